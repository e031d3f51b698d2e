//! Reading a judge's answer: what was asked for, and nothing else.

use serde::Deserialize;

use crate::{decode::utf16_len, limits::MAX_JUDGE_REASON, request::Judge};

/// A valid answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// One of the judge's labels.
    pub choice: String,
    /// Its score.
    pub score: f64,
    /// The judge's words: 1 to [`MAX_JUDGE_REASON`] characters.
    pub reason: String,
}

/// A text is no valid answer. Completes "the answer is not valid".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// There is none.
    #[error("it is empty")]
    Empty,
    /// It is something else, or has something around it.
    #[error("it is not one JSON object and nothing else")]
    NotAnObject,
    /// It is JSON of another shape.
    #[error("it is not the JSON that was asked for: {0}")]
    Shape(String),
    /// It picks something else.
    #[error("its choice {0:?} is none of the judge's")]
    UnknownChoice(String),
    /// It does not say why.
    #[error("its reason is empty")]
    NoReason,
    /// It says too much.
    #[error("its reason has {0} characters; the limit is {MAX_JUDGE_REASON}")]
    LongReason(usize),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    choice: String,
    reason: String,
}

/// Reads an answer: one JSON object of exactly `choice` and `reason`, alone or alone in one Markdown fence. The text is not redacted, and neither
/// are what comes of it and why it is refused.
pub fn read_answer(judge: &Judge, text: &str) -> Result<Answer, AnswerError> {
    let text = unfenced(text.trim());
    if text.is_empty() {
        return Err(AnswerError::Empty);
    }
    // Without this, an array of two strings would do.
    if !(text.starts_with('{') && text.ends_with('}')) {
        return Err(AnswerError::NotAnObject);
    }
    let raw: Raw = serde_json::from_str(text).map_err(|error| match error.is_data() {
        true => AnswerError::Shape(told(&error)),
        false => AnswerError::NotAnObject,
    })?;
    let Some(score) = judge.choices.get(&raw.choice) else {
        return Err(AnswerError::UnknownChoice(raw.choice));
    };
    match utf16_len(&raw.reason) {
        _ if raw.reason.trim().is_empty() => Err(AnswerError::NoReason),
        ..=MAX_JUDGE_REASON => Ok(Answer {
            choice: raw.choice,
            score: score.0,
            reason: raw.reason,
        }),
        length => Err(AnswerError::LongReason(length)),
    }
}

/// What is in the one fence around all, where there is one: models like to add it.
fn unfenced(text: &str) -> &str {
    let inner = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    let inner = inner.map(|inner| inner.strip_prefix("json").unwrap_or(inner));
    match inner {
        Some(inner) if inner.starts_with(char::is_whitespace) => inner.trim(),
        _ => text,
    }
}

/// The parser's words, without the place.
fn told(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}
