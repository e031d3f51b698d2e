//! What follows from a request, in a state, at a time: the events that carry it out, or a refusal. Nothing here changes anything.

use evalgrid_domain::{
    ids::{BatchId, KeyId, OrgId},
    limits, outcome,
    outcome::CANCELLED,
};
use evalgrid_proto::{
    log::v1::{self as log, Event, attempt_ended::Why, event::Kind},
    v1::{self, AttemptFailureKind, TrialOutcome, TrialStatus},
};

use crate::{
    apply::trial_ref,
    state::{Batch, BatchPhase, Phase, State, TrialKey},
};

/// A step's result beyond this is an object, named by the step.
pub const MAX_STEP_RESULT_BYTES: usize = 64 * 1024;
/// 50 turns of three steps each, and the steps around them, with room.
pub const MAX_STEPS_PER_TRIAL: usize = 1024;
/// A step's name, e.g. `turn.12.agent`.
pub const MAX_STEP_NAME_BYTES: usize = 80;
/// Leases in a row without a recorded step: a trial that kills its worker every time must end.
pub const MAX_IDLE_LEASES: u32 = 64;

/// Why a request changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Three batches run already.
    #[error("{running} batches are running, which is the limit of this organization; start again once one finishes")]
    Busy {
        /// How many.
        running: usize,
    },
    /// The idempotency key belongs to a different request.
    #[error("this idempotency key was used with a different request; use a new key for a new request")]
    KeyReused,
    /// Too many idempotency keys are remembered.
    #[error(
        "{} idempotency keys are remembered for this organization, which is the limit; start without one, or wait",
        limits::MAX_IDEMPOTENCY_KEYS
    )]
    TooManyKeys,
    /// No such batch, or somebody else's.
    #[error("there is no batch with this id")]
    NoBatch,
    /// It ended before it could be cancelled.
    #[error("the batch has already ended")]
    Ended,
    /// No such key, or revoked before.
    #[error("there is no living key with this id")]
    NoKey,
    /// The token holds no lease.
    #[error("the attempt holds no lease")]
    Stale,
    /// A step breaks a limit.
    #[error("the step breaks a limit: {0}")]
    StepLimit(String),
}

/// One event at a time.
pub fn event(at_ms: u64, kind: Kind) -> Event {
    Event { at_ms, kind: Some(kind) }
}

/// What to do about a start.
#[derive(Debug)]
pub enum Start {
    /// The same key and the same request have started this batch before.
    Replay(BatchId),
    /// Admit it with these events.
    Admit(Vec<Event>),
}

/// Admission of a batch: an idempotent replay first, then the limit of running batches.
pub fn start(state: &State, started: log::BatchStarted, organization: &OrgId, now_ms: u64) -> Result<Start, Refusal> {
    if let Some(known) = replay(
        state,
        organization,
        started.idempotency_key.as_deref(),
        &started.request_hash,
        now_ms,
    )? {
        return Ok(Start::Replay(known));
    }
    if let Some(refusal) = busy(state, organization, started.idempotency_key.is_some()) {
        return Err(refusal);
    }
    Ok(Start::Admit(vec![event(now_ms, Kind::BatchStarted(started))]))
}

/// The batch that this key has started already. A different request under the same key is refused.
pub fn replay(state: &State, organization: &OrgId, key: Option<&str>, request_hash: &str, now_ms: u64) -> Result<Option<BatchId>, Refusal> {
    match key.and_then(|key| state.idempotent_start(organization, key, now_ms)) {
        Some(start) if start.request_hash == request_hash => Ok(Some(start.batch)),
        Some(_) => Err(Refusal::KeyReused),
        None => Ok(None),
    }
}

/// Whether the organization may not start another batch now.
pub fn busy(state: &State, organization: &OrgId, with_key: bool) -> Option<Refusal> {
    let organization = state.organization(organization)?;
    if organization.running.len() >= limits::MAX_RUNNING_BATCHES {
        return Some(Refusal::Busy {
            running: organization.running.len(),
        });
    }
    (with_key && organization.idempotency.len() >= limits::MAX_IDEMPOTENCY_KEYS).then_some(Refusal::TooManyKeys)
}

/// An organization, where there is none with this slug yet.
pub fn create_organization(state: &State, slug: &str, id: OrgId, now_ms: u64) -> Option<Event> {
    state.organization_by_slug(slug).is_none().then(|| {
        let created = log::OrganizationCreated {
            organization_id: id.to_string(),
            name: slug.to_owned(),
            slug: slug.to_owned(),
        };
        event(now_ms, Kind::OrganizationCreated(created))
    })
}

/// The end of a key. Revoking twice is refused.
pub fn revoke_key(state: &State, id: &KeyId, now_ms: u64) -> Result<Event, Refusal> {
    match state.key(id) {
        Some(key) if key.revoked_ms.is_none() => Ok(event(now_ms, Kind::KeyRevoked(log::KeyRevoked { key_id: id.to_string() }))),
        _ => Err(Refusal::NoKey),
    }
}

/// Cancels a batch: every trial without a verdict is void with that text. No events where it is cancelled already.
pub fn cancel(state: &State, organization: &OrgId, id: &BatchId, now_ms: u64) -> Result<Vec<Event>, Refusal> {
    let batch = state
        .batch(id)
        .filter(|batch| batch.organization == *organization)
        .ok_or(Refusal::NoBatch)?;
    if let BatchPhase::Ended { failure, .. } = &batch.phase {
        return if failure.as_deref() == Some(CANCELLED) {
            Ok(Vec::new())
        } else {
            Err(Refusal::Ended)
        };
    }
    Ok(unsettled(batch)
        .map(|(key, token)| {
            let outcome = TrialOutcome {
                cancelled: true,
                ..void(CANCELLED, batch, key)
            };
            settled(key, token, outcome, now_ms)
        })
        .collect())
}

/// What follows by itself from an event that has just been applied: a batch ends with its last verdict.
pub fn after(state: &State, applied: &Event) -> Option<Event> {
    let Some(Kind::TrialSettled(settled)) = &applied.kind else {
        return None;
    };
    let batch = state.batch(&crate::apply::trial_key(settled.trial.as_ref()).ok()?.batch)?;
    ending(batch, applied.at_ms)
}

/// What should have followed from the last events of a log that was cut right behind them. For once, after recovery.
pub fn catch_up(state: &State, now_ms: u64) -> Vec<Event> {
    state.batches().filter_map(|batch| ending(batch, now_ms)).collect()
}

fn ending(batch: &Batch, now_ms: u64) -> Option<Event> {
    if batch.unsettled != 0 || batch.phase != BatchPhase::Running {
        return None;
    }
    let cancelled = batch
        .trials()
        .any(|(_, trial)| trial.outcome().is_some_and(|outcome| outcome.cancelled));
    let (status, failure) = match cancelled {
        true => (v1::BatchStatus::Failed, Some(CANCELLED.to_owned())),
        false => (v1::BatchStatus::Finished, None),
    };
    let ended = log::BatchEnded {
        batch: batch.id.0.to_vec().into(),
        status: status.into(),
        failure,
    };
    Some(event(now_ms, Kind::BatchEnded(ended)))
}

/// Why a sandbox is lost that its worker no longer has.
pub(crate) const GONE_ON_RETURN: &str = "it was gone when its worker came back";

/// A lease for a waiting trial.
#[derive(Debug, Clone, Copy)]
pub struct Holder<'a> {
    /// The worker's lasting name.
    pub worker_id: &'a str,
    /// Its process.
    pub incarnation: &'a str,
    /// Its boot.
    pub boot_id: &'a str,
}

/// Gives a waiting trial to a worker. Past the bound of fruitless leases the trial settles void instead.
pub fn grant(state: &State, key: TrialKey, holder: Holder<'_>, now_ms: u64) -> Vec<Event> {
    let Some(batch) = state.batch(&key.batch) else { return Vec::new() };
    let Some(trial) = batch.trial(key) else { return Vec::new() };
    if trial.idle_leases >= MAX_IDLE_LEASES {
        let text = format!("The worker stopped {MAX_IDLE_LEASES} times in a row while it ran this trial");
        return vec![settled(key, 0, void(&text, batch, key), now_ms)];
    }
    let token = state.last_token + 1;
    let adopt = trial.sandbox.is_some();
    let sandbox = trial.sandbox.clone().unwrap_or_else(|| format!("{}-{token}", key.id()));
    vec![event(
        now_ms,
        Kind::LeaseGranted(log::LeaseGranted {
            token,
            trial: trial_ref(key),
            worker_id: holder.worker_id.to_owned(),
            incarnation: holder.incarnation.to_owned(),
            boot_id: holder.boot_id.to_owned(),
            sandbox,
            adopt,
        }),
    )]
}

/// A recorded step. `None`: it is recorded already, and the report is only acknowledged again.
pub fn step(state: &State, worker_id: &str, record: v1::StepRecord, now_ms: u64) -> Result<Option<Event>, Refusal> {
    let trial = state.trial(lease_of(state, worker_id, record.token)?).ok_or(Refusal::Stale)?;
    if record.result.len() > MAX_STEP_RESULT_BYTES {
        return Err(Refusal::StepLimit(format!(
            "a result has {} bytes, the limit is {MAX_STEP_RESULT_BYTES}",
            record.result.len()
        )));
    }
    if record.step.is_empty() || record.step.len() > MAX_STEP_NAME_BYTES {
        return Err(Refusal::StepLimit(format!(
            "a name has {} bytes, the limit is {MAX_STEP_NAME_BYTES}",
            record.step.len()
        )));
    }
    if trial.steps.iter().any(|known| known.step == record.step) {
        return Ok(None);
    }
    if trial.steps.len() >= MAX_STEPS_PER_TRIAL {
        return Err(Refusal::StepLimit(format!("a trial has {MAX_STEPS_PER_TRIAL} steps at most")));
    }
    let recorded = log::StepRecorded {
        token: record.token,
        step: record.step,
        outcome: record.outcome,
        result: record.result,
    };
    Ok(Some(event(now_ms, Kind::StepRecorded(recorded))))
}

/// A verdict from the worker that holds the lease.
pub fn result(state: &State, worker_id: &str, token: u64, outcome: TrialOutcome, now_ms: u64) -> Result<Event, Refusal> {
    let key = lease_of(state, worker_id, token)?;
    if !matches!(outcome.status(), TrialStatus::Passed | TrialStatus::Failed | TrialStatus::Void) {
        return Err(Refusal::StepLimit(format!("{:?} is not a verdict", outcome.status())));
    }
    Ok(settled(key, token, outcome, now_ms))
}

/// An attempt that its worker gives up. A lost sandbox is tried again a bounded number of times, then the trial is void.
pub fn attempt_failed(
    state: &State,
    worker_id: &str,
    failure: &v1::AttemptFailure,
    retry_delay_ms: u64,
    now_ms: u64,
) -> Result<Option<Event>, Refusal> {
    let key = lease_of(state, worker_id, failure.token)?;
    let why = match failure.kind() {
        AttemptFailureKind::Released => return Ok(Some(attempt_ended(failure.token, key, Why::Released, String::new(), 0, now_ms))),
        AttemptFailureKind::SandboxUnavailable => Why::SandboxUnavailable,
        AttemptFailureKind::SandboxLost | AttemptFailureKind::Unspecified => Why::SandboxLost,
    };
    let reason = outcome::failure_text(&failure.reason);
    Ok(retry_or_void(state, key, failure.token, why, &reason, retry_delay_ms, now_ms))
}

fn retry_or_void(state: &State, key: TrialKey, token: u64, why: Why, reason: &str, delay_ms: u64, now_ms: u64) -> Option<Event> {
    let batch = state.batch(&key.batch)?;
    let lost = batch.trial(key).map_or(0, |trial| trial.lost.len() as u32) + 1;
    if lost < limits::MAX_SANDBOX_ATTEMPTS {
        return Some(attempt_ended(token, key, why, reason.to_owned(), now_ms + delay_ms, now_ms));
    }
    let text = match why {
        Why::SandboxUnavailable => reason.to_owned(),
        _ => format!("{}: {reason}", outcome::sandbox_lost(lost)),
    };
    Some(settled(key, token, void(&text, batch, key), now_ms))
}

/// What a worker's greeting proves of leases: those of an earlier process of it have ended, and those that never reached it.
pub fn hello_leases(state: &State, hello: &v1::Hello, now_ms: u64) -> Vec<Event> {
    let ours = state.leases().filter(|(_, lease)| lease.worker_id == hello.worker_id);
    let ended = ours.filter_map(|(token, lease)| {
        let why = match (lease.incarnation == hello.incarnation, hello.held.contains(&token)) {
            (false, _) => Why::WorkerReplaced,
            (true, false) => Why::NotDelivered,
            (true, true) => return None,
        };
        Some(attempt_ended(token, lease.trial, why, String::new(), 0, now_ms))
    });
    ended.collect()
}

/// What a worker's greeting proves of sandboxes, once [`hello_leases`] is applied: those of an earlier boot, and those of which nothing is
/// left, are destroyed. A sandbox under a living lease may be about to be made and is left alone.
pub fn hello_sandboxes(state: &State, hello: &v1::Hello, now_ms: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for (name, sandbox) in state.custody().filter(|(_, sandbox)| sandbox.worker_id == hello.worker_id) {
        let leased = state
            .trial(sandbox.trial)
            .is_some_and(|trial| trial.sandbox.as_deref() == Some(name) && matches!(trial.phase, Phase::Leased { .. }));
        let gone = sandbox.boot_id != hello.boot_id || !hello.sandboxes.iter().any(|present| present == name);
        if gone && !leased {
            events.extend(destroyed(state, name, &hello.worker_id, now_ms));
        }
    }
    events
}

/// Sandboxes in the worker's folder that no trial needs any more.
pub fn unneeded<'a>(state: &State, hello: &'a v1::Hello) -> Vec<&'a str> {
    hello
        .sandboxes
        .iter()
        .map(String::as_str)
        .filter(|name| !needed(state, name))
        .collect()
}

/// Whether a trial without a verdict still lives in this sandbox.
pub fn needed(state: &State, name: &str) -> bool {
    state
        .custody
        .get(name)
        .and_then(|sandbox| state.trial(sandbox.trial))
        .is_some_and(|trial| trial.sandbox.as_deref() == Some(name) && !matches!(trial.phase, Phase::Settled(_)))
}

/// A sandbox is confirmed destroyed. Where a waiting trial lived in it, that attempt is lost, and past the bound the trial is void.
pub fn destroyed(state: &State, name: &str, worker_id: &str, now_ms: u64) -> Vec<Event> {
    let Some(sandbox) = state.custody.get(name).filter(|sandbox| sandbox.worker_id == worker_id) else {
        return Vec::new();
    };
    let mut events = Vec::new();
    if let Some(batch) = state.batch(&sandbox.trial.batch)
        && let Some(trial) = batch.trial(sandbox.trial)
        && trial.sandbox.as_deref() == Some(name)
        && matches!(trial.phase, Phase::Queued { .. })
        && !trial.steps.is_empty()
        && trial.lost.len() as u32 + 1 >= limits::MAX_SANDBOX_ATTEMPTS
    {
        let text = format!("{}: {GONE_ON_RETURN}", outcome::sandbox_lost(trial.lost.len() as u32 + 1));
        events.push(settled(sandbox.trial, 0, void(&text, batch, sandbox.trial), now_ms));
    }
    let gone = log::SandboxDestroyed {
        sandbox: name.to_owned(),
        worker_id: worker_id.to_owned(),
    };
    events.push(event(now_ms, Kind::SandboxDestroyed(gone)));
    events
}

/// No sign of a worker for a whole lease: its trials wait for it, or for whoever takes its folder over.
pub fn expire_worker(state: &State, worker_id: &str, now_ms: u64) -> Vec<Event> {
    state
        .leases()
        .filter(|(_, lease)| lease.worker_id == worker_id)
        .map(|(token, lease)| attempt_ended(token, lease.trial, Why::LeaseExpired, String::new(), 0, now_ms))
        .collect()
}

/// Trials whose sandbox lies with a worker that stayed away past the grace: they start over elsewhere. The sandbox stays in custody.
///
/// `gone` tells whether a worker is away; it is not part of the state.
pub fn give_up_absent(state: &State, gone: &dyn Fn(&str) -> bool, grace_ms: u64, retry_delay_ms: u64, now_ms: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for (name, sandbox) in state.custody() {
        let Some(batch) = state.batch(&sandbox.trial.batch) else { continue };
        let Some(trial) = batch.trial(sandbox.trial) else { continue };
        let Phase::Queued { since_ms, .. } = trial.phase else { continue };
        if trial.sandbox.as_deref() == Some(name) && since_ms + grace_ms <= now_ms && gone(&sandbox.worker_id) {
            if trial.steps.is_empty() {
                // Nothing is known to have begun there, so nothing is lost.
                events.push(attempt_ended(0, sandbox.trial, Why::SandboxLost, String::new(), now_ms, now_ms));
                continue;
            }
            let reason = format!("no word from its worker for {}", outcome::humanise_duration(grace_ms));
            events.extend(retry_or_void(
                state,
                sandbox.trial,
                0,
                Why::SandboxLost,
                &reason,
                retry_delay_ms,
                now_ms,
            ));
        }
    }
    events
}

/// Trials that nothing will end: no sign of progress for six hours, or 72 hours in the queue.
pub fn abandon(state: &State, now_ms: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for batch in state.batches().filter(|batch| batch.phase == BatchPhase::Running) {
        for (key, trial) in batch.trials() {
            let quiet = trial.progress_ms + limits::ABANDONED_AFTER_MS <= now_ms;
            let (overdue, token, text) = match trial.phase {
                Phase::Settled(_) => continue,
                Phase::Queued { since_ms, .. } if trial.attempts == 0 => (
                    since_ms + limits::MAX_WAIT_FOR_SLOT_MS <= now_ms,
                    0,
                    outcome::never_started(limits::MAX_WAIT_FOR_SLOT_MS),
                ),
                Phase::Queued { .. } => (quiet, 0, outcome::abandoned(limits::ABANDONED_AFTER_MS)),
                Phase::Leased { token } => (quiet, token, outcome::abandoned(limits::ABANDONED_AFTER_MS)),
            };
            if overdue {
                events.push(settled(key, token, void(&text, batch, key), now_ms));
            }
        }
    }
    events
}

/// The whole result of an ended batch is durable as an object.
pub fn archived(batch: &Batch, manifest: v1::ObjectRef, summary: v1::BatchSummary, now_ms: u64) -> Event {
    event(
        now_ms,
        Kind::BatchArchived(log::BatchArchived {
            batch: batch.id.0.to_vec().into(),
            organization_id: batch.organization.to_string(),
            manifest: Some(manifest),
            summary: Some(summary),
        }),
    )
}

fn settled(key: TrialKey, token: u64, outcome: TrialOutcome, now_ms: u64) -> Event {
    event(
        now_ms,
        Kind::TrialSettled(log::TrialSettled {
            trial: trial_ref(key),
            token,
            outcome: Some(outcome),
        }),
    )
}

fn unsettled(batch: &Batch) -> impl Iterator<Item = (TrialKey, u64)> {
    batch.trials().filter_map(|(key, trial)| match trial.phase {
        Phase::Settled(_) => None,
        Phase::Leased { token } => Some((key, token)),
        Phase::Queued { .. } => Some((key, 0)),
    })
}

fn void(failure: &str, batch: &Batch, key: TrialKey) -> TrialOutcome {
    TrialOutcome {
        status: TrialStatus::Void.into(),
        exit_code: -1,
        failure: Some(failure.to_owned()),
        sandbox_id: batch.trial(key).and_then(|trial| trial.sandbox.clone()),
        ..TrialOutcome::default()
    }
}

fn attempt_ended(token: u64, key: TrialKey, why: Why, reason: String, not_before_ms: u64, now_ms: u64) -> Event {
    let ended = log::AttemptEnded {
        token,
        why: why.into(),
        reason,
        not_before_ms,
        trial: trial_ref(key),
    };
    event(now_ms, Kind::AttemptEnded(ended))
}

/// The trial of a living lease, if this worker holds it.
fn lease_of(state: &State, worker_id: &str, token: u64) -> Result<TrialKey, Refusal> {
    state
        .lease(token)
        .filter(|lease| lease.worker_id == worker_id)
        .map(|lease| lease.trial)
        .ok_or(Refusal::Stale)
}
