//! What commands do with a log that nobody runs on. Reading changes nothing, a torn tail is only counted.

use std::path::Path;

use super::error::{BoxError, LogError};
use super::file::{FileLog, LogOptions, take_lock};
use super::frame::FORMAT_LEVEL;
use super::recover::{Reader, Recovery};
use super::{RecordRef, Replay};

/// What a check of a log found.
#[derive(Debug)]
pub struct Report {
    /// What is whole, up to the problem if there is one. All segments are read; `snapshot` is the newest intact one.
    pub whole: Recovery,
    /// The first damage ([`LogError::Corrupt`]), newer level ([`LogError::NewerFormat`]) or gap ([`LogError::Missing`]).
    pub problem: Option<LogError>,
    /// Whether the log can be opened. It can in spite of a problem, where a snapshot reflects what is damaged.
    pub opens: bool,
}

/// Checks every segment and every snapshot of the log in `dir`. An error means that it could not be checked: it is in use, or
/// unreadable.
pub fn verify(dir: &Path) -> Result<Report, LogError> {
    let _lock = take_lock(dir)?;
    let mut reader = Reader::new();
    let read = reader.read_all(dir, &mut |_| Ok(())).map(|_| ());
    let problem = match read.and_then(|()| reader.check_snapshots(dir)) {
        Ok(()) => None,
        Err(problem @ (LogError::Corrupt { .. } | LogError::NewerFormat { .. } | LogError::Missing { .. })) => Some(problem),
        Err(error) => return Err(error),
    };
    let opens = match &problem {
        None => true,
        Some(LogError::Corrupt { .. }) => Reader::new().read_tail(dir, &mut |_| Ok(())).is_ok(),
        Some(_) => false,
    };
    Ok(Report {
        whole: reader.recovery,
        problem,
        opens,
    })
}

/// Hands every whole record that is still in `dir` to `visit`, in order, with its position; also those that a snapshot reflects.
pub fn dump(dir: &Path, mut visit: impl FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<Recovery, LogError> {
    let _lock = take_lock(dir)?;
    let mut reader = Reader::new();
    reader.read_all(dir, &mut |replay| match replay {
        Replay::Record(position, record) => visit(position, record),
        Replay::Snapshot(_) => Ok(()),
    })?;
    Ok(reader.recovery)
}

/// Hands `visit` what opening would: the newest intact snapshot, and every record behind it.
pub fn replay(dir: &Path, mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>) -> Result<Recovery, LogError> {
    let _lock = take_lock(dir)?;
    let mut reader = Reader::new();
    reader.read_tail(dir, &mut visit)?;
    Ok(reader.recovery)
}

/// Which format level a log was written at, and which it is written at from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finalized {
    /// Before.
    pub from: u16,
    /// From now on; the same where there was nothing to do.
    pub to: u16,
}

/// Has the log in `dir` written at the newest level that this version knows, from now on and durably. There is no way back: versions
/// that do not know the level refuse the log from then on. A log of a newer level is refused, untouched.
pub fn finalize(dir: &Path) -> Result<Finalized, LogError> {
    std::fs::metadata(dir).map_err(LogError::io("find", dir))?;
    let (mut log, recovery) = FileLog::open(dir, LogOptions::default(), |_| Ok(()))?;
    log.raise_level(FORMAT_LEVEL)?;
    Ok(Finalized {
        from: recovery.level,
        to: FORMAT_LEVEL,
    })
}
