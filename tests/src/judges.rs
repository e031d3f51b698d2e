//! Judges and simulated people by a model's API: how often each was asked, and what must hold however often everybody is killed.

use std::collections::BTreeMap;

use evalgrid_modelserver::ModelServer;

use crate::agents;

/// Asks of one job whose answer may be lost.
pub const MAX_ASKS: usize = 2;
/// How the failure of a trial ends of which both asks were lost.
pub const STOPPED: &str = "it was asked 2 times, and each time the judge runner stopped before an answer was kept";

/// How often each job was asked, by its idempotency key.
pub fn asks(model: &ModelServer) -> BTreeMap<String, usize> {
    let mut asks = BTreeMap::new();
    for key in model.requests().into_iter().filter_map(|request| request.idempotency_key) {
        *asks.entry(key).or_default() += 1;
    }
    asks
}

/// What a scheduler is told of the model that judges and plays people: a made-up key, and where it is.
pub fn variables(base: &str) -> Vec<(String, String)> {
    vec![
        ("OPENAI_API_KEY".into(), agents::key_of("codex")),
        ("OPENAI_BASE_URL".into(), format!("{base}/v1")),
    ]
}
