//! The worker's folder: one process at a time, one name for ever.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rand::Rng as _;
use rustix::fs::{FlockOperation, flock};

/// The worker's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Another worker runs on it.
    #[error("the folder {0} is in use by another worker")]
    InUse(PathBuf),
    /// It cannot be read or written.
    #[error("the folder {0}: {1}")]
    Io(PathBuf, #[source] io::Error),
}

/// The folder, locked for as long as this lives. A second process that gets the lock proves that the first is dead.
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
    /// Random, made once.
    pub worker_id: String,
    /// Random, new at each start.
    pub incarnation: String,
    /// Of the running kernel.
    pub boot_id: String,
    _lock: File,
}

impl Folder {
    /// Locks it, and makes it where it is missing.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        let failed = |error| FolderError::Io(path.to_owned(), error);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(FolderError::InUse(path.to_owned())),
            Err(error) => return Err(failed(error.into())),
        }
        Ok(Self {
            path: path.to_owned(),
            worker_id: worker_id(path).map_err(failed)?,
            incarnation: random_id(),
            boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map_err(failed)?
                .trim()
                .to_owned(),
            _lock: lock,
        })
    }
}

/// The folder's name for schedulers. It is kept together with what tells this folder from a copy of it: a copy is another worker, whose lock
/// says nothing about this one.
fn worker_id(folder: &Path) -> io::Result<String> {
    let path = folder.join("worker-id");
    let here = identity(folder)?;
    match fs::read_to_string(&path) {
        Ok(text) => {
            if let Some((id, place)) = text.trim_end().split_once(' ')
                && is_id(id)
            {
                if place == here {
                    return Ok(id.to_owned());
                }
                tracing::warn!(folder = %folder.display(), "the folder was copied from another worker's, so it gets a name of its own");
            }
            // Anything else is the rest of a start that was cut off; no scheduler has heard that name.
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let id = random_id();
    let unfinished = folder.join("worker-id.new");
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&unfinished)?;
    writeln!(file, "{id} {here}")?;
    file.sync_all()?;
    fs::rename(&unfinished, &path)?;
    File::open(folder)?.sync_all()?;
    Ok(id)
}

/// Host and inode of the folder: a copy has another inode, the copy of a whole machine another host name.
fn identity(folder: &Path) -> io::Result<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(format!("{host} {}", fs::metadata(folder)?.ino()))
}

fn random_id() -> String {
    let bytes: [u8; 16] = rand::rng().random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// catalogue 29: the name lasts, the incarnation is new with each process.
    #[test]
    fn one_owner_one_name() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        let first = Folder::open(&path).unwrap();
        assert!(is_id(&first.worker_id) && is_id(&first.incarnation) && !first.boot_id.is_empty());
        assert!(matches!(Folder::open(&path), Err(FolderError::InUse(_))));
        let id = first.worker_id.clone();
        let incarnation = first.incarnation.clone();
        drop(first);
        let second = Folder::open(&path).unwrap();
        assert_eq!(second.worker_id, id);
        assert_ne!(second.incarnation, incarnation);
        drop(second);
        // A copy of the folder is another worker.
        let copy = root.path().join("copy");
        fs::create_dir(&copy).unwrap();
        fs::copy(path.join("worker-id"), copy.join("worker-id")).unwrap();
        assert_ne!(Folder::open(&copy).unwrap().worker_id, id);
        fs::write(path.join("worker-id"), "torn").unwrap();
        assert!(is_id(&Folder::open(&path).unwrap().worker_id));
    }
}
