//! The scheduler: the only one that decides, and the only one that appends to the log.
//!
//! `engine` holds the state and the committer; `clients`, `admin` and `workers` are the gRPC services; `dispatch` and `timers` give out
//! leases and take them back; `archive` and `read` are the way of an ended batch out of memory and back to readers; `collect` removes what
//! nothing refers to.

mod admin;
mod archive;
mod auth;
mod chunks;
mod clients;
pub mod clock;
mod collect;
mod dispatch;
mod engine;
#[cfg(test)]
mod failure_tests;
mod folder;
mod gate;
mod organizations;
mod read;
mod reaper;
mod recovery;
mod refusals;
mod replica;
mod runner;
mod sessions;
mod snapshot;
mod stall;
mod standby;
mod starts;
mod term;
mod timers;
mod trials;
mod waits;
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
        standby::token_floor,
        timers::tick,
        workers::{greet, hear},
    };
}

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use evalgrid_domain::request::Harness;
use evalgrid_store::{Objects, SledIndex, StoredObjects};
use tokio::{net::TcpListener, sync::watch};
use tonic::transport::{Server, server::TcpIncoming};

pub use evalgrid_workflow::{Limits, ProviderLimits, admission::MAX_CREATE_BURST};
pub use folder::{FolderError, Tokens};
pub use recovery::{OpenError, RebuildError, RecoverySummary, rebuild_index};
pub use standby::CellOptions;

use crate::{
    clock::Machine,
    engine::{LockHeld, OnLogFailure},
    folder::Folder,
    gate::Gate,
    replica::FetchPart,
    standby::Cell,
    term::{Ended, Ground, LAST_COMMIT_DEADLINE, Term},
};

/// After this long of silence the other side is asked whether it still lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long open calls may take to end at shutdown before they are cut.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// A snapshot per this many bytes of log: what a start has to read at most, beside the snapshot, and a second's work at full load.
pub const SNAPSHOT_BYTES: u64 = 64 * 1024 * 1024;

/// A heartbeat takes milliseconds, on a busy machine a few tens of them.
pub const MIN_LEASE: Duration = Duration::from_millis(100);
/// Workers believe in no longer one; trials of a machine that is gone should not wait for longer either.
pub const MAX_LEASE: Duration = Duration::from_secs(3600);

/// How a scheduler is set up.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// The data folder.
    pub data: PathBuf,
    /// How long a silent worker keeps its leases.
    pub lease: Duration,
    /// Names of sandboxes that may be asked for, each with the provider that really runs it.
    pub sandbox_map: BTreeMap<String, String>,
    /// Agents that the workers have, each with its version (`unknown` for the command harness).
    pub harnesses: BTreeMap<Harness, String>,
    /// How long a trial waits for the worker that has its sandbox.
    pub affinity_grace: Duration,
    /// Values of variables that profiles may name.
    pub environment: BTreeMap<String, String>,
    /// The cell's log in Redis; None: in the data folder, which then holds everything.
    pub cell: Option<CellOptions>,
    /// Where the objects are: a folder or `s3://bucket/prefix`; None: in the data folder. All schedulers of a cell share them.
    pub objects: Option<String>,
    /// `AWS_*` variables, for objects in S3.
    pub aws: BTreeMap<String, String>,
    /// Tokens that the operator has chosen.
    pub tokens: Tokens,
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
    /// The log could not be followed, or the cell not be taken over.
    #[error(transparent)]
    Follow(#[from] OpenError),
    /// The last records did not become durable in time.
    #[error("the log did not finish its last group within {LAST_COMMIT_DEADLINE:?}")]
    LastCommit,
}

/// A scheduler that does not serve yet.
pub struct Scheduler {
    options: SchedulerOptions,
    support: evalgrid_domain::request::Support,
    folder: Folder,
    objects: Arc<dyn Objects>,
    fetch: FetchPart,
    role: Role,
    recovery: Option<RecoverySummary>,
    first_key: Option<String>,
}

/// What this process is to its cell.
enum Role {
    /// The only scheduler there can be: it has the folder's lock.
    Only(Box<Term>),
    /// One of several, in turns.
    OneOf(Arc<Cell>, Arc<SledIndex>),
}

impl Scheduler {
    /// Opens the data folder and recovers; on the very first start it creates the organization `default` and its key. With a log in Redis it
    /// connects, and does the rest once it is the active scheduler.
    pub async fn open(options: SchedulerOptions) -> Result<Scheduler, OpenError> {
        if !(MIN_LEASE..=MAX_LEASE).contains(&options.lease) {
            return Err(OpenError::Lease(options.lease));
        }
        let support = recovery::support(&options.sandbox_map, &options.harnesses)?;
        let world = Machine::shared();
        let folder = Folder::open(&options.data, &options.tokens, world.as_ref())?;
        let objects: Arc<dyn Objects> = Arc::new(match &options.objects {
            Some(location) => StoredObjects::at(location, options.aws.clone())?,
            None => StoredObjects::in_folder(&folder.path().join("objects"))?,
        });
        let fetch = snapshot::fetch_parts(objects.clone(), tokio::runtime::Handle::current());
        let (role, recovery, first_key) = match &options.cell {
            None => {
                let (data, bytes, fetch) = (folder.path().to_owned(), options.snapshot_bytes, fetch.clone());
                let recovered = blocking(move || recovery::recover(&data, bytes, &fetch)).await?;
                let ground = Ground {
                    core: recovered.core,
                    log: Box::new(recovered.log),
                    tenure: Arc::new(LockHeld),
                    on_failure: OnLogFailure::EndProcess,
                };
                let (term, first_key) =
                    Term::begin(ground, recovered.index, objects.clone(), &folder, world, options.limits.clone()).await?;
                (Role::Only(Box::new(term)), Some(recovered.summary), first_key)
            }
            Some(cell) => {
                check_shared(&options)?;
                let (cell, data) = (cell.clone(), folder.path().join("index"));
                let opened = blocking(move || Ok((Cell::connect(cell)?, SledIndex::open(&data)?.0)));
                let (cell, index) = opened.await?;
                (Role::OneOf(Arc::new(cell), Arc::new(index)), None, None)
            }
        };
        Ok(Scheduler {
            options,
            support,
            folder,
            objects,
            fetch,
            role,
            recovery,
            first_key,
        })
    }

    /// The secret of the first key, on the very first start only, and only of a scheduler that is alone.
    pub fn first_key(&self) -> Option<&str> {
        self.first_key.as_deref()
    }

    /// What was found in the data folder, or what the cell's Redis keeps.
    pub fn recovery(&self) -> String {
        match (&self.recovery, &self.role) {
            (Some(summary), _) => summary.to_string(),
            (None, Role::OneOf(cell, _)) => cell.durability(),
            (None, Role::Only(_)) => String::new(),
        }
    }

    /// Serves gRPC until `shutdown` says so; then everything acknowledged is durable.
    pub async fn serve(self, listener: TcpListener, shutdown: watch::Receiver<bool>) -> Result<(), ServeError> {
        let Scheduler {
            options,
            support,
            folder,
            objects,
            fetch,
            role,
            ..
        } = self;
        let (gate, routes) = Gate::new().await?;
        let (drained, until_drained) = watch::channel(false);
        let server = tokio::spawn(front(routes, listener, shutdown.clone(), drained));
        let serve = async |term: Term| {
            term.serve(&options, support.clone(), &folder, &gate, shutdown.clone(), until_drained.clone())
                .await
        };
        match role {
            Role::Only(term) => {
                serve(*term).await?;
            }
            Role::OneOf(cell, index) => loop {
                let (follow, rows, parts) = (cell.clone(), index.clone(), fetch.clone());
                let (door, stop) = (gate.clone(), shutdown.clone());
                let Some(ground) = blocking(move || follow.follow(&rows, &parts, &door, &stop)).await? else {
                    break;
                };
                let world = Machine::shared();
                let (term, first_key) =
                    match Term::begin(ground, index.clone(), objects.clone(), &folder, world, options.limits.clone()).await {
                        Ok(begun) => begun,
                        // Deposed before it began.
                        Err(OpenError::Stopped) => continue,
                        Err(error) => return Err(error.into()),
                    };
                if first_key.is_some() {
                    let file = folder.path().join(folder::API_KEY);
                    tracing::info!("the cell is new; its first API key is kept in {}", file.display());
                }
                match serve(term).await? {
                    Ended::Stopped => break,
                    Ended::SteppedDown => tracing::warn!("this scheduler has stepped down and follows"),
                }
            },
        }
        server.await.map_err(|_| ServeError::LastCommit)?
    }
}

/// What all schedulers of a cell must have in common.
fn check_shared(options: &SchedulerOptions) -> Result<(), OpenError> {
    if options.objects.is_none() {
        return Err(OpenError::NotShared(
            "with a log in Redis the objects must lie where every scheduler of the cell finds them: name the place with --objects",
        ));
    }
    if options.tokens.admin.is_none() || options.tokens.worker.is_none() {
        return Err(OpenError::NotShared(
            "with a log in Redis every scheduler of the cell must know the same tokens: set EVALGRID_ADMIN_TOKEN and EVALGRID_WORKER_TOKEN",
        ));
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, OpenError> + Send + 'static) -> Result<T, OpenError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| OpenError::Stopped)?
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
