//! How a workspace was before a turn: an index of its files, and the contents of those that are small enough to be compared. Two files in the
//! sandbox's folder, where they outlive the executor and go with the sandbox, and a third where something has changed:
//!
//! - `changes.pack`: contents, one after the other, only ever appended to. What has not changed since the last turn is there already.
//! - `changes.base`: the index, put in its place by a rename, so that it is whole or not there. An empty workspace has none: most trials begin
//!   with one, and files cost more than anything else here.
//! - `changes.N`: what turn N has changed, from before anything else may write into the workspace until that is on record.
//!
//! Not git: a commit costs 20 ms of processes and writes each file anew; this writes what has changed, and reading it back is one `pread`.
//! Nothing is synced: after a power cut the sandbox is gone with all of this.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use evalgrid_domain::{
    changes::ChangeFilter,
    limits::{MAX_DIFFED_FILE_BYTES, MAX_TURN_CONTENT_BYTES},
};
use prost::Message as _;
use tokio::time::Instant;

use super::scan::{self, Entry, Kind, ScanError};

const INDEX: &str = "changes.base";
const NEW: &str = "changes.new";
const PACK: &str = "changes.pack";
/// Bytes of a pack: an agent that rewrites everything in each of many turns must not fill the disk.
const MAX_PACK_BYTES: u64 = 4 * MAX_TURN_CONTENT_BYTES;
/// A file that was changed less than this before it was seen may change again without another time: clocks of file systems tick every 10 ms at
/// worst. Nanoseconds.
const FRESH: i64 = 100_000_000;

/// The index.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Base {
    /// The turn that it was made before.
    #[prost(uint32, tag = "1")]
    turn: u32,
    #[prost(message, repeated, tag = "2")]
    pub(super) entries: Vec<Entry>,
    /// Folders whose content is unknown.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub(super) hidden: Vec<Vec<u8>>,
}

/// Whether the workspace was looked at before this turn and was not empty.
pub(super) fn exists(sandbox: &Path, turn: u32) -> bool {
    load(sandbox).is_ok_and(|base| base.is_some_and(|base| base.turn == turn))
}

fn load(sandbox: &Path) -> io::Result<Option<Base>> {
    match fs::read(sandbox.join(INDEX)) {
        Ok(bytes) => Ok(Some(Base::decode(bytes.as_slice())?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The base of a turn: none on the disk means that the workspace was empty. `None`: that of a later turn is in its place, which is made only
/// when this turn has been looked at, and what was found, if anything, has been saved.
pub(super) fn read(sandbox: &Path, turn: u32) -> io::Result<Option<Base>> {
    match load(sandbox)? {
        None => Ok(Some(Base { turn, ..Base::default() })),
        Some(base) if base.turn == turn => Ok(Some(base)),
        Some(base) if base.turn > turn => Ok(None),
        Some(_) => Err(io::Error::other("what was kept of it is of an earlier turn")),
    }
}

/// Saves what a look at the workspace has come to: under a turn's number, what it has changed.
pub(super) fn save(sandbox: &Path, name: &str, found: &[u8]) -> io::Result<()> {
    put(sandbox, &format!("changes.{name}"), found)
}

/// What was saved under this name.
pub(super) fn saved(sandbox: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    match fs::read(sandbox.join(format!("changes.{name}"))) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whole or not at all.
fn put(sandbox: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = sandbox.join(NEW);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(content)?;
    fs::rename(&new, sandbox.join(name))
}

/// Looks at the workspace and keeps what is found. `now_ns`: the wall clock, in nanoseconds since the epoch.
pub(super) fn make(sandbox: &Path, turn: u32, filter: &ChangeFilter, now_ns: i64, deadline: Instant) -> Result<(), ScanError> {
    let mut older: Option<HashMap<Vec<u8>, Entry>> = None;
    let mut base = Base { turn, ..Base::default() };
    let mut pack: Option<Pack> = None;
    let mut room = MAX_TURN_CONTENT_BYTES;
    let blind = scan::walk(sandbox, filter, deadline, &mut |folder, name, mut entry| {
        entry.fresh = entry.ctime > now_ns - FRESH;
        if entry.kind() == Kind::File && entry.size <= MAX_DIFFED_FILE_BYTES && entry.size <= room {
            let older = older.get_or_insert_with(|| last(sandbox));
            let known = older.get(&entry.path).filter(|old| !old.fresh && old.looks_like(&entry));
            entry.kept_at = known.and_then(|old| old.kept_at);
            if entry.kept_at.is_none()
                // What cannot be read shows when it has changed.
                && let Ok(Some(content)) = scan::read(folder, name, entry.size)
                && content.len() as u64 == entry.size
            {
                let pack = match &mut pack {
                    Some(pack) => pack,
                    none => none.insert(Pack::open(sandbox)?),
                };
                entry.kept_at = pack.append(&content)?;
            }
            if entry.kept_at.is_some() {
                room -= entry.size;
            }
        }
        base.entries.push(entry);
        Ok(())
    })?;
    if let Some(pack) = pack {
        pack.finish()?;
    }
    base.hidden = blind.hidden;
    if base.entries.is_empty() && base.hidden.is_empty() {
        return match fs::remove_file(sandbox.join(INDEX)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        };
    }
    put(sandbox, INDEX, &base.encode_to_vec())?;
    Ok(())
}

/// The files of the last turn's base. One that cannot be read only saves nothing.
fn last(sandbox: &Path) -> HashMap<Vec<u8>, Entry> {
    let entries = load(sandbox).ok().flatten().map(|base| base.entries).unwrap_or_default();
    entries.into_iter().map(|entry| (entry.path.clone(), entry)).collect()
}

/// The pack while it is added to.
struct Pack {
    file: io::BufWriter<File>,
    end: u64,
}

impl Pack {
    fn open(sandbox: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(sandbox.join(PACK))?;
        let end = file.metadata()?.len();
        Ok(Self {
            file: io::BufWriter::new(file),
            end,
        })
    }

    /// Where it is, if there was room.
    fn append(&mut self, content: &[u8]) -> io::Result<Option<u64>> {
        if self.end + content.len() as u64 > MAX_PACK_BYTES {
            return Ok(None);
        }
        self.file.write_all(content)?;
        let at = self.end;
        self.end += content.len() as u64;
        Ok(Some(at))
    }

    fn finish(mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The contents of a base.
pub(super) struct Contents(Option<File>);

impl Contents {
    pub(super) fn open(sandbox: &Path) -> io::Result<Self> {
        match File::open(sandbox.join(PACK)) {
            Ok(file) => Ok(Self(Some(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }

    /// What an entry of the base had in it; `None` where that was not kept.
    pub(super) fn of(&self, entry: &Entry) -> io::Result<Option<Vec<u8>>> {
        let (Some(file), Some(at)) = (&self.0, entry.kept_at) else {
            return Ok(None);
        };
        // Kept ones are small.
        let mut bytes = vec![0; entry.size as usize];
        file.read_exact_at(&mut bytes, at)?;
        Ok(Some(bytes))
    }
}
