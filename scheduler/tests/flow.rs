//! Limits, refusals of models, and custody, over loopback, with workers and an operator played by the test.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use evalgrid_proto::v1::{self, Hello, Report, SandboxState, to_worker::Message};
use evalgrid_scheduler::{Limits, ProviderLimits, SchedulerOptions};
use support::*;

fn slots(slots: u32) -> Hello {
    Hello { slots, ..hello("w", "1") }
}

/// What the worker is told besides answers to heartbeats, for as long as nothing is to be expected.
async fn quiet(worker: &mut Worker) -> Option<Message> {
    let told = async {
        loop {
            match worker.next().await {
                Some(Message::Heartbeat(_)) => {}
                other => return other,
            }
        }
    };
    tokio::time::timeout(Duration::from_millis(700), told).await.ok().flatten()
}

#[tokio::test]
async fn sandboxes_on_their_way_are_limited_per_provider() {
    let folder = tempfile::tempdir().unwrap();
    let limits = ProviderLimits {
        create_per_second: 1_000.0,
        create_burst: 100,
        max_starting: 1,
        max_living: 2,
    };
    let options = || SchedulerOptions {
        limits: Limits {
            providers: [("bubblewrap".to_owned(), limits)].into(),
            ..Limits::default()
        },
        ..options(folder.path())
    };
    let server = Server::open(options()).await;
    let id = server.client().await.start(&batch(1, 4)).await.id;
    let mut worker = server.worker(slots(4)).await;
    let first = worker.lease().await;
    assert!(quiet(&mut worker).await.is_none(), "one is on its way");
    worker.step(first.token, "sandbox.create").await;
    let second = worker.lease().await;
    worker.step(second.token, "sandbox.create").await;
    assert!(quiet(&mut worker).await.is_none(), "two live");
    drop(worker);
    server.stop().await;

    // After a restart the limits hold as before: two live.
    let server = Server::open(options()).await;
    let back = Hello {
        slots: 2,
        held: vec![first.token, second.token],
        sandboxes: vec![first.sandbox.clone(), second.sandbox.clone()],
        ..hello("w", "1")
    };
    let mut worker = server.worker(back).await;
    assert!(quiet(&mut worker).await.is_none());
    worker.pass(&first).await;
    let third = worker.lease().await;
    worker.step(third.token, "sandbox.create").await;
    worker.pass(&second).await;
    let fourth = worker.lease().await;
    worker.pass(&third).await;
    worker.pass(&fourth).await;
    assert_eq!(server.client().await.ended(&id).await.runs[0].distribution.unwrap().passed, 4);
    server.stop().await;
}

#[tokio::test]
async fn a_refused_trial_gives_its_slot_back_and_keeps_its_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let id = client.start(&batch(2, 1)).await.id;
    let mut worker = server.worker(slots(2)).await;
    let (first, second) = (worker.lease().await, worker.lease().await);
    assert_eq!(first.model_key, "command/m");
    worker.step(first.token, "sandbox.create").await;
    let throttled = |token, model_key: &str| Report {
        throttled: vec![v1::Throttled {
            token,
            model_key: model_key.into(),
            retry_after_ms: 1_000,
        }],
        credits: 1,
        ..Report::default()
    };
    let ack = worker.report(throttled(first.token, "command/m")).await;
    assert!(ack.stale.is_empty());
    assert_eq!(
        worker.step(first.token, "turn.1.agent").await.stale,
        [first.token],
        "the lease has ended"
    );
    assert!(worker.pass(&second).await.stale.is_empty());
    // It comes back, to the same sandbox, once the provider wants to be asked again.
    let again = worker.lease().await;
    assert!(again.adopt && again.sandbox == first.sandbox && again.token > second.token);
    assert_eq!(again.steps.len(), 1);
    let refused = worker.report(throttled(again.token, "command/another")).await;
    assert_eq!(refused.stale, [again.token], "not the key of this lease");
    let batch = client.ended(&id).await;
    let trial = &batch.runs[0].trials[0];
    assert_eq!((trial.attempts, trial.lost_attempts.len()), (1, 0), "no attempt was lost");
    let failure = trial.outcome.as_ref().and_then(|outcome| outcome.failure.as_deref());
    assert!(
        failure.is_some_and(|text| text.contains("not the model key")),
        "who says so would say it again: {failure:?}"
    );
    server.stop().await;
}

async fn list(server: &Server) -> v1::SandboxList {
    let (mut admin, token) = server.admin().await;
    let list = admin.list_sandboxes(with_token(v1::ListSandboxesRequest {}, &token)).await;
    list.unwrap().into_inner()
}

async fn reap(server: &Server, dry_run: bool) -> Vec<String> {
    let (mut admin, token) = server.admin().await;
    let asked = admin.reap_sandboxes(with_token(v1::ReapSandboxesRequest { dry_run }, &token)).await;
    asked
        .unwrap()
        .into_inner()
        .sandboxes
        .into_iter()
        .map(|sandbox| sandbox.name)
        .collect()
}

#[tokio::test]
async fn custody_from_intent_to_confirmation() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    client.start(&batch(1, 2)).await;
    let mut worker = server.worker(slots(2)).await;
    let (over, needed) = (worker.lease().await, worker.lease().await);
    let shown = list(&server).await;
    assert_eq!((shown.total, shown.sandboxes.len()), (2, 2));
    assert!(
        shown
            .sandboxes
            .iter()
            .all(|sandbox| sandbox.state() == SandboxState::Intended && sandbox.needed && sandbox.worker_here)
    );
    let created = v1::CreatedSandbox {
        sandbox: over.sandbox.clone(),
        provider_id: "i-1".into(),
    };
    let report = Report {
        created: vec![created],
        ..Report::default()
    };
    worker.report(report).await;
    assert!(reap(&server, false).await.is_empty(), "both are needed");

    // A verdict, and the worker dies before it has removed anything.
    let outcome = v1::TrialOutcome {
        status: v1::TrialStatus::Passed.into(),
        ..Default::default()
    };
    let report = Report {
        results: vec![v1::TrialResult {
            token: over.token,
            outcome: Some(outcome),
            keep_sandbox_ms: 0,
        }],
        ..Report::default()
    };
    worker.report(report).await;
    drop(worker);
    server.stop().await;
    let server = Server::start(folder.path()).await;
    let find = |shown: &v1::SandboxList, name: &str| shown.sandboxes.iter().find(|sandbox| sandbox.name == name).cloned();
    let sandbox = find(&list(&server).await, &over.sandbox).unwrap();
    assert_eq!(
        (sandbox.state(), sandbox.provider_id.as_deref()),
        (SandboxState::Created, Some("i-1"))
    );
    assert!(!sandbox.needed && !sandbox.worker_here);
    assert!(reap(&server, false).await.is_empty(), "nobody is here who could be asked");

    // It comes back with a new process, and is asked at once; what is not ours is left alone.
    let back = Hello {
        slots: 0,
        sandboxes: vec![over.sandbox.clone(), needed.sandbox.clone(), "somebody-elses".into()],
        ..hello("w", "2")
    };
    let mut worker = server.worker(back).await;
    let Some(Message::Destroy(destroy)) = worker.next().await else {
        panic!()
    };
    assert_eq!((&destroy.sandbox, destroy.provider_id.as_str()), (&over.sandbox, "i-1"));
    assert!(quiet(&mut worker).await.is_none(), "and nothing else");
    let shown = list(&server).await;
    assert_eq!(
        shown.foreign.iter().map(|foreign| foreign.name.as_str()).collect::<Vec<_>>(),
        ["somebody-elses"]
    );
    let sandbox = find(&shown, &over.sandbox).unwrap();
    assert_eq!((sandbox.state(), sandbox.asked), (SandboxState::DestroyAsked, 1));

    // It cannot confirm, so it is asked again.
    assert_eq!(reap(&server, true).await, std::slice::from_ref(&over.sandbox));
    assert!(quiet(&mut worker).await.is_none(), "a dry run asks nobody");
    assert_eq!(reap(&server, false).await, std::slice::from_ref(&over.sandbox));
    assert!(matches!(worker.next().await, Some(Message::Destroy(again)) if again == destroy));
    let report = Report {
        destroyed: vec![over.sandbox.clone(), needed.sandbox.clone()],
        ..Report::default()
    };
    worker.report(report).await;
    let shown = list(&server).await;
    assert!(find(&shown, &over.sandbox).is_none(), "confirmed");
    assert!(reap(&server, false).await.is_empty());
    server.stop().await;
}
