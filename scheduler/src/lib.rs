//! The scheduler: the only one that decides, and the only one that appends to the log.
//!
//! `engine` holds the state and the committer; `clients`, `admin` and `workers` are the gRPC services; `dispatch` and `timers` give out
//! leases and take them back; `archive` and `read` are the way of an ended batch out of memory and back to readers.

mod admin;
mod archive;
mod auth;
mod chunks;
mod clients;
pub mod clock;
mod dispatch;
mod engine;
mod folder;
mod gate;
mod read;
mod reaper;
mod recovery;
mod replica;
mod sessions;
mod snapshot;
mod term;
mod timers;
mod workers;

/// The scheduler's loop without threads, clocks and wires, for the simulator: the very code that serves.
pub mod heart {
    pub use crate::{
        dispatch::{Variables, dispatch},
        engine::Core,
        read::row_key,
        replica::{FetchPart, Replica},
        sessions::{MAX_OUTBOUND, Outbound},
        snapshot::save,
        timers::tick,
        workers::{greet, hear},
    };
}

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use evalgrid_store::{Index, Objects, StoredObjects};
use tokio::{net::TcpListener, sync::watch};
use tonic::transport::{Server, server::TcpIncoming};

pub use evalgrid_workflow::{Limits, ProviderLimits, admission::MAX_CREATE_BURST};
pub use folder::FolderError;
pub use recovery::{OpenError, RebuildError, RecoverySummary, rebuild_index};

use crate::{
    clock::Machine,
    engine::{LockHeld, OnLogFailure},
    folder::Folder,
    gate::Gate,
    term::{Ended, Ground, LAST_COMMIT_DEADLINE, Term},
};

/// After this long of silence the other side is asked whether it still lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long open calls may take to end at shutdown before they are cut.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// A snapshot per this many bytes of log: what a start has to read at most, beside the snapshot, and a second's work at full load.
pub const SNAPSHOT_BYTES: u64 = 64 * 1024 * 1024;

/// How a scheduler is set up.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// The data folder.
    pub data: PathBuf,
    /// How long a silent worker keeps its leases.
    pub lease: Duration,
    /// Names of sandboxes that may be asked for, each with the provider that really runs it.
    pub sandbox_map: BTreeMap<String, String>,
    /// How long a trial waits for the worker that has its sandbox.
    pub affinity_grace: Duration,
    /// Values of variables that profiles may name.
    pub environment: BTreeMap<String, String>,
    /// A snapshot is taken whenever this many bytes of log have gathered; [`SNAPSHOT_BYTES`] unless there is a reason.
    pub snapshot_bytes: u64,
    /// How much may run at once, per provider account and per model key.
    pub limits: Limits,
}

/// Serving has failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The gRPC server.
    #[error("the gRPC server failed: {0}")]
    Grpc(#[from] tonic::transport::Error),
    /// The descriptors for reflection.
    #[error("gRPC reflection could not be set up: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The last records did not become durable in time.
    #[error("the log did not finish its last group within {LAST_COMMIT_DEADLINE:?}")]
    LastCommit,
}

/// A recovered scheduler that does not serve yet.
pub struct Scheduler {
    options: SchedulerOptions,
    support: evalgrid_domain::request::Support,
    folder: Folder,
    term: Term,
    recovery: RecoverySummary,
    first_key: Option<String>,
}

impl Scheduler {
    /// Opens the data folder, recovers, and on the very first start creates the organization `default` and its key.
    pub async fn open(options: SchedulerOptions) -> Result<Scheduler, OpenError> {
        let support = recovery::support(&options.sandbox_map)?;
        let world = Machine::shared();
        let folder = Folder::open(&options.data, world.as_ref())?;
        let objects: Arc<dyn Objects> = Arc::new(StoredObjects::in_folder(&folder.path().join("objects"))?);
        let fetch = snapshot::fetch_parts(objects.clone(), tokio::runtime::Handle::current());
        let data = folder.path().to_owned();
        let snapshot_bytes = options.snapshot_bytes;
        let recovered = tokio::task::spawn_blocking(move || recovery::recover(&data, snapshot_bytes, &fetch))
            .await
            .map_err(|_| OpenError::Stopped)??;
        let ground = Ground {
            core: recovered.core,
            log: Box::new(recovered.log),
            tenure: Arc::new(LockHeld),
            on_failure: OnLogFailure::EndProcess,
        };
        let index: Arc<dyn Index> = recovered.index;
        let (term, first_key) = Term::begin(ground, index, objects, &folder, world, options.limits.clone()).await?;
        Ok(Scheduler {
            options,
            support,
            folder,
            term,
            recovery: recovered.summary,
            first_key,
        })
    }

    /// The secret of the first key, on the very first start only.
    pub fn first_key(&self) -> Option<&str> {
        self.first_key.as_deref()
    }

    /// What was found in the data folder.
    pub fn recovery(&self) -> &RecoverySummary {
        &self.recovery
    }

    /// Serves gRPC until `shutdown` says so; then everything acknowledged is durable.
    pub async fn serve(self, listener: TcpListener, shutdown: watch::Receiver<bool>) -> Result<(), ServeError> {
        let (gate, routes) = Gate::new().await?;
        let (drained, until_drained) = watch::channel(false);
        let server = tokio::spawn(front(routes, listener, shutdown.clone(), drained));
        let served = self
            .term
            .serve(&self.options, self.support, &self.folder, &gate, shutdown, until_drained)
            .await;
        match served? {
            Ended::Stopped => {}
            // The lock on a folder is never lost.
            Ended::SteppedDown => return Err(ServeError::LastCommit),
        }
        server.await.map_err(|_| ServeError::LastCommit)?
    }
}

/// The server itself, from now until `shutdown`; `drained` tells that no call is open any more, or has been for too long.
async fn front(
    routes: tonic::service::Routes,
    listener: TcpListener,
    shutdown: watch::Receiver<bool>,
    drained: watch::Sender<bool>,
) -> Result<(), ServeError> {
    let mut stop = shutdown.clone();
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .add_routes(routes)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async move {
            let _ = stop.wait_for(|stop| *stop).await;
        });
    // A graceful end waits for idle connections; a deadline behind it does not.
    let mut stop = shutdown;
    let served = tokio::select! {
        served = server => served,
        () = async {
            let _ = stop.wait_for(|stop| *stop).await;
            tokio::time::sleep(DRAIN_DEADLINE).await;
        } => Ok(()),
    };
    drained.send_replace(true);
    served.map_err(ServeError::from)
}
