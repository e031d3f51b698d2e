//! The executor's hands in `home` and `workspace`: never follows a symlink out of them, never hangs on a pipe that the agent has put there.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Component, Path},
};

use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt, Permissions, PermissionsExt};
use rustix::fs::{Gid, Mode, OFlags, Uid};

use crate::Base;

/// The name of a base folder within the sandbox's.
fn folder_name(base: Base) -> &'static str {
    match base {
        Base::Home => "home",
        Base::Workspace => "workspace",
    }
}

/// Opens a base folder; a symlink in its place is an error.
fn open(sandbox: &Path, base: Base) -> io::Result<Dir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = rustix::fs::open(sandbox, flags, Mode::empty())?;
    let folder = rustix::fs::openat(parent, folder_name(base), flags, Mode::empty())?;
    Ok(Dir::from_std_file(File::from(folder)))
}

/// Refuses paths that are absolute, empty or climb.
pub fn relative(path: &str) -> io::Result<&Path> {
    let path = Path::new(path);
    let plain = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if plain && path.file_name().is_some() {
        Ok(path)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path must be relative and stay below its base",
        ))
    }
}

/// Not waiting is for pipes: opening one that nobody reads fails instead of hanging.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    options
}

/// User and group.
pub type Owner = (u32, u32);

/// Gives what was just made to whom it is for.
fn give(file: impl AsFd, owner: Option<Owner>) -> io::Result<()> {
    let Some((user, group)) = owner else { return Ok(()) };
    Ok(rustix::fs::fchown(file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?)
}

/// Writes one file, making folders. Mode 0644, or 0600 if `private`. All that is made is `owner`'s, where there is one.
pub fn write(sandbox: &Path, base: Base, path: &str, bytes: &[u8], private: bool, owner: Option<Owner>) -> io::Result<()> {
    let folder = open(sandbox, base)?;
    let path = relative(path)?;
    make_folders(&folder, path, owner)?;
    let mode = if private { 0o600 } else { 0o644 };
    // Not truncated before it is known to be a file of the right mode.
    let mut file = folder.open_with(path, options().write(true).create(true).mode(mode))?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it exists and is not a regular file"));
    }
    file.set_permissions(Permissions::from_mode(mode))?;
    give(&file, owner)?;
    file.set_len(0)?;
    file.write_all(bytes)
}

fn make_folders(base: &Dir, path: &Path, owner: Option<Owner>) -> io::Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let mut missing = Vec::new();
    for folder in parent.ancestors().filter(|f| !f.as_os_str().is_empty()) {
        if base.metadata(folder).is_ok_and(|m| m.is_dir()) {
            break;
        }
        missing.push(folder);
    }
    for folder in missing.into_iter().rev() {
        base.create_dir(folder)?;
        base.set_permissions(folder, Permissions::from_mode(0o755))?;
        give(base.open_with(folder, options().read(true))?.as_fd(), owner)?;
    }
    Ok(())
}

/// At most `limit` bytes of a regular file; `None` if there is none.
pub fn read(sandbox: &Path, base: Base, path: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let opened = open(sandbox, base).and_then(|folder| folder.open_with(relative(path)?, options().read(true)));
    let file = match opened {
        Ok(file) => file,
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory
            ) =>
        {
            return Ok(None);
        }
        // A socket in its place.
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(e) => return Err(e),
    };
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Removes a file (or a symlink, never what it points to). Fine when it is not there.
pub fn remove(sandbox: &Path, base: Base, path: &str) -> io::Result<()> {
    match open(sandbox, base).and_then(|folder| folder.remove_file(relative(path)?)) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(()),
        other => other,
    }
}

/// Makes the workspace and the home again where they are not folders, and opens them to their owner where they are closed.
pub fn ensure_workspace(sandbox: &Path, owner: Option<Owner>) -> io::Result<()> {
    [Base::Workspace, Base::Home]
        .into_iter()
        .try_for_each(|base| ensure(&sandbox.join(folder_name(base)), owner))
}

fn ensure(folder: &Path, owner: Option<Owner>) -> io::Result<()> {
    const MODE: u32 = 0o755;
    let made = match folder.symlink_metadata() {
        Ok(m) if m.is_dir() && m.permissions().mode() & 0o700 == 0o700 => return Ok(()),
        Ok(m) if m.is_dir() => false,
        Ok(_) => {
            std::fs::remove_file(folder)?;
            true
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => true,
        Err(e) => return Err(e),
    };
    if made {
        std::fs::create_dir(folder)?;
    }
    // Opened without the right to read, so that it may be closed to its owner, and never through a link that somebody puts there meanwhile.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = File::from(rustix::fs::open(folder, flags, Mode::empty())?);
    let by_descriptor = format!("/proc/self/fd/{}", opened.as_raw_fd());
    std::fs::set_permissions(&by_descriptor, std::fs::Permissions::from_mode(MODE))?;
    match (made, owner) {
        (true, Some((user, group))) => std::os::unix::fs::chown(&by_descriptor, Some(user), Some(group)),
        _ => Ok(()),
    }
}
