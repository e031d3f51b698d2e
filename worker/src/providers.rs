//! Which kinds of sandboxes work on this host.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use evalgrid_sandbox::{BubblewrapOptions, BubblewrapProvider, ProcessProvider, SandboxProvider};
use tokio::time::timeout;

use crate::{WorkerError, WorkerOptions, docker, whole::Whole};

/// Making one sandbox to see whether it works.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(30);

/// Kinds of sandboxes, by their names.
pub type Providers = BTreeMap<&'static str, Arc<dyn SandboxProvider>>;

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

/// What a worker is without sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sandboxes {
    /// Nothing.
    Needed,
    /// Still of use: it calls models.
    Optional,
}

/// The kinds of sandboxes that work here.
pub(crate) async fn open(options: &WorkerOptions, need: Sandboxes, tools: &Path, worker: &str) -> Result<Providers, WorkerError> {
    let mut providers = Providers::new();
    let executable = || Some(options.supervisor_executable.clone());
    let refused = match bubblewrap(options, executable(), tools).await {
        Ok(provider) => {
            providers.insert("bubblewrap", Arc::new(Whole::new(provider)));
            None
        }
        Err(reason) => Some(reason),
    };
    if let Some(provider) = docker::provider(options, tools, worker).await? {
        providers.insert("docker", Arc::new(Whole::new(provider)));
    }
    match (options.process_sandbox, &refused) {
        (ProcessPolicy::On, _) => tracing::warn!("process sandboxes are on: what runs in them is not isolated from this machine at all"),
        (ProcessPolicy::IfNoBubblewrap, Some(reason)) => {
            tracing::warn!(
                "bubblewrap does not work here ({reason}), so agents run as plain processes, not isolated from this machine at all"
            );
        }
        (_, Some(reason)) if providers.is_empty() => {
            let reason = format!("bubblewrap: {reason}; process sandboxes are off");
            return match need {
                Sandboxes::Needed => Err(WorkerError::NoSandbox(reason)),
                Sandboxes::Optional => {
                    tracing::warn!("no kind of sandbox works here ({reason}): no agent runs here, only models are called");
                    Ok(providers)
                }
            };
        }
        _ => return Ok(providers),
    }
    let process = ProcessProvider::new(options.work.join("process"), executable()).and_then(|provider| provider.with_tools(tools));
    let process = process.map_err(|error| WorkerError::Provider("process", error))?;
    providers.insert("process", Arc::new(Whole::new(process)));
    Ok(providers)
}

async fn bubblewrap(options: &WorkerOptions, executable: Option<PathBuf>, tools: &Path) -> Result<BubblewrapProvider, String> {
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
