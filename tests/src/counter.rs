//! A counter on loopback that the steps of trials report to: what really ran, told by what ran.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpListener,
};

/// Counts lines.
#[derive(Clone)]
pub struct Counter {
    /// Where it listens.
    pub port: u16,
    lines: Arc<Mutex<HashMap<String, u32>>>,
}

impl Counter {
    /// Listens from now on.
    pub async fn start() -> Counter {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let counter = Counter {
            port: listener.local_addr().unwrap().port(),
            lines: Arc::default(),
        };
        let lines = counter.lines.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let lines = lines.clone();
                tokio::spawn(async move {
                    let mut reader = BufReader::new(stream).lines();
                    while let Ok(Some(line)) = reader.next_line().await {
                        *lines.lock().unwrap().entry(line).or_default() += 1;
                    }
                });
            }
        });
        counter
    }

    /// The shell command that reports a line; bash alone does it.
    pub fn report(&self, line: &str) -> String {
        format!("echo \"{line}\" > /dev/tcp/127.0.0.1/{}", self.port)
    }

    /// Every line, and how often it came.
    pub fn lines(&self) -> HashMap<String, u32> {
        self.lines.lock().unwrap().clone()
    }
}
