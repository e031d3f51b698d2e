//! What the set-up of a trial with a large checkout costs: cloned, mounted from a base, copied from a base. Then the first `git status`, and the
//! end. CPU is that of every process started (cpuacct group).
//!
//! `cargo run --release -p evalgrid-sandbox --example bases -- [megabytes] [rounds]`
#![allow(clippy::disallowed_methods)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use evalgrid_sandbox::*;

const GROUP: &str = "/sys/fs/cgroup/cpuacct/evalgrid-bases";
/// Of the repository, each of its own content.
const FILE_BYTES: usize = 20 << 10;

fn cpu_ms() -> f64 {
    let used = fs::read_to_string(format!("{GROUP}/cpuacct.usage")).ok();
    used.and_then(|ns| ns.trim().parse::<f64>().ok()).map_or(f64::NAN, |ns| ns / 1e6)
}

/// A repository of so many megabytes that do not compress well.
fn repository(folder: &Path, megabytes: usize) {
    let mut state = 1u64;
    for number in 0..(megabytes << 20) / FILE_BYTES {
        let path = folder.join(format!("{}/{}", number % 100, number));
        let mut text = String::with_capacity(FILE_BYTES + 16);
        while text.len() < FILE_BYTES {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            text.push_str(&format!("{state:016x}\n"));
        }
        let parent = path.parent().expect("below the folder");
        fs::create_dir_all(parent).expect("a folder");
        fs::write(path, text).expect("a file");
    }
    let script = "git init -q . && git add . && git -c user.name=t -c user.email=t@example.com commit -q -m t";
    assert!(
        Command::new("bash")
            .args(["-c", script])
            .current_dir(folder)
            .status()
            .expect("git")
            .success()
    );
}

async fn run(sandbox: &dyn Sandbox, step: &str, script: String) {
    let command = StepCommand {
        step: step.to_owned(),
        argv: vec!["bash".into(), "-c".into(), script],
        env: Default::default(),
        time_limit: Duration::from_secs(600),
    };
    assert_eq!(sandbox.run(&command).await.expect("run").code, 0, "{step}");
}

/// Milliseconds and milliseconds of CPU since `start`.
fn since(start: (Instant, f64)) -> [f64; 2] {
    [start.0.elapsed().as_secs_f64() * 1e3, cpu_ms() - start.1]
}

async fn trial(provider: &ProcessProvider, name: &str, base: Option<&Path>, origin: &Path, save: Option<&Path>) -> [[f64; 2]; 4] {
    let now = || (Instant::now(), cpu_ms());
    let spec = SandboxSpec {
        name: name.to_owned(),
        token: 1,
        lifetime: Duration::from_secs(600),
        limits: Limits {
            memory_bytes: 4 << 30,
            pids: 200,
        },
        base: base.map(Path::to_owned),
    };
    let start = now();
    let sandbox = provider.create(&spec).await.expect("create");
    if base.is_none() {
        run(
            sandbox.as_ref(),
            "source",
            format!("git clone --quiet file://{} .", origin.display()),
        )
        .await;
    }
    let set_up = since(start);
    let start = now();
    if let Some(folder) = save {
        sandbox.save_base(folder, &[], u64::MAX).await.expect("save");
    }
    let saved = since(start);
    let start = now();
    run(sandbox.as_ref(), "status", "test -z \"$(git status --porcelain)\"".to_owned()).await;
    let status = since(start);
    let start = now();
    provider.destroy(name).await.expect("destroy");
    [set_up, saved, status, since(start)]
}

fn main() {
    run_if_helper();
    let _ = fs::create_dir(GROUP);
    if let Err(e) = fs::write(Path::new(GROUP).join("cgroup.procs"), std::process::id().to_string()) {
        eprintln!("CPU cannot be measured: {e}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(measure());
    let _ = fs::write("/sys/fs/cgroup/cpuacct/cgroup.procs", std::process::id().to_string());
}

async fn measure() {
    let argument = |n: usize, default: usize| std::env::args().nth(n).and_then(|text| text.parse().ok()).unwrap_or(default);
    let (megabytes, rounds) = (argument(1, 200), argument(2, 5));
    let root: PathBuf = std::env::temp_dir().join(format!("evalgrid-bases-{}", std::process::id()));
    let origin = root.join("origin");
    fs::create_dir_all(&origin).expect("a folder");
    repository(&origin, megabytes);
    let mounting = ProcessProvider::new(root.join("mounting"), None).expect("process");
    let copying = ProcessProvider::new(root.join("copying"), None)
        .expect("process")
        .with_copied_bases();
    let bases = root.join("bases");
    fs::create_dir(&bases).expect("a folder");
    spread(&bases);
    let base = bases.join("base");
    trial(&mounting, "first", None, &origin, Some(&base)).await;
    for (label, provider, from, save) in [
        ("cloned", &mounting, None, false),
        ("cloned and saved", &mounting, None, true),
        ("from a base", &mounting, Some(base.as_path()), false),
        ("from a copied base", &copying, Some(base.as_path()), false),
    ] {
        let mut results = Vec::new();
        // Each sandbox has a name of its own: ext4 places folders by their names, and would search past what the last one's had.
        for round in 0..rounds {
            let saved = bases.join(format!("saved-{round}"));
            results.push(
                trial(
                    provider,
                    &format!("{}-{round}", label.replace(' ', "-")),
                    from,
                    &origin,
                    save.then_some(saved.as_path()),
                )
                .await,
            );
            let _ = fs::remove_dir_all(saved);
        }
        let median = |part: usize, what: usize| {
            let mut all: Vec<f64> = results.iter().map(|result| result[part][what]).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let shown: Vec<_> = ["set-up", "save", "git status", "destroy"]
            .iter()
            .enumerate()
            .map(|(part, name)| format!("{name} {:.0} ms ({:.0} CPU)", median(part, 0), median(part, 1)))
            .collect();
        println!("{label:18}: {}", shown.join(", "));
    }
    let _ = remove_tree(&root);
}
