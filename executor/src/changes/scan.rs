//! A walk over a workspace from the host's side. It follows no symlink, enters no excluded folder, never waits on a pipe, and ends.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use evalgrid_domain::changes::{ChangeFilter, Seen};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat},
    io::Errno,
};
use tokio::time::Instant;

/// Names that one scan reads. More take seconds each turn, and tens of megabytes of memory; such a folder belongs into `diff.ignore`.
const MAX_NAMES: usize = 300_000;
/// Folders in folders; each holds a file descriptor open.
const MAX_DEPTH: usize = 64;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum Kind {
    File = 0,
    Symlink = 1,
    /// A pipe, a socket, a device.
    Other = 2,
}

/// A file as it was found. As a message, because it is kept beside the sandbox.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Entry {
    /// Below the workspace.
    #[prost(bytes = "vec", tag = "1")]
    pub(super) path: Vec<u8>,
    #[prost(enumeration = "Kind", tag = "2")]
    pub(super) kind: i32,
    /// Permissions.
    #[prost(uint32, tag = "3")]
    pub(super) mode: u32,
    #[prost(uint64, tag = "4")]
    pub(super) size: u64,
    /// Nanoseconds since the epoch.
    #[prost(int64, tag = "5")]
    pub(super) mtime: i64,
    /// Nanoseconds since the epoch. Nobody can set it back without setting the clock.
    #[prost(int64, tag = "6")]
    pub(super) ctime: i64,
    #[prost(uint64, tag = "7")]
    pub(super) inode: u64,
    /// Of a symlink.
    #[prost(bytes = "vec", tag = "8")]
    pub(super) target: Vec<u8>,
    /// Where its content is kept.
    #[prost(uint64, optional, tag = "9")]
    pub(super) kept_at: Option<u64>,
    /// It was changed just before it was found: a change within the same tick of the clock would not show in its times.
    #[prost(bool, tag = "10")]
    pub(super) fresh: bool,
}

impl Entry {
    /// Nothing of it is another, as far as the file system tells.
    pub(super) fn looks_like(&self, other: &Entry) -> bool {
        (self.kind, self.mode, self.size, self.mtime, self.ctime, self.inode, &self.target)
            == (
                other.kind,
                other.mode,
                other.size,
                other.mtime,
                other.ctime,
                other.inode,
                &other.target,
            )
    }
}

/// What a walk could not see, and other things worth telling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Blind {
    /// Folders whose content is unknown.
    pub(super) hidden: Vec<Vec<u8>>,
    /// Folders with a repository of their own.
    pub(super) nested: Vec<Vec<u8>>,
    /// The workspace is no folder.
    pub(super) gone: bool,
}

/// A workspace that cannot be looked at as a whole. The texts are for people.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScanError {
    #[error("the workspace has more than {MAX_NAMES} files; exclude what is not the agent's work with diff.ignore")]
    TooMany,
    #[error("looking at the workspace took too long")]
    TooSlow,
    #[error("the workspace could not be read: {0}")]
    Io(#[from] io::Error),
}

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

struct Frame {
    folder: OwnedFd,
    path: Vec<u8>,
    seen: Seen,
    names: Vec<(Vec<u8>, FileType)>,
}

/// What is done with each file: the folder that it is in, its name there, and what it is.
pub(super) type Visit<'a> = dyn FnMut(BorrowedFd<'_>, &[u8], Entry) -> io::Result<()> + 'a;

/// Visits every file that counts, in no particular order.
pub(super) fn walk(sandbox: &Path, filter: &ChangeFilter, deadline: Instant, visit: &mut Visit<'_>) -> Result<Blind, ScanError> {
    let mut blind = Blind::default();
    let sandbox = rustix::fs::open(sandbox, FOLDER, Mode::empty()).map_err(io::Error::from)?;
    let root = match openat(&sandbox, "workspace", FOLDER, Mode::empty()) {
        Ok(root) => root,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
            blind.gone = true;
            return Ok(blind);
        }
        Err(error) => return Err(io::Error::from(error).into()),
    };
    let mut names_left = MAX_NAMES;
    let mut stack = Vec::new();
    enter(&mut stack, root, Vec::new(), Seen::default(), &mut names_left, &mut blind)?;
    while let Some(frame) = stack.last_mut() {
        let Some((name, mut file_type)) = frame.names.pop() else {
            stack.pop();
            continue;
        };
        let path = joined(&frame.path, &name);
        let as_path = Path::new(std::ffi::OsStr::from_bytes(&path));
        let mut stat = None;
        if file_type == FileType::Unknown {
            match statat(&frame.folder, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => {
                    file_type = FileType::from_raw_mode(found.st_mode);
                    stat = Some(found);
                }
                Err(_) => continue,
            }
        }
        let seen = filter.look(as_path, file_type == FileType::Directory, frame.seen);
        if file_type == FileType::Directory {
            if !filter.enters(as_path, seen) {
                continue;
            }
            if Instant::now() > deadline {
                return Err(ScanError::TooSlow);
            }
            match openat(&frame.folder, name.as_slice(), FOLDER, Mode::empty()) {
                _ if stack.len() >= MAX_DEPTH => blind.hidden.push(path),
                Ok(folder) => enter(&mut stack, folder, path, seen, &mut names_left, &mut blind)?,
                // It has gone, or is something else by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(_) => blind.hidden.push(path),
            }
            continue;
        }
        if !seen.counts() {
            continue;
        }
        let Some(stat) = stat.or_else(|| statat(&frame.folder, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).ok()) else {
            continue;
        };
        let entry = entry(frame.folder.as_fd(), &name, path, &stat);
        visit(frame.folder.as_fd(), &name, entry)?;
    }
    Ok(blind)
}

fn joined(folder: &[u8], name: &[u8]) -> Vec<u8> {
    match folder {
        [] => name.to_vec(),
        folder => [folder, b"/", name].concat(),
    }
}

/// Reads the names of a folder and puts it on the stack.
fn enter(
    stack: &mut Vec<Frame>,
    folder: OwnedFd,
    path: Vec<u8>,
    seen: Seen,
    names_left: &mut usize,
    blind: &mut Blind,
) -> Result<(), ScanError> {
    let mut names = Vec::new();
    for found in Dir::read_from(&folder).map_err(io::Error::from)? {
        let Ok(found) = found else {
            blind.hidden.push(path.clone());
            break;
        };
        let name = found.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        *names_left = names_left.checked_sub(1).ok_or(ScanError::TooMany)?;
        if name == b".git" && !path.is_empty() && seen.counts() {
            blind.nested.push(path.clone());
        }
        names.push((name.to_vec(), found.file_type()));
    }
    stack.push(Frame { folder, path, seen, names });
    Ok(())
}

fn entry(folder: BorrowedFd<'_>, name: &[u8], path: Vec<u8>, stat: &Stat) -> Entry {
    let (kind, target) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (Kind::File, Vec::new()),
        FileType::Symlink => {
            let target = readlinkat(folder, name, Vec::new()).map(|target| target.into_bytes());
            (Kind::Symlink, target.unwrap_or_default())
        }
        _ => (Kind::Other, Vec::new()),
    };
    let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
    Entry {
        path,
        kind: kind.into(),
        mode: stat.st_mode & 0o7777,
        size: stat.st_size as u64,
        mtime: nanoseconds(stat.st_mtime, stat.st_mtime_nsec as i64),
        ctime: nanoseconds(stat.st_ctime, stat.st_ctime_nsec as i64),
        inode: stat.st_ino,
        target,
        kept_at: None,
        fresh: false,
    }
}

/// At most `limit` bytes of a regular file; `None` where there is none of that name, or more in it.
pub(super) fn read(folder: BorrowedFd<'_>, name: &[u8], limit: u64) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match openat(folder, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}
