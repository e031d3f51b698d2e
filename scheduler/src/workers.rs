//! The service for workers: one stream each, leases down, grouped facts up, one acknowledgement per group once it is durable.

use std::{collections::BTreeSet, pin::Pin, sync::Arc, time::Duration};

use evalgrid_domain::ids::OrgId;
use evalgrid_proto::v1::{self, FromWorker, Hello, Report, ToWorker, from_worker, to_worker::Message, workers_server::Workers};
use evalgrid_store::Objects;
use evalgrid_workflow::{
    Chance,
    decide::{self, Refusal},
};
use futures::Stream;
use tokio::sync::{mpsc, watch};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    auth::{SharedToken, stopping},
    chunks,
    clock::World,
    dispatch::{Variables, dispatch},
    engine::{Core, Engine},
    reaper,
    sessions::{MAX_OUTBOUND, Outbound},
};

/// A worker that says nothing after connecting is not one.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// Two may be lost, and the third still comes in time; a lease shorter than three of them would be a coin that is tossed.
pub const HEARTBEATS_PER_LEASE: u64 = 5;
/// An object's stream that stalls this long is cut.
const OBJECT_DEADLINE: Duration = Duration::from_secs(120);
/// Longest worker id, incarnation, boot id or provider name.
const MAX_NAME_BYTES: usize = 128;
/// More slots than any one machine can serve.
const MAX_SLOTS: u32 = 10_000;

/// Chance for one turn.
pub fn chance(world: &dyn World) -> Chance {
    let mut seed = [0; 8];
    world.random(&mut seed);
    Chance::new(u64::from_le_bytes(seed))
}

/// The service.
#[derive(Clone)]
pub struct WorkersService {
    /// State.
    pub engine: Engine,
    /// Evidence.
    pub objects: Arc<dyn Objects>,
    /// Who may call.
    pub token: SharedToken,
    /// What profiles may name.
    pub variables: Arc<Variables>,
    /// How long a silent worker keeps its leases.
    pub lease: Duration,
    /// Ends the streams.
    pub shutdown: watch::Receiver<bool>,
}

type WorkStream = Pin<Box<dyn Stream<Item = Result<ToWorker, Status>> + Send>>;

#[tonic::async_trait]
impl Workers for WorkersService {
    type WorkStream = WorkStream;
    type GetObjectStream = chunks::ChunkStream;

    async fn work(&self, request: Request<Streaming<FromWorker>>) -> Result<Response<WorkStream>, Status> {
        self.token.check(request.metadata(), "workers'")?;
        let mut inbound = request.into_inner();
        let (sender, outbound) = mpsc::channel(MAX_OUTBOUND);
        let service = self.clone();
        // The greeting is awaited inside the task: the response's headers must not wait for the worker's first message.
        tokio::spawn(async move {
            let mut shutdown = service.shutdown.clone();
            let served = async {
                let hello = match tokio::time::timeout(HELLO_DEADLINE, inbound.message()).await {
                    Ok(Ok(Some(FromWorker {
                        message: Some(from_worker::Message::Hello(hello)),
                    }))) => hello,
                    _ => return,
                };
                if let Err(problem) = check_hello(&hello) {
                    tracing::warn!(problem, "a worker's greeting is refused");
                    return;
                }
                let number = service.welcome(&hello, sender);
                service.listen(&hello.worker_id, number, &mut inbound).await;
                service.engine.turn(|core| core.sessions.leave(&hello.worker_id, number));
                tracing::info!(worker_id = hello.worker_id, "a worker's connection has ended");
            };
            tokio::select! {
                () = served => {}
                _ = shutdown.wait_for(|stop| *stop) => {}
            }
        });
        Ok(Response::new(deliver(self.engine.clone(), outbound)))
    }

    async fn put_object(&self, request: Request<Streaming<v1::PutObjectChunk>>) -> Result<Response<v1::ObjectRef>, Status> {
        self.token.check(request.metadata(), "workers'")?;
        let write = chunks::write(self.objects.as_ref(), request.into_inner());
        let reference = tokio::time::timeout(OBJECT_DEADLINE, write).await;
        Ok(Response::new(
            reference.map_err(|_| Status::deadline_exceeded("the object took too long to arrive"))??,
        ))
    }

    async fn get_object(&self, request: Request<v1::WorkerObjectRequest>) -> Result<Response<chunks::ChunkStream>, Status> {
        self.token.check(request.metadata(), "workers'")?;
        let request = request.into_inner();
        let organization: OrgId = request
            .organization_id
            .parse()
            .map_err(|error| Status::invalid_argument(format!("organization_id: {error}")))?;
        let reference = request.object.ok_or_else(|| Status::invalid_argument("object: missing"))?;
        Ok(Response::new(chunks::read(self.objects.as_ref(), &organization, &reference).await?))
    }
}

/// Messages leave in order, each once its position is durable.
fn deliver(engine: Engine, outbound: mpsc::Receiver<Outbound>) -> WorkStream {
    Box::pin(futures::stream::unfold((engine, outbound), |(engine, mut outbound)| async move {
        let (position, message) = outbound.recv().await?;
        let item = match engine.durable(position).await {
            Ok(()) => Ok(ToWorker { message: Some(message) }),
            Err(_) => Err(stopping()),
        };
        Some((item, (engine, outbound)))
    }))
}

fn check_hello(hello: &Hello) -> Result<(), &'static str> {
    let names = [&hello.worker_id, &hello.incarnation, &hello.boot_id];
    if names
        .into_iter()
        .chain(&hello.providers)
        .any(|name| name.is_empty() || name.len() > MAX_NAME_BYTES)
    {
        return Err("a name is empty or too long");
    }
    if hello.slots > MAX_SLOTS {
        return Err("too many slots");
    }
    Ok(())
}

/// A worker has come: what its greeting proves is recorded, and it is told what has changed meanwhile. Answers with the number of its
/// connection.
pub fn greet(
    core: &mut Core,
    hello: &Hello,
    outbound: mpsc::Sender<Outbound>,
    lease_ms: u64,
    chance: &mut Chance,
    variables: &Variables,
) -> u64 {
    let welcome = v1::Welcome {
        lease_ms,
        heartbeat_ms: lease_ms / HEARTBEATS_PER_LEASE,
    };
    let now_ms = core.now_ms();
    let steady_ms = core.steady_ms();
    let number = core.sessions.join(hello, outbound, steady_ms);
    let events = decide::hello_leases(&core.state, hello, chance, now_ms);
    core.commit_all(events);
    let events = decide::hello_sandboxes(&core.state, hello, now_ms);
    core.commit_all(events);
    let position = core.position();
    core.sessions.send(&hello.worker_id, position, Message::Welcome(welcome));
    let ours = |token: &u64| core.state.lease(*token).is_some_and(|lease| lease.worker_id == hello.worker_id);
    let ended: Vec<u64> = hello.held.iter().copied().filter(|token| !ours(token)).collect();
    if !ended.is_empty() && waited_in(core, &hello.worker_id) {
        // A lease that ended with words which the worker does not know to be recorded leaves its sandbox to what waits: for its person, or for
        // its turn. Whose sandbox is whose is not told; those that nobody needs are asked for below.
        let ack = v1::Ack { number: 0, stale: ended };
        core.sessions.send(&hello.worker_id, position, Message::Ack(ack));
    } else {
        for token in ended {
            core.sessions
                .revoke(&hello.worker_id, token, "the lease has ended".into(), position);
        }
    }
    reaper::greet(core, hello, chance);
    dispatch(core, variables);
    number
}

/// Whether something lives in a sandbox of this worker, and nobody works there now.
fn waited_in(core: &Core, worker_id: &str) -> bool {
    let leases = core.state.leases().filter(|(_, lease)| lease.worker_id == worker_id);
    let worked_in: BTreeSet<&str> = leases
        .filter_map(|(_, lease)| core.state.trial(lease.trial)?.sandbox_of(lease.part))
        .collect();
    let mut custody = core.state.custody().filter(|(_, sandbox)| sandbox.worker_id == worker_id);
    custody.any(|(name, _)| decide::needed(&core.state, name) && !worked_in.contains(name))
}

/// Takes one message of a connection. False: the connection is over.
pub fn hear(
    core: &mut Core,
    worker_id: &str,
    number: u64,
    message: from_worker::Message,
    chance: &mut Chance,
    variables: &Variables,
) -> bool {
    let steady_ms = core.steady_ms();
    match core.sessions.current(worker_id, number) {
        Some(session) => session.heard_ms = steady_ms,
        None => return false,
    }
    match message {
        from_worker::Message::Heartbeat(v1::Heartbeat { number }) => {
            core.sessions.send(worker_id, 0, Message::Heartbeat(v1::HeartbeatReply { number }));
        }
        from_worker::Message::Report(message) => report(core, worker_id, number, message, chance, variables),
        from_worker::Message::Hello(_) => {
            tracing::warn!(worker_id, "a second greeting on one stream; the connection is cut");
            return false;
        }
    }
    true
}

/// Records a group of facts. What a token without a lease reports is not recorded, and the worker is told.
fn report(core: &mut Core, worker_id: &str, number: u64, report: Report, chance: &mut Chance, variables: &Variables) {
    let now_ms = core.now_ms();
    let mut stale = Vec::new();
    let mut refuse = |core: &mut Core, token: u64, refusal: Refusal| {
        if refusal != Refusal::Stale {
            tracing::error!(worker_id, token, "a worker's report is refused: {refusal}");
            // The worker lets go of it, and would be refused again the next time: nothing is gained by waiting.
            let end = decide::unacceptable(&core.state, worker_id, token, &refusal, now_ms);
            core.commit_all(end);
        }
        if !stale.contains(&token) {
            stale.push(token);
        }
    };
    for step in report.steps {
        let token = step.token;
        match decide::step(&core.state, worker_id, step, now_ms) {
            Ok(event) => core.commit_all(event),
            Err(refusal) => refuse(core, token, refusal),
        }
    }
    for result in report.results {
        let Some(outcome) = result.outcome else { continue };
        match decide::result(&core.state, worker_id, result.token, outcome, chance, now_ms) {
            Ok(event) => {
                let event = decide::keep_sandbox(&core.state, worker_id, event, result.keep_sandbox_ms, now_ms);
                core.commit_settled(event);
            }
            Err(refusal) => refuse(core, result.token, refusal),
        }
    }
    for failure in report.failures {
        tracing::info!(worker_id, token = failure.token, kind = ?failure.kind(), reason = failure.reason, "an attempt has failed");
        match decide::attempt_failed(&core.state, worker_id, &failure, chance, now_ms) {
            Ok(event) => core.commit_all(event),
            Err(refusal) => refuse(core, failure.token, refusal),
        }
    }
    for throttled in report.throttled {
        let (token, model_key) = (throttled.token, &throttled.model_key);
        tracing::info!(worker_id, token, model_key, "a model's provider has refused");
        match decide::throttled(&core.state, worker_id, &throttled, chance, now_ms) {
            Ok(event) => core.commit(event),
            Err(refusal) => refuse(core, token, refusal),
        }
    }
    for awaits in report.awaiting {
        let token = awaits.token;
        match decide::awaits_reply(&core.state, worker_id, awaits, chance, now_ms) {
            Ok(event) => core.commit(event),
            Err(refusal) => refuse(core, token, refusal),
        }
    }
    for asked in report.asked {
        match decide::job_asked(&core.state, worker_id, asked.token, now_ms) {
            Ok(event) => core.commit_all(event),
            Err(refusal) => refuse(core, asked.token, refusal),
        }
    }
    for job in report.jobs {
        let token = job.token;
        match decide::job_result(&core.state, worker_id, job, chance, now_ms) {
            Ok(event) => core.commit(event),
            Err(refusal) => refuse(core, token, refusal),
        }
    }
    for created in report.created {
        let event = decide::created(&core.state, worker_id, created, now_ms);
        core.commit_all(event);
    }
    for sandbox in report.destroyed {
        let ended = decide::gone_under_lease(&core.state, worker_id, &sandbox, chance, now_ms);
        core.commit_all(ended);
        let events = decide::destroyed(&core.state, &sandbox, worker_id, now_ms);
        core.commit_all(events);
    }
    let position = core.position();
    let ack = v1::Ack {
        number: report.number,
        stale,
    };
    core.sessions.send(worker_id, position, Message::Ack(ack));
    if let Some(session) = core.sessions.current(worker_id, number) {
        session.credits = session.credits.saturating_add(report.credits).min(MAX_SLOTS);
    }
    dispatch(core, variables);
}

impl WorkersService {
    fn welcome(&self, hello: &Hello, outbound: mpsc::Sender<Outbound>) -> u64 {
        let lease_ms = self.lease.as_millis() as u64;
        let mut chance = chance(self.engine.world());
        let (number, _) = self
            .engine
            .turn(|core| greet(core, hello, outbound, lease_ms, &mut chance, &self.variables));
        tracing::info!(worker_id = hello.worker_id, slots = hello.slots, held = hello.held.len(), providers = ?hello.providers, "a worker has come");
        number
    }

    async fn listen(&self, worker_id: &str, number: u64, inbound: &mut Streaming<FromWorker>) {
        loop {
            let message = match inbound.message().await {
                Ok(Some(FromWorker { message: Some(message) })) => message,
                Ok(Some(FromWorker { message: None })) => continue,
                Ok(None) => return,
                Err(status) => {
                    tracing::debug!(worker_id, %status, "the worker's stream broke");
                    return;
                }
            };
            if self.engine.admit().await.is_err() {
                return;
            }
            let mut chance = chance(self.engine.world());
            let (goes_on, _) = self
                .engine
                .turn(|core| hear(core, worker_id, number, message, &mut chance, &self.variables));
            if !goes_on {
                return;
            }
        }
    }
}
