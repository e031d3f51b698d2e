//! What a worker has, and every job may use: the way to the scheduler, sandboxes, agents, and whether it may act.

use std::{collections::BTreeSet, time::Duration};

use evalgrid_sandbox::Limits;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep_until, timeout},
};

use crate::{Client, Fact, Folder, Host, Objects, Outbox, Providers, Sandboxes, Tools, WorkerError, WorkerOptions, host};

/// Destroying is mostly waiting and deleting files; more at once would keep the disk from the agents.
const DESTROYED_AT_ONCE: usize = 16;
/// This part of a lease's time is left unused at its end: for noticing, and for what is on its way to a sandbox by then.
const LEASE_MARGIN: u32 = 10;
/// Listing reads one folder.
const LIST_DEADLINE: Duration = Duration::from_secs(5);

/// See the top of this file.
pub struct Worker {
    /// What is to be reported.
    pub outbox: Outbox,
    /// The scheduler's objects.
    pub objects: Objects,
    /// The sandboxes that work here.
    pub providers: Providers,
    /// Of each sandbox.
    pub limits: Limits,
    /// The agents of this host.
    pub tools: Tools,
    /// Its name, and what tells its processes apart.
    pub folder: Folder,
    pub(crate) client: Client,
    destroy_room: Semaphore,
    /// When the leases end if nothing more is heard; `None` while there is nothing to lose.
    leases_end: watch::Sender<Option<Instant>>,
}

impl Worker {
    /// Locks the folder, and finds out what works on this host. Takes some seconds where sandboxes have to be tried out.
    pub async fn open(options: &WorkerOptions, need: Sandboxes) -> Result<Self, WorkerError> {
        let client = || Client::new(&options.schedulers, &options.worker_token);
        // Connections of their own: evidence keeps no lease waiting.
        let (stream, objects) = (client()?, Objects::new(client()?));
        let Host {
            folder,
            tools,
            providers,
            limits,
        } = Host::open(options, need).await?;
        Ok(Self::new(folder, options.slots, stream, objects, providers, limits, tools))
    }

    /// One of these parts. [`Self::open`] makes them for whoever runs for real.
    pub fn new(folder: Folder, slots: u32, client: Client, objects: Objects, providers: Providers, limits: Limits, tools: Tools) -> Self {
        Self {
            outbox: Outbox::new(slots),
            objects,
            providers,
            limits,
            tools,
            folder,
            client,
            destroy_room: Semaphore::new(DESTROYED_AT_ONCE),
            leases_end: watch::Sender::new(None),
        }
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
    pub fn heard(&self, sent: Instant, lease: Duration) {
        let end = sent + (lease - lease / LEASE_MARGIN);
        self.leases_end.send_modify(|known| *known = (*known).max(Some(end)));
    }

    /// Whether the leases hold now. A process that was stopped for a while, and goes on, may not have heard of their end yet: whoever is
    /// about to act asks.
    pub fn leases_hold(&self) -> bool {
        self.leases_end.borrow().is_some_and(|end| Instant::now() < end)
    }

    /// All leases have ended.
    pub(crate) fn leases_ended(&self) {
        self.leases_end.send_replace(None);
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

    /// Removes what is left of a sandbox, and says so. `provider`: whose it is, where that is known. Where there is no sandbox, because a model
    /// was called, its name is empty.
    pub(crate) async fn destroy_and_tell(&self, sandbox: &str, provider: Option<&str>) {
        if sandbox.is_empty() {
            return;
        }
        // Closed it never is.
        let _room = self.destroy_room.acquire().await;
        match host::destroy(&self.providers, sandbox, provider).await {
            true => self.outbox.push(Fact::Destroyed(sandbox.to_owned())),
            // The next Hello names it.
            false => tracing::error!(sandbox, "a sandbox could not be destroyed; it stays in custody"),
        }
    }
}
