//! What every backend of `Index` and `Objects` must do, run over each of them. A new backend adds itself at the end of its section.
//! The suite of `Log` is in `tests/log_conformance`, where the tests of a backend that needs a server can use it, too.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::index::{MAX_INDEX_KEY, MAX_INDEX_VALUE};
use crate::*;

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

    assert_eq!(index.origin().unwrap(), None);
    index.reset("another log").unwrap();
    assert_eq!(
        (index.position().unwrap(), index.origin().unwrap().as_deref()),
        (0, Some("another log"))
    );
    assert!(index.scan(b"", None, 10).unwrap().is_empty(), "a reset forgets every row");
    index.apply(1, &[(b"first".to_vec(), Some(b"again".to_vec()))]).unwrap();
    assert_eq!(
        index.get(b"first").unwrap().as_deref(),
        Some(b"again".as_slice()),
        "and begins anew"
    );
    assert_eq!(index.origin().unwrap().as_deref(), Some("another log"));
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
    assert_eq!((opened, index.position().unwrap()), (Opened::Existing, 1));
    assert_eq!(keys(&index, "", None, 10), ["first"]);
    assert_eq!(
        index.origin().unwrap().as_deref(),
        Some("another log"),
        "what was reset stays reset"
    );
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

/// catalogue 59: whatever sled makes of it.
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

pub(crate) async fn check_objects(objects: &dyn Objects) {
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

/// Makes an object look as if it had last been put at this time.
pub(crate) type Age<'a> = &'a dyn Fn(&str, &ObjectId, u64);

async fn old(objects: &dyn Objects, before_ms: u64, after: Option<&ObjectId>, limit: usize) -> Vec<ObjectId> {
    let found = objects.put_before("org_1", before_ms, after, limit).await.unwrap();
    assert!(found.iter().all(|old| old.bytes > 0));
    found.into_iter().map(|old| old.id).collect()
}

/// Listing and removing by age, on an empty store.
pub(crate) async fn check_removal(objects: &dyn Objects, age: Age<'_>, limits: &[usize]) {
    // Whole seconds: some stores keep no more.
    const OLD: u64 = 1_000_000;
    const SECOND: u64 = 1_000;
    assert!(old(objects, u64::MAX, None, 10).await.is_empty());
    let mut ids = Vec::new();
    for number in 0..40u64 {
        let bytes = Bytes::from(format!("object {number}"));
        let id = objects.put("org_1", bytes.clone()).await.unwrap();
        age("org_1", &id, OLD + number * SECOND);
        ids.push((id, bytes, OLD + number * SECOND));
    }
    let (id, bytes, _) = ids[3].clone();
    objects.put("archive", bytes.clone()).await.unwrap();
    age("archive", &id, OLD);
    ids.sort_unstable_by_key(|(id, _, _)| *id);
    for before_ms in [0, OLD, OLD + SECOND, OLD + 20 * SECOND, OLD + 40 * SECOND, u64::MAX] {
        let expected: Vec<ObjectId> = ids.iter().filter(|(_, _, at)| *at < before_ms).map(|(id, _, _)| *id).collect();
        assert_eq!(old(objects, before_ms, None, 1_000).await, expected, "{before_ms}");
        for &limit in limits {
            let mut paged: Vec<ObjectId> = Vec::new();
            loop {
                let page = old(objects, before_ms, paged.last(), limit).await;
                paged.extend(&page);
                if page.len() < limit {
                    break;
                }
            }
            assert_eq!(paged, expected, "{before_ms} {limit}");
        }
        assert!(old(objects, before_ms, None, 0).await.is_empty());
    }
    let (first, last) = (ObjectId::from_bytes([0; 32]), ObjectId::from_bytes([255; 32]));
    assert_eq!(old(objects, u64::MAX, Some(&first), 1_000).await.len(), 40);
    assert!(old(objects, u64::MAX, Some(&last), 1_000).await.is_empty());

    let never = ObjectId::of(b"never put");
    assert!(!objects.remove("org_1", &never, u64::MAX).await.unwrap());
    assert!(!objects.remove("org_2", &id, u64::MAX).await.unwrap(), "another organization's");
    assert!(!objects.remove("org_1", &id, OLD + 3 * SECOND).await.unwrap(), "not older");
    assert_eq!(objects.get("org_1", &id, 100).await.unwrap().unwrap(), bytes);
    assert!(objects.remove("org_1", &id, OLD + 4 * SECOND).await.unwrap());
    assert!(objects.get("org_1", &id, 100).await.unwrap().is_none());
    assert!(objects.get("archive", &id, 100).await.unwrap().is_some(), "another organization's");
    assert!(!objects.remove("org_1", &id, u64::MAX).await.unwrap(), "once is enough");
    objects.put("org_1", bytes.clone()).await.unwrap();
    assert_eq!(
        objects.get("org_1", &id, 100).await.unwrap().unwrap(),
        bytes,
        "and it can come back"
    );

    for org in ["", "..", "a/b", "A"] {
        let listed = objects.put_before(org, 1, None, 1).await;
        assert!(matches!(listed, Err(ObjectError::BadOrganization { .. })), "{org}");
        let removed = objects.remove(org, &id, 1).await;
        assert!(matches!(removed, Err(ObjectError::BadOrganization { .. })), "{org}");
    }
}

async fn check_organizations(objects: &dyn Objects) {
    assert!(objects.organizations().await.unwrap().is_empty());
    for org in ["org_2", "archive", "org_1", "org_2"] {
        objects.put(org, Bytes::from("x")).await.unwrap();
        objects.put(org, Bytes::from("y")).await.unwrap();
    }
    assert_eq!(objects.organizations().await.unwrap(), ["archive", "org_1", "org_2"]);
}

/// Makes a file look as if it had last been written at this time.
pub(crate) fn age_file(dir: &std::path::Path, org: &str, id: &ObjectId, at_ms: u64) {
    let hex = id.to_string();
    let file = std::fs::File::options().write(true).open(dir.join(org).join(&hex[..2]).join(&hex));
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(at_ms);
    file.unwrap().set_modified(at).unwrap();
}

/// Pages around the number of objects in the check.
const LIMITS: [usize; 5] = [1, 7, 39, 40, 41];

#[tokio::test]
async fn objects_conform() {
    check_objects(&MemoryObjects::new()).await;
    check_organizations(&MemoryObjects::new()).await;
    let memory = MemoryObjects::new();
    check_removal(&memory, &|org, id, at_ms| memory.age(org, id, at_ms), &LIMITS).await;
    let dir = tempfile::tempdir().unwrap();
    check_objects(&StoredObjects::in_folder(&dir.path().join("a/objects")).unwrap()).await;
    check_organizations(&StoredObjects::in_folder(&dir.path().join("organizations")).unwrap()).await;
    let dir = dir.path().join("b");
    let stored = StoredObjects::in_folder(&dir).unwrap();
    check_removal(&stored, &|org, id, at_ms| age_file(&dir, org, id, at_ms), &LIMITS).await;
}

#[tokio::test]
async fn what_is_no_object_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let objects = StoredObjects::in_folder(dir.path()).unwrap();
    let id = objects.put("org_1", Bytes::from("x")).await.unwrap();
    let folder = dir.path().join("org_1").join(&id.to_string()[..2]);
    for name in ["README", &format!("{id}.bak"), &format!("{id}#1"), &id.to_string().to_uppercase()] {
        std::fs::write(folder.join(name), "x").unwrap();
    }
    std::fs::create_dir(dir.path().join("Not ours")).unwrap();
    assert_eq!(objects.organizations().await.unwrap(), ["org_1"]);
    assert_eq!(old(&objects, u64::MAX, None, 10).await, [id]);
}

/// However a removal and a put of the same object meet, and whether the removal's caller waits or not: once the put has returned, the object
/// is there and stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_put_outlives_a_removal_that_it_meets() {
    let dir = tempfile::tempdir().unwrap();
    let objects = std::sync::Arc::new(StoredObjects::in_folder(dir.path()).unwrap());
    for round in 0..300u32 {
        let bytes = Bytes::from(format!("round {round}"));
        let id = objects.put("org", bytes.clone()).await.unwrap();
        age_file(dir.path(), "org", &id, 1_000);
        let remover = objects.clone();
        let removal = tokio::spawn(async move { remover.remove("org", &id, 2_000).await });
        if round % 3 == 1 {
            tokio::task::yield_now().await;
        }
        if round % 2 == 1 {
            removal.abort();
        }
        objects.put("org", bytes.clone()).await.unwrap();
        let _ = removal.await;
        // This one waits for what the other may have left to be done.
        assert!(!objects.remove("org", &id, 2_000).await.unwrap(), "{round}");
        assert_eq!(objects.get("org", &id, 100).await.unwrap().as_ref(), Some(&bytes), "{round}");
    }
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
