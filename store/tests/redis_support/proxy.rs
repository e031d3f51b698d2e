//! A TCP proxy that can lose what passes through it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::thread;

/// What happens to the next bytes; after it, the connection is closed and everything passes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Loss {
    None = 0,
    /// The next request does not reach the server.
    Request = 1,
    /// The next request reaches the server, its reply does not come back.
    Reply = 2,
    /// A part of the next request reaches the server.
    HalfRequest = 3,
    /// A part of the next reply comes back.
    HalfReply = 4,
}

pub struct Proxy {
    pub port: u16,
    next: Arc<AtomicU8>,
    server: Arc<AtomicU16>,
}

impl Proxy {
    pub fn to(server: u16) -> Proxy {
        let server = Arc::new(AtomicU16::new(server));
        let target = Arc::clone(&server);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let next = Arc::new(AtomicU8::new(0));
        let shared = Arc::clone(&next);
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let Ok(server) = TcpStream::connect(("127.0.0.1", target.load(Ordering::SeqCst))) else {
                    continue;
                };
                for (from, to, request) in [(&client, &server, true), (&server, &client, false)] {
                    let (from, to, next) = (from.try_clone().unwrap(), to.try_clone().unwrap(), Arc::clone(&shared));
                    thread::spawn(move || pump(from, to, request, &next));
                }
            }
        });
        Proxy { port, next, server }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// New connections go to another server, as after a failover.
    pub fn point_to(&self, server: u16) {
        self.server.store(server, Ordering::SeqCst);
    }

    /// Arms it. Whatever passes next is hit: the lease's connection should go another way.
    pub fn lose(&self, loss: Loss) {
        self.next.store(loss as u8, Ordering::SeqCst);
    }

    /// Whether it has struck.
    pub fn is_done(&self) -> bool {
        self.next.load(Ordering::SeqCst) == 0
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, request: bool, next: &AtomicU8) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        let (all, half) = if request {
            (Loss::Request, Loss::HalfRequest)
        } else {
            (Loss::Reply, Loss::HalfReply)
        };
        let hit = |loss: Loss| next.compare_exchange(loss as u8, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if hit(all) {
            break;
        }
        if hit(half) {
            let _ = to.write_all(&buffer[..length / 2]);
            break;
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
