//! What every backend of a trait must do, run over each of them. A new backend adds itself at the end of its section.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::index::{MAX_INDEX_KEY, MAX_INDEX_VALUE};
use crate::log::{BoxError, Fault, MAX_GROUP_BYTES, MAX_GROUP_RECORDS, RECORD_OVERHEAD};
use crate::*;

// ---- Log ----

/// A log that can be opened again, as after a crash of its owner.
trait Reopen {
    fn open(&self, visit: &mut dyn FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<(Box<dyn Log>, Recovery), LogError>;
}

impl Reopen for MemoryLog {
    fn open(&self, visit: &mut dyn FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<(Box<dyn Log>, Recovery), LogError> {
        let (log, recovery) = MemoryLog::open(self, visit)?;
        Ok((Box::new(log), recovery))
    }
}

struct Folder(TempDir, LogOptions);

impl Reopen for Folder {
    fn open(&self, visit: &mut dyn FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<(Box<dyn Log>, Recovery), LogError> {
        let (log, recovery) = FileLog::open(&self.0.path().join("deep/log"), self.1, visit)?;
        Ok((Box::new(log), recovery))
    }
}

fn reopened(backend: &dyn Reopen) -> (Box<dyn Log>, Recovery, Vec<Record>) {
    let mut records = Vec::new();
    let (log, recovery) = backend
        .open(&mut |position, record| {
            records.push(record.to_record());
            assert_eq!(position, records.len() as u64);
            Ok(())
        })
        .unwrap();
    assert_eq!(recovery.records, records.len() as u64);
    (log, recovery, records)
}

fn record(partition: u16, sequence: u64, payload: impl Into<Bytes>) -> Record {
    Record {
        partition,
        sequence,
        payload: payload.into(),
    }
}

fn check_log(new: &dyn Fn() -> Box<dyn Reopen>) {
    let backend = new();
    let (mut log, recovery, records) = reopened(&*backend);
    assert_eq!((recovery.groups, records.len()), (0, 0));
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
    let refused = |log: &mut dyn Log, group: &[Record], wants: u64| match log.append(group) {
        Err(LogError::NotDense { expected, .. }) => assert_eq!(expected, wants),
        other => panic!("{other:?}"),
    };
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
    let (mut log, recovery, records) = reopened(&*backend);
    assert_eq!((recovery.groups, recovery.torn_bytes), (3, 0));
    assert_eq!(records, all);
    refused(&mut *log, &[record(9, 3, "again")], 4);
    log.append(&[record(9, 4, "e")]).unwrap();
    drop(log);
    assert_eq!(reopened(&*backend).2.len(), all.len() + 1);

    // A reader that refuses ends the opening.
    match backend.open(&mut |position, _| if position == 3 { Err("no".into()) } else { Ok(()) }) {
        Err(LogError::Refused { position: 3, .. }) => {}
        other => panic!("{:?}", other.map(|(_, recovery)| recovery)),
    };
    assert_eq!(reopened(&*backend).2.len(), all.len() + 1);
}

/// Records by partition, payload length and a byte to fill it from; and whether to open the log anew after them.
type PlannedGroup = (Vec<(u16, usize, u8)>, bool);

fn check_log_holds(backend: &dyn Reopen, groups: &[PlannedGroup]) {
    let mut next = std::collections::BTreeMap::new();
    let mut all = Vec::new();
    let mut log = reopened(backend).0;
    for (group, reopen) in groups {
        let group = group.iter().map(|&(partition, length, byte)| {
            let sequence = next.entry(partition).and_modify(|sequence| *sequence += 1).or_insert(1);
            record(
                partition,
                *sequence,
                (0..length).map(|at| byte.wrapping_mul(at as u8)).collect::<Vec<u8>>(),
            )
        });
        let group: Vec<Record> = group.collect();
        log.append(&group).unwrap();
        all.extend(group);
        if *reopen {
            drop(log);
            let (again, _, records) = reopened(backend);
            assert_eq!(records, all);
            log = again;
        }
    }
    drop(log);
    assert_eq!(reopened(backend).2, all);
}

fn folder(segment_bytes: u64) -> Box<dyn Reopen> {
    Box::new(Folder(tempfile::tempdir().unwrap(), LogOptions { segment_bytes }))
}

#[test]
fn logs_conform() {
    check_log(&|| Box::new(MemoryLog::new()));
    check_log(&|| folder(log::SEGMENT_BYTES));
    check_log(&|| folder(4096));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn logs_hold_what_they_took(
        groups in proptest::collection::vec((proptest::collection::vec((0..4u16, 0..200usize, any::<u8>()), 1..8), any::<bool>()), 1..20),
    ) {
        check_log_holds(&MemoryLog::new(), &groups);
        check_log_holds(&*folder(2048), &groups);
        check_log_holds(&*folder(1 << 20), &groups);
    }
}

#[test]
fn a_memory_log_fails_as_asked() {
    for (fault, kept) in [(Fault::Lost, 1), (Fault::Kept, 2)] {
        let disk = MemoryLog::new();
        let mut log = reopened(&disk).0;
        log.append(&[record(1, 1, "a")]).unwrap();
        disk.fail_next(fault);
        assert!(matches!(log.append(&[record(1, 2, "b")]), Err(LogError::Io { .. })));
        assert!(matches!(log.append(&[record(1, 2, "b")]), Err(LogError::Poisoned)));
        let (mut again, _, records) = reopened(&disk);
        assert_eq!(records.len(), kept);
        again.append(&[record(1, kept as u64 + 1, "c")]).unwrap();
        assert!(matches!(log.append(&[record(1, 9, "zombie")]), Err(LogError::Poisoned)));
    }
}

// ---- Index ----

fn put(key: &str, value: &str) -> Row {
    (key.into(), Some(value.into()))
}

fn keys(index: &dyn Index, prefix: &str, after: Option<&str>, limit: usize) -> Vec<String> {
    let rows = index.scan(prefix.as_bytes(), after.map(str::as_bytes), limit).unwrap();
    rows.into_iter().map(|(key, _)| String::from_utf8(key).unwrap()).collect()
}

fn check_index(index: &dyn Index) {
    assert_eq!(index.position().unwrap(), 0);
    assert_eq!(index.get(b"position").unwrap(), None);
    index
        .apply(
            3,
            &[put("b/1", "x"), put("b/2", "y"), put("a/1", "z"), put("", "empty"), put("c", "c")],
        )
        .unwrap();
    index
        .apply(
            4,
            &[
                put("b/3", "v"),
                (b"b/1".to_vec(), None),
                put("b/3", "w"),
                (b"nothing".to_vec(), None),
            ],
        )
        .unwrap();
    index.apply(9, &[]).unwrap();
    assert_eq!(index.position().unwrap(), 9);
    for (key, value) in [
        ("b/1", None),
        ("b/2", Some("y")),
        ("b/3", Some("w")),
        ("", Some("empty")),
        ("b", None),
    ] {
        assert_eq!(index.get(key.as_bytes()).unwrap().as_deref(), value.map(str::as_bytes), "{key}");
    }
    for (prefix, after, limit, expected) in [
        ("", None, 10, &["", "a/1", "b/2", "b/3", "c"][..]),
        ("", None, 2, &["", "a/1"]),
        ("", Some(""), 2, &["a/1", "b/2"]),
        ("b/", None, 10, &["b/2", "b/3"]),
        ("b/", Some("b/2"), 10, &["b/3"]),
        ("b/", Some("b/20"), 10, &["b/3"]),
        ("b/", Some("b/3"), 10, &[]),
        ("b/", Some("a"), 10, &["b/2", "b/3"]),
        ("b/", Some("z"), 10, &[]),
        ("b/", None, 0, &[]),
        ("x", None, 10, &[]),
    ] {
        assert_eq!(keys(index, prefix, after, limit), expected, "{prefix:?} {after:?} {limit}");
    }
    // What is refused changes nothing.
    for position in [0, 8, 9] {
        let result = index.apply(position, &[put("c", "old")]);
        assert!(matches!(result, Err(IndexError::Stale { reflected: 9, .. })), "{result:?}");
    }
    for (key, value) in [(vec![0; MAX_INDEX_KEY + 1], Vec::new()), (vec![0], vec![0; MAX_INDEX_VALUE + 1])] {
        let result = index.apply(10, &[put("c", "new"), (key, Some(value))]);
        assert!(matches!(result, Err(IndexError::TooLarge { .. })), "{result:?}");
    }
    assert_eq!((index.get(b"c").unwrap(), index.position().unwrap()), (Some(b"c".to_vec()), 9));
    index
        .apply(10, &[(vec![255; MAX_INDEX_KEY], Some(vec![1; MAX_INDEX_VALUE]))])
        .unwrap();
    assert_eq!(index.scan(&[255], None, 9).unwrap().len(), 1);
    index.sync().unwrap();
}

fn sled_at(dir: &TempDir) -> (SledIndex, Opened) {
    SledIndex::open(&dir.path().join("index")).unwrap()
}

#[test]
fn indexes_conform() {
    check_index(&MemoryIndex::new());
    let dir = tempfile::tempdir().unwrap();
    let (index, opened) = sled_at(&dir);
    assert_eq!(opened, Opened::Fresh);
    check_index(&index);
    assert!(matches!(SledIndex::open(&dir.path().join("index")), Err(IndexError::InUse { .. })));
    drop(index);
    let (index, opened) = sled_at(&dir);
    assert_eq!((opened, index.position().unwrap()), (Opened::Existing, 10));
    assert_eq!(keys(&index, "b/", None, 10), ["b/2", "b/3"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn sled_holds_what_memory_holds(
        batches in proptest::collection::vec(proptest::collection::vec(("[ab]{0,3}", proptest::option::of("[xy]{0,4}")), 0..6), 1..20),
        prefix in "[ab]{0,2}", after in proptest::option::of("[ab]{0,3}"), limit in 0..5usize,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (memory, sled) = (MemoryIndex::new(), sled_at(&dir).0);
        for (position, rows) in batches.into_iter().enumerate() {
            let rows: Vec<Row> = rows.into_iter().map(|(key, value)| (key.into(), value.map(String::into_bytes))).collect();
            memory.apply(position as u64 + 1, &rows).unwrap();
            sled.apply(position as u64 + 1, &rows).unwrap();
        }
        drop(sled);
        let (sled, opened) = sled_at(&dir);
        prop_assert_eq!(opened, Opened::Existing);
        prop_assert_eq!(sled.position().unwrap(), memory.position().unwrap());
        prop_assert_eq!(sled.scan(b"", None, 1000).unwrap(), memory.scan(b"", None, 1000).unwrap());
        let (prefix, after) = (prefix.as_bytes(), after.as_ref().map(String::as_bytes));
        prop_assert_eq!(sled.scan(prefix, after, limit).unwrap(), memory.scan(prefix, after, limit).unwrap());
    }
}

#[test]
fn a_broken_index_is_moved_aside() {
    let dir = tempfile::tempdir().unwrap();
    let db = dir.path().join("index/db");
    for round in 1..=4u64 {
        let (index, _) = sled_at(&dir);
        index.apply(round, &[put("key", "value")]).unwrap();
        index.sync().unwrap();
        drop(index);
        // Each round damages another part; whatever sled makes of it, it must open, and say what it did.
        match round {
            1 => std::fs::write(&db, vec![0xa5; 100_000]).unwrap(),
            2 => {
                std::fs::remove_file(&db).unwrap();
                std::fs::create_dir(&db).unwrap();
            }
            3 => std::fs::write(dir.path().join("index/BROKEN"), b"found at run time").unwrap(),
            _ => std::fs::write(&db, b"").unwrap(),
        }
        let (index, opened) = sled_at(&dir);
        if let Opened::Replaced { moved_to, reason } = &opened {
            assert!(moved_to.is_dir() && !reason.is_empty());
            assert_eq!(index.position().unwrap(), 0);
        }
        // sled takes some damage for an empty or shorter file; the position tells.
        assert!(index.position().unwrap() <= round);
        if round < 4 {
            assert!(matches!(opened, Opened::Replaced { .. }), "{round}: {opened:?}");
        }
        drop(index);
        std::fs::remove_dir_all(dir.path().join("index")).unwrap();
    }
    let aside: Vec<PathBuf> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let aside = aside.iter().filter(|path| path.to_string_lossy().contains("broken")).count();
    assert!((1..=2).contains(&aside), "the newest ones are kept: {aside}");
}

// ---- Objects ----

async fn check_objects(objects: &dyn Objects) {
    let noise: Vec<u8> = (0..40_000u32)
        .flat_map(|index| ObjectId::of(&index.to_le_bytes()).as_bytes()[..2].to_vec())
        .collect();
    for bytes in [Vec::new(), b"a".to_vec(), vec![0; 3_000_000], noise] {
        let bytes = Bytes::from(bytes);
        let id = objects.put("org_1", bytes.clone()).await.unwrap();
        assert_eq!(id, ObjectId::of(&bytes));
        assert_eq!(objects.put("org_1", bytes.clone()).await.unwrap(), id);
        for limit in [bytes.len(), bytes.len() + 1, usize::MAX] {
            assert_eq!(objects.get("org_1", &id, limit).await.unwrap().unwrap(), bytes);
        }
        if let Some(less) = bytes.len().checked_sub(1) {
            for limit in [0, less] {
                let result = objects.get("org_1", &id, limit).await;
                assert!(matches!(result, Err(ObjectError::TooLarge { .. })), "{result:?}");
            }
        }
        assert!(objects.get("org_2", &id, 10).await.unwrap().is_none(), "another organization's");
    }
    let id = ObjectId::of(b"never put");
    assert!(objects.get("org_1", &id, 10).await.unwrap().is_none());
    let long = "a".repeat(65);
    for org in ["", ".", "..", "a/b", "../a", "A", "a b", "a\0", "é", "a#1", &long] {
        assert!(
            matches!(objects.put(org, Bytes::new()).await, Err(ObjectError::BadOrganization { .. })),
            "{org}"
        );
        assert!(
            matches!(objects.get(org, &id, 1).await, Err(ObjectError::BadOrganization { .. })),
            "{org}"
        );
    }
    objects.put(&"a".repeat(64), Bytes::new()).await.unwrap();
}

#[tokio::test]
async fn objects_conform() {
    check_objects(&MemoryObjects::new()).await;
    let dir = tempfile::tempdir().unwrap();
    check_objects(&StoredObjects::in_folder(&dir.path().join("a/objects")).unwrap()).await;
}

#[tokio::test]
async fn damage_to_an_object_is_seen_and_healed() {
    let dir = tempfile::tempdir().unwrap();
    let objects = StoredObjects::in_folder(dir.path()).unwrap();
    for text in ["short".to_owned(), "long ".repeat(1000)] {
        let id = objects.put("org", Bytes::from(text.clone())).await.unwrap();
        let hex = id.to_string();
        assert_eq!(hex.parse::<ObjectId>().unwrap(), id);
        let path = dir.path().join("org").join(&hex[..2]).join(&hex);
        let whole = std::fs::read(&path).unwrap();
        let mut lies: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
        for at in 0..whole.len() {
            lies.extend([1u8, 0x80].map(|mask| {
                let mut bytes = whole.clone();
                bytes[at] ^= mask;
                bytes
            }));
        }
        for lie in lies {
            std::fs::write(&path, &lie).unwrap();
            match objects.get("org", &id, 10_000).await {
                Err(ObjectError::Damaged { .. } | ObjectError::TooLarge { .. }) => {}
                // A flipped bit that zstd does not mind; the hash has the last word.
                Ok(Some(bytes)) => assert_eq!(bytes, text.as_bytes()),
                other => panic!("{other:?} of {lie:?}"),
            }
        }
        objects.put("org", Bytes::from(text.clone())).await.unwrap();
        assert_eq!(objects.get("org", &id, 10_000).await.unwrap().unwrap(), text.as_bytes());
    }
}

#[test]
fn ids_are_exact() {
    let id = ObjectId::of(b"x").to_string();
    assert_eq!(id.parse::<ObjectId>().unwrap().to_string(), id);
    for bad in [
        "",
        &id[1..],
        &id.to_uppercase(),
        &format!("{id}0"),
        &format!("{id}00"),
        &id.replace(&id[..1], "g"),
    ] {
        assert!(bad.parse::<ObjectId>().is_err(), "{bad}");
    }
}
