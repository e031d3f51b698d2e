//! What a crash, a bad disk or a newer version may leave in a log's folder, and what must come of it.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const SMALL: LogOptions = LogOptions {
    segment_bytes: 4096,
    write_level: FORMAT_LEVEL,
};

/// A log that was written and closed, and where its groups lie in its one segment.
struct Written {
    dir: TempDir,
    records: Vec<Record>,
    bytes: Vec<u8>,
    /// Each group: its range in the file, and the number of records up to and with it.
    groups: Vec<(Range<usize>, usize)>,
}

fn open(dir: &Path) -> Result<(FileLog, Recovery, Vec<Record>), LogError> {
    let mut records = Vec::new();
    let (log, recovery) = FileLog::open(dir, SMALL, |replay| {
        if let Replay::Record(_, record) = replay {
            records.push(record.to_record());
        }
        Ok(())
    })?;
    Ok((log, recovery, records))
}

fn segment(dir: &Path, first_position: u64) -> PathBuf {
    segment::path(dir, first_position)
}

/// Groups of 1, 2, 3 … records in two partitions; every third group compresses.
fn write(groups: usize) -> Written {
    let dir = crate::disk::scratch();
    let (mut log, _, _) = open(dir.path()).unwrap();
    let (mut records, mut places, mut sequences) = (Vec::new(), Vec::new(), [0u64; 2]);
    for number in 0..groups {
        let start = log.end() as usize;
        let group = (0..=number).map(|index| {
            let partition = (number + index) % 2;
            sequences[partition] += 1;
            let payload = if number % 3 == 2 {
                vec![b'a'; 60]
            } else {
                format!("record {index} of group {number}").into_bytes()
            };
            Record {
                partition: partition as u16,
                sequence: sequences[partition],
                payload: Bytes::from(payload),
            }
        });
        let group: Vec<Record> = group.collect();
        log.append(&group).unwrap();
        records.extend(group);
        places.push((start..log.end() as usize, records.len()));
    }
    drop(log);
    let bytes = fs::read(segment(dir.path(), 1)).unwrap();
    assert_eq!(segment::list(dir.path()).unwrap().len(), 1, "the tests below need one segment");
    Written {
        dir,
        records,
        bytes,
        groups: places,
    }
}

impl Written {
    /// Puts `bytes` in the place of the segment.
    fn put(&self, bytes: &[u8]) {
        for (_, path) in segment::list(self.dir.path()).unwrap() {
            fs::remove_file(path).unwrap();
        }
        fs::write(segment(self.dir.path(), 1), bytes).unwrap();
    }

    fn end(&self) -> usize {
        self.groups.last().unwrap().0.end
    }

    /// Number of records in the groups that end at or before `length`.
    fn whole_before(&self, length: usize) -> usize {
        self.groups
            .iter()
            .rev()
            .find(|(range, _)| range.end <= length)
            .map_or(0, |(_, records)| *records)
    }

    /// Opens, expects exactly the first `records`, appends, and expects all of that after opening again.
    fn check_goes_on(&self, records: usize) {
        let (mut log, recovery, found) = open(self.dir.path()).unwrap();
        assert_eq!(found, self.records[..records]);
        assert_eq!((recovery.records, recovery.position), (records as u64, records as u64));
        let sequence = found.iter().filter(|record| record.partition == 1).count() as u64 + 1;
        let more = [Record {
            partition: 1,
            sequence,
            payload: Bytes::from_static(b"more"),
        }];
        log.append(&more).unwrap();
        drop(log);
        let (_, recovery, found) = open(self.dir.path()).unwrap();
        assert_eq!(recovery.torn_bytes, 0);
        assert_eq!(found, [&self.records[..records], &more].concat());
    }
}

/// catalogue 11: whatever a crash left of it.
#[test]
fn every_prefix_recovers() {
    let written = write(5);
    for length in 0..=written.end() + 3 {
        // As a file that ends there, and as one whose rest was reserved and never written.
        let cut = &written.bytes[..length];
        let mut zeroed = cut.to_vec();
        zeroed.resize(written.bytes.len(), 0);
        for bytes in [cut, &zeroed] {
            if bytes.len() >= segment::HEADER_BYTES && length < segment::HEADER_BYTES {
                continue; // A segment's header is renamed into place whole; half of one is damage, and tested as such below.
            }
            written.put(bytes);
            written.check_goes_on(written.whole_before(length));
        }
    }
}

#[test]
fn a_torn_tail_is_counted_and_cut() {
    let written = write(4);
    let (last, _) = written.groups.last().unwrap().clone();
    let mut bytes = written.bytes.clone();
    bytes[last.start + 40] ^= 1;
    written.put(&bytes);
    let report = offline::verify(written.dir.path()).unwrap();
    assert!(report.problem.is_none());
    assert_eq!((report.whole.groups, report.whole.torn_bytes), (3, last.len() as u64));
    assert_eq!(
        fs::read(segment(written.dir.path(), 1)).unwrap(),
        bytes,
        "offline reading changes nothing"
    );
    assert_eq!(open(written.dir.path()).unwrap().1.torn_bytes, last.len() as u64);
    written.check_goes_on(written.whole_before(last.start));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn a_flipped_bit_is_never_a_wrong_record(at: usize, bit in 0..8u8) {
        thread_local!(static WRITTEN: Written = write(5));
        WRITTEN.with(|written| {
            let at = at % written.end();
            let mut bytes = written.bytes.clone();
            bytes[at] ^= 1 << bit;
            written.put(&bytes);
            let last = written.groups.last().unwrap().0.clone();
            match open(written.dir.path()) {
                Ok((_, _, found)) => {
                    assert!(last.contains(&at), "damage before the last group must not pass for a torn tail");
                    assert_eq!(found, written.records[..written.whole_before(last.start)]);
                }
                Err(LogError::Corrupt { .. }) => {
                    assert_eq!(fs::read(segment(written.dir.path(), 1)).unwrap(), bytes, "nothing is touched");
                }
                Err(other) => panic!("{other}"),
            }
        });
    }

    /// The device may write the sectors of the last group in any order, and lose any of them.
    #[test]
    fn a_group_may_be_torn_anywhere(sector in 1..64usize, lost in proptest::collection::vec(any::<bool>(), 64)) {
        thread_local!(static WRITTEN: Written = write(7));
        WRITTEN.with(|written| {
            let last = written.groups.last().unwrap().0.clone();
            let mut bytes = written.bytes.clone();
            let mut whole = true;
            for (part, _) in bytes[last.clone()].chunks_mut(sector).zip(lost.iter().cycle()).filter(|(_, lost)| **lost) {
                whole &= part.iter().all(|byte| *byte == 0);
                part.fill(0);
            }
            written.put(&bytes);
            written.check_goes_on(if whole { written.records.len() } else { written.whole_before(last.start) });
        });
    }

    #[test]
    fn garbage_is_refused_or_torn(garbage in proptest::collection::vec(any::<u8>(), 0..300), keep in 0..400usize) {
        let written = write(2);
        let mut bytes = written.bytes[..keep.min(written.end())].to_vec();
        bytes.extend_from_slice(&garbage);
        written.put(&bytes);
        match open(written.dir.path()) {
            Ok((_, _, found)) => assert_eq!(found, written.records[..found.len()]),
            Err(LogError::Corrupt { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

fn corrupt_at(dir: &Path) -> (PathBuf, u64) {
    match open(dir).map(|(_, recovery, _)| recovery) {
        Err(error @ LogError::Corrupt { .. }) => {
            assert!(error.to_string().contains("evalgrid log repair"), "{error}");
            let LogError::Corrupt { segment, offset, .. } = error else {
                unreachable!()
            };
            (segment, offset)
        }
        other => panic!("{other:?}"),
    }
}

/// catalogue 38: it is seen.
#[test]
fn damage_in_the_middle_is_refused() {
    let written = write(4);
    let path = segment(written.dir.path(), 1);
    let second = written.groups[1].0.clone();
    // A lost block, a rotten body, a rotten header.
    let damages: [fn(&mut [u8]); 3] = [|bytes| bytes.fill(0), |bytes| bytes[50] ^= 4, |bytes| bytes[13] ^= 4];
    for damage in damages {
        let mut bytes = written.bytes.clone();
        damage(&mut bytes[second.clone()]);
        written.put(&bytes);
        assert_eq!(corrupt_at(written.dir.path()), (path.clone(), second.start as u64));
        assert_eq!(fs::read(&path).unwrap(), bytes, "nothing is touched");
        let report = offline::verify(written.dir.path()).unwrap();
        assert!(matches!(report.problem, Some(LogError::Corrupt { .. })));
        assert_eq!(report.whole.groups, 1);
        let mut dumped = 0;
        let result = offline::dump(written.dir.path(), |position, _| {
            dumped = position;
            Ok(())
        });
        assert!(matches!(result, Err(LogError::Corrupt { .. })));
        assert_eq!(dumped, 1, "what is whole before the damage is shown");
    }
    // A group that is missing, or there twice.
    for bytes in [
        [&written.bytes[..second.start], &written.bytes[second.end..]].concat(),
        [&written.bytes[..second.end], &written.bytes[second.start..]].concat(),
    ] {
        written.put(&bytes);
        corrupt_at(written.dir.path());
    }
    // A header that is there and wrong.
    let mut bytes = written.bytes.clone();
    bytes[..segment::HEADER_BYTES].fill(0);
    written.put(&bytes);
    assert_eq!(corrupt_at(written.dir.path()), (path, 0));
}

/// A payload that holds a later group's very bytes, as a tenant who read a log might send it, must not make a torn tail look like damage.
#[test]
fn a_payload_cannot_pose_as_a_group() {
    let other = write(4);
    let dir = crate::disk::scratch();
    let (mut log, _, _) = open(dir.path()).unwrap();
    let payload = Bytes::copy_from_slice(&other.bytes[..other.end()]);
    log.append(&[Record {
        partition: 0,
        sequence: 1,
        payload,
    }])
    .unwrap();
    let end = log.end() as usize;
    drop(log);
    let mut bytes = fs::read(segment(dir.path(), 1)).unwrap();
    bytes[end - 1] ^= 1;
    fs::write(segment(dir.path(), 1), &bytes).unwrap();
    let (_, recovery, found) = open(dir.path()).unwrap();
    assert_eq!((found.len(), recovery.torn_bytes > 0), (0, true));
}

/// catalogue 12: what a newer version wrote.
#[test]
fn a_newer_level_is_refused_untouched() {
    let written = write(3);
    // The level of the last group, and that of the segment, with the checksums that a newer version would write.
    let mut group = written.bytes.clone();
    let seed = segment::Header::read(group.first_chunk().unwrap()).unwrap().seed();
    let start = written.groups[2].0.start;
    group[start + 4] = 3;
    let crc = crc32c::crc32c_append(seed, &group[start..start + 32]);
    group[start + 32..start + 36].copy_from_slice(&crc.to_le_bytes());
    let mut whole = written.bytes.clone();
    whole[8] = 3;
    let crc = crc32c::crc32c(&whole[..28]);
    whole[28..32].copy_from_slice(&crc.to_le_bytes());
    for (bytes, at) in [(group, start), (whole, 0)] {
        written.put(&bytes);
        match open(written.dir.path()).map(|(_, recovery, _)| recovery) {
            Err(LogError::NewerFormat {
                offset,
                found: 3,
                supported: FORMAT_LEVEL,
                ..
            }) => assert_eq!(offset, at as u64),
            other => panic!("{other:?}"),
        }
        assert_eq!(fs::read(segment(written.dir.path(), 1)).unwrap(), bytes);
        let report = offline::verify(written.dir.path()).unwrap();
        assert!(matches!(report.problem, Some(LogError::NewerFormat { .. })));
    }
}

/// Fills several segments with records that do not compress, and returns how many there are.
fn fill(dir: &Path, records: u64) {
    let (mut log, _, _) = open(dir).unwrap();
    let noise: Vec<u8> = (0..900u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8 ^ (index % 7) as u8)
        .collect();
    for sequence in 1..=records {
        log.append(&[Record {
            partition: 3,
            sequence,
            payload: Bytes::from(noise.clone()),
        }])
        .unwrap();
    }
}

#[test]
fn segments_follow_each_other() {
    let dir = crate::disk::scratch();
    fill(dir.path(), 20);
    let segments = segment::list(dir.path()).unwrap();
    assert!(segments.len() > 3, "{segments:?}");
    assert_eq!(segments[0].1.file_name().unwrap(), "00000000000000000001.log");
    for (_, path) in &segments {
        assert!(fs::metadata(path).unwrap().len() <= SMALL.segment_bytes);
    }
    let (_, recovery, found) = open(dir.path()).unwrap();
    assert_eq!((recovery.segments, recovery.groups, found.len()), (segments.len() as u64, 20, 20));

    // A later segment that a crash left empty, or of which a copy lost all: made anew under the same name.
    for rest in [0, 10, segment::HEADER_BYTES] {
        let last = &segments.last().unwrap();
        let bytes = fs::read(&last.1).unwrap();
        fs::write(&last.1, &bytes[..rest]).unwrap();
        fs::write(dir.path().join("next.new"), "left by a crash").unwrap();
        let (mut log, recovery, found) = open(dir.path()).unwrap();
        assert_eq!(
            (found.len() as u64, recovery.torn_bytes),
            (last.0 - 1, (rest % segment::HEADER_BYTES) as u64)
        );
        assert!(!dir.path().join("next.new").exists());
        for record in &found[found.len() - 1..] {
            log.append(&[Record {
                sequence: record.sequence + 1,
                ..record.clone()
            }])
            .unwrap();
        }
    }

    // Damage at the very end of a segment is not a torn tail when there is another one.
    let path = &segments[1].1;
    let whole = fs::read(path).unwrap();
    let end = whole.iter().rposition(|byte| *byte != 0).unwrap();
    let mut bytes = whole.clone();
    bytes[end] ^= 1;
    fs::write(path, &bytes).unwrap();
    assert_eq!(&corrupt_at(dir.path()).0, path);
    fs::write(path, &whole[..20]).unwrap();
    assert_eq!(&corrupt_at(dir.path()).0, path);
    // A missing segment is seen at the next one, the first one too.
    fs::remove_file(path).unwrap();
    assert_eq!(corrupt_at(dir.path()).0, segments[2].1);
    fs::write(path, whole).unwrap();
    fs::remove_file(&segments[0].1).unwrap();
    let missing = open(dir.path()).map(|(_, recovery, _)| recovery);
    let positions = format!("positions 1 to {} are missing", segments[1].0 - 1);
    assert!(
        matches!(&missing, Err(LogError::Missing { what, .. }) if what.contains(&positions)),
        "{missing:?}"
    );
    assert!(matches!(
        offline::verify(dir.path()).unwrap().problem,
        Some(LogError::Missing { .. })
    ));
}

#[test]
fn a_log_has_one_owner() {
    let written = write(1);
    let path = written.dir.path();
    let log = open(path).unwrap().0;
    assert!(matches!(open(path), Err(LogError::InUse { .. })));
    assert!(matches!(offline::verify(path), Err(LogError::InUse { .. })));
    assert!(matches!(offline::dump(path, |_, _| Ok(())), Err(LogError::InUse { .. })));
    drop(log);
    assert_eq!(offline::dump(path, |_, _| Ok(())).unwrap().records, 1);
    assert!(matches!(offline::verify(&path.join("missing")), Err(LogError::Io { .. })));
}

#[test]
fn a_failed_write_poisons() {
    let dir = crate::disk::scratch();
    let path = dir.path().join("log");
    let (mut log, _, _) = open(&path).unwrap();
    // The next segment cannot be made in a folder that is gone.
    fs::remove_dir_all(&path).unwrap();
    let noise: Vec<u8> = (0..3000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let record = |sequence| {
        [Record {
            partition: 0,
            sequence,
            payload: Bytes::from(noise.clone()),
        }]
    };
    let failed = (1..=9).find_map(|sequence| log.append(&record(sequence)).err().map(|error| (sequence, error)));
    let (sequence, error) = failed.unwrap();
    assert!(matches!(error, LogError::Io { .. }), "{error}");
    for sequence in [sequence, sequence + 1] {
        assert!(matches!(log.append(&record(sequence)), Err(LogError::Poisoned)));
    }
    assert!(matches!(log.append(&[]), Err(LogError::Poisoned)));
}
