//! The disk: a FUSE file system of one file, whose writes are volatile until the file is synced. `evalgrid-volatile-disk FOLDER MEBIBYTES`.
//!
//! A process of its own, so that a test that hangs or dies leaves nobody waiting in the kernel: when it ends, the kernel fails what waits for
//! it. It holds its content in memory and touches no file, least of all one that lies on itself.
#![allow(clippy::unwrap_used, reason = "for tests only")]

use std::{
    ffi::OsStr,
    io::{BufRead as _, Write as _},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, UNIX_EPOCH},
};

use evalgrid_powercut::{
    control::{Answer, FREEZE_LIMIT, IMAGE, Order},
    volatile::{BLOCK, Image, SECTOR},
};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use rand::{SeedableRng as _, rngs::StdRng};

/// Nothing ever changes but the content.
const FOR_EVER: Duration = Duration::from_secs(3600);
const FILE: INodeNo = INodeNo(2);

enum Power {
    On,
    /// On until a flush comes: after this many more, one that this many blocks wait for.
    Failing(u32, usize),
    /// Writes and flushes wait.
    Frozen(Vec<Waiting>),
    Off,
}

enum Waiting {
    Write(ReplyWrite),
    Sync(ReplyEmpty),
}

struct State {
    image: Image,
    power: Power,
}

#[derive(Clone)]
struct Disk(Arc<(Mutex<State>, Condvar)>);

impl Disk {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn freeze(&self, flushes: u32, blocks: usize) {
        self.with(|state| state.power = Power::Failing(flushes, blocks));
        let (state, frozen) = &*self.0;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let failing = |state: &mut State| matches!(state.power, Power::Failing(..));
        let waited = frozen.wait_timeout_while(state, FREEZE_LIMIT, failing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if failing(&mut state) {
            state.power = Power::Frozen(Vec::new());
        }
    }

    fn attributes(&self, node: INodeNo) -> FileAttr {
        let (kind, bytes) = match node {
            INodeNo::ROOT => (FileType::Directory, 0),
            _ => (FileType::RegularFile, self.with(|state| state.image.bytes() as u64)),
        };
        FileAttr {
            ino: node,
            size: bytes,
            blocks: bytes / SECTOR as u64,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        }
    }

    fn fail(&self) {
        let before = self.with(|state| std::mem::replace(&mut state.power, Power::Off));
        let Power::Frozen(waiting) = before else { return };
        for one in waiting {
            match one {
                Waiting::Write(reply) => reply.error(Errno::EIO),
                Waiting::Sync(reply) => reply.error(Errno::EIO),
            }
        }
    }

    fn obey(&self, order: &Order) -> Answer {
        match *order {
            Order::Freeze { flushes, blocks } => {
                self.freeze(flushes, blocks);
                Answer::Done
            }
            Order::Fail => {
                self.fail();
                Answer::Done
            }
            Order::Cut { seed, keep } => {
                self.fail();
                Answer::Cut(self.with(|state| {
                    state.power = Power::On;
                    state.image.cut(&mut StdRng::seed_from_u64(seed), keep)
                }))
            }
            Order::Count => Answer::Counted(self.with(|state| state.image.counts())),
        }
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match parent == INodeNo::ROOT && name == IMAGE {
            true => reply.entry(&FOR_EVER, &self.attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attributes(node));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // The kernel must not keep pages of the file, which a cut changes behind its back.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, size: u32, _: OpenFlags, _: Option<LockOwner>, reply: ReplyData) {
        self.with(|state| reply.data(state.image.read(offset as usize, size as usize)));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.with(|state| match &mut state.power {
            Power::On | Power::Failing(..) if state.image.write(offset as usize, data) => reply.written(data.len() as u32),
            Power::On | Power::Failing(..) => reply.error(Errno::ENOSPC),
            Power::Frozen(waiting) => waiting.push(Waiting::Write(reply)),
            Power::Off => reply.error(Errno::EIO),
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.with(|state| match &mut state.power {
            Power::On => {
                state.image.flush();
                reply.ok();
            }
            Power::Failing(0, blocks) if state.image.pending_blocks() >= *blocks => {
                state.power = Power::Frozen(vec![Waiting::Sync(reply)]);
                self.0.1.notify_all();
            }
            Power::Failing(left, _) => {
                *left = left.saturating_sub(1);
                state.image.flush();
                reply.ok();
            }
            Power::Frozen(waiting) => waiting.push(Waiting::Sync(reply)),
            Power::Off => reply.error(Errno::EIO),
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // FUSE's flush is the close of a descriptor, which promises nothing.
        reply.ok();
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EOPNOTSUPP);
    }
}

fn say(answer: &Answer) {
    let mut line = serde_json::to_string(answer).unwrap();
    line.push('\n');
    // Nobody listens any more once the test is gone; the end of stdin says so, too.
    let _ = std::io::stdout().write_all(line.as_bytes());
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, mebibytes] = arguments.as_slice() else {
        eprintln!("usage: evalgrid-volatile-disk FOLDER MEBIBYTES");
        return ExitCode::from(2);
    };
    let folder = PathBuf::from(folder);
    let bytes = mebibytes.parse::<usize>().unwrap() << 20;
    let disk = Disk(Arc::new((
        Mutex::new(State {
            image: Image::new(bytes),
            power: Power::On,
        }),
        Condvar::new(),
    )));
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("evalgrid-powercut".into())];
    let session = Session::new(disk.clone(), &folder, &config).and_then(Session::spawn);
    let _session = match session {
        Ok(session) => session,
        Err(error) => {
            say(&Answer::Failed(error.to_string()));
            return ExitCode::FAILURE;
        }
    };
    say(&Answer::Ready);
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        say(&disk.obey(&serde_json::from_str(&line).unwrap()));
    }
    disk.fail();
    // Without unmounting, which would wait for the loop device, and would hide from who clears up whose file that device has.
    std::process::exit(0)
}
