//! What judges and simulated people cost: no-op trials with none, one and twenty judges, and with a conversation, beside the bare requests to the
//! same model server.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use evalgrid_modelserver::{Mode, ModelServer, Request};
use evalgrid_tests::{http::Bare, judges, server::Server, suite};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::stats::median;

/// Trials at once.
const SLOTS: u32 = 16;
/// Judges and people asked at once.
const AT_ONCE: usize = 16;
/// Per batch: the most that one may have, and three batches of one organization run at once.
const BATCH: usize = 100;
const MOST_TRIALS: usize = 3 * BATCH;
/// The judged output, from an agent that can be talked to.
const RUN: &str =
    r#"printf '{"_tag":"Started","model":"m","sessionId":"one"}\n{"_tag":"Message","role":"assistant","text":"it is four"}\n'"#;
/// What the person says, and when it is quiet.
const REPLIES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(600);

/// What is asked for each trial.
#[derive(Clone, Copy)]
enum Asks {
    Judges(usize),
    Replies,
}

const ROWS: [Asks; 4] = [Asks::Judges(0), Asks::Judges(1), Asks::Judges(20), Asks::Replies];

impl Asks {
    fn name(self) -> String {
        match self {
            Asks::Judges(count) => format!("{count} judges"),
            Asks::Replies => format!("a conversation of {REPLIES} replies"),
        }
    }

    fn per_trial(self) -> usize {
        match self {
            Asks::Judges(count) => count,
            Asks::Replies => REPLIES,
        }
    }

    /// Ten cases of ten trials each. Where judges decide there is no command that does.
    fn batch(self) -> Value {
        let mut batch = suite::command_batch(10, BATCH / 10, "process", RUN, "true");
        for case in batch["cases"].as_array_mut().unwrap() {
            match self {
                Asks::Judges(0) => {}
                Asks::Judges(count) => {
                    let judge = |index| {
                        json!({ "kind": "judge", "name": format!("judge-{index}"), "provider": "openai", "model": "gpt-5",
                            "prompt": "PICK right IF OUTPUT CONTAINS four ELSE wrong", "choices": { "right": 1, "wrong": 0 } })
                    };
                    let judges: Vec<Value> = (0..count).map(judge).collect();
                    let validator = json!({ "kind": "judged", "name": "judged", "checks": [], "judges": judges });
                    *case = json!({ "id": case["id"], "validator": validator });
                }
                Asks::Replies => {
                    case["user"] = json!({ "kind": "simulated", "goal": "The agent is sure.", "prompt": "PERSON: one | two | three" });
                    case["maxTurns"] = json!(REPLIES + 1);
                }
            }
        }
        batch
    }
}

/// Prints a row for each of them.
pub async fn report(folder: &Path, runs: usize, trials: usize) {
    assert!(
        trials.is_multiple_of(BATCH) && (BATCH..=MOST_TRIALS).contains(&trials),
        "whole batches of {BATCH}, at most {MOST_TRIALS} trials"
    );
    println!(
        "\nNo-op trials with judges and people by a model ({trials} trials, {SLOTS} at once, {AT_ONCE} asks at once; median of {runs} runs)"
    );
    println!("asked for each trial | wall time, s | asks/s | server CPU, ms per trial | bare requests, s | bare, requests/s");
    let mut rows: Vec<[Vec<f64>; 3]> = ROWS.iter().map(|_| Default::default()).collect();
    for _ in 0..runs {
        for (row, asks) in rows.iter_mut().zip(ROWS) {
            let figures = measure(folder, asks, trials).await;
            row.iter_mut().zip(figures).for_each(|(all, figure)| all.push(figure));
        }
    }
    for (row, asks) in rows.iter().zip(ROWS) {
        let [wall, cpu, bare] = [&row[0], &row[1], &row[2]].map(|figures| median(figures));
        let (name, cpu_ms) = (asks.name(), cpu * 1000.0 / trials as f64);
        match (trials * asks.per_trial()) as f64 {
            0.0 => println!("{name} | {wall:.2} | | {cpu_ms:.2} | |"),
            requests => println!(
                "{name} | {wall:.2} | {:.0} | {cpu_ms:.2} | {bare:.2} | {:.0}",
                requests / wall,
                requests / bare
            ),
        }
    }
}

/// Seconds until every trial has its verdict, the server's CPU meanwhile, and the seconds of the bare requests.
async fn measure(folder: &Path, asks: Asks, trials: usize) -> [f64; 3] {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let mut server = Server::new(folder.path());
    server.variables = judges::variables(&model.url(Mode::Ok));
    let (slots, at_once) = (SLOTS.to_string(), AT_ONCE.to_string());
    server.executor = ["--slots", &slots, "--enable-process-sandbox", "--judge-slots", &at_once]
        .map(str::to_owned)
        .into();
    let process = server.serve();
    let api = server.ready().await;
    // A first trial warms all of it up.
    let warm = api.start(&suite::command_batch(1, 10, "process", RUN, "true")).await;
    api.ended(&warm, DEADLINE).await;
    let (began, cpu) = (Instant::now(), process.cpu_seconds());
    let mut started = Vec::new();
    for _ in 0..trials / BATCH {
        started.push(api.start(&asks.batch()).await);
    }
    for id in &started {
        // The list is cheap to ask while the batch runs.
        evalgrid_tests::eventually("the batch ends", DEADLINE, || async {
            let page = api.call("evals.batches.list", &json!({ "limit": 4 })).await.ok()?;
            let batches = page.body["batches"].as_array()?;
            let ended = batches
                .iter()
                .any(|batch| batch["id"] == id.as_str() && batch["status"] != "running");
            ended.then_some(())
        })
        .await;
    }
    let (wall, cpu) = (began.elapsed().as_secs_f64(), process.cpu_seconds() - cpu);
    for id in &started {
        let batch = api.batch(id).await.unwrap();
        let passed = suite::trials(&batch).iter().filter(|trial| trial["status"] == "passed").count();
        assert_eq!(passed, BATCH, "every trial passes: {batch:.3000}");
    }
    let requests = model.requests();
    assert_eq!(requests.len(), trials * asks.per_trial(), "each is asked once");
    drop(process);
    [wall, cpu, bare(&model, requests).await]
}

/// Seconds of the same requests with nothing around them, as many at once.
async fn bare(model: &ModelServer, requests: Vec<Request>) -> f64 {
    let (client, requests, next) = (Bare::default(), Arc::new(requests), Arc::new(AtomicUsize::new(0)));
    let origin = format!("http://{}", model.address());
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (client, requests, next, origin) = (client.clone(), requests.clone(), next.clone(), origin.clone());
        tasks.spawn(async move {
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                let url = format!("{origin}{}", request.path);
                let status = client.post(&url, &request.key, request.body.as_bytes().to_vec()).await.unwrap();
                assert_eq!(status, 200);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    began.elapsed().as_secs_f64()
}
