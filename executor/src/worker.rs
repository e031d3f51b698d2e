//! The trials that run here, and who may end them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use evalgrid_proto::v1::{AttemptFailure, AttemptFailureKind, Hello, Lease, Report, Throttled, TrialResult, TrialStatus};
use evalgrid_sandbox::{Limits, SandboxProvider};
use futures::FutureExt as _;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::Instrument as _;

use crate::{
    backoff::Pauses,
    cache::Caches,
    folder::Folder,
    layers::Bases,
    objects::Objects,
    outbox::{Fact, Outbox},
    tools::Tools,
    trial::{self, Ended},
};

/// Destroying is mostly waiting and deleting files; more at once would keep the disk from the agents.
const DESTROYED_AT_ONCE: usize = 16;
/// Tries to destroy one sandbox, some minutes in all. Custody stays open after that: the next Hello names what is left.
const DESTROY_TRIES: u32 = 10;
/// One try; the provider has shorter deadlines of its own.
const DESTROY_DEADLINE: Duration = Duration::from_secs(120);
/// How long a stopping worker waits for its trials to notice.
const STOP_DEADLINE: Duration = Duration::from_secs(2);
/// This part of a lease's time is left unused at its end: for noticing, and for what is on its way to a sandbox by then.
const LEASE_MARGIN: u32 = 10;
/// Listing reads one folder.
const LIST_DEADLINE: Duration = Duration::from_secs(5);

/// See the top of this file.
pub(crate) struct Worker {
    pub(crate) outbox: Outbox,
    pub(crate) objects: Objects,
    pub(crate) providers: BTreeMap<&'static str, Arc<dyn SandboxProvider>>,
    pub(crate) bases: Arc<Bases>,
    pub(crate) limits: Limits,
    /// How long the sandbox of a trial that did not pass stays.
    keep_failed: Duration,
    pub(crate) tools: Tools,
    pub(crate) folder: Folder,
    pub(crate) caches: Arc<Caches>,
    trials: Mutex<HashMap<u64, Running>>,
    /// Sandboxes that are being destroyed because the scheduler said so.
    destroying: Mutex<BTreeSet<String>>,
    destroy_room: Semaphore,
    /// When the leases end if nothing more is heard; `None` while there is nothing to lose.
    leases_end: watch::Sender<Option<Instant>>,
    stopping: AtomicBool,
}

struct Running {
    task: JoinHandle<()>,
    sandbox: String,
    provider: String,
    /// Its end is on its way to the scheduler.
    reported: Arc<AtomicBool>,
}

impl Worker {
    pub(crate) fn new(
        folder: Folder,
        slots: u32,
        objects: Objects,
        providers: BTreeMap<&'static str, Arc<dyn SandboxProvider>>,
        bases: Arc<Bases>,
        limits: Limits,
        tools: Tools,
    ) -> Self {
        Self {
            outbox: Outbox::new(slots),
            objects,
            providers,
            bases,
            limits,
            keep_failed: Duration::ZERO,
            caches: Arc::new(Caches::open(&folder.path, &folder.boot_id)),
            tools,
            folder,
            trials: Mutex::default(),
            destroying: Mutex::default(),
            destroy_room: Semaphore::new(DESTROYED_AT_ONCE),
            leases_end: watch::Sender::new(None),
            stopping: AtomicBool::new(false),
        }
    }

    /// Keeps the sandboxes of trials that did not pass for this long.
    pub(crate) fn keeping(self, keep_failed: Duration) -> Self {
        Self { keep_failed, ..self }
    }

    /// What a new session begins with, and the reports to send again.
    pub(crate) fn hello(&self, sandboxes: Vec<String>) -> (Hello, Vec<Report>) {
        // No trial begins or ends between the two halves.
        let trials = self.trials();
        let greeting = self.outbox.greet();
        let mut held: Vec<u64> = trials.keys().copied().collect();
        held.sort_unstable();
        let hello = Hello {
            worker_id: self.folder.worker_id.clone(),
            incarnation: self.folder.incarnation.clone(),
            boot_id: self.folder.boot_id.clone(),
            slots: if self.stopping.load(Ordering::Acquire) { 0 } else { greeting.slots },
            providers: self.providers.keys().map(|name| (*name).to_owned()).collect(),
            held,
            sandboxes,
            role: evalgrid_proto::v1::WorkerRole::Executor.into(),
        };
        (hello, greeting.unacknowledged)
    }

    /// Every sandbox that has left something on the disk. All of them or an error: what a greeting does not name is taken to be gone.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<String>, String> {
        let mut names = BTreeSet::new();
        for (provider, sandboxes) in &self.providers {
            match timeout(LIST_DEADLINE, sandboxes.list()).await {
                Ok(Ok(found)) => names.extend(found),
                Ok(Err(error)) => return Err(format!("{provider}: {error}")),
                Err(_) => return Err(format!("{provider}: it takes longer than {LIST_DEADLINE:?}")),
            }
        }
        Ok(names.into_iter().collect())
    }

    /// The scheduler has heard what we said at `sent`.
    pub(crate) fn heard(&self, sent: Instant, lease: Duration) {
        let end = sent + (lease - lease / LEASE_MARGIN);
        self.leases_end.send_modify(|known| *known = (*known).max(Some(end)));
    }

    /// Whether the leases hold now. A process that was stopped for a while, and goes on, may not have heard of their end yet: whoever is
    /// about to act asks.
    pub(crate) fn leases_hold(&self) -> bool {
        self.leases_end.borrow().is_some_and(|end| Instant::now() < end)
    }

    /// Returns when the scheduler has not been heard for the time of a lease.
    pub(crate) async fn silence(&self) {
        let mut changes = self.leases_end.subscribe();
        loop {
            let end = *changes.borrow_and_update();
            let changed = async {
                // The sender lives as long as we do.
                let _ = changes.changed().await;
            };
            match end {
                Some(end) if end <= Instant::now() => return,
                Some(end) => tokio::select! { () = sleep_until(end) => {} () = changed => {} },
                None => changed.await,
            }
        }
    }

    /// All leases have ended: stops acting, and leaves the agents to their supervisors.
    pub(crate) fn expire(&self) {
        let trials = std::mem::take(&mut *self.trials());
        if !trials.is_empty() {
            tracing::warn!(
                trials = trials.len(),
                "the scheduler was silent for the time of a lease: its trials are let go"
            );
        }
        for running in trials.into_values() {
            running.task.abort();
            self.outbox.free_slot();
        }
        self.outbox.forget_trials();
        self.leases_end.send_replace(None);
    }

    /// Begins, or goes on with, a trial.
    pub(crate) fn begin(self: &Arc<Self>, lease: Lease) {
        let token = lease.token;
        let older = self
            .trials()
            .iter()
            .find(|(_, running)| running.sandbox == lease.sandbox)
            .map(|(token, _)| *token);
        match older {
            Some(older) if older >= token => return,
            Some(older) => self.abandon(older),
            None => {}
        }
        let mut trials = self.trials();
        self.outbox.take_slot();
        if self.stopping.load(Ordering::Acquire) {
            // The slot stays taken: its credit would only bring the next lease, to be given back too.
            self.outbox.push(released(token));
            return;
        }
        let reported = Arc::new(AtomicBool::new(false));
        let (sandbox, provider) = (lease.sandbox.clone(), lease.provider.clone());
        let span = tracing::info_span!("trial", id = lease.trial_id, token);
        let work = {
            let (slot, reported) = (
                Slot {
                    worker: self.clone(),
                    token,
                },
                reported.clone(),
            );
            async move { slot.worker.work(&lease, &reported).await }
        };
        let task = tokio::spawn(work.instrument(span));
        trials.insert(
            token,
            Running {
                task,
                sandbox,
                provider,
                reported,
            },
        );
    }

    async fn work(&self, lease: &Lease, reported: &AtomicBool) {
        let ended = AssertUnwindSafe(trial::run(self, lease)).catch_unwind().await;
        let ended = ended.unwrap_or_else(|_| {
            tracing::error!("a trial has hit a bug in the executor");
            Ended::Failed(AttemptFailureKind::SandboxLost, "the executor hit a bug".into())
        });
        let token = lease.token;
        let mut keep_ms = 0;
        let fact = match ended {
            Ended::Outcome(outcome) => {
                keep_ms = match outcome.status() {
                    TrialStatus::Passed => 0,
                    _ => self.keep_failed.as_millis() as u64,
                };
                Fact::Result(Box::new(TrialResult {
                    token,
                    outcome: Some(*outcome),
                    keep_sandbox_ms: keep_ms,
                }))
            }
            Ended::Failed(kind, reason) => {
                tracing::warn!(?kind, reason, "the attempt has failed");
                Fact::Failure(AttemptFailure {
                    token,
                    kind: kind.into(),
                    reason,
                })
            }
            Ended::Throttled { retry_after_ms } => {
                tracing::info!(retry_after_ms, "the model's provider limits requests: the trial goes on later");
                // Whatever may go on in it, the sandbox stays.
                self.outbox.push(Fact::Throttled(Throttled {
                    token,
                    model_key: lease.model_key.clone(),
                    retry_after_ms,
                }));
                return;
            }
            Ended::Fenced => {
                tracing::warn!("a newer attempt has taken over the sandbox");
                // If there is one, this comes under an old token, and is refused. If there is none, a failover has taken back the attempt that the
                // sandbox obeys, and it will obey none that is to come: without a word the trial would wait for hours. Whose the sandbox is, only
                // the scheduler can tell; it asks for its destruction where nobody needs it.
                self.outbox.push(Fact::Failure(AttemptFailure {
                    token,
                    kind: AttemptFailureKind::SandboxLost.into(),
                    reason: "its sandbox obeys a newer attempt".into(),
                }));
                return;
            }
        };
        reported.store(true, Ordering::Release);
        // One that is kept goes when the scheduler asks for that: its log has the deadline, which outlives this process.
        if self.outbox.push_awaited(fact).await.is_ok() && keep_ms == 0 {
            self.destroy_and_tell(&lease.sandbox, Some(&lease.provider)).await;
        }
    }

    /// The trial lost its lease: stops acting on it, and on its sandbox.
    pub(crate) fn abandon(&self, token: u64) {
        if let Some(running) = self.trials().remove(&token) {
            tracing::warn!(token, "a trial has lost its lease");
            running.task.abort();
            self.outbox.free_slot();
        }
    }

    /// The trial is over for others than us: ends it and all that it has.
    pub(crate) fn revoke(self: &Arc<Self>, token: u64, reason: &str) {
        let Some(running) = self.trials().remove(&token) else { return };
        tracing::info!(token, reason, "a trial is revoked");
        running.task.abort();
        let worker = self.clone();
        tokio::spawn(async move {
            // An error says that it was cancelled, which is what we want.
            let _ = running.task.await;
            worker.destroy_and_tell(&running.sandbox, Some(&running.provider)).await;
            worker.outbox.free_slot();
        });
    }

    /// Removes what is left of a sandbox.
    pub(crate) fn destroy(self: &Arc<Self>, sandbox: String) {
        if !locked(&self.destroying).insert(sandbox.clone()) {
            return;
        }
        let worker = self.clone();
        tokio::spawn(async move {
            worker.destroy_and_tell(&sandbox, None).await;
            locked(&worker.destroying).remove(&sandbox);
        });
    }

    /// `provider`: whose it is, where that is known.
    async fn destroy_and_tell(&self, sandbox: &str, provider: Option<&str>) {
        // Closed it never is.
        let _room = self.destroy_room.acquire().await;
        let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(60));
        for _ in 0..DESTROY_TRIES {
            let mut gone = true;
            for (name, sandboxes) in self.providers.iter().filter(|(name, _)| provider.is_none_or(|own| own == **name)) {
                match timeout(DESTROY_DEADLINE, sandboxes.destroy(sandbox)).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => tracing::warn!(sandbox, provider = name, %error, "a sandbox is not destroyed yet"),
                    Err(_) => tracing::warn!(sandbox, provider = name, "destroying a sandbox takes too long"),
                }
                gone = false;
            }
            if gone {
                self.outbox.push(Fact::Destroyed(sandbox.to_owned()));
                return;
            }
            sleep(pauses.next()).await;
        }
        tracing::error!(sandbox, "a sandbox could not be destroyed; it stays in custody");
    }

    /// The worker is stopping: takes nothing more, stops acting, leaves the agents to their supervisors, and gives the leases back.
    pub(crate) async fn release(&self) {
        self.stopping.store(true, Ordering::Release);
        let trials = std::mem::take(&mut *self.trials());
        for running in trials.values() {
            running.task.abort();
        }
        let deadline = Instant::now() + STOP_DEADLINE;
        for (token, running) in trials {
            // Its error says that it was cancelled. Who does not notice in time is still told to be released: its supervisor is fenced.
            let _ = tokio::time::timeout_at(deadline, running.task).await;
            if !running.reported.load(Ordering::Acquire) {
                self.outbox.push(released(token));
            }
        }
    }

    fn trials(&self) -> MutexGuard<'_, HashMap<u64, Running>> {
        locked(&self.trials)
    }
}

/// A trial's place. Given back when its task ends, however it ends, unless somebody has taken the trial away before.
struct Slot {
    worker: Arc<Worker>,
    token: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.worker.trials().remove(&self.token).is_some() {
            self.worker.outbox.free_slot();
        }
    }
}

fn released(token: u64) -> Fact {
    let reason = "the worker is stopping".to_owned();
    Fact::Failure(AttemptFailure {
        token,
        kind: AttemptFailureKind::Released.into(),
        reason,
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
