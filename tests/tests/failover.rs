//! Redis fails over to a replica that lags: the loss is told, what is left is true, nothing is written over the hole, and work goes on.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::time::Duration;

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{
    cell::{Cell, Redis},
    http::Api,
    judges, suite,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

async fn run(api: &Api) -> (String, Value) {
    let body = suite::command_batch(3, 2, "process", "echo done > done", "test -f done");
    // A call during a failover may be told to come again.
    let id = evalgrid_tests::eventually("the batch is started", PATIENCE, || async {
        let answer = api.call("evals.batches.start", &body).await.ok()?;
        (answer.status == 200).then(|| answer.body["id"].as_str().unwrap().to_owned())
    })
    .await;
    let ended = api.ended(&id, PATIENCE).await;
    assert!(suite::trials(&ended).iter().all(|trial| trial["status"] == "passed"), "{ended}");
    (id, ended)
}

/// catalogue 49: the loss is found by whoever had seen what is gone, and said.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_lagging_replica_loses_is_told_and_the_rest_is_true() {
    let folder = tempfile::tempdir().unwrap();
    let mut redis = Redis::start(&folder.path().join("redis"));
    let mut cell = Cell::new(folder.path(), &redis, 2);
    cell.scheduler = ["--sandbox-map", "process=process"].map(str::to_owned).into();
    cell.executor = ["--slots", "6", "--enable-process-sandbox"].map(str::to_owned).into();
    let _schedulers = [cell.scheduler(0), cell.scheduler(1)];
    let _gateway = cell.api();
    let api = cell.ready().await;
    let _executor = cell.executor(0);

    let (kept, before) = run(&api).await;
    redis.fork();
    let (lost, _) = run(&api).await;
    redis.fail_over();

    // The active scheduler believes its memory until its next word with Redis, which comes with the renewal of its lease.
    evalgrid_tests::eventually("what is lost did not happen", PATIENCE, || async {
        let answer = api.call("evals.batches.get", &json!({ "id": lost })).await.ok()?;
        (answer.status == 404).then_some(())
    })
    .await;
    assert_eq!(api.batch(&kept).await.unwrap(), before, "what is left is as it was");
    let (next, _) = run(&api).await;
    let list = api.call("evals.batches.list", &json!({})).await.unwrap().body;
    let ids: Vec<&str> = list["batches"]
        .as_array()
        .unwrap()
        .iter()
        .map(|batch| batch["id"].as_str().unwrap())
        .collect();
    assert_eq!(
        (&list["total"], ids),
        (&json!(2), vec![next.as_str(), kept.as_str()]),
        "no row tells of what is lost"
    );
    // The one that was active had seen what is gone, whether or not the standby had come that far.
    let told = |number: usize| {
        let log = std::fs::read_to_string(folder.path().join(format!("scheduler-{number}.log"))).unwrap();
        log.contains("has lost records that may have been acknowledged")
    };
    assert!(told(0) || told(1), "the loss is told");
}

/// catalogue 49: of a judge's answer that is lost, it is known that there was a question. It is asked once more, and judges once.
#[tokio::test(flavor = "multi_thread")]
async fn a_judgment_that_a_lagging_replica_loses_is_asked_for_once_more() {
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut redis = Redis::start(&folder.path().join("redis"));
    let mut cell = Cell::new(folder.path(), &redis, 2);
    cell.variables = judges::variables(&model.url(Mode::Ok));
    cell.scheduler = ["--sandbox-map", "process=process"].map(str::to_owned).into();
    cell.executor = ["--slots", "1", "--enable-process-sandbox"].map(str::to_owned).into();
    let _schedulers = [cell.scheduler(0), cell.scheduler(1)];
    let _gateway = cell.api();
    let api = cell.ready().await;
    let _workers = [cell.executor(0), cell.judge_runner(0)];
    let mut batch = suite::command_batch(1, 1, "process", "echo done > done", "true");
    let judge = json!({ "kind": "judge", "name": "right", "provider": "openai", "model": "gpt-5", "choices": { "right": 1, "wrong": 0 },
        "prompt": "PICK right\nWAIT 2000" });
    batch["cases"][0] = json!({ "id": "judged", "validator": { "kind": "judged", "name": "judged", "checks": [], "judges": [judge] } });
    let id = api.start(&batch).await;
    let asked = async |times: u64| {
        evalgrid_tests::eventually("the judge is asked", PATIENCE, || async {
            (model.totals().requests >= times).then_some(())
        })
        .await;
    };
    // The copy has the question, and not the answer.
    asked(1).await;
    redis.fork();
    let before = api.ended(&id, PATIENCE).await;
    assert_eq!(before["runs"][0]["trials"][0]["status"], "passed", "{before}");
    redis.fail_over();
    asked(2).await;
    let after = api.ended(&id, PATIENCE).await;
    let trial = &after["runs"][0]["trials"][0];
    assert_eq!(
        (&trial["status"], trial["validations"].as_array().map(Vec::len)),
        (&json!("passed"), Some(1)),
        "{after}"
    );
    assert_eq!(judges::asks(&model).into_values().collect::<Vec<_>>(), [2], "one job, asked twice");
}
