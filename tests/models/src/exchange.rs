//! What the formats have in common: a request read, and an answer to write.

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::script::Reply;

/// A wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// OpenAI's `POST /v1/responses`.
    Responses,
    /// Anthropic's `POST /v1/messages`.
    Messages,
    /// `POST /v1/chat/completions`, which many servers speak.
    Chat,
    /// Gemini's `POST /v1beta/models/MODEL:streamGenerateContent` and `:generateContent`.
    Gemini,
}

/// A request, whatever its format.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exchange {
    pub model: String,
    pub stream: bool,
    pub tools: Vec<Tool>,
    /// Names of all tools, those that a client does not run itself among them.
    pub offered: Vec<String>,
    /// What the system prompts say.
    pub system: String,
    /// The JSON schema that the answer must follow.
    pub schema: Option<Value>,
    /// What was said so far, system prompts left out.
    pub items: Vec<Item>,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
}

/// One thing that was said.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    User(String),
    Assistant(String),
    /// The model's call of a tool, by its id (in Gemini's format: its name).
    Call(String),
    /// What the tool with this id answered.
    Result(String),
}

/// An answer to be written.
pub struct Answer<'a> {
    /// Unique for each request of a server.
    pub number: u64,
    pub model: &'a str,
    pub reply: &'a Reply,
}

impl Answer<'_> {
    /// An id of a message, a response or a call.
    pub fn id(&self, kind: &str) -> String {
        format!("{kind}_{:06}", self.number)
    }
}

/// The parts of a streamed answer: the first half may be sent, and the rest not.
pub type Parts = Vec<String>;

/// A text in two pieces, as a stream brings it.
pub fn halves(text: &str) -> (&str, &str) {
    let middle = (0..=text.len() / 2).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.split_at(middle)
}

impl Exchange {
    /// The same for the same step of the same conversation, whatever the tools printed and the ids were: two requests with one hash are a
    /// request that was made twice.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(&self.model);
        for item in &self.items {
            match item {
                Item::User(text) => hash.update(format!("\0user {text}")),
                Item::Assistant(_) => hash.update("\0assistant"),
                Item::Call(_) => hash.update("\0call"),
                Item::Result(_) => hash.update("\0result"),
            }
        }
        hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Each result must answer a call, and no call may be left without one: all vendors refuse that.
    pub fn check(&self) -> Result<(), String> {
        if self.model.is_empty() {
            return Err("model: must not be empty".into());
        }
        if !self.items.iter().any(|item| matches!(item, Item::User(_))) {
            return Err("no user message".into());
        }
        let mut open: Vec<&str> = Vec::new();
        for item in &self.items {
            match item {
                Item::Call(id) => open.push(id),
                Item::Result(id) => {
                    let at = open.iter().position(|call| call == id);
                    open.remove(at.ok_or_else(|| format!("a tool result without its call: {id}"))?);
                }
                Item::User(_) if !open.is_empty() => return Err(format!("no tool result for the call {}", open[0])),
                Item::User(_) | Item::Assistant(_) => {}
            }
        }
        match open.first() {
            Some(id) => Err(format!("no tool result for the call {id}")),
            None => Ok(()),
        }
    }
}

/// The JSON schema of an answer, as OpenAI's strict mode wants it: a name, every property required, none beside them.
pub fn strict_schema(format: &Value, at: &str) -> Result<Value, String> {
    let name = format["name"].as_str().unwrap_or_default();
    if name.is_empty()
        || !name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    {
        return Err(format!("{at}.name: must be letters, digits, '_' and '-'"));
    }
    let schema = &format["schema"];
    let Some(properties) = schema["properties"].as_object().filter(|_| schema["type"] == "object") else {
        return Err(format!("{at}.schema: must have the type 'object' and properties"));
    };
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    if format["strict"] == true {
        if schema["additionalProperties"] != false {
            return Err(format!(
                "{at}.schema: 'additionalProperties' is required to be supplied and to be false"
            ));
        }
        if let Some((name, _)) = properties
            .iter()
            .find(|(name, _)| !required.iter().any(|required| required == name.as_str()))
        {
            return Err(format!("{at}.schema: 'required' must name every property; {name:?} is missing"));
        }
    }
    Ok(schema.clone())
}

/// Adds texts, each on lines of its own.
pub fn add(system: &mut String, texts: Vec<String>) {
    for text in texts {
        if !system.is_empty() {
            system.push('\n');
        }
        system.push_str(&text);
    }
}

/// A required text.
pub fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, String> {
    value[field].as_str().ok_or_else(|| format!("{field}: must be a string"))
}

/// A required array.
pub fn array<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, String> {
    value[field].as_array().ok_or_else(|| format!("{field}: must be an array"))
}

/// The texts of a content that is a string, or an array of parts with a `text`.
pub fn texts(content: &Value) -> Result<Vec<String>, String> {
    match content {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(parts) => Ok(parts.iter().filter_map(|part| part["text"].as_str()).map(str::to_owned).collect()),
        Value::Null => Ok(Vec::new()),
        _ => Err("content: must be a string or an array".into()),
    }
}
