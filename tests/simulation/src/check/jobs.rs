//! What the log says of jobs: judgments behind a trial, and the replies of its person in the middle of it.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use evalgrid_domain::limits::JUDGE_AFTER_SANDBOX_MS;
use evalgrid_proto::{
    log::v1::{self as log, job_answered::Answer, job_ended::Why, job_ref},
    v1::{Evidence, JudgeVerdict, Judged, TrialOutcome, TrialStatus},
};

use super::{Fact, Ledger, TrialId, Violation, broken, trial};
use crate::trial::transcript;

/// What is asked once: a judgment, or the reply after a turn of what goes on in this sandbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobKey {
    /// Of which trial.
    pub trial: TrialId,
    part: Part,
    /// Where the conversation goes on; empty for a judge.
    pub sandbox: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Judge(u32),
    Reply(u32),
}

/// A trial that is judged.
struct Judging {
    outcome: TrialOutcome,
    /// Its sandbox, and since when that has to go before anybody judges.
    waits_for: Option<(String, u64)>,
    judges: u32,
    answers: BTreeMap<u32, Judged>,
}

/// A trial whose person speaks.
struct Awaiting {
    turn: u32,
    conversation: Option<Evidence>,
}

/// See the module.
#[derive(Default)]
pub struct Jobs {
    /// Every lease that there ever was.
    of_token: BTreeMap<u64, JobKey>,
    /// The living lease of each job.
    leased: BTreeMap<JobKey, u64>,
    /// Jobs that are asked, or may have been, by whoever holds their lease or has left their sandbox.
    asked: BTreeSet<JobKey>,
    /// Where a harness answers.
    sandbox_of: BTreeMap<JobKey, String>,
    judging: BTreeMap<TrialId, Judging>,
    awaiting: BTreeMap<TrialId, Awaiting>,
    /// What people have said, by the sandbox in which they were heard.
    replies: BTreeMap<String, Vec<Bytes>>,
    answered: BTreeSet<JobKey>,
    /// Sandboxes of people in which a reply was given: where their memory is.
    homes: BTreeSet<String>,
}

impl Ledger {
    /// What a lease is for, if it is one of a job.
    pub fn job_of(&self, token: u64) -> Option<&JobKey> {
        self.jobs.of_token.get(&token)
    }

    /// Whether it is on record that a job is asked now.
    pub fn is_asked(&self, job: &JobKey) -> bool {
        self.jobs.asked.contains(job)
    }

    /// Whether a job has its answer.
    pub fn is_answered(&self, job: &JobKey) -> bool {
        self.jobs.answered.contains(job)
    }

    /// What a judge or a person has to be shown under this token, as long as that lease lives.
    pub fn shown(&self, token: u64) -> Option<&Option<Evidence>> {
        let job = self
            .jobs
            .of_token
            .get(&token)
            .filter(|job| self.jobs.leased.get(job) == Some(&token))?;
        match job.part {
            Part::Judge(_) => Some(&self.jobs.judging.get(&job.trial)?.outcome.evidence),
            Part::Reply(_) => Some(&self.jobs.awaiting.get(&job.trial)?.conversation),
        }
    }

    /// Whether a person has spoken in a sandbox of its own, and can go on with what it remembers.
    pub fn remembers(&self, home: &str) -> bool {
        self.jobs.homes.contains(home)
    }

    /// What must hold of jobs when nothing more happens.
    pub(super) fn jobs_at_rest(&self) -> Result<(), Violation> {
        match self.jobs.leased.iter().next() {
            Some((job, token)) => broken("no lease is left", format!("token {token} of {job:?} is")),
            None => Ok(()),
        }
    }

    /// Whether a trial waits for others than its worker.
    pub(super) fn waits_for_jobs(&self, trial: &TrialId) -> bool {
        self.jobs.judging.contains_key(trial) || self.jobs.awaiting.contains_key(trial)
    }

    /// What a trial is judged by: its checks' verdict, and what they have seen.
    pub(super) fn judged_from_now(&mut self, trial: TrialId, outcome: &TrialOutcome, waits_for: Option<(String, u64)>) {
        let judging = Judging {
            outcome: outcome.clone(),
            waits_for,
            judges: self.case_of(trial).map_or(0, |(judges, _)| judges),
            answers: BTreeMap::new(),
        };
        self.jobs.judging.insert(trial, judging);
    }

    pub(super) fn checked(&mut self, checked: &log::TrialChecked, at_ms: u64) -> Result<(), Violation> {
        let trial = trial(checked.trial.as_ref())?;
        self.end(trial, checked.token)?;
        let outcome = checked.outcome.clone().unwrap_or_default();
        let scored = matches!(outcome.status(), TrialStatus::Passed | TrialStatus::Failed);
        if !scored || self.case_of(trial).is_none_or(|(judges, _)| judges == 0) {
            return broken(
                "judges have a say where there are any",
                format!("{trial:?} is checked: {:?}", outcome.status()),
            );
        }
        self.heard_whole(trial, outcome.evidence.as_ref())?;
        let sandbox = self.sandboxes.get(&trial).cloned().unwrap_or_default();
        // What is kept for people keeps no judge.
        let waits_for = checked.sandbox_kept_until_ms.is_none().then_some((sandbox, at_ms));
        self.judged_from_now(trial, &outcome, waits_for);
        self.facts.insert(Fact::Checked(trial.0, trial.1, trial.2));
        Ok(())
    }

    /// Each reply is there once, in order, in what a trial shows of its conversation.
    fn heard_whole(&self, trial: TrialId, shown: Option<&Evidence>) -> Result<(), Violation> {
        let sandbox = self.sandboxes.get(&trial).map(String::as_str).unwrap_or_default();
        let replies = self.jobs.replies.get(sandbox).map(Vec::as_slice).unwrap_or_default();
        match shown {
            Some(shown) if *shown != transcript(replies) => broken(
                "each reply is heard once, in order",
                format!("{shown:?} in {sandbox}, instead of {replies:?}"),
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn reply_awaited(&mut self, awaited: &log::ReplyAwaited) -> Result<(), Violation> {
        let trial = trial(awaited.trial.as_ref())?;
        self.end(trial, awaited.token)?;
        if self.case_of(trial).is_none_or(|(_, person)| !person) {
            return broken("people speak where there are any", format!("{trial:?} waits for nobody"));
        }
        self.heard_whole(trial, awaited.conversation.as_ref())?;
        let sandbox = self.sandboxes.get(&trial).map(String::as_str).unwrap_or_default();
        let before = self.jobs.replies.get(sandbox).map_or(0, Vec::len);
        if awaited.turn as usize != before + 1 {
            let detail = format!("{trial:?} waits for reply {} in {sandbox}, behind {before}", awaited.turn);
            return broken("each reply is heard once, in order", detail);
        }
        let awaiting = Awaiting {
            turn: awaited.turn,
            conversation: awaited.conversation.clone(),
        };
        self.jobs.awaiting.insert(trial, awaiting);
        Ok(())
    }

    fn job_key(&self, job: Option<&log::JobRef>) -> Result<JobKey, Violation> {
        let Some(job) = job else {
            return broken("a record can be read", "no job is named");
        };
        let trial = trial(job.trial.as_ref())?;
        let (part, sandbox) = match job.part {
            Some(job_ref::Part::Judge(index)) => (Part::Judge(index), String::new()),
            Some(job_ref::Part::Reply(turn)) => (Part::Reply(turn), self.sandboxes.get(&trial).cloned().unwrap_or_default()),
            None => return broken("a record can be read", "a job of no kind"),
        };
        Ok(JobKey { trial, part, sandbox })
    }

    pub(super) fn job_leased(&mut self, leased: &log::JobLeased, at_ms: u64) -> Result<(), Violation> {
        let job = self.job_key(leased.job.as_ref())?;
        self.newer(leased.token)?;
        let waits = match job.part {
            Part::Judge(index) => self.jobs.judging.get(&job.trial).is_some_and(|judging| index < judging.judges),
            Part::Reply(turn) => self.jobs.awaiting.get(&job.trial).is_some_and(|awaiting| awaiting.turn == turn),
        };
        if !waits || self.jobs.answered.contains(&job) {
            return broken(
                "who has answered is not asked again",
                format!("{job:?} is leased, and waits: {waits}"),
            );
        }
        if let Some(Judging {
            waits_for: Some((sandbox, since_ms)),
            ..
        }) = self.jobs.judging.get(&job.trial)
            && self.custody.contains_key(sandbox)
            && at_ms < since_ms + JUDGE_AFTER_SANDBOX_MS
        {
            return broken(
                "no judge begins beside its trial's sandbox",
                format!("{job:?} is leased, and {sandbox} is there"),
            );
        }
        if let Some(token) = self.jobs.leased.insert(job.clone(), leased.token) {
            return broken(
                "a job has one living lease",
                format!("{job:?} is leased under {token} and {}", leased.token),
            );
        }
        if !leased.sandbox.is_empty() {
            self.takes(&leased.sandbox, leased.adopt, &leased.worker_id, job.trial)?;
            self.jobs.sandbox_of.insert(job.clone(), leased.sandbox.clone());
        }
        self.jobs.of_token.insert(leased.token, job);
        Ok(())
    }

    pub(super) fn job_asked(&mut self, asked: &log::JobAsked) -> Result<(), Violation> {
        let token = asked.token;
        let job = self.jobs.of_token.get(&token);
        let Some(job) = job.filter(|job| self.jobs.leased.get(job) == Some(&token)) else {
            return broken("no record under an old token", format!("{token} asks"));
        };
        self.jobs.asked.insert(job.clone());
        self.facts.insert(Fact::Asked(token));
        Ok(())
    }

    /// A job's lease ends. Token 0: there was none.
    fn job_ends(&mut self, job: &JobKey, token: u64) -> Result<(), Violation> {
        let held = self.jobs.leased.remove(job).unwrap_or_default();
        match held == token {
            true => Ok(()),
            false => broken(
                "no record under an old token",
                format!("{job:?} ends under {token}, and is held under {held}"),
            ),
        }
    }

    pub(super) fn job_ended(&mut self, ended: &log::JobEnded) -> Result<(), Violation> {
        let job = self.job_key(ended.job.as_ref())?;
        let stays = match ended.why() {
            Why::NotNow | Why::Unclear | Why::SandboxLost => false,
            // A process goes on, whoever holds its lease; a call is lost with whoever made it.
            _ => self.jobs.sandbox_of.contains_key(&job),
        };
        if !stays {
            self.jobs.asked.remove(&job);
        }
        self.job_ends(&job, ended.token)
    }

    /// A sandbox is gone, and with it what was asked there.
    pub(super) fn asked_no_more(&mut self, sandbox: &str) {
        let Jobs { sandbox_of, asked, .. } = &mut self.jobs;
        sandbox_of.retain(|job, of_job| {
            let stays = of_job != sandbox;
            if !stays {
                asked.remove(job);
            }
            stays
        });
    }

    pub(super) fn job_answered(&mut self, answered: &log::JobAnswered) -> Result<(), Violation> {
        let job = self.job_key(answered.job.as_ref())?;
        self.job_ends(&job, answered.token)?;
        if !self.jobs.answered.insert(job.clone()) {
            return broken("a job has one answer", format!("{job:?}"));
        }
        self.facts.insert(Fact::Answered(answered.token));
        match (&answered.answer, job.part) {
            (Some(Answer::Judged(judged)), Part::Judge(index)) => {
                if let Some(judging) = self.jobs.judging.get_mut(&job.trial) {
                    judging.answers.insert(index, judged.clone());
                }
                Ok(())
            }
            (Some(Answer::Replied(replied)), Part::Reply(turn)) => {
                self.jobs.awaiting.remove(&job.trial);
                if replied.session_id.is_some() {
                    self.jobs.homes.extend(self.jobs.sandbox_of.get(&job).cloned());
                }
                self.jobs
                    .replies
                    .entry(job.sandbox.clone())
                    .or_default()
                    .push(replied.record.clone());
                let step = format!("turn.{turn}.person");
                match self.facts.insert(Fact::Step(job.sandbox.clone(), step.clone())) {
                    true => Ok(()),
                    false => broken("a step is recorded once per sandbox", format!("{step} in {}", job.sandbox)),
                }
            }
            _ => broken("a record can be read", "an answer to another question"),
        }
    }

    /// A trial's sandbox is lost, and with it the conversation that went on there.
    pub(super) fn conversation_ends(&mut self, trial: TrialId) {
        if self.jobs.awaiting.remove(&trial).is_some() {
            self.nobody_asks(trial);
        }
    }

    fn nobody_asks(&mut self, trial: TrialId) {
        self.jobs.leased.retain(|job, _| job.trial != trial);
    }

    /// A trial has its verdict: that of its checks and its judges, and where one of them is missing, none.
    pub(super) fn judged(&mut self, trial: TrialId, outcome: &TrialOutcome) -> Result<(), Violation> {
        self.nobody_asks(trial);
        let awaited = self.jobs.awaiting.remove(&trial).is_some();
        let judges = self.case_of(trial).map_or(0, |(judges, _)| judges);
        let Some(judging) = self.jobs.judging.remove(&trial) else {
            let scored = outcome.status() != TrialStatus::Void;
            if scored && (judges > 0 || awaited) {
                let detail = format!("{trial:?} is {:?}, and {judges} judges were not asked", outcome.status());
                return broken("judges have a say where there are any", detail);
            }
            return self.heard_whole(trial, outcome.evidence.as_ref());
        };
        let verdicts: Vec<JudgeVerdict> = judging.answers.values().map(Judged::verdict).collect();
        let due = match judging.outcome.status() {
            _ if verdicts.len() < judging.judges as usize => TrialStatus::Void,
            _ if verdicts.contains(&JudgeVerdict::Error) => TrialStatus::Void,
            TrialStatus::Passed if verdicts.iter().all(|verdict| *verdict == JudgeVerdict::Passed) => TrialStatus::Passed,
            _ => TrialStatus::Failed,
        };
        // Of judges that have not answered, a trial that was ended from outside tells that they have not.
        let (answers, others): (Vec<&Judged>, Vec<&Judged>) = outcome
            .judged
            .iter()
            .partition(|judged| judging.answers.contains_key(&judged.index));
        let kept = judging.answers.values().eq(answers)
            && others.iter().all(|judged| judged.choice.is_none())
            && judging.outcome.evidence == outcome.evidence;
        if outcome.status() != due || !kept {
            let detail = format!(
                "{trial:?} is {:?}, and should be {due:?} by {verdicts:?}; kept: {kept}",
                outcome.status()
            );
            return broken("a verdict is what checks and judges say", detail);
        }
        Ok(())
    }
}
