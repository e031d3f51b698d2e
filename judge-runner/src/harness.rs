//! A harness that answers in words: a judge in a fresh sandbox, or a person in one that stays for the whole conversation.
//!
//! Its process is a step of its sandbox, started once: who comes after a crash attaches to it, so that it is not asked again. Nothing of the trial
//! is in the sandbox but the question.

use std::{collections::BTreeMap, time::Duration};

use evalgrid_domain::{answerer::Failure, evidence::JudgeUsage, outcome::Usage};
use evalgrid_harness::{Harness, Place, Purpose, Setting, Spoken as Words, TextFile, Turn, TurnEnd};
use evalgrid_sandbox::{Base, Limits, Sandbox, SandboxError, SandboxProvider, SandboxSpec, StepCommand, StepExit};
use evalgrid_worker::{Tools, output};
use serde_json::{Map, Value};
use tokio::time::timeout;

use crate::{
    job::{Answered, Job, Stop, now_ms},
    model::{Ended, Met},
};

/// The step of a judge: there is one in its sandbox.
pub const JUDGE_STEP: &str = "judge";
/// What a sandbox lives longer than what is asked in it may take: waiting for a worker that crashed.
pub(crate) const LIFETIME_MARGIN: Duration = Duration::from_secs(3_600);
/// How much longer than its time limit a process may be awaited: proving a tree dead takes seconds at worst.
const STEP_GRACE: Duration = Duration::from_secs(60);
/// Any other call to a sandbox. The providers have shorter deadlines of their own.
const CALL_DEADLINE: Duration = Duration::from_secs(120);
/// Diagnostics of one answer that are kept.
const MAX_DIAGNOSTICS: usize = 8;

/// What an agent is asked.
#[derive(Clone, Copy, Debug)]
pub struct Talk<'a> {
    /// The harness's name.
    pub harness: &'a str,
    /// Its model.
    pub model: &'a str,
    /// How it signs in: `apiKey`, `baseUrl`.
    pub credential: &'a BTreeMap<String, String>,
    /// The step that is its process.
    pub step: &'a str,
    /// The turn of its session, from 1.
    pub number: u32,
    /// What it is told.
    pub prompt: &'a str,
    /// The session to go on with, which is in the sandbox.
    pub session_id: Option<&'a str>,
    /// The time limit, as people are told it.
    pub limit_ms: u64,
    /// What of the limit is left.
    pub left: Duration,
}

/// What an agent has said.
#[derive(Clone, Debug, PartialEq)]
pub struct Spoken {
    /// What came of it. Never unclear: its process is there to be looked at.
    pub met: Met,
    /// The session that it can go on with.
    pub session_id: Option<String>,
    /// Milliseconds since the epoch.
    pub started_at_ms: u64,
    /// How long its process ran.
    pub spent_ms: u64,
}

/// Why an agent could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum SpeakError {
    /// It will never be able to.
    #[error("{0}")]
    Unable(String),
    /// It cannot be had now.
    #[error("{0}")]
    Unavailable(String),
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Makes a sandbox for an agent that talks. The caller has recorded the intent.
pub async fn sandbox(
    provider: &dyn SandboxProvider,
    name: &str,
    token: u64,
    limits: Limits,
    lifetime: Duration,
) -> Result<Box<dyn Sandbox>, SandboxError> {
    let spec = SandboxSpec {
        name: name.to_owned(),
        token,
        lifetime,
        limits,
        base: None,
    };
    called("create", provider.create(&spec)).await
}

/// Installs the agent on this host, if it is not there yet. Takes minutes the first time.
pub async fn ready(tools: &Tools, harness: &str) -> Result<(), SpeakError> {
    let Some(install) = known(harness)?.install() else {
        return Ok(());
    };
    tools
        .ready(install)
        .await
        .map_err(|error| SpeakError::Unavailable(error.to_string()))
}

/// Lets an agent say something, or waits for what it is saying already. `announce` ends when its process may be started.
pub async fn speak<E: From<SpeakError>>(
    sandbox: &dyn Sandbox,
    tools: &Tools,
    talk: Talk<'_>,
    announce: impl Future<Output = Result<(), E>>,
) -> Result<Spoken, E> {
    let harness = known(talk.harness)?;
    let command = prepare(sandbox, tools, harness, &talk).await?;
    announce.await?;
    let exit = match timeout(command.time_limit + STEP_GRACE, sandbox.run(&command)).await {
        Ok(exit) => exit.map_err(SpeakError::from)?,
        Err(_) => return Err(SpeakError::from(late("run the agent")).into()),
    };
    let (started_at_ms, spent_ms) = (exit.started_at_ms, exit.finished_at_ms.saturating_sub(exit.started_at_ms));
    let model = talk.model.to_owned();
    let heard = tokio::task::spawn_blocking(move || Heard::read(harness, exit, &model));
    let heard = heard.await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let heard = heard.map_err(|error| {
        SpeakError::Sandbox(SandboxError::Operation {
            operation: "read what the agent printed".into(),
            reason: error.to_string(),
        })
    })?;
    Ok(Spoken {
        session_id: heard.end.session_id.clone(),
        met: heard.met(harness, &talk),
        started_at_ms,
        spent_ms,
    })
}

fn known(harness: &str) -> Result<&'static dyn Harness, SpeakError> {
    evalgrid_harness::by_name(harness).ok_or_else(|| SpeakError::Unable("this worker does not have it".into()))
}

/// Writes what the process needs, unless it was started before.
async fn prepare(sandbox: &dyn Sandbox, tools: &Tools, harness: &dyn Harness, talk: &Talk<'_>) -> Result<StepCommand, SpeakError> {
    let inside = sandbox.tools();
    let setting = Setting {
        home: sandbox.home().to_owned(),
        workspace: sandbox.workspace().to_owned(),
        shared: sandbox.shared().to_owned(),
        tools: inside.to_owned(),
        program: harness.install().and_then(|install| tools.program(install, inside)),
        model: talk.model.to_owned(),
        credential: talk.credential.clone(),
        purpose: Purpose::Words,
        ..Setting::default()
    };
    let turn = Turn {
        number: talk.number,
        prompt: talk.prompt,
        session_id: talk.session_id,
        deadline_ms: now_ms() + talk.left.as_millis() as u64,
    };
    let command = harness
        .turn(&setting, &turn)
        .map_err(|error| SpeakError::Unable(error.to_string()))?;
    let started = called("list the steps", sandbox.started()).await?;
    if started.is_empty() {
        write(sandbox, harness.files(&setting)).await?;
    }
    if !started.contains(talk.step) {
        write(sandbox, command.files).await?;
    }
    Ok(StepCommand {
        step: talk.step.to_owned(),
        argv: command.argv,
        env: command.env,
        time_limit: talk.left,
    })
}

async fn write(sandbox: &dyn Sandbox, files: Vec<TextFile>) -> Result<(), SpeakError> {
    for (base, place) in [(Base::Home, Place::Home), (Base::Workspace, Place::Workspace)] {
        for private in [false, true] {
            let files = files.iter().filter(|file| file.place == place && file.private == private);
            let files: Vec<_> = files.map(|file| (file.path.clone(), file.content.clone())).collect();
            if !files.is_empty() {
                called("write files", sandbox.write_files(base, &files, private)).await?;
            }
        }
    }
    Ok(())
}

async fn called<T>(operation: &str, call: impl Future<Output = Result<T, SandboxError>>) -> Result<T, SandboxError> {
    match timeout(CALL_DEADLINE, call).await {
        Ok(result) => result,
        Err(_) => Err(late(operation)),
    }
}

fn late(operation: &str) -> SandboxError {
    SandboxError::Operation {
        operation: operation.to_owned(),
        reason: "no answer in time".into(),
    }
}

/// What a process has printed.
struct Heard {
    exit: StepExit,
    end: TurnEnd,
    words: Words,
}

impl Heard {
    fn read(harness: &dyn Harness, exit: StepExit, model: &str) -> std::io::Result<Self> {
        let mut words = Words::default();
        let end = output::read_turn(harness, &exit, &[], model, None, &mut |event| words.take(event))?;
        Ok(Self { exit, end, words })
    }

    fn met(self, harness: &dyn Harness, talk: &Talk<'_>) -> Met {
        let Self { exit, end, words } = self;
        let mut metadata = Map::new();
        metadata.insert("harness".into(), harness.name().into());
        metadata.insert("model".into(), talk.model.into());
        metadata.insert("exitCode".into(), exit.code.into());
        let version = harness.install().map(|install| install.version);
        metadata.extend(version.map(|version| ("harnessVersion".to_owned(), version.into())));
        metadata.extend(end.model.map(|model| ("modelReported".to_owned(), model.into())));
        let diagnostics: Vec<Value> = end.diagnostics.into_iter().take(MAX_DIAGNOSTICS).map(Value::from).collect();
        if !diagnostics.is_empty() {
            metadata.insert("diagnostics".into(), diagnostics.into());
        }
        let broken = |reason: String| {
            Err(Failure::Harness {
                harness: harness.name().to_owned(),
                reason,
            })
        };
        let tool = words.tools.into_iter().next();
        let answer = match (tool, end.failure) {
            _ if exit.timed_out => Err(Failure::TimedOut { limit_ms: talk.limit_ms }),
            // What used a tool is no answer, and no question to be asked again.
            (Some(tool), _) => Err(Failure::UsedTool { tool }),
            (None, Some(reason)) if end.limited => {
                return Met::NotNow { retry_after_ms: 0, reason };
            }
            (None, Some(reason)) => broken(reason),
            (None, None) if exit.out_of_memory => broken("its sandbox ran out of memory".into()),
            (None, None) if exit.code != 0 => broken(format!("its process exited with status {}", exit.code)),
            (None, None) => Ok(words.answer.clone().unwrap_or_default()),
        };
        Met::Ended(Ended {
            said: answer,
            raw: words.answer,
            usage: end.usage.map(told),
            metadata,
        })
    }
}

fn told(usage: Usage) -> JudgeUsage {
    JudgeUsage {
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_1h_tokens: None,
        cache_write_tokens: usage.cache_write_tokens,
        cost_usd: usage.cost_usd,
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        total_tokens: usage.total_tokens,
    }
}

impl From<SpeakError> for Stop {
    fn from(error: SpeakError) -> Self {
        match error {
            SpeakError::Unable(reason) => Self::uncallable(reason),
            SpeakError::Unavailable(reason) => Self::unavailable(reason),
            SpeakError::Sandbox(error) => error.into(),
        }
    }
}

/// Asks the agent of a lease, in the lease's sandbox.
pub(crate) async fn ask(job: &Job<'_>, talk: Talk<'_>, lifetime: Duration) -> Result<Answered, Stop> {
    let (worker, lease) = (job.worker, job.lease);
    let provider = worker.providers.get(lease.provider.as_str());
    let provider = provider.ok_or_else(|| Stop::unavailable(format!("this worker has no {} sandboxes", lease.provider)))?;
    ready(&worker.tools, talk.harness).await?;
    job.may_act()?;
    let sandbox = match lease.adopt {
        true => called("attach", provider.attach(&lease.sandbox, lease.token)).await?,
        false => sandbox(provider.as_ref(), &lease.sandbox, lease.token, worker.limits, lifetime).await?,
    };
    let spoken = speak(sandbox.as_ref(), &worker.tools, talk, job.announce()).await?;
    Ok(Answered {
        ended: job.bounded(spoken.met, spoken.spent_ms)?,
        session_id: spoken.session_id.filter(|id| job.redactor.text(id) == id.as_str()),
        started_at_ms: spoken.started_at_ms,
        spent_ms: spoken.spent_ms,
    })
}
