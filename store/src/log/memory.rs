//! A log in memory, for tests and simulation: what a crash, or a failover to a replica that lags, leaves of it can be chosen.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{BoxError, LogError};
use super::file::KEPT_SNAPSHOTS;
use super::frame::{self, MAX_GROUP_BYTES, MAX_GROUP_RECORDS};
use super::{Log, Record, Recovery, Replay, Sequences, Snapshot, Snapshots, snapshot};

/// How an append fails. Its owner sees the same error each time, and cannot know which it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The group is lost, as by a power cut before the sync.
    Lost,
    /// The group is lost, and the next opening finds and cuts a part of it.
    Torn,
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
    /// Position of the last record that was cut.
    cut: u64,
    groups: Vec<Vec<Record>>,
    snapshots: Vec<Snapshot>,
    sequences: Sequences,
    torn_bytes: u64,
    since_snapshot: u64,
    fault: Option<Fault>,
    owner: u64,
    poisoned: bool,
}

impl Disk {
    fn position(&self) -> u64 {
        self.cut + self.groups.iter().map(|group| group.len() as u64).sum::<u64>()
    }
}

impl MemoryLog {
    /// An empty log.
    pub fn new() -> MemoryLog {
        MemoryLog::default()
    }

    /// Opens it, as after a restart: the newest snapshot and every record behind it go to `visit`, and only the returned handle
    /// may append.
    pub fn open(&self, mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>) -> Result<(MemoryLog, Recovery), LogError> {
        let mut disk = self.disk();
        let mut recovery = Recovery {
            segments: 1,
            first_position: disk.cut + 1,
            position: disk.cut,
            torn_bytes: disk.torn_bytes,
            ..Recovery::default()
        };
        if let Some(snapshot) = disk.snapshots.last() {
            let position = snapshot.position;
            recovery.snapshot = Some(position);
            visit(Replay::Snapshot(snapshot)).map_err(|source| LogError::Refused { position, source })?;
        }
        let mut since_snapshot = 0;
        for group in &disk.groups {
            for record in group {
                recovery.position += 1;
                recovery.bytes += size(record);
                let position = recovery.position;
                if recovery.snapshot.is_none_or(|reflected| reflected < position) {
                    recovery.records += 1;
                    since_snapshot += size(record);
                    visit(Replay::Record(position, record.as_ref())).map_err(|source| LogError::Refused { position, source })?;
                }
            }
            recovery.groups += 1;
        }
        disk.since_snapshot = since_snapshot;
        disk.torn_bytes = 0;
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

    /// Number of durable groups that have not been cut.
    pub fn len(&self) -> usize {
        self.disk().groups.len()
    }

    /// Whether there is no such group.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes back the last durable groups (at most those there are), with the snapshots that reflect any of them, as a failover to
    /// a replica that lags does. The owner may append no more. Returns the position that is the last one now.
    pub fn lose_last(&self, groups: usize) -> u64 {
        let mut disk = self.disk();
        let left = disk.groups.len().saturating_sub(groups);
        for record in disk.groups.split_off(left).iter().flatten().rev() {
            disk.sequences.begin(record.partition, record.sequence - 1);
        }
        let position = disk.position();
        disk.snapshots.retain(|snapshot| snapshot.position <= position);
        disk.poisoned = true;
        position
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        // Nothing in here panics half-way through a change.
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that a record takes, at most.
fn size(record: &Record) -> u64 {
    (record.payload.len() + frame::RECORD_OVERHEAD) as u64
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
        match fault {
            Some(Fault::Lost) => disk.sequences = before,
            Some(Fault::Torn) => (disk.sequences, disk.torn_bytes) = (before, bytes as u64 / 2),
            Some(Fault::Kept) | None => {
                disk.since_snapshot += bytes as u64;
                disk.groups.push(records.to_vec());
            }
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

    fn cut(&mut self, position: u64) -> Result<u64, LogError> {
        let mut disk = self.disk();
        let reflected = match &disk.snapshots[..] {
            [older, _] => older.position,
            _ => 0,
        };
        let (mut groups, mut cut) = (0, disk.cut);
        while let Some(group) = disk.groups.get(groups)
            && cut + group.len() as u64 <= position.min(reflected)
        {
            cut += group.len() as u64;
            groups += 1;
        }
        disk.groups.drain(..groups);
        disk.cut = cut;
        Ok(cut + 1)
    }

    fn bytes_since_snapshot(&self) -> u64 {
        self.disk().since_snapshot
    }

    fn snapshots(&self) -> Arc<dyn Snapshots> {
        Arc::new(self.clone())
    }
}

impl Snapshots for MemoryLog {
    fn save(&self, snapshot: &Snapshot) -> Result<(), LogError> {
        let mut disk = self.disk();
        if disk.poisoned || disk.owner != self.owner {
            return Err(LogError::Poisoned);
        }
        let last = disk.snapshots.last().map_or(0, |last| last.position);
        snapshot::check(snapshot, last, disk.position())?;
        disk.snapshots.push(snapshot.clone());
        let old = disk.snapshots.len().saturating_sub(KEPT_SNAPSHOTS);
        disk.snapshots.drain(..old);
        disk.since_snapshot = 0;
        Ok(())
    }
}
