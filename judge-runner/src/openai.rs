//! A judge of OpenAI's Responses API: one call, with the answer's form enforced by the provider, and nothing stored there.

use evalgrid_domain::{evidence::JudgeUsage, judge::Question};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    http::Http,
    model::{Endpoint, Met, Reading, Said, Terms, ask},
};

/// Tokens of an answer, with the model's reasoning (contract 2.7).
const MAX_OUTPUT_TOKENS: u32 = 2_048;

/// Asks a judging model once. What it said is not looked at here.
pub async fn judge(http: &Http, endpoint: Endpoint<'_>, question: &Question, terms: Terms<'_>) -> Met {
    ask(http, endpoint, "/responses", &body(endpoint.model, question), terms, read).await
}

fn body(model: &str, question: &Question) -> Value {
    json!({
        "model": model,
        "instructions": question.instructions,
        "input": question.input,
        "store": false,
        "max_output_tokens": MAX_OUTPUT_TOKENS,
        "text": {"format": {"type": "json_schema", "name": "judgment", "strict": true, "schema": question.schema}},
    })
}

/// What is read of a response; what else is in it does not matter.
#[derive(Deserialize)]
struct Response {
    status: String,
    id: Option<String>,
    model: Option<String>,
    #[serde(default)]
    output: Vec<Item>,
    error: Option<ResponseError>,
    incomplete_details: Option<Incomplete>,
    usage: Option<Value>,
}

#[derive(Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    content: Option<Value>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    OutputText { text: String },
    Refusal { refusal: String },
}

#[derive(Deserialize)]
struct ResponseError {
    code: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
struct Incomplete {
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    input_tokens: u64,
    output_tokens: u64,
    total_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: u64,
}

fn read(body: &[u8]) -> Result<Reading, String> {
    let response: Response = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let usage = response.usage.and_then(|usage| serde_json::from_value::<Usage>(usage).ok());
    let mut metadata = Map::new();
    metadata.insert("status".into(), response.status.as_str().into());
    let reason = response.incomplete_details.and_then(|details| details.reason);
    for (name, value) in [
        ("responseId", response.id),
        ("modelReported", response.model),
        ("incompleteReason", reason.clone()),
    ] {
        metadata.extend(value.map(|value| (name.to_owned(), Value::from(value))));
    }
    let (mut text, mut refused, mut tool) = (String::new(), None, None);
    for item in response.output {
        match item.kind.as_str() {
            "reasoning" => {}
            "message" => {
                let parts: Vec<Part> = serde_json::from_value(item.content.unwrap_or_default()).map_err(|error| error.to_string())?;
                for part in parts {
                    match part {
                        Part::OutputText { text: more } => text.push_str(&more),
                        Part::Refusal { refusal } => refused = Some(refusal),
                    }
                }
            }
            _ => tool = tool.or(item.name).or(Some(item.kind)),
        }
    }
    let said = match (response.status.as_str(), tool, refused) {
        ("failed", ..) => failed(response.error),
        (_, Some(tool), _) => Said::Tool(tool),
        (_, None, Some(refused)) => Said::Refused(refused),
        ("completed", ..) => Said::Text(text),
        ("incomplete", ..) => Said::CutOff(reason.unwrap_or_default(), text),
        (status, ..) => return Err(format!("its status is {status:?}")),
    };
    Ok(Reading {
        said,
        usage: usage.map(Usage::tell),
        metadata,
    })
}

fn failed(error: Option<ResponseError>) -> Said {
    let (code, message) = error.map_or((None, None), |error| (error.code, error.message));
    let status = match code.as_deref() {
        Some("rate_limit_exceeded") => 429,
        // All others speak of what was asked.
        Some("server_error") | None => 500,
        Some(_) => 400,
    };
    let message = message.or(code).unwrap_or_else(|| "no reason was given".into());
    Said::Failed(status, message)
}

impl Usage {
    /// OpenAI's input holds what came from its cache.
    fn tell(self) -> JudgeUsage {
        let cached = self.input_tokens_details.map_or(0, |details| details.cached_tokens);
        JudgeUsage {
            cache_read_tokens: cached,
            input_tokens: self.input_tokens.saturating_sub(cached),
            output_tokens: self.output_tokens,
            total_tokens: self.total_tokens.unwrap_or(self.input_tokens.saturating_add(self.output_tokens)),
            ..JudgeUsage::default()
        }
    }
}
