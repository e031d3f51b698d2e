//! The one place where state changes: decide and apply run at once in memory, the events join the next commit group, and everybody who
//! acts on them waits until their position is durable.
//!
//! [`Core`] is the part without threads and clocks, which the simulator drives as well; [`Engine`] puts a lock and a committer around it.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use bytes::{Bytes, BytesMut};
use evalgrid_domain::ids::{BatchId, DIRECTORY_PARTITION, OrgId, partition};
use evalgrid_proto::{
    log::v1::{BatchArchived, Event, JobRef, event::Kind},
    v1,
};
use evalgrid_store::{
    Log, Record, Snapshots,
    log::{MAX_GROUP_BYTES, MAX_GROUP_RECORDS, RECORD_OVERHEAD},
};
use evalgrid_workflow::{
    CheckIns, Part, State, decide,
    faults::{self, Fault},
    growth,
};
use prost::Message as _;
use tokio::sync::watch;

use crate::{clock::World, sessions::Sessions};

/// Records applied and not yet durable. Past this, newcomers wait: memory stays bounded when the disk stalls.
const MAX_UNCOMMITTED_RECORDS: u64 = 4 * MAX_GROUP_RECORDS as u64;

/// The scheduler is stopping, or is no longer the active one of its cell; nothing more becomes durable through it.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the scheduler is stopping")]
pub struct Stopping;

/// The right to act as the one scheduler of a cell. It can end by itself at any moment.
#[async_trait::async_trait]
pub trait Tenure: Send + Sync {
    /// Whether it certainly still holds.
    fn holds(&self) -> bool;
    /// Returns once it no longer does.
    async fn lost(&self);
    /// Gives it up, so that another can act at once. Blocking.
    fn release(&self);
}

/// The right that comes with the lock on a folder: the kernel takes it back when the process ends, never before.
pub struct LockHeld;

#[async_trait::async_trait]
impl Tenure for LockHeld {
    fn holds(&self) -> bool {
        true
    }

    async fn lost(&self) {
        std::future::pending().await
    }

    fn release(&self) {}
}

/// What to do once the log takes nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLogFailure {
    /// A disk that failed a sync cannot be trusted by this process again: it ends, and the next start reads what is there.
    EndProcess,
    /// Somebody else may own the log by now: drop the state, and follow.
    StepDown,
}

/// How far the log is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Everything up to here is.
    pub position: u64,
    /// Nothing more will be.
    pub over: bool,
}

/// A cheap handle.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    core: Mutex<Core>,
    /// Tells the committer that something is pending, or that it shall end.
    pending: Condvar,
    /// As the log says after each group.
    log_bytes: AtomicU64,
    /// Where the committer shall cut the log; 0 for nowhere.
    cut: AtomicU64,
    snapshots: Arc<dyn Snapshots>,
    durable: watch::Sender<Progress>,
    tenure: Arc<dyn Tenure>,
    on_failure: OnLogFailure,
    world: Arc<dyn World>,
}

/// What the lock guards. The lock is a plain one, held for microseconds and never across an await.
pub struct Core {
    /// The state machine.
    pub state: State,
    /// Workers that are here now.
    pub sessions: Sessions,
    /// When the machines of local batches were last heard of.
    pub check_ins: CheckIns,
    /// Ended batches whose result is not durable as an object yet.
    pub ended: Vec<BatchId>,
    /// Batches archived since the newest snapshot: the next one takes them into the archive. Bounded by the log between two snapshots.
    pub archived: Vec<BatchArchived>,
    /// The newest object of the archive.
    pub archive: Option<v1::ObjectRef>,
    /// The last sequence of each partition.
    sequences: Vec<u64>,
    partitions: HashMap<OrgId, u16>,
    pending: Vec<Record>,
    pending_bytes: usize,
    position: u64,
    stopping: bool,
    own_verdict: bool,
    scratch: BytesMut,
    now_ms: u64,
    steady_ms: u64,
    /// The last time, and its steady time, at which the wall clock was not behind.
    in_step: Option<(u64, u64)>,
}

impl Core {
    /// Takes over what recovery has read.
    pub fn new(state: State, sequences: Vec<u64>, position: u64) -> Core {
        Core {
            state,
            sessions: Sessions::default(),
            check_ins: CheckIns::default(),
            ended: Vec::new(),
            archived: Vec::new(),
            archive: None,
            sequences,
            partitions: HashMap::new(),
            pending: Vec::new(),
            pending_bytes: 0,
            position,
            stopping: false,
            own_verdict: false,
            scratch: BytesMut::new(),
            now_ms: 0,
            steady_ms: 0,
            in_step: None,
        }
    }

    /// The time of this turn: never before an earlier event.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Time for liveness.
    pub fn steady_ms(&self) -> u64 {
        self.steady_ms
    }

    /// Sets the time of this turn. It never goes back behind an event, and it never stands still: where the wall clock has been set back, it
    /// goes on at half its pace until that catches up. Otherwise a clock that was wrong for a moment would stop every delay for hours.
    pub fn set_time(&mut self, wall_ms: u64, steady_ms: u64) {
        self.steady_ms = steady_ms;
        if faults::active(Fault::TimeGoesBack) {
            self.now_ms = wall_ms;
            return;
        }
        let (since_ms, since_steady_ms) = *self.in_step.get_or_insert((self.state.last_ms(), steady_ms));
        let slowly = since_ms + steady_ms.saturating_sub(since_steady_ms) / 2;
        self.now_ms = wall_ms.max(slowly).max(self.state.last_ms());
        if wall_ms == self.now_ms {
            self.in_step = Some((wall_ms, steady_ms));
        }
    }

    /// The last sequence of each partition.
    pub fn sequences(&self) -> &[u64] {
        &self.sequences
    }

    /// Whether events wait for the committer.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The position of the newest event; whoever acts on what it saw waits until this is durable.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Applies an event and whatever follows from it by itself, and queues them for the next commit group.
    pub fn commit(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            self.commit_one(&event);
            next = decide::after(&self.state, &event);
        }
    }

    /// As [`Core::commit`], for a verdict from the lease's own worker, which needs no telling that its lease has ended.
    pub fn commit_settled(&mut self, event: Event) {
        self.own_verdict = true;
        self.commit(event);
        self.own_verdict = false;
    }

    /// Several events, in order.
    pub fn commit_all(&mut self, events: impl IntoIterator<Item = Event>) {
        events.into_iter().for_each(|event| self.commit(event));
    }

    fn commit_one(&mut self, event: &Event) {
        let partition = self.partition_of(event);
        self.before_apply(event);
        for near in growth::near(&self.state, event) {
            let (whose, limit, then) = (near.whose.unwrap_or_default(), near.growth.limit, near.growth.then);
            tracing::warn!(
                whose,
                limit,
                "80 % of the limit is reached: {}; once it is full, {then}",
                near.growth.what
            );
        }
        if let Err(error) = self.state.apply(event) {
            // Memory and log would part ways: the log is the truth, so the process ends and replays it.
            fatal(&format!("{error}: {event:?}"));
        }
        match &event.kind {
            Some(Kind::BatchEnded(ended)) => self.ended.extend(<[u8; 16]>::try_from(ended.batch.as_ref()).map(BatchId)),
            Some(Kind::BatchArchived(archived) | Kind::BatchImported(archived)) => self.archived.push(archived.clone()),
            _ => {}
        }
        self.scratch.reserve(event.encoded_len());
        if let Err(error) = event.encode(&mut self.scratch) {
            fatal(&format!("an event cannot be encoded: {error}"));
        }
        let payload: Bytes = self.scratch.split().freeze();
        let sequence = &mut self.sequences[usize::from(partition)];
        *sequence += 1;
        self.pending_bytes += payload.len() + RECORD_OVERHEAD;
        self.pending.push(Record {
            partition,
            sequence: *sequence,
            payload,
        });
        self.position += 1;
    }

    /// A verdict that did not come from the worker itself takes its lease away, and whoever is being asked for a trial is asked no more where that
    /// has its verdict or starts over: tell them.
    fn before_apply(&mut self, event: &Event) {
        if let Some(Kind::TrialSettled(settled)) = &event.kind
            && !self.own_verdict
            && let Some(lease) = self.state.lease(settled.token)
        {
            let reason = settled
                .outcome
                .as_ref()
                .and_then(|outcome| outcome.failure.clone())
                .unwrap_or_default();
            self.sessions
                .revoke(&lease.worker_id.clone(), settled.token, reason, self.position + 1);
        }
        let (trial, reason) = match &event.kind {
            Some(Kind::TrialSettled(settled)) => (
                settled.trial.as_ref().and_then(|trial| self.state.trial_at(trial)),
                "the trial has its verdict",
            ),
            Some(Kind::AttemptEnded(_) | Kind::SandboxDestroyed(_)) if faults::active(Fault::LostConversationUntold) => return,
            Some(Kind::AttemptEnded(ended)) if ended.token == 0 => (
                ended.trial.as_ref().and_then(|trial| self.state.trial_at(trial)),
                "the trial starts over",
            ),
            Some(Kind::SandboxDestroyed(gone)) => {
                let trial = self
                    .state
                    .sandbox(&gone.sandbox)
                    .and_then(|sandbox| self.state.trial(sandbox.trial));
                let trial = trial.filter(|trial| trial.lives_in(&gone.sandbox) == Some(Part::Trial));
                (trial, "the trial starts over")
            }
            _ => return,
        };
        let jobs = trial.into_iter().flat_map(|trial| trial.jobs()).filter_map(|(_, job)| job.token());
        for token in jobs.collect::<Vec<_>>() {
            if let Some(lease) = self.state.lease(token) {
                let reason = reason.to_owned();
                self.sessions.revoke(&lease.worker_id.clone(), token, reason, self.position + 1);
            }
        }
    }

    fn partition_of(&mut self, event: &Event) -> u16 {
        let organization = match &event.kind {
            Some(Kind::BatchStarted(started)) => started.organization_id.parse().ok(),
            Some(Kind::BatchArchived(archived) | Kind::BatchImported(archived)) => archived.organization_id.parse().ok(),
            Some(Kind::StepRecorded(step)) => self.organization_of_token(step.token),
            Some(Kind::AttemptEnded(ended)) => ended.trial.as_ref().and_then(|trial| self.organization_of_batch(&trial.batch)),
            Some(Kind::LeaseGranted(lease)) => lease.trial.as_ref().and_then(|trial| self.organization_of_batch(&trial.batch)),
            Some(Kind::TrialSettled(settled)) => settled.trial.as_ref().and_then(|trial| self.organization_of_batch(&trial.batch)),
            Some(Kind::TrialChecked(checked)) => checked.trial.as_ref().and_then(|trial| self.organization_of_batch(&trial.batch)),
            Some(Kind::ReplyAwaited(awaited)) => awaited.trial.as_ref().and_then(|trial| self.organization_of_batch(&trial.batch)),
            Some(Kind::JobLeased(lease)) => self.organization_of_job(lease.job.as_ref()),
            Some(Kind::JobAsked(asked)) => self.organization_of_token(asked.token),
            Some(Kind::JobEnded(ended)) => self.organization_of_job(ended.job.as_ref()),
            Some(Kind::JobAnswered(answered)) => self.organization_of_job(answered.job.as_ref()),
            Some(Kind::BatchEnded(ended)) => self.organization_of_batch(&ended.batch),
            Some(Kind::LocalCheckedIn(checked_in)) => self.organization_of_batch(&checked_in.batch),
            Some(Kind::LocalBatchClosed(closed)) => self.organization_of_batch(&closed.batch),
            // Custody outlives batches, so it is kept with the cell's own facts.
            Some(Kind::SandboxCreated(_) | Kind::SandboxDestroyAsked(_) | Kind::SandboxDestroyed(_)) => None,
            Some(
                Kind::OrganizationCreated(_)
                | Kind::OrganizationFrozen(_)
                | Kind::OrganizationUnfrozen(_)
                | Kind::OrganizationMoved(_)
                | Kind::OrganizationImported(_)
                | Kind::KeyCreated(_)
                | Kind::KeyRevoked(_),
            )
            | None => None,
        };
        match organization {
            Some(id) => *self.partitions.entry(id).or_insert_with(|| partition(&id)),
            None => DIRECTORY_PARTITION,
        }
    }

    /// Moves as much as one group may hold to `group`; answers with the position that its last record has.
    pub fn take_group(&mut self, group: &mut Vec<Record>) -> u64 {
        if self.pending.len() <= MAX_GROUP_RECORDS && self.pending_bytes <= MAX_GROUP_BYTES {
            std::mem::swap(&mut self.pending, group);
            self.pending_bytes = 0;
            return self.position;
        }
        let mut bytes = 0;
        let mut count = 0;
        for record in self.pending.iter().take(MAX_GROUP_RECORDS) {
            let size = record.payload.len() + RECORD_OVERHEAD;
            if count > 0 && bytes + size > MAX_GROUP_BYTES {
                break;
            }
            bytes += size;
            count += 1;
        }
        group.extend(self.pending.drain(..count));
        self.pending_bytes -= bytes;
        self.position - self.pending.len() as u64
    }

    fn organization_of_job(&self, job: Option<&JobRef>) -> Option<OrgId> {
        self.organization_of_batch(&job?.trial.as_ref()?.batch)
    }

    fn organization_of_token(&self, token: u64) -> Option<OrgId> {
        let lease = self.state.lease(token)?;
        Some(self.state.batch(&lease.trial.batch)?.organization)
    }

    fn organization_of_batch(&self, batch: &[u8]) -> Option<OrgId> {
        Some(self.state.batch(&BatchId(batch.try_into().ok()?))?.organization)
    }
}

impl Engine {
    /// Starts the committer on its own thread. It ends, and lets go of the log, some time after [`Engine::stop`].
    pub fn start(
        core: Core,
        mut log: Box<dyn Log>,
        tenure: Arc<dyn Tenure>,
        on_failure: OnLogFailure,
        world: Arc<dyn World>,
    ) -> std::io::Result<(Engine, thread::JoinHandle<()>)> {
        let (durable, _) = watch::channel(Progress {
            position: core.position,
            over: false,
        });
        let snapshots = log.snapshots();
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            pending: Condvar::new(),
            log_bytes: AtomicU64::new(log.bytes_since_snapshot()),
            cut: AtomicU64::new(0),
            snapshots,
            durable,
            tenure,
            on_failure,
            world,
        });
        let engine = Engine { shared: shared.clone() };
        let committer = thread::Builder::new().name("committer".into()).spawn(move || {
            commit_loop(&shared, log.as_mut());
            shared.durable.send_modify(|progress| progress.over = true);
        })?;
        Ok((engine, committer))
    }

    /// Runs `turn` on the state. The second value is the position that must be durable before anybody acts on the first.
    pub fn turn<T>(&self, turn: impl FnOnce(&mut Core) -> T) -> (T, u64) {
        let mut core = self.lock();
        core.set_time(self.shared.world.now_ms(), self.shared.world.steady_ms());
        let value = turn(&mut core);
        let position = core.position;
        let wake = !core.pending.is_empty();
        drop(core);
        if wake {
            self.shared.pending.notify_one();
        }
        (value, position)
    }

    /// As [`Engine::turn`], and waits until it may be acted upon.
    pub async fn settled_turn<T>(&self, turn: impl FnOnce(&mut Core) -> T) -> Result<T, Stopping> {
        let (value, position) = self.turn(turn);
        self.durable(position).await?;
        Ok(value)
    }

    /// Waits until everything up to `position` is durable. Whoever is no longer the active scheduler hears so instead: what it knows may be
    /// old by now.
    pub async fn durable(&self, position: u64) -> Result<(), Stopping> {
        let reached = |progress: &Progress| progress.position >= position || progress.over;
        let seen = *self.shared.durable.borrow();
        let progress = match reached(&seen) {
            true => seen,
            false => *self.shared.durable.subscribe().wait_for(reached).await.map_err(|_| Stopping)?,
        };
        match progress.position >= position && self.shared.tenure.holds() {
            true => Ok(()),
            false => Err(Stopping),
        }
    }

    /// Waits while too much is applied that is not durable yet.
    pub async fn admit(&self) -> Result<(), Stopping> {
        let position = self.lock().position;
        self.durable(position.saturating_sub(MAX_UNCOMMITTED_RECORDS)).await
    }

    /// Follows the durable position: a hint that something may have changed.
    pub fn watch(&self) -> watch::Receiver<Progress> {
        self.shared.durable.subscribe()
    }

    /// Bytes of log since the newest snapshot.
    pub fn log_bytes(&self) -> u64 {
        self.shared.log_bytes.load(Ordering::Relaxed)
    }

    /// Where snapshots go.
    pub fn snapshots(&self) -> Arc<dyn Snapshots> {
        self.shared.snapshots.clone()
    }

    /// Lets the committer cut the log behind `position`, which a snapshot has passed.
    pub fn cut(&self, position: u64) {
        self.shared.cut.store(position, Ordering::Relaxed);
        self.shared.pending.notify_one();
    }

    /// Time and chance.
    pub fn world(&self) -> &dyn World {
        self.shared.world.as_ref()
    }

    /// Lets the committer write what is pending and end.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.shared.pending.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under the lock may have left half a change: the log is the truth, so the process ends and replays it.
        self.shared
            .core
            .lock()
            .unwrap_or_else(|_| fatal("a turn on the state has panicked"))
    }
}

/// Takes what is pending, writes it as one group, syncs once, tells everyone. No timer: the groups form while the disk is busy.
fn commit_loop(shared: &Shared, log: &mut dyn Log) {
    let mut group = Vec::new();
    loop {
        let position = {
            let mut core = match shared.core.lock() {
                Ok(core) => core,
                Err(_) => fatal("a turn on the state has panicked"),
            };
            while core.pending.is_empty() {
                if core.stopping {
                    return;
                }
                if shared.cut.load(Ordering::Relaxed) > 0 {
                    break;
                }
                core = match shared.pending.wait(core) {
                    Ok(core) => core,
                    Err(_) => fatal("a turn on the state has panicked"),
                };
            }
            core.take_group(&mut group)
        };
        let done = log.append(&group).and_then(|()| match shared.cut.swap(0, Ordering::Relaxed) {
            0 => Ok(()),
            position => log
                .cut(position)
                .map(|first| tracing::info!(first, "the log was cut behind its snapshot")),
        });
        if let Err(error) = done {
            let text = format!("the log could not be written: {error}");
            match shared.on_failure {
                // Whether the group is there is unknown. Only reading the log again can tell, and that is what a start does.
                OnLogFailure::EndProcess => fatal(&text),
                OnLogFailure::StepDown => {
                    tracing::error!("{text}; this scheduler steps down");
                    return;
                }
            }
        }
        group.clear();
        shared.log_bytes.store(log.bytes_since_snapshot(), Ordering::Relaxed);
        shared.durable.send_modify(|progress| progress.position = position);
    }
}

/// The process cannot go on honestly; the next start replays the log.
pub(crate) fn fatal(message: &str) -> ! {
    // The simulator has to survive it, to tell of it.
    #[cfg(feature = "faults")]
    panic!("{message}");
    #[cfg(not(feature = "faults"))]
    end_process(message)
}

#[cfg(not(feature = "faults"))]
fn end_process(message: &str) -> ! {
    tracing::error!("{message}; the process ends, start it again to recover from the log");
    eprintln!("evalgrid: {message}; the process ends, start it again to recover from the log");
    std::process::exit(70)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_never_goes_back_and_never_stands_still() {
        let mut core = Core::new(State::default(), Vec::new(), 0);
        let mut check = |wall_ms, steady_ms, expected| {
            core.set_time(wall_ms, steady_ms);
            assert_eq!(core.now_ms(), expected, "at {wall_ms}, {steady_ms}");
        };
        check(1_000, 0, 1_000);
        check(1_500, 500, 1_500);
        // Ahead by an hour for a moment.
        check(3_601_500, 501, 3_601_500);
        check(1_502, 502, 3_601_500);
        check(1_701, 701, 3_601_600);
        // As often as one may ask, its pace stays.
        (702..2_501).for_each(|steady_ms| check(steady_ms + 1_000, steady_ms, 3_601_500 + (steady_ms - 501) / 2));
        check(3_602_500, 2_501, 3_602_500);
        check(3_602_600, 2_601, 3_602_600);
    }
}
