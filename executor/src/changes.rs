//! What each turn of an agent did to the workspace.
//!
//! The workspace is looked at from the host's side before a turn and after it; what differs belongs to that turn, and what others write
//! between turns does not. What it was like before lies beside the sandbox, outside the agent's reach, before the agent starts: whoever goes
//! on after a crash compares with that, and never with a workspace that the agent has been in.

mod base;
mod compare;
mod scan;

use std::{path::PathBuf, sync::Arc, time::Duration};

use evalgrid_domain::{
    changes::{ChangeFilter, TurnChanges},
    coverage::Channel,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use crate::trial::{Attempt, StepResult, Stop, json, now_ms};

/// Workspaces looked at at once, in this process: it is work for processors and disks, and each holds up to 64 folders open.
static SCANS: Semaphore = Semaphore::const_new(4);
/// Looking at one workspace.
const SCAN_TIME: Duration = Duration::from_secs(60);
/// Waiting for others and for the scan, which looks at its own time only between folders.
const SCAN_DEADLINE: Duration = Duration::from_secs(300);

/// What `turn.N.files` records. Every text in it is redacted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FilesRecord {
    pub(crate) started_at_ms: u64,
    pub(crate) finished_at_ms: u64,
    pub(crate) changes: TurnChanges,
}

impl StepResult for FilesRecord {
    fn failed(&self) -> bool {
        false
    }

    fn times(&self) -> Option<(u64, u64)> {
        Some((self.started_at_ms, self.finished_at_ms))
    }
}

/// What `turn.N.base` records: only where the workspace could not be looked at before the turn, which nobody could tell afterwards.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct NoBase {
    reason: String,
}

impl StepResult for NoBase {
    fn failed(&self) -> bool {
        true
    }
}

/// The file changes of one attempt.
pub(crate) struct Changes<'a> {
    attempt: &'a Attempt<'a>,
    filter: Arc<ChangeFilter>,
}

impl<'a> Changes<'a> {
    pub(crate) fn new(attempt: &'a Attempt<'a>) -> Self {
        Self {
            attempt,
            filter: ChangeFilter::new(attempt.case.diff.as_ref()),
        }
    }

    /// Before a turn's agent is started. What this finds is on the disk when it returns.
    pub(crate) async fn before(&self, turn: u32) -> Result<Window, Stop> {
        let attempt = self.attempt;
        let agent = format!("turn.{turn}.agent");
        let step = format!("turn.{turn}.base");
        if let Some(NoBase { reason }) = attempt.recalled(&step).await? {
            return Ok(Window {
                turn,
                no_base: Some(reason),
            });
        }
        let window = Window { turn, no_base: None };
        let Some(folder) = attempt.sandbox.folder().map(PathBuf::from) else {
            return Ok(window);
        };
        let adopted = attempt.lease.adopt;
        if attempt.is_recorded(&agent) || adopted && attempt.sandbox.started().await?.contains(&agent) {
            // It was looked at before that: what was found lies there, or it was empty.
            return Ok(window);
        }
        let filter = self.filter.clone();
        let now_ns = i64::try_from(now_ms()).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        let made = blocking(move |deadline| {
            // An earlier attempt may have looked. Nothing has run since.
            if adopted && base::exists(&folder, turn) {
                return Ok(());
            }
            base::make(&folder, turn, &filter, now_ns, deadline)
        });
        let Err(reason) = made.await else { return Ok(window) };
        let reason = attempt.redactor.text(&reason).into_owned();
        let NoBase { reason } = attempt.once(&step, async { Ok(NoBase { reason }) }).await?;
        attempt.durable().await?;
        Ok(Window {
            turn,
            no_base: Some(reason),
        })
    }

    /// After a turn's agent has ended. When this returns, what it finds is where a later attempt will find it: whatever runs next may write into
    /// the workspace, too.
    pub(crate) async fn after(&self, window: Window) -> Result<FilesRecord, Stop> {
        let attempt = self.attempt;
        let turn = window.turn;
        let recorded = attempt.is_recorded(&format!("turn.{turn}.files"));
        let record = attempt.once(&format!("turn.{turn}.files"), self.look(window)).await?;
        let changed = !record.changes.changes.is_empty() || !record.changes.coverage.is_complete();
        if changed && !recorded {
            save(attempt, turn.to_string(), &record).await?;
        }
        Ok(record)
    }

    async fn look(&self, Window { turn, no_base }: Window) -> Result<FilesRecord, Stop> {
        let attempt = self.attempt;
        let started_at_ms = now_ms();
        let found = match (no_base, attempt.sandbox.folder().map(PathBuf::from)) {
            (Some(reason), _) => Err(format!("before it, {reason}")),
            (None, None) => Err("the files of this kind of sandbox cannot be seen from outside".to_owned()),
            (None, Some(folder)) => {
                let (filter, redactor) = (self.filter.clone(), attempt.redactor.clone());
                let adopted = attempt.lease.adopt;
                // An earlier attempt has gone on from here: what it had not saved was nothing.
                let passed = adopted && attempt.sandbox.started().await?.iter().any(|step| is_after(step, turn));
                let scan = move |deadline| {
                    if adopted && let Some(saved) = base::saved(&folder, &turn.to_string())? {
                        return Ok(Looked::Saved(serde_json::from_slice(&saved).map_err(std::io::Error::from)?));
                    }
                    Ok(Looked::Now(match passed {
                        true => compare::nothing(turn),
                        false => compare::compare(&folder, turn, &filter, &redactor, deadline)?,
                    }))
                };
                match blocking(scan).await {
                    Ok(Looked::Saved(record)) => return Ok(*record),
                    Ok(Looked::Now(changes)) => Ok(changes),
                    Err(reason) => Err(reason),
                }
            }
        };
        let changes = found.unwrap_or_else(|reason| TurnChanges {
            coverage: Channel::unavailable(attempt.redactor.text(&format!("Turn {turn}: {reason}"))),
            ..compare::nothing(turn)
        });
        Ok(FilesRecord {
            started_at_ms,
            finished_at_ms: now_ms(),
            changes,
        })
    }
}

/// Keeps what was seen of the workspace beside the sandbox, so that no later attempt has to look again: what runs next may write into it.
pub(crate) async fn save(attempt: &Attempt<'_>, name: String, seen: &impl Serialize) -> Result<(), Stop> {
    let seen = json(seen);
    let saved = match attempt.sandbox.folder().map(PathBuf::from) {
        Some(folder) => blocking(move |_| Ok(base::save(&folder, &name, &seen)?)).await,
        None => Err(String::new()),
    };
    match saved {
        Ok(()) => Ok(()),
        // Nowhere to keep it: then the log must have it first.
        Err(_) => attempt.durable().await,
    }
}

/// What an earlier attempt has kept under this name.
pub(crate) async fn saved<T: DeserializeOwned + Send + 'static>(attempt: &Attempt<'_>, name: &'static str) -> Option<T> {
    let folder = attempt.sandbox.folder().filter(|_| attempt.lease.adopt)?.to_owned();
    let read = move |_| Ok(base::saved(&folder, name)?);
    // What cannot be read was not kept.
    serde_json::from_slice(&blocking(read).await.ok()??).ok()
}

enum Looked {
    Saved(Box<FilesRecord>),
    Now(TurnChanges),
}

/// Whether a step runs after a turn's files have been looked at.
fn is_after(step: &str, turn: u32) -> bool {
    let number = step
        .strip_prefix("turn.")
        .and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    number.map_or_else(|| step.starts_with("check."), |number| number > turn)
}

/// One turn's place in time.
pub(crate) struct Window {
    turn: u32,
    /// Why nobody knows what was there before it.
    no_base: Option<String>,
}

/// Runs a scan on a thread of its own, when there is room. Why it failed, for people.
async fn blocking<T: Send + 'static>(scan: impl FnOnce(Instant) -> Result<T, scan::ScanError> + Send + 'static) -> Result<T, String> {
    let run = async {
        // Closed it never is.
        let _room = SCANS.acquire().await;
        tokio::task::spawn_blocking(move || scan(Instant::now() + SCAN_TIME)).await
    };
    match timeout(SCAN_DEADLINE, run).await {
        Ok(Ok(result)) => result.map_err(|error| error.to_string()),
        Ok(Err(error)) => Err(format!("looking at the workspace broke: {error}")),
        Err(_) => Err(scan::ScanError::TooSlow.to_string()),
    }
}

#[cfg(test)]
mod tests;
