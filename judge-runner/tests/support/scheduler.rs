//! A scheduler small enough to script: it leases one job after the other to a real judge runner, and shows what comes back.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use evalgrid_domain::request::decode_start;
use evalgrid_harness::by_name;
use evalgrid_judge_runner::{JudgeRunnerError, JudgeRunnerOptions, http::HttpOptions};
use evalgrid_proto::v1::{
    Ack, AttemptFailure, Evidence, FromWorker, HeartbeatReply, Hello, JobLease, JobResult, ObjectChunk, ObjectRef, PutObjectChunk, Report,
    ToWorker, Welcome, WorkerObjectRequest,
    evidence::Place,
    from_worker, to_worker,
    workers_server::{Workers, WorkersServer},
};
use evalgrid_sandbox::{DockerImage, Limits, Network, ProcessProvider, SandboxProvider as _};
use evalgrid_worker::{DockerPolicy, DockerUse, ProcessPolicy, ToolOptions, WorkerOptions};
use futures::Stream;
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

/// Nothing here takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The model key of all jobs.
pub const KEY: &str = "sk-this-is-the-secret-key-0123456789";
const LEASE_MS: u64 = 30_000;

/// Waits, not for ever.
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
        let mut incoming = request.into_inner();
        let (to_worker, outgoing) = mpsc::channel(64);
        let sessions = self.sessions.clone();
        tokio::spawn(async move {
            if let Ok(Some(FromWorker {
                message: Some(from_worker::Message::Hello(hello)),
            })) = incoming.message().await
            {
                let _ = sessions.send(Session::welcome(hello, incoming, to_worker).await);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn put_object(&self, request: Request<Streaming<PutObjectChunk>>) -> Result<Response<ObjectRef>, Status> {
        let mut chunks = request.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(Response::new(put(&self.objects, bytes.into())))
    }

    async fn get_object(&self, request: Request<WorkerObjectRequest>) -> Result<Response<Self::GetObjectStream>, Status> {
        let name = request.into_inner().object.unwrap().sha256;
        let bytes = self.objects.lock().unwrap().get(&name).cloned();
        let data = bytes.ok_or_else(|| Status::not_found(name))?;
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(ObjectChunk { data })]))))
    }
}

fn put(objects: &Objects, bytes: Bytes) -> ObjectRef {
    let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let size = bytes.len() as u64;
    objects.lock().unwrap().insert(sha256.clone(), bytes);
    ObjectRef { sha256, size }
}

/// The scripted scheduler, and the folder of its judge runner.
pub struct Grid {
    url: String,
    sessions: mpsc::UnboundedReceiver<Session>,
    objects: Objects,
    server: JoinHandle<()>,
    pub folder: tempfile::TempDir,
}

impl Grid {
    pub async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, sessions) = mpsc::unbounded_channel();
        let objects = Objects::default();
        let service = WorkersServer::new(Service {
            sessions: sender,
            objects: objects.clone(),
        });
        let (_, health) = tonic_health::server::health_reporter();
        let server = tokio::spawn(async move {
            let server = Server::builder().add_service(health).add_service(service);
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self {
            url,
            sessions,
            objects,
            server,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// A judge runner on the grid's folder.
    pub fn runner(&self) -> Runner {
        self.runner_with(|_| {})
    }

    /// Another one.
    pub fn runner_with(&self, change: impl FnOnce(&mut WorkerOptions)) -> Runner {
        let (stop, shutdown) = watch::channel(false);
        let work = self.folder.path().join("worker");
        let mut worker = WorkerOptions {
            schedulers: vec![self.url.clone()],
            worker_token: "token".into(),
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
                folder: work.join("tools"),
                ..ToolOptions::default()
            },
            work,
        };
        change(&mut worker);
        let http = HttpOptions {
            connect: Duration::from_secs(2),
            stall: Duration::from_millis(200),
            ..HttpOptions::default()
        };
        // A runtime of its own dies as a process does: all of it at once.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        Runner {
            task: runtime.spawn(evalgrid_judge_runner::run(JudgeRunnerOptions { worker, http }, shutdown)),
            stop,
            runtime: Some(runtime),
        }
    }

    /// The next connection.
    pub async fn session(&mut self) -> Session {
        soon("a connection", self.sessions.recv()).await.unwrap()
    }

    /// A lease of a job about the only case of a request; the rest is the test's.
    pub fn lease(&self, token: u64, request: &Value) -> JobLease {
        let request = decode_start(request).unwrap_or_else(|issues| panic!("{issues:?}"));
        JobLease {
            token,
            organization_id: "org_test".into(),
            trial_id: "trial_test".into(),
            request: Some(put(&self.objects, serde_json::to_vec(&request).unwrap().into())),
            provider: "process".into(),
            credential: [("apiKey".to_owned(), KEY.to_owned())].into(),
            idempotency_key: "job-7".into(),
            nonce: Bytes::from_static(b"0123456789abcdef"),
            ..JobLease::default()
        }
    }

    /// A JSON, as a lease or a result brings it.
    pub fn object(&self, value: &Value) -> Evidence {
        let object = put(&self.objects, value.to_string().into());
        Evidence {
            place: Some(Place::Object(object)),
        }
    }

    /// The JSON in a result.
    pub fn read(&self, evidence: &Evidence) -> Value {
        match evidence.place.as_ref().unwrap() {
            Place::Inline(bytes) => serde_json::from_slice(bytes).unwrap(),
            Place::Object(object) => serde_json::from_slice(&self.objects.lock().unwrap()[&object.sha256]).unwrap(),
        }
    }

    /// Everything that ever came here.
    pub fn holds(&self, text: &str) -> bool {
        self.objects
            .lock()
            .unwrap()
            .values()
            .any(|bytes| String::from_utf8_lossy(bytes).contains(text))
    }

    /// Loses all objects.
    pub fn forget_objects(&self) {
        self.objects.lock().unwrap().clear();
    }

    /// Stands in for a harness's program: `script` is what it does, in bash, when it is not asked for its version.
    pub fn stand_in(&self, name: &str, script: &str) {
        let install = by_name(name).unwrap().install().unwrap();
        let program = self.folder.path().join("worker/tools").join(install.folder()).join(install.program);
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let version = install.version;
        fs::write(
            &program,
            format!("#!/bin/bash\n[ \"$1\" = --version ] && exec echo {version}\n{script}\n"),
        )
        .unwrap();
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Folders of sandboxes on the disk.
    pub fn sandboxes(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.folder.path().join("worker/process")).unwrap();
        let names = folders.map(|entry| entry.unwrap().path());
        names
            .filter(|path| path.is_dir() && path.file_name().unwrap().to_str().unwrap().starts_with("sandbox-"))
            .collect()
    }
}

/// A sandbox's name that is unique on this machine: tests share its cgroups.
pub fn sandbox_name() -> String {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    format!("sandbox-judge-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
}

impl Drop for Grid {
    /// Also destroys the sandboxes that are left: their supervisors outlive this process.
    fn drop(&mut self) {
        self.server.abort();
        let root = self.folder.path().join("worker/process");
        if !root.exists() {
            return;
        }
        // A thread of its own, because the test's runtime cannot be waited for here.
        let destroyed = std::thread::spawn(move || {
            let provider = ProcessProvider::new(root, Some(host())).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for name in provider.list().await.unwrap() {
                    timeout(PATIENCE, provider.destroy(&name)).await.unwrap().unwrap();
                }
            });
        });
        if destroyed.join().is_err() {
            eprintln!("a sandbox may be left");
        }
    }
}

/// The program that supervises.
fn host() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_evalgrid-judge-runner-host"))
}

pub struct Runner {
    task: JoinHandle<Result<(), JudgeRunnerError>>,
    stop: watch::Sender<bool>,
    runtime: Option<Runtime>,
}

impl Runner {
    /// As SIGTERM does.
    pub async fn stop(mut self) {
        self.stop.send(true).unwrap();
        soon("the judge runner's end", &mut self.task).await.unwrap().unwrap();
    }

    /// The nearest to SIGKILL inside one process: no code of it runs any more, and its lock is free.
    pub async fn kill(mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(PATIENCE))
            .await
            .unwrap();
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // Waited for, so that it makes no sandbox after the grid has destroyed them all; in a thread, because this one has a runtime too.
        if let Some(runtime) = self.runtime.take() {
            let _ = std::thread::spawn(move || runtime.shutdown_timeout(PATIENCE)).join();
        }
    }
}

/// One connection of the judge runner. Heartbeats are answered, and reports acknowledged, in the background.
pub struct Session {
    pub hello: Hello,
    to_worker: mpsc::Sender<Result<ToWorker, Status>>,
    reports: mpsc::UnboundedReceiver<Report>,
    /// Numbers of reports that wait for an acknowledgement, where they do.
    withheld: Arc<Mutex<Option<Vec<u64>>>>,
    listener: JoinHandle<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

/// What the judge runner has reported.
#[derive(Debug, Default)]
pub struct Told {
    /// Tokens of asks that were announced.
    pub asked: Vec<u64>,
    pub results: Vec<JobResult>,
    pub failures: Vec<AttemptFailure>,
    pub destroyed: Vec<String>,
    pub credits: u32,
}

impl Session {
    async fn welcome(hello: Hello, mut incoming: Streaming<FromWorker>, to_worker: mpsc::Sender<Result<ToWorker, Status>>) -> Self {
        let withheld = Arc::new(Mutex::new(None::<Vec<u64>>));
        let (sender, reports) = mpsc::unbounded_channel();
        let (answers, holding) = (to_worker.clone(), withheld.clone());
        let listener = tokio::spawn(async move {
            while let Ok(Some(FromWorker { message: Some(message) })) = incoming.message().await {
                let answer = match &message {
                    from_worker::Message::Heartbeat(beat) => Some(to_worker::Message::Heartbeat(HeartbeatReply { number: beat.number })),
                    from_worker::Message::Report(report) => match &mut *holding.lock().unwrap() {
                        Some(withheld) => {
                            withheld.push(report.number);
                            None
                        }
                        None => Some(ack(report.number)),
                    },
                    from_worker::Message::Hello(_) => panic!("a second Hello"),
                };
                if let Some(answer) = answer {
                    let _ = answers.send(Ok(ToWorker { message: Some(answer) })).await;
                }
                if let from_worker::Message::Report(report) = message {
                    let _ = sender.send(report);
                }
            }
        });
        let session = Self {
            hello,
            to_worker,
            reports,
            withheld,
            listener,
        };
        let welcome = Welcome {
            lease_ms: LEASE_MS,
            heartbeat_ms: LEASE_MS / 5,
        };
        session.send(to_worker::Message::Welcome(welcome)).await;
        session
    }

    async fn send(&self, message: to_worker::Message) {
        // The worker may have closed the stream meanwhile.
        let _ = soon("room to send", self.to_worker.send(Ok(ToWorker { message: Some(message) }))).await;
    }

    pub async fn lease(&self, lease: &JobLease) {
        self.send(to_worker::Message::Job(lease.clone())).await;
    }

    /// From now on nothing is acknowledged.
    pub fn hold_back(&self) {
        *self.withheld.lock().unwrap() = Some(Vec::new());
    }

    /// Acknowledges what was held back, and everything from now on.
    pub async fn make_up(&self) {
        let withheld = self.withheld.lock().unwrap().take();
        for number in withheld.into_iter().flatten() {
            self.send(ack(number)).await;
        }
    }

    /// Listens until `enough`.
    pub async fn until(&mut self, enough: impl Fn(&Told) -> bool) -> Told {
        let mut told = Told::default();
        while !enough(&told) {
            let report = soon("a report", self.reports.recv()).await.expect("the judge runner stays");
            told.asked.extend(report.asked.into_iter().map(|asked| asked.token));
            told.results.extend(report.jobs);
            told.failures.extend(report.failures);
            told.destroyed.extend(report.destroyed);
            told.credits += report.credits;
        }
        told
    }

    /// A job from its lease to the free slot.
    pub async fn job(&mut self, lease: &JobLease) -> Told {
        self.lease(lease).await;
        self.until(|told| told.credits == 1).await
    }
}

fn ack(number: u64) -> to_worker::Message {
    to_worker::Message::Ack(Ack { number, stale: Vec::new() })
}
