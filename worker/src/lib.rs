//! A worker's side of the stream: its folder, its connection, what it holds, its sandboxes and agents.
//!
//! A worker holds one stream to the scheduler, takes leases, and reports what came of them. What it does with a lease is its [`Role`]: an
//! executor runs a trial, a judge runner asks a judge or plays a person. Everything else is the same for all, and here.

mod backoff;
mod docker;
mod folder;
mod host;
mod jobs;
mod link;
mod objects;
mod outbox;
pub mod output;
mod providers;
mod tools;
mod whole;
mod worker;

#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

use evalgrid_sandbox::{Limits, Network, SandboxError};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

pub use docker::{DockerPolicy, DockerUse, open_docker};
pub use folder::{Folder, FolderError};
pub use host::Host;
pub use jobs::{End, Jobs, Role, Task, Then};
pub use link::{AddressError, Client};
pub use objects::{ObjectError, Objects};
pub use outbox::{Fact, Outbox};
pub use providers::{ProcessPolicy, Providers, Sandboxes};
pub use tools::{ToolError, ToolOptions, ToolState, Tools};
pub use worker::Worker;

use crate::backoff::Pauses;

/// Pauses between the beginnings of two connections: short enough that a restarted scheduler is found at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// And never so long that a lease could not be saved.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// How long a stopping worker waits until what it has reported is durable.
const FLUSH_DEADLINE: Duration = Duration::from_secs(5);

/// What every worker needs, whatever its role.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Its folder, for it alone: its name, its sandboxes.
    pub work: PathBuf,
    /// `http://host:port` of the gRPC of each scheduler of the cell.
    pub schedulers: Vec<String>,
    /// The workers' token.
    pub worker_token: String,
    /// Leases at once.
    pub slots: u32,
    /// Whether sandboxes without isolation are offered.
    pub process_sandbox: ProcessPolicy,
    /// Whether and how Docker sandboxes are offered.
    pub docker: DockerUse,
    /// What sandboxes may reach, where they are isolated.
    pub network: Network,
    /// The program whose `main` calls [`evalgrid_sandbox::run_if_helper`].
    pub supervisor_executable: PathBuf,
    /// Of each sandbox.
    pub limits: Limits,
    /// Where agents come from.
    pub tools: ToolOptions,
}

/// Why a worker cannot run, or goes no further.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Its folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The scheduler's address or token.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A provider of sandboxes.
    #[error("the {0} sandboxes: {1}")]
    Provider(&'static str, #[source] SandboxError),
    /// The folder of the agents, or a program of the operator's own.
    #[error("agents: {0}")]
    Tools(#[from] ToolError),
    /// The scheduler does not know the token, and never has.
    #[error("{0} does not accept this workers' token; set EVALGRID_WORKER_TOKEN to what is in the scheduler's DATA/worker-token")]
    Refused(String),
    /// Docker, which was asked for.
    #[error("the docker sandboxes: {0}")]
    Docker(String),
    /// Docker sandboxes of an earlier run are there, and no Docker is.
    #[error(
        "sandboxes of Docker are left in {folder}, and without Docker they cannot be removed ({reason}); let --docker name the daemon, or \
         remove its containers with the label evalgrid.owner and then that folder"
    )]
    DockerLeft {
        /// Where.
        folder: PathBuf,
        /// Why there is no Docker.
        reason: String,
    },
    /// There is no provider at all.
    #[error("no kind of sandbox works here: {0}")]
    NoSandbox(String),
}

/// Runs until `shutdown` says true (or its sender is gone). Loses the scheduler as often as it must, and comes back each time.
pub async fn run<R: Role>(worker: Worker, role: R, mut shutdown: watch::Receiver<bool>) -> Result<(), WorkerError> {
    let jobs = Arc::new(Jobs::new(worker, role));
    let worker = jobs.worker();
    tracing::info!(
        worker = worker.folder.worker_id,
        providers = ?worker.providers.keys().collect::<Vec<_>>(),
        "the {} runs",
        R::NAME
    );
    let stop = async {
        // An error says that nobody can tell us any more.
        let _ = shutdown.wait_for(|stop| *stop).await;
        jobs.release().await;
        if timeout(FLUSH_DEADLINE, worker.outbox.emptied()).await.is_err() {
            tracing::warn!("the scheduler has not acknowledged the last reports; it learns the rest when the leases end");
        }
    };
    tokio::select! {
        () = stay_connected(&jobs) => Err(WorkerError::Refused(worker.client.addresses().join(", "))),
        () = stop => Ok(()),
    }
}

/// One session after the other, for ever; returns only if the token has been refused from the start.
async fn stay_connected<R: Role>(jobs: &Arc<Jobs<R>>) {
    let worker = jobs.worker();
    let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut known = false;
    loop {
        // One that has lasted is followed by the next at once; those that fail at once keep their distance.
        let next = Instant::now() + pauses.next();
        let mut began = Instant::now();
        let welcomed = || {
            tracing::info!("connected to the scheduler");
            pauses.reset();
            known = true;
            began = Instant::now();
        };
        tokio::select! {
            Err(end) = link::session(jobs, welcomed) => {
                if end.is_refusal() && !known {
                    return;
                }
                tracing::warn!("no connection to the scheduler: {end}");
            }
            () = worker.silence() => jobs.expire(),
        }
        worker.client.suspect(began);
        let pause = sleep_until(next);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                () = worker.silence() => jobs.expire(),
            }
        }
    }
}
