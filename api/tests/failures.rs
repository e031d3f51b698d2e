//! Everything that is not a result: refusals, malformed requests, limits, and results that break off.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::Mutex;

use evalgrid_proto::v1::{Evidence, ObjectRef, evidence::Place, refusal::Kind};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::{Api, KEY, batch, refusal, schema};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::{Code, Status};

#[tokio::test]
async fn refusals_have_the_documented_bodies() {
    let api = Api::start().await;
    let issues = json!([{"_tag": "Missing", "path": ["cases", 0, "id"], "message": "is missing"}]);
    let check = async |status: Status, expected: (u16, &str), message: &str| {
        api.script.lock().unwrap().refuse = Some(status);
        for op in [
            "evals.batches.start",
            "evals.batches.get",
            "evals.batches.list",
            "evals.batches.cancel",
            "evals.runs.get",
        ] {
            let answer = api.op(op, json!({"id": "batch_1"})).await;
            assert_eq!(answer.kind(), (expected.0, expected.1.to_owned()), "{op}");
            assert_eq!(answer.json()["message"], message, "{op}");
            assert_eq!(answer.headers["content-type"], "application/json");
            assert_eq!(answer.headers.contains_key("retry-after"), matches!(expected.0, 429 | 503));
            if !matches!(expected.0, 413 | 429 | 503) {
                schema::check(expected.1, &answer.json());
            }
        }
    };
    let unavailable = "The service cannot answer right now. Try again.";
    let invalid = Code::InvalidArgument;
    check(
        refusal(invalid, Kind::Decode, "cases[0].id: is missing", &issues),
        (400, "HttpApiDecodeError"),
        "cases[0].id: is missing",
    )
    .await;
    check(
        refusal(invalid, Kind::BadRequest, "too many", &json!([])),
        (400, "BadRequest"),
        "too many",
    )
    .await;
    check(
        refusal(Code::ResourceExhausted, Kind::TooLarge, "large", &json!([])),
        (413, "PayloadTooLarge"),
        "large",
    )
    .await;
    check(
        refusal(Code::FailedPrecondition, Kind::Conflict, "3 are running", &json!([])),
        (409, "Conflict"),
        "3 are running",
    )
    .await;
    check(Status::unauthenticated("no such key"), (401, "Unauthorized"), "no such key").await;
    check(Status::permission_denied("evals:write"), (403, "Forbidden"), "evals:write").await;
    check(Status::not_found("no batch"), (404, "NotFound"), "no batch").await;
    check(Status::failed_precondition("ended"), (409, "Conflict"), "ended").await;
    check(Status::resource_exhausted("slow down"), (429, "TooManyRequests"), "slow down").await;
    check(Status::unavailable("10.0.0.7 is down"), (503, "Unavailable"), unavailable).await;
    check(Status::deadline_exceeded("disk is slow"), (503, "Unavailable"), unavailable).await;
    check(
        Status::internal("panicked at state.rs"),
        (500, "InternalError"),
        "Something went wrong on our side.",
    )
    .await;
    check(Status::data_loss("restore it"), (500, "InternalError"), "restore it").await;
}

#[tokio::test]
async fn without_a_scheduler_the_caller_may_come_again() {
    let api = Api::without_scheduler().await;
    let answer = api.op("evals.batches.list", json!({})).await;
    assert_eq!(answer.kind(), (503, "Unavailable".into()));
    assert_eq!(answer.headers["retry-after"], "1");
}

#[tokio::test]
async fn a_key_is_needed() {
    let api = Api::start().await;
    let long = format!("Bearer {}", "x".repeat(9000));
    let headers: [&[(&str, &str)]; 6] = [
        &[],
        &[("authorization", "")],
        &[("authorization", "Bearer ")],
        &[("authorization", "Basic YTpi")],
        &[("authorization", "Bearer another")],
        &[("authorization", &long)],
    ];
    for headers in headers {
        for op in [
            "auth.whoami",
            "evals.batches.start",
            "evals.batches.get",
            "evals.batches.list",
            "evals.runs.get",
        ] {
            let answer = api.send("POST", &format!("/v1/{op}"), headers, r#"{"id":"batch_1"}"#).await;
            assert_eq!(answer.kind(), (401, "Unauthorized".into()), "{op} {headers:?}");
            schema::check("Unauthorized", &answer.json());
        }
    }
}

#[tokio::test]
async fn a_stranger_sends_no_large_body() {
    let api = Api::start().await;
    let body = vec![b' '; 2 << 20];
    let answer = api
        .send("POST", "/v1/evals.batches.start", &[("authorization", "Bearer x")], body)
        .await;
    assert_eq!(answer.status, 401);
    assert_eq!(api.script.lock().unwrap().asked, ["whoami"], "refused before the body was read");
}

#[tokio::test]
async fn paths_and_methods() {
    let api = Api::start().await;
    let check = async |method: &str, path: &str, status: u16, tag: &str| {
        let answer = api.send(method, path, &[("authorization", KEY)], "{}").await;
        assert_eq!(answer.kind(), (status, tag.to_owned()), "{method} {path}");
        assert!(answer.json()["message"].is_string());
    };
    check("POST", "/v1/evals.unknown", 404, "NotFound").await;
    check("POST", "/v1/evals.batches.get/", 404, "NotFound").await;
    check("POST", "/v1/evals.batches.get/x", 404, "NotFound").await;
    check("POST", "/v1/%FF", 404, "NotFound").await;
    check("POST", "/v1/", 404, "NotFound").await;
    check("POST", "/v2/evals.batches.get", 404, "NotFound").await;
    check("GET", "/v1/evals.unknown", 404, "NotFound").await;
    check("GET", "/nothing", 404, "NotFound").await;
    check("GET", "/v1/evals.batches.get", 405, "MethodNotAllowed").await;
    check("PUT", "/v1/evals.batches.start", 405, "MethodNotAllowed").await;
    check("DELETE", "/v1/auth.whoami", 405, "MethodNotAllowed").await;
    check("POST", "/", 405, "MethodNotAllowed").await;
}

#[tokio::test]
async fn malformed_bodies_name_their_fault() {
    let api = Api::start().await;
    let deep = |depth: usize| format!("{{\"id\":\"batch_1\",\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    let check = async |op: &str, body: &[u8], path: Value| {
        let answer = api
            .send("POST", &format!("/v1/{op}"), &[("authorization", KEY)], body.to_vec())
            .await;
        assert_eq!(
            answer.kind(),
            (400, "HttpApiDecodeError".into()),
            "{:?}",
            String::from_utf8_lossy(body)
        );
        schema::check("HttpApiDecodeError", &answer.json());
        assert_eq!(answer.json()["issues"][0]["path"], path, "{:?}", String::from_utf8_lossy(body));
    };
    check("evals.batches.get", b"", json!([])).await;
    check("evals.batches.get", b"{", json!([])).await;
    check("evals.batches.get", b"\xff\xfe", json!([])).await;
    check("evals.batches.get", b"null", json!([])).await;
    check("evals.batches.get", b"{}", json!(["id"])).await;
    check("evals.batches.get", b"{\"id\":7}", json!(["id"])).await;
    check("evals.runs.get", b"{\"id\":null}", json!(["id"])).await;
    check("evals.batches.cancel", b"{\"id\":[]}", json!(["id"])).await;
    check("evals.batches.get", deep(64).as_bytes(), json!([])).await;
    check("evals.batches.get", "[".repeat(1_000_000).as_bytes(), json!([])).await;
    check("evals.batches.list", b"{\"limit\":\"5\"}", json!(["limit"])).await;
    check("evals.batches.list", b"{\"limit\":2.5}", json!(["limit"])).await;
    check("evals.batches.list", b"{\"cursor\":{}}", json!(["cursor", "id"])).await;
    check(
        "evals.batches.list",
        b"{\"cursor\":{\"id\":\"a\",\"startedAtMillis\":-1}}",
        json!(["cursor", "startedAtMillis"]),
    )
    .await;
    check("evals.batches.list", b"{\"cursor\":\"a\"}", json!(["cursor"])).await;
    let fine = api.send("POST", "/v1/evals.batches.get", &[("authorization", KEY)], deep(63)).await;
    assert_eq!(fine.status, 404, "64 levels are allowed");
}

#[tokio::test]
async fn bodies_have_limits() {
    let api = Api::start().await;
    let check = async |op: &str, size: usize, status: u16| {
        let mut body = vec![b' '; size - 2];
        body.extend_from_slice(b"{}");
        let answer = api.send("POST", &format!("/v1/{op}"), &[("authorization", KEY)], body).await;
        assert_eq!(answer.status, status, "{op} {size}");
        if status == 413 {
            assert_eq!(answer.kind().1, "PayloadTooLarge");
        }
    };
    check("evals.batches.start", 64 << 20, 200).await;
    check("evals.batches.start", (64 << 20) + 1, 413).await;
    check("auth.whoami", 8 << 20, 200).await;
    check("auth.whoami", (8 << 20) + 1, 413).await;
    assert_eq!(api.script.lock().unwrap().started[0].json.len(), 64 << 20);
}

#[test]
fn whatever_is_sent_is_answered_with_a_4xx() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let api = runtime.block_on(Api::start());
    let seen = Mutex::new(0);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC*".prop_map(Value::from),
    ];
    let key = prop_oneof![
        Just("id".to_owned()),
        Just("cursor".to_owned()),
        Just("limit".to_owned()),
        Just("startedAtMillis".to_owned()),
        "\\PC*"
    ];
    let tree = leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    });
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        tree.prop_map(|value| value.to_string().into_bytes())
    ];
    let op = prop::sample::select(vec![
        "evals.batches.get",
        "evals.batches.cancel",
        "evals.runs.get",
        "evals.batches.list",
        "auth.whoami",
    ]);
    proptest!(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() }, |(op in op, body in body)| {
        // Nothing is found, so a well-formed body gets a 404 where it names something.
        api.script.lock().unwrap().refuse = Some(Status::not_found("nothing"));
        let answer = runtime.block_on(api.send("POST", &format!("/v1/{op}"), &[("authorization", KEY)], body));
        let fine = answer.status.is_client_error() || (op == "auth.whoami" && answer.status == 200);
        prop_assert!(fine, "{op} {:?}", answer);
        *seen.lock().unwrap() += 1;
    });
    assert_eq!(*seen.lock().unwrap(), 300);
}

/// The script with `size` bytes of evidence in an object.
fn with_evidence(api: &Api, bytes: Vec<u8>) {
    let (mut batch, mut objects) = batch();
    let outcome = batch.runs[0].trials[1].outcome.as_mut().unwrap();
    outcome.evidence = Some(Evidence {
        place: Some(Place::Object(ObjectRef {
            sha256: "large".into(),
            size: bytes.len() as u64,
        })),
    });
    objects.insert("large".into(), bytes);
    let mut script = api.script.lock().unwrap();
    script.batch = batch;
    script.objects = objects;
}

#[tokio::test]
async fn evidence_of_any_size_comes_through_whole() {
    let api = Api::start().await;
    for size in [1, 1000, 65_530, 65_536, 65_540, 200_000, 40 << 20] {
        let evidence = json!({
            "artifacts": [], "filesChanged": ["x".repeat(size)], "trajectory": [], "validations": [], "verifySteps": [],
            "voidFields": [], "diagnostics": [],
        });
        with_evidence(&api, evidence.to_string().into_bytes());
        let batch = api.op("evals.batches.get", json!({"id": "batch_1"})).await.json();
        schema::check("EvalBatch", &batch);
        assert_eq!(batch["runs"][0]["trials"][1]["filesChanged"][0].as_str().unwrap().len(), size);
    }
}

#[tokio::test]
async fn a_result_that_breaks_off_never_looks_whole() {
    let api = Api::start().await;
    let get = async || {
        let body = json!({"id": "batch_1"}).to_string();
        api.try_send("POST", "/v1/evals.batches.get", &[("authorization", KEY)], body).await
    };
    for evidence in ["{\"artifacts\":[]", "[]", "", "\"text\"", "{"] {
        with_evidence(&api, evidence.as_bytes().to_vec());
        let answer = get().await;
        assert!(answer.is_err(), "{evidence:?}: {answer:?}");
    }
    with_evidence(&api, format!("{{\"filesChanged\":[\"{}\"]}}", "x".repeat(300_000)).into_bytes());
    for cut in [0, 1, 100_000, 300_000] {
        api.script.lock().unwrap().cut_objects_at = Some(cut);
        let answer = get().await;
        assert!(answer.is_err(), "cut at {cut}: {answer:?}");
    }
    api.script.lock().unwrap().cut_objects_at = None;
    api.script.lock().unwrap().objects.remove("large");
    assert!(get().await.is_err());
    api.script.lock().unwrap().objects.remove("request");
    let answer = get().await.unwrap();
    assert_eq!(
        answer.kind(),
        (500, "InternalError".into()),
        "before the first byte there is a proper answer"
    );
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("Start the batch anew"), "it says what to do: {message}");
}

#[tokio::test]
async fn shutdown_lets_requests_finish_and_takes_no_more() {
    let api = Api::start().await;
    let mut connection = tokio::net::TcpStream::connect(api.address).await.unwrap();
    let head =
        format!("POST /v1/auth.whoami HTTP/1.1\r\nhost: x\r\nauthorization: {KEY}\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    // This much is answered only when the handler waits for the body.
    let mut continued = [0; 25];
    connection.read_exact(&mut continued).await.unwrap();
    assert_eq!(&continued, b"HTTP/1.1 100 Continue\r\n\r\n");
    api.shut_down();
    connection.write_all(b"{}").await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
}

/// catalogue 54: connections that say nothing, or stop in the middle of a word, are cut at the end of the grace.
#[tokio::test]
async fn shutdown_waits_for_no_silent_connection() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let schedulers = vec!["http://127.0.0.1:1".to_owned()];
    let serving = tokio::spawn(evalgrid_api::serve(
        listener,
        evalgrid_api::ApiOptions::one_cell(schedulers),
        stopped,
    ));
    let head = "POST /v1/auth.whoami HTTP/1.1\r\nhost: x\r\nauthorization: Bearer x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
    let mut connections = Vec::new();
    for words in ["", "POST /v1/auth.wh", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", head] {
        let mut connection = tokio::net::TcpStream::connect(address).await.unwrap();
        connection.write_all(words.as_bytes()).await.unwrap();
        connections.push(connection);
    }
    // The last one has been taken in: its handler waits for the body.
    let mut continued = [0; 25];
    connections[3].read_exact(&mut continued).await.unwrap();
    stop.send(true).unwrap();
    // The grace is ten seconds; the rest is the machine's.
    let ended = tokio::time::timeout(std::time::Duration::from_secs(16), serving).await;
    ended.unwrap().unwrap().unwrap();
}
