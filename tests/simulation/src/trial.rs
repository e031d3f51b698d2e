//! A trial in a simulated executor: set-up steps that may run twice until they are recorded, then processes that a supervisor starts once, and
//! between them what a simulated person says.

use bytes::Bytes;
use evalgrid_domain::ids::TrialId;
use evalgrid_proto::v1::{
    AwaitsReply, Evidence, Lease, StepOutcome, StepRecord, Throttled, TrialOutcome, TrialResult, TrialStatus, evidence::Place,
};
use rand::Rng as _;

use crate::{
    outbox::News,
    sim::{MINUTE, MS, SECOND, Sim},
    task::{Stage, Work},
    trouble::Trouble,
};

/// A trial that an executor works on.
pub struct Running {
    /// By which right.
    pub lease: Lease,
    /// Batch, run, ordinal.
    pub trial: ([u8; 16], u32, u32),
    plan: Vec<(String, Kind)>,
    next: usize,
    /// What the person has said, as it came with the lease.
    replies: Vec<Bytes>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// May run again until it is recorded.
    Idempotent,
    /// The supervisor starts it once; asking again attaches.
    Process,
    /// A person says it, if there is one.
    Reply(u32),
}

/// Everything that a person has said, as it is shown to others.
pub fn transcript(replies: &[Bytes]) -> Evidence {
    Evidence {
        place: Some(Place::Inline(replies.join(&b'\n').into())),
    }
}

impl Running {
    /// What a lease asks for. Every attempt at a trial plans the same.
    pub fn new(lease: Lease) -> Running {
        let parsed: Option<TrialId> = lease.trial_id.parse().ok();
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
        let turns = 1 + seed / 3 % 3;
        for turn in 1..=turns {
            plan.push((format!("turn.{turn}.agent"), Kind::Process));
            if turn < turns {
                plan.push((format!("turn.{turn}.person"), Kind::Reply(turn)));
            }
        }
        plan.push(("check.0".to_owned(), Kind::Process));
        Running {
            lease,
            trial,
            plan,
            next: 0,
            replies: Vec::new(),
        }
    }
}

impl Sim {
    /// Whether simulated people and judges belong to a trial's case.
    pub fn case_of(&self, running: &Running) -> (bool, bool) {
        let cases = self.clients.cases.get(&running.trial.0);
        let case = cases.and_then(|cases| cases.get(running.lease.case_index as usize));
        case.map_or((false, false), |case| (case.person.is_some(), !case.judges.is_empty()))
    }

    /// A trial goes on behind what is recorded.
    pub fn next_step(&mut self, worker: usize, token: u64) {
        let Some(Work::Trial(running)) = self.workers[worker].work(token) else {
            return;
        };
        let (has_person, _) = self.case_of(running);
        let slow = self.strike(Trouble::SlowStep, 0.02);
        let Some(task) = self.task(worker, token) else { return };
        let said = task.newest.is_some();
        let Work::Trial(running) = &mut task.work else { return };
        while let Some((step, kind)) = running.plan.get(running.next) {
            let known = running.lease.steps.iter().find(|known| known.step == *step);
            match (kind, known) {
                (Kind::Reply(_), Some(known)) => {
                    running.replies.push(known.result.clone());
                    if known.outcome() == StepOutcome::Failed {
                        return self.trial_ends(worker, token, &[TrialStatus::Void]);
                    }
                }
                (Kind::Reply(_), None) if has_person => break,
                (_, None) if !matches!(kind, Kind::Reply(_)) => break,
                _ => {}
            }
            running.next += 1;
        }
        let Some((step, kind)) = running.plan.get(running.next).cloned() else {
            return self.trial_ends(worker, token, &[TrialStatus::Passed, TrialStatus::Failed, TrialStatus::Void]);
        };
        let first = kind == Kind::Process && !running.plan[..running.next].iter().any(|(_, kind)| *kind == Kind::Process);
        if said && (first || matches!(kind, Kind::Reply(_))) {
            task.stage = Stage::Durable;
            return;
        }
        let length = match (kind, slow) {
            (Kind::Reply(turn), _) => {
                let awaits = AwaitsReply {
                    token,
                    turn,
                    conversation: Some(transcript(&running.replies)),
                };
                return self.report(worker, token, true, News::Awaits(awaits));
            }
            (Kind::Process, _) if self.strike(Trouble::ModelRefused, 0.03) => return self.trial_is_throttled(worker, token),
            (_, true) => self.rng.random_range(MINUTE..20 * MINUTE),
            (Kind::Idempotent, _) => self.rng.random_range(MS..2 * SECOND),
            (Kind::Process, _) => self.about(20 * SECOND),
        };
        if let Some((wait, _)) = self.run_step(worker, token, &step, kind == Kind::Process, length) {
            self.task_waits(worker, token, Stage::Working, wait);
        }
    }

    /// A step of a trial has its result.
    pub fn step_is_done(&mut self, worker: usize, token: u64) {
        let Some(Work::Trial(running)) = self.task(worker, token).map(|task| &mut task.work) else {
            return;
        };
        let (step, _) = running.plan[running.next].clone();
        running.next += 1;
        let record = StepRecord {
            token,
            step,
            outcome: StepOutcome::Done.into(),
            result: Bytes::from_static(b"{}"),
        };
        self.say(worker, token, News::Step(record));
        match self.sandbox_is_dead(worker, token) {
            true => self.task_fails(
                worker,
                token,
                evalgrid_proto::v1::AttemptFailureKind::SandboxLost,
                "its supervisor is dead",
            ),
            false => self.next_step(worker, token),
        }
    }

    fn trial_ends(&mut self, worker: usize, token: u64, statuses: &[TrialStatus]) {
        let status = statuses[self.rng.random_range(0..statuses.len())];
        let Some(Work::Trial(running)) = self.workers[worker].work(token) else {
            return;
        };
        let outcome = TrialOutcome {
            status: status.into(),
            evidence: self.case_of(running).0.then(|| transcript(&running.replies)),
            ..TrialOutcome::default()
        };
        // Some are kept for people to look into: the worker waits to be asked for their destruction.
        let keep_sandbox_ms = match self.rng.random_bool(0.03) {
            true => self.rng.random_range(SECOND / MS..10 * MINUTE / MS),
            false => 0,
        };
        let result = TrialResult {
            token,
            outcome: Some(outcome),
            keep_sandbox_ms,
        };
        self.report(worker, token, keep_sandbox_ms > 0, News::Result(Box::new(result)));
    }

    /// The model's provider has refused: the attempt ends, its slot is free, its sandbox stays.
    fn trial_is_throttled(&mut self, worker: usize, token: u64) {
        let retry_after_ms = self.rng.random_range(0..90_000);
        let Some(Work::Trial(running)) = self.workers[worker].work(token) else {
            return;
        };
        let throttled = Throttled {
            token,
            model_key: running.lease.model_key.clone(),
            retry_after_ms,
        };
        self.report(worker, token, true, News::Throttled(throttled));
    }
}
