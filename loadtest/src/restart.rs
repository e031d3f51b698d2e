//! From `kill -9` of the scheduler with 100 trials in flight to the first new step.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use evalgrid_tests::{
    server::Server,
    suite,
    worker::{Shape, Worker},
};

use crate::{
    stats::{median, milliseconds},
    steps::{RESULT_BYTES, STEPS_PER_TRIAL},
};

/// Prints the time, and that nothing was lost or doubled.
pub async fn report(folder: &Path, runs: usize) {
    println!("\nRestart after kill -9 with 100 trials in flight (300 trials of {STEPS_PER_TRIAL} steps; median of {runs} runs)");
    let mut times = Vec::new();
    let mut lost = 0;
    let mut twice = 0;
    for run in 0..runs {
        let (time, missing, doubled) = measure(folder, run as u64).await;
        times.push(time);
        lost += missing;
        twice += doubled;
    }
    let figures = milliseconds(&times);
    println!(
        "first new step after {:.0} ms (of {:?}); steps lost {lost}, steps twice {twice}",
        median(&figures),
        figures.iter().map(|ms| ms.round()).collect::<Vec<_>>()
    );
}

async fn measure(folder: &Path, seed: u64) -> (Duration, u64, u64) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = Server::new(folder.path());
    let mut scheduler = server.scheduler();
    let _gateway = server.api();
    let api = server.ready().await;
    let mut batches = Vec::new();
    for _ in 0..3 {
        batches.push(api.start(&suite::command_batch(10, 10, "bubblewrap", "true", "true")).await);
    }
    let shape = Shape {
        slots: 100,
        steps: STEPS_PER_TRIAL,
        result_bytes: RESULT_BYTES,
        trials: 300,
        seed,
    };
    let mut worker = Worker::new(&server.grpc, &server.secret("worker-token"), "restart", shape);
    let (killed, recovered);
    {
        let mut work = std::pin::pin!(worker.run());
        tokio::select! {
            () = &mut work => panic!("the work is done before the kill"),
            () = tokio::time::sleep(Duration::from_millis(20 + seed * 7)) => {}
        }
        scheduler.kill();
        killed = Instant::now();
        scheduler = server.scheduler();
        work.await;
    }
    recovered = worker.first_ack.expect("an acknowledgement after the restart");
    let mut settled = 0;
    for id in &batches {
        let batch = api.ended(id, Duration::from_secs(30)).await;
        settled += suite::trials(&batch).iter().filter(|trial| trial["status"] == "passed").count() as u64;
    }
    assert_eq!(settled, 300, "every trial has its verdict");
    drop(scheduler);
    let (distinct, all) = recorded_steps(&server);
    let expected = 300 * u64::from(STEPS_PER_TRIAL);
    (recovered - killed, expected - distinct, all - distinct)
}

/// Steps in the log: distinct ones, and all.
fn recorded_steps(server: &Server) -> (u64, u64) {
    let data = server.data();
    let output = std::process::Command::new(evalgrid_tests::server::binary())
        .args(["log", "dump", "--data", data.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "the log can be dumped: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let mut distinct = std::collections::HashSet::new();
    let mut all = 0;
    for line in text.lines().filter(|line| line.contains("\"StepRecorded\"")) {
        let event: serde_json::Value = serde_json::from_str(line).expect("each line of the dump is a JSON object");
        all += 1;
        distinct.insert((event["token"].as_u64(), event["step"].to_string()));
    }
    (distinct.len() as u64, all)
}
