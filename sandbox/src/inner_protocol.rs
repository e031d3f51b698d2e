//! What a supervisor and the init inside a sandbox say to each other, over a connection that only they have.
//!
//! Frames as in `protocol`; the pipes of a step travel with its start message, those for the gate of its network
//! with the first.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::SocketAddrV4,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    network::MOST_ENDPOINTS,
    protocol::{FrameBuffer, encode},
};

/// A message carries stdout and stderr, or a socket for each endpoint.
const DESCRIPTORS: usize = MOST_ENDPOINTS;

/// Where the init finds its own executable.
pub const INIT_PATH: &str = "/run/evalgrid/init";
/// The folder in a container that holds the socket its init connects to.
pub const DOOR: &str = "/run/evalgrid/door";
/// That socket's name.
pub const DOOR_SOCKET: &str = "socket";
/// The home folder inside.
pub const HOME: &str = "/home/agent";
/// The shared folder inside; what is shared is below its link.
pub const SHARE: &str = "/run/evalgrid/shared";
/// The folder of programs inside.
pub const TOOLS: &str = "/run/evalgrid/tools";
/// The workspace inside.
pub const WORKSPACE: &str = "/workspace";

/// What an init is started with: its one argument, as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct InitOptions {
    /// The socket on which the supervisor waits, where stdin is not one already.
    pub connect: Option<PathBuf>,
    /// After this it ends, whoever is still interested.
    pub lifetime: Option<Duration>,
    /// A limit, where no control group sets it.
    pub most_processes: Option<u32>,
    /// It sends its network namespace with its first message, because it may not take every port itself.
    pub show_network: bool,
    /// Where it listens for the gate.
    pub listen: Vec<SocketAddrV4>,
}

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
    /// It is up. Its network namespace or its listening sockets come with the message, where it was to send them.
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

    /// Waits for the next whole message.
    pub fn wait<T: DeserializeOwned>(&mut self, patience: Duration) -> io::Result<T> {
        let until = Instant::now() + patience;
        loop {
            if let Some(message) = self.next()? {
                return Ok(message);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos() as i64,
            };
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
            if !self.receive()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The oldest descriptor that came with a message.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// All descriptors that have come.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        self.descriptors.drain(..).collect()
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
