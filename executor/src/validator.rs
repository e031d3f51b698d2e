//! Code validators: bundles of checks, one step each (contract 2.4). What they say is read in `domain::validator`.

use std::{collections::BTreeMap, time::Duration};

use evalgrid_domain::{
    evidence::Validation,
    limits::CHECK_TIMEOUT_MS,
    outcome::EXIT_NOT_SCORED,
    request::Validator,
    validator::{Conclusion, Exit, Plan, Reading, plans},
};
use serde::{Deserialize, Serialize};

use crate::{
    account::Account,
    bundle::{self, Bundle},
    setup::memory_diagnostics,
    trial::{Attempt, StepResult, Stop},
    turn_files,
};

/// How long one bundle may take.
const LIMIT: Duration = Duration::from_millis(CHECK_TIMEOUT_MS);

/// What one bundle records. Every text in it is redacted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ValidatorRecord {
    /// `None`: it gave no verdict, and the trial is void.
    pub(crate) passed: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    /// Of the process; -1 where it says nothing about why there is no verdict.
    pub(crate) exit_code: i32,
    pub(crate) validations: Vec<Validation>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) diagnostics: Vec<String>,
}

impl StepResult for ValidatorRecord {
    fn failed(&self) -> bool {
        self.passed.is_none()
    }
}

/// How long all bundles of a validator may take together.
pub(crate) fn limit(validator: &Validator) -> Duration {
    LIMIT * u32::try_from(plans(validator).len()).unwrap_or(u32::MAX)
}

/// Runs every bundle, also behind one that failed or broke: each leaves its own results.
pub(crate) async fn run(attempt: &Attempt<'_>, account: &mut Account, validator: &Validator) -> Result<(), Stop> {
    let redactor = &attempt.prepared.redactor;
    let plans = plans(validator);
    if account.is_void() {
        plans.iter().for_each(|plan| account.skipped(plan.skipped(redactor)));
        return Ok(());
    }
    if plans.is_empty() {
        account.without_checks();
        return Ok(());
    }
    let asked = account.asked().to_vec();
    for (number, plan) in plans.iter().enumerate() {
        let step = format!("check.{number}");
        let record = attempt.once(&step, check(attempt, plan, &step, &asked)).await?;
        account.validator(record);
    }
    Ok(())
}

async fn check(attempt: &Attempt<'_>, plan: &Plan<'_>, step: &str, asked: &[String]) -> Result<ValidatorRecord, Stop> {
    let redactor = &attempt.prepared.redactor;
    let started = match turn_files::write(attempt, asked).await? {
        Ok(files) => {
            let bundle = Bundle {
                kind: bundle::VALIDATOR,
                step,
                source: &plan.check.source,
                env: env(attempt, files),
                limit: LIMIT,
            };
            bundle::run(attempt, bundle).await?
        }
        Err(reason) => Err(reason),
    };
    let exit = match started {
        Ok(exit) => exit,
        Err(reason) => return Ok(record(plan.refused(&reason, redactor), EXIT_NOT_SCORED, Vec::new())),
    };
    let reading = bundle::read(&exit.output, Reading::new(plan), Reading::line).await?;
    let end = Exit {
        code: exit.code,
        timed_out: exit.timed_out,
        no_node: bundle::is_without_node(&exit),
        started_at_ms: exit.started_at_ms,
        finished_at_ms: exit.finished_at_ms,
    };
    let mut diagnostics = memory_diagnostics(&exit, step);
    if exit.code != 0 && plan.captures() {
        let who = format!("The validator {}", plan.check.name);
        diagnostics.push(crate::output::last_words(&who, exit.code, &exit.output, redactor));
    }
    let code = if exit.code == 0 { EXIT_NOT_SCORED } else { exit.code };
    Ok(record(reading.conclude(plan, end, redactor), code, diagnostics))
}

fn record(conclusion: Conclusion, exit_code: i32, mut diagnostics: Vec<String>) -> ValidatorRecord {
    diagnostics.extend(conclusion.diagnostics);
    ValidatorRecord {
        passed: conclusion.passed,
        failure: conclusion.failure,
        exit_code,
        validations: conclusion.validations,
        diagnostics,
    }
}

/// The trial's environment, where the conversation is, and what was prepared.
fn env(attempt: &Attempt<'_>, files: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut env = attempt.env();
    env.extend(files);
    env.insert("SPHYNX_PREPARE_VALUE".into(), attempt.prepared.value.clone());
    env
}
