//! The init of a bubblewrap sandbox: process 1 of its pid namespace. Starts what the supervisor orders, reaps everybody, kills everybody.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{DumpableBehavior, Pid, Resource, Rlimit, Signal},
};

use crate::{
    inner_protocol::{Channel, Order, Report, WORKSPACE},
    supervisor::backend::StartFailure,
    sys::{self, Prepare, Reaped},
};

/// Between two rounds of killing; killed processes usually leave within the first.
const KILL_ROUND: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// Runs the init on the socket that is its stdin, until the supervisor hangs up. `most_processes`: a limit, where no control group sets it. Then the kernel kills the whole namespace.
pub fn run(most_processes: Option<u64>) -> io::Result<()> {
    sys::close_inherited()?;
    // The agent has the same user id: without this it could trace us, or open our descriptors in /proc.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    if most_processes.is_some() {
        // The kernel counts a user's processes for each user namespace apart, so this is a limit on the sandbox. (It does not bind host root.)
        rustix::process::setrlimit(
            Resource::Nproc,
            Rlimit {
                current: most_processes,
                maximum: most_processes,
            },
        )?;
    }
    let signals = sys::signal_descriptor()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    sys::detach_stdio()?;
    let mut init = Init {
        channel: Channel::new(socket),
        step: None,
        childless: true,
        ending: false,
        killing: false,
    };
    init.channel.send(&Report::Ready, &[])?;
    while init.turn(&signals)? {}
    Ok(())
}

struct Init {
    channel: Channel,
    step: Option<Pid>,
    childless: bool,
    /// Everybody is to end, and that they have is not yet reported.
    ending: bool,
    /// With SIGKILL.
    killing: bool,
}

impl Init {
    fn turn(&mut self, signals: &OwnedFd) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        match poll(&mut fds, self.killing.then_some(&KILL_ROUND)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let heard = !fds[0].revents().is_empty();
        sys::drain_signals(signals);
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
        let mut command = Command::new(program);
        command.args(&argv[1..]).env_clear().envs(&env).current_dir(WORKSPACE);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        sys::prepare(
            &mut command,
            Prepare {
                new_session: true,
                die_with_parent: false,
                first_out_of_memory: false,
                join: Vec::new(),
            },
        );
        let child = command.spawn().map_err(|e| StartFailure::from_exec(program, &env, &e))?;
        self.step = Pid::from_raw(child.id() as i32);
        self.childless = false;
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
            self.channel.send(&Report::AllDead, &[])?;
        }
        Ok(())
    }
}
