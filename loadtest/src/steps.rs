//! Durable steps per second: batches over HTTP, leases and steps over the workers' gRPC stream.

use std::{path::Path, time::Duration};

use evalgrid_tests::{
    http::Api,
    server::Server,
    suite,
    worker::{Shape, Worker},
};

use crate::{
    floor,
    stats::{bytes_at_device, median, milliseconds, percentile},
};

/// Steps of a trial: the shape that the targets are given for.
pub const STEPS_PER_TRIAL: u32 = 12;
/// What a step's result weighs.
pub const RESULT_BYTES: usize = 512;

struct Figures {
    floor: f64,
    steps: f64,
    step_p50: f64,
    step_p99: f64,
    trial_p50: f64,
    trial_p99: f64,
    cpu_per_thousand: f64,
    device_bytes: f64,
}

/// Prints a row per number of trials in flight.
pub async fn report(folder: &Path, runs: usize, in_flight: &[u32], steps: u64) {
    println!(
        "\nDurable steps ({STEPS_PER_TRIAL} steps of {RESULT_BYTES} random bytes per trial; scheduler and API as two processes; median of {runs} runs)"
    );
    println!(
        "in flight | bare synced file, records/s | steps/s | of the bare file | step p50 / p99 ms | trial p50 / p99 ms | server CPU s per 1,000 trials | bytes at the device per trial"
    );
    let mut all: Vec<Vec<Figures>> = in_flight.iter().map(|_| Vec::new()).collect();
    for _ in 0..runs {
        for (row, &flying) in all.iter_mut().zip(in_flight) {
            let share = if flying == 1 { 10 } else { 1 };
            let trials = (steps / share / u64::from(STEPS_PER_TRIAL)).max(u64::from(flying));
            let floor = floor::synced_file(folder, flying as usize, trials * u64::from(STEPS_PER_TRIAL));
            row.push(measure(folder, flying, trials, floor).await);
        }
    }
    for (row, flying) in all.iter().zip(in_flight) {
        let of = |figure: fn(&Figures) -> f64| median(&row.iter().map(figure).collect::<Vec<_>>());
        let (steps, floor) = (of(|f| f.steps), of(|f| f.floor));
        println!(
            "{flying} | {floor:.0} | {steps:.0} | {:.0} % | {:.2} / {:.2} | {:.1} / {:.1} | {:.3} | {:.0}",
            100.0 * steps / floor,
            of(|f| f.step_p50),
            of(|f| f.step_p99),
            of(|f| f.trial_p50),
            of(|f| f.trial_p99),
            of(|f| f.cpu_per_thousand),
            of(|f| f.device_bytes),
        );
    }
}

async fn measure(folder: &Path, in_flight: u32, trials: u64, floor: f64) -> Figures {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = Server::new(folder.path());
    let scheduler = server.scheduler();
    let gateway = server.api();
    server.ready().await;
    let token = server.secret("worker-token");
    let feeders = feed(&server, in_flight, trials).await;
    let shape = Shape {
        slots: in_flight,
        steps: STEPS_PER_TRIAL,
        result_bytes: RESULT_BYTES,
        trials,
        seed: u64::from(in_flight),
    };
    let mut worker = Worker::new(&server.grpc, &token, "load", shape);
    let (bytes, cpu) = (bytes_at_device(folder.path()), scheduler.cpu_seconds() + gateway.cpu_seconds());
    worker.run().await;
    let cpu = scheduler.cpu_seconds() + gateway.cpu_seconds() - cpu;
    let bytes = bytes_at_device(folder.path()) - bytes;
    feeders.into_iter().for_each(|feeder| feeder.abort());
    let seen = worker.seen;
    assert_eq!(seen.stale, 0, "nothing is refused");
    let (step, trial) = (milliseconds(&seen.step_latency), milliseconds(&seen.trial_latency));
    Figures {
        floor,
        steps: seen.steps as f64 / seen.took.as_secs_f64(),
        step_p50: percentile(&step, 0.5),
        step_p99: percentile(&step, 0.99),
        trial_p50: percentile(&trial, 0.5),
        trial_p99: percentile(&trial, 0.99),
        cpu_per_thousand: cpu / seen.trials as f64 * 1e3,
        device_bytes: bytes as f64 / seen.trials as f64,
    }
}

/// Keeps enough batches waiting: each organization runs three at a time, and starts a new one as soon as one has ended.
pub async fn feed(server: &Server, in_flight: u32, trials: u64) -> Vec<tokio::task::JoinHandle<()>> {
    // Twice what flies, so that the queue is never empty while a batch ends and the next one starts.
    let organizations = (in_flight * 2).div_ceil(300).max(1) + 1;
    let batches = trials.div_ceil(100) + u64::from(organizations) * 3;
    let left = std::sync::Arc::new(std::sync::atomic::AtomicI64::new(batches as i64));
    let mut feeders = Vec::new();
    for number in 0..organizations {
        let api = Api::new(&server.http, &server.key(&format!("load-{number}")).await);
        for _ in 0..3 {
            let (api, left) = (api.clone(), left.clone());
            let first = api.start(&batch()).await;
            left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            feeders.push(tokio::spawn(async move {
                let mut id = first;
                while left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) > 0 {
                    while api
                        .call("evals.batches.list", &serde_json::json!({ "limit": 3 }))
                        .await
                        .is_ok_and(|answer| {
                            answer.body["batches"]
                                .as_array()
                                .is_some_and(|all| all.iter().any(|b| b["id"] == id.as_str() && b["status"] == "running"))
                        })
                    {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    match api.call("evals.batches.start", &batch()).await {
                        Ok(answer) if answer.status == 200 => id = answer.body["id"].as_str().unwrap().to_owned(),
                        _ => tokio::time::sleep(Duration::from_millis(50)).await,
                    }
                }
            }));
        }
    }
    feeders
}

fn batch() -> serde_json::Value {
    suite::command_batch(10, 10, "bubblewrap", "true", "true")
}
