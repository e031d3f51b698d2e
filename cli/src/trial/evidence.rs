//! What a trial that has ended is known by: how much of its evidence there is, where its time went, and the files that were kept.

use evalgrid_domain::{
    evidence::TrialEvidence,
    ids::TrialId,
    outcome::humanise_duration,
    timing::{Span, Timing},
};
use evalgrid_proto::v1::{Batch, GetRunRequest, ObjectRef, TrialStatus, evidence::Place};

use crate::{Failure, client, output, reasons};

/// Changed files and kept ones that are listed; the API has them all.
const MAX_LISTED: usize = 20;

/// A trial, what it was, and its evidence; `None` where it has none yet.
async fn of(batches: &mut client::Batches, id: &str) -> Result<Option<(Head, TrialEvidence)>, Failure> {
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
    let outcome = trials.into_iter().find(|trial| trial.id == id).and_then(|trial| trial.outcome);
    let bytes = match outcome.and_then(|outcome| outcome.evidence?.place) {
        None => return Ok(None),
        Some(Place::Inline(bytes)) => bytes.to_vec(),
        Some(Place::Object(object)) => bytes(batches, &object).await?,
    };
    serde_json::from_slice(&bytes)
        .map(|evidence| Some((head, evidence)))
        .map_err(|error| Failure::new(format!("the trial's evidence cannot be read: {error}"), "See the server's log."))
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
    let evidence = of(batches, id).await?.map(|(_, evidence)| evidence).unwrap_or_default();
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
    let found = of(batches, id).await?;
    Ok(found.map(|(head, evidence)| shown(if headed { head } else { Head::new() }, &evidence)))
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
    use evalgrid_domain::coverage::{Channel, Coverage};

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
}
