//! Every operation, in and out, held against the contract.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use evalgrid_proto::v1::PageCursor;
use serde_json::{Value, json};
use support::{Api, KEY, batch, evidence, schema};

async fn api_with_batch() -> Api {
    let api = Api::start().await;
    let (batch, objects) = batch();
    let mut script = api.script.lock().unwrap();
    script.batch = batch;
    script.objects = objects;
    drop(script);
    api
}

#[tokio::test]
async fn the_origin_answers_without_a_key() {
    let api = Api::without_scheduler().await;
    let answer = api.send("GET", "/", &[], "").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["name"], "evalgrid");
    assert!(answer.json()["version"].is_string());
    assert_eq!(api.send("HEAD", "/", &[], "").await.status, 200);
    assert_eq!(api.send("GET", "/healthz", &[], "").await.status, 200);
}

#[tokio::test]
async fn start_passes_the_body_on_untouched() {
    let api = Api::start().await;
    // Not even JSON: whether it may start is the scheduler's to say.
    let body = "{\"cases\": \u{fffd} whatever";
    let headers = [("authorization", KEY), ("idempotency-key", "once ~ more!")];
    let answer = api.send("POST", "/v1/evals.batches.start", &headers, body).await;
    assert_eq!(answer.status, 200);
    schema::check("StartedBatch", &answer.json());
    assert_eq!(
        answer.json(),
        json!({"id": "batch_1", "runs": [{"caseId": "add", "id": "run_1", "variantId": "variant_1"}]})
    );
    let script = api.script.lock().unwrap();
    assert_eq!(script.started[0].json, body.as_bytes());
    assert_eq!(script.started[0].idempotency_key.as_deref(), Some("once ~ more!"));
}

#[tokio::test]
async fn idempotency_keys_are_checked() {
    let api = Api::start().await;
    let (longest, too_long) = ("k".repeat(128), "k".repeat(129));
    for (key, status) in [
        ("a", 200),
        (&longest, 200),
        ("", 400),
        (&too_long, 400),
        ("tab\there", 400),
        ("\u{e9}", 400),
    ] {
        let headers = [("authorization", KEY), ("idempotency-key", key)];
        let answer = api.send("POST", "/v1/evals.batches.start", &headers, "{}").await;
        assert_eq!(answer.status, status, "{key:?}");
    }
    let twice = [("authorization", KEY), ("idempotency-key", "a"), ("idempotency-key", "b")];
    assert_eq!(api.send("POST", "/v1/evals.batches.start", &twice, "{}").await.status, 400);
    assert_eq!(api.script.lock().unwrap().started.len(), 2);
}

#[tokio::test]
async fn a_batch_has_every_documented_field() {
    let api = api_with_batch().await;
    let answer = api.op("evals.batches.get", json!({"id": "batch_1"})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "application/json");
    let batch = answer.json();
    schema::check("EvalBatch", &batch);
    assert_eq!(batch["startedAt"], "2026-09-03T10:00:00.000Z");
    assert_eq!(
        (&batch["costs"], &batch["local"], &batch["trigger"]),
        (&Value::Null, &json!(false), &json!({"source": "api"}))
    );
    let run = &batch["runs"][0];
    assert_eq!(
        run["setup"],
        json!({
            "prepare": null, "prompt": "Do it.", "source": {"kind": "files", "files": {"a.txt": "a"}}, "validator": null,
            "verify": "test -f hello.txt",
        })
    );
    assert_eq!(
        run["variant"],
        json!({
            "harness": "command", "id": "variant_1", "model": "m", "profile": "p", "provider": "bubblewrap", "sandbox": "e2b",
            "userModel": null,
        })
    );
    assert_eq!(run["distribution"]["passRate"], 0.5);
    let statuses: Vec<_> = run["trials"]
        .as_array()
        .unwrap()
        .iter()
        .map(|trial| trial["status"].as_str().unwrap())
        .collect();
    assert_eq!(statuses, ["passed", "failed", "void", "running", "queued"]);
    for trial in &run["trials"].as_array().unwrap()[..2] {
        for (key, value) in evidence().as_object().unwrap() {
            assert_eq!(&trial[key], value, "inline or object, the evidence is the same");
        }
    }
    let exit_codes: Vec<_> = run["trials"]
        .as_array()
        .unwrap()
        .iter()
        .map(|trial| trial["exitCode"].as_i64().unwrap())
        .collect();
    assert_eq!(exit_codes, [0, 1, -1, -1, -1]);
    assert_eq!(run["trials"][0]["failure"], Value::Null);
    assert_eq!(run["trials"][2]["failure"], "The agent ran past its time limit of 5m");
    assert_eq!(run["trials"][0]["lostAttempts"], json!(["the sandbox is gone"]));
    assert_eq!(
        (&run["trials"][0]["usage"]["totalTokens"], &run["trials"][1]["usage"]),
        (&json!(12), &Value::Null)
    );
}

#[tokio::test]
async fn a_run_is_the_one_in_its_batch() {
    let api = api_with_batch().await;
    let batch = api.op("evals.batches.get", json!({"id": "batch_1"})).await.json();
    let run = api.op("evals.runs.get", json!({"id": "run_1", "ignored": [1]})).await;
    assert_eq!(run.status, 200);
    schema::check("EvalRun", &run.json());
    assert_eq!(run.json(), batch["runs"][0]);
}

#[tokio::test]
async fn models_of_a_harness() {
    let api = Api::start().await;
    let answer = api.op("evals.models.list", json!({"harness": "codex", "q": "5"})).await;
    schema::check("ModelCatalogue", &answer.json());
    let model = json!({"displayName": "Name", "id": "codex-5", "summary": null, "vendor": "vendor"});
    assert_eq!(answer.json(), json!({"harness": "codex", "models": [model], "total": 1}));
    for request in [json!({}), json!({"harness": "nobody"}), json!({"harness": "codex", "q": 1})] {
        assert_eq!(api.op("evals.models.list", request).await.status, 400);
    }
}

#[tokio::test]
async fn cancel_answers_with_the_batch() {
    let api = api_with_batch().await;
    let answer = api.op("evals.batches.cancel", json!({"id": "batch_1"})).await;
    schema::check("EvalBatch", &answer.json());
    assert_eq!(
        (&answer.json()["status"], &answer.json()["failure"]),
        (&json!("failed"), &json!("Cancelled"))
    );
}

#[tokio::test]
async fn lists_page_by_cursor() {
    let api = Api::start().await;
    let cursor = json!({"id": "batch_9", "startedAtMillis": 1_788_429_600_123_u64});
    let given = PageCursor {
        id: "batch_9".into(),
        started_at_ms: 1_788_429_600_123,
    };
    let cases = [
        (json!({}), None, 20),
        (json!({"cursor": null}), None, 20),
        (json!({"limit": 5}), None, 5),
        (json!({"limit": 0}), None, 1),
        (json!({"limit": -3}), None, 1),
        (json!({"limit": 1e9}), None, 100),
        (json!({"cursor": cursor, "limit": 100, "unknown": true}), Some(given), 100),
    ];
    for (body, cursor, limit) in cases {
        let answer = api.op("evals.batches.list", body.clone()).await;
        schema::check("BatchesListResponse", &answer.json());
        let asked = api.script.lock().unwrap().listed.pop().unwrap();
        assert_eq!((asked.cursor, asked.limit), (cursor, limit), "{body}");
        // What is answered as `next` can be sent back whole.
        assert_eq!(
            api.op("evals.batches.list", json!({"cursor": answer.json()["next"]})).await.status,
            200
        );
    }
    let answer = api.op("evals.batches.list", json!({})).await.json();
    assert_eq!((&answer["total"], &answer["batches"][2]["cancelled"]), (&json!(7), &json!(1)));
    let regraded = |row: usize| answer["batches"][row].get("regradeOf").cloned();
    assert_eq!((regraded(0), regraded(1)), (Some(json!("batch_2")), None));
}

#[tokio::test]
async fn whoami_takes_any_object() {
    let api = Api::start().await;
    for body in [json!({}), json!([]), json!({"a": 1})] {
        let answer = api.op("auth.whoami", body).await;
        schema::check("Whoami", &answer.json());
        assert_eq!(
            answer.json(),
            json!({
                "credential": {"kind": "apiKey", "name": "first", "start": "anp_AbCd"},
                "organization": {"id": "org_1", "name": "Acme", "slug": "acme"},
                "permissions": ["evals:read", "evals:write"],
            })
        );
    }
    assert_eq!(
        api.op("auth.whoami", json!("text")).await.kind(),
        (400, "HttpApiDecodeError".into())
    );
}
