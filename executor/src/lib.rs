//! A trial, step by step.
//!
//! An executor holds one stream to the scheduler. It takes leases, runs each trial in a sandbox whose supervisor outlives it, and reports
//! every step. When it dies, the next one on the same folder takes the sandboxes over and goes on after the last recorded step.

mod account;
mod artifacts;
mod backoff;
mod bundle;
mod cache;
mod changes;
mod check;
mod docker;
mod folder;
mod layers;
mod link;
mod mocks;
mod objects;
mod outbox;
mod output;
mod prepare;
mod setup;
mod source;
mod timing;
mod tools;
mod trial;
mod turn_files;
mod turns;
mod validator;
mod worker;

#[cfg(test)]
mod fake;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use evalgrid_sandbox::{BubblewrapOptions, BubblewrapProvider, Limits, Network, ProcessProvider, SandboxError, SandboxProvider};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

pub use docker::{DockerPolicy, DockerUse, open_docker};
pub use folder::FolderError;
pub use link::AddressError;
pub use tools::{ToolError, ToolOptions, ToolState, Tools};

use crate::{backoff::Pauses, folder::Folder, layers::Bases, link::Client, objects::Objects, worker::Worker};

/// Pauses between the beginnings of two connections: short enough that a restarted scheduler is found at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// And never so long that a lease could not be saved.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// How long a stopping executor waits until what it has reported is durable.
const FLUSH_DEADLINE: Duration = Duration::from_secs(5);
/// Making one sandbox to see whether it works.
const PROBE_DEADLINE: Duration = Duration::from_secs(30);

/// Whether sandboxes without isolation are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessPolicy {
    /// Never.
    Off,
    /// Where bubblewrap does not work here.
    IfNoBubblewrap,
    /// Always.
    On,
}

/// How an executor runs.
#[derive(Clone, Debug)]
pub struct ExecutorOptions {
    /// Its folder, for it alone: its name, its sandboxes.
    pub work: PathBuf,
    /// `http://host:port` of the gRPC of each scheduler of the cell.
    pub schedulers: Vec<String>,
    /// The workers' token.
    pub worker_token: String,
    /// Trials at once.
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
    /// How long the sandbox of a trial that did not pass stays, for people to look into; zero: it goes at once.
    pub keep_failed: Duration,
    /// Where agents come from.
    pub tools: ToolOptions,
}

/// Why an executor cannot run, or goes no further.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
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
pub async fn run(options: ExecutorOptions, mut shutdown: watch::Receiver<bool>) -> Result<(), ExecutorError> {
    let folder = Folder::open(&options.work)?;
    let client = Client::new(&options.schedulers, &options.worker_token)?;
    let objects = Objects::new(Client::new(&options.schedulers, &options.worker_token)?);
    let tools = Tools::new(options.tools.clone())?;
    let providers = providers(&options, tools.folder(), &folder.worker_id).await?;
    let shared: Vec<_> = evalgrid_harness::shared_files()
        .into_iter()
        .map(|file| (file.path, file.content))
        .collect();
    for (name, provider) in &providers {
        provider.share(&shared).map_err(|error| ExecutorError::Provider(name, error))?;
    }
    tracing::info!(worker = folder.worker_id, slots = options.slots, providers = ?providers.keys().collect::<Vec<_>>(), "the executor runs");
    let bases = {
        let (work, boot_id, providers) = (options.work.clone(), folder.boot_id.clone(), providers.clone());
        let open = tokio::task::spawn_blocking(move || Bases::open(&work, &boot_id, &providers)).await;
        open.unwrap_or_else(|error| Err(std::io::Error::other(error)))
            .map_err(|error| FolderError::Io(options.work.join("bases"), error))?
    };
    let worker = Worker::new(folder, options.slots, objects, providers, bases, options.limits, tools);
    let worker = Arc::new(worker.keeping(options.keep_failed));
    let stop = async {
        // An error says that nobody can tell us any more.
        let _ = shutdown.wait_for(|stop| *stop).await;
        worker.release().await;
        if timeout(FLUSH_DEADLINE, worker.outbox.emptied()).await.is_err() {
            tracing::warn!("the scheduler has not acknowledged the last reports; it learns the rest when the leases end");
        }
    };
    tokio::select! {
        () = stay_connected(&worker, &client) => Err(ExecutorError::Refused(options.schedulers.join(", "))),
        () = stop => Ok(()),
    }
}

/// One session after the other, for ever; returns only if the token has been refused from the start.
async fn stay_connected(worker: &Arc<Worker>, client: &Client) {
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
            Err(end) = link::session(worker, client, welcomed) => {
                if end.is_refusal() && !known {
                    return;
                }
                tracing::warn!("no connection to the scheduler: {end}");
            }
            () = worker.silence() => worker.expire(),
        }
        client.suspect(began);
        let pause = sleep_until(next);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                () = worker.silence() => worker.expire(),
            }
        }
    }
}

/// The kinds of sandboxes that work here.
async fn providers(
    options: &ExecutorOptions,
    tools: &Path,
    worker: &str,
) -> Result<BTreeMap<&'static str, Arc<dyn SandboxProvider>>, ExecutorError> {
    let mut providers: BTreeMap<&'static str, Arc<dyn SandboxProvider>> = BTreeMap::new();
    let executable = || Some(options.supervisor_executable.clone());
    let refused = match bubblewrap(options, executable(), tools).await {
        Ok(provider) => {
            providers.insert("bubblewrap", Arc::new(provider));
            None
        }
        Err(reason) => Some(reason),
    };
    if let Some(provider) = docker::provider(options, tools, worker).await? {
        providers.insert("docker", Arc::new(provider));
    }
    match (options.process_sandbox, &refused) {
        (ProcessPolicy::On, _) => tracing::warn!("process sandboxes are on: what runs in them is not isolated from this machine at all"),
        (ProcessPolicy::IfNoBubblewrap, Some(reason)) => {
            tracing::warn!(
                "bubblewrap does not work here ({reason}), so agents run as plain processes, not isolated from this machine at all"
            );
        }
        (_, Some(reason)) if providers.is_empty() => {
            return Err(ExecutorError::NoSandbox(format!("bubblewrap: {reason}; process sandboxes are off")));
        }
        _ => return Ok(providers),
    }
    let process = ProcessProvider::new(options.work.join("process"), executable()).and_then(|provider| provider.with_tools(tools));
    providers.insert(
        "process",
        Arc::new(process.map_err(|error| ExecutorError::Provider("process", error))?),
    );
    Ok(providers)
}

async fn bubblewrap(options: &ExecutorOptions, executable: Option<PathBuf>, tools: &Path) -> Result<BubblewrapProvider, String> {
    let bubblewrap = BubblewrapOptions {
        network: options.network.clone(),
        ..BubblewrapOptions::default()
    };
    let provider = BubblewrapProvider::new(options.work.join("bubblewrap"), executable, bubblewrap)
        .and_then(|provider| provider.with_tools(tools))
        .map_err(|error| error.to_string())?;
    match timeout(PROBE_DEADLINE, provider.probe()).await {
        Ok(result) => result.map(|()| provider),
        Err(_) => Err("making a sandbox takes too long".into()),
    }
}
