//! Anthropic's Messages format: what claude speaks.

use serde_json::{Value, json};

use crate::{
    exchange::{Answer, Exchange, Item, Parts, Tool, add, array, halves, text, texts},
    script::Reply,
    usage::{CACHE_READ, CACHE_WRITE, INPUT, OUTPUT},
};

/// Reads a request.
pub fn read(body: &Value) -> Result<Exchange, String> {
    if body["max_tokens"].as_u64().is_none_or(|tokens| tokens == 0) {
        return Err("max_tokens: Field required".into());
    }
    let mut items = Vec::new();
    let mut system = String::new();
    add(&mut system, texts(&body["system"])?);
    for message in array(body, "messages")? {
        match text(message, "role")? {
            "user" => {
                for part in parts(&message["content"])? {
                    match part["type"].as_str() {
                        Some("text") => items.push(Item::User(text(&part, "text")?.to_owned())),
                        Some("tool_result") => items.push(Item::Result(text(&part, "tool_use_id")?.to_owned())),
                        _ => {}
                    }
                }
            }
            "assistant" => {
                for part in parts(&message["content"])? {
                    match part["type"].as_str() {
                        Some("text") => items.push(Item::Assistant(text(&part, "text")?.to_owned())),
                        Some("tool_use") => items.push(Item::Call(text(&part, "id")?.to_owned())),
                        _ => {}
                    }
                }
            }
            // Claude puts what it knows of the machine there, after the person's words.
            "system" => add(&mut system, texts(&message["content"])?),
            role => return Err(format!("messages: unexpected role {role:?}")),
        }
    }
    let offered = body["tools"].as_array().into_iter().flatten();
    let offered = offered.filter_map(|tool| tool["name"].as_str()).map(str::to_owned);
    Ok(Exchange {
        offered: offered.collect(),
        system,
        schema: None,
        model: text(body, "model")?.to_owned(),
        stream: body["stream"] == true,
        tools: body["tools"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|tool| {
                Ok(Tool {
                    name: text(tool, "name")?.to_owned(),
                    parameters: tool["input_schema"].clone(),
                })
            })
            .collect::<Result<_, String>>()?,
        items,
    })
}

fn parts(content: &Value) -> Result<Vec<Value>, String> {
    match content {
        Value::Array(parts) => Ok(parts.clone()),
        _ => Ok(texts(content)?
            .into_iter()
            .map(|text| json!({ "type": "text", "text": text }))
            .collect()),
    }
}

fn usage(output: u64) -> Value {
    json!({ "input_tokens": INPUT, "cache_creation_input_tokens": CACHE_WRITE, "cache_read_input_tokens": CACHE_READ, "output_tokens": output })
}

fn stop_reason(answer: &Answer<'_>) -> &'static str {
    match answer.reply {
        Reply::Text(_) => "end_turn",
        Reply::CutOff(_) => "max_tokens",
        Reply::Refusal(_) => "refusal",
        Reply::Call { .. } => "tool_use",
    }
}

/// The whole answer at once.
pub fn whole(answer: &Answer<'_>) -> Value {
    let content = match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) | Reply::Refusal(text) => json!({ "type": "text", "text": text }),
        Reply::Call { name, arguments } => json!({ "type": "tool_use", "id": answer.id("toolu"), "name": name, "input": arguments }),
    };
    json!({
        "id": answer.id("msg"), "type": "message", "role": "assistant", "model": answer.model, "content": [content],
        "stop_reason": stop_reason(answer), "stop_sequence": null, "usage": usage(OUTPUT),
    })
}

/// The answer as a stream.
pub fn stream(answer: &Answer<'_>) -> Parts {
    let mut message = whole(answer);
    let mut block = message["content"][0].clone();
    message["content"] = json!([]);
    message["stop_reason"] = Value::Null;
    message["usage"] = usage(1);
    let delta = |delta: Value| json!({ "type": "content_block_delta", "index": 0, "delta": delta });
    let deltas = match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) | Reply::Refusal(text) => {
            block["text"] = json!("");
            let (first, second) = halves(text);
            [first, second].map(|text| delta(json!({ "type": "text_delta", "text": text })))
        }
        Reply::Call { arguments, .. } => {
            block["input"] = json!({});
            let arguments = arguments.to_string();
            let (first, second) = halves(&arguments);
            [first, second].map(|json| delta(json!({ "type": "input_json_delta", "partial_json": json })))
        }
    };
    let mut events = vec![
        json!({ "type": "message_start", "message": message }),
        json!({ "type": "content_block_start", "index": 0, "content_block": block }),
        json!({ "type": "ping" }),
    ];
    events.extend(deltas);
    events.extend([
        json!({ "type": "content_block_stop", "index": 0 }),
        json!({ "type": "message_delta", "delta": { "stop_reason": stop_reason(answer), "stop_sequence": null }, "usage": usage(OUTPUT) }),
        json!({ "type": "message_stop" }),
    ]);
    let written = events
        .into_iter()
        .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default()));
    written.collect()
}
