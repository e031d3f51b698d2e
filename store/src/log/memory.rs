//! A log in memory, for tests and simulation: what a crash leaves of it can be chosen.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{BoxError, LogError};
use super::frame::{self, MAX_GROUP_BYTES, MAX_GROUP_RECORDS};
use super::{Log, Record, RecordRef, Recovery, Sequences};

/// How an append fails. Its owner sees the same error either way, and cannot know which it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The group is lost, as by a power cut before the sync.
    Lost,
    /// The group is there after all, as by a sync whose answer got lost.
    Kept,
}

/// A log in memory. Clones share what is stored, as handles of one disk; the one that was opened last is the owner.
#[derive(Clone, Debug, Default)]
pub struct MemoryLog {
    disk: Arc<Mutex<Disk>>,
    owner: u64,
}

#[derive(Debug, Default)]
struct Disk {
    groups: Vec<Vec<Record>>,
    sequences: Sequences,
    fault: Option<Fault>,
    owner: u64,
    poisoned: bool,
}

impl MemoryLog {
    /// An empty log.
    pub fn new() -> MemoryLog {
        MemoryLog::default()
    }

    /// Opens it, as after a restart: every record goes to `visit`, and only the returned handle may append.
    pub fn open(&self, mut visit: impl FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<(MemoryLog, Recovery), LogError> {
        let mut disk = self.disk();
        let mut recovery = Recovery {
            segments: 1,
            ..Recovery::default()
        };
        for group in &disk.groups {
            for record in group {
                recovery.records += 1;
                recovery.bytes += (record.payload.len() + frame::RECORD_OVERHEAD) as u64;
                let position = recovery.records;
                visit(position, record.as_ref()).map_err(|source| LogError::Refused { position, source })?;
            }
            recovery.groups += 1;
        }
        disk.poisoned = false;
        disk.owner += 1;
        let owner = disk.owner;
        drop(disk);
        Ok((
            MemoryLog {
                disk: Arc::clone(&self.disk),
                owner,
            },
            recovery,
        ))
    }

    /// Makes the next append fail.
    pub fn fail_next(&self, fault: Fault) {
        self.disk().fault = Some(fault);
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        // Nothing in here panics half-way through a change.
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for MemoryLog {
    fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        let mut disk = self.disk();
        if disk.poisoned || disk.owner != self.owner {
            return Err(LogError::Poisoned);
        }
        if records.is_empty() {
            return Ok(());
        }
        let bytes = frame::size_bound(records);
        if records.len() > MAX_GROUP_RECORDS || bytes > MAX_GROUP_BYTES {
            let (max_records, max_bytes) = (MAX_GROUP_RECORDS, MAX_GROUP_BYTES);
            return Err(LogError::TooLarge {
                records: records.len(),
                bytes,
                max_records,
                max_bytes,
            });
        }
        let before = disk.sequences.clone();
        disk.sequences.advance_all(records)?;
        let fault = disk.fault.take();
        if fault == Some(Fault::Lost) {
            disk.sequences = before;
        } else {
            disk.groups.push(records.to_vec());
        }
        if fault.is_some() {
            disk.poisoned = true;
            let source = std::io::Error::other("a fault that was asked for");
            return Err(LogError::Io {
                action: "sync",
                path: "memory".into(),
                source,
            });
        }
        Ok(())
    }
}
