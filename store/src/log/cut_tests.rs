//! Snapshots, cutting, recycled segments, levels and repair: what a crash or a bad disk may leave, and what must come of it.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::disk;

const SMALL: LogOptions = LogOptions {
    segment_bytes: 4096,
    write_level: FORMAT_LEVEL,
};

struct Opened {
    log: FileLog,
    recovery: Recovery,
    records: Vec<Record>,
}

fn open_with(dir: &Path, options: LogOptions) -> Result<Opened, LogError> {
    let mut records = Vec::new();
    let (log, recovery) = FileLog::open(dir, options, |replay| {
        if let Replay::Record(_, record) = replay {
            records.push(record.to_record());
        }
        Ok(())
    })?;
    Ok(Opened { log, recovery, records })
}

fn open(dir: &Path) -> Result<Opened, LogError> {
    open_with(dir, SMALL)
}

/// A snapshot of what `records` have brought about.
fn snapshot_of(records: &[Record]) -> Snapshot {
    let mut sequences = Sequences::default();
    records.iter().for_each(|record| sequences.begin(record.partition, record.sequence));
    Snapshot {
        position: records.len() as u64,
        sequences: sequences.0,
        payload: Bytes::from(vec![records.len() as u8; 5000]),
    }
}

/// The next group: two records of noise in two partitions, about 600 bytes.
fn next_group(all: &[Record]) -> [Record; 2] {
    let number = all.len() as u64;
    [0, 1].map(|partition| Record {
        partition,
        sequence: all.iter().filter(|record| record.partition == partition).count() as u64 + 1,
        payload: (0..280u64)
            .map(|at| ((number + u64::from(partition) + at * at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8)
            .collect(),
    })
}

/// The first records of what `work` writes.
fn first(records: usize) -> Vec<Record> {
    let mut all = Vec::new();
    while all.len() < records {
        let group = next_group(&all);
        all.extend(group);
    }
    all
}

/// Appends `groups` groups, with a snapshot and a cut after every fourth. What is acknowledged is in `all`, even after an error.
fn work(log: &mut FileLog, all: &mut Vec<Record>, groups: usize) -> Result<(), LogError> {
    for _ in 0..groups {
        let group = next_group(all);
        log.append(&group)?;
        all.extend(group);
        if all.len().is_multiple_of(8) {
            log.snapshots().save(&snapshot_of(all))?;
            log.cut(u64::MAX)?;
        }
    }
    Ok(())
}

fn worked(groups: usize) -> (TempDir, Vec<Record>) {
    let dir = disk::scratch();
    let mut all = Vec::new();
    work(&mut open(dir.path()).unwrap().log, &mut all, groups).unwrap();
    (dir, all)
}

fn header_of(path: &Path) -> segment::Header {
    segment::Header::read(fs::read(path).unwrap().first_chunk().unwrap()).unwrap()
}

fn last_segment(dir: &Path) -> PathBuf {
    segment::list(dir).unwrap().pop().unwrap().1
}

/// Every file in `dir` and below, by name.
fn contents(dir: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut files = std::collections::BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            files.insert(path, bytes);
        }
    }
    files
}

fn copy_to(files: &std::collections::BTreeMap<PathBuf, Vec<u8>>, from: &Path) -> TempDir {
    let dir = disk::scratch();
    for (path, bytes) in files {
        fs::write(dir.path().join(path.strip_prefix(from).unwrap()), bytes).unwrap();
    }
    dir
}

/// Opens, expects the snapshot and the records that make up `all`, appends, and expects that, too.
fn check_goes_on(dir: &Path, all: &[Record]) {
    let mut opened = open(dir).unwrap();
    let reflected = opened.recovery.snapshot.unwrap_or(0) as usize;
    assert_eq!(opened.recovery.position, all.len() as u64);
    assert_eq!(opened.records, all[reflected..]);
    let mut more = all.to_vec();
    work(&mut opened.log, &mut more, 12).unwrap();
    drop(opened);
    let opened = open(dir).unwrap();
    let reflected = opened.recovery.snapshot.unwrap_or(0) as usize;
    assert_eq!(opened.records, more[reflected..]);
    drop(opened);
    assert!(offline::verify(dir).unwrap().problem.is_none());
}

#[test]
fn a_log_that_is_cut_stays_small_and_uses_its_segments_again() {
    let (dir, all) = worked(400);
    let segments = segment::list(dir.path()).unwrap();
    let spares = segment::SPARES.iter().filter(|name| dir.path().join(name).exists()).count();
    assert!(segments.len() <= 5 && spares > 0, "{segments:?}, {spares} spares");
    assert!(segments.iter().all(|(_, path)| header_of(path).recycled));
    assert_eq!(snapshot::list(dir.path()).unwrap().len(), 2);
    check_goes_on(dir.path(), &all);
    // Segments of another size are no use as spares, and not taken for ones.
    let larger = LogOptions {
        segment_bytes: 8192,
        ..SMALL
    };
    let mut opened = open_with(dir.path(), larger).unwrap();
    let mut all = first(opened.recovery.position as usize);
    work(&mut opened.log, &mut all, 60).unwrap();
    drop(opened);
    check_goes_on(dir.path(), &all);
}

#[test]
fn a_crash_between_any_two_steps_loses_nothing() {
    let (base, before) = worked(22);
    let files = contents(base.path());
    let mut steps = 0;
    loop {
        let dir = copy_to(&files, base.path());
        let mut all = before.clone();
        let mut opened = open(dir.path()).unwrap();
        disk::crash_after(steps);
        let result = work(&mut opened.log, &mut all, 40);
        disk::crash_after(u64::MAX);
        drop(opened);
        check_goes_on(dir.path(), &all);
        if result.is_ok() {
            break;
        }
        steps += 1;
    }
    assert!(steps > 80, "only {steps} steps were seen");
}

/// A folder whose last segment was another one before and holds several groups; its bytes before and after the last append, and where
/// the last group lies.
struct Recycled {
    dir: TempDir,
    all: Vec<Record>,
    before: Vec<u8>,
    after: Vec<u8>,
    last: std::ops::Range<usize>,
}

fn recycled() -> Recycled {
    let (dir, mut all) = worked(40);
    let mut log = open(dir.path()).unwrap().log;
    loop {
        let path = last_segment(dir.path());
        let before = fs::read(&path).unwrap();
        let start = log.end() as usize;
        let group = next_group(&all);
        log.append(&group).unwrap();
        all.extend(group);
        // Far into the segment, and none of it reflected by a snapshot.
        if path == last_segment(dir.path()) && start > 2000 {
            let (after, end) = (fs::read(&path).unwrap(), log.end() as usize);
            assert!(header_of(&path).recycled && after[end..].iter().any(|byte| *byte != 0));
            let last = start..end;
            drop(log);
            return Recycled {
                dir,
                all,
                before,
                after,
                last,
            };
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// The device may write the sectors of the last group in any order, and lose any of them: then the old bytes stay.
    #[test]
    fn a_group_over_old_bytes_may_be_torn_anywhere(sector in 1..64usize, lost in proptest::collection::vec(any::<bool>(), 64)) {
        thread_local!(static RECYCLED: Recycled = recycled());
        RECYCLED.with(|recycled| {
            let mut bytes = recycled.after.clone();
            let mut at = recycled.last.start;
            for lost in lost.iter().cycle() {
                let end = (at + sector).min(recycled.last.end);
                if *lost {
                    bytes[at..end].copy_from_slice(&recycled.before[at..end]);
                }
                at = end;
                if at == recycled.last.end {
                    break;
                }
            }
            let path = last_segment(recycled.dir.path());
            fs::write(&path, &bytes).unwrap();
            let opened = open(recycled.dir.path()).unwrap();
            let reflected = opened.recovery.snapshot.unwrap() as usize;
            let whole = bytes == recycled.after;
            let header = recycled.last.start..recycled.last.start + frame::HEADER_BYTES;
            let begun = bytes[header.clone()] == recycled.after[header];
            assert_eq!(opened.recovery.torn_bytes > 0, begun && !whole, "a group whose header is there is told of");
            let expected = if whole { recycled.all.len() } else { recycled.all.len() - 2 };
            assert_eq!(opened.records, recycled.all[reflected..expected]);
        });
    }

    #[test]
    fn a_flipped_bit_over_old_bytes_is_never_a_wrong_record(at: usize, bit in 0..8u8) {
        thread_local!(static RECYCLED: Recycled = recycled());
        RECYCLED.with(|recycled| {
            let at = at % recycled.after.len();
            let mut bytes = recycled.after.clone();
            bytes[at] ^= 1 << bit;
            let path = last_segment(recycled.dir.path());
            fs::write(&path, &bytes).unwrap();
            match open(recycled.dir.path()) {
                Ok(opened) => {
                    let reflected = opened.recovery.snapshot.unwrap() as usize;
                    let behind = at >= recycled.last.end;
                    assert!(behind || recycled.last.contains(&at) || !opened.recovery.passed_damage.is_empty(), "{at}");
                    let lost = if recycled.last.contains(&at) { 2 } else { 0 };
                    assert_eq!(opened.records, recycled.all[reflected..recycled.all.len() - lost]);
                }
                Err(LogError::Corrupt { .. }) => assert!(at < recycled.last.start),
                Err(other) => panic!("{other}"),
            }
        });
    }
}

#[test]
fn damage_in_old_segments_and_snapshots_is_told_apart() {
    let (dir, all) = worked(47);
    let files = contents(dir.path());
    let damaged = |change: &dyn Fn(&Path)| {
        let copy = copy_to(&files, dir.path());
        change(copy.path());
        copy
    };
    let rot = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let snapshots: Vec<u64> = snapshot::list(dir.path())
        .unwrap()
        .into_iter()
        .map(|(position, _)| position)
        .collect();
    let (older, newest) = (snapshots[0], snapshots[1]);

    // A damaged newest snapshot: the older one, and all that follows it.
    for at in [0, 9, 13, 40, 60, 80] {
        let copy = damaged(&|dir| rot(&snapshot::path(dir, newest), at));
        let opened = open(copy.path()).unwrap();
        assert_eq!(opened.recovery.snapshot, Some(older));
        assert_eq!(
            (opened.recovery.skipped_snapshots.len(), &opened.records[..]),
            (1, &all[older as usize..])
        );
        drop(opened);
        assert_eq!(offline::verify(copy.path()).unwrap().whole.skipped_snapshots.len(), 1);
        check_goes_on(copy.path(), &all);
    }
    // One that is cut short, or too long.
    for length in [0, 31, 40, 4999] {
        let copy = damaged(&|dir| {
            let path = snapshot::path(dir, newest);
            let mut bytes = fs::read(&path).unwrap();
            bytes.resize(if length == 4999 { bytes.len() + 1 } else { length }, 0);
            fs::write(path, bytes).unwrap();
        });
        assert_eq!(open(copy.path()).unwrap().recovery.snapshot, Some(older));
    }
    // No snapshot that reaches the log's beginning; segments that are gone.
    let missing = |change: &dyn Fn(&Path), words: &str| {
        let copy = damaged(change);
        let before = contents(copy.path());
        for error in [open(copy.path()).err(), offline::verify(copy.path()).unwrap().problem] {
            let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(matches!(error, Some(LogError::Missing { .. })) && text.contains(words), "{error:?}");
        }
        let mut after = contents(copy.path());
        after.remove(&copy.path().join("LOCK"));
        let before: std::collections::BTreeMap<_, _> = before.into_iter().filter(|(path, _)| !path.ends_with("LOCK")).collect();
        assert_eq!(after, before, "nothing is touched");
    };
    let beginning = segment::list(dir.path()).unwrap()[0].0;
    missing(
        &|dir| snapshots.iter().for_each(|position| rot(&snapshot::path(dir, *position), 20)),
        &format!("positions 1 to {} are missing", beginning - 1),
    );
    missing(
        &|dir| {
            fs::remove_file(snapshot::path(dir, newest)).unwrap();
            let segments = segment::list(dir).unwrap();
            segments
                .iter()
                .filter(|(first, _)| *first <= older + 1)
                .for_each(|(_, path)| fs::remove_file(path).unwrap());
            assert!(segments.iter().any(|(first, _)| *first > older + 1));
        },
        &format!("positions {} to ", older + 1),
    );
    missing(
        &|dir| {
            let segments = segment::list(dir).unwrap();
            segments.iter().filter(|(first, _)| *first + 5 > newest).for_each(|(_, path)| {
                fs::remove_file(path).unwrap();
            });
        },
        &format!("a snapshot reflects position {newest}, but the segments end at"),
    );
    // A newer snapshot is no reason to go on from an older one.
    let copy = damaged(&|dir| snapshot::save(dir, FORMAT_LEVEL + 1, &snapshot_of(&all)).unwrap());
    assert!(matches!(open(copy.path()).err(), Some(LogError::NewerFormat { .. })));
    assert!(matches!(
        offline::verify(copy.path()).unwrap().problem,
        Some(LogError::NewerFormat { .. })
    ));
}

#[test]
fn a_crash_while_a_snapshot_is_saved_leaves_the_old_ones() {
    let (dir, all) = worked(3);
    for steps in 0.. {
        let opened = open(dir.path()).unwrap();
        let last = opened.recovery.snapshot.unwrap_or(0);
        let snapshot = snapshot_of(&all[..=last as usize]);
        disk::crash_after(steps);
        let result = opened.log.snapshots().save(&snapshot);
        disk::crash_after(u64::MAX);
        drop(opened);
        let again = open(dir.path()).unwrap().recovery;
        assert!(again.skipped_snapshots.is_empty());
        let found = again.snapshot.unwrap_or(0);
        assert!(found == last || found == snapshot.position);
        if result.is_ok() {
            assert_eq!(found, snapshot.position);
        }
        if steps > 5 && found > 3 {
            break;
        }
    }
    assert!(!dir.path().join("snapshot.new").exists());
    assert_eq!(snapshot::list(dir.path()).unwrap().len(), 2);
}

/// What lies in `tests/fixtures/level-1`, written by the last version that knew level 1 only.
fn level_1() -> (TempDir, Vec<Record>) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/level-1");
    let dir = copy_to(&contents(&fixture), &fixture);
    let mut sequences = [0u64; 3];
    let records = (1..=120u64).map(|position| {
        let partition = (position % 3) as usize;
        sequences[partition] += 1;
        let payload = (0..position).map(|at| ((at * position * 2_654_435_761) >> 11) as u8);
        Record {
            partition: partition as u16,
            sequence: sequences[partition],
            payload: payload.collect(),
        }
    });
    let records = records.collect();
    (dir, records)
}

/// The levels of all headers in `dir`: of segments, groups and snapshots.
fn levels(dir: &Path) -> std::collections::BTreeSet<u16> {
    let mut levels = std::collections::BTreeSet::new();
    for (_, path) in segment::list(dir).unwrap() {
        let bytes = fs::read(&path).unwrap();
        let header = segment::Header::read(bytes.first_chunk().unwrap()).unwrap();
        levels.insert(header.level);
        let mut at = segment::HEADER_BYTES;
        while let Some(group) = frame::Header::read(header.seed(), &bytes[at..]) {
            levels.insert(group.level);
            at += frame::HEADER_BYTES + group.body_length as usize;
        }
    }
    for (_, path) in snapshot::list(dir).unwrap() {
        levels.insert(u16::from(fs::read(path).unwrap()[8]));
    }
    levels
}

/// catalogue 12: what an older version wrote.
#[test]
fn an_old_level_is_kept_until_it_is_finalized() {
    let (dir, mut all) = level_1();
    let mut opened = open(dir.path()).unwrap();
    assert_eq!((&opened.records, opened.recovery.level), (&all, 1));
    let written: Vec<(u64, PathBuf)> = segment::list(dir.path()).unwrap();
    work(&mut opened.log, &mut all, 30).unwrap();
    drop(opened);
    // All of it can be read by the version before, which knows no cut logs either.
    assert_eq!(levels(dir.path()), [1].into());
    let segments = segment::list(dir.path()).unwrap();
    assert!(segments[0].0 == 1 && segments.len() > written.len() + 3);
    assert!(segments.iter().all(|(_, path)| !header_of(path).recycled));

    let before = contents(dir.path());
    let finalized = offline::finalize(dir.path()).unwrap();
    assert_eq!((finalized.from, finalized.to), (1, 2));
    for (path, bytes) in segments.iter().rev().skip(1).map(|(_, path)| (path, &before[path])) {
        assert_eq!(&fs::read(path).unwrap(), bytes, "what is written stays as it is");
    }
    assert_eq!(header_of(&last_segment(dir.path())).level, 2);
    let again = offline::finalize(dir.path()).unwrap();
    assert_eq!((again.from, again.to), (2, 2));
    // An option for new logs does not lower it.
    let old = LogOptions { write_level: 1, ..SMALL };
    let mut opened = open_with(dir.path(), old).unwrap();
    assert_eq!(opened.recovery.level, 2);
    work(&mut opened.log, &mut all, 40).unwrap();
    drop(opened);
    assert_eq!(levels(dir.path()), [2].into(), "the old segments are cut by now");
    check_goes_on(dir.path(), &all);
    // A log that is made anew begins at the level that is asked for.
    let new = disk::scratch();
    work(&mut open_with(new.path(), old).unwrap().log, &mut Vec::new(), 9).unwrap();
    assert_eq!(levels(new.path()), [1].into());
    assert!(matches!(offline::finalize(&new.path().join("nowhere")), Err(LogError::Io { .. })));
}

#[test]
fn an_empty_log_can_be_finalized() {
    let dir = disk::scratch();
    drop(open_with(dir.path(), LogOptions { write_level: 1, ..SMALL }).unwrap());
    for steps in 0.. {
        disk::crash_after(steps);
        let result = offline::finalize(dir.path());
        disk::crash_after(u64::MAX);
        if result.is_ok() {
            break;
        }
    }
    assert_eq!(levels(dir.path()), [2].into());
    check_goes_on(dir.path(), &[]);
}

/// Whatever is damaged: a repair keeps what it says, lays aside every byte that it takes away, and goes on after a crash.
fn check_repair(snapshots: bool, place: usize, length: usize, crash: Option<u64>) {
    let dir = disk::scratch();
    let mut all = Vec::new();
    let mut log = open(dir.path()).unwrap().log;
    for _ in 0..if snapshots { 47 } else { 20 } {
        let group = next_group(&all);
        log.append(&group).unwrap();
        all.extend(group);
        if snapshots && all.len().is_multiple_of(30) {
            log.snapshots().save(&snapshot_of(&all)).unwrap();
            log.cut(u64::MAX).unwrap();
        }
    }
    drop(log);
    let segments = segment::list(dir.path()).unwrap();
    let (_, path) = &segments[place / 4096 % segments.len()];
    let mut bytes = fs::read(path).unwrap();
    let at = place % 4096;
    bytes.iter_mut().skip(at).take(length).for_each(|byte| *byte ^= 0x55);
    fs::write(path, bytes).unwrap();

    let before = contents(dir.path());
    let Some(damage) = repair::examine(dir.path()).unwrap() else {
        assert!(open(dir.path()).is_ok());
        assert!(repair::repair(dir.path()).unwrap().is_none());
        return;
    };
    assert_eq!(contents(dir.path()), before, "to look changes nothing");
    assert!(matches!(open(dir.path()), Err(LogError::Corrupt { .. } | LogError::Missing { .. })));
    assert!(damage.last_known <= all.len() as u64 && damage.kept <= damage.last_known);
    let mut aside = Vec::new();
    if let Some(steps) = crash {
        disk::crash_after(steps);
        let result = repair::repair(dir.path());
        disk::crash_after(u64::MAX);
        aside.extend(result.ok().flatten().map(|(_, aside)| aside));
    }
    if aside.is_empty() {
        // After a crash at its very end there may be nothing left to do.
        aside.extend(repair::repair(dir.path()).unwrap().map(|(_, aside)| aside));
    }
    assert!(crash.is_some() || aside.len() == 1);
    let after = contents(dir.path());
    for (path, bytes) in &before {
        let name = path.file_name().unwrap();
        let kept = after.iter().any(|(path, kept)| path.file_name().unwrap() == name && kept == bytes);
        assert!(kept || bytes.is_empty(), "{} is gone", path.display());
    }
    check_goes_on(dir.path(), &all[..damage.kept as usize]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// catalogue 38: what lies before it is kept.
    #[test]
    fn a_repair_keeps_what_it_says(snapshots: bool, place: usize, length in 1..3000usize, crash in proptest::option::of(0..20u64)) {
        check_repair(snapshots, place, length, crash);
    }
}

#[test]
fn a_repair_at_known_places() {
    // The very first segment's header: nothing is left but an empty log.
    for (snapshots, place, length) in [(false, 0, 10), (true, 0, 10), (false, 4096 * 2 + 5, 1), (false, 4096 + 700, 1)] {
        for crash in std::iter::once(None).chain((0..30).map(Some)) {
            check_repair(snapshots, place, length, crash);
        }
    }
}
