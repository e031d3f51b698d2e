//! Large and slow request bodies over real sockets: they keep nobody else out.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::time::Duration;

use evalgrid_api::limits;
use futures::{StreamExt as _, future, stream::FuturesUnordered};
use serde_json::json;
use support::{Api, KEY, OTHER, READER};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Generous: an answer on an idle machine takes a few milliseconds.
const SOON: Duration = Duration::from_secs(1);
/// Until the test gives up on a condition.
const AT_LAST: Duration = Duration::from_secs(30);
const FIRST_BYTES: &[u8] = b"{\"cases\": [";

/// A request whose body does not end: `framing` is the header that says how long it is, `bytes` are all that is sent of it.
async fn unfinished(api: &Api, op: &str, key: &str, framing: &str, bytes: &[u8]) -> TcpStream {
    let mut connection = TcpStream::connect(api.address).await.unwrap();
    let head = format!("POST /v1/{op} HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\n{framing}\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(bytes).await.unwrap();
    connection
}

async fn slow_start(api: &Api, key: &str) -> TcpStream {
    unfinished(api, "evals.batches.start", key, "content-length: 64000000", FIRST_BYTES).await
}

/// The status and headers of what is answered, when it is.
async fn head(connection: &mut TcpStream) -> (u16, String) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head)
}

/// The status of a list call, which must come soon.
async fn list(api: &Api, key: &str) -> u16 {
    let headers = [("authorization", key)];
    let call = api.send("POST", "/v1/evals.batches.list", &headers, "{}");
    let answer = timeout(SOON, call).await.expect("a small request waits for nobody");
    answer.status.as_u16()
}

/// Opens slow starts until the organization of KEY has all its turns taken, and gives those that have one.
async fn all_turns(api: &Api, attempts: usize) -> Vec<TcpStream> {
    let mut connections = Vec::new();
    for _ in 0..attempts {
        connections.push(slow_start(api, KEY).await);
    }
    // One future for each connection: it ends when the connection is refused, and gives the connection back when told to stop.
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut waiting: FuturesUnordered<_> = connections
        .into_iter()
        .map(|mut connection| {
            let mut stopped = stopped.clone();
            async move {
                let answer = tokio::select! {
                    answer = head(&mut connection) => Some(answer),
                    _ = stopped.wait_for(|stop| *stop) => None,
                };
                if let Some((status, head)) = answer {
                    assert_eq!(status, 429);
                    assert!(head.contains("\r\nretry-after: 1\r\n"), "{head}");
                    return None;
                }
                Some(connection)
            }
        })
        .collect();
    for _ in limits::LARGE_BODIES_PER_ORGANIZATION..attempts {
        assert!(timeout(SOON, waiting.next()).await.expect("refused at once").unwrap().is_none());
    }
    stop.send(true).unwrap();
    let held: Vec<_> = waiting.filter_map(future::ready).collect().await;
    assert_eq!(held.len(), limits::LARGE_BODIES_PER_ORGANIZATION);
    held
}

#[tokio::test]
async fn slow_bodies_of_one_organization_keep_no_other_out() {
    let api = Api::start().await;
    let slow = async {
        let held = all_turns(&api, 16).await;
        assert_eq!(list(&api, KEY).await, 200, "nor its own small requests");
        let headers = [("authorization", OTHER)];
        let start = api.send("POST", "/v1/evals.batches.start", &headers, vec![b' '; 1 << 20]);
        let started = timeout(SOON, start).await.expect("another's start waits for nobody");
        assert_eq!(started.status, 200);
        held
    };
    let others = async || {
        for _ in 0..20 {
            assert_eq!(list(&api, OTHER).await, 200);
        }
    };
    let (held, ()) = tokio::join!(slow, others());
    others().await;
    drop(held);
}

#[tokio::test]
async fn a_turn_is_free_again_when_its_connection_is_gone() {
    let api = Api::start().await;
    let mut held = all_turns(&api, limits::LARGE_BODIES_PER_ORGANIZATION + 1).await;
    let start = async || {
        api.send("POST", "/v1/evals.batches.start", &[("authorization", KEY)], vec![b' '; 1 << 20])
            .await
    };
    let refused = start().await;
    assert_eq!(refused.kind(), (429, "TooManyRequests".into()));
    assert_eq!(refused.headers["retry-after"], "1");
    held.pop();
    let freed = async { while start().await.status != 200 {} };
    timeout(AT_LAST, freed).await.expect("the turn is given back");
}

#[tokio::test]
async fn a_body_that_stalls_is_cut() {
    let api = Api::start().await;
    let cut = async |op: &str, framing: &str, bytes: &[u8]| {
        let mut connection = unfinished(&api, op, KEY, framing, bytes).await;
        let (status, _) = timeout(AT_LAST, head(&mut connection)).await.expect("cut in time");
        assert_eq!(status, 408, "{op} {framing}");
    };
    tokio::join!(
        cut("evals.batches.start", "content-length: 64000000", FIRST_BYTES),
        cut("evals.batches.list", "content-length: 2", b"{"),
        cut("evals.batches.list", "transfer-encoding: chunked", b"1\r\n{\r\n"),
    );
    assert!(api.script.lock().unwrap().started.is_empty());
}

#[tokio::test]
async fn a_large_body_is_refused_before_it_is_sent() {
    let api = Api::start().await;
    // One chunk that is more than a small body, and no end.
    let large_chunk = [b"20000\r\n".as_slice(), &[b' '; 0x20000], b"\r\n"].concat();
    let check = async |op: &str, key: &str, status: u16| {
        for (framing, bytes) in [
            ("content-length: 1000000", b"".as_slice()),
            ("transfer-encoding: chunked", &large_chunk),
        ] {
            let mut connection = unfinished(&api, op, key, framing, bytes).await;
            let (got, _) = timeout(SOON, head(&mut connection)).await.expect("refused at once");
            assert_eq!(got, status, "{op} {key} {framing}");
        }
    };
    check("evals.batches.start", READER, 403).await;
    check("evals.batches.start", "Bearer x", 401).await;
    check("evals.batches.list", "Bearer x", 401).await;
    assert_eq!(api.script.lock().unwrap().asked, ["whoami"; 6]);

    let mut connection = unfinished(&api, "evals.batches.start", KEY, "content-length: 67108865", b"").await;
    assert_eq!(timeout(SOON, head(&mut connection)).await.expect("refused at once").0, 413);
}

#[tokio::test]
async fn a_chunked_body_is_measured_while_it_is_read() {
    let api = Api::start().await;
    let chunk = [b"100000\r\n".as_slice(), &[b' '; 0x100000], b"\r\n"].concat();
    let end = b"2\r\n{}\r\n0\r\n\r\n".as_slice();
    for (chunks, status) in [(0, 200), (7, 200), (8, 413)] {
        let body = [&chunk.repeat(chunks), end].concat();
        let mut connection = unfinished(&api, "auth.whoami", KEY, "transfer-encoding: chunked", &body).await;
        assert_eq!(
            timeout(AT_LAST, head(&mut connection)).await.expect("answered").0,
            status,
            "{chunks}"
        );
    }
}

#[tokio::test]
async fn a_reader_may_send_a_large_body_to_what_only_reads() {
    let api = Api::start().await;
    let body = [vec![b' '; 1 << 20], json!({}).to_string().into_bytes()].concat();
    let answer = api.send("POST", "/v1/evals.batches.list", &[("authorization", READER)], body).await;
    assert_eq!(answer.status, 200);
}
