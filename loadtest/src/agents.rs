//! A real agent, codex, against a model server on loopback: trials per minute beside the same program started bare, and the memory that a
//! running trial takes.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use evalgrid_harness::Install;
use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::server::Server;
use serde_json::{Value, json};

use crate::{machine, stats::median};

const KEY: &str = "sk-loopback-0000000000000001";
const MODEL: &str = "gpt-5.5";
const PROMPT: &str = "Do this:\nRUN echo hello > hello.txt\n";
const VERIFY: &str = "test \"$(cat hello.txt)\" = hello";
/// Two calls of the model and one command take codex a few seconds of a busy machine.
const BATCH_DEADLINE: Duration = Duration::from_secs(900);
/// How long each agent of the memory run waits for its model: longer than it takes to start them all.
const WAIT_MS: u64 = 30_000;

/// Prints a row per number of slots, and what running trials hold in memory.
pub async fn report(folder: &Path, runs: usize, tools: &Path, slots: &[u32], trials: usize) {
    let models = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let base = models.url(Mode::Ok);
    let install = evalgrid_harness::by_name("codex").and_then(|codex| codex.install()).unwrap();
    println!(
        "\nReal {} {} against a model server on loopback ({trials} trials; median of {runs} runs)",
        install.name, install.version
    );
    println!("slots | bare, runs/min | process, trials/min | of the bare | bubblewrap, trials/min | of the bare");
    let program = program(tools, install, folder).await;
    for &at_once in slots {
        let mut figures: [Vec<f64>; 3] = Default::default();
        for _ in 0..runs {
            figures[0].push(bare(folder, &program, &base, at_once, trials));
            figures[1].push(measure(folder, tools, &base, at_once, trials, "process").await);
            figures[2].push(measure(folder, tools, &base, at_once, trials, "bubblewrap").await);
        }
        let [bare, process, bubblewrap] = figures.map(|figures| median(&figures));
        println!(
            "{at_once} | {bare:.1} | {process:.1} | {:.0} % | {bubblewrap:.1} | {:.0} %",
            100.0 * process / bare,
            100.0 * bubblewrap / bare
        );
    }
    memory(folder, tools, &base).await;
}

/// The agent's program; a first trial installs it where it is not there yet.
async fn program(tools: &Path, install: &Install, folder: &Path) -> PathBuf {
    let program = tools.join(install.folder()).join(install.program);
    if !program.exists() {
        let status = Command::new(evalgrid_tests::server::binary())
            .args(["harness", "install", install.name, "--tools"])
            .arg(tools)
            .arg("--data")
            .arg(folder)
            .status()
            .unwrap();
        assert!(status.success(), "{} can be installed", install.name);
    }
    program
}

/// Runs per minute of the program alone, each with a HOME and a folder of its own.
fn bare(folder: &Path, program: &Path, base: &str, at_once: u32, runs: usize) -> f64 {
    let next = AtomicUsize::new(0);
    let provider = format!("model_providers.loop={{name=\"loop\",base_url=\"{base}/v1\",env_key=\"KEY\",wire_api=\"responses\"}}");
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < runs {
                    let home = tempfile::tempdir_in(folder).unwrap();
                    let workspace = home.path().join("workspace");
                    fs::create_dir(&workspace).unwrap();
                    let status = Command::new(program)
                        .args([
                            "exec",
                            "--json",
                            "--skip-git-repo-check",
                            "--dangerously-bypass-approvals-and-sandbox",
                            "-m",
                            MODEL,
                        ])
                        .args(["-c", "model_provider=\"loop\"", "-c", &provider, "-C"])
                        .arg(&workspace)
                        .arg(PROMPT)
                        .env_clear()
                        .envs([("PATH", "/usr/local/bin:/usr/bin:/bin"), ("KEY", KEY)])
                        .env("HOME", home.path())
                        .env("CODEX_HOME", home.path())
                        .stdin(Stdio::null())
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .status()
                        .unwrap();
                    assert!(status.success() && workspace.join("hello.txt").exists(), "the agent does its work");
                }
            });
        }
    });
    runs as f64 * 60.0 / began.elapsed().as_secs_f64()
}

fn server(folder: &Path, tools: &Path, base: &str, slots: u32) -> Server {
    let mut server = Server::new(folder);
    let tools = tools.to_str().unwrap().to_owned();
    server.executor = vec![
        "--slots".into(),
        slots.to_string(),
        "--enable-process-sandbox".into(),
        "--tools".into(),
        tools,
    ];
    server.variables = vec![
        ("OPENAI_API_KEY".into(), KEY.into()),
        ("OPENAI_BASE_URL".into(), format!("{base}/v1")),
    ];
    server
}

fn request(sandbox: &str, cases: usize, prompt: &str, verify: &str) -> Value {
    let cases: Vec<Value> = (0..cases)
        .map(|index| json!({"id": format!("case-{index}"), "verify": verify}))
        .collect();
    json!({
        "suite": {"id": "agents", "prompt": prompt},
        "cases": cases,
        "variants": [{"harness": "codex", "model": MODEL, "sandbox": sandbox}],
        "trials": 1,
    })
}

async fn measure(folder: &Path, tools: &Path, base: &str, slots: u32, trials: usize, sandbox: &str) -> f64 {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = server(folder.path(), tools, base, slots);
    let _process = server.serve();
    let api = server.ready().await;
    // A first trial warms the page cache up.
    let warm = api.start(&request(sandbox, 1, PROMPT, VERIFY)).await;
    api.ended(&warm, BATCH_DEADLINE).await;
    let began = Instant::now();
    let id = api.start(&request(sandbox, trials, PROMPT, VERIFY)).await;
    let batch = api.ended(&id, BATCH_DEADLINE).await;
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let passed = evalgrid_tests::suite::trials(&batch)
        .iter()
        .filter(|trial| trial["status"] == "passed")
        .count();
    assert_eq!(passed, trials, "every trial passes: {batch}");
    passed as f64 / minutes
}

/// What trials hold while their agents wait for the model: ours, and the agents' own.
async fn memory(folder: &Path, tools: &Path, base: &str) {
    const TRIALS: usize = 8;
    let folder = tempfile::tempdir_in(folder).unwrap();
    let server = server(folder.path(), tools, base, TRIALS as u32);
    let process = server.serve();
    let api = server.ready().await;
    let idle = machine::memory(process.pid());
    let prompt = format!("WAIT {WAIT_MS}\nSAY done");
    let id = api.start(&request("bubblewrap", TRIALS, &prompt, "true")).await;
    let mut most: BTreeMap<&str, u64> = BTreeMap::new();
    let end = Instant::now() + Duration::from_millis(WAIT_MS);
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(500)).await;
        for (whose, bytes) in machine::memory(process.pid()) {
            let known = most.entry(whose).or_default();
            *known = (*known).max(bytes);
        }
    }
    api.ended(&id, BATCH_DEADLINE).await;
    let each = |whose: &str| {
        let before = idle.get(whose).copied().unwrap_or(0);
        most.get(whose).copied().unwrap_or(0).saturating_sub(before) as f64 / TRIALS as f64 / 1e6
    };
    println!("\nMemory per running trial, proportional shares ({TRIALS} on bubblewrap, each waiting for its model)");
    println!(
        "Evalgrid (server, supervisor, init) {:.1} MB; bubblewrap {:.1} MB; the agent {:.1} MB",
        each("evalgrid"),
        each("bwrap"),
        each("agent")
    );
}
