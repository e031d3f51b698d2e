//! Processes of the real binary, started, killed and started again on the same data folder.

use std::{
    collections::BTreeMap,
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use crate::http::Api;

/// The binary under test: `EVALGRID_BIN`, or the one that cargo built beside this program.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("EVALGRID_BIN") {
        return path.into();
    }
    let this = std::env::current_exe().unwrap();
    let built = this.ancestors().map(|folder| folder.join("evalgrid")).find(|path| path.is_file());
    built.expect("the evalgrid binary is built: run `cargo xtask test`, or set EVALGRID_BIN")
}

/// An address on loopback that nobody listens on, and that nobody gets by chance: below the ports that the system gives out by itself, and
/// never twice to the same process.
pub fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(97);
    loop {
        let port = 10_000 + start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let address = format!("127.0.0.1:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// One running process.
pub struct Process {
    child: Child,
    /// Its standard error, for a person who looks into a failure.
    pub log: PathBuf,
}

impl Process {
    /// Starts the binary with these arguments; its output is appended to `log`.
    pub fn start(arguments: &[&str], variables: &[(&str, &str)], log: &Path) -> Process {
        let out = File::options().create(true).append(true).open(log).unwrap();
        let child = Command::new(binary())
            .args(arguments)
            .envs(variables.iter().copied())
            .env(
                "EVALGRID_LOG",
                std::env::var("EVALGRID_LOG").unwrap_or_else(|_| "warn,evalgrid=info".into()),
            )
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .expect("the evalgrid binary starts");
        Process {
            child,
            log: log.to_owned(),
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it as a power cut would: no warning, no clean-up.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it in the middle of whatever it does, as a hypervisor or a debugger might; [`Process::go_on`] lets it go on.
    pub fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// See [`Process::freeze`].
    pub fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Asks it to stop, and waits.
    pub fn terminate(&mut self, limit: Duration) -> i32 {
        self.signal(rustix::process::Signal::TERM);
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < end, "the process stops within {limit:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// CPU seconds used so far, of this process alone.
    pub fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.pid())
    }

    /// Resident memory now, bytes.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

/// User and system seconds of a process, without its children.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit_once(") ").unwrap().1;
    let fields: Vec<&str> = after_name.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A whole server: one process for all roles, or one for each.
pub struct Server {
    /// Everything lies in here.
    pub folder: PathBuf,
    /// Address of the public API.
    pub http: String,
    /// Address of the scheduler.
    pub grpc: String,
    /// Further arguments of the executor's side.
    pub executor: Vec<String>,
    /// Further arguments of the scheduler's side.
    pub scheduler: Vec<String>,
    /// Further variables.
    pub variables: Vec<(String, String)>,
}

impl Server {
    /// A server that will keep its things in `folder`.
    pub fn new(folder: &Path) -> Server {
        Server {
            folder: folder.to_owned(),
            http: free_address(),
            grpc: free_address(),
            executor: Vec::new(),
            scheduler: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// The data folder.
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// All roles in one process.
    pub fn serve(&self) -> Process {
        let data = self.data();
        let mut arguments = vec![
            "serve",
            "--data",
            data.to_str().unwrap(),
            "--http",
            &self.http,
            "--grpc",
            &self.grpc,
        ];
        arguments.extend(self.scheduler.iter().chain(&self.executor).map(String::as_str));
        self.start(&arguments)
    }

    /// The scheduler alone.
    pub fn scheduler(&self) -> Process {
        let data = self.data();
        let mut arguments = vec!["scheduler", "--data", data.to_str().unwrap(), "--grpc", &self.grpc];
        arguments.extend(self.scheduler.iter().map(String::as_str));
        self.start(&arguments)
    }

    /// The API alone.
    pub fn api(&self) -> Process {
        let scheduler = format!("http://{}", self.grpc);
        self.start(&["api", "--http", &self.http, "--scheduler", &scheduler])
    }

    /// An executor alone, in a work folder of this name.
    pub fn executor(&self, name: &str) -> Process {
        self.worker("executor", name, &self.executor)
    }

    /// A judge runner alone, in a work folder of this name.
    pub fn judge_runner(&self, name: &str) -> Process {
        self.worker("judge-runner", name, &[])
    }

    fn worker(&self, role: &str, name: &str, further: &[String]) -> Process {
        let scheduler = format!("http://{}", self.grpc);
        let work = self.folder.join(name);
        let data = self.data();
        let mut arguments = vec![
            role,
            "--work",
            work.to_str().unwrap(),
            "--scheduler",
            &scheduler,
            "--data",
            data.to_str().unwrap(),
        ];
        arguments.extend(further.iter().map(String::as_str));
        self.start(&arguments)
    }

    fn start(&self, arguments: &[&str]) -> Process {
        let variables: Vec<(&str, &str)> = self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Process::start(arguments, &variables, &self.folder.join("evalgrid.log"))
    }

    /// How often each job of a judge runner was answered, as far as the log goes back. Nobody may be writing it.
    pub fn answers(&self) -> BTreeMap<String, usize> {
        let dump = Command::new(binary())
            .args(["log", "dump", "--data"])
            .arg(self.data())
            .output()
            .unwrap();
        assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        let mut answers = BTreeMap::new();
        for line in String::from_utf8(dump.stdout).unwrap().lines() {
            let event: serde_json::Value = serde_json::from_str(line).unwrap();
            if event["kind"] == "JobAnswered" {
                *answers.entry(event["job"].to_string()).or_default() += 1;
            }
        }
        answers
    }

    /// Waits until the scheduler answers and the first key is there.
    pub async fn ready(&self) -> Api {
        let key = self.data().join("api-key");
        crate::eventually("the server answers", Duration::from_secs(20), || async {
            let secret = std::fs::read_to_string(&key).ok()?;
            let api = Api::new(&self.http, secret.trim());
            let answer = api.call("auth.whoami", &serde_json::json!({})).await.ok()?;
            (answer.status == 200).then_some(api)
        })
        .await
    }

    /// The secret in one of the data folder's files.
    pub fn secret(&self, name: &str) -> String {
        std::fs::read_to_string(self.data().join(name)).unwrap().trim().to_owned()
    }

    /// A key of a (new) organization, through the operator's service.
    pub async fn key(&self, organization: &str) -> String {
        use evalgrid_proto::v1::{CreateKeyRequest, admin_client::AdminClient};
        let mut client = AdminClient::connect(format!("http://{}", self.grpc)).await.unwrap();
        let mut request = tonic::Request::new(CreateKeyRequest {
            organization: organization.into(),
            ..Default::default()
        });
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {}", self.secret("admin-token")).parse().unwrap());
        client.create_key(request).await.unwrap().into_inner().secret
    }
}
