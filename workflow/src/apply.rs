//! One event changes the state. An event that does not fit the state is a typed error: in replay it means that the log is not ours or is
//! damaged, live it means a bug, and in both cases going on would make it worse.

use std::collections::BTreeMap;

use bytes::Bytes;
use evalgrid_domain::{
    ids::{BatchId, KeyId, OrgId},
    limits,
};
use evalgrid_proto::{
    log::v1::{self as log, Event, event::Kind},
    v1::{self, TrialStatus},
};

use crate::{
    faults::{self, Fault},
    jobs::Target,
    local::Local,
    moving::Residence,
    retry::{self, is_scored},
    state::{Batch, BatchPhase, IdempotentStart, Key, Organization, Phase, Run, State, Trial, TrialKey},
};

/// An event that cannot happen in this state.
#[derive(Debug, thiserror::Error)]
#[error("an event does not fit the state before it: {0}")]
pub struct ApplyError(String);

pub(crate) fn illegal<T>(what: impl Into<String>) -> Result<T, ApplyError> {
    Err(ApplyError(what.into()))
}

pub(crate) fn batch_id(bytes: &[u8]) -> Result<BatchId, ApplyError> {
    bytes.try_into().map(BatchId).or_else(|_| illegal("a batch id is not 16 bytes"))
}

pub(crate) fn organization_id(text: &str) -> Result<OrgId, ApplyError> {
    text.parse().or_else(|_| illegal(format!("{text:?} is not an organization id")))
}

pub(crate) fn key_id(text: &str) -> Result<KeyId, ApplyError> {
    text.parse().or_else(|_| illegal(format!("{text:?} is not a key id")))
}

/// Reads a trial's reference as the log writes it.
pub(crate) fn trial_key(reference: Option<&log::TrialRef>) -> Result<TrialKey, ApplyError> {
    let Some(reference) = reference else {
        return illegal("no trial is named");
    };
    match (u8::try_from(reference.run), u8::try_from(reference.ordinal)) {
        (Ok(run), Ok(ordinal)) => Ok(TrialKey {
            batch: batch_id(&reference.batch)?,
            run,
            ordinal,
        }),
        _ => illegal("a trial's position is out of range"),
    }
}

/// A trial's reference as the log writes it.
pub(crate) fn trial_ref(key: TrialKey) -> Option<log::TrialRef> {
    Some(log::TrialRef {
        batch: key.batch.0.to_vec().into(),
        run: key.run.into(),
        ordinal: key.ordinal.into(),
    })
}

/// Verdicts by run and ordinal.
type Carried = BTreeMap<(u32, u32), v1::TrialOutcome>;

/// What a batch takes over from the one that it retries or regrades. At least one trial is left to run, or to judge.
fn carried_trials(started: &log::BatchStarted) -> Result<Carried, ApplyError> {
    let regrades = started.regrade_of.is_some();
    let mut carried = BTreeMap::new();
    for trial in &started.carried {
        let takes = |outcome: &v1::TrialOutcome| is_scored(outcome.status()) || (regrades && outcome.status() == TrialStatus::Void);
        let Some(outcome) = trial.outcome.clone().filter(takes) else {
            return illegal("a trial without a score is carried over");
        };
        if carried.insert((trial.run, trial.ordinal), own_evidence(outcome)).is_some() {
            return illegal("a trial is carried over twice");
        }
    }
    let in_all = started.variant_ids.len() * started.trials as usize;
    let possible = match (started.retry_of.is_some(), regrades) {
        (true, true) => false,
        (true, false) => carried.len() < in_all,
        (false, true) => carried.len() == in_all && retry::judged(started) > 0,
        (false, false) => carried.is_empty(),
    };
    match possible {
        true => Ok(carried),
        false => illegal("a batch takes over more than it may"),
    }
}

/// Small evidence arrives as a slice of a whole group's buffer, which must not live as long as the trial.
pub(crate) fn own_evidence(mut outcome: v1::TrialOutcome) -> v1::TrialOutcome {
    if let Some(v1::Evidence {
        place: Some(v1::evidence::Place::Inline(bytes)),
    }) = &mut outcome.evidence
    {
        *bytes = Bytes::copy_from_slice(bytes);
    }
    outcome
}

impl State {
    /// Changes the state by one event. On an error the state must be thrown away.
    pub fn apply(&mut self, event: &Event) -> Result<(), ApplyError> {
        let at_ms = event.at_ms;
        if at_ms < self.last_ms {
            return illegal(format!("time goes back from {} to {at_ms}", self.last_ms));
        }
        self.last_ms = at_ms;
        match event.kind.as_ref() {
            Some(Kind::StepRecorded(step)) => self.step_recorded(step, at_ms),
            Some(Kind::LeaseGranted(lease)) => self.lease_granted(lease, at_ms),
            Some(Kind::TrialSettled(settled)) => self.trial_settled(settled, at_ms),
            Some(Kind::SandboxCreated(created)) => self.sandbox_created(created),
            Some(Kind::SandboxDestroyAsked(asked)) => self.sandbox_destroy_asked(asked, at_ms),
            Some(Kind::SandboxDestroyed(destroyed)) => self.sandbox_destroyed(destroyed, at_ms),
            Some(Kind::AttemptEnded(ended)) => self.attempt_ended(ended, at_ms),
            Some(Kind::BatchStarted(started)) => self.batch_started(started, at_ms),
            Some(Kind::BatchEnded(ended)) => self.batch_ended(ended, at_ms),
            Some(Kind::BatchArchived(archived)) => self.batch_archived(archived),
            Some(Kind::OrganizationCreated(created)) => self.organization_created(created),
            Some(Kind::KeyCreated(created)) => self.key_created(created, at_ms),
            Some(Kind::KeyRevoked(revoked)) => self.key_revoked(revoked, at_ms),
            Some(Kind::LocalCheckedIn(checked_in)) => self.local_checked_in(checked_in, at_ms),
            Some(Kind::LocalBatchClosed(closed)) => self.local_batch_closed(closed, at_ms),
            Some(Kind::OrganizationFrozen(event)) => self.reside(&event.organization_id, Residence::Here, Residence::Frozen),
            Some(Kind::OrganizationUnfrozen(event)) => self.reside(&event.organization_id, Residence::Frozen, Residence::Here),
            Some(Kind::OrganizationMoved(event)) => self.reside(&event.organization_id, Residence::Frozen, Residence::Moved),
            Some(Kind::OrganizationImported(imported)) => self.organization_imported(imported),
            Some(Kind::TrialChecked(checked)) => self.trial_checked(checked, at_ms),
            Some(Kind::ReplyAwaited(awaited)) => self.reply_awaited(awaited, at_ms),
            Some(Kind::JobLeased(leased)) => self.job_leased(leased, at_ms),
            Some(Kind::JobAsked(asked)) => self.job_asked(asked, at_ms),
            Some(Kind::JobEnded(ended)) => self.job_ended(ended, at_ms),
            Some(Kind::JobAnswered(answered)) => self.job_answered(answered, at_ms),
            // It is in the index only, until its organization arrives.
            Some(Kind::BatchImported(_)) => Ok(()),
            None => illegal("an event of a kind that this version does not know"),
        }
    }

    fn organization_created(&mut self, created: &log::OrganizationCreated) -> Result<(), ApplyError> {
        let id = organization_id(&created.organization_id)?;
        if self.organizations.contains_key(&id) || self.slugs.contains_key(&created.slug) {
            return illegal("an organization is created twice");
        }
        self.slugs.insert(created.slug.clone(), id);
        self.organizations.insert(
            id,
            Organization {
                id,
                name: created.name.clone(),
                slug: created.slug.clone(),
                running: Default::default(),
                in_memory: Default::default(),
                started: 0,
                residence: Residence::Here,
                generation: 0,
                idempotency: Default::default(),
                idempotency_expiry: Default::default(),
            },
        );
        Ok(())
    }

    pub(crate) fn key_created(&mut self, created: &log::KeyCreated, at_ms: u64) -> Result<(), ApplyError> {
        let id = key_id(&created.key_id)?;
        let organization = organization_id(&created.organization_id)?;
        let Ok(hash) = <[u8; 32]>::try_from(created.hash.as_ref()) else {
            return illegal("a key's hash is not 32 bytes");
        };
        if !self.organizations.contains_key(&organization) || self.keys.contains_key(&id) || self.keys_by_hash.contains_key(&hash) {
            return illegal("a key without an organization, or one that is there already");
        }
        self.keys_by_hash.insert(hash, id);
        self.keys.insert(
            id,
            Key {
                id,
                organization,
                name: created.name.clone(),
                start: created.start.clone(),
                permissions: created.permissions.clone(),
                created_ms: at_ms,
                revoked_ms: None,
            },
        );
        Ok(())
    }

    pub(crate) fn key_revoked(&mut self, revoked: &log::KeyRevoked, at_ms: u64) -> Result<(), ApplyError> {
        match self.keys.get_mut(&key_id(&revoked.key_id)?) {
            Some(key) if key.revoked_ms.is_none() => key.revoked_ms = Some(at_ms),
            _ => return illegal("a key is revoked that does not live"),
        }
        Ok(())
    }

    fn batch_started(&mut self, started: &log::BatchStarted, at_ms: u64) -> Result<(), ApplyError> {
        let id = batch_id(&started.batch)?;
        let organization_id = organization_id(&started.organization_id)?;
        let runs = started.cases.len() * started.variants.len();
        let (Some(request), Some(suite)) = (started.request.clone(), started.suite.clone()) else {
            return illegal("a batch without a request or a suite");
        };
        let trials_in_all = runs as u64 * u64::from(started.trials);
        if trials_in_all == 0 || trials_in_all > limits::MAX_TRIALS_PER_BATCH || started.variant_ids.len() != runs {
            return illegal("a batch of an impossible size");
        }
        let Self {
            organizations,
            queue,
            batches,
            ..
        } = self;
        let Some(organization) = organizations.get_mut(&organization_id) else {
            return illegal("a batch of no organization");
        };
        if batches.contains_key(&id) {
            return illegal("a batch is started twice");
        }
        while let Some((expiry, key)) = organization.idempotency_expiry.first().cloned() {
            if expiry > at_ms {
                break;
            }
            organization.idempotency_expiry.remove(&(expiry, key.clone()));
            organization.idempotency.remove(&key);
        }
        if let Some(key) = &started.idempotency_key {
            let start = IdempotentStart {
                request_hash: started.request_hash.clone(),
                batch: id,
                expires_ms: None,
            };
            if organization.idempotency.insert(key.clone(), start).is_some() {
                return illegal("an idempotency key is used twice");
            }
        }
        let mut carried = carried_trials(started)?;
        let retry_of = started.retry_of.as_deref().map(batch_id).transpose()?;
        let regrade_of = started.regrade_of.as_deref().map(batch_id).transpose()?;
        let mut judged = Vec::new();
        let mut unsettled = trials_in_all as usize - carried.len();
        organization.running.insert(id);
        organization.in_memory.insert(id);
        organization.started += 1;
        let mut all_runs = Vec::with_capacity(runs);
        for run in 0..runs {
            let mut trials = Vec::with_capacity(started.trials as usize);
            for ordinal in 1..=started.trials {
                let ticket = queue.ticket();
                let phase = match carried.remove(&(run as u32, ordinal)) {
                    Some(outcome) => {
                        let case = run / started.variants.len();
                        if regrade_of.is_some() && is_scored(outcome.status()) && !started.cases[case].judges.is_empty() {
                            judged.push((run as u8, ordinal as u8, outcome.clone()));
                            unsettled += 1;
                        }
                        Phase::Settled(Box::new(outcome))
                    }
                    None => Phase::Queued {
                        since_ms: at_ms,
                        not_before_ms: 0,
                        ticket,
                    },
                };
                trials.push(Trial {
                    phase,
                    attempts: 0,
                    idle_leases: 0,
                    idle_end: String::new(),
                    lost: Vec::new(),
                    progress_ms: at_ms,
                    sandbox: None,
                    steps: Vec::new(),
                    person: None,
                    user_spend: None,
                });
            }
            let finished = trials.iter().all(|trial| matches!(trial.phase, Phase::Settled(_)));
            all_runs.push(Run {
                trials,
                finished_ms: finished.then_some(at_ms),
            });
        }
        if !carried.is_empty() {
            return illegal("a trial is carried over that the batch does not have");
        }
        batches.insert(
            id,
            Batch {
                id,
                organization: organization_id,
                request,
                suite,
                cases: started.cases.clone(),
                variants: started.variants.clone(),
                variant_ids: started.variant_ids.clone(),
                trigger: started.trigger.clone(),
                idempotency_key: started.idempotency_key.clone(),
                started_ms: at_ms,
                runs: all_runs,
                unsettled: unsettled as u32,
                phase: BatchPhase::Running,
                local: started.local.then(|| Local {
                    checks_in: started.checks_in,
                    harnesses: started.harnesses.clone(),
                    sign_ms: at_ms,
                    closed: None,
                }),
                retry_of,
                regrade_of,
            },
        );
        for run in 0..runs {
            for ordinal in 1..=started.trials {
                let key = TrialKey {
                    batch: id,
                    run: run as u8,
                    ordinal: ordinal as u8,
                };
                self.enqueue(Target::trial(key), at_ms);
            }
        }
        for (run, ordinal, outcome) in judged {
            let key = TrialKey { batch: id, run, ordinal };
            self.judge(key, outcome, Bytes::copy_from_slice(&started.nonce), at_ms, at_ms)?;
            if let Some(batch) = self.batches.get_mut(&id) {
                batch.runs[usize::from(run)].finished_ms = None;
            }
        }
        Ok(())
    }

    fn trial_settled(&mut self, settled: &log::TrialSettled, at_ms: u64) -> Result<(), ApplyError> {
        let key = trial_key(settled.trial.as_ref())?;
        let Some(outcome) = settled.outcome.clone().map(own_evidence) else {
            return illegal("a verdict without an outcome");
        };
        match self.trial(key).map(|trial| &trial.phase) {
            None => return illegal("a verdict for no trial"),
            Some(Phase::Settled(_)) => return illegal("a second verdict for a trial"),
            Some(Phase::Leased { token }) => self.end_lease(*token),
            Some(Phase::Queued { .. }) => self.stop_waiting(Target::trial(key)),
            Some(Phase::Conversing(_) | Phase::Judging(_)) => self.stop_asking(key),
        }
        self.admission.talks_no_more(key);
        let Some(batch) = self.batches.get_mut(&key.batch) else {
            return illegal("a verdict for no batch");
        };
        let Some(trial) = batch.trial_mut(key) else {
            return illegal("a verdict for no trial");
        };
        trial.phase = Phase::Settled(Box::new(outcome));
        trial.steps = Vec::new();
        trial.person = None;
        trial.user_spend = None;
        trial.progress_ms = at_ms;
        if let Some(until_ms) = settled.sandbox_kept_until_ms
            && let Some(sandbox) = trial.sandbox.as_ref().and_then(|name| self.custody.get_mut(name))
        {
            sandbox.kept_until_ms = Some(until_ms);
        }
        if let Some(local) = &mut batch.local {
            local.sign_ms = at_ms;
        }
        let run = &mut batch.runs[usize::from(key.run)];
        if run.trials.iter().all(|trial| matches!(trial.phase, Phase::Settled(_))) {
            run.finished_ms = Some(at_ms);
        }
        batch.unsettled -= 1;
        Ok(())
    }

    fn batch_ended(&mut self, ended: &log::BatchEnded, at_ms: u64) -> Result<(), ApplyError> {
        let id = batch_id(&ended.batch)?;
        let Some(batch) = self.batches.get_mut(&id) else {
            return illegal("a batch ends that is not there");
        };
        if (batch.unsettled != 0 && !faults::active(Fault::BatchEndsEarly)) || batch.phase != BatchPhase::Running {
            return illegal("a batch ends that has trials without a verdict, or has ended before");
        }
        batch.phase = BatchPhase::Ended {
            status: ended.status(),
            failure: ended.failure.clone(),
            at_ms,
            manifest: None,
        };
        let Some(organization) = self.organizations.get_mut(&batch.organization) else {
            return illegal("a batch of no organization");
        };
        organization.running.remove(&id);
        if faults::active(Fault::SlotReleasedTwice) {
            organization.running.pop_first();
        }
        if let Some(key) = &batch.idempotency_key
            && let Some(start) = organization.idempotency.get_mut(key)
        {
            let expiry = at_ms + limits::IDEMPOTENCY_KEY_MS;
            start.expires_ms = Some(expiry);
            organization.idempotency_expiry.insert((expiry, key.clone()));
        }
        Ok(())
    }

    fn batch_archived(&mut self, archived: &log::BatchArchived) -> Result<(), ApplyError> {
        match self.batches.get_mut(&batch_id(&archived.batch)?) {
            Some(Batch {
                phase: BatchPhase::Ended {
                    manifest: manifest @ None, ..
                },
                ..
            }) => *manifest = archived.manifest.clone(),
            _ => return illegal("a batch is archived that has not ended, or is archived already"),
        }
        Ok(())
    }
}
