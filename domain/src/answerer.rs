//! Why a judge or a simulated person gave no answer, in words for people.

use crate::{
    credential,
    judge::{AnswerError, MaterialError},
    outcome::humanise_duration,
    person::ReplyError,
};

/// Why there is no valid answer. Its text is not redacted, and may be long: what keeps it does both.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It took too long.
    #[error("there was no answer within {}", humanise_duration(*.limit_ms))]
    TimedOut {
        /// How long it may take.
        limit_ms: u64,
    },
    /// The model did not want to answer.
    #[error("the model refused to answer: {}", or(.said, "it gave no reason"))]
    Refused {
        /// The model's words.
        said: String,
    },
    /// The answer is not complete.
    #[error("the answer was cut off: {}", or(.reason, "no reason was given"))]
    CutOff {
        /// As the provider says it.
        reason: String,
    },
    /// The judge's answer is not one that was asked for.
    #[error("the answer is not valid: {0}")]
    Answer(#[from] AnswerError),
    /// The person's answer is not one that was asked for.
    #[error("the answer is not valid: {0}")]
    Reply(#[from] ReplyError),
    /// The answer does not end.
    #[error("the answer is longer than {limit} bytes")]
    TooLong {
        /// What is read of one.
        limit: usize,
    },
    /// It did more than answer.
    #[error("it used a tool ({tool}), and may use none")]
    UsedTool {
        /// What it used.
        tool: String,
    },
    /// There is no key.
    #[error("{}", credential::missing_for(.answerer, .variable))]
    MissingCredential {
        /// The harness or the provider.
        answerer: String,
        /// What should hold the key.
        variable: String,
    },
    /// There is nobody to ask, or nothing to ask about.
    #[error("it cannot be asked: {}", or(.reason, "no reason was given"))]
    Uncallable {
        /// Why.
        reason: String,
    },
    /// The provider does not take the request.
    #[error("the provider answered with status {status}: {}", or(.message, "it gave no reason"))]
    Provider {
        /// Of HTTP.
        status: u16,
        /// Its words.
        message: String,
    },
    /// The provider refused for now, until it was asked no more.
    #[error("the provider still refused for now when it was asked {tries} times: {}", or(.reason, "it gave no reason"))]
    Limited {
        /// How often it was asked.
        tries: u32,
        /// The newest reason.
        reason: String,
    },
    /// Each time it was asked, it may have answered or not.
    #[error("it was asked {tries} times, and no answer arrived: {}", or(.reason, "no reason is known"))]
    Unclear {
        /// How often it was asked.
        tries: u32,
        /// The newest reason.
        reason: String,
    },
    /// Each time it was asked, what asked it stopped.
    #[error("it was asked {tries} times, and each time the judge runner stopped before an answer was kept")]
    Stopped {
        /// How often it was asked.
        tries: u32,
    },
    /// What it should read is not there.
    #[error(transparent)]
    Material(#[from] MaterialError),
    /// The harness, or its sandbox, did not work.
    #[error("the {harness} agent failed: {}", or(.reason, "no reason was given"))]
    Harness {
        /// Its name.
        harness: String,
        /// Why.
        reason: String,
    },
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    match text.trim() {
        "" => otherwise,
        text => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_words() {
        let text = str::to_owned;
        for (failure, expected) in [
            (Failure::TimedOut { limit_ms: 120_000 }, "there was no answer within 2m"),
            (Failure::Refused { said: text(" no ") }, "the model refused to answer: no"),
            (
                Failure::Refused { said: text(" ") },
                "the model refused to answer: it gave no reason",
            ),
            (
                Failure::CutOff {
                    reason: text("max_output_tokens"),
                },
                "the answer was cut off: max_output_tokens",
            ),
            (Failure::Answer(AnswerError::Empty), "the answer is not valid: it is empty"),
            (Failure::TooLong { limit: 65_536 }, "the answer is longer than 65536 bytes"),
            (Failure::UsedTool { tool: text("Bash") }, "it used a tool (Bash), and may use none"),
            (
                Failure::MissingCredential {
                    answerer: text("openai"),
                    variable: text("OPENAI_API_KEY"),
                },
                "Set OPENAI_API_KEY in Settings > Environment to run openai (on this server: in the scheduler's own environment)",
            ),
            (
                Failure::Uncallable {
                    reason: text("its address is none"),
                },
                "it cannot be asked: its address is none",
            ),
            (
                Failure::Provider {
                    status: 404,
                    message: text("no such model"),
                },
                "the provider answered with status 404: no such model",
            ),
            (
                Failure::Limited {
                    tries: 4,
                    reason: text("429"),
                },
                "the provider still refused for now when it was asked 4 times: 429",
            ),
            (
                Failure::Unclear {
                    tries: 2,
                    reason: text("the connection broke"),
                },
                "it was asked 2 times, and no answer arrived: the connection broke",
            ),
            (
                Failure::Stopped { tries: 2 },
                "it was asked 2 times, and each time the judge runner stopped before an answer was kept",
            ),
            (
                Failure::Harness {
                    harness: text("codex"),
                    reason: text("no sandbox"),
                },
                "the codex agent failed: no sandbox",
            ),
        ] {
            assert_eq!(failure.to_string(), expected);
        }
    }
}
