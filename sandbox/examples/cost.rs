//! What a sandbox costs: create, one `true`, destroy; beside the bare processes. CPU is that of every process started (cpuacct group).
//!
//! `cargo run --release -p evalgrid-sandbox --example cost -- [rounds] [provider] [docker socket] [docker image]`
#![allow(clippy::disallowed_methods)]

use std::{
    fs,
    path::Path,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use evalgrid_sandbox::*;

async fn join_all<T: Send + 'static>(tasks: Vec<impl Future<Output = T> + Send + 'static>) -> Vec<T> {
    let handles: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
    let mut results = Vec::new();
    for handle in handles {
        results.push(handle.await.expect("a task of the measurement panicked"));
    }
    results
}

const GROUP: &str = "/sys/fs/cgroup/cpuacct/evalgrid-cost";

fn cpu_ms() -> f64 {
    let read = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<f64>().ok();
    read(&format!("{GROUP}/cpuacct.usage")).map_or(f64::NAN, |ns| ns / 1e6)
}

async fn trial(provider: &dyn SandboxProvider, name: String) -> [f64; 3] {
    let limits = Limits {
        memory_bytes: 1 << 30,
        pids: 200,
    };
    let spec = SandboxSpec {
        name: name.clone(),
        token: 1,
        lifetime: Duration::from_secs(600),
        limits,
        base: None,
    };
    let step = StepCommand {
        step: "noop".into(),
        argv: vec!["true".into()],
        env: Default::default(),
        time_limit: Duration::from_secs(60),
    };
    let t0 = Instant::now();
    let sandbox = provider.create(&spec).await.expect("create");
    let t1 = Instant::now();
    assert_eq!(sandbox.run(&step).await.expect("run").code, 0);
    let t2 = Instant::now();
    provider.destroy(&name).await.expect("destroy");
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    [ms(t1 - t0), ms(t2 - t1), ms(t2.elapsed())]
}

async fn bare(argv: Vec<String>) -> [f64; 3] {
    let t = Instant::now();
    let mut command = tokio::process::Command::new(&argv[0]);
    command
        .args(&argv[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    assert!(command.output().await.expect("spawn").status.success());
    [0.0, t.elapsed().as_secs_f64() * 1e3, 0.0]
}

/// Runs batches and prints the median times of all, and the CPU of the cheapest batch: what other processes did to the caches is not ours.
async fn batches<F: Future<Output = [f64; 3]> + Send + 'static>(
    label: &str,
    parallel: usize,
    rounds: usize,
    mut one: impl FnMut(String) -> F,
) {
    let mut results = Vec::new();
    let mut cpu = Vec::new();
    for batch in 0..5 {
        let before = cpu_ms();
        let turns = rounds.div_ceil(5 * parallel);
        for turn in 0..turns {
            results.extend(join_all((0..parallel).map(|i| one(format!("r{parallel}-{batch}-{turn}-{i}"))).collect()).await);
        }
        cpu.push((cpu_ms() - before) / (turns * parallel) as f64);
    }
    cpu.sort_by(f64::total_cmp);
    let mut part = |f: fn(&[f64; 3]) -> f64, part: usize| {
        results.sort_by(|a, b| f(a).total_cmp(&f(b)));
        f(&results[(results.len() - 1) * part / 100])
    };
    let (all, create, slow) = (part(|r| r.iter().sum(), 50), part(|r| r[0], 50), part(|r| r[0], 99));
    let (run, destroy) = (part(|r| r[1], 50), part(|r| r[2], 50));
    println!(
        "{label:16} x{parallel:2}: p50 {all:6.2} ms (create {create:6.2}, p99 {slow:6.2}; step {run:6.2}, destroy {destroy:6.2}), CPU each {:6.3} ms (median batch {:6.3})",
        cpu[0], cpu[2]
    );
}

fn main() {
    run_if_helper();
    let _ = fs::create_dir(GROUP);
    if let Err(e) = fs::write(Path::new(GROUP).join("cgroup.procs"), std::process::id().to_string()) {
        eprintln!("CPU cannot be measured: {e}");
    }
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(measure());
    let _ = fs::write("/sys/fs/cgroup/cpuacct/cgroup.procs", std::process::id().to_string());
}

async fn measure() {
    let rounds: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(100);
    let root = std::env::temp_dir().join(format!("evalgrid-cost-{}", std::process::id()));
    let process: Arc<dyn SandboxProvider> = Arc::new(ProcessProvider::new(root.join("p"), None).expect("process"));
    let inner = BubblewrapProvider::new(root.join("b"), None, BubblewrapOptions::default()).expect("bubblewrap");
    println!("{}", inner.enforcement().description);
    let bubblewrap: Arc<dyn SandboxProvider> = Arc::new(inner);
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let bwrap = words(
        "bwrap --unshare-user --unshare-pid --unshare-uts --unshare-ipc --uid 1000 --gid 1000 --as-pid-1 --ro-bind /usr /usr --symlink usr/lib /lib \
         --symlink usr/lib64 /lib64 --symlink usr/bin /bin --proc /proc --dev /dev --tmpfs /tmp --die-with-parent --new-session true",
    );
    let only = std::env::args().nth(2);
    let mut providers = vec![("process", process, words("true")), ("bubblewrap", bubblewrap, bwrap)];
    if let (Some(socket), Some(image)) = (std::env::args().nth(3), std::env::args().nth(4)) {
        let bare = words(&format!("docker -H unix://{socket} run --rm --network none {image} true"));
        let options = DockerOptions {
            socket: socket.into(),
            image: DockerImage::Name(image),
            owner: format!("cost-{}", std::process::id()),
            network: Network::Off,
            cpus: None,
        };
        let docker = DockerProvider::open(root.join("d"), None, options).await.expect("docker");
        providers.push(("docker", Arc::new(docker), bare));
    }
    for parallel in [1, 8, 32] {
        for (label, provider, argv) in &providers {
            if only.as_ref().is_some_and(|o| o != "all" && o != label) {
                continue;
            }
            trial(&**provider, format!("warm-{parallel}")).await;
            let in_sandbox = |name| {
                let provider = provider.clone();
                async move { trial(&*provider, name).await }
            };
            batches(label, parallel, rounds, in_sandbox).await;
            batches(&format!("bare {}", argv[0]), parallel, rounds, |_| bare(argv.clone())).await;
        }
    }
    fs::remove_dir_all(root).expect("clean up");
}
