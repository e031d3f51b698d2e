//! The case's `prepare`: a bundle that runs before the agent and may hand a value to the checks (contract 2.4).
//!
//! The value may be a secret that nobody else knows. It stays where the supervisor keeps the step's output: a file of mode 0600 in the
//! sandbox's folder, which nothing inside an isolated sandbox can see. The log has its digest only, so a trial whose sandbox is lost starts over.

use std::sync::Arc;
use std::time::Duration;

use evalgrid_domain::{
    limits::{MAX_PREPARED_BYTES, PREPARE_TIMEOUT_MS},
    outcome,
    redact::{Redactor, is_secret_variable},
};
use evalgrid_sandbox::StepExit;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::{
    account::Account,
    bundle::{self, Bundle},
    output,
    setup::memory_diagnostics,
    trial::{Attempt, StepResult, Stop, called, secrets},
};

/// How long the step may take.
pub(crate) const LIMIT: Duration = Duration::from_millis(PREPARE_TIMEOUT_MS);
const STEP: &str = "prepare";
/// Begins the line with the value.
const RESULT: &str = "SPHYNX_PREPARE_RESULT=";
/// What checks get where nothing was prepared.
const NOTHING: &str = "{}";

/// What was prepared.
pub(crate) struct Prepared {
    /// A JSON object.
    pub(crate) value: String,
    /// Also knows every text of the value, for evidence of the checks that read it.
    pub(crate) redactor: Arc<Redactor>,
}

impl Prepared {
    pub(crate) fn nothing(redactor: Arc<Redactor>) -> Self {
        Self {
            value: NOTHING.into(),
            redactor,
        }
    }
}

/// What the step records. Nothing of the value.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    /// SHA-256 of the value, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
}

impl StepResult for Record {
    fn failed(&self) -> bool {
        self.failure.is_some()
    }
}

/// Runs the step, where the case has one, and takes what it returned into the attempt.
pub(crate) async fn run(attempt: &mut Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let Some(prepare) = attempt.case.prepare.as_ref().filter(|_| !account.is_void()) else {
        return Ok(());
    };
    let restored = account.cache_restored;
    let record = attempt.once(STEP, step(attempt, &prepare.name, &prepare.source, restored)).await?;
    account.diagnostics(record.diagnostics);
    if let Some(failure) = record.failure {
        account.void(failure, &[]);
        return Ok(());
    }
    let exit = called("read what was prepared", attempt.sandbox.ended(STEP)).await?;
    let exit = exit.ok_or_else(|| Stop::lost("what was prepared is not there any more"))?;
    let value = value(&exit).await?;
    if value.as_deref().ok().map(digest) != record.digest {
        return Err(Stop::lost("what was prepared is not what it was"));
    }
    let value = value.unwrap_or_default();
    let known: Vec<&str> = secrets(attempt.lease).collect();
    // A word of the value that is no secret by its name or its look stays readable in what the agent says.
    let mut own = Vec::new();
    if let Ok(Value::Object(map)) = serde_json::from_str(&value) {
        secret_texts("", &Value::Object(map), &mut own);
    }
    attempt.redactor = Arc::new(Redactor::new(known.iter().copied().chain(own.iter().map(String::as_str))));
    attempt.prepared = Prepared {
        redactor: Arc::new(Redactor::new(known.iter().copied().chain([value.as_str()]))),
        value,
    };
    Ok(())
}

async fn step(attempt: &Attempt<'_>, name: &str, source: &str, restored: bool) -> Result<Record, Stop> {
    let mut env = attempt.env();
    env.insert("SPHYNX_CACHE_RESTORED".into(), restored.to_string());
    let bundle = Bundle {
        kind: "prepare",
        step: STEP,
        source,
        env,
        limit: LIMIT,
    };
    let exit = match bundle::run(attempt, bundle).await? {
        Ok(exit) => exit,
        Err(reason) => {
            return Ok(Record {
                failure: Some(outcome::prepare_refused(name, &attempt.redactor.text(&reason))),
                ..Record::default()
            });
        }
    };
    let mut diagnostics = memory_diagnostics(&exit, STEP);
    let failure = if exit.timed_out {
        Some(outcome::set_up_timed_out(&format!("prepare step {name}"), PREPARE_TIMEOUT_MS))
    } else if bundle::is_without_node(&exit) {
        Some(outcome::prepare_refused(name, "there is no node in the sandbox"))
    } else {
        (exit.code != 0).then(|| outcome::prepare_failed(name, exit.code))
    };
    if failure.is_some() {
        let who = format!("The prepare step {name}");
        diagnostics.push(output::last_words(&who, exit.code, &exit.output, &attempt.redactor));
        return Ok(Record {
            failure,
            diagnostics,
            ..Record::default()
        });
    }
    Ok(match value(&exit).await? {
        Ok(value) => Record {
            digest: Some(digest(&value)),
            diagnostics,
            ..Record::default()
        },
        Err(reason) => Record {
            failure: Some(outcome::prepare_refused(name, &reason)),
            diagnostics,
            ..Record::default()
        },
    })
}

/// What the step returned: a JSON object. `Err`: why it cannot be handed on. The reason never shows any of it.
async fn value(exit: &StepExit) -> Result<Result<String, String>, Stop> {
    let last = bundle::read(&exit.output, None::<Vec<u8>>, |last, line| {
        if let Some(value) = line.strip_prefix(RESULT.as_bytes()) {
            // One byte too many is enough to see that there are too many.
            *last = Some(value.trim_ascii().iter().take(MAX_PREPARED_BYTES + 1).copied().collect());
        }
    });
    let Some(value) = last.await? else { return Ok(Ok(NOTHING.into())) };
    if value.len() > MAX_PREPARED_BYTES {
        return Ok(Err(format!("it returned more than {MAX_PREPARED_BYTES} bytes")));
    }
    let value = String::from_utf8(value).ok();
    let value = value.filter(|value| serde_json::from_str::<Map<String, Value>>(value).is_ok());
    Ok(value.ok_or_else(|| "what it returned is no JSON object".to_owned()))
}

fn digest(value: impl AsRef<[u8]>) -> String {
    Sha256::digest(value).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Texts that are secret by the name that they stand under, or by their look.
fn secret_texts(name: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) if is_secret_variable(&words(name), text) => found.push(text.clone()),
        Value::Array(values) => values.iter().for_each(|value| secret_texts(name, value, found)),
        Value::Object(map) => map.iter().for_each(|(name, value)| secret_texts(name, value, found)),
        _ => {}
    }
}

/// `apiKey` as `api_Key`: the words of a name.
fn words(name: &str) -> String {
    let mut words = String::with_capacity(name.len() + 4);
    let mut after_lower = false;
    for c in name.chars() {
        if after_lower && c.is_uppercase() {
            words.push('_');
        }
        after_lower = c.is_lowercase();
        words.push(c);
    }
    words
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_known_by_name_or_look() {
        let value = json!({
            "port": 4173, "mode": "production", "apiKey": "plain-word", "nested": [{ "DB_PASSWORD": ["one two"] }],
            "id": "a1b2c3d4e5f6a7b8", "path": "/srv/a1b2c3d4e5f6a7b8",
        });
        let mut found = Vec::new();
        secret_texts("", &value, &mut found);
        found.sort_unstable();
        assert_eq!(found, ["a1b2c3d4e5f6a7b8", "one two", "plain-word"]);
    }
}
