//! The log: one physical, append-only sequence of records for all partitions. What is in it survives; all else is derived from it.
//!
//! Records are written in groups. A group is durable as a whole or not there at all: it has one frame, one checksum, one sync.

mod error;
mod file;
#[cfg(test)]
mod file_tests;
mod frame;
mod memory;
pub mod offline;
mod recover;
mod segment;

use bytes::Bytes;

pub use error::{BoxError, LogError};
pub use file::{FileLog, LogOptions};
pub use frame::{FORMAT_LEVEL, MAX_GROUP_BYTES, MAX_GROUP_RECORDS, RECORD_OVERHEAD};
pub use memory::{Fault, MemoryLog};
pub use recover::Recovery;
pub use segment::SEGMENT_BYTES;

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

/// Appends groups of records. Blocking, and for one owner: the committer's thread.
///
/// Opening is each backend's own: it hands every record that is already there to a callback, in order, with its position
/// (the count of records up to and with it, so the first has position 1).
pub trait Log: Send {
    /// Writes `records` as one group and makes it durable; returns only then. No records is no group.
    ///
    /// After any error but [`LogError::TooLarge`] and [`LogError::NotDense`], which refuse the group before anything is written,
    /// the outcome is unknown: the group may or may not be there. The log takes nothing more, and its owner must end, and open
    /// it again to learn what is in it.
    fn append(&mut self, records: &[Record]) -> Result<(), LogError>;
}

/// The next sequence of every partition: what makes a lost or doubled record visible, when written and when read.
#[derive(Clone, Debug, Default)]
struct Sequences(Vec<u64>);

impl Sequences {
    /// The sequence that the next record of `partition` must have.
    fn expected(&self, partition: u16) -> u64 {
        self.0.get(usize::from(partition)).map_or(1, |last| last + 1)
    }

    /// Takes the next record of `partition`, or says which sequence it should have had.
    fn advance(&mut self, partition: u16, sequence: u64) -> Result<(), u64> {
        let expected = self.expected(partition);
        if sequence != expected {
            return Err(expected);
        }
        let place = usize::from(partition);
        if place >= self.0.len() {
            self.0.resize(place + 1, 0);
        }
        self.0[place] = sequence;
        Ok(())
    }

    /// Takes a whole group, or nothing of it.
    fn advance_all(&mut self, records: &[Record]) -> Result<(), LogError> {
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
