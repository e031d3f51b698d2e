//! Whether the agent did it: the case's validator, or its verify command.

use std::time::Duration;

use evalgrid_domain::{
    evidence::{LogLevel, Validation, ValidationKind, ValidationLog, ValidationStatus, ValidationValue, VerifyStep},
    limits::CHECK_TIMEOUT_MS,
    number::Number,
    outcome,
    request::Case,
    verify::{self, VerifyPlan},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    account::Account,
    output,
    setup::{OWN_PROGRAMS_LAST, command, memory_diagnostics},
    trial::{Attempt, StepResult, Stop, called},
    validator,
};

/// How long the verify command may take.
const LIMIT: Duration = Duration::from_millis(CHECK_TIMEOUT_MS);
const STEP: &str = "check.0";

/// What a check records. Every text in it is redacted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CheckRecord {
    /// `None`: it gave no verdict, and the trial is void.
    pub(crate) passed: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    pub(crate) validation: Validation,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) verify_steps: Vec<VerifyStep>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) diagnostics: Vec<String>,
}

impl StepResult for CheckRecord {
    fn failed(&self) -> bool {
        self.passed.is_none()
    }
}

/// How long all checks of a case may take.
pub(crate) fn limit(case: &Case) -> Duration {
    case.validator.as_ref().map_or(LIMIT, validator::limit)
}

/// Checks the trial, unless it is void already.
pub(crate) async fn run(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    if let Some(validator) = &attempt.case.validator {
        return validator::run(attempt, account, validator).await;
    }
    match &attempt.case.verify {
        Some(verify) if account.is_void() => {
            let mut skipped = validation(verify, ValidationStatus::Skipped, String::new());
            skipped.seal(&attempt.redactor);
            account.skipped(vec![skipped]);
        }
        Some(verify) => {
            let record = attempt.once(STEP, check(attempt, verify)).await?;
            account.check(record);
        }
        None if account.is_void() => {}
        None => account.void(outcome::NOTHING_TO_CHECK.into(), &[]),
    }
    Ok(())
}

async fn check(attempt: &Attempt<'_>, verify: &str) -> Result<CheckRecord, Stop> {
    let mut record = match verify::plan(verify, &marker(attempt)) {
        VerifyPlan::Refused(message) => {
            let validation = validation(verify, ValidationStatus::Failed, message);
            CheckRecord {
                passed: Some(false),
                failure: None,
                validation,
                verify_steps: Vec::new(),
                diagnostics: Vec::new(),
            }
        }
        VerifyPlan::Single(script) => ran(attempt, verify, script, |output| (output, Vec::new())).await?,
        VerifyPlan::Steps { script, steps, marker } => {
            ran(attempt, verify, script, |output| verify::read_steps(&output, &marker, &steps)).await?
        }
    };
    record.validation.seal(&attempt.redactor);
    record
        .verify_steps
        .iter_mut()
        .for_each(|step| attempt.redactor.string(&mut step.command));
    Ok(record)
}

async fn ran(
    attempt: &Attempt<'_>,
    verify: &str,
    script: String,
    steps: impl FnOnce(String) -> (String, Vec<VerifyStep>),
) -> Result<CheckRecord, Stop> {
    // An agent that deletes its workspace fails the checks; it does not break them.
    called("make the workspace", attempt.sandbox.ensure_workspace()).await?;
    let exit = attempt
        .process(command(STEP, format!("{OWN_PROGRAMS_LAST}{script}"), attempt.env(), LIMIT))
        .await?;
    let unreadable = |error| Stop::lost(format!("the check's output cannot be read: {error}"));
    let (stdout, verify_steps) = steps(output::stdout(&exit.output).map_err(unreadable)?);
    let stderr = output::stderr(&exit.output).map_err(unreadable)?;
    let (passed, status, message) = match exit.code {
        _ if exit.timed_out => (None, ValidationStatus::Error, outcome::verify_timed_out(CHECK_TIMEOUT_MS)),
        0 => (
            Some(true),
            ValidationStatus::Passed,
            "The verify command exited with status 0".to_owned(),
        ),
        code => (
            Some(false),
            ValidationStatus::Failed,
            format!("The verify command exited with status {code}"),
        ),
    };
    let mut validation = validation(verify, status, message);
    validation.exit_code = Some(exit.code.into());
    validation.started_at = Some(Number::from(exit.started_at_ms));
    validation.duration_ms = Some(Number::from(exit.finished_at_ms.saturating_sub(exit.started_at_ms)));
    validation.output = ValidationValue::text(stdout);
    if !stderr.is_empty() {
        let value = ValidationValue::text(stderr);
        validation.logs.push(ValidationLog {
            at: Number::from(exit.finished_at_ms),
            index: 0,
            level: LogLevel::Stderr,
            value,
        });
    }
    let failure = passed.is_none().then(|| validation.message.clone());
    validation.error = failure.clone().map(ValidationValue::text);
    Ok(CheckRecord {
        passed,
        failure,
        validation,
        verify_steps,
        diagnostics: memory_diagnostics(&exit, STEP),
    })
}

fn validation(verify: &str, status: ValidationStatus, message: String) -> Validation {
    Validation {
        calls: Vec::new(),
        duration_ms: None,
        error: None,
        exit_code: None,
        id: "command:0".into(),
        index: 0,
        input: ValidationValue::text(verify),
        judgment: None,
        kind: ValidationKind::Command,
        logs: Vec::new(),
        message,
        metadata: None,
        name: "verify command".into(),
        output: ValidationValue::unavailable(),
        started_at: None,
        status,
        truncated: false,
    }
}

/// The word that tells the command's steps apart. The same when a later attempt goes on with a check that runs; no agent can know it, because
/// the worker's id is in no sandbox.
fn marker(attempt: &Attempt<'_>) -> String {
    let secret = Sha256::new()
        .chain_update("verify")
        .chain_update(&attempt.worker.folder.worker_id)
        .chain_update(&attempt.lease.sandbox);
    let word: String = secret.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("evalgrid-{word}")
}
