//! One API in front of two cells: each organization is found where it lives.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use serde_json::json;
use support::{Api, Scheduler};
use tokio::net::TcpListener;

fn asked(scheduler: &Scheduler) -> Vec<&'static str> {
    std::mem::take(&mut scheduler.script.lock().unwrap().asked)
}

fn set_home(home: &Scheduler, other: &Scheduler) {
    home.script.lock().unwrap().empty = false;
    other.script.lock().unwrap().empty = true;
}

#[tokio::test]
async fn a_key_is_asked_for_once_and_again_when_its_home_forgets_it() {
    let (a, b) = (Scheduler::start().await, Scheduler::start().await);
    let api = Api::of_cells(&[a.url.clone(), b.url.clone()]).await;
    set_home(&b, &a);
    for _ in 0..3 {
        assert_eq!(api.op("evals.batches.list", json!({})).await.status, 200);
    }
    // The home's answer may come before the other's question arrives.
    assert!(asked(&a).iter().all(|call| *call == "whoami"));
    assert_eq!(asked(&b), ["whoami", "list", "list", "list"]);

    set_home(&a, &b);
    for op in ["evals.batches.list", "evals.batches.start"] {
        assert_eq!(api.op(op, json!({})).await.status, 200, "{op}");
    }
    assert_eq!(asked(&a), ["whoami", "list", "start"]);
    assert_eq!(asked(&b).first(), Some(&"list"), "the old home was asked first");
    let started = [&a, &b].map(|scheduler| scheduler.script.lock().unwrap().started.len());
    assert_eq!(started, [1, 0]);
}

#[tokio::test]
async fn a_cell_that_is_down_harms_nobody_else_and_makes_no_key_wrong() {
    let a = Scheduler::start().await;
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let api = Api::of_cells(&[format!("http://{unused}"), a.url.clone()]).await;
    assert_eq!(api.op("evals.batches.list", json!({})).await.status, 200);
    let stranger = [("authorization", "Bearer anp_stranger")];
    let answer = api.send("POST", "/v1/evals.batches.list", &stranger, "{}").await;
    assert_eq!(answer.kind(), (503, "Unavailable".into()));

    let b = Scheduler::start().await;
    let api = Api::of_cells(&[a.url.clone(), b.url.clone()]).await;
    let answer = api.send("POST", "/v1/evals.batches.list", &stranger, "{}").await;
    assert_eq!(answer.kind(), (401, "Unauthorized".into()));
}
