//! The supervisor of one sandbox: a single-threaded loop over signals, pipes, connections and deadlines that never waits for any of them.

pub mod backend;
mod bubblewrap;
mod connection;
mod docker;
mod inner;
mod output;
mod tree;

use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::DirBuilderExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    time::{Duration, Instant},
};

pub use bubblewrap::shell;

use backend::{Backend, Event, Launch, StartFailure};
use connection::Connection;
use output::{Burst, Sink, Source};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    cgroup::Group,
    journal::{Journal, Meta, Record},
    layers::{self, Means},
    layout::{self, Layout},
    protocol::{self, Create, ExitRecord, Reply, Request},
    sys,
};

/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// Between two attempts at killing what is left.
const KILL_ROUND: Duration = Duration::from_millis(5);
/// How long output is waited for after the process itself has exited, where others still hold its pipes.
const DRAIN: Duration = Duration::from_millis(200);
/// Between two looks at whether the sandbox's folder is still there. Somebody who deletes it expects the agent to end, but not this instant.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// The executor sends what to supervise at once.
const CREATE_PATIENCE: Duration = Duration::from_secs(10);
/// An executor, its successor and the reaper: a handful at once. More are turned away.
const MAX_CONNECTIONS: usize = 64;

/// What supervisors read into, for [`run`].
pub fn buffer() -> Vec<u8> {
    vec![0; output::CHUNK]
}

/// Supervises what the first frame on `first` says, until the sandbox is destroyed or its lifetime is over.
pub fn run(root: &Path, mut first: UnixStream, buffer: Vec<u8>) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    first.set_read_timeout(Some(CREATE_PATIENCE))?;
    let create: Create = protocol::read_blocking(&mut first)?;
    match Supervisor::create(root, create, &mut first, buffer) {
        Ok(mut supervisor) => {
            if let Ok(mut connection) = Connection::new(0, first) {
                connection.reply(&Reply::Done);
                supervisor.connections.push(connection);
            }
            supervisor.serve()
        }
        Err(e) => {
            let reply = if e.kind() == io::ErrorKind::AlreadyExists {
                Reply::Exists
            } else {
                Reply::Refused { reason: e.to_string() }
            };
            io::Write::write_all(&mut first, &protocol::encode(&reply)?)?;
            Err(e)
        }
    }
}

struct Supervisor {
    layout: Layout,
    journal: Journal,
    /// The highest fencing token seen.
    token: u64,
    /// Held while this process lives.
    _lock: fs::File,
    signals: OwnedFd,
    listener: UnixListener,
    connections: Vec<Connection>,
    next_connection: u64,
    group: Group,
    backend: Backend,
    lifetime_over: Option<Instant>,
    next_look: Instant,
    step: Option<Step>,
    /// A start that waits until leftovers of earlier steps are dead.
    pending: Option<(u64, StepRequest)>,
    kill: Option<Kill>,
    closing: Option<Closing>,
    /// Pipes that outlived their step; what still comes is thrown away, so that whoever writes never blocks.
    leftovers: Vec<Source>,
    /// For reading; see [`buffer`].
    buffer: Vec<u8>,
}

struct StepRequest {
    step: String,
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    time_limit: Duration,
}

/// The running step.
struct Step {
    name: String,
    started_at_ms: u64,
    deadline: Option<Instant>,
    stdout: Option<Source>,
    stderr: Option<Source>,
    sink: Sink,
    /// Set when the process has ended.
    code: Option<i32>,
    /// Other processes were there when it did.
    left_running: bool,
    drain_until: Option<Instant>,
    timed_out: bool,
    /// Connections that wait for its end.
    waiting: Vec<u64>,
    /// Connections that wait for it to be dead.
    killing: Vec<u64>,
}

/// How far killing everything has got.
enum Kill {
    Asked { until: Instant },
    Forced { next: Instant },
}

struct Closing {
    reason: String,
    /// Connections that asked for it.
    waiting: Vec<u64>,
    /// Connections whose step this ends.
    lost: Vec<u64>,
    /// What is left of it is of no interest any more.
    destroyed: bool,
    /// Nothing is left.
    dead: bool,
}

/// What a polled descriptor belongs to.
#[derive(Clone, Copy)]
enum Polled {
    Signals,
    Backend,
    Listener,
    Stdout,
    Stderr,
    Leftover(usize),
    Connection(usize),
}

impl Supervisor {
    fn create(root: &Path, create: Create, first: &mut UnixStream, buffer: Vec<u8>) -> io::Result<Self> {
        let layout = Layout::new(root, &create.name);
        let folder = |path: &Path, mode| fs::DirBuilder::new().mode(mode).create(path);
        folder(&layout.folder, 0o700)?;
        // From here on AlreadyExists would mean something else.
        Self::create_inside(create, layout, first, buffer, folder).map_err(|e| io::Error::other(e.to_string()))
    }

    fn create_inside(
        create: Create,
        layout: Layout,
        first: &mut UnixStream,
        buffer: Vec<u8>,
        folder: impl Fn(&Path, u32) -> io::Result<()>,
    ) -> io::Result<Self> {
        let lock = layout::try_lock(&layout.folder)?.ok_or_else(|| io::Error::other("somebody else holds the lock"))?;
        sys::detach_stdio()?;
        let log = layout.log();
        std::panic::set_hook(Box::new(move |panic| drop(fs::write(&log, panic.to_string()))));
        sys::become_subreaper()?;
        let meta = Meta {
            name: create.name.clone(),
            provider: create.backend.provider().to_owned(),
            supervisor: std::process::id(),
            boot_id: create.boot_id.clone(),
            created_at_ms: layout::now_ms(),
            lifetime_ms: create.lifetime.as_millis() as u64,
            token: create.token,
            cgroups: create.cgroups.folders(&create.name),
            base: create.base.clone(),
        };
        let mut journal = Journal::create(&layout.journal())?;
        journal.append(Record::Made(meta))?;
        for path in [layout.home(), layout.workspace(), layout.tmp()] {
            folder(&path, 0o755)?;
        }
        if let Some(based) = create.base.as_ref().filter(|based| based.means == Means::Overlay) {
            layers::mount(&layout, &based.folder)?;
        }
        // The path of a socket may be 108 bytes long; a relative one always fits.
        std::env::set_current_dir(&layout.folder)?;
        let signals = sys::signal_descriptor()?;
        let listener = UnixListener::bind("control")?;
        listener.set_nonblocking(true)?;
        let mut group = Group::create(&create.cgroups, &create.name, create.limits())?;
        let backend = Backend::start(&create, &layout, &mut group, first)
            // `destroy` does it too, unless the folder was deleted meanwhile, which may be why this failed.
            .inspect_err(|_| group.dissolve())?;
        Ok(Self {
            layout,
            journal,
            token: create.token,
            _lock: lock,
            signals,
            listener,
            connections: Vec::new(),
            next_connection: 1,
            group,
            backend,
            lifetime_over: Instant::now().checked_add(create.lifetime),
            next_look: Instant::now() + LOOK_INTERVAL,
            step: None,
            pending: None,
            kill: None,
            closing: None,
            leftovers: Vec::new(),
            buffer,
        })
    }

    fn serve(&mut self) -> io::Result<()> {
        while !self.closing.as_ref().is_some_and(|c| c.dead) {
            for polled in self.wait()? {
                self.react(polled);
            }
            for event in self.backend.collect() {
                self.on_event(event);
            }
            self.on_time(Instant::now());
            self.connections.retain(|c| !c.broken);
        }
        if let Some(closing) = self.closing.take() {
            if !closing.destroyed {
                // First the reason, then the news. On a full disk there are only the news.
                let _ = self.journal.append(Record::Ended(closing.reason.clone()));
            }
            // Whoever destroys it knows the groups from the journal.
            if !closing.destroyed || !self.is_there() {
                self.group.dissolve();
            }
            // Nobody else would find the mounts. We are in the folder, wherever it is by now.
            if !self.is_there() {
                let _ = layers::unmount(Path::new("."));
            }
            let lost = Reply::Lost { reason: closing.reason };
            closing.lost.into_iter().for_each(|id| self.reply(id, &lost));
            closing.waiting.into_iter().for_each(|id| self.reply(id, &Reply::Done));
        }
        Ok(())
    }

    fn wait(&mut self) -> io::Result<Vec<Polled>> {
        let mut what = vec![Polled::Signals, Polled::Listener];
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        if let Some(fd) = self.backend.descriptor() {
            what.push(Polled::Backend);
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        if let Some(step) = &self.step {
            for (source, polled) in [(&step.stdout, Polled::Stdout), (&step.stderr, Polled::Stderr)] {
                if let Some(source) = source {
                    what.push(polled);
                    fds.push(PollFd::new(source, PollFlags::IN));
                }
            }
        }
        for (i, source) in self.leftovers.iter().enumerate() {
            what.push(Polled::Leftover(i));
            fds.push(PollFd::new(source, PollFlags::IN));
        }
        for (i, connection) in self.connections.iter().enumerate() {
            what.push(Polled::Connection(i));
            fds.push(PollFd::new(connection, connection.interest()));
        }
        let timeout = self.next_deadline().map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            // Rounded up, so as not to wake just before the deadline.
            Timespec {
                tv_sec: left.as_secs().min(1 << 30) as i64,
                tv_nsec: (left.subsec_nanos() as i64 + 1_000_000).min(999_999_999),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Backwards: leftovers that end are removed by their index.
        Ok(fds
            .iter()
            .zip(what)
            .filter(|(fd, _)| !fd.revents().is_empty())
            .map(|(_, what)| what)
            .rev()
            .collect())
    }

    fn next_deadline(&self) -> Option<Instant> {
        let kill = self.kill.as_ref().map(|k| match k {
            Kill::Asked { until } => *until,
            Kill::Forced { next } => *next,
        });
        let step = self
            .step
            .as_ref()
            .filter(|_| self.kill.is_none())
            .and_then(|s| if s.code.is_some() { s.drain_until } else { s.deadline });
        let (lifetime, look) = match self.closing {
            None => (self.lifetime_over, Some(self.next_look)),
            Some(_) => (None, None),
        };
        [kill, step, lifetime, look].into_iter().flatten().min()
    }

    /// Whether the executor can still find this sandbox. Even where an agent that goes on writing has kept the folder from being deleted as a
    /// whole, the journal is gone.
    fn is_there(&self) -> bool {
        self.journal.is_at(&self.layout.journal())
    }

    fn react(&mut self, polled: Polled) {
        match polled {
            Polled::Signals => {
                if sys::drain_signals(&self.signals) {
                    self.close("the supervisor was told to end", None);
                }
            }
            // `collect` follows anyway.
            Polled::Backend => {}
            Polled::Listener => {
                while let Ok((stream, _)) = self.listener.accept() {
                    if self.connections.len() < MAX_CONNECTIONS
                        && let Ok(connection) = Connection::new(self.next_connection, stream)
                    {
                        self.connections.push(connection);
                    }
                    self.next_connection += 1;
                }
            }
            Polled::Stdout | Polled::Stderr => self.read_output(),
            Polled::Leftover(i) => {
                if self.leftovers[i].read(&mut self.buffer, |_| {}) == Burst::Ended {
                    self.leftovers.swap_remove(i);
                }
            }
            Polled::Connection(i) => {
                let connection = &mut self.connections[i];
                let id = connection.id;
                connection.flush();
                for request in connection.receive(&mut self.buffer) {
                    self.on_request(id, request);
                }
            }
        }
    }

    fn read_output(&mut self) {
        let Some(step) = &mut self.step else { return };
        let Step { stdout, stderr, sink, .. } = step;
        let now = layout::now_ms();
        if let Some(source) = stdout
            && source.read(&mut self.buffer, |chunk| sink.stdout(chunk, now)) == Burst::Ended
        {
            *stdout = None;
        }
        if let Some(source) = stderr
            && source.read(&mut self.buffer, |chunk| sink.stderr(chunk)) == Burst::Ended
        {
            *stderr = None;
        }
    }

    fn reply(&mut self, id: u64, reply: &Reply) {
        // Whoever has hung up is not interested any more.
        if let Some(connection) = self.connections.iter_mut().find(|c| c.id == id) {
            connection.reply(reply);
        }
    }

    fn on_request(&mut self, id: u64, request: Request) {
        let token = match request {
            Request::Hello { token } | Request::Start { token, .. } | Request::Kill { token, .. } => Some(token),
            Request::Destroy | Request::Ping => None,
        };
        if let Some(token) = token
            && let Err(reply) = self.check_token(token)
        {
            return self.reply(id, &reply);
        }
        match request {
            Request::Hello { .. } | Request::Ping => self.reply(id, &Reply::Done),
            Request::Start {
                step,
                argv,
                env,
                time_limit_ms,
                ..
            } => {
                let request = StepRequest {
                    step,
                    argv,
                    env,
                    time_limit: Duration::from_millis(time_limit_ms),
                };
                if let Err(reply) = self.start(id, request) {
                    self.reply(id, &reply);
                }
            }
            Request::Kill { step, .. } => match &mut self.step {
                Some(running) if running.name == step && running.code.is_none() => {
                    running.killing.push(id);
                    if self.kill.is_none() {
                        self.ask_to_end();
                    }
                }
                _ => self.reply(id, &Reply::Done),
            },
            Request::Destroy => self.close("it was destroyed", Some(id)),
        }
    }

    fn check_token(&mut self, token: u64) -> Result<(), Reply> {
        if token < self.token {
            return Err(Reply::Fenced { current: self.token });
        }
        if token > self.token {
            self.journal.append(Record::Token(token)).map_err(|e| Reply::Refused {
                reason: format!("keep the token: {e}"),
            })?;
            self.token = token;
        }
        Ok(())
    }

    /// Starts a step or attaches to it. `Err` is an answer that can be given now.
    fn start(&mut self, id: u64, request: StepRequest) -> Result<(), Reply> {
        let refused = |reason: String| Reply::Refused { reason };
        if let Some(closing) = &self.closing {
            return Err(Reply::Lost {
                reason: closing.reason.clone(),
            });
        }
        if !layout::is_step_name(&request.step) {
            return Err(refused(format!("{:?} is not a name for a step", request.step)));
        }
        // An end that is kept is told first: an executor that comes back after a crash asks for steps that have long ended, while a later
        // one, whose start it does not know of either, still runs.
        if let Some(exit) = self.journal.content().exits.get(&request.step) {
            return Err(Reply::Exited(exit.clone()));
        }
        if let Some(running) = &mut self.step {
            if running.name == request.step {
                running.waiting.push(id);
                return Ok(());
            }
            return Err(refused(format!("the step {} is still running", running.name)));
        }
        if let Some((_, pending)) = &self.pending {
            return Err(refused(format!("the step {} is about to start", pending.step)));
        }
        // Daemons live until the sandbox goes, but not so many that a step cannot run beside them (a fork bomb's remains).
        if self.group.is_crowded() {
            self.pending = Some((id, request));
            self.force_end();
            return Ok(());
        }
        self.launch(id, request)
    }

    fn launch(&mut self, id: u64, request: StepRequest) -> Result<(), Reply> {
        let name = request.step;
        if self.journal.content().started.contains(&name) {
            return Err(Reply::Lost {
                reason: format!("the step {name} was started before and its end was not recorded"),
            });
        }
        let refused = |e: io::Error| Reply::Refused {
            reason: format!("prepare the step {name}: {e}"),
        };
        let (stdout, stdout_end) = output::pipe().map_err(refused)?;
        let (stderr, stderr_end) = output::pipe().map_err(refused)?;
        self.journal.append(Record::Started(name.clone())).map_err(refused)?;
        self.step = Some(Step {
            started_at_ms: layout::now_ms(),
            deadline: Instant::now().checked_add(request.time_limit),
            stdout: Some(stdout),
            stderr: Some(stderr),
            sink: Sink::new(&self.layout, &name),
            name,
            code: None,
            left_running: false,
            drain_until: None,
            timed_out: false,
            waiting: vec![id],
            killing: Vec::new(),
        });
        let launch = Launch {
            argv: &request.argv,
            env: &request.env,
            stdout: stdout_end,
            stderr: stderr_end,
        };
        if let Err(failure) = self.backend.launch(launch) {
            self.on_start_failure(failure);
        }
        Ok(())
    }

    fn on_start_failure(&mut self, failure: StartFailure) {
        match failure {
            StartFailure::NotRunnable { code, message } => {
                if let Some(step) = &mut self.step {
                    step.sink.stderr(message.as_bytes());
                    step.code = Some(code);
                }
                self.finish();
            }
            StartFailure::Failed(reason) => {
                let Some(step) = self.step.take() else { return };
                // Nothing ran: it may be tried again. Where that cannot be kept, it counts as started, which is the safe mistake.
                let _ = self.journal.append(Record::NotStarted(step.name.clone()));
                let reply = Reply::Refused {
                    reason: format!("start the step {}: {reason}", step.name),
                };
                step.waiting.iter().for_each(|id| self.reply(*id, &reply));
                step.killing.iter().for_each(|id| self.reply(*id, &Reply::Done));
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::StepEnded { code, left } => {
                if let Some(step) = &mut self.step {
                    step.code = Some(code);
                    step.left_running = left;
                    step.drain_until = Some(Instant::now() + DRAIN);
                }
            }
            Event::StartFailed(failure) => self.on_start_failure(failure),
            Event::AllDead => self.on_all_dead(),
            Event::Broken(reason) => self.close(&reason, None),
        }
    }

    fn on_all_dead(&mut self) {
        self.kill = None;
        self.group.forbid_forks(false);
        if let Some(closing) = &mut self.closing {
            closing.dead = true;
            return;
        }
        // What is in the pipes is all there will ever be, and a burst is larger than a pipe.
        self.read_output();
        if self.step.as_ref().is_some_and(|s| s.code.is_some()) {
            self.finish();
        }
        if let Some((id, request)) = self.pending.take()
            && let Err(reply) = self.launch(id, request)
        {
            self.reply(id, &reply);
        }
    }

    fn on_time(&mut self, now: Instant) {
        if self.closing.is_none() && self.lifetime_over.is_some_and(|at| now >= at) {
            self.close("its lifetime is over", None);
        }
        if self.closing.is_none() && now >= self.next_look {
            self.next_look = now + LOOK_INTERVAL;
            if !self.is_there() {
                self.close("its folder was deleted or moved", None);
            }
        }
        match self.kill {
            Some(Kill::Asked { until }) if now >= until => self.force_end(),
            Some(Kill::Forced { next }) if now >= next => {
                self.backend.kill();
                self.kill = Some(Kill::Forced {
                    next: Instant::now() + KILL_ROUND,
                });
                for event in self.backend.collect() {
                    self.on_event(event);
                }
            }
            Some(_) => {}
            None => self.on_step_time(now),
        }
    }

    fn on_step_time(&mut self, now: Instant) {
        let Some(step) = &mut self.step else { return };
        match step.code {
            None if step.deadline.is_some_and(|at| now >= at) => {
                step.timed_out = true;
                self.ask_to_end();
            }
            Some(_) if (step.stdout.is_none() && step.stderr.is_none()) || step.drain_until.is_none_or(|at| now >= at) => self.finish(),
            _ => {}
        }
    }

    fn ask_to_end(&mut self) {
        self.backend.terminate();
        self.kill = Some(Kill::Asked {
            until: Instant::now() + GRACE,
        });
    }

    fn force_end(&mut self) {
        self.group.forbid_forks(true);
        self.backend.kill();
        self.kill = Some(Kill::Forced {
            next: Instant::now() + KILL_ROUND,
        });
    }

    /// Records the end of the step, whose process has ended, and tells everybody.
    fn finish(&mut self) {
        let Some(mut step) = self.step.take() else { return };
        let stdout_tail = step.sink.finish();
        self.leftovers
            .extend([step.stdout.take(), step.stderr.take()].into_iter().flatten());
        let exit = ExitRecord {
            // A step without status cannot get here; 255 would say that something is wrong with it.
            code: step.code.unwrap_or(255),
            timed_out: step.timed_out,
            out_of_memory: self.group.out_of_memory(),
            left_running: step.left_running,
            started_at_ms: step.started_at_ms,
            finished_at_ms: layout::now_ms().max(step.started_at_ms),
            stdout_bytes: step.sink.stdout_bytes(),
            stdout_tail,
            stderr_bytes: step.sink.stderr_bytes(),
            output_error: step.sink.error.take(),
        };
        let record = Record::Exited {
            step: step.name.clone(),
            exit: exit.clone(),
        };
        let reply = match self.journal.append(record) {
            Ok(()) => Reply::Exited(exit),
            Err(e) => Reply::Lost {
                reason: format!("the end of the step {} could not be recorded: {e}", step.name),
            },
        };
        step.waiting.iter().for_each(|id| self.reply(*id, &reply));
        step.killing.iter().for_each(|id| self.reply(*id, &Reply::Done));
    }

    /// Begins the end: everything is killed, then this process exits.
    fn close(&mut self, reason: &str, waiting: Option<u64>) {
        if let Some(closing) = &mut self.closing {
            closing.destroyed |= waiting.is_some();
            closing.waiting.extend(waiting);
            return;
        }
        let mut lost: Vec<u64> = self.pending.take().map(|(id, _)| id).into_iter().collect();
        let destroyed = waiting.is_some();
        let mut waiting: Vec<u64> = waiting.into_iter().collect();
        if let Some(step) = self.step.take() {
            lost.extend(step.waiting);
            waiting.extend(step.killing);
        }
        self.closing = Some(Closing {
            reason: reason.to_owned(),
            waiting,
            lost,
            destroyed,
            dead: false,
        });
        self.backend.close();
        self.force_end();
    }
}
