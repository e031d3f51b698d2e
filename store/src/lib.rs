//! Log, Index and Objects: traits, one conformance suite, and their backends.
//!
//! The log is the truth: ordered, durable records that this crate never looks into. The index holds rows derived from the log
//! and can be rebuilt. Objects are immutable bytes of one organization, named by their hash. Nothing here knows what a trial is.

mod disk;
pub mod index;
pub mod log;
pub mod objects;
pub mod redis;

#[cfg(test)]
mod conformance;

pub use index::{Index, IndexError, KeyValue, MemoryIndex, Opened, Row, SledIndex};
pub use log::{FileLog, Log, LogError, LogOptions, MemoryLog, Record, RecordRef, Recovery, Replay, Snapshot, Snapshots};
pub use objects::{MemoryObjects, ObjectError, ObjectId, Objects, OldObject, StoredObjects};
