//! A simulated person, played by a model through chat completions, which all providers speak, more or less.

use evalgrid_domain::{evidence::JudgeUsage, person::ChatMessage};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    http::Http,
    model::{Endpoint, Met, Reading, Said, Terms, ask},
};

/// Tokens of a reply (contract 2.6): a sentence or two, and what a reasoning model thinks before.
const MAX_REPLY_TOKENS: u32 = 512;
/// Providers that know the newer name of that limit, and whose reasoning models refuse the older one. All others know the older one.
const NEWER_NAME: [&str; 3] = ["openai", "xai", "groq"];

/// Asks the model that plays a person once, for its next words.
pub async fn person(http: &Http, endpoint: Endpoint<'_>, messages: &[ChatMessage], terms: Terms<'_>) -> Met {
    ask(http, endpoint, "/chat/completions", &body(endpoint, messages), terms, read).await
}

fn body(endpoint: Endpoint<'_>, messages: &[ChatMessage]) -> Value {
    let limit = match NEWER_NAME.contains(&endpoint.provider) {
        true => "max_completion_tokens",
        false => "max_tokens",
    };
    json!({"model": endpoint.model, "messages": messages, limit: MAX_REPLY_TOKENS})
}

/// What is read of a completion; what else is in it does not matter.
#[derive(Deserialize)]
struct Completion {
    id: Option<String>,
    model: Option<String>,
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<CompletionError>,
    usage: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

/// OpenRouter tells failures of the provider behind it in an answer of status 200.
#[derive(Deserialize)]
struct CompletionError {
    code: Option<Value>,
    message: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

fn read(body: &[u8]) -> Result<Reading, String> {
    let completion: Completion = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let usage = completion.usage.and_then(|usage| serde_json::from_value::<Usage>(usage).ok());
    let mut metadata = Map::new();
    let choice = completion.choices.into_iter().next();
    let finish = choice.as_ref().and_then(|choice| choice.finish_reason.clone());
    for (name, value) in [
        ("responseId", completion.id),
        ("modelReported", completion.model),
        ("finishReason", finish.clone()),
    ] {
        metadata.extend(value.map(|value| (name.to_owned(), Value::from(value))));
    }
    let said = match (choice, completion.error) {
        (_, Some(error)) => {
            let status = error.code.and_then(|code| code.as_u64()).and_then(|code| u16::try_from(code).ok());
            Said::Failed(status.unwrap_or(500), error.message.unwrap_or_else(|| "no reason was given".into()))
        }
        (None, None) => return Err("it has no choices".into()),
        (Some(Choice { message, .. }), None) => {
            let tool = message.tool_calls.into_iter().flatten().next();
            let text = message.content.unwrap_or_default();
            match (tool, message.refusal.filter(|refusal| !refusal.is_empty()), finish.as_deref()) {
                (Some(tool), ..) => Said::Tool(tool["function"]["name"].as_str().unwrap_or("without a name").to_owned()),
                (None, Some(refusal), _) => Said::Refused(refusal),
                (None, None, Some("content_filter")) => Said::CutOff("content_filter".into(), text),
                // A long reply, cut short, is still what somebody says. No reply at all would end the conversation as if the goal were met.
                (None, None, Some("length")) if text.trim().is_empty() => Said::CutOff("length".into(), text),
                _ => Said::Text(text),
            }
        }
    };
    Ok(Reading {
        said,
        usage: usage.map(Usage::tell),
        metadata,
    })
}

impl Usage {
    /// The prompt's tokens hold what came from the cache.
    fn tell(self) -> JudgeUsage {
        let cached = self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
        JudgeUsage {
            cache_read_tokens: cached,
            input_tokens: self.prompt_tokens.saturating_sub(cached),
            output_tokens: self.completion_tokens,
            total_tokens: self
                .total_tokens
                .unwrap_or(self.prompt_tokens.saturating_add(self.completion_tokens)),
            ..JudgeUsage::default()
        }
    }
}
