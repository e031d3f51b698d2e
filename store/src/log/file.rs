//! The log in a folder of one machine.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::{BoxError, LogError};
use super::frame::{self, Encoder, MAX_GROUP_BYTES, MAX_GROUP_RECORDS};
use super::recover::{Reader, Recovery, Tail};
use super::segment::{self, SEGMENT_BYTES};
use super::{Log, Record, RecordRef, Sequences};
use crate::disk;

/// The file whose lock makes the log have one owner.
const LOCK_FILE: &str = "LOCK";

/// How a [`FileLog`] is laid out.
#[derive(Clone, Copy, Debug)]
pub struct LogOptions {
    /// Size of a new segment in bytes; at most, and by default, [`SEGMENT_BYTES`]. Tests use small ones.
    pub segment_bytes: u64,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions {
            segment_bytes: SEGMENT_BYTES,
        }
    }
}

/// A log in a folder, open for appending.
pub struct FileLog {
    dir: PathBuf,
    segment_bytes: u64,
    path: PathBuf,
    file: File,
    seed: u32,
    pub(super) end: u64,
    next_position: u64,
    sequences: Sequences,
    encoder: Encoder,
    poisoned: bool,
    _lock: File,
}

impl FileLog {
    /// Opens the log in `dir`, creating it where there is none: takes its lock, checks everything, hands every record to `visit`
    /// with its position, and cuts a torn tail. Changes nothing unless all of that went well.
    pub fn open(
        dir: &Path,
        options: LogOptions,
        mut visit: impl FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>,
    ) -> Result<(FileLog, Recovery), LogError> {
        disk::create_dir_durably(dir).map_err(LogError::io("create", dir))?;
        let lock = take_lock(dir)?;
        let mut reader = Reader::new();
        let tail = reader.read(dir, &mut visit)?;
        segment::remove_unfinished(dir).map_err(LogError::io("clean up", dir))?;

        let segment_bytes = options.segment_bytes.min(SEGMENT_BYTES);
        let next_position = reader.recovery.records + 1;
        let (path, file, seed, end) = match tail {
            Some(Tail {
                seed: Some(seed),
                path,
                end,
                last_group,
                ..
            }) => {
                let file = settle_tail(&path, end, segment_bytes, reader.recovery.torn_bytes, last_group)
                    .map_err(LogError::io("settle the end of", &path))?;
                (path, file, seed, end)
            }
            empty => {
                let first_position = empty.map_or(next_position, |tail| tail.first_position);
                reader.recovery.segments = reader.recovery.segments.max(1);
                create_segment(dir, first_position, segment_bytes)?
            }
        };
        // An earlier owner may have been killed between making an entry and syncing it.
        for dir in [dir, disk::parent_of(dir)] {
            disk::sync_dir(dir).map_err(LogError::io("sync", dir))?;
        }
        let sequences = reader.sequences;
        let encoder = Encoder::new();
        let dir = dir.to_owned();
        let log = FileLog {
            dir,
            segment_bytes,
            path,
            file,
            seed,
            end,
            next_position,
            sequences,
            encoder,
            poisoned: false,
            _lock: lock,
        };
        Ok((log, reader.recovery))
    }

    fn check_size(&self, records: &[Record]) -> Result<(), LogError> {
        let bytes = frame::size_bound(records);
        let room = self
            .segment_bytes
            .saturating_sub((segment::HEADER_BYTES + frame::HEADER_BYTES) as u64);
        let max_bytes = usize::try_from(room).map_or(MAX_GROUP_BYTES, |room| room.min(MAX_GROUP_BYTES));
        if records.len() > MAX_GROUP_RECORDS || bytes > max_bytes {
            return Err(LogError::TooLarge {
                records: records.len(),
                bytes,
                max_records: MAX_GROUP_RECORDS,
                max_bytes,
            });
        }
        Ok(())
    }

    fn write(&mut self, records: &[Record]) -> Result<(), LogError> {
        let mut group = self.encoder.encode(self.seed, self.next_position, records);
        if self.end + group.len() as u64 > self.segment_bytes {
            (self.path, self.file, self.seed, self.end) = create_segment(&self.dir, self.next_position, self.segment_bytes)?;
            group = self.encoder.encode(self.seed, self.next_position, records);
        }
        self.file
            .write_all_at(group, self.end)
            .map_err(LogError::io("write to", &self.path))?;
        self.file.sync_data().map_err(LogError::io("sync", &self.path))?;
        self.end += group.len() as u64;
        self.next_position += records.len() as u64;
        Ok(())
    }
}

impl Log for FileLog {
    fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        if records.is_empty() {
            return Ok(());
        }
        self.check_size(records)?;
        self.sequences.advance_all(records)?;
        let result = self.write(records);
        // After a failed sync the kernel may call the very same pages clean: to try again would be to lie.
        self.poisoned = result.is_err();
        result
    }
}

/// Takes the lock of the log in `dir`.
pub(super) fn take_lock(dir: &Path) -> Result<File, LogError> {
    let path = dir.join(LOCK_FILE);
    let lock = disk::lock(&path).map_err(LogError::io("lock", &path))?;
    lock.ok_or_else(|| LogError::InUse { dir: dir.to_owned() })
}

fn create_segment(dir: &Path, first_position: u64, bytes: u64) -> Result<(PathBuf, File, u32, u64), LogError> {
    let path = segment::path(dir, first_position);
    let (file, seed) = segment::create(dir, first_position, bytes).map_err(LogError::io("create", &path))?;
    Ok((path, file, seed, segment::HEADER_BYTES as u64))
}

/// Cuts a torn tail, and makes durable what was read.
///
/// The last group may be whole in the page cache only: its owner was killed before its sync returned, or died of a sync that failed
/// and left the pages marked clean. It is about to be replayed and built upon, so it is written once more and synced.
fn settle_tail(path: &Path, end: u64, segment_bytes: u64, torn: u64, last_group: Option<(u64, Vec<u8>)>) -> std::io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    if torn > 0 {
        file.set_len(end)?;
    }
    if file.metadata()?.len() < segment_bytes {
        segment::reserve(&file, segment_bytes)?;
    }
    if let Some((start, group)) = last_group {
        file.write_all_at(&group, start)?;
    }
    file.sync_all()?;
    Ok(file)
}
