//! What an agent's error message means, and what to do about it.
//!
//! Exit codes lie: some agents exit 0 after a refused key, some never exit. So failures are read from what the agents print, in their words, and
//! told in ours, with theirs behind.

use crate::agent::Agent;

/// Whether an error that an agent printed says that its model server limits requests.
pub(crate) fn is_limit(message: &str, status: Option<u16>) -> bool {
    match status.or_else(|| status_in(first_line(message))) {
        Some(status) => status == 429,
        None => LIMITED.iter().any(|text| message.to_lowercase().contains(text)),
    }
}

fn first_line(message: &str) -> &str {
    message.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default()
}

/// What to tell about an error that an agent printed. `status` is the HTTP status where the agent names it apart from the text.
pub(crate) fn explain(agent: &Agent, message: &str, status: Option<u16>) -> String {
    let message = first_line(message);
    let lower = message.to_lowercase();
    let has = |texts: &[&str]| texts.iter().any(|text| lower.contains(text));
    let meaning = match status.or_else(|| status_in(message)) {
        Some(status @ (401 | 403)) => format!("its model server refused the key ({status}); check {}", agent.key),
        Some(404) => "its model server does not know the address or the model (404); check the base URL and the variant's model".into(),
        Some(429) => "its model server limits its requests (429); run fewer trials at once, or raise the limit".into(),
        Some(status @ 500..) => format!("its model server failed ({status}); run the trial again later"),
        Some(status) => format!("its model server refused the request ({status})"),
        None if has(LIMITED) => "its model server limits its requests; run fewer trials at once, or raise the limit".into(),
        None if has(UNREACHABLE) => "its model server could not be reached; check the base URL and the sandbox's network".into(),
        None if has(CUT) => "its model server's answer broke off; run the trial again".into(),
        None if has(BUSY) => "its model server is overloaded; run the trial again later".into(),
        None if message.is_empty() => return "it gave no reason".into(),
        None => return message.to_owned(),
    };
    match message {
        "" => meaning,
        message => format!("{meaning}: {message}"),
    }
}

/// No connection came about.
const UNREACHABLE: &[&str] = &[
    "connectionrefused",
    "connection refused",
    "econnrefused",
    "unable to connect",
    "connection error",
    "connection failed",
    "error sending request",
    "fetch failed",
    "enotfound",
    "eai_again",
    "etimedout",
    "waiting for network",
    "could not resolve",
    "name or service not known",
];
/// One came about and ended too early.
const CUT: &[&str] = &[
    "stream closed",
    "stream disconnected",
    "stream ended",
    "without a finish reason",
    "empty or malformed response",
    "econnreset",
    "connection reset",
    "connection was lost",
    "socket hang up",
    "terminated",
    "premature close",
    "incomplete chunked read",
    "other side closed",
    "socket connection was closed",
];
/// The server says without a status that there are too many requests.
const LIMITED: &[&str] = &["too many requests", "rate limit", "quota"];
/// The server says without a status that it cannot.
const BUSY: &[&str] = &["high demand", "overloaded"];

/// An HTTP status of a failure in a text: three digits at its beginning, or behind a word that announces one.
fn status_in(message: &str) -> Option<u16> {
    let mut words = message.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    // A text may also begin with it.
    let mut announced = true;
    words.find_map(|word| {
        let status = word
            .parse()
            .ok()
            .filter(|status| announced && word.len() == 3 && (400..=599).contains(status));
        announced = matches!(
            word.to_ascii_lowercase().as_str(),
            "status" | "error" | "code" | "http" | "statuscode" | "rejected"
        );
        status
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_with_what_to_do() {
        let agent = Agent { name: "x", key: "X_KEY" };
        for (message, status, expected) in [
            (
                "unexpected status 401 Unauthorized: fake",
                None,
                "refused the key (401); check X_KEY: unexpected",
            ),
            ("Failed to authenticate. API Error: 401 fake 401", None, "(401)"),
            ("Error code: 429 - slow down", None, "limits its requests (429)"),
            ("exceeded retry limit, last status: 429", None, "(429)"),
            ("whatever", Some(500), "failed (500); run the trial again later: whatever"),
            ("", Some(503), "failed (503)"),
            ("model not found", Some(404), "does not know the address or the model"),
            ("bad request", Some(400), "refused the request (400)"),
            ("We're currently experiencing high demand", None, "overloaded"),
            ("Unable to connect to API (ConnectionRefused)", None, "could not be reached"),
            (
                "stream disconnected before completion: stream closed before response.completed",
                None,
                "broke off",
            ),
            ("401 Incorrect API key", None, "(401)"),
            ("429 Rate limit reached", None, "(429)"),
            ("[API Error: Rate limit reached for requests]", None, "limits its requests; run"),
            ("Connection reset by server", None, "broke off"),
            ("the file has 404 lines", None, "the file has 404 lines"),
            ("\n  first line\nsecond", None, "first line"),
            (" \n", None, "it gave no reason"),
        ] {
            let told = explain(&agent, message, status);
            assert!(told.contains(expected), "{message}: {told}");
            assert_eq!(is_limit(message, status), told.contains("limits its requests"), "{message}");
        }
    }
}
