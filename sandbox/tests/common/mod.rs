//! What the tests of all providers share.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, dead_code)]

pub mod dockerd;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use evalgrid_sandbox::*;

/// Everything in these tests ends within this, on a loaded machine too.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The executable with the helpers.
pub fn helper() -> Option<PathBuf> {
    Some(env!("CARGO_BIN_EXE_evalgrid-sandbox-host").into())
}

/// A provider over a folder.
pub type Make = fn(&Path) -> Arc<dyn SandboxProvider>;

/// The providers that need no daemon, as functions of their root.
pub fn makers() -> [(&'static str, Make); 2] {
    [("process", make_process), ("bubblewrap", make_bubblewrap)]
}

pub fn make_process(root: &Path) -> Arc<dyn SandboxProvider> {
    let provider = ProcessProvider::new(root.join("process"), helper()).unwrap();
    Arc::new(provider.with_tools(&root.join("tools")).unwrap())
}

pub fn make_bubblewrap(root: &Path) -> Arc<dyn SandboxProvider> {
    let provider = BubblewrapProvider::new(root.join("bubblewrap"), helper(), BubblewrapOptions::default());
    let provider = provider.expect("bubblewrap must be installed for these tests (Debian: apt-get install bubblewrap)");
    Arc::new(provider.with_tools(&root.join("tools")).unwrap())
}

/// One sandbox with its provider, removed at the end of a test.
pub struct World {
    pub root: tempfile::TempDir,
    pub provider: Arc<dyn SandboxProvider>,
    pub make: Make,
    pub name: String,
}

impl World {
    pub fn new(make: Make, name: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let provider = make(root.path());
        Self {
            root,
            provider,
            make,
            name: name.to_owned(),
        }
    }

    /// `<root>/<name>`.
    pub fn folder(&self) -> PathBuf {
        self.root.path().join(self.provider.name()).join(&self.name)
    }

    pub fn spec(&self) -> SandboxSpec {
        let limits = Limits {
            memory_bytes: 512 << 20,
            pids: 100,
        };
        SandboxSpec {
            name: self.name.clone(),
            token: 5,
            lifetime: Duration::from_secs(300),
            limits,
            base: None,
        }
    }

    pub async fn create(&self) -> Box<dyn Sandbox> {
        self.provider.create(&self.spec()).await.unwrap()
    }

    pub async fn destroy(&self) {
        self.provider.destroy(&self.name).await.unwrap();
        self.provider.destroy(&self.name).await.unwrap();
        assert_eq!(self.provider.list().await.unwrap(), Vec::<String>::new());
        assert!(!self.folder().exists());
    }

    /// The supervisor's process id.
    pub fn supervisor(&self) -> i32 {
        let journal = fs::read_to_string(self.folder().join("journal")).unwrap();
        let made: serde_json::Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
        made["Made"]["supervisor"].as_i64().unwrap() as i32
    }
}

/// A step that runs a bash script.
pub fn bash(step: &str, script: &str) -> StepCommand {
    command(step, &["bash", "-c", script])
}

pub fn command(step: &str, argv: &[&str]) -> StepCommand {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    StepCommand {
        step: step.to_owned(),
        argv,
        env: BTreeMap::new(),
        time_limit: PATIENCE,
    }
}

pub fn stdout(exit: &StepExit) -> String {
    fs::read_to_string(&exit.output.stdout).unwrap()
}

pub fn stderr(exit: &StepExit) -> String {
    fs::read_to_string(&exit.output.stderr).unwrap()
}

/// Waits for a condition.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Processes with `mark` in their environment or arguments, whatever namespace they are in. Ended ones do not count.
pub fn marked(mark: &str) -> BTreeSet<i32> {
    let own = std::process::id() as i32;
    let has_mark = |path: PathBuf| fs::read(path).is_ok_and(|b| b.windows(mark.len()).any(|w| w == mark.as_bytes()));
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| *pid != own && (has_mark(format!("/proc/{pid}/environ").into()) || has_mark(format!("/proc/{pid}/cmdline").into())))
        .collect()
}

/// Control groups of a sandbox.
pub fn cgroups(name: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, wanted: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with(wanted) {
                    found.push(entry.path());
                }
                walk(&entry.path(), wanted, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), &format!("evalgrid-{name}."), &mut found);
    found
}

/// Mounts of this mount namespace that are of or below a folder.
pub fn mounts(folder: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(&*folder.to_string_lossy())).count()
}

/// A server outside that answers every request with as many bytes as its path says, after it has read as many as its header promises.
pub fn server(address: &str) -> u16 {
    use std::io::{BufRead, BufReader, Read, Write};
    let listener = std::net::TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let serve = |stream: std::net::TcpStream| -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let (mut line, mut answer, mut promised) = (String::new(), 0, 0);
        while reader.read_line(&mut line)? > 0 && line != "\r\n" {
            if let Some(path) = line.strip_prefix("GET /") {
                answer = path.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            }
            if let Some(length) = line.strip_prefix("Content-Length: ") {
                promised = length.trim().parse().unwrap_or(0);
            }
            line.clear();
        }
        let read = std::io::copy(&mut reader.take(promised), &mut std::io::sink())?;
        let mut stream = stream;
        write!(stream, "HTTP/1.0 200 OK\r\n\r\nread {read}\n")?;
        stream.write_all(&vec![b'x'; answer])
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // Whoever hangs up early is not the server's business.
            std::thread::spawn(move || serve(stream));
        }
    });
    port
}

/// Names of this machine that lead to itself.
pub fn own_names() -> Vec<String> {
    use std::net::ToSocketAddrs;
    let name = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let is_local = |name: &str| {
        let mut addresses = (name, 0).to_socket_addrs().ok()?.map(|a| a.ip());
        addresses.all(|ip| std::net::UdpSocket::bind((ip, 0)).is_ok()).then_some(())
    };
    let mut names = vec!["localhost".to_owned()];
    names.extend(is_local(&name).map(|()| name));
    names
}

/// Processes whose working folder is `folder` or below.
pub fn working_in(folder: &Path) -> usize {
    let is_process = |e: &fs::DirEntry| e.file_name().to_string_lossy().parse::<i32>().is_ok();
    let is_there = |e: &fs::DirEntry| fs::read_link(e.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter(is_process).filter(is_there).count()
}

/// A network with a list lets the sandbox reach what is on it and nothing else. `make` makes a provider over a folder with a network.
pub async fn check_allowed_network(make: &dyn Fn(&Path, Network) -> Arc<dyn SandboxProvider>) {
    let root = tempfile::tempdir().unwrap();
    let (allowed, other) = (server("0.0.0.0"), server("0.0.0.0"));
    let names = own_names();
    let mut list: Vec<String> = names.iter().map(|name| format!("{name}:{allowed}")).collect();
    // A name that leads nowhere, on a port that only root may take.
    list.push("nowhere.invalid:443".to_owned());
    let network: Network = format!("allow={}", list.join(",")).parse().unwrap();
    let provider = make(root.path(), network.clone());
    let spec = SandboxSpec {
        name: "allowed".into(),
        token: 1,
        lifetime: PATIENCE * 5,
        limits: Limits {
            memory_bytes: 512 << 20,
            pids: 100,
        },
        base: None,
    };
    let sandbox = provider.create(&spec).await.unwrap();
    let ask = |name: &str, port: u16, tail: &str| format!("exec 3<>/dev/tcp/{name}/{port} || exit 9; {tail}");
    let get = |n: usize| format!(r"printf 'GET /{n} HTTP/1.0\r\n\r\n' >&3; tail -c +20 <&3 | wc -c");
    let put = r"{ printf 'GET /0 HTTP/1.0\r\nContent-Length: 3000000\r\n\r\n'; head -c 3000000 /dev/zero; } >&3; tail -c +20 <&3";
    let metadata = ask("169.254.169.254", 80, "echo reached");
    let mut cases = vec![
        (ask("nowhere.invalid", 443, "cat <&3; echo closed"), 0, "closed\n".to_owned()),
        (ask("nowhere.invalid", 80, ""), 9, String::new()),
        (ask("127.0.0.1", other, ""), 9, String::new()),
        (ask("example.com", 443, ""), 9, String::new()),
        ("getent hosts example.com".to_owned(), 2, String::new()),
        (metadata, 9, String::new()),
        (ask("192.0.2.1", 53, ""), 9, String::new()),
        ("tail -n +3 /proc/net/dev | grep -vc ' lo:'".to_owned(), 1, "0\n".to_owned()),
        (
            "grep -h -e CapEff -e CapPrm -e CapAmb /proc/self/status | sort".to_owned(),
            0,
            "CapAmb:\t0000000000000000\nCapEff:\t0000000000000000\nCapPrm:\t0000000000000000\n".to_owned(),
        ),
    ];
    for name in &names {
        cases.push((ask(name, allowed, &get(5_000_000)), 0, "5000007\n".to_owned()));
        cases.push((ask(name, allowed, put), 0, "read 3000000\n".to_owned()));
        cases.push((ask(name, other, ""), 9, String::new()));
    }
    for (i, (script, code, expected)) in cases.iter().enumerate() {
        let exit = sandbox.run(&bash(&format!("ask.{i}"), script)).await.unwrap();
        assert_eq!((exit.code, &stdout(&exit)), (*code, expected), "{script}: {}", stderr(&exit));
    }
    // It goes on without the executor that made it.
    let script = format!(
        "for i in 1 2; do ({}) || exit 8; : > asked.$i; while [ $i = 1 ] && [ ! -e go ]; do sleep 0.02; done; done",
        ask("localhost", allowed, &get(1))
    );
    let step = bash("long", &script);
    let folder = root.path().join(provider.name()).join(&spec.name);
    tokio::select! {
        exit = sandbox.run(&step) => panic!("{exit:?}"),
        () = until("the first answer comes", || folder.join("workspace/asked.1").exists()) => {}
    }
    drop((sandbox, provider));
    let second = make(root.path(), network);
    let sandbox = second.attach(&spec.name, 2).await.unwrap();
    fs::write(folder.join("workspace/go"), "").unwrap();
    let exit = sandbox.run(&step).await.unwrap();
    assert_eq!((exit.code, stdout(&exit).as_str()), (0, "8\n8\n"), "{}", stderr(&exit));
    // Supervisor and gate at least, and then nobody.
    assert!(working_in(&folder) >= 2);
    second.destroy(&spec.name).await.unwrap();
    assert_eq!(working_in(root.path()), 0);
}

/// How providers of tests use the daemon.
pub fn docker_options(root: &Path, dockerd: &dockerd::Dockerd) -> DockerOptions {
    // Each test is an executor of its own.
    let owner = root.file_name().unwrap().to_string_lossy().trim_matches('.').to_owned();
    DockerOptions {
        socket: dockerd.socket.clone(),
        image: DockerImage::Name(dockerd::IMAGE.to_owned()),
        owner,
        network: Network::Off,
        cpus: None,
    }
}

/// A provider of the tests' daemon. To be called on a runtime with several threads.
pub fn make_docker(root: &Path) -> Arc<dyn SandboxProvider> {
    let dockerd = dockerd::dockerd().expect("whoever makes a docker world has asked for the daemon before");
    let open = DockerProvider::open(root.join("docker"), helper(), docker_options(root, dockerd));
    let provider = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(open)).unwrap();
    Arc::new(provider.with_tools(&root.join("tools")).unwrap())
}
