//! What the events of jobs do to the state.

use bytes::Bytes;
use evalgrid_domain::limits::JUDGE_AFTER_SANDBOX_MS;
use evalgrid_proto::{
    log::v1::{self as log, job_answered::Answer, job_ended::Why},
    v1,
};

use super::{ASKS, Conversing, Job, JobPhase, Judging, Part, Person, Target, model_key, provider_of, reply_step};
use crate::{
    apply::{ApplyError, illegal, own_evidence, trial_key},
    custody::Sandbox,
    faults::{self, Fault},
    queue::Wait,
    state::{Lease, Phase, State, Trial, TrialKey},
};

impl State {
    /// Reads a job as the log writes it: it must be there.
    fn job_target(&self, job: Option<&log::JobRef>) -> Result<Target, ApplyError> {
        let Some(job) = job else { return illegal("no job is named") };
        let trial = trial_key(job.trial.as_ref())?;
        let part = match job.part {
            Some(log::job_ref::Part::Judge(index)) => u8::try_from(index).ok().map(Part::Judge),
            Some(log::job_ref::Part::Reply(turn)) => match self.trial(trial).map(|trial| &trial.phase) {
                Some(Phase::Conversing(conversing)) if conversing.turn == turn => Some(Part::Reply),
                _ => None,
            },
            None => None,
        };
        match part {
            Some(part) if self.trial(trial).is_some_and(|trial| trial.job(part).is_some()) => Ok(Target { trial, part }),
            _ => illegal("a job that its trial does not have"),
        }
    }

    /// The job of a target that must have one.
    fn job_mut(&mut self, target: Target) -> Result<&mut Job, ApplyError> {
        match self.trial_mut(target.trial).and_then(|trial| trial.job_mut(target.part)) {
            Some(job) => Ok(job),
            None => illegal("a job that its trial does not have"),
        }
    }

    pub(crate) fn trial_checked(&mut self, checked: &log::TrialChecked, at_ms: u64) -> Result<(), ApplyError> {
        let key = trial_key(checked.trial.as_ref())?;
        let Some(outcome) = checked.outcome.clone().map(own_evidence) else {
            return illegal("a trial is checked without an outcome");
        };
        if !matches!(self.trial(key).map(|trial| &trial.phase), Some(Phase::Leased { token }) if *token == checked.token) {
            return illegal("a trial is checked under a token that holds no lease");
        }
        self.end_lease(checked.token);
        if let Some(until_ms) = checked.sandbox_kept_until_ms
            && let Some(name) = self.trial(key).and_then(|trial| trial.sandbox.clone())
            && let Some(sandbox) = self.custody.get_mut(&name)
        {
            sandbox.kept_until_ms = Some(until_ms);
        }
        // No judge begins while the trial's own sandbox is there, unless that stays for people.
        let leaves = |sandbox: &Sandbox| sandbox.kept_until_ms.is_none();
        let name = self.trial(key).and_then(|trial| trial.sandbox.as_ref());
        let beside = faults::active(Fault::JudgedBesideSandbox);
        let not_before_ms = match name.and_then(|name| self.custody.get(name)).is_some_and(leaves) && !beside {
            true => at_ms + JUDGE_AFTER_SANDBOX_MS,
            false => at_ms,
        };
        let nonce = Bytes::copy_from_slice(&checked.nonce);
        self.judge(key, outcome, nonce, not_before_ms, at_ms)
    }

    /// The judges of a trial's case are asked from now on.
    pub(crate) fn judge(
        &mut self,
        key: TrialKey,
        outcome: v1::TrialOutcome,
        nonce: Bytes,
        not_before_ms: u64,
        at_ms: u64,
    ) -> Result<(), ApplyError> {
        let judges = self.judges_of(key);
        if judges == 0 {
            return illegal("a trial without judges is judged");
        }
        self.admission.talks_no_more(key);
        let jobs = (0..judges).map(|_| Job::new(at_ms, not_before_ms, self.queue.ticket())).collect();
        let Some(trial) = self.trial_mut(key) else {
            return illegal("a trial is judged that is not there");
        };
        trial.phase = Phase::Judging(Box::new(Judging { outcome, jobs, nonce }));
        trial.steps = Vec::new();
        trial.progress_ms = at_ms;
        self.enqueue_jobs(key, at_ms);
        Ok(())
    }

    /// How many judges a trial's case has.
    pub(crate) fn judges_of(&self, key: TrialKey) -> usize {
        let batch = self.batches.get(&key.batch);
        let case = batch.and_then(|batch| batch.cases.get(batch.coordinates(key.run).0));
        case.map_or(0, |case| case.judges.len())
    }

    pub(crate) fn reply_awaited(&mut self, awaited: &log::ReplyAwaited, at_ms: u64) -> Result<(), ApplyError> {
        let key = trial_key(awaited.trial.as_ref())?;
        let Some(conversation) = awaited.conversation.clone() else {
            return illegal("a reply is awaited to nothing");
        };
        if !matches!(self.trial(key).map(|trial| &trial.phase), Some(Phase::Leased { token }) if *token == awaited.token) {
            return illegal("a reply is awaited under a token that holds no lease");
        }
        self.end_lease(awaited.token);
        let job = Job::new(at_ms, at_ms, self.queue.ticket());
        let Some(trial) = self.trial_mut(key) else {
            return illegal("a reply is awaited by no trial");
        };
        trial.phase = Phase::Conversing(Box::new(Conversing {
            turn: awaited.turn,
            conversation: own_bytes(conversation),
            since_ms: at_ms,
            job,
            nonce: Bytes::copy_from_slice(&awaited.nonce),
        }));
        trial.idle_leases = 0;
        trial.idle_end.clear();
        trial.progress_ms = at_ms;
        self.enqueue_jobs(key, at_ms);
        Ok(())
    }

    pub(crate) fn job_leased(&mut self, leased: &log::JobLeased, at_ms: u64) -> Result<(), ApplyError> {
        let target = self.job_target(leased.job.as_ref())?;
        if leased.token <= self.last_token {
            return illegal("a fencing token that is not newer than all before it");
        }
        let Some(wait) = self.wait_of(target) else {
            return illegal("a lease for a job that does not wait");
        };
        let current = self.trial(target.trial).and_then(|trial| trial.sandbox_of(target.part));
        let name = (!leased.sandbox.is_empty()).then(|| leased.sandbox.clone());
        match (&name, leased.adopt) {
            (Some(name), true) => {
                let known = self.custody.get(name).is_some_and(|sandbox| sandbox.worker_id == leased.worker_id);
                if !known || current != Some(name) {
                    return illegal("a lease on a sandbox that is not the job's");
                }
            }
            (Some(name), false) => {
                let provider = provider_of(&wait.provider).to_owned();
                let sandbox = Sandbox::intended(target.trial, &leased.worker_id, &leased.boot_id, &provider, at_ms);
                if self.custody.insert(name.clone(), sandbox).is_some() {
                    return illegal("a sandbox's name is used twice");
                }
                self.admission.lives(&provider, name);
                self.admission.asked_for(&provider, at_ms);
            }
            (None, adopt) => {
                if adopt {
                    return illegal("a lease on no sandbox");
                }
            }
        }
        if !leased.adopt {
            self.queue.charge(&wait.provider, &wait.organization);
        }
        self.queue.remove(&wait);
        self.last_token = leased.token;
        self.leases.insert(
            leased.token,
            Lease {
                trial: target.trial,
                part: target.part,
                worker_id: leased.worker_id.clone(),
                incarnation: leased.incarnation.clone(),
            },
        );
        if let (Part::Reply, Some(sandbox), false) = (target.part, &name, leased.adopt)
            && let Some(trial) = self.trial_mut(target.trial)
        {
            trial.person = Some(Person {
                sandbox: sandbox.clone(),
                session_id: String::new(),
            });
        }
        let job = self.job_mut(target)?;
        job.phase = JobPhase::Leased {
            token: leased.token,
            since_ms: at_ms,
        };
        job.idle_leases += 1;
        if matches!(target.part, Part::Judge(_)) {
            job.sandbox = name;
        }
        self.hold(leased.token);
        Ok(())
    }

    pub(crate) fn job_asked(&mut self, asked: &log::JobAsked, at_ms: u64) -> Result<(), ApplyError> {
        let target = match self.leases.get(&asked.token) {
            Some(lease) if lease.part != Part::Trial => lease.target(),
            _ => return illegal("an ask under a token that holds no job"),
        };
        self.job_mut(target)?.asked = true;
        let Some(trial) = self.trial_mut(target.trial) else {
            return illegal("an ask for no trial");
        };
        trial.progress_ms = at_ms;
        // Who asks in a sandbox has made it.
        if let Some(name) = trial.sandbox_of(target.part).map(str::to_owned) {
            self.seen(&name);
        }
        Ok(())
    }

    pub(crate) fn job_ended(&mut self, ended: &log::JobEnded, at_ms: u64) -> Result<(), ApplyError> {
        let target = self.job_target(ended.job.as_ref())?;
        let why = ended.why();
        if ended.token == 0 {
            let Some(wait) = self.wait_of(target).filter(|_| why == Why::SandboxLost) else {
                return illegal("a job ends that holds no lease");
            };
            self.queue.remove(&wait);
        } else {
            if self.leases.get(&ended.token).is_none_or(|lease| lease.target() != target) {
                return illegal("a job ends that holds no lease");
            }
            if why == Why::NotNow
                && let Some(model_key) = self.model_key_of(target)
            {
                self.admission.throttled(&model_key, ended.throttled_until_ms, at_ms);
            }
            self.end_lease(ended.token);
        }
        let in_sandbox = self
            .trial(target.trial)
            .is_some_and(|trial| trial.sandbox_of(target.part).is_some());
        let ticket = self.queue.ticket();
        let job = self.job_mut(target)?;
        job.spent_ms += ended.spent_ms;
        if !ended.reason.is_empty() {
            job.reason = ended.reason.clone();
        }
        let orderly = match why {
            Why::NotNow => {
                job.refused += 1;
                job.asked = false;
                true
            }
            Why::Unclear => {
                job.unclear += 1;
                job.asked = false;
                true
            }
            Why::SandboxLost => {
                job.refused += u32::from(!job.asked && ended.token != 0);
                job.unclear += u32::from(job.asked);
                job.asked = false;
                ended.token != 0
            }
            Why::LeaseExpired | Why::WorkerReplaced | Why::NotDelivered | Why::Released | Why::Unspecified => {
                // A harness goes on in its sandbox; a call is lost with whoever made it.
                if !in_sandbox {
                    job.unclear += u32::from(job.asked && !faults::active(Fault::LostAskNotCounted));
                    job.asked = false;
                }
                why == Why::Released
            }
        };
        job.idle_leases = job.idle_leases.saturating_sub(orderly.into());
        // A judge is asked again in a fresh sandbox; a person's is its memory.
        let leaves = why == Why::SandboxLost || (matches!(why, Why::NotNow | Why::Unclear) && target.part != Part::Reply);
        if leaves {
            job.sandbox = None;
        }
        job.phase = JobPhase::Waits {
            since_ms: at_ms,
            not_before_ms: ended.not_before_ms,
            ticket,
        };
        if why == Why::SandboxLost
            && target.part == Part::Reply
            && let Some(trial) = self.trial_mut(target.trial)
        {
            trial.person = None;
        }
        self.enqueue(target, at_ms);
        Ok(())
    }

    pub(crate) fn job_answered(&mut self, answered: &log::JobAnswered, at_ms: u64) -> Result<(), ApplyError> {
        let target = self.job_target(answered.job.as_ref())?;
        match answered.token {
            0 => match self.wait_of(target) {
                Some(wait) => drop(self.queue.remove(&wait)),
                None => return illegal("an answer to a job that does not wait"),
            },
            token if self.leases.get(&token).is_some_and(|lease| lease.target() == target) => self.end_lease(token),
            _ => return illegal("an answer under a token that holds no lease"),
        }
        match (&answered.answer, target.part) {
            (Some(Answer::Judged(judged)), Part::Judge(index)) if judged.index == u32::from(index) => {
                let mut judged = judged.clone();
                judged.validation = judged.validation.map(own_bytes);
                let job = self.job_mut(target)?;
                job.phase = JobPhase::Judged(Box::new(judged));
                job.asked = false;
                if faults::active(Fault::AnswerForgotten) {
                    self.forget_answer(target, at_ms)?;
                }
                if let Some(trial) = self.trial_mut(target.trial) {
                    trial.progress_ms = at_ms;
                }
                Ok(())
            }
            (Some(Answer::Replied(replied)), Part::Reply) => self.replied(target.trial, replied, at_ms),
            _ => illegal("an answer to another question"),
        }
    }

    /// A deliberate defect.
    fn forget_answer(&mut self, target: Target, at_ms: u64) -> Result<(), ApplyError> {
        let others = |trial: &Trial| trial.jobs().any(|(_, job)| job.judged().is_none());
        if self.trial(target.trial).is_some_and(others) {
            let ticket = self.queue.ticket();
            *self.job_mut(target)? = Job::new(at_ms, at_ms, ticket);
            self.enqueue(target, at_ms);
        }
        Ok(())
    }

    /// The person has answered: a step of the trial, which goes on where its sandbox is.
    fn replied(&mut self, key: TrialKey, replied: &v1::Replied, at_ms: u64) -> Result<(), ApplyError> {
        let Some(trial) = self.trial_mut(key) else {
            return illegal("a reply to no trial");
        };
        let Phase::Conversing(conversing) = &trial.phase else {
            return illegal("a reply to a trial that waits for none");
        };
        let step = v1::RecordedStep {
            step: reply_step(conversing.turn),
            outcome: match replied.failed {
                true => v1::StepOutcome::Failed,
                false => v1::StepOutcome::Done,
            }
            .into(),
            result: Bytes::copy_from_slice(&replied.record),
        };
        if !faults::active(Fault::ReplyForgotten) {
            trial.steps.push(step);
        }
        if let Some(person) = &mut trial.person {
            person.session_id = replied.session_id.clone().unwrap_or_default();
        }
        if let Some(spend) = &replied.spend {
            trial.user_spend = Some(added(trial.user_spend.take(), spend));
        }
        trial.progress_ms = at_ms;
        self.wait_again(key, false, "", 0, at_ms)
    }

    /// A sandbox is gone that judges of its trial waited for.
    pub(crate) fn sandbox_made_way(&mut self, key: TrialKey, name: &str, at_ms: u64) {
        let Some(trial) = self.trial(key).filter(|trial| trial.sandbox.as_deref() == Some(name)) else {
            return;
        };
        let waiting = |(part, job): (Part, &Job)| match job.phase {
            JobPhase::Waits { not_before_ms, .. } if job.is_untouched() && not_before_ms > at_ms => Some(part),
            _ => None,
        };
        let judges: Vec<Part> = match trial.phase {
            Phase::Judging(_) => trial.jobs().filter_map(waiting).collect(),
            _ => return,
        };
        for part in judges {
            let target = Target { trial: key, part };
            if let Some(wait) = self.wait_of(target) {
                self.queue.remove(&wait);
            }
            if let Ok(job) = self.job_mut(target)
                && let JobPhase::Waits { not_before_ms, .. } = &mut job.phase
            {
                *not_before_ms = at_ms;
            }
            self.enqueue(target, at_ms);
        }
    }

    /// The sandbox in which a job's harness answered is gone, while nobody held the job.
    pub(crate) fn job_sandbox_gone(&mut self, target: Target, at_ms: u64) {
        if let Some(wait) = self.wait_of(target) {
            self.queue.remove(&wait);
        }
        if target.part == Part::Reply
            && let Some(trial) = self.trial_mut(target.trial)
        {
            trial.person = None;
        }
        if let Ok(job) = self.job_mut(target) {
            job.sandbox = None;
            job.unclear += u32::from(job.asked);
            job.asked = false;
        }
        self.enqueue(target, at_ms);
    }

    /// Nobody asks for a trial any more: its jobs wait no longer, and their leases end.
    pub(crate) fn stop_asking(&mut self, key: TrialKey) {
        let Some(trial) = self.trial(key) else { return };
        let jobs: Vec<(Part, Option<u64>)> = trial.jobs().map(|(part, job)| (part, job.token())).collect();
        for (part, token) in jobs {
            match token {
                Some(token) => self.end_lease(token),
                None => self.stop_waiting(Target { trial: key, part }),
            }
        }
    }

    /// Puts those of a trial's jobs into the queue that wait.
    pub(crate) fn enqueue_jobs(&mut self, key: TrialKey, now_ms: u64) {
        let parts: Vec<Part> = self.trial(key).into_iter().flat_map(Trial::jobs).map(|(part, _)| part).collect();
        for part in parts {
            self.enqueue(Target { trial: key, part }, now_ms);
        }
    }

    /// Where a job that waits stands in the queue.
    pub(crate) fn job_wait(&self, target: Target) -> Option<Wait> {
        let batch = self.batches.get(&target.trial.batch).filter(|batch| batch.local.is_none())?;
        let trial = batch.trial(target.trial)?;
        let JobPhase::Waits { not_before_ms, ticket, .. } = trial.job(target.part)?.phase else {
            return None;
        };
        let answerer = batch.answerer(target)?;
        let variant = batch.variants.get(batch.coordinates(target.trial.run).1)?;
        let adopter = trial
            .sandbox_of(target.part)
            .and_then(|name| Some(self.custody.get(name)?.worker_id.clone()));
        Some(Wait {
            key: target,
            ticket,
            not_before_ms,
            organization: batch.organization,
            provider: match answerer.harness.is_empty() {
                true => ASKS.to_owned(),
                false => format!("{ASKS}@{}", variant.provider),
            },
            model_key: model_key(target.part, answerer),
            adopter,
        })
    }
}

/// What was taken together. What one has not told nobody knows of both.
fn added(before: Option<v1::ModelSpend>, more: &v1::ModelSpend) -> v1::ModelSpend {
    let Some(before) = before else { return more.clone() };
    let usage = before.usage.zip(more.usage).map(|(one, other)| v1::Usage {
        input_tokens: one.input_tokens.saturating_add(other.input_tokens),
        output_tokens: one.output_tokens.saturating_add(other.output_tokens),
        cache_read_tokens: one.cache_read_tokens.saturating_add(other.cache_read_tokens),
        cache_write_tokens: one.cache_write_tokens.saturating_add(other.cache_write_tokens),
        total_tokens: one.total_tokens.saturating_add(other.total_tokens),
        cost_usd: one.cost_usd.zip(other.cost_usd).map(|(one, other)| one + other),
        cache_write_1h_tokens: one
            .cache_write_1h_tokens
            .zip(other.cache_write_1h_tokens)
            .map(|(one, other)| one.saturating_add(other)),
    });
    v1::ModelSpend {
        model: more.model.clone(),
        usage,
    }
}

/// What arrives is a slice of a whole group's buffer, which must not live as long as the trial.
fn own_bytes(mut evidence: v1::Evidence) -> v1::Evidence {
    if let Some(v1::evidence::Place::Inline(bytes)) = &mut evidence.place {
        *bytes = Bytes::copy_from_slice(bytes);
    }
    evidence
}
