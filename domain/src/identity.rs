//! Hashes that say "the same": of a case's definition, of a profile, of a start request.
//!
//! JSON inside these hashes is *canonical*: no white space, keys sorted by their UTF-8 bytes at every depth, numbers as JavaScript writes them.
//! The hashes are stored and compared for ever: the golden vectors in the tests never change.

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    number::Number,
    prompt,
    request::{Profile, Source, SuiteBatchRequest, Validator, effective_source},
};

/// Canonical JSON of a value.
///
/// # Panics
/// Where the value has a map whose keys are not strings; none of ours has.
pub fn canonical_json<T: Serialize + ?Sized>(value: &T) -> String {
    let value = serde_json::to_value(value).expect("our types have string keys only");
    let mut text = String::new();
    write(&value, &mut text);
    text
}

/// Recursive: values come from decoded requests, whose depth is bounded.
fn write(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| key.as_bytes());
            for (index, (key, value)) in entries.into_iter().enumerate() {
                text.push(if index == 0 { '{' } else { ',' });
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                write(value, text);
            }
            text.push_str(if map.is_empty() { "{}" } else { "}" });
        }
        Value::Array(values) => {
            text.push('[');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write(value, text);
            }
            text.push(']');
        }
        Value::Number(number) => {
            let integer = number
                .as_f64()
                .filter(|_| number.is_f64())
                .and_then(|double| Number(double).as_integer());
            text.push_str(&integer.map_or_else(|| number.to_string(), |integer| integer.to_string()));
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hash of what a case asks for: 32 hex digits, the first half of the SHA-256 over these parts, joined by NUL:
///
/// 1. the prompt with its variables filled in;
/// 2. the source of `prepare`, or nothing;
/// 3. the source of a code validator; or the canonical JSON of a judged one without `sourceFiles`; or nothing;
/// 4. `verify`, or nothing;
/// 5. the effective source: `empty`; `repo URL REF` (nothing for a null ref); `files `, then path, space, content of each file, sorted by path;
/// 6. the canonical JSON of `user`, or nothing;
/// 7. the cache as `KEY PATH`, or nothing;
/// 8. only where one of them is set: `limits MAXTURNS TIMEOUTMS`, with nothing for a null.
///
/// Names and tags are not hashed.
///
/// # Panics
/// Where `case` is not an index of the request's cases.
pub fn definition_hash(request: &SuiteBatchRequest, case: usize) -> String {
    let source = effective_source(request, case);
    let case = &request.cases[case];
    let mut parts = vec![
        prompt::render(&request.suite.prompt, &case.variables),
        case.prepare.as_ref().map_or_else(String::new, |prepare| prepare.source.clone()),
        case.validator.as_ref().map_or_else(String::new, validator_text),
        case.verify.clone().unwrap_or_default(),
        source_text(source),
        case.user.as_ref().map_or_else(String::new, canonical_json),
        case.cache
            .as_ref()
            .map_or_else(String::new, |cache| format!("{} {}", cache.key, cache.path)),
    ];
    if case.max_turns.is_some() || case.timeout_ms.is_some() {
        let blank = |limit: Option<u32>| limit.map_or_else(String::new, |limit| limit.to_string());
        parts.push(format!("limits {} {}", blank(case.max_turns), blank(case.timeout_ms)));
    }
    hex(&Sha256::digest(parts.join("\0"))[..16])
}

fn validator_text(validator: &Validator) -> String {
    match validator {
        Validator::Code(validator) => validator.check.source.clone(),
        Validator::Judged(validator) => {
            let mut validator = validator.clone();
            validator.source_files = None;
            canonical_json(&validator)
        }
    }
}

fn source_text(source: &Source) -> String {
    match source {
        Source::Empty => "empty".to_owned(),
        Source::Repo { reference, url } => format!("repo {url} {}", reference.as_deref().unwrap_or_default()),
        Source::Files { files } => {
            let pairs: Vec<_> = files.iter().map(|(path, content)| format!("{path} {content}")).collect();
            format!("files {}", pairs.concat())
        }
    }
}

/// The version of a profile: 32 hex digits, the first half of the SHA-256 of the JSON of an object with `env` (null when absent), `files`,
/// `install`, `run`, `systemPrompt` (null when absent) and, only when there are any, `variables` (sorted, duplicates kept); `env` and `files`
/// are arrays of `[key,value]`, sorted by key. Its name is not hashed: it is part of the variant's identity.
pub fn profile_version(profile: &Profile) -> String {
    let mut object = json!({
        "env": profile.env.as_ref().map(|env| env.iter().collect::<Vec<_>>()),
        "files": profile.files.iter().collect::<Vec<_>>(),
        "install": profile.install,
        "run": profile.run,
        "systemPrompt": profile.system_prompt,
    });
    let mut variables = profile.variables.clone().unwrap_or_default();
    if !variables.is_empty() {
        variables.sort_unstable();
        object["variables"] = json!(variables);
    }
    hex(&Sha256::digest(canonical_json(&object))[..16])
}

/// The hash by which a repeated start is told from another one under the same idempotency key: the SHA-256, 64 hex digits, of the canonical JSON
/// of the decoded request (a [`SuiteBatchRequest`] or a [`crate::request::RunnerStart`]).
pub fn start_hash<T: Serialize>(request: &T) -> String {
    hex(&Sha256::digest(canonical_json(request)))
}
