//! What a simulated worker does under one token, and what trials and jobs have in common there: a sandbox that is made or taken over, processes
//! that its supervisor starts once, and an end that is reported.

use evalgrid_proto::v1::{AttemptFailure, AttemptFailureKind, JobLease, Lease};
use rand::Rng as _;

use crate::{
    check::{Fact, broken},
    defect::Defect,
    judge::Asking,
    outbox::News,
    sim::{MINUTE, MS, SECOND, Sim},
    trial::Running,
    trouble::Trouble,
    worker::{Then, WorkerEvent},
};

/// See the module.
pub struct Task {
    /// Where it works; empty where it calls a model.
    pub sandbox: String,
    /// An earlier one has left the sandbox there.
    pub adopt: bool,
    /// Where it is.
    pub stage: Stage,
    /// The newest thing that it said and that is not durable yet.
    pub newest: Option<u64>,
    /// Counts what it waits for; an older wait is none any more.
    wait: u64,
    /// What it is.
    pub work: Work,
}

/// What is done under a lease.
pub enum Work {
    /// By an executor.
    Trial(Running),
    /// By a judge runner.
    Job(Asking),
}

/// Where a task is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its sandbox is made, or what it needs to know is fetched.
    Preparing,
    /// Something runs, or is asked.
    Working,
    /// What it has said must be durable before it goes on.
    Durable,
    /// Its end is reported; true: its sandbox stays.
    Reported(bool),
    /// Its sandbox is destroyed.
    Destroying,
}

impl Stage {
    /// Whether the end has been told.
    pub fn is_over(self) -> bool {
        matches!(self, Stage::Reported(_) | Stage::Destroying)
    }
}

impl Task {
    /// A trial that is leased.
    pub fn trial(lease: Lease) -> Task {
        Task::new(lease.sandbox.clone(), lease.adopt, Work::Trial(Running::new(lease)))
    }

    /// A job that is.
    pub fn job(lease: JobLease) -> Task {
        Task::new(lease.sandbox.clone(), lease.adopt, Work::Job(Asking::new(lease)))
    }

    fn new(sandbox: String, adopt: bool, work: Work) -> Task {
        Task {
            sandbox,
            adopt,
            stage: Stage::Preparing,
            newest: None,
            wait: 0,
            work,
        }
    }
}

/// A lease that is given back.
pub fn released(token: u64) -> News {
    News::Failure(AttemptFailure {
        token,
        kind: AttemptFailureKind::Released.into(),
        reason: "the worker is stopping".to_owned(),
    })
}

impl Sim {
    /// What a worker does under a token.
    pub fn task(&mut self, worker: usize, token: u64) -> Option<&mut Task> {
        self.process(worker)?.tasks.get_mut(&token)
    }

    /// Lets a task go on after a while.
    pub fn task_waits(&mut self, worker: usize, token: u64, stage: Stage, wait: u64) {
        let Some(task) = self.task(worker, token) else { return };
        task.stage = stage;
        task.wait += 1;
        let number = task.wait;
        self.at_worker(worker, wait, WorkerEvent::Task(token, number));
    }

    /// What a task waited for has come, if it still waits for it.
    pub fn task_goes_on(&mut self, worker: usize, token: u64, wait: u64) {
        let Some(task) = self.task(worker, token).filter(|task| task.wait == wait) else {
            return;
        };
        match (task.stage, &task.work) {
            (Stage::Preparing, _) if task.sandbox.is_empty() => self.prepared(worker, token),
            (Stage::Preparing, _) => self.create(worker, token),
            (Stage::Working, Work::Trial(_)) => self.step_is_done(worker, token),
            (Stage::Working, Work::Job(_)) => self.job_is_met(worker, token),
            _ => {}
        }
    }

    /// Everything that a task has said is durable.
    pub fn task_is_durable(&mut self, worker: usize, token: u64) {
        let Some(task) = self.task(worker, token) else { return };
        match (task.stage, &task.work) {
            (Stage::Durable, Work::Trial(_)) => self.next_step(worker, token),
            (Stage::Durable, Work::Job(_)) => self.job_asks(worker, token),
            (Stage::Reported(false), _) if !task.sandbox.is_empty() => {
                task.stage = Stage::Destroying;
                let name = task.sandbox.clone();
                self.destroy_soon(worker, name, Then::TaskOver(token));
            }
            (Stage::Reported(_), _) => self.abandon(worker, token),
            _ => {}
        }
    }

    /// A task begins in its sandbox: it makes it, or takes over what an earlier one has left.
    pub fn enter(&mut self, worker: usize, token: u64) {
        let Some(task) = self.task(worker, token) else { return };
        let (name, adopt) = (task.sandbox.clone(), task.adopt);
        let is_job = matches!(task.work, Work::Job(_));
        if !adopt {
            // A judge runner installs the agent first, where it has not done so yet.
            let wait = match is_job && self.strike(Trouble::SlowStep, 0.3) {
                true => self.rng.random_range(20 * SECOND..3 * MINUTE),
                false => self.rng.random_range(5 * MS..3 * SECOND),
            };
            return self.task_waits(worker, token, Stage::Preparing, wait);
        }
        match self.workers[worker].folder.get_mut(&name) {
            Some(sandbox) if sandbox.dead => self.task_fails(worker, token, AttemptFailureKind::SandboxLost, "its supervisor is dead"),
            Some(sandbox) if sandbox.token > token => self.task_is_fenced(worker, token),
            Some(sandbox) => {
                sandbox.token = token;
                self.prepared(worker, token);
            }
            None => self.task_fails(worker, token, AttemptFailureKind::SandboxLost, "it is gone"),
        }
    }

    fn prepared(&mut self, worker: usize, token: u64) {
        match self.task(worker, token).map(|task| &task.work) {
            Some(Work::Trial(_)) => self.next_step(worker, token),
            Some(Work::Job(_)) => self.job_announces(worker, token),
            None => {}
        }
    }

    fn create(&mut self, worker: usize, token: u64) {
        let is_job = matches!(self.workers[worker].work(token), Some(Work::Job(_)));
        if is_job && !self.may_act(worker) {
            return self.task_is_fenced(worker, token);
        }
        if self.strike(Trouble::CreateFailed, 0.05) {
            return self.task_fails(worker, token, AttemptFailureKind::SandboxUnavailable, "no room");
        }
        let Some(task) = self.task(worker, token) else { return };
        let name = task.sandbox.clone();
        if !self.disk.ledger.says(&Fact::Intended(name.clone())) && !self.disk.lost.contains(&Fact::Intended(name.clone())) {
            return self
                .check(broken("an intent comes before a sandbox", format!("{name} is made")))
                .unwrap_or_default();
        }
        self.tell(|| format!("worker {worker} makes {name}"));
        let before = self.sandboxes.insert(name.clone(), true);
        if before == Some(false) {
            return self.check(broken("a sandbox's name is used once", name)).unwrap_or_default();
        }
        let sandbox = self.workers[worker].folder.entry(name).or_default();
        if sandbox.token > token {
            return self.task_is_fenced(worker, token);
        }
        sandbox.token = token;
        match self.strike(Trouble::CreateMadeAndFailed, 0.05) {
            true => self.task_fails(worker, token, AttemptFailureKind::SandboxUnavailable, "no answer"),
            false => self.prepared(worker, token),
        }
    }

    /// Starts a step in a task's sandbox, or attaches to the process that it is there. What is left to wait, and whether it has begun just now;
    /// `None`: the task has ended over it.
    pub fn run_step(&mut self, worker: usize, token: u64, step: &str, is_process: bool, length: u64) -> Option<(u64, bool)> {
        let now = self.now;
        let twice = self.defect == Some(Defect::ProcessStartedTwice);
        let name = self.task(worker, token)?.sandbox.clone();
        let Some(sandbox) = self.workers[worker].folder.get_mut(&name).filter(|sandbox| !sandbox.dead) else {
            self.task_fails(worker, token, AttemptFailureKind::SandboxLost, "it is gone");
            return None;
        };
        if sandbox.token > token {
            self.task_is_fenced(worker, token);
            return None;
        }
        let before = sandbox.started.get(step);
        if let Some(done) = before.filter(|_| is_process && !twice) {
            return Some((done.saturating_sub(now), false));
        }
        let again = before.is_some() && is_process;
        sandbox.started.insert(step.to_owned(), now + length);
        if again {
            self.check::<()>(broken("a process starts once per sandbox", format!("{step} in {name}")));
            return None;
        }
        self.tell(|| format!("worker {worker} runs {step} in {name} under {token}"));
        if self.disk.ledger.says(&Fact::Step(name.clone(), step.to_owned())) {
            let detail = format!("{step} in {name}");
            self.check::<()>(broken("a recorded step never runs again", detail));
            return None;
        }
        Some((length, true))
    }

    /// Whether nothing is left of a task's sandbox that could go on.
    pub fn sandbox_is_dead(&mut self, worker: usize, token: u64) -> bool {
        let name = self.task(worker, token).map(|task| task.sandbox.clone());
        name.is_some_and(|name| !name.is_empty() && self.workers[worker].folder.get(&name).is_none_or(|sandbox| sandbox.dead))
    }

    /// A task says something that is not its end.
    pub fn say(&mut self, worker: usize, token: u64, news: News) {
        let Some(process) = self.process(worker) else { return };
        let Some(task) = process.tasks.get_mut(&token) else { return };
        task.newest = Some(process.outbox.push(news));
        self.flush(worker);
    }

    /// A task comes to its end. `keep`: its sandbox stays.
    pub fn report(&mut self, worker: usize, token: u64, keep: bool, news: News) {
        let Some(task) = self.task(worker, token) else { return };
        task.stage = Stage::Reported(keep);
        task.wait += 1;
        self.say(worker, token, news);
    }

    /// A task comes to no end.
    pub fn task_fails(&mut self, worker: usize, token: u64, kind: AttemptFailureKind, reason: &str) {
        let last = match self.task(worker, token).map(|task| &task.work) {
            Some(Work::Job(asking)) => asking.was_last(kind),
            _ => false,
        };
        match last {
            true => self.job_ends_without_answer(worker, token, reason),
            false => self.fail(worker, token, false, kind, reason),
        }
    }

    /// A newer one has its sandbox.
    pub fn task_is_fenced(&mut self, worker: usize, token: u64) {
        self.fail(
            worker,
            token,
            true,
            AttemptFailureKind::SandboxLost,
            "its sandbox obeys a newer attempt",
        );
    }

    fn fail(&mut self, worker: usize, token: u64, keep: bool, kind: AttemptFailureKind, reason: &str) {
        let failure = AttemptFailure {
            token,
            kind: kind.into(),
            reason: reason.to_owned(),
        };
        self.report(worker, token, keep, News::Failure(failure));
    }
}
