//! Gemini's format. The model is in the path, and calls are told apart by the tool's name where there is no id.

use serde_json::{Value, json};

use crate::{
    exchange::{Answer, Exchange, Item, Parts, Tool, add, array, halves, text, texts},
    script::Reply,
    usage::{CACHE_READ, INPUT, OUTPUT, REASONING},
};

/// Reads a request.
pub fn read(model: &str, stream: bool, body: &Value) -> Result<Exchange, String> {
    let mut items = Vec::new();
    for content in array(body, "contents")? {
        let role = content["role"].as_str().unwrap_or("user");
        for part in array(content, "parts")? {
            let id = |value: &Value| match value["id"].as_str() {
                Some(id) => Ok(id.to_owned()),
                None => text(value, "name").map(str::to_owned),
            };
            let call = &part["functionCall"];
            let response = &part["functionResponse"];
            let item = match (role, part["text"].as_str()) {
                ("model", _) if call.is_object() => Item::Call(id(call)?),
                ("user" | "function", _) if response.is_object() => Item::Result(id(response)?),
                // What the model has thought.
                ("model", Some(_)) if part["thought"] == true => continue,
                ("model", Some(text)) => Item::Assistant(text.to_owned()),
                ("user", Some(text)) => Item::User(text.to_owned()),
                ("user" | "model" | "function", _) => continue,
                _ => return Err(format!("contents: please use a valid role: user, model, not {role:?}")),
            };
            items.push(item);
        }
    }
    let mut system = String::new();
    add(&mut system, texts(&body["systemInstruction"]["parts"])?);
    let declared = body["tools"].as_array().into_iter().flatten();
    let declared = declared.flat_map(|tool| tool["functionDeclarations"].as_array().into_iter().flatten());
    let declared: Vec<&Value> = declared.collect();
    let config = &body["generationConfig"];
    let schema = ["responseJsonSchema", "responseSchema"].iter().find_map(|key| config.get(*key));
    Ok(Exchange {
        offered: declared
            .iter()
            .filter_map(|tool| tool["name"].as_str())
            .map(str::to_owned)
            .collect(),
        system,
        schema: schema.cloned(),
        model: model.to_owned(),
        stream,
        tools: declared
            .into_iter()
            .map(|tool| {
                let schema = &tool["parametersJsonSchema"];
                Ok(Tool {
                    name: text(tool, "name")?.to_owned(),
                    parameters: if schema.is_object() { schema } else { &tool["parameters"] }.clone(),
                })
            })
            .collect::<Result<_, String>>()?,
        items,
    })
}

fn part(answer: &Answer<'_>, parts: Value, last: bool) -> Value {
    let mut candidate = json!({ "index": 0, "content": { "role": "model", "parts": parts } });
    let mut whole = json!({ "modelVersion": answer.model, "responseId": answer.id("resp") });
    if last {
        candidate["finishReason"] = json!(match answer.reply {
            Reply::Text(_) | Reply::Call { .. } => "STOP",
            Reply::CutOff(_) => "MAX_TOKENS",
            Reply::Refusal(_) => "SAFETY",
        });
        whole["usageMetadata"] = json!({
            "promptTokenCount": INPUT, "cachedContentTokenCount": CACHE_READ, "candidatesTokenCount": OUTPUT, "thoughtsTokenCount": REASONING,
            "totalTokenCount": INPUT + OUTPUT + REASONING,
        });
    }
    whole["candidates"] = json!([candidate]);
    whole
}

fn content(answer: &Answer<'_>) -> Value {
    match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) => json!([{ "text": text }]),
        // What is withheld is not told.
        Reply::Refusal(_) => json!([]),
        Reply::Call { name, arguments } => json!([{ "functionCall": { "id": answer.id("call"), "name": name, "args": arguments } }]),
    }
}

/// The whole answer at once.
pub fn whole(answer: &Answer<'_>) -> Value {
    part(answer, content(answer), true)
}

/// The answer as a stream.
pub fn stream(answer: &Answer<'_>) -> Parts {
    let parts = match answer.reply {
        Reply::Text(text) | Reply::CutOff(text) => {
            let (first, second) = halves(text);
            vec![
                part(answer, json!([{ "text": first }]), false),
                part(answer, json!([{ "text": second }]), true),
            ]
        }
        Reply::Call { .. } | Reply::Refusal(_) => vec![part(answer, json!([]), false), part(answer, content(answer), true)],
    };
    parts.into_iter().map(|part| format!("data: {part}\n\n")).collect()
}
