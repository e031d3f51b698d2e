//! Mocks of a profile: the HTTP mock is started before the agent and told to it, and what was asked of any mock is kept (contract 2.4).
//!
//! The HTTP mock is a daemon of its sandbox: one step starts it, waits until it serves, and ends; the daemon lives on until the sandbox goes.
//! So it is started once whatever the executor goes through, and it needs nothing of the supervisor that steps have not.

use std::time::Duration;

use evalgrid_domain::{
    limits::{MAX_MOCK_CALL_BYTES, MAX_MOCK_CALLS, MAX_PROCESS_STRING_BYTES, MOCK_READY_MS},
    mocks::{self, API_CALLS, CLI_CALLS, CallLogs, MANIFEST, MockCalls},
    outcome, prompt,
};
use evalgrid_sandbox::{Base, SandboxError, StepCommand};
use serde::{Deserialize, Serialize};

use crate::{
    account::Account,
    output,
    setup::memory_diagnostics,
    trial::{Attempt, StepResult, Stop, called},
};

/// How long the HTTP mock may take until it serves.
pub(crate) const LIMIT: Duration = Duration::from_millis(MOCK_READY_MS);
const STEP: &str = "mocks";
const CALLS_STEP: &str = "mocks.calls";
/// A manifest that is longer fits into no prompt.
const MAX_MANIFEST_BYTES: u64 = 256 << 10;
/// Bytes of one log that are read: twice what is kept of all. The agent can write into these files, and they are read into memory.
const MAX_LOG_BYTES: u64 = 2 * MAX_MOCK_CALL_BYTES as u64;
/// The status of the script where the mock ended well, but before it served.
const ENDED: i32 = 125;

/// Starts the program that is its first argument, and ends when that says that it serves. What it prints later is read and forgotten, so that it
/// never waits for a reader.
const SCRIPT: &str = r#"exec 4< <(exec node "$1" 2>&1)
mock=$!
while IFS= read -r -u 4 line; do
  printf '%s\n' "$line" >&2
  case $line in SPHYNX_API_READY=*) cat <&4 >/dev/null 2>&1 & exit 0;; esac
done
wait "$mock" || exit
exit 125"#;

/// What the start records. Every text in it is redacted.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Started {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    /// What the agent is told.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    introduction: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
}

impl StepResult for Started {
    fn failed(&self) -> bool {
        self.failure.is_some()
    }
}

/// Starts the profile's HTTP mock, if it has one.
pub(crate) async fn start(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let Some(program) = attempt.profile().and_then(mocks::program).filter(|_| !account.is_void()) else {
        return Ok(());
    };
    let started = attempt.once(STEP, serve(attempt, program)).await?;
    account.diagnostics(started.diagnostics);
    account.introduction = started.introduction;
    if let Some(failure) = started.failure {
        account.void(failure, &[]);
    }
    Ok(())
}

async fn serve(attempt: &Attempt<'_>, program: Result<String, String>) -> Result<Started, Stop> {
    let failed = |reason: &str, diagnostics: Vec<String>| Started {
        failure: Some(outcome::mock_failed(&attempt.redactor.text(reason))),
        diagnostics,
        ..Started::default()
    };
    let entry = match program {
        Ok(entry) => entry,
        Err(reason) => return Ok(failed(&reason, Vec::new())),
    };
    let command = StepCommand {
        step: STEP.into(),
        argv: vec![
            evalgrid_harness::SHELL.into(),
            "-c".into(),
            SCRIPT.into(),
            "mocks".into(),
            format!("./{entry}"),
        ],
        env: attempt.env(),
        time_limit: LIMIT,
    };
    let exit = attempt.process(command).await?;
    let mut diagnostics = memory_diagnostics(&exit, STEP);
    let reason = match exit.code {
        _ if exit.timed_out => Some(format!("it was not ready within {}", outcome::humanise_duration(MOCK_READY_MS))),
        0 => None,
        ENDED => Some("it ended before it was ready".to_owned()),
        code => Some(format!("it exited with status {code} before it was ready")),
    };
    if let Some(reason) = reason {
        diagnostics.push(output::last_words("The HTTP mock", exit.code, &exit.output, &attempt.redactor));
        return Ok(failed(&reason, diagnostics));
    }
    let manifest = read(attempt, MANIFEST, MAX_MANIFEST_BYTES).await?;
    let introduction = manifest.and_then(|manifest| {
        let manifest = manifest.ok_or_else(|| format!("there is no {MANIFEST}"))?;
        let introduction = attempt.redactor.text(&mocks::introduction(&manifest)?).into_owned();
        let whole = prompt::rendered_len(&attempt.request.suite.prompt, &attempt.case.variables) + introduction.len();
        match whole > MAX_PROCESS_STRING_BYTES {
            true => Err(format!(
                "the prompt with the list of its endpoints holds {whole} bytes; the limit is {MAX_PROCESS_STRING_BYTES}"
            )),
            false => Ok(introduction),
        }
    });
    Ok(match introduction {
        Ok(introduction) => Started {
            introduction,
            diagnostics,
            ..Started::default()
        },
        Err(reason) => failed(&reason, diagnostics),
    })
}

/// A file of the workspace. `Err`: it cannot be read, and why.
async fn read(attempt: &Attempt<'_>, path: &str, limit: u64) -> Result<Result<Option<Vec<u8>>, String>, Stop> {
    let found = attempt.sandbox.read_file(Base::Workspace, path, limit);
    match called("read a file of the mocks", async { Ok(found.await) }).await? {
        Ok(found) => Ok(Ok(found)),
        Err(SandboxError::Operation { reason, .. }) => Ok(Err(format!("{path} cannot be read: {reason}"))),
        Err(error) => Err(error.into()),
    }
}

/// What reading the logs records. Every text in it is redacted.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Called {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    calls: Option<MockCalls>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
}

impl StepResult for Called {
    fn failed(&self) -> bool {
        false
    }
}

/// Keeps what the agent asked of the mocks. After the turns and before the checks, which may call the mocks too.
pub(crate) async fn keep_calls(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    if !account.has_run() || !attempt.profile().is_some_and(mocks::any) {
        return Ok(());
    }
    let called = attempt.once(CALLS_STEP, calls(attempt)).await?;
    account.diagnostics(called.diagnostics);
    account.mock_calls = called.calls;
    Ok(())
}

async fn calls(attempt: &Attempt<'_>) -> Result<Called, Stop> {
    let mut diagnostics = Vec::new();
    let mut logs = CallLogs::default();
    for (path, log) in [
        (API_CALLS, &mut logs.api),
        (CLI_CALLS, &mut logs.cli),
        (mocks::MCP_CALLS, &mut logs.mcp),
    ] {
        match read(attempt, path, MAX_LOG_BYTES).await? {
            Ok(found) => {
                *log = found.unwrap_or_default();
                if log.len() as u64 == MAX_LOG_BYTES {
                    diagnostics.push(format!("Only the first {} MiB of {path} were read", MAX_LOG_BYTES >> 20));
                }
            }
            Err(reason) => diagnostics.push(attempt.redactor.text(&reason).into_owned()),
        }
    }
    let redactor = attempt.redactor.clone();
    let read = tokio::task::spawn_blocking(move || MockCalls::read(&logs, &redactor)).await;
    let (calls, unreadable) = read.map_err(|error| Stop::lost(format!("the calls of the mocks cannot be read: {error}")))?;
    if unreadable > 0 {
        diagnostics.push(format!("{unreadable} lines in the logs of the mocks are no calls"));
    }
    if calls.as_ref().is_some_and(|calls| calls.truncated) {
        diagnostics.push(format!(
            "Some calls of the mocks were cut or left out: at most {MAX_MOCK_CALLS} of each kind are kept"
        ));
    }
    Ok(Called { calls, diagnostics })
}
