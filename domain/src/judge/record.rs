//! What stays of a judge's answer: a verdict, and the record among the trial's validations (contract 1.7).

use serde_json::Value;

use crate::{
    cutting::cut,
    evidence::{JudgeUsage, Judgment, Validation, ValidationKind, ValidationStatus, ValidationValue, ValueFormat},
    judge::{Answer, Failure, Question, prompt},
    limits::MAX_VALIDATION_MESSAGE,
    number::Number,
    outcome,
    redact::Redactor,
    request::Judge,
};

/// The reason of a judgment that there is none of.
pub const NO_JUDGMENT: &str = "The judge gave no valid judgment";

/// What a judge's answer means for its trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its score reaches the threshold.
    Passed,
    /// It does not.
    Failed,
    /// No valid judgment: the trial cannot be scored.
    Error,
}

/// Where a judge stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its place among the case's judges.
    pub judge: u32,
    /// The place of its record among the trial's validations.
    pub validation: u64,
}

/// How a judge was asked. Nothing of it is redacted yet.
#[derive(Clone, Debug, Default)]
pub struct Asked<'a> {
    /// Milliseconds since the epoch.
    pub started_at_ms: u64,
    /// How long it took, over all times it was asked.
    pub duration_ms: u64,
    /// What it was asked. `None`: it could not be asked.
    pub question: Option<&'a Question>,
    /// What it answered, valid or not. `None`: nothing.
    pub raw: Option<&'a str>,
    /// What the provider or the harness says about the answer.
    pub metadata: Option<Value>,
    /// What it used. `None`: not reported.
    pub usage: Option<JudgeUsage>,
}

/// What a judge came to. Every text is redacted.
#[derive(Clone, Debug, PartialEq)]
pub struct Concluded {
    /// For the trial.
    pub verdict: Verdict,
    /// The label that it picked.
    pub choice: Option<String>,
    /// Of that label.
    pub score: Option<f64>,
    /// Why there is no judgment; empty where there is one.
    pub error: String,
    /// The record, sealed.
    pub validation: Validation,
}

/// What a judge comes to. `capture` false: what it was given and gave is not kept, only its judgment.
pub fn conclude(
    judge: &Judge,
    place: Place,
    asked: Asked<'_>,
    result: Result<Answer, Failure>,
    capture: bool,
    redactor: &Redactor,
) -> Concluded {
    let (verdict, status) = match &result {
        Ok(answer) if answer.score >= judge.threshold.0 => (Verdict::Passed, ValidationStatus::Passed),
        Ok(_) => (Verdict::Failed, ValidationStatus::Failed),
        Err(_) => (Verdict::Error, ValidationStatus::Error),
    };
    let error = result.as_ref().err().map(|failure| sealed(&failure.to_string(), redactor));
    let answer = result.ok();
    let score = answer.as_ref().map(|answer| answer.score);
    let (choice, reason) = match answer {
        Some(answer) => (Some(answer.choice), answer.reason),
        None => (None, NO_JUDGMENT.to_owned()),
    };
    let value = |value: Option<ValidationValue>| match (capture, value) {
        (true, Some(value)) => value,
        (true, None) => ValidationValue::unavailable(),
        (false, _) => ValidationValue::disabled(),
    };
    let mut validation = Validation {
        duration_ms: Some(Number::from(asked.duration_ms)),
        error: error.as_ref().map(|error| value(Some(ValidationValue::text(error)))),
        input: value(asked.question.map(|question| ValidationValue::text(prompt(question)))),
        output: value(asked.raw.map(ValidationValue::text)),
        metadata: asked.metadata.filter(|_| capture).map(|metadata| json(metadata, redactor)),
        message: error.clone().unwrap_or_else(|| reason.clone()),
        judgment: Some(Judgment {
            choice,
            duration_ms: asked.duration_ms,
            error: error.clone(),
            evaluator: judge.by.evaluator().to_owned(),
            model: judge.model.clone(),
            name: judge.name.clone(),
            reason,
            score: score.map(Number),
            threshold: judge.threshold,
            usage: asked.usage,
        }),
        started_at: Some(Number::from(asked.started_at_ms)),
        ..blank(judge, place, status)
    };
    validation.seal(redactor);
    Concluded {
        verdict,
        choice: validation.judgment.as_ref().and_then(|judgment| judgment.choice.clone()),
        score,
        error: error.unwrap_or_default(),
        validation,
    }
}

/// The record of a judge that was not asked, because the trial was void already.
pub fn skipped(judge: &Judge, place: Place, redactor: &Redactor) -> Validation {
    let mut validation = blank(judge, place, ValidationStatus::Skipped);
    validation.seal(redactor);
    validation
}

/// The failure of a trial that cannot be scored because of a judge. `error` must be redacted.
pub fn trial_failure(name: &str, error: &str) -> String {
    outcome::judge_failed(name, error)
}

fn blank(judge: &Judge, place: Place, status: ValidationStatus) -> Validation {
    Validation {
        calls: Vec::new(),
        duration_ms: None,
        error: None,
        exit_code: None,
        id: format!("judge:{}", place.judge),
        index: place.validation,
        input: ValidationValue::unavailable(),
        judgment: None,
        kind: ValidationKind::Judge,
        logs: Vec::new(),
        message: String::new(),
        metadata: None,
        name: judge.name.clone(),
        output: ValidationValue::unavailable(),
        started_at: None,
        status,
        truncated: false,
    }
}

/// Redacts first: a secret that crosses the cut leaves no piece.
fn sealed(text: &str, redactor: &Redactor) -> String {
    let mut text = redactor.text(text).into_owned();
    cut(&mut text, MAX_VALIDATION_MESSAGE);
    text
}

fn json(mut value: Value, redactor: &Redactor) -> ValidationValue {
    redactor.json(&mut value);
    ValidationValue {
        format: ValueFormat::Json,
        ..ValidationValue::text(value.to_string())
    }
}
