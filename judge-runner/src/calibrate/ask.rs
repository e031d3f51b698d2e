//! Asking a judge about the examples. No scheduler is there, so what is refused for now is waited out here.

use std::time::Duration;

use evalgrid_domain::{
    answerer::Failure,
    judge::{Entry, Material, Question, question, question_in_order},
    limits::MAX_UNCLEAR_ASKS,
    request::Judge,
};
use futures::{StreamExt as _, stream};
use tokio::time::sleep;

use super::{Calibration, Item};
use crate::{judgment, model::Met};

/// What the idempotency keys of calibrations begin with, and the names of their sandboxes.
pub(super) const KEY_PREFIX: &str = "calibrate-";
/// Asks on their way at once. A calibration is in no hurry, and shares the key's limits with grids.
const AT_ONCE: usize = 4;
/// Refusals for now before one is given up: with the waits between them a few minutes of a limited key.
const MAX_REFUSALS: u32 = 6;
/// The first wait where the provider names none; each further one is twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait, whatever the provider names: a person is waiting.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// What a judge answered about one example: labels, or why there is no valid answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// With the choices in the order of a grid's question.
    pub usual: Vec<Result<String, String>>,
    /// With the choices in the reverse order.
    pub turned: Result<String, String>,
}

/// The judge could not be reached at all, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the judge could not be asked: {0}")]
pub struct Unreachable(pub String);

/// Why there is no answer.
enum Nothing {
    /// The judge's own doing.
    Invalid(String),
    /// Nobody answered.
    Unreached(String),
}

/// Asks about every example: `ask` asks once, under the idempotency key that it is given. `nonce` is new for each run. `progress` hears how many
/// asks have ended.
///
/// # Errors
/// The first ask reached nobody: a wrong key or address, no network, a limit that does not end.
pub async fn run<A: Future<Output = Met>>(
    calibration: &Calibration,
    nonce: [u8; 16],
    ask: impl Fn(Question, String) -> A,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Observed>, Unreachable> {
    let each = calibration.repeats as usize + 1;
    let total = calibration.items.len() * each;
    let one = async |number: usize| {
        let (item, of_item) = (&calibration.items[number / each], number % each);
        answer(calibration, item, of_item + 1 == each, (nonce, number), &ask).await
    };
    let first = match one(0).await {
        Err(Nothing::Unreached(reason)) => return Err(Unreachable(reason)),
        first => first,
    };
    progress(1);
    let mut rest = stream::iter(1..total).map(one).buffered(AT_ONCE);
    let mut answers = vec![first];
    while let Some(answer) = rest.next().await {
        answers.push(answer);
        progress(answers.len());
    }
    let mut answers = answers.into_iter().map(|answer| {
        answer.map_err(|nothing| match nothing {
            Nothing::Invalid(reason) | Nothing::Unreached(reason) => reason,
        })
    });
    let observed = calibration.items.iter().map(|_| {
        let usual = answers.by_ref().take(each - 1).collect();
        // There are as many as were asked for.
        let turned = answers.next().unwrap_or_else(|| Err("it was not asked".to_owned()));
        Observed { usual, turned }
    });
    Ok(observed.collect())
}

async fn answer<A: Future<Output = Met>>(
    calibration: &Calibration,
    item: &Item,
    turned: bool,
    (nonce, number): ([u8; 16], usize),
    ask: &impl Fn(Question, String) -> A,
) -> Result<String, Nothing> {
    let judge = &calibration.judge;
    let run: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = format!("{KEY_PREFIX}{run}-{number}");
    let material = material(judge, item);
    let question = match turned {
        false => question(judge, &material, key.as_bytes()),
        true => {
            let labels: Vec<&str> = judge.choices.keys().rev().map(String::as_str).collect();
            question_in_order(judge, &material, key.as_bytes(), &labels)
        }
    };
    let (mut refused, mut unclear) = (0, 0);
    loop {
        match ask(question.clone(), key.clone()).await {
            Met::Ended(ended) => {
                // An agent that fails tells in words alone whether a model was behind it: what no model has written is nobody's answer.
                let has_written = ended.usage.is_some_and(|usage| usage.output_tokens > 0);
                return judgment::answer(judge, ended.said)
                    .map(|answer| answer.choice)
                    .map_err(|failure| match failure {
                        Failure::Provider { .. } | Failure::Uncallable { .. } | Failure::MissingCredential { .. } => {
                            Nothing::Unreached(failure.to_string())
                        }
                        Failure::Harness { .. } if !has_written => Nothing::Unreached(failure.to_string()),
                        failure => Nothing::Invalid(failure.to_string()),
                    });
            }
            Met::NotNow { retry_after_ms, reason } => {
                refused += 1;
                if refused == MAX_REFUSALS {
                    return Err(Nothing::Unreached(Failure::Limited { tries: refused, reason }.to_string()));
                }
                let named = (retry_after_ms > 0).then(|| Duration::from_millis(retry_after_ms));
                let wait = named.unwrap_or(FIRST_WAIT * 2u32.pow(refused - 1));
                sleep(wait.min(LONGEST_WAIT)).await;
            }
            Met::Unclear { reason } => {
                unclear += 1;
                if unclear == MAX_UNCLEAR_ASKS {
                    return Err(Nothing::Unreached(Failure::Unclear { tries: unclear, reason }.to_string()));
                }
            }
        }
    }
}

/// What the judge is shown: as of a trial with one turn.
fn material(judge: &Judge, item: &Item) -> Material {
    let entries = [
        Entry::User { user: item.input.clone() },
        Entry::Agent {
            agent: item.output.clone(),
        },
    ];
    Material {
        input: item.input.clone(),
        output: item.output.clone(),
        expected: item.expected.clone().or_else(|| judge.expected.clone()),
        conversation: entries.into(),
        files: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;
    use crate::{calibrate::decode, model::Ended};

    fn calibration() -> Calibration {
        let item = |output: &str| json!({"input": "Say hello.", "output": output, "label": "polite"});
        let file = json!({
            "judge": {
                "kind": "judge", "name": "tone", "provider": "openai", "model": "m", "prompt": "Is it polite?", "choices": {"polite": 1, "rude": 0},
            },
            "items": [item("Hello!"), item("Oh, you.")],
            "repeats": 2,
        });
        decode(&file).unwrap()
    }

    fn says(choice: &str) -> Met {
        let mut ended = Ended::failed(Failure::TimedOut { limit_ms: 1_000 });
        ended.said = Ok(json!({"choice": choice, "reason": "so it is"}).to_string());
        Met::Ended(ended)
    }

    fn fails(failure: Failure) -> Met {
        Met::Ended(Ended::failed(failure))
    }

    fn not_now(retry_after_ms: u64) -> Met {
        Met::NotNow {
            retry_after_ms,
            reason: "busy".into(),
        }
    }

    /// Runs with what each ask meets; also what was asked.
    async fn met(meets: impl Fn(usize, &str) -> Met) -> (Result<Vec<Observed>, Unreachable>, Vec<(String, String)>) {
        let asked = Mutex::new(Vec::new());
        let ask = |question: Question, key: String| {
            let mut asked = asked.lock().unwrap();
            let met = meets(asked.len(), &key);
            asked.push((question.instructions, key));
            async { met }
        };
        let result = run(&calibration(), [7; 16], ask, |_| {}).await;
        (result, asked.into_inner().unwrap())
    }

    #[tokio::test]
    async fn every_example_is_asked_about_in_both_orders() {
        let (result, asked) = met(|number, _| says(if number < 3 { "polite" } else { "rude" })).await;
        let same = |choice: &str| Observed {
            usual: vec![Ok(choice.into()); 2],
            turned: Ok(choice.into()),
        };
        assert_eq!(result.unwrap(), [same("polite"), same("rude")]);
        let turned: Vec<bool> = asked
            .iter()
            .map(|(text, _)| text.find("\n- \"rude\"") < text.find("\n- \"polite\""))
            .collect();
        assert_eq!(turned, [false, false, true, false, false, true]);
        let mut keys: Vec<_> = asked.iter().map(|(_, key)| key).collect();
        keys.dedup();
        assert_eq!(keys.len(), 6, "each ask has its own key");
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_for_now_are_waited_out() {
        let started = tokio::time::Instant::now();
        let (result, asked) = met(|number, _| match number {
            0 => not_now(7_000),
            1 | 2 => not_now(0),
            3 => not_now(3_600_000),
            _ => says("polite"),
        })
        .await;
        assert_eq!(result.unwrap()[0].usual[0], Ok("polite".into()));
        assert_eq!(started.elapsed().as_secs(), 7 + 2 + 4 + 60);
        assert!(asked[..5].iter().all(|(_, key)| *key == asked[0].1), "one ask, one key");
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_not_reached_first_is_not_asked_on() {
        let check = async |meets: fn() -> Met, asks: usize, reason: &str| {
            let (result, asked) = met(|_, _| meets()).await;
            assert_eq!((result.unwrap_err().0.as_str(), asked.len()), (reason, asks));
        };
        check(
            || not_now(0),
            6,
            "the provider still refused for now when it was asked 6 times: busy",
        )
        .await;
        check(
            || Met::Unclear { reason: "it broke".into() },
            2,
            "it was asked 2 times, and no answer arrived: it broke",
        )
        .await;
        let refused = || {
            fails(Failure::Provider {
                status: 401,
                message: "no such key".into(),
            })
        };
        check(refused, 1, "the provider answered with status 401: no such key").await;
        let failed = || {
            fails(Failure::Harness {
                harness: "codex".into(),
                reason: "its model server refused the key".into(),
            })
        };
        check(failed, 1, "the codex agent failed: its model server refused the key").await;
    }

    #[tokio::test]
    async fn what_is_no_answer_is_counted_and_not_asked_again() {
        let (result, asked) = met(|number, _| match number {
            0 => says("neither"),
            1 => fails(Failure::TimedOut { limit_ms: 60_000 }),
            3 => Met::Unclear { reason: "it broke".into() },
            _ => says("polite"),
        })
        .await;
        let observed = result.unwrap();
        assert!(observed[0].usual[0].as_ref().unwrap_err().contains("\"neither\""));
        assert_eq!(observed[0].usual[1], Err("there was no answer within 1m".into()));
        assert_eq!(observed[1].usual, [Ok("polite".into()), Ok("polite".into())]);
        assert_eq!(asked.len(), 7);
    }
}
