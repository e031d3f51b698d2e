//! Starts bubblewrap with our init inside and speaks to it.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal};

use super::{
    backend::{Event, Launch, StartFailure},
    output::{self, Source},
};
use crate::{
    cgroup::Group,
    inner_protocol::{Channel, HOME, INIT_PATH, Order, Report, SHARE, TOOLS, WORKSPACE},
    layout::Layout,
    protocol::{self, Bubblewrap},
    sys::{self, Prepare, Reaped},
};

/// How long bubblewrap may take until our init speaks. Measured: 15 to 30 ms; a machine under full load takes seconds.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// The init always listens; if it takes no order for this long, the sandbox is broken.
const ORDER_PATIENCE: Duration = Duration::from_secs(10);

/// The supervisor's side of a bubblewrap.
pub struct Inner {
    /// What bubblewrap says on stderr; only its reasons for not starting are of interest.
    _complaints: Source,
    channel: Option<Channel>,
    bwrap: Option<Pid>,
    childless: bool,
    closing: bool,
}

impl Inner {
    /// Starts bubblewrap inside `group` and waits for the init.
    pub fn start(spec: &Bubblewrap, layout: &Layout, group: &Group, most_processes: Option<u32>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(START_PATIENCE))?;
        ours.set_write_timeout(Some(ORDER_PATIENCE))?;
        let (complaints, complaints_end) = output::pipe()?;
        let mut command = Command::new(&spec.program);
        arguments(&mut command, spec, layout);
        command.args(most_processes.map(|n| n.to_string()));
        command
            .env_clear()
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(complaints_end);
        // `--die-with-parent` means the thread that started it: this process has only one.
        let prepare = Prepare {
            new_session: true,
            die_with_parent: false,
            first_out_of_memory: true,
            join: group.doors()?,
        };
        sys::prepare(&mut command, prepare);
        let child = command
            .spawn()
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", spec.program.display())))?;
        // The command holds the other end of the pair, whose closing must be seen.
        drop(command);
        match protocol::read_blocking::<Report>(&mut &ours) {
            Ok(Report::Ready) => {}
            Ok(other) => return Err(io::Error::other(format!("the init said {other:?} instead of Ready"))),
            Err(e) => {
                let mut said = Vec::new();
                complaints.read(&mut vec![0; output::CHUNK], |chunk| said.extend_from_slice(chunk));
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                return Err(io::Error::other(if said.is_empty() {
                    format!("no word from inside: {e}")
                } else {
                    said
                }));
            }
        }
        Ok(Self {
            _complaints: complaints,
            channel: Some(Channel::new(ours)),
            bwrap: Pid::from_raw(child.id() as i32),
            childless: false,
            closing: false,
        })
    }

    pub fn launch(&mut self, launch: Launch<'_>) -> io::Result<()> {
        let mut env = BTreeMap::from([
            ("HOME".to_owned(), HOME.to_owned()),
            (
                "PATH".to_owned(),
                format!("{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ),
            ("TMPDIR".to_owned(), "/tmp".to_owned()),
            ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ]);
        env.extend(launch.env.clone());
        self.order(
            &Order::Start {
                argv: launch.argv.to_vec(),
                env,
            },
            &[launch.stdout.as_fd(), launch.stderr.as_fd()],
        )
    }

    pub fn terminate(&mut self) {
        // A failure shows as a broken channel in `collect`.
        let _ = self.order(&Order::Terminate, &[]);
    }

    pub fn kill(&mut self) {
        match (&self.channel, self.bwrap) {
            (Some(_), _) => drop(self.order(&Order::Kill, &[])),
            // Closing: with bubblewrap dies its init, with that the namespace.
            (None, Some(bwrap)) => drop(rustix::process::kill_process(bwrap, Signal::KILL)),
            (None, None) => {}
        }
    }

    fn order(&self, order: &Order, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
        self.channel
            .as_ref()
            .ok_or_else(|| io::Error::other("the sandbox is being closed"))?
            .send(order, descriptors)
    }

    /// Hangs up: the init exits, and the kernel kills everybody in its namespace.
    pub fn close(&mut self) {
        self.closing = true;
        self.channel = None;
    }

    pub fn socket(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    pub fn collect(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        if let Err(e) = self.hear(&mut events) {
            self.channel = None;
            events.push(Event::Broken(format!("the init inside bubblewrap is gone: {e}")));
        }
        while !self.childless {
            match sys::reap() {
                Reaped::Ended(pid, code) if self.bwrap == Some(pid) => {
                    self.bwrap = None;
                    if !self.closing {
                        events.push(Event::Broken(format!("bubblewrap ended with status {code}")));
                    }
                }
                Reaped::Ended(..) => {}
                Reaped::Busy => break,
                // Its last child was the namespace's init, whose end is the end of all others.
                Reaped::Childless => self.childless = true,
            }
        }
        if self.childless && self.closing {
            events.push(Event::AllDead);
        }
        events
    }

    fn hear(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        let open = channel.receive()?;
        while let Some(report) = channel.next()? {
            match report {
                Report::Ready => {}
                Report::StepEnded { code, left } => events.push(Event::StepEnded { code, left }),
                Report::NotRunnable { code, message } => events.push(Event::StartFailed(StartFailure::NotRunnable { code, message })),
                Report::StartFailed { reason } => events.push(Event::StartFailed(StartFailure::Failed(reason))),
                Report::AllDead => events.push(Event::AllDead),
            }
        }
        if open { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// The command line. Every mount costs about 0.1 ms, so `/etc` is one prepared folder rather than twenty files.
fn arguments(command: &mut Command, spec: &Bubblewrap, layout: &Layout) {
    command.args([
        "--unshare-user",
        "--unshare-pid",
        "--unshare-uts",
        "--unshare-ipc",
        "--unshare-cgroup-try",
    ]);
    if !spec.network {
        command.arg("--unshare-net");
    }
    command.args(["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL"]);
    command.args(["--die-with-parent", "--new-session", "--as-pid-1"]);
    command.args(["--ro-bind", "/usr", "/usr"]);
    for name in ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"] {
        let path = Path::new(name);
        match fs::read_link(path) {
            Ok(target) => command.arg("--symlink").arg(target).arg(name),
            Err(_) if path.is_dir() => command.args(["--ro-bind", name, name]),
            Err(_) => command,
        };
    }
    if Path::new("/opt").is_dir() {
        command.args(["--ro-bind", "/opt", "/opt"]);
    }
    command.arg("--ro-bind").arg(&spec.etc).arg("/etc");
    command.args([
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--dir",
        "/run",
        "--dir",
        "/var",
        "--symlink",
        "/tmp",
        "/var/tmp",
    ]);
    command.arg("--bind").arg(layout.tmp()).arg("/tmp");
    command.arg("--bind").arg(layout.home()).arg(HOME);
    command.arg("--bind").arg(layout.workspace()).arg(WORKSPACE);
    command.arg("--ro-bind").arg(&spec.executable).arg(INIT_PATH);
    command.arg("--ro-bind").arg(&spec.share).arg(SHARE);
    command.arg("--ro-bind").arg(&spec.tools).arg(TOOLS);
    command.args(["--remount-ro", "/", "--chdir", WORKSPACE, "--", INIT_PATH, "sandbox-init"]);
}
