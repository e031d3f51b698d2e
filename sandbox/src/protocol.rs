//! What the executor and a supervisor say to each other: frames of a little-endian `u32` length and that many bytes of JSON.

use std::{collections::BTreeMap, io, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Limits, cgroup::Plan, layers::Based, network::Network};

/// Largest frame: Linux itself refuses to start a program with more than about 2 MiB of arguments and environment (6 MiB at most).
pub const MAX_FRAME: usize = 8 * 1024 * 1024;

/// The first frame to a zygote's child: what it is to supervise.
#[derive(Debug, Serialize, Deserialize)]
pub struct Create {
    pub name: String,
    pub token: u64,
    pub lifetime: Duration,
    pub boot_id: String,
    pub memory_bytes: u64,
    pub pids: u32,
    pub cgroups: Plan,
    /// What its folders are made from.
    pub base: Option<Based>,
    pub backend: Backend,
}

impl Create {
    pub fn limits(&self) -> Limits {
        Limits {
            memory_bytes: self.memory_bytes,
            pids: self.pids,
        }
    }
}

/// How the processes of a sandbox are run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Backend {
    /// As children of the supervisor, with the host's `PATH`.
    Process { path: String },
    /// Inside one long-lived bubblewrap.
    Bubblewrap(Bubblewrap),
    /// Inside a container that the executor makes.
    Docker(Docker),
}

impl Backend {
    pub fn provider(&self) -> &'static str {
        match self {
            Self::Process { .. } => "process",
            Self::Bubblewrap(_) => "bubblewrap",
            Self::Docker(_) => "docker",
        }
    }
}

/// What bubblewrap is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bubblewrap {
    /// The `bwrap` program.
    pub program: PathBuf,
    /// The executable that holds [`crate::init_main`].
    pub executable: PathBuf,
    /// The folder that is `/etc` inside.
    pub etc: PathBuf,
    /// The shared folder.
    pub share: PathBuf,
    /// The folder of programs.
    pub tools: PathBuf,
    /// What is reached.
    pub network: Network,
}

/// What a container's supervisor has to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Docker {
    /// The executable that holds the gate.
    pub executable: PathBuf,
    /// Variables that the image sets.
    pub env: BTreeMap<String, String>,
    /// User and group that the folders belong to, where they are not this process's.
    pub owner: Option<(u32, u32)>,
    /// What is reached.
    pub network: Network,
}

/// A request to a supervisor. Those that act carry the caller's fencing token.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Attaches.
    Hello { token: u64 },
    /// Starts a step, or attaches to it. Answered when the step has ended.
    Start {
        token: u64,
        step: String,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
        time_limit_ms: u64,
    },
    /// Ends a step's tree. Answered when it is dead.
    Kill { token: u64, step: String },
    /// Kills everything and exits. Answered when everything is dead.
    Destroy,
    /// Answered at once.
    Ping,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The sandbox was made, the caller is attached, or what was asked is done.
    Done,
    /// The step ended.
    Exited(ExitRecord),
    /// The folders are there: the container may be started, whose init the supervisor waits for. `Done` follows.
    Prepared,
    /// The name is taken; nothing was made.
    Exists,
    /// A newer token has been seen.
    Fenced { current: u64 },
    /// The sandbox ends, or the step's end cannot be known.
    Lost { reason: String },
    /// It could not be done; the sandbox lives.
    Refused { reason: String },
}

/// Everything about a finished step but where its files are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExitRecord {
    pub code: i32,
    pub timed_out: bool,
    pub out_of_memory: bool,
    #[serde(default)]
    pub left_running: bool,
    pub started_at_ms: u64,
    pub finished_at_ms: u64,
    pub stdout_bytes: u64,
    pub stdout_tail: bool,
    /// What was kept of it.
    pub stderr_bytes: u64,
    /// Why some output could not be kept (a full disk), where that happened.
    pub output_error: Option<String>,
}

/// One encoded frame.
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = frame.len() - 4;
    if length > MAX_FRAME {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {length} bytes is over the limit of {MAX_FRAME}"),
        ));
    }
    // MAX_FRAME fits u32.
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Checks the length field of a frame.
pub fn frame_length(header: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_le_bytes(header) as usize;
    if length > MAX_FRAME {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes is over the limit of {MAX_FRAME}"),
        ));
    }
    Ok(length)
}

/// Collects bytes until they make frames.
#[derive(Default)]
pub struct FrameBuffer(Vec<u8>);

impl FrameBuffer {
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next whole message, if it is here. An error means that the stream makes no sense any more.
    pub fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some(header) = self.0.first_chunk::<4>() else { return Ok(None) };
        let end = 4 + frame_length(*header)?;
        if self.0.len() < end {
            return Ok(None);
        }
        let message = serde_json::from_slice(&self.0[4..end])?;
        self.0.drain(..end);
        if self.0.is_empty() {
            // A start may have been megabytes; a waiting connection holds nothing.
            self.0 = Vec::new();
        }
        Ok(Some(message))
    }
}

/// Reads one message from a blocking stream.
pub fn read_blocking<T: DeserializeOwned>(stream: &mut impl io::Read) -> io::Result<T> {
    let mut header = [0; 4];
    stream.read_exact(&mut header)?;
    let mut body = vec![0; frame_length(header)?];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn frames_survive_any_split() {
        let messages = [
            Request::Ping,
            Request::Hello { token: 7 },
            Request::Kill {
                token: u64::MAX,
                step: "turn.1.agent".into(),
            },
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
        for size in 1..bytes.len() {
            let mut buffer = FrameBuffer::default();
            let mut seen = Vec::new();
            for chunk in bytes.chunks(size) {
                buffer.push(chunk);
                while let Some(message) = buffer.next::<Request>().unwrap() {
                    seen.push(format!("{message:?}"));
                }
            }
            assert_eq!(
                seen,
                messages.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>(),
                "chunks of {size}"
            );
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        for bytes in [&b"\xff\xff\xff\xff"[..], b"\x02\0\0\0{]", b"\x04\0\0\0null"] {
            let mut buffer = FrameBuffer::default();
            buffer.push(bytes);
            assert!(buffer.next::<Request>().is_err(), "{bytes:?}");
        }
    }
}
