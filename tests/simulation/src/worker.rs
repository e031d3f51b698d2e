//! A worker: a machine with a folder of sandboxes, and a process on it, executor or judge runner, that speaks the real protocol and comes and
//! goes. What it does under a lease is in `task`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use evalgrid_proto::v1::{Heartbeat, Hello, JobResult, TrialStatus, WorkerRole, from_worker, job_result, to_worker::Message};
use rand::Rng as _;

use crate::{
    check::{Fact, broken},
    client::PROVIDER,
    models::Met,
    outbox::{News, Outbox},
    sim::{Event, MS, SECOND, Sim},
    task::{Task, Work, released},
    trouble::Trouble,
};

/// Between two tries to connect, at most.
const LONGEST_PAUSE: u64 = 5 * SECOND;
/// How long a scheduler may take to answer a greeting.
const WELCOME_DEADLINE: u64 = 10 * SECOND;
/// Tries to destroy one sandbox, as in the worker.
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
    /// A task goes on; the second number tells whether it still is where it was.
    Task(u64, u64),
    /// A sandbox is destroyed, at this try, and then a slot is free or a task over.
    Destroy(String, u32, Then),
}

/// What follows once a sandbox is destroyed.
#[derive(Clone, Copy)]
pub enum Then {
    /// The task under this token is over.
    TaskOver(u64),
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
    /// What came of those that were asks.
    pub met: BTreeMap<String, Met>,
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
    role: WorkerRole,
    slots: u32,
    boot: u32,
    /// What its folder holds.
    pub folder: BTreeMap<String, Sandbox>,
    /// Its process.
    pub process: Option<Process>,
}

/// An executor, or a judge runner.
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
    pub tasks: BTreeMap<u64, Task>,
    /// In which sandbox each token works or has worked.
    pub sandbox_of: BTreeMap<u64, String>,
    destroying: BTreeSet<String>,
}

impl Worker {
    /// The worker with this number.
    pub fn new(role: WorkerRole, number: usize, slots: u32) -> Worker {
        Worker {
            id: match role {
                WorkerRole::JudgeRunner => format!("judge-runner-{number}"),
                _ => format!("worker-{number}"),
            },
            role,
            life: 0,
            stopped_until: 0,
            cut_off_until: 0,
            slots,
            boot: 0,
            folder: BTreeMap::new(),
            process: None,
        }
    }

    /// What it does under a token.
    pub fn work(&self, token: u64) -> Option<&Work> {
        Some(&self.process.as_ref()?.tasks.get(&token)?.work)
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
            WorkerEvent::Task(token, step) => self.task_goes_on(worker, token, step),
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
            held: process.tasks.keys().copied().collect(),
            sandboxes: this.folder.keys().cloned().collect(),
            role: this.role.into(),
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
        for _ in std::mem::take(&mut process.tasks) {
            process.outbox.free_slot();
        }
        process.outbox.forget_leases();
        self.tell(|| format!("worker {worker} has heard nothing for a lease"));
        self.hang_up(worker);
    }

    /// Whether its leases may still hold: nothing is begun under one that has ended, however late it hears of that.
    pub fn may_act(&mut self, worker: usize) -> bool {
        let now = self.now;
        let end = self.process(worker).and_then(|process| process.leases_end);
        end.is_some_and(|end| now < end)
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
            Message::Lease(lease) => self.begin(worker, lease.token, Task::trial(lease)),
            Message::Job(lease) => self.begin(worker, lease.token, Task::job(lease)),
            Message::Ack(ack) => {
                ack.stale.iter().for_each(|token| self.abandon(worker, *token));
                self.acknowledged(worker, ack.number, &ack.stale);
                self.flush(worker);
            }
            Message::Revoke(revoke) => {
                let task = process.tasks.remove(&revoke.token);
                self.tell(|| format!("worker {worker} loses {}: {}", revoke.token, revoke.reason));
                if let Some(task) = task {
                    self.destroy_soon(worker, task.sandbox, Then::SlotFree);
                }
            }
            Message::Destroy(destroy) => {
                if process.destroying.insert(destroy.sandbox.clone()) {
                    self.destroy_soon(worker, destroy.sandbox, Then::Nothing);
                }
            }
        }
    }

    /// A task is over, or has lost its lease: its sandbox is left alone.
    pub fn abandon(&mut self, worker: usize, token: u64) {
        if let Some(process) = self.process(worker)
            && process.tasks.remove(&token).is_some()
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
        let answered = report.jobs.iter().filter(|job| is_final(job) && !stale.contains(&job.token));
        facts.extend(answered.map(|job| Fact::Answered(job.token)));
        let waiting = process
            .tasks
            .iter_mut()
            .filter(|(_, task)| task.newest.is_some_and(|newest| news.contains(&newest)));
        let durable: Vec<u64> = waiting
            .map(|(token, task)| {
                task.newest = None;
                *token
            })
            .collect();
        for result in report.results {
            if let Some(outcome) = result.outcome
                && !stale.contains(&result.token)
                && let Some(Work::Trial(running)) = self.workers[worker].work(result.token)
            {
                let (batch, run, ordinal) = running.trial;
                facts.push(match self.case_of(running).1 && outcome.status() != TrialStatus::Void {
                    true => Fact::Checked(batch, run, ordinal),
                    false => Fact::Settled(batch, run, ordinal, outcome.status),
                });
            }
        }
        for fact in facts {
            let told = self.disk.tell(fact, self.now);
            self.check(told);
        }
        for token in durable {
            self.task_is_durable(worker, token);
        }
    }

    /// A lease arrives.
    fn begin(&mut self, worker: usize, token: u64, task: Task) {
        let for_us = matches!(task.work, Work::Job(_)) == (self.workers[worker].role == WorkerRole::JudgeRunner);
        if !for_us {
            let detail = format!("{token} reaches {}", self.workers[worker].id);
            return self
                .check(broken("judge runners have jobs, executors trials", detail))
                .unwrap_or_default();
        }
        let Some(process) = self.process(worker) else { return };
        let shared = |other: &Task| !task.sandbox.is_empty() && other.sandbox == task.sandbox;
        let older = process.tasks.iter().find(|(_, other)| shared(other)).map(|(token, _)| *token);
        match older {
            Some(older) if older >= token => return,
            Some(older) => self.abandon(worker, older),
            None => {}
        }
        self.tell(|| format!("worker {worker} begins {:?} under {token}, adopting: {}", task.sandbox, task.adopt));
        let Some(process) = self.process(worker) else { return };
        process.outbox.occupied += 1;
        if process.stopping {
            process.outbox.push(released(token));
            return self.flush(worker);
        }
        if matches!(task.work, Work::Trial(_)) {
            process.sandbox_of.insert(token, task.sandbox.clone());
        }
        let is_trial = matches!(task.work, Work::Trial(_));
        process.tasks.insert(token, task);
        match is_trial {
            true => self.enter(worker, token),
            false => self.job_begins(worker, token),
        }
    }

    /// Destroys a sandbox before long.
    pub fn destroy_soon(&mut self, worker: usize, sandbox: String, then: Then) {
        if sandbox.is_empty() {
            return self.sandbox_is_gone(worker, &sandbox, then);
        }
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
        self.sandbox_is_gone(worker, &sandbox, then);
    }

    fn sandbox_is_gone(&mut self, worker: usize, sandbox: &str, then: Then) {
        let Some(process) = self.process(worker) else { return };
        match then {
            Then::TaskOver(token) => self.abandon(worker, token),
            Then::SlotFree => process.outbox.free_slot(),
            Then::Nothing => {
                process.destroying.remove(sandbox);
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
        for (token, task) in std::mem::take(&mut process.tasks) {
            if !task.stage.is_over() {
                process.outbox.push(released(token));
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

/// Whether a job's result is its answer.
fn is_final(result: &JobResult) -> bool {
    matches!(result.result, Some(job_result::Result::Judged(_) | job_result::Result::Replied(_)))
}
