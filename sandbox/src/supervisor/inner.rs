//! What the supervisor does with an init of ours inside a sandbox, however that was started.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal},
};

use super::{
    backend::{Event, Launch, StartFailure},
    output::{self, Source},
};
use crate::{
    gate::Gate,
    inner_protocol::{Channel, HOME, Order, Report},
    sys::{self, Reaped},
};

/// The init always listens; if it takes no order for this long, the sandbox is broken.
pub const ORDER_PATIENCE: Duration = Duration::from_secs(10);
/// Where the image or the host does not say otherwise.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The supervisor's side of an init.
pub struct Inner {
    /// Variables that every step has.
    base: BTreeMap<String, String>,
    channel: Option<Channel>,
    life: Life,
    gate: Option<Gate>,
    childless: bool,
    closing: bool,
}

/// By what we know whether anybody inside lives.
pub enum Life {
    /// Our child, the program that made the namespaces. With it dies its init, with that the namespace.
    Child {
        /// Until it is reaped.
        pid: Option<Pid>,
        /// What it says on stderr; only its reasons for not starting are of interest.
        complaints: Source,
    },
    /// Somebody else's child: the init itself. It has not ended before everybody in its namespace has.
    Peer(OwnedFd),
}

impl Life {
    /// What it had to say about why there is no init.
    pub fn complaint(&self) -> String {
        let mut said = Vec::new();
        if let Self::Child { complaints, .. } = self {
            complaints.read(&mut vec![0; output::CHUNK], |chunk| said.extend_from_slice(chunk));
        }
        String::from_utf8_lossy(&said).trim().to_owned()
    }
}

impl Inner {
    /// `env`: what steps see beyond what every sandbox sets.
    pub fn new(env: &BTreeMap<String, String>, channel: Channel, life: Life, gate: Option<Gate>) -> Self {
        let mut base = env.clone();
        let path = env.get("PATH").map_or(PATH, String::as_str);
        for (name, value) in [
            ("HOME", HOME.to_owned()),
            ("PATH", format!("{HOME}/.local/bin:{path}")),
            ("TMPDIR", "/tmp".to_owned()),
            ("LANG", "C.UTF-8".to_owned()),
        ] {
            base.insert(name.to_owned(), value);
        }
        Self {
            base,
            channel: Some(channel),
            life,
            gate,
            childless: false,
            closing: false,
        }
    }

    pub fn launch(&mut self, launch: Launch<'_>) -> io::Result<()> {
        let mut env = self.base.clone();
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
        match (&self.channel, &self.life) {
            (Some(_), _) => drop(self.order(&Order::Kill, &[])),
            // Closing: the init has been hung up on, and is helped along.
            (None, Life::Child { pid: Some(pid), .. }) => drop(rustix::process::kill_process(*pid, Signal::KILL)),
            (None, Life::Peer(init)) => drop(rustix::process::pidfd_send_signal(init, Signal::KILL)),
            (None, Life::Child { pid: None, .. }) => {}
        }
    }

    fn order(&self, order: &Order, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.channel
            .as_ref()
            .ok_or_else(|| io::Error::other("the sandbox is being closed"))?
            .send(order, descriptors)
    }

    /// Hangs up: the init exits, and the kernel kills everybody in its namespace.
    pub fn close(&mut self) {
        self.closing = true;
        self.channel = None;
        if let Some(gate) = &self.gate {
            gate.kill();
        }
    }

    pub fn socket(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    pub fn collect(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        if let Err(e) = self.hear(&mut events) {
            self.channel = None;
            events.push(Event::Broken(match self.life {
                Life::Child { .. } => format!("the init inside bubblewrap is gone: {e}"),
                Life::Peer(_) => "the container has ended".to_owned(),
            }));
        }
        self.reap(&mut events);
        if self.closing && self.childless && self.is_dead() {
            events.push(Event::AllDead);
        }
        events
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        while !self.childless {
            match sys::reap() {
                Reaped::Ended(ended, code) => {
                    if let Life::Child { pid, .. } = &mut self.life
                        && *pid == Some(ended)
                    {
                        *pid = None;
                        if !self.closing {
                            events.push(Event::Broken(format!("bubblewrap ended with status {code}")));
                        }
                    }
                    if self.gate.as_ref().is_some_and(|gate| gate.pid() == ended) {
                        self.gate = None;
                        if !self.closing {
                            events.push(Event::Broken("the gate of its network has ended".to_owned()));
                        }
                    }
                }
                Reaped::Busy => break,
                // Its last child was the namespace's init, whose end is the end of all others; or the gate.
                Reaped::Childless => self.childless = true,
            }
        }
    }

    fn is_dead(&self) -> bool {
        match &self.life {
            Life::Child { .. } => true,
            Life::Peer(init) => {
                let mut fds = [PollFd::new(init, PollFlags::IN)];
                poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
            }
        }
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
