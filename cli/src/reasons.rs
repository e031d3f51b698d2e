//! Why trials failed, in a line each: the check that said no, from the trial's evidence.

use std::collections::BTreeMap;

use evalgrid_domain::evidence::{TrialEvidence, Validation, ValidationStatus, ValidationValue, ValueState};
use evalgrid_proto::v1::{Batch, GetRunRequest, JudgeVerdict, Judged, ObjectRef, Run, Trial, TrialProgress, TrialStatus, evidence::Place};

use crate::client::Batches;

/// Case, variant and ordinal of a trial.
pub(crate) type TrialKey = (u32, u32, u32);
/// What is known; a trial that is not in it failed for a reason that could not be read.
pub(crate) type Reasons = BTreeMap<TrialKey, String>;

/// Evidence that is fetched for one trial. Almost all evidence is smaller; what is larger can be read with `batch get --json`.
const EVIDENCE: u64 = 4 << 20;
/// Evidence that is fetched for a whole batch, so that a table stays a matter of seconds.
const ALL_EVIDENCE: u64 = 32 << 20;
/// Longest command, or line of output, within a reason.
const PART: usize = 100;

/// The reasons of all failed trials of a batch.
pub(crate) async fn of(batches: &mut Batches, batch: &Batch) -> Reasons {
    let mut reasons = Reasons::new();
    let mut left = ALL_EVIDENCE;
    for run in &batch.runs {
        for trial in run.trials.iter().filter(|trial| trial.status() == TrialStatus::Failed) {
            let evidence = fetched(batches, place(trial), &mut left).await;
            let mut why = evidence.and_then(|bytes| reason(&bytes));
            if let (None, Some(judged)) = (&why, said_no(trial)) {
                let record = fetched(batches, record_of(judged), &mut left).await;
                why = Some(picked(judged, record.as_deref()));
            }
            reasons.extend(why.map(|reason| (key(run, trial), reason)));
        }
    }
    reasons
}

/// The reasons of trials that have just failed: one small call for each of their runs, and nothing that is not in its answer.
pub(crate) async fn of_ended(batches: &mut Batches, runs: &BTreeMap<(u32, u32), String>, ended: &[&TrialProgress]) -> Reasons {
    let mut wanted: Vec<&String> = ended
        .iter()
        .filter(|trial| trial.status() == TrialStatus::Failed)
        .filter_map(|trial| runs.get(&(trial.case_index, trial.variant_index)))
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut reasons = Reasons::new();
    for id in wanted {
        // A reason that is not there now is there at the end.
        let Ok(answer) = batches.get_run(GetRunRequest { id: id.clone() }).await else {
            continue;
        };
        let batch = answer.into_inner().batch.unwrap_or_default();
        for run in &batch.runs {
            for trial in run.trials.iter().filter(|trial| trial.status() == TrialStatus::Failed) {
                let checks = inline(place(trial)).and_then(reason);
                let judged = || said_no(trial).map(|judged| picked(judged, inline(record_of(judged))));
                reasons.extend(checks.or_else(judged).map(|reason| (key(run, trial), reason)));
            }
        }
    }
    reasons
}

fn key(run: &Run, trial: &Trial) -> TrialKey {
    (run.case_index, run.variant_index, trial.ordinal)
}

fn place(trial: &Trial) -> Option<&Place> {
    trial.outcome.as_ref()?.evidence.as_ref()?.place.as_ref()
}

/// The record of what a judge said.
fn record_of(judged: &Judged) -> Option<&Place> {
    judged.validation.as_ref()?.place.as_ref()
}

fn inline(place: Option<&Place>) -> Option<&[u8]> {
    match place {
        Some(Place::Inline(bytes)) => Some(bytes),
        _ => None,
    }
}

/// What is there, or may still be fetched.
async fn fetched(batches: &mut Batches, place: Option<&Place>, left: &mut u64) -> Option<Vec<u8>> {
    match place? {
        Place::Inline(bytes) => Some(bytes.to_vec()),
        Place::Object(object) if object.size <= EVIDENCE.min(*left) => {
            *left -= object.size;
            object_bytes(batches, object).await
        }
        Place::Object(_) => None,
    }
}

pub(crate) async fn object_bytes(batches: &mut Batches, object: &ObjectRef) -> Option<Vec<u8>> {
    let mut chunks = batches.get_object(object.clone()).await.ok()?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.ok()? {
        if bytes.len() + chunk.data.len() > object.size as usize {
            return None;
        }
        bytes.extend_from_slice(&chunk.data);
    }
    Some(bytes)
}

/// The reason in a trial's evidence.
fn reason(evidence: &[u8]) -> Option<String> {
    let evidence: TrialEvidence = serde_json::from_slice(evidence).ok()?;
    let failed = |validation: &&Validation| matches!(validation.status, ValidationStatus::Failed | ValidationStatus::Error);
    let validation = evidence.validations.iter().find(failed);
    let step = evidence.verify_steps.iter().find(|step| step.exit_code != 0);
    let what = match (step, validation) {
        (Some(step), _) => format!("`{}` exited with {}", cut(&step.command), step.exit_code),
        (None, Some(validation)) => match (validation.exit_code, captured(&validation.input)) {
            (Some(code), Some(command)) => format!("`{}` exited with {code}", cut(command)),
            _ if validation.message.trim().is_empty() => format!("the check {} said no, without a reason", cut(&validation.name)),
            _ => validation.message.clone(),
        },
        (None, None) => return None,
    };
    Some(match validation.and_then(last_line) {
        Some(line) => format!("{what}: {}", cut(line)),
        None => what,
    })
}

/// The first judge that said no.
fn said_no(trial: &Trial) -> Option<&Judged> {
    let mut judges = trial.outcome.as_ref()?.judged.iter();
    judges.find(|judged| judged.verdict() == JudgeVerdict::Failed)
}

/// What a judge picked; why, and what passes, where its record is at hand.
fn picked(judged: &Judged, record: Option<&[u8]>) -> String {
    let record: Option<Validation> = record.and_then(|bytes| serde_json::from_slice(bytes).ok());
    let picked = cut(judged.choice.as_deref().unwrap_or_default());
    let score = judged.score.map(|score| format!("score {score}"));
    let judgment = record.and_then(|record| record.judgment);
    let threshold = judgment.as_ref().map(|judgment| format!("passes from {}", judgment.threshold.0));
    let numbers: Vec<String> = score.into_iter().chain(threshold).collect();
    let numbers = match numbers.is_empty() {
        true => String::new(),
        false => format!(" ({})", numbers.join(", ")),
    };
    let said = format!("the judge {} picked {picked}{numbers}", cut(&judged.name));
    judgment.map_or(said.clone(), |judgment| format!("{said}: {}", cut(&judgment.reason)))
}

/// The last line of what the check printed, errors first.
fn last_line(validation: &Validation) -> Option<&str> {
    let errors = validation.logs.iter().rev().map(|log| &log.value);
    let printed = errors.chain([&validation.output]).filter_map(captured);
    printed
        .flat_map(|text| text.lines().rev())
        .map(str::trim)
        .find(|line| !line.is_empty())
}

fn captured(value: &ValidationValue) -> Option<&str> {
    (value.state == ValueState::Captured && !value.text.is_empty()).then_some(value.text.as_str())
}

fn cut(text: &str) -> String {
    crate::output::short(text.trim(), PART)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_domain::evidence::{Judgment, LogLevel, ValidationKind, ValidationLog, VerifyStep};
    use evalgrid_proto::v1::{Evidence, TrialOutcome};

    use super::*;

    fn validation(verify: &str, exit_code: Option<i64>, stdout: &str, stderr: &str) -> Validation {
        let log = |text: &str| ValidationLog {
            at: 0.into(),
            index: 0,
            level: LogLevel::Stderr,
            value: ValidationValue::text(text),
        };
        Validation {
            calls: Vec::new(),
            duration_ms: None,
            error: None,
            exit_code,
            id: "command:0".into(),
            index: 0,
            input: ValidationValue::text(verify),
            judgment: None,
            kind: ValidationKind::Command,
            logs: (!stderr.is_empty()).then(|| log(stderr)).into_iter().collect(),
            message: "It is refused.".into(),
            metadata: None,
            name: "verify command".into(),
            output: ValidationValue::text(stdout),
            started_at: None,
            status: ValidationStatus::Failed,
            truncated: false,
        }
    }

    #[test]
    fn reasons_are_what_the_check_said() {
        fn check(validations: Vec<Validation>, steps: &[(&str, i64)], expected: Option<&str>) {
            let steps = steps.iter().map(|(command, exit_code)| VerifyStep {
                command: (*command).to_owned(),
                exit_code: *exit_code,
            });
            let evidence = TrialEvidence {
                validations,
                verify_steps: steps.collect(),
                ..TrialEvidence::default()
            };
            assert_eq!(reason(&serde_json::to_vec(&evidence).unwrap()).as_deref(), expected);
        }
        check(vec![], &[], None);
        check(vec![validation("false", Some(1), "", "")], &[], Some("`false` exited with 1"));
        check(
            vec![validation("make test", Some(2), "one\ntwo\n\n", "")],
            &[],
            Some("`make test` exited with 2: two"),
        );
        check(
            vec![validation("cat x", Some(1), "one\n", "cat: x: No such file\n")],
            &[],
            Some("`cat x` exited with 1: cat: x: No such file"),
        );
        check(
            vec![validation("true && b", Some(3), "", "")],
            &[("true", 0), ("b", 3)],
            Some("`b` exited with 3"),
        );
        check(vec![validation("a | b", None, "", "")], &[], Some("It is refused."));
        let long = "x".repeat(200);
        let cut = format!("`{}…` exited with 1", "x".repeat(99));
        check(vec![validation(&long, Some(1), "", "")], &[], Some(&cut));
    }

    #[test]
    fn a_judge_that_said_no_is_a_reason() {
        let mut record = validation("", None, "", "");
        record.judgment = Some(Judgment {
            choice: Some("rude".into()),
            duration_ms: 1,
            error: None,
            evaluator: "openai".into(),
            model: "m".into(),
            name: "tone".into(),
            reason: "It is curt.".into(),
            score: Some(0.5.into()),
            threshold: 1.into(),
            usage: None,
        });
        let place = Place::Inline(serde_json::to_vec(&record).unwrap().into());
        let judge = |name: &str, verdict: JudgeVerdict, place: Option<Place>| Judged {
            name: name.into(),
            verdict: verdict.into(),
            choice: Some("rude".into()),
            score: Some(0.5),
            validation: place.map(|place| Evidence { place: Some(place) }),
            ..Judged::default()
        };
        let check = |judges: Vec<Judged>, expected: Option<&str>| {
            let outcome = TrialOutcome {
                judged: judges,
                ..TrialOutcome::default()
            };
            let trial = Trial {
                outcome: Some(outcome),
                ..Trial::default()
            };
            let said = said_no(&trial).map(|judged| picked(judged, inline(record_of(judged))));
            assert_eq!(said.as_deref(), expected);
        };
        let passed = || judge("length", JudgeVerdict::Passed, None);
        check(vec![], None);
        check(vec![passed()], None);
        check(
            vec![passed(), judge("tone", JudgeVerdict::Failed, None)],
            Some("the judge tone picked rude (score 0.5)"),
        );
        let whole = judge("tone", JudgeVerdict::Failed, Some(place));
        check(
            vec![whole],
            Some("the judge tone picked rude (score 0.5, passes from 1): It is curt."),
        );
    }

    #[test]
    fn what_is_no_evidence_has_no_reason() {
        assert_eq!(reason(b"{"), None);
    }
}
