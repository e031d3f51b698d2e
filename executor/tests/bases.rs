//! What is the same for many trials is made once: real git, real installs, real sandboxes.
#![allow(clippy::unwrap_used)]

mod support;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
};

use evalgrid_proto::v1::{Lease, StepRecord, TrialStatus};
use serde_json::{Value, json};
use support::{Grid, Told, request};

/// A repository on a loopback web server, which counts what is asked for. `/go` is there once it has been put there.
struct Origin {
    folder: tempfile::TempDir,
    port: u16,
    asked: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl Origin {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin = Self {
            folder: tempfile::tempdir().unwrap(),
            port: listener.local_addr().unwrap().port(),
            asked: Arc::default(),
        };
        fs::create_dir(origin.path("work")).unwrap();
        origin.git(&["init", "-q", "."]);
        let (root, asked) = (origin.path("served"), origin.asked.clone());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut head = Vec::new();
                let mut buffer = [0; 4096];
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut buffer) {
                        Ok(n) if n > 0 => head.extend_from_slice(&buffer[..n]),
                        _ => break,
                    }
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let path = head.split([' ', '?']).nth(1).unwrap_or("/").to_owned();
                *asked.lock().unwrap().entry(path.clone()).or_default() += 1;
                let (status, body) = match fs::read(root.join(path.trim_start_matches('/'))) {
                    Ok(body) => ("200 OK", body),
                    Err(_) => ("404 Not Found", Vec::new()),
                };
                let _ = write!(stream, "HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
                let _ = stream.write_all(&body);
            }
        });
        origin.commit("one");
        origin
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn git(&self, args: &[&str]) -> String {
        let settings = ["user.name=t", "user.email=t@example.com", "init.defaultBranch=main"];
        let output = Command::new("git")
            .args(settings.iter().flat_map(|setting| ["-c", setting]))
            .args(args)
            .current_dir(self.path("work"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// A new commit on the branch; its name.
    fn commit(&self, content: &str) -> String {
        fs::write(self.path("work/f"), content).unwrap();
        self.git(&["add", "f"]);
        self.git(&["commit", "-q", "-m", content]);
        let served = self.path("served");
        let _ = fs::remove_dir_all(&served);
        // By its URL: else whatever lies about in the repository would come along.
        let url = format!("file://{}", self.path("work").display());
        self.git(&["clone", "-q", "--bare", &url, served.to_str().unwrap()]);
        self.git(&["-C", served.to_str().unwrap(), "update-server-info"]);
        self.git(&["rev-parse", "HEAD"])
    }

    fn count(&self, path: &str) -> usize {
        self.asked.lock().unwrap().get(path).copied().unwrap_or(0)
    }

    fn clones(&self) -> usize {
        self.count("/info/refs")
    }

    /// `get PATH`, for bash.
    fn get(&self) -> String {
        format!(
            "get() {{ exec 3<>/dev/tcp/127.0.0.1/{}; printf 'GET %s HTTP/1.0\\r\\n\\r\\n' \"$1\" >&3; cat <&3; exec 3>&-; }}; ",
            self.port
        )
    }

    /// A request with two cases of ten trials on this repository.
    fn request(&self, run: &str, verify: &str, profile: Value) -> Value {
        let source = json!({ "kind": "repo", "url": format!("http://127.0.0.1:{}/", self.port), "ref": "main" });
        let case = json!({ "source": source, "verify": verify });
        let mut request = request(&format!("{}{run}", self.get()), case, profile);
        request["trials"] = json!(10);
        let mut second = request["cases"][0].clone();
        second["id"] = json!("d");
        request["cases"].as_array_mut().unwrap().push(second);
        request
    }
}

/// Leases of `count` trials of a request.
fn leases(grid: &Grid, first: u64, count: usize, provider: &str, batch: &str, request: &Value) -> Vec<Lease> {
    let lease = |i: usize| Lease {
        provider: provider.into(),
        batch_id: batch.into(),
        case_index: (i % 2) as u32,
        ..grid.lease(first + i as u64, request)
    };
    (0..count).map(lease).collect()
}

/// Runs trials on a new executor, all at once, to their ends.
async fn trials(grid: &mut Grid, leases: &[Lease]) -> Told {
    let executor = grid.executor();
    let mut session = grid.session().await;
    for lease in leases {
        session.lease(lease).await;
    }
    let told = session.until(|told| told.credits as usize >= leases.len()).await;
    executor.stop().await;
    assert_eq!(told.failures, []);
    assert_eq!(told.destroyed.len(), leases.len());
    assert_eq!(mounts_below(grid.folder.path()), 0);
    told
}

/// The same with the leases made here.
async fn batch(grid: &mut Grid, first: u64, count: usize, provider: &str, batch: &str, request: &Value) -> Told {
    let leases = leases(grid, first, count, provider, batch, request);
    trials(grid, &leases).await
}

fn mounts_below(folder: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts
        .lines()
        .filter(|line| line.contains(&format!("{}/", folder.display())))
        .count()
}

fn results(told: &Told, step: &str) -> Vec<Value> {
    let of = |record: &&StepRecord| record.step == step;
    told.steps
        .iter()
        .filter(of)
        .map(|record| serde_json::from_slice(&record.result).unwrap())
        .collect()
}

/// How many records of a step say that it was there already.
fn cached(told: &Told, step: &str) -> usize {
    results(told, step).iter().filter(|result| result["cached"] == true).count()
}

fn passed(grid: &Grid, told: &Told) -> usize {
    let all = told.results.iter();
    all.filter(|(_, outcome)| match outcome.status() {
        TrialStatus::Passed => true,
        other => panic!("{other:?}: {:?} {:?}", outcome.failure, grid.evidence(outcome)),
    })
    .count()
}

/// Names in the folder of bases: whole ones, and what is about to be one.
fn bases(grid: &Grid) -> (usize, usize) {
    let names = fs::read_dir(grid.folder.path().join("worker/bases")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let (staging, whole): (Vec<_>, Vec<_>) = names.filter(|name| name.contains('.')).partition(|name| name.contains(".staging-"));
    (whole.len(), staging.len())
}

/// The install counts itself, makes something that takes the place of what the profile has brought, and needs the checkout.
fn profile(origin: &Origin) -> Value {
    json!({
        "files": { "home/.tool": "raw", "workspace/note": "from the profile" },
        "install": format!("{} get /installed >/dev/null; echo \"built from $(cat f)\" > ~/.tool; mkdir -p ~/.local/bin; cp /usr/bin/true ~/.local/bin/tool", origin.get()),
    })
}

const RUN: &str =
    "cat ~/.tool note f > seen; git status --porcelain >> seen; tool && echo works >> seen; echo $$ >> f; rm note; mv .git moved";
const VERIFY: &str = "test \"$(head -n 1 seen)\" = 'built from one' && grep -q works seen && ! grep -q '^ M' seen && test ! -e note && test $(wc -l < f) = 1 && test -d moved";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grid_clones_once_and_installs_once() {
    let origin = Origin::new();
    let mut grid = Grid::new().await;
    let commit = origin.git(&["rev-parse", "HEAD"]);
    let request = origin.request(RUN, VERIFY, profile(&origin));
    let told = batch(&mut grid, 10, 20, "bubblewrap", "batch_a", &request).await;
    assert_eq!(passed(&grid, &told), 20);
    assert_eq!((origin.clones(), origin.count("/installed")), (1, 1));
    assert_eq!((cached(&told, "source"), cached(&told, "profile.install")), (19, 19));
    for (_, outcome) in &told.results {
        assert_eq!(grid.evidence(outcome).source_commit, Some(commit.clone()));
    }
    assert_eq!(bases(&grid), (2, 0), "the source, and the installed");
    // The branch moves. The batch stays where it is, on the next executor too; another batch sees the new commit, once.
    let newer = origin.commit("two");
    let told = batch(&mut grid, 40, 2, "bubblewrap", "batch_a", &request).await;
    assert_eq!((passed(&grid, &told), origin.clones(), origin.count("/installed")), (2, 1, 1));
    let request = origin.request(RUN, &VERIFY.replace("one", "two"), profile(&origin));
    let told = batch(&mut grid, 50, 4, "bubblewrap", "batch_b", &request).await;
    assert_eq!((passed(&grid, &told), origin.clones(), origin.count("/installed")), (4, 2, 2));
    assert_eq!(grid.evidence(&told.results[0].1).source_commit, Some(newer));
    // Without its bases the first batch is cloned again, and still is where it was.
    remove_bases(&grid);
    let request = origin.request(RUN, VERIFY, profile(&origin));
    let told = batch(&mut grid, 60, 2, "bubblewrap", "batch_a", &request).await;
    assert_eq!((passed(&grid, &told), origin.clones()), (2, 3));
    assert_eq!(grid.evidence(&told.results[0].1).source_commit, Some(commit));
    // Until that commit is gone from the repository: then the trial says so.
    origin.git(&["checkout", "-q", "--orphan", "fresh"]);
    origin.git(&["branch", "-q", "-D", "main"]);
    origin.git(&["branch", "-q", "-m", "main"]);
    let rewritten = origin.commit("three");
    remove_bases(&grid);
    let request = origin.request(RUN, &VERIFY.replace("one", "three"), profile(&origin));
    let told = batch(&mut grid, 70, 2, "bubblewrap", "batch_a", &request).await;
    assert_eq!(passed(&grid, &told), 2);
    let evidence = grid.evidence(&told.results[0].1);
    assert_eq!(evidence.source_commit, Some(rewritten));
    assert!(
        evidence.diagnostics[0].contains("cannot be had any more"),
        "{:?}",
        evidence.diagnostics
    );
}

fn remove_bases(grid: &Grid) {
    for entry in fs::read_dir(grid.folder.path().join("worker/bases")).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("commits") {
            fs::remove_dir_all(path).unwrap();
        }
    }
}

/// Ten trials of one batch: how often was cloned and installed?
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_the_same_is_made_once() {
    async fn check(provider: &str, profile: impl Fn(&Origin) -> Value, clones: usize, installs: usize, whole: usize) {
        let origin = Origin::new();
        let mut grid = Grid::new().await;
        let mut leases = leases(
            &grid,
            10,
            4,
            provider,
            "batch_a",
            &origin.request("cat f", "test $(cat f) = one", profile(&origin)),
        );
        for lease in &mut leases {
            lease.variables.insert("KEY".into(), "correct-horse".into());
        }
        let told = trials(&mut grid, &leases).await;
        let what = profile(&origin);
        assert_eq!(
            (origin.clones(), origin.count("/installed")),
            (clones, installs),
            "{provider} {what}"
        );
        assert_eq!(bases(&grid), (whole, 0), "{provider} {what}");
        assert_eq!(told.results.len(), 4);
    }
    let install = |origin: &Origin, more: &str| format!("{} get /installed >/dev/null; {more}", origin.get());
    // What was installed knows where it is, and process sandboxes are each somewhere else.
    check("process", |origin| json!({ "install": install(origin, "true") }), 1, 4, 1).await;
    check("bubblewrap", |origin| json!({ "install": install(origin, "true") }), 1, 1, 2).await;
    check("bubblewrap", |_| json!({}), 1, 0, 1).await;
    check(
        "bubblewrap",
        |origin| json!({ "install": install(origin, "true"), "variables": ["KEY"] }),
        1,
        4,
        1,
    )
    .await;
    // A service that the agent is to find running.
    check(
        "bubblewrap",
        |origin| json!({ "install": install(origin, "setsid sleep 1000 &") }),
        1,
        4,
        1,
    )
    .await;
    check("bubblewrap", |origin| json!({ "install": install(origin, "exit 3") }), 1, 4, 1).await;
}

/// One trial alone makes nothing for others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_shares_is_not_kept() {
    let origin = Origin::new();
    let mut grid = Grid::new().await;
    let mut request = origin.request(RUN, VERIFY, profile(&origin));
    request["trials"] = json!(1);
    request["cases"].as_array_mut().unwrap().truncate(1);
    let told = batch(&mut grid, 10, 1, "bubblewrap", "batch_a", &request).await;
    assert_eq!((passed(&grid, &told), bases(&grid)), (1, (0, 0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trial_on_a_base_survives_its_executor() {
    let origin = Origin::new();
    let mut grid = Grid::new().await;
    let run = format!("{RUN}; until get /go | grep -q yes; do sleep 0.05; done");
    let request = origin.request(&run, VERIFY, profile(&origin));
    let leases = leases(&grid, 10, 3, "bubblewrap", "batch_a", &request);
    let executor = grid.executor();
    let mut session = grid.session().await;
    for lease in &leases {
        session.lease(lease).await;
    }
    let told = session
        .until(|told| told.step_names().iter().filter(|name| **name == "profile.install").count() == 3)
        .await;
    drop(session);
    executor.kill().await;
    // Half-made ones, of a key and of none, and one of before the machine's restart.
    let folder = grid.folder.path().join("worker/bases");
    let key = "0".repeat(64);
    for name in [format!("{key}.staging-1"), format!("{key}.1"), format!("{key}.2")] {
        fs::create_dir_all(folder.join(&name).join("home")).unwrap();
    }
    let manifest = json!({ "key": key, "bootId": "other", "madeAtMs": 1, "bytes": 1, "commit": null, "installed": false, "written": {} });
    fs::write(folder.join(format!("{key}.2/base.json")), manifest.to_string()).unwrap();
    let executor = grid.executor();
    let mut session = grid.session().await;
    assert_eq!(bases(&grid), (2, 0), "what lives stays, the rest goes");
    fs::write(origin.path("served/go"), "yes").unwrap();
    let steps = told.recorded();
    for lease in &leases {
        let own = |step: &&StepRecord| step.token == lease.token;
        let count = told.steps.iter().filter(own).count();
        assert!(count > 3 && steps.len() > count);
        let mine = told
            .steps
            .iter()
            .zip(&steps)
            .filter(|(record, _)| own(record))
            .map(|(_, step)| step.clone());
        let adopted = Lease {
            token: lease.token + 100,
            adopt: true,
            steps: mine.collect(),
            ..lease.clone()
        };
        session.lease(&adopted).await;
    }
    let told = session.until(|told| told.credits >= 3).await;
    assert_eq!((passed(&grid, &told), origin.clones(), origin.count("/installed")), (3, 1, 1));
    executor.stop().await;
    assert_eq!(mounts_below(grid.folder.path()), 0);
}
