//! What a supervisor and the init inside bubblewrap say to each other, over a socket pair that only they have.
//!
//! Frames as in `protocol`; the pipes of a step travel with its start message.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::protocol::{FrameBuffer, encode};

/// stdout and stderr: a message carries two descriptors or none.
const DESCRIPTORS: usize = 2;

/// Where the init finds its own executable.
pub const INIT_PATH: &str = "/run/evalgrid/init";
/// The home folder inside.
pub const HOME: &str = "/home/agent";
/// The shared folder inside; what is shared is below its link.
pub const SHARE: &str = "/run/evalgrid/shared";
/// The folder of programs inside.
pub const TOOLS: &str = "/run/evalgrid/tools";
/// The workspace inside.
pub const WORKSPACE: &str = "/workspace";

/// To the init.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Start this; its stdout and stderr come with the message.
    Start { argv: Vec<String>, env: BTreeMap<String, String> },
    /// SIGTERM for everybody.
    Terminate,
    /// SIGKILL until nobody is left.
    Kill,
}

/// From the init.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// It is up.
    Ready,
    /// The step's process ended. `left`: others were still there.
    StepEnded { code: i32, left: bool },
    /// The command cannot be run; the status and message that a shell would give.
    NotRunnable { code: i32, message: String },
    /// The command could not be started for no fault of its own.
    StartFailed { reason: String },
    /// Nobody is left but the init.
    AllDead,
}

/// One end of the socket pair.
pub struct Channel {
    stream: UnixStream,
    frames: FrameBuffer,
    descriptors: VecDeque<OwnedFd>,
    buffer: Vec<u8>,
}

impl Channel {
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            frames: FrameBuffer::default(),
            descriptors: VecDeque::new(),
            buffer: vec![0; 16 * 1024],
        }
    }

    /// Sends a whole message, with descriptors where there are some.
    pub fn send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let frame = encode(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let sent = rustix::net::sendmsg(&self.stream, &[IoSlice::new(&frame)], &mut control, SendFlags::NOSIGNAL)?;
        io::Write::write_all(&mut &self.stream, &frame[sent..])
    }

    /// Takes in what has arrived, without waiting. `false`: the other end is gone.
    pub fn receive(&mut self) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let message = match rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(&mut self.buffer)], &mut control, flags) {
            Ok(message) => message,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(true),
            Err(e) => return Err(e.into()),
        };
        for item in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = item {
                self.descriptors.extend(received);
            }
        }
        let bytes = message.bytes;
        self.frames.push(&self.buffer[..bytes]);
        Ok(bytes > 0)
    }

    /// The next whole message, if it is here.
    pub fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.frames.next()
    }

    /// The descriptors that came with the oldest start message.
    pub fn take_outputs(&mut self) -> Option<(OwnedFd, OwnedFd)> {
        Some((self.descriptors.pop_front()?, self.descriptors.pop_front()?))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
