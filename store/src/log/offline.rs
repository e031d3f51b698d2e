//! Reading a log that nobody runs on: for the commands `log verify` and `log dump`. Nothing is changed, a torn tail is only counted.

use std::path::Path;

use super::RecordRef;
use super::error::{BoxError, LogError};
use super::file::take_lock;
use super::recover::{Reader, Recovery};

/// What a check of a log found.
#[derive(Debug)]
pub struct Report {
    /// What is whole, up to the problem if there is one.
    pub whole: Recovery,
    /// The first damage ([`LogError::Corrupt`]) or newer level ([`LogError::NewerFormat`]). None: the log opens.
    pub problem: Option<LogError>,
}

/// Checks the whole log in `dir`. An error means that it could not be checked: it is in use, or unreadable.
pub fn verify(dir: &Path) -> Result<Report, LogError> {
    let _lock = take_lock(dir)?;
    let mut reader = Reader::new();
    let problem = match reader.read(dir, &mut |_, _| Ok(())) {
        Ok(_) => None,
        Err(problem @ (LogError::Corrupt { .. } | LogError::NewerFormat { .. })) => Some(problem),
        Err(error) => return Err(error),
    };
    Ok(Report {
        whole: reader.recovery,
        problem,
    })
}

/// Hands every whole record in `dir` to `visit`, in order, with its position.
pub fn dump(dir: &Path, mut visit: impl FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>) -> Result<Recovery, LogError> {
    let _lock = take_lock(dir)?;
    let mut reader = Reader::new();
    reader.read(dir, &mut visit)?;
    Ok(reader.recovery)
}
