//! Waits for the init of a container that the executor starts, and takes it over.

use std::{
    fs, io,
    os::{
        fd::AsFd,
        unix::{
            fs::{DirBuilderExt, PermissionsExt, chown},
            net::{UnixListener, UnixStream},
        },
    },
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{PidfdFlags, pidfd_open},
};

use super::inner::{Inner, Life, ORDER_PATIENCE};
use crate::{
    Limits,
    cgroup::Group,
    gate::Gate,
    inner_protocol::{Channel, DOOR_SOCKET, Report},
    layout::Layout,
    protocol::{self, Docker, Reply},
    sys,
};

/// How long the executor and the daemon may take until our init connects. Measured: half a second for a container; a daemon under full load
/// takes ten.
const START_PATIENCE: Duration = Duration::from_secs(90);
/// An init that has connected speaks at once.
const READY_PATIENCE: Duration = Duration::from_secs(20);

/// Makes what the container needs of us, says so on `first`, and waits for its init.
pub fn start(spec: &Docker, layout: &Layout, limits: Limits, first: &mut UnixStream) -> io::Result<(Inner, Group)> {
    if let Some((user, group)) = spec.owner {
        for folder in [layout.home(), layout.workspace(), layout.tmp()] {
            chown(folder, Some(user), Some(group))?;
        }
    }
    if let Some(hosts) = spec.network.hosts() {
        fs::write(layout.hosts(), hosts)?;
    }
    let door = layout.door();
    fs::DirBuilder::new().mode(0o755).create(&door)?;
    // The working folder is the sandbox's, and a socket's address is short.
    let socket = layout.door().join(DOOR_SOCKET);
    let relative = socket.strip_prefix(&layout.folder).unwrap_or(&socket);
    let listener = UnixListener::bind(relative)?;
    // Nobody but us gets as far as this socket on the host, and the init's user may be another.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666))?;
    io::Write::write_all(first, &protocol::encode(&Reply::Prepared)?)?;
    let stream = accept(&listener, first)?;
    // Before anybody else can be inside.
    fs::remove_file(&socket)?;
    fs::remove_dir(&door)?;
    stream.set_write_timeout(Some(ORDER_PATIENCE))?;
    // Where dockerd runs in namespaces of its own, beside ours.
    let process = sys::peer_process(&stream)?.ok_or_else(|| io::Error::other("the container's processes cannot be seen from here"))?;
    let init = pidfd_open(process, PidfdFlags::empty())?;
    let mut channel = Channel::new(stream);
    // An answer proves that the id was still the init's when it was opened.
    match channel.wait::<Report>(READY_PATIENCE)? {
        Report::Ready => {}
        other => return Err(io::Error::other(format!("the init said {other:?} instead of Ready"))),
    }
    let group = Group::around(process, limits);
    let gate = Gate::start(&spec.executable, &spec.network, channel.take_descriptors())?;
    Ok((Inner::new(&spec.env, channel, Life::Peer(init), gate), group))
}

/// The init's connection, unless the executor gives up first.
fn accept(listener: &UnixListener, first: &UnixStream) -> io::Result<UnixStream> {
    let mut fds = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::from_borrowed_fd(first.as_fd(), PollFlags::IN),
    ];
    let patience = Timespec {
        tv_sec: START_PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    loop {
        match poll(&mut fds, Some(&patience)) {
            Ok(0) => return Err(io::Error::other("no word from inside the container")),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(listener.accept()?.0),
            // It has nothing to say until we answer.
            Ok(_) => return Err(io::Error::other("the executor has given up")),
        }
    }
}
