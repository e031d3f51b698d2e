//! A log that is cut behind its snapshots: the server starts from a snapshot, and all that ever ended can still be read, with the old index,
//! without one, with a rebuilt one, and from the older snapshot where the newest is damaged.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use evalgrid_tests::{
    http::Api,
    server::{Process, Server, binary},
    suite,
    worker::{Shape, Worker},
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(120);
/// Waves of three batches of 100 trials, until the log is cut; each writes about 10 MiB.
const MOST_WAVES: u64 = 40;

fn files(data: &Path, ending: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(data.join("log"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_str().unwrap().contains(ending))
        .collect();
    files.sort();
    files
}

fn is_cut(data: &Path) -> bool {
    let first = files(data, ".log").first().cloned().unwrap();
    let position: u64 = first.file_stem().unwrap().to_str().unwrap().parse().unwrap();
    position > 1 && files(data, "snapshot-").len() == 2
}

/// Everything that a reader can see of batches.
async fn read_all(api: &Api, batches: &[String]) -> Vec<Value> {
    let mut seen = vec![api.call("evals.batches.list", &json!({ "limit": 100 })).await.unwrap().body];
    for id in batches {
        seen.push(api.batch(id).await.unwrap());
    }
    seen
}

async fn start(server: &Server) -> (Process, Process, Api) {
    let (scheduler, gateway) = (server.scheduler(), server.api());
    let api = server.ready().await;
    (scheduler, gateway, api)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_ended_outlives_the_log() {
    let seed: u64 = std::env::var("EVALGRID_SEED").map_or_else(|_| rand::rng().random(), |seed| seed.parse().unwrap());
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.scheduler = ["--snapshot-every", "16MiB", "--lease", "3s"].map(str::to_owned).into();
    let data = server.data();
    let (mut scheduler, gateway, api) = start(&server).await;
    let mut batches = Vec::new();
    for wave in 0..MOST_WAVES {
        for _ in 0..3 {
            batches.push(api.start(&suite::command_batch(10, 10, "bubblewrap", "true", "true")).await);
        }
        let shape = Shape {
            slots: 50,
            steps: 4,
            result_bytes: 8 * 1024,
            trials: 300,
            seed: seed ^ wave,
        };
        let mut worker = Worker::new(&server.grpc, &server.secret("worker-token"), "snapshots", shape);
        let mut work = std::pin::pin!(worker.run());
        let moment = Duration::from_millis(rng.random_range(50..1500));
        tokio::select! {
            () = &mut work => {}
            () = tokio::time::sleep(moment) => {
                scheduler.kill();
                scheduler = server.scheduler();
                tokio::time::timeout(PATIENCE, work).await.unwrap();
            }
        }
        for id in &batches[batches.len() - 3..] {
            let batch = api.ended(id, PATIENCE).await;
            assert_eq!(
                suite::trials(&batch).iter().filter(|trial| trial["status"] == "passed").count(),
                100
            );
        }
        if is_cut(&data) {
            break;
        }
    }
    assert!(is_cut(&data), "the log is cut behind its snapshots");
    let before = read_all(&api, &batches).await;
    assert_eq!(before[0]["total"], batches.len());
    scheduler.kill();
    drop(gateway);

    let check = async |what: &str| {
        let (mut scheduler, _gateway, api) = start(&server).await;
        assert!(
            read_all(&api, &batches).await == before,
            "{what}: what was answered once is answered again"
        );
        assert_eq!(scheduler.terminate(Duration::from_secs(20)), 0);
    };
    check("the old index").await;
    std::fs::remove_dir_all(data.join("index")).unwrap();
    check("no index").await;
    let rebuilt = evalgrid(&["index", "rebuild", "--data", data.to_str().unwrap()]);
    assert!(rebuilt.contains(&format!("{} batches", batches.len())), "{rebuilt}");
    check("a rebuilt index").await;
    let newest = files(&data, "snapshot-").pop().unwrap();
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&newest, bytes).unwrap();
    check("a damaged newest snapshot").await;
    let log = std::fs::read_to_string(folder.path().join("evalgrid.log")).unwrap();
    assert!(log.contains("snapshot"), "the operator hears of the damage");
}

fn evalgrid(arguments: &[&str]) -> String {
    let output = Command::new(binary()).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
