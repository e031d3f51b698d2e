//! Rows of the failure catalogue over loopback: replies that get lost, restarts, silent connections, a damaged index.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use evalgrid_proto::v1;
use evalgrid_scheduler::{MAX_LEASE, MIN_LEASE, OpenError, Scheduler, SchedulerOptions};
use support::*;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};
use tonic::Code;

async fn listed(client: &mut Client) -> v1::BatchPage {
    let answer = client
        .batches
        .list(with_token(v1::ListBatchesRequest::default(), &client.key))
        .await;
    answer.unwrap().into_inner()
}

/// catalogue 2: whoever hears nothing of a start asks again under the same key, and there is one batch, also behind a restart.
#[tokio::test]
async fn a_start_whose_reply_is_lost_is_started_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path()).await;
    let (mut lost, rounds) = (0, 24u64);
    for round in 0..rounds {
        let mut client = server.client().await;
        let key = format!("key-{round}");
        // Cut off later and later: before it is sent, on its way, while its group is written, and long after.
        let first = timeout(
            Duration::from_micros(round * round * 60),
            client.try_start(&batch(1, 1), Some(&key)),
        )
        .await;
        lost += usize::from(first.is_err());
        if round % 6 == 0 {
            server.stop().await;
            server = Server::start(folder.path()).await;
            client = server.client().await;
        }
        let mut racing = client.clone();
        let asked = batch(1, 1);
        let (one, other) = tokio::join!(client.try_start(&asked, Some(&key)), racing.try_start(&asked, Some(&key)));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!(one, other, "round {round}");
        if let Ok(first) = first {
            assert_eq!(first.unwrap(), one, "round {round}");
        }
        assert_eq!(listed(&mut client).await.total as u64, round + 1, "one batch for each key");
        client.cancel(&one.id).await.unwrap();
    }
    assert!((1..rounds as usize).contains(&lost), "{lost} of {rounds} replies were lost");
    server.stop().await;
}

/// catalogue 16: what a batch is follows from the log alone: a restart changes no answer, and what could be done before can be done after it.
#[tokio::test]
async fn a_restart_changes_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let id = client.start(&batch(2, 2)).await.id;
    let mut worker = server
        .worker(v1::Hello {
            slots: 3,
            ..hello("w", "1")
        })
        .await;
    let (first, second, third) = (worker.lease().await, worker.lease().await, worker.lease().await);
    worker.step(second.token, "source").await;
    worker.pass(&first).await;
    // The freed slot takes the last one.
    worker.lease().await;
    let before = client.get(&id).await;
    let listed_before = listed(&mut client).await;
    drop(worker);
    server.stop().await;
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    assert_eq!(client.get(&id).await, before);
    assert_eq!(listed(&mut client).await, listed_before);
    let cancelled = client.cancel(&id).await.unwrap();
    assert_eq!(
        (cancelled.status(), cancelled.failure.as_deref()),
        (v1::BatchStatus::Failed, Some("Cancelled"))
    );
    assert_eq!(cancelled.runs.iter().map(|run| run.distribution.unwrap().cancelled).sum::<u32>(), 3);
    // Its worker comes back and hears that nothing of it is wanted any more.
    let back = v1::Hello {
        held: vec![second.token, third.token],
        ..hello("w", "1")
    };
    let mut worker = server.worker(back).await;
    let mut revoked = Vec::new();
    while revoked.len() < 2 {
        if let Some(v1::to_worker::Message::Revoke(revoke)) = worker.next().await {
            revoked.push(revoke.token);
        }
    }
    assert_eq!(revoked, [second.token, third.token]);
    drop(worker);
    server.stop().await;
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    assert_eq!(client.get(&id).await, cancelled, "an end is an end");
    assert_eq!(client.cancel(&id).await.unwrap(), cancelled);
    server.stop().await;
}

/// catalogue 54: connections that say nothing, streams that nobody reads and calls that wait keep no scheduler from stopping.
#[tokio::test]
async fn shutdown_waits_for_no_silent_connection() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let address = server.address.trim_start_matches("http://").to_owned();
    let mut client = server.client().await;
    let id = client.start(&batch(1, 1)).await.id;
    // A channel that is idle, a stream that waits for news, a worker that is silent, one that has not even said hello.
    let idle = server.channel().await;
    let watch = client
        .batches
        .watch(with_token(v1::WatchBatchRequest { id: id.clone() }, &client.key));
    let watch = watch.await.unwrap().into_inner();
    let worker = server.worker(hello("w", "1")).await;
    let (up, outbound) = tokio::sync::mpsc::channel::<v1::FromWorker>(1);
    let request = with_token(
        tokio_stream::wrappers::ReceiverStream::new(outbound),
        &server.secret("worker-token"),
    );
    let mute = v1::workers_client::WorkersClient::new(server.channel().await)
        .work(request)
        .await
        .unwrap();
    // And strangers: one without a byte, one that stops in the middle of the preface, one that stops behind it.
    let mut strangers = Vec::new();
    for words in [&b""[..], b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stranger = TcpStream::connect(&address).await.unwrap();
        stranger.write_all(words).await.unwrap();
        strangers.push(stranger);
    }
    server.stop.send_replace(true);
    // Five seconds of grace, and what a busy machine adds.
    timeout(Duration::from_secs(12), server.serving).await.unwrap().unwrap();
    drop((strangers, idle, watch, worker, up, mute));
}

/// catalogue 59: an index that cannot be opened, whatever is wrong with it, is moved aside and made anew; nothing that was answered is lost.
#[tokio::test]
async fn a_damaged_index_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut client = server.client().await;
    let mut worker = server.worker(hello("w", "1")).await;
    let mut known = Vec::new();
    for _ in 0..3 {
        let id = client.start(&batch(1, 1)).await.id;
        let lease = worker.lease().await;
        worker.pass(&lease).await;
        known.push(client.ended(&id).await);
    }
    known.reverse();
    drop(worker);
    server.stop().await;
    let db = folder.path().join("index/db");
    let damages: [&dyn Fn(); 4] = [
        &|| std::fs::write(&db, vec![0xa5; 100_000]).unwrap(),
        &|| {
            std::fs::remove_file(&db).unwrap();
            std::fs::create_dir(&db).unwrap();
        },
        &|| {
            let mut bytes = std::fs::read(&db).unwrap();
            let half = bytes.len() / 2;
            bytes[half..].fill(0x5a);
            std::fs::write(&db, bytes).unwrap();
        },
        &|| std::fs::remove_dir_all(folder.path().join("index")).unwrap(),
    ];
    for (round, damage) in damages.iter().enumerate() {
        damage();
        let server = Server::start(folder.path()).await;
        let mut client = server.client().await;
        let listed = listed(&mut client).await.batches;
        let ids = |batches: &[v1::Batch]| batches.iter().map(|batch| batch.id.clone()).collect::<Vec<_>>();
        assert_eq!(
            listed.into_iter().map(|batch| batch.id).collect::<Vec<_>>(),
            ids(&known),
            "damage {round}"
        );
        for batch in &known {
            assert_eq!(client.get(&batch.id).await, *batch, "damage {round}");
        }
        let unknown = v1::GetBatchRequest {
            id: "batch_00000000000000000000000000".into(),
        };
        let answer = client.batches.get(with_token(unknown, &client.key)).await;
        assert_eq!(answer.unwrap_err().code(), Code::NotFound);
        server.stop().await;
    }
}

/// catalogue 22: a lease that heartbeats could not keep is refused before anything is touched.
#[tokio::test]
async fn a_lease_that_cannot_be_kept_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let little = Duration::from_millis(1);
    for lease in [Duration::ZERO, MIN_LEASE - little, MAX_LEASE + little] {
        let refused = Scheduler::open(SchedulerOptions { lease, ..options(&data) }).await.err();
        assert!(
            matches!(refused, Some(OpenError::Lease(asked)) if asked == lease),
            "{lease:?}: {refused:?}"
        );
        assert!(!data.exists());
    }
}
