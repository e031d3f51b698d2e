//! Each format, each mode, over real connections: what a client gets, and what is written down.
#![allow(clippy::unwrap_used)]

mod client;

use std::{collections::BTreeMap, time::Duration};

use client::{CHAT, GEMINI, GEMINI_WHOLE, MESSAGES, PATIENCE, RESPONSES, all, ask, post};
use evalgrid_modelserver::{Mode, ModelServer, usage};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// One user message, and one shell tool, in the words of a format.
fn request(path: &str, prompt: &str, stream: bool) -> Value {
    let schema = json!({ "type": "object", "properties": { "command": { "type": "string" } }, "required": ["command"] });
    match path {
        RESPONSES => json!({ "model": "m", "stream": stream, "instructions": "be good",
            "input": [{ "type": "message", "role": "user", "content": [{ "type": "input_text", "text": prompt }] }],
            "tools": [{ "type": "web_search" }, { "type": "function", "name": "bash", "parameters": schema }] }),
        MESSAGES => json!({ "model": "m", "stream": stream, "max_tokens": 100, "system": "be good",
            "messages": [{ "role": "user", "content": prompt }], "tools": [{ "name": "bash", "input_schema": schema }] }),
        CHAT => {
            json!({ "model": "m", "stream": stream, "messages": [{ "role": "system", "content": "be good" }, { "role": "user", "content": prompt }],
            "tools": [{ "type": "function", "function": { "name": "bash", "parameters": schema } }] })
        }
        _ => json!({ "contents": [{ "role": "user", "parts": [{ "text": prompt }] }],
            "tools": [{ "functionDeclarations": [{ "name": "bash", "parametersJsonSchema": schema }] }] }),
    }
}

#[tokio::test]
async fn what_clients_get() {
    let server = &ModelServer::start("127.0.0.1:0", None).await.unwrap();
    // Where the pieces of a streamed text, and of a call's arguments, are; and of the same in an answer at once.
    let check = async |path: &str, stream: bool, text: &str, arguments: &str, output_tokens: &str| {
        let got = ask(server, Mode::Ok, path, &request(path, "hello", stream)).await;
        assert_eq!((got.status, got.whole), (200, true), "{path} {}", got.body);
        assert!(all(&got.body, text).starts_with("[turn 1] You said: hello"), "{path} {}", got.body);
        // The last number is that of the whole.
        assert!(
            all(&got.body, output_tokens).ends_with(&usage::OUTPUT.to_string()),
            "{path} {}",
            got.body
        );
        let got = ask(server, Mode::Ok, path, &request(path, "RUN ls -l", stream)).await;
        let called = all(&got.body, arguments);
        let expected = if called.starts_with('{') {
            r#"{"command":"ls -l"}"#
        } else {
            "ls -l"
        };
        assert!(called.starts_with(expected), "{path} {}", got.body);
        assert!(all(&got.body, "name").starts_with("bash"), "{path} {}", got.body);
    };
    check(RESPONSES, true, "delta", "delta", "output_tokens").await;
    check(RESPONSES, false, "text", "arguments", "output_tokens").await;
    check(MESSAGES, true, "text", "partial_json", "output_tokens").await;
    check(MESSAGES, false, "text", "command", "output_tokens").await;
    check(CHAT, true, "content", "arguments", "completion_tokens").await;
    check(CHAT, false, "content", "arguments", "completion_tokens").await;
    check(GEMINI, true, "text", "command", "candidatesTokenCount").await;
    check(GEMINI_WHOLE, false, "text", "command", "candidatesTokenCount").await;
}

#[tokio::test]
async fn faults_and_refusals() {
    let server = &ModelServer::start("127.0.0.1:0", None).await.unwrap();
    // `kind`: the field of the vendor's error that says what it is, and its values for 401, 429, 500 and 400.
    let check = async |path: &str, kind: &str, kinds: [&str; 4], nonsense: &[Value]| {
        let hello = request(path, "hello", true);
        for (mode, status, expected) in [
            (Mode::M401, 401, kinds[0]),
            (Mode::M429, 429, kinds[1]),
            (Mode::M500, 500, kinds[2]),
        ] {
            let got = ask(server, mode, path, &hello).await;
            assert_eq!(
                (got.status, all(&got.body, kind).as_str()),
                (status, expected),
                "{path} {}",
                got.body
            );
            assert_eq!(got.retry_after.is_some(), status == 429);
        }
        let got = post(&format!("{}{path}", server.url(Mode::Ok)), &[], hello.to_string().into_bytes()).await;
        assert_eq!(
            (got.status, all(&got.body, kind).as_str()),
            (401, kinds[0]),
            "{path}: without a key"
        );
        let got = ask(server, Mode::Cut, path, &hello).await;
        assert_eq!((got.status, got.whole), (200, false), "{path} {}", got.body);
        assert!(!got.body.is_empty(), "{path}");
        for nonsense in nonsense {
            let got = ask(server, Mode::Ok, path, nonsense).await;
            assert_eq!(
                (got.status, all(&got.body, kind).as_str()),
                (400, kinds[3]),
                "{path} {nonsense} {}",
                got.body
            );
        }
    };
    let no_user = json!({ "model": "m", "max_tokens": 1, "input": [], "messages": [], "contents": [] });
    let orphans = json!({ "model": "m", "max_tokens": 1,
        "input": [{ "role": "user", "content": "a" }, { "type": "function_call_output", "call_id": "c", "output": "x" }],
        "messages": [{ "role": "user", "content": "a" }, { "role": "tool", "tool_call_id": "c", "content": "x" }],
        "contents": [{ "role": "user", "parts": [{ "text": "a" }, { "functionResponse": { "name": "bash", "response": {} } }] }] });
    let unanswered = json!({ "model": "m", "max_tokens": 1,
        "input": [{ "role": "user", "content": "a" }, { "type": "function_call", "call_id": "c" }, { "role": "user", "content": "b" }],
        "contents": [{ "parts": [{ "text": "a" }] }, { "role": "model", "parts": [{ "functionCall": { "name": "bash" } }] }, { "parts": [{ "text": "b" }] }],
        "messages": [{ "role": "user", "content": "a" },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": "c" }], "tool_calls": [{ "id": "c", "function": { "arguments": "{}" } }] },
            { "role": "user", "content": "b" }] });
    let nonsense = [json!(null), json!({}), no_user, orphans, unanswered];
    let openai = ["invalid_api_key", "rate_limit_exceeded", "server_error", "invalid_request_error"];
    check(RESPONSES, "code", openai, &nonsense).await;
    check(CHAT, "code", openai, &nonsense).await;
    let anthropic = ["authentication_error", "rate_limit_error", "api_error", "invalid_request_error"].map(|kind| format!("{kind}error"));
    check(MESSAGES, "type", anthropic.each_ref().map(String::as_str), &nonsense).await;
    let gemini = ["UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT"];
    check(GEMINI, "status", gemini, &nonsense).await;

    let post = async |path: &str, body: Vec<u8>| post(&format!("{}{path}", server.url(Mode::Ok)), &[("x-api-key", "k")], body).await;
    assert!(post("/v1/messages", b"{}".to_vec()).await.body.contains("anthropic-version"));
    assert_eq!(post("/v1/responses", vec![b' '; (16 << 20) + 1]).await.status, 413);
    assert_eq!(post("/v1/nothing", Vec::new()).await.status, 404);
    assert_eq!(post("/v1beta/models/m:embedContent", Vec::new()).await.status, 404);
}

#[tokio::test]
async fn every_request_is_written_down() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    std::fs::write(&socket, "an old one").unwrap();
    let server = ModelServer::start("127.0.0.1:0", Some(&socket)).await.unwrap();
    let conversation = |last: Value| json!({ "model": "m", "messages": [{ "role": "user", "content": "RUN ls" }, last] });
    let call = |id: &str, output: &str| {
        json!({ "model": "m", "messages": [
            { "role": "user", "content": "RUN ls" },
            { "role": "assistant", "tool_calls": [{ "id": id, "function": { "name": "bash", "arguments": "{}" } }] },
            { "role": "tool", "tool_call_id": id, "content": output },
        ] })
    };
    ask(&server, Mode::Ok, CHAT, &request(CHAT, "RUN ls", true)).await;
    ask(&server, Mode::Ok, CHAT, &call("1", "a")).await;
    // The same step again, though the tool printed something else this time.
    ask(&server, Mode::Ok, CHAT, &call("2", "b")).await;
    ask(
        &server,
        Mode::M500,
        CHAT,
        &conversation(json!({ "role": "user", "content": "SAY x" })),
    )
    .await;
    ask(&server, Mode::Ok, GEMINI, &json!({})).await;
    // A request that is waited for in vain is written down too.
    let hang = request(CHAT, "hang", true);
    let seen = async {
        while server.totals().requests < 6 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        got = ask(&server, Mode::Hang, CHAT, &hang) => panic!("answered: {}", got.status),
        seen = tokio::time::timeout(PATIENCE, seen) => seen.unwrap(),
    }

    let requests = server.requests();
    let answers: Vec<&str> = requests.iter().map(|request| request.answer.as_str()).collect();
    let refused = "refused: contents: must be an array";
    assert_eq!(answers, ["call bash", "text", "text", "500", refused, "none"]);
    assert_eq!(requests[1].prompt_hash, requests[2].prompt_hash);
    assert_ne!(requests[0].prompt_hash, requests[1].prompt_hash);
    assert_eq!(
        (requests[3].prompt.as_str(), requests[3].key.as_str(), requests[3].items),
        ("SAY x", "k", 2)
    );
    assert_eq!(
        (requests[3].method.as_str(), requests[3].path.as_str(), &requests[3].idempotency_key),
        ("POST", "/m500/v1/chat/completions", &None)
    );
    assert_eq!((requests[0].tools.concat().as_str(), &*requests[4].body), ("bash", "{}"));
    let counts = BTreeMap::from(
        [("chat ok", 3), ("chat m500", 1), ("chat mhang", 1), ("gemini ok", 1)].map(|(kind, count)| (kind.to_owned(), count)),
    );
    assert_eq!(server.totals().by_kind, counts);

    // The same through the socket.
    let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
    stream
        .write_all(b"GET /_requests HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut text = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut text))
        .await
        .unwrap()
        .unwrap();
    assert!(text.contains(r#""requests":6"#) && text.contains(r#""promptHash""#), "{text}");
}
