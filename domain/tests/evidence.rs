//! Evidence: the JSON has exactly the contract's fields, limits hold, and redaction comes before cutting.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use evalgrid_domain::{
    evidence::*,
    limits::*,
    number::Number,
    outcome::{Distribution, Usage},
    permission::Permission,
    redact::Redactor,
    request::*,
};
use serde::Serialize;
use serde_json::{Value, json};

fn schemas() -> Value {
    serde_json::from_str(include_str!("fixtures/contract-schemas.json")).unwrap()
}

fn names(schema: &Value, list: &str) -> BTreeSet<String> {
    schema[list]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

/// `least` has every optional field absent, `most` every one present.
fn check_shape(schemas: &Value, name: &str, least: &impl Serialize, most: &impl Serialize, filled: &[&str]) {
    let schema = &schemas[name];
    assert!(schema.is_object(), "{name}");
    let keys = |value: Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let (mut required, optional, nullable) = (names(schema, "required"), names(schema, "optional"), names(schema, "nullable"));
    let all: BTreeSet<_> = required.union(&optional).cloned().collect();
    assert_eq!(keys(serde_json::to_value(most).unwrap()), all, "{name}: all fields");
    // Optional fields that our decoded form always fills in.
    required.extend(filled.iter().map(|field| (*field).to_owned()));
    let least = serde_json::to_value(least).unwrap();
    assert_eq!(keys(least.clone()), required, "{name}: required fields");
    for (key, value) in least.as_object().unwrap() {
        assert!(!value.is_null() || nullable.contains(key), "{name}.{key} must not be null");
    }
}

fn value() -> ValidationValue {
    ValidationValue::text("v")
}

fn validation(most: bool) -> Validation {
    Validation {
        calls: vec![],
        duration_ms: None,
        error: None,
        exit_code: None,
        id: "code:0".into(),
        index: 0,
        input: value(),
        judgment: most.then(|| judgment(true)),
        kind: ValidationKind::Code,
        logs: vec![],
        message: "m".into(),
        metadata: most.then(value),
        name: "n".into(),
        output: value(),
        started_at: None,
        status: ValidationStatus::Passed,
        truncated: false,
    }
}

fn judgment(most: bool) -> Judgment {
    Judgment {
        choice: None,
        duration_ms: 1,
        error: None,
        evaluator: "openai".into(),
        model: "m".into(),
        name: "n".into(),
        reason: "r".into(),
        score: None,
        threshold: Number(1.0),
        usage: most.then(JudgeUsage::default),
    }
}

fn message(text: &str) -> JournalEntry {
    JournalEntry::Message {
        finished_at_millis: None,
        role: None,
        text: text.into(),
        usage: None,
    }
}

fn command(output: String) -> JournalEntry {
    JournalEntry::Command {
        command: "c".into(),
        exit_code: Some(0),
        finished_at_millis: None,
        output,
        output_truncated: false,
        started_at_millis: None,
    }
}

fn tool(text: Option<String>, truncated: bool) -> JournalEntry {
    JournalEntry::ToolCall {
        error: text.clone(),
        error_truncated: truncated,
        finished_at_millis: None,
        input: text.clone(),
        input_truncated: truncated,
        name: "t".into(),
        output: text.clone(),
        output_truncated: truncated,
        started_at_millis: text.map(|_| Number(1.0)),
        status: None,
    }
}

#[test]
fn evidence_has_the_contracts_fields() {
    let s = &schemas();
    let cut_command = JournalEntry::Command {
        command: "c".into(),
        exit_code: None,
        finished_at_millis: None,
        output: String::new(),
        output_truncated: true,
        started_at_millis: None,
    };
    check_shape(s, "EvalJournalEntry#command", &command(String::new()), &cut_command, &[]);
    let said = JournalEntry::Message {
        finished_at_millis: None,
        role: Some(Role::User),
        text: "t".into(),
        usage: Some(Usage::default()),
    };
    check_shape(s, "EvalJournalEntry#message", &message("m"), &said, &[]);
    check_shape(
        s,
        "EvalJournalEntry#toolCall",
        &tool(None, false),
        &tool(Some("x".into()), true),
        &[],
    );
    let change = JournalEntry::FileChange {
        finished_at_millis: None,
        paths: vec![],
    };
    check_shape(s, "EvalJournalEntry#fileChange", &change, &change, &[]);
    check_shape(
        s,
        "EvalUsage",
        &Usage::default(),
        &Usage {
            cost_usd: Some(Number(1.0)),
            ..Usage::default()
        },
        &[],
    );
    check_shape(s, "EvalValidation", &validation(false), &validation(true), &[]);
    check_shape(s, "EvalValidation.judgment", &judgment(false), &judgment(true), &[]);
    let usage = JudgeUsage {
        cache_write_1h_tokens: Some(1),
        cost_usd: Some(Number(1.0)),
        ..JudgeUsage::default()
    };
    check_shape(s, "EvalValidation.judgment.usage", &JudgeUsage::default(), &usage, &[]);
    check_shape(s, "ValidationValue", &value(), &value(), &[]);
    let log = ValidationLog {
        at: Number(1.0),
        index: 0,
        level: LogLevel::Stdout,
        value: value(),
    };
    check_shape(s, "EvalValidation.logs[]", &log, &log, &[]);
    let call = ValidationCall {
        duration_ms: None,
        error: None,
        index: 0,
        input: value(),
        method: CallMethod::Exec,
        output: value(),
        started_at: Number(1.0),
    };
    check_shape(s, "ValidationCall", &call, &call, &[]);
    let step = VerifyStep {
        command: "c".into(),
        exit_code: 0,
    };
    check_shape(s, "EvalVerifyStep", &step, &step, &[]);
    let artifact = Artifact {
        byte_size: 1,
        path: "p".into(),
        sha256: "0".repeat(64),
        text: None,
    };
    check_shape(s, "EvalTrial.artifacts[]", &artifact, &artifact, &[]);
    check_shape(s, "EvalDistribution", &Distribution::default(), &Distribution::default(), &[]);
}

#[test]
fn requests_have_the_contracts_fields() {
    let s = &schemas();
    let request = |most: bool| {
        let mut body = json!({
            "suite": {"id": "s", "prompt": "p"}, "trials": 1, "cases": [{"id": "c"}],
            "variants": [{"harness": "claude", "model": "m"}, {"harness": "command", "model": "m", "profile": {"name": "p", "files": {}}}],
        });
        let judge = |by: &str, name: &str, most: bool| {
            let mut judge = json!({"kind": "judge", "name": name, "model": "m", "prompt": "p", "choices": {"y": 1}});
            judge[by] = json!(if by == "harness" { "codex" } else { "openai" });
            if most {
                judge["expected"] = json!("e");
                judge["files"] = json!(["f"]);
            }
            judge
        };
        let check = if most {
            json!({"name": "n", "source": "s", "capture": true, "manifest": [{"index": 0, "name": "n"}]})
        } else {
            json!({"name": "n", "source": "s"})
        };
        let mut code = check.clone();
        let mut judged = json!({"kind": "judged", "name": "v", "checks": [check], "judges": [judge("provider", "a", most), judge("harness", "b", most)]});
        if most {
            judged["capture"] = json!(true);
            judged["sourceFiles"] = json!([{"path": "p", "content": "c"}]);
            code["sourceFiles"] = json!([]);
            body["cases"][0]["cache"] = json!({"key": "k", "path": "p"});
            body["cases"][0]["source"] = json!({"kind": "repo", "url": "u", "ref": null});
            body["variants"][0]["credentials"] = json!({"harnessRef": "a", "sandboxRef": "b"});
            body["variants"][0]["profile"] = json!({"name": "p", "files": {}});
            body["variants"][1]["profile"] =
                json!({"name": "p", "files": {}, "env": {}, "install": "i", "run": "r", "systemPrompt": "s", "variables": []});
        }
        body["cases"][0]["prepare"] = json!({"name": "n", "source": "s"});
        body["cases"][0]["validator"] = judged;
        body["cases"][0]["user"] = json!({"kind": "simulated", "goal": "g", "prompt": "p"});
        if most {
            body["cases"][0]["user"]["harness"] = json!("pi");
            body["cases"][0]["user"]["model"] = json!("m");
        }
        let mut second = body["cases"][0].clone();
        second["id"] = json!("d");
        second["validator"] = code;
        second["user"] = json!({"kind": "scripted", "replies": ["r"]});
        second["source"] = json!({"kind": "files", "files": {}});
        body["cases"].as_array_mut().unwrap().push(second);
        serde_json::to_value(decode_start(&body).unwrap()).unwrap()
    };
    let (least, most) = (request(false), request(true));
    for (name, pointer, filled) in [
        ("SuiteBatchRequest", "", &["checksIn"][..]),
        ("EvalSuiteRequest", "/suite", &["name", "source"]),
        (
            "EvalCase",
            "/cases/0",
            &[
                "maxTurns",
                "name",
                "prepare",
                "tags",
                "timeoutMs",
                "user",
                "validator",
                "variables",
                "verify",
            ],
        ),
        ("EvalPrepare", "/cases/0/prepare", &[]),
        ("EvalValidator#judged", "/cases/0/validator", &[]),
        ("EvalValidator.check", "/cases/0/validator/checks/0", &[]),
        (
            "EvalValidator.judge#provider",
            "/cases/0/validator/judges/0",
            &["threshold", "timeoutMs"],
        ),
        (
            "EvalValidator.judge#harness",
            "/cases/0/validator/judges/1",
            &["threshold", "timeoutMs"],
        ),
        ("EvalValidator#code", "/cases/1/validator", &[]),
        ("EvalCase.user#scripted", "/cases/1/user", &[]),
        ("EvalSource#files", "/cases/1/source", &[]),
        ("EvalVariantRequest", "/variants/0", &["sandbox"]),
        ("HarnessProfile", "/variants/1/profile", &[]),
    ] {
        // The source of the least request is absent.
        let at = |request: &'_ Value, other: &'_ Value| request.pointer(pointer).unwrap_or_else(|| other.pointer(pointer).unwrap()).clone();
        let mut least = at(&least, &most);
        if name == "EvalCase" {
            // Checked below: what is null here is filled by the fixture.
            least["verify"] = Value::Null;
        }
        check_shape(s, name, &least, &at(&most, &least), filled);
    }
    for (name, request, pointer) in [
        ("EvalCase.user#simulatedByModel", &least, "/cases/0/user"),
        ("EvalCase.user#simulatedByHarness", &most, "/cases/0/user"),
        ("CaseCache", &most, "/cases/0/cache"),
        ("EvalSource#repo", &most, "/cases/0/source"),
        ("SourceFile", &most, "/cases/0/validator/sourceFiles/0"),
        ("EvalValidator.manifest[]", &most, "/cases/0/validator/checks/0/manifest/0"),
    ] {
        let value = request.pointer(pointer).unwrap();
        check_shape(s, name, value, value, &[]);
    }
    let source = serde_json::to_value(Source::Empty).unwrap();
    check_shape(s, "EvalSource#empty", &source, &source, &[]);
    let trigger = |url| Trigger {
        source: TriggerSource::Ci,
        url,
    };
    check_shape(s, "EvalTrigger", &trigger(None), &trigger(Some("u".into())), &[]);
}

#[test]
fn names_are_the_contracts() {
    let s = schemas();
    let listed = |schema: &str, field: &str| names(&s[schema]["enums"], field);
    fn ours<T>(all: &[(&str, T)]) -> BTreeSet<String> {
        all.iter().map(|(name, _)| (*name).to_owned()).collect()
    }
    let with = |mut names: BTreeSet<String>, more: &[&str]| {
        names.extend(more.iter().map(|name| (*name).to_owned()));
        names
    };
    assert_eq!(ours(Harness::ALL), with(listed("EvalVariant", "harness"), &["bub"]));
    assert_eq!(
        ours(Sandbox::ALL),
        with(listed("EvalVariant", "sandbox"), &["bubblewrap", "docker", "process"])
    );
    assert_eq!(ours(TriggerSource::ALL), listed("EvalTrigger", "source"));
    assert_eq!(ours(Permission::ALL), listed("Whoami", "permissions[]"));
    assert_eq!(ours(ValidationKind::ALL), listed("EvalValidation", "kind"));
    assert_eq!(ours(ValidationStatus::ALL), listed("EvalValidation", "status"));
    assert_eq!(ours(CallMethod::ALL), listed("ValidationCall", "method"));
    assert_eq!(ours(ValueFormat::ALL), listed("ValidationValue", "format"));
    assert_eq!(ours(ValueState::ALL), listed("ValidationValue", "state"));
    assert_eq!(ours(LogLevel::ALL), listed("EvalValidation.logs[]", "level"));
    assert_eq!(ours(Role::ALL), listed("EvalJournalEntry#message", "role"));
    assert_eq!(ours(evalgrid_domain::outcome::TrialStatus::ALL), listed("EvalTrial", "status"));
    let judging: BTreeSet<_> = Harness::ALL
        .iter()
        .filter(|(_, harness)| harness.may_judge())
        .map(|(name, _)| (*name).to_owned())
        .collect();
    assert_eq!(judging, listed("EvalValidator.judge#harness", "harness"));
}

#[test]
fn tags_and_numbers_on_the_wire() {
    let entry = JournalEntry::Command {
        command: "ls".into(),
        exit_code: None,
        finished_at_millis: Some(Number(1_700_000_000_000.5)),
        output: "o".into(),
        output_truncated: true,
        started_at_millis: Some(1_700_000_000_000u64.into()),
    };
    let expected = r#"{"_tag":"command","command":"ls","exitCode":null,"finishedAtMillis":1700000000000.5,"output":"o","outputTruncated":true,"startedAtMillis":1700000000000}"#;
    assert_eq!(serde_json::to_string(&entry).unwrap(), expected);
    for entry in [
        entry,
        message("m"),
        tool(Some("x".into()), false),
        tool(None, true),
        JournalEntry::FileChange {
            finished_at_millis: None,
            paths: vec!["p".into()],
        },
    ] {
        assert_eq!(
            serde_json::from_value::<JournalEntry>(serde_json::to_value(&entry).unwrap()).unwrap(),
            entry
        );
    }
    assert_eq!(
        serde_json::from_str::<TrialEvidence>(&serde_json::to_string(&TrialEvidence::default()).unwrap()).unwrap(),
        TrialEvidence::default()
    );
}

#[test]
fn sealing_redacts_first() {
    let redactor = Redactor::new(["my-secret-value"]);
    // The secret crosses the cut: it goes whole.
    let text = format!("{}my-secret-value{}", "x".repeat(MAX_EVIDENCE_TEXT - 5), "y".repeat(100));
    let mut entry = command(text.clone());
    entry.seal(&redactor);
    let JournalEntry::Command {
        output, output_truncated, ..
    } = &entry
    else {
        panic!()
    };
    assert!(*output_truncated && output.len() == MAX_EVIDENCE_TEXT && output.ends_with("x[reda"));
    let mut entry = tool(Some(text.clone()), false);
    entry.seal(&redactor);
    let JournalEntry::ToolCall {
        input: Some(input),
        input_truncated,
        error_truncated,
        output_truncated,
        ..
    } = &entry
    else {
        panic!()
    };
    assert!(*input_truncated && *error_truncated && *output_truncated && input.len() == MAX_EVIDENCE_TEXT && !input.contains("my-"));
    let mut entry = message(&text);
    entry.seal(&redactor);
    let JournalEntry::Message { text, .. } = &entry else { panic!() };
    assert!(text.len() > MAX_EVIDENCE_TEXT && text.contains("[redacted]"));
    let mut exact = command("z".repeat(MAX_EVIDENCE_TEXT));
    exact.seal(&redactor);
    assert!(matches!(
        exact,
        JournalEntry::Command {
            output_truncated: false,
            ..
        }
    ));
}

#[test]
fn validations_have_limits() {
    let mut record = validation(true);
    record.message = format!("{}my-secret-value", "m".repeat(1_995));
    record.output = ValidationValue::text("o".repeat(20_000));
    record.judgment.as_mut().unwrap().reason = "my-secret-value".into();
    record.logs = (0..70)
        .map(|index| ValidationLog {
            at: Number(0.0),
            index,
            level: LogLevel::Stderr,
            value: ValidationValue::text("l".repeat(2_000)),
        })
        .collect();
    record.seal(&Redactor::new(["my-secret-value"]));
    assert!(record.truncated && record.message.ends_with("m[reda") && record.message.len() == MAX_VALIDATION_MESSAGE);
    assert_eq!(record.output.text.len(), MAX_VALIDATION_VALUE);
    assert_eq!(record.logs.len(), MAX_VALIDATION_CALLS);
    assert_eq!(record.judgment.as_ref().unwrap().reason, "[redacted]");
    let total: usize = record.logs.iter().map(|log| log.value.text.len()).sum::<usize>() + MAX_VALIDATION_VALUE + 2;
    assert_eq!(total, MAX_VALIDATION_TOTAL);
    let mut small = validation(true);
    small.seal(&Redactor::default());
    assert_eq!(small, validation(true));
}
