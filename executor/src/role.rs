//! What an executor does with a lease, and what it reports of it.

use std::{io, sync::Arc, time::Duration};

use evalgrid_proto::v1::{AttemptFailure, AttemptFailureKind, AwaitsReply, Lease, Throttled, TrialResult, TrialStatus, WorkerRole};
use evalgrid_worker::{End, Fact, FolderError, Role, Then, Worker};

use crate::{
    cache::Caches,
    layers::Bases,
    trial::{self, Ended},
};

/// The part of a worker that only executors have.
pub(crate) struct Executor {
    pub(crate) bases: Arc<Bases>,
    pub(crate) caches: Arc<Caches>,
    /// How long the sandbox of a trial that did not pass stays.
    keep_failed: Duration,
}

impl Executor {
    /// Takes over what an earlier process has left in the worker's folder. Blocks.
    pub(crate) fn open(worker: &Worker, keep_failed: Duration) -> Result<Self, FolderError> {
        let folder = &worker.folder;
        let failed = |error: io::Error| FolderError::Io(folder.path.join("bases"), error);
        Ok(Self {
            bases: Bases::open(&folder.path, &folder.boot_id, &worker.providers).map_err(failed)?,
            caches: Arc::new(Caches::open(&folder.path, &folder.boot_id)),
            keep_failed,
        })
    }
}

impl Role for Executor {
    type Task = Lease;
    const ROLE: WorkerRole = WorkerRole::Executor;
    const NAME: &str = "executor";

    async fn run(&self, worker: &Worker, lease: &Lease) -> End {
        let ended = trial::run(self, worker, lease).await;
        self.told(lease, ended)
    }

    fn broken(&self, lease: &Lease) -> End {
        let reason = "the executor hit a bug".to_owned();
        self.told(lease, Ended::Failed(AttemptFailureKind::SandboxLost, reason))
    }
}

impl Executor {
    fn told(&self, lease: &Lease, ended: Ended) -> End {
        let token = lease.token;
        let failure = |kind: AttemptFailureKind, reason| {
            Fact::Failure(AttemptFailure {
                token,
                kind: kind.into(),
                reason,
            })
        };
        let (fact, then) = match ended {
            Ended::Outcome(outcome) => {
                let keep = match outcome.status() {
                    TrialStatus::Passed => Duration::ZERO,
                    _ => self.keep_failed,
                };
                let result = TrialResult {
                    token,
                    outcome: Some(*outcome),
                    keep_sandbox_ms: keep.as_millis() as u64,
                };
                // One that is kept goes when the scheduler asks for that: its log has the deadline, which outlives this process.
                let then = if keep.is_zero() { Then::Destroy } else { Then::Keep };
                (Fact::Result(Box::new(result)), then)
            }
            Ended::Failed(kind, reason) => {
                tracing::warn!(?kind, reason, "the attempt has failed");
                (failure(kind, reason), Then::Destroy)
            }
            Ended::Throttled { retry_after_ms } => {
                tracing::info!(retry_after_ms, "the model's provider limits requests: the trial goes on later");
                let throttled = Throttled {
                    token,
                    model_key: lease.model_key.clone(),
                    retry_after_ms,
                };
                // Whatever may go on in it, the sandbox stays.
                (Fact::Throttled(throttled), Then::Keep)
            }
            Ended::AwaitsReply { turn, conversation } => {
                let awaits = AwaitsReply {
                    token,
                    turn,
                    conversation: Some(*conversation),
                };
                (Fact::Awaits(awaits), Then::Keep)
            }
            Ended::Fenced => {
                tracing::warn!("a newer attempt has taken over the sandbox");
                // If there is one, this comes under an old token, and is refused. If there is none, a failover has taken back the attempt that the
                // sandbox obeys, and it will obey none that is to come: without a word the trial would wait for hours. Whose the sandbox is, only
                // the scheduler can tell; it asks for its destruction where nobody needs it.
                let reason = "its sandbox obeys a newer attempt".to_owned();
                (failure(AttemptFailureKind::SandboxLost, reason), Then::Keep)
            }
        };
        End { fact, then }
    }
}
