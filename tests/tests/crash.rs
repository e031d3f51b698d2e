//! `kill -9` at seeded random moments of a running 100-trial batch: the batch finishes, each trial has one verdict, nothing ran twice, and the
//! agents that were running went on.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` chooses one, `EVALGRID_LONG=1` kills ten times as often.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{collections::HashMap, time::Duration};

use evalgrid_tests::{
    counter::Counter,
    server::{Process, Server},
    suite,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

/// However often it is interrupted.
const PATIENCE: Duration = Duration::from_secs(600);

fn long() -> bool {
    std::env::var_os("EVALGRID_LONG").is_some()
}

fn kills() -> u32 {
    if long() { 200 } else { 20 }
}

/// Long enough that the batch outlives the kills: 100 agents in 12 slots, a kill about every 0.4 s.
fn agent_seconds() -> &'static str {
    if long() { "12" } else { "1.2" }
}

fn seeded(test: u64) -> StdRng {
    let seed = std::env::var("EVALGRID_SEED").map_or(2026, |seed| seed.parse().unwrap());
    println!("EVALGRID_SEED={seed}");
    StdRng::seed_from_u64(seed ^ (test << 32))
}

/// 100 trials whose every step tells the counter that it ran, under a name that nothing else has: one for the agent and its check, and one for the
/// install, which bubblewrap sandboxes may share. Who runs twice in one sandbox has the same name twice.
fn batch(counter: &Counter, sandbox: &str) -> Value {
    let agent_seconds = agent_seconds();
    let named = |file: &str| format!("[ -e ~/{file} ] || cat /proc/sys/kernel/random/uuid > ~/{file}");
    let install = format!("{}; {}", named("installed"), counter.report("install $(cat ~/installed)"));
    let begin = counter.report("begin $(cat ~/name)");
    let end = counter.report("end $(cat ~/name)");
    let run = format!("{}; {begin}; sleep {agent_seconds}; echo done > done; {end}", named("name"));
    let verify = format!("{} && test \"$(cat done)\" = done", counter.report("check $(cat ~/name)"));
    let mut batch = suite::command_batch(10, 10, sandbox, &run, &verify);
    batch["variants"][0]["profile"]["install"] = json!(install);
    batch
}

/// Exactly one verdict each, every step once, in 100 sandboxes of which none was lost.
fn check(batch: &Value, counter: &Counter) {
    assert_eq!(batch["status"], "finished", "{batch}");
    let trials = suite::trials(batch);
    assert_eq!(trials.len(), 100);
    for trial in &trials {
        assert_eq!(trial["status"], "passed", "{trial}");
        assert_eq!(
            trial["lostAttempts"].as_array().map_or(0, Vec::len),
            0,
            "no sandbox was lost: {trial}"
        );
    }
    let lines = counter.lines();
    let twice: HashMap<_, _> = lines.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "ran twice: {twice:?}");
    let count = |step: &str| lines.keys().filter(|line| line.split(' ').next() == Some(step)).count();
    for step in ["begin", "end", "check"] {
        assert_eq!(count(step), 100, "{step} ran once in each of 100 sandboxes");
    }
    let shared = batch["runs"][0]["variant"]["provider"] == "bubblewrap";
    match count("install") {
        installs if shared => assert!((1..=100).contains(&installs), "{installs} installs"),
        installs => assert_eq!(installs, 100, "the install ran once in each of 100 sandboxes"),
    }
}

fn arguments(server: &mut Server) {
    server.executor = ["--slots", "12", "--enable-process-sandbox"].map(str::to_owned).into();
    server.scheduler = ["--lease", "5s", "--sandbox-map", "process=process"].map(str::to_owned).into();
}

fn ended_agents(counter: &Counter) -> usize {
    counter.lines().keys().filter(|line| line.starts_with("end ")).count()
}

async fn pause(rng: &mut StdRng, milliseconds: std::ops::Range<u64>) {
    tokio::time::sleep(Duration::from_millis(rng.random_range(milliseconds))).await;
}

async fn whole_process(test: u64, sandbox: &str) {
    let mut rng = seeded(test);
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let mut server = Server::new(folder.path());
    arguments(&mut server);
    let mut process = server.serve();
    let api = server.ready().await;
    let id = api.start(&batch(&counter, sandbox)).await;
    for kill in 0..kills() {
        pause(&mut rng, 1..700).await;
        process.kill();
        println!("kill {kill}: {} agents have ended", ended_agents(&counter));
        process = server.serve();
    }
    assert!(ended_agents(&counter) < 100, "the batch outlives the kills");
    let ended = api.ended(&id, PATIENCE).await;
    check(&ended, &counter);
    nothing_left(&server, &mut process).await;
}

/// After the last trial no sandbox is left, and after the end of the process no process of it.
async fn nothing_left(server: &Server, process: &mut Process) {
    evalgrid_tests::eventually("no sandbox is left", Duration::from_secs(30), || async {
        let left = sandboxes(server.folder.as_path());
        left.is_empty().then_some(())
    })
    .await;
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
}

/// Folders of sandboxes, wherever the executors keep them.
fn sandboxes(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("trial_") {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(sandboxes(&entry.path()));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_process_with_process_sandboxes() {
    whole_process(1, "process").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_process_with_bubblewrap_sandboxes() {
    whole_process(2, "bubblewrap").await;
}

/// One role at a time is killed; the others never notice more than a broken connection.
async fn one_role(test: u64, choose: fn(&mut Roles) -> &mut Process, restart: fn(&Server) -> Process) {
    let mut rng = seeded(test);
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let mut server = Server::new(folder.path());
    arguments(&mut server);
    let mut roles = Roles {
        scheduler: server.scheduler(),
        api: server.api(),
        executor: None,
    };
    let api = server.ready().await;
    roles.executor = Some(server.executor("executor"));
    let id = api.start(&batch(&counter, "process")).await;
    for _ in 0..kills() {
        pause(&mut rng, 1..700).await;
        choose(&mut roles).kill();
        pause(&mut rng, 1..100).await;
        *choose(&mut roles) = restart(&server);
    }
    assert!(ended_agents(&counter) < 100, "the batch outlives the kills");
    let ended = api.ended(&id, PATIENCE).await;
    check(&ended, &counter);
    nothing_left(&server, roles.executor.as_mut().unwrap()).await;
}

struct Roles {
    scheduler: Process,
    api: Process,
    executor: Option<Process>,
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_executor() {
    one_role(3, |roles| roles.executor.as_mut().unwrap(), |server| server.executor("executor")).await;
}

/// catalogue 1, 23: what was dispatched and what waits survives the one who dispatches.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_scheduler() {
    one_role(4, |roles| &mut roles.scheduler, Server::scheduler).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_api() {
    one_role(5, |roles| &mut roles.api, Server::api).await;
}
