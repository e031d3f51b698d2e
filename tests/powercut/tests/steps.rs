//! The power of the scheduler's machine is cut while a worker on another machine reports steps as fast as they are acknowledged: large groups of
//! records are torn in the middle, and the worker goes on with what it was told.
//!
//! Seeds, long mode and what it needs are as in `power_cuts.rs`.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{sync::Arc, time::Duration};

use evalgrid_powercut::{
    host, log,
    log::LogView,
    site::{Site, seed},
    volatile::Cut,
};
use evalgrid_proto::v1::{BatchStatus, GetBatchRequest, StartBatchRequest, batches_client::BatchesClient};
use evalgrid_tests::{
    server::Server,
    suite,
    worker::{Shape, Worker},
};
use rand::Rng as _;
use tokio::{sync::Mutex, task::JoinHandle};
use tonic::{
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};

/// Longer than any recovery, so that the worker's leases outlive the cuts.
const LEASE: &str = "120s";
/// With how many cuts a store that does not sync must be found out.
const CUTS_TO_FIND_OUT: u32 = 5;
/// Of each batch.
const CASES: usize = 10;
/// Of each case.
const TRIALS: usize = 10;
/// Until something that must come has come.
const PATIENCE: Duration = Duration::from_secs(120);
const SHAPE: Shape = Shape {
    slots: 200,
    steps: 12,
    result_bytes: 300,
    trials: u64::MAX,
    seed: 1,
};

fn cuts() -> u32 {
    match std::env::var_os("EVALGRID_LONG") {
        Some(_) => 30,
        None => 4,
    }
}

/// A client of the scheduler, once that answers.
async fn client(server: &Server) -> Option<(BatchesClient<Channel>, MetadataValue<Ascii>)> {
    let key = std::fs::read_to_string(server.data().join("api-key")).ok()?;
    let client = BatchesClient::connect(format!("http://{}", server.grpc)).await.ok()?;
    Some((client, format!("Bearer {}", key.trim()).parse().ok()?))
}

/// Starts batches for as long as it is let; those that were acknowledged.
async fn feed(server: Arc<Server>, started: Arc<Mutex<Vec<String>>>) {
    let body = suite::command_batch(CASES, TRIALS, "process", "true", "true").to_string();
    loop {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let Some((mut client, key)) = client(&server).await else { continue };
        let mut request = tonic::Request::new(StartBatchRequest {
            json: body.clone().into_bytes().into(),
            idempotency_key: None,
        });
        request.metadata_mut().insert("authorization", key);
        // Refused while three run.
        if let Ok(batch) = client.start(request).await {
            started.lock().await.push(batch.into_inner().id);
        }
    }
}

/// Whether a batch has ended; false, too, where nobody answers.
async fn has_ended(server: &Server, id: &str) -> Option<()> {
    let (mut client, key) = client(server).await?;
    let mut request = tonic::Request::new(GetBatchRequest { id: id.to_owned() });
    request.metadata_mut().insert("authorization", key);
    let batch = client.get(request).await.ok()?.into_inner();
    (batch.status() == BatchStatus::Finished).then_some(())
}

/// What the log lacks of what the worker and the client were told.
fn missing(view: &LogView, worker: &Worker, started: &[String]) -> Vec<String> {
    let mut wrong = view.wrong.clone();
    let lost = started.iter().filter(|id| !view.batches.contains_key(*id));
    wrong.extend(lost.map(|id| format!("lost: {id}")));
    // The worker names its steps by number, so that a lost one leaves a hole once it goes on.
    for (token, steps) in &view.steps {
        let expected = (1..=steps.len()).map(|number| format!("turn.{number}.agent"));
        if !expected.eq(steps.iter().cloned()) {
            wrong.push(format!("token {token} has the steps {steps:?}"));
        }
    }
    for (token, trial) in &view.settled_by {
        let steps = view.steps.get(token).map_or(0, Vec::len);
        if steps != SHAPE.steps as usize {
            wrong.push(format!("{trial} has a verdict after {steps} of {} steps", SHAPE.steps));
        }
    }
    // A verdict that was recorded and not acknowledged is sent again, and called stale: it counts as one of those that are there. A lease that
    // was lost is called stale as well, and is one too many.
    let (recorded, settled) = (view.steps.values().map(Vec::len).sum::<usize>() as u64, view.settled.len() as u64);
    let seen = &worker.seen;
    if recorded < seen.steps || settled < seen.trials + seen.stale {
        wrong.push(format!(
            "{} steps and {} verdicts were acknowledged, {} called stale; {recorded} steps and {settled} verdicts are there",
            seen.steps, seen.trials, seen.stale
        ));
    }
    wrong
}

fn counts(worker: &Worker) -> (u64, u64) {
    (worker.seen.steps, worker.seen.trials)
}

/// The scheduler on its machine, and who talks to it from elsewhere.
struct Elsewhere {
    site: Site,
    worker: Arc<Mutex<Worker>>,
    started: Arc<Mutex<Vec<String>>>,
}

impl Elsewhere {
    async fn new(name: &str) -> Elsewhere {
        let mut site = Site::new(env!("CARGO_BIN_EXE_evalgrid-volatile-disk"), name, seed());
        boot(&mut site);
        let server = site.server.clone();
        let installed = || async { client(&server).await };
        evalgrid_tests::eventually("the scheduler is installed", PATIENCE, installed).await;
        let token = server.secret("worker-token");
        Elsewhere {
            worker: Arc::new(Mutex::new(Worker::new(&server.grpc, &token, "elsewhere", SHAPE))),
            started: Arc::default(),
            site,
        }
    }

    fn work(&self) -> JoinHandle<()> {
        let worker = self.worker.clone();
        tokio::spawn(async move { worker.lock().await.run().await })
    }

    /// Works until the power goes at a random moment.
    async fn live(&mut self) -> Cut {
        let answers = || async { client(&self.site.server).await };
        evalgrid_tests::eventually("the scheduler answers", PATIENCE, answers).await;
        let working = self.work();
        let feeding = tokio::spawn(feed(self.site.server.clone(), self.started.clone()));
        let milliseconds = self.site.rng.random_range(100..1500);
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        let cut = self.site.cut();
        for task in [working, feeding] {
            task.abort();
            let _ = task.await;
        }
        cut
    }

    /// What is not as it must be in the log, while nothing runs.
    async fn missing(&self) -> Vec<String> {
        match log::read(&self.site.server.data()) {
            Ok(view) => missing(&view, &*self.worker.lock().await, &self.started.lock().await),
            Err(error) => vec![error],
        }
    }

    async fn counts(&self) -> (u64, u64) {
        counts(&*self.worker.lock().await)
    }
}

fn boot(site: &mut Site) {
    site.boot("scheduler", &["--lease", LEASE, "--sandbox-map", "process=process"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_steps_survive() {
    if host::skipped() {
        return;
    }
    let mut all = Elsewhere::new("steps").await;
    let (mut lost_blocks, mut met) = (Vec::new(), 0);
    for number in 0..cuts() {
        let cut = all.live().await;
        let wrong = all.missing().await;
        let now = all.counts().await;
        println!("cut {number}: {cut:?}, steps and verdicts acknowledged: {now:?}");
        assert!(wrong.is_empty(), "after cut {number}:\n{}", wrong.join("\n"));
        lost_blocks.push(cut.dropped + cut.torn);
        met += cut.kept + cut.dropped + cut.torn;
        boot(&mut all.site);
    }
    // All that was started ends, so that a hole in the last steps shows, too.
    let working = all.work();
    let started = all.started.lock().await.clone();
    for id in &started {
        let ended = || has_ended(&all.site.server, id);
        evalgrid_tests::eventually(&format!("{id} has ended"), PATIENCE, ended).await;
    }
    working.abort();
    let _ = working.await;
    all.site.stop();
    let wrong = all.missing().await;
    assert!(wrong.is_empty(), "at the end:\n{}", wrong.join("\n"));
    let view = log::read(&all.site.server.data()).unwrap();
    assert!(view.settled.len() >= started.len() * CASES * TRIALS, "every trial has a verdict");
    println!(
        "{} cuts, lost 0, twice 0: {} batches, steps and verdicts {:?}; blocks lost or torn per cut: {lost_blocks:?}",
        cuts(),
        started.len(),
        all.counts().await
    );
    assert!(met > 0, "no cut met a block that was not flushed");
}

/// The same over a store that only says that it syncs.
#[tokio::test(flavor = "multi_thread")]
async fn steps_that_were_not_synced_are_missed() {
    if host::skipped() {
        return;
    }
    let mut all = Elsewhere::new("steps-found-out").await;
    all.site.stop();
    all.site.lie_about_syncs();
    boot(&mut all.site);
    for number in 0..CUTS_TO_FIND_OUT {
        let cut = all.live().await;
        let wrong = all.missing().await;
        println!("cut {number}: {cut:?}, {:?}: {} findings", all.counts().await, wrong.len());
        if !wrong.is_empty() {
            assert!(
                wrong.iter().any(|text| text.contains("were acknowledged")),
                "steps are missed: {wrong:?}"
            );
            return;
        }
        boot(&mut all.site);
    }
    panic!("{CUTS_TO_FIND_OUT} cuts under a store that does not sync, and nothing was missed");
}
