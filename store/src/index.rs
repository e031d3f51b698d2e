//! The index: rows derived from the log, for look-ups and lists. Losing it costs a rebuild, never data.
//!
//! All calls block; from async code use `spawn_blocking`.

mod memory;
mod sled_index;

use std::path::PathBuf;

pub use memory::MemoryIndex;
pub use sled_index::{Opened, SledIndex};

/// Longest value of a row in bytes. sled keeps values of the size of a page in files of their own, which it never syncs; rows
/// are small, and what is big is an object.
pub const MAX_INDEX_VALUE: usize = 8 * 1024;
/// Longest key of a row in bytes: a few ids and a time, with room to spare.
pub const MAX_INDEX_KEY: usize = 1024;

/// A change of one row: its key, and its new value or none to remove it.
pub type Row = (Vec<u8>, Option<Vec<u8>>);

/// A row that was found: its key and its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// Ordered rows, and the position of the log that they reflect. One writer, many readers.
pub trait Index: Send + Sync {
    /// Changes `rows` (later ones win) and moves to `position`, all or nothing. Positions only grow: an older batch of rows would
    /// bring back what is gone. Not durable before [`Index::sync`].
    fn apply(&self, position: u64, rows: &[Row]) -> Result<(), IndexError>;

    /// The value of `key`.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError>;

    /// At most `limit` rows whose keys begin with `prefix`, in the order of their keys; with `after`, only keys behind it.
    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, IndexError>;

    /// The position of the log that the rows reflect; 0 in a new index.
    fn position(&self) -> Result<u64, IndexError>;

    /// Makes everything that was applied durable.
    fn sync(&self) -> Result<(), IndexError>;

    /// Which log the rows came from, as [`Index::reset`] was told; None in a new index.
    fn origin(&self) -> Result<Option<String>, IndexError>;

    /// Forgets every row and the position: the log that they came from is no more, another one is. An interrupted reset leaves an index
    /// without an origin.
    fn reset(&self, origin: &str) -> Result<(), IndexError>;
}

/// Why the index did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// Another process (or another part of this one) has the index open.
    #[error("the index in {} is in use by another process", dir.display())]
    InUse {
        /// The index's folder.
        dir: PathBuf,
    },
    /// A key or value over its limit. Nothing was changed.
    #[error("a row's {what} of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// "key" or "value".
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The rows belong to a position that the index has passed. Nothing was changed.
    #[error("rows of position {position} come after those of position {reflected}")]
    Stale {
        /// The position that was given.
        position: u64,
        /// The position that the index reflects.
        reflected: u64,
    },
    /// The engine found itself damaged. Every later call fails; opening the index again moves it aside and makes a new one.
    #[error("the index is broken and must be rebuilt: {reason}")]
    Broken {
        /// What the engine said.
        reason: String,
    },
    /// The file system refused something.
    #[error("cannot {action} the index in {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// The checks that all backends share, before anything is changed.
fn check_rows(position: u64, reflected: u64, rows: &[Row]) -> Result<(), IndexError> {
    if position <= reflected {
        return Err(IndexError::Stale { position, reflected });
    }
    for (key, value) in rows {
        let value_bytes = value.as_ref().map_or(0, Vec::len);
        for (what, bytes, limit) in [("key", key.len(), MAX_INDEX_KEY), ("value", value_bytes, MAX_INDEX_VALUE)] {
            if bytes > limit {
                return Err(IndexError::TooLarge { what, bytes, limit });
            }
        }
    }
    Ok(())
}
