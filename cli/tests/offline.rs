//! The commands for a data folder that no server uses, on folders of real servers: repair of a damaged log, and the end of an upgrade.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

const EVALGRID: &str = env!("CARGO_BIN_EXE_evalgrid");
/// Far more than a stop takes, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs it on `data`; answers with its exit code and all that it wrote.
fn offline(words: &[&str], data: &Path) -> (i32, String) {
    let Output { status, stdout, stderr } = Command::new(EVALGRID).args(words).arg("--data").arg(data).output().unwrap();
    (status.code().unwrap(), text(&stdout) + &text(&stderr))
}

/// A server, killed when the test ends.
struct Server {
    child: Child,
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
        Server { child, grpc }
    }

    /// Creates a key, which is one event, and one group of the log.
    fn create_key(&self, data: &Path, org: &str) {
        let (code, said) = offline(&["keys", "create", "--org", org, "--scheduler", &self.grpc], data);
        assert_eq!(code, 0, "{said}");
    }

    fn keys(&self, data: &Path) -> String {
        offline(&["keys", "list", "--scheduler", &self.grpc], data).1
    }

    fn stop(mut self) {
        let kill = format!("kill -TERM {}", self.child.id());
        assert!(Command::new("bash").args(["-c", &kill]).status().unwrap().success());
        let end = Instant::now() + DEADLINE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "it does not stop");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fine where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the groups of the log's only segment begin: at the magic of a group's header.
fn groups(segment: &Path) -> Vec<usize> {
    let bytes = fs::read(segment).unwrap();
    let starts = bytes.windows(4).enumerate().filter(|(_, window)| window == b"EGgr");
    starts.map(|(at, _)| at).collect()
}

fn only_segment(data: &Path) -> PathBuf {
    let entries = fs::read_dir(data.join("log")).unwrap().map(|entry| entry.unwrap().path());
    let segments: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "log"))
        .collect();
    assert_eq!(segments.len(), 1);
    segments[0].clone()
}

/// catalogue 38: by the operator's word only.
#[test]
fn a_damaged_log_is_repaired_only_when_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data);
    for org in ["one", "two", "three", "four"] {
        server.create_key(&data, org);
    }
    let (code, said) = offline(&["log", "repair"], &data);
    assert!(code == 1 && said.contains("in use"), "{said}");
    server.stop();
    assert!(offline(&["log", "verify"], &data).1.contains("The log is whole."));
    assert!(offline(&["log", "repair", "--yes"], &data).1.contains("nothing to repair"));

    // One bit in the last group but one: what was durable is gone, and no crash does that.
    let segment = only_segment(&data);
    let mut bytes = fs::read(&segment).unwrap();
    let place = groups(&segment).into_iter().rev().nth(1).unwrap();
    bytes[place + 40] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let refused = Command::new(EVALGRID)
        .args(["scheduler", "--grpc", "127.0.0.1:0", "--data"])
        .arg(&data)
        .output()
        .unwrap();
    assert!(text(&refused.stderr).contains("evalgrid log repair"), "{}", text(&refused.stderr));
    let (code, said) = offline(&["log", "verify"], &data);
    assert!(code == 1 && said.contains("evalgrid log repair"), "{said}");

    let (code, said) = offline(&["log", "repair"], &data);
    for words in [&format!("damaged at byte {place}"), "Lost would be", "nothing was changed", "--yes"] {
        assert!(code == 1 && said.contains(words), "{words}: {said}");
    }
    assert_eq!(fs::read(&segment).unwrap(), bytes);

    let (code, said) = offline(&["log", "repair", "--yes"], &data);
    assert!(code == 0 && said.contains("damaged-1"), "{said}");
    assert_eq!(
        fs::read(data.join("log/damaged-1").join(segment.file_name().unwrap())).unwrap(),
        bytes
    );
    assert!(offline(&["log", "verify"], &data).1.contains("The log is whole."));
    let server = Server::start(&data);
    let keys = server.keys(&data);
    assert!(keys.contains("two") && !keys.contains("four"), "{keys}");
    server.create_key(&data, "five");
    assert!(server.keys(&data).contains("five"));
    server.stop();
}

#[test]
fn an_upgrade_is_finalized_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let (code, said) = offline(&["upgrade", "finalize"], &data);
    assert!(code == 2 && said.contains("holds no log"), "{said}");
    // A log as the version that knew level 1 only would have left it.
    let options = evalgrid_store::LogOptions {
        write_level: 1,
        ..Default::default()
    };
    drop(evalgrid_store::FileLog::open(&data.join("log"), options, |_| Ok(())).unwrap());

    let server = Server::start(&data);
    server.create_key(&data, "one");
    let (code, said) = offline(&["upgrade", "finalize"], &data);
    assert!(code == 1 && said.contains("in use"), "{said}");
    server.stop();
    let level = |path: &Path| fs::read(path).unwrap()[8];
    let segment = only_segment(&data);
    let written = fs::read(&segment).unwrap();
    assert_eq!(level(&segment), 1, "a server alone changes no level");

    let (code, said) = offline(&["upgrade", "finalize"], &data);
    assert!(code == 0 && said.contains("level 2 from now on; it was 1"), "{said}");
    assert_eq!(fs::read(&segment).unwrap(), written);
    let (code, said) = offline(&["upgrade", "finalize"], &data);
    assert!(code == 0 && said.contains("nothing was changed"), "{said}");
    let server = Server::start(&data);
    server.create_key(&data, "two");
    let keys = server.keys(&data);
    assert!(keys.contains("one") && keys.contains("two"), "{keys}");
    server.stop();

    // A level that this version does not know, with the checksum that a newer one would write.
    let last = fs::read_dir(data.join("log")).unwrap().map(|entry| entry.unwrap().path());
    let last = last
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "log"))
        .max()
        .unwrap();
    let mut bytes = fs::read(&last).unwrap();
    assert_eq!(bytes[8], 2);
    bytes[8] = 3;
    let crc = crc32c::crc32c(&bytes[..28]);
    bytes[28..32].copy_from_slice(&crc.to_le_bytes());
    fs::write(&last, &bytes).unwrap();
    for words in [
        &["log", "verify"][..],
        &["log", "repair", "--yes"],
        &["upgrade", "finalize"],
        &["scheduler", "--grpc", "127.0.0.1:0"],
    ] {
        let (code, said) = offline(words, &data);
        assert!(
            code == 1 && said.contains("format level 3") && said.contains("newer version"),
            "{words:?}: {said}"
        );
        assert_eq!(fs::read(&last).unwrap(), bytes, "{words:?}");
    }
}
