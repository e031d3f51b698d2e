//! A minute of trouble, for a server on one machine, and for a cell of three schedulers over a Redis with four executors: whatever is killed,
//! stopped or cut in whatever order, each trial has one verdict, nothing ran twice, and what was answered stays true. Some of the trials are judged,
//! and some talk to a person, by a model that counts its asks: no job asks more than twice.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` chooses one; `EVALGRID_LONG=1` goes on for an hour instead of a minute.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{
    cell::{Cell, Redis},
    counter::Counter,
    http::Api,
    judges::{self, MAX_ASKS, STOPPED},
    server::{Process, Server},
    suite,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const SCHEDULERS: usize = 3;
const EXECUTORS: usize = 4;
const JUDGE_RUNNERS: usize = 2;
/// However often it is interrupted.
const PATIENCE: Duration = Duration::from_secs(300);
/// Batches at once: the limit of an organization.
const BATCHES: usize = 3;

fn duration() -> Duration {
    let minutes = if std::env::var_os("EVALGRID_LONG").is_some() { 60 } else { 1 };
    Duration::from_secs(60 * minutes)
}

/// Cases, of two trials each: two that are judged, one with a person, and two with neither.
const CASES: usize = 5;
/// By case: how its trials end unless both asks of a job were lost.
const EXPECTED: [&str; CASES] = ["passed", "failed", "passed", "passed", "passed"];
/// By case: what its judge picks.
const PICKED: [Option<&str>; CASES] = [Some("right"), Some("wrong"), None, None, None];
const WITH_PERSON: usize = 2;
/// What the person says before it has nothing to say any more.
const REPLY: &str = "more";
/// How long the model thinks: now and then, somebody is killed meanwhile.
const THINKS_MS: u32 = 100;

/// Ten trials whose every step tells the counter that it ran.
fn batch(counter: &Counter) -> Value {
    let install = format!(
        "cat /proc/sys/kernel/random/uuid > ~/name; {}",
        counter.report("install $(cat ~/name)")
    );
    // What the person says is part of what is told: each turn is another one.
    let run = format!(
        "{}; sleep 0.7; echo done > done; {}; {}",
        counter.report("begin $(cat ~/name) $SPHYNX_PROMPT"),
        r#"printf '{"_tag":"Started","model":"m","sessionId":"one"}\n{"_tag":"Message","role":"assistant","text":"it is four"}\n'"#,
        counter.report("end $(cat ~/name) $SPHYNX_PROMPT"),
    );
    let verify = format!("{} && test \"$(cat done)\" = done", counter.report("check $(cat ~/name)"));
    let mut batch = suite::command_batch(CASES, 2, "process", &run, &verify);
    batch["variants"][0]["profile"]["install"] = json!(install);
    for (index, said) in [(0, "four"), (1, "five")] {
        let judge = json!({ "kind": "judge", "name": "right", "provider": "openai", "model": "gpt-5", "choices": { "right": 1, "wrong": 0 },
            "prompt": format!("PICK right IF OUTPUT CONTAINS {said} ELSE wrong\nWAIT {THINKS_MS}") });
        let validator = json!({ "kind": "judged", "name": "judged", "checks": [], "judges": [judge] });
        batch["cases"][index] = json!({ "id": format!("case-{index}"), "validator": validator });
    }
    batch["cases"][WITH_PERSON]["user"] = json!({ "kind": "simulated", "goal": "It is done.",
        "prompt": format!("PERSON: {REPLY} | <<DONE>>\nWAIT {THINKS_MS}") });
    batch
}

/// Starts a batch under a key until it is told which one it is: however often the answer gets lost, it is one batch.
async fn start(api: &Api, body: &Value, key: &str) -> String {
    evalgrid_tests::eventually("the batch is started", PATIENCE, || async {
        let headers = [("idempotency-key", key), ("content-type", "application/json")];
        let answer = api
            .send("evals.batches.start", body.to_string().into_bytes(), &headers)
            .await
            .ok()?;
        assert!(matches!(answer.status, 200 | 409 | 500..=599), "{} {}", answer.status, answer.body);
        (answer.status == 200).then(|| answer.body["id"].as_str().unwrap().to_owned())
    })
    .await
}

fn signal(process: &Process, signal: Signal) {
    let pid = Pid::from_raw(process.pid() as i32).unwrap();
    kill_process(pid, signal).unwrap();
}

struct Trouble {
    rng: StdRng,
    redis: Redis,
    schedulers: Vec<Process>,
    executors: Vec<Process>,
    judge_runners: Vec<Process>,
    done: HashMap<&'static str, u32>,
}

impl Trouble {
    async fn make(&mut self, cell: &Cell) {
        let pause = Duration::from_millis(self.rng.random_range(10..1500));
        tokio::time::sleep(pause).await;
        let what = match self.rng.random_range(0..100) {
            0..22 => {
                let number = cell.active().await.unwrap_or(0);
                self.schedulers[number].kill();
                self.schedulers[number] = cell.scheduler(number);
                "kill -9 of the active scheduler"
            }
            22..34 => {
                let number = self.rng.random_range(0..SCHEDULERS);
                self.schedulers[number].kill();
                self.schedulers[number] = cell.scheduler(number);
                "kill -9 of a scheduler"
            }
            34..50 => {
                let number = self.rng.random_range(0..EXECUTORS);
                self.executors[number].kill();
                self.executors[number] = cell.executor(number);
                "kill -9 of an executor"
            }
            50..58 => {
                let number = self.rng.random_range(0..JUDGE_RUNNERS);
                self.judge_runners[number].kill();
                self.judge_runners[number] = cell.judge_runner(number);
                "kill -9 of a judge runner"
            }
            58..68 => {
                self.redis.kill();
                tokio::time::sleep(Duration::from_millis(self.rng.random_range(0..800))).await;
                self.redis.again();
                "kill -9 of Redis"
            }
            68..74 => {
                // catalogue 19, 31, 33: asleep past its lease, it wakes and writes and answers nothing.
                let number = cell.active().await.unwrap_or(0);
                signal(&self.schedulers[number], Signal::STOP);
                tokio::time::sleep(Duration::from_secs(4)).await;
                signal(&self.schedulers[number], Signal::CONT);
                "SIGSTOP of the active scheduler past its lease"
            }
            74..77 => {
                // It may have asked, and then answers under a lease that has ended.
                let number = self.rng.random_range(0..JUDGE_RUNNERS);
                signal(&self.judge_runners[number], Signal::STOP);
                tokio::time::sleep(Duration::from_secs(7)).await;
                signal(&self.judge_runners[number], Signal::CONT);
                "SIGSTOP of a judge runner past its lease"
            }
            77..83 => {
                self.redis.command(&["CLIENT", "KILL", "TYPE", "normal"]);
                "every connection to Redis cut"
            }
            83..89 => {
                let milliseconds = self.rng.random_range(100..3000).to_string();
                self.redis.command(&["CLIENT", "PAUSE", &milliseconds, "ALL"]);
                "CLIENT PAUSE"
            }
            89..94 => {
                self.redis.command(&["SCRIPT", "FLUSH"]);
                "SCRIPT FLUSH"
            }
            _ => {
                let seconds = format!("{:.1}", self.rng.random_range(0.1..3.0));
                self.redis.command(&["DEBUG", "SLEEP", &seconds]);
                "DEBUG SLEEP"
            }
        };
        *self.done.entry(what).or_default() += 1;
    }
}

/// Batches under a client's key, as they ended.
type Ended = Vec<(String, String, Value)>;

/// Clients that each start a batch, wait for its end, and start the next, until `end`.
fn clients(api: &Api, counter: &Counter, end: Instant) -> Vec<tokio::task::JoinHandle<Ended>> {
    let client = |client: usize| {
        let (api, body) = (api.clone(), batch(counter));
        async move {
            let mut ended = Vec::new();
            while ended.is_empty() || Instant::now() < end {
                let key = format!("client-{client}-{}", ended.len());
                let id = start(&api, &body, &key).await;
                ended.push((key, id.clone(), api.ended(&id, PATIENCE).await));
            }
            ended
        }
    };
    (0..BATCHES).map(|number| tokio::spawn(client(number))).collect()
}

/// One verdict, from one sandbox; one judgment, if it is judged; each reply once. How many turns it had, and whether it came to its check.
fn check_trial(case: usize, trial: &Value) -> (usize, bool) {
    assert_eq!(
        trial["lostAttempts"].as_array().map_or(0, Vec::len),
        0,
        "no sandbox was lost: {trial}"
    );
    let failure = trial["failure"].as_str().unwrap_or_default();
    // Of whom all asks were lost, nothing is guessed.
    let unanswered = failure.ends_with(STOPPED);
    let who = if case == WITH_PERSON {
        "The simulated person"
    } else {
        "The judge right"
    };
    match unanswered && (PICKED[case].is_some() || case == WITH_PERSON) {
        true => assert!(trial["status"] == "void" && failure.starts_with(who), "{trial}"),
        false => assert_eq!(trial["status"], EXPECTED[case], "{trial}"),
    }
    let of = |list: &str, name: &str, value: &str| {
        let all = trial[list].as_array().into_iter().flatten();
        all.filter(|entry| entry[name] == value).cloned().collect::<Vec<_>>()
    };
    let judgments = of("validations", "kind", "judge");
    assert_eq!(judgments.len(), usize::from(PICKED[case].is_some()), "{trial}");
    for judged in judgments {
        let picked = PICKED[case].filter(|_| !unanswered);
        assert_eq!(judged["judgment"]["choice"].as_str(), picked, "{trial}");
    }
    let replies = of("trajectory", "role", "user")
        .iter()
        .filter(|entry| entry["text"] == REPLY)
        .count();
    assert!(replies == usize::from(case == WITH_PERSON) || unanswered && replies == 0, "{trial}");
    (1 + replies, PICKED[case].is_none() && !unanswered)
}

/// Every trial has one verdict from one sandbox in which each step ran once; what was answered stays true; nobody was asked too often.
async fn check(api: &Api, counter: &Counter, model: &ModelServer, clients: Vec<tokio::task::JoinHandle<Ended>>) -> String {
    let mut batches = Vec::new();
    for client in clients {
        batches.extend(client.await.unwrap());
    }
    let (mut trials, mut turns, mut checks, mut void) = (0, 0, 0, 0);
    for (key, id, batch) in &batches {
        assert_eq!(batch["status"], "finished", "{batch}");
        let runs = batch["runs"].as_array().unwrap();
        assert_eq!(runs.len(), CASES, "{batch}");
        for (case, run) in runs.iter().enumerate() {
            assert_eq!(run["case"]["id"], format!("case-{case}"));
            for trial in run["trials"].as_array().unwrap() {
                let (had, checked) = check_trial(case, trial);
                trials += 1;
                turns += had;
                checks += usize::from(checked);
                void += usize::from(trial["status"] == "void");
            }
        }
        assert_eq!(&api.batch(id).await.unwrap(), batch, "what was answered stays true");
        assert_eq!(&start(api, &self::batch(counter), key).await, id, "the key still names it");
    }
    assert_eq!(trials, batches.len() * CASES * 2);
    let lines = counter.lines();
    let twice: HashMap<_, _> = lines.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "ran twice: {twice:?}");
    for (step, expected) in [("install", trials), ("begin", turns), ("end", turns), ("check", checks)] {
        let count = lines.keys().filter(|line| line.split(' ').next() == Some(step)).count();
        assert_eq!(count, expected, "{step} ran once in each trial's sandbox, at each turn");
    }
    let list = api.call("evals.batches.list", &json!({ "limit": 1 })).await.unwrap().body;
    assert_eq!(list["total"], batches.len(), "no batch was started twice");
    let asks = judges::asks(model);
    let often: HashMap<_, _> = asks.iter().filter(|(_, times)| **times > MAX_ASKS).collect();
    assert!(often.is_empty(), "asked too often: {often:?}");
    let twice = asks.values().filter(|times| **times > 1).count();
    format!(
        "{} batches of {} trials; {} judges and people asked, {twice} of them twice; {void} trials without an answer; nothing lost, nothing twice",
        batches.len(),
        CASES * 2,
        asks.len()
    )
}

fn seed() -> u64 {
    let seed = std::env::var("EVALGRID_SEED").map_or(2026, |seed| seed.parse().unwrap());
    println!("EVALGRID_SEED={seed}");
    seed
}

/// catalogue J2, J14: the whole server is killed, about once in 0.6 s.
#[tokio::test(flavor = "multi_thread")]
async fn one_machine_survives_being_killed() {
    let mut rng = StdRng::seed_from_u64(seed());
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let mut server = Server::new(folder.path());
    server.variables = judges::variables(&model.url(Mode::Ok));
    server.scheduler = ["--lease", "6s", "--sandbox-map", "process=process", "--snapshot-every", "64KiB"]
        .map(str::to_owned)
        .into();
    server.executor = ["--slots", "20", "--enable-process-sandbox"].map(str::to_owned).into();
    let mut process = server.serve();
    let api = server.ready().await;
    let end = Instant::now() + duration();
    let clients = clients(&api, &counter, end);
    let mut kills = 0;
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(rng.random_range(1..1200))).await;
        process.kill();
        process = server.serve();
        kills += 1;
    }
    // The last kill may be of now, and a connection of the clients' that it cut not yet be known as dead: this one is new.
    let api = server.ready().await;
    let told = check(&api, &counter, &model, clients).await;
    println!("{told}; {kills} kills");
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    let answers = server.answers();
    assert!(answers.values().all(|times| *times == 1), "answered twice: {answers:?}");
}

/// catalogue 19, J1, J19: whoever was frozen past its lease wakes up, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_cell_survives_whatever_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let counter = Counter::start().await;
    let model = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let redis = Redis::start(&folder.path().join("redis"));
    let mut cell = Cell::new(folder.path(), &redis, SCHEDULERS);
    cell.variables = judges::variables(&model.url(Mode::Ok));
    cell.scheduler = ["--lease", "6s", "--sandbox-map", "process=process", "--snapshot-every", "64KiB"]
        .map(str::to_owned)
        .into();
    cell.executor = ["--slots", "6", "--enable-process-sandbox"].map(str::to_owned).into();
    let schedulers = (0..SCHEDULERS).map(|number| cell.scheduler(number)).collect();
    let _gateway = cell.api();
    let api = cell.ready().await;
    let executors = (0..EXECUTORS).map(|number| cell.executor(number)).collect();
    let judge_runners = (0..JUDGE_RUNNERS).map(|number| cell.judge_runner(number)).collect();
    let mut trouble = Trouble {
        rng: StdRng::seed_from_u64(seed()),
        redis,
        schedulers,
        executors,
        judge_runners,
        done: HashMap::new(),
    };

    let end = Instant::now() + duration();
    let clients = clients(&api, &counter, end);
    while Instant::now() < end {
        trouble.make(&cell).await;
    }
    let told = check(&api, &counter, &model, clients).await;
    let mut count: Vec<_> = trouble.done.iter().collect();
    count.sort();
    println!("{told}; {count:?}");
}
