//! A trial in a simulated executor: set-up steps that may run twice until they are recorded, then processes that a supervisor starts once.

use evalgrid_proto::v1::{
    AttemptFailure, AttemptFailureKind, Lease, StepOutcome, StepRecord, Throttled, TrialOutcome, TrialResult, TrialStatus,
};
use rand::Rng as _;

use crate::{
    check::{Fact, broken},
    defect::Defect,
    outbox::News,
    sim::{MINUTE, MS, SECOND, Sim},
    trouble::Trouble,
    worker::{Then, WorkerEvent},
};

/// A trial that an executor works on.
pub struct Running {
    /// By which right.
    pub lease: Lease,
    /// Batch, run, ordinal.
    pub trial: ([u8; 16], u32, u32),
    plan: Vec<(String, Kind)>,
    next: usize,
    /// Where it is.
    pub stage: Stage,
    /// The newest thing that it said and that is not durable yet.
    pub newest: Option<u64>,
    /// Counts what it waits for; an older wait is none any more.
    wait: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// May run again until it is recorded.
    Idempotent,
    /// The supervisor starts it once; asking again attaches.
    Process,
}

/// Where a trial is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its sandbox is made.
    Creating,
    /// A step runs.
    Step,
    /// What was recorded must be durable before the first process starts.
    Durable,
    /// Its end is reported; true: with a verdict.
    Reported(bool),
    /// Its sandbox is destroyed.
    Destroying,
}

impl Running {
    /// What a lease asks for. Every attempt at a trial plans the same.
    pub fn new(lease: Lease) -> Running {
        let parsed: Option<evalgrid_domain::ids::TrialId> = lease.trial_id.parse().ok();
        let trial = parsed
            .map(|id| (id.batch.0, u32::from(id.run), u32::from(id.ordinal)))
            .unwrap_or_default();
        let seed = trial
            .0
            .iter()
            .fold(trial.1 * 7 + trial.2, |sum, byte| sum * 31 % 65_521 + u32::from(*byte));
        let mut plan = vec![
            ("sandbox.create".to_owned(), Kind::Idempotent),
            ("source".to_owned(), Kind::Idempotent),
        ];
        plan.extend((0..seed % 3).map(|number| (format!("prepare.{number}"), Kind::Idempotent)));
        plan.extend((1..=1 + seed / 3 % 3).map(|turn| (format!("turn.{turn}.agent"), Kind::Process)));
        plan.push(("check.0".to_owned(), Kind::Process));
        Running {
            lease,
            trial,
            plan,
            next: 0,
            stage: Stage::Creating,
            newest: None,
            wait: 0,
        }
    }
}

/// A lease that is given back.
pub fn released(token: u64) -> AttemptFailure {
    AttemptFailure {
        token,
        kind: AttemptFailureKind::Released.into(),
        reason: "the worker is stopping".to_owned(),
    }
}

impl Sim {
    fn running(&mut self, worker: usize, token: u64) -> Option<&mut Running> {
        self.process(worker)?.trials.get_mut(&token)
    }

    fn trial_waits(&mut self, worker: usize, token: u64, stage: Stage, wait: u64) {
        let Some(running) = self.running(worker, token) else { return };
        running.stage = stage;
        running.wait += 1;
        let number = running.wait;
        self.at_worker(worker, wait, WorkerEvent::Trial(token, number));
    }

    /// An attempt begins: it makes its sandbox, or takes over what an earlier one has left.
    pub fn trial_begins(&mut self, worker: usize, token: u64) {
        let Some(running) = self.running(worker, token) else { return };
        let name = running.lease.sandbox.clone();
        if !running.lease.adopt {
            let wait = self.rng.random_range(5 * MS..3 * SECOND);
            return self.trial_waits(worker, token, Stage::Creating, wait);
        }
        match self.workers[worker].folder.get_mut(&name) {
            Some(sandbox) if sandbox.dead => self.trial_fails(worker, token, AttemptFailureKind::SandboxLost, "its supervisor is dead"),
            Some(sandbox) if sandbox.token > token => self.trial_is_fenced(worker, token),
            Some(sandbox) => {
                sandbox.token = token;
                self.next_step(worker, token);
            }
            None => self.trial_fails(worker, token, AttemptFailureKind::SandboxLost, "it is gone"),
        }
    }

    /// What a trial waited for has come, if it still waits for it.
    pub fn trial_goes_on(&mut self, worker: usize, token: u64, wait: u64) {
        let Some(running) = self.running(worker, token).filter(|running| running.wait == wait) else {
            return;
        };
        match running.stage {
            Stage::Creating => self.create(worker, token),
            Stage::Step => self.step_is_done(worker, token),
            Stage::Durable | Stage::Reported(_) | Stage::Destroying => {}
        }
    }

    fn create(&mut self, worker: usize, token: u64) {
        if self.strike(Trouble::CreateFailed, 0.05) {
            return self.trial_fails(worker, token, AttemptFailureKind::SandboxUnavailable, "no room");
        }
        let Some(running) = self.running(worker, token) else { return };
        let name = running.lease.sandbox.clone();
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
            return self.trial_is_fenced(worker, token);
        }
        sandbox.token = token;
        match self.strike(Trouble::CreateMadeAndFailed, 0.05) {
            true => self.trial_fails(worker, token, AttemptFailureKind::SandboxUnavailable, "no answer"),
            false => self.next_step(worker, token),
        }
    }

    fn next_step(&mut self, worker: usize, token: u64) {
        let now = self.now;
        let slow = self.strike(Trouble::SlowStep, 0.02);
        let Some(running) = self.running(worker, token) else { return };
        while let Some((step, _)) = running.plan.get(running.next)
            && running.lease.steps.iter().any(|known| known.step == *step)
        {
            running.next += 1;
        }
        let name = running.lease.sandbox.clone();
        let Some((step, kind)) = running.plan.get(running.next).cloned() else {
            return self.trial_ends(worker, token);
        };
        if kind == Kind::Process && running.newest.is_some() && !running.plan[..running.next].iter().any(|(_, kind)| *kind == Kind::Process)
        {
            running.stage = Stage::Durable;
            return;
        }
        if kind == Kind::Process && self.strike(Trouble::ModelRefused, 0.03) {
            return self.trial_is_throttled(worker, token);
        }
        let twice = self.defect == Some(Defect::ProcessStartedTwice);
        let length = match (kind, slow) {
            (_, true) => self.rng.random_range(MINUTE..20 * MINUTE),
            (Kind::Idempotent, _) => self.rng.random_range(MS..2 * SECOND),
            (Kind::Process, _) => self.about(20 * SECOND),
        };
        let Some(sandbox) = self.workers[worker].folder.get_mut(&name).filter(|sandbox| !sandbox.dead) else {
            return self.trial_fails(worker, token, AttemptFailureKind::SandboxLost, "it is gone");
        };
        if sandbox.token > token {
            return self.trial_is_fenced(worker, token);
        }
        let wait = match sandbox.started.get(&step) {
            Some(done) if kind == Kind::Process && !twice => done.saturating_sub(now),
            before => {
                let again = before.is_some() && kind == Kind::Process;
                sandbox.started.insert(step.clone(), now + length);
                if again {
                    return self
                        .check(broken("a process starts once per sandbox", format!("{step} in {name}")))
                        .unwrap_or_default();
                }
                self.tell(|| format!("worker {worker} runs {step} in {name} under {token}"));
                if self.disk.ledger.says(&Fact::Step(name.clone(), step.clone())) {
                    let detail = format!("{step} in {name}");
                    return self.check(broken("a recorded step never runs again", detail)).unwrap_or_default();
                }
                length
            }
        };
        self.trial_waits(worker, token, Stage::Step, wait);
    }

    fn step_is_done(&mut self, worker: usize, token: u64) {
        let Some(process) = self.process(worker) else { return };
        let Some(running) = process.trials.get_mut(&token) else { return };
        let (step, _) = running.plan[running.next].clone();
        running.next += 1;
        let news = process.outbox.push(News::Step(StepRecord {
            token,
            step,
            outcome: StepOutcome::Done.into(),
            result: bytes::Bytes::from_static(b"{}"),
        }));
        if let Some(running) = process.trials.get_mut(&token) {
            running.newest = Some(news);
        }
        self.flush(worker);
        let dead = self.running(worker, token).map(|running| running.lease.sandbox.clone());
        let dead = dead.is_some_and(|name| self.workers[worker].folder.get(&name).is_none_or(|sandbox| sandbox.dead));
        match dead {
            true => self.trial_fails(worker, token, AttemptFailureKind::SandboxLost, "its supervisor is dead"),
            false => self.next_step(worker, token),
        }
    }

    /// Everything that a trial has said is durable.
    pub fn trial_is_durable(&mut self, worker: usize, token: u64) {
        let Some(running) = self.running(worker, token) else { return };
        match running.stage {
            Stage::Durable => self.next_step(worker, token),
            Stage::Reported(_) => {
                running.stage = Stage::Destroying;
                let name = running.lease.sandbox.clone();
                self.destroy_soon(worker, name, Then::TrialOver(token));
            }
            Stage::Creating | Stage::Step | Stage::Destroying => {}
        }
    }

    fn trial_ends(&mut self, worker: usize, token: u64) {
        let status = [TrialStatus::Passed, TrialStatus::Failed, TrialStatus::Void][self.rng.random_range(0..3)];
        let outcome = TrialOutcome {
            status: status.into(),
            ..TrialOutcome::default()
        };
        self.report(worker, token, true, |token| {
            News::Result(Box::new(TrialResult {
                token,
                outcome: Some(outcome),
                keep_sandbox_ms: 0,
            }))
        });
    }

    fn trial_fails(&mut self, worker: usize, token: u64, kind: AttemptFailureKind, reason: &str) {
        let reason = reason.to_owned();
        self.report(worker, token, false, |token| {
            News::Failure(AttemptFailure {
                token,
                kind: kind.into(),
                reason,
            })
        });
    }

    /// The model's provider has refused: the attempt ends, its slot is free, its sandbox stays.
    fn trial_is_throttled(&mut self, worker: usize, token: u64) {
        let retry_after_ms = self.rng.random_range(0..90_000);
        let Some(process) = self.process(worker) else { return };
        let Some(running) = process.trials.remove(&token) else { return };
        process.outbox.push(News::Throttled(Throttled {
            token,
            model_key: running.lease.model_key,
            retry_after_ms,
        }));
        process.outbox.free_slot();
        self.flush(worker);
    }

    fn trial_is_fenced(&mut self, worker: usize, token: u64) {
        let Some(process) = self.process(worker) else { return };
        process.outbox.push(News::Failure(AttemptFailure {
            token,
            kind: AttemptFailureKind::SandboxLost.into(),
            reason: "its sandbox obeys a newer attempt".to_owned(),
        }));
        self.abandon(worker, token);
        self.flush(worker);
    }

    fn report(&mut self, worker: usize, token: u64, verdict: bool, news: impl FnOnce(u64) -> News) {
        let Some(process) = self.process(worker) else { return };
        let Some(running) = process.trials.get_mut(&token) else { return };
        running.stage = Stage::Reported(verdict);
        running.wait += 1;
        running.newest = Some(process.outbox.push(news(token)));
        self.flush(worker);
    }
}
