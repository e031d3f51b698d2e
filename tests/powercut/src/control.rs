//! What the test and the disk's process say to each other: one JSON value per line, orders on its stdin, one answer to each on its stdout.
//!
//! The end of stdin means that the test is gone: the disk then lets everything go that waits for it, and ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::volatile::{Counts, Cut};

/// How long a freeze waits for the flush that it is to happen at. A server with something to do flushes within milliseconds.
pub const FREEZE_LIMIT: Duration = Duration::from_millis(150);
/// The name of the one file.
pub const IMAGE: &str = "image";

/// Of the test.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// The power goes at a flush: the first one, after some more, that has something to do. It is not carried out, and after it nothing is
    /// carried out or answered. The answer comes once that is so; where no such flush comes, after [`FREEZE_LIMIT`].
    Freeze {
        /// How many flushes are carried out at least.
        flushes: u32,
        /// How many blocks must wait for the flush.
        blocks: usize,
    },
    /// Whoever waits for an answer gets an error, and so does everybody who comes.
    Fail,
    /// Loses what was not flushed, and works again.
    Cut {
        /// Decides which blocks.
        seed: u64,
        /// The probability with which a block that was not flushed stays.
        keep: f64,
    },
    /// Tells what happened so far.
    Count,
}

/// Of the disk.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Mounted; said once, unasked.
    Ready,
    /// Could not be mounted, and why; said instead of `Ready`.
    Failed(String),
    /// To `Freeze` and `Fail`.
    Done,
    /// To `Cut`.
    Cut(Cut),
    /// To `Count`.
    Counted(Counts),
}
