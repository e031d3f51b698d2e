//! What a process has on this machine to run agents with: a folder of its own, sandboxes, agents. A worker has a scheduler besides.

use std::time::Duration;

use evalgrid_sandbox::Limits;
use tokio::time::{sleep, timeout};

use crate::{Folder, Providers, Sandboxes, Tools, WorkerError, WorkerOptions, backoff::Pauses, providers};

/// Tries to destroy one sandbox, some minutes in all.
const DESTROY_TRIES: u32 = 10;
/// One try; the provider has shorter deadlines of its own.
const DESTROY_DEADLINE: Duration = Duration::from_secs(120);
/// Between tries.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Between tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// See the top of this file.
pub struct Host {
    /// For this process alone.
    pub folder: Folder,
    /// The agents of this host.
    pub tools: Tools,
    /// The sandboxes that work here.
    pub providers: Providers,
    /// Of each sandbox.
    pub limits: Limits,
}

impl Host {
    /// Locks the folder, and finds out what works on this host. Takes some seconds where sandboxes have to be tried out: a future that is dropped
    /// meanwhile leaves one of those behind. Uses nothing of the options that is about schedulers.
    pub async fn open(options: &WorkerOptions, need: Sandboxes) -> Result<Self, WorkerError> {
        let folder = Folder::open(&options.work)?;
        let tools = Tools::new(options.tools.clone())?;
        let providers = providers::open(options, need, tools.folder(), &folder.worker_id).await?;
        let shared: Vec<_> = evalgrid_harness::shared_files()
            .into_iter()
            .map(|file| (file.path, file.content))
            .collect();
        for (name, provider) in &providers {
            provider.share(&shared).map_err(|error| WorkerError::Provider(name, error))?;
        }
        Ok(Self {
            folder,
            tools,
            providers,
            limits: options.limits,
        })
    }

    /// Removes what is left of a sandbox, as often as it takes. Whether nothing of it is left.
    pub async fn destroy(&self, sandbox: &str) -> bool {
        destroy(&self.providers, sandbox, None).await
    }
}

/// As [`Host::destroy`]. `provider`: whose it is, where that is known.
pub(crate) async fn destroy(providers: &Providers, sandbox: &str, provider: Option<&str>) -> bool {
    let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
    for _ in 0..DESTROY_TRIES {
        let mut gone = true;
        for (name, sandboxes) in providers.iter().filter(|(name, _)| provider.is_none_or(|own| own == **name)) {
            match timeout(DESTROY_DEADLINE, sandboxes.destroy(sandbox)).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => tracing::warn!(sandbox, provider = name, %error, "a sandbox is not destroyed yet"),
                Err(_) => tracing::warn!(sandbox, provider = name, "destroying a sandbox takes too long"),
            }
            gone = false;
        }
        if gone {
            return true;
        }
        sleep(pauses.next()).await;
    }
    false
}
