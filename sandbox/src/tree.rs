//! Copies a tree of files: bases are made from sandboxes by it, and sandboxes from bases where there is no overlayfs.
//!
//! What is copied was written by programs that nobody vouches for: no symlink is followed, no pipe is opened, and everything is bounded.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::{CStr, CString},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RawMode, Stat, Timespec, Timestamps, Uid};

/// Folders within folders; each holds two descriptors open. Deeper trees exist only to break programs.
const MOST_DEPTH: usize = 128;
/// What must stay free on the disk: sandboxes of others are written to it too.
const KEEP_FREE_BYTES: u64 = 2 << 30;
/// After this many bytes it is looked again whether the disk has room.
const LOOK_AFTER_BYTES: u64 = 64 << 20;

/// What a copy may come to, over all calls that share it; and how far it has got.
pub struct Budget<'a> {
    /// Bytes of files that may still be copied.
    pub bytes: u64,
    /// Files, folders and links that may still be made.
    pub entries: u64,
    /// Once it is set, copying ends with an error.
    pub cancelled: &'a AtomicBool,
    look_at: u64,
}

impl<'a> Budget<'a> {
    /// Nothing is copied yet.
    pub fn new(bytes: u64, entries: u64, cancelled: &'a AtomicBool) -> Self {
        Self {
            bytes,
            entries,
            cancelled,
            look_at: u64::MAX,
        }
    }

    fn entry(&mut self) -> io::Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it is not wanted any more"));
        }
        self.entries = self.entries.checked_sub(1).ok_or_else(|| refused("there are too many files"))?;
        Ok(())
    }

    fn room(&mut self, target: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| refused("it is too big"))?;
        if self.bytes <= self.look_at {
            let disk = rustix::fs::fstatvfs(target)?;
            if disk.f_bavail.saturating_mul(disk.f_frsize) < KEEP_FREE_BYTES.saturating_add(bytes) {
                return Err(io::Error::new(io::ErrorKind::StorageFull, "the disk has too little room"));
            }
            self.look_at = self.bytes.saturating_sub(LOOK_AFTER_BYTES);
        }
        Ok(())
    }
}

fn refused(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, reason)
}

/// Copies what is in the folder `from` into the folder `to`, and the mode, owner and time of `from` itself. Hard links stay links; sockets and
/// devices are left out, and so is what `without` names, relative to `from`.
pub fn copy(from: &Path, to: &Path, without: &BTreeSet<PathBuf>, budget: &mut Budget<'_>) -> io::Result<()> {
    let (from, to) = (folder(rustix::fs::CWD, from)?, folder(rustix::fs::CWD, to)?);
    let stat = rustix::fs::fstat(&from)?;
    let mut copier = Copier {
        top: to.as_fd(),
        without,
        links: HashMap::new(),
        path: PathBuf::new(),
        own: (rustix::process::geteuid(), rustix::process::getegid()),
        budget,
    };
    copier.folder(&from, &to, 0)?;
    copier.finish(to.as_fd(), &stat)
}

struct Copier<'a, 'b> {
    top: BorrowedFd<'a>,
    without: &'a BTreeSet<PathBuf>,
    /// Where the first name of a file with several is, below the top.
    links: HashMap<(u64, u64), PathBuf>,
    /// Of what is being copied, below the top.
    path: PathBuf,
    /// Who we are: what we make is ours already.
    own: (Uid, Gid),
    budget: &'a mut Budget<'b>,
}

impl Copier<'_, '_> {
    fn folder(&mut self, from: &OwnedFd, to: &OwnedFd, depth: usize) -> io::Result<()> {
        if depth > MOST_DEPTH {
            return Err(refused("its folders are too deep"));
        }
        // All names first: the listing holds a descriptor of its own.
        let names = names(from)?;
        for name in names {
            self.path.push(std::ffi::OsStr::from_bytes(name.to_bytes()));
            if !self.without.contains(&self.path) {
                self.entry(from, to, &name, depth)
                    .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", self.path.display())))?;
            }
            self.path.pop();
        }
        Ok(())
    }

    fn entry(&mut self, from: &OwnedFd, to: &OwnedFd, name: &CStr, depth: usize) -> io::Result<()> {
        self.budget.entry()?;
        let stat = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                rustix::fs::mkdirat(to, name, Mode::RWXU)?;
                let (inner_from, inner_to) = (folder(from, name)?, folder(to, name)?);
                // Said once, for the innermost.
                self.folder(&inner_from, &inner_to, depth + 1)?;
                self.finish(inner_to.as_fd(), &stat)
            }
            FileType::RegularFile => {
                let several = (stat.st_nlink > 1).then_some((stat.st_dev, stat.st_ino));
                if let Some(first) = several.and_then(|file| self.links.get(&file)) {
                    return Ok(rustix::fs::linkat(self.top, first, to, name, AtFlags::empty())?);
                }
                self.file(from, to, name, &stat)?;
                if let Some(file) = several {
                    self.links.insert(file, self.path.clone());
                }
                Ok(())
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(&target, to, name)?;
                if let Some((uid, gid)) = self.owner(&stat) {
                    rustix::fs::chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
                }
                Ok(())
            }
            FileType::Fifo => Ok(rustix::fs::mknodat(to, name, FileType::Fifo, mode(&stat), 0)?),
            // A socket without its process is of no use, and devices are no agent's business.
            _ => Ok(()),
        }
    }

    fn file(&mut self, from: &OwnedFd, to: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
        let size = stat.st_size as u64;
        self.budget.room(self.top, size)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let source = File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut target = File::from(rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
        // Within the kernel, and by reference where the file system can (`copy_file_range`).
        io::copy(&mut source.take(size), &mut target)?;
        self.finish(target.as_fd(), stat)
    }

    /// Owner before mode, which it would change; time last.
    fn finish(&self, made: BorrowedFd<'_>, stat: &Stat) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner(stat) {
            rustix::fs::fchown(made, Some(uid), Some(gid))?;
        }
        rustix::fs::fchmod(made, mode(stat))?;
        let time = Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: stat.st_mtime_nsec as _,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        Ok(rustix::fs::futimens(made, &times)?)
    }

    /// Who is to own it, where that is not who made it. Only root can give files away, and only root's sandboxes have those of others.
    fn owner(&self, stat: &Stat) -> Option<(Uid, Gid)> {
        let owner = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        (self.own.0.is_root() && owner != self.own).then_some(owner)
    }
}

fn mode(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode as RawMode & 0o7777)
}

fn folder(parent: impl AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

fn names(folder: &OwnedFd) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        fs,
        os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_copy_is_as_its_original() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        fs::create_dir_all(from.join("deep/er")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("plain"), "text").unwrap();
        fs::write(from.join("deep/script"), "#!/bin/sh").unwrap();
        fs::write(from.join("secret"), "key").unwrap();
        fs::hard_link(from.join("plain"), from.join("deep/er/again")).unwrap();
        symlink("/etc/passwd", from.join("outside")).unwrap();
        symlink("nowhere", from.join("deep/dangling")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, from.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
        set_mode(&from.join("deep/script"), 0o4755);
        set_mode(&from.join("deep/er"), 0o500);
        set_mode(&from, 0o711);
        let old = fs::File::open(from.join("plain")).unwrap();
        old.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_500))
            .unwrap();
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            std::os::unix::fs::lchown(from.join("outside"), Some(1234), Some(5678)).unwrap();
            std::os::unix::fs::chown(from.join("deep/script"), Some(1234), None).unwrap();
            set_mode(&from.join("deep/script"), 0o4755);
        }
        let without = BTreeSet::from([PathBuf::from("secret")]);
        let cancelled = AtomicBool::new(false);
        copy(&from, &to, &without, &mut Budget::new(1 << 20, 100, &cancelled)).unwrap();
        for path in [
            "",
            "plain",
            "deep",
            "deep/script",
            "deep/er",
            "deep/er/again",
            "outside",
            "deep/dangling",
            "pipe",
        ] {
            let (a, b) = (
                from.join(path).symlink_metadata().unwrap(),
                to.join(path).symlink_metadata().unwrap(),
            );
            let facts = |m: &fs::Metadata| (m.mode(), m.uid(), m.gid(), m.nlink());
            assert_eq!(facts(&a), facts(&b), "{path:?}");
            if !a.is_symlink() && !a.file_type().is_fifo() {
                assert_eq!((a.mtime(), a.mtime_nsec()), (b.mtime(), b.mtime_nsec()), "{path:?}");
            }
            if a.is_file() {
                assert_eq!(fs::read(from.join(path)).unwrap(), fs::read(to.join(path)).unwrap());
            }
            if a.is_symlink() {
                assert_eq!(fs::read_link(from.join(path)).unwrap(), fs::read_link(to.join(path)).unwrap());
            }
        }
        assert_eq!(
            to.join("plain").metadata().unwrap().ino(),
            to.join("deep/er/again").metadata().unwrap().ino()
        );
        for path in ["secret", "socket"] {
            assert!(!to.join(path).exists(), "{path}");
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        fn check(prepare: impl Fn(&Path), bytes: u64, entries: u64, cancelled: bool, reason: Option<&str>) {
            let root = tempfile::tempdir().unwrap();
            let (from, to) = (root.path().join("from"), root.path().join("to"));
            fs::create_dir(&from).unwrap();
            fs::create_dir(&to).unwrap();
            prepare(&from);
            let cancelled = AtomicBool::new(cancelled);
            let result = copy(&from, &to, &BTreeSet::new(), &mut Budget::new(bytes, entries, &cancelled));
            let told = result.err().map(|e| e.to_string());
            assert!(
                reason.map_or(told.is_none(), |reason| told.as_deref().is_some_and(|told| told.contains(reason))),
                "{told:?}, not {reason:?}"
            );
        }
        let three = |from: &Path| ["a", "b", "c"].iter().for_each(|name| fs::write(from.join(name), "1234").unwrap());
        check(three, 12, 3, false, None);
        check(three, 11, 3, false, Some("it is too big"));
        check(three, 12, 2, false, Some("there are too many files"));
        check(three, 12, 3, true, Some("it is not wanted any more"));
        // A hole counts as much as it claims.
        let hole = |from: &Path| fs::File::create(from.join("hole")).unwrap().set_len(1 << 40).unwrap();
        check(hole, 1 << 30, 3, false, Some("it is too big"));
        let deep = |levels: usize| move |from: &Path| fs::create_dir_all(from.join("d/".repeat(levels))).unwrap();
        check(deep(MOST_DEPTH), 0, 1_000, false, None);
        check(deep(MOST_DEPTH + 1), 0, 1_000, false, Some("its folders are too deep"));
    }
}
