//! Keeps what a step writes: pipes in, capped files out.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use rustix::pipe::PipeFlags;

use crate::{STDERR_LIMIT, STDOUT_HEAD_LIMIT, STDOUT_TAIL_LIMIT, layout};

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
    stdout: File,
    stdout_bytes: u64,
    /// The last bytes beyond the head, while there are any.
    tail: VecDeque<u8>,
    times: File,
    times_bytes: u64,
    /// The entry that may still grow: (end of the chunk, time of its first byte).
    open_time: Option<(u64, u64)>,
    stderr: File,
    stderr_left: u64,
    /// The first failure to keep something.
    pub error: Option<String>,
}

impl Sink {
    /// Makes the files in the folder of the step.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let file = |name| OpenOptions::new().write(true).create_new(true).mode(0o600).open(folder.join(name));
        Ok(Self {
            stdout: file("stdout")?,
            stdout_bytes: 0,
            tail: VecDeque::new(),
            times: file("stdout.times")?,
            times_bytes: 0,
            open_time: None,
            stderr: file("stderr")?,
            stderr_left: STDERR_LIMIT,
            error: None,
        })
    }

    /// How many bytes stdout had in all.
    pub fn stdout_bytes(&self) -> u64 {
        self.stdout_bytes
    }

    /// Keeps a chunk of stdout.
    pub fn stdout(&mut self, chunk: &[u8], now_ms: u64) {
        let head = STDOUT_HEAD_LIMIT.saturating_sub(self.stdout_bytes).min(chunk.len() as u64) as usize;
        let (head, rest) = chunk.split_at(head);
        self.keep(|s| s.stdout.write_all(head));
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
        self.keep(|s| s.stderr.write_all(&chunk[..kept]));
    }

    fn flush_time(&mut self) {
        if let Some((end, since)) = self.open_time.take()
            && self.times_bytes < TIMES_LIMIT
        {
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&end.to_le_bytes());
            entry[8..].copy_from_slice(&since.to_le_bytes());
            self.times_bytes += 16;
            self.keep(|s| s.times.write_all(&entry));
        }
    }

    /// Completes the files; says whether there is a tail.
    pub fn finish(&mut self, folder: &Path) -> bool {
        self.flush_time();
        if self.stdout_bytes <= STDOUT_HEAD_LIMIT {
            return false;
        }
        let (a, b) = self.tail.as_slices();
        let tail = [a, b].concat();
        self.keep(|_| layout::create_private(&folder.join("stdout.tail"))?.write_all(&tail));
        true
    }

    fn keep(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) {
        // A full disk must not stop the agent; that its evidence has a hole is said at the end.
        if let Err(e) = write(self) {
            self.error.get_or_insert_with(|| e.to_string());
        }
    }
}
