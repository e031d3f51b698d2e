//! A model provider on loopback that does to each call exactly what a test says, down to the byte.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// What is done to one call, once it has been read.
#[derive(Clone, Debug)]
pub enum Reply {
    /// These bytes, then the end.
    Bytes(String),
    /// These bytes, then nothing for ever.
    Stuck(String),
}

impl Reply {
    /// A whole answer of JSON.
    pub fn json(status: u16, body: &str) -> Self {
        Self::with(status, &[("x-request-id", "req-1")], body)
    }

    /// A whole answer.
    pub fn with(status: u16, headers: &[(&str, &str)], body: &str) -> Self {
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        Self::Bytes(format!(
            "HTTP/1.1 {status} X\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        ))
    }
}

/// One call as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// The first line and the headers, in lower case.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Answers every call with the next reply, the last one again and again.
pub struct Server {
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start(replies: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let task = tokio::spawn(async move {
            let mut connections = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let Some(request) = read(&mut stream).await else { continue };
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(request);
                    seen.len() - 1
                };
                match &replies[number.min(replies.len() - 1)] {
                    Reply::Bytes(bytes) => {
                        // A caller that has read enough may be gone already.
                        let _ = stream.write_all(bytes.as_bytes()).await;
                        let _ = stream.shutdown().await;
                    }
                    Reply::Stuck(bytes) => {
                        stream.write_all(bytes.as_bytes()).await.unwrap();
                        connections.push(stream);
                    }
                }
            }
        });
        Self { url, requests, task }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                let body = String::from_utf8(bytes[end + 4..].to_vec()).unwrap();
                return Some(Request { head, body });
            }
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return None;
        }
    }
}
