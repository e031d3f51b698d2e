//! Chat completions: what opencode, qwen, pi and bub speak, and people by model.

use serde_json::{Value, json};

use crate::{
    exchange::{Answer, Exchange, Item, Parts, Tool, add, array, halves, strict_schema, text, texts},
    script::Reply,
    usage::{CACHE_READ, INPUT, OUTPUT, REASONING},
};

/// Reads a request.
pub fn read(body: &Value) -> Result<Exchange, String> {
    let mut items = Vec::new();
    let mut system = String::new();
    for message in array(body, "messages")? {
        match text(message, "role")? {
            "user" => items.extend(texts(&message["content"])?.into_iter().map(Item::User)),
            "assistant" => {
                let said = texts(&message["content"])?.concat();
                if !said.is_empty() {
                    items.push(Item::Assistant(said));
                }
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    let arguments = text(&call["function"], "arguments")?;
                    serde_json::from_str::<Value>(arguments).map_err(|error| format!("tool_calls: arguments are not JSON: {error}"))?;
                    items.push(Item::Call(text(call, "id")?.to_owned()));
                }
            }
            "tool" => items.push(Item::Result(text(message, "tool_call_id")?.to_owned())),
            "system" | "developer" => add(&mut system, texts(&message["content"])?),
            role => return Err(format!("messages: unknown role {role:?}")),
        }
    }
    let format = &body["response_format"];
    let schema = match format["type"].as_str() {
        Some("json_schema") => Some(strict_schema(&format["json_schema"], "response_format.json_schema")?),
        _ => None,
    };
    let offered = body["tools"].as_array().into_iter().flatten();
    let offered = offered.filter_map(|tool| tool["function"]["name"].as_str().or(tool["type"].as_str()));
    Ok(Exchange {
        offered: offered.map(str::to_owned).collect(),
        system,
        schema,
        model: text(body, "model")?.to_owned(),
        stream: body["stream"] == true,
        tools: body["tools"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|tool| {
                Ok(Tool {
                    name: text(&tool["function"], "name")?.to_owned(),
                    parameters: tool["function"]["parameters"].clone(),
                })
            })
            .collect::<Result<_, String>>()?,
        items,
    })
}

fn usage() -> Value {
    json!({
        "prompt_tokens": INPUT, "completion_tokens": OUTPUT, "total_tokens": INPUT + OUTPUT,
        "prompt_tokens_details": { "cached_tokens": CACHE_READ }, "completion_tokens_details": { "reasoning_tokens": REASONING },
    })
}

fn finish_reason(answer: &Answer<'_>) -> &'static str {
    match answer.reply {
        Reply::Text(_) | Reply::Refusal(_) => "stop",
        Reply::CutOff(_) => "length",
        Reply::Call { .. } => "tool_calls",
    }
}

/// The whole answer at once.
pub fn whole(answer: &Answer<'_>) -> Value {
    let message = match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) => json!({ "role": "assistant", "content": text, "refusal": null }),
        Reply::Refusal(text) => json!({ "role": "assistant", "content": null, "refusal": text }),
        Reply::Call { name, arguments } => json!({
            "role": "assistant", "content": null,
            "tool_calls": [{ "id": answer.id("call"), "type": "function", "function": { "name": name, "arguments": arguments.to_string() } }],
        }),
    };
    json!({
        "id": answer.id("chatcmpl"), "object": "chat.completion", "created": 1_700_000_000, "model": answer.model,
        "choices": [{ "index": 0, "message": message, "finish_reason": finish_reason(answer) }], "usage": usage(),
    })
}

/// The answer as a stream.
pub fn stream(answer: &Answer<'_>) -> Parts {
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": answer.id("chatcmpl"), "object": "chat.completion.chunk", "created": 1_700_000_000, "model": answer.model,
            "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let delta = |delta: Value| chunk(json!([{ "index": 0, "delta": delta, "finish_reason": null }]), Value::Null);
    let mut parts = vec![delta(json!({ "role": "assistant", "content": "" }))];
    match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) => {
            let (first, second) = halves(text);
            parts.extend([first, second].map(|text| delta(json!({ "content": text }))));
        }
        Reply::Refusal(text) => parts.push(delta(json!({ "refusal": text }))),
        Reply::Call { name, arguments } => {
            let arguments = arguments.to_string();
            let (first, second) = halves(&arguments);
            parts.extend([
                delta(
                    json!({ "tool_calls": [{ "index": 0, "id": answer.id("call"), "type": "function", "function": { "name": name, "arguments": first } }] }),
                ),
                delta(json!({ "tool_calls": [{ "index": 0, "function": { "arguments": second } }] })),
            ]);
        }
    }
    parts.push(chunk(
        json!([{ "index": 0, "delta": {}, "finish_reason": finish_reason(answer) }]),
        Value::Null,
    ));
    parts.push(chunk(json!([]), usage()));
    parts.push("data: [DONE]\n\n".into());
    parts
}
