//! What is made ready for a built-in agent, and what becomes of its output: a stand-in program says what it found.
#![allow(clippy::unwrap_used)]

mod support;

use std::{fs, os::unix::fs::PermissionsExt as _};

use evalgrid_domain::evidence::{JournalEntry, TrialEvidence};
use evalgrid_harness::by_name;
use evalgrid_proto::v1::{TrialOutcome, TrialStatus};
use serde_json::{Value, json};
use support::{Grid, request};

/// Stands in for a harness's program: `script` is what it does, in sh, when it is not asked for its version.
fn stand_in(grid: &Grid, name: &str, script: &str) {
    let install = by_name(name).unwrap().install().unwrap();
    let program = grid.folder.path().join("worker/tools").join(install.folder()).join(install.program);
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    let version = install.version;
    fs::write(
        &program,
        format!("#!/bin/sh\n[ \"$1\" = --version ] && exec echo {version}\n{script}\n"),
    )
    .unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A trial of a built-in agent, whose program is `script`.
async fn trial(name: &str, script: &str, case: Value, mut profile: Value) -> (TrialOutcome, TrialEvidence) {
    let mut grid = Grid::new().await;
    stand_in(&grid, name, script);
    profile["name"] = json!("p");
    let mut request = request("", case, json!({}));
    request["variants"] = json!([{ "harness": name, "model": "gemini-9", "sandbox": "e2b", "profile": profile }]);
    let mut lease = grid.lease(7, &request);
    lease.credential = [("apiKey".to_owned(), "a-secret-key".to_owned())].into();
    let told = grid.trial(lease).await;
    assert_eq!(told.failures, []);
    let evidence = grid.evidence(told.outcome());
    (told.outcome().clone(), evidence)
}

fn messages(evidence: &TrialEvidence) -> Vec<&str> {
    let entries = evidence.trajectory.iter();
    entries
        .filter_map(|entry| match entry {
            JournalEntry::Message { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn files_of_the_agent_the_profile_and_the_source() {
    // Gemini's: its settings in HOME, and the system prompt before what GEMINI.md holds.
    let gemini = r#"say() { printf '{"type":"message","role":"assistant","content":"%s"}\n' "$1"; }
        printf '{"type":"init","session_id":"s","model":"gemini-9"}\n'
        say "$(tr '\n' '|' < GEMINI.md) $(cat $HOME/.gemini/settings.json | tr -d '{}" \n' | cut -c1-20) $GEMINI_API_KEY"
        printf '{"type":"result","status":"success","stats":{"input_tokens":5,"cached":2,"output_tokens":1,"total_tokens":6}}\n'"#;
    let check = async |profile: Value, case: Value, expected: &str| {
        let (outcome, evidence) = trial("gemini", gemini, case, profile).await;
        assert_eq!((outcome.status(), outcome.failure.as_deref()), (TrialStatus::Passed, None));
        assert_eq!(messages(&evidence), [expected]);
        let usage = outcome.usage.unwrap();
        assert_eq!(
            (usage.input_tokens, usage.cache_read_tokens, usage.output_tokens, usage.total_tokens),
            (3, 2, 1, 6)
        );
        let coverage = evidence.coverage.unwrap();
        assert!(coverage.usage.is_complete() && !coverage.status.is_complete());
    };
    let source = |text: &str| json!({ "source": { "kind": "files", "files": { "GEMINI.md": text } }, "verify": "test -s GEMINI.md" });
    let own = json!({ "systemPrompt": "Be terse.", "files": {} });
    check(
        own.clone(),
        json!({ "source": { "kind": "empty" }, "verify": "test -s GEMINI.md" }),
        "Be terse.|| general:enableAutoUp [redacted]",
    )
    .await;
    check(
        own,
        source("from the source\n"),
        "Be terse.||from the source| general:enableAutoUp [redacted]",
    )
    .await;
    let files = json!({ "workspace/GEMINI.md": "from the profile", "home/.gemini/settings.json": "{\"theirs\":1}" });
    check(
        json!({ "systemPrompt": "Be terse.", "files": files }),
        source("from the source"),
        "Be terse.||from the profile theirs:1 [redacted]",
    )
    .await;
    check(
        json!({ "files": {} }),
        source("only this"),
        "only this general:enableAutoUp [redacted]",
    )
    .await;
}

#[tokio::test]
async fn credentials_are_private_and_a_profile_may_bring_its_own() {
    let codex = r#"say() { printf '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"%s"}}\n' "$1"; }
        say "$(stat -c %a $HOME/.codex/auth.json) $(tr -d '{}" \n' < $HOME/.codex/auth.json)"
        printf '{"type":"turn.completed","usage":{"input_tokens":1,"output_tokens":1}}\n'"#;
    let case = json!({ "source": { "kind": "empty" }, "verify": "true" });
    for (files, expected) in [
        (json!({}), "600 OPENAI_API_KEY:[redacted],auth_mode:apikey"),
        (json!({ "home/.codex/auth.json": "{\"mine\":1}" }), "644 mine:1"),
    ] {
        let (_, evidence) = trial("codex", codex, case.clone(), json!({ "files": files })).await;
        assert_eq!(messages(&evidence), [expected]);
    }
}

#[tokio::test]
async fn failures_void_the_trial_and_say_why() {
    let case = json!({ "source": { "kind": "empty" }, "verify": "true" });
    for (script, expected) in [
        (
            r#"printf '{"type":"turn.failed","error":{"message":"unexpected status 401 of a-secret-key"}}\n'; exit 1"#,
            "The codex agent failed: its model server refused the key (401); check OPENAI_API_KEY: unexpected status 401 of [redacted]",
        ),
        (
            "echo 'cannot start: a-secret-key' >&2; exit 3",
            "The codex agent failed: it stopped before its turn was over, with status 3: cannot start: [redacted]",
        ),
    ] {
        let (outcome, evidence) = trial("codex", script, case.clone(), json!({ "files": {} })).await;
        assert_eq!((outcome.status(), outcome.failure.as_deref()), (TrialStatus::Void, Some(expected)));
        assert_eq!(outcome.usage, None);
        assert!(!evidence.coverage.unwrap().usage.is_complete());
    }
    let mut slow = case;
    slow["timeoutMs"] = json!(1_000);
    let script = r#"printf '{"type":"error","message":"Reconnecting... waiting for network"}\n'; exec sleep 60"#;
    let (outcome, evidence) = trial("codex", script, slow, json!({ "files": {} })).await;
    assert_eq!(outcome.failure.as_deref(), Some("The agent ran past its time limit of 1s"));
    assert_eq!(
        evidence.diagnostics[0],
        "codex was waiting for its model server: Reconnecting... waiting for network"
    );
}

/// A model server that limits requests costs a trial its slot for a while, and nothing else.
#[tokio::test]
async fn a_limited_turn_is_begun_again_later_in_the_same_sandbox() {
    let limited = r#"printf '{"type":"turn.failed","error":{"message":"exceeded retry limit, last status: 429"}}\n'; exit 1"#;
    let answer = r#"printf '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"%s"}}\n' "$(wc -l < $HOME/tries)"
        printf '{"type":"turn.completed","usage":{"input_tokens":1,"output_tokens":1}}\n'"#;
    // How many tries fail, what each of them tells, and how the trial ends.
    for (failing, pauses, status, text) in [
        (2, &[5_000, 15_000][..], TrialStatus::Passed, "3"),
        (9, &[5_000, 15_000, 45_000], TrialStatus::Void, "limits its requests (429)"),
    ] {
        let mut grid = Grid::new().await;
        let script = format!("echo try >> $HOME/tries; if [ $(wc -l < $HOME/tries) -le {failing} ]; then {limited}; fi\n{answer}");
        stand_in(&grid, "codex", &script);
        let case = json!({ "source": { "kind": "empty" }, "verify": "true" });
        let mut request = request("", case, json!({}));
        request["variants"] = json!([{ "harness": "codex", "model": "m", "sandbox": "e2b" }]);
        let mut lease = grid.lease(7, &request);
        lease.credential = [("apiKey".to_owned(), "a-secret-key".to_owned())].into();
        lease.model_key = "codex/m".into();
        let executor = grid.executor();
        let mut session = grid.session().await;
        for pause in pauses {
            session.lease(&lease).await;
            let told = session.until(|told| told.credits == 1).await;
            assert_eq!(told.throttled, [(lease.token, "codex/m".to_owned(), *pause)]);
            assert!(told.results.is_empty() && told.failures.is_empty() && told.destroyed.is_empty());
            assert_eq!(grid.sandboxes().len(), 1, "it waits for the next attempt");
            lease.steps.extend(told.recorded());
            (lease.token, lease.adopt) = (lease.token + 1, true);
        }
        session.lease(&lease).await;
        let told = session.until(|told| told.credits == 1).await;
        let outcome = told.outcome();
        assert_eq!(outcome.status(), status, "{outcome:?}");
        match &outcome.failure {
            Some(failure) => assert!(failure.contains(text), "{failure}"),
            None => assert_eq!(messages(&grid.evidence(outcome)), [text]),
        }
        assert!(grid.sandboxes().is_empty(), "everything is gone");
        executor.stop().await;
    }
}
