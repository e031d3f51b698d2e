//! A worker: a machine with a folder of sandboxes, and an executor process on it that speaks the real protocol and comes and goes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use evalgrid_proto::v1::{Heartbeat, Hello, Lease, from_worker, to_worker::Message};
use rand::Rng as _;

use crate::{
    check::Fact,
    client::PROVIDER,
    outbox::{News, Outbox},
    sim::{Event, MS, SECOND, Sim},
    trial::{Running, Stage},
    trouble::Trouble,
};

/// Between two tries to connect, at most.
const LONGEST_PAUSE: u64 = 5 * SECOND;
/// How long a scheduler may take to answer a greeting.
const WELCOME_DEADLINE: u64 = 10 * SECOND;
/// Tries to destroy one sandbox, as in the executor.
const DESTROY_TRIES: u32 = 10;

/// What a worker does next.
pub enum WorkerEvent {
    /// Its process starts.
    Boot,
    /// It connects.
    Connect,
    /// It beats, on this connection.
    Beat(u64),
    /// It has waited long enough for an answer to its greeting.
    NoWelcome(u64),
    /// Its leases may have run out.
    Silence,
    /// A trial goes on; the second number tells whether it still is where it was.
    Trial(u64, u64),
    /// A sandbox is destroyed, at this try, and then a slot is free or a trial over.
    Destroy(String, u32, Then),
}

/// What follows once a sandbox is destroyed.
#[derive(Clone, Copy)]
pub enum Then {
    /// The trial under this token is over.
    TrialOver(u64),
    /// A slot is free.
    SlotFree,
    /// Nothing.
    Nothing,
}

/// A sandbox in the worker's folder.
#[derive(Default)]
pub struct Sandbox {
    /// The highest token that its supervisor has seen.
    pub token: u64,
    /// Steps that were started, and when each is done.
    pub started: BTreeMap<String, u64>,
    /// Its supervisor has died.
    pub dead: bool,
}

/// See the module.
pub struct Worker {
    /// Lives in its folder.
    pub id: String,
    /// Tells the lives of its process apart.
    pub life: u64,
    /// Its process gets no time until then.
    pub stopped_until: u64,
    /// Nothing reaches it until then.
    pub cut_off_until: u64,
    slots: u32,
    boot: u32,
    /// What its folder holds.
    pub folder: BTreeMap<String, Sandbox>,
    /// Its process.
    pub process: Option<Process>,
}

/// An executor.
#[derive(Default)]
pub struct Process {
    incarnation: String,
    conn: Option<u64>,
    welcomed: bool,
    greeted_at: u64,
    lease: u64,
    heartbeat: u64,
    leases_end: Option<u64>,
    beats: VecDeque<(u64, u64)>,
    beat: u64,
    tries: u32,
    stopping: bool,
    /// What it has to tell.
    pub outbox: Outbox,
    /// What it works on, by token.
    pub trials: BTreeMap<u64, Running>,
    /// In which sandbox each token works or has worked.
    pub sandbox_of: BTreeMap<u64, String>,
    destroying: BTreeSet<String>,
}

impl Worker {
    /// The worker with this number.
    pub fn new(number: usize, slots: u32) -> Worker {
        Worker {
            id: format!("worker-{number}"),
            life: 0,
            stopped_until: 0,
            cut_off_until: 0,
            slots,
            boot: 0,
            folder: BTreeMap::new(),
            process: None,
        }
    }
}

impl Sim {
    /// Something happens to a worker.
    pub fn worker_event(&mut self, worker: usize, event: WorkerEvent) {
        match event {
            WorkerEvent::Boot => {
                let this = &mut self.workers[worker];
                this.process = Some(Process {
                    incarnation: format!("{}-{}", this.id, this.life),
                    ..Process::default()
                });
                self.tell(|| format!("worker {worker} starts"));
                self.at_worker(worker, MS, WorkerEvent::Connect);
            }
            WorkerEvent::Connect => self.greet(worker),
            WorkerEvent::Beat(conn) => self.beat(worker, conn),
            WorkerEvent::NoWelcome(conn) => {
                let process = self.workers[worker].process.as_mut();
                if process.is_some_and(|process| process.conn == Some(conn) && !process.welcomed) {
                    self.hang_up(worker);
                }
            }
            WorkerEvent::Silence => self.look_for_silence(worker),
            WorkerEvent::Trial(token, step) => self.trial_goes_on(worker, token, step),
            WorkerEvent::Destroy(sandbox, tries, then) => self.destroy(worker, sandbox, tries, then),
        }
    }

    /// Lets something happen to a worker in the life that it lives now.
    pub fn at_worker(&mut self, worker: usize, wait: u64, event: WorkerEvent) {
        let life = self.workers[worker].life;
        self.at(wait, Event::Worker(worker, life, event));
    }

    /// Its process.
    pub fn process(&mut self, worker: usize) -> Option<&mut Process> {
        self.workers[worker].process.as_mut()
    }

    fn pause(&mut self, worker: usize) {
        let Some(process) = self.workers[worker].process.as_mut() else {
            return;
        };
        process.tries += 1;
        let longest = ((100 * MS) << process.tries.min(10)).min(LONGEST_PAUSE);
        let wait = self.rng.random_range(longest / 2..longest);
        self.at_worker(worker, wait, WorkerEvent::Connect);
    }

    fn greet(&mut self, worker: usize) {
        if self.workers[worker].process.as_ref().is_none_or(|process| process.conn.is_some()) {
            return;
        }
        // What is not listed counts as gone: who cannot list does not greet.
        let failed = self.strike(Trouble::ListFailed, 0.1);
        let active = self.nodes.iter().position(|node| node.is_active());
        let any = self.rng.random_range(0..self.nodes.len());
        let node = active.filter(|_| self.rng.random_bool(0.7)).unwrap_or(any);
        let conn = if failed { None } else { self.connect(worker, node) };
        let now = self.now;
        let this = &mut self.workers[worker];
        let Some(process) = this.process.as_mut() else { return };
        let Some(conn) = conn else { return self.pause(worker) };
        process.conn = Some(conn);
        process.welcomed = false;
        process.greeted_at = now;
        process.beats.clear();
        let hello = Hello {
            worker_id: this.id.clone(),
            incarnation: process.incarnation.clone(),
            boot_id: format!("{}-boot-{}", this.id, this.boot),
            slots: match process.stopping {
                true => 0,
                false => this.slots.saturating_sub(process.outbox.occupied),
            },
            providers: vec![PROVIDER.to_owned()],
            held: process.trials.keys().copied().collect(),
            sandboxes: this.folder.keys().cloned().collect(),
            role: evalgrid_proto::v1::WorkerRole::Executor.into(),
        };
        let again = process.outbox.greet();
        self.tell(|| format!("worker {worker} greets: {hello:?}"));
        self.send_up(conn, from_worker::Message::Hello(hello));
        for report in again {
            self.troubles.count(Trouble::ReportsSentAgain);
            self.send_up(conn, from_worker::Message::Report(report));
        }
        self.at_worker(worker, WELCOME_DEADLINE, WorkerEvent::NoWelcome(conn));
    }

    fn beat(&mut self, worker: usize, conn: u64) {
        let now = self.now;
        let Some(process) = self.process(worker).filter(|process| process.conn == Some(conn)) else {
            return;
        };
        process.beat += 1;
        let number = process.beat;
        process.beats.push_back((number, now));
        let wait = process.heartbeat;
        self.send_up(conn, from_worker::Message::Heartbeat(Heartbeat { number }));
        self.at_worker(worker, wait, WorkerEvent::Beat(conn));
    }

    /// The scheduler has heard what was said then.
    fn heard(&mut self, worker: usize, sent: u64) {
        let now = self.now;
        let Some(process) = self.process(worker) else { return };
        let end = sent + process.lease;
        process.leases_end = process.leases_end.max(Some(end));
        let wait = end.saturating_sub(now);
        self.at_worker(worker, wait, WorkerEvent::Silence);
    }

    fn look_for_silence(&mut self, worker: usize) {
        let now = self.now;
        let Some(process) = self.process(worker) else { return };
        if process.leases_end.is_none_or(|end| end > now) {
            return;
        }
        process.leases_end = None;
        for _ in std::mem::take(&mut process.trials) {
            process.outbox.free_slot();
        }
        process.outbox.forget_trials();
        self.tell(|| format!("worker {worker} has heard nothing for a lease"));
        self.hang_up(worker);
    }

    fn hang_up(&mut self, worker: usize) {
        let Some(conn) = self.process(worker).and_then(|process| process.conn.take()) else {
            return;
        };
        self.close_from_worker(conn);
        self.pause(worker);
    }

    /// A connection is over for the worker.
    pub fn worker_loses(&mut self, worker: usize, conn: u64) {
        if self.process(worker).is_some_and(|process| process.conn == Some(conn)) {
            self.hang_up(worker);
        }
    }

    /// Sends what there is to tell.
    pub fn flush(&mut self, worker: usize) {
        loop {
            let Some(process) = self.process(worker).filter(|process| process.welcomed) else {
                return;
            };
            let (Some(conn), Some(report)) = (process.conn, process.outbox.next_report()) else {
                return;
            };
            self.send_up(conn, from_worker::Message::Report(report));
        }
    }

    /// A scheduler's message arrives.
    pub fn worker_hears(&mut self, worker: usize, conn: u64, message: Message) {
        let Some(process) = self.workers[worker].process.as_mut().filter(|process| process.conn == Some(conn)) else {
            return;
        };
        match message {
            Message::Welcome(welcome) => {
                process.welcomed = true;
                process.tries = 0;
                process.lease = welcome.lease_ms * MS;
                process.heartbeat = welcome.heartbeat_ms * MS;
                let sent = process.greeted_at;
                self.heard(worker, sent);
                self.beat(worker, conn);
                self.flush(worker);
            }
            Message::Heartbeat(reply) => {
                while let Some((number, sent)) = process.beats.pop_front() {
                    if number == reply.number {
                        return self.heard(worker, sent);
                    }
                }
            }
            Message::Lease(lease) => self.begin(worker, lease),
            Message::Ack(ack) => {
                ack.stale.iter().for_each(|token| self.abandon(worker, *token));
                self.acknowledged(worker, ack.number, &ack.stale);
                self.flush(worker);
            }
            // Jobs are for judge runners.
            Message::Job(_) => {}
            Message::Revoke(revoke) => {
                let running = process.trials.remove(&revoke.token);
                self.tell(|| format!("worker {worker} loses {}: {}", revoke.token, revoke.reason));
                if let Some(running) = running {
                    self.destroy_soon(worker, running.lease.sandbox, Then::SlotFree);
                }
            }
            Message::Destroy(destroy) => {
                if process.destroying.insert(destroy.sandbox.clone()) {
                    self.destroy_soon(worker, destroy.sandbox, Then::Nothing);
                }
            }
        }
    }

    /// A trial has lost its lease: its sandbox is left alone.
    pub fn abandon(&mut self, worker: usize, token: u64) {
        if let Some(process) = self.process(worker)
            && process.trials.remove(&token).is_some()
        {
            process.outbox.free_slot();
        }
    }

    /// What was reported is durable, but for what came under tokens that hold no lease.
    fn acknowledged(&mut self, worker: usize, number: u64, stale: &[u64]) {
        let Some(process) = self.process(worker) else { return };
        let Some((report, news)) = process.outbox.acknowledge(number) else {
            return;
        };
        let mut facts = Vec::new();
        for step in report.steps {
            if let Some(sandbox) = process.sandbox_of.get(&step.token)
                && !stale.contains(&step.token)
            {
                facts.push(Fact::Step(sandbox.clone(), step.step));
            }
        }
        let mut results = Vec::new();
        for result in report.results {
            if let Some(outcome) = result.outcome
                && !stale.contains(&result.token)
            {
                results.extend(process.trials.get(&result.token).map(|running| (running.trial, outcome.status)));
            }
        }
        facts.extend(
            results
                .into_iter()
                .map(|((batch, run, ordinal), status)| Fact::Settled(batch, run, ordinal, status)),
        );
        let waiting = process
            .trials
            .iter_mut()
            .filter(|(_, running)| running.newest.is_some_and(|newest| news.contains(&newest)));
        let durable: Vec<u64> = waiting
            .map(|(token, running)| {
                running.newest = None;
                *token
            })
            .collect();
        for fact in facts {
            let told = self.disk.tell(fact, self.now);
            self.check(told);
        }
        for token in durable {
            self.trial_is_durable(worker, token);
        }
    }

    /// A lease arrives.
    fn begin(&mut self, worker: usize, lease: Lease) {
        let token = lease.token;
        let Some(process) = self.process(worker) else { return };
        let older = process
            .trials
            .iter()
            .find(|(_, running)| running.lease.sandbox == lease.sandbox)
            .map(|(token, _)| *token);
        match older {
            Some(older) if older >= token => return,
            Some(older) => self.abandon(worker, older),
            None => {}
        }
        self.tell(|| format!("worker {worker} begins {} under {token}, adopting: {}", lease.sandbox, lease.adopt));
        let Some(process) = self.process(worker) else { return };
        process.outbox.occupied += 1;
        if process.stopping {
            process.outbox.push(News::Failure(crate::trial::released(token)));
            return self.flush(worker);
        }
        process.sandbox_of.insert(token, lease.sandbox.clone());
        process.trials.insert(token, Running::new(lease));
        self.trial_begins(worker, token);
    }

    /// Destroys a sandbox before long.
    pub fn destroy_soon(&mut self, worker: usize, sandbox: String, then: Then) {
        let wait = self.rng.random_range(MS..300 * MS);
        self.at_worker(worker, wait, WorkerEvent::Destroy(sandbox, 1, then));
    }

    fn destroy(&mut self, worker: usize, sandbox: String, tries: u32, then: Then) {
        if self.strike(Trouble::DestroyFailed, 0.3) {
            if tries < DESTROY_TRIES {
                let wait = ((100 * MS) << tries).min(60 * SECOND);
                return self.at_worker(worker, wait, WorkerEvent::Destroy(sandbox, tries + 1, then));
            }
        } else {
            self.tell(|| format!("worker {worker} destroys {sandbox}"));
            self.workers[worker].folder.remove(&sandbox);
            self.sandboxes.insert(sandbox.clone(), false);
            if let Some(process) = self.process(worker) {
                process.outbox.push(News::Destroyed(sandbox.clone()));
            }
        }
        let Some(process) = self.process(worker) else { return };
        match then {
            Then::TrialOver(token) => {
                if process.trials.remove(&token).is_some() {
                    process.outbox.free_slot();
                }
            }
            Then::SlotFree => process.outbox.free_slot(),
            Then::Nothing => {
                process.destroying.remove(&sandbox);
            }
        }
        self.flush(worker);
    }

    /// Its process ends, and starts again after a while.
    pub fn kill_worker(&mut self, worker: usize, away: u64) {
        self.tell(|| format!("worker {worker} is killed"));
        let this = &mut self.workers[worker];
        this.process = None;
        this.life += 1;
        this.stopped_until = 0;
        for conn in self.conns_of(|conn| conn.worker == worker) {
            self.close_from_worker(conn);
        }
        self.at_worker(worker, away, WorkerEvent::Boot);
    }

    /// Its machine starts anew: every process is gone, and the folder is on a file system that does not outlive a boot.
    pub fn reboot(&mut self, worker: usize, away: u64) {
        self.kill_worker(worker, away);
        let this = &mut self.workers[worker];
        this.boot += 1;
        for name in std::mem::take(&mut this.folder).into_keys() {
            self.sandboxes.insert(name, false);
        }
    }

    /// It takes nothing more, gives its leases back, and ends.
    pub fn release(&mut self, worker: usize, away: u64) {
        let Some(process) = self.process(worker) else { return };
        process.stopping = true;
        for (token, running) in std::mem::take(&mut process.trials) {
            if !matches!(running.stage, Stage::Reported(_) | Stage::Destroying) {
                process.outbox.push(News::Failure(crate::trial::released(token)));
            }
        }
        self.flush(worker);
        let life = self.workers[worker].life;
        self.at(
            3 * SECOND,
            Event::Over(Box::new(move |sim| {
                if sim.workers[worker].life == life {
                    sim.kill_worker(worker, away);
                }
            })),
        );
    }
}
