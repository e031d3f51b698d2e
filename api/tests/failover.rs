//! The API in front of a cell whose active scheduler changes.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use serde_json::json;
use support::{Api, Scheduler};
use tokio::{io::AsyncReadExt as _, net::TcpListener};

#[tokio::test]
async fn every_call_reaches_the_active_scheduler() {
    let (a, b) = (Scheduler::start().await, Scheduler::start().await);
    let (batch, objects) = support::batch();
    for scheduler in [&a, &b] {
        let mut script = scheduler.script.lock().unwrap();
        (script.batch, script.objects) = (batch.clone(), objects.clone());
    }
    a.set_active(true).await;
    b.set_active(false).await;
    let api = Api::of_cell(vec![a.url.clone(), b.url.clone()]).await;
    let mut active = (&a, &b);
    for op in [
        "auth.whoami",
        "evals.batches.start",
        "evals.batches.get",
        "evals.batches.list",
        "evals.runs.get",
        "evals.batches.cancel",
    ] {
        let id = if op == "evals.runs.get" { "run_1" } else { "batch_1" };
        for _ in 0..2 {
            let answer = api.op(op, json!({ "id": id })).await;
            assert_eq!(answer.status, 200, "{op}: {answer:?}");
            // The next one finds a standby where the active one was.
            active.0.set_active(false).await;
            active.1.set_active(true).await;
            active = (active.1, active.0);
        }
    }
    let started: usize = [&a, &b].iter().map(|s| s.script.lock().unwrap().started.len()).sum();
    assert_eq!(started, 2, "each start was taken once");
}

#[tokio::test]
async fn a_change_that_breaks_off_is_for_the_caller_to_repeat() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broken = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // Takes what comes first, and hangs up.
            let _ = stream.read(&mut [0; 4096]).await;
        }
    });
    let api = Api::of_cell(vec![broken]).await;
    for (op, advice) in [
        ("evals.batches.start", "same idempotency-key"),
        ("evals.batches.cancel", "same idempotency-key"),
        ("evals.batches.list", "Try again."),
    ] {
        let answer = api.op(op, json!({"id": "batch_1"})).await;
        assert_eq!(answer.kind(), (503, "Unavailable".into()), "{op}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(advice), "{op}: {message}");
        assert_eq!(answer.headers["retry-after"], "1");
    }
}
