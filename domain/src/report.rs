//! What a client's own machine reports of a trial: its decoded form, and the evidence that is kept of it.
//!
//! The report is as untrusted as an agent's output: text enters redacted and cut, as that of hosted trials does.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value};

use crate::{
    decode::{Decoder, Issue, IssueTag, Text},
    evidence::{Artifact, JournalEntry, Role, Trajectory, TrialEvidence, Validation, VerifyStep},
    ids::RunId,
    limits::{MAX_CHANGED_FILES, MAX_VALIDATIONS},
    number::{MAX_SAFE_INTEGER, Number},
    outcome::{TrialStatus, Usage, failure_text},
    redact::Redactor,
};

type Object = Map<String, Value>;

/// The last millisecond of a JavaScript date.
const MAX_TIME_MS: f64 = 8.64e15;
/// Reports are bounded by their bytes: a number of elements is no limit of its own.
const ANY: std::ops::RangeInclusive<usize> = 0..=usize::MAX;

/// How one trial came out on the client's own machine.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedTrial {
    /// Its run.
    pub run: RunId,
    /// Which trial of the run, from 1.
    pub ordinal: u32,
    /// Where it ran, as the machine names it.
    pub sandbox_id: Option<String>,
    /// Tokens of the trial.
    pub usage: Option<ReportedUsage>,
    /// What the agent did, not yet sealed.
    pub journal: Vec<JournalEntry>,
    /// Its verdict, or why there is none.
    pub result: ReportedResult,
}

/// The verdict of a reported trial.
#[derive(Clone, Debug, PartialEq)]
pub enum ReportedResult {
    /// The trial ran to its end.
    Ended(Box<ReportedOutcome>),
    /// It stopped before it was scored.
    Broken(String),
}

/// The contract's `TrialOutcome`, and what came with it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedOutcome {
    /// Passed, failed or void.
    pub status: TrialStatus,
    /// As its process ended.
    pub exit_code: i32,
    /// Commands that the agent ran.
    pub commands: u32,
    /// How long the agent worked.
    pub model_ms: u64,
    /// How long the sandbox lived.
    pub sandbox_ms: u64,
    /// Files that were kept.
    pub artifacts: Vec<Artifact>,
    /// What checks and judges saw.
    pub validations: Vec<Validation>,
    /// The steps of the verify command that ran.
    pub verify_steps: Vec<VerifyStep>,
    /// Evidence that is missing.
    pub void_fields: Vec<String>,
    /// What a simulated person has used: the model, and its tokens where known.
    pub user_spend: Option<(String, Option<ReportedUsage>)>,
}

/// Tokens, and which part of the cache writes is kept for one hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReportedUsage {
    /// As everywhere.
    pub usage: Usage,
    /// Part of the cache writes.
    pub cache_write_1h_tokens: Option<u64>,
}

/// Decodes the body of `runner.report`.
///
/// # Errors
/// Every issue found, at most [`crate::limits::MAX_ISSUES`].
pub fn decode_report(value: &Value) -> Result<ReportedTrial, Vec<Issue>> {
    Decoder::run(value, report)
}

/// Text of a process may hold anything.
fn any_text(d: &mut Decoder, value: &Value) -> Option<String> {
    d.string(value, Text::any().with_nul())
}

fn count(d: &mut Decoder, value: &Value) -> Option<u64> {
    d.integer(value, 0..=MAX_SAFE_INTEGER).map(i64::unsigned_abs)
}

fn count_u32(d: &mut Decoder, value: &Value) -> Option<u32> {
    d.integer(value, 0..=i64::from(u32::MAX))
        .and_then(|number| u32::try_from(number).ok())
}

fn code(d: &mut Decoder, value: &Value) -> Option<i64> {
    d.integer(value, i64::from(i32::MIN)..=i64::from(i32::MAX))
}

fn time(d: &mut Decoder, map: &Object, key: &str) -> Option<Option<Number>> {
    d.optional(map, key, |d, value| d.number(value, 0.0..=MAX_TIME_MS).map(Number))
}

/// A key that must be there, but may be null.
fn required_nullable<T>(d: &mut Decoder, map: &Object, key: &str, decode: fn(&mut Decoder, &Value) -> Option<T>) -> Option<Option<T>> {
    d.required(map, key, |d, value| match value {
        Value::Null => Some(None),
        value => decode(d, value).map(Some),
    })
}

fn report(d: &mut Decoder, value: &Value) -> Option<ReportedTrial> {
    let map = d.object(value)?;
    // What is no run's id names no run, which is for the scheduler to say; the shape only asks for a string.
    let run = d.required(map, "runId", |d, value| d.string(value, Text::any()));
    let ordinal = d.required(map, "ordinal", |d, value| {
        d.integer(value, 1..=i64::from(u32::MAX))
            .and_then(|number| u32::try_from(number).ok())
    });
    let sandbox_id = d.nullable(map, "sandboxId", any_text);
    let usage = d.nullable(map, "usage", usage);
    let journal = d.required(map, "events", |d, value| d.array(value, ANY, harness_event));
    let result = match (map.contains_key("outcome"), map.contains_key("failure")) {
        (_, false) => d
            .required(map, "outcome", |d, value| outcome(d, map, value))
            .map(Box::new)
            .map(ReportedResult::Ended),
        (false, true) => d
            .required(map, "failure", |d, value| d.string(value, Text::any().min(1).with_nul()))
            .map(ReportedResult::Broken),
        (true, true) => {
            d.issue(IssueTag::Unexpected, "Expected either \"outcome\" or \"failure\", not both");
            None
        }
    };
    Some(ReportedTrial {
        run: run?.parse().unwrap_or(NO_RUN),
        ordinal: ordinal?,
        sandbox_id: sandbox_id?,
        usage: usage?,
        journal: journal?.into_iter().flatten().collect(),
        result: result?,
    })
}

/// The run that no batch has: an id of all zeros.
const NO_RUN: RunId = RunId {
    batch: crate::ids::BatchId([0; 16]),
    run: 0,
};

fn outcome(d: &mut Decoder, report: &Object, value: &Value) -> Option<ReportedOutcome> {
    let map = d.object(value)?;
    let status = d.required(map, "status", |d, value| d.one_of(value, TrialStatus::ALL));
    let exit_code = d.required(map, "exitCode", code);
    let commands = d.required(map, "commandCount", count_u32);
    let model_ms = d.required(map, "modelMs", count);
    let sandbox_ms = d.required(map, "sandboxMs", count);
    let artifacts = d.optional(map, "artifacts", |d, value| d.array(value, ANY, artifact));
    let validations = d.optional(map, "validations", |d, value| d.array(value, 0..=MAX_VALIDATIONS, validation));
    let verify_steps = d.required(map, "verifySteps", |d, value| d.array(value, ANY, verify_step));
    let void_fields = d.required(map, "voidFields", |d, value| d.array(value, ANY, any_text));
    let user_spend = user_spend(d, report);
    Some(ReportedOutcome {
        status: status?,
        exit_code: i32::try_from(exit_code?).ok()?,
        commands: commands?,
        model_ms: model_ms?,
        sandbox_ms: sandbox_ms?,
        artifacts: artifacts?.unwrap_or_default(),
        validations: validations?.unwrap_or_default(),
        verify_steps: verify_steps?,
        void_fields: void_fields?,
        user_spend: user_spend?,
    })
}

fn user_spend(d: &mut Decoder, report: &Object) -> Option<Option<(String, Option<ReportedUsage>)>> {
    d.nullable(report, "userSpend", |d, value| {
        let map = d.object(value)?;
        let model = d.required(map, "model", any_text);
        let usage = required_nullable(d, map, "usage", usage);
        Some((model?, usage?))
    })
}

fn usage(d: &mut Decoder, value: &Value) -> Option<ReportedUsage> {
    let map = d.object(value)?;
    let mut tokens = |key: &str| d.required(map, key, count);
    let (input, output, total) = (tokens("inputTokens"), tokens("outputTokens"), tokens("totalTokens"));
    let (read, write) = (tokens("cacheReadTokens"), tokens("cacheWriteTokens"));
    let one_hour = d.optional(map, "cacheWrite1hTokens", count);
    let cost = d.nullable(map, "costUsd", |d, value| d.number(value, 0.0..=f64::MAX).map(Number));
    Some(ReportedUsage {
        usage: Usage {
            cache_read_tokens: read?,
            cache_write_tokens: write?,
            input_tokens: input?,
            output_tokens: output?,
            total_tokens: total?,
            cost_usd: cost?,
        },
        cache_write_1h_tokens: one_hour?,
    })
}

fn artifact(d: &mut Decoder, value: &Value) -> Option<Artifact> {
    let map = d.object(value)?;
    let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let path = d.required(map, "path", any_text);
    let byte_size = d.required(map, "byteSize", count);
    let sha256 = d.required(map, "sha256", |d, value| {
        d.string(value, Text::any().matching(is_hash, "64 lower-case hex digits"))
    });
    Some(Artifact {
        byte_size: byte_size?,
        path: path?,
        sha256: sha256?,
        text: None,
    })
}

fn verify_step(d: &mut Decoder, value: &Value) -> Option<VerifyStep> {
    let map = d.object(value)?;
    let command = d.required(map, "command", any_text);
    let exit_code = d.required(map, "exitCode", code);
    Some(VerifyStep {
        command: command?,
        exit_code: exit_code?,
    })
}

fn validation(d: &mut Decoder, value: &Value) -> Option<Validation> {
    d.object(value)?;
    serde_json::from_value(value.clone())
        .map_err(|error| {
            // The parser's other words may repeat a value, which may be a secret.
            let text = error.to_string();
            let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
            match missing {
                Some((field, _)) => d.at(field, |d| d.issue(IssueTag::Missing, "is missing")),
                None => d.issue(IssueTag::Type, "Expected a validation with the documented fields"),
            }
        })
        .ok()
}

/// An entry of the journal, or nothing: a session's begin and end are none.
fn harness_event(d: &mut Decoder, value: &Value) -> Option<Option<JournalEntry>> {
    const TAGS: &[(&str, u8)] = &[
        ("Started", 0),
        ("Message", 1),
        ("Command", 2),
        ("FileChange", 3),
        ("ToolCall", 4),
        ("Finished", 5),
    ];
    let map = d.object(value)?;
    let tag = d.required(map, "_tag", |d, value| d.one_of(value, TAGS))?;
    let at = time(d, map, "at");
    let started_at = time(d, map, "startedAt");
    let entry = match tag {
        0 => {
            let model = d.required(map, "model", any_text);
            let session = d.required(map, "sessionId", any_text);
            model.and(session)?;
            None
        }
        1 => {
            let role = d.required(map, "role", |d, value| d.one_of(value, Role::ALL));
            let text = d.required(map, "text", any_text);
            let usage = d.nullable(map, "usage", usage);
            Some(JournalEntry::Message {
                finished_at_millis: at?,
                role: Some(role?),
                text: text?,
                usage: usage?.map(|usage| usage.usage),
            })
        }
        2 => {
            let command = d.required(map, "command", any_text);
            let exit_code = required_nullable(d, map, "exitCode", code);
            let output = d.required(map, "output", any_text);
            Some(JournalEntry::Command {
                command: command?,
                exit_code: exit_code?,
                finished_at_millis: at?,
                output: output?,
                output_truncated: false,
                started_at_millis: started_at?,
            })
        }
        3 => {
            let paths = d.required(map, "paths", |d, value| d.array(value, ANY, any_text));
            Some(JournalEntry::FileChange {
                finished_at_millis: at?,
                paths: paths?,
            })
        }
        4 => {
            required_nullable(d, map, "callId", any_text)?;
            let input = d.required(map, "input", any_text);
            let name = d.required(map, "name", any_text);
            let output = d.nullable(map, "output", any_text);
            let error = d.nullable(map, "error", any_text);
            let status = required_nullable(d, map, "status", any_text);
            Some(JournalEntry::ToolCall {
                error: error?,
                error_truncated: false,
                finished_at_millis: at?,
                input: Some(input?),
                input_truncated: false,
                name: name?,
                output: output?,
                output_truncated: false,
                started_at_millis: started_at?,
                status: status?,
            })
        }
        _ => {
            d.required(map, "reason", any_text)?;
            None
        }
    };
    Some(entry)
}

/// A report as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Redacted and cut.
    pub evidence: TrialEvidence,
    /// Why the trial was not scored, where the report says so.
    pub failure: Option<String>,
    /// Redacted.
    pub sandbox_id: Option<String>,
    /// Commands that ended with another status than 0.
    pub failed_commands: u32,
    /// The journal carries times.
    pub timed: bool,
}

impl ReportedTrial {
    /// Takes the evidence out of the report, redacted first and cut afterwards.
    pub fn keep(&mut self, redactor: &Redactor) -> Kept {
        let mut trajectory = Trajectory::default();
        let mut files = BTreeSet::new();
        let (mut failed_commands, mut timed) = (0u32, false);
        for mut entry in std::mem::take(&mut self.journal) {
            entry.seal(redactor);
            timed |= entry.finished_at().is_some();
            match &entry {
                JournalEntry::Command { exit_code, .. } => failed_commands += u32::from(exit_code.is_some_and(|code| code != 0)),
                JournalEntry::FileChange { paths, .. } => {
                    for path in paths {
                        if files.len() < MAX_CHANGED_FILES {
                            files.insert(path.clone());
                        }
                    }
                }
                JournalEntry::Message { .. } | JournalEntry::ToolCall { .. } => {}
            }
            trajectory.push(entry);
        }
        let mut evidence = TrialEvidence {
            trajectory: trajectory.finish(),
            files_changed: files.into_iter().collect(),
            ..TrialEvidence::default()
        };
        let mut failure = None;
        match &mut self.result {
            ReportedResult::Ended(outcome) => {
                evidence.artifacts = std::mem::take(&mut outcome.artifacts);
                evidence.validations = std::mem::take(&mut outcome.validations);
                evidence.verify_steps = std::mem::take(&mut outcome.verify_steps);
                evidence
                    .artifacts
                    .iter_mut()
                    .for_each(|artifact| redactor.string(&mut artifact.path));
                evidence.validations.iter_mut().for_each(|validation| validation.seal(redactor));
                evidence.verify_steps.iter_mut().for_each(|step| redactor.string(&mut step.command));
                outcome.void_fields.iter_mut().for_each(|field| redactor.string(field));
                // The same field twice says nothing more.
                let mut seen = HashSet::new();
                outcome.void_fields.retain(|field| seen.insert(field.clone()));
                evidence.void_fields.clone_from(&outcome.void_fields);
                outcome.user_spend.iter_mut().for_each(|(model, _)| redactor.string(model));
            }
            ReportedResult::Broken(text) => failure = Some(failure_text(&redactor.text(text))),
        }
        Kept {
            evidence,
            failure,
            sandbox_id: self.sandbox_id.as_deref().map(|id| redactor.text(id).into_owned()),
            failed_commands,
            timed,
        }
    }
}
