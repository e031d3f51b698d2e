//! Who answers, and who must not.

use std::sync::atomic::Ordering;

use evalgrid_proto::v1::{
    admin_client::AdminClient, auth_client::AuthClient, batches_client::BatchesClient, batches_server::BatchesServer,
};
use evalgrid_workflow::{Kind, decide};
use futures::StreamExt as _;
use tokio::net::TcpListener;
use tonic::{
    Code,
    service::Routes,
    transport::{Channel, Server, server::TcpIncoming},
};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::*;
use crate::{
    gate::Gate,
    stall::{self, Pace, STALLED_AFTER},
};

fn unavailable<T>(answer: Result<T, Status>, call: &str) {
    match answer {
        Err(status) => assert_eq!(status.code(), Code::Unavailable, "{call}: {status}"),
        Ok(_) => panic!("{call} is answered"),
    }
}

/// catalogue 3, 7: whoever has lost the right to answers nothing, least of all that something is not there.
#[tokio::test]
async fn a_deposed_scheduler_answers_nothing() {
    let site = Site::new();
    site.organization("one", "anp_one").await;
    let id = site.start("anp_one").await;
    site.get(&id, "anp_one").await.unwrap();
    site.right.0.send_replace(false);
    for id in [id.as_str(), "batch_00000000000000000000000000"] {
        unavailable(site.get(id, "anp_one").await, "get");
        let watched = site.service.watch(signed(v1::WatchBatchRequest { id: id.into() }, "anp_one")).await;
        unavailable(watched, "watch");
        let run = signed(v1::GetRunRequest { id: id.into() }, "anp_one");
        unavailable(site.service.get_run(run).await, "get_run");
        let cancelled = site
            .service
            .cancel(signed(v1::CancelBatchRequest { id: id.into() }, "anp_one"))
            .await;
        unavailable(cancelled, "cancel");
    }
    unavailable(site.list("anp_one").await, "list");
    unavailable(site.service.whoami(signed(v1::WhoamiRequest {}, "anp_one")).await, "whoami");
    unavailable(
        site.service.whoami(signed(v1::WhoamiRequest {}, "anp_unknown")).await,
        "whoami with a key that it does not know",
    );
    unavailable(site.service.start(signed(start_request(None), "anp_one")).await, "start");
}

/// catalogue 3: the right may be lost between a look at memory and one at the index, which by then may be another's.
#[tokio::test]
async fn who_is_deposed_while_reading_does_not_say_that_nothing_is_there() {
    for read in ["get", "list"] {
        let site = Site::new();
        site.organization("one", "anp_one").await;
        let id = site.ended("anp_one").await;
        site.stop.send_replace(true);
        crate::archive::archive_loop(site.reader.clone(), site.stop.subscribe()).await;
        assert_eq!(
            site.get(&id, "anp_one").await.unwrap().id,
            id,
            "it has left memory, and is read from the index"
        );
        assert_eq!(site.list("anp_one").await.unwrap(), [id.as_str()]);
        site.index.deposes.store(true, Ordering::SeqCst);
        match read {
            "get" => unavailable(site.get(&id, "anp_one").await, read),
            _ => unavailable(site.list("anp_one").await, read),
        }
        assert!(!*site.right.0.borrow(), "it was deposed on the way");
    }
}

/// A gate on loopback.
async fn served() -> (Gate, Channel) {
    let (gate, routes) = Gate::new().await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(
        Server::builder()
            .add_routes(routes)
            .serve_with_incoming(TcpIncoming::from(listener)),
    );
    (gate, Channel::from_shared(address).unwrap().connect().await.unwrap())
}

async fn health(channel: &Channel) -> ServingStatus {
    let answer = HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await;
    answer.unwrap().into_inner().status()
}

/// catalogue 7: a standby says who it is, whatever it is asked; it never answers from what it happens to know.
#[tokio::test]
async fn a_standby_refuses_every_call() {
    let (gate, channel) = served().await;
    for active in [None, Some("http://127.0.0.1:1".to_owned())] {
        gate.close(active.clone()).await;
        assert_eq!(health(&channel).await, ServingStatus::NotServing);
        let mut batches = BatchesClient::new(channel.clone());
        let known = "batch_00000000000000000000000000";
        let answers: [Result<(), Status>; 6] = [
            batches.get(v1::GetBatchRequest { id: known.into() }).await.map(drop),
            batches.list(v1::ListBatchesRequest::default()).await.map(drop),
            batches.watch(v1::WatchBatchRequest { id: known.into() }).await.map(drop),
            batches.start(start_request(None)).await.map(drop),
            AuthClient::new(channel.clone()).whoami(v1::WhoamiRequest {}).await.map(drop),
            AdminClient::new(channel.clone())
                .list_sandboxes(v1::ListSandboxesRequest::default())
                .await
                .map(drop),
        ];
        for answer in answers {
            let status = answer.unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            let told = status.metadata().get("evalgrid-active").unwrap().to_str().unwrap();
            assert_eq!(told, active.as_deref().unwrap_or(""), "it says where to go");
        }
    }
}

/// catalogue 6: serving means that the log goes on.
#[test]
fn a_stall_is_a_wait_without_progress() {
    let check = |looks: &[(u64, u64, u64)], expected: &[bool]| {
        let mut pace = Pace::default();
        let told: Vec<bool> = looks
            .iter()
            .map(|(newest, durable, seconds)| pace.look(*newest, *durable, seconds * 1_000).is_some())
            .collect();
        assert_eq!(told, expected, "{looks:?}");
    };
    check(&[(9, 9, 0), (9, 9, 100)], &[false, false]);
    // Idle for long, then a record that waits: its time begins with it.
    check(
        &[(9, 9, 0), (9, 9, 100), (10, 9, 101), (10, 9, 104), (10, 9, 105)],
        &[false, false, false, false, true],
    );
    // Slow, but it moves.
    check(&[(20, 9, 0), (20, 10, 4), (20, 11, 8), (20, 12, 12)], &[false; 4]);
    check(
        &[(20, 9, 0), (20, 9, 6), (20, 10, 7), (20, 10, 11), (20, 10, 12)],
        &[false, true, false, false, true],
    );
}

/// catalogue 6: while the log takes nothing, health says so, new calls are refused, and those that wait are let go; once it goes on, so does all.
#[tokio::test]
async fn a_log_that_takes_nothing_is_told() {
    let site = Site::new();
    site.organization("one", "anp_one").await;
    let known = site.start("anp_one").await;
    let (gate, channel) = served().await;
    gate.open(Routes::new(BatchesServer::new(site.service.clone()))).await;
    let watching = tokio::spawn(stall::watch(site.engine.clone(), gate.clone(), site.stop.subscribe()));
    let mut batches = BatchesClient::new(channel.clone());
    let get = || signed(v1::GetBatchRequest { id: known.clone() }, "anp_one");
    assert_eq!(health(&channel).await, ServingStatus::Serving);
    for round in 0..2 {
        site.hang(true);
        let mut caller = batches.clone();
        let key = format!("key-{round}");
        let again = key.clone();
        let waits = tokio::spawn(async move { caller.start(signed(start_request(Some(&key)), "anp_one")).await });
        let newest = || site.engine.turn(|core| core.position()).0;
        eventually("the start waits for the log", async || {
            newest() > site.engine.watch().borrow().position
        })
        .await;
        assert_eq!(health(&channel).await, ServingStatus::Serving, "a moment is no stall");
        // The watcher has seen the wait begin, or begins to count now: time only goes on afterwards.
        eventually("health says that nothing is served", async || {
            site.clock.ms.fetch_add(STALLED_AFTER.as_millis() as u64 / 4, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(200)).await;
            health(&channel).await == ServingStatus::NotServing
        })
        .await;
        let told = timeout(PATIENCE, waits).await.unwrap().unwrap().unwrap_err();
        assert_eq!(told.code(), Code::Unavailable);
        assert!(
            told.message().contains("not known") && !told.metadata().contains_key("evalgrid-active"),
            "{told}"
        );
        let refused = timeout(PATIENCE, batches.get(get())).await.unwrap().unwrap_err();
        assert!(refused.metadata().contains_key("evalgrid-active"), "nothing was done: {refused}");

        site.hang(false);
        eventually("it serves again", async || health(&channel).await == ServingStatus::Serving).await;
        assert_eq!(batches.get(get()).await.unwrap().into_inner().id, known);
        let replayed = batches
            .start(signed(start_request(Some(&again)), "anp_one"))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            site.list("anp_one").await.unwrap().len(),
            2 + round,
            "{} was started once",
            replayed.id
        );
    }
    site.stop.send_replace(true);
    watching.await.unwrap();
}

/// catalogue 8: what wakes a watcher is a hint; without any it looks by itself.
#[tokio::test]
async fn a_watcher_that_nobody_wakes_looks_by_itself() {
    let site = Site::new();
    site.organization("one", "anp_one").await;
    let id = site.start("anp_one").await;
    let watched = site
        .service
        .watch(signed(v1::WatchBatchRequest { id: id.clone() }, "anp_one"))
        .await;
    let mut watched = watched.unwrap().into_inner();
    let first = timeout(PATIENCE, watched.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(first.status(), v1::BatchStatus::Running);
    // The state changes, and nothing becomes durable that could tell of it.
    let organization = site
        .engine
        .turn(|core| core.state.batch(&id.parse().unwrap()).unwrap().organization)
        .0;
    site.engine.turn(|core| {
        let events = decide::cancel(&core.state, &organization, &id.parse().unwrap(), core.now_ms()).unwrap();
        for event in events {
            core.state.apply(&event).unwrap();
            let after = decide::after(&core.state, &event).unwrap();
            assert!(matches!(after.kind, Some(Kind::BatchEnded(_))));
            core.state.apply(&after).unwrap();
        }
    });
    let last = timeout(PATIENCE, watched.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(last.status(), v1::BatchStatus::Failed);
}
