//! The models that judge and play people, directly or through a harness. They know what they were asked and what they said, which the log only
//! claims to know.

use std::collections::BTreeMap;

use evalgrid_domain::limits::{MAX_REFUSED_ASKS, MAX_UNCLEAR_ASKS};
use evalgrid_proto::{
    log::v1::{Event, event::Kind, job_answered::Answer},
    v1::{JobLease, JudgeVerdict},
};
use rand::Rng as _;

use crate::{
    check::{Fact, JobKey, Violation, broken},
    disk::Disk,
    sim::Sim,
    trouble::Trouble,
};

/// What came of an ask, for whoever hears it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Met {
    /// These very words, and what they mean. From a person, an error is no reply.
    Said(String, JudgeVerdict),
    /// Not now; after so many milliseconds.
    NotNow(u64),
    /// Nobody knows.
    Unclear,
}

struct Ask {
    token: u64,
    refused: bool,
}

/// See the module.
#[derive(Default)]
pub struct Models {
    asks: BTreeMap<String, Vec<Ask>>,
    /// Whose an idempotency key is.
    jobs: BTreeMap<String, JobKey>,
    keys: BTreeMap<JobKey, String>,
    said: BTreeMap<String, JobKey>,
}

impl Models {
    /// What is on record must have been said, and about this.
    pub fn check(&self, disk: &Disk, event: &Event) -> Result<(), Violation> {
        let Some(Kind::JobAnswered(answered)) = &event.kind else {
            return Ok(());
        };
        let words = match &answered.answer {
            // Who could not be asked has said nothing.
            Some(Answer::Judged(judged)) if judged.verdict() == JudgeVerdict::Error && judged.choice.is_none() => return Ok(()),
            Some(Answer::Judged(judged)) => judged.choice.clone().unwrap_or_default(),
            Some(Answer::Replied(replied)) if replied.failed => return Ok(()),
            Some(Answer::Replied(replied)) => String::from_utf8_lossy(&replied.record).into_owned(),
            None => String::new(),
        };
        let job = disk.ledger.job_of(answered.token);
        match job.is_some() && self.said.get(&words) == job {
            true => Ok(()),
            false => broken("what is on record was said", format!("{words:?} of {job:?}")),
        }
    }

    fn ask(&mut self, disk: &Disk, lease: &JobLease, refused: bool) -> Result<usize, Violation> {
        let (key, token) = (&lease.idempotency_key, lease.token);
        let was_lost = |token: u64| disk.lost.contains(&Fact::Asked(token));
        // A lease that a failover took back is on no record.
        if let Some(job) = disk.ledger.job_of(token) {
            if !disk.ledger.is_asked(job) && !disk.ledger.says(&Fact::Asked(token)) && !was_lost(token) {
                return broken("an ask is on record before it is made", format!("{key} is asked under {token}"));
            }
            if disk.ledger.is_answered(job) {
                return broken("who has answered is not asked again", format!("{key} is asked under {token}"));
            }
            let other_key = self.keys.insert(job.clone(), key.clone()).filter(|before| before != key);
            // What a failover took back may come again in another way.
            let other_job = self.jobs.insert(key.clone(), job.clone()).filter(|before| before != job);
            let other_job = other_job.filter(|before| !disk.lost.contains(&Fact::Intended(before.sandbox.clone())));
            if other_key.is_some() || other_job.is_some() {
                let detail = format!("{key} of {job:?}, and {other_key:?}, {other_job:?}");
                return broken("a job has one idempotency key", detail);
            }
        }
        let asks = self.asks.entry(key.clone()).or_default();
        // What a failover took back is not counted.
        asks.retain(|ask| disk.ledger.job_of(ask.token).is_some() && !was_lost(ask.token));
        if asks.iter().any(|ask| ask.token == token) {
            return broken("a lease asks once", format!("{key} is asked twice under {token}"));
        }
        asks.push(Ask { token, refused });
        let lost = asks.iter().filter(|ask| !ask.refused).count();
        if lost > MAX_UNCLEAR_ASKS as usize || asks.len() >= (MAX_UNCLEAR_ASKS + MAX_REFUSED_ASKS) as usize {
            let detail = format!("{key} is asked {} times, {lost} of them without a refusal", asks.len());
            return broken("a lost ask is made once more", detail);
        }
        Ok(asks.len())
    }
}

impl Sim {
    /// Somebody is asked, for real; what the answer is to whoever asks. `None`: that must not be.
    pub fn ask_model(&mut self, lease: &JobLease) -> Option<Met> {
        let key = &lease.idempotency_key;
        self.tell(|| format!("{key} is asked under {}", lease.token));
        let refused = self.strike(Trouble::AnswererRefused, 0.2);
        let asked = self.models.ask(&self.disk, lease, refused);
        let number = self.check(asked)?;
        if refused {
            return Some(Met::NotNow([0, self.rng.random_range(0..90_000)][self.rng.random_range(0..2)]));
        }
        if self.strike(Trouble::AnswerUnclear, 0.1) {
            return Some(Met::Unclear);
        }
        let verdict = match self.rng.random_range(0..10) {
            0 => JudgeVerdict::Error,
            1..5 => JudgeVerdict::Failed,
            _ => JudgeVerdict::Passed,
        };
        let words = format!("{key} under {} says {number} {}", lease.token, verdict.as_str_name());
        if let Some(job) = self.disk.ledger.job_of(lease.token) {
            self.models.said.insert(words.clone(), job.clone());
        }
        Some(Met::Said(words, verdict))
    }
}
