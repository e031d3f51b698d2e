//! 1,000 malformed starts against the real binary while a batch runs: only 4xx, nothing changes, the batch is unharmed.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` chooses one.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::time::Duration;

use evalgrid_tests::{http::Api, server::Server, suite};
use rand::{Rng as _, RngCore as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

/// A start that would be admitted; every malformed one is this with something broken.
fn sound() -> Value {
    json!({
        "suite": { "id": "suite", "prompt": "Do {{ what }}.", "source": { "kind": "files", "files": { "a.txt": "a" } } },
        "cases": [{
            "id": "case",
            "name": "A case",
            "tags": ["one", "two"],
            "variables": { "what": "it" },
            "timeoutMs": 60_000,
            "maxTurns": 3,
            "user": { "kind": "scripted", "replies": ["yes"] },
            "source": { "kind": "repo", "url": "https://example.com/a.git", "ref": null },
            "verify": "true",
        }],
        "variants": [{
            "harness": "command",
            "model": "m",
            "sandbox": "bubblewrap",
            "profile": { "name": "p", "files": { "home/x": "y" }, "env": { "A": "b" }, "install": "true", "run": "true", "systemPrompt": "s" },
        }],
        "trials": 1,
    })
}

/// Every path to a value inside.
fn paths(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            let here = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
            found.push(here.clone());
            paths(value, &here, found);
        }),
        Value::Array(items) => items.iter().enumerate().for_each(|(index, value)| {
            let here = format!("{at}/{index}");
            found.push(here.clone());
            paths(value, &here, found);
        }),
        _ => {}
    }
}

/// Values that no field of the contract takes in place of a sound one.
fn wrong(rng: &mut StdRng) -> Value {
    match rng.random_range(0..7) {
        0 => json!(true),
        1 => json!([[[]]]),
        2 => json!(-1),
        3 => json!(1.5),
        4 => json!({ "\u{0}": null }),
        5 => json!(["\u{0}"]),
        _ => json!("\u{0}\u{ffff}".repeat(20_000)),
    }
}

fn malformed(rng: &mut StdRng) -> Vec<u8> {
    let text = sound().to_string().into_bytes();
    match rng.random_range(0..10) {
        // Bytes.
        0 => (0..rng.random_range(0..400)).map(|_| rng.random()).collect(),
        1 => text[..rng.random_range(0..text.len())].to_vec(),
        2 => {
            let mut text = text;
            let place = rng.random_range(0..text.len());
            text[place] = 0xff;
            text
        }
        // Deep, and wide.
        3 => [b"{\"a\":".repeat(rng.random_range(65..50_000)), b"1".to_vec()].concat(),
        4 => format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)).into_bytes(),
        5 => [text, b" x".to_vec()].concat(),
        // Sound JSON with one field wrong.
        _ => {
            let mut body = sound();
            let mut all = Vec::new();
            paths(&body, "", &mut all);
            // A file's content may be any text.
            all.retain(|path| !path.contains("/files/"));
            let path = &all[rng.random_range(0..all.len())];
            *body.pointer_mut(path).unwrap() = wrong(rng);
            body.to_string().into_bytes()
        }
    }
}

async fn total(api: &Api) -> u64 {
    api.call("evals.batches.list", &json!({})).await.unwrap().body["total"]
        .as_u64()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_starts_change_nothing() {
    let seed = std::env::var("EVALGRID_SEED").map_or_else(|_| rand::rng().next_u64(), |seed| seed.parse().unwrap());
    println!("EVALGRID_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor = vec!["--slots".into(), "4".into()];
    let mut process = server.serve();
    let api = server.ready().await;
    let running = api
        .start(&suite::command_batch(
            10,
            10,
            "bubblewrap",
            "sleep 0.1; echo hello > hello.txt",
            "test -e hello.txt",
        ))
        .await;
    let before = total(&api).await;
    for number in 0..1000 {
        let body = malformed(&mut rng);
        let shown = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
        let answer = api.send("evals.batches.start", body, &[]).await.unwrap();
        assert!(
            (400..500).contains(&answer.status),
            "{number}: {} for {shown}: {}",
            answer.status,
            answer.body
        );
        assert!(
            answer.body["_tag"].is_string() && answer.body["message"].is_string(),
            "{number}: {shown}: {}",
            answer.body
        );
    }
    assert_eq!(total(&api).await, before, "nothing was started");
    assert!(process.is_running());
    let batch = api.ended(&running, Duration::from_secs(120)).await;
    assert!(suite::trials(&batch).iter().all(|trial| trial["status"] == "passed"), "{batch}");
    let log = std::fs::read_to_string(&process.log).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(folder.path());
    let _process = server.serve();
    let api = server.ready().await;
    let check = |pointer: &'static str, value: Value, status: u16, path: Value| {
        let api = api.clone();
        async move {
            let mut body = sound();
            *body.pointer_mut(pointer).unwrap() = value;
            let answer = api.call("evals.batches.start", &body).await.unwrap();
            assert_eq!(answer.status, status, "{pointer}: {}", answer.body);
            match path {
                Value::String(text) => {
                    let message = answer.body["message"].as_str().unwrap();
                    assert!(message.contains(&text), "{pointer}: {message}");
                    assert_eq!(answer.body["_tag"], "BadRequest");
                }
                path => {
                    assert_eq!(answer.body["_tag"], "HttpApiDecodeError", "{pointer}: {}", answer.body);
                    assert_eq!(answer.body["issues"][0]["path"], path, "{pointer}: {}", answer.body);
                }
            }
        }
    };
    check("/trials", json!(0), 400, json!(["trials"])).await;
    check("/trials", json!(11), 400, json!(["trials"])).await;
    check("/cases/0/timeoutMs", json!(999), 400, json!(["cases", 0, "timeoutMs"])).await;
    check("/cases/0/id", json!("Not-A-Handle"), 400, json!(["cases", 0, "id"])).await;
    check("/cases/0/user/replies/0", json!(""), 400, json!(["cases", 0, "user", "replies", 0])).await;
    check(
        "/variants/0/profile/env/A",
        json!(7),
        400,
        json!(["variants", 0, "profile", "env", "A"]),
    )
    .await;
    check("/variants/0/harness", json!("codex"), 400, json!("variants[0]")).await;
    check("/variants/0/sandbox", json!("daytona"), 400, json!("variants[0].sandbox")).await;
    check(
        "/cases/0/user",
        json!({ "kind": "simulated", "goal": "g", "prompt": "p" }),
        400,
        json!("Set OPENAI_API_KEY"),
    )
    .await;

    let answer = api.send("evals.batches.start", b"{".to_vec(), &[]).await.unwrap();
    assert_eq!((answer.status, &answer.body["_tag"]), (400, &json!("HttpApiDecodeError")));
    let answer = api.send("evals.batches.start", vec![b' '; (64 << 20) + 1], &[]).await.unwrap();
    assert_eq!(answer.status, 413, "{}", answer.body);
    let answer = Api::new(&server.http, "anp_nobody")
        .call("evals.batches.list", &json!({}))
        .await
        .unwrap();
    assert_eq!((answer.status, &answer.body["_tag"]), (401, &json!("Unauthorized")));
    let answer = api.call("evals.batches.get", &json!({ "id": "batch_nothing" })).await.unwrap();
    assert_eq!((answer.status, &answer.body["_tag"]), (404, &json!("NotFound")));
    let answer = api.call("evals.runs.get", &json!({})).await.unwrap();
    assert_eq!((answer.status, &answer.body["issues"][0]["path"]), (400, &json!(["id"])));
}
