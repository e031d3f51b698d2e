//! What a regrade is asked with, and what it has changed: verdicts of trials, and of their judges.

use std::path::Path;

use bytes::Bytes;
use evalgrid_domain::{
    decode::{Decoder, parse_json},
    limits::MAX_JSON_DEPTH,
    request,
};
use evalgrid_proto::v1::{Batch, Before, JudgeVerdict, Judged, Trial, TrialOutcome, TrialStatus};

use crate::{Failure, batch, grid, output, warnings};

/// The judges of a file, as they are sent. What is wrong with them is said in the file's name, which the scheduler does not know; slips are warned of.
pub(crate) fn asked(file: &Path) -> Result<Bytes, Failure> {
    let bytes = batch::read(file)?;
    warnings::tell(&warnings::of_judges(&bytes));
    let wrong = |what: String| {
        Failure::data(
            format!("{}: {}", file.display(), output::plain(&what)),
            "It must be a JSON array of judges, as docs/requests.md describes them.",
        )
    };
    let value = parse_json(&bytes, MAX_JSON_DEPTH).map_err(|error| wrong(error.to_string()))?;
    let decoded = Decoder::run(&value, |d, value| d.at("judges", |d| request::judges(d, value)));
    decoded.map_err(|issues| {
        let issues: Vec<String> = issues.iter().map(ToString::to_string).collect();
        wrong(issues.join("; "))
    })?;
    Ok(bytes.into())
}

/// For people; empty for a batch that regrades none.
pub(crate) fn changes(batch: &Batch) -> String {
    if batch.regrade_of.is_none() {
        return String::new();
    }
    let variants = grid::variant_names(batch);
    let (mut regraded, mut changed, mut text) = (0_usize, 0_usize, String::new());
    for run in &batch.runs {
        for trial in &run.trials {
            let Some((outcome, before)) = trial.outcome.as_ref().and_then(|outcome| Some((outcome, outcome.before.as_ref()?))) else {
                continue;
            };
            regraded += 1;
            changed += usize::from(before.status() != trial.status());
            let judges = judges(outcome, before);
            if before.status() == trial.status() && judges.is_empty() {
                continue;
            }
            let variant = variants.get(run.variant_index as usize).map_or("", String::as_str);
            let name = format!("{} × {variant} #{}", grid::case_name(batch, run.case_index), trial.ordinal);
            text.push_str(&format!("  {name}: {}  ({})\n", moved(before, trial), trial.id));
            text.extend(judges.iter().map(|judge| format!("    {judge}\n")));
        }
    }
    let of = output::plain(batch.regrade_of.as_deref().unwrap_or_default());
    format!(
        "Regrade of {of}: {changed} of {} with another verdict.\n{text}",
        output::count(regraded, "judged trial")
    )
}

fn moved(before: &Before, trial: &Trial) -> String {
    match before.status() == trial.status() {
        true => format!("{} as before", word(trial.status())),
        false => format!("{} -> {}", word(before.status()), word(trial.status())),
    }
}

/// The judges that say something else than those of the same name did, those that are new, and those that are gone.
fn judges(outcome: &TrialOutcome, before: &Before) -> Vec<String> {
    let known = |all: &[Judged], name: &str| all.iter().find(|judged| judged.name == name).map(said);
    let now = outcome.judged.iter().filter_map(|judged| {
        let (old, new) = (known(&before.judged, &judged.name), said(judged));
        let old = old.unwrap_or_else(|| "not asked".to_owned());
        (old != new).then(|| format!("{}: {old} -> {new}", output::short(&judged.name, 40)))
    });
    let gone = before.judged.iter().filter(|judged| known(&outcome.judged, &judged.name).is_none());
    let gone = gone.map(|judged| format!("{}: {} -> not asked", output::short(&judged.name, 40), said(judged)));
    now.chain(gone).collect()
}

/// What a judge came to.
pub(crate) fn said(judged: &Judged) -> String {
    let verdict = match judged.verdict() {
        JudgeVerdict::Passed => "passed",
        JudgeVerdict::Failed => "failed",
        JudgeVerdict::Error | JudgeVerdict::Unspecified => return "error".to_owned(),
        JudgeVerdict::Skipped => return "not asked".to_owned(),
    };
    let choice = output::short(judged.choice.as_deref().unwrap_or_default(), 60);
    match judged.score {
        Some(score) => format!("{verdict} with {choice} ({score})"),
        None => format!("{verdict} with {choice}"),
    }
}

fn word(status: TrialStatus) -> &'static str {
    match status {
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void => "void",
        TrialStatus::Queued | TrialStatus::Running | TrialStatus::Unspecified => "not judged yet",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_proto::v1::{CaseInfo, Run, VariantInfo};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_of_judges_is_told_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("j.json");
        let check = |content: &str, expected: Option<&str>| {
            std::fs::write(&file, content).unwrap();
            let wrong = asked(&file).map(|bytes| assert_eq!(bytes, content)).err();
            let expected = expected.map(|expected| {
                let next = "It must be a JSON array of judges, as docs/requests.md describes them.";
                (65, format!("{}: {expected}\n{next}", file.display()))
            });
            assert_eq!(wrong.map(|failure| (failure.code(), failure.to_string())), expected, "{content}");
        };
        let judge =
            json!({"kind": "judge", "name": "a", "provider": "openai", "model": "m", "prompt": "p", "choices": {"yes": 1, "no": 0}});
        let mut strange = judge.clone();
        strange["provider"] = json!("nobody");
        strange["model"] = json!("");
        check(&json!([judge]).to_string(), None);
        check(
            &json!({"judges": [judge]}).to_string(),
            Some("judges: Expected an array, got an object"),
        );
        check(
            &json!([judge, strange]).to_string(),
            Some("judges[1].model: Expected a non-empty string; judges[1].provider: Expected \"openai\""),
        );
        check("[", Some("The body is not JSON: EOF while parsing a list at line 1, column 1"));
    }

    fn judged(name: &str, choice: Option<&str>, score: f64) -> Judged {
        let verdict = match (choice, score >= 1.0) {
            (None, _) => JudgeVerdict::Error,
            (Some(_), true) => JudgeVerdict::Passed,
            (Some(_), false) => JudgeVerdict::Failed,
        };
        Judged {
            name: name.into(),
            verdict: verdict.into(),
            choice: choice.map(str::to_owned),
            score: choice.map(|_| score),
            ..Judged::default()
        }
    }

    fn trial(ordinal: u32, before: Option<(TrialStatus, Vec<Judged>)>, now: (TrialStatus, Vec<Judged>)) -> Trial {
        let before = before.map(|(status, judged)| Before {
            status: status.into(),
            judged,
        });
        Trial {
            id: format!("trial_{ordinal}"),
            ordinal,
            status: now.0.into(),
            outcome: Some(TrialOutcome {
                judged: now.1,
                before,
                ..TrialOutcome::default()
            }),
            ..Trial::default()
        }
    }

    #[test]
    fn what_flipped() {
        use TrialStatus::{Failed, Passed, Void};
        let right = || judged("tone", Some("right"), 1.0);
        let wrong = || judged("tone", Some("wr\u{1b}ong"), 0.0);
        let mut batch = Batch {
            cases: vec![CaseInfo {
                id: "greet".into(),
                ..CaseInfo::default()
            }],
            variants: vec![VariantInfo {
                model: "m".into(),
                ..VariantInfo::default()
            }],
            runs: vec![Run {
                trials: vec![
                    trial(1, Some((Passed, vec![right()])), (Passed, vec![right()])),
                    trial(2, Some((Passed, vec![right()])), (Failed, vec![wrong()])),
                    trial(3, Some((Void, vec![judged("tone", None, 0.0)])), (Passed, vec![right()])),
                    trial(4, Some((Failed, vec![judged("old", Some("bad"), 0.25)])), (Failed, vec![wrong()])),
                    trial(5, None, (Void, vec![])),
                ],
                ..Run::default()
            }],
            ..Batch::default()
        };
        assert_eq!(changes(&batch), "");
        batch.regrade_of = Some("batch_0".into());
        let expected = "\
Regrade of batch_0: 2 of 4 judged trials with another verdict.
  greet × m #2: passed -> failed  (trial_2)
    tone: passed with right (1) -> failed with wr ong (0)
  greet × m #3: void -> passed  (trial_3)
    tone: error -> passed with right (1)
  greet × m #4: failed as before  (trial_4)
    tone: not asked -> failed with wr ong (0)
    old: failed with bad (0.25) -> not asked
";
        assert_eq!(changes(&batch), expected);
    }
}
