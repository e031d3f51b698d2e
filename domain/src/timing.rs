//! Where the time of a trial went: a tree of spans, from what is on record.

use serde::{Deserialize, Serialize};

/// Steps of one trial that its tree shows: a trial has at most 50 turns, and a handful of steps around each.
pub const MAX_SPANS: usize = 512;

/// One stretch of time, and what it is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Span {
    /// A step's name as it is on record, a turn, or a phase: `queue`, `setup`, `turns`, `checks`, `cleanup`.
    pub name: String,
    /// Milliseconds from the start of the trial's timing: that of its batch or, where it is not known, of its first step.
    pub offset_ms: u64,
    /// Milliseconds. A phase lasts from its first part to the end of its last.
    pub duration_ms: u64,
    /// It did not end well.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// In order of their beginnings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Span>,
}

/// Where the time of a trial went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Timing {
    /// Milliseconds since the epoch that the offsets count from.
    pub started_at_ms: u64,
    /// In order of their beginnings.
    pub spans: Vec<Span>,
    /// Steps that were left out because there are more than [`MAX_SPANS`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
