//! Judges: what one is shown, how it is asked, how its answer is read, and the record that stays.
//!
//! [`material`] picks what a judge may see from a trial's stored evidence, [`question`] wraps it so that nothing in it can pass for an
//! instruction, [`read_answer`] takes only what was asked for, and [`conclude`] makes the record. Judged text is hostile: an agent would like to
//! write its own verdict.

use serde::{Deserialize, Serialize};

use crate::{decode::utf16_len, limits::MAX_JUDGE_FILE, redact::Redactor};

mod answer;
mod material;
mod question;
mod record;

pub use answer::{Answer, AnswerError, read_answer};
pub use material::{Entry, File, Material, MaterialError, material};
pub use question::{Question, prompt, question, question_in_order};
pub use record::{Asked, Concluded, NO_JUDGMENT, Place, Verdict, conclude, skipped, trial_failure};

pub use crate::answerer::Failure;

/// A file of the workspace that a judge reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum JudgeFile {
    /// It was read.
    Text {
        /// As the judge names it.
        path: String,
        /// All of it, redacted. At most [`MAX_JUDGE_FILE`] characters.
        text: String,
    },
    /// It was not.
    Missing {
        /// As the judge names it.
        path: String,
        /// Completes "the file PATH": `is not there`. Redacted.
        problem: String,
    },
}

impl JudgeFile {
    /// A file that was read, or why it was not: completes "the file PATH", for example `is not there`. Redacts it, and refuses it over its limit.
    pub fn new(path: impl Into<String>, read: Result<String, String>, redactor: &Redactor) -> Self {
        let path = path.into();
        match read {
            Ok(mut text) => {
                redactor.string(&mut text);
                match utf16_len(&text) {
                    ..=MAX_JUDGE_FILE => Self::Text { path, text },
                    length => Self::Missing {
                        path,
                        problem: format!("has {length} characters; a judge reads at most {MAX_JUDGE_FILE}"),
                    },
                }
            }
            Err(mut problem) => {
                redactor.string(&mut problem);
                Self::Missing { path, problem }
            }
        }
    }

    /// As the judge names it.
    pub fn path(&self) -> &str {
        match self {
            Self::Text { path, .. } | Self::Missing { path, .. } => path,
        }
    }
}
