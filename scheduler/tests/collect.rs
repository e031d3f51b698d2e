//! Collection over loopback, with the real folder of objects, files that look old, and workers played by the test: what running, ended,
//! archived and retried batches need stays, whatever is restarted in between.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use evalgrid_proto::v1::{
    self, CollectObjectsRequest, CollectedObjects, ObjectRef, PutObjectChunk, Report, RetryBatchRequest, StepRecord, TrialOutcome,
    TrialResult, TrialStatus, WhoamiRequest, auth_client::AuthClient, evidence::Place, workers_client::WorkersClient,
};
use evalgrid_scheduler::SchedulerOptions;
use support::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => drop(found.insert(entry.path())),
        }
    }
    found
}

fn age(file: &Path, by: Duration) {
    let opened = std::fs::File::options().write(true).open(file).unwrap();
    opened.set_modified(SystemTime::now() - by).unwrap();
}

/// A server, and who acts on it.
struct Scene {
    server: Server,
    client: Client,
    organization: String,
}

impl Scene {
    async fn open(options: SchedulerOptions) -> Scene {
        let server = Server::open(options).await;
        let client = server.client().await;
        let mut auth = AuthClient::new(server.channel().await);
        let identity = auth.whoami(with_token(WhoamiRequest {}, &client.key)).await.unwrap();
        Scene {
            organization: identity.into_inner().organization_id,
            server,
            client,
        }
    }

    fn objects(&self) -> PathBuf {
        self.server.data.join("objects")
    }

    fn file(&self, object: &ObjectRef) -> PathBuf {
        let hash = &object.sha256;
        self.objects().join(&self.organization).join(&hash[..2]).join(hash)
    }

    /// As a worker puts evidence.
    async fn put(&self, bytes: impl Into<Bytes>) -> ObjectRef {
        let piece = PutObjectChunk {
            organization_id: self.organization.clone(),
            data: bytes.into(),
        };
        let request = with_token(tokio_stream::iter([piece]), &self.server.secret("worker-token"));
        let put = WorkersClient::new(self.server.channel().await).put_object(request).await;
        put.unwrap().into_inner()
    }

    async fn collect(&self, dry_run: bool) -> Vec<CollectedObjects> {
        let (mut admin, token) = self.server.admin().await;
        let request = CollectObjectsRequest {
            organization: String::new(),
            dry_run,
        };
        let mut progress = admin.collect_objects(with_token(request, &token)).await.unwrap().into_inner();
        let mut done = Vec::new();
        while let Some(told) = tokio::time::timeout(PATIENCE, progress.message()).await.unwrap().unwrap() {
            done.extend(Some(told).filter(|told| told.done));
        }
        done
    }

    /// A recorded step whose result is an object.
    async fn big_step(&self, worker: &mut Worker, token: u64, object: &ObjectRef) {
        let step = StepRecord {
            token,
            step: "turn.1.agent".into(),
            outcome: 1,
            result: format!(r#"{{"object":{{"sha256":"{}","size":{}}}}}"#, object.sha256, object.size).into(),
        };
        let report = Report {
            steps: vec![step],
            ..Report::default()
        };
        assert!(worker.report(report).await.stale.is_empty());
    }

    /// A verdict whose evidence is an object, which names another.
    async fn settle(&self, worker: &mut Worker, lease: &v1::Lease, status: TrialStatus, name: &str) -> [ObjectRef; 2] {
        let artifact = self.put(format!("artifact of {name}")).await;
        let evidence = self.put(format!(r#"{{"artifacts":[{{"sha256":"{}"}}]}}"#, artifact.sha256)).await;
        let outcome = TrialOutcome {
            status: status.into(),
            evidence: Some(v1::Evidence {
                place: Some(Place::Object(evidence.clone())),
            }),
            failure: (status == TrialStatus::Void).then(|| "it could not be run".to_owned()),
            ..TrialOutcome::default()
        };
        let report = Report {
            results: vec![TrialResult {
                token: lease.token,
                outcome: Some(outcome),
                keep_sandbox_ms: 0,
            }],
            destroyed: vec![lease.sandbox.clone()],
            credits: 1,
            ..Report::default()
        };
        assert!(worker.report(report).await.stale.is_empty());
        [artifact, evidence]
    }

    /// Waits until every batch that has ended has left memory.
    async fn archived(&self, id: &str) {
        let (mut admin, token) = self.server.admin().await;
        let batch = self.client.clone().get(id).await;
        let id = batch.runs[0].trials[0].id.clone();
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            let request = v1::ShowTrialRequest { id: id.clone() };
            match admin.show_trial(with_token(request, &token)).await {
                Err(status) if status.code() == tonic::Code::NotFound => return,
                other => assert!(tokio::time::Instant::now() < end, "{other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_batches_need_stays() {
    let folder = tempfile::tempdir().unwrap();
    let opened = || SchedulerOptions {
        // A snapshot, and a part of the archive, at every look.
        snapshot_bytes: 1,
        ..options(folder.path())
    };
    let mut scene = Scene::open(opened()).await;
    let mut worker = scene.server.worker(hello("w", "1")).await;
    let mut needed = Vec::new();

    // One that ends, and one that has a trial to run again.
    let ended = scene.client.start(&batch(1, 1)).await.id;
    let lease = worker.lease().await;
    let of_a_step = scene.put("the result of a step, of no use once its trial has ended").await;
    scene.big_step(&mut worker, lease.token, &of_a_step).await;
    needed.extend(scene.settle(&mut worker, &lease, TrialStatus::Passed, "ended").await);
    let partly = scene.client.start(&batch(2, 1)).await.id;
    for (name, status) in [("scored", TrialStatus::Failed), ("void", TrialStatus::Void)] {
        let lease = worker.lease().await;
        needed.extend(scene.settle(&mut worker, &lease, status, name).await);
    }
    for id in [&ended, &partly] {
        scene.client.ended(id).await;
        scene.archived(id).await;
    }
    let archive = scene.objects().join("archive");
    let end = tokio::time::Instant::now() + PATIENCE;
    while files(&archive).is_empty() {
        assert!(tokio::time::Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Two that run: one of them takes over what the old one has scored.
    let retry = RetryBatchRequest {
        id: partly.clone(),
        idempotency_key: None,
    };
    let retried = scene.client.batches.retry(with_token(retry, &scene.client.key)).await.unwrap();
    let retried = retried.into_inner().id;
    let retried_lease = worker.lease().await;
    let running = scene.client.start(&batch(1, 2)).await.id;
    let mut other = scene.server.worker(hello("other", "1")).await;
    let lease = other.lease().await;
    needed.extend(scene.settle(&mut other, &lease, TrialStatus::Passed, "running").await);
    let lease = other.lease().await;
    let step = scene.put("the result of a step that an executor may come back for").await;
    scene.big_step(&mut other, lease.token, &step).await;
    let of_a_running_step = step.clone();
    needed.push(step);

    let orphan = scene.put("orphan").await;
    let young = scene.put("put six days ago").await;
    let again = scene.put("put long ago, and again").await;
    files(&scene.objects()).iter().for_each(|file| age(file, 8 * DAY));
    age(&scene.file(&young), 6 * DAY);
    scene.put("put long ago, and again").await;
    let before = files(&scene.objects());

    let told = scene.collect(true).await;
    assert!(told.iter().all(|told| told.problem.is_none()), "{told:?}");
    assert!(before.is_subset(&files(&scene.objects())), "a dry run removes nothing");
    let told = scene.collect(false).await;
    let of = |name: &str| told.iter().find(|told| told.organization == name).unwrap();
    let gone: BTreeSet<PathBuf> = [&orphan, &of_a_step].map(|object| scene.file(object)).into();
    let left = files(&scene.objects());
    assert_eq!(before.difference(&left).cloned().collect::<BTreeSet<_>>(), gone);
    assert_eq!((of("default").removed, of("default").results, of("the archive").removed), (2, 2, 0));
    for object in needed.iter().chain([&young, &again]) {
        assert!(scene.file(object).exists());
    }

    // All that ran runs on, and all that ended is read, without the index, too.
    worker.pass(&retried_lease).await;
    other.pass(&lease).await;
    let mut seen = Vec::new();
    for id in [&ended, &partly, &retried, &running] {
        seen.push(scene.client.ended(id).await);
    }
    drop((worker, other));
    scene.server.stop().await;
    std::fs::remove_dir_all(folder.path().join("index")).unwrap();
    let mut scene = Scene::open(opened()).await;
    for batch in &seen {
        assert_eq!(scene.client.get(&batch.id).await, *batch);
    }
    // With its trial, the step has lost its use.
    let told = scene.collect(false).await;
    assert!(told.iter().all(|told| told.problem.is_none()), "{told:?}");
    assert_eq!(told.iter().map(|told| told.removed).sum::<u64>(), 1, "{told:?}");
    assert!(!scene.file(&of_a_running_step).exists());
    scene.server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_result_stops_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut scene = Scene::open(options(folder.path())).await;
    let mut worker = scene.server.worker(hello("w", "1")).await;
    let id = scene.client.start(&batch(1, 1)).await.id;
    let lease = worker.lease().await;
    let [_, evidence] = scene.settle(&mut worker, &lease, TrialStatus::Passed, "x").await;
    scene.client.ended(&id).await;
    scene.archived(&id).await;
    let orphan = scene.file(&scene.put("orphan").await);
    let all = files(&scene.objects());
    all.iter().for_each(|file| age(file, 8 * DAY));
    let evidence = scene.file(&evidence);
    let artifacts = all.iter().filter(|file| **file != orphan);
    for file in artifacts {
        let bytes = std::fs::read(file).unwrap();
        for damage in [&bytes[..bytes.len() / 2], &b""[..], &[7; 30]] {
            std::fs::write(file, damage).unwrap();
            age(file, 8 * DAY);
            let told = scene.collect(false).await;
            let text = std::str::from_utf8(&bytes[1..]).unwrap_or_default();
            // What nothing could be named by need not be whole.
            match told[0].problem.as_ref() {
                Some(problem) => assert!(problem.contains("damaged") && problem.contains("restore"), "{problem}"),
                None => assert!(text.starts_with("artifact of") && *file != evidence, "{}: {text}", file.display()),
            }
            let went = !orphan.exists();
            assert_eq!(went, told[0].problem.is_none());
            if went {
                let again = scene.put("orphan").await;
                age(&scene.file(&again), 8 * DAY);
            }
        }
        std::fs::write(file, bytes).unwrap();
    }
    let told = scene.collect(false).await;
    assert_eq!((told[0].removed, orphan.exists()), (1, false), "{told:?}");
    drop(worker);
    scene.server.stop().await;
}
