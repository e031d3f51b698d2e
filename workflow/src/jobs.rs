//! Jobs of a trial that other workers than its own do: judgments after it, and the replies of its simulated person in the middle of it.
//!
//! A job waits, is leased, and waits again until it has an answer, which is final. What is asked may be answered without anybody ever knowing, so
//! each ask is announced in the log before it is made: one whose answer is not known is made once more, and no third time. A harness answers in a
//! sandbox, where it is a process that goes on while workers come and go; as long as that sandbox is there, nothing is unclear.

use bytes::Bytes;
use evalgrid_proto::{log::v1 as log, v1};

use crate::{
    admission,
    apply::trial_ref,
    state::{Batch, Phase, Trial, TrialKey},
};

mod apply;

/// What the queue calls a worker that asks models directly; `ask@PROVIDER` asks a harness in a sandbox of the provider.
const ASKS: &str = "ask";

/// What a worker can be given of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The trial itself.
    Trial,
    /// The reply that it waits for.
    Reply,
    /// The judge at this place among its case's.
    Judge(u8),
}

/// A part of a trial: what waits in the queue, and what a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// Of which trial.
    pub trial: TrialKey,
    /// Which part.
    pub part: Part,
}

impl Target {
    /// The trial itself.
    pub fn trial(trial: TrialKey) -> Target {
        Target { trial, part: Part::Trial }
    }
}

/// A job, as far as it has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Waiting, leased or answered.
    pub phase: JobPhase,
    /// Asks whose answer is not known.
    pub unclear: u32,
    /// Refusals for now.
    pub refused: u32,
    /// Under the living lease, or in the living sandbox, it has been asked.
    pub asked: bool,
    /// How long it has been asked, in milliseconds.
    pub spent_ms: u64,
    /// Leases so far that brought no word from their worker.
    pub idle_leases: u32,
    /// Why the newest ask came to nothing.
    pub reason: String,
    /// The sandbox of a judge that is a harness. A person's is the trial's to keep, over all replies.
    pub sandbox: Option<String>,
}

/// Where a job stands.
#[derive(Clone, Debug, PartialEq)]
pub enum JobPhase {
    /// For a worker.
    Waits {
        /// Since when.
        since_ms: u64,
        /// Not before.
        not_before_ms: u64,
        /// Its place in the queue.
        ticket: u64,
    },
    /// A worker has it.
    Leased {
        /// The fencing token.
        token: u64,
        /// Since when; 0 where an older version has written that down.
        since_ms: u64,
    },
    /// A judge has answered.
    Judged(Box<v1::Judged>),
}

/// A trial that has run, and whose judges are asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Judging {
    /// What its checks said.
    pub outcome: v1::TrialOutcome,
    /// One for each judge of its case, in order.
    pub jobs: Vec<Job>,
    /// Of which fences are made.
    pub nonce: Bytes,
}

/// A trial that waits for its person.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversing {
    /// The turn that has ended.
    pub turn: u32,
    /// Everything said so far.
    pub conversation: v1::Evidence,
    /// Since when.
    pub since_ms: u64,
    /// The reply.
    pub job: Job,
    /// Of which fences are made.
    pub nonce: Bytes,
}

/// Where the person of a trial lives who is played by a harness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// Its sandbox.
    pub sandbox: String,
    /// Its session there; empty where there is none to go on with.
    pub session_id: String,
}

impl Job {
    pub(crate) fn new(at_ms: u64, not_before_ms: u64, ticket: u64) -> Job {
        Job {
            phase: JobPhase::Waits {
                since_ms: at_ms,
                not_before_ms,
                ticket,
            },
            unclear: 0,
            refused: 0,
            asked: false,
            spent_ms: 0,
            idle_leases: 0,
            reason: String::new(),
            sandbox: None,
        }
    }

    /// The token of its lease.
    pub fn token(&self) -> Option<u64> {
        match self.phase {
            JobPhase::Leased { token, .. } => Some(token),
            _ => None,
        }
    }

    /// Its answer.
    pub fn judged(&self) -> Option<&v1::Judged> {
        match &self.phase {
            JobPhase::Judged(judged) => Some(judged),
            _ => None,
        }
    }

    /// A judge runner has it, or it has been asked before.
    pub(crate) fn has_begun(&self) -> bool {
        self.token().is_some() || self.asked || self.unclear > 0 || self.refused > 0
    }

    /// It may have been answered without anybody knowing.
    pub(crate) fn may_have_spent(&self) -> bool {
        self.asked || self.unclear > 0
    }

    fn is_untouched(&self) -> bool {
        self.unclear == 0 && self.refused == 0 && self.idle_leases == 0
    }
}

impl Trial {
    /// One of its jobs.
    pub fn job(&self, part: Part) -> Option<&Job> {
        match (&self.phase, part) {
            (Phase::Conversing(conversing), Part::Reply) => Some(&conversing.job),
            (Phase::Judging(judging), Part::Judge(index)) => judging.jobs.get(usize::from(index)),
            _ => None,
        }
    }

    fn job_mut(&mut self, part: Part) -> Option<&mut Job> {
        match (&mut self.phase, part) {
            (Phase::Conversing(conversing), Part::Reply) => Some(&mut conversing.job),
            (Phase::Judging(judging), Part::Judge(index)) => judging.jobs.get_mut(usize::from(index)),
            _ => None,
        }
    }

    /// All of its jobs.
    pub fn jobs(&self) -> impl Iterator<Item = (Part, &Job)> {
        let (reply, judges) = match &self.phase {
            Phase::Conversing(conversing) => (Some((Part::Reply, &conversing.job)), [].as_slice()),
            Phase::Judging(judging) => (None, judging.jobs.as_slice()),
            _ => (None, [].as_slice()),
        };
        // At most 20 judges: see `domain::limits`.
        let judges = (0u8..).zip(judges).map(|(index, job)| (Part::Judge(index), job));
        reply.into_iter().chain(judges)
    }

    /// The sandbox in which a job's harness answers.
    pub fn sandbox_of(&self, part: Part) -> Option<&str> {
        match part {
            Part::Trial => self.sandbox.as_deref(),
            Part::Reply => self.person.as_ref().map(|person| person.sandbox.as_str()),
            Part::Judge(_) => self.job(part)?.sandbox.as_deref(),
        }
    }

    /// Which part of it lives in a sandbox now.
    pub fn lives_in(&self, name: &str) -> Option<Part> {
        if matches!(self.phase, Phase::Settled(_)) {
            return None;
        }
        let running = !matches!(self.phase, Phase::Judging(_));
        if running && self.sandbox.as_deref() == Some(name) {
            return Some(Part::Trial);
        }
        if running && self.person.as_ref().is_some_and(|person| person.sandbox == name) {
            return Some(Part::Reply);
        }
        let judge = |(part, job): (Part, &Job)| (job.judged().is_none() && job.sandbox.as_deref() == Some(name)).then_some(part);
        self.jobs().find_map(judge)
    }
}

impl Batch {
    /// Who answers for a part of a trial; `None` for the trial itself.
    pub fn answerer(&self, target: Target) -> Option<&v1::AnswererInfo> {
        let case = self.cases.get(self.coordinates(target.trial.run).0)?;
        match target.part {
            Part::Trial => None,
            Part::Reply => case.person.as_ref(),
            Part::Judge(index) => case.judges.get(usize::from(index)),
        }
    }
}

/// Whose limits a judge or a person counts toward. Never those of the trials: a slow judge must not take the agents' places.
pub fn model_key(part: Part, answerer: &v1::AnswererInfo) -> String {
    let role = match part {
        Part::Reply => "person",
        Part::Trial | Part::Judge(_) => "judge",
    };
    let v1::AnswererInfo {
        harness, provider, model, ..
    } = answerer;
    match harness.as_str() {
        "" => format!("{role}/{provider}/{model}"),
        harness => format!("{role}/{harness}/{}", model.split('/').next().unwrap_or_default()),
    }
}

/// The queues that a judge runner serves which has these kinds of sandboxes.
pub(crate) fn queues(providers: &[String]) -> Vec<String> {
    let harnesses = providers.iter().map(|provider| format!("{ASKS}@{provider}"));
    std::iter::once(ASKS.to_owned()).chain(harnesses).collect()
}

/// The provider of a queue's sandboxes.
pub(crate) fn provider_of(queue: &str) -> &str {
    queue.strip_prefix(ASKS).and_then(|rest| rest.strip_prefix('@')).unwrap_or(queue)
}

/// The provider of the sandboxes in which the jobs of a queue are answered, empty where none is needed. `None`: trials wait there.
pub(crate) fn asked_in(queue: &str) -> Option<&str> {
    let rest = queue.strip_prefix(ASKS)?;
    if rest.is_empty() { Some("") } else { rest.strip_prefix('@') }
}

/// A part of a trial, as the log writes it. The trial itself is written otherwise.
pub(crate) fn job_ref(target: Target, trial: Option<&Trial>) -> Option<log::JobRef> {
    let part = match target.part {
        Part::Trial => return None,
        Part::Judge(index) => log::job_ref::Part::Judge(index.into()),
        Part::Reply => match &trial?.phase {
            Phase::Conversing(conversing) => log::job_ref::Part::Reply(conversing.turn),
            _ => return None,
        },
    };
    Some(log::JobRef {
        trial: trial_ref(target.trial),
        part: Some(part),
    })
}

/// The step of a person's reply.
pub fn reply_step(turn: u32) -> String {
    format!("turn.{turn}.person")
}

/// Whose limit a target's model counts toward, where its batch is there.
pub(crate) fn key_of(batch: &Batch, target: Target) -> Option<String> {
    match target.part {
        Part::Trial => batch.variants.get(batch.coordinates(target.trial.run).1).map(admission::model_key),
        part => batch.answerer(target).map(|answerer| model_key(part, answerer)),
    }
}
