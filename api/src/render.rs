//! The contract's objects, field by field, from what the scheduler says.

use evalgrid_domain::{
    evidence::{Judgment, Validation, ValidationKind, ValidationStatus, ValidationValue},
    judge::{self, Place},
    limits::MAX_VALIDATION_MESSAGE,
    number::Number,
    prompt,
    redact::Redactor,
    request::{Case, DEFAULT_USER_MODEL, Source, SourceFile, SuiteBatchRequest, Validator, effective_source},
    timestamp,
};
use evalgrid_proto::v1::{
    Batch, BatchPage, BatchStatus, BatchSummary, CaseInfo, Distribution, Identity, JudgeVerdict, Judged, ModelCatalogue, PageCursor, Run,
    StartedBatch, Trial, TrialStatus, Trigger, Usage, VariantInfo,
};
use serde::Serialize;
use serde_json::{Value, json};

/// What the scheduler said does not hold together: our fault, an internal error.
#[derive(Debug, thiserror::Error)]
#[error("the scheduler's batch does not hold together: {0}")]
pub(crate) struct Incoherent(pub(crate) &'static str);

/// StartedBatch.
pub(crate) fn started(started: &StartedBatch) -> Value {
    let runs: Vec<_> = started
        .runs
        .iter()
        .map(|run| json!({"caseId": run.case_id, "id": run.id, "variantId": run.variant_id}))
        .collect();
    json!({"id": started.id, "runs": runs})
}

/// Whoami.
pub(crate) fn whoami(identity: &Identity) -> Value {
    json!({
        "credential": {"kind": "apiKey", "name": identity.key_name, "start": identity.key_start},
        "organization": {
            "id": identity.organization_id,
            "name": identity.organization_name,
            "slug": identity.organization_slug,
        },
        "permissions": identity.permissions,
    })
}

/// The page of `evals.batches.list`.
pub(crate) fn page(page: &BatchPage) -> Value {
    json!({
        "batches": page.batches.iter().map(summary).collect::<Vec<_>>(),
        "next": page.next.as_ref().map(cursor),
        "total": page.total,
    })
}

/// What `evals.models.list` answers. Nothing here is known that a summary could say.
pub(crate) fn models(harness: &str, catalogue: &ModelCatalogue) -> Value {
    let models = catalogue
        .models
        .iter()
        .map(|model| json!({"displayName": model.display_name, "id": model.id, "summary": null, "vendor": model.vendor}));
    json!({
        "harness": harness,
        "models": models.collect::<Vec<_>>(),
        "total": catalogue.models.len(),
    })
}

fn cursor(cursor: &PageCursor) -> Value {
    json!({"id": cursor.id, "startedAtMillis": cursor.started_at_ms})
}

fn summary(summary: &BatchSummary) -> Value {
    let mut row = json!({
        "cancelled": summary.cancelled,
        "cases": summary.cases,
        "failure": summary.failure,
        "finishedAt": summary.finished_at_ms.map(timestamp::format),
        "id": summary.id,
        "passed": summary.passed,
        "runs": summary.runs,
        "scored": summary.scored,
        "startedAt": timestamp::format(summary.started_at_ms),
        "status": batch_status(summary.status()),
        "trigger": summary.trigger.as_ref().map(trigger),
        "voided": summary.voided,
    });
    if let Some(regraded) = &summary.regrade_of {
        row["regradeOf"] = json!(regraded);
    }
    row
}

/// EvalBatch without `runs`.
pub(crate) fn batch_head(batch: &Batch) -> Value {
    let mut head = json!({
        "costs": null,
        "failure": batch.failure,
        "finishedAt": batch.finished_at_ms.map(timestamp::format),
        "id": batch.id,
        "local": batch.local,
        "startedAt": timestamp::format(batch.started_at_ms),
        "status": batch_status(batch.status()),
        "trigger": batch.trigger.as_ref().map(trigger),
    });
    if let Some(retried) = &batch.retry_of {
        head["retryOf"] = json!(retried);
    }
    if let Some(regraded) = &batch.regrade_of {
        head["regradeOf"] = json!(regraded);
    }
    head
}

fn trigger(trigger: &Trigger) -> Value {
    match &trigger.url {
        Some(url) => json!({"source": trigger.source, "url": url}),
        None => json!({"source": trigger.source}),
    }
}

fn batch_status(status: BatchStatus) -> &'static str {
    match status {
        BatchStatus::Finished => "finished",
        BatchStatus::Failed => "failed",
        BatchStatus::Running | BatchStatus::Unspecified => "running",
    }
}

fn trial_status(status: TrialStatus) -> &'static str {
    match status {
        TrialStatus::Running => "running",
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void => "void",
        TrialStatus::Queued | TrialStatus::Unspecified => "queued",
    }
}

/// EvalRun without `trials`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunHead<'a> {
    batch_id: &'a str,
    case: CaseName<'a>,
    costs: Option<Value>,
    definition_hash: &'a str,
    distribution: Value,
    finished_at: Option<String>,
    harness_version: &'a str,
    id: &'a str,
    local: bool,
    profile_version: Option<&'a str>,
    setup: Setup<'a>,
    started_at: String,
    status: &'static str,
    suite: Value,
    trigger: Option<Value>,
    variant: Value,
}

#[derive(Serialize)]
struct CaseName<'a> {
    id: &'a str,
    name: &'a str,
}

/// EvalSetup.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Setup<'a> {
    prepare: Option<&'a str>,
    prompt: String,
    source: &'a Source,
    validator: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    validator_files: Option<&'a [SourceFile]>,
    verify: Option<&'a str>,
}

/// The head of `run`, one of `batch`'s.
pub(crate) fn run_head<'a>(batch: &'a Batch, run: &'a Run, request: &'a SuiteBatchRequest) -> Result<RunHead<'a>, Incoherent> {
    let index = run.case_index as usize;
    let info: &CaseInfo = batch.cases.get(index).ok_or(Incoherent("a run of no case"))?;
    let case = request
        .cases
        .get(index)
        .ok_or(Incoherent("a case that the start request does not have"))?;
    let variant = batch
        .variants
        .get(run.variant_index as usize)
        .ok_or(Incoherent("a run of no variant"))?;
    let suite = batch.suite.as_ref().ok_or(Incoherent("no suite"))?;
    Ok(RunHead {
        batch_id: &batch.id,
        case: CaseName {
            id: &info.id,
            name: &info.name,
        },
        costs: None,
        definition_hash: &info.definition_hash,
        distribution: distribution(run.distribution.as_ref().ok_or(Incoherent("a run without distribution"))?),
        finished_at: run.finished_at_ms.map(timestamp::format),
        harness_version: &variant.harness_version,
        id: &run.id,
        local: batch.local,
        profile_version: variant.profile_version.as_deref(),
        setup: Setup {
            prepare: case.prepare.as_ref().map(|prepare| prepare.name.as_str()),
            prompt: prompt::render(&request.suite.prompt, &case.variables),
            source: effective_source(request, index),
            validator: case.validator.as_ref().map(|validator| validator.name()),
            validator_files: case.validator.as_ref().and_then(|validator| validator.source_files()),
            verify: case.verify.as_deref(),
        },
        started_at: timestamp::format(batch.started_at_ms),
        status: batch_status(run.status()),
        suite: json!({"id": suite.id, "name": suite.name}),
        trigger: batch.trigger.as_ref().map(trigger),
        variant: variant_value(variant, &run.variant_id, user_model(batch, run, case)),
    })
}

/// Who plays the case's person: as its batch was started with, or, in one of an older version, by the default.
fn user_model(batch: &Batch, run: &Run, case: &Case) -> Option<String> {
    let person = batch.cases.get(run.case_index as usize).and_then(|info| info.person.as_ref());
    person
        .map(|person| person.name.clone())
        .or_else(|| case.user_model(DEFAULT_USER_MODEL))
}

fn variant_value(variant: &VariantInfo, id: &str, user_model: Option<String>) -> Value {
    json!({
        "harness": variant.harness,
        "id": id,
        "model": variant.model,
        "profile": variant.profile,
        "provider": variant.provider,
        "sandbox": variant.sandbox,
        "userModel": user_model,
    })
}

fn distribution(d: &Distribution) -> Value {
    json!({
        "cancelled": d.cancelled,
        "commandMax": d.command_max,
        "commandMedian": Number(d.command_median),
        "commandMin": d.command_min,
        "deterministic": d.deterministic,
        "failed": d.failed,
        "passRate": Number(d.pass_rate),
        "passed": d.passed,
        "scored": d.scored,
        "trials": d.trials,
        "voided": d.voided,
    })
}

/// EvalTrial without what its evidence holds. One that has not ended has no exit code yet, which the contract writes as -1.
pub(crate) fn trial_head(trial: &Trial) -> Value {
    let outcome = trial.outcome.clone().unwrap_or_default();
    let scored = matches!(trial.status(), TrialStatus::Passed | TrialStatus::Failed);
    // What the checks of a trial said is no verdict as long as its judges have not answered.
    let exit_code = match trial.status() {
        TrialStatus::Passed | TrialStatus::Failed | TrialStatus::Void => outcome.exit_code,
        TrialStatus::Queued | TrialStatus::Running | TrialStatus::Unspecified => -1,
    };
    let mut head = json!({
        "commands": outcome.commands,
        "costs": null,
        "exitCode": exit_code,
        "failedCommands": outcome.failed_commands,
        "failure": outcome.failure.filter(|_| !scored),
        "id": trial.id,
        "lostAttempts": trial.lost_attempts,
        "modelMs": outcome.model_ms,
        "ordinal": trial.ordinal,
        "sandboxId": outcome.sandbox_id,
        "sandboxMs": outcome.sandbox_ms,
        "status": trial_status(trial.status()),
        "timed": outcome.timed,
        "usage": outcome.usage.as_ref().map(usage),
    });
    if outcome.carried {
        head["carried"] = json!(true);
    }
    if let Some(before) = &outcome.before {
        head["before"] = json!({
            "judges": before.judged.iter().map(short).collect::<Vec<_>>(),
            "status": trial_status(before.status()),
        });
    }
    head
}

/// A judgment of before a regrade; its record is in the batch of then.
fn short(judged: &Judged) -> Value {
    json!({
        "choice": judged.choice,
        "name": judged.name,
        "score": judged.score.map(Number),
        "verdict": judge_status(judged.verdict()).name(),
    })
}

fn judge_status(verdict: JudgeVerdict) -> ValidationStatus {
    match verdict {
        JudgeVerdict::Passed => ValidationStatus::Passed,
        JudgeVerdict::Failed => ValidationStatus::Failed,
        JudgeVerdict::Error | JudgeVerdict::Unspecified => ValidationStatus::Error,
        JudgeVerdict::Skipped => ValidationStatus::Skipped,
    }
}

/// What is shown of a judge that left no record, such as one that nobody could ask.
pub(crate) fn judged(judged: &Judged, batch: &Batch, run: &Run, request: &SuiteBatchRequest) -> Result<Validation, Incoherent> {
    let (case, index) = (run.case_index as usize, judged.index as usize);
    let info = batch.cases.get(case).ok_or(Incoherent("a run of no case"))?;
    // As the request has it: of a case that a regrade leaves out, the batch itself names no judges.
    let asked = match request.cases.get(case).and_then(|case| case.validator.as_ref()) {
        Some(Validator::Judged(validator)) => validator.judges.get(index),
        Some(Validator::Code(_)) | None => None,
    };
    let asked = asked.ok_or(Incoherent("a judgment that the start request does not ask for"))?;
    let place = Place {
        judge: judged.index,
        validation: u64::from(info.checks) + u64::from(judged.index),
    };
    if judged.verdict() == JudgeVerdict::Skipped {
        return Ok(judge::skipped(asked, place, &Redactor::default()));
    }
    let error = (!judged.error.is_empty()).then(|| judged.error.clone());
    let message: String = judged.error.chars().take(MAX_VALIDATION_MESSAGE).collect();
    Ok(Validation {
        calls: Vec::new(),
        duration_ms: None,
        error: error.clone().map(ValidationValue::text),
        exit_code: None,
        id: format!("judge:{index}"),
        index: place.validation,
        input: ValidationValue::unavailable(),
        judgment: Some(Judgment {
            choice: judged.choice.clone(),
            duration_ms: 0,
            error,
            evaluator: asked.by.evaluator().to_owned(),
            model: asked.model.clone(),
            name: judged.name.clone(),
            reason: "There is no record of this judgment.".to_owned(),
            score: judged.score.map(Number),
            threshold: asked.threshold,
            usage: None,
        }),
        kind: ValidationKind::Judge,
        logs: Vec::new(),
        message,
        metadata: None,
        name: judged.name.clone(),
        output: ValidationValue::unavailable(),
        started_at: None,
        status: judge_status(judged.verdict()),
        truncated: false,
    })
}

fn usage(usage: &Usage) -> Value {
    json!({
        "cacheReadTokens": usage.cache_read_tokens,
        "cacheWriteTokens": usage.cache_write_tokens,
        "costUsd": usage.cost_usd,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_tokens,
    })
}
