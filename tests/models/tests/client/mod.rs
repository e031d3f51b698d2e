//! A client of the model server, and what it reads out of answers.

use std::time::Duration;

use bytes::Bytes;
use evalgrid_modelserver::{Mode, ModelServer};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::Value;

/// Nothing here takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub const RESPONSES: &str = "/v1/responses";
pub const MESSAGES: &str = "/v1/messages?beta=true";
pub const CHAT: &str = "/v1/chat/completions";
pub const GEMINI: &str = "/v1beta/models/m:streamGenerateContent?alt=sse";
pub const GEMINI_WHOLE: &str = "/v1beta/models/m:generateContent";

/// Status, whether the body came to its end, and what came of it.
pub struct Got {
    pub status: u16,
    pub whole: bool,
    pub body: String,
    pub retry_after: Option<String>,
}

pub async fn post(url: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Got {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut request = http::Request::post(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::from(body)).unwrap();
    let response = tokio::time::timeout(PATIENCE, client.request(request)).await.unwrap().unwrap();
    let status = response.status().as_u16();
    let retry_after = response
        .headers()
        .get("retry-after")
        .map(|value| value.to_str().unwrap().to_owned());
    let (mut body, mut got, mut whole) = (response.into_body(), Vec::new(), true);
    while let Some(frame) = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap() {
        match frame {
            Ok(frame) => got.extend_from_slice(frame.data_ref().unwrap()),
            Err(_) => {
                whole = false;
                break;
            }
        }
    }
    Got {
        status,
        whole,
        body: String::from_utf8(got).unwrap(),
        retry_after,
    }
}

/// A request of a format, with its key where a client of that format puts it.
pub async fn ask(server: &ModelServer, mode: Mode, path: &str, body: &Value) -> Got {
    let key: &[(&str, &str)] = match path {
        MESSAGES => &[("x-api-key", "k"), ("anthropic-version", "2023-06-01")],
        GEMINI | GEMINI_WHOLE => &[("x-goog-api-key", "k")],
        _ => &[("authorization", "Bearer k")],
    };
    post(&format!("{}{path}", server.url(mode)), key, body.to_string().into_bytes()).await
}

/// All the values of a field anywhere in a stream's or an answer's JSON, joined; texts first of all.
pub fn all(body: &str, field: &str) -> String {
    fn walk(value: &Value, field: &str, found: &mut String) {
        match value {
            Value::Object(object) => {
                for (name, value) in object {
                    match value {
                        Value::String(text) if name == field => found.push_str(text),
                        value if name == field && !value.is_object() => found.push_str(&value.to_string()),
                        value => walk(value, field, found),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| walk(value, field, found)),
            _ => {}
        }
    }
    let mut found = String::new();
    for line in body.lines() {
        let line = line.strip_prefix("data: ").unwrap_or(line);
        if let Ok(value) = serde_json::from_str::<Value>(line) {
            walk(&value, field, &mut found);
        }
    }
    found
}
