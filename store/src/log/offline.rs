//! Reading a log that nobody runs on: for the commands that look into a data folder. Nothing is changed, a torn tail is only counted.

use std::path::Path;

use super::error::{BoxError, LogError};
use super::file::take_lock;
use super::recover::{Reader, Recovery};
use super::{RecordRef, Replay};

/// What a check of a log found.
#[derive(Debug)]
pub struct Report {
    /// What is whole, up to the problem if there is one. All segments are read; `snapshot` is the newest intact one.
    pub whole: Recovery,
    /// The first damage ([`LogError::Corrupt`]), newer level ([`LogError::NewerFormat`]) or gap ([`LogError::Missing`]). None: the
    /// log opens.
    pub problem: Option<LogError>,
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
    Ok(Report {
        whole: reader.recovery,
        problem,
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
