//! The real binary: exit codes, what it prints and never prints again, how it stops, and the demo from end to end.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

const EVALGRID: &str = env!("CARGO_BIN_EXE_evalgrid");
/// Far more than anything here takes, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

fn evalgrid(args: &[&str]) -> Output {
    Command::new(EVALGRID).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn mistakes_end_with_two_and_say_what_to_do() {
    fn check(args: &[&str], words: &[&str]) {
        let output = evalgrid(args);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(2), "{args:?}: {out}{err}");
        assert!(out.is_empty(), "{args:?}: {out}");
        for word in words {
            assert!(err.contains(word), "{args:?}: {word:?} is not in {err:?}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().to_str().unwrap();
    check(&[], &["Usage: evalgrid"]);
    check(&["serv"], &["serv", "serve"]);
    check(&["serve", "--slots", "0"], &["--slots"]);
    check(&["serve", "--log", "=,="], &["--log"]);
    check(&["batch", "list", "--data", data], &["API key", "EVALGRID_API_KEY", "--data"]);
    check(
        &["batch", "list", "--api-key", "k", "--scheduler", "ftp://x"],
        &["ftp://x", "--scheduler"],
    );
    check(&["batch", "start", "/nowhere.json", "--data", data], &["/nowhere.json"]);
    check(&["batch", "start", "r.json", "--fail-under", "1"], &["--watch"]);
    check(&["keys", "list", "--data", data], &["EVALGRID_ADMIN_TOKEN"]);
    check(&["executor", "--data", data], &["EVALGRID_WORKER_TOKEN"]);
    check(&["log", "verify", "--data", data], &["holds no log", "--data"]);
    check(&["index", "rebuild", "--data", data], &["holds no log", "--data"]);
}

#[test]
fn a_variable_of_no_flag_is_told() {
    let output = Command::new(EVALGRID)
        .args(["log", "verify", "--data", "/nowhere"])
        .env("EVALGRID_SLOT", "2")
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert!(err.contains("EVALGRID_SLOT is the variable of no flag"), "{err}");
}

/// Nothing that answers is needed: what is wrong with the file, and with the key, is seen before anybody is asked.
#[test]
fn a_calibration_that_cannot_be_says_whose_fault_it_is() {
    let check = |file: &Path, key: Option<&str>, code: i32, word: &str| {
        let mut command = Command::new(EVALGRID);
        command.args(["judge", "calibrate"]).arg(file).env_remove("OPENAI_API_KEY");
        command.envs(key.map(|key| ("OPENAI_API_KEY", key)));
        let output = command.output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!((output.status.code(), out.as_str()), (Some(code), ""), "{err}");
        assert!(err.contains(word), "{word:?} is not in {err:?}");
    };
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/calibrate.json");
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let good = fs::read_to_string(&example).unwrap();
    let by = |harness: &str| good.replace("\"provider\": \"openai\"", &format!("\"harness\": \"{harness}\""));
    check(&example, None, 69, "OPENAI_API_KEY is not set");
    check(Path::new("/nowhere.json"), Some("k"), 2, "/nowhere.json");
    check(&put("no.json", "{"), Some("k"), 65, "no.json");
    check(
        &put("label.json", &good.replace("\"label\": \"empty\"", "\"label\": \"odd\"")),
        Some("k"),
        65,
        "items[2].label",
    );
    check(&put("harness.json", &by("command")), Some("k"), 65, "judge.harness");
    check(&put("codex.json", &by("codex")), None, 69, "OPENAI_API_KEY is not set");
}

#[test]
fn failures_end_with_one_and_say_what_to_do() {
    fn check(args: &[&str], words: &[&str]) {
        let output = evalgrid(args);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: {word:?} is not in {err:?}");
        }
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    check(&["api", "--http", &address], &[&address, "--http"]);
    // Nothing listens at port 9.
    check(
        &["batch", "list", "--api-key", "k", "--scheduler", "http://127.0.0.1:9"],
        &["127.0.0.1:9", "evalgrid serve"],
    );
    let json = ["batch", "get", "b", "--json", "--api-key", "k", "--api", "http://127.0.0.1:9"];
    check(&json, &["127.0.0.1:9", "evalgrid serve"]);
}

#[test]
fn help_and_version_are_no_failures() {
    for args in [["--help"], ["--version"]] {
        let output = evalgrid(&args);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains("evalgrid"));
        assert!(output.stderr.is_empty());
    }
}

/// A server on free ports, killed when the test ends.
struct Server {
    child: Child,
    /// What it printed until it said what to try.
    greeting: String,
    grpc: String,
}

impl Server {
    fn start(data: &Path) -> Server {
        let mut child = Command::new(EVALGRID)
            .args([
                "serve",
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "127.0.0.1:0",
                "--enable-process-sandbox",
                "--data",
            ])
            .arg(data)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut greeting = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        while !greeting.contains("evalgrid batch start") {
            assert_ne!(lines.read_line(&mut greeting).unwrap(), 0, "the server has ended: {greeting}");
        }
        let line = greeting.lines().find(|line| line.trim_start().starts_with("gRPC")).unwrap();
        let grpc = line.split_whitespace().last().unwrap().to_owned();
        Server { child, greeting, grpc }
    }

    fn key(&self) -> Option<&str> {
        self.greeting.split_whitespace().find(|word| word.starts_with("anp_"))
    }

    fn stop(mut self) -> Option<i32> {
        signal(&self.child, "TERM");
        ended(&mut self.child)
    }
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    assert!(Command::new("bash").args(["-c", &kill]).status().unwrap().success());
}

fn ended(child: &mut Child) -> Option<i32> {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < end, "it does not stop");
        thread::sleep(Duration::from_millis(20));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fine where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_first_key_is_shown_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data);
    let key = server.key().expect("the first start shows the key").to_owned();
    let file = data.join("api-key");
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), key);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

    let shown = data.to_str().unwrap();
    let listed = evalgrid(&["batch", "list", "--data", shown, "--scheduler", &server.grpc]);
    assert!(listed.status.success(), "{}", text(&listed.stderr));
    let created = evalgrid(&["keys", "create", "--org", "acme", "--data", shown, "--scheduler", &server.grpc]);
    assert!(text(&created.stdout).starts_with("anp_"), "{}", text(&created.stderr));
    let operator = |args: &[&str]| {
        let at = ["--data", shown, "--scheduler", &server.grpc];
        let output = evalgrid(&[args, &at].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        text(&output.stderr)
    };
    assert!(operator(&["keys", "revoke", "foo"]).contains("keys list"));
    assert!(operator(&["keys", "create", "--permissions", "fly"]).ends_with("Correct --permissions.\n"));
    let free = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--enable-process-sandbox"];
    let second = evalgrid(&[&["serve", "--data", shown], &free[..]].concat());
    assert!(text(&second.stderr).contains(&format!("another server uses {shown} already")));
    let busy = evalgrid(&["log", "verify", "--data", shown]);
    assert_eq!(busy.status.code(), Some(1));
    assert!(text(&busy.stderr).contains("in use"), "{}", text(&busy.stderr));
    assert_eq!(server.stop(), Some(0));

    let again = Server::start(&data);
    assert_eq!(again.key(), None, "{}", again.greeting);
    assert_eq!(again.stop(), Some(0));
    assert!(evalgrid(&["log", "verify", "--data", shown]).status.success());
    assert!(evalgrid(&["index", "rebuild", "--data", shown]).status.success());
    let dump = evalgrid(&["log", "dump", "--data", shown]);
    let lines = text(&dump.stdout);
    let events: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().any(|event| event["kind"] == "KeyCreated"), "{lines}");
    assert!(!text(&dump.stdout).contains(&key), "the log has no secret");

    let unread = format!("set -o pipefail; {EVALGRID} log dump --data {shown} | true");
    let unread = Command::new("bash").args(["-c", &unread]).output().unwrap();
    assert_eq!(
        (unread.status.code(), text(&unread.stderr)),
        (Some(0), String::new()),
        "a reader that has gone is no failure"
    );
}

/// A scheduler without executors: what waits, what was cancelled, and warnings before a start.
#[test]
fn a_batch_that_nobody_runs_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let mut child = Command::new(EVALGRID)
        .args(["scheduler", "--grpc", "127.0.0.1:0", "--data"])
        .arg(&data)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut greeting = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    while !greeting.contains("executor") {
        assert_ne!(lines.read_line(&mut greeting).unwrap(), 0, "the scheduler has ended: {greeting}");
    }
    let grpc = greeting.lines().find(|line| line.trim_start().starts_with("gRPC")).unwrap();
    let grpc = grpc.split_whitespace().last().unwrap().to_owned();
    let server = Server { child, greeting, grpc };
    let request = folder.path().join("request.json");
    let json = r#"{"suite":{"id":"s","prompt":"Do it."},"cases":[{"id":"a"}],"trails":3,"trials":2,
        "variants":[{"harness":"command","model":"m","profile":{"name":"p","files":{},"run":"true"}}]}"#;
    fs::write(&request, json).unwrap();
    let at = ["--data", data.to_str().unwrap(), "--scheduler", &server.grpc];
    let call = |args: &[&str]| evalgrid(&[&["batch"], args, &at].concat());

    let started = call(&["start", request.to_str().unwrap()]);
    let (id, err) = (text(&started.stdout).trim().to_owned(), text(&started.stderr));
    for words in ["\"trails\" is not a field", "neither \"verify\"", "Started 1 run."] {
        assert!(err.contains(words), "{words:?} is not in {err}");
    }
    let got = text(&call(&["get", &id]).stdout);
    assert!(got.contains("is running. 2 trials: 0 passed of 0 scored, 0 void, 2 open."), "{got}");

    let mut watch = Command::new(EVALGRID)
        .args(["batch", "watch", &id])
        .args(at)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(
        first.starts_with("waiting: 2 trials wait for a free slot; is an executor connected?"),
        "{first}"
    );
    let cancelled = text(&call(&["cancel", &id]).stdout);
    let words = "was cancelled. 2 trials: 0 passed of 0 scored, 2 void (2 cancelled).";
    assert!(cancelled.contains(words), "{cancelled}");
    assert!(lines.any(|line| line.unwrap().contains(words)));
    assert_eq!(ended(&mut watch), Some(1));
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn the_demo_ends_as_it_must() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(EVALGRID)
        .arg("demo")
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut err = child.stderr.take().unwrap();
    let errors = thread::spawn(move || {
        let mut text = String::new();
        err.read_to_string(&mut text).map(|_| text)
    });
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let status = child.wait().unwrap();
    let err = errors.join().unwrap().unwrap();
    assert!(status.success(), "{out}\n{err}");
    for words in [
        "[30/30]",
        "careful",
        "hasty",
        "15 passed of 24 scored, 6 void",
        "add-numbers × hasty #1: `test \"$(cat total.txt)\" = 42` exited with 1",
        "failed ×3  add-numbers × hasty: `test",
        "evalgrid serve --data",
        "curl",
    ] {
        assert!(out.contains(words), "{words:?} is not in {out}");
    }
    let kept = fs::read_dir(folder.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().join("log").is_dir())
        .count();
    assert_eq!(kept, 1, "the data folder is kept");
}

#[test]
fn a_stopped_demo_leaves_nothing_running() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(EVALGRID)
        .args(["demo", "--slots", "4"])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // With four slots and thirty trials, some are running and some wait when the first has ended.
    lines.find(|line| line.as_ref().unwrap().starts_with("[ 1/30]")).unwrap().unwrap();
    signal(&child, "INT");
    lines.for_each(drop);
    assert_eq!(ended(&mut child), Some(1));
    let data = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.join("log").is_dir())
        .unwrap();
    for provider in ["bubblewrap", "process"] {
        let Ok(entries) = fs::read_dir(data.join("work").join(provider)) else {
            continue;
        };
        let left: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| !name.to_string_lossy().starts_with('.'))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
