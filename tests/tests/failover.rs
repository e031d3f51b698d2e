//! Redis fails over to a replica that lags: the loss is told, what is left is true, nothing is written over the hole, and work goes on.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::time::Duration;

use evalgrid_tests::{
    cell::{Cell, Redis},
    http::Api,
    suite,
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
