//! The real agents, through the whole product: real command lines in bubblewrap sandboxes, against a model server on loopback that does what the
//! prompts say. What each comes to when its model answers, and when it does not; and what a killed executor costs: nothing.
//!
//! Agents are installed into `~/.cache/evalgrid/tools` (or `EVALGRID_TEST_TOOLS`) by `cargo xtask install`, or by the first test that needs them.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{collections::HashMap, path::PathBuf, time::Duration};

use evalgrid_modelserver::{Mode, ModelServer, usage};
use evalgrid_tests::{
    eventually,
    http::Api,
    leftovers,
    server::{Server, free_address},
    suite,
};
use serde_json::{Value, json};

/// The slowest agent needs half a minute on a busy machine, and the table runs forty of all kinds.
const PATIENCE: Duration = Duration::from_secs(480);

/// (agent, variable of its key, variable of its base URL, whether that ends in `/v1`)
const AGENTS: &[(&str, &str, &str, bool)] = &[
    ("codex", "OPENAI_API_KEY", "OPENAI_BASE_URL", true),
    ("claude", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", false),
    ("gemini", "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL", false),
    ("opencode", "OPENCODE_API_KEY", "OPENCODE_BASE_URL", true),
    ("qwen", "DASHSCOPE_API_KEY", "QWEN_BASE_URL", true),
    ("pi", "PI_API_KEY", "PI_BASE_URL", true),
    ("bub", "BUB_API_KEY", "BUB_API_BASE", true),
];

fn tools() -> PathBuf {
    let named = std::env::var_os("EVALGRID_TEST_TOOLS").map(PathBuf::from);
    named.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/evalgrid/tools"))
}

/// Those that can be had here: bub needs a Python that Debian 12 does not have.
fn agents() -> Vec<&'static str> {
    let here = |name: &&str| {
        let there = *name != "bub"
            || std::fs::read_dir(tools()).is_ok_and(|entries| {
                entries
                    .flatten()
                    .any(|entry| entry.file_name().to_string_lossy().starts_with("bub-"))
            });
        if !there {
            println!("LEFT OUT: {name} is not installed in {} (it needs Python 3.12)", tools().display());
        }
        there
    };
    AGENTS.iter().map(|(name, ..)| *name).filter(here).collect()
}

/// A server whose agents find their models at `base`.
fn server(folder: &std::path::Path, base: &str, slots: u32) -> Server {
    let mut server = Server::new(folder);
    server.executor = vec![
        "--slots".into(),
        slots.to_string(),
        "--tools".into(),
        tools().to_str().unwrap().into(),
    ];
    for (name, key, variable, version) in AGENTS {
        server.variables.push(((*key).into(), key_of(name)));
        let end = if *version { "/v1" } else { "" };
        server.variables.push(((*variable).into(), format!("{base}{end}")));
    }
    server
}

fn key_of(agent: &str) -> String {
    format!("sk-made-up-key-of-{agent}-0123456789")
}

/// One case of the table.
struct Row {
    case: &'static str,
    /// What the person says, turn by turn.
    turns: &'static [&'static str],
    verify: &'static str,
    seconds: u32,
    /// The trial's status, and a part of its failure, by agent; `*` for all others.
    expected: &'static [(&'static str, &'static str, &'static str)],
}

const ANSWERED: &[Row] = &[
    Row {
        case: "ok",
        turns: &["RUN echo hello > hello.txt"],
        verify: "test \"$(cat hello.txt)\" = hello",
        seconds: 240,
        expected: &[("*", "passed", "")],
    },
    Row {
        case: "second-turn",
        turns: &["RUN echo one > hello.txt", "RUN echo two >> hello.txt"],
        verify: "test \"$(cat hello.txt)\" = \"$(printf 'one\\ntwo')\"",
        seconds: 240,
        // gemini holds one turn.
        expected: &[("gemini", "failed", ""), ("*", "passed", "")],
    },
    Row {
        case: "401",
        turns: &["FAULT m401"],
        verify: "true",
        seconds: 120,
        expected: &[("*", "void", "refused the key (401)")],
    },
    Row {
        case: "429",
        turns: &["FAULT m429"],
        verify: "true",
        seconds: 40,
        // qwen tries for 67 s.
        expected: &[("qwen", "void", "ran past its time limit"), ("*", "void", "limits its requests")],
    },
    Row {
        case: "500",
        turns: &["FAULT m500"],
        verify: "true",
        seconds: 40,
        // codex tells of no status; opencode tries for ever, qwen for 90 s.
        expected: &[
            ("codex", "void", "is overloaded"),
            ("opencode", "void", "ran past its time limit"),
            ("qwen", "void", "ran past its time limit"),
            ("*", "void", "failed (500)"),
        ],
    },
    Row {
        case: "cut",
        turns: &["FAULT mcut\nSAY a long answer that is cut in its middle"],
        verify: "true",
        seconds: 40,
        expected: &[
            ("opencode", "void", "ran past its time limit"),
            ("bub", "void", "could not be reached"),
            ("*", "void", "broke off"),
        ],
    },
];

const UNREACHABLE: &[Row] = &[Row {
    case: "unreachable",
    turns: &["SAY nothing"],
    verify: "true",
    seconds: 45,
    expected: &[
        ("codex", "void", "ran past its time limit"),
        ("opencode", "void", "ran past its time limit"),
        ("*", "void", "could not be reached"),
    ],
}];

fn batch(rows: &[Row], agents: &[&str]) -> Value {
    let cases = rows.iter().map(|row| {
        let mut case =
            json!({ "id": row.case, "variables": { "task": row.turns[0] }, "verify": row.verify, "timeoutMs": row.seconds * 1000 });
        if row.turns.len() > 1 {
            case["user"] = json!({ "kind": "scripted", "replies": row.turns[1..] });
        }
        case
    });
    let variants = agents
        .iter()
        .map(|agent| json!({ "harness": agent, "model": "fake-model", "sandbox": "bubblewrap" }));
    json!({ "suite": { "id": "agents", "prompt": "{{ task }}" }, "cases": cases.collect::<Vec<_>>(), "variants": variants.collect::<Vec<_>>(), "trials": 1 })
}

/// (case, agent) and the trial.
fn trials(batch: &Value) -> Vec<(String, String, Value)> {
    let runs = batch["runs"].as_array().unwrap().iter();
    runs.map(|run| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&run["case"]["id"]), text(&run["variant"]["harness"]), run["trials"][0].clone())
    })
    .collect()
}

/// What is not as the table says.
fn compare(rows: &[Row], batch: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    for (case, agent, trial) in trials(batch) {
        let row = rows.iter().find(|row| row.case == case).unwrap();
        let expected = row.expected.iter().find(|(name, ..)| *name == agent || *name == "*").unwrap();
        let (status, failure) = (
            trial["status"].as_str().unwrap_or_default(),
            trial["failure"].as_str().unwrap_or_default(),
        );
        println!("{case:<12}{agent:<10}{status:<8}{failure}");
        if status != expected.1 || !failure.contains(expected.2) {
            wrong.push(format!(
                "{agent} {case}: {status} {failure:?}, and not {} {:?}; {trial:.3000}",
                expected.1, expected.2
            ));
        }
        if !trial.to_string().contains("Done.") && status == "passed" {
            wrong.push(format!("{agent} {case}: no answer in {trial:.3000}"));
        }
        if case == "second-turn" && status == "passed" && !trial.to_string().contains("[turn 2] Done.") {
            wrong.push(format!("{agent}: the second turn does not know the first: {trial:.3000}"));
        }
        if trial.to_string().contains(&key_of(&agent)) {
            wrong.push(format!("{agent} {case}: the key is in the evidence"));
        }
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn what_each_agent_comes_to() {
    let agents = agents();
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let answered = server(folder.path(), &model.url(Mode::Ok), 5);
    let unreachable = server(other.path(), &format!("http://{}", free_address()), 4);
    let mut processes = [answered.serve(), unreachable.serve()];
    let ended = tokio::join!(run(&answered, ANSWERED, &agents), run(&unreachable, UNREACHABLE, &agents));
    let mut wrong = Vec::new();
    for ((server, process), (found, batch)) in [&answered, &unreachable].into_iter().zip(&mut processes).zip([ended.0, ended.1]) {
        wrong.extend(found);
        no_sandbox(&server.folder).await;
        assert_eq!(process.terminate(Duration::from_secs(20)), 0);
        nothing_left(&server.folder, &batch).await;
    }
    println!("{:?}", model.totals());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

async fn run(server: &Server, rows: &[Row], agents: &[&str]) -> (Vec<String>, Value) {
    let api: Api = server.ready().await;
    let id = api.start(&batch(rows, agents)).await;
    let ended = api.ended(&id, PATIENCE).await;
    let mut wrong = compare(rows, &ended);
    for (case, agent, trial) in trials(&ended) {
        // Two requests: the call, and the answer. OpenCode makes one more, for a title, and does not count it.
        let output = trial["usage"]["outputTokens"].as_u64();
        let expected = 2 * usage::OUTPUT + if agent == "gemini" { 2 * usage::REASONING } else { 0 };
        if case == "ok" && output != Some(expected) {
            wrong.push(format!("{agent}: output tokens {output:?}, and not {expected}"));
        }
    }
    (wrong, ended)
}

/// The sandboxes go while their executors still run.
async fn no_sandbox(folder: &std::path::Path) {
    eventually("every sandbox's folder is gone", Duration::from_secs(60), || async {
        let find = std::process::Command::new("find")
            .arg(folder)
            .args(["-name", "trial_*"])
            .output()
            .unwrap();
        find.stdout.is_empty().then_some(())
    })
    .await;
}

/// When all processes of a server have ended, nothing of it is on the machine any more, whatever else runs there.
async fn nothing_left(folder: &std::path::Path, batch: &Value) {
    eventually("no process is left", Duration::from_secs(20), || async {
        leftovers::processes(folder).is_empty().then_some(())
    })
    .await;
    let ids: Vec<&str> = suite::trials(batch).iter().map(|trial| trial["id"].as_str().unwrap()).collect();
    assert!(ids.iter().all(|id| id.starts_with("trial_")), "{ids:?}");
    eventually("no control group is left", Duration::from_secs(20), || async {
        let left = leftovers::groups();
        let ours = left.iter().any(|group| ids.iter().any(|id| group.contains(id)));
        (!ours).then_some(())
    })
    .await;
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(folder.to_str().unwrap()), "a mount is left");
}

/// An executor is killed while codex and claude wait for their model, and while their tool runs: the next one finds both at work. Nothing is
/// lost, and no request to a model is made twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_executor_costs_no_request() {
    let agents = ["codex", "claude"];
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &model.url(Mode::Ok), 4);
    let (mut scheduler, mut front) = (server.scheduler(), server.api());
    let api = server.ready().await;
    let mut executor = server.executor("worker");
    let rows = [Row {
        case: "killed",
        turns: &["WAIT 1500\nRUN sleep 2; echo once >> hello.txt\nRUN echo twice >> hello.txt"],
        verify: "test \"$(cat hello.txt)\" = \"$(printf 'once\\ntwice')\"",
        seconds: 240,
        expected: &[("*", "passed", "")],
    }];
    let id = api.start(&batch(&rows, &agents)).await;
    // At each of the first two steps of both.
    for seen in [2, 4] {
        eventually("the agents are at work", Duration::from_secs(120), || async {
            (model.totals().requests >= seen).then_some(())
        })
        .await;
        executor.kill();
        executor = server.executor("worker");
    }
    let ended = api.ended(&id, PATIENCE).await;
    let wrong = compare(&rows, &ended);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let mut steps: HashMap<(String, String), usize> = HashMap::new();
    for request in model.requests() {
        *steps.entry((request.key, request.prompt_hash)).or_default() += 1;
    }
    assert!(
        steps.values().all(|times| *times == 1),
        "a request was made twice: {:?}",
        model.requests()
    );
    assert_eq!(steps.len(), 3 * agents.len(), "{:?}", model.requests());
    for trial in suite::trials(&ended) {
        assert_eq!(trial["usage"]["outputTokens"], 3 * usage::OUTPUT, "{trial:.2000}");
    }
    no_sandbox(&server.folder).await;
    for process in [&mut executor, &mut front, &mut scheduler] {
        assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    }
    nothing_left(&server.folder, &ended).await;
}
