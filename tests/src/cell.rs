//! A whole cell of real processes: a Redis, three schedulers, an API, and executors that follow whichever scheduler is active.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::{
    http::Api,
    server::{Process, free_address},
};

/// The tokens that all processes of the cell share.
pub const WORKER_TOKEN: &str = "the-worker-token-of-this-test";
const ADMIN_TOKEN: &str = "the-admin-token-of-this-test";
/// A process that takes longer to answer does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A real `redis-server` that syncs every command before it answers.
pub struct Redis {
    folder: PathBuf,
    port: u16,
    process: Option<Child>,
}

impl Redis {
    /// Starts it in a folder of its own.
    pub fn start(folder: &Path) -> Redis {
        let port = free_address().rsplit(':').next().unwrap().parse().unwrap();
        std::fs::create_dir_all(folder).unwrap();
        let mut redis = Redis {
            folder: folder.to_owned(),
            port,
            process: None,
        };
        redis.again();
        redis
    }

    /// Starts it again on what it has kept.
    pub fn again(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("redis.log"))
            .unwrap();
        let settings = [
            ("--port", self.port.to_string()),
            ("--bind", "127.0.0.1".into()),
            ("--dir", self.folder.to_str().unwrap().into()),
            ("--appendonly", "yes".into()),
            ("--appendfsync", "always".into()),
            ("--save", String::new()),
            ("--enable-debug-command", "yes".into()),
        ];
        let child = Command::new("redis-server")
            .args(settings.iter().flat_map(|(name, value)| [*name, value.as_str()]))
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed: run `cargo xtask install`");
        self.process = Some(child);
        // A scheduler that finds no Redis when it starts ends: whoever comes back from here may start one.
        let end = std::time::Instant::now() + PATIENCE;
        while !self.command(&["PING"]).contains("PONG") {
            assert!(std::time::Instant::now() < end, "redis-server answers");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills it as a power cut of the process would.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Keeps a copy of what it has now, as a replica that goes no further.
    pub fn fork(&self) {
        copy(&self.folder.join("appendonlydir"), &self.folder.join("forked"));
    }

    /// Dies, and is replaced by that replica: what came after the copy is lost.
    pub fn fail_over(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.folder.join("appendonlydir")).unwrap();
        copy(&self.folder.join("forked"), &self.folder.join("appendonlydir"));
        self.again();
    }

    /// One command, through `redis-cli`; whether it worked is of no interest to those who make trouble.
    pub fn command(&self, words: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-p", &self.port.to_string()])
            .args(words)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// For `--store`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Addresses and folders of a cell; its processes are whoever started them.
pub struct Cell {
    /// Everything lies in here.
    pub folder: PathBuf,
    /// Where the schedulers listen.
    pub grpc: Vec<String>,
    /// Where the API listens.
    pub http: String,
    /// Further arguments of every scheduler.
    pub scheduler: Vec<String>,
    /// Further arguments of every executor.
    pub executor: Vec<String>,
    /// Further variables of every scheduler.
    pub variables: Vec<(String, String)>,
    store: String,
}

impl Cell {
    /// A cell of this many schedulers over `redis`.
    pub fn new(folder: &Path, redis: &Redis, schedulers: usize) -> Cell {
        Cell {
            folder: folder.to_owned(),
            grpc: (0..schedulers).map(|_| free_address()).collect(),
            http: free_address(),
            scheduler: Vec::new(),
            executor: Vec::new(),
            variables: Vec::new(),
            store: redis.url(),
        }
    }

    /// One of the schedulers, by number.
    pub fn scheduler(&self, number: usize) -> Process {
        let data = self.folder.join(format!("scheduler-{number}"));
        let objects = self.folder.join("objects");
        let mut arguments = vec![
            "scheduler",
            "--data",
            data.to_str().unwrap(),
            "--grpc",
            &self.grpc[number],
            "--store",
            &self.store,
            "--objects",
            objects.to_str().unwrap(),
        ];
        arguments.extend(self.scheduler.iter().map(String::as_str));
        self.start(&format!("scheduler-{number}"), &arguments)
    }

    /// The API.
    pub fn api(&self) -> Process {
        let schedulers = self.schedulers();
        self.start("api", &["api", "--http", &self.http, "--scheduler", &schedulers])
    }

    /// An executor, by number.
    pub fn executor(&self, number: usize) -> Process {
        self.worker("executor", number, &self.executor)
    }

    /// A judge runner, by number.
    pub fn judge_runner(&self, number: usize) -> Process {
        self.worker("judge-runner", number, &[])
    }

    fn worker(&self, role: &str, number: usize, further: &[String]) -> Process {
        let name = format!("{role}-{number}");
        let work = self.folder.join(&name);
        let schedulers = self.schedulers();
        let mut arguments = vec![role, "--work", work.to_str().unwrap(), "--scheduler", &schedulers];
        arguments.extend(further.iter().map(String::as_str));
        self.start(&name, &arguments)
    }

    /// For `--scheduler`.
    pub fn schedulers(&self) -> String {
        let urls: Vec<String> = self.grpc.iter().map(|address| format!("http://{address}")).collect();
        urls.join(",")
    }

    /// Waits until the cell answers, with the key that whoever was active first has kept.
    pub async fn ready(&self) -> Api {
        crate::eventually("the cell answers", PATIENCE, || async {
            let key = (0..self.grpc.len()).find_map(|number| {
                let path = self.folder.join(format!("scheduler-{number}")).join("api-key");
                std::fs::read_to_string(path).ok()
            })?;
            let api = Api::new(&self.http, key.trim());
            let answer = api.call("auth.whoami", &serde_json::json!({})).await.ok()?;
            (answer.status == 200).then_some(api)
        })
        .await
    }

    /// Which scheduler says that it is the active one.
    pub async fn active(&self) -> Option<usize> {
        for (number, address) in self.grpc.iter().enumerate() {
            let asked = crate::serves(address);
            if let Ok(true) = tokio::time::timeout(Duration::from_millis(300), asked).await {
                return Some(number);
            }
        }
        None
    }

    fn start(&self, name: &str, arguments: &[&str]) -> Process {
        let mut variables = vec![("EVALGRID_WORKER_TOKEN", WORKER_TOKEN)];
        // Each role is only told what it may know.
        if arguments.first() == Some(&"scheduler") {
            variables.push(("EVALGRID_ADMIN_TOKEN", ADMIN_TOKEN));
            variables.extend(self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        }
        Process::start(arguments, &variables, &self.folder.join(format!("{name}.log")))
    }
}
