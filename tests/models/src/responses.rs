//! OpenAI's Responses format: what codex speaks, and judges by model.

use serde_json::{Value, json};

use crate::{
    exchange::{Answer, Exchange, Item, Parts, Tool, add, array, halves, strict_schema, text, texts},
    script::Reply,
    usage::{CACHE_READ, INPUT, OUTPUT, REASONING},
};

/// Reads a request.
pub fn read(body: &Value) -> Result<Exchange, String> {
    let mut items = Vec::new();
    let mut system = body["instructions"].as_str().unwrap_or_default().to_owned();
    match &body["input"] {
        Value::String(text) => items.push(Item::User(text.clone())),
        _ => {
            for item in array(body, "input")? {
                read_item(item, &mut items, &mut system)?;
            }
        }
    }
    let format = &body["text"]["format"];
    let schema = match format["type"].as_str() {
        Some("json_schema") => Some(strict_schema(format, "text.format")?),
        _ => None,
    };
    let tools = || body["tools"].as_array().into_iter().flatten();
    let offered = tools()
        .filter_map(|tool| tool["name"].as_str().or(tool["type"].as_str()))
        .map(str::to_owned);
    let offered = offered.collect();
    let tools = tools().filter(|tool| tool["type"] == "function");
    Ok(Exchange {
        offered,
        system,
        schema,
        model: text(body, "model")?.to_owned(),
        stream: body["stream"] == true,
        tools: tools
            .map(|tool| {
                Ok(Tool {
                    name: text(tool, "name")?.to_owned(),
                    parameters: tool["parameters"].clone(),
                })
            })
            .collect::<Result<_, String>>()?,
        items,
    })
}

fn read_item(item: &Value, items: &mut Vec<Item>, system: &mut String) -> Result<(), String> {
    match item["type"].as_str().unwrap_or("message") {
        "message" => match text(item, "role")? {
            "user" => items.extend(texts(&item["content"])?.into_iter().map(Item::User)),
            "assistant" => items.push(Item::Assistant(texts(&item["content"])?.concat())),
            "system" | "developer" => add(system, texts(&item["content"])?),
            role => return Err(format!("input: unknown role {role}")),
        },
        "function_call" => items.push(Item::Call(text(item, "call_id")?.to_owned())),
        "function_call_output" => items.push(Item::Result(text(item, "call_id")?.to_owned())),
        // Reasoning, searches and the like: what the model has said to itself.
        _ => {}
    }
    Ok(())
}

fn output(answer: &Answer<'_>) -> Value {
    match answer.reply {
        Reply::Text(text) => json!({
            "type": "message", "id": answer.id("msg"), "status": "completed", "role": "assistant",
            "content": [{ "type": "output_text", "text": text, "annotations": [] }],
        }),
        Reply::CutOff(text) => json!({
            "type": "message", "id": answer.id("msg"), "status": "incomplete", "role": "assistant",
            "content": [{ "type": "output_text", "text": text, "annotations": [] }],
        }),
        Reply::Refusal(text) => json!({
            "type": "message", "id": answer.id("msg"), "status": "completed", "role": "assistant",
            "content": [{ "type": "refusal", "refusal": text }],
        }),
        Reply::Call { name, arguments } => json!({
            "type": "function_call", "id": answer.id("fc"), "call_id": answer.id("call"), "status": "completed", "name": name,
            "arguments": arguments.to_string(),
        }),
    }
}

/// The whole answer at once.
pub fn whole(answer: &Answer<'_>) -> Value {
    let (status, details) = match answer.reply {
        Reply::CutOff(_) => ("incomplete", json!({ "reason": "max_output_tokens" })),
        _ => ("completed", Value::Null),
    };
    json!({
        "id": answer.id("resp"), "object": "response", "created_at": 1_700_000_000, "status": status, "incomplete_details": details,
        "model": answer.model, "output": [output(answer)], "parallel_tool_calls": false, "error": null,
        "usage": {
            "input_tokens": INPUT, "input_tokens_details": { "cached_tokens": CACHE_READ },
            "output_tokens": OUTPUT, "output_tokens_details": { "reasoning_tokens": REASONING }, "total_tokens": INPUT + OUTPUT,
        },
    })
}

/// The answer as a stream.
pub fn stream(answer: &Answer<'_>) -> Parts {
    let done = output(answer);
    let mut begun = done.clone();
    begun["status"] = json!("in_progress");
    let mut response = whole(answer);
    let completed = response.clone();
    let last = format!("response.{}", response["status"].as_str().unwrap_or_default());
    response["status"] = json!("in_progress");
    response["incomplete_details"] = Value::Null;
    response["output"] = json!([]);
    response["usage"] = Value::Null;
    let id = done["id"].clone();
    let mut events = vec![json!({ "type": "response.created", "response": response })];
    match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) | Reply::Refusal(text) => {
            begun["content"] = json!([]);
            let (first, second) = halves(text);
            let (kind, field, empty) = match answer.reply {
                Reply::Refusal(_) => ("refusal", "refusal", json!({ "type": "refusal", "refusal": "" })),
                _ => (
                    "output_text",
                    "text",
                    json!({ "type": "output_text", "text": "", "annotations": [] }),
                ),
            };
            let delta = |delta: &str| json!({ "type": format!("response.{kind}.delta"), "item_id": id, "output_index": 0, "content_index": 0, "delta": delta });
            events.extend([
                json!({ "type": "response.output_item.added", "output_index": 0, "item": begun }),
                json!({ "type": "response.content_part.added", "item_id": id, "output_index": 0, "content_index": 0, "part": empty }),
                delta(first),
                delta(second),
                json!({ "type": format!("response.{kind}.done"), "item_id": id, "output_index": 0, "content_index": 0, field: text }),
                json!({ "type": "response.content_part.done", "item_id": id, "output_index": 0, "content_index": 0,
                    "part": done["content"][0] }),
            ]);
        }
        Reply::Call { arguments, .. } => {
            begun["arguments"] = json!("");
            let arguments = arguments.to_string();
            let (first, second) = halves(&arguments);
            let delta =
                |delta: &str| json!({ "type": "response.function_call_arguments.delta", "item_id": id, "output_index": 0, "delta": delta });
            events.extend([
                json!({ "type": "response.output_item.added", "output_index": 0, "item": begun }),
                delta(first),
                delta(second),
                json!({ "type": "response.function_call_arguments.done", "item_id": id, "output_index": 0, "arguments": arguments }),
            ]);
        }
    }
    events.extend([
        json!({ "type": "response.output_item.done", "output_index": 0, "item": done }),
        json!({ "type": last, "response": completed }),
    ]);
    let numbered = events.into_iter().enumerate().map(|(number, mut event)| {
        event["sequence_number"] = json!(number);
        format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
    });
    numbered.collect()
}
