//! What follows from a request, in a state, at a time: the events that carry it out, or a refusal. Nothing here changes anything.

use evalgrid_domain::{
    ids::{BatchId, KeyId, OrgId},
    limits, outcome,
    outcome::CANCELLED,
};
use evalgrid_proto::{
    log::v1::{self as log, Event, attempt_ended::Why, event::Kind, job_ended::Why as JobWhy},
    v1::{self, AttemptFailureKind, TrialOutcome, TrialStatus},
};

pub use crate::custody::{
    ask_to_destroy, created, destroyed, gone_under_lease, hello_sandboxes, keep_sandbox, kept, listed_sandboxes, needed, unneeded,
};
pub use crate::judging::{awaits_reply, grant_job, job_asked, job_result};
use crate::{
    admission::{MAX_RETRY_AFTER_MS, MIN_RETRY_AFTER_MS},
    apply::trial_ref,
    chance::Chance,
    custody::sandbox_name,
    faults::{self, Fault},
    jobs::{JobPhase, Part, Target},
    judging, local,
    state::{Batch, BatchPhase, Phase, State, TrialKey},
};

/// A step's result beyond this is an object, named by the step.
pub const MAX_STEP_RESULT_BYTES: usize = 64 * 1024;
/// A step's name, e.g. `turn.12.agent`.
pub const MAX_STEP_NAME_BYTES: usize = 80;
/// Leases in a row without a recorded step: a trial that kills its worker every time must end. Waits between them grow ([`FRUITLESS_DELAY_MS`]),
/// so that this many take some five minutes at least: a machine that is restarted a few times within one long turn stays far below, and a
/// poisonous trial cannot take a worker down more often.
pub const MAX_IDLE_LEASES: u32 = 16;
/// After its first fruitless lease a trial is leased again at once, after the second it waits this long, then twice as long each time.
pub const FRUITLESS_DELAY_MS: u64 = 250;
/// A lost sandbox is tried again after this long and up to twice as long, the next one after twice that.
pub const RETRY_DELAY_MS: u64 = 500;
/// The longest of these waits: a trial of a worker that is there again should not lie idle for longer.
pub const MAX_DELAY_MS: u64 = 30_000;
/// Trials that start over together are spread so that one in this time does, but for no longer than [`MAX_DELAY_MS`]: what has just brought one
/// worker down must not meet them all at once elsewhere.
const SPREAD_PER_TRIAL_MS: u64 = 20;

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
    /// No such batch, or somebody else's.
    #[error("there is no batch with this id")]
    NoBatch,
    /// It ended before it could be cancelled.
    #[error("the batch has already ended")]
    Ended,
    /// No such key, or revoked before.
    #[error("there is no living key with this id")]
    NoKey,
    /// It is frozen.
    #[error("this organization is being moved to another cell; try again in a few minutes")]
    OnTheMove,
    /// It lives in another cell.
    #[error("this organization has moved to another cell")]
    Elsewhere,
    /// The token holds no lease.
    #[error("the attempt holds no lease")]
    Stale,
    /// It runs on the server.
    #[error("this batch runs on the server, not on a machine of yours")]
    Hosted,
    /// The machine of a local batch has finished it.
    #[error("the batch has already finished")]
    Finished,
    /// A local batch was closed without its machine.
    #[error("the batch was closed: {0}")]
    Closed(String),
    /// No such run, or somebody else's.
    #[error("there is no run with this id")]
    NoRun,
    /// The run has fewer trials.
    #[error("the run has no trial with this ordinal")]
    NoTrial,
    /// A trial has one verdict.
    #[error("this trial was reported before with another verdict, which stands")]
    ReportedBefore,
    /// A batch that runs cannot be retried.
    #[error("the batch still runs; retry it once it has ended")]
    StillRunning,
    /// Nor one whose trials ran elsewhere.
    #[error("a local batch ran on a machine of yours; run it again there")]
    LocalRetry,
    /// Nor one without a need.
    #[error("every trial of the batch was scored; there is nothing to retry")]
    NothingUnscored,
    /// Nor a regrade.
    #[error("no trial of these cases came to a verdict that a judge could add to, or the cases have no judges; there is nothing to judge")]
    NothingToJudge,
    /// No such trial, or its batch has left memory, and so has its verdict.
    #[error("there is no trial with this id in a batch that runs")]
    NoOpenTrial,
    /// A verdict is for ever.
    #[error("the trial has its verdict already")]
    Settled,
    /// Something that grows with use is full.
    #[error("{0}")]
    Full(limits::Full),
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

/// Admission of a batch: an idempotent replay first, then the limit of running batches. `quiet` tells of a local batch whose machine is gone.
pub fn start(
    state: &State,
    started: log::BatchStarted,
    organization: &OrgId,
    quiet: &dyn Fn(&Batch) -> bool,
    now_ms: u64,
) -> Result<Start, Refusal> {
    if let Some(known) = replay(
        state,
        organization,
        started.idempotency_key.as_deref(),
        &started.request_hash,
        now_ms,
    )? {
        return Ok(Start::Replay(known));
    }
    if let Some(refusal) = busy(state, organization, started.idempotency_key.is_some(), quiet, now_ms) {
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

/// Whether the organization may not start another batch now. A local batch whose machine is gone (`quiet`) holds no place, even before it is
/// closed.
pub fn busy(state: &State, organization: &OrgId, with_key: bool, quiet: &dyn Fn(&Batch) -> bool, now_ms: u64) -> Option<Refusal> {
    let organization = state.organization(organization)?;
    if let Some(refusal) = organization.immovable() {
        return Some(refusal);
    }
    let batches = organization.running.iter().filter_map(|id| state.batch(id));
    let running = batches.filter(|batch| !quiet(batch)).count();
    if running >= limits::MAX_RUNNING_BATCHES {
        return Some(Refusal::Busy { running });
    }
    let keys = organization.living_idempotency_keys(now_ms) + 1;
    match with_key {
        true => limits::IDEMPOTENCY_KEYS.check(keys as u64).err().map(Refusal::Full),
        false => None,
    }
}

/// The operator's end of a trial that nothing else ends: void, with the operator's reason.
pub fn resolve(state: &State, key: TrialKey, reason: &str, now_ms: u64) -> Result<Event, Refusal> {
    let batch = state.batch(&key.batch).ok_or(Refusal::NoOpenTrial)?;
    let token = match batch.trial(key).ok_or(Refusal::NoOpenTrial)?.phase {
        Phase::Settled(_) => return Err(Refusal::Settled),
        Phase::Leased { token } => token,
        Phase::Queued { .. } | Phase::Conversing(_) | Phase::Judging(_) => 0,
    };
    Ok(settled(
        key,
        token,
        void(&outcome::failure_text(reason), Some((batch, key))),
        now_ms,
    ))
}

/// Whether an organization may have another key, and whether it may be created where there is none with this slug yet.
pub fn room_for_key(state: &State, slug: &str) -> Result<(), limits::Full> {
    limits::API_KEYS.check(state.keys().count() as u64 + 1)?;
    match state.organization_by_slug(slug) {
        Some(organization) => limits::KEYS_PER_ORGANIZATION.check(state.keys_of(&organization.id) as u64 + 1),
        None => limits::ORGANIZATIONS.check(state.organization_count() as u64 + 1),
    }
}

/// A trial of which something is reported that cannot be recorded cannot go on, and is void: every later attempt would report it again.
pub fn unacceptable(state: &State, worker_id: &str, token: u64, refusal: &Refusal, now_ms: u64) -> Option<Event> {
    let target = judging::target_of(state, worker_id, token, |_| true).ok()?;
    let key = target.trial;
    let text = outcome::failure_text(&format!("The trial could not go on: {refusal}"));
    let token = if target.part == Part::Trial { token } else { 0 };
    Some(settled(
        key,
        token,
        void(&text, state.batch(&key.batch).map(|batch| (batch, key))),
        now_ms,
    ))
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
        Some(key)
            if state
                .organization(&key.organization)
                .is_some_and(|owner| owner.immovable().is_some()) =>
        {
            Err(Refusal::OnTheMove)
        }
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
    if batch.local.is_some() {
        return Ok(vec![local::close(batch, Some(CANCELLED), CANCELLED, true, now_ms)]);
    }
    Ok(unsettled(batch)
        .map(|(key, token)| {
            let outcome = TrialOutcome {
                cancelled: true,
                ..void(CANCELLED, Some((batch, key)))
            };
            settled(key, token, outcome, now_ms)
        })
        .collect())
}

/// What follows by itself from an event that has just been applied: a trial has its verdict with the answer of its last judge, a batch ends with its
/// last verdict, a local one once it is closed.
pub fn after(state: &State, applied: &Event) -> Option<Event> {
    let id = match &applied.kind {
        Some(Kind::JobAnswered(answered)) => {
            let trial = answered.job.as_ref()?.trial.as_ref();
            return judging::verdict(state, crate::apply::trial_key(trial).ok()?, applied.at_ms);
        }
        Some(Kind::TrialSettled(settled)) => crate::apply::trial_key(settled.trial.as_ref()).ok()?.batch,
        Some(Kind::LocalBatchClosed(closed)) => crate::apply::batch_id(&closed.batch).ok()?,
        _ => return None,
    };
    ending(state.batch(&id)?, applied.at_ms)
}

/// What should have followed from the last events of a log that was cut right behind them. For once, after recovery.
pub fn catch_up(state: &State, now_ms: u64) -> Vec<Event> {
    let trials = state.batches().flat_map(Batch::trials);
    let verdicts = trials.filter_map(|(key, _)| judging::verdict(state, key, now_ms));
    let endings = state.batches().filter_map(|batch| ending(batch, now_ms));
    verdicts.chain(endings).collect()
}

fn ending(batch: &Batch, now_ms: u64) -> Option<Event> {
    let open = match faults::active(Fault::BatchEndsEarly) {
        true => batch.unsettled > 1,
        false => batch.unsettled != 0,
    };
    if open || batch.phase != BatchPhase::Running {
        return None;
    }
    let cancelled = || {
        let mut outcomes = batch.trials().filter_map(|(_, trial)| trial.outcome());
        outcomes.any(|outcome| outcome.cancelled)
    };
    let (status, failure) = match &batch.local {
        Some(local) => local::ending(local.closed.as_ref()?),
        None if cancelled() => (v1::BatchStatus::Failed, Some(CANCELLED.to_owned())),
        None => (v1::BatchStatus::Finished, None),
    };
    let ended = log::BatchEnded {
        batch: batch.id.0.to_vec().into(),
        status: status.into(),
        failure,
    };
    Some(event(now_ms, Kind::BatchEnded(ended)))
}

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
        let text = format!(
            "The worker stopped {MAX_IDLE_LEASES} times in a row while it ran this trial, the last time because of this: {}",
            trial.idle_end
        );
        return vec![settled(key, 0, void(&outcome::failure_text(&text), Some((batch, key))), now_ms)];
    }
    let token = state.last_token.max(state.token_floor) + 1;
    let adopt = trial.sandbox.is_some();
    let sandbox = trial.sandbox.clone().unwrap_or_else(|| sandbox_name(key, token));
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
    limits::STEPS_PER_TRIAL
        .check(trial.steps.len() as u64 + 1)
        .and(limits::RECORDED_BYTES_PER_TRIAL.check(trial.recorded_bytes() + record.result.len() as u64))
        .map_err(Refusal::Full)?;
    let recorded = log::StepRecorded {
        token: record.token,
        step: record.step,
        outcome: record.outcome,
        result: record.result,
    };
    Ok(Some(event(now_ms, Kind::StepRecorded(recorded))))
}

/// A verdict from the worker that holds the lease; where the case has judges, they are asked now.
pub fn result(
    state: &State,
    worker_id: &str,
    token: u64,
    outcome: TrialOutcome,
    chance: &mut Chance,
    now_ms: u64,
) -> Result<Event, Refusal> {
    let key = lease_of(state, worker_id, token)?;
    if !matches!(outcome.status(), TrialStatus::Passed | TrialStatus::Failed | TrialStatus::Void) {
        return Err(Refusal::StepLimit(format!("{:?} is not a verdict", outcome.status())));
    }
    let outcome = TrialOutcome {
        user_spend: state.trial(key).and_then(|trial| trial.user_spend.clone().map(Box::new)),
        ..outcome
    };
    let checked = judging::checked(state, key, token, &outcome, chance, now_ms);
    Ok(checked.unwrap_or_else(|| settled(key, token, outcome, now_ms)))
}

/// An attempt that its worker gives up. A lost sandbox is tried again a bounded number of times, then the trial is void.
pub fn attempt_failed(
    state: &State,
    worker_id: &str,
    failure: &v1::AttemptFailure,
    chance: &mut Chance,
    now_ms: u64,
) -> Result<Option<Event>, Refusal> {
    let target = judging::target_of(state, worker_id, failure.token, |_| true)?;
    if target.part != Part::Trial {
        return judging::job_failed(state, target, failure, chance, now_ms).map(Some);
    }
    let key = target.trial;
    let why = match failure.kind() {
        AttemptFailureKind::Released => {
            let ended = AttemptEnd::new(failure.token, key, Why::Released);
            return Ok(Some(ended.event(now_ms)));
        }
        AttemptFailureKind::SandboxUnavailable => Why::SandboxUnavailable,
        AttemptFailureKind::SandboxLost | AttemptFailureKind::Unspecified => Why::SandboxLost,
    };
    let reason = outcome::failure_text(&failure.reason);
    Ok(retry_or_void(
        state,
        AttemptEnd::new(failure.token, key, why),
        &reason,
        0,
        chance,
        now_ms,
    ))
}

/// The provider of a trial's model has refused: the model key's limit is cut, and the trial waits, without its slot, until the provider wants
/// to be asked again. Its sandbox stays. That is no lost attempt, and no fruitless lease.
pub fn throttled(state: &State, worker_id: &str, report: &v1::Throttled, chance: &mut Chance, now_ms: u64) -> Result<Event, Refusal> {
    let key = lease_of(state, worker_id, report.token)?;
    if state.model_key_of(Target::trial(key)).as_deref() != Some(report.model_key.as_str()) {
        return Err(Refusal::StepLimit(format!(
            "{:?} is not the model key of the lease",
            report.model_key
        )));
    }
    let until_ms = now_ms + report.retry_after_ms.clamp(MIN_RETRY_AFTER_MS, MAX_RETRY_AFTER_MS);
    let ended = AttemptEnd {
        // All of them were told the same time: up to a quarter later, not all at once.
        not_before_ms: until_ms + chance.below((until_ms - now_ms) / 4),
        throttled_until_ms: until_ms,
        ..AttemptEnd::new(report.token, key, Why::Throttled)
    };
    Ok(ended.event(now_ms))
}

/// `spread_ms`: over how long those are spread that start over together.
fn retry_or_void(state: &State, ended: AttemptEnd, reason: &str, spread_ms: u64, chance: &mut Chance, now_ms: u64) -> Option<Event> {
    let batch = state.batch(&ended.key.batch)?;
    let lost = batch.trial(ended.key).map_or(0, |trial| trial.lost.len() as u32) + 1;
    if lost < limits::MAX_SANDBOX_ATTEMPTS {
        let delay_ms = (RETRY_DELAY_MS << (lost - 1).min(16)).min(MAX_DELAY_MS / 2);
        let ended = AttemptEnd {
            reason: reason.to_owned(),
            not_before_ms: now_ms + delay_ms + chance.below(delay_ms.max(spread_ms)),
            ..ended
        };
        return Some(ended.event(now_ms));
    }
    let text = match ended.why {
        Why::SandboxUnavailable => reason.to_owned(),
        _ => format!("{}: {reason}", outcome::sandbox_lost(lost)),
    };
    Some(settled(ended.key, ended.token, void(&text, Some((batch, ended.key))), now_ms))
}

/// What a worker's greeting proves of leases: those of an earlier process of it have ended, and those that never reached it.
pub fn hello_leases(state: &State, hello: &v1::Hello, chance: &mut Chance, now_ms: u64) -> Vec<Event> {
    let ours = state.leases().filter(|(_, lease)| lease.worker_id == hello.worker_id);
    let ended = ours.filter_map(|(token, lease)| {
        let why = match (lease.incarnation == hello.incarnation, hello.held.contains(&token)) {
            (false, _) => Why::WorkerReplaced,
            (true, false) if faults::active(Fault::LostLeaseKept) => return None,
            (true, false) => Why::NotDelivered,
            (true, true) => return None,
        };
        fruitless(state, token, lease.target(), why, chance, now_ms)
    });
    ended.collect()
}

/// An attempt that ended without its worker's word. The more of them in a row, the longer the trial waits.
fn fruitless(state: &State, token: u64, target: Target, why: Why, chance: &mut Chance, now_ms: u64) -> Option<Event> {
    if target.part != Part::Trial {
        let why = match why {
            Why::WorkerReplaced => JobWhy::WorkerReplaced,
            Why::NotDelivered => JobWhy::NotDelivered,
            _ => JobWhy::LeaseExpired,
        };
        return judging::job_fruitless(state, token, target, why, chance, now_ms);
    }
    let key = target.trial;
    let in_a_row = state.trial(key).map_or(0, |trial| trial.idle_leases);
    let ended = AttemptEnd {
        not_before_ms: now_ms + fruitless_delay_ms(in_a_row, chance),
        ..AttemptEnd::new(token, key, why)
    };
    Some(ended.event(now_ms))
}

/// The wait after this many fruitless leases in a row: none after the first, then exponential, half of it by chance.
pub(crate) fn fruitless_delay_ms(in_a_row: u32, chance: &mut Chance) -> u64 {
    let Some(doublings) = in_a_row.checked_sub(2) else { return 0 };
    let delay_ms = (FRUITLESS_DELAY_MS << doublings.min(16)).min(MAX_DELAY_MS);
    delay_ms / 2 + chance.below(delay_ms / 2 + 1)
}

/// No sign of a worker for a whole lease: its trials wait for it, or for whoever takes its folder over.
pub fn expire_worker(state: &State, worker_id: &str, chance: &mut Chance, now_ms: u64) -> Vec<Event> {
    let ours = state.leases().filter(|(_, lease)| lease.worker_id == worker_id);
    let ended = ours.filter_map(|(token, lease)| fruitless(state, token, lease.target(), Why::LeaseExpired, chance, now_ms));
    let mut events: Vec<Event> = ended.collect();
    if faults::active(Fault::DestroyedUnasked) {
        let theirs = state.custody().filter(|(_, sandbox)| sandbox.worker_id == worker_id);
        events.extend(theirs.map(|(name, _)| {
            let gone = log::SandboxDestroyed {
                sandbox: name.to_owned(),
                worker_id: worker_id.to_owned(),
            };
            event(now_ms, Kind::SandboxDestroyed(gone))
        }));
    }
    events
}

/// Trials whose sandbox lies with a worker that stayed away past the grace: they start over elsewhere. The sandbox stays in custody.
///
/// `gone` tells whether a worker is away; it is not part of the state.
pub fn give_up_absent(state: &State, gone: &dyn Fn(&str) -> bool, grace_ms: u64, chance: &mut Chance, now_ms: u64) -> Vec<Event> {
    let stranded = state.custody().filter(|(name, sandbox)| {
        state.trial(sandbox.trial).is_some_and(|trial| {
            let since_ms = match &trial.phase {
                Phase::Queued { since_ms, .. } => *since_ms,
                Phase::Conversing(conversing) => conversing.since_ms,
                _ => return false,
            };
            trial.sandbox.as_deref() == Some(*name) && since_ms + grace_ms <= now_ms && gone(&sandbox.worker_id)
        })
    });
    let stranded: Vec<TrialKey> = stranded.map(|(_, sandbox)| sandbox.trial).collect();
    // The first is fast, the rest follow over a time that grows with their number.
    let spread_ms = (stranded.len() as u64 * SPREAD_PER_TRIAL_MS).min(MAX_DELAY_MS);
    let reason = format!("no word from its worker for {}", outcome::humanise_duration(grace_ms));
    let events = stranded.into_iter().enumerate().filter_map(|(place, key)| {
        let ended = AttemptEnd::new(0, key, Why::SandboxLost);
        let trial = state.trial(key)?;
        if !trial.steps.is_empty() {
            return retry_or_void(state, ended, &reason, spread_ms, chance, now_ms);
        }
        // Nothing is known to have begun there, so nothing is lost.
        let spread_ms = if place == 0 { 0 } else { chance.below(spread_ms) };
        let not_before_ms = now_ms + spread_ms + fruitless_delay_ms(trial.idle_leases, chance);
        Some(AttemptEnd { not_before_ms, ..ended }.event(now_ms))
    });
    let mut events: Vec<Event> = events.collect();
    if events.is_empty() {
        // One after the other: a trial that starts over has no jobs any more.
        events = judging::give_up_absent(state, gone, grace_ms, now_ms);
    }
    events
}

/// Trials that nothing will end: no sign of progress for six hours, or 72 hours in the queue.
pub fn abandon(state: &State, now_ms: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for batch in state.batches().filter(|batch| batch.phase == BatchPhase::Running) {
        if batch.local.is_some() {
            events.extend(local::abandon(batch, now_ms));
            continue;
        }
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
                // Waiting for a judge runner is like waiting for a slot.
                Phase::Conversing(_) | Phase::Judging(_) => {
                    let asked = trial.jobs().any(|(_, job)| matches!(job.phase, JobPhase::Leased { .. }));
                    let (after_ms, text) = match asked {
                        true => (limits::ABANDONED_AFTER_MS, outcome::abandoned(limits::ABANDONED_AFTER_MS)),
                        false => (limits::MAX_WAIT_FOR_SLOT_MS, outcome::never_judged(limits::MAX_WAIT_FOR_SLOT_MS)),
                    };
                    (trial.progress_ms + after_ms <= now_ms, 0, text)
                }
            };
            if overdue {
                events.push(settled(key, token, void(&text, Some((batch, key))), now_ms));
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

pub(crate) fn settled(key: TrialKey, token: u64, outcome: TrialOutcome, now_ms: u64) -> Event {
    event(
        now_ms,
        Kind::TrialSettled(log::TrialSettled {
            trial: trial_ref(key),
            token,
            outcome: Some(outcome),
            sandbox_kept_until_ms: None,
        }),
    )
}

fn unsettled(batch: &Batch) -> impl Iterator<Item = (TrialKey, u64)> {
    batch.trials().filter_map(|(key, trial)| match trial.phase {
        Phase::Settled(_) => None,
        Phase::Leased { token } => Some((key, token)),
        Phase::Queued { .. } | Phase::Conversing(_) | Phase::Judging(_) => Some((key, 0)),
    })
}

/// Not scored, for this reason.
pub(crate) fn void(failure: &str, of: Option<(&Batch, TrialKey)>) -> TrialOutcome {
    let trial = of.and_then(|(batch, key)| batch.trial(key));
    // What a trial has shown before its judges were asked stays.
    let known = match (of, trial.map(|trial| &trial.phase)) {
        (Some((batch, key)), Some(Phase::Judging(judging))) => judging::cut_short(batch, key, judging, failure),
        _ => TrialOutcome {
            user_spend: trial.and_then(|trial| trial.user_spend.clone().map(Box::new)),
            ..TrialOutcome::default()
        },
    };
    TrialOutcome {
        status: TrialStatus::Void.into(),
        exit_code: -1,
        failure: Some(failure.to_owned()),
        sandbox_id: trial.and_then(|trial| trial.sandbox.clone()),
        ..known
    }
}

/// How an attempt ends.
struct AttemptEnd {
    token: u64,
    key: TrialKey,
    why: Why,
    reason: String,
    not_before_ms: u64,
    throttled_until_ms: u64,
}

impl AttemptEnd {
    fn new(token: u64, key: TrialKey, why: Why) -> AttemptEnd {
        AttemptEnd {
            token,
            key,
            why,
            reason: String::new(),
            not_before_ms: 0,
            throttled_until_ms: 0,
        }
    }

    fn event(self, now_ms: u64) -> Event {
        let ended = log::AttemptEnded {
            token: self.token,
            why: self.why.into(),
            reason: self.reason,
            not_before_ms: self.not_before_ms,
            trial: trial_ref(self.key),
            throttled_until_ms: self.throttled_until_ms,
        };
        event(now_ms, Kind::AttemptEnded(ended))
    }
}

/// The trial of a living lease, if this worker holds it.
fn lease_of(state: &State, worker_id: &str, token: u64) -> Result<TrialKey, Refusal> {
    state
        .lease(token)
        .filter(|lease| lease.worker_id == worker_id && lease.part == Part::Trial)
        .map(|lease| lease.trial)
        .ok_or(Refusal::Stale)
}
