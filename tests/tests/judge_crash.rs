//! `kill -9` while judges are asked: each is asked twice at most, and judges once, whoever is killed.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` chooses one.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{path::Path, time::Duration};

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{
    agents, eventually,
    http::Api,
    judges::{MAX_ASKS, STOPPED, asks},
    server::{Process, Server},
    suite,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

/// However often it is interrupted.
const PATIENCE: Duration = Duration::from_secs(120);
const KILLS: u32 = 8;

const AGENT: &str =
    r#"printf '{"_tag":"Started","model":"m","sessionId":"one"}\n{"_tag":"Message","role":"assistant","text":"it is four"}\n'"#;

/// A case for each fault of its judge.
fn batch(faults: &[String]) -> Value {
    let cases = faults.iter().enumerate().map(|(index, fault)| {
        let prompt = format!("PICK right IF OUTPUT CONTAINS four ELSE wrong\nFAULT {fault}");
        let judge = json!({ "kind": "judge", "name": "right", "provider": "openai", "model": "gpt-5", "prompt": prompt,
            "choices": { "right": 1, "wrong": 0 } });
        json!({ "id": format!("case-{index}"), "validator": { "kind": "judged", "name": "judged", "checks": [], "judges": [judge] } })
    });
    json!({
        "suite": { "id": "crash", "prompt": "How much is two and two?" },
        "cases": cases.collect::<Vec<_>>(),
        "variants": [{ "harness": "command", "model": "none", "sandbox": "bubblewrap",
            "profile": { "name": "answers", "files": {}, "run": AGENT } }],
        "trials": 1,
    })
}

/// All roles, each in a process of its own.
struct Roles {
    scheduler: Process,
    _api: Process,
    _executor: Process,
    judge_runner: Process,
}

impl Roles {
    async fn start(server: &Server) -> (Roles, Api) {
        let (scheduler, api) = (server.scheduler(), server.api());
        let client = server.ready().await;
        let roles = Roles {
            scheduler,
            _api: api,
            _executor: server.executor("executor"),
            judge_runner: server.judge_runner("judges"),
        };
        (roles, client)
    }
}

fn rig(folder: &Path, model: &ModelServer) -> Server {
    let mut server = agents::server(folder, &model.url(Mode::Ok), 8);
    server.scheduler = ["--lease", "5s"].map(str::to_owned).into();
    server
}

/// One answer for each of so many jobs, of which none was asked more often than that.
fn check(server: &Server, model: &ModelServer, jobs: usize, most: usize) {
    let (asks, answers) = (asks(model), server.answers());
    println!("asks {asks:?}\nanswers {answers:?}");
    assert!(asks.len() <= jobs && asks.values().all(|times| *times <= most), "{asks:?}");
    assert!(answers.len() == jobs && answers.values().all(|times| *times == 1), "{answers:?}");
}

/// A trial of which all asks were lost is void, and says so; all others have the verdict of their judge.
fn check_trials(batch: &Value, lost: impl Fn(usize) -> bool) {
    assert_eq!(batch["status"], "finished", "{batch}");
    for (index, trial) in suite::trials(batch).into_iter().enumerate() {
        match trial["failure"].as_str() {
            Some(failure) => {
                let expected = format!("The judge right gave no judgment: {STOPPED}");
                assert!(lost(index) && trial["status"] == "void" && failure == expected, "{trial}");
            }
            None => assert!(trial["status"] == "passed", "{trial}"),
        }
    }
}

/// catalogue J2: killed while the request is open: asked once more. Killed again: never a third time.
#[tokio::test(flavor = "multi_thread")]
async fn a_judge_runner_that_is_killed_while_it_asks() {
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = rig(folder.path(), &model);
    let (mut roles, api) = Roles::start(&server).await;
    let id = api.start(&batch(&["mfirst1-mhang", "mhang"].map(str::to_owned))).await;
    for seen in [2, 4] {
        eventually("the judges are asked", PATIENCE, || async {
            (model.totals().requests >= seen).then_some(())
        })
        .await;
        if seen == 4 {
            // The one that answers this time has its verdict, before the next blow.
            eventually("one trial is judged", PATIENCE, || async {
                let batch = api.batch(&id).await.ok()?;
                suite::trials(&batch).iter().any(|trial| trial["status"] == "passed").then_some(())
            })
            .await;
        }
        roles.judge_runner.kill();
        roles.judge_runner = server.judge_runner("judges");
    }
    let ended = api.ended(&id, PATIENCE).await;
    check_trials(&ended, |index| index == 1);
    assert_eq!(suite::trials(&ended)[1]["status"], "void");
    assert_eq!(model.totals().requests, 4);
    drop(roles);
    check(&server, &model, 2, MAX_ASKS);
}

/// Kills at seeded moments, by `kill`, while judges that take their time are asked: each of them no more often than `most`.
async fn killed_at_any_time(seed: u64, most: usize, kill: impl Fn(&mut Roles, &Server, &mut StdRng)) {
    let seed = std::env::var("EVALGRID_SEED").map_or(seed, |seed| seed.parse().unwrap());
    println!("EVALGRID_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = rig(folder.path(), &model);
    let (mut roles, api) = Roles::start(&server).await;
    let waits: Vec<String> = (0..24).map(|_| format!("mwait{}", rng.random_range(1..4_000))).collect();
    let id = api.start(&batch(&waits)).await;
    eventually("a judge is asked", PATIENCE, || async {
        (model.totals().requests > 0).then_some(())
    })
    .await;
    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(rng.random_range(1..700))).await;
        kill(&mut roles, &server, &mut rng);
    }
    let ended = api.ended(&id, PATIENCE).await;
    let asked = asks(&model);
    check_trials(&ended, |_| true);
    // Whoever has answered is not asked again, however often all of them start anew.
    drop(roles);
    check(&server, &model, waits.len(), most);
    let (mut roles, api) = Roles::start(&server).await;
    assert_eq!(api.ended(&id, PATIENCE).await["status"], "finished");
    roles.judge_runner.kill();
    roles.scheduler.kill();
    assert_eq!(asks(&model), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_judge_runner_that_is_killed_at_any_time() {
    killed_at_any_time(1, MAX_ASKS, |roles, server, _| {
        roles.judge_runner.kill();
        roles.judge_runner = server.judge_runner("judges");
    })
    .await;
}

/// catalogue 1, 23: the judge runner lives, keeps its jobs, and tells the next scheduler what came of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_scheduler_that_is_killed_at_any_time() {
    killed_at_any_time(2, 1, |roles, server, _| {
        roles.scheduler.kill();
        roles.scheduler = server.scheduler();
    })
    .await;
}

/// catalogue J1: whoever has answered has.
#[tokio::test(flavor = "multi_thread")]
async fn both_killed_at_any_time() {
    killed_at_any_time(3, MAX_ASKS, |roles, server, rng| {
        roles.scheduler.kill();
        if rng.random_bool(0.7) {
            roles.judge_runner.kill();
            roles.judge_runner = server.judge_runner("judges");
        }
        roles.scheduler = server.scheduler();
    })
    .await;
}
