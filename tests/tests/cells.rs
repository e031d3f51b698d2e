//! Two cells behind one API: each organization is served where it lives, and one moves while its mover and its new cell are killed.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use bytes::Bytes;
use evalgrid_tests::{
    http::Api,
    server::{Process, Server, binary, free_address},
    suite,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const SLUG: &str = "acme";

struct Cell {
    server: Server,
    scheduler: Process,
    _executor: Process,
}

impl Cell {
    /// One with its processes, once it answers.
    async fn start(folder: &Path) -> Cell {
        std::fs::create_dir_all(folder).unwrap();
        let mut server = Server::new(folder);
        server.executor = ["--slots", "4", "--enable-process-sandbox"].map(str::to_owned).into();
        server.scheduler = ["--sandbox-map", "process=process"].map(str::to_owned).into();
        let scheduler = server.scheduler();
        let grpc = server.grpc.clone();
        evalgrid_tests::eventually("a cell serves", PATIENCE, || async {
            evalgrid_tests::serves(&grpc).await.then_some(())
        })
        .await;
        let executor = server.executor("work");
        Cell {
            server,
            scheduler,
            _executor: executor,
        }
    }

    /// Killed and started again, until it serves.
    async fn crash(&mut self) {
        self.scheduler.kill();
        self.scheduler = self.server.scheduler();
        let grpc = self.server.grpc.clone();
        evalgrid_tests::eventually("a cell serves again", PATIENCE, || async {
            evalgrid_tests::serves(&grpc).await.then_some(())
        })
        .await;
    }

    fn url(&self) -> String {
        format!("http://{}", self.server.grpc)
    }

    /// What `organizations list` says of the organization that moves.
    fn says(&self) -> String {
        let out = Command::new(binary())
            .args(["organizations", "list", "--scheduler", &self.url(), "--data"])
            .arg(self.server.data())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = String::from_utf8(out.stdout).unwrap();
        text.lines().find(|line| line.contains(SLUG)).unwrap_or_default().to_owned()
    }
}

fn mover(from: &Cell, to: &Cell, more: &[&str]) -> Child {
    Command::new(binary())
        .args(["organizations", "move", SLUG, "--from", &from.url(), "--to", &to.url()])
        .arg("--from-token-file")
        .arg(from.server.data().join("admin-token"))
        .arg("--to-token-file")
        .arg(to.server.data().join("admin-token"))
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn finish(mover: Child) -> (bool, String) {
    let out = mover.wait_with_output().unwrap();
    let text = [out.stdout, out.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    (out.status.success(), text)
}

/// Everything that a reader can see, as it came.
async fn seen(api: &Api, batches: &[String]) -> Vec<Bytes> {
    let mut all = Vec::new();
    let gets = batches.iter().map(|id| ("evals.batches.get", json!({ "id": id })));
    for (operation, body) in gets.chain([("evals.batches.list", json!({}))]) {
        let answer = api.call(operation, &body).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        all.push(answer.bytes);
    }
    all
}

async fn start(api: &Api, request: &Value, key: &str) -> (u16, Value) {
    let answer = api
        .send("evals.batches.start", request.to_string().into_bytes(), &[("idempotency-key", key)])
        .await
        .unwrap();
    (answer.status, answer.body)
}

#[tokio::test(flavor = "multi_thread")]
async fn organizations_live_in_their_cells_and_move() {
    let folder = tempfile::tempdir().unwrap();
    let mut one = Cell::start(&folder.path().join("one")).await;
    let mut two = Cell::start(&folder.path().join("two")).await;
    let http = free_address();
    let cells = [format!("one={}", one.url()), format!("two={}", two.url())];
    let api_log = folder.path().join("api.log");
    let _api = Process::start(&["api", "--http", &http, "--cell", &cells[0], "--cell", &cells[1]], &[], &api_log);
    let acme = Api::new(&http, &one.server.key(SLUG).await);
    let other = Api::new(&http, &two.server.key("other").await);
    evalgrid_tests::eventually("the API answers", PATIENCE, || async {
        let answer = acme.call("auth.whoami", &json!({})).await.ok()?;
        (answer.status == 200).then_some(())
    })
    .await;

    // Enough output that evidence is an object of its own.
    let request = suite::command_batch(2, 1, "process", "seq 1 20000", "true");
    let mut batches = Vec::new();
    for number in 0..3 {
        let (status, started) = start(&acme, &request, &format!("key-{number}")).await;
        assert_eq!(status, 200, "{started}");
        batches.push(started["id"].as_str().unwrap().to_owned());
        acme.ended(&batches[number], PATIENCE).await;
    }
    let theirs = other.start(&request).await;
    other.ended(&theirs, PATIENCE).await;
    assert_eq!(acme.call("evals.batches.get", &json!({ "id": theirs })).await.unwrap().status, 404);

    // Refused while something runs, and then called off.
    let waiting = suite::command_batch(1, 1, "process", "sleep 300", "true");
    let running = acme.start(&waiting).await;
    let (moved, text) = finish(mover(&one, &two, &[]));
    assert!(!moved && text.contains("running"), "{text}");
    assert_eq!(
        acme.call("evals.batches.cancel", &json!({ "id": running })).await.unwrap().status,
        200
    );
    acme.ended(&running, PATIENCE).await;
    batches.push(running);
    let before = seen(&acme, &batches).await;

    // The mover dies after each thing that it says, and so does the new cell.
    for point in 0.. {
        let mut child = mover(&one, &two, &[]);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said: Vec<String> = lines.by_ref().take(point + 1).map(Result::unwrap).collect();
        println!("point {point}: {said:?}");
        if point == 0 {
            two.crash().await;
        }
        if said.len() <= point {
            let (moved, text) = finish(child);
            assert!(moved, "{text}");
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        two.crash().await;
        if point == 0 {
            let (status, refusal) = start(&acme, &request, "key-new").await;
            assert_eq!(status, 409, "{refusal}");
            let (called_off, text) = finish(mover(&one, &two, &["--abort"]));
            assert!(called_off, "{text}");
            let (status, again) = start(&acme, &request, "key-0").await;
            assert_eq!((status, again["id"].as_str().unwrap()), (200, batches[0].as_str()));
        }
        assert_eq!(seen(&acme, &batches).await, before, "after point {point}");
    }
    assert!(one.says().contains("moved"), "{}", one.says());
    assert!(two.says().contains("here"), "{}", two.says());
    let (called_off, text) = finish(mover(&one, &two, &["--abort"]));
    assert!(!called_off && text.contains("lives in the other cell"), "{text}");

    // The old cell is gone for good, and nothing is missing.
    one.crash().await;
    let direct = Command::new(binary())
        .args(["batch", "list", "--scheduler", &one.url(), "--data"])
        .arg(one.server.data())
        .output()
        .unwrap();
    assert!(direct.status.success(), "the cell's other organizations are served");
    one.scheduler.kill();
    for round in 0..2 {
        assert_eq!(seen(&acme, &batches).await, before, "round {round}");
        for (number, id) in batches.iter().take(3).enumerate() {
            let (status, again) = start(&acme, &request, &format!("key-{number}")).await;
            assert_eq!((status, again["id"].as_str().unwrap()), (200, id.as_str()), "{again}");
        }
        // Once more with an index made anew.
        two.scheduler.terminate(PATIENCE);
        let rebuilt = Command::new(binary())
            .args(["index", "rebuild", "--data"])
            .arg(two.server.data())
            .status()
            .unwrap();
        assert!(rebuilt.success());
        two.scheduler = two.server.scheduler();
        let grpc = two.server.grpc.clone();
        evalgrid_tests::eventually("the new cell serves", PATIENCE, || async {
            evalgrid_tests::serves(&grpc).await.then_some(())
        })
        .await;
    }
    // And it goes on there.
    let (status, started) = start(&acme, &request, "key-new").await;
    assert_eq!(status, 200, "{started}");
    let ended = acme.ended(started["id"].as_str().unwrap(), PATIENCE).await;
    assert_eq!(ended["status"], "finished");
    let list = acme.call("evals.batches.list", &json!({})).await.unwrap().body;
    assert_eq!(list["total"], 5, "{list}");
    assert_eq!(other.batch(&theirs).await.unwrap()["status"], "finished");
}
