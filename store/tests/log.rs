//! The logs that need no server, through the suite of all logs.
#![allow(clippy::unwrap_used)]

mod log_conformance;

use evalgrid_store::log::Fault;
use evalgrid_store::{FileLog, Log, LogError, LogOptions, MemoryLog, Recovery, Snapshot};
use log_conformance::{Reopen, Visit, check_all, record, reopened};
use tempfile::TempDir;

struct Memory(MemoryLog);

impl Reopen for Memory {
    fn open(&self, visit: Visit<'_>) -> Result<(Box<dyn Log>, Recovery), LogError> {
        let (log, recovery) = self.0.open(visit)?;
        Ok((Box::new(log), recovery))
    }
}

struct Folder(TempDir, LogOptions);

impl Reopen for Folder {
    fn open(&self, visit: Visit<'_>) -> Result<(Box<dyn Log>, Recovery), LogError> {
        let (log, recovery) = FileLog::open(&self.0.path().join("deep/log"), self.1, visit)?;
        Ok((Box::new(log), recovery))
    }
}

/// In memory, where the system has such a place: thousands of syncs, and no power cut.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn memory_conforms() {
    check_all(&|| Box::new(Memory(MemoryLog::new())));
}

#[test]
fn folders_conform() {
    for segment_bytes in [4096, 1 << 20] {
        let options = LogOptions {
            segment_bytes,
            ..LogOptions::default()
        };
        check_all(&|| Box::new(Folder(scratch(), options)));
    }
}

#[test]
fn a_memory_log_fails_as_asked() {
    for (fault, kept, torn) in [(Fault::Lost, 1, false), (Fault::Torn, 1, true), (Fault::Kept, 2, false)] {
        let disk = Memory(MemoryLog::new());
        let mut log = reopened(&disk).log;
        log.append(&[record(1, 1, "a")]).unwrap();
        disk.0.fail_next(fault);
        assert!(matches!(log.append(&[record(1, 2, "b")]), Err(LogError::Io { .. })));
        assert!(matches!(log.append(&[record(1, 2, "b")]), Err(LogError::Poisoned)));
        let mut again = reopened(&disk);
        assert_eq!((again.records.len(), again.recovery.torn_bytes > 0), (kept, torn));
        again.log.append(&[record(1, kept as u64 + 1, "c")]).unwrap();
        assert!(matches!(log.append(&[record(1, 9, "zombie")]), Err(LogError::Poisoned)));
        assert_eq!(reopened(&disk).recovery.torn_bytes, 0);
    }
}

#[test]
fn a_memory_log_fails_over() {
    let disk = Memory(MemoryLog::new());
    let mut log = reopened(&disk).log;
    for sequence in 1..=5 {
        log.append(&[record(0, sequence, "a"), record(1, sequence, "b")]).unwrap();
        let snapshot = Snapshot {
            position: 2 * sequence,
            sequences: vec![sequence; 2],
            payload: "".into(),
        };
        log.snapshots().save(&snapshot).unwrap();
    }
    assert_eq!((log.cut(u64::MAX).unwrap(), disk.0.len()), (9, 1));
    let mut opened = reopened(&disk);
    opened.log.append(&[record(0, 6, "c")]).unwrap();
    opened.log.append(&[record(0, 7, "d")]).unwrap();
    assert_eq!(disk.0.lose_last(1), 11);
    assert!(matches!(opened.log.append(&[record(0, 8, "e")]), Err(LogError::Poisoned)));
    let mut opened = reopened(&disk);
    assert_eq!(opened.records, [record(0, 6, "c")]);
    opened.log.append(&[record(0, 7, "other")]).unwrap();
    // A snapshot of what is lost goes with it.
    assert_eq!((disk.0.lose_last(9), disk.0.is_empty()), (8, true));
    let opened = reopened(&disk);
    assert_eq!((opened.recovery.snapshot, opened.records.len()), (Some(8), 0));
}
