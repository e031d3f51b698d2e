//! Holds an answer against the contract's list of required, nullable and enumerated fields.

use std::sync::LazyLock;

use serde_json::{Map, Value};

static SCHEMAS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let text = include_str!("../fixtures/contract-schemas.json");
    serde_json::from_str(text).unwrap()
});

/// Which schema the values of a field have; `[]` stands for each element. The list of schemas does not say it itself.
const FIELDS: &[(&str, &str, &str)] = &[
    ("StartedBatch", "runs[]", "StartedBatch.runs[]"),
    ("BatchesListResponse", "batches[]", "EvalBatchSummary"),
    ("BatchesListResponse", "next", "PageCursor"),
    ("EvalBatchSummary", "trigger", "EvalTrigger"),
    ("EvalBatch", "runs[]", "EvalRun"),
    ("EvalBatch", "trigger", "EvalTrigger"),
    ("EvalRun", "case", "EvalRun.case"),
    ("EvalRun", "distribution", "EvalDistribution"),
    ("EvalRun", "setup", "EvalSetup"),
    ("EvalRun", "suite", "EvalSuite"),
    ("EvalRun", "trials[]", "EvalTrial"),
    ("EvalRun", "trigger", "EvalTrigger"),
    ("EvalRun", "variant", "EvalVariant"),
    ("EvalSetup", "source", "EvalSource"),
    ("EvalTrial", "artifacts[]", "EvalTrial.artifacts[]"),
    ("EvalTrial", "trajectory[]", "EvalJournalEntry"),
    ("EvalTrial", "usage", "EvalUsage"),
    ("EvalTrial", "validations[]", "EvalValidation"),
    ("EvalTrial", "verifySteps[]", "EvalVerifyStep"),
    ("EvalValidation", "input", "ValidationValue"),
    ("EvalValidation", "output", "ValidationValue"),
    ("EvalValidation", "error", "ValidationValue"),
    ("EvalValidation", "judgment", "EvalValidation.judgment"),
    ("EvalValidation.judgment", "usage", "EvalValidation.judgment.usage"),
    ("EvalBatchTail", "events[]", "EvalTailEvent"),
    ("EvalBatchTail", "next[]", "EvalTailMark"),
    ("EvalTailEvent", "entry", "EvalJournalEntry"),
    ("Whoami", "credential", "WhoamiCredential"),
    ("Whoami", "organization", "Whoami.organization"),
    ("HttpApiDecodeError", "issues[]", "Issue"),
];

/// Fields of ours beside the contract's.
const EXTRA: &[(&str, &str)] = &[
    ("EvalBatch", "retryOf"),
    ("EvalBatch", "regradeOf"),
    ("EvalTrial", "before"),
    ("EvalTrial", "carried"),
    ("EvalDistribution", "cancelled"),
    ("EvalBatchSummary", "cancelled"),
    ("EvalBatchSummary", "regradeOf"),
    ("EvalVariant", "provider"),
    ("EvalTrial", "coverage"),
    ("EvalTrial", "diagnostics"),
    ("EvalTrial", "fileChanges"),
    ("EvalTrial", "lostAttempts"),
    ("EvalTrial", "mockCalls"),
    ("EvalTrial", "sourceCommit"),
    ("EvalTrial", "timing"),
];

/// Timestamps, wherever they are.
const INSTANTS: &[&str] = &["startedAt", "finishedAt", "expiresAt"];

fn names<'a>(schema: &'a Value, list: &str) -> Vec<&'a str> {
    schema[list].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Asserts that `value` is what the contract calls `schema`.
pub fn check(schema: &str, value: &Value) {
    walk(schema, value, schema);
}

fn walk(name: &str, value: &Value, path: &str) {
    // A member of a union has the schema `Union#tag` beside the union's own.
    let tag = value.get("_tag").or_else(|| value.get("kind")).and_then(Value::as_str);
    let member = tag.map(|tag| format!("{name}#{tag}")).filter(|member| SCHEMAS.contains_key(member));
    let exact = member.as_deref().unwrap_or(name);
    let schema = SCHEMAS.get(exact).unwrap_or_else(|| panic!("no schema {exact}"));
    let object = value.as_object().unwrap_or_else(|| panic!("{path} is no object: {value}"));
    let (required, optional, nullable) = (names(schema, "required"), names(schema, "optional"), names(schema, "nullable"));
    for key in &required {
        assert!(object.contains_key(*key), "{path}.{key} is missing");
    }
    for (key, value) in object {
        let known = required.contains(&key.as_str()) || optional.contains(&key.as_str()) || EXTRA.contains(&(name, key.as_str()));
        assert!(known, "{path}.{key} is not documented");
        assert!(
            !value.is_null() || nullable.contains(&key.as_str()),
            "{path}.{key} must not be null"
        );
    }
    for (field, allowed) in schema["enums"].as_object().into_iter().flatten() {
        let allowed = allowed.as_array().unwrap();
        for (value, path) in values(object, field, path) {
            assert!(
                value.is_null() || allowed.contains(value),
                "{path} is {value}, not one of {allowed:?}"
            );
        }
    }
    for (_, field, child) in FIELDS.iter().filter(|(schema, _, _)| *schema == name) {
        for (value, path) in values(object, field, path).into_iter().filter(|(value, _)| !value.is_null()) {
            walk(child, value, &path);
        }
    }
    for key in INSTANTS {
        if let Some(Value::String(text)) = object.get(*key) {
            let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
            assert_eq!(shape, "0000-00-00T00:00:00.000Z", "{path}.{key}");
        }
    }
}

/// The values of `field`, each with its path.
fn values<'a>(object: &'a Map<String, Value>, field: &str, path: &str) -> Vec<(&'a Value, String)> {
    match field.strip_suffix("[]") {
        None => object
            .get(field)
            .map(|value| (value, format!("{path}.{field}")))
            .into_iter()
            .collect(),
        Some(field) => {
            let elements = object.get(field).and_then(Value::as_array).into_iter().flatten();
            elements
                .enumerate()
                .map(|(index, value)| (value, format!("{path}.{field}[{index}]")))
                .collect()
        }
    }
}
