//! Real Redis servers for tests: each in a temporary folder, on free ports of the loopback, ended with the test.
#![allow(clippy::unwrap_used, dead_code)]
#![expect(clippy::disallowed_methods, reason = "it waits for real processes")]

pub mod proxy;

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use evalgrid_store::log::BoxError;
use evalgrid_store::redis::{Followed, Follower, RedisLog, RedisOptions, RedisStore, Tenure};
use evalgrid_store::{Log, LogError, Record, Replay};
use redis::{FromRedisValue, cmd};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long anything may take that takes seconds on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// Polls until `done` gives something.
pub fn wait_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A port below those that the system gives to clients, so that nobody gets it between the look and the server's bind.
pub fn free_port() -> u16 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let seed = NEXT.fetch_add(1, Ordering::Relaxed) + u64::from(std::process::id()) * 131;
    for step in 0..2000 {
        let port = 12_000 + ((seed + step * 37) * 7919 % 18_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

pub struct Server {
    pub port: u16,
    dir: TempDir,
    program: &'static str,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// A server that keeps what it acknowledges, and `arguments`, which may say otherwise.
    pub fn start(arguments: &[&str]) -> Server {
        let mut all = vec![
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
            "--enable-debug-command",
            "yes",
            "--repl-diskless-sync-delay",
            "0",
        ];
        all.extend_from_slice(arguments);
        Server::start_bare("redis-server", &all)
    }

    pub fn start_bare(program: &'static str, arguments: &[&str]) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let mut server = Server {
            port,
            dir,
            program,
            arguments,
            child: None,
        };
        server.restart();
        server
    }

    /// Starts it (again) on the same data.
    pub fn restart(&mut self) {
        // Other servers that speak the same language go through the same tests: `EVALGRID_TEST_REDIS=valkey-server`.
        let program = match std::env::var("EVALGRID_TEST_REDIS") {
            Ok(other) if self.program == "redis-server" => other,
            _ => self.program.to_owned(),
        };
        let log = fs::File::create(self.dir.path().join("output")).unwrap();
        let mut command = Command::new(program);
        if self.program == "redis-sentinel" {
            command.arg(self.dir.path().join("sentinel.conf"));
        }
        command
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--dir"])
            .arg(self.dir.path())
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stderr(log.try_clone().unwrap())
            .stdout(log);
        if self.program == "redis-sentinel" {
            let conf = self.dir.path().join("sentinel.conf");
            if !conf.exists() {
                fs::write(conf, "").unwrap();
            }
        }
        self.child = Some(command.spawn().unwrap());
        wait_for("redis to answer", || {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!(
                    "redis ended with {status}: {}",
                    fs::read_to_string(self.dir.path().join("output")).unwrap()
                );
            }
            self.try_call::<String>(&["PING"]).ok().filter(|pong| pong == "PONG")
        });
    }

    /// As `kill -9` does.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Stops it as it is, or lets it go on.
    pub fn freeze(&self, freeze: bool) {
        let signal = if freeze { Signal::STOP } else { Signal::CONT };
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), signal).unwrap();
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Whether it gives no answer right now.
    pub fn is_stuck(&self) -> bool {
        let client = redis::Client::open(self.url()).unwrap();
        client
            .get_connection_with_timeout(Duration::from_millis(50))
            .and_then(|mut connection| {
                connection.set_read_timeout(Some(Duration::from_millis(50)))?;
                cmd("PING").query::<String>(&mut connection)
            })
            .is_err()
    }

    pub fn try_call<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.url())?;
        let mut connection = client.get_connection_with_timeout(Duration::from_secs(2))?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let mut command = cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut connection)
    }

    pub fn call<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_call(words).unwrap()
    }

    pub fn info(&self, section: &str, field: &str) -> String {
        let info: String = self.call(&["INFO", section]);
        let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_default().to_owned()
    }

    /// Makes it a replica of `master`, and waits until it has caught up.
    pub fn replicate(&self, master: &Server) {
        self.call::<String>(&["REPLICAOF", "127.0.0.1", &master.port.to_string()]);
        wait_for("the replica to catch up", || {
            let up = self.info("replication", "master_link_status") == "up";
            (up && self.info("replication", "slave_repl_offset") == master.info("replication", "master_repl_offset")).then_some(())
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill();
        }
    }
}

/// Three masters that share the slots.
pub struct Cluster(pub Vec<Server>);

impl Cluster {
    pub fn start() -> Cluster {
        let nodes: Vec<Server> = (0..3)
            .map(|_| Server::start(&["--cluster-enabled", "yes", "--cluster-port", &free_port().to_string()]))
            .collect();
        for (index, (first, last)) in [(0, 5460), (5461, 10922), (10923, 16383)].into_iter().enumerate() {
            nodes[index].call::<String>(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        }
        for node in &nodes[1..] {
            let bus: Vec<String> = node.call(&["CONFIG", "GET", "cluster-port"]);
            nodes[0].call::<String>(&["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string(), &bus[1]]);
        }
        for node in &nodes {
            wait_for("the cluster to form", || {
                let info: String = node.call(&["CLUSTER", "INFO"]);
                (info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") && info.contains("cluster_slots_ok:16384"))
                    .then_some(())
            });
        }
        Cluster(nodes)
    }

    pub fn url(&self) -> String {
        let nodes: Vec<String> = self.0.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis-cluster://{}", nodes.join(","))
    }
}

/// A master, a replica, and three sentinels that watch them.
pub struct Sentinels {
    pub servers: Vec<Server>,
    sentinels: Vec<Server>,
}

impl Sentinels {
    pub fn start() -> Sentinels {
        let servers = vec![Server::start(&[]), Server::start(&[])];
        servers[1].replicate(&servers[0]);
        let sentinels: Vec<Server> = (0..3).map(|_| Server::start_bare("redis-sentinel", &[])).collect();
        let port = servers[0].port.to_string();
        for sentinel in &sentinels {
            sentinel.call::<String>(&["SENTINEL", "MONITOR", "cell", "127.0.0.1", &port, "2"]);
            for (option, value) in [("down-after-milliseconds", "1000"), ("failover-timeout", "4000")] {
                sentinel.call::<String>(&["SENTINEL", "SET", "cell", option, value]);
            }
        }
        for sentinel in &sentinels {
            wait_for("the sentinels to meet", || {
                let master: Vec<String> = sentinel.call(&["SENTINEL", "MASTER", "cell"]);
                let field = |name: &str| master.chunks(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
                (field("num-slaves").as_deref() == Some("1") && field("num-other-sentinels").as_deref() == Some("2")).then_some(())
            });
        }
        Sentinels { servers, sentinels }
    }

    pub fn url(&self) -> String {
        let nodes: Vec<String> = self.sentinels.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis-sentinel://{}/cell", nodes.join(","))
    }
}

pub fn store_with(url: &str, cell: &str, options: RedisOptions) -> RedisStore {
    RedisStore::connect(url.parse().unwrap(), cell, options).unwrap()
}

pub fn store(url: &str, cell: &str) -> RedisStore {
    store_with(url, cell, RedisOptions::default())
}

pub fn record(sequence: u64, payload: &str) -> Record {
    Record {
        partition: 1,
        sequence,
        payload: payload.to_owned().into(),
    }
}

/// What a follower was handed: the snapshot's position, and what each position holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub snapshot: Option<u64>,
    pub payloads: Vec<String>,
}

impl Seen {
    pub fn visit(&mut self) -> impl FnMut(Replay<'_>) -> Result<(), BoxError> {
        |replay| {
            match replay {
                Replay::Snapshot(snapshot) => {
                    self.snapshot = Some(snapshot.position);
                    self.payloads.clear();
                }
                Replay::Record(position, record) => {
                    self.payloads.push(String::from_utf8(record.payload.to_vec()).unwrap());
                    assert_eq!(position, self.snapshot.unwrap_or(0) + self.payloads.len() as u64);
                }
            }
            Ok(())
        }
    }
}

/// An owner with what it read.
pub struct Owned {
    pub log: RedisLog,
    pub tenure: Tenure,
    pub seen: Seen,
}

impl Owned {
    /// Appends one record that follows what was read, and says so itself.
    pub fn append(&mut self, payload: &str) -> Result<(), LogError> {
        let sequence = self.seen.payloads.len() as u64 + 1;
        self.log.append(&[record(sequence, payload)])?;
        self.seen.payloads.push(payload.to_owned());
        Ok(())
    }
}

/// Waits until the cell can be taken, past errors that pass, and takes it. Losses on the way are returned, too.
pub fn take(store: &RedisStore) -> (Owned, Vec<Followed>) {
    let mut follower = store.follow();
    take_by(&mut follower, Seen::default())
}

pub fn take_by(follower: &mut Follower, mut seen: Seen) -> (Owned, Vec<Followed>) {
    let mut losses = Vec::new();
    let taken = wait_for("the cell to be free", || match follower.poll(seen.visit()) {
        Ok(followed) if followed.loss.is_some() => {
            losses.push(followed);
            seen = Seen::default();
            None
        }
        Ok(followed) if !followed.free => None,
        Ok(_) => match follower.take("here:1", seen.visit()) {
            Ok(taken) => taken,
            Err(LogError::Redis(error)) if error.passes() => None,
            Err(error) => panic!("{error}"),
        },
        Err(LogError::Redis(error)) if error.passes() => None,
        Err(error) => panic!("{error}"),
    });
    let (log, tenure) = taken;
    (Owned { log, tenure, seen }, losses)
}

/// All that a fresh process reads of the cell.
pub fn read(url: &str, cell: &str) -> Seen {
    let mut seen = Seen::default();
    let followed = store(url, cell).follow().poll(seen.visit()).unwrap();
    assert_eq!(followed.loss, None);
    seen
}
