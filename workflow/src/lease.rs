//! What the events of attempts do to the state: leases are granted and end, trials wait again, sandboxes come into custody and go.
//!
//! Three functions carry the bookkeeping of all of them: `hold` takes everything that a lease holds, `end_lease` lets go of it, `wait_again` lets
//! the trial wait. Nobody else does any of these, so nothing is taken or let go by halves.

use bytes::Bytes;
use evalgrid_proto::{
    log::v1::{self as log, attempt_ended::Why},
    v1,
};

use crate::{
    admission::model_key,
    apply::{ApplyError, illegal, trial_key},
    custody::{GONE_ON_RETURN, Sandbox},
    faults::{self, Fault},
    jobs::{self, Part, Target},
    queue::Wait,
    state::{Lease, Phase, State, Trial, TrialKey},
};

impl State {
    pub(crate) fn lease_granted(&mut self, granted: &log::LeaseGranted, at_ms: u64) -> Result<(), ApplyError> {
        let key = trial_key(granted.trial.as_ref())?;
        if granted.token <= self.last_token {
            return illegal("a fencing token that is not newer than all before it");
        }
        let Some(wait) = self.wait_of(Target::trial(key)) else {
            return illegal("a lease for a trial that does not wait");
        };
        if granted.adopt {
            let known = self
                .custody
                .get(&granted.sandbox)
                .is_some_and(|sandbox| sandbox.worker_id == granted.worker_id && sandbox.trial == key);
            if !known || self.trial(key).and_then(|trial| trial.sandbox.as_deref()) != Some(granted.sandbox.as_str()) {
                return illegal("a lease on a sandbox that is not the trial's");
            }
        } else {
            let sandbox = Sandbox::intended(key, &granted.worker_id, &granted.boot_id, &wait.provider, at_ms);
            if self.custody.insert(granted.sandbox.clone(), sandbox).is_some() {
                return illegal("a sandbox's name is used twice");
            }
            self.admission.lives(&wait.provider, &granted.sandbox);
            self.admission.asked_for(&wait.provider, at_ms);
            if self.has_harness_person(key) {
                self.admission.talks(&wait.provider, key);
            }
            // Before it leaves the queue, or the turn of its organization would be lost.
            self.queue.charge(&wait.provider, &wait.organization);
        }
        self.queue.remove(&wait);
        self.last_token = granted.token;
        self.leases.insert(
            granted.token,
            Lease {
                trial: key,
                part: Part::Trial,
                worker_id: granted.worker_id.clone(),
                incarnation: granted.incarnation.clone(),
            },
        );
        let Some(trial) = self.trial_mut(key) else {
            return illegal("a lease for no trial");
        };
        if !granted.adopt {
            // The first one begins the trial. A later one is no sign of progress, or one that is tried for ever would never be abandoned.
            if trial.attempts == 0 {
                trial.progress_ms = at_ms;
            }
            trial.attempts += 1;
            trial.steps.clear();
            trial.sandbox = Some(granted.sandbox.clone());
            trial.person = None;
            trial.user_spend = None;
        }
        trial.idle_leases += 1;
        trial.phase = Phase::Leased { token: granted.token };
        self.hold(granted.token);
        Ok(())
    }

    pub(crate) fn step_recorded(&mut self, step: &log::StepRecorded, at_ms: u64) -> Result<(), ApplyError> {
        let lease = self.leases.get(&step.token).filter(|lease| lease.part == Part::Trial);
        let key = lease.map(|lease| lease.trial);
        let Some(trial) = key.and_then(|key| self.trial_mut(key)) else {
            return illegal("a step under a token that holds no lease");
        };
        let first = trial.steps.is_empty();
        trial.progress_ms = at_ms;
        trial.idle_leases = 0;
        trial.idle_end.clear();
        // A copy: what arrives is a slice of a whole group's buffer, which must not live as long as the trial.
        let result = Bytes::copy_from_slice(&step.result);
        trial.steps.push(v1::RecordedStep {
            step: step.step.clone(),
            outcome: step.outcome,
            result,
        });
        if first && let Some(name) = trial.sandbox.clone() {
            self.seen(&name);
        }
        Ok(())
    }

    pub(crate) fn attempt_ended(&mut self, ended: &log::AttemptEnded, at_ms: u64) -> Result<(), ApplyError> {
        let key = trial_key(ended.trial.as_ref())?;
        let why = ended.why();
        let loses_sandbox = matches!(why, Why::SandboxLost | Why::SandboxUnavailable);
        if ended.token == 0 {
            // The attempt had lost its worker before, and now loses its sandbox.
            match self.trial(key).map(|trial| &trial.phase) {
                Some(Phase::Queued { .. }) if loses_sandbox => self.stop_waiting(Target::trial(key)),
                Some(Phase::Conversing(_)) if loses_sandbox => self.stop_asking(key),
                _ => return illegal("an attempt ends that holds no lease"),
            }
            return self.wait_again(key, true, &ended.reason, ended.not_before_ms, at_ms);
        }
        if self
            .leases
            .get(&ended.token)
            .is_none_or(|lease| lease.target() != Target::trial(key))
        {
            return illegal("an attempt ends that holds no lease");
        }
        if why == Why::Throttled
            && let Some(model_key) = self.model_key_of(Target::trial(key))
        {
            // With this one still among the holders: they were too many together.
            self.admission.throttled(&model_key, ended.throttled_until_ms, at_ms);
        }
        if faults::active(Fault::ExpiryForgetsCustody)
            && why == Why::LeaseExpired
            && let Some(name) = self.trial(key).and_then(|trial| trial.sandbox.clone())
        {
            self.custody.remove(&name);
            self.end_lease(ended.token);
            return self.wait_again(key, true, &ended.reason, ended.not_before_ms, at_ms);
        }
        if !faults::active(Fault::OldLeaseLives) {
            self.end_lease(ended.token);
        }
        if let Some(trial) = self.trial_mut(key) {
            match why {
                // These are orderly ends: the worker has told of them, so the trial did not kill it.
                Why::Throttled | Why::Released => trial.idle_leases = trial.idle_leases.saturating_sub(1),
                _ => trial.idle_end = end_text(why).to_owned(),
            }
        }
        self.wait_again(key, loses_sandbox, &ended.reason, ended.not_before_ms, at_ms)
    }

    pub(crate) fn sandbox_created(&mut self, created: &log::SandboxCreated) -> Result<(), ApplyError> {
        let Some(sandbox) = self.custody.get_mut(&created.sandbox) else {
            return illegal("a sandbox is created that is not in custody");
        };
        sandbox.provider_id = (!created.provider_id.is_empty()).then(|| created.provider_id.clone());
        self.seen(&created.sandbox);
        Ok(())
    }

    pub(crate) fn sandbox_destroy_asked(&mut self, asked: &log::SandboxDestroyAsked, at_ms: u64) -> Result<(), ApplyError> {
        match self.custody.get_mut(&asked.sandbox) {
            Some(sandbox) if sandbox.destroy_asked_ms.is_none() => sandbox.destroy_asked_ms = Some(at_ms),
            _ => return illegal("the destruction of a sandbox is asked for that is not in custody, or twice"),
        }
        Ok(())
    }

    pub(crate) fn sandbox_destroyed(&mut self, destroyed: &log::SandboxDestroyed, at_ms: u64) -> Result<(), ApplyError> {
        let Some(key) = self.custody.get(&destroyed.sandbox).map(|sandbox| sandbox.trial) else {
            return illegal("a sandbox is destroyed that is not in custody");
        };
        let name = destroyed.sandbox.as_str();
        let lived = self.trial(key).and_then(|trial| Some((trial.lives_in(name)?, trial)));
        match lived.map(|(part, trial)| (part, &trial.phase, trial.steps.is_empty())) {
            Some((Part::Trial, Phase::Leased { .. }, _)) => return illegal("a sandbox is destroyed under a living lease"),
            Some((Part::Trial, _, untouched)) => {
                self.stop_waiting(Target::trial(key));
                self.stop_asking(key);
                let reason = if untouched { "" } else { GONE_ON_RETURN };
                self.wait_again(key, true, reason, 0, at_ms)?;
            }
            Some((part, ..)) => {
                let target = Target { trial: key, part };
                if self.trial(key).and_then(|trial| trial.job(part)?.token()).is_some() {
                    return illegal("a sandbox is destroyed under a living lease");
                }
                self.job_sandbox_gone(target, at_ms);
            }
            None => self.sandbox_made_way(key, name, at_ms),
        }
        if let Some(sandbox) = self.custody.remove(&destroyed.sandbox) {
            self.admission.gone(&sandbox.provider, &destroyed.sandbox);
        }
        Ok(())
    }

    /// Takes everything that a lease holds: a place among those on its model key, and, until there is a sign of its sandbox, among those that start.
    pub(crate) fn hold(&mut self, token: u64) {
        let Some(target) = self.leases.get(&token).map(Lease::target) else {
            return;
        };
        if let Some(model_key) = self.model_key_of(target) {
            self.admission.hold(&model_key, token);
        }
        let name = self.trial(target.trial).and_then(|trial| trial.sandbox_of(target.part));
        if let Some((name, sandbox)) = name.and_then(|name| self.custody.get_key_value(name))
            && !sandbox.created
        {
            self.admission.starting(&sandbox.provider, name);
        }
    }

    /// Lets go of everything that a lease holds.
    pub(crate) fn end_lease(&mut self, token: u64) {
        let Some(lease) = self.leases.remove(&token) else { return };
        let target = lease.target();
        if let Some(model_key) = self.model_key_of(target) {
            self.admission.release(&model_key, token);
        }
        let name = self.trial(target.trial).and_then(|trial| trial.sandbox_of(target.part));
        if let Some((name, sandbox)) = name.and_then(|name| self.custody.get_key_value(name)) {
            // Nobody is making it any more.
            self.admission.started(&sandbox.provider, name);
        }
    }

    /// Takes what waits, if it does, out of the queue.
    pub(crate) fn stop_waiting(&mut self, target: Target) {
        if let Some(wait) = self.wait_of(target) {
            self.queue.remove(&wait);
        }
    }

    /// Puts what waits into the queue.
    pub(crate) fn enqueue(&mut self, target: Target, now_ms: u64) {
        if let Some(wait) = self.wait_of(target) {
            self.queue.push(wait, now_ms);
        }
    }

    /// The trial waits: for the worker in whose folder its sandbox lives, or, without that, for a fresh sandbox anywhere.
    pub(crate) fn wait_again(
        &mut self,
        key: TrialKey,
        loses_sandbox: bool,
        reason: &str,
        not_before_ms: u64,
        at_ms: u64,
    ) -> Result<(), ApplyError> {
        let ticket = self.queue.ticket();
        let Some(trial) = self.trial_mut(key) else {
            return illegal("a trial that is not there waits");
        };
        trial.phase = Phase::Queued {
            since_ms: at_ms,
            not_before_ms,
            ticket,
        };
        if loses_sandbox {
            // A sandbox in which nothing had been recorded yet cost the trial nothing.
            if !trial.steps.is_empty() || !reason.is_empty() {
                trial.lost.push(reason.to_owned());
                // The next attempt gets its whole time. Lost ones are few, so this ends.
                trial.progress_ms = at_ms;
            }
            trial.sandbox = None;
            // The next conversation has another person: this one's sandbox must not keep its place.
            trial.person = None;
            trial.steps.clear();
        }
        if loses_sandbox {
            self.admission.talks_no_more(key);
        }
        self.enqueue(Target::trial(key), at_ms);
        Ok(())
    }

    /// Whether a trial's person is a harness, which lives in a sandbox as the trial does.
    pub(crate) fn has_harness_person(&self, key: TrialKey) -> bool {
        let person = Target {
            trial: key,
            part: Part::Reply,
        };
        let answerer = self.batches.get(&key.batch).and_then(|batch| batch.answerer(person));
        answerer.is_some_and(|answerer| !answerer.harness.is_empty())
    }

    /// Where what waits stands in the queue.
    pub(crate) fn wait_of(&self, target: Target) -> Option<Wait> {
        if target.part != Part::Trial {
            return self.job_wait(target);
        }
        let key = target.trial;
        // The machine of a local batch takes its trials without asking.
        let batch = self.batches.get(&key.batch).filter(|batch| batch.local.is_none())?;
        let trial = batch.trial(key)?;
        let Phase::Queued { not_before_ms, ticket, .. } = trial.phase else {
            return None;
        };
        let variant = batch.variants.get(batch.coordinates(key.run).1)?;
        let adopter = trial
            .sandbox
            .as_ref()
            .and_then(|name| Some(self.custody.get(name)?.worker_id.clone()));
        Some(Wait {
            key: target,
            ticket,
            not_before_ms,
            organization: batch.organization,
            provider: variant.provider.clone(),
            model_key: model_key(variant),
            adopter,
        })
    }

    /// Whose limit the model of a trial, or of one of its jobs, counts toward.
    pub(crate) fn model_key_of(&self, target: Target) -> Option<String> {
        jobs::key_of(self.batches.get(&target.trial.batch)?, target)
    }

    pub(crate) fn trial_mut(&mut self, key: TrialKey) -> Option<&mut Trial> {
        self.batches.get_mut(&key.batch)?.trial_mut(key)
    }

    /// There is a sign of the sandbox.
    pub(crate) fn seen(&mut self, name: &str) {
        if let Some(sandbox) = self.custody.get_mut(name)
            && !sandbox.created
        {
            sandbox.created = true;
            self.admission.started(&sandbox.provider, name);
        }
    }
}

/// For people: how an attempt ended that recorded nothing.
fn end_text(why: Why) -> &'static str {
    match why {
        Why::LeaseExpired => "no word from the worker for a whole lease",
        Why::WorkerReplaced => "the worker was started anew",
        Why::NotDelivered => "the lease did not reach the worker",
        Why::SandboxLost => "the sandbox was lost",
        Why::SandboxUnavailable => "the sandbox could not be made",
        Why::Released | Why::Throttled | Why::Unspecified => "",
    }
}
