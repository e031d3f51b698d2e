//! Judges and people that are models: what they are sent, and what is made of everything they may send back.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use evalgrid_domain::{
    answerer::Failure,
    evidence::JudgeUsage,
    judge::Question,
    person::{ChatMessage, ChatRole},
};
use evalgrid_judge_runner::{
    chat,
    http::{Http, HttpOptions},
    model::{Ended, Endpoint, Met, Terms},
    openai,
};
use serde_json::{Value, json};
use support::provider::{Reply, Request, Server};
use tokio::time::Instant;

const LIMIT_MS: u64 = 20_000;

fn http() -> Http {
    Http::new(HttpOptions {
        stall: Duration::from_millis(100),
        max_answer_bytes: 10_000,
        ..HttpOptions::default()
    })
    .unwrap()
}

fn endpoint<'a>(provider: &'a str, base_url: &'a str) -> Endpoint<'a> {
    Endpoint {
        provider,
        base_url,
        key: "secret-key",
        model: "model-1",
    }
}

fn terms() -> Terms<'static> {
    Terms {
        idempotency_key: "job-7",
        deadline: Instant::now() + Duration::from_millis(LIMIT_MS),
        limit_ms: LIMIT_MS,
    }
}

fn question() -> Question {
    Question {
        instructions: "Judge.".into(),
        input: "The evidence.".into(),
        schema: json!({"type": "object"}),
    }
}

async fn judge(reply: Reply) -> (Met, Request) {
    let server = Server::start(vec![reply]).await;
    let met = openai::judge(&http(), endpoint("openai", &server.url), &question(), terms()).await;
    (met, server.requests().remove(0))
}

async fn person(provider: &str, reply: Reply) -> (Met, Request) {
    let server = Server::start(vec![reply]).await;
    let messages = [ChatMessage {
        role: ChatRole::User,
        content: "Hello!".into(),
    }];
    let met = chat::person(&http(), endpoint(provider, &server.url), &messages, terms()).await;
    (met, server.requests().remove(0))
}

fn ended(met: Met) -> Ended {
    match met {
        Met::Ended(ended) => {
            assert!(!format!("{:?}", ended.metadata).contains("secret-key"));
            ended
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_a_judge_is_sent() {
    let (_, request) = judge(Reply::json(200, "{}")).await;
    assert!(request.head.starts_with("post /responses "), "{}", request.head);
    let body: Value = serde_json::from_str(&request.body).unwrap();
    let expected = json!({
        "model": "model-1", "instructions": "Judge.", "input": "The evidence.", "store": false, "max_output_tokens": 2048,
        "text": {"format": {"type": "json_schema", "name": "judgment", "strict": true, "schema": {"type": "object"}}},
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn what_a_judge_answers() {
    let answer = json!({
        "id": "resp_1", "object": "response", "status": "completed", "model": "model-1-2026", "service_tier": "default", "error": null,
        "incomplete_details": null, "output": [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "{\"choice\":", "annotations": []}, {"type": "output_text", "text": "1}", "logprobs": []},
            ]},
        ],
        "usage": {
            "input_tokens": 100, "input_tokens_details": {"cached_tokens": 60}, "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 120,
        },
    });
    let ended = ended(judge(Reply::json(200, &answer.to_string())).await.0);
    assert_eq!(
        (ended.said, ended.raw.as_deref()),
        (Ok("{\"choice\":1}".into()), Some("{\"choice\":1}"))
    );
    let usage = JudgeUsage {
        cache_read_tokens: 60,
        input_tokens: 40,
        output_tokens: 20,
        total_tokens: 120,
        ..JudgeUsage::default()
    };
    assert_eq!(ended.usage, Some(usage));
    let metadata = json!({
        "provider": "openai", "model": "model-1", "modelReported": "model-1-2026", "httpStatus": 200, "requestId": "req-1",
        "responseId": "resp_1", "status": "completed",
    });
    assert_eq!(Value::Object(ended.metadata), metadata);
}

/// catalogue J5: refused, cut off, or something else than an answer.
#[tokio::test]
async fn what_is_no_judges_answer() {
    let check = async |status: &str, output: Value, more: Value, expected: Failure, raw: &str| {
        let mut answer = json!({"status": status, "output": output, "usage": {"input_tokens": 1, "output_tokens": 2}});
        answer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let ended = ended(judge(Reply::json(200, &answer.to_string())).await.0);
        assert_eq!(ended.said, Err(expected), "{answer}");
        assert_eq!(ended.usage.map(|usage| usage.total_tokens), Some(3), "{answer}");
        // What was said is kept. Where something else came, that is.
        match raw {
            "" => assert_eq!(ended.raw.unwrap(), answer.to_string()),
            raw => assert_eq!(ended.raw.unwrap(), raw),
        }
    };
    let says = |text: &str| json!({"type": "message", "content": [{"type": "output_text", "text": text}]});
    let refusal = json!([says("I"), {"type": "message", "content": [{"type": "refusal", "refusal": "I will not"}]}]);
    let refused = Failure::Refused { said: "I will not".into() };
    check("completed", refusal.clone(), json!({}), refused.clone(), "I will not").await;
    check(
        "incomplete",
        refusal,
        json!({"incomplete_details": {"reason": "content_filter"}}),
        refused,
        "I will not",
    )
    .await;
    for reason in ["max_output_tokens", "content_filter"] {
        let more = json!({"incomplete_details": {"reason": reason}});
        let expected = Failure::CutOff { reason: reason.into() };
        check("incomplete", json!([says("{\"choi")]), more, expected, "{\"choi").await;
    }
    let tool = |tool: &str| Failure::UsedTool { tool: tool.into() };
    let call = json!([{"type": "function_call", "name": "shell", "arguments": "{}"}, says("{}")]);
    check("completed", call, json!({}), tool("shell"), "").await;
    let search = json!([{"type": "web_search_call", "status": "completed"}, says("{}")]);
    check("completed", search, json!({}), tool("web_search_call"), "").await;
    let expected = Failure::Provider {
        status: 400,
        message: "bad image".into(),
    };
    check(
        "failed",
        json!([]),
        json!({"error": {"code": "invalid_image", "message": "bad image"}}),
        expected,
        "",
    )
    .await;
}

#[tokio::test]
async fn what_cannot_be_read() {
    let check = async |body: &str| {
        let judged = ended(judge(Reply::json(200, body)).await.0);
        let replied = ended(person("openai", Reply::json(200, body)).await.0);
        for ended in [judged, replied] {
            match &ended.said {
                Err(Failure::Provider { status: 200, message }) => assert!(message.contains("cannot be read"), "{message}"),
                other => panic!("{body}: {other:?}"),
            }
            assert_eq!((ended.raw.as_deref(), ended.usage), (Some(body), None));
            assert_eq!(ended.metadata["requestId"], "req-1");
        }
    };
    for body in [
        "",
        "null",
        "[]",
        "{}",
        "<html>",
        "{\"status\":1}",
        "{\"status\":\"queued\",\"choices\":[]}",
        "{\"status\":\"completed\"",
        "{\"status\":\"completed\",\"output\":7,\"choices\":7}",
        "{\"status\":\"completed\",\"output\":[{}],\"choices\":[{}]}",
        "{\"status\":\"completed\",\"output\":[{\"type\":\"message\"}],\"choices\":[{\"message\":[]}]}",
        "{\"status\":\"completed\",\"output\":[{\"type\":\"message\",\"content\":[{\"type\":\"image\"}]}],\"choices\":[{\"message\":{\"content\":[]}}]}",
        "{\"status\":\"completed\",\"status\":\"completed\",\"choices\":[],\"choices\":[]}",
    ] {
        check(body).await;
    }
}

#[tokio::test]
async fn usage_that_is_not_known_is_not_zero() {
    for usage in [
        json!(null),
        json!({}),
        json!("many"),
        json!({"input_tokens": -1, "output_tokens": 2}),
    ] {
        let answer = json!({"status": "completed", "output": [{"type": "message", "content": []}], "usage": usage});
        let ended = ended(judge(Reply::json(200, &answer.to_string())).await.0);
        assert_eq!((ended.said, ended.usage), (Ok(String::new()), None));
    }
}

/// catalogue J3: one request, whatever comes back.
#[tokio::test]
async fn what_is_asked_again_is_not_decided_here() {
    let judged = async |reply: Reply| judge(reply).await.0;
    let replied = async |reply: Reply| person("openai", reply).await.0;
    let limited = Reply::with(429, &[("retry-after", "2")], r#"{"error":{"message":"slow down"}}"#);
    let expected = Met::NotNow {
        retry_after_ms: 2_000,
        reason: "status 429: slow down".into(),
    };
    assert_eq!(judged(limited.clone()).await, expected);
    assert_eq!(replied(limited).await, expected);
    let broken = Reply::Bytes(String::new());
    assert!(matches!(judged(broken.clone()).await, Met::Unclear { .. }));
    assert!(matches!(replied(broken).await, Met::Unclear { .. }));
    // Failures that come as success.
    let failed = |code: &str| {
        Reply::json(
            200,
            &json!({"status": "failed", "error": {"code": code, "message": "oh"}}).to_string(),
        )
    };
    assert!(matches!(judged(failed("rate_limit_exceeded")).await, Met::NotNow { .. }));
    assert!(matches!(judged(failed("server_error")).await, Met::Unclear { .. }));
    let failed = |code: Value| Reply::json(200, &json!({"error": {"code": code, "message": "oh"}}).to_string());
    assert!(matches!(replied(failed(json!(429))).await, Met::NotNow { .. }));
    assert!(matches!(replied(failed(json!(502))).await, Met::Unclear { .. }));
    assert!(matches!(replied(failed(json!("strange"))).await, Met::Unclear { .. }));
    let refused = ended(replied(failed(json!(402))).await);
    assert!(matches!(refused.said, Err(Failure::Provider { status: 402, .. })));
}

#[tokio::test]
async fn ends_without_an_answer() {
    let check = async |reply: Reply, expected: Failure| {
        assert_eq!(ended(judge(reply.clone()).await.0).said, Err(expected.clone()));
        assert_eq!(ended(person("openai", reply).await.0).said, Err(expected));
    };
    let unknown = Failure::Provider {
        status: 404,
        message: "no such model".into(),
    };
    check(Reply::json(404, r#"{"error":{"message":"no such model"}}"#), unknown).await;
    check(Reply::json(200, &"x".repeat(10_001)), Failure::TooLong { limit: 10_000 }).await;
    let late = Terms {
        deadline: Instant::now(),
        ..terms()
    };
    let met = openai::judge(&http(), endpoint("openai", "http://127.0.0.1:1"), &question(), late).await;
    assert_eq!(ended(met).said, Err(Failure::TimedOut { limit_ms: LIMIT_MS }));
    let met = openai::judge(&http(), endpoint("openai", "no address"), &question(), terms()).await;
    assert!(matches!(ended(met).said, Err(Failure::Uncallable { .. })));
}

#[tokio::test]
async fn what_a_person_is_sent() {
    for (provider, limit) in [
        ("openai", "max_completion_tokens"),
        ("groq", "max_completion_tokens"),
        ("anthropic", "max_tokens"),
        ("deepseek", "max_tokens"),
    ] {
        let (_, request) = person(provider, Reply::json(200, "{}")).await;
        assert!(request.head.starts_with("post /chat/completions "), "{}", request.head);
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let expected = json!({"model": "model-1", "messages": [{"role": "user", "content": "Hello!"}], limit: 512});
        assert_eq!(body, expected);
    }
}

#[tokio::test]
async fn what_a_person_replies() {
    let check = async |message: Value, finish: Value, expected: Result<&str, Failure>| {
        let answer = json!({
            "id": "chatcmpl-1", "model": "model-1", "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
        });
        let ended = ended(person("openai", Reply::json(200, &answer.to_string())).await.0);
        assert_eq!(ended.said, expected.map(str::to_owned), "{answer}");
        let usage = JudgeUsage {
            cache_read_tokens: 4,
            input_tokens: 6,
            output_tokens: 3,
            total_tokens: 13,
            ..JudgeUsage::default()
        };
        assert_eq!(ended.usage, Some(usage));
        assert_eq!(ended.metadata["responseId"], "chatcmpl-1");
    };
    let content = |content: Value| json!({"role": "assistant", "content": content, "refusal": null});
    check(content(json!("Blue, please.")), json!("stop"), Ok("Blue, please.")).await;
    check(content(json!("Blue, please.")), json!(null), Ok("Blue, please.")).await;
    check(content(json!(null)), json!("stop"), Ok("")).await;
    check(content(json!("A long st")), json!("length"), Ok("A long st")).await;
    let cut = |reason: &str| Err(Failure::CutOff { reason: reason.into() });
    check(content(json!(" ")), json!("length"), cut("length")).await;
    check(content(json!(null)), json!("length"), cut("length")).await;
    check(content(json!("Bl")), json!("content_filter"), cut("content_filter")).await;
    let refused = Err(Failure::Refused { said: "No.".into() });
    check(json!({"content": null, "refusal": "No."}), json!("stop"), refused).await;
    let call = json!({"content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}]});
    check(call, json!("tool_calls"), Err(Failure::UsedTool { tool: "shell".into() })).await;
}
