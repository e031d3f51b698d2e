//! Whole trials in real process sandboxes, from the lease to the free slot.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_domain::evidence::{JournalEntry, Role, ValidationStatus};
use evalgrid_proto::v1::{TrialOutcome, TrialStatus};
use serde_json::{Value, json};
use support::{Grid, Told, request};

/// A trial of this request, in a grid of its own.
async fn trial(request: &Value) -> (Grid, Told) {
    let mut grid = Grid::new().await;
    let lease = grid.lease(7, request);
    let sandbox = lease.sandbox.clone();
    let told = grid.trial(lease).await;
    assert_eq!(told.failures, []);
    assert_eq!(told.destroyed, std::slice::from_ref(&sandbox));
    assert_eq!(told.outcome().sandbox_id, Some(sandbox));
    (grid, told)
}

fn summaries(entries: &[JournalEntry]) -> Vec<String> {
    let summary = |entry: &JournalEntry| match entry {
        JournalEntry::Message { role, text, .. } if *role == Some(Role::User) => format!("user {text}"),
        JournalEntry::Message { text, .. } => format!("agent {text}"),
        JournalEntry::Command { command, .. } => format!("command {command}"),
        JournalEntry::ToolCall { name, .. } => format!("tool {name}"),
        JournalEntry::FileChange { paths, .. } => format!("files {}", paths.join(" ")),
    };
    entries.iter().map(summary).collect()
}

fn void(outcome: &TrialOutcome) -> (&str, &[String]) {
    assert_eq!((outcome.status(), outcome.exit_code), (TrialStatus::Void, -1));
    (outcome.failure.as_deref().unwrap(), &outcome.void_fields)
}

/// A bash function that prints a message line.
const SAY: &str = r#"say() { printf '{"_tag":"Message","role":"assistant","text":"%s"}\n' "$1"; }; "#;

#[tokio::test]
async fn a_trial_that_passes() {
    let run = format!(
        r#"{SAY} say "$SPHYNX_PROMPT, $GREETING, $(cat a.txt), $(cat $SPHYNX_SYSTEM_PROMPT_FILE), $(cat installed)"
        printf '{{"_tag":"FileChange","paths":["%s/b.txt","/elsewhere"]}}\n' "$SPHYNX_WORKSPACE"
        printf '{{"_tag":"Command","command":"make","exitCode":2,"output":"no"}}\n'
        printf '{{"_tag":"Usage","inputTokens":10,"outputTokens":5}}\n'
        echo b > b.txt"#
    );
    let profile = json!({
        "env": { "GREETING": "hello" },
        "systemPrompt": "Be terse.",
        "files": { "home/.tool": "t", "workspace/a.txt": "from profile" },
        "install": "cat $HOME/.tool a.txt > installed",
    });
    let case = json!({ "source": { "kind": "files", "files": { "a.txt": "from source", "deep/x": "" } }, "verify": "test -f deep/x && cat b.txt && echo $GREETING" });
    let (grid, told) = trial(&request(&run, case, profile)).await;
    let steps = [
        "sandbox.create",
        "source",
        "profile.home",
        "profile.workspace",
        "profile.install",
        "turn.1.agent",
        "turn.1.files",
        "artifacts",
        "check.0",
    ];
    assert_eq!(told.step_names(), steps);
    assert!(told.steps.iter().all(|step| step.outcome == 1));
    let outcome = told.outcome();
    assert_eq!(
        (outcome.status(), outcome.exit_code, outcome.failure.as_deref()),
        (TrialStatus::Passed, 0, None)
    );
    assert_eq!((outcome.timed, outcome.failed_commands), (true, 1));
    assert!(outcome.sandbox_ms >= outcome.model_ms);
    let usage = outcome.usage.unwrap();
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.total_tokens, usage.cost_usd),
        (10, 5, 15, None)
    );
    let evidence = grid.evidence(outcome);
    let entries = summaries(&evidence.trajectory);
    assert_eq!(entries[0], "agent Do it, hello, from profile, Be terse., tfrom profile");
    assert_eq!(entries[2], "command make");
    // The recorder's commands come last.
    assert_eq!(entries.last().unwrap(), "command echo b > b.txt");
    assert_eq!(
        outcome.commands as usize,
        entries.iter().filter(|entry| entry.starts_with("command")).count()
    );
    assert_eq!(evidence.files_changed, ["b.txt"]);
    let [turn] = evidence.file_changes.as_slice() else {
        panic!("{:?}", evidence.file_changes)
    };
    assert_eq!((turn.turn, turn.changes[0].diff.as_deref()), (1, Some("@@ -0,0 +1 @@\n+b\n")));
    assert!(evidence.coverage.unwrap().files.is_complete());
    let [artifact] = evidence.artifacts.as_slice() else {
        panic!("{:?}", evidence.artifacts)
    };
    assert_eq!((artifact.path.as_str(), artifact.text.as_deref()), ("b.txt", Some("b\n")));
    assert_eq!(grid.objects(), 1, "a short text costs no object: there is the request only");
    let timing: Vec<_> = evidence.timing.iter().flat_map(|timing| &timing.spans).collect();
    assert_eq!(
        timing.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(),
        ["setup", "turns", "cleanup", "checks"]
    );
    let ran: Vec<_> = evidence
        .verify_steps
        .iter()
        .map(|step| (step.command.as_str(), step.exit_code))
        .collect();
    assert_eq!(ran, [("test -f deep/x", 0), ("cat b.txt", 0), ("echo $GREETING", 0)]);
    let check = &evidence.validations[0];
    assert_eq!(
        (check.id.as_str(), check.status, check.output.text.as_str()),
        ("command:0", ValidationStatus::Passed, "b\nhello\n")
    );
}

#[tokio::test]
async fn verdicts() {
    async fn check(run: &str, verify: &str, passed: bool, steps: &[(&str, i64)]) {
        let (grid, told) = trial(&request(run, json!({ "verify": verify }), json!({}))).await;
        let outcome = told.outcome();
        let status = if passed { TrialStatus::Passed } else { TrialStatus::Failed };
        assert_eq!(
            (outcome.status(), outcome.exit_code, outcome.failure.as_deref()),
            (status, i32::from(!passed), None),
            "{run}; {verify}"
        );
        let evidence = grid.evidence(outcome);
        let ran: Vec<_> = evidence
            .verify_steps
            .iter()
            .map(|step| (step.command.as_str(), step.exit_code))
            .collect();
        assert_eq!(ran, steps);
    }
    check("exit 3", "true", true, &[]).await;
    check("true", "false", false, &[]).await;
    check("true", "exit 75", false, &[]).await;
    check("true", "true && exit 4 && true", false, &[("true", 0), ("exit 4", 4)]).await;
    check("true", "false | true", false, &[]).await;
    check("rm -rf \"$SPHYNX_WORKSPACE\"", "test -z \"$(ls)\"", true, &[]).await;
    check("echo '{\"_tag\":\"Finished\",\"reason\":\"parked: later\"}'", "true", true, &[]).await;
    // The agent is gone; what it left behind holds stdout, and is no reason to wait.
    check("sleep 1000 & echo done", "true", true, &[]).await;
    // A program that the agent calls like one of the system's does not judge for it; others of its HOME can be called.
    let forged =
        |name: &str| format!("mkdir -p ~/.local/bin; printf '#!/bin/sh\\nexit 0\\n' > ~/.local/bin/{name}; chmod +x ~/.local/bin/{name}");
    check(&forged("grep"), "grep not-in-it /etc/passwd", false, &[]).await;
    check(&forged("its-own"), "its-own", true, &[]).await;
}

#[tokio::test]
async fn what_leaves_a_trial_void() {
    async fn check(request: Value, failure: &str, fields: &[&str], entries: usize) {
        let (grid, told) = trial(&request).await;
        let outcome = told.outcome();
        assert_eq!(
            void(outcome),
            (failure, &fields.iter().map(|field| (*field).to_owned()).collect::<Vec<_>>()[..])
        );
        let evidence = grid.evidence(outcome);
        assert_eq!(evidence.trajectory.len(), entries, "{failure}");
        assert!(evidence.validations.iter().all(|check| check.status == ValidationStatus::Skipped));
    }
    let verify = json!({ "verify": "true" });
    check(
        request("true", verify.clone(), json!({ "install": "echo why >&2; exit 9" })),
        "The profile's install exited with status 9",
        &[],
        0,
    )
    .await;
    check(
        request("true", json!({}), json!({})),
        "The case has neither a validator nor a verify command",
        &[],
        1,
    )
    .await;
    let failed = format!("{SAY} say hi; echo '{{\"_tag\":\"Finished\",\"reason\":\"failed: no key\"}}'");
    check(
        request(&failed, verify.clone(), json!({})),
        "The command agent failed: no key",
        &[],
        3,
    )
    .await;
    let files = json!({ "source": { "kind": "files", "files": { "a": "" } }, "verify": "true" });
    let (_, told) = trial(&request("true", files, json!({ "files": { "workspace/a/b": "" } }))).await;
    assert!(
        void(told.outcome()).0.starts_with("The profile's files could not be written: "),
        "{:?}",
        told.outcome().failure
    );
    let repository = |url: &str| json!({ "source": { "kind": "repo", "url": url, "ref": null }, "verify": "true" });
    check(
        request("true", repository("/etc"), json!({})),
        "The source /etc could not be cloned: it is not a URL",
        &[],
        0,
    )
    .await;
    let (_, told) = trial(&request("true", repository("file:///nowhere/x.git"), json!({}))).await;
    let failure = void(told.outcome()).0;
    assert!(
        failure.starts_with("The source file:///nowhere/x.git could not be cloned: "),
        "{failure}"
    );
    assert_eq!(told.steps.last().unwrap().outcome, 2);
}

#[tokio::test]
async fn a_time_limit_keeps_what_was_said() {
    let run = format!("{SAY} trap '' TERM; say early; sleep 1000");
    let (grid, told) = trial(&request(&run, json!({ "timeoutMs": 1000, "verify": "true" }), json!({}))).await;
    let outcome = told.outcome();
    assert_eq!(void(outcome), ("The agent ran past its time limit of 1s", &[][..]));
    assert!((1_000..30_000).contains(&outcome.model_ms), "{}", outcome.model_ms);
    assert_eq!(summaries(&grid.evidence(outcome).trajectory)[0], "agent early");
}

#[tokio::test]
async fn conversations() {
    async fn check(started: &str, replies: &[&str], max_turns: u32, turns: u32) {
        let run = format!("{SAY} {started} say \"$SPHYNX_PROMPT/$SPHYNX_SESSION_ID\"; echo x >> turns");
        let case = json!({
            "user": { "kind": "scripted", "replies": replies },
            "maxTurns": max_turns,
            "verify": format!("test $(wc -l < turns) = {turns}"),
        });
        let (grid, told) = trial(&request(&run, case, json!({}))).await;
        let outcome = told.outcome();
        assert_eq!((outcome.status(), outcome.failure.as_deref()), (TrialStatus::Passed, None));
        let said: Vec<_> = summaries(&grid.evidence(outcome).trajectory)
            .into_iter()
            .filter(|entry| !entry.starts_with("command"))
            .collect();
        let mut expected = vec!["user Do it".to_owned(), "agent Do it/".to_owned()];
        for reply in &replies[..turns as usize - 1] {
            expected.extend([format!("user {reply}"), format!("agent {reply}/s-1")]);
        }
        assert_eq!(said, expected);
        let agents = told.steps.iter().filter(|step| step.step.ends_with(".agent"));
        assert_eq!(agents.count(), turns as usize);
        let evidence = grid.evidence(outcome);
        let changed: Vec<_> = evidence.file_changes.iter().flat_map(|turn| &turn.changes).collect();
        assert_eq!(changed.len(), turns as usize, "each turn has added a line");
    }
    let once = r#"[ -n "$SPHYNX_SESSION_ID" ] || echo '{"_tag":"Started","sessionId":"s-1","model":"m"}';"#;
    check(once, &["yes", "fine"], 8, 3).await;
    check(once, &["yes", "fine"], 2, 2).await;
    check("", &["yes", "fine"], 8, 1).await;
}

#[tokio::test]
async fn all_turns_share_one_time_limit() {
    let run = r#"echo '{"_tag":"Started","sessionId":"s","model":"m"}'; [ -n "$SPHYNX_SESSION_ID" ] && sleep 1000; sleep 0.5"#;
    let case = json!({ "user": { "kind": "scripted", "replies": ["more"] }, "timeoutMs": 1500, "verify": "true" });
    let (_, told) = trial(&request(run, case, json!({}))).await;
    let outcome = told.outcome();
    assert_eq!(void(outcome).0, "The agent ran past its time limit of 1s 500ms");
    assert!((1_500..10_000).contains(&outcome.model_ms), "{}", outcome.model_ms);
}

#[tokio::test]
async fn secrets_stay_inside() {
    let secret = "correct-horse-battery";
    let run = format!(
        "{SAY} say \"key $KEY\"; echo \"$KEY\" > key; echo \"{{\\\"_tag\\\":\\\"Started\\\",\\\"sessionId\\\":\\\"$KEY\\\",\\\"model\\\":\\\"m\\\"}}\""
    );
    let case = json!({ "verify": "cat key && cat key >&2 && false", "user": { "kind": "scripted", "replies": ["more"] } });
    let mut grid = Grid::new().await;
    let mut lease = grid.lease(7, &request(&run, case, json!({ "variables": ["KEY"] })));
    lease.variables.insert("KEY".into(), secret.into());
    let told = grid.trial(lease).await;
    let evidence = grid.evidence(told.outcome());
    assert_eq!(evidence.validations[0].output.text, "[redacted]\n");
    assert!(!format!("{:?} {evidence:?}", told.reports).contains(secret));
    assert_eq!(summaries(&evidence.trajectory)[1], "agent key [redacted]");
}

#[tokio::test]
async fn big_results_are_objects() {
    let run = r#"for i in {1..300}; do printf '{"_tag":"Message","role":"assistant","text":"%0200d"}\n' $i; done"#;
    let (grid, told) = trial(&request(run, json!({ "verify": "true" }), json!({}))).await;
    let step = told.steps.iter().find(|step| step.step == "turn.1.agent").unwrap();
    let pointer: Value = serde_json::from_slice(&step.result).unwrap();
    let object = grid.object(pointer["object"]["sha256"].as_str().unwrap());
    assert_eq!(pointer["object"]["size"], object.len());
    assert!(grid.evidence(told.outcome()).trajectory.len() >= 300);
    assert_eq!(grid.objects(), 3, "the request, the turn, the evidence");
}

#[tokio::test]
async fn repositories() {
    fn git(folder: &std::path::Path, args: &[&str]) -> String {
        let output = std::process::Command::new("git")
            .args([
                "-c",
                "user.name=t",
                "-c",
                "user.email=t@example.com",
                "-c",
                "init.defaultBranch=main",
            ])
            .args(args)
            .current_dir(folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
    let origin = tempfile::tempdir().unwrap();
    let path = origin.path();
    git(path, &["init", "-q", "."]);
    let mut commits = Vec::new();
    for content in ["one", "two"] {
        std::fs::write(path.join("f"), content).unwrap();
        git(path, &["add", "f"]);
        git(path, &["commit", "-q", "-m", content]);
        commits.push(git(path, &["rev-parse", "HEAD"]));
    }
    git(path, &["tag", "v1", &commits[0]]);
    git(path, &["branch", "old", &commits[0]]);
    let url = format!("file://{}", path.display());
    for (reference, content) in [(None, "two"), (Some("v1"), "one"), (Some("old"), "one"), (Some(&commits[0]), "one")] {
        let case = json!({ "source": { "kind": "repo", "url": url, "ref": reference }, "verify": format!("test $(cat f) = {content}") });
        let (_, told) = trial(&request("true", case, json!({}))).await;
        assert_eq!(
            (told.outcome().status(), told.outcome().failure.as_deref()),
            (TrialStatus::Passed, None),
            "{reference:?}"
        );
    }
    let case = json!({ "source": { "kind": "repo", "url": url, "ref": "nope" }, "verify": "true" });
    let (_, told) = trial(&request("true", case, json!({}))).await;
    assert!(void(told.outcome()).0.contains("nope"), "{:?}", told.outcome().failure);
}
