//! The init of a sandbox in namespaces of its own: process 1 of its pid namespace. Starts what the supervisor orders, reaps everybody, kills
//! everybody. When it ends, whatever the reason, the kernel kills the whole namespace.

use std::{
    fs::File,
    io,
    net::TcpListener,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::Access,
    process::{DumpableBehavior, Pid, Resource, Rlimit, Signal},
};

use crate::{
    inner_protocol::{Channel, InitOptions, Order, Report, WORKSPACE},
    supervisor::backend::StartFailure,
    sys::{self, Prepare, Reaped},
};

/// Between two rounds of killing; killed processes usually leave within the first.
const KILL_ROUND: Duration = Duration::from_millis(5);

/// Runs the init until the supervisor hangs up or its lifetime is over.
pub fn run(options: &InitOptions) -> io::Result<()> {
    sys::close_inherited()?;
    // A lifetime that no clock can hold never ends.
    let lifetime_over = options.lifetime.and_then(|lifetime| Instant::now().checked_add(lifetime));
    let network = network(options)?;
    // The agent has the same user id: without this it could trace us, or open our descriptors in /proc.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    if let Some(most) = options.most_processes {
        // The kernel counts a user's processes for each user namespace apart, so this is a limit on the sandbox. (It does not bind host root.)
        rustix::process::setrlimit(
            Resource::Nproc,
            Rlimit {
                current: Some(most.into()),
                maximum: Some(most.into()),
            },
        )?;
    }
    let signals = sys::signal_descriptor()?;
    let socket = match &options.connect {
        Some(path) => UnixStream::connect(path)?,
        None => UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?),
    };
    sys::detach_stdio()?;
    let mut init = Init {
        channel: Channel::new(socket),
        step: None,
        childless: true,
        ending: false,
        killing: false,
        said_dead: false,
        lifetime_over,
    };
    let descriptors: Vec<_> = network.iter().map(AsFd::as_fd).collect();
    init.channel.send(&Report::Ready, &descriptors)?;
    drop(network);
    while init.turn(&signals)? {}
    Ok(())
}

/// Opens the sockets that the gate is to have, or the network namespace where somebody else can open them.
fn network(options: &InitOptions) -> io::Result<Vec<OwnedFd>> {
    if options.show_network {
        return Ok(vec![File::open("/proc/self/ns/net")?.into()]);
    }
    let bind = |address| {
        TcpListener::bind(address)
            .map(OwnedFd::from)
            .map_err(|e| io::Error::new(e.kind(), format!("listen at {address}: {e}")))
    };
    options.listen.iter().map(bind).collect()
}

struct Init {
    channel: Channel,
    step: Option<Pid>,
    childless: bool,
    /// Everybody is to end, and that they have is not yet reported.
    ending: bool,
    /// With SIGKILL.
    killing: bool,
    /// It has been reported that everybody has ended, and nothing was started since.
    said_dead: bool,
    lifetime_over: Option<Instant>,
}

impl Init {
    fn turn(&mut self, signals: &OwnedFd) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        match poll(&mut fds, self.pause().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let heard = !fds[0].revents().is_empty();
        sys::drain_signals(signals);
        if self.lifetime_over.is_some_and(|at| Instant::now() >= at) {
            return Ok(false);
        }
        if heard {
            if !self.channel.receive()? {
                return Ok(false);
            }
            while let Some(order) = self.channel.next()? {
                self.obey(order)?;
            }
        }
        if self.killing {
            sys::kill_everyone_else(Signal::KILL)?;
        }
        self.reap()?;
        Ok(true)
    }

    /// How long there may be nothing to do.
    fn pause(&self) -> Option<Timespec> {
        let left = self.lifetime_over.map(|at| at.saturating_duration_since(Instant::now()));
        let pause = [self.killing.then_some(KILL_ROUND), left].into_iter().flatten().min()?;
        Some(Timespec {
            tv_sec: pause.as_secs().min(1 << 30) as i64,
            tv_nsec: pause.subsec_nanos() as i64,
        })
    }

    fn obey(&mut self, order: Order) -> io::Result<()> {
        match order {
            Order::Start { argv, env } => {
                let outputs = self.channel.take_outputs();
                if let Err(failure) = self.start(&argv, env, outputs) {
                    let report = match failure {
                        StartFailure::NotRunnable { code, message } => Report::NotRunnable { code, message },
                        StartFailure::Failed(reason) => Report::StartFailed { reason },
                    };
                    self.channel.send(&report, &[])?;
                }
            }
            Order::Terminate => {
                self.ending = true;
                sys::kill_everyone_else(Signal::TERM)?;
            }
            // Sent before our report had arrived: what is started next is not meant.
            Order::Kill if self.said_dead => {}
            Order::Kill => {
                self.ending = true;
                self.killing = true;
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        argv: &[String],
        env: std::collections::BTreeMap<String, String>,
        outputs: Option<(OwnedFd, OwnedFd)>,
    ) -> Result<(), StartFailure> {
        let (Some(program), Some((stdout, stderr))) = (argv.first(), outputs) else {
            return Err(StartFailure::Failed("a start order without program or pipes".to_owned()));
        };
        // It would look like a command that cannot be run.
        rustix::fs::access(WORKSPACE, Access::EXEC_OK)
            .map_err(|e| StartFailure::Failed(format!("the workspace cannot be entered: {e}")))?;
        let mut command = Command::new(program);
        command.args(&argv[1..]).env_clear().envs(&env).current_dir(WORKSPACE);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        sys::prepare(
            &mut command,
            Prepare {
                new_session: true,
                die_with_parent: false,
                // Rather than this init, with which everybody would die.
                first_out_of_memory: true,
                join: Vec::new(),
            },
        );
        let child = command.spawn().map_err(|e| StartFailure::from_exec(program, &env, &e))?;
        self.step = Pid::from_raw(child.id() as i32);
        (self.childless, self.said_dead) = (false, false);
        Ok(())
    }

    fn reap(&mut self) -> io::Result<()> {
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
        if let Some(code) = ended {
            let left = !self.childless;
            self.channel.send(&Report::StepEnded { code, left }, &[])?;
        }
        if self.childless && self.ending {
            (self.ending, self.killing) = (false, false);
            self.said_dead = true;
            self.channel.send(&Report::AllDead, &[])?;
        }
        Ok(())
    }
}
