//! What every backend of `Log` must do. A backend's tests hand `check_all` a maker of empty logs.
#![allow(clippy::unwrap_used, dead_code)]

use std::collections::BTreeMap;

use bytes::Bytes;
use evalgrid_store::log::{BoxError, MAX_GROUP_BYTES, MAX_GROUP_RECORDS, RECORD_OVERHEAD};
use evalgrid_store::{Log, LogError, Record, Recovery, Replay, Snapshot};

pub type Visit<'a> = &'a mut dyn FnMut(Replay<'_>) -> Result<(), BoxError>;

/// A log that can be opened again, as after a crash of its owner.
pub trait Reopen {
    fn open(&self, visit: Visit<'_>) -> Result<(Box<dyn Log>, Recovery), LogError>;
}

/// Runs the whole suite, each check on empty logs of its own.
pub fn check_all(new: &dyn Fn() -> Box<dyn Reopen>) {
    check_appends(&*new());
    check_snapshots(&*new());
    for seed in 1..=8 {
        println!("seed {seed}");
        check_random(&*new(), seed);
    }
}

/// An opened log, and what it was opened with.
pub struct Opened {
    pub log: Box<dyn Log>,
    pub recovery: Recovery,
    pub snapshot: Option<Snapshot>,
    pub records: Vec<Record>,
}

pub fn reopened(backend: &dyn Reopen) -> Opened {
    let (mut snapshot, mut records) = (None, Vec::new());
    let mut last = 0;
    let opened = backend.open(&mut |replay| {
        match replay {
            Replay::Snapshot(found) => {
                assert!(last == 0 && snapshot.is_none(), "one snapshot, and before the records");
                (last, snapshot) = (found.position, Some(found.clone()));
            }
            Replay::Record(position, record) => {
                last += 1;
                assert_eq!(position, last);
                records.push(record.to_record());
            }
        }
        Ok(())
    });
    let (log, recovery) = opened.unwrap();
    assert_eq!((recovery.records, recovery.position), (records.len() as u64, last));
    assert_eq!(recovery.snapshot, snapshot.as_ref().map(|snapshot| snapshot.position));
    let snapshot_position = recovery.snapshot.unwrap_or(0);
    assert!(recovery.first_position <= snapshot_position + 1, "{recovery:?}");
    assert_eq!(recovery.skipped_snapshots, [""; 0]);
    Opened {
        log,
        recovery,
        snapshot,
        records,
    }
}

pub fn record(partition: u16, sequence: u64, payload: impl Into<Bytes>) -> Record {
    Record {
        partition,
        sequence,
        payload: payload.into(),
    }
}

fn refused(log: &mut dyn Log, group: &[Record], wants: u64) {
    match log.append(group) {
        Err(LogError::NotDense { expected, .. }) => assert_eq!(expected, wants),
        other => panic!("{other:?}"),
    }
}

fn check_appends(backend: &dyn Reopen) {
    let Opened {
        mut log,
        recovery,
        records,
        ..
    } = reopened(backend);
    assert_eq!((recovery.groups, records.len(), recovery.first_position), (0, 0, 1));
    let first = [
        record(0, 1, "a"),
        record(9, 1, ""),
        record(0, 2, vec![7; 3000]),
        record(u16::MAX, 1, "z"),
    ];
    let second = [record(9, 2, "b")];
    log.append(&[]).unwrap();
    log.append(&first).unwrap();
    log.append(&second).unwrap();

    // What is refused leaves no trace, not even the part of a group that was right.
    refused(&mut *log, &[record(9, 2, "again")], 3);
    refused(&mut *log, &[record(9, 4, "gap")], 3);
    refused(&mut *log, &[record(5, 0, "zero")], 1);
    refused(&mut *log, &[record(9, 3, "right"), record(9, 4, "right"), record(0, 9, "wrong")], 3);
    let huge = record(9, 3, vec![0; MAX_GROUP_BYTES - RECORD_OVERHEAD + 1]);
    assert!(matches!(log.append(&[huge]), Err(LogError::TooLarge { .. })));
    let many: Vec<Record> = (0..MAX_GROUP_RECORDS as u64 + 1).map(|index| record(9, 3 + index, "")).collect();
    assert!(matches!(log.append(&many), Err(LogError::TooLarge { .. })));
    let third = [record(9, 3, "c"), record(0, 3, "d")];
    log.append(&third).unwrap();
    drop(log);

    let all: Vec<Record> = [&first[..], &second, &third].concat();
    let Opened {
        mut log,
        recovery,
        records,
        ..
    } = reopened(backend);
    assert_eq!((recovery.groups, recovery.torn_bytes), (3, 0));
    assert_eq!(records, all);
    refused(&mut *log, &[record(9, 3, "again")], 4);
    log.append(&[record(9, 4, "e")]).unwrap();
    drop(log);
    assert_eq!(reopened(backend).records.len(), all.len() + 1);

    // A reader that refuses ends the opening.
    let result = backend.open(&mut |replay| match replay {
        Replay::Record(3, _) => Err("no".into()),
        _ => Ok(()),
    });
    match result {
        Err(LogError::Refused { position: 3, .. }) => {}
        other => panic!("{:?}", other.map(|(_, recovery)| recovery)),
    }
    assert_eq!(reopened(backend).records.len(), all.len() + 1);
}

fn snapshot(position: u64, sequences: &[u64], payload: impl Into<Bytes>) -> Snapshot {
    Snapshot {
        position,
        sequences: sequences.to_vec(),
        payload: payload.into(),
    }
}

fn check_snapshots(backend: &dyn Reopen) {
    let mut log = reopened(backend).log;
    let refused_snapshot = |log: &dyn Log, position: u64| {
        let result = log.snapshots().save(&snapshot(position, &[], "no"));
        assert!(matches!(result, Err(LogError::SnapshotRefused { .. })), "{position}: {result:?}");
    };
    refused_snapshot(&*log, 0);
    refused_snapshot(&*log, 1);
    assert_eq!(log.bytes_since_snapshot(), 0);
    for sequence in 1..=10 {
        log.append(&[record(0, sequence, vec![1; 900]), record(1, sequence, "x")]).unwrap();
    }
    let before = log.bytes_since_snapshot();
    assert!(before > 0);
    assert_eq!(log.cut(20).unwrap(), 1, "without snapshots nothing may go");

    // A snapshot may fall between two records of a group, and it is saved by another thread.
    let snapshots = log.snapshots();
    let first = snapshot(7, &[4, 3], vec![5; 3 << 20]);
    std::thread::scope(|scope| scope.spawn(|| snapshots.save(&first)).join().unwrap()).unwrap();
    assert!(log.bytes_since_snapshot() < before);
    refused_snapshot(&*log, 7);
    refused_snapshot(&*log, 21);
    assert_eq!(log.cut(20).unwrap(), 1, "one snapshot may turn out to be damaged");
    drop((log, snapshots));
    let mut opened = reopened(backend);
    assert_eq!(opened.snapshot.as_ref(), Some(&first));
    assert_eq!(opened.records.len(), 13);
    assert_eq!((opened.records[0].partition, opened.records[0].sequence), (1, 4));
    assert!(opened.log.bytes_since_snapshot() > 0);
    refused(&mut *opened.log, &[record(1, 4, "again")], 11);

    // At the very end, empty and with many sequences.
    let second = snapshot(20, &[10, 10, 0, 0, 0], "");
    opened.log.snapshots().save(&second).unwrap();
    let beginning = opened.log.cut(u64::MAX).unwrap();
    assert!(beginning <= 8, "the older snapshot needs what follows it: {beginning}");
    drop(opened);
    let mut opened = reopened(backend);
    assert_eq!((opened.snapshot.as_ref(), opened.records.len()), (Some(&second), 0));
    assert_eq!(opened.recovery.first_position, beginning);
    assert_eq!(opened.log.bytes_since_snapshot(), 0);
    refused(&mut *opened.log, &[record(0, 1, "again")], 11);
    refused(&mut *opened.log, &[record(2, 2, "gap")], 1);
    opened.log.append(&[record(2, 1, "new"), record(0, 11, "next")]).unwrap();
    drop(opened);
    assert_eq!(reopened(backend).records, [record(2, 1, "new"), record(0, 11, "next")]);
}

/// A small generator (SplitMix64): the same everywhere, for ever.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }
}

/// Appends, snapshots, cuts and reopenings in any order: what is there is what was taken, less what was cut.
fn check_random(backend: &dyn Reopen, seed: u64) {
    let mut chance = Chance(seed);
    let mut sequences = BTreeMap::new();
    let mut all: Vec<Record> = Vec::new();
    let mut kept: Vec<Snapshot> = Vec::new();
    let mut beginning = 1;
    let mut log = reopened(backend).log;
    for _ in 0..60 {
        match chance.below(8) {
            0 => {
                drop(log);
                let opened = reopened(backend);
                assert_eq!(opened.snapshot.as_ref(), kept.last());
                let reflected = kept.last().map_or(0, |snapshot| snapshot.position as usize);
                assert_eq!(opened.records, all[reflected..]);
                assert_eq!(opened.recovery.first_position, beginning);
                log = opened.log;
            }
            1 => {
                let last = kept.last().map_or(0, |snapshot| snapshot.position);
                let position = last + chance.below(all.len() as u64 - last + 1);
                if position > last {
                    let mut reflected = vec![0; 4];
                    for record in &all[..position as usize] {
                        reflected[usize::from(record.partition)] = record.sequence;
                    }
                    let payload: Vec<u8> = (0..chance.below(3000)).map(|_| chance.below(256) as u8).collect();
                    kept.push(snapshot(position, &reflected, payload));
                    log.snapshots().save(&kept[kept.len() - 1]).unwrap();
                    kept.drain(..kept.len().saturating_sub(2));
                }
            }
            2 => {
                let position = chance.below(all.len() as u64 + 2);
                let cut = log.cut(position).unwrap();
                let reflected = if kept.len() == 2 { kept[0].position } else { 0 };
                assert!(cut >= beginning && (cut == beginning || cut <= position.min(reflected) + 1));
                beginning = cut;
            }
            _ => {
                let group = (0..=chance.below(7)).map(|_| {
                    let partition = chance.below(4) as u16;
                    let sequence = sequences.entry(partition).and_modify(|sequence| *sequence += 1).or_insert(1);
                    let (length, factor) = (chance.below(200), chance.below(256));
                    record(partition, *sequence, (0..length).map(|at| (factor * at) as u8).collect::<Vec<u8>>())
                });
                let group: Vec<Record> = group.collect();
                log.append(&group).unwrap();
                all.extend(group);
            }
        }
    }
}
