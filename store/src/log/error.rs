//! What can go wrong with a log, told apart by what its owner must do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::redis::RedisError;

/// An error of the callback that takes the records when a log is read.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a log could not be opened, read or appended to.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Another process (or another part of this one) has the log open.
    #[error("the log in {} is in use by another process", dir.display())]
    InUse {
        /// The log's folder.
        dir: PathBuf,
    },
    /// A newer version wrote it. Nothing was touched.
    #[error("{} at byte {offset} has format level {found}; this version reads up to {supported}: start a newer version", segment.display())]
    NewerFormat {
        /// The segment file.
        segment: PathBuf,
        /// Where in it.
        offset: u64,
        /// The level that was found.
        found: u16,
        /// The highest level that this version reads.
        supported: u16,
    },
    /// Something durable is damaged, which no crash can do. Nothing was touched.
    #[error("{} is damaged at byte {offset}: {reason}; `evalgrid log repair` tells what can still be read, and what would be lost", segment.display())]
    Corrupt {
        /// The segment file.
        segment: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// Records that should be there are in no segment and no intact snapshot. Nothing was touched.
    #[error("the log in {} is not complete: {what}. Put the missing files back, or a backup of the whole folder", dir.display())]
    Missing {
        /// The log's folder.
        dir: PathBuf,
        /// Which positions are missing, and how that shows.
        what: String,
    },
    /// A snapshot that is over the limits or does not follow the last. Nothing was written.
    #[error("a snapshot at position {position} was refused: {reason}")]
    SnapshotRefused {
        /// Its position.
        position: u64,
        /// Why.
        reason: String,
    },
    /// A group over the limits. Nothing was written.
    #[error("a group of {records} records and {bytes} bytes is over the limit of {max_records} records and {max_bytes} bytes")]
    TooLarge {
        /// Records in the group.
        records: usize,
        /// Their encoded bytes, before compression.
        bytes: usize,
        /// The limit of records.
        max_records: usize,
        /// The limit of bytes.
        max_bytes: usize,
    },
    /// A record that is not its partition's next one. Nothing was written.
    #[error("partition {partition} expects sequence {expected} next, not {found}")]
    NotDense {
        /// The partition.
        partition: u16,
        /// The sequence that would be right.
        expected: u64,
        /// The sequence that was given.
        found: u64,
    },
    /// An earlier append failed, so nobody knows what is in the log. Open it again.
    #[error("an earlier append failed with an unknown outcome; the log must be opened again")]
    Poisoned,
    /// The callback refused a record while the log was read.
    #[error("the record at position {position} was refused: {source}")]
    Refused {
        /// The record's position.
        position: u64,
        /// The callback's error.
        source: BoxError,
    },
    /// Another owner has the log, or its history is another than the one that was written. Nothing was written. The owner must
    /// step down and read the log again.
    #[error("this owner may write no more: {reason}; step down and read the log again")]
    Fenced {
        /// How that showed.
        reason: String,
    },
    /// Nobody knows whether the group is there: no answer told before the time was up. The owner must step down and read the log again.
    #[error("it is unknown whether the last group was written: {reason}; step down and read the log again")]
    Unknown {
        /// What was tried, and how it failed.
        reason: String,
    },
    /// Redis could not be used. On an append, the group was not written.
    #[error("{0}")]
    Redis(#[source] Box<RedisError>),
    /// The file system refused something. On an append, the outcome is unknown.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl LogError {
    /// For `map_err`: an I/O error with what was tried, and on what.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LogError {
        let path = path.to_owned();
        move |source| LogError::Io { action, path, source }
    }
}
