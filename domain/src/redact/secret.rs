//! Which values are secret, and which parts of them.

use std::collections::BTreeSet;

use serde_json::Value;

use super::MIN_SECRET;
use crate::decode::parse_json;

/// Nested containers of a credential's JSON value that are looked into.
const MAX_DEPTH: usize = 32;

/// Collects what is secret of a value that is known to be one.
pub(super) fn collect(value: &str, secrets: &mut BTreeSet<String>) {
    let value = value.trim();
    if let Some(parts) = url_secrets(value) {
        parts.into_iter().for_each(|part| add(&part, secrets));
        return;
    }
    add(value, secrets);
    // A key of several lines is often shown line by line.
    if value.contains('\n') {
        value.lines().for_each(|line| add(line.trim(), secrets));
    }
    if value.starts_with(['{', '['])
        && let Ok(json) = parse_json(value.as_bytes(), MAX_DEPTH)
    {
        strings(&json, secrets);
    }
}

fn add(value: &str, secrets: &mut BTreeSet<String>) {
    if value.chars().count() >= MIN_SECRET {
        secrets.insert(value.to_owned());
    }
}

fn strings(json: &Value, secrets: &mut BTreeSet<String>) {
    match json {
        Value::String(text) => collect(text, secrets),
        Value::Array(values) => values.iter().for_each(|value| strings(value, secrets)),
        Value::Object(map) => map.values().for_each(|value| strings(value, secrets)),
        _ => {}
    }
}

/// The secret parts of a URL: its password, unless that is letters only, also percent-decoded; and what looks like a token as its user name or
/// as a value of its query. None: the value is not a URL.
fn url_secrets(value: &str) -> Option<Vec<String>> {
    let (scheme, rest) = value.split_once("://")?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte));
    if !is_scheme || value.contains(char::is_whitespace) {
        return None;
    }
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let mut parts = Vec::new();
    if let Some((user_info, _)) = authority.rsplit_once('@') {
        let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
        if is_token_shaped(user) {
            parts.push(user.to_owned());
        }
        if password.chars().any(|c| !c.is_ascii_alphabetic()) {
            parts.push(password.to_owned());
            parts.extend(percent_decode(password));
        }
    }
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    let values = query.split('&').filter_map(|pair| pair.split_once('='));
    parts.extend(
        values
            .map(|(_, value)| value)
            .filter(|value| is_token_shaped(value))
            .map(str::to_owned),
    );
    Some(parts)
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = (*first == b'%').then(|| tail.get(..2)).flatten();
        let decoded = hex
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8(bytes).ok().filter(|decoded| decoded != text)
}

/// A value that looks like a token: at least 16 characters, letters and digits, and no path.
pub fn is_token_shaped(value: &str) -> bool {
    value.chars().count() >= 16
        && !value.starts_with(['/', '.', '~'])
        && !value.contains(char::is_whitespace)
        && value.contains(|c: char| c.is_ascii_alphabetic())
        && value.contains(|c: char| c.is_ascii_digit())
}

/// Words that make a variable's name that of a secret.
const SECRET_WORDS: &[&str] = &[
    "apikey",
    "auth",
    "cookie",
    "credential",
    "credentials",
    "dsn",
    "key",
    "passphrase",
    "passwd",
    "password",
    "pat",
    "private",
    "pwd",
    "secret",
    "session",
    "token",
];

/// Whether a variable of a host's environment is secret, by its name or by its value.
pub fn is_secret_variable(name: &str, value: &str) -> bool {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric());
    words.map(str::to_ascii_lowercase).any(|word| SECRET_WORDS.contains(&word.as_str())) || is_token_shaped(value)
}
