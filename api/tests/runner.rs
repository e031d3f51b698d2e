//! The operations of local batches and of retries, in and out, held against the contract.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use evalgrid_proto::v1::{TailMark, TailRequest};
use serde_json::{Value, json};
use support::{Api, KEY, READER, batch, evidence, schema};

#[tokio::test]
async fn starts_and_retries_pass_key_and_body_on() {
    let api = Api::start().await;
    let headers = [("authorization", KEY), ("idempotency-key", "once")];
    let answer = api.send("POST", "/v1/runner.start", &headers, "whatever it is").await;
    assert_eq!(answer.status, 200);
    schema::check("StartedBatch", &answer.json());
    let body = json!({"id": "batch_1"}).to_string();
    let answer = api.send("POST", "/v1/evals.batches.retry", &headers, body).await;
    schema::check("StartedBatch", &answer.json());
    assert_eq!(answer.json()["id"], "batch_2");
    let script = api.script.lock().unwrap();
    assert_eq!(script.asked, ["runner_start", "retry"]);
    assert_eq!(
        (script.started[0].json.as_ref(), script.started[0].idempotency_key.as_deref()),
        (&b"whatever it is"[..], Some("once"))
    );
    assert_eq!(
        (script.retried[0].id.as_str(), script.retried[0].idempotency_key.as_deref()),
        ("batch_1", Some("once"))
    );
}

#[tokio::test]
async fn leases_are_as_documented() {
    let api = Api::start().await;
    let answer = api.op("runner.lease", json!({"id": "batch_1", "harness": "claude"})).await.json();
    schema::check("CredentialLease", &answer);
    assert_eq!(
        answer,
        json!({"authMethodId": "of claude", "expiresAt": "2026-09-03T10:00:00.000Z", "values": {"apiKey": "secret"}})
    );
    let answer = api
        .op("runner.leaseVariables", json!({"id": "batch_1", "names": ["TOKEN"]}))
        .await
        .json();
    schema::check("VariableLease", &answer);
    assert_eq!(
        answer,
        json!({"expiresAt": "2026-09-03T10:00:00.000Z", "values": {"TOKEN": "secret"}})
    );
    let names: Vec<String> = (0..101).map(|index| format!("N{index}")).collect();
    for (op, body) in [
        ("runner.lease", json!({"id": "batch_1"})),
        ("runner.lease", json!({"id": "batch_1", "harness": "nobody"})),
        ("runner.leaseVariables", json!({"id": "batch_1", "names": []})),
        ("runner.leaseVariables", json!({"id": "batch_1", "names": names})),
        ("runner.leaseVariables", json!({"names": ["TOKEN"]})),
    ] {
        assert_eq!(
            api.op(op, body.clone()).await.kind(),
            (400, "HttpApiDecodeError".into()),
            "{op} {body}"
        );
    }
}

#[tokio::test]
async fn reports_and_beats_answer_with_nothing() {
    let api = Api::start().await;
    let report = json!({"anything": ["goes", "through"]});
    for (op, body) in [("runner.report", report.clone()), ("runner.beat", json!({"id": "batch_1"}))] {
        let answer = api.op(op, body).await;
        assert_eq!((answer.status.as_u16(), answer.body.len()), (204, 0), "{op}");
    }
    assert_eq!(api.script.lock().unwrap().reported[0].json, report.to_string().as_bytes());
}

#[tokio::test]
async fn a_report_over_the_limit_is_413_so_that_a_smaller_one_can_follow() {
    let api = Api::start().await;
    let report = |bytes: usize| format!("{{\"events\":\"{}\"}}", "x".repeat(bytes));
    let send = async |key: &str, body: String| api.send("POST", "/v1/runner.report", &[("authorization", key)], body).await;
    assert_eq!(send(KEY, report(7 << 20)).await.status, 204);
    assert_eq!(send(KEY, report(8 << 20)).await.kind(), (413, "PayloadTooLarge".into()));
    // Nothing large is read for who may not report.
    assert_eq!(send(READER, report(7 << 20)).await.kind(), (403, "Forbidden".into()));
}

#[tokio::test]
async fn finish_answers_with_the_batch() {
    let api = Api::start().await;
    let (mut local, objects) = batch();
    local.local = true;
    local.retry_of = Some("batch_0".into());
    local.runs[0].trials[0].outcome.as_mut().unwrap().carried = true;
    {
        let mut script = api.script.lock().unwrap();
        script.batch = local;
        script.objects = objects;
    }
    let answer = api.op("runner.finish", json!({"id": "batch_1"})).await.json();
    schema::check("EvalBatch", &answer);
    assert_eq!((&answer["local"], &answer["retryOf"]), (&json!(true), &json!("batch_0")));
    assert_eq!(
        (&answer["runs"][0]["local"], &answer["runs"][0]["trials"][0]["carried"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(answer["runs"][0]["trials"][1].get("carried"), None);
}

#[tokio::test]
async fn a_tail_pages_by_marks() {
    let api = Api::start().await;
    let after = json!([{"run": "run_1", "ordinal": 2, "seq": 0}]);
    let answer = api.op("runner.tail", json!({"id": "batch_1", "after": after})).await.json();
    schema::check("EvalBatchTail", &answer);
    let entries: Vec<&Value> = answer["events"].as_array().unwrap().iter().map(|event| &event["entry"]).collect();
    let expected = evidence();
    assert_eq!(entries, expected["trajectory"].as_array().unwrap().iter().collect::<Vec<_>>());
    assert_eq!((&answer["running"], &answer["settled"]), (&json!(true), &json!(1)));
    assert_eq!(answer["next"], json!([{"run": "run_1", "ordinal": 1, "seq": 3}]));
    let asked = api.script.lock().unwrap().tailed.pop().unwrap();
    let mark = TailMark {
        run_id: "run_1".into(),
        ordinal: 2,
        seq: 0,
    };
    let expected = TailRequest {
        batch_id: "batch_1".into(),
        after: vec![mark],
    };
    assert_eq!(asked, expected);
    for body in [
        json!({"id": "batch_1"}),
        json!({"id": "batch_1", "after": [{"run": "r", "ordinal": 0, "seq": 0}]}),
    ] {
        assert_eq!(api.op("runner.tail", body).await.kind(), (400, "HttpApiDecodeError".into()));
    }
}

#[tokio::test]
async fn a_subscription_is_as_documented() {
    let api = Api::start().await;
    let answer = api.op("runner.subscribe", json!({"id": "1"})).await.json();
    schema::check("BatchSubscription", &answer);
    assert_eq!(
        answer,
        json!({"expiresAtMillis": 1_788_429_600_000_u64, "tag": "batch_1", "token": "anp_tail"})
    );
}
