//! The leases that a worker works on, and who may end them.

use std::{
    collections::{BTreeSet, HashMap},
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use evalgrid_proto::v1::{AttemptFailure, AttemptFailureKind, Hello, JobLease, Lease, Report, WorkerRole, to_worker::Message};
use futures::FutureExt as _;
use tokio::{
    task::JoinHandle,
    time::{Instant, timeout_at},
};
use tracing::Instrument as _;

use crate::{Fact, Worker};

/// How long a stopping worker waits for its jobs to notice.
const STOP_DEADLINE: Duration = Duration::from_secs(2);

/// What a worker does with its leases.
pub trait Role: Send + Sync + 'static {
    /// What it is leased.
    type Task: Task;
    /// As it says of itself to the scheduler.
    const ROLE: WorkerRole;
    /// As it is called in the log.
    const NAME: &str;

    /// Does what a lease says, to its end. Dropped where the lease is lost meanwhile.
    fn run(&self, worker: &Worker, task: &Self::Task) -> impl Future<Output = End> + Send;

    /// What is reported where that panics.
    fn broken(&self, task: &Self::Task) -> End;
}

/// What a worker is leased: a trial, or a job.
pub trait Task: Sized + Send + Sync + 'static {
    /// Out of the scheduler's message; `None` where that is something else.
    fn of(message: Message) -> Option<Self>;
    /// The fencing token.
    fn token(&self) -> u64;
    /// The trial that it is, or is for.
    fn trial_id(&self) -> &str;
    /// The sandbox's name. Empty: there is none, because a model is called.
    fn sandbox(&self) -> &str;
    /// Whose the sandbox is.
    fn provider(&self) -> &str;
}

impl Task for Lease {
    fn of(message: Message) -> Option<Self> {
        match message {
            Message::Lease(lease) => Some(lease),
            _ => None,
        }
    }
    fn token(&self) -> u64 {
        self.token
    }
    fn trial_id(&self) -> &str {
        &self.trial_id
    }
    fn sandbox(&self) -> &str {
        &self.sandbox
    }
    fn provider(&self) -> &str {
        &self.provider
    }
}

impl Task for JobLease {
    fn of(message: Message) -> Option<Self> {
        match message {
            Message::Job(job) => Some(job),
            _ => None,
        }
    }
    fn token(&self) -> u64 {
        self.token
    }
    fn trial_id(&self) -> &str {
        &self.trial_id
    }
    fn sandbox(&self) -> &str {
        &self.sandbox
    }
    fn provider(&self) -> &str {
        &self.provider
    }
}

/// How the work on a lease has ended.
#[derive(Debug)]
pub struct End {
    /// What is reported. The slot is taken until that is durable.
    pub fact: Fact,
    /// And then.
    pub then: Then,
}

/// What becomes of a lease's sandbox once its end is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It goes.
    Destroy,
    /// It stays until somebody goes on with it, or the scheduler asks for its destruction.
    Keep,
}

/// See the top of this file.
pub struct Jobs<R> {
    worker: Worker,
    role: R,
    running: Mutex<HashMap<u64, Running>>,
    /// Sandboxes that are being destroyed because the scheduler said so.
    destroying: Mutex<BTreeSet<String>>,
    stopping: AtomicBool,
}

struct Running {
    task: JoinHandle<()>,
    sandbox: String,
    provider: String,
    /// Its end is on its way to the scheduler.
    reported: Arc<AtomicBool>,
}

impl<R: Role> Jobs<R> {
    /// None yet.
    pub fn new(worker: Worker, role: R) -> Self {
        Self {
            worker,
            role,
            running: Mutex::default(),
            destroying: Mutex::default(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Who works on them.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// As what.
    pub fn role(&self) -> &R {
        &self.role
    }

    /// What a new session begins with, and the reports to send again.
    pub(crate) fn hello(&self, sandboxes: Vec<String>) -> (Hello, Vec<Report>) {
        // No job begins or ends between the two halves.
        let running = self.running();
        let greeting = self.worker.outbox.greet();
        let mut held: Vec<u64> = running.keys().copied().collect();
        held.sort_unstable();
        let folder = &self.worker.folder;
        let hello = Hello {
            worker_id: folder.worker_id.clone(),
            incarnation: folder.incarnation.clone(),
            boot_id: folder.boot_id.clone(),
            slots: if self.stopping.load(Ordering::Acquire) { 0 } else { greeting.slots },
            providers: self.worker.providers.keys().map(|name| (*name).to_owned()).collect(),
            held,
            sandboxes,
            role: R::ROLE.into(),
        };
        (hello, greeting.unacknowledged)
    }

    /// All leases have ended: stops acting, and leaves the agents to their supervisors.
    pub(crate) fn expire(&self) {
        let running = std::mem::take(&mut *self.running());
        if !running.is_empty() {
            tracing::warn!(
                leases = running.len(),
                "the scheduler was silent for the time of a lease: what it leased is let go"
            );
        }
        for running in running.into_values() {
            running.task.abort();
            self.worker.outbox.free_slot();
        }
        self.worker.outbox.forget_leases();
        self.worker.leases_ended();
    }

    /// Begins, or goes on with, what is leased.
    pub fn begin(self: &Arc<Self>, task: R::Task) {
        let token = task.token();
        let older = match task.sandbox() {
            "" => None,
            sandbox => self
                .running()
                .iter()
                .find(|(_, running)| running.sandbox == sandbox)
                .map(|(token, _)| *token),
        };
        match older {
            Some(older) if older >= token => return,
            Some(older) => self.abandon(older),
            None => {}
        }
        let mut running = self.running();
        if self.stopping.load(Ordering::Acquire) {
            drop(running);
            self.refuse(token, STOPPING);
            return;
        }
        self.worker.outbox.take_slot();
        let reported = Arc::new(AtomicBool::new(false));
        let (sandbox, provider) = (task.sandbox().to_owned(), task.provider().to_owned());
        let span = tracing::info_span!("lease", trial = task.trial_id(), token);
        let work = {
            let slot = Slot { jobs: self.clone(), token };
            let reported = reported.clone();
            async move { slot.jobs.work(&task, &reported).await }
        };
        let task = tokio::spawn(work.instrument(span));
        running.insert(
            token,
            Running {
                task,
                sandbox,
                provider,
                reported,
            },
        );
    }

    /// Gives a lease back at once. The slot stays taken: its credit would only bring the next lease, to be given back too.
    pub(crate) fn refuse(&self, token: u64, reason: &str) {
        self.worker.outbox.take_slot();
        self.worker.outbox.push(released(token, reason));
    }

    async fn work(&self, task: &R::Task, reported: &AtomicBool) {
        let ended = AssertUnwindSafe(self.role.run(&self.worker, task)).catch_unwind().await;
        let End { fact, then } = ended.unwrap_or_else(|_| {
            tracing::error!("a lease has hit a bug in the {}", R::NAME);
            self.role.broken(task)
        });
        reported.store(true, Ordering::Release);
        let durable = self.worker.outbox.push_awaited(fact).await.is_ok();
        if durable && then == Then::Destroy {
            self.worker.destroy_and_tell(task.sandbox(), Some(task.provider())).await;
        }
    }

    /// The lease is lost: stops acting on it, and on its sandbox.
    pub(crate) fn abandon(&self, token: u64) {
        if let Some(running) = self.running().remove(&token) {
            tracing::warn!(token, "a lease is lost");
            running.task.abort();
            self.worker.outbox.free_slot();
        }
    }

    /// What was leased is over for others than us: ends it and all that it has.
    pub(crate) fn revoke(self: &Arc<Self>, token: u64, reason: &str) {
        let Some(running) = self.running().remove(&token) else { return };
        tracing::info!(token, reason, "a lease is revoked");
        running.task.abort();
        let jobs = self.clone();
        tokio::spawn(async move {
            // An error says that it was cancelled, which is what we want.
            let _ = running.task.await;
            jobs.worker.destroy_and_tell(&running.sandbox, Some(&running.provider)).await;
            jobs.worker.outbox.free_slot();
        });
    }

    /// Removes what is left of a sandbox.
    pub(crate) fn destroy(self: &Arc<Self>, sandbox: String) {
        if !locked(&self.destroying).insert(sandbox.clone()) {
            return;
        }
        let jobs = self.clone();
        tokio::spawn(async move {
            jobs.worker.destroy_and_tell(&sandbox, None).await;
            locked(&jobs.destroying).remove(&sandbox);
        });
    }

    /// The worker is stopping: takes nothing more, stops acting, leaves the agents to their supervisors, and gives the leases back.
    pub(crate) async fn release(&self) {
        self.stopping.store(true, Ordering::Release);
        let running = std::mem::take(&mut *self.running());
        for running in running.values() {
            running.task.abort();
        }
        let deadline = Instant::now() + STOP_DEADLINE;
        for (token, running) in running {
            // Its error says that it was cancelled. Who does not notice in time is still told to be released: its supervisor is fenced.
            let _ = timeout_at(deadline, running.task).await;
            if !running.reported.load(Ordering::Acquire) {
                self.worker.outbox.push(released(token, STOPPING));
            }
        }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<u64, Running>> {
        locked(&self.running)
    }
}

/// A lease's place. Given back when its task ends, however it ends, unless somebody has taken the lease away before.
struct Slot<R: Role> {
    jobs: Arc<Jobs<R>>,
    token: u64,
}

impl<R: Role> Drop for Slot<R> {
    fn drop(&mut self) {
        if self.jobs.running().remove(&self.token).is_some() {
            self.jobs.worker.outbox.free_slot();
        }
    }
}

/// Why a lease is given back.
const STOPPING: &str = "the worker is stopping";

fn released(token: u64, reason: &str) -> Fact {
    Fact::Failure(AttemptFailure {
        token,
        kind: AttemptFailureKind::Released.into(),
        reason: reason.to_owned(),
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
