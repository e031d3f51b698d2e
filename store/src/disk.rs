//! What the file backends share: directories that survive a power cut, and one owner at a time.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Makes the entries of `dir` durable. A new or renamed file is not, until its directory is synced.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates `dir` and its missing parents, and makes each new entry durable.
pub(crate) fn create_dir_durably(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = parent_of(dir);
    create_dir_durably(parent)?;
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    sync_dir(parent)
}

/// The directory that holds `path`; a bare name lies in the current one.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Takes the lock file at `path` (creating it), or `None` where somebody else holds it. Held until the file is dropped; the
/// kernel drops it with the process, however that ends.
pub(crate) fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The files of `dir` whose name, rid of what `digits` takes away, is a position of 20 digits; in order. Other files are none of
/// our business.
pub(crate) fn list_numbered(dir: &Path, digits: impl Fn(&str) -> Option<&str>) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(&digits).filter(|digits| digits.len() == 20);
        if let Some(number) = number.and_then(|digits| digits.parse().ok()) {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Removes a file that need not be there.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
thread_local! {
    /// How many more steps succeed before one fails, as by a crash.
    static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

/// Stands before each change of a folder, so that tests can crash between any two. Does nothing in a product.
#[cfg(not(test))]
#[inline]
pub(crate) fn step() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) fn step() -> io::Result<()> {
    STEPS.with(|steps| match steps.get() {
        u64::MAX => Ok(()),
        0 => Err(io::Error::other("a crash that was asked for")),
        left => {
            steps.set(left - 1);
            Ok(())
        }
    })
}

/// Lets `steps` more steps of this thread succeed; `u64::MAX` lets all.
#[cfg(test)]
pub(crate) fn crash_after(steps: u64) {
    STEPS.with(|left| left.set(steps));
}

/// A folder for tests that sync thousands of times and cut no power: in memory, where the system has such a place.
#[cfg(test)]
pub(crate) fn scratch() -> tempfile::TempDir {
    let memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    memory.unwrap_or_else(|error| panic!("no temporary folder: {error}"))
}
