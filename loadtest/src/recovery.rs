//! How long a scheduler takes to come back: with a million records in the log, with and without a snapshot, and with 100,000 trials waiting.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use evalgrid_tests::{
    http::Api,
    server::{Process, Server},
    suite,
    worker::{Shape, Worker},
};

use crate::{
    stats::{median, milliseconds},
    steps::{RESULT_BYTES, STEPS_PER_TRIAL, feed},
};

/// What is written before the kill.
const RECORDS: u64 = 1_000_000;
/// Records per trial beside its steps: lease, verdict, custody; batches add a little.
const RECORDS_PER_TRIAL: u64 = STEPS_PER_TRIAL as u64 + 3;
/// Organizations that each queue three full batches of 100.
const ORGANIZATIONS: usize = 334;
/// A start that takes longer is none.
const PATIENCE: Duration = Duration::from_secs(120);

/// Prints all three.
pub async fn report(folder: &Path, runs: usize) {
    println!("\nRecovery after kill -9 (from the start of the process to its first answer; median of {runs} starts)");
    println!("what is there | seconds | the scheduler's own words");
    for (what, every) in [
        ("1,000,000 records, no snapshot", "16GiB"),
        ("1,000,000 records, a snapshot per 64 MiB", "64MiB"),
    ] {
        records(folder, what, every, runs).await;
    }
    waiting(folder, runs).await;
}

async fn records(folder: &Path, what: &str, snapshot_every: &str, runs: usize) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let mut server = Server::new(folder.path());
    server.scheduler = ["--snapshot-every", snapshot_every].map(str::to_owned).into();
    let scheduler = server.scheduler();
    let _gateway = server.api();
    server.ready().await;
    let trials = RECORDS.div_ceil(RECORDS_PER_TRIAL);
    let feeders = feed(&server, 256, trials).await;
    let shape = Shape {
        slots: 256,
        steps: STEPS_PER_TRIAL,
        result_bytes: RESULT_BYTES,
        trials,
        seed: 1,
    };
    Worker::new(&server.grpc, &server.secret("worker-token"), "recovery", shape)
        .run()
        .await;
    feeders.into_iter().for_each(|feeder| feeder.abort());
    starts(&server, scheduler, what, runs).await;
}

async fn waiting(folder: &Path, runs: usize) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = Server::new(folder.path());
    let scheduler = server.scheduler();
    let _gateway = server.api();
    server.ready().await;
    let before = scheduler.resident_bytes();
    for number in 0..ORGANIZATIONS {
        let api = Api::new(&server.http, &server.key(&format!("waiting-{number}")).await);
        for _ in 0..3 {
            api.start(&suite::command_batch(10, 10, "bubblewrap", "true", "true")).await;
        }
    }
    let trials = ORGANIZATIONS * 300;
    println!(
        "{trials} waiting trials, before the kill | – | resident {:.0} MB, {} bytes per trial",
        scheduler.resident_bytes() as f64 / 1e6,
        scheduler.resident_bytes().saturating_sub(before) / trials as u64
    );
    starts(&server, scheduler, &format!("{trials} waiting trials"), runs).await;
}

/// Kills and starts, again and again.
async fn starts(server: &Server, mut scheduler: Process, what: &str, runs: usize) {
    let mut times = Vec::new();
    for _ in 0..runs {
        scheduler.kill();
        let began = Instant::now();
        scheduler = server.scheduler();
        evalgrid_tests::eventually("the scheduler answers", PATIENCE, || async {
            evalgrid_tests::serves(&server.grpc).await.then_some(())
        })
        .await;
        times.push(began.elapsed());
    }
    let log = std::fs::read_to_string(server.folder.join("evalgrid.log")).unwrap_or_default();
    let words = log.lines().rfind(|line| line.contains("records read")).unwrap_or_default();
    let words = words.split_once("evalgrid_cli").map_or(words, |(_, rest)| rest);
    println!(
        "{what} | {:.2} | {} (resident {:.0} MB)",
        median(&milliseconds(&times)) / 1e3,
        words.trim(),
        scheduler.resident_bytes() as f64 / 1e6
    );
}
