//! Ended batches, judged anew: other judges read what is stored, no agent runs again, and the old batch stays as it is.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::time::Duration;

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{agents, counter::Counter, suite};
use serde_json::{Value, json};

/// A few short trials on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Picks `right` where the agent has said this.
fn judge(said: &str) -> Value {
    json!({ "kind": "judge", "name": "right", "provider": "openai", "model": "gpt-5", "choices": { "right": 1, "wrong": 0 },
        "prompt": format!("PICK right IF OUTPUT CONTAINS {said} ELSE wrong") })
}

/// A case for each answer: its agent says it, and tells the counter that it ran.
fn batch(answers: &[&str], judge: Option<Value>, counter: &Counter) -> Value {
    let cases = answers.iter().enumerate().map(|(index, answer)| {
        let mut case = json!({ "id": format!("case-{index}"), "variables": { "answer": answer } });
        match &judge {
            Some(judge) => case["validator"] = json!({ "kind": "judged", "name": "judged", "checks": [], "judges": [judge] }),
            None => case["verify"] = json!("true"),
        }
        case
    });
    let told = counter.report("ran");
    let run = format!(r#"{told}; printf '{{"_tag":"Message","role":"assistant","text":"%s"}}\n' "$SPHYNX_PROMPT""#);
    json!({
        "suite": { "id": "regrade", "prompt": "{{ answer }}" },
        "cases": cases.collect::<Vec<_>>(),
        "variants": [{ "harness": "command", "model": "none", "sandbox": "bubblewrap",
            "profile": { "name": "answers", "files": {}, "run": run } }],
        "trials": 1,
    })
}

fn choices(batch: &Value) -> Vec<String> {
    let judged = |trial: &&Value| {
        let judgment = trial["validations"]
            .as_array()
            .unwrap()
            .iter()
            .find_map(|validation| validation.get("judgment"));
        let choice = judgment.and_then(|judgment| judgment["choice"].as_str()).unwrap_or("none");
        format!("{choice} {}", trial["status"].as_str().unwrap())
    };
    suite::trials(batch).iter().map(judged).collect()
}

/// catalogue J13: a regrade asks other judges about what is stored; no agent runs again, and the old batch stays as it is.
#[tokio::test(flavor = "multi_thread")]
async fn ended_batches_are_judged_anew() {
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = agents::server(folder.path(), &model.url(Mode::Ok), 6);
    let _process = server.serve();
    let api = server.ready().await;
    let counter = Counter::start().await;
    let judged = batch(&["one", "two"], Some(judge("one")), &counter);
    let id = api.start(&judged).await;
    let old = api.ended(&id, PATIENCE).await;
    assert_eq!(choices(&old), ["right passed", "wrong failed"]);
    let ran = counter.lines();
    assert_eq!(ran["ran"], 2);

    let regrade = async |body: Value| api.call("evals.batches.regrade", &body).await.unwrap();
    let answer = regrade(json!({ "id": id, "judges": [judge("two")] })).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let new = api.ended(answer.body["id"].as_str().unwrap(), PATIENCE).await;
    assert_eq!(choices(&new), ["wrong failed", "right passed"]);
    for (trial, before) in suite::trials(&new).iter().zip(["passed", "failed"]) {
        assert_eq!(trial["before"]["status"], before, "{trial}");
    }
    assert_eq!(api.batch(&id).await.unwrap(), old, "the old batch is as it was");

    // Some cases only.
    let answer = regrade(json!({ "id": id, "cases": ["case-1"], "judges": [judge("two")] })).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let some = api.ended(answer.body["id"].as_str().unwrap(), PATIENCE).await;
    // The other one keeps the verdict that it had.
    assert_eq!(choices(&some), ["right passed", "right passed"]);
    let judged = |trial: &Value| !trial["before"].is_null();
    assert_eq!(suite::trials(&some).into_iter().map(judged).collect::<Vec<_>>(), [false, true]);
    let answer = regrade(json!({ "id": id, "cases": ["no-such-case"] })).await;
    assert_eq!(answer.status, 400, "{}", answer.body);

    // A batch without judges is judged by those that come with the request.
    let plain = api.start(&batch(&["one"], None, &counter)).await;
    api.ended(&plain, PATIENCE).await;
    let answer = regrade(json!({ "id": plain, "judges": [judge("two")] })).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let first = api.ended(answer.body["id"].as_str().unwrap(), PATIENCE).await;
    assert_eq!(choices(&first), ["wrong failed"]);
    assert_eq!(counter.lines()["ran"], 3, "no agent ran again");

    // While it runs, there is nothing to judge anew.
    let mut slow = judge("one");
    slow["prompt"] = json!("PICK right\nFAULT mhang");
    let hanging = batch(&["one"], Some(slow), &counter);
    let running = api.start(&hanging).await;
    let answer = regrade(json!({ "id": running })).await;
    assert_eq!(answer.status, 409, "{}", answer.body);
}
