//! Every way in which a call to a model can end.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use evalgrid_judge_runner::http::{Answered, Call, Http, HttpOptions, Outcome};
use support::provider::{Reply, Server};
use tokio::{net::TcpListener, time::Instant};

fn options() -> HttpOptions {
    HttpOptions {
        connect: Duration::from_millis(500),
        stall: Duration::from_millis(100),
        max_answer_bytes: 1_000,
        ..HttpOptions::default()
    }
}

async fn ask(url: &str, within: Duration) -> Outcome {
    let call = Call {
        url,
        key: "secret-key",
        idempotency_key: "job-7",
        body: br#"{"question":1}"#.to_vec(),
        deadline: Instant::now() + within,
    };
    Http::new(options()).unwrap().post(call).await
}

/// What comes of a call that is answered like this, which is sent once whatever comes.
async fn answered(reply: Reply) -> Outcome {
    let server = Server::start(vec![reply]).await;
    let outcome = ask(&server.url, Duration::from_secs(20)).await;
    let requests = server.requests();
    assert_eq!(requests.len(), 1, "{outcome:?}");
    outcome
}

#[tokio::test]
async fn a_call_is_sent_as_it_should_be() {
    let server = Server::start(vec![Reply::json(200, "{}")]).await;
    let outcome = ask(&format!("{}/v1/responses", server.url), Duration::from_secs(20)).await;
    let expected = Answered {
        status: 200,
        request_id: Some("req-1".into()),
        body: b"{}".to_vec(),
    };
    assert_eq!(outcome, Outcome::Answered(expected));
    let requests = server.requests();
    let head = &requests[0].head;
    for line in [
        "post /v1/responses http/1.1",
        "authorization: bearer secret-key",
        "idempotency-key: job-7",
        "content-type: application/json",
        "user-agent: evalgrid/",
    ] {
        assert!(head.lines().any(|found| found.starts_with(line)), "{line} in {head}");
    }
    assert_eq!(requests[0].body, r#"{"question":1}"#);
}

#[tokio::test]
async fn refusals_for_now() {
    let check =
        async |status: u16, headers: &[(&str, &str)], body: &str, wait: u64| match answered(Reply::with(status, headers, body)).await {
            Outcome::NotNow { retry_after_ms, reason } => {
                assert_eq!(retry_after_ms, wait, "{status}");
                assert_eq!(reason, format!("status {status}: slow down"));
            }
            other => panic!("{status}: {other:?}"),
        };
    let body = r#"{"error":{"message":"slow down","code":"rate_limit_exceeded"}}"#;
    check(429, &[("retry-after", "3")], body, 3_000).await;
    check(429, &[("retry-after", "3"), ("retry-after-ms", "40")], body, 40).await;
    for status in [408, 409, 425, 429, 503, 529] {
        check(status, &[], body, 0).await;
    }
}

#[tokio::test]
async fn refusals_for_good() {
    let check = async |status: u16, headers: &[(&str, &str)], body: &str, expected: &str| {
        let outcome = answered(Reply::with(status, headers, body)).await;
        let message = expected.to_owned();
        assert_eq!(outcome, Outcome::Refused { status, message });
    };
    for status in [400, 401, 402, 403, 404, 413, 422] {
        check(status, &[], r#"{"error":{"message":"no"}}"#, "no").await;
    }
    check(
        429,
        &[],
        r#"{"error":{"message":"no money","code":"insufficient_quota"}}"#,
        "no money",
    )
    .await;
    // A redirect is no answer, and the key goes nowhere else.
    check(302, &[("location", "http://127.0.0.1:1/")], "", "no reason was given").await;
    check(307, &[("location", "/other")], "moved", "moved").await;
    check(404, &[], &"x".repeat(100_000), &"x".repeat(500)).await;
}

#[tokio::test]
async fn answers_that_may_have_been_given() {
    let check = async |reply: Reply, expected: &str| match answered(reply.clone()).await {
        Outcome::Unclear { reason } => assert!(reason.contains(expected), "{reply:?}: {reason}"),
        other => panic!("{reply:?}: {other:?}"),
    };
    for status in [500, 502, 504, 520, 524] {
        check(Reply::with(status, &[], "oops"), ": oops").await;
    }
    // It breaks before the answer, in its head, in its body.
    check(Reply::Bytes(String::new()), "broke before it answered").await;
    check(Reply::Bytes("HTTP/1.1 200 OK\r\ncont".into()), "broke before it answered").await;
    check(Reply::Bytes("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{".into()), "broke off").await;
    check(
        Reply::Bytes("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n12345\r\n".into()),
        "broke off",
    )
    .await;
    check(Reply::Bytes("SSH-2.0-OpenSSH\r\n".into()), "broke before it answered").await;
    // One byte, and then silence.
    check(Reply::Stuck("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{".into()), "stood still").await;
    check(Reply::Stuck("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n".into()), "stood still").await;
    // A failure counts even if its text does not come.
    check(Reply::Stuck("HTTP/1.1 500 No\r\ncontent-length: 10\r\n\r\n{".into()), "500").await;
}

#[tokio::test]
async fn answers_that_are_too_long() {
    assert_eq!(answered(Reply::json(200, &"x".repeat(1_001))).await, Outcome::TooLong);
    assert!(matches!(answered(Reply::json(200, &"x".repeat(1_000))).await, Outcome::Answered(_)));
    // One that never ends, and does not say how long it is.
    let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(2_000));
    assert_eq!(answered(Reply::Stuck(endless)).await, Outcome::TooLong);
}

#[tokio::test]
async fn answers_that_do_not_come_in_time() {
    for reply in ["", "HTTP/1.1 20"] {
        let server = Server::start(vec![Reply::Stuck(reply.into())]).await;
        assert_eq!(ask(&server.url, Duration::from_millis(200)).await, Outcome::TimedOut);
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn nobody_there() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for url in [format!("http://{port}/v1"), "http://no-such-host.invalid/".into()] {
        match ask(&url, Duration::from_secs(20)).await {
            Outcome::NotNow { retry_after_ms: 0, reason } => assert!(reason.starts_with("no connection: "), "{reason}"),
            other => panic!("{url}: {other:?}"),
        }
    }
    // Speaks, but no TLS.
    let server = Server::start(vec![Reply::json(200, "{}")]).await;
    let outcome = ask(&server.url.replace("http:", "https:"), Duration::from_secs(20)).await;
    assert!(matches!(outcome, Outcome::NotNow { .. }), "{outcome:?}");
    for url in ["", "not a url", "ftp://host/", "/v1/responses"] {
        let outcome = ask(url, Duration::from_secs(20)).await;
        assert!(matches!(&outcome, Outcome::Uncallable { .. }), "{url}: {outcome:?}");
    }
}

#[tokio::test]
async fn an_operators_proxy_gets_the_calls() {
    let proxy = Server::start(vec![Reply::json(200, "{}")]).await;
    let options = HttpOptions {
        proxy: Some(proxy.url.clone()),
        ..options()
    };
    let call = Call {
        url: "http://model.invalid/v1",
        key: "k",
        idempotency_key: "i",
        body: Vec::new(),
        deadline: Instant::now() + Duration::from_secs(20),
    };
    let outcome = Http::new(options).unwrap().post(call).await;
    assert!(matches!(outcome, Outcome::Answered(_)), "{outcome:?}");
    assert!(proxy.requests()[0].head.starts_with("post http://model.invalid/v1 "));
    let options = HttpOptions {
        proxy: Some("::no proxy::".into()),
        ..HttpOptions::default()
    };
    assert!(Http::new(options).is_err());
}
