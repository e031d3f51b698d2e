//! What a trial that has ended is known by: how much of its evidence there is, where its time went, and the files that were kept.

use evalgrid_domain::{
    evidence::{TrialEvidence, Validation},
    ids::TrialId,
    outcome::humanise_duration,
    timing::{Span, Timing},
};
use evalgrid_proto::v1::{Batch, Before, GetRunRequest, Judged, ObjectRef, TrialOutcome, TrialStatus, evidence::Place};

use crate::{Failure, client, output, reasons, regrade};

/// Changed files and kept ones that are listed; the API has them all.
const MAX_LISTED: usize = 20;

/// A trial, what it was, and its evidence; `None` where it has none yet.
async fn of(batches: &mut client::Batches, id: &str) -> Result<Option<Found>, Failure> {
    let no_trial = || {
        Failure::usage(
            format!("{:?} is not the id of a trial", output::short(id, 60)),
            "Trials' ids begin with trial_.",
        )
    };
    let run = id.parse::<TrialId>().map_err(|_| no_trial())?.run_id().to_string();
    let found = batches.get_run(GetRunRequest { id: run }).await;
    let found = found.map_err(|status| client::refused(&status))?.into_inner();
    let batch = found.batch.unwrap_or_default();
    let head = head(&batch, id);
    let trials = batch.runs.into_iter().flat_map(|run| run.trials);
    let Some(outcome) = trials.into_iter().find(|trial| trial.id == id).and_then(|trial| trial.outcome) else {
        return Ok(None);
    };
    let place = outcome.evidence.as_ref().and_then(|evidence| evidence.place.as_ref());
    let evidence = match place {
        None if outcome.judged.is_empty() => return Ok(None),
        None => TrialEvidence::default(),
        Some(place) => {
            let bytes = stored(batches, place).await?;
            serde_json::from_slice(&bytes)
                .map_err(|error| Failure::new(format!("the trial's evidence cannot be read: {error}"), "See the server's log."))?
        }
    };
    Ok(Some(Found { head, evidence, outcome }))
}

/// What is known of a trial that has ended.
struct Found {
    head: Head,
    evidence: TrialEvidence,
    outcome: TrialOutcome,
}

async fn stored(batches: &mut client::Batches, place: &Place) -> Result<Vec<u8>, Failure> {
    match place {
        Place::Inline(bytes) => Ok(bytes.to_vec()),
        Place::Object(object) => bytes(batches, object).await,
    }
}

/// Lines that say which trial it is and how it ended.
type Head = Vec<(String, String)>;

fn head(batch: &Batch, id: &str) -> Head {
    let mut runs = batch.runs.iter().flat_map(|run| run.trials.iter().map(move |trial| (run, trial)));
    let Some((run, trial)) = runs.find(|(_, trial)| trial.id == id) else {
        return Head::new();
    };
    let case = batch.cases.get(run.case_index as usize);
    let variant = batch.variants.get(run.variant_index as usize);
    let status = match trial.status() {
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void => "void",
        TrialStatus::Running => "running",
        TrialStatus::Queued | TrialStatus::Unspecified => "queued",
    };
    let mut lines = vec![("trial".to_owned(), id.to_owned()), ("batch".to_owned(), batch.id.clone())];
    lines.extend(case.map(|case| ("case".to_owned(), format!("{}, trial {}", case.id, trial.ordinal))));
    lines.extend(variant.map(|variant| {
        let profile = variant.profile.as_ref().map(|profile| format!(", profile {profile}"));
        let (harness, model) = (&variant.harness, &variant.model);
        (
            "variant".to_owned(),
            format!("{harness} {model} on {}{}", variant.provider, profile.unwrap_or_default()),
        )
    }));
    lines.push(("status".to_owned(), status.to_owned()));
    let failure = trial.outcome.as_ref().and_then(|outcome| outcome.failure.clone());
    lines.extend(failure.map(|failure| ("failure".to_owned(), failure)));
    lines
}

async fn bytes(batches: &mut client::Batches, object: &ObjectRef) -> Result<Vec<u8>, Failure> {
    let broken = || {
        Failure::new(
            "what was stored of the trial could not be read",
            "Try again; see the server's log if it stays so.",
        )
    };
    reasons::object_bytes(batches, object).await.ok_or_else(broken)
}

/// A file that was kept.
pub(super) async fn artifact(batches: &mut client::Batches, id: &str, path: &str) -> Result<Vec<u8>, Failure> {
    let evidence = of(batches, id).await?.map(|found| found.evidence).unwrap_or_default();
    let Some(artifact) = evidence.artifacts.iter().find(|artifact| artifact.path == path) else {
        let known = evidence
            .artifacts
            .iter()
            .take(MAX_LISTED)
            .map(|artifact| output::plain(&artifact.path));
        let known = known.collect::<Vec<_>>().join(", ");
        return Err(Failure::usage(
            format!("nothing was kept of the trial under {:?}", output::short(path, 200)),
            match known.is_empty() {
                true => "No file of it was kept.".to_owned(),
                false => format!("Kept were: {known}"),
            },
        ));
    };
    if let Some(text) = &artifact.text {
        return Ok(text.clone().into_bytes());
    }
    let object = ObjectRef {
        sha256: artifact.sha256.clone(),
        size: artifact.byte_size,
    };
    bytes(batches, &object).await
}

/// For people; `None` where there is nothing yet. `headed`: with what the operator's report of a trial in memory says, too.
pub(super) async fn text(batches: &mut client::Batches, id: &str, headed: bool) -> Result<Option<String>, Failure> {
    let Some(found) = of(batches, id).await? else { return Ok(None) };
    let mut lines = if headed { found.head } else { Head::new() };
    for judged in &found.outcome.judged {
        let place = judged.validation.as_ref().and_then(|validation| validation.place.as_ref());
        // Without its record a judge still has a verdict.
        let record: Option<Validation> = match place {
            Some(place) => serde_json::from_slice(&stored(batches, place).await?).ok(),
            None => None,
        };
        lines.push(("judge".to_owned(), judge(judged, record.as_ref())));
    }
    lines.extend(found.outcome.before.iter().flat_map(before));
    Ok(Some(shown(lines, &found.evidence)))
}

/// What a judge said, and why.
fn judge(judged: &Judged, record: Option<&Validation>) -> String {
    let judgment = record.and_then(|record| record.judgment.as_ref());
    let threshold = judgment.filter(|_| judged.score.is_some());
    let threshold = threshold
        .map(|judgment| format!(", passes from {}", judgment.threshold.0))
        .unwrap_or_default();
    let by = judgment
        .map(|judgment| format!(", {} {}", judgment.evaluator, judgment.model))
        .unwrap_or_default();
    let why = match (&judged.choice, judgment) {
        (None, _) => judged.error.clone(),
        (Some(_), Some(judgment)) => judgment.reason.clone(),
        (Some(_), None) => "there is no record of its reason".to_owned(),
    };
    format!("{}: {}{threshold}{by}: {why}", judged.name, regrade::said(judged))
}

/// What a trial was before it was regraded.
fn before(before: &Before) -> Head {
    let status = match before.status() {
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void | TrialStatus::Queued | TrialStatus::Running | TrialStatus::Unspecified => "void",
    };
    let judges = before
        .judged
        .iter()
        .map(|judged| format!("{}: {}", judged.name, regrade::said(judged)));
    let said = std::iter::once(status.to_owned()).chain(judges);
    said.map(|line| ("before the regrade".to_owned(), line)).collect()
}

fn shown(mut lines: Head, evidence: &TrialEvidence) -> String {
    lines.extend(evidence.validations.iter().map(|check| {
        let said = format!("{}: {} {}", check.name, check.status.name(), check.message);
        ("check".to_owned(), said.trim_end().to_owned())
    }));
    let channels = evidence.coverage.iter().flat_map(|coverage| coverage.channels());
    for (name, channel) in channels.filter(|(_, channel)| !channel.is_complete()) {
        lines.push(("incomplete".into(), format!("{name}: {}", channel.reason().unwrap_or_default())));
    }
    if evidence
        .coverage
        .as_ref()
        .is_some_and(|coverage| coverage.channels().iter().all(|(_, channel)| channel.is_complete()))
    {
        lines.push(("evidence".into(), "complete".into()));
    }
    lines.extend(evidence.diagnostics.iter().map(|text| ("diagnostic".to_owned(), text.clone())));
    for turn in &evidence.file_changes {
        let changes = turn.changes.iter().take(MAX_LISTED);
        lines.extend(changes.map(|change| (format!("turn {}", turn.turn), format!("{} {}", change.kind.name(), change.path))));
        let more = turn.changes.len().saturating_sub(MAX_LISTED) as u64 + turn.omitted;
        if more > 0 {
            lines.push((format!("turn {}", turn.turn), format!("and {more} more")));
        }
    }
    lines.extend(
        evidence
            .artifacts
            .iter()
            .take(MAX_LISTED)
            .map(|artifact| ("kept".to_owned(), artifact.path.clone())),
    );
    let row = |(name, value): &(String, String)| format!("{name:22}{}\n", output::plain(value));
    let mut text: String = lines.iter().map(row).collect();
    if let Some(timing) = &evidence.timing {
        tree(timing, &mut text);
    }
    text
}

fn tree(timing: &Timing, text: &mut String) {
    fn add(span: &Span, depth: usize, text: &mut String) {
        let name = format!("{:depth$}{}", "", output::plain(&span.name), depth = 2 * depth);
        let failed = if span.failed { "  failed" } else { "" };
        let (from, took) = (clock(span.offset_ms), clock(span.duration_ms));
        text.push_str(&format!("{name:32}{from:>12}{took:>12}{failed}\n"));
        span.parts.iter().for_each(|part| add(part, depth + 1, text));
    }
    text.push_str(&format!("{:32}{:>12}{:>12}\n", "time", "from", "took"));
    timing.spans.iter().for_each(|span| add(span, 1, text));
    if timing.omitted > 0 {
        text.push_str(&format!("  … and {}\n", output::count(timing.omitted, "step")));
    }
}

/// Short ones to the millisecond.
fn clock(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{ms} ms"),
        _ => humanise_duration(ms / 1000 * 1000),
    }
}

#[cfg(test)]
mod tests {
    use evalgrid_domain::{
        coverage::{Channel, Coverage},
        evidence::{Judgment, ValidationKind, ValidationStatus, ValidationValue},
    };
    use evalgrid_proto::v1::JudgeVerdict;

    use super::*;

    #[test]
    fn what_is_shown() {
        let evidence = TrialEvidence {
            diagnostics: vec!["odd\u{1b}[1m".into()],
            coverage: Some(Coverage {
                usage: Channel::unavailable("none was reported"),
                ..Coverage::default()
            }),
            timing: Some(Timing {
                spans: vec![Span {
                    name: "turns".into(),
                    offset_ms: 5,
                    duration_ms: 65_000,
                    failed: true,
                    parts: vec![Span {
                        name: "turn.1".into(),
                        offset_ms: 5,
                        duration_ms: 9_999,
                        ..Span::default()
                    }],
                }],
                ..Timing::default()
            }),
            ..TrialEvidence::default()
        };
        let text = shown(Head::new(), &evidence);
        for line in [
            "incomplete            usage: none was reported".to_owned(),
            format!("{:32}{:>12}{:>12}  failed", "  turns", "5 ms", "1m 5s"),
            format!("{:32}{:>12}{:>12}", "    turn.1", "5 ms", "9999 ms"),
        ] {
            assert!(text.lines().any(|known| known == line), "{line:?} in {text}");
        }
        assert!(!text.contains('\u{1b}'), "a terminal is not told what to do");
    }

    fn record(choice: Option<&str>) -> Validation {
        Validation {
            calls: Vec::new(),
            duration_ms: None,
            error: None,
            exit_code: None,
            id: "judge:0".into(),
            index: 0,
            input: ValidationValue::unavailable(),
            judgment: Some(Judgment {
                choice: choice.map(str::to_owned),
                duration_ms: 5,
                error: None,
                evaluator: "openai".into(),
                model: "m".into(),
                name: "tone".into(),
                reason: "It is curt.".into(),
                score: None,
                threshold: 0.5.into(),
                usage: None,
            }),
            kind: ValidationKind::Judge,
            logs: Vec::new(),
            message: String::new(),
            metadata: None,
            name: "tone".into(),
            output: ValidationValue::unavailable(),
            started_at: None,
            status: ValidationStatus::Failed,
            truncated: false,
        }
    }

    #[test]
    fn what_judges_said() {
        let judged = |choice: Option<&str>, verdict: JudgeVerdict, error: &str| Judged {
            name: "tone".into(),
            choice: choice.map(str::to_owned),
            score: choice.map(|_| 0.25),
            verdict: verdict.into(),
            error: error.into(),
            ..Judged::default()
        };
        let rude = judged(Some("rude"), JudgeVerdict::Failed, "");
        let error = judged(None, JudgeVerdict::Error, "OPENAI_API_KEY is not set");
        for (judged, record, expected) in [
            (
                &rude,
                Some(record(Some("rude"))),
                "tone: failed with rude (0.25), passes from 0.5, openai m: It is curt.",
            ),
            (&rude, None, "tone: failed with rude (0.25): there is no record of its reason"),
            (&error, Some(record(None)), "tone: error, openai m: OPENAI_API_KEY is not set"),
            (&error, None, "tone: error: OPENAI_API_KEY is not set"),
        ] {
            assert_eq!(judge(judged, record.as_ref()), expected);
        }
        let was = Before {
            status: TrialStatus::Passed.into(),
            judged: vec![rude],
        };
        let lines: Vec<_> = before(&was).into_iter().map(|(_, line)| line).collect();
        assert_eq!(lines, ["passed", "tone: failed with rude (0.25)"]);
    }
}
