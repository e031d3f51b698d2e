//! Resident memory of the scheduler: idle, per queued trial, and under load.

use std::{path::Path, time::Duration};

use evalgrid_tests::{
    http::Api,
    server::Server,
    suite,
    worker::{Shape, Worker},
};

use crate::steps::{RESULT_BYTES, STEPS_PER_TRIAL};

/// Organizations that each queue three full batches.
const ORGANIZATIONS: usize = 30;

/// Prints the three figures.
pub async fn report(folder: &Path) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = Server::new(folder.path());
    let scheduler = server.scheduler();
    let gateway = server.api();
    server.ready().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let idle = scheduler.resident_bytes();
    let mut apis = Vec::new();
    for number in 0..ORGANIZATIONS {
        apis.push(Api::new(&server.http, &server.key(&format!("memory-{number}")).await));
    }
    // The first batch pays for buffers that the others share.
    apis[0].start(&suite::command_batch(10, 10, "bubblewrap", "true", "true")).await;
    let before = scheduler.resident_bytes();
    let mut batches = 1;
    for (number, api) in apis.iter().enumerate() {
        for _ in usize::from(number == 0)..3 {
            api.start(&suite::command_batch(10, 10, "bubblewrap", "true", "true")).await;
            batches += 1;
        }
    }
    let queued = (batches - 1) * 100;
    let after = scheduler.resident_bytes();
    let trials = batches as u64 * 100;
    let shape = Shape {
        slots: 100,
        steps: STEPS_PER_TRIAL,
        result_bytes: RESULT_BYTES,
        trials,
        seed: 1,
    };
    let mut worker = Worker::new(&server.grpc, &server.secret("worker-token"), "memory", shape);
    let mut peak = 0;
    {
        let mut work = std::pin::pin!(worker.run());
        loop {
            tokio::select! {
                () = &mut work => break,
                () = tokio::time::sleep(Duration::from_millis(50)) => peak = peak.max(scheduler.resident_bytes()),
            }
        }
    }
    println!("\nResident memory of the scheduler");
    println!(
        "idle {:.1} MB; API idle {:.1} MB",
        idle as f64 / 1e6,
        gateway.resident_bytes() as f64 / 1e6
    );
    println!(
        "per queued trial {} bytes ({queued} trials)",
        after.saturating_sub(before) / queued as u64
    );
    println!("peak under load (100 in flight, {trials} trials) {:.1} MB", peak as f64 / 1e6);
}
