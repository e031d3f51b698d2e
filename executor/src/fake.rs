//! For tests: a sandbox that does what it is told to, in memory; and what the worker makes of sandboxes that misbehave.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use evalgrid_proto::v1::{
    AttemptFailureKind, FromWorker, Lease, ObjectChunk, ObjectRef, PutObjectChunk, StepRecord, ToWorker, TrialOutcome, TrialStatus,
    WorkerObjectRequest,
    evidence::Place,
    workers_server::{Workers, WorkersServer},
};
use evalgrid_sandbox::{Base, Limits, Sandbox, SandboxError, SandboxName, SandboxProvider, SandboxSpec, StepCommand, StepExit, StepOutput};
use evalgrid_worker::{Client, Folder, Jobs, Objects, Providers, ToolOptions, Tools, Worker};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming, transport::Server};

use crate::{
    Executor,
    trial::{self, Ended},
};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// What happens when a step runs.
type Script = dyn Fn(&StepCommand) -> Result<StepExit, SandboxError> + Send + Sync;

struct FakeProvider {
    script: Arc<Script>,
    destroyed: Arc<Mutex<Vec<String>>>,
}

struct FakeSandbox(Arc<Script>);

#[async_trait]
impl SandboxProvider for FakeProvider {
    fn name(&self) -> &'static str {
        "process"
    }
    async fn create(&self, _: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(FakeSandbox(self.script.clone())))
    }
    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        let _ = (name, token);
        Ok(Box::new(FakeSandbox(self.script.clone())))
    }
    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        Ok(Vec::new())
    }
    fn share(&self, _: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        self.destroyed.lock().unwrap().push(name.to_owned());
        Ok(())
    }
}

#[async_trait]
impl Sandbox for FakeSandbox {
    fn home(&self) -> &str {
        "/home/agent"
    }
    fn workspace(&self) -> &str {
        "/workspace"
    }
    fn shared(&self) -> &str {
        "/run/evalgrid/shared/current"
    }
    fn tools(&self) -> &str {
        "/run/evalgrid/tools"
    }
    fn base(&self) -> Option<&Path> {
        None
    }
    async fn save_base(&self, _: &Path, _: &[PathBuf], _: u64) -> Result<u64, SandboxError> {
        Ok(0)
    }
    async fn write_files(&self, _: Base, _: &[(String, Vec<u8>)], _: bool) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn read_file(&self, _: Base, _: &str, _: u64) -> Result<Option<Vec<u8>>, SandboxError> {
        Err(SandboxError::Operation {
            operation: "read".into(),
            reason: "a folder is in its place".into(),
        })
    }
    async fn remove_file(&self, _: Base, _: &str) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn ensure_workspace(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    fn folder(&self) -> Option<&std::path::Path> {
        None
    }
    async fn started(&self) -> Result<std::collections::BTreeSet<String>, SandboxError> {
        Ok(Default::default())
    }
    async fn run(&self, command: &StepCommand) -> Result<StepExit, SandboxError> {
        (self.0)(command)
    }
    async fn ended(&self, _: &str) -> Result<Option<StepExit>, SandboxError> {
        Ok(None)
    }
    async fn kill(&self, _: &str) -> Result<(), SandboxError> {
        Ok(())
    }
}

/// Serves one object.
struct OneObject(Bytes);

#[tonic::async_trait]
impl Workers for OneObject {
    type WorkStream = tokio_stream::Empty<Result<ToWorker, Status>>;
    type GetObjectStream = tokio_stream::Once<Result<ObjectChunk, Status>>;

    async fn work(&self, _: Request<Streaming<FromWorker>>) -> Result<Response<Self::WorkStream>, Status> {
        Err(Status::unimplemented("objects only"))
    }
    async fn put_object(&self, _: Request<Streaming<PutObjectChunk>>) -> Result<Response<ObjectRef>, Status> {
        Err(Status::unimplemented("read only"))
    }
    async fn get_object(&self, _: Request<WorkerObjectRequest>) -> Result<Response<Self::GetObjectStream>, Status> {
        Ok(Response::new(tokio_stream::once(Ok(ObjectChunk { data: self.0.clone() }))))
    }
}

struct Rig {
    jobs: Arc<Jobs<Executor>>,
    lease: Lease,
    destroyed: Arc<Mutex<Vec<String>>>,
    outputs: Arc<tempfile::TempDir>,
}

/// A worker with fake sandboxes, and a lease of a trial of which `script` decides what its steps do.
async fn rig(script: impl Fn(&StepCommand, &Outputs) -> Result<StepExit, SandboxError> + Send + Sync + 'static) -> Rig {
    let request = json!({
        "suite": { "id": "s", "prompt": "p" },
        "cases": [{ "id": "c", "verify": "true" }],
        "variants": [{ "harness": "command", "model": "m", "sandbox": "process", "profile": { "name": "p", "files": {}, "run": "true", "install": "true" } }],
        "trials": 1,
    });
    let request = evalgrid_domain::request::decode_start(&request).unwrap_or_else(|issues| panic!("{issues:?}"));
    let bytes: Bytes = serde_json::to_vec(&request).unwrap().into();
    let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let object = ObjectRef {
        sha256,
        size: bytes.len() as u64,
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(&[format!("http://{}", listener.local_addr().unwrap())], "token").unwrap();
    tokio::spawn(
        Server::builder()
            .add_service(WorkersServer::new(OneObject(bytes)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );

    let outputs = Arc::new(tempfile::tempdir().unwrap());
    let destroyed = Arc::default();
    let steps = Outputs(outputs.path().to_owned());
    let provider = FakeProvider {
        script: Arc::new(move |command| script(command, &steps)),
        destroyed: Arc::clone(&destroyed),
    };
    let mut providers = Providers::new();
    providers.insert("process", Arc::new(provider));
    let folder = Folder::open(&outputs.path().join("worker")).unwrap();
    let limits = Limits {
        memory_bytes: 1 << 30,
        pids: 64,
    };
    let tools = ToolOptions {
        folder: outputs.path().join("tools"),
        ..ToolOptions::default()
    };
    let tools = Tools::new(tools).unwrap();
    let worker = Worker::new(folder, 1, client.clone(), Objects::new(client), providers, limits, tools);
    let executor = Executor::open(&worker, Duration::ZERO).unwrap();
    let lease = Lease {
        token: 5,
        organization_id: "org_test".into(),
        trial_id: "trial_test".into(),
        ordinal: 1,
        request: Some(object),
        sandbox: "sandbox".into(),
        provider: "process".into(),
        ..Lease::default()
    };
    Rig {
        jobs: Arc::new(Jobs::new(worker, executor)),
        lease,
        destroyed,
        outputs,
    }
}

impl Rig {
    /// From now on the worker has its lease.
    fn welcome(&self) {
        self.worker().heard(tokio::time::Instant::now(), Duration::from_secs(3_600));
    }

    fn worker(&self) -> &Worker {
        self.jobs.worker()
    }

    /// Runs the trial to its end while everything recorded becomes durable.
    async fn outcome(&self) -> (TrialOutcome, Vec<StepRecord>) {
        self.welcome();
        match self.end().await {
            (Ended::Outcome(outcome), steps) => (*outcome, steps),
            (Ended::Failed(kind, reason), _) => panic!("{kind:?}: {reason}"),
            (Ended::Throttled { .. }, _) => panic!("throttled"),
            (Ended::AwaitsReply { .. }, _) => panic!("it awaits a reply"),
            (Ended::Fenced, _) => panic!("fenced"),
        }
    }

    async fn end(&self) -> (Ended, Vec<StepRecord>) {
        let steps = Mutex::new(Vec::new());
        let acknowledge = || {
            while let Some(report) = self.worker().outbox.next_report() {
                self.worker().outbox.acknowledge(report.number);
                steps.lock().unwrap().extend(report.steps);
            }
        };
        let scheduler = async {
            loop {
                self.worker().outbox.ready().await;
                acknowledge();
            }
        };
        let ended = tokio::time::timeout(PATIENCE, async {
            tokio::select! {
                ended = trial::run(self.jobs.role(), self.worker(), &self.lease) => ended,
                () = scheduler => unreachable!("it listens for ever"),
            }
        });
        let ended = ended.await.unwrap();
        acknowledge();
        (ended, steps.into_inner().unwrap())
    }
}

/// Where the outputs of fake steps are.
struct Outputs(PathBuf);

impl Outputs {
    fn exit(&self, command: &StepCommand, code: i32, stdout: &str) -> StepExit {
        let path = |kind: &str| self.0.join(format!("{}.{kind}", command.step));
        // As a real sandbox: no file without a byte.
        if !stdout.is_empty() {
            fs::write(path("out"), stdout).unwrap();
        }
        let output = StepOutput {
            stdout: path("out"),
            stdout_tail: None,
            stdout_bytes: stdout.len() as u64,
            stdout_times: path("times"),
            stderr: path("err"),
        };
        StepExit {
            code,
            timed_out: false,
            out_of_memory: false,
            left_running: false,
            started_at_ms: 1_000,
            finished_at_ms: 1_250,
            output,
        }
    }
}

fn diagnostics(outcome: &TrialOutcome) -> Vec<String> {
    let Some(Place::Inline(bytes)) = outcome.evidence.as_ref().and_then(|evidence| evidence.place.clone()) else {
        panic!("no evidence")
    };
    serde_json::from_slice::<evalgrid_domain::evidence::TrialEvidence>(&bytes)
        .unwrap()
        .diagnostics
}

#[tokio::test]
async fn a_verdict_counts_only_what_the_steps_say() {
    let rig = rig(|command, outputs| {
        let mut exit = outputs.exit(command, i32::from(command.step == "check.0") * 3, "");
        exit.out_of_memory = command.step == "turn.1.agent";
        Ok(exit)
    });
    let rig = rig.await;
    let (outcome, _) = rig.outcome().await;
    assert_eq!(
        (outcome.status(), outcome.exit_code, outcome.model_ms, outcome.usage),
        (TrialStatus::Failed, 1, 250, None)
    );
    let found = diagnostics(&outcome);
    assert_eq!(found[0], "The sandbox ran out of memory during turn.1.agent");
    assert_eq!(found[1], "The recorder's log could not be read: a folder is in its place");
}

#[tokio::test]
async fn a_check_that_does_not_end_gives_no_verdict() {
    let rig = rig(|command, outputs| {
        let mut exit = outputs.exit(command, 137, "");
        exit.timed_out = command.step == "check.0";
        exit.code = if exit.timed_out { 137 } else { 0 };
        Ok(exit)
    });
    let rig = rig.await;
    let (outcome, _) = rig.outcome().await;
    assert_eq!((outcome.status(), outcome.exit_code), (TrialStatus::Void, -1));
    assert_eq!(outcome.failure.as_deref(), Some("The verify command ran past its limit of 5m"));
    assert_eq!(outcome.void_fields, ["verify"]);
}

#[tokio::test]
async fn an_install_that_does_not_end_leaves_the_trial_void() {
    let rig = rig(|command, outputs| {
        Ok(StepExit {
            timed_out: true,
            ..outputs.exit(command, 137, "")
        })
    })
    .await;
    let (outcome, _) = rig.outcome().await;
    assert_eq!(outcome.failure.as_deref(), Some("The profile's install ran past its limit of 10m"));
}

/// Whichever step it happens in: what the worker reports of it.
async fn misbehave(step: &'static str, error: impl Fn() -> SandboxError + Send + Sync + 'static) -> (Vec<AttemptFailureKind>, Vec<String>) {
    let rig = rig(move |command, outputs| {
        if command.step == step {
            Err(error())
        } else {
            Ok(outputs.exit(command, 0, ""))
        }
    })
    .await;
    rig.welcome();
    rig.jobs.begin(rig.lease.clone());
    let mut failures = Vec::new();
    loop {
        tokio::time::timeout(PATIENCE, rig.worker().outbox.ready()).await.unwrap();
        while let Some(report) = rig.worker().outbox.next_report() {
            failures.extend(report.failures.iter().map(|failure| failure.kind()));
            assert!(report.results.is_empty());
            rig.worker().outbox.acknowledge(report.number);
            if report.credits == 1 {
                let destroyed = rig.destroyed.lock().unwrap().clone();
                drop(rig.outputs);
                return (failures, destroyed);
            }
        }
    }
}

#[tokio::test]
async fn a_lost_sandbox_is_told_and_cleaned_up() {
    for step in ["profile.install", "turn.1.agent", "check.0"] {
        let lost = || SandboxError::Lost {
            name: "sandbox".into(),
            reason: "its supervisor died".into(),
        };
        let expected = (vec![AttemptFailureKind::SandboxLost], vec!["sandbox".to_owned()]);
        assert_eq!(misbehave(step, lost).await, expected, "{step}");
    }
}

#[tokio::test]
async fn who_is_fenced_says_so_and_destroys_nothing() {
    for step in ["profile.install", "turn.1.agent", "check.0"] {
        assert_eq!(
            misbehave(step, || SandboxError::Fenced { current: 6, ours: 5 }).await,
            (vec![AttemptFailureKind::SandboxLost], vec![]),
            "{step}"
        );
    }
}

#[tokio::test]
async fn a_bug_costs_one_attempt_only() {
    let (failures, _) = misbehave("turn.1.agent", || panic!("a bug")).await;
    assert_eq!(failures, [AttemptFailureKind::SandboxLost]);
}

#[tokio::test]
async fn nothing_is_asked_of_a_sandbox_that_has_recorded_everything() {
    let first = rig(|command, outputs| Ok(outputs.exit(command, 0, ""))).await;
    let (before, steps) = first.outcome().await;
    let mut second = rig(|command, _| panic!("{} ran again", command.step)).await;
    second.lease.adopt = true;
    second.lease.steps = steps
        .into_iter()
        .map(|step| evalgrid_proto::v1::RecordedStep {
            step: step.step,
            outcome: step.outcome,
            result: step.result,
        })
        .collect();
    let (after, steps) = second.outcome().await;
    assert_eq!(TrialOutcome { sandbox_ms: 0, ..after }, TrialOutcome { sandbox_ms: 0, ..before });
    assert_eq!(steps, [], "nothing new to record");
}

/// catalogue 31: a process that was stopped in the middle of a step, and goes on past its lease, may have no timer that has told it yet.
/// catalogue 25: nothing begins in a lease's last moments that would go on behind it.
#[tokio::test]
async fn nothing_is_begun_after_the_lease_has_ended() {
    const LEASE: std::time::Duration = std::time::Duration::from_secs(2);
    let rig = rig(|command, outputs| {
        assert_eq!(command.step, "profile.install", "begun too late");
        // The whole thread stands still, as a stopped process does.
        std::thread::sleep(LEASE);
        Ok(outputs.exit(command, 0, ""))
    })
    .await;
    assert!(matches!(rig.end().await.0, Ended::Fenced), "nor before there is one");
    rig.worker().heard(tokio::time::Instant::now(), LEASE);
    let (ended, steps) = rig.end().await;
    assert!(matches!(ended, Ended::Fenced));
    let steps: Vec<_> = steps.into_iter().map(|step| step.step).collect();
    assert_eq!(
        steps,
        ["sandbox.create", "profile.install"],
        "what was begun in time is told, and refused by who knows better"
    );
}
