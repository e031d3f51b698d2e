//! Batches whose trials run on the client's own machine: who may report to them, when they close, and when their machine counts as gone.
//!
//! Their trials never enter the queue and never have a lease. Such a batch ends when it is *closed*: by its machine, by a cancel, or by time.
//! Two periods watch over it. A machine that has promised to check in and is quiet for ten minutes is gone; its check-ins live in memory alone
//! ([`CheckIns`]), so a restart gives it one full period. Every local batch is over after six hours without a sign in the log: a report, or one of
//! the check-ins that are recorded now and then for this purpose. That period outlives any number of restarts.

use std::collections::HashMap;

use evalgrid_domain::{
    ids::{BatchId, OrgId, RunId},
    limits, outcome,
};
use evalgrid_proto::{
    log::v1::{self as log, Event, event::Kind},
    v1::{self, BatchStatus, TrialOutcome, TrialStatus},
};

use crate::{
    apply::{ApplyError, batch_id, illegal},
    decide::{Refusal, event, settled, void},
    state::{Batch, BatchPhase, Phase, State, TrialKey},
};

/// A check-in is recorded where the last sign in the log is older than this: a twelfth of the six hours that such signs are for.
pub const CHECK_IN_RECORD_MS: u64 = limits::ABANDONED_AFTER_MS / 12;

/// What a batch has besides, whose trials run on the client's own machine.
#[derive(Clone, Debug)]
pub struct Local {
    /// Its machine has promised to check in.
    pub checks_in: bool,
    /// Harnesses whose credentials it may lease.
    pub harnesses: Vec<String>,
    /// The newest sign of its machine in the log, milliseconds since the epoch.
    pub sign_ms: u64,
    /// No more reports are taken.
    pub closed: Option<Closed>,
}

impl Local {
    pub(crate) fn save(&self) -> log::SavedLocal {
        log::SavedLocal {
            sign_ms: self.sign_ms,
            closed: self.closed.is_some(),
            failure: self.closed.as_ref().and_then(|closed| closed.failure.clone()),
        }
    }

    pub(crate) fn restore(started: &log::BatchStarted, saved: &log::SavedLocal) -> Local {
        Local {
            checks_in: started.checks_in,
            harnesses: started.harnesses.clone(),
            sign_ms: saved.sign_ms,
            closed: saved.closed.then(|| Closed {
                failure: saved.failure.clone(),
            }),
        }
    }
}

/// How a local batch was closed.
#[derive(Clone, Debug)]
pub struct Closed {
    /// Why it stopped early; none where its machine has finished it.
    pub failure: Option<String>,
}

/// When each machine was last heard of. Not part of the state: check-ins are not events.
#[derive(Debug, Default)]
pub struct CheckIns {
    heard: HashMap<BatchId, u64>,
    /// Whether batches that were already there have been given their first period.
    swept: bool,
}

impl CheckIns {
    /// A sign of the batch's machine. `now_ms` is the same clock for every call: the one that liveness goes by.
    pub fn hear(&mut self, batch: BatchId, now_ms: u64) {
        self.heard.insert(batch, now_ms);
    }

    /// Whether the machine has been quiet for too long, so that its batch holds no place any more, even before it is closed.
    pub fn is_quiet(&self, batch: &Batch, now_ms: u64) -> bool {
        let promised = batch.local.as_ref().is_some_and(|local| local.checks_in && local.closed.is_none());
        promised
            && self
                .heard
                .get(&batch.id)
                .is_some_and(|heard| heard + limits::LOCAL_QUIET_MS <= now_ms)
    }

    /// Closes what is quiet (the events are of the time `at_ms`), forgets what is closed, and gives batches from before a restart one full period.
    pub fn sweep(&mut self, state: &State, now_ms: u64, at_ms: u64) -> Vec<Event> {
        if !self.swept {
            self.swept = true;
            let open = state.batches().filter(|batch| is_open(batch)).map(|batch| batch.id);
            open.for_each(|id| {
                self.heard.entry(id).or_insert(now_ms);
            });
        }
        self.heard.retain(|id, _| state.batch(id).is_some_and(is_open));
        let quiet = self.heard.keys().filter_map(|id| state.batch(id));
        quiet
            .filter(|batch| self.is_quiet(batch, now_ms))
            .map(|batch| close_quiet(batch, at_ms))
            .collect()
    }
}

fn is_open(batch: &Batch) -> bool {
    batch.local.as_ref().is_some_and(|local| local.closed.is_none())
}

/// A local batch of this organization that still takes reports.
pub fn open<'a>(state: &'a State, organization: &OrgId, id: &BatchId) -> Result<&'a Batch, Refusal> {
    let batch = state
        .batch(id)
        .filter(|batch| batch.organization == *organization)
        .ok_or(Refusal::NoBatch)?;
    match &batch.local {
        None => Err(Refusal::Hosted),
        Some(Local { closed: None, .. }) => Ok(batch),
        Some(Local { closed: Some(closed), .. }) => Err(match &closed.failure {
            Some(failure) => Refusal::Closed(failure.clone()),
            None => Refusal::Finished,
        }),
    }
}

/// What a batch that has left memory says to its machine.
pub fn too_late(batch: &v1::Batch) -> Refusal {
    match (batch.local, batch.status()) {
        (false, _) => Refusal::Hosted,
        (true, BatchStatus::Finished) => Refusal::Finished,
        (true, _) => Refusal::Closed(batch.failure.clone().unwrap_or_default()),
    }
}

/// The record of a check-in, where the last sign in the log is old.
pub fn checked_in(batch: &Batch, now_ms: u64) -> Option<Event> {
    let local = batch.local.as_ref()?;
    (local.sign_ms + CHECK_IN_RECORD_MS <= now_ms).then(|| {
        let checked_in = log::LocalCheckedIn {
            batch: batch.id.0.to_vec().into(),
        };
        event(now_ms, Kind::LocalCheckedIn(checked_in))
    })
}

/// Whether a trial takes a report with this verdict. False: it has this verdict already.
pub fn takes_report(state: &State, organization: &OrgId, run: RunId, ordinal: u32, status: TrialStatus) -> Result<bool, Refusal> {
    let batch = open(state, organization, &run.batch)?;
    if usize::from(run.run) >= batch.runs.len() {
        return Err(Refusal::NoRun);
    }
    let trial = report_key(run, ordinal).and_then(|key| batch.trial(key)).ok_or(Refusal::NoTrial)?;
    match trial.outcome() {
        None => Ok(true),
        Some(known) if known.status() == status => Ok(false),
        Some(_) => Err(Refusal::ReportedBefore),
    }
}

fn report_key(run: RunId, ordinal: u32) -> Option<TrialKey> {
    Some(TrialKey {
        batch: run.batch,
        run: run.run,
        ordinal: u8::try_from(ordinal).ok()?,
    })
}

/// A reported verdict. `None`: it is recorded already.
pub fn report(
    state: &State,
    organization: &OrgId,
    run: RunId,
    ordinal: u32,
    outcome: TrialOutcome,
    now_ms: u64,
) -> Result<Option<Event>, Refusal> {
    if !takes_report(state, organization, run, ordinal, outcome.status())? {
        return Ok(None);
    }
    let key = report_key(run, ordinal).ok_or(Refusal::NoTrial)?;
    Ok(Some(settled(key, 0, outcome, now_ms)))
}

/// The machine has finished. No event where it had before.
pub fn finish(state: &State, organization: &OrgId, id: &BatchId, now_ms: u64) -> Result<Option<Event>, Refusal> {
    match open(state, organization, id) {
        Ok(batch) => Ok(Some(close(batch, None, outcome::NEVER_REPORTED, false, now_ms))),
        Err(Refusal::Finished) => Ok(None),
        Err(refusal) => Err(refusal),
    }
}

/// The machine is gone.
pub fn close_quiet(batch: &Batch, now_ms: u64) -> Event {
    close_for(batch, &outcome::machine_quiet(limits::LOCAL_QUIET_MS), now_ms)
}

/// The end of an open batch of which the log has had no sign for six hours.
pub(crate) fn abandon(batch: &Batch, now_ms: u64) -> Option<Event> {
    let local = batch.local.as_ref().filter(|local| local.closed.is_none())?;
    (local.sign_ms + limits::ABANDONED_AFTER_MS <= now_ms)
        .then(|| close_for(batch, &outcome::machine_quiet(limits::ABANDONED_AFTER_MS), now_ms))
}

/// A batch whose trials are all reported has not stopped early, whoever closes it.
fn close_for(batch: &Batch, why: &str, now_ms: u64) -> Event {
    close(batch, (batch.unsettled > 0).then_some(why), why, false, now_ms)
}

/// The end of an open batch: unreported trials are void.
pub(crate) fn close(batch: &Batch, failure: Option<&str>, unreported: &str, cancelled: bool, now_ms: u64) -> Event {
    let closed = log::LocalBatchClosed {
        batch: batch.id.0.to_vec().into(),
        failure: failure.map(str::to_owned),
        unreported: unreported.to_owned(),
        cancelled,
    };
    event(now_ms, Kind::LocalBatchClosed(closed))
}

/// The end that follows from being closed.
pub(crate) fn ending(closed: &Closed) -> (BatchStatus, Option<String>) {
    match &closed.failure {
        Some(failure) => (BatchStatus::Failed, Some(failure.clone())),
        None => (BatchStatus::Finished, None),
    }
}

impl State {
    pub(crate) fn local_checked_in(&mut self, checked_in: &log::LocalCheckedIn, at_ms: u64) -> Result<(), ApplyError> {
        let batch = self.batches.get_mut(&batch_id(&checked_in.batch)?);
        match batch.and_then(|batch| batch.local.as_mut()) {
            Some(local @ Local { closed: None, .. }) => local.sign_ms = at_ms,
            _ => return illegal("a check-in for no open local batch"),
        }
        Ok(())
    }

    pub(crate) fn local_batch_closed(&mut self, closed: &log::LocalBatchClosed, at_ms: u64) -> Result<(), ApplyError> {
        let Some(batch) = self.batches.get_mut(&batch_id(&closed.batch)?) else {
            return illegal("a batch is closed that is not there");
        };
        match &mut batch.local {
            Some(local @ Local { closed: None, .. }) if batch.phase == BatchPhase::Running => {
                local.closed = Some(Closed {
                    failure: closed.failure.clone(),
                });
            }
            _ => return illegal("a batch is closed that is not an open local one"),
        }
        let unreported = TrialOutcome {
            cancelled: closed.cancelled,
            ..void(&closed.unreported, None)
        };
        for run in &mut batch.runs {
            for trial in &mut run.trials {
                if !matches!(trial.phase, Phase::Settled(_)) {
                    trial.phase = Phase::Settled(Box::new(unreported.clone()));
                    trial.progress_ms = at_ms;
                }
            }
            run.finished_ms.get_or_insert(at_ms);
        }
        batch.unsettled = 0;
        Ok(())
    }
}
