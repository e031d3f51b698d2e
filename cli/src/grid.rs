//! The results of a batch for people: cases down, variants across, what did not count and why below.

use std::collections::BTreeMap;

use evalgrid_proto::v1::{Batch, BatchStatus, Run, Trial, TrialStatus, VariantInfo};

use crate::{
    output,
    reasons::{Reasons, TrialKey},
};

/// Longest name of a case or variant in a table.
const NAME: usize = 32;
/// Longest reason below it; the failure texts of trials are no longer.
const REASON: usize = 241;
/// The failure of a batch that was cancelled.
const CANCELLED: &str = "Cancelled";

/// Names for columns: the model, and as much more as tells the variants apart.
pub(crate) fn variant_names(batch: &Batch) -> Vec<String> {
    let short = |v: &VariantInfo| v.model.clone();
    let middle = |v: &VariantInfo| format!("{}/{}", v.harness, v.model);
    let long = |v: &VariantInfo| format!("{}/{}/{}/{}", v.harness, v.model, v.sandbox, v.profile.as_deref().unwrap_or("-"));
    let forms: [&dyn Fn(&VariantInfo) -> String; 3] = [&short, &middle, &long];
    let unique = |names: &Vec<String>| names.iter().collect::<std::collections::BTreeSet<_>>().len() == names.len();
    let mut names = Vec::new();
    for form in forms {
        names = batch.variants.iter().map(form).collect();
        if unique(&names) {
            break;
        }
    }
    names.iter().map(|name| output::short(name, NAME)).collect()
}

/// The name of the case at `index`.
pub(crate) fn case_name(batch: &Batch, index: u32) -> String {
    batch
        .cases
        .get(index as usize)
        .map_or_else(String::new, |case| output::short(&case.id, NAME))
}

/// The whole report; `reasons` says why trials failed.
pub(crate) fn render(batch: &Batch, reasons: &Reasons) -> String {
    let variants = variant_names(batch);
    let mut rows = vec![std::iter::once(String::new()).chain(variants.iter().cloned()).collect::<Vec<_>>()];
    for case in 0..batch.cases.len() as u32 {
        let mut row = vec![case_name(batch, case)];
        for variant in 0..batch.variants.len() as u32 {
            let run = batch.runs.iter().find(|run| (run.case_index, run.variant_index) == (case, variant));
            row.push(run.map(cell).unwrap_or_default());
        }
        rows.push(row);
    }
    let mut text = table(&rows);
    text.push_str("\nEach cell: passed/scored, tokens of the trials that reported them, median time of the agent.\n");
    text.push_str(&explained(batch, &variants, reasons));
    text.push_str(&ending(batch));
    text
}

fn cell(run: &Run) -> String {
    let count = |status: TrialStatus| run.trials.iter().filter(|trial| trial.status() == status).count();
    let (passed, failed, void) = (count(TrialStatus::Passed), count(TrialStatus::Failed), count(TrialStatus::Void));
    let open = run.trials.len() - passed - failed - void;
    let mut parts = vec![format!("{passed}/{}", passed + failed)];
    if void > 0 {
        parts.push(format!("{void} void"));
    }
    if open > 0 {
        parts.push(format!("{open} open"));
    }
    parts.extend(tokens(&run.trials));
    parts.extend(time(&run.trials));
    parts.join("  ")
}

/// Unknown is not zero: trials that reported no tokens are left out, and without any there is no number.
fn tokens(trials: &[Trial]) -> Option<String> {
    let known: Vec<u64> = trials
        .iter()
        .filter_map(|trial| Some(trial.outcome.as_ref()?.usage.as_ref()?.total_tokens))
        .collect();
    let total: u64 = known.iter().fold(0, |sum, tokens| sum.saturating_add(*tokens));
    match (known.len(), total) {
        (0, _) => None,
        (_, 0..10_000) => Some(format!("{total} tok")),
        (_, 10_000..10_000_000) => Some(format!("{} ktok", total / 1000)),
        _ => Some(format!("{} Mtok", total / 1_000_000)),
    }
}

fn time(trials: &[Trial]) -> Option<String> {
    let mut times: Vec<u64> = trials
        .iter()
        .filter(|trial| matches!(trial.status(), TrialStatus::Passed | TrialStatus::Failed))
        .filter_map(|trial| Some(trial.outcome.as_ref()?.model_ms))
        .collect();
    times.sort_unstable();
    let median = times.get(times.len().checked_sub(1)? / 2)?;
    Some(match median {
        0..1000 => format!("{median} ms"),
        1000..60_000 => format!("{}.{} s", median / 1000, median % 1000 / 100),
        _ => format!("{} min {} s", median / 60_000, median % 60_000 / 1000),
    })
}

/// What did not pass and why, the same words of a run together: what failed first, then what did not count.
fn explained(batch: &Batch, variants: &[String], reasons: &Reasons) -> String {
    // How many, and the id of the first.
    let mut counts: BTreeMap<(bool, u32, u32, String), (u32, &str)> = BTreeMap::new();
    for run in &batch.runs {
        for trial in &run.trials {
            let key: TrialKey = (run.case_index, run.variant_index, trial.ordinal);
            let why = match trial.status() {
                TrialStatus::Failed => reasons.get(&key).map(|reason| output::short(reason, REASON)),
                TrialStatus::Void => Some(reason(trial)),
                _ => None,
            };
            if let Some(why) = why {
                let void = trial.status() == TrialStatus::Void;
                let counted = counts.entry((void, run.case_index, run.variant_index, why));
                counted.or_insert((0, &trial.id)).0 += 1;
            }
        }
    }
    let mut text = String::new();
    for ((void, case, variant, reason), (count, id)) in counts {
        let word = if void { "void" } else { "failed" };
        let variant = variants.get(variant as usize).map_or("", String::as_str);
        text.push_str(&format!(
            "  {word} ×{count}  {} × {variant}: {reason}  ({id})\n",
            case_name(batch, case)
        ));
    }
    text
}

fn reason(trial: &Trial) -> String {
    let outcome = trial.outcome.as_ref();
    match outcome.and_then(|outcome| outcome.failure.as_deref()) {
        Some(failure) => output::short(failure, REASON),
        None => {
            let fields = outcome.map(|outcome| outcome.void_fields.join(", ")).unwrap_or_default();
            match fields.is_empty() {
                true => "evidence is missing".to_owned(),
                false => output::short(&format!("evidence is missing: {fields}"), REASON),
            }
        }
    }
}

/// Counted from the trials as they are now: the distribution of a run that goes on leaves out what is open.
fn ending(batch: &Batch) -> String {
    let trials = || batch.runs.iter().flat_map(|run| &run.trials);
    let count = |status: TrialStatus| trials().filter(|trial| trial.status() == status).count();
    let (all, passed, failed, void) = (
        trials().count(),
        count(TrialStatus::Passed),
        count(TrialStatus::Failed),
        count(TrialStatus::Void),
    );
    let cancelled = trials()
        .filter(|trial| trial.outcome.as_ref().is_some_and(|outcome| outcome.cancelled))
        .count();
    let state = match (batch.status(), batch.failure.as_deref()) {
        (BatchStatus::Running | BatchStatus::Unspecified, _) => "is running".to_owned(),
        (BatchStatus::Finished, _) => "is finished".to_owned(),
        (BatchStatus::Failed, Some(CANCELLED)) => "was cancelled".to_owned(),
        (BatchStatus::Failed, failure) => format!("has failed: {}", output::short(failure.unwrap_or("no reason given"), REASON)),
    };
    let cancelled = match cancelled {
        0 => String::new(),
        cancelled => format!(" ({cancelled} cancelled)"),
    };
    let open = match all - passed - failed - void {
        0 => String::new(),
        open => format!(", {open} open"),
    };
    format!(
        "{} {state}. {}: {passed} passed of {} scored, {void} void{cancelled}{open}.\n",
        batch.id,
        output::count(all, "trial"),
        passed + failed,
    )
}

/// Columns padded to their widest cell.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let line: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(line.join("   ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use evalgrid_proto::v1::{CaseInfo, TrialOutcome, Usage};

    use super::*;

    fn variant(harness: &str, model: &str, sandbox: &str) -> VariantInfo {
        VariantInfo {
            harness: harness.into(),
            model: model.into(),
            sandbox: sandbox.into(),
            ..VariantInfo::default()
        }
    }

    fn trial(status: TrialStatus, tokens: Option<u64>, model_ms: u64, failure: Option<&str>) -> Trial {
        let outcome = TrialOutcome {
            usage: tokens.map(|total_tokens| Usage {
                total_tokens,
                ..Usage::default()
            }),
            model_ms,
            failure: failure.map(str::to_owned),
            ..TrialOutcome::default()
        };
        Trial {
            id: "trial_x".into(),
            status: status.into(),
            outcome: (!matches!(status, TrialStatus::Queued | TrialStatus::Running)).then_some(outcome),
            ..Trial::default()
        }
    }

    #[test]
    fn cells() {
        use TrialStatus::{Failed, Passed, Queued, Running, Void};
        fn check(trials: &[(TrialStatus, Option<u64>, u64)], expected: &str) {
            let run = Run {
                trials: trials
                    .iter()
                    .map(|(status, tokens, ms)| trial(*status, *tokens, *ms, None))
                    .collect(),
                ..Run::default()
            };
            assert_eq!(cell(&run), expected, "{trials:?}");
        }
        check(&[(Queued, None, 0)], "0/0  1 open");
        check(&[(Running, None, 0), (Passed, None, 5)], "1/1  1 open  5 ms");
        check(
            &[(Passed, Some(10), 100), (Failed, Some(5), 3100), (Passed, None, 3200)],
            "2/3  15 tok  3.1 s",
        );
        check(&[(Void, None, 10_000), (Void, None, 1)], "0/0  2 void");
        check(&[(Passed, Some(0), 61_000)], "1/1  0 tok  1 min 1 s");
        check(&[(Passed, Some(12_345), 999)], "1/1  12 ktok  999 ms");
        check(
            &[(Passed, Some(u64::MAX), 999), (Passed, Some(1), 999)],
            "2/2  18446744073709 Mtok  999 ms",
        );
    }

    #[test]
    fn variants_are_told_apart() {
        fn check(variants: Vec<VariantInfo>, expected: &[&str]) {
            let batch = Batch {
                variants,
                ..Batch::default()
            };
            assert_eq!(variant_names(&batch), expected);
        }
        check(vec![variant("command", "a", "e2b"), variant("command", "b", "e2b")], &["a", "b"]);
        check(vec![variant("codex", "a", "e2b"), variant("pi", "a", "e2b")], &["codex/a", "pi/a"]);
        check(
            vec![variant("pi", "a", "e2b"), variant("pi", "a", "modal")],
            &["pi/a/e2b/-", "pi/a/modal/-"],
        );
        check(vec![variant("pi", "a\x1b[2J", "e2b")], &["a [2J"]);
    }

    #[test]
    fn a_whole_grid() {
        let case = |id: &str| CaseInfo {
            id: id.into(),
            ..CaseInfo::default()
        };
        let run = |case_index, variant_index, trials: Vec<Trial>| Run {
            case_index,
            variant_index,
            trials,
            ..Run::default()
        };
        let passed = || trial(TrialStatus::Passed, Some(100), 20, None);
        let void = |why| trial(TrialStatus::Void, None, 0, Some(why));
        let batch = Batch {
            id: "batch_1".into(),
            status: BatchStatus::Finished.into(),
            cases: vec![case("greet"), case("unreachable")],
            variants: vec![variant("command", "careful", "e2b"), variant("command", "hasty", "e2b")],
            runs: vec![
                run(0, 0, vec![passed(), passed()]),
                run(0, 1, vec![passed(), trial(TrialStatus::Failed, Some(50), 10, None)]),
                run(1, 0, vec![void("no\nroute"), void("no\nroute")]),
                run(1, 1, vec![void("no\nroute"), void("other")]),
            ],
            ..Batch::default()
        };
        let expected = "\
\x20             careful                 hasty
greet         2/2  200 tok  20 ms     1/2  150 tok  10 ms
unreachable   0/0  2 void             0/0  2 void

Each cell: passed/scored, tokens of the trials that reported them, median time of the agent.
  failed ×1  greet × hasty: `false` exited with 1 (trial_x)
  void ×2  unreachable × careful: no route (trial_x)
  void ×1  unreachable × hasty: no route (trial_x)
  void ×1  unreachable × hasty: other (trial_x)
batch_1 is finished. 8 trials: 3 passed of 4 scored, 4 void.
";
        let reasons = Reasons::from([
            ((0, 1, 0), "`false` exited\nwith 1".to_owned()),
            ((0, 0, 0), "no matter".to_owned()),
        ]);
        let text = render(&batch, &reasons);
        let squeezed = |text: &str| {
            text.lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>()
        };
        assert_eq!(squeezed(&text), squeezed(expected), "{text}");
    }

    #[test]
    fn endings() {
        use BatchStatus as B;
        use TrialStatus::{Failed, Passed, Queued, Running, Void};
        fn check(status: BatchStatus, failure: Option<&str>, trials: &[(TrialStatus, bool)], expected: &str) {
            let trials = trials.iter().map(|(status, cancelled)| {
                let mut trial = trial(*status, None, 0, None);
                trial.outcome.iter_mut().for_each(|outcome| outcome.cancelled = *cancelled);
                trial
            });
            let batch = Batch {
                id: "b".into(),
                status: status.into(),
                failure: failure.map(str::to_owned),
                runs: vec![Run {
                    trials: trials.collect(),
                    ..Run::default()
                }],
                ..Batch::default()
            };
            assert_eq!(ending(&batch), format!("{expected}\n"));
        }
        check(
            B::Running,
            None,
            &[(Queued, false); 4],
            "b is running. 4 trials: 0 passed of 0 scored, 0 void, 4 open.",
        );
        check(
            B::Running,
            None,
            &[(Running, false), (Passed, false), (Failed, false), (Void, false)],
            "b is running. 4 trials: 1 passed of 2 scored, 1 void, 1 open.",
        );
        check(
            B::Failed,
            Some("Cancelled"),
            &[(Void, true); 4],
            "b was cancelled. 4 trials: 0 passed of 0 scored, 4 void (4 cancelled).",
        );
        check(
            B::Failed,
            Some("gone"),
            &[(Void, false)],
            "b has failed: gone. 1 trial: 0 passed of 0 scored, 1 void.",
        );
        check(
            B::Finished,
            None,
            &[(Passed, false)],
            "b is finished. 1 trial: 1 passed of 1 scored, 0 void.",
        );
    }
}
