//! Judges and people that are harnesses, each in a sandbox of its own: a stand-in program says what it was given, and does what the test wants.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_proto::v1::{
    AttemptFailureKind, Evidence, JobLease, JudgeJob, JudgeVerdict, Judged, ReplyJob, evidence::Place, job_lease::Job,
    job_result::Result as Outcome,
};
use serde_json::{Value, json};
use support::scheduler::{Grid, KEY, Told, sandbox_name, soon};

/// What a stand-in for codex can use: `say TEXT` is its message, `finish` ends its turn.
const CODEX: &str = r#"
    say() { printf '{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"%s"}}\n' "$1"; }
    finish() { printf '{"type":"turn.completed","usage":{"input_tokens":7,"cached_input_tokens":2,"output_tokens":1}}\n'; }
    printf '{"type":"thread.started","thread_id":"thread-1"}\n'
    question="$(cat)"
"#;
const YES: &str = r#"say '{\"choice\":\"yes\",\"reason\":\"It is.\"}'; finish"#;

fn request() -> Value {
    json!({
        "suite": {"id": "s", "prompt": "Paint the shed"},
        "cases": [{
            "id": "c",
            "user": {"kind": "simulated", "goal": "a blue shed", "prompt": "It is for bicycles.", "harness": "codex", "model": "m"},
            "validator": {"kind": "judged", "name": "v", "checks": [], "judges": [
                {"kind": "judge", "name": "colour", "prompt": "Is it blue?", "harness": "codex", "model": "m",
                 "choices": {"yes": 1, "no": 0}, "threshold": 1, "timeoutMs": 20000},
            ]},
        }],
        "variants": [{"harness": "command", "model": "m", "sandbox": "process", "profile": {"name": "p", "files": {}, "run": "true"}}],
        "trials": 1,
    })
}

fn inline(value: &Value) -> Option<Evidence> {
    Some(Evidence {
        place: Some(Place::Inline(value.to_string().into())),
    })
}

fn judgment(grid: &Grid, output: &str) -> JobLease {
    let mut lease = grid.lease(7, &request());
    lease.sandbox = sandbox_name();
    let evidence = json!({
        "trajectory": [{"_tag": "message", "role": "assistant", "text": output, "finishedAtMillis": 1}],
        "validations": [], "verifySteps": [], "voidFields": [], "filesChanged": [], "artifacts": [],
    });
    lease.job = Some(Job::Judge(JudgeJob {
        index: 0,
        evidence: Some(grid.object(&evidence)),
        validation_index: 0,
    }));
    lease
}

fn reply(grid: &Grid, turn: u32, said: &[&str]) -> JobLease {
    let mut lease = judgment(grid, "");
    let said: Vec<_> = said
        .iter()
        .zip(["person", "agent"].iter().cycle())
        .map(|(text, by)| json!({"by": by, "text": text}))
        .collect();
    lease.job = Some(Job::Reply(ReplyJob {
        turn,
        conversation: inline(&json!({"said": said})),
        session_id: String::new(),
    }));
    lease
}

fn judged(told: &Told) -> &Judged {
    assert_eq!(told.results.len(), 1, "{:?}", told.failures);
    match told.results[0].result.as_ref().unwrap() {
        Outcome::Judged(judged) => judged,
        other => panic!("{other:?}"),
    }
}

/// What comes of a judgment whose program does this.
async fn judge(script: &str, change: impl FnOnce(&mut JobLease)) -> (Told, Grid) {
    let mut grid = Grid::new().await;
    grid.stand_in("codex", &format!("{CODEX}\n{script}"));
    let mut lease = judgment(&grid, "It is blue now.");
    change(&mut lease);
    let runner = grid.runner();
    let told = grid.session().await.job(&lease).await;
    assert!(grid.sandboxes().is_empty() && told.destroyed == [lease.sandbox], "nothing is left");
    runner.stop().await;
    assert!(!format!("{told:?}").contains(KEY) && !grid.holds(KEY), "the key stays here");
    (told, grid)
}

/// catalogue J7: it begins with nothing, and leaves nothing.
#[tokio::test]
async fn a_judge_in_a_sandbox_of_its_own() {
    let script = format!(r#"say "thinking about it with $OPENAI_API_KEY"; [[ $question == *"It is blue now."* ]] || exit 1; {YES}"#);
    let (told, grid) = judge(&script, |_| {}).await;
    let judged = judged(&told);
    assert_eq!(
        (judged.verdict(), judged.choice.as_deref()),
        (JudgeVerdict::Passed, Some("yes")),
        "{}",
        judged.error
    );
    assert_eq!(told.asked, [7]);
    let usage = judged.spend.as_ref().unwrap().usage.as_ref().unwrap();
    assert_eq!((usage.input_tokens, usage.cache_read_tokens, usage.output_tokens), (5, 2, 1));
    let validation = grid.read(judged.validation.as_ref().unwrap());
    assert_eq!(validation["judgment"]["evaluator"], "codex");
    let metadata: Value = serde_json::from_str(validation["metadata"]["text"].as_str().unwrap()).unwrap();
    assert_eq!((&metadata["harness"], &metadata["exitCode"]), (&json!("codex"), &json!(0)));
}

/// A question may be far longer than what an argument can hold, 120 KiB.
#[tokio::test]
async fn a_long_question() {
    let mut grid = Grid::new().await;
    grid.stand_in(
        "codex",
        &format!(r#"{CODEX} [ "$(printf %s "$question" | wc -c)" -gt 150000 ] || exit 1; {YES}"#),
    );
    let mut request = request();
    request["cases"][0]["validator"]["judges"][0]["prompt"] = json!("漢".repeat(30_000));
    let lease = JobLease {
        request: grid.lease(7, &request).request,
        ..judgment(&grid, &"漢".repeat(60_000))
    };
    let runner = grid.runner();
    let told = grid.session().await.job(&lease).await;
    runner.stop().await;
    assert_eq!(judged(&told).verdict(), JudgeVerdict::Passed, "{}", judged(&told).error);
}

#[tokio::test]
async fn what_is_no_answer_of_a_harness() {
    let check = async |script: &str, expected: &str| {
        let (told, _) = judge(script, |_| {}).await;
        let judged = judged(&told);
        assert_eq!((judged.verdict(), &judged.choice), (JudgeVerdict::Error, &None), "{script}");
        assert!(judged.error.contains(expected), "{} has not: {expected}", judged.error);
    };
    check("say yes; finish", "not valid").await;
    check("finish", "empty").await;
    let tool = r#"printf '{"type":"item.completed","item":{"id":"j","type":"command_execution","command":"ls","exit_code":0,"status":"completed"}}\n'"#;
    check(&format!("{tool}; {YES}"), "it used a tool (a command)").await;
    let failed = r#"printf '{"type":"turn.failed","error":{"message":"unexpected status 401 of '$OPENAI_API_KEY'"}}\n'; exit 1"#;
    check(failed, "the codex agent failed: its model server refused the key (401)").await;
    check("echo broken >&2; exit 3", "the codex agent failed").await;
    let (told, _) = judge("exec sleep 60", |lease| lease.spent_ms = 19_000).await;
    assert_eq!(judged(&told).error, "there was no answer within 20s");
}

#[tokio::test]
async fn a_limited_harness_is_asked_again_later() {
    let limited = r#"printf '{"type":"turn.failed","error":{"message":"exceeded retry limit, last status: 429"}}\n'; exit 1"#;
    let (told, _) = judge(limited, |_| {}).await;
    assert!(matches!(told.results[0].result, Some(Outcome::NotNow(_))), "{told:?}");
    let (told, _) = judge(limited, |lease| lease.refused = 3).await;
    assert!(judged(&told).error.contains("asked 4 times"), "{}", judged(&told).error);
}

#[tokio::test]
async fn what_is_not_there_is_tried_elsewhere() {
    let mut grid = Grid::new().await;
    let mut lease = judgment(&grid, "");
    lease.provider = "nowhere".into();
    let runner = grid.runner();
    let mut session = grid.session().await;
    let told = session.job(&lease).await;
    assert_eq!(
        (told.failures[0].kind(), told.asked.len()),
        (AttemptFailureKind::SandboxUnavailable, 0)
    );
    lease.refused = 3;
    lease.token = 8;
    let told = session.job(&lease).await;
    assert_eq!(judged(&told).error, "the codex agent failed: this worker has no nowhere sandboxes");
    runner.stop().await;
}

/// The process goes on without its runner: the next one takes the sandbox over, and asks nothing again.
#[tokio::test]
async fn a_judge_outlives_its_runner() {
    let mut grid = Grid::new().await;
    let script = format!(r#"echo asked >> "$HOME/asks"; until [ -e "$HOME/go" ]; do sleep 0.05; done; {YES}"#);
    grid.stand_in("codex", &format!("{CODEX}\n{script}"));
    let mut lease = judgment(&grid, "");
    let runner = grid.runner();
    let mut session = grid.session().await;
    session.lease(&lease).await;
    session.until(|told| !told.asked.is_empty()).await;
    let home = grid.folder.path().join("worker/process").join(&lease.sandbox).join("home");
    soon("the program", async {
        while !home.join("asks").exists() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    runner.kill().await;
    let runner = grid.runner();
    let mut session = grid.session().await;
    assert!(session.hello.sandboxes.contains(&lease.sandbox));
    std::fs::write(home.join("go"), "").unwrap();
    (lease.token, lease.adopt) = (8, true);
    session.lease(&lease).await;
    let told = session.until(|told| !told.results.is_empty()).await;
    assert_eq!(judged(&told).verdict(), JudgeVerdict::Passed, "{}", judged(&told).error);
    runner.stop().await;
}

/// catalogue J16: a person keeps its sandbox and its session: it is told everything once, then only what is new.
#[tokio::test]
async fn a_person_remembers() {
    let mut grid = Grid::new().await;
    let script = r#"[[ $question == *"It is for bicycles."* ]] && knows=all || knows=new
        say "$knows $(echo "$*" | grep -c 'resume') $(echo turn >> "$HOME/turns"; grep -c . "$HOME/turns")"; finish"#;
    grid.stand_in("codex", &format!("{CODEX}\n{script}"));
    let runner = grid.runner();
    let mut session = grid.session().await;
    let mut lease = reply(&grid, 1, &["Paint the shed", "Which colour?"]);
    let sandbox = lease.sandbox.clone();
    let mut expect = async |lease: &JobLease, expected: &str| {
        let told = session.job(lease).await;
        assert!(told.destroyed.is_empty(), "its memory stays");
        match told.results[0].result.as_ref().unwrap() {
            Outcome::Replied(replied) => {
                let record: Value = serde_json::from_slice(&replied.record).unwrap();
                assert_eq!((&record["text"], &record["by"]), (&json!(expected), &json!("codex/m")), "{record}");
                assert_eq!(replied.spend.as_ref().unwrap().model, "m");
                replied.session_id.clone().unwrap()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(expect(&lease, "all 0 1").await, "thread-1");
    let next = |turn, token, adopt| {
        let mut lease = reply(&grid, turn, &["Paint the shed", "Which colour?", "Blue", "Dark or light?"]);
        (lease.token, lease.adopt, lease.sandbox) = (token, adopt, sandbox.clone());
        let Some(Job::Reply(reply)) = &mut lease.job else { unreachable!() };
        reply.session_id = "thread-1".into();
        lease
    };
    lease = next(2, 8, true);
    expect(&lease, "new 1 2").await;
    // The same reply is asked again after a refusal: a process of its own.
    lease = next(2, 9, true);
    lease.refused = 1;
    expect(&lease, "new 1 3").await;
    // A new sandbox remembers nothing.
    lease = next(3, 10, false);
    lease.sandbox = sandbox_name();
    expect(&lease, "all 0 1").await;
    assert_eq!(grid.sandboxes().len(), 2);
    runner.stop().await;
}
