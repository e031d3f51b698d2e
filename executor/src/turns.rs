//! The agent's turns: one process each, within one time limit over all of them.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use evalgrid_domain::{
    coverage::{Channel, Coverage},
    evidence::{JournalEntry, Role, Trajectory},
    number::Number,
    outcome::{self, Usage},
    prompt,
    redact::Redactor,
};
use evalgrid_harness::{Harness, HarnessEvent, Install, ProfileFiles, Purpose, Setting, TextFile, Turn, recorder};
use evalgrid_sandbox::{Base, SandboxError, StepCommand, StepExit};
use serde::{Deserialize, Serialize};

use crate::{
    account::Account,
    changes::Changes,
    output,
    person::{self, Person, Turned},
    setup::memory_diagnostics,
    trial::{Attempt, StepResult, Stop, called, now_ms},
};

/// Bytes of output that are read at once; more would keep other trials waiting and goes to a thread of its own.
const INLINE_READ_BYTES: u64 = 256 << 10;
/// Paths of changed files that one turn may name.
const MAX_FILES: usize = 10_000;

/// Times that a turn is begun again because its model server limits requests. With the pauses that is more than a minute, and limits are per minute.
const MAX_LIMITED: u32 = 3;
/// The pause before the first of them; each next one is three times as long.
const FIRST_PAUSE_MS: u64 = 5_000;

/// A try of a turn that came to nothing, because the agent's model server limits requests.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Limited {
    retry_after_ms: u64,
}

impl StepResult for Limited {
    fn failed(&self) -> bool {
        false
    }
}

/// What a turn records. Every text in it is redacted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TurnRecord {
    pub(crate) started_at_ms: u64,
    pub(crate) finished_at_ms: u64,
    pub(crate) exit_code: i32,
    /// Why the trial cannot be scored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    /// The failure is a limit of the model server.
    #[serde(skip)]
    limited: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    pub(crate) commands: u32,
    pub(crate) failed_commands: u32,
    /// As the agent named them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<String>,
    pub(crate) entries: Vec<JournalEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) diagnostics: Vec<String>,
    /// Of the harness's channels.
    #[serde(default)]
    pub(crate) coverage: Coverage,
}

impl StepResult for TurnRecord {
    fn failed(&self) -> bool {
        self.failure.is_some()
    }

    fn times(&self) -> Option<(u64, u64)> {
        Some((self.started_at_ms, self.finished_at_ms))
    }
}

/// What the harness needs before its first turn.
pub(crate) fn files(attempt: &Attempt<'_>) -> Vec<TextFile> {
    let files = harness(attempt).map(|harness| harness.files(&setting(attempt)));
    files.unwrap_or_default()
}

/// The step of a turn.
pub(crate) fn step(number: u32) -> String {
    format!("turn.{number}.agent")
}

/// The step that says that a try of a turn came to nothing.
fn limited_step(number: u32, tries: u32) -> String {
    format!("turn.{number}.limited.{tries}")
}

/// The harness of the trial's variant.
pub(crate) fn harness(attempt: &Attempt<'_>) -> Option<&'static dyn Harness> {
    evalgrid_harness::by_name(attempt.variant.harness.name())
}

/// What the variant's agent needs on this host.
pub(crate) fn install(attempt: &Attempt<'_>) -> Option<&'static Install> {
    harness(attempt)?.install()
}

fn setting(attempt: &Attempt<'_>) -> Setting {
    let profile = attempt.profile();
    let (tools, inside) = (&attempt.worker.tools, attempt.sandbox.tools());
    Setting {
        purpose: Purpose::Work,
        home: attempt.sandbox.home().to_owned(),
        workspace: attempt.sandbox.workspace().to_owned(),
        shared: attempt.sandbox.shared().to_owned(),
        tools: inside.to_owned(),
        program: install(attempt).and_then(|install| tools.program(install, inside)),
        model: attempt.variant.model.clone(),
        credential: attempt.lease.credential.clone().into_iter().collect(),
        profile: profile.map(|profile| ProfileFiles {
            home: below(&profile.files, "home/"),
            workspace: below(&profile.files, "workspace/"),
        }),
        run: profile.and_then(|profile| profile.run.clone()),
        system_prompt: profile.and_then(|profile| profile.system_prompt.clone()),
        env: attempt.env(),
    }
}

fn below(files: &BTreeMap<String, String>, folder: &str) -> BTreeMap<String, String> {
    let files = files.iter();
    files
        .filter_map(|(path, content)| Some((path.strip_prefix(folder)?.to_owned(), content.clone())))
        .collect()
}

/// Runs the turns until the conversation is over: the person has said all, the turns are used up, nothing continues, or something failed. Ends the
/// attempt where a simulated person speaks next.
pub(crate) async fn run(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let name = attempt.variant.harness.name();
    let Some(harness) = harness(attempt) else {
        account.void(outcome::harness_failed(name, "this worker does not have it"), &[]);
        return Ok(());
    };
    let setting = setting(attempt);
    let mut person = Person::of(attempt.case);
    // What it says next.
    let mut says = Some(prompt::render(&attempt.request.suite.prompt, &attempt.case.variables));
    let mut number = 0;
    let limit_ms = u64::from(attempt.case.time_limit_ms());
    let mut session_id: Option<String> = None;
    let mut earlier: Option<Usage> = None;
    let changes = Changes::new(attempt);
    while let Some(prompt) = says.take() {
        number += 1;
        let left_ms = limit_ms.saturating_sub(account.model_ms());
        if left_ms == 0 {
            account.void(outcome::timed_out(limit_ms), &[]);
            break;
        }
        // The mocks are the agent's to know of; the person has not said it.
        let told = match number {
            1 => format!("{prompt}{}", account.introduction),
            _ => prompt.clone(),
        };
        let turn = Turn {
            number,
            prompt: &told,
            session_id: session_id.as_deref(),
            deadline_ms: now_ms() + left_ms,
        };
        let command = match harness.turn(&setting, &turn) {
            Ok(command) => command,
            Err(error) => {
                account.void(outcome::harness_failed(name, &error.to_string()), &[]);
                break;
            }
        };
        let step = step(number);
        let tries = (0..MAX_LIMITED)
            .take_while(|tries| attempt.is_recorded(&limited_step(number, *tries)))
            .count() as u32;
        let command = StepCommand {
            // Each process of a sandbox has a name of its own, and is started once.
            step: match tries {
                0 => step.clone(),
                tries => format!("{step}.{}", tries + 1),
            },
            argv: command.argv,
            env: command.env,
            time_limit: Duration::from_millis(left_ms),
        };
        let window = changes.before(number).await?;
        let mut record = attempt
            .once(
                &step,
                agent(attempt, harness, (&turn, &prompt), (command, tries), earlier, limit_ms),
            )
            .await?;
        session_id = record.session_id.take().or(session_id);
        earlier = Usage::sum(earlier, record.usage);
        // Of a turn that failed, too.
        let files = changes.after(window).await?;
        let (answer, finished_at_ms) = (person::answer(&record), record.finished_at_ms);
        account.turn(&prompt, record, files, &setting.workspace);
        if account.is_void() {
            break;
        }
        let turned = Turned {
            number,
            prompt: &prompt,
            answer: &answer,
            finished_at_ms,
            resumes: session_id.is_some(),
        };
        says = person.reply(attempt, account, turned).await?;
    }
    Ok(())
}

async fn agent(
    attempt: &Attempt<'_>,
    harness: &'static dyn Harness,
    (turn, said): (&Turn<'_>, &str),
    (command, tries): (StepCommand, u32),
    earlier: Option<Usage>,
    limit_ms: u64,
) -> Result<TurnRecord, Stop> {
    let step = command.step.clone();
    let exit = attempt.process(command).await?;
    let mut diagnostics = memory_diagnostics(&exit, &step);
    let (mut trace, mut lost) = (Vec::new(), None);
    if let Some(log) = harness.trace_log(turn.number) {
        match called("read the recorder's log", async {
            Ok(attempt.sandbox.read_file(Base::Home, &log, recorder::LOG_LIMIT).await)
        })
        .await?
        {
            Ok(found) => trace = found.unwrap_or_default(),
            Err(SandboxError::Operation { reason, .. }) => {
                diagnostics.push(format!("The recorder's log could not be read: {}", attempt.redactor.text(&reason)));
                lost = Some(Channel::partial("The recorder's log could not be read"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    // Only in a conversation is it worth saying who said what.
    let person = attempt.case.user.is_some().then(|| said.to_owned());
    let reader = Reader {
        harness,
        redactor: attempt.redactor.clone(),
        exit: exit.clone(),
        trace,
        person,
        model: attempt.variant.model.clone(),
        earlier,
        diagnostics,
    };
    let record = if exit.output.stdout_bytes + reader.trace.len() as u64 <= INLINE_READ_BYTES {
        reader.read()
    } else {
        tokio::task::spawn_blocking(|| reader.read())
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    };
    let mut record = record.map_err(|error| Stop::lost(format!("the agent's output cannot be read: {error}")))?;
    if let Some(lost) = lost {
        record.coverage.actions.lower(&lost);
    }
    if exit.timed_out {
        record.failure = Some(outcome::timed_out(limit_ms));
    } else if record.limited && tries < MAX_LIMITED && record.is_untouched() {
        let retry_after_ms = FIRST_PAUSE_MS * 3_u64.pow(tries);
        attempt
            .once(&limited_step(turn.number, tries), async { Ok(Limited { retry_after_ms }) })
            .await?;
        // Before the attempt ends, so that the next one knows that this process is not to be waited for.
        attempt.durable().await?;
        return Err(Stop::Throttled { retry_after_ms });
    }
    Ok(record)
}

impl TurnRecord {
    /// The agent has only talked.
    fn is_untouched(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry, JournalEntry::Message { .. }))
    }
}

/// Reads what a turn has left behind.
struct Reader {
    harness: &'static dyn Harness,
    redactor: Arc<Redactor>,
    exit: StepExit,
    trace: Vec<u8>,
    person: Option<String>,
    model: String,
    earlier: Option<Usage>,
    diagnostics: Vec<String>,
}

impl Reader {
    fn read(self) -> io::Result<TurnRecord> {
        let exit = &self.exit;
        let mut record = TurnRecord {
            started_at_ms: exit.started_at_ms,
            finished_at_ms: exit.finished_at_ms,
            exit_code: exit.code,
            diagnostics: self.diagnostics,
            ..TurnRecord::default()
        };
        let mut trajectory = Trajectory::default();
        if let Some(text) = self.person {
            let mut entry = JournalEntry::Message {
                finished_at_millis: Some(Number::from(exit.started_at_ms)),
                role: Some(Role::User),
                text,
                usage: None,
            };
            entry.seal(&self.redactor);
            trajectory.push(entry);
        }
        let end = output::read_turn(self.harness, exit, &self.trace, &self.model, self.earlier, &mut |event| {
            if let HarnessEvent::Command { exit_code, .. } = &event {
                record.commands += 1;
                record.failed_commands += u32::from(exit_code.is_some_and(|code| code != 0));
            }
            let Some(mut entry) = event.into_entry() else { return };
            entry.seal(&self.redactor);
            if let JournalEntry::FileChange { paths, .. } = &entry {
                let room = MAX_FILES.saturating_sub(record.files.len());
                record.files.extend(paths.iter().take(room).cloned());
            }
            trajectory.push(entry);
        })?;
        record.entries = trajectory.finish();
        record.usage = end.usage;
        record.coverage = end.coverage;
        record.coverage.seal(&self.redactor);
        record.limited = end.limited;
        if exit.timed_out {
            record
                .diagnostics
                .extend(end.stalled.map(|stalled| self.redactor.text(&stalled).into_owned()));
        }
        record.diagnostics.extend(end.diagnostics);
        record.failure = end
            .failure
            .map(|reason| outcome::harness_failed(self.harness.name(), &self.redactor.text(&reason)));
        match end.session_id {
            Some(id) if self.redactor.text(&id) != id => {
                record
                    .diagnostics
                    .push("The agent's session id looks like a secret, so the conversation cannot go on".into());
            }
            id => record.session_id = id,
        }
        if exit.code != 0 {
            record
                .diagnostics
                .push(output::last_words("The agent", exit.code, &exit.output, &self.redactor));
        }
        Ok(record)
    }
}
