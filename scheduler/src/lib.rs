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
mod read;
mod recovery;
mod sessions;
mod timers;
mod workers;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, thread, time::Duration};

use evalgrid_proto::v1::{
    admin_server::AdminServer, auth_server::AuthServer, batches_server::BatchesServer, workers_server::WorkersServer,
};
use evalgrid_store::{Objects, StoredObjects};
use tokio::{net::TcpListener, sync::watch};
use tonic::transport::{Server, server::TcpIncoming};

pub use folder::FolderError;
pub use recovery::{OpenError, RebuildError, RecoverySummary, rebuild_index};

use crate::{
    admin::AdminService, auth::SharedToken, clients::ClientsService, clock::Machine, engine::Engine, folder::Folder, read::Reader,
    workers::WorkersService,
};

/// Batches may bring 64 MiB, and the envelope around them.
const MAX_CLIENT_MESSAGE_BYTES: usize = 64 * 1024 * 1024 + 64 * 1024;
/// A report holds 256 KiB of steps, or results with their inline evidence.
const MAX_WORKER_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// After this long of silence the other side is asked whether it still lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long open calls may take to end at shutdown before they are cut.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// How long the last commit group may take at shutdown.
const LAST_COMMIT_DEADLINE: Duration = Duration::from_secs(10);

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
    engine: Engine,
    committer: thread::JoinHandle<()>,
    reader: Reader,
    recovery: RecoverySummary,
    first_key: Option<String>,
}

impl Scheduler {
    /// Opens the data folder, recovers, and on the very first start creates the organization `default` and its key.
    pub async fn open(options: SchedulerOptions) -> Result<Scheduler, OpenError> {
        let support = recovery::support(&options.sandbox_map)?;
        let world = Machine::shared();
        let folder = Folder::open(&options.data, world.as_ref())?;
        let data = folder.path().to_owned();
        let recovered = tokio::task::spawn_blocking(move || recovery::recover(&data))
            .await
            .map_err(|_| OpenError::Stopped)??;
        let objects: Arc<dyn Objects> = Arc::new(StoredObjects::in_folder(&folder.path().join("objects"))?);
        let (engine, committer) = Engine::start(recovered.core, recovered.log, world).map_err(OpenError::Thread)?;
        let reader = Reader {
            engine: engine.clone(),
            index: recovered.index,
            objects,
        };
        let mut scheduler = Scheduler {
            options,
            support,
            folder,
            engine,
            committer,
            reader,
            recovery: recovered.summary,
            first_key: None,
        };
        scheduler.engine.turn(|core| {
            let events = evalgrid_workflow::decide::catch_up(&core.state, core.now_ms());
            core.commit_all(events);
        });
        scheduler.first_start().await?;
        Ok(scheduler)
    }

    /// The secret of the first key, on the very first start only.
    pub fn first_key(&self) -> Option<&str> {
        self.first_key.as_deref()
    }

    /// What was found in the data folder.
    pub fn recovery(&self) -> &RecoverySummary {
        &self.recovery
    }

    async fn first_start(&mut self) -> Result<(), OpenError> {
        let (organizations, _) = self.engine.turn(|core| core.state.organization_count());
        if organizations > 0 {
            return Ok(());
        }
        // The file first: a crash in between leaves a key that opens nothing and is replaced, never an organization without a key.
        let secret = admin::new_secret(self.engine.world());
        self.folder.write_secret(folder::API_KEY, &secret)?;
        let created = admin::create_key(&self.engine, "default", "first key", Vec::new(), &secret).await;
        created.map_err(|status| OpenError::FirstKey(status.message().to_owned()))?;
        self.first_key = Some(secret);
        Ok(())
    }

    /// Serves gRPC until `shutdown` says so; then everything acknowledged is durable.
    pub async fn serve(self, listener: TcpListener, shutdown: watch::Receiver<bool>) -> Result<(), ServeError> {
        let Scheduler {
            options,
            support,
            folder,
            engine,
            committer,
            reader,
            ..
        } = self;
        let variables = Arc::new(options.environment);
        let clients = ClientsService::new(reader.clone(), support, variables.clone(), shutdown.clone());
        let workers = WorkersService {
            engine: engine.clone(),
            objects: reader.objects.clone(),
            token: SharedToken::new(folder.worker_token()),
            variables: variables.clone(),
            lease: options.lease,
            shutdown: shutdown.clone(),
        };
        let admin = AdminService {
            engine: engine.clone(),
            token: SharedToken::new(folder.admin_token()),
        };
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<BatchesServer<ClientsService>>().await;
        health.set_serving::<WorkersServer<WorkersService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(evalgrid_proto::DESCRIPTORS)
            .build_v1()?;

        let archiver = tokio::spawn(archive::archive_loop(reader, shutdown.clone()));
        let timers = tokio::spawn(timers::timer_loop(
            engine.clone(),
            variables,
            options.lease,
            options.affinity_grace,
            shutdown.clone(),
        ));
        let mut stop = shutdown.clone();
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .http2_keepalive_timeout(Some(KEEP_ALIVE))
            .add_service(health_service)
            .add_service(reflection)
            .add_service(
                BatchesServer::new(clients.clone())
                    .max_decoding_message_size(MAX_CLIENT_MESSAGE_BYTES)
                    .max_encoding_message_size(MAX_CLIENT_MESSAGE_BYTES),
            )
            .add_service(AuthServer::new(clients))
            .add_service(AdminServer::new(admin))
            .add_service(WorkersServer::new(workers).max_decoding_message_size(MAX_WORKER_MESSAGE_BYTES))
            .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async move {
                let _ = stop.wait_for(|stop| *stop).await;
            });
        // A graceful end waits for idle connections; a deadline behind it does not.
        let mut stop = shutdown.clone();
        let served = tokio::select! {
            served = server => served,
            () = async {
                let _ = stop.wait_for(|stop| *stop).await;
                tokio::time::sleep(DRAIN_DEADLINE).await;
            } => Ok(()),
        };
        timers.abort();
        // Whatever it does not get done is done at the next start.
        let _ = tokio::time::timeout(DRAIN_DEADLINE, archiver).await;
        engine.stop();
        let ended = tokio::task::spawn_blocking(move || committer.join());
        match tokio::time::timeout(LAST_COMMIT_DEADLINE, ended).await {
            Ok(Ok(Ok(()))) => {}
            _ => return Err(ServeError::LastCommit),
        }
        served.map_err(ServeError::from)
    }
}
