//! How much of the evidence of a trial is there, channel by channel. What is missing is unknown, never zero and never "nothing happened".

use serde::{Deserialize, Serialize};

use crate::{evidence::cut, redact::Redactor};

/// Characters of one reason.
pub const MAX_REASON: usize = 500;

/// How much of one kind of evidence is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum Channel {
    /// All of it.
    #[default]
    Complete,
    /// A part: what is there is true, what is not there may have happened.
    Partial {
        /// What is missing, and why; for people.
        reason: String,
    },
    /// None: what is there, if anything, says nothing.
    Unavailable {
        /// Why; for people.
        reason: String,
    },
}

impl Channel {
    /// A part is missing.
    pub fn partial(reason: impl Into<String>) -> Self {
        Self::Partial { reason: reason.into() }
    }

    /// All is missing.
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::Unavailable { reason: reason.into() }
    }

    /// Whether nothing is missing.
    pub fn is_complete(&self) -> bool {
        *self == Self::Complete
    }

    /// Why something is missing.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Complete => None,
            Self::Partial { reason } | Self::Unavailable { reason } => Some(reason),
        }
    }

    /// Takes the worse of the two; among equals the one that was there, whose reason came first. Nothing makes it better again.
    pub fn lower(&mut self, other: &Channel) {
        if other.rank() > self.rank() {
            *self = other.clone();
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Self::Complete => 0,
            Self::Partial { .. } => 1,
            Self::Unavailable { .. } => 2,
        }
    }

    fn seal(&mut self, redactor: &Redactor) {
        if let Self::Partial { reason } | Self::Unavailable { reason } = self {
            redactor.string(reason);
            cut(reason, MAX_REASON);
        }
    }
}

/// How much of the evidence of a turn, or of a whole trial, is there. The default is complete: whoever reads a channel lowers it where it is not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Coverage {
    /// The agent's events, in their order.
    pub events: Channel,
    /// Its commands and tool calls.
    pub actions: Channel,
    /// What was said.
    pub messages: Channel,
    /// Tokens.
    pub usage: Channel,
    /// How the agent's process and its commands ended.
    pub status: Channel,
    /// The files that it changed.
    pub files: Channel,
}

impl Coverage {
    /// Takes the worst of each channel: over the turns of a trial.
    pub fn lower(&mut self, other: &Coverage) {
        for (own, other) in self.channels_mut().into_iter().zip(other.channels()) {
            own.lower(other.1);
        }
    }

    /// Redacts every reason, then cuts it.
    pub fn seal(&mut self, redactor: &Redactor) {
        self.channels_mut().into_iter().for_each(|channel| channel.seal(redactor));
    }

    /// The channels with their names.
    pub fn channels(&self) -> [(&'static str, &Channel); 6] {
        [
            ("events", &self.events),
            ("actions", &self.actions),
            ("messages", &self.messages),
            ("usage", &self.usage),
            ("status", &self.status),
            ("files", &self.files),
        ]
    }

    fn channels_mut(&mut self) -> [&mut Channel; 6] {
        [
            &mut self.events,
            &mut self.actions,
            &mut self.messages,
            &mut self.usage,
            &mut self.status,
            &mut self.files,
        ]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nothing_makes_a_channel_better() {
        let [complete, partial, gone] = [Channel::Complete, Channel::partial("p"), Channel::unavailable("u")];
        for (first, second, worst) in [
            (&complete, &complete, &complete),
            (&complete, &partial, &partial),
            (&partial, &complete, &partial),
            (&partial, &gone, &gone),
            (&gone, &partial, &gone),
            (&partial, &Channel::partial("later"), &partial),
        ] {
            let mut trial = Coverage {
                usage: first.clone(),
                ..Coverage::default()
            };
            trial.lower(&Coverage {
                usage: second.clone(),
                ..Coverage::default()
            });
            assert_eq!(trial.usage, *worst);
            assert!(
                trial
                    .channels()
                    .iter()
                    .all(|(name, channel)| *name == "usage" || channel.is_complete())
            );
        }
    }

    #[test]
    fn reasons_are_sealed_and_the_wire_is_plain() {
        let mut coverage = Coverage {
            files: Channel::partial(format!("my-secret-value {}", "x".repeat(MAX_REASON))),
            ..Coverage::default()
        };
        coverage.seal(&Redactor::new(["my-secret-value"]));
        let reason = coverage.files.reason().unwrap();
        assert!(reason.starts_with("[redacted] x") && reason.len() == MAX_REASON);
        let wire = serde_json::to_value(&coverage).unwrap();
        assert_eq!(wire["events"], serde_json::json!({"state": "complete"}));
        assert_eq!(wire["files"], serde_json::json!({"state": "partial", "reason": reason}));
        assert_eq!(serde_json::from_value::<Coverage>(wire).unwrap(), coverage);
    }
}
