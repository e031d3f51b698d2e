//! Jobs that ask a model, from the lease to what is reported: each is asked once, on record before it is, and its end says all there is to say.
#![allow(clippy::unwrap_used)]

mod support;

use bytes::Bytes;
use evalgrid_proto::v1::{
    AttemptFailureKind, Evidence, JobLease, JudgeJob, JudgeVerdict, Judged, Replied, ReplyJob, WorkerRole, evidence::Place, job_lease::Job,
    job_result::Result as Outcome,
};
use evalgrid_worker::ProcessPolicy;
use serde_json::{Value, json};
use support::{
    provider::{Reply, Server},
    scheduler::{Grid, KEY, Told, soon},
};

fn request(capture: bool) -> Value {
    json!({
        "suite": {"id": "s", "prompt": "Paint the {{what}}"},
        "cases": [{
            "id": "c", "variables": {"what": "shed"},
            "user": {"kind": "simulated", "goal": "a blue shed", "prompt": "It is for bicycles."},
            "validator": {"kind": "judged", "name": "v", "checks": [], "capture": capture, "judges": [
                {"kind": "judge", "name": "other", "prompt": "p", "provider": "openai", "model": "m", "choices": {"a": 1, "b": 0},
                 "threshold": 1, "timeoutMs": 120000},
                {"kind": "judge", "name": "colour", "prompt": "Is it blue?", "provider": "openai", "model": "gpt-5", "expected": "blue",
                 "choices": {"yes": 1, "nearly": 0.5, "no": 0}, "threshold": 0.5, "timeoutMs": 20000, "files": ["shed.txt"]},
            ]},
        }],
        "variants": [{"harness": "command", "model": "m", "sandbox": "process", "profile": {"name": "p", "files": {}, "run": "true"}}],
        "trials": 1,
    })
}

fn evidence() -> Value {
    json!({
        "trajectory": [{"_tag": "message", "role": "assistant", "text": "It is blue now.", "finishedAtMillis": 1}],
        "validations": [], "verifySteps": [], "voidFields": [], "filesChanged": [], "artifacts": [],
        "judgeFiles": [{"path": "shed.txt", "text": "#0000ff"}],
    })
}

fn inline(value: &Value) -> Option<Evidence> {
    Some(Evidence {
        place: Some(Place::Inline(value.to_string().into())),
    })
}

/// A judgment by the model at `url`.
fn judgment(grid: &Grid, url: &str) -> JobLease {
    let mut lease = grid.lease(7, &request(true));
    lease.credential.insert("baseUrl".into(), url.into());
    lease.model_provider = "openai".into();
    lease.model = "gpt-5".into();
    lease.job = Some(Job::Judge(JudgeJob {
        index: 1,
        evidence: inline(&evidence()),
        validation_index: 3,
    }));
    lease
}

/// A reply by the model at `url`.
fn reply(grid: &Grid, url: &str) -> JobLease {
    let mut lease = judgment(grid, url);
    lease.job = Some(Job::Reply(ReplyJob {
        turn: 1,
        conversation: inline(&json!({"said": [{"by": "person", "text": "Paint the shed"}, {"by": "agent", "text": "Which colour?"}]})),
        session_id: String::new(),
    }));
    lease
}

fn says(text: &str) -> Reply {
    let output = json!([{"type": "message", "content": [{"type": "output_text", "text": text}]}]);
    let answer = json!({
        "id": "resp_1", "status": "completed", "model": "gpt-5-2026", "output": output,
        "usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60}, "output_tokens": 20, "total_tokens": 120},
    });
    Reply::json(200, &answer.to_string())
}

fn replies(text: &str) -> Reply {
    let answer = json!({
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 10, "completion_tokens": 3},
    });
    Reply::json(200, &answer.to_string())
}

const YES: &str = r#"{"choice": "yes", "reason": "It says blue."}"#;

fn judged(told: &Told) -> &Judged {
    assert!(told.failures.is_empty(), "{:?}", told.failures);
    assert_eq!(told.results.len(), 1);
    match told.results[0].result.as_ref().unwrap() {
        Outcome::Judged(judged) => judged,
        other => panic!("{other:?}"),
    }
}

fn replied(told: &Told) -> (&Replied, Value) {
    assert_eq!(told.results.len(), 1, "{:?}", told.failures);
    match told.results[0].result.as_ref().unwrap() {
        Outcome::Replied(replied) => (replied, serde_json::from_slice(&replied.record).unwrap()),
        other => panic!("{other:?}"),
    }
}

/// What comes of a judgment that a model answers like this; `change` makes the lease another one.
async fn judge(answer: Reply, change: impl FnOnce(&Grid, &mut JobLease)) -> (Told, Grid, usize) {
    let model = Server::start(vec![answer]).await;
    let mut grid = Grid::new().await;
    let mut lease = judgment(&grid, &model.url);
    change(&grid, &mut lease);
    let runner = grid.runner();
    let told = grid.session().await.job(&lease).await;
    runner.stop().await;
    assert!(told.destroyed.is_empty());
    assert!(!format!("{told:?}").contains(KEY) && !grid.holds(KEY), "the key stays here");
    (told, grid, model.requests().len())
}

/// catalogue J8: with the model that gave it.
#[tokio::test]
async fn a_judgment() {
    let (told, grid, asks) = judge(says(YES), |_, _| {}).await;
    assert_eq!((asks, told.asked.as_slice()), (1, &[7][..]));
    let judged = judged(&told);
    assert_eq!(
        (judged.index, judged.name.as_str(), judged.verdict()),
        (1, "colour", JudgeVerdict::Passed)
    );
    assert_eq!(
        (judged.choice.as_deref(), judged.score, judged.error.as_str()),
        (Some("yes"), Some(1.0), "")
    );
    let spend = judged.spend.as_ref().unwrap();
    let usage = spend.usage.as_ref().unwrap();
    assert_eq!(
        (spend.model.as_str(), usage.input_tokens, usage.cache_read_tokens),
        ("gpt-5", 40, 60)
    );
    let validation = grid.read(judged.validation.as_ref().unwrap());
    assert_eq!(
        (&validation["id"], &validation["index"], &validation["status"]),
        (&json!("judge:1"), &json!(3), &json!("passed"))
    );
    assert_eq!(validation["output"]["text"], YES);
    let input = validation["input"]["text"].as_str().unwrap();
    for part in ["Is it blue?", "Paint the shed", "It is blue now.", "#0000ff"] {
        assert!(input.contains(part), "{part} in {input}");
    }
    let metadata: Value = serde_json::from_str(validation["metadata"]["text"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&metadata["responseId"], &metadata["modelReported"]),
        (&json!("resp_1"), &json!("gpt-5-2026"))
    );
    assert_eq!(metadata["questionSha256"].as_str().unwrap().len(), 64);
}

/// catalogue J2: a crash behind that is one ask, and known.
#[tokio::test]
async fn it_is_on_record_before_it_is_asked() {
    let model = Server::start(vec![says(YES)]).await;
    let mut grid = Grid::new().await;
    let runner = grid.runner();
    let mut session = grid.session().await;
    assert_eq!(
        (session.hello.role(), session.hello.providers.contains(&"process".to_owned())),
        (WorkerRole::JudgeRunner, true)
    );
    session.hold_back();
    session.lease(&judgment(&grid, &model.url)).await;
    let told = session.until(|told| !told.asked.is_empty()).await;
    assert!(
        told.results.is_empty() && model.requests().is_empty(),
        "nothing is sent before that is durable"
    );
    session.make_up().await;
    let told = session.until(|told| told.credits == 1).await;
    judged(&told);
    assert_eq!(model.requests().len(), 1);
    assert!(model.requests()[0].head.contains("idempotency-key: job-7"));
    runner.stop().await;
}

/// A machine on which no sandbox works is good enough for models.
#[tokio::test]
async fn a_runner_without_sandboxes() {
    let model = Server::start(vec![says(YES)]).await;
    let mut grid = Grid::new().await;
    let runner = grid.runner_with(|options| {
        options.process_sandbox = ProcessPolicy::Off;
        options.supervisor_executable = "/nowhere".into();
    });
    let mut session = grid.session().await;
    assert_eq!(session.hello.providers, [""; 0]);
    judged(&session.job(&judgment(&grid, &model.url)).await);
    runner.stop().await;
}

/// catalogue 58: whoever comes next asks instead.
#[tokio::test]
async fn a_runner_that_stops_gives_its_jobs_back() {
    let model = Server::start(vec![Reply::Stuck(String::new())]).await;
    let mut grid = Grid::new().await;
    let runner = grid.runner();
    let mut session = grid.session().await;
    session.lease(&judgment(&grid, &model.url)).await;
    session.until(|told| !told.asked.is_empty()).await;
    let (told, ()) = tokio::join!(session.until(|told| !told.failures.is_empty()), runner.stop());
    assert_eq!((told.failures[0].token, told.failures[0].kind()), (7, AttemptFailureKind::Released));
}

/// catalogue J5: a label that is not one of the judge's has no score.
#[tokio::test]
async fn what_a_score_means() {
    let check = async |answer: &str, verdict: JudgeVerdict, error: &str| {
        let (told, ..) = judge(says(answer), |_, _| {}).await;
        let judged = judged(&told);
        assert_eq!(judged.verdict(), verdict, "{answer}");
        assert!(
            judged.error.contains(error) && judged.error.is_empty() == error.is_empty(),
            "{}",
            judged.error
        );
        assert_eq!(judged.score.is_some(), verdict != JudgeVerdict::Error);
    };
    check(r#"{"choice": "nearly", "reason": "r"}"#, JudgeVerdict::Passed, "").await;
    check(r#"{"choice": "no", "reason": "r"}"#, JudgeVerdict::Failed, "").await;
    check(r#"{"choice": "maybe", "reason": "r"}"#, JudgeVerdict::Error, "not valid").await;
    check(r#"{"choice": "yes"}"#, JudgeVerdict::Error, "not valid").await;
    check("", JudgeVerdict::Error, "empty").await;
}

#[tokio::test]
async fn a_judgment_without_capture_keeps_no_values() {
    let (told, grid, _) = judge(says(YES), |grid, lease| lease.request = grid.lease(7, &request(false)).request).await;
    let validation = grid.read(judged(&told).validation.as_ref().unwrap());
    assert_eq!(
        (&validation["input"]["state"], &validation["output"]["state"]),
        (&json!("disabled"), &json!("disabled"))
    );
    assert_eq!(validation["judgment"]["choice"], "yes");
    assert!(!validation.to_string().contains("It is blue now."));
}

/// An agent spells a variable of its own, which nobody takes for one; who reads it puts it together.
#[tokio::test]
async fn what_is_put_together_of_the_trial_s_secrets_is_redacted() {
    const SECRETS: [&str; 2] = ["hunter2-and-more", "correct horse battery"];
    let joined = SECRETS.join(" and ");
    let secret = |_: &Grid, lease: &mut JobLease| lease.trial_secrets = SECRETS.map(str::to_owned).into();
    let check = |told: &Told, grid: &Grid| {
        for secret in SECRETS {
            assert!(!format!("{told:?}").contains(secret) && !grid.holds(secret), "{secret} in {told:?}");
        }
    };
    let answer = json!({"choice": "yes", "reason": joined}).to_string();
    let (told, grid, _) = judge(says(&answer), secret).await;
    check(&told, &grid);
    let validation = grid.read(judged(&told).validation.as_ref().unwrap());
    let redacted = "[redacted] and [redacted]";
    assert_eq!(validation["judgment"]["reason"], redacted);
    let raw = json!({"choice": "yes", "reason": redacted}).to_string();
    assert_eq!(validation["output"]["text"], raw);

    let output = json!([{"type": "message", "content": [{"type": "output_text", "text": answer}]}]);
    let response = json!({"id": joined, "model": joined, "status": "completed", "output": output});
    let (told, grid, _) = judge(Reply::json(200, &response.to_string()), secret).await;
    check(&told, &grid);
    let failure = json!({"error": {"message": joined}}).to_string();
    let (told, grid, _) = judge(Reply::json(401, &failure), secret).await;
    check(&told, &grid);
    assert!(judged(&told).error.contains(redacted), "{}", judged(&told).error);

    let person = |grid: &Grid, lease: &mut JobLease| {
        secret(grid, lease);
        lease.job = reply(grid, "").job;
    };
    let (told, grid, _) = judge(replies(&joined), person).await;
    check(&told, &grid);
    assert_eq!(replied(&told).1["text"], redacted);
}

#[tokio::test]
async fn what_a_judge_says_of_a_secret_is_redacted() {
    let answer = json!({"choice": "yes", "reason": format!("The key is {KEY}.")});
    let (told, grid, _) = judge(says(&answer.to_string()), |_, _| {}).await;
    let validation = grid.read(judged(&told).validation.as_ref().unwrap());
    assert_eq!(validation["judgment"]["reason"], "The key is [redacted].");
    let failure = json!({"error": {"message": format!("Incorrect API key provided: {KEY}")}});
    let (told, ..) = judge(Reply::json(401, &failure.to_string()), |_, _| {}).await;
    assert_eq!(
        judged(&told).error,
        "the provider answered with status 401: Incorrect API key provided: [redacted]"
    );
}

#[tokio::test]
async fn evidence_and_records_that_are_long_are_objects() {
    let mut long = evidence();
    long["judgeFiles"][0]["text"] = json!("blue ".repeat(5_000));
    let (told, grid, _) = judge(says(YES), |grid, lease| {
        let Some(Job::Judge(judge)) = &mut lease.job else { unreachable!() };
        judge.evidence = Some(grid.object(&long));
    })
    .await;
    let evidence = judged(&told).validation.as_ref().unwrap();
    assert!(matches!(evidence.place, Some(Place::Object(_))));
    assert_eq!(grid.read(evidence)["truncated"], true);
}

/// Ends that need no ask, and tell nobody that there is one.
#[tokio::test]
async fn what_is_not_asked() {
    let check = async |change: &dyn Fn(&Grid, &mut JobLease), expected: &str| {
        let (told, _, asks) = judge(says(YES), change).await;
        let judged = judged(&told);
        assert_eq!(
            (asks, told.asked.len(), judged.verdict()),
            (0, 0, JudgeVerdict::Error),
            "{expected}"
        );
        assert!(judged.error.contains(expected), "{} has not: {expected}", judged.error);
    };
    check(
        &|_, lease| lease.missing = "OPENAI_API_KEY".into(),
        "Set OPENAI_API_KEY in Settings > Environment to run openai",
    )
    .await;
    check(
        &|_, lease| lease.unclear = 2,
        "asked 2 times, and each time the judge runner stopped",
    )
    .await;
    check(
        &|_, lease| (lease.unclear, lease.reason) = (2, "it broke".into()),
        "asked 2 times, and no answer arrived: it broke",
    )
    .await;
    check(&|_, lease| (lease.refused, lease.reason) = (4, "429".into()), "asked 4 times: 429").await;
    check(&|_, lease| lease.spent_ms = 20_000, "no answer within 20s").await;
    check(&|_, lease| lease.credential.clear(), "no key and address").await;
    check(&|_, lease| lease.case_index = 9, "no such judge").await;
    check(&|_, lease| lease.request = None, "no start request").await;
    check(&|grid, _| grid.forget_objects(), "the object store refused").await;
    let with = |evidence: Value| {
        move |_: &Grid, lease: &mut JobLease| {
            let Some(Job::Judge(judge)) = &mut lease.job else { unreachable!() };
            judge.evidence = inline(&evidence);
        }
    };
    check(&with(json!("no evidence")), "cannot be read").await;
    let mut missing = evidence();
    missing["judgeFiles"] = json!([{"path": "shed.txt", "problem": "is not there"}]);
    check(&with(missing), "the file shed.txt is not there").await;
}

/// catalogue J3: what the scheduler has asked again, and what is the end because it was the last time.
#[tokio::test]
async fn what_may_be_asked_again() {
    let limited = Reply::with(429, &[("retry-after", "2")], r#"{"error":{"message":"slow down"}}"#);
    for (refused, last) in [(0, false), (2, false), (3, true)] {
        let (told, _, asks) = judge(limited.clone(), |_, lease| lease.refused = refused).await;
        assert_eq!(asks, 1);
        match (last, told.results[0].result.as_ref().unwrap()) {
            (false, Outcome::NotNow(not_now)) => {
                assert_eq!((not_now.retry_after_ms, not_now.reason.as_str()), (2_000, "status 429: slow down"));
            }
            (true, Outcome::Judged(judged)) => assert!(judged.error.ends_with("asked 4 times: status 429: slow down"), "{}", judged.error),
            other => panic!("{other:?}"),
        }
    }
    for (unclear, last) in [(0, false), (1, true)] {
        let (told, _, asks) = judge(Reply::Bytes(String::new()), |_, lease| lease.unclear = unclear).await;
        assert_eq!(asks, 1);
        match (last, told.results[0].result.as_ref().unwrap()) {
            (false, Outcome::Unclear(unclear)) => assert!(unclear.reason.contains("broke"), "{}", unclear.reason),
            (true, Outcome::Judged(judged)) => {
                assert!(
                    judged.error.starts_with("it was asked 2 times, and no answer arrived: "),
                    "{}",
                    judged.error
                );
                // What the first answer has cost, nobody knows.
                assert_eq!(judged.spend.as_ref().unwrap().usage, None);
            }
            other => panic!("{other:?}"),
        }
    }
    let (told, _, asks) = judge(Reply::Stuck(String::new()), |_, lease| lease.spent_ms = 19_800).await;
    assert_eq!((asks, judged(&told).error.as_str()), (1, "there was no answer within 20s"));
    assert!(told.results[0].spent_ms >= 200, "{}", told.results[0].spent_ms);
}

#[tokio::test]
async fn a_person_of_a_model() {
    let check = async |answer: Reply, change: &dyn Fn(&mut JobLease), expected: Value, failed: bool, asks: usize| {
        let model = Server::start(vec![answer]).await;
        let mut grid = Grid::new().await;
        let mut lease = reply(&grid, &model.url);
        change(&mut lease);
        let runner = grid.runner();
        let told = grid.session().await.job(&lease).await;
        runner.stop().await;
        let (replied, mut record) = replied(&told);
        record.as_object_mut().unwrap().remove("durationMs");
        assert_eq!((&record, replied.failed, model.requests().len()), (&expected, failed, asks));
        assert_eq!(told.asked.len(), asks);
        // What was lost has used something, too.
        assert_eq!(replied.spend.is_some(), asks > 0 || lease.unclear > 0);
        model.requests().pop()
    };
    let asked = check(
        replies("Blue."),
        &|_| {},
        json!({"text": "Blue.", "done": false, "by": "gpt-5"}),
        false,
        1,
    )
    .await
    .unwrap();
    let body: Value = serde_json::from_str(&asked.body).unwrap();
    let said: Vec<_> = body["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| (&message["role"], &message["content"]))
        .collect();
    assert_eq!(
        said[2..],
        [
            (&json!("assistant"), &json!("Paint the shed")),
            (&json!("user"), &json!("Which colour?"))
        ]
    );
    check(replies("<<DONE>>"), &|_| {}, json!({"done": true, "by": "gpt-5"}), false, 1).await;
    let failure =
        |reason: &str| json!({"done": false, "by": "gpt-5", "failure": format!("The simulated person could not answer: {reason}")});
    let unknown = Reply::json(404, r#"{"error":{"message":"no such model"}}"#);
    check(
        unknown,
        &|_| {},
        failure("the provider answered with status 404: no such model"),
        true,
        1,
    )
    .await;
    let late = |lease: &mut JobLease| lease.spent_ms = 119_800;
    check(
        Reply::Stuck(String::new()),
        &late,
        failure("there was no answer within 2m"),
        true,
        1,
    )
    .await;
    let stopped = failure("it was asked 2 times, and each time the judge runner stopped before an answer was kept");
    check(replies("Blue."), &|lease| lease.unclear = 2, stopped, true, 0).await;
}

#[tokio::test]
async fn a_job_that_nobody_knows() {
    let mut grid = Grid::new().await;
    let lease = JobLease {
        job: None,
        ..judgment(&grid, "http://127.0.0.1:1")
    };
    let runner = grid.runner();
    let told = soon("its end", async { grid.session().await.job(&lease).await }).await;
    runner.stop().await;
    assert_eq!((told.failures.len(), told.results.len()), (1, 0));
    assert!(Bytes::from(told.failures[0].reason.clone()).starts_with(b"this judge runner does not know"));
}
