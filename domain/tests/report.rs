//! Reports of a client's own machine: what is taken, what is refused, and that no secret is kept.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::{
    evidence::JournalEntry,
    outcome::TrialStatus,
    redact::Redactor,
    report::{ReportedResult, decode_report},
};
use serde_json::{Value, json};

const RUN: &str = "run_00000000000000000000000000";

fn scored() -> Value {
    json!({
        "runId": format!("{RUN}01"),
        "ordinal": 1,
        "sandboxId": "/tmp/sphynx-local-1",
        "usage": {"cacheReadTokens": 1, "cacheWriteTokens": 2, "inputTokens": 3, "outputTokens": 4, "totalTokens": 10, "cacheWrite1hTokens": 1},
        "userSpend": {"model": "m", "usage": null},
        "events": [
            {"_tag": "Started", "model": "m", "sessionId": "s"},
            {"_tag": "Message", "at": 1.5, "role": "assistant", "text": "the key is hunter2hunter2"},
            {"_tag": "Command", "at": 2, "command": "false", "exitCode": 1, "output": "hunter2hunter2\u{0}"},
            {"_tag": "Command", "command": "true", "exitCode": null, "output": ""},
            {"_tag": "FileChange", "paths": ["b", "a", "b"]},
            {"_tag": "ToolCall", "callId": null, "input": "{}", "name": "search", "status": null, "error": "hunter2hunter2"},
            {"_tag": "Finished", "reason": "done"},
        ],
        "outcome": {
            "artifacts": [{"path": "out/hunter2hunter2", "byteSize": 1, "sha256": "a".repeat(64)}],
            "commandCount": 2, "exitCode": 0, "modelMs": 5, "sandboxMs": 6, "status": "passed",
            "validations": [validation()],
            "verifySteps": [{"command": "test hunter2hunter2", "exitCode": 0}],
            "voidFields": ["stdout", "stdout"],
        },
    })
}

fn validation() -> Value {
    let value = json!({"text": "hunter2hunter2", "format": "text", "state": "captured", "truncated": false});
    json!({
        "id": "command:0", "index": 0, "name": "verify", "kind": "command", "status": "passed", "startedAt": 1.0, "durationMs": 3,
        "message": "hunter2hunter2", "exitCode": 0, "truncated": false, "input": value, "output": value, "error": null, "calls": [], "logs": [],
    })
}

#[test]
fn a_scored_report_is_kept_without_its_secrets() {
    let mut report = decode_report(&scored()).unwrap();
    assert_eq!((report.run.run, report.ordinal, report.journal.len()), (1, 1, 5));
    assert_eq!(report.usage.unwrap().cache_write_1h_tokens, Some(1));
    let kept = report.keep(&Redactor::new(["hunter2hunter2"]));
    assert_eq!((kept.failed_commands, kept.timed, kept.failure.as_deref()), (1, true, None));
    assert_eq!(kept.evidence.files_changed, ["a", "b"]);
    assert_eq!(kept.evidence.void_fields, ["stdout"]);
    let text = serde_json::to_string(&kept.evidence).unwrap();
    assert!(!text.contains("hunter2") && text.matches("[redacted]").count() >= 8, "{text}");
    assert!(
        matches!(
            &kept.evidence.trajectory[2],
            JournalEntry::Command {
                finished_at_millis: None,
                ..
            }
        ),
        "unknown is not zero"
    );
    let ReportedResult::Ended(outcome) = report.result else { panic!() };
    assert_eq!((outcome.status, outcome.commands, outcome.exit_code), (TrialStatus::Passed, 2, 0));
    assert_eq!(outcome.user_spend, Some(("m".into(), None)));
}

#[test]
fn a_broken_report_says_why() {
    let report = json!({"runId": format!("{RUN}00"), "ordinal": 2, "events": [], "failure": "\n the key hunter2hunter2 is wrong\nmore"});
    let mut report = decode_report(&report).unwrap();
    assert_eq!((&report.sandbox_id, &report.usage), (&None, &None));
    let kept = report.keep(&Redactor::new(["hunter2hunter2"]));
    assert_eq!(kept.failure.as_deref(), Some("the key [redacted] is wrong"));
}

#[test]
fn what_is_wrong_is_named_and_no_value_repeated() {
    let check = |pointer: &str, value: Value, path: &str| {
        let mut report = scored();
        match report.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => {
                let (parent, key) = pointer.rsplit_once('/').unwrap();
                report.pointer_mut(parent).unwrap()[key] = value;
            }
        }
        let issues = decode_report(&report).unwrap_err();
        assert!(
            issues.iter().any(|issue| issue.to_string().starts_with(path)),
            "{pointer}: {issues:?}"
        );
        assert!(issues.iter().all(|issue| !issue.to_string().contains("hunter2")), "{issues:?}");
    };
    check("/ordinal", json!(0), "ordinal: ");
    check("/runId", json!(7), "runId: ");
    check("/events/1/role", json!("system"), "events[1].role: ");
    check("/events/2/exitCode", json!("hunter2"), "events[2].exitCode: ");
    check("/events/3", json!({"_tag": "Usage"}), "events[3]._tag: ");
    check("/events/5", json!({"_tag": "ToolCall"}), "events[5].callId: is missing");
    check("/usage/inputTokens", json!(-1), "usage.inputTokens: ");
    check("/outcome/status", json!("timed out"), "outcome.status: ");
    check("/outcome/artifacts/0/sha256", json!("hunter2"), "outcome.artifacts[0].sha256: ");
    check("/outcome/validations/0", json!({"id": "hunter2"}), "outcome.validations[0].");
    check("/outcome/validations/0/kind", json!("hunter2"), "outcome.validations[0]: ");
    check("/outcome/validations", json!(vec![validation(); 41]), "outcome.validations: ");
    check("/failure", json!("and an outcome"), "Expected either");
    check("/outcome/modelMs", json!(1.5), "outcome.modelMs: ");
}

#[test]
fn a_report_without_a_verdict_lacks_its_outcome() {
    let mut report = scored();
    report.as_object_mut().unwrap().remove("outcome");
    assert_eq!(decode_report(&report).unwrap_err()[0].to_string(), "outcome: is missing");
}
