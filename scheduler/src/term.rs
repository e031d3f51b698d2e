//! One term: from the moment this scheduler is the active one of its cell until it stops or steps down.

use std::{sync::Arc, thread, time::Duration};

use evalgrid_proto::v1::{
    admin_server::AdminServer, auth_server::AuthServer, batches_server::BatchesServer, organizations_server::OrganizationsServer,
    runner_server::RunnerServer, workers_server::WorkersServer,
};
use evalgrid_store::{Index, Log, Objects};
use evalgrid_workflow::decide;
use tokio::{sync::watch, task::JoinHandle};
use tonic::service::Routes;

use crate::{
    DRAIN_DEADLINE, OpenError, SchedulerOptions, ServeError, admin,
    admin::AdminService,
    archive,
    auth::SharedToken,
    clients::ClientsService,
    clock::World,
    collect::Collector,
    engine::{Core, Engine, OnLogFailure, Tenure},
    folder::{self, Folder},
    gate::Gate,
    organizations::OrganizationsService,
    read::Reader,
    runner::RunnerService,
    snapshot, stall,
    starts::Admission,
    timers,
    workers::WorkersService,
};

/// Batches may bring 64 MiB, and the envelope around them.
const MAX_CLIENT_MESSAGE_BYTES: usize = 64 * 1024 * 1024 + 64 * 1024;
/// A report holds 256 KiB of steps, or results with their inline evidence.
const MAX_WORKER_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// The same where another scheduler can take over: nobody is served until it does, so only calls that are nearly done are waited for.
const HANDOVER_GRACE: Duration = Duration::from_millis(300);
/// How long the last commit group may take at shutdown.
pub(crate) const LAST_COMMIT_DEADLINE: Duration = Duration::from_secs(10);

/// What a term stands on.
pub struct Ground {
    /// What was recovered.
    pub core: Core,
    /// Where it goes on.
    pub log: Box<dyn Log>,
    /// The right to.
    pub tenure: Arc<dyn Tenure>,
    /// What the end of the log means.
    pub on_failure: OnLogFailure,
}

/// A scheduler that is the active one.
pub struct Term {
    engine: Engine,
    committer: thread::JoinHandle<()>,
    reader: Reader,
    tenure: Arc<dyn Tenure>,
    /// How long open calls may take to end when the process is asked to stop.
    grace: Duration,
}

/// How a term ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The process was asked to stop; everything acknowledged is durable.
    Stopped,
    /// Somebody else may be the active one now.
    SteppedDown,
}

impl Term {
    /// Takes office: what should have followed from the last records follows now. On the very first start of a cell it creates the
    /// organization `default` and its key, and answers with the key's secret.
    pub async fn begin(
        ground: Ground,
        index: Arc<dyn Index>,
        objects: Arc<dyn Objects>,
        folder: &Folder,
        world: Arc<dyn World>,
        limits: evalgrid_workflow::Limits,
    ) -> Result<(Term, Option<String>), OpenError> {
        let tenure = ground.tenure.clone();
        let grace = match ground.on_failure {
            OnLogFailure::EndProcess => DRAIN_DEADLINE,
            OnLogFailure::StepDown => HANDOVER_GRACE,
        };
        let started = Engine::start(ground.core, ground.log, ground.tenure, ground.on_failure, world);
        let (engine, committer) = started.map_err(OpenError::Thread)?;
        let reader = Reader {
            engine: engine.clone(),
            index,
            objects,
            filing: Arc::default(),
        };
        engine.turn(|core| {
            core.state.configure(limits);
            let events = decide::catch_up(&core.state, core.now_ms());
            core.commit_all(events);
        });
        let first_key = match first_start(&engine, folder).await {
            Ok(first_key) => first_key,
            Err(error) => {
                engine.stop();
                // It ends soon, and lets go of the log and of the right to it.
                drop(tokio::task::spawn_blocking(move || committer.join()));
                return Err(error);
            }
        };
        let term = Term {
            engine,
            committer,
            reader,
            tenure,
            grace,
        };
        Ok((term, first_key))
    }

    /// Serves through the gate until `shutdown`, and then until `drained`; or until this scheduler steps down.
    pub async fn serve(
        self,
        options: &SchedulerOptions,
        support: evalgrid_domain::request::Support,
        folder: &Folder,
        gate: &Gate,
        shutdown: watch::Receiver<bool>,
        drained: watch::Receiver<bool>,
    ) -> Result<Ended, ServeError> {
        let Term {
            engine,
            committer,
            reader,
            tenure,
            grace,
        } = self;
        let (stop, stopping) = watch::channel(false);
        let variables = Arc::new(options.environment.clone());
        gate.open(routes(options, support, folder, &reader, variables.clone(), stopping.clone()))
            .await;
        let archiver = tokio::spawn(archive::archive_loop(reader.clone(), stopping.clone()));
        let snapshots = tokio::spawn(snapshot::snapshot_loop(reader, options.snapshot_bytes, stopping.clone()));
        let stalls = tokio::spawn(stall::watch(engine.clone(), gate.clone(), stopping.clone()));
        let timers = tokio::spawn(timers::timer_loop(
            engine.clone(),
            variables,
            options.lease,
            options.affinity_grace,
            stopping,
        ));
        let ended = self::ended(&engine, tenure.as_ref(), shutdown).await;
        stop.send_replace(true);
        engine.turn(|core| core.sessions.end_all());
        // Before the gate closes: it must not be told of this term any more.
        let _ = stalls.await;
        if ended == Ended::Stopped {
            // Open calls may still be answered.
            let _ = tokio::time::timeout(grace, until(drained)).await;
        }
        // Connections may outlive this: nobody finds this term's services through them any more, and what these hold is free.
        gate.close(None).await;
        engine.turn(|core| core.sessions.end_all());
        timers.abort();
        // Whatever they do not get done is done at the next start.
        let _ = tokio::time::timeout(DRAIN_DEADLINE, async { tokio::join!(archiver, snapshots) }).await;
        engine.stop();
        let last: JoinHandle<_> = tokio::task::spawn_blocking(move || {
            committer.join()?;
            tenure.release();
            Ok::<_, Box<dyn std::any::Any + Send>>(())
        });
        match tokio::time::timeout(LAST_COMMIT_DEADLINE, last).await {
            Ok(Ok(Ok(()))) => Ok(ended),
            _ => Err(ServeError::LastCommit),
        }
    }
}

/// Waits until it is over, and says how.
async fn ended(engine: &Engine, tenure: &dyn Tenure, mut shutdown: watch::Receiver<bool>) -> Ended {
    let mut progress = engine.watch();
    let over = async {
        let _ = progress.wait_for(|progress| progress.over).await;
    };
    tokio::select! {
        _ = shutdown.wait_for(|stop| *stop) => Ended::Stopped,
        () = over => Ended::SteppedDown,
        () = tenure.lost() => Ended::SteppedDown,
    }
}

async fn until(mut drained: watch::Receiver<bool>) {
    let _ = drained.wait_for(|done| *done).await;
}

fn routes(
    options: &SchedulerOptions,
    support: evalgrid_domain::request::Support,
    folder: &Folder,
    reader: &Reader,
    variables: Arc<crate::dispatch::Variables>,
    stopping: watch::Receiver<bool>,
) -> Routes {
    let admission = Admission::new(reader.clone(), support, variables.clone());
    let runner = RunnerServer::new(RunnerService::new(admission.clone()))
        .max_decoding_message_size(MAX_CLIENT_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_CLIENT_MESSAGE_BYTES);
    let clients = ClientsService::new(admission, stopping.clone());
    let admin = AdminService {
        engine: reader.engine.clone(),
        token: SharedToken::new(folder.admin_token()),
        collector: Collector::new(
            reader.clone(),
            // Elsewhere other schedulers may keep their archives in the same place, and standbys know parts by heart.
            options.objects.is_none() && options.cell.is_none(),
            stopping.clone(),
        ),
    };
    let workers = WorkersService {
        engine: reader.engine.clone(),
        objects: reader.objects.clone(),
        token: SharedToken::new(folder.worker_token()),
        variables,
        lease: options.lease,
        shutdown: stopping,
    };
    let organizations = OrganizationsService {
        reader: reader.clone(),
        token: SharedToken::new(folder.admin_token()),
    };
    let batches = BatchesServer::new(clients.clone())
        .max_decoding_message_size(MAX_CLIENT_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_CLIENT_MESSAGE_BYTES);
    Routes::new(batches)
        .add_service(runner)
        .add_service(AuthServer::new(clients))
        .add_service(AdminServer::new(admin))
        .add_service(OrganizationsServer::new(organizations).max_decoding_message_size(MAX_CLIENT_MESSAGE_BYTES))
        .add_service(WorkersServer::new(workers).max_decoding_message_size(MAX_WORKER_MESSAGE_BYTES))
}

async fn first_start(engine: &Engine, folder: &Folder) -> Result<Option<String>, OpenError> {
    let (organizations, _) = engine.turn(|core| core.state.organization_count());
    if organizations > 0 {
        return Ok(None);
    }
    // The file first: a crash in between leaves a key that opens nothing yet, never an organization without a key. A file that is there, from
    // such a crash or from a log that is gone, is never overwritten: it may be the only copy of a key that is in use.
    let secret = match folder.secret(folder::API_KEY) {
        Some(kept) => kept,
        None => {
            let fresh = admin::new_secret(engine.world());
            folder.write_secret(folder::API_KEY, &fresh)?;
            fresh
        }
    };
    let created = admin::create_key(engine, "default", "first key", Vec::new(), &secret).await;
    created.map_err(|status| match status.code() {
        tonic::Code::Unavailable => OpenError::Stopped,
        _ => OpenError::FirstKey(status.message().to_owned()),
    })?;
    Ok(Some(secret))
}
