//! A job in a simulated judge runner, as in the true one: announced, asked once when that is durable, and reported, whatever came of it. A model is
//! called; a harness is a process of a sandbox, and whoever comes later attaches to it.

use bytes::Bytes;
use evalgrid_domain::limits::{MAX_REFUSED_ASKS, MAX_UNCLEAR_ASKS};
use evalgrid_proto::v1::{
    AttemptFailureKind, Evidence, JobAsked, JobLease, JobResult, JudgeVerdict, Judged, NotNow, Replied, Unclear, job_lease::Job, job_result,
};
use rand::Rng as _;

use crate::{
    check::broken,
    defect::Defect,
    models::Met,
    outbox::News,
    sim::{MINUTE, MS, SECOND, Sim},
    task::{Stage, Work},
    trouble::Trouble,
};

/// A job that a judge runner works on.
pub struct Asking {
    /// By which right.
    pub lease: JobLease,
    announced: bool,
    /// What will come of the call that is under way.
    met: Option<Met>,
    asked_at: Option<u64>,
}

impl Asking {
    /// What a lease asks for.
    pub fn new(lease: JobLease) -> Asking {
        Asking {
            lease,
            announced: false,
            met: None,
            asked_at: None,
        }
    }

    /// Whether a failure of this kind ends the job, as the scheduler counts it.
    pub fn was_last(&self, kind: AttemptFailureKind) -> bool {
        match kind == AttemptFailureKind::SandboxLost && self.announced {
            true => self.lease.unclear + 1 >= MAX_UNCLEAR_ASKS,
            false => self.lease.refused + 1 >= MAX_REFUSED_ASKS,
        }
    }

    fn is_reply(&self) -> bool {
        matches!(self.lease.job, Some(Job::Reply(_)))
    }

    /// What the ask is in its sandbox. Each process there has a name of its own.
    fn step(&self) -> String {
        match &self.lease.job {
            Some(Job::Reply(reply)) => format!("reply.{}.{}", reply.turn, self.lease.refused + self.lease.unclear),
            _ => "judge".to_owned(),
        }
    }

    fn result(&self, met: Result<(&str, JudgeVerdict), &str>) -> job_result::Result {
        match &self.lease.job {
            Some(Job::Reply(_)) => job_result::Result::Replied(Replied {
                record: Bytes::copy_from_slice(met.map_or_else(str::as_bytes, |(words, _)| words.as_bytes())),
                failed: met.is_ok_and(|(_, verdict)| verdict == JudgeVerdict::Error) || met.is_err(),
                spend: None,
                session_id: (!self.lease.sandbox.is_empty()).then(|| "session".to_owned()),
            }),
            job => job_result::Result::Judged(Judged {
                index: match job {
                    Some(Job::Judge(judge)) => judge.index,
                    _ => 0,
                },
                name: "judge".to_owned(),
                verdict: met.map_or(JudgeVerdict::Error, |(_, verdict)| verdict).into(),
                choice: met.ok().map(|(words, _)| words.to_owned()),
                error: met.err().unwrap_or_default().to_owned(),
                ..Judged::default()
            }),
        }
    }
}

impl Sim {
    fn asking(&mut self, worker: usize, token: u64) -> Option<&mut Asking> {
        match &mut self.task(worker, token)?.work {
            Work::Job(asking) => Some(asking),
            Work::Trial(_) => None,
        }
    }

    /// A job begins, unless it has been asked often enough.
    pub fn job_begins(&mut self, worker: usize, token: u64) {
        let Some(asking) = self.asking(worker, token) else { return };
        let lease = &asking.lease;
        let (calls, spent) = (
            lease.sandbox.is_empty(),
            lease.unclear >= MAX_UNCLEAR_ASKS || lease.refused >= MAX_REFUSED_ASKS,
        );
        let (shown, session): (Option<Evidence>, Option<String>) = match &lease.job {
            Some(Job::Judge(judge)) => (judge.evidence.clone(), None),
            Some(Job::Reply(reply)) => (reply.conversation.clone(), Some(reply.session_id.clone())),
            None => (None, None),
        };
        let home = lease.sandbox.clone();
        if let Some(on_record) = self.disk.ledger.shown(token) {
            if *on_record != shown {
                let detail = format!("{shown:?} of {on_record:?} under {token}");
                return self
                    .check(broken("judges and people are shown what is on record", detail))
                    .unwrap_or_default();
            }
            if session.is_some_and(|session| session.is_empty() == self.disk.ledger.remembers(&home)) {
                let detail = format!("{home} under {token}");
                return self
                    .check(broken("a person goes on where its memory is", detail))
                    .unwrap_or_default();
            }
        }
        match (spent, calls) {
            (true, _) => self.job_ends_without_answer(worker, token, "asked often enough"),
            (false, true) => {
                let wait = self.rng.random_range(MS..200 * MS);
                self.task_waits(worker, token, Stage::Preparing, wait);
            }
            (false, false) => self.enter(worker, token),
        }
    }

    /// Puts on record that it asks.
    pub fn job_announces(&mut self, worker: usize, token: u64) {
        if !self.may_act(worker) {
            return self.task_is_fenced(worker, token);
        }
        let Some(task) = self.task(worker, token) else { return };
        task.stage = Stage::Durable;
        if let Work::Job(asking) = &mut task.work {
            asking.announced = true;
        }
        self.say(worker, token, News::Asked(JobAsked { token }));
        if self.defect == Some(Defect::AskedBeforeDurable) {
            self.job_asks(worker, token);
        }
    }

    /// It is on record, so it asks: a model by a call, a harness by a process that is started once.
    pub fn job_asks(&mut self, worker: usize, token: u64) {
        if self.strike(Trouble::KilledBeforeAsk, 0.03) {
            let away = self.about(5 * SECOND);
            return self.kill_worker(worker, away);
        }
        if !self.may_act(worker) {
            return self.task_is_fenced(worker, token);
        }
        let slow = self.strike(Trouble::SlowStep, 0.02);
        let length = match slow {
            true => self.rng.random_range(MINUTE..10 * MINUTE),
            false => self.about(10 * SECOND),
        };
        let now = self.now;
        let Some(asking) = self.asking(worker, token) else { return };
        asking.asked_at = Some(now);
        let (lease, step) = (asking.lease.clone(), asking.step());
        if lease.sandbox.is_empty() {
            let Some(met) = self.ask_model(&lease) else { return };
            if let Some(asking) = self.asking(worker, token) {
                asking.met = Some(met);
            }
            return self.task_waits(worker, token, Stage::Working, length);
        }
        let Some((wait, begins)) = self.run_step(worker, token, &step, true, length) else {
            return;
        };
        if begins {
            let Some(met) = self.ask_model(&lease) else { return };
            if let Some(sandbox) = self.workers[worker].folder.get_mut(&lease.sandbox) {
                sandbox.met.insert(step, met);
            }
        }
        self.task_waits(worker, token, Stage::Working, wait);
    }

    /// What was asked has come to its end.
    pub fn job_is_met(&mut self, worker: usize, token: u64) {
        if self.sandbox_is_dead(worker, token) {
            return self.task_fails(worker, token, AttemptFailureKind::SandboxLost, "its supervisor is dead");
        }
        if self.strike(Trouble::AnswerLost, 0.05) {
            let away = self.about(5 * SECOND);
            return self.kill_worker(worker, away);
        }
        let Some(asking) = self.asking(worker, token) else { return };
        let (name, step) = (asking.lease.sandbox.clone(), asking.step());
        let met = match asking.met.take() {
            Some(met) => Some(met),
            None => self.workers[worker]
                .folder
                .get(&name)
                .and_then(|sandbox| sandbox.met.get(&step).cloned()),
        };
        let Some(met) = met else {
            return self
                .check(broken("the simulator is right", "nothing came of an ask"))
                .unwrap_or_default();
        };
        if met == Met::Unclear && self.defect == Some(Defect::AskedAgainAtOnce) {
            return self.job_asks(worker, token);
        }
        let Some(asking) = self.asking(worker, token) else { return };
        let result = match &met {
            Met::Said(words, verdict) => asking.result(Ok((words, *verdict))),
            Met::NotNow(_) if asking.lease.refused + 1 >= MAX_REFUSED_ASKS => asking.result(Err("it refuses")),
            Met::NotNow(retry_after_ms) => job_result::Result::NotNow(NotNow {
                retry_after_ms: *retry_after_ms,
                reason: "429".to_owned(),
            }),
            Met::Unclear if asking.lease.unclear + 1 >= MAX_UNCLEAR_ASKS => asking.result(Err("nobody knows")),
            Met::Unclear => job_result::Result::Unclear(Unclear { reason: "500".to_owned() }),
        };
        self.job_ends(worker, token, result);
    }

    /// There will be no answer, and that is the answer.
    pub fn job_ends_without_answer(&mut self, worker: usize, token: u64, reason: &str) {
        let Some(asking) = self.asking(worker, token) else { return };
        let result = asking.result(Err(reason));
        self.job_ends(worker, token, result);
    }

    fn job_ends(&mut self, worker: usize, token: u64, result: job_result::Result) {
        let now = self.now;
        let Some(asking) = self.asking(worker, token) else { return };
        // A person's sandbox is its memory.
        let keep = asking.is_reply();
        let spent_ms = asking.asked_at.map_or(0, |at| (now - at) / MS);
        let result = JobResult {
            token,
            spent_ms,
            result: Some(result),
        };
        self.report(worker, token, keep, News::Job(Box::new(result)));
    }
}
