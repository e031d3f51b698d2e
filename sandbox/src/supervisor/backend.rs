//! What runs the processes of a sandbox: the supervisor itself, or an init inside bubblewrap or a container.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
};

use rustix::process::{Pid, Signal};

use super::{bubblewrap, docker, inner::Inner, tree};
use crate::{
    cgroup::Group,
    layout::Layout,
    protocol::{Backend as Spec, Create},
    sys::{self, Prepare, Reaped},
};

/// What a backend reports.
pub enum Event {
    /// The process of the running step ended with this status. `left`: others were still there.
    StepEnded { code: i32, left: bool },
    /// The running step could not be started.
    StartFailed(StartFailure),
    /// After terminate or kill: nothing but the supervisor and its helpers is alive.
    AllDead,
    /// The backend broke; nothing inside survives that.
    Broken(String),
}

/// Why a step's process did not start.
pub enum StartFailure {
    /// As a shell would say it: exit status 127 or 126, and a line for stderr.
    NotRunnable { code: i32, message: String },
    /// Not the command's fault.
    Failed(String),
}

impl StartFailure {
    /// Sorts the error of an exec with this environment.
    pub fn from_exec(program: &str, env: &BTreeMap<String, String>, error: &io::Error) -> Self {
        use rustix::io::Errno;
        let is_there = |folder: &str| Path::new(folder).join(program).exists();
        let code = match Errno::from_io_error(error) {
            Some(Errno::NOENT | Errno::NOTDIR) => 127,
            // A folder of PATH that may not be entered does not mean that the program is in it.
            Some(Errno::ACCESS) if !program.contains('/') && !env.get("PATH").is_some_and(|p| p.split(':').any(is_there)) => 127,
            Some(Errno::ACCESS | Errno::PERM | Errno::NOEXEC | Errno::ISDIR | Errno::LOOP | Errno::NAMETOOLONG) => 126,
            _ => return Self::Failed(error.to_string()),
        };
        Self::NotRunnable {
            code,
            message: format!("{program}: {error}\n"),
        }
    }
}

/// A command as the backend gets it.
pub struct Launch<'a> {
    pub argv: &'a [String],
    pub env: &'a BTreeMap<String, String>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// See the module.
pub enum Backend {
    Process(Direct),
    Inner(Inner),
}

/// Steps are children of the supervisor.
pub struct Direct {
    base: BTreeMap<String, String>,
    layout: Layout,
    step: Option<Pid>,
    childless: bool,
    /// Everybody is to end, and that they have is not yet reported.
    ending: bool,
}

impl Backend {
    /// Prepares for steps. From here on everything that is started is inside `group`; a backend that has a group of its own puts it there.
    /// `first` is the connection of the executor that creates the sandbox.
    pub fn start(create: &Create, layout: &Layout, group: &mut Group, first: &mut UnixStream) -> io::Result<Self> {
        match &create.backend {
            Spec::Process { path } => {
                group.join()?;
                let text = |path: &Path| path.to_string_lossy().into_owned();
                let base = BTreeMap::from([
                    ("HOME".to_owned(), text(&layout.home())),
                    ("PATH".to_owned(), format!("{}:{path}", text(&layout.home().join(".local/bin")))),
                    ("TMPDIR".to_owned(), text(&layout.tmp())),
                    ("LANG".to_owned(), "C.UTF-8".to_owned()),
                ]);
                Ok(Self::Process(Direct {
                    base,
                    layout: layout.clone(),
                    step: None,
                    childless: true,
                    ending: false,
                }))
            }
            Spec::Bubblewrap(spec) => {
                // Bubblewrap can limit processes by itself, where the group cannot.
                let most_processes = (!create.cgroups.limits_pids()).then_some(create.pids);
                Ok(Self::Inner(bubblewrap::start(spec, layout, group, most_processes)?))
            }
            Spec::Docker(spec) => {
                let (inner, own_group) = docker::start(spec, layout, create.limits(), first)?;
                *group = own_group;
                Ok(Self::Inner(inner))
            }
        }
    }

    /// Starts the process of a step. A failure may also come as an event.
    pub fn launch(&mut self, launch: Launch<'_>) -> Result<(), StartFailure> {
        match self {
            Self::Process(direct) => direct.launch(launch),
            Self::Inner(inner) => inner.launch(launch).map_err(|e| StartFailure::Failed(e.to_string())),
        }
    }

    /// Asks everything inside to end. [`Event::AllDead`] follows if all obey.
    pub fn terminate(&mut self) {
        match self {
            Self::Process(direct) => {
                direct.ending = true;
                tree::signal_descendants(Signal::TERM);
            }
            Self::Inner(inner) => inner.terminate(),
        }
    }

    /// Kills what can be found. To be repeated until [`Event::AllDead`].
    pub fn kill(&mut self) {
        match self {
            Self::Process(direct) => {
                direct.ending = true;
                if !direct.childless {
                    tree::kill_descendants();
                }
            }
            Self::Inner(inner) => inner.kill(),
        }
    }

    /// Ends the backend for good; then [`Self::kill`] reports when that is through.
    pub fn close(&mut self) {
        if let Self::Inner(inner) = self {
            inner.close();
        }
    }

    /// A descriptor that becomes readable when the backend has something to say, beyond SIGCHLD.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Process(_) => None,
            Self::Inner(inner) => inner.socket().map(AsFd::as_fd),
        }
    }

    /// Collects what has happened: reaps, and reads the descriptor.
    pub fn collect(&mut self) -> Vec<Event> {
        match self {
            Self::Process(direct) => direct.collect(),
            Self::Inner(inner) => inner.collect(),
        }
    }
}

impl Direct {
    fn launch(&mut self, launch: Launch<'_>) -> Result<(), StartFailure> {
        let (Some(program), workspace) = (launch.argv.first(), self.layout.workspace()) else {
            return Err(StartFailure::Failed("there is no program to run".to_owned()));
        };
        // A missing working folder would look like a missing program.
        if !workspace.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            return Err(StartFailure::Failed("the workspace is not there".to_owned()));
        }
        let mut env = self.base.clone();
        env.extend(launch.env.clone());
        let mut command = Command::new(program);
        command.args(&launch.argv[1..]).env_clear().envs(&env).current_dir(workspace);
        command.stdin(Stdio::null()).stdout(launch.stdout).stderr(launch.stderr);
        sys::prepare(
            &mut command,
            Prepare {
                new_session: true,
                die_with_parent: true,
                first_out_of_memory: true,
                join: Vec::new(),
            },
        );
        // Dropping std's handle neither kills nor reaps: `collect` reaps all children.
        let child = command.spawn().map_err(|e| StartFailure::from_exec(program, &env, &e))?;
        self.step = Pid::from_raw(child.id() as i32);
        self.childless = false;
        Ok(())
    }

    fn collect(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let mut ended = None;
        while !self.childless {
            match sys::reap() {
                Reaped::Ended(pid, code) => {
                    if self.step == Some(pid) {
                        self.step = None;
                        ended = Some(code);
                    }
                }
                Reaped::Busy => break,
                Reaped::Childless => self.childless = true,
            }
        }
        events.extend(ended.map(|code| Event::StepEnded {
            code,
            left: !self.childless,
        }));
        if self.childless && self.ending {
            self.ending = false;
            events.push(Event::AllDead);
        }
        events
    }
}
