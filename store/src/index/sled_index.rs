//! The index in sled. Everything that is particular about sled stays in this file:
//!
//! - `flush` writes but does not sync, so after it we sync `<dir>/db` through a handle of our own;
//! - it may panic on a damaged file, when it is opened or at any read, so every call is caught, and a damaged index is moved aside;
//! - its own lock cannot be told from other errors, and its threads hold it for a while after the last handle is gone, so there is a
//!   lock file beside the folder, taken first, and then we wait for theirs.

use std::fs::{self, File, TryLockError};
use std::io;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Index, IndexError, KeyValue, Row, check_rows};
use crate::disk;

/// sled's page cache. It really uses several times as much, and the kernel caches the file anyway.
const CACHE_BYTES: u64 = 16 * 1024 * 1024;
/// Broken indexes that are kept for a look, the newest ones; each may be as big as the index.
const MAX_BROKEN_KEPT: u64 = 2;
/// How often, and how long each time, we wait for sled's threads of an earlier handle to let go: 5 s, where milliseconds are usual.
const LOCK_WAITS: (u32, Duration) = (500, Duration::from_millis(10));
/// Rows have keys that begin with this, so that none can be taken for the position.
const ROW: u8 = b'r';
/// The key of the position.
const POSITION: &[u8] = b"position";
/// Key of the origin.
const ORIGIN: &[u8] = b"origin";
/// A file in the folder that says why the index must not be used again.
const BROKEN_MARK: &str = "BROKEN";

/// What was found when the index was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// There was one; it reflects [`Index::position`]. sled takes some damage for a shorter past, so that position, and not this answer,
    /// says from where the log must be followed, and whether it still reaches that far back.
    Existing,
    /// There was none, so it is empty.
    Fresh,
    /// There was one that could not be used, so it is empty, and must be filled from objects and log.
    Replaced {
        /// Where the old one lies.
        moved_to: PathBuf,
        /// What was wrong with it.
        reason: String,
    },
}

/// Rows in sled.
pub struct SledIndex {
    dir: PathBuf,
    db: sled::Db,
    /// Our own handle of sled's one file, to sync it.
    file: File,
    writer: Mutex<()>,
    broken: AtomicBool,
    _lock: File,
}

impl SledIndex {
    /// Opens the index in the folder `dir`, whose lock is a file of the same name with `.lock` behind it. One that errs or panics, or did
    /// when it was last used, is moved to `<dir>.broken-<n>`, and an empty one is made. An error means that this did not help.
    pub fn open(dir: &Path) -> Result<(SledIndex, Opened), IndexError> {
        let at = |action| {
            move |source| IndexError::Io {
                action,
                path: dir.to_owned(),
                source,
            }
        };
        disk::create_dir_durably(disk::parent_of(dir)).map_err(at("create the folder of"))?;
        let lock = disk::lock(&beside(dir, ".lock"))
            .map_err(at("lock"))?
            .ok_or_else(|| IndexError::InUse { dir: dir.to_owned() })?;
        if !released(dir).map_err(at("lock"))? {
            return Err(IndexError::InUse { dir: dir.to_owned() });
        }
        let reason = match fs::read_to_string(dir.join(BROKEN_MARK)) {
            Ok(reason) => reason,
            Err(_) => match open_sled(dir) {
                Ok((db, file)) => {
                    let opened = if db.was_recovered() { Opened::Existing } else { Opened::Fresh };
                    return Ok((SledIndex::new(dir, db, file, lock), opened));
                }
                Err(reason) => reason,
            },
        };
        let moved_to = move_aside(dir).map_err(at("move aside"))?;
        tracing::warn!(moved_to = %moved_to.display(), reason, "the index was unusable and is made anew");
        let (db, file) = open_sled(dir).map_err(|reason| IndexError::Broken { reason })?;
        Ok((SledIndex::new(dir, db, file, lock), Opened::Replaced { moved_to, reason }))
    }

    fn new(dir: &Path, db: sled::Db, file: File, lock: File) -> SledIndex {
        SledIndex {
            dir: dir.to_owned(),
            db,
            file,
            writer: Mutex::new(()),
            broken: AtomicBool::new(false),
            _lock: lock,
        }
    }

    /// Runs one operation. If it panics or finds damage, the index is marked, and not used again.
    fn run<T>(&self, operation: impl FnOnce(&sled::Db) -> Result<T, sled::Error>) -> Result<T, IndexError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(IndexError::Broken {
                reason: "an earlier call found it damaged".to_owned(),
            });
        }
        let reason = match caught(|| operation(&self.db)) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(sled::Error::Io(source))) => {
                return Err(IndexError::Io {
                    action: "use",
                    path: self.dir.clone(),
                    source,
                });
            }
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic,
        };
        self.broken.store(true, Ordering::Relaxed);
        if let Err(error) = fs::write(self.dir.join(BROKEN_MARK), &reason) {
            tracing::warn!(%error, "the index is damaged and could not be marked so");
        }
        Err(IndexError::Broken { reason })
    }
}

impl Index for SledIndex {
    fn apply(&self, position: u64, rows: &[Row]) -> Result<(), IndexError> {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        check_rows(position, self.position()?, rows)?;
        let mut batch = sled::Batch::default();
        for (key, value) in rows {
            match value {
                Some(value) => batch.insert(row_key(key), value.as_slice()),
                None => batch.remove(row_key(key)),
            }
        }
        batch.insert(POSITION, &position.to_be_bytes());
        self.run(|db| db.apply_batch(batch))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Ok(self.run(|db| db.get(row_key(key)))?.map(|value| value.to_vec()))
    }

    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, IndexError> {
        let prefix_key = row_key(prefix);
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(row_key(after)),
            _ => Bound::Included(prefix_key.clone()),
        };
        self.run(|db| {
            let mut rows = Vec::new();
            for row in db.range((from, Bound::Unbounded)).take(limit) {
                let (key, value) = row?;
                if !key.starts_with(&prefix_key) {
                    break;
                }
                rows.push((key[1..].to_vec(), value.to_vec()));
            }
            Ok(rows)
        })
    }

    fn position(&self) -> Result<u64, IndexError> {
        let stored = self.run(|db| db.get(POSITION))?;
        match stored.as_deref().map(<[u8; 8]>::try_from) {
            None => Ok(0),
            Some(Ok(bytes)) => Ok(u64::from_be_bytes(bytes)),
            Some(Err(_)) => self.run(|_| Err(sled::Error::ReportableBug("the position is not 8 bytes".to_owned()))),
        }
    }

    fn sync(&self) -> Result<(), IndexError> {
        self.run(|db| db.flush())?;
        self.file.sync_data().map_err(|source| IndexError::Io {
            action: "sync",
            path: self.dir.clone(),
            source,
        })
    }

    fn origin(&self) -> Result<Option<String>, IndexError> {
        let stored = self.run(|db| db.get(ORIGIN))?;
        Ok(stored.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn reset(&self, origin: &str) -> Result<(), IndexError> {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // Without an origin first: whatever a crash leaves of the rows is not taken for anybody's.
        let mut batch = sled::Batch::default();
        batch.remove(ORIGIN);
        batch.remove(POSITION);
        self.run(|db| db.apply_batch(batch))?;
        self.run(|db| db.clear())?;
        self.run(|db| db.insert(ORIGIN, origin)).map(|_| ())
    }
}

fn row_key(key: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(key.len() + 1);
    row.push(ROW);
    row.extend_from_slice(key);
    row
}

/// Waits until nobody holds sled's own lock.
fn released(dir: &Path) -> io::Result<bool> {
    let file = match File::open(dir.join("db")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?,
    };
    for _ in 0..LOCK_WAITS.0 {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAITS.1),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(false)
}

/// Opens sled, and makes the entries of its folder durable. Errors and panics come back as what they said.
fn open_sled(dir: &Path) -> Result<(sled::Db, File), String> {
    let config = sled::Config::new().path(dir).cache_capacity(CACHE_BYTES).flush_every_ms(None);
    let file = dir.join("db");
    let used = fs::metadata(&file).is_ok_and(|file| file.len() > 0);
    let db = caught(|| config.open())?.map_err(|error| error.to_string())?;
    if used && !db.was_recovered() {
        return Err("sled found nothing in a file that is not empty".to_owned());
    }
    let synced = || -> io::Result<File> {
        let file = File::open(&file)?;
        file.sync_all()?;
        disk::sync_dir(dir)?;
        disk::sync_dir(disk::parent_of(dir))?;
        Ok(file)
    };
    Ok((db, synced().map_err(|error| error.to_string())?))
}

/// Runs `operation`, and makes a panic its message.
fn caught<T>(operation: impl FnOnce() -> T) -> Result<T, String> {
    // What sled may leave half-changed is not used again.
    catch_unwind(AssertUnwindSafe(operation)).map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        format!("sled panicked: {}", text.unwrap_or("without a message"))
    })
}

/// `path` with `suffix` behind its name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Moves the folder to the next free `<dir>.broken-<n>`, and removes the oldest ones.
fn move_aside(dir: &Path) -> io::Result<PathBuf> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned() + ".broken-";
    let mut kept = Vec::new();
    for entry in fs::read_dir(disk::parent_of(dir))? {
        let entry = entry?;
        let number = entry
            .file_name()
            .to_str()
            .and_then(|entry| entry.strip_prefix(&name)?.parse::<u64>().ok());
        kept.extend(number.map(|number| (number, entry.path())));
    }
    let next = kept.iter().map(|(number, _)| number + 1).max().unwrap_or(1);
    for (number, path) in kept {
        if number + MAX_BROKEN_KEPT <= next {
            fs::remove_dir_all(path)?;
        }
    }
    let moved_to = beside(dir, &format!(".broken-{next}"));
    fs::rename(dir, &moved_to)?;
    disk::sync_dir(disk::parent_of(dir))?;
    Ok(moved_to)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// catalogue 60: sled needs memory and disk for each tree and for its cache, so there is one tree, and its cache is small; rows by the ten
    /// thousand take a small multiple of their bytes.
    #[test]
    fn one_tree_and_a_small_cache() {
        let dir = tempfile::tempdir().unwrap();
        let (index, _) = SledIndex::open(&dir.path().join("index")).unwrap();
        let (rows, bytes) = (20_000u64, 300);
        for position in 1..=rows / 100 {
            let batch: Vec<Row> = (0..100)
                .map(|number| {
                    (
                        format!("b/{:08}", position * 100 + number).into_bytes(),
                        Some(vec![number as u8; bytes]),
                    )
                })
                .collect();
            index.apply(position, &batch).unwrap();
        }
        index.sync().unwrap();
        assert_eq!(index.db.tree_names().len(), 1);
        let stored = rows * bytes as u64;
        let used = index.db.size_on_disk().unwrap();
        assert!(used < 10 * stored, "{used} bytes on the disk for {stored}");
        const { assert!(CACHE_BYTES <= 64 * 1024 * 1024) };
    }
}
