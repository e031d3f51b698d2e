//! The examples that a judge is measured by, as a file has them.

use evalgrid_domain::{
    decode::{Decoder, Issue, Text},
    limits::{MAX_JUDGE_OUTPUT, MAX_JUDGE_PROMPT, MAX_PROMPT},
    request::{self, Judge},
};
use serde_json::{Map, Value};

/// Examples in a file. Each is asked about up to 21 times, so a thousand are a day's budget of many accounts; intervals have long become narrow by then.
const MAX_ITEMS: usize = 1_000;
/// Times that each example is asked about. More tell nothing more about a judge that agrees with itself.
const REPEATS: std::ops::RangeInclusive<i64> = 1..=20;
/// Without `repeats`: ten pairs of each example.
const DEFAULT_REPEATS: u32 = 5;

/// A judge, and the examples to measure it by.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// As in a start request, without files.
    pub judge: Judge,
    /// At least one.
    pub items: Vec<Item>,
    /// Times that each is asked about, without the one with the choices turned around.
    pub repeats: u32,
}

/// An answer of an agent, and what a person says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What the agent was asked.
    pub input: String,
    /// What it answered.
    pub output: String,
    /// A reference answer; the judge's own where there is none.
    pub expected: Option<String>,
    /// The judge's choice that a person picked.
    pub label: String,
}

/// Reads `{judge, items: [{input, output, expected?, label}], repeats?}`.
///
/// # Errors
/// Every issue found.
pub fn decode(value: &Value) -> Result<Calibration, Vec<Issue>> {
    Decoder::run(value, calibration)
}

fn calibration(d: &mut Decoder, value: &Value) -> Option<Calibration> {
    let map = d.object(value)?;
    let judge = d.required(map, "judge", |d, value| {
        let judge = request::judge(d, value)?;
        if judge.files.is_some() {
            d.at("files", |d| {
                d.refine("Expected none: an example has no workspace to read them from")
            });
        }
        Some(judge)
    });
    let items = d.required(map, "items", |d, value| {
        d.array(value, 1..=MAX_ITEMS, |d, value| item(d, value, judge.as_ref()))
    });
    let repeats = d.optional(map, "repeats", |d, value| d.integer(value, REPEATS));
    Some(Calibration {
        judge: judge?,
        items: items?,
        repeats: repeats?.map_or(Some(DEFAULT_REPEATS), |repeats| u32::try_from(repeats).ok())?,
    })
}

fn item(d: &mut Decoder, value: &Value, judge: Option<&Judge>) -> Option<Item> {
    let map = d.object(value)?;
    let text = |d: &mut Decoder, map: &Map<String, Value>, key, most| d.required(map, key, |d, value| d.string(value, Text::max(most)));
    let input = text(d, map, "input", MAX_PROMPT);
    let output = text(d, map, "output", MAX_JUDGE_OUTPUT);
    let expected = d.optional(map, "expected", |d, value| d.string(value, Text::max(MAX_JUDGE_PROMPT)));
    let label = d.required(map, "label", |d, value| {
        let label = d.string(value, Text::any())?;
        if let Some(judge) = judge.filter(|judge| !judge.choices.contains_key(&label)) {
            let known: Vec<_> = judge.choices.keys().map(|label| format!("{label:?}")).collect();
            d.refine(format!("Expected a choice of the judge: {}", known.join(" | ")));
        }
        Some(label)
    });
    Some(Item {
        input: input?,
        output: output?,
        expected: expected?,
        label: label?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn file() -> Value {
        json!({
            "judge": {
                "kind": "judge", "name": "tone", "provider": "openai", "model": "m", "prompt": "Is it polite?", "choices": {"polite": 1, "rude": 0},
            },
            "items": [{"input": "Say hello.", "output": "Hello!", "expected": "Good day.", "label": "polite"}, {"input": "", "output": "", "label": "rude"}],
        })
    }

    #[test]
    fn a_file_is_read() {
        let calibration = decode(&file()).unwrap();
        assert_eq!(
            (calibration.repeats, calibration.items.len(), calibration.judge.threshold.0),
            (5, 2, 1.0)
        );
        assert_eq!(
            calibration.items[0],
            Item {
                input: "Say hello.".into(),
                output: "Hello!".into(),
                expected: Some("Good day.".into()),
                label: "polite".into(),
            }
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |change: &dyn Fn(&mut Value), path: &str| {
            let mut file = file();
            change(&mut file);
            let issues = decode(&file).unwrap_err();
            assert!(issues[0].to_string().starts_with(path), "{path} in {issues:?}");
        };
        check(&|file| *file = json!([]), "Expected an object");
        check(&|file| file["judge"]["choices"] = json!({}), "judge.choices");
        check(&|file| file["judge"]["files"] = json!(["a"]), "judge.files");
        check(&|file| file["judge"]["harness"] = json!("codex"), "judge.harness");
        check(&|file| file["items"] = json!([]), "items");
        check(
            &|file| file["items"] = json!(vec![file["items"][0].clone(); MAX_ITEMS + 1]),
            "items",
        );
        check(&|file| file["items"][1]["label"] = json!("odd"), "items[1].label");
        check(
            &|file| file["items"][1]["output"] = json!("x".repeat(MAX_JUDGE_OUTPUT + 1)),
            "items[1].output",
        );
        check(&|file| file["repeats"] = json!(0), "repeats");
        check(&|file| file["repeats"] = json!(21), "repeats");
        check(&|file| file["repeats"] = json!(1.5), "repeats");
    }
}
