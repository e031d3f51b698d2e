//! A judge that is an agent, asked without a scheduler: each ask is a fresh sandbox of this process's own, which is gone when the ask has ended.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use evalgrid_domain::{
    answerer::Failure,
    judge::{self, Question},
    request::{Harness, Judge},
};
use evalgrid_sandbox::{SandboxError, SandboxProvider};
use evalgrid_worker::Host;
use tokio::sync::{mpsc, watch};

use super::ask::KEY_PREFIX;
use crate::{
    harness::{self, SpeakError},
    judgment,
    model::{Ended, Met},
};

/// Kinds of sandboxes, the better isolated ones first. The judge's is the first that this host has.
const KINDS: [&str; 3] = ["bubblewrap", "docker", "process"];
/// Nobody else ever holds these sandboxes.
const TOKEN: u64 = 1;
/// What a sandbox lives longer than its judge may take, where this process is killed: writing files and reading answers takes seconds.
const LIFETIME_MARGIN: Duration = Duration::from_secs(120);

/// Asks one judge. Its asks go on when their futures are dropped; [`Agent::close`] ends them.
pub struct Agent {
    inner: Arc<Inner>,
    /// Held by each ask.
    alive: mpsc::Sender<()>,
    /// Says that no ask is left.
    ended: mpsc::Receiver<()>,
    stop: watch::Sender<bool>,
}

/// Sandboxes that could not be removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sandboxes are left: {}", .0.join(", "))]
pub struct Left(pub Vec<String>);

struct Inner {
    host: Host,
    kind: &'static str,
    provider: Arc<dyn SandboxProvider>,
    judge: Judge,
    harness: Harness,
    credential: BTreeMap<String, String>,
    /// Sandboxes so far: an ask that is repeated has another one.
    sandboxes: AtomicU64,
}

impl Agent {
    /// `harness` is the judge's, and installed. What an earlier calibration has left in the host's folder, which nobody else can be using, is
    /// removed. `None`: this host has no sandboxes.
    pub async fn new(host: Host, judge: Judge, harness: Harness, credential: BTreeMap<String, String>) -> Option<Self> {
        let (kind, provider) = KINDS.iter().find_map(|kind| Some((*kind, host.providers.get(kind)?.clone())))?;
        let (alive, ended) = mpsc::channel(1);
        let agent = Self {
            inner: Arc::new(Inner {
                host,
                kind,
                provider,
                judge,
                harness,
                credential,
                sandboxes: AtomicU64::new(0),
            }),
            alive,
            ended,
            stop: watch::Sender::new(false),
        };
        if let Err(left) = agent.inner.clear().await {
            tracing::warn!("of an earlier calibration, {left}");
        }
        Some(agent)
    }

    /// Which kind of sandbox the judge has.
    pub fn kind(&self) -> &'static str {
        self.inner.kind
    }

    /// Asks once.
    pub async fn ask(&self, question: Question, key: String) -> Met {
        let (inner, alive, mut stop) = (self.inner.clone(), self.alive.clone(), self.stop.subscribe());
        let asked = tokio::spawn(async move {
            let _alive = alive;
            inner.ask(&question, &key, &mut stop).await
        });
        asked.await.unwrap_or_else(|error| Met::Unclear { reason: error.to_string() })
    }

    /// Ends all asks, and removes every sandbox.
    ///
    /// # Errors
    /// What is left after some minutes of trying.
    pub async fn close(self) -> Result<(), Left> {
        let Self {
            inner,
            alive,
            mut ended,
            stop,
        } = self;
        stop.send_replace(true);
        drop(alive);
        // Nothing is ever sent: this is the end of the last ask.
        let _ = ended.recv().await;
        inner.clear().await
    }
}

impl Inner {
    async fn ask(&self, question: &Question, key: &str, stop: &mut watch::Receiver<bool>) -> Met {
        let name = format!("{key}-{}", self.sandboxes.fetch_add(1, Ordering::Relaxed));
        let prompt = judge::prompt(question);
        let left = Duration::from_millis(self.judge.timeout_ms.into());
        let talk = judgment::talk(&self.judge, self.harness, &self.credential, &prompt, left);
        let announced = AtomicBool::new(false);
        let asked = async {
            // To its end, whoever stops: of a sandbox that is half made nobody knows what there will be.
            let sandbox = harness::sandbox(&*self.provider, &name, TOKEN, self.host.limits, left + LIFETIME_MARGIN).await?;
            let announce = async {
                announced.store(true, Ordering::Relaxed);
                Ok(())
            };
            tokio::select! {
                spoken = harness::speak::<SpeakError>(&*sandbox, &self.host.tools, talk, announce) => spoken,
                _ = stop.wait_for(|stop| *stop) => Err(SpeakError::Unavailable("the calibration was stopped".into())),
            }
        };
        let asked = asked.await;
        // What is left now is tried again at the end.
        self.host.destroy(&name).await;
        met(asked.map(|spoken| spoken.met), announced.into_inner())
    }

    /// Removes what there is of calibrations.
    async fn clear(&self) -> Result<(), Left> {
        let mut left = Vec::new();
        for (kind, provider) in &self.host.providers {
            match provider.list().await {
                Ok(names) => {
                    for name in names.into_iter().filter(|name| name.starts_with(KEY_PREFIX)) {
                        if !self.host.destroy(&name).await {
                            left.push(name);
                        }
                    }
                }
                Err(error) => left.push(format!("{kind} ({error})")),
            }
        }
        if left.is_empty() { Ok(()) } else { Err(Left(left)) }
    }
}

/// What a scheduler would make of it: what has not begun is begun again, and what is lost on the way may have been answered.
fn met(asked: Result<Met, SpeakError>, announced: bool) -> Met {
    let not_now = |reason| Met::NotNow { retry_after_ms: 0, reason };
    match asked {
        Ok(met) => met,
        Err(SpeakError::Unable(reason)) => Met::Ended(Ended::failed(Failure::Uncallable { reason })),
        Err(SpeakError::Unavailable(reason)) => not_now(reason),
        Err(SpeakError::Sandbox(error @ SandboxError::Create { .. })) => not_now(error.to_string()),
        Err(SpeakError::Sandbox(error)) if announced => Met::Unclear { reason: error.to_string() },
        Err(SpeakError::Sandbox(error)) => not_now(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_asked_again_as_a_scheduler_would() {
        let lost = || SandboxError::Lost {
            name: "x".into(),
            reason: "it died".into(),
        };
        let check = |error: SpeakError, announced: bool, expected: &str| {
            let found = match met(Err(error), announced) {
                Met::NotNow { retry_after_ms: 0, reason } => format!("not now: {reason}"),
                Met::Unclear { reason } => format!("unclear: {reason}"),
                Met::Ended(Ended { said: Err(failure), .. }) => failure.to_string(),
                other => format!("{other:?}"),
            };
            assert_eq!(found, expected);
        };
        check(SpeakError::Sandbox(lost()), false, "not now: the sandbox x is gone: it died");
        check(SpeakError::Sandbox(lost()), true, "unclear: the sandbox x is gone: it died");
        check(
            SpeakError::Unable("no such model".into()),
            false,
            "it cannot be asked: no such model",
        );
        let create = SandboxError::Create {
            provider: "bubblewrap",
            reason: "no room".into(),
        };
        check(create.into(), true, "not now: the bubblewrap sandbox could not be created: no room");
    }
}
