//! Workers that are slow, not dead: whoever lost its lease acts on nothing, its results are refused, and each trial is scored once.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{path::Path, process::Command, time::Duration};

use evalgrid_tests::{
    counter::Counter,
    eventually,
    server::{Server, binary},
    suite,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(120);

/// What `evalgrid sandboxes` says, as JSON.
fn sandboxes(server: &Server) -> Value {
    let (data, scheduler) = (server.data(), format!("http://{}", server.grpc));
    let listed = Command::new(binary())
        .args(["sandboxes", "list", "--json", "--data"])
        .arg(&data)
        .args(["--scheduler", &scheduler])
        .output()
        .unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    serde_json::from_slice(&listed.stdout).unwrap()
}

fn count(counter: &Counter, step: &str) -> usize {
    let lines = counter.lines();
    lines
        .iter()
        .filter(|(line, _)| line.split(' ').next() == Some(step))
        .map(|(_, count)| *count as usize)
        .sum()
}

/// Trials of which every step tells who ran it: the folder of the executor is in the sandbox's path.
fn batch(counter: &Counter) -> Value {
    let report = |step: &str| counter.report(&format!("{step} $(echo $HOME | grep -o '/[ab]-work/')"));
    let run = format!("{}; sleep 4; {}", report("begin"), report("end"));
    let verify = report("check");
    suite::command_batch(1, 2, "process", &run, &verify)
}

/// catalogue 19, 20: a frozen executor loses its leases and its trials; thawed, it comes too late for everything.
#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_was_frozen_past_its_lease_acts_on_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let mut server = Server::new(folder.path());
    server.executor = ["--slots", "2", "--enable-process-sandbox"].map(str::to_owned).into();
    let flags = ["--lease", "2s", "--affinity-grace", "500ms", "--sandbox-map", "process=process"];
    server.scheduler = flags.map(str::to_owned).into();
    let mut scheduler = server.scheduler();
    let mut front = server.api();
    let api = server.ready().await;
    let mut frozen = server.executor("a-work");
    let id = api.start(&batch(&counter)).await;
    eventually("both agents work", PATIENCE, || async {
        (count(&counter, "begin") == 2).then_some(())
    })
    .await;
    frozen.freeze();
    let mut other = server.executor("b-work");
    eventually("the other has begun both anew", PATIENCE, || async {
        (count(&counter, "begin") == 4).then_some(())
    })
    .await;
    // Those of the frozen one are over before the others, so the thawed one finds work to do, under leases that it no longer has.
    eventually("the first agents have ended", PATIENCE, || async {
        (count(&counter, "end") >= 2).then_some(())
    })
    .await;
    frozen.go_on();
    let ended = api.ended(&id, PATIENCE).await;
    for trial in suite::trials(&ended) {
        assert_eq!(
            (&trial["status"], trial["lostAttempts"].as_array().map_or(0, Vec::len)),
            (&json!("passed"), 1),
            "{trial}"
        );
    }
    let lines = counter.lines();
    assert_eq!(count(&counter, "check"), 2, "one verdict each: {lines:?}");
    assert_eq!(lines.get("check /a-work/"), None, "the frozen one has acted: {lines:?}");
    assert_eq!(
        lines.get("end /a-work/"),
        Some(&2),
        "its agents were left to their supervisors: {lines:?}"
    );
    // It is told what to remove once it is back, and then nothing is in custody.
    eventually("custody is closed", PATIENCE, || async {
        (sandboxes(&server)["total"] == json!(0)).then_some(())
    })
    .await;
    assert!(left(folder.path()).is_empty());
    for process in [&mut frozen, &mut other, &mut front, &mut scheduler] {
        assert!(process.is_running());
        assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    }
}

/// catalogue 40 as an operator sees it: a dead worker's sandboxes stay on the list until it is back, and what is not ours is not touched.
#[tokio::test(flavor = "multi_thread")]
async fn custody_outlives_the_worker_and_foreign_folders_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let mut server = Server::new(folder.path());
    server.executor = ["--slots", "2", "--enable-process-sandbox"].map(str::to_owned).into();
    let flags = ["--lease", "2s", "--affinity-grace", "500ms", "--sandbox-map", "process=process"];
    server.scheduler = flags.map(str::to_owned).into();
    let _scheduler = server.scheduler();
    let _front = server.api();
    let api = server.ready().await;
    let mut first = server.executor("a-work");
    let id = api.start(&batch(&counter)).await;
    eventually("both agents work", PATIENCE, || async {
        (count(&counter, "begin") == 2).then_some(())
    })
    .await;
    first.kill();
    let _other = server.executor("b-work");
    api.ended(&id, PATIENCE).await;
    eventually("only the dead worker's are left", PATIENCE, || async {
        let list = sandboxes(&server);
        let rows = list["sandboxes"].as_array().unwrap();
        let dead = |row: &Value| row["workerHere"] == json!(false) && row["needed"] == json!(false) && row["state"] == json!("created");
        (rows.len() == 2 && rows.iter().all(dead)).then_some(())
    })
    .await;
    let foreign = folder.path().join("a-work/process/somebody-elses");
    std::fs::create_dir(&foreign).unwrap();
    let _back = server.executor("a-work");
    eventually("custody is closed", PATIENCE, || async {
        let list = sandboxes(&server);
        let foreign = list["foreign"].as_array().unwrap();
        (list["total"] == json!(0) && foreign.iter().any(|row| row["name"] == json!("somebody-elses"))).then_some(())
    })
    .await;
    assert!(foreign.is_dir() && left(folder.path()).is_empty());
}

/// Folders of sandboxes, wherever the executors keep them.
fn left(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for work in ["a-work", "b-work"] {
        let entries = std::fs::read_dir(folder.join(work).join("process")).into_iter().flatten().flatten();
        found.extend(
            entries
                .map(|entry| entry.path())
                .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("trial_"))),
        );
    }
    found
}
