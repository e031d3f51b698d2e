//! Start requests.

use serde_json::{Value, json};

/// A batch of the command harness: `cases` cases of `trials` trials, one variant, `run` and `verify` as given.
pub fn command_batch(cases: usize, trials: usize, sandbox: &str, run: &str, verify: &str) -> Value {
    let cases: Vec<Value> = (0..cases)
        .map(|index| json!({ "id": format!("case-{index}"), "verify": verify }))
        .collect();
    json!({
        "suite": { "id": "load", "prompt": "Do the work." },
        "cases": cases,
        "variants": [{
            "harness": "command",
            "model": "none",
            "sandbox": sandbox,
            "profile": { "name": "load", "files": {}, "run": run },
        }],
        "trials": trials,
    })
}

/// Every trial of a batch as the API answers it.
pub fn trials(batch: &Value) -> Vec<&Value> {
    let runs = batch["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    runs.iter()
        .flat_map(|run| run["trials"].as_array().map(Vec::as_slice).unwrap_or_default())
        .collect()
}
