//! A scheduler small enough to script: a real gRPC server on loopback that hands out leases and shows what comes back.
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    collections::{BTreeMap, HashMap},
    error::Error,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use evalgrid_domain::{evidence::TrialEvidence, request::decode_start};
use evalgrid_executor::ExecutorOptions;
use evalgrid_proto::v1::{
    Ack, AwaitsReply, Destroy, Evidence, FromWorker, HeartbeatReply, Hello, Lease, ObjectChunk, ObjectRef, PutObjectChunk, RecordedStep,
    Report, Revoke, StepRecord, ToWorker, TrialOutcome, Welcome, WorkerObjectRequest,
    evidence::Place,
    from_worker, to_worker,
    workers_server::{Workers, WorkersServer},
};
use evalgrid_sandbox::{DockerImage, Limits, Network, ProcessProvider, SandboxProvider as _};
use evalgrid_worker::{DockerPolicy, DockerUse, ProcessPolicy, ToolOptions, WorkerError, WorkerOptions};
use futures::Stream;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tonic_health::{ServingStatus, server::HealthReporter};

/// Nothing here takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const TOKEN: &str = "worker-token";
const ORGANIZATION: &str = "org_test";

pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("waited too long for {what}"))
}

type Objects = Arc<Mutex<HashMap<String, Bytes>>>;

struct Service {
    sessions: mpsc::UnboundedSender<Session>,
    objects: Objects,
}

#[tonic::async_trait]
impl Workers for Service {
    type WorkStream = Pin<Box<dyn Stream<Item = Result<ToWorker, Status>> + Send>>;
    type GetObjectStream = Pin<Box<dyn Stream<Item = Result<ObjectChunk, Status>> + Send>>;

    async fn work(&self, request: Request<Streaming<FromWorker>>) -> Result<Response<Self::WorkStream>, Status> {
        assert_eq!(request.metadata().get("authorization").unwrap(), &format!("Bearer {TOKEN}"));
        let mut incoming = request.into_inner();
        let (to_worker, outgoing) = mpsc::channel(64);
        let sessions = self.sessions.clone();
        tokio::spawn(async move {
            if let Ok(Some(FromWorker {
                message: Some(from_worker::Message::Hello(hello)),
            })) = incoming.message().await
            {
                let _ = sessions.send(Session::new(hello, incoming, to_worker));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn put_object(&self, request: Request<Streaming<PutObjectChunk>>) -> Result<Response<ObjectRef>, Status> {
        let mut chunks = request.into_inner();
        let mut bytes = Vec::new();
        let mut first = true;
        while let Some(chunk) = chunks.message().await? {
            assert_eq!(chunk.organization_id, if first { ORGANIZATION } else { "" });
            first = false;
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(Response::new(put(&self.objects, bytes.into())))
    }

    async fn get_object(&self, request: Request<WorkerObjectRequest>) -> Result<Response<Self::GetObjectStream>, Status> {
        let name = request.into_inner().object.unwrap().sha256;
        let bytes = self
            .objects
            .lock()
            .unwrap()
            .get(&name)
            .cloned()
            .ok_or_else(|| Status::not_found(name))?;
        let chunks: Vec<_> = bytes
            .chunks(1_000)
            .map(|chunk| {
                Ok(ObjectChunk {
                    data: Bytes::copy_from_slice(chunk),
                })
            })
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks))))
    }
}

fn put(objects: &Objects, bytes: Bytes) -> ObjectRef {
    let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let size = bytes.len() as u64;
    objects.lock().unwrap().insert(sha256.clone(), bytes);
    ObjectRef { sha256, size }
}

/// The scripted scheduler, and the folder of its worker.
pub struct Grid {
    address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<Session>,
    objects: Objects,
    server: JoinHandle<()>,
    health: HealthReporter,
    pub folder: tempfile::TempDir,
}

impl Grid {
    pub async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, sessions) = mpsc::unbounded_channel();
        let objects = Objects::default();
        let service = WorkersServer::new(Service {
            sessions: sender,
            objects: objects.clone(),
        });
        let (health, health_service) = tonic_health::server::health_reporter();
        let server = tokio::spawn(async move {
            Server::builder()
                .add_service(health_service)
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self {
            address,
            sessions,
            objects,
            server,
            health,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// An executor on the grid's folder.
    pub fn executor(&self) -> Executor {
        self.executor_of(&[self])
    }

    /// Says whether this is the active scheduler of its cell.
    pub async fn serves(&self, serves: bool) {
        let status = match serves {
            true => ServingStatus::Serving,
            false => ServingStatus::NotServing,
        };
        self.health.set_service_status("", status).await;
    }

    /// An executor on the grid's folder, of a cell of several schedulers.
    pub fn executor_of(&self, cell: &[&Grid]) -> Executor {
        let (stop, shutdown) = watch::channel(false);
        let worker = WorkerOptions {
            work: self.folder.path().join("worker"),
            schedulers: cell.iter().map(|grid| format!("http://{}", grid.address)).collect(),
            worker_token: TOKEN.into(),
            slots: 3,
            process_sandbox: ProcessPolicy::On,
            docker: DockerUse {
                policy: DockerPolicy::Off,
                image: DockerImage::Name(String::new()),
                cpus: None,
            },
            network: Network::Host,
            supervisor_executable: host(),
            limits: Limits {
                memory_bytes: 1 << 30,
                pids: 256,
            },
            tools: ToolOptions {
                folder: self.folder.path().join("worker/tools"),
                ..ToolOptions::default()
            },
        };
        let options = ExecutorOptions {
            worker,
            keep_failed: Duration::ZERO,
        };
        // A runtime of its own dies as a process does: all of it at once.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        Executor {
            task: runtime.spawn(evalgrid_executor::run(options, shutdown)),
            stop,
            runtime: Some(runtime),
        }
    }

    /// The next connection, before it is welcomed.
    pub async fn connection(&mut self) -> Session {
        soon("a connection", self.sessions.recv()).await.unwrap()
    }

    /// The next connection, welcomed with a long lease.
    pub async fn session(&mut self) -> Session {
        let mut session = self.connection().await;
        session.welcome(30_000).await;
        session
    }

    /// A lease of the only trial of a request with one case and one variant, in a process sandbox.
    pub fn lease(&self, token: u64, request: &Value) -> Lease {
        let request = decode_start(request).unwrap_or_else(|issues| panic!("{issues:?}"));
        Lease {
            token,
            organization_id: ORGANIZATION.into(),
            trial_id: format!("trial_{token}"),
            ordinal: 1,
            case_index: 0,
            variant_index: 0,
            request: Some(put(&self.objects, serde_json::to_vec(&request).unwrap().into())),
            sandbox: {
                // Unique on this machine: tests share its cgroups.
                static NAMES: AtomicU64 = AtomicU64::new(0);
                format!("sandbox-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
            },
            provider: "process".into(),
            adopt: false,
            steps: Vec::new(),
            variables: HashMap::new(),
            model_key: String::new(),
            credential: HashMap::new(),
            batch_id: "batch_test".into(),
            waiting_since_ms: 0,
        }
    }

    /// The evidence of an outcome, wherever it is.
    pub fn evidence(&self, outcome: &TrialOutcome) -> TrialEvidence {
        self.placed(outcome.evidence.as_ref().unwrap())
    }

    /// What was reported beside its event, or with it.
    pub fn placed<T: DeserializeOwned>(&self, evidence: &Evidence) -> T {
        let bytes = match evidence.place.as_ref().unwrap() {
            Place::Inline(bytes) => {
                assert!(bytes.len() <= 16 << 10);
                bytes.clone()
            }
            Place::Object(object) => self.object(&object.sha256),
        };
        serde_json::from_slice(&bytes).unwrap()
    }

    /// An outcome and its evidence without what another run of the same records tells otherwise: how long was waited.
    pub fn bare(&self, outcome: &TrialOutcome) -> (TrialOutcome, TrialEvidence) {
        let evidence = TrialEvidence {
            timing: None,
            ..self.evidence(outcome)
        };
        let outcome = TrialOutcome {
            sandbox_ms: 0,
            evidence: None,
            ..outcome.clone()
        };
        (outcome, evidence)
    }

    pub fn object(&self, sha256: &str) -> Bytes {
        self.objects.lock().unwrap()[sha256].clone()
    }

    pub fn objects(&self) -> usize {
        self.objects.lock().unwrap().len()
    }

    /// Runs a trial from its lease to the free slot.
    pub async fn trial(&mut self, lease: Lease) -> Told {
        let executor = self.executor();
        let mut session = self.session().await;
        session.lease(&lease).await;
        let told = session.until(|told| told.credits == 1).await;
        assert!(self.sandboxes().is_empty(), "everything is gone");
        executor.stop().await;
        told
    }

    /// Folders of sandboxes on the disk.
    pub fn sandboxes(&self) -> Vec<PathBuf> {
        let folders = std::fs::read_dir(self.folder.path().join("worker/process")).unwrap();
        folders.map(|entry| entry.unwrap().path()).filter(|path| is_sandbox(path)).collect()
    }
}

fn is_sandbox(path: &Path) -> bool {
    path.is_dir() && path.file_name().unwrap().to_str().unwrap().starts_with("sandbox-")
}

impl Drop for Grid {
    /// Also destroys the sandboxes that are left: their supervisors outlive this process.
    fn drop(&mut self) {
        self.server.abort();
        let root = self.folder.path().join("worker/process");
        if !root.exists() {
            return;
        }
        // A thread of its own, because the test's runtime cannot be waited for here. Its errors are not worth a panic within a panic.
        let destroyed = std::thread::spawn(move || -> Result<(), Box<dyn Error + Send + Sync>> {
            let provider = ProcessProvider::new(root, Some(host()))?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                for name in provider.list().await? {
                    timeout(PATIENCE, provider.destroy(&name)).await??;
                }
                Ok(())
            })
        });
        match destroyed.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("a sandbox may be left: {error}"),
            Err(_) => eprintln!("a sandbox may be left"),
        }
    }
}

/// The program that supervises.
fn host() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_evalgrid-executor-host"))
}

pub struct Executor {
    task: JoinHandle<Result<(), WorkerError>>,
    stop: watch::Sender<bool>,
    runtime: Option<Runtime>,
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Waited for, so that it makes no sandbox after the grid has destroyed them all; in a thread, because this one has a runtime too.
        if let Some(runtime) = self.runtime.take() {
            let _ = std::thread::spawn(move || runtime.shutdown_timeout(PATIENCE)).join();
        }
    }
}

impl Executor {
    /// As SIGTERM does.
    pub async fn stop(self) {
        self.ask_to_stop();
        self.ended().await;
    }

    /// Asks it to stop, without waiting.
    pub fn ask_to_stop(&self) {
        self.stop.send(true).unwrap();
    }

    pub async fn ended(mut self) {
        soon("the executor's end", &mut self.task).await.unwrap().unwrap();
    }

    /// Why it could not run.
    pub async fn refused(mut self) -> String {
        soon("a refusal", &mut self.task).await.unwrap().unwrap_err().to_string()
    }

    /// The nearest to SIGKILL inside one process: no code of it runs any more, and its lock is free.
    pub async fn kill(mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(PATIENCE))
            .await
            .unwrap();
    }
}

/// Whether a report is acknowledged at once.
type Policy = Box<dyn Fn(&Report) -> bool + Send>;

/// One connection of the worker. Answers heartbeats and acknowledges every report, in the background, unless a test says otherwise.
pub struct Session {
    pub hello: Hello,
    to_worker: ToWorkerSender,
    reports: mpsc::UnboundedReceiver<Report>,
    answers: Arc<Mutex<Answers>>,
    listener: JoinHandle<()>,
}

type ToWorkerSender = mpsc::Sender<Result<ToWorker, Status>>;

struct Answers {
    heartbeats: bool,
    acknowledged: Policy,
    /// Numbers of reports without an acknowledgement.
    withheld: Vec<u64>,
    /// Heartbeats so far.
    beats: u64,
}

impl Answers {
    fn to(&mut self, message: &from_worker::Message) -> Option<to_worker::Message> {
        if matches!(message, from_worker::Message::Heartbeat(_)) {
            self.beats += 1;
        }
        match message {
            from_worker::Message::Heartbeat(beat) => self
                .heartbeats
                .then_some(to_worker::Message::Heartbeat(HeartbeatReply { number: beat.number })),
            from_worker::Message::Report(report) if (self.acknowledged)(report) => Some(ack(report.number, Vec::new())),
            from_worker::Message::Report(report) => {
                self.withheld.push(report.number);
                None
            }
            from_worker::Message::Hello(_) => panic!("a second Hello"),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

fn ack(number: u64, stale: Vec<u64>) -> to_worker::Message {
    to_worker::Message::Ack(Ack { number, stale })
}

async fn send(to_worker: &ToWorkerSender, message: to_worker::Message) {
    // The worker may have closed the stream meanwhile.
    let _ = soon("room to send", to_worker.send(Ok(ToWorker { message: Some(message) }))).await;
}

/// What the worker has reported.
#[derive(Debug, Default)]
pub struct Told {
    pub steps: Vec<StepRecord>,
    pub results: Vec<(u64, TrialOutcome)>,
    pub failures: Vec<(u64, i32, String)>,
    /// (token, model key, when to ask again in ms)
    pub throttled: Vec<(u64, String, u64)>,
    pub awaiting: Vec<AwaitsReply>,
    pub destroyed: Vec<String>,
    pub credits: u32,
    pub reports: Vec<Report>,
}

impl Told {
    pub fn outcome(&self) -> &TrialOutcome {
        assert_eq!(self.results.len(), 1, "{:?}", self.failures);
        &self.results[0].1
    }

    pub fn step_names(&self) -> Vec<&str> {
        self.steps.iter().map(|step| step.step.as_str()).collect()
    }

    pub fn recorded(&self) -> Vec<RecordedStep> {
        let record = |step: &StepRecord| RecordedStep {
            step: step.step.clone(),
            outcome: step.outcome,
            result: step.result.clone(),
        };
        self.steps.iter().map(record).collect()
    }

    fn add(&mut self, report: Report) {
        self.steps.extend(report.steps.iter().cloned());
        self.results
            .extend(report.results.iter().map(|result| (result.token, result.outcome.clone().unwrap())));
        self.failures.extend(
            report
                .failures
                .iter()
                .map(|failure| (failure.token, failure.kind, failure.reason.clone())),
        );
        let throttled = report.throttled.iter();
        self.throttled
            .extend(throttled.map(|told| (told.token, told.model_key.clone(), told.retry_after_ms)));
        self.awaiting.extend(report.awaiting.iter().cloned());
        self.destroyed.extend(report.destroyed.iter().cloned());
        self.credits += report.credits;
        self.reports.push(report);
    }
}

impl Session {
    fn new(hello: Hello, mut incoming: Streaming<FromWorker>, to_worker: ToWorkerSender) -> Self {
        let answers = Arc::new(Mutex::new(Answers {
            heartbeats: true,
            acknowledged: Box::new(|_| true),
            withheld: Vec::new(),
            beats: 0,
        }));
        let (sender, reports) = mpsc::unbounded_channel();
        let listener = {
            let (answers, to_worker) = (answers.clone(), to_worker.clone());
            tokio::spawn(async move {
                while let Ok(Some(FromWorker { message: Some(message) })) = incoming.message().await {
                    let answer = answers.lock().unwrap().to(&message);
                    if let Some(answer) = answer {
                        send(&to_worker, answer).await;
                    }
                    if let from_worker::Message::Report(report) = message {
                        let _ = sender.send(report);
                    }
                }
            })
        };
        Self {
            hello,
            to_worker,
            reports,
            answers,
            listener,
        }
    }

    pub async fn welcome(&mut self, lease_ms: u64) {
        self.send(to_worker::Message::Welcome(Welcome {
            lease_ms,
            heartbeat_ms: lease_ms / 5,
        }))
        .await;
    }

    pub async fn send(&mut self, message: to_worker::Message) {
        send(&self.to_worker, message).await;
    }

    pub async fn lease(&mut self, lease: &Lease) {
        self.send(to_worker::Message::Lease(lease.clone())).await;
    }

    pub async fn revoke(&mut self, token: u64) {
        self.send(to_worker::Message::Revoke(Revoke {
            token,
            reason: "cancelled".into(),
        }))
        .await;
    }

    pub async fn destroy(&mut self, sandbox: &str) {
        self.send(to_worker::Message::Destroy(Destroy {
            sandbox: sandbox.into(),
            ..Destroy::default()
        }))
        .await;
    }

    /// How many heartbeats have come.
    pub fn beats(&self) -> u64 {
        self.answers.lock().unwrap().beats
    }

    /// From now on no heartbeat is answered.
    pub fn fall_silent(&mut self) {
        self.answers.lock().unwrap().heartbeats = false;
    }

    /// From now on only such reports are acknowledged.
    pub fn acknowledge_if(&mut self, policy: impl Fn(&Report) -> bool + Send + 'static) {
        self.answers.lock().unwrap().acknowledged = Box::new(policy);
    }

    /// Acknowledges what was withheld.
    pub async fn make_up(&mut self) {
        let withheld = std::mem::take(&mut self.answers.lock().unwrap().withheld);
        for number in withheld {
            self.send(ack(number, Vec::new())).await;
        }
    }

    pub async fn ack(&mut self, number: u64, stale: Vec<u64>) {
        self.send(ack(number, stale)).await;
    }

    /// The next report. `None`: the worker has closed the stream.
    pub async fn report(&mut self) -> Option<Report> {
        soon("a report", self.reports.recv()).await
    }

    /// Listens until `enough`.
    pub async fn until(&mut self, enough: impl Fn(&Told) -> bool) -> Told {
        let mut told = Told::default();
        while !enough(&told) {
            told.add(self.report().await.expect("the worker stays"));
        }
        told
    }

    /// Listens until the worker closes the stream.
    pub async fn closed(mut self) -> Told {
        let mut told = Told::default();
        while let Some(report) = self.report().await {
            told.add(report);
        }
        told
    }
}

/// A start request with one case and one variant of the command harness. `case` and `profile` are merged in.
pub fn request(run: &str, case: Value, profile: Value) -> Value {
    let mut whole = serde_json::json!({
        "suite": { "id": "s", "prompt": "Do {{what}}" },
        "cases": [{ "id": "c", "variables": { "what": "it" } }],
        "variants": [{ "harness": "command", "model": "m", "sandbox": "process", "profile": { "name": "p", "files": {}, "run": run } }],
        "trials": 1,
    });
    for (target, more) in [("/cases/0", case), ("/variants/0/profile", profile)] {
        let target = whole.pointer_mut(target).unwrap().as_object_mut().unwrap();
        target.extend(more.as_object().unwrap().clone());
    }
    whole
}

/// Map of a few strings.
pub fn strings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}
