//! A model that is called directly: what came of asking it, whatever it speaks.

use evalgrid_domain::{answerer::Failure, evidence::JudgeUsage};
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::http::{Answered, Call, Http, Outcome};

/// Where a model is.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint<'a> {
    /// The provider's id.
    pub provider: &'a str,
    /// With its version, without a slash at its end.
    pub base_url: &'a str,
    /// The key.
    pub key: &'a str,
    /// The model, as the provider spells it.
    pub model: &'a str,
}

/// How a model may be asked.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// The same for every ask of one question for one purpose.
    pub idempotency_key: &'a str,
    /// When the answer must be there.
    pub deadline: Instant,
    /// The time limit that the deadline comes from, as people are told it.
    pub limit_ms: u64,
}

/// What came of asking once. No text is redacted yet.
#[derive(Clone, Debug, PartialEq)]
pub enum Met {
    /// That is all: there is an answer, or there will never be one.
    Ended(Ended),
    /// Refused for now, and nothing was done.
    NotNow {
        /// When to ask again; 0 where nobody said.
        retry_after_ms: u64,
        /// Why.
        reason: String,
    },
    /// It may have been answered, or may not.
    Unclear {
        /// What is known.
        reason: String,
    },
}

/// The end of an ask.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// What was said, or why there is nothing to go by.
    pub said: Result<String, Failure>,
    /// What came, where that is no valid answer, too. For people.
    pub raw: Option<String>,
    /// What it took; `None` where nobody said.
    pub usage: Option<JudgeUsage>,
    /// What the provider says about it. Never the key.
    pub metadata: Map<String, Value>,
}

impl Ended {
    /// There is no answer, and nothing came.
    pub fn failed(failure: Failure) -> Self {
        Self {
            said: Err(failure),
            raw: None,
            usage: None,
            metadata: Map::new(),
        }
    }
}

/// What a provider's answer says.
pub(crate) struct Reading {
    pub(crate) said: Said,
    pub(crate) usage: Option<JudgeUsage>,
    /// Its id, the model that it names, how it ended.
    pub(crate) metadata: Map<String, Value>,
}

pub(crate) enum Said {
    Text(String),
    Refused(String),
    /// It is not whole: why, and what is there of it.
    CutOff(String, String),
    /// A tool was used: which.
    Tool(String),
    /// The provider failed behind an answer that looks like success: with this status, had it been told by one.
    Failed(u16, String),
}

/// Asks a model once. `read` says what is in an answer's body, or why it cannot be read.
pub(crate) async fn ask(
    http: &Http,
    endpoint: Endpoint<'_>,
    path: &str,
    body: &Value,
    terms: Terms<'_>,
    read: impl FnOnce(&[u8]) -> Result<Reading, String>,
) -> Met {
    let call = Call {
        url: &format!("{}{path}", endpoint.base_url),
        key: endpoint.key,
        idempotency_key: terms.idempotency_key,
        body: body.to_string().into_bytes(),
        deadline: terms.deadline,
    };
    let mut metadata = Map::new();
    metadata.insert("provider".into(), endpoint.provider.into());
    metadata.insert("model".into(), endpoint.model.into());
    let ended = |said, raw, usage, metadata| {
        Met::Ended(Ended {
            said,
            raw,
            usage,
            metadata,
        })
    };
    let failed = |failure, metadata| ended(Err(failure), None, None, metadata);
    let answered = match http.post(call).await {
        Outcome::Answered(answered) => answered,
        Outcome::NotNow { retry_after_ms, reason } => return Met::NotNow { retry_after_ms, reason },
        Outcome::Unclear { reason } => return Met::Unclear { reason },
        Outcome::Refused { status, message } => {
            metadata.insert("httpStatus".into(), status.into());
            return failed(Failure::Provider { status, message }, metadata);
        }
        Outcome::Uncallable { reason } => return failed(Failure::Uncallable { reason }, metadata),
        Outcome::TooLong => {
            return failed(
                Failure::TooLong {
                    limit: http.max_answer_bytes(),
                },
                metadata,
            );
        }
        Outcome::TimedOut => return failed(Failure::TimedOut { limit_ms: terms.limit_ms }, metadata),
    };
    let Answered { status, request_id, body } = answered;
    metadata.insert("httpStatus".into(), status.into());
    if let Some(id) = request_id {
        metadata.insert("requestId".into(), id.into());
    }
    let Reading {
        said,
        usage,
        metadata: more,
    } = match read(&body) {
        Ok(reading) => reading,
        Err(problem) => {
            let message = format!("what it sent cannot be read: {problem}");
            let raw = String::from_utf8_lossy(&body).into_owned();
            return ended(Err(Failure::Provider { status, message }), Some(raw), None, metadata);
        }
    };
    metadata.extend(more);
    let (said, raw) = match said {
        Said::Text(text) => (Ok(text.clone()), text),
        Said::Refused(said) => (Err(Failure::Refused { said: said.clone() }), said),
        Said::CutOff(reason, text) => (Err(Failure::CutOff { reason }), text),
        Said::Tool(tool) => (Err(Failure::UsedTool { tool }), String::from_utf8_lossy(&body).into_owned()),
        Said::Failed(status, message) => match Outcome::of(status, message, 0) {
            Outcome::NotNow { retry_after_ms, reason } => return Met::NotNow { retry_after_ms, reason },
            Outcome::Unclear { reason } => return Met::Unclear { reason },
            Outcome::Refused { status, message } => (
                Err(Failure::Provider { status, message }),
                String::from_utf8_lossy(&body).into_owned(),
            ),
            _ => {
                return Met::Unclear {
                    reason: format!("the provider failed with status {status}"),
                };
            }
        },
    };
    ended(said, Some(raw), usage, metadata)
}
