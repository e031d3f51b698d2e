//! The log in a folder of one machine.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::{BoxError, LogError};
use super::frame::{self, Encoder, FORMAT_LEVEL, MAX_GROUP_BYTES, MAX_GROUP_RECORDS};
use super::recover::{Reader, Recovery, Tail};
use super::segment::{self, SEGMENT_BYTES};
use super::{Log, Record, Replay, Sequences, Snapshot, Snapshots, snapshot};
use crate::disk;

/// The file whose lock makes the log have one owner.
const LOCK_FILE: &str = "LOCK";

/// How a [`FileLog`] is laid out.
#[derive(Clone, Copy, Debug)]
pub struct LogOptions {
    /// Size of a new segment in bytes; at most, and by default, [`SEGMENT_BYTES`]. Tests use small ones.
    pub segment_bytes: u64,
    /// Format level of a log that is made anew; at most, and by default, [`FORMAT_LEVEL`]. One that is there keeps its own, so that
    /// the version that wrote it can be gone back to.
    pub write_level: u16,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions {
            segment_bytes: SEGMENT_BYTES,
            write_level: FORMAT_LEVEL,
        }
    }
}

/// The first level whose readers know that a log may begin behind a snapshot. One of a lower level is not cut.
const CUTTING_LEVEL: u16 = 2;
/// Behind a small group in a fresh segment, zeros are written this far ahead: one sync in many notes new extents in the file system's
/// journal, the others only write their block, which is five times as fast.
const ZERO_AHEAD_BYTES: u64 = 64 * 1024;
/// A group of this size or more is worth a journal entry of its own; zeros ahead of it would double what the device writes.
const SMALL_GROUP_BYTES: usize = 4096;

/// Snapshots that are kept: a damaged newest one must have an older one, and the log behind that, to fall back to.
pub(crate) const KEPT_SNAPSHOTS: usize = 2;

/// A log in a folder, open for appending.
pub struct FileLog {
    folder: Arc<Folder>,
    segment_bytes: u64,
    level: u16,
    current: Current,
    next_position: u64,
    /// The first positions of the segments before the current one, and that one's.
    segments: Vec<u64>,
    sequences: Sequences,
    encoder: Encoder,
    poisoned: bool,
}

/// The segment that is appended to.
struct Current {
    path: PathBuf,
    file: File,
    seed: u32,
    end: u64,
    /// Up to here its blocks have been written before.
    zeroed: u64,
}

impl Current {
    fn create(dir: &Path, level: u16, first_position: u64, bytes: u64) -> Result<Current, LogError> {
        let path = segment::path(dir, first_position);
        let (file, header) = segment::create(dir, level, first_position, bytes).map_err(LogError::io("create", &path))?;
        let end = segment::HEADER_BYTES as u64;
        Ok(Current {
            path,
            file,
            seed: header.seed(),
            end,
            zeroed: if header.recycled { bytes } else { end },
        })
    }

    fn write(&mut self, group: &[u8], segment_bytes: u64) -> std::io::Result<()> {
        let end = self.end + group.len() as u64;
        self.file.write_all_at(group, self.end)?;
        if end > self.zeroed && group.len() < SMALL_GROUP_BYTES {
            self.zeroed = segment_bytes.min(end + ZERO_AHEAD_BYTES);
            let zeros = [0; ZERO_AHEAD_BYTES as usize];
            self.file.write_all_at(&zeros[..(self.zeroed - end) as usize], end)?;
        }
        self.file.sync_data()?;
        self.end = end;
        Ok(())
    }
}

/// What the log shares with those who save its snapshots.
struct Folder {
    dir: PathBuf,
    level: AtomicU16,
    /// Held as long as anybody may write here.
    _lock: File,
    /// The last durable position.
    durable: AtomicU64,
    /// Bytes of the groups since opening, and of those before that the newest snapshot did not reflect.
    written: AtomicU64,
    /// What `written` was when the newest snapshot was asked for.
    at_newest: AtomicU64,
    /// One snapshot is saved at a time.
    saving: Mutex<()>,
    /// Positions of the kept snapshots, oldest first. Locked for moments only: `cut` must not wait for a snapshot's sync.
    kept: Mutex<Vec<u64>>,
}

impl Folder {
    fn kept(&self) -> Vec<u64> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The damaged ones go with the old ones: an intact one is newer than all of them.
    fn remove_all_but(&self, kept: &[u64]) -> std::io::Result<()> {
        for (position, path) in snapshot::list(&self.dir)? {
            if !kept.contains(&position) {
                disk::step()?;
                disk::remove_if_there(&path)?;
            }
        }
        Ok(())
    }
}

impl Snapshots for Folder {
    fn save(&self, snapshot: &Snapshot) -> Result<(), LogError> {
        let _saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = self.kept();
        snapshot::check(snapshot, kept.last().copied().unwrap_or(0), self.durable.load(Ordering::Acquire))?;
        let written = self.written.load(Ordering::Relaxed);
        let path = snapshot::path(&self.dir, snapshot.position);
        snapshot::save(&self.dir, self.level.load(Ordering::Relaxed), snapshot).map_err(LogError::io("save", &path))?;
        kept.push(snapshot.position);
        kept.drain(..kept.len().saturating_sub(KEPT_SNAPSHOTS));
        self.at_newest.store(written, Ordering::Relaxed);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&kept);
        if let Err(error) = self.remove_all_but(&kept) {
            // The next one tries again; nothing depends on it.
            tracing::warn!("old snapshots in {} could not be removed: {error}", self.dir.display());
        }
        Ok(())
    }
}

impl FileLog {
    /// Opens the log in `dir`, creating it where there is none: takes its lock, hands the newest intact snapshot and every record
    /// behind it to `visit`, and cuts a torn tail. Changes nothing unless all of that went well.
    pub fn open(
        dir: &Path,
        options: LogOptions,
        mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>,
    ) -> Result<(FileLog, Recovery), LogError> {
        disk::create_dir_durably(dir).map_err(LogError::io("create", dir))?;
        let lock = take_lock(dir)?;
        let mut reader = Reader::new();
        let found = reader.read_tail(dir, &mut visit)?;
        let cleaned = segment::remove_unfinished(dir).and_then(|()| snapshot::remove_unfinished(dir));
        cleaned.map_err(LogError::io("clean up", dir))?;

        let segment_bytes = options.segment_bytes.min(SEGMENT_BYTES);
        let next_position = reader.recovery.position + 1;
        if reader.recovery.level == 0 {
            reader.recovery.level = options.write_level.clamp(1, FORMAT_LEVEL);
        }
        let level = reader.recovery.level;
        let current = match found.tail {
            Some(Tail {
                header: Some(header),
                path,
                end,
                last_group,
                ..
            }) => {
                let torn = reader.recovery.torn_bytes;
                let file = settle_tail(&path, end, segment_bytes, torn, last_group).map_err(LogError::io("settle the end of", &path))?;
                let zeroed = if header.recycled && torn == 0 { segment_bytes } else { end };
                let seed = header.seed();
                Current {
                    path,
                    file,
                    seed,
                    end,
                    zeroed,
                }
            }
            empty => {
                let first_position = empty.map_or(next_position, |tail| tail.first_position);
                reader.recovery.segments = reader.recovery.segments.max(1);
                Current::create(dir, level, first_position, segment_bytes)?
            }
        };
        // An earlier owner may have been killed between making an entry and syncing it.
        for dir in [dir, disk::parent_of(dir)] {
            disk::sync_dir(dir).map_err(LogError::io("sync", dir))?;
        }
        let sequences = reader.sequences;
        let encoder = Encoder::new(level);
        let mut segments: Vec<u64> = found.segments.into_iter().map(|(first_position, _)| first_position).collect();
        if segments.is_empty() {
            segments.push(next_position);
        }
        let kept = found.snapshots[found.snapshots.len().saturating_sub(KEPT_SNAPSHOTS)..].to_vec();
        let folder = Folder {
            dir: dir.to_owned(),
            level: AtomicU16::new(level),
            _lock: lock,
            durable: AtomicU64::new(reader.recovery.position),
            written: AtomicU64::new(reader.since_snapshot),
            at_newest: AtomicU64::new(0),
            saving: Mutex::new(()),
            kept: Mutex::new(kept),
        };
        let log = FileLog {
            folder: Arc::new(folder),
            segment_bytes,
            level,
            current,
            next_position,
            segments,
            sequences,
            encoder,
            poisoned: false,
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
        let mut group = self.encoder.encode(self.current.seed, self.next_position, records);
        if self.current.end + group.len() as u64 > self.segment_bytes {
            self.current = Current::create(&self.folder.dir, self.level, self.next_position, self.segment_bytes)?;
            self.segments.push(self.next_position);
            group = self.encoder.encode(self.current.seed, self.next_position, records);
        }
        let written = self.current.write(group, self.segment_bytes);
        written.map_err(LogError::io("write to", &self.current.path))?;
        self.next_position += records.len() as u64;
        self.folder.durable.store(self.next_position - 1, Ordering::Release);
        self.folder.written.fetch_add(group.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Has everything from now on written at `level`, durably: a segment of that level begins. Never lowers it.
    pub(super) fn raise_level(&mut self, level: u16) -> Result<(), LogError> {
        if level <= self.level {
            return Ok(());
        }
        self.current = Current::create(&self.folder.dir, level, self.next_position, self.segment_bytes)?;
        if self.segments.last() != Some(&self.next_position) {
            self.segments.push(self.next_position);
        }
        self.level = level;
        self.folder.level.store(level, Ordering::Relaxed);
        self.encoder = Encoder::new(level);
        Ok(())
    }

    /// The end of the last group in its segment.
    #[cfg(test)]
    pub(super) fn end(&self) -> u64 {
        self.current.end
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

    fn cut(&mut self, position: u64) -> Result<u64, LogError> {
        let kept = self.folder.kept();
        if self.level < CUTTING_LEVEL || kept.len() < KEPT_SNAPSHOTS {
            return Ok(self.segments[0]);
        }
        let position = position.min(kept[0]);
        // The oldest goes first, and durably before the next: whatever a crash leaves is without a hole.
        while self.segments.get(1).is_some_and(|next| *next <= position + 1) {
            let retired = segment::retire(&self.folder.dir, self.segments[0], self.segment_bytes);
            retired.map_err(LogError::io("let go of a segment in", &self.folder.dir))?;
            self.segments.remove(0);
        }
        Ok(self.segments[0])
    }

    fn bytes_since_snapshot(&self) -> u64 {
        let folder = &self.folder;
        folder.written.load(Ordering::Relaxed) - folder.at_newest.load(Ordering::Relaxed)
    }

    fn snapshots(&self) -> Arc<dyn Snapshots> {
        Arc::clone(&self.folder) as Arc<dyn Snapshots>
    }
}

/// Takes the lock of the log in `dir`.
pub(super) fn take_lock(dir: &Path) -> Result<File, LogError> {
    let path = dir.join(LOCK_FILE);
    let lock = disk::lock(&path).map_err(LogError::io("lock", &path))?;
    lock.ok_or_else(|| LogError::InUse { dir: dir.to_owned() })
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
