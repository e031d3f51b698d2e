//! Repairing a log that is damaged in the middle: what can still be read is kept, what cannot is laid aside, nothing is deleted.
//!
//! A repair gives up records that were acknowledged, so it happens only when a person has seen what it would cost. It is made so that a
//! crash in the middle of it leaves a log that the same repair can go on with.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::error::LogError;
use super::file::take_lock;
use super::frame::{self, FORMAT_LEVEL};
use super::recover::{Reader, load};
use super::segment::{self, SEGMENT_BYTES, SPARES};
use super::snapshot;
use crate::disk;

/// Folders with what repairs laid aside. More of them mean that the disk, not the log, needs repair.
const MAX_ASIDE: u32 = 1000;

/// What keeps a log from being opened, and what a repair would make of it.
#[derive(Debug)]
pub struct Damage {
    /// [`LogError::Corrupt`], or [`LogError::Missing`] where the log ends before a snapshot that it could go on from.
    pub problem: LogError,
    /// Position of the last record that a repaired log would have, or whose effect its snapshot would have.
    pub kept: u64,
    /// Position of the last record that there is a trace of. There may have been more behind it.
    pub last_known: u64,
    /// How to repair it.
    plan: Plan,
}

impl Damage {
    /// Records that a repair would lose, as far as there is a trace of them.
    pub fn lost(&self) -> u64 {
        self.last_known - self.kept
    }
}

#[derive(Debug)]
struct Plan {
    /// Segments that go whole, by first position.
    whole: Vec<u64>,
    /// A segment that is cut, and at which byte.
    cut: Option<(u64, u64)>,
    /// Snapshots that go.
    snapshots: Vec<u64>,
    /// The segment that must be made, so that the log has one to go on with.
    make: Option<u64>,
    level: u16,
}

/// Tells what keeps the log in `dir` from being opened; None: nothing does. Changes nothing.
pub fn examine(dir: &Path) -> Result<Option<Damage>, LogError> {
    let _lock = take_lock(dir)?;
    find(dir)
}

/// Cuts the log in `dir` to what can be read before the damage, and lays aside the rest, as it was, in a new folder beside the
/// segments, which is returned. None: there was no damage.
pub fn repair(dir: &Path) -> Result<Option<(Damage, PathBuf)>, LogError> {
    let _lock = take_lock(dir)?;
    let Some(damage) = find(dir)? else {
        return Ok(None);
    };
    let aside = free_folder(dir).map_err(LogError::io("lay something aside in", dir))?;
    carry_out(dir, &aside, &damage.plan).map_err(LogError::io("repair the log in", dir))?;
    Ok(Some((damage, aside)))
}

fn find(dir: &Path) -> Result<Option<Damage>, LogError> {
    let mut reader = Reader::new();
    let (problem, path, offset) = match reader.read_tail(dir, &mut |_| Ok(())) {
        Ok(_) => return Ok(None),
        Err(LogError::Corrupt { segment, offset, reason }) => {
            let path = segment.clone();
            (LogError::Corrupt { segment, offset, reason }, path, offset)
        }
        // The snapshot was taken up, and the segments end before it. Without it, there is nothing to go on from.
        Err(problem @ LogError::Missing { .. }) if reader.recovery.snapshot.is_some() => (problem, PathBuf::new(), 0),
        Err(other) => return Err(other),
    };
    let segments = segment::list(dir).map_err(LogError::io("list the segments in", dir))?;
    let snapshots = snapshot::list(dir).map_err(LogError::io("list the snapshots in", dir))?;
    let damaged = segments.iter().position(|(_, found)| *found == path).unwrap_or(0);
    let (read, reflected) = (reader.recovery.position, reader.recovery.snapshot.unwrap_or(0));
    let kept = read.max(reflected);
    let last_known = last_trace(&segments[damaged..])?.max(kept);
    let firsts = |segments: &[(u64, PathBuf)]| segments.iter().map(|(first_position, _)| *first_position).collect::<Vec<_>>();
    let level = match reader.recovery.level {
        0 => FORMAT_LEVEL,
        level => level,
    };
    let snapshots = snapshots.into_iter().map(|(position, _)| position);
    let plan = if read < reflected {
        // Nothing that can be read goes on from the snapshot, and nothing that could be fallen back to reaches it.
        Plan {
            whole: firsts(&segments),
            cut: None,
            snapshots: snapshots.filter(|position| *position != reflected).collect(),
            make: Some(reflected + 1),
            level,
        }
    } else {
        let keeps_a_part = offset >= segment::HEADER_BYTES as u64;
        let whole = firsts(&segments[damaged + usize::from(keeps_a_part)..]);
        Plan {
            cut: keeps_a_part.then_some((segments[damaged].0, offset)),
            make: (whole.len() == segments.len()).then_some(kept + 1),
            whole,
            snapshots: snapshots.filter(|position| *position > kept).collect(),
            level,
        }
    };
    Ok(Some(Damage {
        problem,
        kept,
        last_known,
        plan,
    }))
}

/// The last position of any whole group in `segments`, wherever in a segment it lies.
fn last_trace(segments: &[(u64, PathBuf)]) -> Result<u64, LogError> {
    let (mut last, mut buffer) = (0, Vec::new());
    for (first_position, path) in segments {
        match load(path, &mut buffer) {
            Err(LogError::Corrupt { .. }) => continue,
            result => result?,
        }
        let Some(header) = buffer.first_chunk().and_then(segment::Header::read) else {
            continue;
        };
        let ours = |group: &frame::Header| group.first_position >= *first_position;
        let mut rest = &buffer[segment::HEADER_BYTES..];
        while let Some((offset, group)) = frame::Header::find(header.seed(), rest, ours) {
            rest = &rest[offset + frame::HEADER_BYTES..];
            if let Some(body) = group.body(rest) {
                last = last.max(group.first_position + u64::from(group.records) - 1);
                rest = &rest[body.len()..];
            }
        }
    }
    Ok(last)
}

fn free_folder(dir: &Path) -> io::Result<PathBuf> {
    for number in 1..=MAX_ASIDE {
        let path = dir.join(format!("damaged-{number}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => return result.and_then(|()| disk::sync_dir(dir)).map(|()| path),
        }
    }
    Err(io::Error::other(format!("there are {MAX_ASIDE} folders of earlier repairs")))
}

fn carry_out(dir: &Path, aside: &Path, plan: &Plan) -> io::Result<()> {
    let keep = |path: &Path| -> io::Result<PathBuf> { Ok(aside.join(path.file_name().ok_or(io::ErrorKind::InvalidInput)?)) };
    // Newest first, so that until the last one is gone the damage still is one in the middle.
    let whole: Vec<PathBuf> = plan.whole.iter().rev().map(|first| segment::path(dir, *first)).collect();
    let snapshots: Vec<PathBuf> = plan.snapshots.iter().map(|position| snapshot::path(dir, *position)).collect();
    // The spares hold positions that the log is going to use again.
    let spares: Vec<PathBuf> = SPARES.iter().map(|name| dir.join(name)).filter(|spare| spare.exists()).collect();

    // Everything is safe in its new place before anything leaves its old one.
    for path in whole.iter().chain(&snapshots).chain(&spares) {
        disk::step()?;
        fs::hard_link(path, keep(path)?)?;
    }
    if let Some((first_position, _)) = plan.cut {
        let path = segment::path(dir, first_position);
        let copy = keep(&path)?;
        disk::step()?;
        fs::copy(&path, &copy)?;
        fs::File::open(&copy)?.sync_all()?;
    }
    disk::step()?;
    disk::sync_dir(aside)?;

    for path in spares.iter().chain(&snapshots) {
        disk::step()?;
        fs::remove_file(path)?;
    }
    let made = plan.make.map(|first_position| segment::path(dir, first_position));
    if let Some(first_position) = plan.make {
        segment::create(dir, plan.level, first_position, SEGMENT_BYTES)?;
    }
    for path in whole.iter().filter(|path| Some(*path) != made.as_ref()) {
        disk::step()?;
        fs::remove_file(path)?;
        disk::sync_dir(dir)?;
    }
    if let Some((first_position, offset)) = plan.cut {
        disk::step()?;
        let file = OpenOptions::new().write(true).open(segment::path(dir, first_position))?;
        file.set_len(offset)?;
        file.sync_all()?;
    }
    disk::step()?;
    disk::sync_dir(dir)
}
