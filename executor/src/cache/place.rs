//! Finds places among folders that an agent's programs have made, without ever following a symlink.
//!
//! Each step goes from an open folder to a name in it, never by a longer path, so whoever swaps a folder for a symlink meanwhile leads nowhere.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags, RenameFlags},
    io::Errno,
};

/// Why a place cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlaceError {
    #[error("{0} is no folder")]
    NoFolder(String),
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for PlaceError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Opens a folder by its whole path, which is ours.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, FOLDER, Mode::empty())?)
}

/// The folder that a relative path lies in, and its last name. `make`: folders on the way that are missing are made; else there is none.
pub(super) fn parent(base: OwnedFd, path: &Path, make: bool) -> Result<Option<(OwnedFd, CString)>, PlaceError> {
    let wrong = || PlaceError::NoFolder(path.display().to_string());
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(CString::new(name.as_encoded_bytes()).map_err(|_| wrong())?),
            Component::CurDir => {}
            _ => return Err(wrong()),
        }
    }
    let last = names.pop().ok_or_else(wrong)?;
    let mut folder = base;
    for name in names {
        let opened = rustix::fs::openat(&folder, &name, FOLDER, Mode::empty());
        folder = match opened {
            Err(Errno::NOENT) if !make => return Ok(None),
            Err(Errno::NOENT) => {
                rustix::fs::mkdirat(&folder, &name, Mode::from_raw_mode(0o755))?;
                rustix::fs::openat(&folder, &name, FOLDER, Mode::empty())?
            }
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(PlaceError::NoFolder(name.to_string_lossy().into_owned())),
            opened => opened?,
        };
    }
    Ok(Some((folder, last)))
}

/// Opens a folder by its name in another. `None`: there is nothing of that name.
pub(super) fn folder(parent: &OwnedFd, name: &CStr) -> Result<Option<OwnedFd>, PlaceError> {
    match rustix::fs::openat(parent, name, FOLDER, Mode::empty()) {
        Ok(folder) => Ok(Some(folder)),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => Err(PlaceError::NoFolder(name.to_string_lossy().into_owned())),
        Err(error) => Err(error.into()),
    }
}

/// Makes a folder of that name, which must not be there.
pub(super) fn make(parent: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
    Ok(rustix::fs::openat(parent, name, FOLDER, Mode::empty())?)
}

/// Puts `from` in the place of `to`, both in one folder, where nothing may be.
pub(super) fn rename(parent: &OwnedFd, from: &CStr, to: &CStr) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(parent, from, parent, to, RenameFlags::NOREPLACE)?)
}

/// Removes whatever has that name: a folder with all that is in it, a symlink and not what it leads to. Fine when there is nothing.
pub(super) fn remove(parent: &OwnedFd, name: &CStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    // The folder is open, so this path is one name in it; the standard library follows no symlink below.
    let name = std::ffi::OsStr::new(name.to_str().map_err(io::Error::other)?);
    match std::fs::remove_dir_all(path_of(parent).join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A path to an open folder, whatever has become of the one that it was opened by.
pub(super) fn path_of(folder: &OwnedFd) -> PathBuf {
    // The dot, because the last part of a path that is not to be a symlink must not be this one.
    format!("/proc/self/fd/{}/.", folder.as_raw_fd()).into()
}
