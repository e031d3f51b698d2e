//! The executor's side of a control connection.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use crate::protocol::{self, Reply, Request};

/// A full backlog is emptied within milliseconds.
const CONNECT_ATTEMPTS: u32 = 50;
/// Between two attempts at connecting.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);

/// A connection to one supervisor: one request at a time.
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the socket `name` in `folder`, which may have a longer path than a socket's address can hold.
    pub async fn connect(folder: &Path, name: &str) -> io::Result<Self> {
        let folder = File::options()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(folder)?;
        let address = format!("/proc/self/fd/{}/{name}", folder.as_raw_fd());
        let mut attempts = 0;
        loop {
            match UnixStream::connect(&address).await {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && attempts < CONNECT_ATTEMPTS => {
                    attempts += 1;
                    tokio::time::sleep(CONNECT_PAUSE).await;
                }
                stream => return stream.map(|stream| Self { stream }),
            }
        }
    }

    /// Sends one frame.
    pub async fn send<T: serde::Serialize>(&mut self, message: &T) -> io::Result<()> {
        self.stream.write_all(&protocol::encode(message)?).await
    }

    /// Waits for the next reply.
    pub async fn receive(&mut self) -> io::Result<Reply> {
        let mut header = [0; 4];
        self.stream.read_exact(&mut header).await?;
        let mut body = vec![0; protocol::frame_length(header)?];
        self.stream.read_exact(&mut body).await?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Waits until the other side is gone.
    pub async fn closed(&mut self) {
        let mut rest = [0; 64];
        while self.stream.read(&mut rest).await.is_ok_and(|n| n > 0) {}
    }

    /// One request and its reply.
    pub async fn ask(&mut self, request: &Request) -> io::Result<Reply> {
        self.send(request).await?;
        self.receive().await
    }
}
