//! The gate of a sandbox whose network is a list: a process of its own, outside, that leads each connection made to one of the sandbox's
//! listening sockets to the host that the socket stands for. Bytes go through unread, so TLS is end to end.
//!
//! It is a child of the supervisor and hangs on a socket to it: it goes on when the executor dies, and ends with the supervisor.

use std::{
    io::{self, Read},
    net::{Shutdown, SocketAddrV4, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal};

use crate::{
    helpers,
    inner_protocol::Channel,
    network::{Endpoint, Network},
    sys::{self, Prepare},
};

/// Of one sandbox at a time; more are hung up on. An agent has a handful, a browser a hundred.
const MOST_CONNECTIONS: usize = 256;
/// Each connection has two threads with nothing but a copy loop and, at first, a name lookup on them.
const STACK: usize = 256 * 1024;
/// Of one address of a host.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// After a failure to accept, such as for too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The supervisor sends what to do at once.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// The supervisor's side of a gate.
pub struct Gate {
    pid: Pid,
    /// It ends when this is closed.
    _lifeline: Channel,
}

impl Gate {
    /// Starts the gate that a network needs, if it needs one. `listeners` stand for its endpoints, in the same order.
    pub fn start(executable: &Path, network: &Network, listeners: Vec<OwnedFd>) -> io::Result<Option<Self>> {
        let endpoints = network.endpoints();
        if endpoints.len() != listeners.len() {
            return Err(io::Error::other("there is not a socket for each endpoint"));
        }
        if endpoints.is_empty() {
            return Ok(None);
        }
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(executable);
        command
            .arg(helpers::GATE)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        sys::prepare(
            &mut command,
            Prepare {
                new_session: true,
                die_with_parent: true,
                first_out_of_memory: false,
                join: Vec::new(),
            },
        );
        let child = command.spawn()?;
        drop(command);
        let pid = Pid::from_raw(child.id() as i32).ok_or_else(|| io::Error::other("a child without an id"))?;
        let lifeline = Channel::new(ours);
        let descriptors: Vec<BorrowedFd<'_>> = listeners.iter().map(AsFd::as_fd).collect();
        lifeline.send(&endpoints, &descriptors)?;
        Ok(Some(Self { pid, _lifeline: lifeline }))
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Ends it. It is still to be reaped.
    pub fn kill(&self) {
        // It is our child and not reaped yet, so the id is its own.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
    }
}

/// Opens sockets in another network namespace, whatever ports they ask for: whoever made the namespace may, what runs inside may not.
pub fn listen_in(namespace: &OwnedFd, addresses: &[SocketAddrV4]) -> io::Result<Vec<OwnedFd>> {
    let (ours, theirs) = UnixStream::pair()?;
    // Nobody comes back from a namespace, so a child goes there. The supervisor reaps it with all others.
    match sys::fork()? {
        sys::Fork::Child => {
            let bind = |address: &SocketAddrV4| TcpListener::bind(address).map(OwnedFd::from);
            let listeners = sys::enter_network(namespace).and_then(|()| addresses.iter().map(bind).collect::<io::Result<Vec<_>>>());
            let channel = Channel::new(theirs);
            let sent = match &listeners {
                Ok(listeners) => channel.send(&Ok::<(), String>(()), &listeners.iter().map(AsFd::as_fd).collect::<Vec<_>>()),
                Err(e) => channel.send(&Err::<(), String>(e.to_string()), &[]),
            };
            std::process::exit(sent.is_err().into())
        }
        sys::Fork::Parent => {
            drop(theirs);
            let mut channel = Channel::new(ours);
            let opened: Result<(), String> = channel.wait(START_PATIENCE)?;
            opened.map_err(|e| io::Error::other(format!("open the sockets of the allowed network: {e}")))?;
            Ok(channel.take_descriptors())
        }
    }
}

/// Serves what the first message on stdin says, until stdin ends.
pub fn run() -> io::Result<()> {
    sys::close_inherited()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut channel = Channel::new(socket.try_clone()?);
    let endpoints: Vec<Endpoint> = channel.wait(START_PATIENCE)?;
    let open = Arc::new(AtomicUsize::new(0));
    for endpoint in endpoints {
        let listener = TcpListener::from(channel.take_descriptor().ok_or_else(|| io::Error::other("a socket is missing"))?);
        listener.set_nonblocking(false)?;
        let open = open.clone();
        thread::Builder::new()
            .stack_size(STACK)
            .spawn(move || accept(&listener, &Arc::new(endpoint), &open))?;
    }
    // Nothing more is ever sent.
    let _ = (&socket).read(&mut [0]);
    Ok(())
}

fn accept(listener: &TcpListener, endpoint: &Arc<Endpoint>, open: &Arc<AtomicUsize>) {
    loop {
        let Ok((inside, _)) = listener.accept() else {
            thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        let slot = Slot::new(open);
        if slot.number >= MOST_CONNECTIONS {
            continue;
        }
        let endpoint = endpoint.clone();
        // Where no thread can be had, the connection is dropped.
        let _ = thread::Builder::new().stack_size(STACK).spawn(move || {
            let _slot = slot;
            // Whoever is inside sees a closed connection.
            let _ = connect(&endpoint).and_then(|outside| pump(&inside, outside));
        });
    }
}

/// Counts connections while it lives.
struct Slot {
    open: Arc<AtomicUsize>,
    /// How many there were before.
    number: usize,
}

impl Slot {
    fn new(open: &Arc<AtomicUsize>) -> Self {
        Self {
            number: open.fetch_add(1, Ordering::Relaxed),
            open: open.clone(),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn connect(endpoint: &Endpoint) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for address in (endpoint.host.as_str(), endpoint.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Copies both ways until both sides have ended. A side that fails takes the other with it.
fn pump(inside: &TcpStream, outside: TcpStream) -> io::Result<()> {
    // Whoever sends small pieces has reasons to.
    let _ = (inside.set_nodelay(true), outside.set_nodelay(true));
    let (reader, writer) = (inside.try_clone()?, outside.try_clone()?);
    let up = thread::Builder::new().stack_size(STACK).spawn(move || one_way(&reader, &writer))?;
    one_way(&outside, inside);
    // It has said all it could.
    let _ = up.join();
    Ok(())
}

fn one_way(mut from: &TcpStream, mut to: &TcpStream) {
    let ended = io::copy(&mut from, &mut to);
    let how = if ended.is_ok() { Shutdown::Write } else { Shutdown::Both };
    let _ = to.shutdown(how);
    if ended.is_err() {
        let _ = from.shutdown(how);
    }
}
