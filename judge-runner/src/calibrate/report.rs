//! What a judge's answers say about the judge.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::Serialize;

use super::{
    Calibration, Observed,
    statistics::{Interval, Table, around, bootstrap, kappa, spearman, wilson},
};

/// Fewer examples than this, and every interval is so wide that it decides little.
const FEW: usize = 30;
/// Kinds of failures that are told; behind them come rarer ones.
const MAX_FAILURES: usize = 5;

/// A number, how sure it is, and what to know about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measure {
    /// Absent where it is not defined.
    pub value: Option<f64>,
    /// Absent where there is none.
    pub interval: Option<Interval>,
    /// Why something is absent, or what it does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Measure {
    fn undefined(why: impl Into<String>) -> Measure {
        Measure {
            note: Some(why.into()),
            ..Measure::default()
        }
    }

    /// A share of `n` independent observations.
    fn share(hits: f64, n: usize, none: &str) -> Measure {
        match n {
            0 => Measure::undefined(none),
            n => Measure {
                value: Some(hits / n as f64),
                interval: wilson(hits / n as f64, n),
                note: None,
            },
        }
    }
}

/// Everything that a calibration tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The judge's name.
    pub judge: String,
    /// Who answered.
    pub evaluator: String,
    /// Its model.
    pub model: String,
    /// Examples.
    pub items: usize,
    /// Times that each was asked about in the usual order.
    pub repeats: u32,
    /// Answers that are valid, of all asks.
    pub answered: usize,
    /// Asks without a valid answer.
    pub invalid: usize,
    /// Why there was none, and how often: the most frequent reasons.
    pub failures: Vec<(String, usize)>,
    /// With the labels.
    pub agreement: Agreement,
    /// With itself.
    pub consistency: Consistency,
    /// Whether the order of the choices matters.
    pub position: Position,
    /// Whether the length of the answer matters.
    pub length: Length,
    /// What to know about all of it.
    pub notes: Vec<String>,
}

/// Of the choice that the judge picked most often with the label.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Agreement {
    /// Examples with a valid answer.
    pub items: usize,
    /// Cohen's kappa: 0 is as good as chance, 1 is always.
    pub kappa: Measure,
    /// The share of examples in which both are the same.
    pub same: Measure,
    /// The judge's choices, in the order of rows and columns.
    pub labels: Vec<String>,
    /// Examples: rows are labels, columns are what the judge picked.
    pub confusion: Table,
}

/// Whether the judge says the same when it is asked again.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Consistency {
    /// The mean over the examples of the share of pairs of answers that are the same.
    pub overall: Measure,
    /// That share of each example; absent where it has fewer than two valid answers.
    pub items: Vec<Option<f64>>,
}

/// What changes when the choices are listed the other way around.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Position {
    /// The share of examples in which the pick is another than the most frequent one.
    pub changed: Measure,
    /// The share of answers in the usual order that differ from the most frequent one: so much would change without any bias.
    pub by_chance: Option<f64>,
    /// Among the changed picks, the share that moved towards what is listed first; the others moved towards what is listed last.
    pub towards_first: Measure,
}

/// Whether longer answers are scored better than the labels say.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Length {
    /// Spearman's correlation of an answer's length with the judge's score less the label's: above 0, long answers are favoured.
    pub correlation: Measure,
    /// Of the bootstrap.
    pub seed: u64,
}

impl Report {
    /// Counts. `observed` is of the calibration's items, in their order.
    pub fn of(calibration: &Calibration, observed: &[Observed], seed: u64) -> Report {
        let judge = &calibration.judge;
        let labels: Vec<&str> = judge.choices.keys().map(String::as_str).collect();
        let place = |label: &str| labels.iter().position(|known| *known == label);
        let items: Vec<Counted> = calibration
            .items
            .iter()
            .zip(observed)
            .filter_map(|(item, observed)| {
                Some(Counted {
                    label: place(&item.label)?,
                    length: item.output.chars().count(),
                    picks: observed.usual.iter().filter_map(|answer| place(answer.as_ref().ok()?)).collect(),
                    turned: observed.turned.as_ref().ok().and_then(|answer| place(answer)),
                })
            })
            .collect();
        let scores: Vec<f64> = judge.choices.values().map(|score| score.0).collect();
        let asks = || observed.iter().flat_map(|observed| observed.usual.iter().chain([&observed.turned]));
        let answered = asks().filter(|answer| answer.is_ok()).count();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for failure in asks().filter_map(|answer| answer.as_ref().err()) {
            *counts.entry(failure).or_default() += 1;
        }
        let mut failures: Vec<(String, usize)> = counts.into_iter().map(|(failure, count)| (failure.to_owned(), count)).collect();
        failures.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        failures.truncate(MAX_FAILURES);
        let mut notes = Vec::new();
        if items.len() < FEW {
            notes.push(format!(
                "There are only {} items: the intervals are wide, and decide little. Label at least {FEW}, better 100.",
                items.len()
            ));
        }
        if let [label] = labels[..] {
            notes.push(format!(
                "The judge has one choice only, {label:?}: there is nothing that it could get wrong."
            ));
        }
        Report {
            judge: judge.name.clone(),
            evaluator: judge.by.evaluator().to_owned(),
            model: judge.model.clone(),
            items: calibration.items.len(),
            repeats: calibration.repeats,
            answered,
            invalid: asks().count() - answered,
            failures,
            agreement: agreement(&items, &labels),
            consistency: consistency(&items),
            position: position(&items, labels.len()),
            length: length(&items, &scores, seed),
            notes,
        }
    }
}

/// One example with its answers, by the places of their labels.
struct Counted {
    label: usize,
    length: usize,
    picks: Vec<usize>,
    turned: Option<usize>,
}

impl Counted {
    /// What it picked most often; of several, what it picked first.
    fn most(&self) -> Option<usize> {
        let count = |pick: usize| self.picks.iter().filter(|other| **other == pick).count();
        let best = self.picks.iter().map(|pick| count(*pick)).max()?;
        self.picks.iter().copied().find(|pick| count(*pick) == best)
    }

    /// The share of pairs of its answers that are the same.
    fn same_pairs(&self) -> Option<f64> {
        let pairs = self.picks.len() * self.picks.len().saturating_sub(1) / 2;
        let same = self
            .picks
            .iter()
            .enumerate()
            .map(|(at, pick)| self.picks[..at].iter().filter(|other| *other == pick).count());
        (pairs > 0).then(|| same.sum::<usize>() as f64 / pairs as f64)
    }
}

fn agreement(items: &[Counted], labels: &[&str]) -> Agreement {
    let mut confusion: Table = vec![vec![0; labels.len()]; labels.len()];
    let picked: Vec<(usize, usize)> = items.iter().filter_map(|item| Some((item.label, item.most()?))).collect();
    for (label, pick) in &picked {
        confusion[*label][*pick] += 1;
    }
    let one = |of: &dyn Fn(&(usize, usize)) -> usize| picked.iter().all(|pair| of(pair) == of(&picked[0]));
    let kappa = match (picked.is_empty(), kappa(&confusion)) {
        (true, _) => Measure::undefined("not defined: no item has a valid answer"),
        (false, _) if one(&|pair| pair.0) => {
            Measure::undefined("not defined: all items have the same label, so agreement beyond chance cannot be told")
        }
        (false, None) => Measure::undefined("not defined: only one label occurs"),
        (false, Some((value, _))) if one(&|pair| pair.1) => Measure {
            value: Some(value),
            interval: None,
            note: Some("the judge always picked the same, which is as good as chance".to_owned()),
        },
        (false, Some((value, error))) => Measure {
            value: Some(value),
            interval: Some(around(value, error)),
            note: (error == 0.0).then(|| {
                "the interval has no width because all items agree (or none does), not because the items were many; see the share below"
                    .to_owned()
            }),
        },
    };
    let same = picked.iter().filter(|(label, pick)| label == pick).count();
    Agreement {
        items: picked.len(),
        kappa,
        same: Measure::share(same as f64, picked.len(), "not defined: no item has a valid answer"),
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        confusion,
    }
}

fn consistency(items: &[Counted]) -> Consistency {
    let shares: Vec<Option<f64>> = items.iter().map(Counted::same_pairs).collect();
    let known: Vec<f64> = shares.iter().copied().flatten().collect();
    Consistency {
        // Pairs of one example are not independent: each example counts as one observation, which is on the safe side.
        overall: Measure::share(known.iter().sum(), known.len(), "not defined: no item has two valid answers"),
        items: shares,
    }
}

fn position(items: &[Counted], labels: usize) -> Position {
    if labels < 2 {
        let none = || Measure::undefined("not defined: one choice has no order");
        return Position {
            changed: none(),
            by_chance: None,
            towards_first: none(),
        };
    }
    let both: Vec<(usize, usize)> = items.iter().filter_map(|item| Some((item.most()?, item.turned?))).collect();
    let changed: Vec<&(usize, usize)> = both.iter().filter(|(usual, turned)| usual != turned).collect();
    // In the usual order the place of the label `usual` is its own; turned around, the place of `turned` is counted from the end. A pull towards
    // the beginning makes both places small, which is so where `usual` is before `turned`.
    let first = changed.iter().filter(|(usual, turned)| usual < turned).count();
    let others = items.iter().filter_map(|item| {
        let most = item.most()?;
        Some(item.picks.iter().filter(|pick| **pick != most).count() as f64 / item.picks.len() as f64)
    });
    let others: Vec<f64> = others.collect();
    Position {
        by_chance: (!others.is_empty()).then(|| others.iter().sum::<f64>() / others.len() as f64),
        towards_first: Measure::share(first as f64, changed.len(), "not defined: no pick changed"),
        changed: Measure::share(
            changed.len() as f64,
            both.len(),
            "not defined: no item has valid answers in both orders",
        ),
    }
}

fn length(items: &[Counted], scores: &[f64], seed: u64) -> Length {
    let pairs: Vec<(f64, f64)> = items
        .iter()
        .filter(|item| !item.picks.is_empty())
        .map(|item| {
            let score = item.picks.iter().map(|pick| scores[*pick]).sum::<f64>() / item.picks.len() as f64;
            (item.length as f64, score - scores[item.label])
        })
        .collect();
    let correlation = match spearman(&pairs) {
        Some(value) => {
            let interval = bootstrap(&pairs, seed, spearman);
            Measure {
                value: Some(value),
                interval,
                note: interval.is_none().then(|| "no interval: too few items differ".to_owned()),
            }
        }
        None if pairs.len() < 2 => Measure::undefined("not defined: fewer than two items have a valid answer"),
        None => Measure::undefined("not defined: all lengths are the same, or the judge is off by the same for all items"),
    };
    Length { correlation, seed }
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "judge {}, {} {}: {} items, each asked {} times, and once with the choices turned around\nanswered {}, invalid {}\n",
            self.judge, self.evaluator, self.model, self.items, self.repeats, self.answered, self.invalid
        );
        let mut line = |name: &str, said: String| {
            // Writing into a string cannot fail.
            let _ = writeln!(text, "{}", format!("{name:22}{said}").trim_end());
        };
        for (failure, count) in &self.failures {
            line("  invalid", format!("×{count} {failure}"));
        }
        let Agreement {
            kappa,
            same,
            labels,
            confusion,
            ..
        } = &self.agreement;
        line("kappa", number(kappa, coefficient));
        line("same as the label", number(same, percent));
        line("self-consistency", number(&self.consistency.overall, percent));
        let Position {
            changed,
            by_chance,
            towards_first,
        } = &self.position;
        let chance = by_chance
            .map(|share| format!("; about {} without any bias", percent(share)))
            .unwrap_or_default();
        line("changed by order", number(changed, percent) + &chance);
        line("  towards the first", number(towards_first, percent));
        let Length { correlation, seed } = &self.length;
        line(
            "pull of length",
            format!("{} (bootstrap, seed {seed})", number(correlation, coefficient)),
        );
        line("", String::new());
        line(
            "label \\ judge",
            labels.iter().map(|label| format!("{:>12}", cut(label, 11))).collect(),
        );
        for (label, row) in labels.iter().zip(confusion) {
            line(&cut(label, 21), row.iter().map(|count| format!("{count:>12}")).collect());
        }
        let unsteady = self
            .consistency
            .items
            .iter()
            .enumerate()
            .filter_map(|(index, share)| share.filter(|share| *share < 1.0).map(|share| (index, share)));
        for (index, share) in unsteady {
            line(
                &format!("items[{index}]"),
                format!("{} of pairs of answers are the same", percent(share)),
            );
        }
        for note in &self.notes {
            line("note", note.clone());
        }
        text
    }
}

fn coefficient(value: f64) -> String {
    format!("{value:.3}")
}

fn percent(value: f64) -> String {
    format!("{:.1} %", 100.0 * value)
}

fn number(measure: &Measure, shown: fn(f64) -> String) -> String {
    let mut parts = Vec::new();
    parts.extend(measure.value.map(shown));
    parts.extend(
        measure
            .interval
            .map(|interval| format!("(95 %: {} to {})", shown(interval.low), shown(interval.high))),
    );
    let text = parts.join(" ");
    match (&measure.note, text.is_empty()) {
        (None, _) => text,
        (Some(note), true) => note.clone(),
        (Some(note), false) => format!("{text}; {note}"),
    }
}

fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        None => text.to_owned(),
        Some(_) => text.chars().take(width - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::calibrate::decode;

    /// A judge with the choices `a`, `b` and `c` (scored 1, 0.5, 0), and an example for each letter of `labels`.
    fn calibration(labels: &str) -> Calibration {
        let items: Vec<Value> = labels
            .chars()
            .enumerate()
            .map(|(index, label)| json!({"input": "?", "output": "x".repeat(index), "label": label.to_string()}))
            .collect();
        let file = json!({
            "judge": {"kind": "judge", "name": "j", "provider": "openai", "model": "m", "prompt": "?", "choices": {"a": 1, "b": 0.5, "c": 0}},
            "items": items,
        });
        decode(&file).unwrap()
    }

    /// Answers as `aab/c`: picks in the usual order, then the one of the turned order; `-` is no valid answer.
    fn observed(picks: &str) -> Vec<Observed> {
        let pick = |pick: char| match pick {
            '-' => Err("it is empty".to_owned()),
            pick => Ok(pick.to_string()),
        };
        let item = |picks: &str| {
            let (usual, turned) = picks.split_once('/').unwrap();
            Observed {
                usual: usual.chars().map(pick).collect(),
                turned: pick(turned.chars().next().unwrap()),
            }
        };
        picks.split(' ').map(item).collect()
    }

    fn report(labels: &str, picks: &str) -> Report {
        Report::of(&calibration(labels), &observed(picks), 1)
    }

    fn value(measure: &Measure) -> Option<f64> {
        measure.value.map(|value| (value * 1000.0).round() / 1000.0)
    }

    #[test]
    fn agreement_is_of_what_is_picked_most() {
        let report = report("abca", "aab/a bbb/b c-c/c -bc/a");
        // The last one picks `b` first, and each once.
        assert_eq!(report.agreement.confusion, [[1, 1, 0], [0, 1, 0], [0, 0, 1]]);
        assert_eq!((report.answered, report.invalid, report.agreement.items), (14, 2, 4));
        assert_eq!(report.failures, [("it is empty".to_owned(), 2)]);
        assert_eq!(
            (value(&report.agreement.same), value(&report.agreement.kappa)),
            (Some(0.75), Some(0.636))
        );
        assert_eq!(report.consistency.items, [Some(1.0 / 3.0), Some(1.0), Some(1.0), Some(0.0)]);
        assert_eq!(value(&report.consistency.overall), Some(0.583));
    }

    #[test]
    fn kappa_is_told_only_where_there_is_one() {
        let check = |labels: &str, picks: &str, expected: Option<f64>, interval: bool, note: &str| {
            let kappa = report(labels, picks).agreement.kappa;
            assert_eq!((value(&kappa), kappa.interval.is_some()), (expected, interval), "{labels} {picks}");
            assert!(kappa.note.clone().unwrap_or_default().contains(note), "{kappa:?}");
            assert_eq!(kappa.note.is_none(), note.is_empty(), "{kappa:?}");
        };
        check("aabb", "a/a b/b a/a b/b", Some(0.0), true, "");
        check("aaaa", "a/a a/a a/a a/a", None, false, "the same label");
        check("aaaa", "a/a b/b a/a b/b", None, false, "the same label");
        check("aabb", "a/a a/a a/a a/a", Some(0.0), false, "always picked the same");
        check("aabb", "a/a a/a b/b b/b", Some(1.0), true, "not because the items were many");
        check("ab", "-/a -/b", None, false, "no item has a valid answer");
    }

    /// catalogue J9: how often, and towards what.
    #[test]
    fn where_a_pick_moves_when_the_order_is_turned() {
        let check = |labels: &str, picks: &str, changed: Option<f64>, first: Option<f64>, chance: Option<f64>| {
            let position = report(labels, picks).position;
            assert_eq!(
                (value(&position.changed), value(&position.towards_first), position.by_chance),
                (changed, first, chance),
                "{picks}"
            );
        };
        check("abc", "a/a b/b c/c", Some(0.0), None, Some(0.0));
        // Always the one that is listed first, and always the last.
        check("aa", "a/c a/c", Some(1.0), Some(1.0), Some(0.0));
        check("aa", "c/a c/a", Some(1.0), Some(0.0), Some(0.0));
        check("abca", "ab/a b/c c/b a/-", Some(0.667), Some(0.5), Some(0.125));
        check("a", "-/a", None, None, None);
    }

    /// catalogue J9: long answers that score more than their label, or do not.
    #[test]
    fn a_pull_of_length_is_seen() {
        // Lengths grow; scores of what is picked grow against those of the labels.
        let pull = report("bbbbbb", "c/c c/c b/b b/b a/a a/a").length.correlation;
        assert_eq!(value(&pull), Some(0.956));
        assert!(pull.interval.unwrap().low > 0.5);
        assert_eq!(value(&report("abc", "a/a b/b c/c").length.correlation), None);
        assert_eq!(value(&report("a", "a/a").length.correlation), None);
        let few = report("ab", "a/a a/a").length.correlation;
        assert_eq!((value(&few), few.interval), (Some(1.0), None));
    }

    #[test]
    fn the_text_says_what_is_known_and_what_is_not() {
        let text = report("abca", "aab/a bbb/b ccc/c -bc/a").text();
        for line in [
            "judge j, openai m: 4 items, each asked 5 times, and once with the choices turned around",
            "answered 15, invalid 1",
            "  invalid             ×1 it is empty",
            "same as the label     75.0 % (95 %: 30.1 % to 95.4 %)",
            "a                                1           1           0",
            "items[3]              0.0 % of pairs of answers are the same",
            "note                  There are only 4 items: the intervals are wide, and decide little. Label at least 30, better 100.",
        ] {
            assert!(text.lines().any(|known| known == line), "{line:?} in\n{text}");
        }
        let text = report("aaaa", "a/a a/a a/a a/a").text();
        assert!(
            text.contains("kappa                 not defined: all items have the same label"),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn whatever_is_answered_no_number_is_none(labels in "[abc]{1,8}", picks in prop::collection::vec("[abc-]{1,4}/[abc-]", 8)) {
            let picks = picks[..labels.len()].join(" ");
            let report = report(&labels, &picks);
            let json = serde_json::to_string(&report).unwrap();
            prop_assert!(!json.contains("NaN") && !report.text().contains("NaN") && !report.text().contains("inf"));
            for measure in [&report.agreement.kappa, &report.agreement.same, &report.consistency.overall, &report.position.changed, &report.position.towards_first, &report.length.correlation] {
                prop_assert!(measure.value.is_none_or(f64::is_finite));
                prop_assert!(measure.value.is_some() || measure.note.is_some(), "{measure:?}");
                if let (Some(value), Some(interval)) = (measure.value, measure.interval) {
                    prop_assert!(interval.low.is_finite() && interval.high.is_finite() && interval.low <= interval.high);
                    prop_assert!((-1.0..=1.0).contains(&value));
                }
            }
        }
    }
}
