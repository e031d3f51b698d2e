//! The process that supervisors are forked from: starting a new program for each would cost ten times the CPU.

use std::{
    io::{self, Write},
    os::unix::net::UnixListener,
    path::Path,
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::{supervisor, sys};

/// Serves in the folder `root` (its working folder too) on the socket `name`, until stdin, which the executor holds, ends.
pub fn run(root: &Path, name: &str) -> io::Result<()> {
    sys::close_inherited()?;
    // A Ctrl-C on the executor's terminal is the executor's to handle.
    rustix::process::setsid()?;
    sys::auto_reap_children(true);
    let listener = UnixListener::bind(name)?;
    println!("ready");
    io::stdout().flush()?;
    let stdin = io::stdin();
    // Made once: a child that zeroed its own would get all the pages, and few are ever written to.
    let buffer = supervisor::buffer();
    loop {
        let mut fds = [PollFd::new(&stdin, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Nobody ever writes to stdin: readable means closed.
        if !fds[0].revents().is_empty() {
            let _ = std::fs::remove_file(name);
            return Ok(());
        }
        if !fds[1].revents().is_empty() {
            match listener.accept() {
                Ok((connection, _)) => match sys::fork() {
                    // Dropping our copy of the connection leaves the child's.
                    Ok(sys::Fork::Parent) => {}
                    Ok(sys::Fork::Child) => {
                        drop(listener);
                        sys::auto_reap_children(false);
                        std::process::exit(supervisor::run(root, connection, buffer).map_or(1, |()| 0));
                    }
                    // The executor sees the connection close and reports it.
                    Err(e) => eprintln!("sandbox zygote: fork: {e}"),
                },
                Err(e) => eprintln!("sandbox zygote: accept: {e}"),
            }
        }
    }
}
