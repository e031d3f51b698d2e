//! The scheduler's gRPC services over loopback, with workers played by the test: leases, fencing, recovery, limits, reads.
#![allow(clippy::unwrap_used)]

mod support;

use std::{path::Path, time::Duration};

use evalgrid_proto::v1::{self, FromWorker, Hello, TrialStatus, from_worker, to_worker::Message, workers_client::WorkersClient};
use serde_json::{Value, json};
use support::*;
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

#[tokio::test]
async fn a_batch_runs_is_archived_and_is_read_back_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let started = client.start(&batch(2, 2)).await;
    assert_eq!(
        started.runs.iter().map(|run| run.case_id.as_str()).collect::<Vec<_>>(),
        ["case-0", "case-1"]
    );
    let mut worker = server.worker(hello("w", "1")).await;
    for _ in 0..4 {
        let lease = worker.lease().await;
        assert_eq!(lease.provider, "bubblewrap", "the default sandbox is mapped");
        assert!(worker.step(lease.token, "turn.1.agent").await.stale.is_empty());
        assert!(worker.pass(&lease).await.stale.is_empty());
    }
    let live = client.ended(&started.id).await;
    assert_eq!(live.status(), v1::BatchStatus::Finished);
    let counts = live.runs[0].distribution.unwrap();
    assert_eq!(
        (counts.trials, counts.passed, counts.command_median, counts.deterministic),
        (2, 2, 2.0, true)
    );
    drop(worker);
    server.stop().await;

    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    assert_eq!(client.get(&started.id).await, live, "what was answered can always be read");
    let page = client
        .batches
        .list(with_token(v1::ListBatchesRequest::default(), &client.key))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((page.total, page.batches.len(), page.batches[0].passed), (1, 1, 4));
    server.stop().await;
    let data = folder.path().to_owned();
    let rebuilt = tokio::task::spawn_blocking(move || evalgrid_scheduler::rebuild_index(&data))
        .await
        .unwrap();
    assert_eq!(rebuilt.unwrap(), 1);
    let server = Server::start(folder.path()).await;
    assert_eq!(
        server.client().await.get(&started.id).await,
        live,
        "and after the index was made anew"
    );
    server.stop().await;
}

/// catalogue 13, 19: a dead process's trials are adopted under a new token, and the old one writes nothing.
#[tokio::test]
async fn an_old_token_records_nothing_and_the_trial_goes_on_where_it_stood() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let id = client.start(&batch(1, 1)).await.id;
    let mut old = server.worker(hello("w", "1")).await;
    let first = old.lease().await;
    assert!(!first.adopt && first.steps.is_empty());
    old.step(first.token, "source").await;
    assert!(
        old.step(first.token, "source").await.stale.is_empty(),
        "the same step again is only acknowledged"
    );

    // A second process on the same folder proves that the first one is dead.
    let greeting = Hello {
        sandboxes: vec![first.sandbox.clone()],
        ..hello("w", "2")
    };
    let mut new = server.worker(greeting).await;
    let second = new.lease().await;
    assert!(second.adopt && second.token > first.token && second.sandbox == first.sandbox);
    assert_eq!(second.steps.iter().map(|step| step.step.as_str()).collect::<Vec<_>>(), ["source"]);
    assert_eq!(
        new.step(first.token, "check.0").await.stale,
        [first.token],
        "the old token is refused"
    );
    assert!(new.pass(&second).await.stale.is_empty());
    assert_eq!(new.pass(&second).await.stale, [second.token], "a second verdict is refused");
    let batch = client.ended(&id).await;
    assert_eq!(batch.runs[0].trials[0].attempts, 1, "it was one attempt in one sandbox");
    server.stop().await;
}

/// catalogue 23, 27: a restart takes nothing from a process that still works; only another process of the same worker ends its leases.
#[tokio::test]
async fn a_lease_survives_the_scheduler() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let id = server.client().await.start(&batch(1, 1)).await.id;
    let mut worker = server.worker(hello("w", "1")).await;
    let lease = worker.lease().await;
    worker.step(lease.token, "source").await;
    drop(worker);
    server.stop().await;

    let server = Server::start(folder.path()).await;
    let greeting = Hello {
        slots: 0,
        held: vec![lease.token],
        sandboxes: vec![lease.sandbox.clone()],
        ..hello("w", "1")
    };
    let mut worker = server.worker(greeting).await;
    assert!(
        worker.step(lease.token, "turn.1.agent").await.stale.is_empty(),
        "the same process goes on under the same token"
    );
    assert!(worker.pass(&lease).await.stale.is_empty());
    assert_eq!(server.client().await.ended(&id).await.runs[0].distribution.unwrap().passed, 1);
    server.stop().await;
}

#[tokio::test]
async fn a_silent_worker_loses_its_leases_and_an_absent_one_its_trials() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with(folder.path(), Duration::from_millis(600), Duration::from_millis(400)).await;
    let id = server.client().await.start(&batch(1, 1)).await.id;
    let mut names = Vec::new();
    // Three workers take it, fall silent, and are cut off after a lease: that is one attempt and two more.
    for name in ["a", "b", "c"] {
        let mut silent = server.worker(hello(name, "1")).await;
        let lease = silent.lease().await;
        assert!(!lease.adopt, "a sandbox out of reach is not waited for beyond the grace");
        names.push(lease.sandbox.clone());
        silent.step(lease.token, "source").await;
        while silent.next().await.is_some() {}
    }
    names.dedup();
    assert_eq!(names.len(), 3, "each attempt has a sandbox of its own");
    let trial = server.client().await.ended(&id).await.runs[0].trials[0].clone();
    let outcome = trial.outcome.unwrap();
    assert_eq!(
        (outcome.status(), trial.attempts, trial.lost_attempts.len()),
        (TrialStatus::Void, 3, 2)
    );
    assert!(
        outcome
            .failure
            .as_deref()
            .unwrap()
            .starts_with("The sandbox was lost in each of 3 attempts"),
        "{:?}",
        outcome.failure
    );

    // The first one comes back with what it left: it is told to remove it.
    let mut back = server
        .worker(Hello {
            sandboxes: vec![names[0].clone()],
            ..hello("a", "2")
        })
        .await;
    match back.next().await {
        Some(Message::Destroy(destroy)) => assert_eq!(destroy.sandbox, names[0]),
        other => panic!("expected an order to destroy, got {other:?}"),
    }
    server.stop().await;
}

#[tokio::test]
async fn cancel_voids_what_is_open_takes_leases_away_and_is_idempotent() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let id = client.start(&batch(1, 3)).await.id;
    let mut worker = server.worker(hello("w", "1")).await;
    let lease = worker.lease().await;
    worker.pass(&lease).await;
    let held = loop {
        match worker.next().await {
            Some(Message::Lease(lease)) => break lease,
            Some(_) => {}
            None => panic!("no second lease"),
        }
    };
    let cancelled = client.cancel(&id).await.unwrap();
    assert_eq!(
        (cancelled.status(), cancelled.failure.as_deref()),
        (v1::BatchStatus::Failed, Some("Cancelled"))
    );
    let counts = cancelled.runs[0].distribution.unwrap();
    assert_eq!((counts.trials, counts.passed, counts.voided, counts.cancelled), (3, 1, 2, 2));
    assert_eq!(client.cancel(&id).await.unwrap(), cancelled);
    match worker.next().await {
        Some(Message::Revoke(revoke)) => assert_eq!(revoke.token, held.token),
        other => panic!("expected a revocation, got {other:?}"),
    }
    assert_eq!(worker.pass(&held).await.stale, [held.token], "its verdict comes too late");

    let done = client.start(&batch(1, 1)).await.id;
    let lease = worker.lease().await;
    worker.pass(&lease).await;
    client.ended(&done).await;
    assert_eq!(client.cancel(&done).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(
        client.cancel("batch_00000000000000000000000000").await.unwrap_err().code(),
        Code::NotFound
    );
    server.stop().await;
}

#[tokio::test]
async fn admission() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let first = client.try_start(&batch(1, 1), Some("key")).await.unwrap();
    assert_eq!(
        client.try_start(&batch(1, 1), Some("key")).await.unwrap(),
        first,
        "the same start is answered again"
    );
    let reused = client.try_start(&batch(1, 2), Some("key")).await.unwrap_err();
    assert_eq!(refusal(&reused).kind(), v1::refusal::Kind::BadRequest);
    client.start(&batch(1, 1)).await;
    client.start(&batch(1, 1)).await;
    let busy = client.try_start(&batch(1, 1), None).await.unwrap_err();
    assert_eq!(
        (busy.code(), refusal(&busy).kind()),
        (Code::FailedPrecondition, v1::refusal::Kind::Conflict)
    );
    assert_eq!(
        client.try_start(&batch(1, 1), Some("key")).await.unwrap(),
        first,
        "a replay comes before every rule"
    );

    let check = |body: Value, code: Code, text: &'static str| {
        let mut client = client.clone();
        async move {
            let status = client.try_start(&body, None).await.unwrap_err();
            assert_eq!(status.code(), code, "{body}: {status}");
            assert!(status.message().contains(text), "{body}: {}", status.message());
        }
    };
    let with = |pointer: &str, value: Value| {
        let mut body = batch(1, 1);
        *body.pointer_mut(pointer).unwrap() = value;
        body
    };
    check(with("/trials", json!(11)), Code::InvalidArgument, "trials").await;
    check(with("/variants/0/harness", json!("codex")), Code::InvalidArgument, "variants[0]").await;
    check(batch(51, 2), Code::InvalidArgument, "102").await;
    let variables = |name: &str| {
        with(
            "/variants/0/profile",
            json!({ "name": "p", "files": {}, "run": "true", "variables": [name] }),
        )
    };
    check(
        variables("SEARCH_API_KEY"),
        Code::InvalidArgument,
        "Set SEARCH_API_KEY in Settings > Environment",
    )
    .await;

    let mut stranger = client.clone();
    stranger.key = "anp_wrong".into();
    assert_eq!(
        stranger.try_start(&batch(1, 1), None).await.unwrap_err().code(),
        Code::Unauthenticated
    );
    server.stop().await;
}

#[tokio::test]
async fn a_profile_s_variables_reach_the_worker_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut body = batch(1, 1);
    body["variants"][0]["profile"]["variables"] = json!(["OPENAI_API_KEY"]);
    server.client().await.start(&body).await;
    let mut worker = server.worker(hello("w", "1")).await;
    let lease = worker.lease().await;
    assert_eq!(lease.variables.get("OPENAI_API_KEY").map(String::as_str), Some("sk-secret-value"));
    assert_eq!(lease.variables.len(), 1);
    server.stop().await;
    let found = walk(folder.path())
        .into_iter()
        .find(|path| std::fs::read(path).unwrap().windows(15).any(|window| window == b"sk-secret-value"));
    assert_eq!(found, None, "no secret is written down");
}

/// A judge, too, may put together what the agent has told in pieces: what is secret of the trial comes along, and is not written down.
#[tokio::test]
async fn a_trial_s_secrets_reach_its_judge_runner() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.environment.insert("OWN".into(), "its-own-value".into());
    options.environment.insert("FOREIGN".into(), "another-value".into());
    let server = Server::open(options).await;
    let mut body = batch(1, 1);
    body["variants"][0]["profile"]["variables"] = json!(["OWN"]);
    body["cases"][0] = json!({"id": "judged", "validator": {"kind": "judged", "name": "v", "checks": [], "judges": [
        {"kind": "judge", "name": "j", "provider": "openai", "model": "m", "prompt": "p", "choices": {"yes": 1, "no": 0}}]}});
    server.client().await.start(&body).await;
    let mut worker = server.worker(hello("w", "1")).await;
    let lease = worker.lease().await;
    worker.pass(&lease).await;
    let mut runner = server
        .worker(Hello {
            role: v1::WorkerRole::JudgeRunner.into(),
            ..hello("j", "1")
        })
        .await;
    let job = match runner.next().await {
        Some(Message::Job(job)) => job,
        other => panic!("expected a job, got {other:?}"),
    };
    assert_eq!(job.trial_secrets, ["its-own-value"]);
    assert_eq!(job.credential["apiKey"], "sk-secret-value");
    server.stop().await;
    let written = walk(folder.path()).into_iter().map(|path| std::fs::read(path).unwrap());
    assert!(
        written
            .into_iter()
            .all(|bytes| !bytes.windows(13).any(|window| window == b"its-own-value")),
        "no secret is written down"
    );
}

#[tokio::test]
async fn an_older_log_put_in_place_is_believed_over_the_newer_index() {
    async fn one_batch(server: &Server) -> String {
        let mut client = server.client().await;
        let id = client.start(&batch(1, 1)).await.id;
        let mut worker = server.worker(hello("w", &id)).await;
        let lease = worker.lease().await;
        worker.pass(&lease).await;
        client.ended(&id).await;
        id
    }
    let folder = tempfile::tempdir().unwrap();
    let (log, backup) = (folder.path().join("log"), folder.path().join("backup"));
    let server = Server::start(folder.path()).await;
    let kept = one_batch(&server).await;
    server.stop().await;
    std::fs::create_dir(&backup).unwrap();
    for path in walk(&log) {
        std::fs::copy(&path, backup.join(path.file_name().unwrap())).unwrap();
    }
    let server = Server::start(folder.path()).await;
    for _ in 0..3 {
        one_batch(&server).await;
    }
    server.stop().await;
    std::fs::remove_dir_all(&log).unwrap();
    std::fs::rename(&backup, &log).unwrap();

    let server = Server::start(folder.path()).await;
    let new = one_batch(&server).await;
    server.stop().await;
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let page = client
        .batches
        .list(with_token(v1::ListBatchesRequest::default(), &client.key))
        .await
        .unwrap()
        .into_inner();
    let ids: Vec<String> = page.batches.into_iter().map(|batch| batch.id).collect();
    assert_eq!(ids, [new.clone(), kept.clone()], "what the log knows, and nothing else");
    for id in [new, kept] {
        assert_eq!(client.get(&id).await.status(), v1::BatchStatus::Finished);
    }
    server.stop().await;

    // A log that is not there at all is not a new installation.
    std::fs::rename(&log, &backup).unwrap();
    let key = std::fs::read(folder.path().join("api-key")).unwrap();
    let refused = evalgrid_scheduler::Scheduler::open(support::options(folder.path()))
        .await
        .err()
        .unwrap();
    assert!(refused.to_string().contains("not mounted"), "{refused}");
    std::fs::remove_dir_all(folder.path().join("index")).unwrap();
    let server = Server::start(folder.path()).await;
    assert_eq!(
        std::fs::read(folder.path().join("api-key")).unwrap(),
        key,
        "a key is never overwritten"
    );
    assert!(client_list(&server).await.batches.is_empty(), "and opens the new beginning");
    server.stop().await;
}

async fn client_list(server: &Server) -> v1::BatchPage {
    let mut client = server.client().await;
    let request = with_token(v1::ListBatchesRequest::default(), &client.key);
    client.batches.list(request).await.unwrap().into_inner()
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] })
        .collect()
}

#[tokio::test]
async fn workers_that_do_not_belong_here_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let (_up, outbound) = mpsc::channel::<FromWorker>(1);
    let mut client = WorkersClient::new(server.channel().await);
    let refused = client
        .work(with_token(ReceiverStream::new(outbound), "nonsense"))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    for bad in [
        Hello {
            worker_id: String::new(),
            ..hello("w", "1")
        },
        Hello {
            slots: u32::MAX,
            ..hello("w", "1")
        },
    ] {
        let (up, outbound) = mpsc::channel(1);
        up.send(FromWorker {
            message: Some(from_worker::Message::Hello(bad)),
        })
        .await
        .unwrap();
        let request = with_token(ReceiverStream::new(outbound), &server.secret("worker-token"));
        let mut down = client.work(request).await.unwrap().into_inner();
        assert!(
            timeout(PATIENCE, down.message()).await.unwrap().unwrap().is_none(),
            "the stream ends without a welcome"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn pages() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let mut worker = server.worker(hello("w", "1")).await;
    let mut ids = Vec::new();
    for number in 0..7 {
        let id = client.start(&batch(1, 1)).await.id;
        ids.push(id.clone());
        // The last two stay in memory, running; the others are archived at some time.
        if number < 5 {
            let lease = worker.lease().await;
            worker.pass(&lease).await;
            client.ended(&id).await;
        }
    }
    ids.reverse();
    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let message = v1::ListBatchesRequest { cursor, limit: 2 };
        let page = client.batches.list(with_token(message, &client.key)).await.unwrap().into_inner();
        assert_eq!(page.total, 7);
        assert!(page.batches.len() <= 2);
        seen.extend(page.batches.into_iter().map(|batch| batch.id));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, ids, "newest first, each once");
    server.stop().await;
}
