//! What a trial does for those who are asked outside of it: it waits for its simulated person, and keeps what its judges read.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_domain::{
    evidence::{JournalEntry, Role, TrialEvidence},
    judge::JudgeFile,
    person::{Conversation, ReplyRecord, Speaker},
};
use evalgrid_proto::v1::{AwaitsReply, Lease, RecordedStep, TrialStatus, evidence::Place};
use serde_json::{Value, json};
use support::{Grid, Told, request};

/// A bash function that prints a message line.
const SAY: &str = r#"say() { printf '{"_tag":"Message","role":"assistant","text":"%s"}\n' "$1"; }; "#;
/// Gives the agent a session that can go on.
const STARTED: &str = r#"[ -n "$SPHYNX_SESSION_ID" ] || echo '{"_tag":"Started","sessionId":"s-1","model":"m"}'; "#;

/// A case whose person is simulated. The agent repeats what it was told, and adds a line to `turns`.
fn asking(more: &str, case: Value) -> Value {
    let run = format!("{SAY}{more} say \"to $SPHYNX_PROMPT\"; say \"my key is $KEY\"; echo x >> turns");
    let mut whole = json!({ "user": { "kind": "simulated", "goal": "a cake", "prompt": "no nuts" }, "maxTurns": 3, "verify": "true" });
    whole.as_object_mut().unwrap().extend(case.as_object().unwrap().clone());
    request(&run, whole, json!({ "variables": ["KEY"] }))
}

fn lease(grid: &Grid, request: &Value) -> Lease {
    let mut lease = grid.lease(1, request);
    lease.variables.insert("KEY".into(), "correct-horse-battery".into());
    lease
}

fn reply(turn: u32, record: Value) -> RecordedStep {
    let mut whole = json!({ "done": false, "by": "m", "durationMs": 7 });
    whole.as_object_mut().unwrap().extend(record.as_object().unwrap().clone());
    // It is what a judge runner says.
    let record: ReplyRecord = serde_json::from_value(whole).unwrap();
    RecordedStep {
        step: format!("turn.{turn}.person"),
        outcome: if record.failure.is_some() { 2 } else { 1 },
        result: serde_json::to_vec(&record).unwrap().into(),
    }
}

fn said(grid: &Grid, awaits: &AwaitsReply) -> Vec<String> {
    let conversation: Conversation = grid.placed(awaits.conversation.as_ref().unwrap());
    let line = |said: &evalgrid_domain::person::Said| match said.by {
        Speaker::Person => format!("person {}", said.text),
        Speaker::Agent => format!("agent {}", said.text),
    };
    conversation.said.iter().map(line).collect()
}

fn messages(evidence: &TrialEvidence) -> Vec<String> {
    let text = |entry: &JournalEntry| match entry {
        JournalEntry::Message { role, text, .. } if *role == Some(Role::User) => Some(format!("person {text}")),
        JournalEntry::Message { text, .. } => Some(format!("agent {text}")),
        _ => None,
    };
    evidence.trajectory.iter().filter_map(text).collect()
}

/// Runs a trial from lease to lease, with these replies. What was asked each time, and the last attempt with its free slot. `dies`: the executor
/// does while the person thinks.
async fn talk(grid: &mut Grid, dies: bool, mut lease: Lease, replies: &[Value]) -> (Vec<Vec<String>>, Told) {
    let mut executor = grid.executor();
    let mut session = grid.session().await;
    let mut asked = Vec::new();
    let mut replies = replies.iter();
    loop {
        session.lease(&lease).await;
        let told = session.until(|told| told.credits == 1).await;
        assert_eq!(told.failures, []);
        let Some(awaits) = told.awaiting.first() else {
            assert_eq!(told.destroyed, std::slice::from_ref(&lease.sandbox));
            executor.stop().await;
            return (asked, told);
        };
        assert_eq!((awaits.token, awaits.turn as usize), (lease.token, asked.len() + 1));
        assert_eq!(
            (told.results.len(), told.destroyed.len(), grid.sandboxes().len()),
            (0, 0, 1),
            "its sandbox waits with it"
        );
        asked.push(said(grid, awaits));
        lease.steps.extend(told.recorded());
        lease
            .steps
            .push(reply(awaits.turn, replies.next().expect("it asks no more").clone()));
        (lease.token, lease.adopt) = (lease.token + 1, true);
        if dies {
            executor.kill().await;
            executor = grid.executor();
            session = grid.session().await;
            assert_eq!(session.hello.held, [0; 0]);
            assert_eq!(session.hello.sandboxes, std::slice::from_ref(&lease.sandbox));
        }
    }
}

#[tokio::test]
async fn a_trial_waits_for_its_person_and_goes_on_with_the_reply() {
    for dies in [false, true] {
        goes_on(dies).await;
    }
}

async fn goes_on(dies: bool) {
    let mut grid = Grid::new().await;
    let lease = lease(&grid, &asking(STARTED, json!({ "verify": "test $(wc -l < turns) = 2" })));
    let last = json!({ "done": true, "text": "Thanks" });
    let (asked, told) = talk(&mut grid, dies, lease, &[json!({ "text": "a round one" }), last]).await;
    let first = ["person Do it", "agent to Do it\n\nmy key is [redacted]"];
    let second = ["person a round one", "agent to a round one\n\nmy key is [redacted]"];
    assert_eq!(asked, [first.to_vec(), [first, second].concat()]);
    let outcome = told.outcome();
    assert_eq!(outcome.status(), TrialStatus::Passed);
    let evidence = grid.evidence(outcome);
    let key = "agent my key is [redacted]";
    assert_eq!(
        messages(&evidence),
        [
            "person Do it",
            "agent to Do it",
            key,
            "person a round one",
            "agent to a round one",
            key,
            "person Thanks"
        ]
    );
    assert_eq!(
        evidence.diagnostics,
        ["The conversation ended after turn 2: the person has what it wanted"]
    );
    let timing = serde_json::to_string(&evidence.timing).unwrap();
    assert_eq!(timing.matches("\"person\"").count(), 2, "{timing}");
}

#[tokio::test]
async fn how_conversations_end() {
    async fn check(more: &str, case: Value, replies: &[Value], verdict: &str, diagnostics: &[&str]) {
        let mut grid = Grid::new().await;
        let lease = lease(&grid, &asking(more, case));
        let (asked, told) = talk(&mut grid, false, lease, replies).await;
        let outcome = told.outcome();
        let text = match outcome.status() {
            TrialStatus::Passed => "passed",
            _ => outcome.failure.as_deref().unwrap(),
        };
        let evidence = grid.evidence(outcome);
        assert_eq!((text, asked.len()), (verdict, replies.len()));
        assert_eq!(evidence.diagnostics, diagnostics, "{verdict}");
    }
    let says = || json!({ "text": "go on" });
    check(
        STARTED,
        json!({}),
        &[says(), says()],
        "passed",
        &["The conversation ended after turn 3: the case allows no more"],
    )
    .await;
    check(
        STARTED,
        json!({ "maxTurns": 1 }),
        &[],
        "passed",
        &["The conversation ended after turn 1: the case allows no more"],
    )
    .await;
    let nothing = "The conversation ended after turn 1: the agent printed no Started with a sessionId, so nothing could continue it";
    check("", json!({}), &[], "passed", &[nothing]).await;
    let broken = "The simulated person could not answer: there was no answer within 2m";
    check(STARTED, json!({}), &[says(), json!({ "failure": broken })], broken, &[]).await;
    // A turn that failed is nothing to reply to.
    let failed = r#"echo '{"_tag":"Finished","reason":"failed: no key"}';"#;
    check(
        &format!("{STARTED}{failed}"),
        json!({}),
        &[],
        "The command agent failed: no key",
        &["2 lines came after Finished and were not recorded"],
    )
    .await;
}

#[tokio::test]
async fn a_long_conversation_is_an_object() {
    let mut grid = Grid::new().await;
    let long = format!("{STARTED} say $(yes é | head -n 9000 | tr -d '\\n');");
    let lease = lease(&grid, &asking(&long, json!({ "maxTurns": 2 })));
    let executor = grid.executor();
    let mut session = grid.session().await;
    session.lease(&lease).await;
    let told = session.until(|told| told.credits == 1).await;
    let conversation = told.awaiting[0].conversation.as_ref().unwrap();
    assert!(matches!(conversation.place, Some(Place::Object(_))));
    assert!(said(&grid, &told.awaiting[0])[1].len() > 18_000);
    session.destroy(&lease.sandbox).await;
    session.until(|told| !told.destroyed.is_empty()).await;
    executor.stop().await;
}

/// Before that is durable, the lease is held and the request sent again; everything recorded is told before it.
#[tokio::test]
async fn that_a_person_is_awaited_survives_a_broken_connection() {
    let mut grid = Grid::new().await;
    let lease = lease(&grid, &asking(STARTED, json!({})));
    let executor = grid.executor();
    let mut session = grid.session().await;
    session.acknowledge_if(|report| report.awaiting.is_empty());
    session.lease(&lease).await;
    let told = session.until(|told| !told.awaiting.is_empty()).await;
    assert_eq!(told.step_names(), ["sandbox.create", "turn.1.agent", "turn.1.files"]);
    assert_eq!(told.credits, 0);
    drop(session);
    let mut session = grid.session().await;
    assert_eq!(
        (session.hello.held.as_slice(), session.hello.sandboxes.as_slice()),
        (&[1][..], std::slice::from_ref(&lease.sandbox))
    );
    let again = session.until(|told| told.credits == 1).await;
    assert_eq!((&again.awaiting, again.steps.len()), (&told.awaiting, 0));
    session.destroy(&lease.sandbox).await;
    session.until(|told| !told.destroyed.is_empty()).await;
    executor.stop().await;
}

/// A case with these judges, and checks where there are any.
fn judged(run: &str, checks: Value, files: &[&[&str]]) -> Value {
    let judge = |(number, files): (usize, &&[&str])| {
        let mut judge = json!({
            "kind": "judge", "name": format!("judge {number}"), "provider": "openai", "model": "m", "prompt": "Is it good?",
            "choices": { "good": 1, "bad": 0 },
        });
        if !files.is_empty() {
            judge["files"] = json!(files);
        }
        judge
    };
    let judges: Vec<_> = files.iter().enumerate().map(judge).collect();
    let validator = json!({ "kind": "judged", "name": "all", "checks": checks, "judges": judges });
    request(run, json!({ "validator": validator }), json!({ "variables": ["KEY"] }))
}

fn node(source: &str) -> Value {
    json!([{ "name": "checks", "source": source }])
}

/// What was kept for the judges, or what was wrong.
fn kept(evidence: &TrialEvidence) -> Vec<(&str, String)> {
    let file = |file: &'_ JudgeFile| match file {
        JudgeFile::Text { text, .. } if text.len() > 100 => format!("{} characters", text.chars().count()),
        JudgeFile::Text { text, .. } => format!("text {text}"),
        JudgeFile::Missing { problem, .. } => problem.clone(),
    };
    evidence.judge_files.iter().map(|kept| (kept.path(), file(kept))).collect()
}

#[tokio::test]
async fn files_for_the_judges() {
    async fn check(run: &str, checks: Value, files: &[&[&str]], status: TrialStatus, expected: &[(&str, &str)]) {
        let mut grid = Grid::new().await;
        let lease = lease(&grid, &judged(run, checks, files));
        let told = grid.trial(lease).await;
        let outcome = told.outcome();
        let evidence = grid.evidence(outcome);
        assert_eq!(outcome.status(), status, "{run}: {:?}", outcome.failure);
        let found = kept(&evidence);
        let found: Vec<_> = found.iter().map(|(path, text)| (*path, text.as_str())).collect();
        assert_eq!(found, expected, "{run}");
        assert!(evidence.validations.iter().all(|validation| validation.judgment.is_none()));
        assert_eq!(told.step_names().last() == Some(&"judge-files"), !expected.is_empty());
        assert!(!format!("{:?}{evidence:?}", told.reports).contains("correct-horse"));
    }
    use TrialStatus::{Failed, Passed};
    let none = || json!([]);
    // Nothing but judges: nothing in the sandbox speaks against the agent.
    check("true", none(), &[&[]], Passed, &[]).await;
    // Each once, in the order of the judges.
    check(
        "echo -n a > a; mkdir d; echo -n $KEY > d/b; echo -n c > c",
        none(),
        &[&["d/b", "a"], &["a", "c"]],
        Passed,
        &[("d/b", "text [redacted]"), ("a", "text a"), ("c", "text c")],
    )
    .await;
    // Whatever a check says, judges are asked; they read what it has left.
    let check_fails = "import fs from 'node:fs'; fs.writeFileSync('a', 'by the check'); \
                       console.log('SPHYNX_VALIDATION={\"id\":\"code:0\",\"status\":\"failed\"}'); \
                       console.log('SPHYNX_VALIDATOR_RESULT={\"passed\":false}')";
    check("true", node(check_fails), &[&["a"]], Failed, &[("a", "text by the check")]).await;
    // What is not there, not a file, not text, or not the workspace's.
    check(
        "mkdir folder; mkfifo pipe; printf '\\377' > bytes; printf 'a\\0b' > zero; ln -s /etc/passwd out; ln -s a in; echo -n a > a",
        none(),
        &[&["gone", "folder", "pipe", "bytes", "zero", "in", "a/b"]],
        Passed,
        &[
            ("gone", "is not there"),
            ("folder", "is not there"),
            ("pipe", "is not there"),
            ("bytes", "is not text"),
            ("zero", "is not text"),
            ("in", "text a"),
            ("a/b", "is not there"),
        ],
    )
    .await;
    // As long as may be, and longer.
    check(
        "head -c 32000 /dev/zero | tr '\\0' x > most; head -c 32001 /dev/zero | tr '\\0' x > more; head -c 96001 /dev/zero | tr '\\0' x > much",
        none(),
        &[&["most", "more", "much"]],
        Passed,
        &[
            ("most", "32000 characters"),
            ("more", "has 32001 characters; a judge reads at most 32000"),
            ("much", "has more than 32000 characters; a judge reads at most 32000"),
        ],
    )
    .await;
    let too_much = "does not fit: the files of the case's judges may have 96000 characters together";
    check(
        "head -c 32000 /dev/zero | tr '\\0' x > a; cp a b; cp a c; echo > d; touch e",
        none(),
        &[&["a", "b"], &["c", "d"], &["e"]],
        Passed,
        &[
            ("a", "32000 characters"),
            ("b", "32000 characters"),
            ("c", "32000 characters"),
            ("d", too_much),
            ("e", too_much),
        ],
    )
    .await;
}

/// Nobody reads the host's files for an agent, however it asks.
#[tokio::test]
async fn no_link_leads_a_judge_out_of_the_workspace() {
    let mut grid = Grid::new().await;
    let outside = grid.folder.path().join("outside");
    std::fs::write(&outside, "the host's").unwrap();
    let run = format!(
        "ln -s {0} link; ln -s ../../../../../../../..{0} dots; mkdir d; ln -s {1} d/up",
        outside.display(),
        grid.folder.path().display()
    );
    let lease = lease(&grid, &judged(&run, json!([]), &[&["link", "dots", "d/up/outside"]]));
    let told = grid.trial(lease).await;
    let evidence = grid.evidence(told.outcome());
    assert_eq!(evidence.judge_files.len(), 3);
    for file in &evidence.judge_files {
        let JudgeFile::Missing { problem, .. } = file else {
            panic!("{file:?}")
        };
        assert!(problem.starts_with("cannot be read: "), "{problem}");
    }
}

#[tokio::test]
async fn judges_of_a_void_trial_are_skipped() {
    async fn check(run: &str, checks: Value, failure: &str, expected: &[(&str, &str, u64)]) {
        let mut grid = Grid::new().await;
        let lease = lease(&grid, &judged(run, checks, &[&["a"], &[]]));
        let told = grid.trial(lease).await;
        let outcome = told.outcome();
        assert_eq!((outcome.status(), outcome.failure.as_deref()), (TrialStatus::Void, Some(failure)));
        let evidence = grid.evidence(outcome);
        let records = evidence
            .validations
            .iter()
            .map(|record| (record.id.as_str(), record.status.name(), record.index));
        assert_eq!(records.collect::<Vec<_>>(), expected);
        assert_eq!(evidence.judge_files, []);
    }
    let failed = r#"echo '{"_tag":"Finished","reason":"failed: no key"}'"#;
    let no_key = "The command agent failed: no key";
    let judges = |first| [("judge:0", "skipped", first), ("judge:1", "skipped", first + 1)];
    check(failed, json!([]), no_key, &judges(0)).await;
    check(failed, node("0"), no_key, &[&[("code:0", "skipped", 0)][..], &judges(1)].concat()).await;
    check(
        "true",
        node("process.exit(0)"),
        "The validator checks gave no verdict: it ended without a verdict",
        &[&[("code:0", "error", 0)][..], &judges(1)].concat(),
    )
    .await;
}
