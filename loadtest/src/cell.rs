//! A cell over Redis: durable steps per second with `appendfsync always`, and failover from the kill of the active scheduler to the first new
//! step.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use evalgrid_tests::{
    cell::{Cell, Redis, WORKER_TOKEN},
    http::Api,
    suite,
    worker::{Shape, Worker},
};

use crate::{
    stats::{median, milliseconds, percentile},
    steps::{RESULT_BYTES, STEPS_PER_TRIAL},
};

const SCHEDULERS: usize = 3;
/// Trials in flight.
const IN_FLIGHT: u32 = 100;
/// Batches of 100 trials per measurement: an organization runs three at once.
const BATCHES: u64 = 9;

/// Prints both.
pub async fn report(folder: &Path, runs: usize) {
    println!("\nA cell of {SCHEDULERS} schedulers over Redis, appendfsync always, lease 2 s (median of {runs} runs)");
    let mut rates = Vec::new();
    let mut latencies = Vec::new();
    for seed in 0..runs as u64 {
        let (rate, p99) = steps(folder, seed).await;
        rates.push(rate);
        latencies.push(p99);
    }
    println!(
        "{:.0} steps/s with {IN_FLIGHT} in flight, step p99 {:.1} ms",
        median(&rates),
        median(&latencies)
    );
    let mut times = Vec::new();
    for seed in 0..runs as u64 {
        times.push(failover(folder, seed).await);
    }
    let figures = milliseconds(&times);
    println!(
        "failover: first new step {:.0} ms after SIGKILL of the active scheduler (of {:?})",
        median(&figures),
        figures.iter().map(|ms| ms.round()).collect::<Vec<_>>()
    );
}

fn shape(trials: u64, seed: u64) -> Shape {
    Shape {
        slots: IN_FLIGHT,
        steps: STEPS_PER_TRIAL,
        result_bytes: RESULT_BYTES,
        trials,
        seed,
    }
}

async fn start(api: &Api, batches: u64) {
    for number in 0..batches {
        let body = suite::command_batch(10, 10, "bubblewrap", "true", "true");
        let key = format!("batch-{number}");
        let headers = [("idempotency-key", key.as_str()), ("content-type", "application/json")];
        // Three at once: the next one waits for an end.
        while !api
            .send("evals.batches.start", body.to_string().into_bytes(), &headers)
            .await
            .is_ok_and(|answer| answer.status == 200)
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn steps(folder: &Path, seed: u64) -> (f64, f64) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let redis = Redis::start(&folder.path().join("redis"));
    let cell = Cell::new(folder.path(), &redis, 1);
    let _scheduler = cell.scheduler(0);
    let _gateway = cell.api();
    let api = cell.ready().await;
    let feeder = tokio::spawn(async move { start(&api, BATCHES).await });
    let mut worker = Worker::new(&cell.grpc[0], WORKER_TOKEN, "load", shape(BATCHES * 100, seed));
    worker.run().await;
    feeder.abort();
    let latencies = milliseconds(&worker.seen.step_latency);
    (
        worker.seen.steps as f64 / worker.seen.took.as_secs_f64(),
        percentile(&latencies, 0.99),
    )
}

async fn failover(folder: &Path, seed: u64) -> Duration {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let redis = Redis::start(&folder.path().join("redis"));
    let cell = Cell::new(folder.path(), &redis, SCHEDULERS);
    let mut schedulers: Vec<_> = (0..SCHEDULERS).map(|number| cell.scheduler(number)).collect();
    let _gateway = cell.api();
    let api = cell.ready().await;
    start(&api, 3).await;
    let active = cell.active().await.expect("one of them is active");
    let mut worker = Worker::new(&cell.grpc.join(","), WORKER_TOKEN, "failover", shape(300, seed));
    let killed;
    {
        let mut work = std::pin::pin!(worker.run());
        tokio::select! {
            () = &mut work => panic!("the work is done before the kill"),
            () = tokio::time::sleep(Duration::from_millis(20 + seed * 7)) => {}
        }
        schedulers[active].kill();
        killed = Instant::now();
        work.await;
    }
    worker.first_ack.expect("an acknowledgement after the failover") - killed
}
