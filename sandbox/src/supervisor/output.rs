//! Keeps what a step writes: pipes in, capped files out.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use rustix::pipe::PipeFlags;

use crate::{STDERR_LIMIT, STDOUT_HEAD_LIMIT, STDOUT_TAIL_LIMIT, layout::Layout};

/// One read: the capacity of a pipe.
pub const CHUNK: usize = 64 * 1024;
/// Most that is read from one pipe before others get their turn.
const BURST: usize = 16 * CHUNK;
/// Chunks that arrive within this many milliseconds share one entry: 100 entries (1.6 KB) a second at most.
const TIMES_RESOLUTION_MS: u64 = 10;
/// Arrival times beyond this are not kept; that is three hours of output without a pause.
const TIMES_LIMIT: u64 = 16 * 1024 * 1024;

/// The reading end of a pipe that a step writes to.
pub struct Source(OwnedFd);

/// What one burst of reading brought.
#[derive(PartialEq, Eq)]
pub enum Burst {
    /// Nothing more for now, or it is the others' turn.
    Open,
    /// Nobody can write any more.
    Ended,
}

/// A pipe; the reading end never blocks.
pub fn pipe() -> io::Result<(Source, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((Source(read), write))
}

impl Source {
    /// Hands what is there to `take`.
    pub fn read(&self, buffer: &mut [u8], mut take: impl FnMut(&[u8])) -> Burst {
        let mut total = 0;
        while total < BURST {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(0) => return Burst::Ended,
                Ok(n) => {
                    take(&buffer[..n]);
                    total += n;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Burst::Open,
                Err(_) => return Burst::Ended,
            }
        }
        Burst::Open
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The files of one step's output.
pub struct Sink {
    /// `<sandbox>/<step>.stdout` and so on.
    layout: Layout,
    step: String,
    stdout: Option<File>,
    stdout_bytes: u64,
    /// The last bytes beyond the head, while there are any.
    tail: VecDeque<u8>,
    tail_file: Option<File>,
    times: Option<File>,
    times_bytes: u64,
    /// The entry that may still grow: (end of the chunk, time of its first byte).
    open_time: Option<(u64, u64)>,
    stderr: Option<File>,
    stderr_left: u64,
    /// The first failure to keep something.
    pub error: Option<String>,
}

impl Sink {
    /// Makes no file yet.
    pub fn new(layout: &Layout, step: &str) -> Self {
        Self {
            layout: layout.clone(),
            step: step.to_owned(),
            stdout: None,
            stdout_bytes: 0,
            tail: VecDeque::new(),
            tail_file: None,
            times: None,
            times_bytes: 0,
            open_time: None,
            stderr: None,
            stderr_left: STDERR_LIMIT,
            error: None,
        }
    }

    /// How many bytes of stderr were kept.
    pub fn stderr_bytes(&self) -> u64 {
        STDERR_LIMIT - self.stderr_left
    }

    /// How many bytes stdout had in all.
    pub fn stdout_bytes(&self) -> u64 {
        self.stdout_bytes
    }

    /// Keeps a chunk of stdout.
    pub fn stdout(&mut self, chunk: &[u8], now_ms: u64) {
        let head = STDOUT_HEAD_LIMIT.saturating_sub(self.stdout_bytes).min(chunk.len() as u64) as usize;
        let (head, rest) = chunk.split_at(head);
        self.keep("stdout", head, |s| &mut s.stdout);
        // Bytes of the head's end belong to the tail too, if there is one: it is the last bytes of stdout, whatever the head holds.
        if !rest.is_empty() || self.stdout_bytes + chunk.len() as u64 > STDOUT_HEAD_LIMIT - STDOUT_TAIL_LIMIT as u64 {
            let keep = &chunk[chunk.len().saturating_sub(STDOUT_TAIL_LIMIT)..];
            let excess = (self.tail.len() + keep.len()).saturating_sub(STDOUT_TAIL_LIMIT);
            self.tail.drain(..excess);
            self.tail.extend(keep);
        }
        self.stdout_bytes += chunk.len() as u64;
        match &mut self.open_time {
            Some((end, since)) if now_ms < *since + TIMES_RESOLUTION_MS => *end = self.stdout_bytes,
            _ => {
                self.flush_time();
                self.open_time = Some((self.stdout_bytes, now_ms));
            }
        }
    }

    /// Keeps a chunk of stderr.
    pub fn stderr(&mut self, chunk: &[u8]) {
        let kept = self.stderr_left.min(chunk.len() as u64) as usize;
        self.stderr_left -= kept as u64;
        self.keep("stderr", &chunk[..kept], |s| &mut s.stderr);
    }

    fn flush_time(&mut self) {
        if let Some((end, since)) = self.open_time.take()
            && self.times_bytes < TIMES_LIMIT
        {
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&end.to_le_bytes());
            entry[8..].copy_from_slice(&since.to_le_bytes());
            self.times_bytes += 16;
            self.keep("stdout.times", &entry, |s| &mut s.times);
        }
    }

    /// Completes the files; says whether there is a tail.
    pub fn finish(&mut self) -> bool {
        self.flush_time();
        if self.stdout_bytes <= STDOUT_HEAD_LIMIT {
            return false;
        }
        let tail = Vec::from(std::mem::take(&mut self.tail));
        self.keep("stdout.tail", &tail, |s| &mut s.tail_file);
        true
    }

    /// Appends to a file, which is made with its first byte.
    fn keep(&mut self, kind: &str, bytes: &[u8], slot: impl FnOnce(&mut Self) -> &mut Option<File>) {
        if bytes.is_empty() {
            return;
        }
        let path = self.layout.output(&self.step, kind);
        let file = slot(self);
        let write = || -> io::Result<()> {
            let file = match file {
                Some(file) => file,
                None => file.insert(OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?),
            };
            file.write_all(bytes)
        };
        // A full disk must not stop the agent; that its evidence has a hole is said at the end.
        if let Err(e) = write() {
            self.error.get_or_insert_with(|| e.to_string());
        }
    }
}
