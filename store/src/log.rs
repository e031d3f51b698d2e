//! The log: one physical, append-only sequence of records for all partitions. What is in it survives; all else is derived from it.
//!
//! Records are written in groups. A group is durable as a whole or not there at all: it has one frame, one checksum, one sync.

#[cfg(test)]
mod cut_tests;
mod error;
mod file;
#[cfg(test)]
mod file_tests;
pub(crate) mod frame;
mod memory;
pub mod offline;
mod recover;
pub mod repair;
mod segment;
pub(crate) mod snapshot;

use std::sync::Arc;

use bytes::Bytes;

pub use error::{BoxError, LogError};
pub use file::{FileLog, LogOptions};
pub use frame::{FORMAT_LEVEL, MAX_GROUP_BYTES, MAX_GROUP_RECORDS, RECORD_OVERHEAD};
pub use memory::{Fault, MemoryLog};
pub use recover::Recovery;
pub use segment::SEGMENT_BYTES;
pub use snapshot::MAX_SNAPSHOT_BYTES;

/// One durable fact of one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The unit of ordering that the record belongs to.
    pub partition: u16,
    /// Its place in the partition: dense, from 1.
    pub sequence: u64,
    /// What the owner wrote; opaque here.
    pub payload: Bytes,
}

/// A record as it is read back, borrowed from the reader's buffer: nothing that keeps it can pin a whole segment in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// As in [`Record`].
    pub partition: u16,
    /// As in [`Record`].
    pub sequence: u64,
    /// As in [`Record`].
    pub payload: &'a [u8],
}

impl RecordRef<'_> {
    /// A copy that owns its payload.
    pub fn to_record(self) -> Record {
        Record {
            partition: self.partition,
            sequence: self.sequence,
            payload: Bytes::copy_from_slice(self.payload),
        }
    }
}

impl Record {
    /// The record, borrowed.
    pub fn as_ref(&self) -> RecordRef<'_> {
        RecordRef {
            partition: self.partition,
            sequence: self.sequence,
            payload: &self.payload,
        }
    }
}

/// Everything that the records up to and with `position` have brought about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Position of the last record that it reflects.
    pub position: u64,
    /// The last sequence of each partition, by number.
    pub sequences: Vec<u64>,
    /// The owner's encoded state; opaque here. At most [`MAX_SNAPSHOT_BYTES`].
    pub payload: Bytes,
}

/// What a reader of the log is handed, in order: at most one snapshot first (again later only when a follower has fallen behind
/// what was cut), then the records behind it.
#[derive(Clone, Copy, Debug)]
pub enum Replay<'a> {
    /// Forget all, and begin with this.
    Snapshot(&'a Snapshot),
    /// The next record, and its position.
    Record(u64, RecordRef<'a>),
}

/// Appends groups of records. Blocking, and for one owner: the committer's thread.
///
/// Opening is each backend's own: it hands the newest intact snapshot, and every record behind it, to a callback. A record's
/// position is the count of records from the beginning of time, so the first has position 1, whatever has been cut since.
pub trait Log: Send {
    /// Writes `records` as one group and makes it durable; returns only then. No records is no group.
    ///
    /// After any error but [`LogError::TooLarge`] and [`LogError::NotDense`], which refuse the group before anything is written,
    /// the outcome is unknown: the group may or may not be there. The log takes nothing more, and its owner must end, and open
    /// it again to learn what is in it.
    fn append(&mut self, records: &[Record]) -> Result<(), LogError>;

    /// Lets go of the records up to and with `position`, as far as whole units (segments, groups) allow, and never of what the
    /// older of the two kept snapshots does not reflect: when the newest turns out to be damaged, that one still has all that
    /// follows it. Returns the first position still there. After an error less may be gone than was asked for; nothing else is.
    fn cut(&mut self, position: u64) -> Result<u64, LogError>;

    /// Bytes stored since the newest snapshot was asked for (or all, where there is none): tells when the next is due.
    fn bytes_since_snapshot(&self) -> u64;

    /// A handle that saves snapshots from another thread while this one appends.
    fn snapshots(&self) -> Arc<dyn Snapshots>;
}

/// Saves snapshots of one log, from any thread.
pub trait Snapshots: Send + Sync {
    /// Makes the snapshot durable. The newest two are kept, older ones removed. Its position must be durable in the log, and newer
    /// than the last one's. After an error, the log and the snapshots that were there are as they were.
    fn save(&self, snapshot: &Snapshot) -> Result<(), LogError>;
}

/// The next sequence of every partition: what makes a lost or doubled record visible, when written and when read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequences(pub(crate) Vec<u64>);

impl Sequences {
    /// The sequence that the next record of `partition` must have.
    fn expected(&self, partition: u16) -> u64 {
        self.0.get(usize::from(partition)).map_or(1, |last| last + 1)
    }

    /// Takes the next record of `partition`, or says which sequence it should have had.
    pub(crate) fn advance(&mut self, partition: u16, sequence: u64) -> Result<(), u64> {
        let expected = self.expected(partition);
        if sequence != expected {
            return Err(expected);
        }
        self.begin(partition, sequence);
        Ok(())
    }

    /// Takes `sequence` for the partition's last one, whatever was before.
    pub(crate) fn begin(&mut self, partition: u16, sequence: u64) {
        let place = usize::from(partition);
        if place >= self.0.len() {
            self.0.resize(place + 1, 0);
        }
        self.0[place] = sequence;
    }

    /// Takes a whole group, or nothing of it.
    pub(crate) fn advance_all(&mut self, records: &[Record]) -> Result<(), LogError> {
        for (index, record) in records.iter().enumerate() {
            if let Err(expected) = self.advance(record.partition, record.sequence) {
                for taken in records[..index].iter().rev() {
                    self.0[usize::from(taken.partition)] = taken.sequence - 1;
                }
                return Err(LogError::NotDense {
                    partition: record.partition,
                    expected,
                    found: record.sequence,
                });
            }
        }
        Ok(())
    }
}
