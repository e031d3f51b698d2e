//! One control connection. Never waits: what the other side does not take is kept up to a limit, then the connection is dropped.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use rustix::event::PollFlags;

use crate::protocol::{FrameBuffer, Reply, Request, encode};

/// Replies are below a kilobyte and asked for one at a time; whoever leaves this much unread is not listening.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// Read from one connection before others get their turn.
const BURST: usize = 1024 * 1024;

/// See the module.
pub struct Connection {
    pub id: u64,
    stream: UnixStream,
    input: FrameBuffer,
    output: Vec<u8>,
    pub broken: bool,
}

impl Connection {
    pub fn new(id: u64, stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            id,
            stream,
            input: FrameBuffer::default(),
            output: Vec::new(),
            broken: false,
        })
    }

    /// What to poll for.
    pub fn interest(&self) -> PollFlags {
        if self.output.is_empty() {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        }
    }

    /// Requests that have arrived whole.
    pub fn receive(&mut self, buffer: &mut [u8]) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut total = 0;
        while total < BURST && !self.broken {
            match self.stream.read(buffer) {
                Ok(0) => self.broken = true,
                Ok(n) => {
                    total += n;
                    self.input.push(&buffer[..n]);
                    loop {
                        match self.input.next() {
                            Ok(Some(request)) => requests.push(request),
                            Ok(None) => break,
                            Err(_) => {
                                self.broken = true;
                                break;
                            }
                        }
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.broken = true,
            }
        }
        requests
    }

    /// Queues a reply and sends what can be sent.
    pub fn reply(&mut self, reply: &Reply) {
        match encode(reply) {
            Ok(frame) if self.output.len() + frame.len() <= OUTPUT_LIMIT => self.output.extend(frame),
            _ => self.broken = true,
        }
        self.flush();
    }

    /// Sends what can be sent.
    pub fn flush(&mut self) {
        while !self.output.is_empty() && !self.broken {
            match self.stream.write(&self.output) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.broken = true,
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
