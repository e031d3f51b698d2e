//! What a bundle of checks says while it runs, and what that comes to.
//!
//! A bundle prints a line `SPHYNX_VALIDATION=` with a record whenever one of its checks changes, and at its end `SPHYNX_VALIDATOR_RESULT=` with
//! its verdict. The newest record of an id counts, and the last verdict. Everything else that it prints is of no interest. The texts come from a
//! sandbox: nothing leaves this module before it is redacted.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::{
    evidence::{Validation, ValidationCall, ValidationKind, ValidationLog, ValidationStatus, ValidationValue},
    limits::CHECK_TIMEOUT_MS,
    number::Number,
    outcome,
    redact::Redactor,
    request::{Check, Validator},
};

/// Begins a line with a record.
pub const RECORD: &str = "SPHYNX_VALIDATION=";
/// Begins the line with the verdict.
pub const RESULT: &str = "SPHYNX_VALIDATOR_RESULT=";
/// Bytes of one line. A record holds 192,000 characters of values (contract 2.4), each up to six bytes long as an escape, and its frame.
pub const MAX_FRAME_BYTES: usize = 2 << 20;
/// Records under ids that the request does not name are counted up to here, and never kept.
const MAX_UNPLANNED: u32 = 1_000_000;

/// One bundle of a validator, and the records that it must leave.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan<'a> {
    /// The bundle.
    pub check: &'a Check,
    /// Begins the ids of its records, where the validator has several bundles.
    prefix: String,
    /// The place of its first record among the trial's validations.
    first: u64,
    capture: bool,
}

/// The bundles of a validator, in order.
pub fn plans<'a>(validator: &'a Validator) -> Vec<Plan<'a>> {
    let (checks, capture) = match validator {
        Validator::Code(code) => (std::slice::from_ref(&code.check), true),
        Validator::Judged(judged) => (judged.checks.as_slice(), judged.captures()),
    };
    let mut first = 0;
    let plan = |(group, check): (usize, &'a Check)| {
        let prefix = match checks.len() {
            1 => String::new(),
            _ => format!("group:{group}:"),
        };
        let plan = Plan {
            check,
            prefix,
            first,
            capture: capture && check.capture.unwrap_or(true),
        };
        first += plan.entries().len() as u64;
        plan
    };
    checks.iter().enumerate().map(plan).collect()
}

impl Plan<'_> {
    /// Whether anything that it prints may be kept, beyond verdicts and times.
    pub fn captures(&self) -> bool {
        self.capture
    }

    /// The id that the bundle uses, and the name for people, of each record. A bundle without a manifest is one check of the bundle's name.
    fn entries(&self) -> Vec<(String, &str)> {
        match &self.check.manifest {
            Some(manifest) => manifest
                .iter()
                .map(|entry| (format!("code:{}", entry.index), entry.name.as_str()))
                .collect(),
            None => vec![("code:0".to_owned(), self.check.name.as_str())],
        }
    }

    /// The records of a bundle that never ran.
    pub fn skipped(&self, redactor: &Redactor) -> Vec<Validation> {
        self.records(BTreeMap::new(), ValidationStatus::Skipped, "", redactor)
    }

    /// The end of a bundle that could not be started. `reason` must not be redacted yet.
    pub fn refused(&self, reason: &str, redactor: &Redactor) -> Conclusion {
        let failure = outcome::validator_failed(&self.check.name, &redactor.text(reason));
        Conclusion {
            passed: None,
            validations: self.records(BTreeMap::new(), ValidationStatus::Error, &failure, redactor),
            failure: Some(failure),
            diagnostics: Vec::new(),
        }
    }

    /// All records, sealed. `otherwise` and `reason` are for those that the bundle has not finished.
    fn records(
        &self,
        mut newest: BTreeMap<String, Record>,
        otherwise: ValidationStatus,
        reason: &str,
        redactor: &Redactor,
    ) -> Vec<Validation> {
        let record = |(place, (id, name)): (u64, (String, &str))| {
            let record = newest.remove(&id).unwrap_or_default();
            let finished = record.is_finished();
            let mut validation = Validation {
                calls: record.calls,
                duration_ms: record.duration_ms.and_then(whole),
                error: record.error,
                exit_code: None,
                id: format!("{}{id}", self.prefix),
                index: self.first + place,
                // It would show what `prepare` has returned.
                input: ValidationValue::unavailable(),
                judgment: None,
                kind: ValidationKind::Code,
                logs: record.logs,
                message: if finished { record.message } else { reason.to_owned() },
                metadata: record.metadata,
                name: name.to_owned(),
                output: record.output.unwrap_or_else(ValidationValue::unavailable),
                started_at: record.started_at,
                status: if finished { record.status } else { otherwise },
                truncated: record.truncated,
            };
            for call in &mut validation.calls {
                call.duration_ms = call.duration_ms.and_then(whole);
            }
            if !self.capture {
                disable(&mut validation);
            }
            validation.seal(redactor);
            validation
        };
        (0..).zip(self.entries()).map(record).collect()
    }
}

/// A duration as the contract stores it.
fn whole(duration: Number) -> Option<Number> {
    Some(Number(duration.0.round().max(0.0)))
}

/// The validator asked that no values be kept: verdicts and times stay.
fn disable(validation: &mut Validation) {
    let Validation {
        calls,
        logs,
        input,
        output,
        error,
        metadata,
        ..
    } = validation;
    *input = ValidationValue::disabled();
    *output = ValidationValue::disabled();
    *metadata = None;
    logs.clear();
    error.iter_mut().for_each(|error| *error = ValidationValue::disabled());
    for call in calls {
        call.input = ValidationValue::disabled();
        call.output = ValidationValue::disabled();
        call.error.iter_mut().for_each(|error| *error = ValidationValue::disabled());
    }
}

/// A record as a bundle prints it. What a plain hand-written bundle leaves out has a default; the rest of the shape is the contract's.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    id: String,
    status: ValidationStatus,
    #[serde(default)]
    message: String,
    #[serde(default)]
    started_at: Option<Number>,
    #[serde(default)]
    duration_ms: Option<Number>,
    #[serde(default)]
    truncated: bool,
    #[serde(default)]
    output: Option<ValidationValue>,
    #[serde(default)]
    error: Option<ValidationValue>,
    #[serde(default)]
    metadata: Option<ValidationValue>,
    #[serde(default)]
    calls: Vec<ValidationCall>,
    #[serde(default)]
    logs: Vec<ValidationLog>,
}

impl Record {
    fn is_finished(&self) -> bool {
        use ValidationStatus::{Error, Failed, Passed};
        matches!(self.status, Passed | Failed | Error)
    }
}

/// The verdict as a bundle prints it.
#[derive(Debug, Deserialize)]
struct Verdict {
    passed: bool,
    #[serde(default)]
    message: Option<String>,
}

/// Reads what a bundle prints, line by line, in bounded memory.
#[derive(Debug)]
pub struct Reading {
    planned: BTreeSet<String>,
    newest: BTreeMap<String, Record>,
    verdict: Option<Verdict>,
    /// Why a line of ours could not be read: the first such reason.
    unreadable: Option<String>,
    unplanned: u32,
}

impl Reading {
    /// Nothing is read yet.
    pub fn new(plan: &Plan<'_>) -> Self {
        Self {
            planned: plan.entries().into_iter().map(|(id, _)| id).collect(),
            newest: BTreeMap::new(),
            verdict: None,
            unreadable: None,
            unplanned: 0,
        }
    }

    /// Takes the next line of stdout, without its line feed.
    pub fn line(&mut self, line: &[u8]) {
        let line = line.trim_ascii_end();
        if let Some(record) = line.strip_prefix(RECORD.as_bytes()) {
            match read::<Record>(record) {
                Ok(record) if self.planned.contains(&record.id) => {
                    self.newest.insert(record.id.clone(), record);
                }
                Ok(_) => self.unplanned = (self.unplanned + 1).min(MAX_UNPLANNED),
                Err(reason) => self.unreadable("a record", &reason),
            }
        } else if let Some(verdict) = line.strip_prefix(RESULT.as_bytes()) {
            match read(verdict) {
                Ok(verdict) => self.verdict = Some(verdict),
                Err(reason) => self.unreadable("a verdict", &reason),
            }
        }
    }

    fn unreadable(&mut self, what: &str, reason: &str) {
        self.unreadable
            .get_or_insert_with(|| format!("it printed {what} that cannot be read: {reason}"));
    }
}

fn read<T: serde::de::DeserializeOwned>(json: &[u8]) -> Result<T, String> {
    if json.len() > MAX_FRAME_BYTES {
        return Err(format!("it has {} bytes; the limit is {MAX_FRAME_BYTES}", json.len()));
    }
    serde_json::from_slice(json).map_err(|error| error.to_string())
}

/// How the bundle's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its status.
    pub code: i32,
    /// It ran out of time.
    pub timed_out: bool,
    /// There was no program to run it with.
    pub no_node: bool,
    /// Milliseconds since the epoch.
    pub started_at_ms: u64,
    /// Milliseconds since the epoch.
    pub finished_at_ms: u64,
}

/// What a bundle came to. Every text is redacted.
#[derive(Clone, Debug, PartialEq)]
pub struct Conclusion {
    /// `None`: there is no verdict, and the trial is void.
    pub passed: Option<bool>,
    /// Why there is none.
    pub failure: Option<String>,
    /// Every planned record.
    pub validations: Vec<Validation>,
    /// What else a person should know.
    pub diagnostics: Vec<String>,
}

impl Reading {
    /// The end: what was read, and how the process ended, become records and a verdict.
    pub fn conclude(mut self, plan: &Plan<'_>, exit: Exit, redactor: &Redactor) -> Conclusion {
        let name = plan.check.name.as_str();
        if plan.check.manifest.is_none() {
            self.synthesize(exit);
        }
        let trouble = self.trouble(plan, exit);
        let verdict = self.verdict.as_ref().is_some_and(|verdict| verdict.passed);
        let failed = self.newest.values().any(|record| record.status == ValidationStatus::Failed);
        let reason = match &trouble {
            Some(_) if exit.timed_out => outcome::validator_timed_out(name, CHECK_TIMEOUT_MS),
            Some(reason) => outcome::validator_failed(name, &redactor.text(reason)),
            None => String::new(),
        };
        let mut diagnostics = Vec::new();
        if self.unplanned > 0 {
            diagnostics.push(format!(
                "The validator {name} printed {} records of checks that its manifest does not name; they were left out",
                self.unplanned
            ));
        }
        let mut validations = plan.records(self.newest, ValidationStatus::Error, &reason, redactor);
        for validation in &mut validations {
            validation.exit_code = (!exit.no_node).then_some(exit.code.into());
        }
        Conclusion {
            passed: trouble.is_none().then_some(verdict && !failed),
            failure: trouble.is_some().then_some(reason),
            validations,
            diagnostics,
        }
    }

    /// A bundle without a manifest prints no records of its own: its verdict is its one record.
    fn synthesize(&mut self, exit: Exit) {
        let id = "code:0".to_owned();
        let Some(verdict) = self.verdict.as_ref().filter(|_| !self.newest.contains_key(&id)) else {
            return;
        };
        let record = Record {
            id: id.clone(),
            status: if verdict.passed {
                ValidationStatus::Passed
            } else {
                ValidationStatus::Failed
            },
            message: verdict.message.clone().unwrap_or_default(),
            started_at: Some(Number::from(exit.started_at_ms)),
            duration_ms: Some(Number::from(exit.finished_at_ms.saturating_sub(exit.started_at_ms))),
            ..Record::default()
        };
        self.newest.insert(id, record);
    }

    /// Why there is no verdict, if there is none.
    fn trouble(&self, plan: &Plan<'_>, exit: Exit) -> Option<String> {
        if exit.timed_out {
            return Some(String::new());
        }
        if exit.no_node {
            return Some("there is no node in the sandbox".to_owned());
        }
        let entries = plan.entries();
        let named = |id: &str| entries.iter().find(|(known, _)| known == id).map_or("", |(_, name)| *name);
        if let Some(record) = self.newest.values().find(|record| record.status == ValidationStatus::Error) {
            return Some(match record.message.as_str() {
                "" => format!("{} could not finish", named(&record.id)),
                message => format!("{} could not finish: {message}", named(&record.id)),
            });
        }
        if exit.code != 0 {
            return Some(format!("it exited with status {}", exit.code));
        }
        if let Some(reason) = &self.unreadable {
            return Some(reason.clone());
        }
        let unfinished = entries.iter().find(|(id, _)| !self.newest.get(id).is_some_and(Record::is_finished));
        if let Some((_, name)) = unfinished.filter(|_| plan.check.manifest.is_some()) {
            return Some(format!("it ended before {name} had a result"));
        }
        self.verdict.is_none().then(|| "it ended without a verdict".to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{
        evidence::ValueState,
        request::{CodeValidator, Judged, JudgedValidator, ManifestEntry},
    };

    fn check(names: Option<&[&str]>, capture: Option<bool>) -> Check {
        let entry = |(index, name): (u64, &&str)| ManifestEntry {
            index,
            name: (*name).to_owned(),
        };
        Check {
            capture,
            manifest: names.map(|names| (0..).zip(names).map(entry).collect()),
            name: "checks".into(),
            source: String::new(),
        }
    }

    fn code(check: Check) -> Validator {
        Validator::Code(CodeValidator { check, source_files: None })
    }

    const DONE: Exit = Exit {
        code: 0,
        timed_out: false,
        no_node: false,
        started_at_ms: 1_000,
        finished_at_ms: 1_500,
    };

    fn concluded(validator: &Validator, lines: &[&str], exit: Exit) -> Conclusion {
        let plan = &plans(validator)[0];
        let mut reading = Reading::new(plan);
        lines.iter().for_each(|line| reading.line(line.as_bytes()));
        reading.conclude(plan, exit, &Redactor::new(["hunter2-hunter2"]))
    }

    const PASSED: &str = r#"SPHYNX_VALIDATOR_RESULT={"passed":true}"#;
    const FAILED: &str = r#"SPHYNX_VALIDATOR_RESULT={"passed":false,"message":"no"}"#;
    const A: &str = r#"SPHYNX_VALIDATION={"id":"code:0","status":"passed","message":"yes"}"#;
    const B: &str = r#"SPHYNX_VALIDATION={"id":"code:1","status":"failed","message":"no"}"#;
    const B_PASSED: &str = r#"SPHYNX_VALIDATION={"id":"code:1","status":"passed"}"#;
    const B_ERROR: &str = r#"SPHYNX_VALIDATION={"id":"code:1","status":"error","message":"boom hunter2-hunter2"}"#;
    const B_RUNS: &str = r#"SPHYNX_VALIDATION={"id":"code:1","status":"running"}"#;

    #[test]
    fn verdicts() {
        let two = code(check(Some(&["a", "b"]), None));
        let old = code(check(None, None));
        let exit = |code| Exit { code, ..DONE };
        let late = Exit {
            timed_out: true,
            ..exit(137)
        };
        let no_node = Exit {
            no_node: true,
            ..exit(127)
        };
        for (validator, lines, exit, expected, statuses) in [
            (&two, &[A, B_PASSED, PASSED][..], DONE, Ok(true), "passed passed"),
            (&two, &[A, B_RUNS, B, FAILED], DONE, Ok(false), "passed failed"),
            (
                &two,
                &["noise", " SPHYNX_VALIDATION={", B, "\u{1}", A, "x", FAILED],
                DONE,
                Ok(false),
                "passed failed",
            ),
            // The newest of an id counts, and the last verdict; a failed record is never outvoted, nor is a verdict.
            (&two, &[A, B, B_PASSED, FAILED, PASSED], DONE, Ok(true), "passed passed"),
            (&two, &[A, B, PASSED], DONE, Ok(false), "passed failed"),
            (&two, &[A, B_PASSED, FAILED], DONE, Ok(false), "passed passed"),
            (
                &two,
                &[A, B_ERROR, FAILED],
                exit(1),
                Err("The validator checks gave no verdict: b could not finish: boom [redacted]"),
                "passed error",
            ),
            (
                &two,
                &[A, B_PASSED, PASSED],
                exit(3),
                Err("The validator checks gave no verdict: it exited with status 3"),
                "passed passed",
            ),
            (
                &two,
                &[A, B_RUNS, PASSED],
                DONE,
                Err("The validator checks gave no verdict: it ended before b had a result"),
                "passed error",
            ),
            (
                &two,
                &[],
                DONE,
                Err("The validator checks gave no verdict: it ended before a had a result"),
                "error error",
            ),
            (
                &two,
                &[A, B_PASSED],
                DONE,
                Err("The validator checks gave no verdict: it ended without a verdict"),
                "passed passed",
            ),
            (
                &two,
                &[A],
                late,
                Err("The validator checks ran past its limit of 5m"),
                "passed error",
            ),
            (
                &two,
                &[],
                no_node,
                Err("The validator checks gave no verdict: there is no node in the sandbox"),
                "error error",
            ),
            (
                &two,
                &[A, B_PASSED, "SPHYNX_VALIDATION={", PASSED],
                DONE,
                Err(
                    "The validator checks gave no verdict: it printed a record that cannot be read: EOF while parsing an object at line 1 column 1",
                ),
                "passed passed",
            ),
            (
                &two,
                &[A, B_PASSED, r#"SPHYNX_VALIDATOR_RESULT={"passed":1}"#, PASSED],
                DONE,
                Err(
                    "The validator checks gave no verdict: it printed a verdict that cannot be read: invalid type: integer `1`, expected a boolean at line 1 column 11",
                ),
                "passed passed",
            ),
            (&old, &[PASSED], DONE, Ok(true), "passed"),
            (&old, &[FAILED, "\r"], DONE, Ok(false), "failed"),
            (&old, &[A, PASSED], DONE, Ok(true), "passed"),
            (
                &old,
                &[],
                DONE,
                Err("The validator checks gave no verdict: it ended without a verdict"),
                "error",
            ),
            (
                &old,
                &[PASSED],
                exit(137),
                Err("The validator checks gave no verdict: it exited with status 137"),
                "passed",
            ),
        ] {
            let end = concluded(validator, lines, exit);
            assert_eq!((end.passed, end.failure.as_deref()), (expected.ok(), expected.err()), "{lines:?}");
            let found: Vec<_> = end.validations.iter().map(|validation| validation.status.name()).collect();
            assert_eq!(found.join(" "), statuses, "{lines:?}");
            assert_eq!(end.diagnostics, [""; 0], "{lines:?}");
        }
    }

    #[test]
    fn records_are_what_the_plan_says() {
        let text = |text: &str| format!(r#"{{"text":"{text}","format":"text","state":"captured","truncated":false}}"#);
        let long = "y".repeat(100_000);
        let record = format!(
            r#"SPHYNX_VALIDATION={{"id":"code:0","name":"forged","kind":"judge","index":7,"status":"passed","message":"m","exitCode":9,
            "input":{0},"output":{1},"durationMs":12.6,"startedAt":5,"calls":[{{"index":0,"method":"exec","startedAt":1,"durationMs":-3,"input":{0},"output":{0},"error":null}}],
            "logs":[{{"index":0,"at":1,"level":"stdout","value":{0}}}]}}"#,
            text("hunter2-hunter2 and more"),
            text(&long)
        )
        .replace('\n', "");
        let validator = |capture| code(check(Some(&["a"]), capture));
        let end = concluded(
            &validator(None),
            &[&record, r#"SPHYNX_VALIDATION={"id":"judge:0","status":"failed"}"#, PASSED],
            DONE,
        );
        let found = &end.validations[0];
        assert_eq!((end.passed, end.diagnostics.len(), end.validations.len()), (Some(true), 1, 1));
        assert_eq!(
            (found.id.as_str(), found.name.as_str(), found.kind, found.index, found.exit_code),
            ("code:0", "a", ValidationKind::Code, 0, Some(0))
        );
        assert_eq!(
            (found.duration_ms, found.calls[0].duration_ms),
            (Some(Number(13.0)), Some(Number(0.0)))
        );
        assert_eq!(found.input.state, ValueState::Unavailable, "it would tell what was prepared");
        assert_eq!(
            (found.output.text.len(), found.output.truncated, found.truncated),
            (16_000, true, true)
        );
        assert_eq!(found.logs[0].value.text, "[redacted] and more");

        let end = concluded(&validator(Some(false)), &[&record, PASSED], DONE);
        let found = &end.validations[0];
        let states = [found.input.state, found.output.state, found.calls[0].output.state];
        assert_eq!(
            (states, found.logs.len(), found.message.as_str()),
            ([ValueState::Disabled; 3], 0, "m")
        );
        assert!(!serde_json::to_string(&end.validations).unwrap().contains("more"));

        let huge = format!("SPHYNX_VALIDATION={}", " ".repeat(MAX_FRAME_BYTES) + "{}");
        let end = concluded(&validator(None), &[&huge, A, PASSED], DONE);
        assert!(end.failure.unwrap().contains("the limit is 2097152"));
    }

    #[test]
    fn bundles_of_a_judged_validator_are_groups() {
        let judged = |checks| {
            Validator::Judged(JudgedValidator {
                capture: Some(false),
                checks,
                judges: Vec::new(),
                kind: Judged::Judged,
                name: "all".into(),
                source_files: None,
            })
        };
        let ids = |validator: &Validator| {
            let records = plans(validator)
                .iter()
                .flat_map(|plan| plan.skipped(&Redactor::default()))
                .collect::<Vec<_>>();
            assert!(
                records
                    .iter()
                    .all(|record| record.status == ValidationStatus::Skipped && record.output.state == ValueState::Disabled)
            );
            assert!((0..).zip(&records).all(|(index, record)| record.index == index));
            records.into_iter().map(|record| record.id).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            ids(&judged(vec![check(Some(&["a", "b"]), None), check(None, Some(true))])),
            "group:0:code:0 group:0:code:1 group:1:code:0"
        );
        assert_eq!(ids(&judged(vec![check(Some(&["a"]), None)])), "code:0");
        assert_eq!(ids(&judged(Vec::new())), "");
    }
}
