//! Batches that run on a client's own machine, as its CLI plays them; retries; starts under one key; and a trial resolved by hand: through the
//! real binary, which is killed in the middle.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{process::Command, time::Duration};

use evalgrid_tests::{
    http::{Answer, Api},
    server::{Process, Server, binary},
    suite,
};
use serde_json::{Value, json};

/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the server's own environment holds, and a profile names.
const SECRET: &str = "hunter2-hunter2-hunter2";

fn server(folder: &std::path::Path) -> Server {
    let mut server = Server::new(folder);
    server.executor = ["--slots", "4", "--enable-process-sandbox"].map(str::to_owned).into();
    server.scheduler = ["--sandbox-map", "process=process", "--variables", "NPM_TOKEN"]
        .map(str::to_owned)
        .into();
    server.variables = vec![
        ("NPM_TOKEN".into(), SECRET.into()),
        ("OPENAI_API_KEY".into(), "sk-of-the-server-0123456789".into()),
    ];
    server
}

/// Two cases on one variant of a harness that no executor here could run, twice each.
fn local_batch() -> Value {
    json!({
        "suite": { "id": "checkout", "prompt": "Do it." },
        "cases": [{ "id": "completes", "verify": "true" }, { "id": "refunds", "verify": "true" }],
        "variants": [{
            "harness": "codex", "model": "m", "sandbox": "local",
            "profile": { "name": "p", "files": {}, "variables": ["NPM_TOKEN"] },
        }],
        "trials": 2,
        "local": true,
        "checksIn": true,
        "trigger": { "source": "ci", "url": "https://ci.example/1" },
    })
}

fn scored(run: &Value, ordinal: u32, status: &str, output: &str) -> Value {
    json!({
        "runId": run, "ordinal": ordinal, "sandboxId": "/tmp/sphynx-local-1",
        "usage": { "cacheReadTokens": 0, "cacheWriteTokens": 0, "inputTokens": 3, "outputTokens": 4, "totalTokens": 7 },
        "events": [
            { "_tag": "Started", "model": "m", "sessionId": "s" },
            { "_tag": "Command", "at": 1_788_429_600_000_u64, "command": "make", "exitCode": 2, "output": output },
            { "_tag": "Message", "at": 1_788_429_600_001_u64, "role": "assistant", "text": format!("done with {ordinal}") },
            { "_tag": "Finished", "reason": "done" },
        ],
        "outcome": {
            "commandCount": 1, "exitCode": i32::from(status == "failed"), "modelMs": 5, "sandboxMs": 6, "status": status,
            "validations": [], "verifySteps": [], "voidFields": [],
        },
    })
}

async fn call(api: &Api, operation: &str, body: &Value) -> Answer {
    api.call(operation, body).await.unwrap()
}

async fn ok(api: &Api, operation: &str, body: &Value) -> Value {
    let answer = call(api, operation, body).await;
    assert!((200..300).contains(&answer.status), "{operation}: {answer:?}");
    answer.body
}

async fn refused(api: &Api, operation: &str, body: &Value, status: u16, words: &str) {
    let answer = call(api, operation, body).await;
    assert_eq!(answer.status, status, "{operation}: {answer:?}");
    let message = answer.body["message"].as_str().unwrap_or_default();
    assert!(message.contains(words), "{operation}: {words:?} in {message:?}");
}

async fn start_runner(api: &Api, body: &Value, key: &str) -> Answer {
    api.send("runner.start", body.to_string().into_bytes(), &[("idempotency-key", key)])
        .await
        .unwrap()
}

/// Whether the secret is anywhere in what the server keeps. The log is compressed, so its events are read as text.
fn holds_secret(server: &Server) -> bool {
    fn found(folder: &std::path::Path) -> bool {
        let holds = |path: &std::path::Path| {
            let bytes = std::fs::read(path).unwrap();
            bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
        };
        std::fs::read_dir(folder).unwrap().flatten().any(|entry| {
            let kind = entry.file_type().unwrap();
            kind.is_dir() && found(&entry.path()) || kind.is_file() && holds(&entry.path())
        })
    }
    let data = server.data();
    let dump = Command::new(binary())
        .args(["log", "dump", "--data", data.to_str().unwrap()])
        .output()
        .unwrap();
    let events = String::from_utf8_lossy(&dump.stdout).into_owned();
    assert!(events.contains("LocalBatchClosed"), "the whole log is read");
    found(&data) || events.contains(SECRET)
}

async fn restart(process: &mut Process, server: &Server) -> Api {
    process.kill();
    *process = server.serve();
    server.ready().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_batch_as_the_cli_plays_it_over_two_crashes() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let mut process = server.serve();
    let mut api = server.ready().await;

    // The CLI's order: whoami, start, get, leases, reports, finish; beats beside them.
    let started = start_runner(&api, &local_batch(), "0123456789abcdef0123456789abcdef").await;
    assert_eq!(started.status, 200, "{started:?}");
    let id = json!({ "id": started.body["id"] });
    let batch = ok(&api, "evals.batches.get", &id).await;
    assert_eq!(
        (&batch["local"], &batch["status"], &batch["trigger"]["source"]),
        (&json!(true), &json!("running"), &json!("ci"))
    );
    let variant = &batch["runs"][0]["variant"];
    assert_eq!((&variant["harness"], &variant["sandbox"]), (&json!("codex"), &json!("local")));
    let runs: Vec<Value> = started.body["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| run["id"].clone())
        .collect();

    let lease = |harness: &str| json!({ "id": started.body["id"], "harness": harness });
    let leased = ok(&api, "runner.lease", &lease("codex")).await;
    assert_eq!(
        (&leased["authMethodId"], &leased["values"]["apiKey"]),
        (&json!("api-key"), &json!("sk-of-the-server-0123456789"))
    );
    refused(&api, "runner.lease", &lease("claude"), 409, "does not use this harness").await;
    let names = |names: &[&str]| json!({ "id": started.body["id"], "names": names });
    assert_eq!(
        ok(&api, "runner.leaseVariables", &names(&["NPM_TOKEN"])).await["values"]["NPM_TOKEN"],
        SECRET
    );
    refused(&api, "runner.leaseVariables", &names(&["OPENAI_API_KEY"]), 409, "No profile").await;

    ok(&api, "runner.beat", &id).await;
    let first = scored(&runs[0], 1, "passed", &format!("the token is {SECRET}"));
    ok(&api, "runner.report", &first).await;

    api = restart(&mut process, &server).await;
    // The reply of the start, and of the report, may have been lost: the CLI sends them again.
    let again = start_runner(&api, &local_batch(), "0123456789abcdef0123456789abcdef").await;
    assert_eq!(again.body, started.body, "one key, one batch");
    ok(&api, "runner.report", &first).await;
    refused(&api, "runner.report", &scored(&runs[0], 1, "failed", ""), 409, "another verdict").await;
    ok(&api, "runner.beat", &id).await;
    ok(&api, "runner.report", &scored(&runs[0], 2, "failed", &"x".repeat(100_000))).await;
    let broken = json!({ "runId": runs[1], "ordinal": 1, "events": [], "failure": format!("The prepare step seeds exited with status 3 and {SECRET}") });
    ok(&api, "runner.report", &broken).await;
    refused(&api, "runner.report", &scored(&runs[1], 3, "passed", ""), 404, "ordinal").await;
    refused(&api, "runner.report", &scored(&json!("run_nonsense"), 1, "passed", ""), 404, "run").await;
    refused(&api, "runner.report", &scored(&runs[1], 2, "running", ""), 400, "has ended").await;
    let misshapen = call(&api, "runner.report", &json!({ "runId": runs[1], "ordinal": 2, "events": [] })).await;
    assert_eq!((misshapen.status, &misshapen.body["_tag"]), (400, &json!("HttpApiDecodeError")));

    let tail = ok(&api, "runner.tail", &json!({ "id": started.body["id"], "after": [] })).await;
    let entries = tail["events"].as_array().unwrap();
    assert_eq!(
        (entries.len(), &tail["settled"], &tail["running"]),
        (4, &json!(3), &json!(true)),
        "{tail}"
    );
    assert_eq!(entries[1]["entry"]["text"], "done with 1");
    let more = ok(&api, "runner.tail", &json!({ "id": started.body["id"], "after": tail["next"] })).await;
    assert_eq!((&more["events"], &more["next"]), (&json!([]), &tail["next"]), "nothing twice");
    let subscription = ok(&api, "runner.subscribe", &id).await;
    let subscriber = Api::new(&server.http, subscription["token"].as_str().unwrap());
    let page = ok(&subscriber, "runner.tail", &json!({ "id": started.body["id"], "after": [] })).await;
    assert_eq!(page["events"].as_array().unwrap().len(), 4);
    assert_eq!(
        call(&subscriber, "evals.batches.get", &id).await.status,
        401,
        "it opens nothing else"
    );

    // Ctrl+C: the last trial is never reported.
    let finished = ok(&api, "runner.finish", &id).await;
    api = restart(&mut process, &server).await;
    assert_eq!(
        ok(&api, "runner.finish", &id).await["finishedAt"],
        finished["finishedAt"],
        "finishing twice is finishing once"
    );
    refused(&api, "runner.beat", &id, 409, "finished").await;
    refused(&api, "runner.report", &scored(&runs[1], 2, "passed", ""), 409, "finished").await;
    refused(&api, "evals.batches.retry", &id, 409, "local").await;

    let batch = ok(&api, "evals.batches.get", &id).await;
    assert_eq!(
        (&batch["status"], &batch["failure"], &batch["local"]),
        (&json!("finished"), &Value::Null, &json!(true))
    );
    let trials = suite::trials(&batch);
    let statuses: Vec<&str> = trials.iter().map(|trial| trial["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["passed", "failed", "void", "void"]);
    assert_eq!(trials[0]["trajectory"][0]["output"], "the token is [redacted]");
    assert_eq!(
        (&trials[0]["sandboxId"], &trials[0]["timed"]),
        (&json!("/tmp/sphynx-local-1"), &json!(true))
    );
    assert_eq!(
        (
            &trials[0]["commands"],
            &trials[0]["failedCommands"],
            &trials[0]["usage"]["totalTokens"]
        ),
        (&json!(1), &json!(1), &json!(7))
    );
    assert_eq!(trials[1]["trajectory"][0]["outputTruncated"], true);
    assert_eq!(trials[2]["failure"], "The prepare step seeds exited with status 3 and [redacted]");
    assert!(
        trials[3]["failure"].as_str().unwrap().contains("without reporting"),
        "{}",
        trials[3]
    );
    let counts = &batch["runs"][1]["distribution"];
    assert_eq!(
        (&counts["trials"], &counts["voided"]),
        (&json!(2), &json!(2)),
        "denominators are honest"
    );
    process.kill();
    assert!(!holds_secret(&server), "no secret was written down");
}

#[tokio::test(flavor = "multi_thread")]
async fn hosted_batches_start_through_the_runner_too() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let _process = server.serve();
    let api = server.ready().await;
    let mut request = suite::command_batch(
        1,
        2,
        "process",
        "echo '{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"hello\"}'",
        "true",
    );
    request["trigger"] = json!({ "source": "cli" });
    let id = ok(&api, "runner.start", &request).await["id"].clone();
    let ended = api.ended(id.as_str().unwrap(), PATIENCE).await;
    assert_eq!(
        (&ended["status"], &ended["trigger"]["source"], &ended["local"]),
        (&json!("finished"), &json!("cli"), &json!(false))
    );
    let tail = ok(&api, "runner.tail", &json!({ "id": id, "after": [] })).await;
    let texts: Vec<&str> = tail["events"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|event| event["entry"]["text"].as_str())
        .collect();
    assert_eq!(texts, ["hello", "hello"], "what is recorded of hosted trials can be read, too");
    for operation in ["runner.beat", "runner.finish"] {
        refused(&api, operation, &json!({ "id": id }), 409, "runs on the server").await;
    }
    request["variants"][0]["sandbox"] = json!("local");
    refused(&api, "runner.start", &request, 400, "variants[0].sandbox").await;
    // A key that the server does not have is asked for in the documented words.
    let mut keyless = local_batch();
    keyless["variants"][0]["harness"] = json!("claude");
    refused(
        &api,
        "runner.start",
        &keyless,
        400,
        "Set ANTHROPIC_API_KEY in Settings > Environment to run claude",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_starts_with_one_key_are_one_batch_and_a_lost_reply_is_answered_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let mut process = server.serve();
    let api = server.ready().await;
    let request = suite::command_batch(2, 1, "process", "sleep 600", "true");
    let send = |api: Api, request: Value| async move {
        let headers = [("idempotency-key", "raced")];
        api.send("evals.batches.start", request.to_string().into_bytes(), &headers).await
    };
    let starts = (0..16).map(|_| tokio::spawn(send(api.clone(), request.clone())));
    let mut answers = Vec::new();
    for start in starts.collect::<Vec<_>>() {
        answers.push(start.await.unwrap().unwrap());
    }
    assert!(
        answers.iter().all(|answer| answer.status == 200 && answer.body == answers[0].body),
        "{answers:?}"
    );
    let list = async |api: &Api| ok(api, "evals.batches.list", &json!({})).await["total"].clone();
    assert_eq!(list(&api).await, 1);
    // catalogue 2: the server dies between the commit and the reply.
    let second = suite::command_batch(1, 1, "process", "sleep 600", "true");
    let headers = [("idempotency-key", "lost")];
    let lost = tokio::spawn({
        let (api, body) = (api.clone(), second.to_string().into_bytes());
        async move { api.send("evals.batches.start", body, &headers).await }
    });
    evalgrid_tests::eventually("the start is recorded", PATIENCE, || async {
        (list(&api).await == 2).then_some(())
    })
    .await;
    lost.abort();
    process.kill();
    process = server.serve();
    let api = server.ready().await;
    let retried = api
        .send("evals.batches.start", second.to_string().into_bytes(), &headers)
        .await
        .unwrap();
    assert_eq!((retried.status, list(&api).await), (200, json!(2)), "{retried:?}");
    assert_eq!(
        ok(&api, "evals.batches.list", &json!({})).await["batches"][0]["id"],
        retried.body["id"]
    );
    let other = api
        .send("evals.batches.start", request.to_string().into_bytes(), &headers)
        .await
        .unwrap();
    assert_eq!(
        (other.status, &other.body["_tag"]),
        (400, &json!("BadRequest")),
        "another body under a known key: {other:?}"
    );
    // The key is looked at before the limit: a full organization still gets its old answer.
    api.start(&suite::command_batch(1, 1, "process", "sleep 600", "true")).await;
    refused(&api, "evals.batches.start", &second, 409, "3 batches are running").await;
    assert_eq!(send(api.clone(), request).await.unwrap().body, answers[0].body);
    process.kill();
}

fn evalgrid(server: &Server, arguments: &[&str]) -> (bool, String) {
    let scheduler = format!("http://{}", server.grpc);
    let data = server.data();
    let output = Command::new(binary())
        .args(arguments)
        .args(["--scheduler", &scheduler, "--data", data.to_str().unwrap()])
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output.status.success(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_trial_is_resolved_and_its_batch_retried() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let mut process = server.serve();
    let api = server.ready().await;
    let marker = folder.path().join("go-on");
    // The first case passes at once; the second hangs until it may go on.
    let run = format!(
        "test $SPHYNX_PROMPT = easy || while ! test -e {}; do sleep 0.05; done",
        marker.display()
    );
    let mut request = suite::command_batch(2, 1, "process", &run, "true");
    request["suite"]["prompt"] = json!("{{ how }}");
    request["cases"][0]["variables"] = json!({ "how": "easy" });
    request["cases"][1]["variables"] = json!({ "how": "hard" });
    let id = api.start(&request).await;
    let trial = evalgrid_tests::eventually("the first trial has passed", PATIENCE, || async {
        let batch = api.batch(&id).await.ok()?;
        let trials = suite::trials(&batch);
        let settled = trials[0]["status"] == "passed" && trials[1]["status"] == "running";
        settled.then(|| trials[1]["id"].as_str().unwrap().to_owned())
    })
    .await;
    refused(&api, "evals.batches.retry", &json!({ "id": id }), 409, "still runs").await;
    let (shown, text) = evalgrid(&server, &["trial", "show", &trial]);
    assert!(shown && text.contains("running") && text.contains(&id), "{text}");
    let (resolved, text) = evalgrid(&server, &["trial", "resolve", &trial, "--void", "its repository is gone"]);
    assert!(resolved && text.contains("its repository is gone"), "{text}");
    let (again, text) = evalgrid(&server, &["trial", "resolve", &trial, "--void", "again"]);
    assert!(!again && (text.contains("verdict") || text.contains("no trial")), "{text}");
    let ended = api.ended(&id, PATIENCE).await;
    assert_eq!(suite::trials(&ended)[1]["failure"], "its repository is gone");

    // The batch may have left memory by now; after the restart it certainly has.
    process.kill();
    process = server.serve();
    let api = server.ready().await;
    std::fs::write(&marker, "").unwrap();
    let headers = [("idempotency-key", "retry-1")];
    let body = json!({ "id": id }).to_string().into_bytes();
    let retried = api.send("evals.batches.retry", body.clone(), &headers).await.unwrap();
    assert_eq!(retried.status, 200, "{retried:?}");
    assert_eq!(api.send("evals.batches.retry", body, &headers).await.unwrap().body, retried.body);
    let second = api.ended(retried.body["id"].as_str().unwrap(), PATIENCE).await;
    assert_eq!((&second["status"], &second["retryOf"]), (&json!("finished"), &json!(id)));
    let (before, after) = (suite::trials(&ended), suite::trials(&second));
    assert_eq!(
        (&after[0]["status"], &after[0]["carried"], &after[1]["status"]),
        (&json!("passed"), &json!(true), &json!("passed"))
    );
    for field in ["trajectory", "validations", "verifySteps", "sandboxId", "commands", "modelMs"] {
        assert_eq!(after[0][field], before[0][field], "{field} is taken over");
    }
    assert_eq!(api.batch(&id).await.unwrap(), ended, "the old batch stays as it was");
    let (retried, text) = evalgrid(&server, &["batch", "retry", retried.body["id"].as_str().unwrap()]);
    assert!(!retried && text.contains("nothing to retry"), "{text}");
    process.kill();
}
