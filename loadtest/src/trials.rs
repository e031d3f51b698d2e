//! No-op command trials per second, from the start request to the readable result.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use evalgrid_tests::{http::Api, server::Server, suite};

use crate::{floor, machine, stats::median};

const RUN: &str = "echo hello > hello.txt";
const VERIFY: &str = "test \"$(cat hello.txt)\" = hello";
/// Per batch: the most that one may have.
const BATCH: usize = 100;

/// Prints a row per number of slots and provider.
pub async fn report(folder: &Path, runs: usize, slots: &[u32], trials: usize) {
    println!("\nNo-op command trials, end to end (`{RUN}`, then `{VERIFY}`; {trials} trials; median of {runs} runs)");
    println!("slots | bare processes, trials/s | process, trials/s | of the bare | bubblewrap, trials/s | of the bare");
    let mut rows: Vec<[Vec<f64>; 3]> = slots.iter().map(|_| Default::default()).collect();
    for _ in 0..runs {
        for (row, &at_once) in rows.iter_mut().zip(slots) {
            row[0].push(floor::processes(folder, at_once, trials, RUN, VERIFY));
            row[1].push(measure(folder, at_once, trials, "process").await);
            row[2].push(measure(folder, at_once, trials, "bubblewrap").await);
        }
    }
    for (row, at_once) in rows.iter().zip(slots) {
        let [bare, process, bubblewrap] = [median(&row[0]), median(&row[1]), median(&row[2])];
        println!(
            "{at_once} | {bare:.0} | {process:.0} | {:.0} % | {bubblewrap:.0} | {:.0} %",
            100.0 * process / bare,
            100.0 * bubblewrap / bare
        );
    }
}

/// What one trial costs more than its bare commands: one after the other, so that nothing waits for a processor.
pub async fn overhead(folder: &Path, runs: usize, trials: usize, providers: &[&str]) {
    println!("\nOne no-op trial after the other ({trials} trials; median of {runs} runs; CPU of the whole machine)");
    println!("what | ms per trial | CPU ms per trial | more than bare, ms | CPU ms");
    let mut bare: [Vec<f64>; 2] = Default::default();
    let mut rows: Vec<[Vec<f64>; 2]> = providers.iter().map(|_| Default::default()).collect();
    for _ in 0..runs {
        let before = machine::cpu_seconds();
        let rate = floor::processes(folder, 1, trials, RUN, VERIFY);
        bare[0].push(1000.0 / rate);
        bare[1].push((machine::cpu_seconds() - before) * 1000.0 / trials as f64);
        for (row, provider) in rows.iter_mut().zip(providers) {
            let cost = measured(folder, 1, trials, provider).await;
            row[0].push(1000.0 / cost.rate);
            row[1].push(cost.cpu_ms);
        }
    }
    let [bare_ms, bare_cpu] = bare.map(|figures| median(&figures));
    println!("bare processes | {bare_ms:.1} | {bare_cpu:.1} | |");
    for (row, provider) in rows.into_iter().zip(providers) {
        let [ms, cpu] = row.map(|figures| median(&figures));
        println!("{provider} | {ms:.1} | {cpu:.1} | {:.1} | {:.1}", ms - bare_ms, cpu - bare_cpu);
    }
}

/// What a run of trials came to.
struct Cost {
    /// Trials per second.
    rate: f64,
    /// CPU of the whole machine, milliseconds per trial.
    cpu_ms: f64,
}

async fn measure(folder: &Path, slots: u32, trials: usize, sandbox: &str) -> f64 {
    measured(folder, slots, trials, sandbox).await.rate
}

async fn measured(folder: &Path, slots: u32, trials: usize, sandbox: &str) -> Cost {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let mut server = Server::new(folder.path());
    server.executor = vec!["--slots".into(), slots.to_string(), "--enable-process-sandbox".into()];
    let _process = server.serve();
    server.ready().await;
    let mut apis = Vec::new();
    for number in 0..(trials / BATCH).div_ceil(3) {
        apis.push(Api::new(&server.http, &server.key(&format!("load-{number}")).await));
    }
    // A first batch warms the page cache and the executor up.
    let warm = Api::new(&server.http, &server.key("warm").await);
    let id = warm.start(&suite::command_batch(1, 10, sandbox, RUN, VERIFY)).await;
    warm.ended(&id, Duration::from_secs(60)).await;
    let (began, cpu) = (Instant::now(), machine::cpu_seconds());
    let mut started = Vec::new();
    for index in 0..trials / BATCH {
        let api = &apis[index / 3];
        started.push((api.clone(), api.start(&suite::command_batch(10, 10, sandbox, RUN, VERIFY)).await));
    }
    let mut finished = Vec::new();
    for (api, id) in started {
        // The list is cheap to ask while the batch runs.
        evalgrid_tests::eventually("the batch ends", Duration::from_secs(300), || async {
            let page = api.call("evals.batches.list", &serde_json::json!({ "limit": 3 })).await.ok()?;
            let ended = page.body["batches"]
                .as_array()?
                .iter()
                .any(|batch| batch["id"] == id.as_str() && batch["status"] != "running");
            ended.then_some(())
        })
        .await;
        finished.push((api, id));
    }
    let (seconds, cpu) = (began.elapsed().as_secs_f64(), machine::cpu_seconds() - cpu);
    for (api, id) in &finished {
        let batch = api.batch(id).await.unwrap();
        let passed = suite::trials(&batch).iter().filter(|trial| trial["status"] == "passed").count();
        assert_eq!(passed, BATCH, "every trial passes: {batch}");
    }
    let trials = (finished.len() * BATCH) as f64;
    Cost {
        rate: trials / seconds,
        cpu_ms: cpu * 1000.0 / trials,
    }
}
