//! The few system calls that neither std nor rustix offers. All `unsafe` of this crate is here.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::Command,
};

use rustix::process::{Pid, Signal};

/// Which side of a fork this is.
pub enum Fork {
    Parent,
    Child,
}

/// Forks without exec. Refused in a process with several threads, where the child could not even allocate safely.
pub fn fork() -> io::Result<Fork> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("this process has several threads and must not fork"));
    }
    // SAFETY: the process has one thread (checked above), so the child's copy of every lock and of the heap is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        _ => Ok(Fork::Parent),
    }
}

/// The kernel reaps this process's children by itself from now on (`true`), or keeps them for `waitpid` (`false`, the default).
pub fn auto_reap_children(on: bool) {
    let handler = if on { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: SIG_IGN and SIG_DFL are valid dispositions, no handler code is involved.
    unsafe { libc::signal(libc::SIGCHLD, handler) };
}

/// Blocks SIGCHLD and SIGTERM and returns a non-blocking descriptor to read them from. [`prepare`] unblocks them in children.
pub fn signal_descriptor() -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset before any other use, and every pointer outlives its call.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

/// Empties a [`signal_descriptor`]; says whether a SIGTERM was among the signals.
pub fn drain_signals(fd: &OwnedFd) -> bool {
    // The size of `struct signalfd_siginfo`, fixed by the kernel's ABI; the signal's number comes first.
    const RECORD: usize = 128;
    let mut terminate = false;
    let mut buffer = [0u8; RECORD * 4];
    while let Ok(n) = rustix::io::read(fd, &mut buffer) {
        if n == 0 {
            break;
        }
        for record in buffer[..n].chunks_exact(RECORD) {
            terminate |= record[..4] == (libc::SIGTERM as u32).to_ne_bytes();
        }
    }
    terminate
}

/// What a process does to itself between fork and exec.
pub struct Prepare {
    /// Its own session, so that it has no terminal and no group in common with us.
    pub new_session: bool,
    /// SIGKILL when our (single-threaded) process dies.
    pub die_with_parent: bool,
    /// Make it a likelier victim than us when memory runs out.
    pub first_out_of_memory: bool,
    /// Open `cgroup.procs` files of the groups it joins.
    pub join: Vec<OwnedFd>,
}

/// Applies `prepare` to every process started from `command`.
pub fn prepare(command: &mut Command, prepare: Prepare) {
    let hook = move || {
        unblock_signals()?;
        if prepare.new_session {
            rustix::process::setsid()?;
        }
        if prepare.die_with_parent {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        if prepare.first_out_of_memory {
            prefer_in_out_of_memory();
        }
        for group in &prepare.join {
            rustix::io::write(group, b"0")?;
        }
        Ok(())
    };
    // SAFETY: the hook only makes async-signal-safe calls on values prepared before the fork; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(hook) };
}

fn unblock_signals() -> io::Result<()> {
    // SAFETY: `set` is initialised by sigemptyset before its other use, and every pointer outlives its call.
    let result = unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn prefer_in_out_of_memory() {
    use rustix::fs::{Mode, OFlags};
    // Best effort: it only chooses the victim.
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::io::write(&file, b"500");
    }
}

/// Sends `signal` to every process of this pid namespace but its init, which the caller is.
pub fn kill_everyone_else(signal: Signal) -> io::Result<()> {
    if std::process::id() != 1 {
        return Err(io::Error::other("only the init of a pid namespace may do this"));
    }
    // SAFETY: no memory is involved; as init of a namespace, -1 reaches that namespace's processes only.
    match unsafe { libc::kill(-1, signal.as_raw()) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            e => Err(e),
        },
    }
}

/// The process at the other end, as this process sees it; `None` where it is in a namespace that cannot be seen from here.
pub fn peer_process(stream: &UnixStream) -> io::Result<Option<Pid>> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to live values, and `length` is the size of the one that is written to, for which every content is valid.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        )
    };
    if result == 0 {
        Ok(Pid::from_raw(credentials.pid))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Moves this process, which has one thread and can never come back, into a network namespace and the user namespace that rules it.
pub fn enter_network(namespace: &OwnedFd) -> io::Result<()> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    // `NS_GET_USERNS` of linux/nsfs.h.
    const OWNING_USER_NAMESPACE: libc::Ioctl = 0xb701;
    // SAFETY: the request takes no argument and gives a new descriptor, which nobody else owns.
    let users = unsafe {
        match libc::ioctl(namespace.as_raw_fd(), OWNING_USER_NAMESPACE) {
            fd if fd >= 0 => OwnedFd::from_raw_fd(fd),
            _ => return Err(io::Error::last_os_error()),
        }
    };
    move_into_link_name_space(users.as_fd(), Some(LinkNameSpaceType::User))?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Makes orphaned descendants children of this process, so that it can find and reap them.
pub fn become_subreaper() -> io::Result<()> {
    // rustix takes "which process", the kernel only "on or off": our own id stands for on.
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// One reaping step.
pub enum Reaped {
    /// This child ended with this status (128 + signal where a signal ended it).
    Ended(Pid, i32),
    /// There are children, and none has ended.
    Busy,
    /// There is no child left, and with [`become_subreaper`] no descendant either.
    Childless,
}

/// Reaps one ended child without waiting.
pub fn reap() -> Reaped {
    use rustix::process::{WaitOptions, wait};
    loop {
        return match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Reaped::Ended(pid, code),
                (None, Some(signal)) => Reaped::Ended(pid, 128 + signal),
                (None, None) => continue,
            },
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CHILD) => Reaped::Childless,
            Ok(None) | Err(_) => Reaped::Busy,
        };
    }
}

/// Closes everything but stdin, stdout and stderr: what whoever started the executor forgot to mark close-on-exec must not reach an agent.
/// To be called before anything else is opened.
pub fn close_inherited() -> io::Result<()> {
    // SAFETY: at the start of a helper nothing in this process owns a descriptor from 3 on, so none is closed behind its owner's back.
    match unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts `/dev/null` on stdin, stdout and stderr.
pub fn detach_stdio() -> io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}
