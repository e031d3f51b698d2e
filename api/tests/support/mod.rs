//! What the API's tests share: a scheduler that says what it is told to, the API in front of it, and a small HTTP client.
#![allow(clippy::unwrap_used, dead_code, missing_docs)]

pub mod schema;

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use evalgrid_api::{ApiOptions, CellAddresses};
use evalgrid_proto::v1::{
    auth_server::{Auth, AuthServer},
    batches_server::{Batches, BatchesServer},
    evidence::Place,
    runner_server::{Runner, RunnerServer},
    *,
};
use futures::{Stream, stream};
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tonic::{Code, Response, Status};

/// The key that the scheduler knows.
pub const KEY: &str = "Bearer anp_test";

/// A key of the same organization that may only read.
pub const READER: &str = "Bearer anp_reader";
/// A key of another organization.
pub const OTHER: &str = "Bearer anp_other";

/// What the scheduler answers, and what it was asked.
#[derive(Default)]
pub struct Script {
    /// Answers every call with this instead.
    pub refuse: Option<Status>,
    /// Answers every call with this, whoever asks.
    pub standby: Option<Status>,
    /// Knows nobody.
    pub empty: bool,
    pub batch: Batch,
    pub objects: HashMap<String, Vec<u8>>,
    /// Objects end after this many bytes although they are longer.
    pub cut_objects_at: Option<usize>,
    pub started: Vec<StartBatchRequest>,
    pub retried: Vec<RetryBatchRequest>,
    pub regraded: Vec<RegradeBatchRequest>,
    pub reported: Vec<ReportTrialRequest>,
    pub leased: Vec<LeaseVariablesRequest>,
    pub tailed: Vec<TailRequest>,
    pub listed: Vec<ListBatchesRequest>,
    pub asked: Vec<&'static str>,
}

fn key<T>(request: &tonic::Request<T>) -> &str {
    let key = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
    key.unwrap_or_default()
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Script>>);

impl Fake {
    fn enter<T>(&self, name: &'static str, request: &tonic::Request<T>) -> Result<std::sync::MutexGuard<'_, Script>, Status> {
        let mut script = self.0.lock().unwrap();
        script.asked.push(name);
        if let Some(refusal) = script.standby.clone() {
            return Err(refusal);
        }
        if script.empty || ![KEY, READER, OTHER].contains(&key(request)) {
            return Err(Status::unauthenticated("no such key"));
        }
        match script.refuse.clone() {
            Some(status) if name != "whoami" || status.code() == Code::Unauthenticated => Err(status),
            _ => Ok(script),
        }
    }
}

#[tonic::async_trait]
impl Batches for Fake {
    async fn start(&self, request: tonic::Request<StartBatchRequest>) -> Result<Response<StartedBatch>, Status> {
        let mut script = self.enter("start", &request)?;
        script.started.push(request.into_inner());
        let runs = vec![StartedRun {
            case_id: "add".into(),
            id: "run_1".into(),
            variant_id: "variant_1".into(),
        }];
        Ok(Response::new(StartedBatch {
            id: "batch_1".into(),
            runs,
        }))
    }

    async fn get(&self, request: tonic::Request<GetBatchRequest>) -> Result<Response<Batch>, Status> {
        let script = self.enter("get", &request)?;
        match request.get_ref().id == script.batch.id {
            true => Ok(Response::new(script.batch.clone())),
            false => Err(Status::not_found("There is no batch with that id.")),
        }
    }

    async fn get_run(&self, request: tonic::Request<GetRunRequest>) -> Result<Response<RunInBatch>, Status> {
        let script = self.enter("get_run", &request)?;
        let mut batch = script.batch.clone();
        batch.runs.retain(|run| run.id == request.get_ref().id);
        Ok(Response::new(RunInBatch { batch: Some(batch) }))
    }

    async fn list_models(&self, request: tonic::Request<ListModelsRequest>) -> Result<Response<ModelCatalogue>, Status> {
        drop(self.enter("list_models", &request)?);
        let ListModelsRequest { harness, query } = request.into_inner();
        let model = CatalogueModel {
            id: format!("{harness}-{query}"),
            display_name: "Name".into(),
            vendor: "vendor".into(),
        };
        Ok(Response::new(ModelCatalogue { models: vec![model] }))
    }

    async fn list(&self, request: tonic::Request<ListBatchesRequest>) -> Result<Response<BatchPage>, Status> {
        let mut script = self.enter("list", &request)?;
        script.listed.push(request.into_inner());
        let summary = |id: &str, status: BatchStatus, finished: Option<u64>, trigger| BatchSummary {
            id: id.into(),
            status: status.into(),
            failure: (status == BatchStatus::Failed).then(|| "Cancelled".into()),
            started_at_ms: 1_788_429_600_000,
            finished_at_ms: finished,
            trigger,
            cases: 2,
            runs: 2,
            passed: 1,
            scored: 2,
            voided: 3,
            cancelled: 1,
            regrade_of: (id == "batch_3").then(|| "batch_2".into()),
        };
        let url = Some("https://ci.example/1".to_owned());
        Ok(Response::new(BatchPage {
            batches: vec![
                summary(
                    "batch_3",
                    BatchStatus::Running,
                    None,
                    Some(Trigger {
                        source: "api".into(),
                        url: None,
                    }),
                ),
                summary(
                    "batch_2",
                    BatchStatus::Finished,
                    Some(1_788_429_660_001),
                    Some(Trigger { source: "ci".into(), url }),
                ),
                summary("batch_1", BatchStatus::Failed, Some(1_788_429_660_001), None),
            ],
            next: Some(PageCursor {
                id: "batch_1".into(),
                started_at_ms: 1_788_429_600_000,
            }),
            total: 7,
        }))
    }

    async fn cancel(&self, request: tonic::Request<CancelBatchRequest>) -> Result<Response<Batch>, Status> {
        let mut script = self.enter("cancel", &request)?;
        script.batch.status = BatchStatus::Failed.into();
        script.batch.failure = Some("Cancelled".into());
        Ok(Response::new(script.batch.clone()))
    }

    async fn retry(&self, request: tonic::Request<RetryBatchRequest>) -> Result<Response<StartedBatch>, Status> {
        let mut script = self.enter("retry", &request)?;
        script.retried.push(request.into_inner());
        Ok(Response::new(StartedBatch {
            id: "batch_2".into(),
            runs: Vec::new(),
        }))
    }

    async fn regrade(&self, request: tonic::Request<RegradeBatchRequest>) -> Result<Response<StartedBatch>, Status> {
        let mut script = self.enter("regrade", &request)?;
        script.regraded.push(request.into_inner());
        Ok(Response::new(StartedBatch {
            id: "batch_3".into(),
            runs: Vec::new(),
        }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<BatchProgress, Status>> + Send>>;

    async fn watch(&self, _: tonic::Request<WatchBatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("the API does not watch"))
    }

    type GetObjectStream = Pin<Box<dyn Stream<Item = Result<ObjectChunk, Status>> + Send>>;

    async fn get_object(&self, request: tonic::Request<ObjectRef>) -> Result<Response<Self::GetObjectStream>, Status> {
        let script = self.enter("get_object", &request)?;
        let bytes = script.objects.get(&request.get_ref().sha256).cloned();
        let bytes = bytes.ok_or_else(|| Status::not_found("There is no object with that id."))?;
        let cut = match request.get_ref().sha256.as_str() {
            "request" => None,
            _ => script.cut_objects_at,
        };
        let chunks: Vec<_> = bytes[..cut.unwrap_or(bytes.len()).min(bytes.len())]
            .chunks(1 << 16)
            .map(|chunk| {
                Ok(ObjectChunk {
                    data: Bytes::copy_from_slice(chunk),
                })
            })
            .collect();
        Ok(Response::new(Box::pin(stream::iter(chunks))))
    }
}

#[tonic::async_trait]
impl Runner for Fake {
    async fn start(&self, request: tonic::Request<StartBatchRequest>) -> Result<Response<StartedBatch>, Status> {
        let mut script = self.enter("runner_start", &request)?;
        script.started.push(request.into_inner());
        Ok(Response::new(StartedBatch {
            id: "batch_1".into(),
            runs: Vec::new(),
        }))
    }

    async fn lease(&self, request: tonic::Request<LeaseCredentialRequest>) -> Result<Response<LeasedValues>, Status> {
        drop(self.enter("lease", &request)?);
        Ok(Response::new(LeasedValues {
            auth_method_id: format!("of {}", request.get_ref().harness),
            expires_at_ms: 1_788_429_600_000,
            values: HashMap::from([("apiKey".into(), "secret".into())]),
        }))
    }

    async fn lease_variables(&self, request: tonic::Request<LeaseVariablesRequest>) -> Result<Response<LeasedValues>, Status> {
        let mut script = self.enter("lease_variables", &request)?;
        script.leased.push(request.into_inner());
        Ok(Response::new(LeasedValues {
            expires_at_ms: 1_788_429_600_000,
            values: HashMap::from([("TOKEN".into(), "secret".into())]),
            ..LeasedValues::default()
        }))
    }

    async fn report(&self, request: tonic::Request<ReportTrialRequest>) -> Result<Response<ReportTrialReply>, Status> {
        let mut script = self.enter("report", &request)?;
        script.reported.push(request.into_inner());
        Ok(Response::new(ReportTrialReply {}))
    }

    async fn beat(&self, request: tonic::Request<BeatRequest>) -> Result<Response<BeatReply>, Status> {
        drop(self.enter("beat", &request)?);
        Ok(Response::new(BeatReply {}))
    }

    async fn finish(&self, request: tonic::Request<FinishBatchRequest>) -> Result<Response<Batch>, Status> {
        let script = self.enter("finish", &request)?;
        Ok(Response::new(script.batch.clone()))
    }

    async fn subscribe(&self, request: tonic::Request<SubscribeRequest>) -> Result<Response<Subscription>, Status> {
        drop(self.enter("subscribe", &request)?);
        Ok(Response::new(Subscription {
            expires_at_ms: 1_788_429_600_000,
            tag: format!("batch_{}", request.get_ref().batch_id),
            token: "anp_tail".into(),
        }))
    }

    async fn tail(&self, request: tonic::Request<TailRequest>) -> Result<Response<TailPage>, Status> {
        let mut script = self.enter("tail", &request)?;
        script.tailed.push(request.into_inner());
        let mark = |seq| TailMark {
            run_id: "run_1".into(),
            ordinal: 1,
            seq,
        };
        let events = evidence()["trajectory"].as_array().unwrap().clone();
        let events = (0u64..).zip(events).map(|(seq, entry)| TailEvent {
            mark: Some(mark(seq)),
            entry: entry.to_string().into(),
        });
        Ok(Response::new(TailPage {
            events: events.collect(),
            next: vec![mark(3)],
            running: true,
            settled: 1,
        }))
    }
}

#[tonic::async_trait]
impl Auth for Fake {
    async fn whoami(&self, request: tonic::Request<WhoamiRequest>) -> Result<Response<Identity>, Status> {
        drop(self.enter("whoami", &request)?);
        let permissions: &[&str] = match key(&request) {
            READER => &["evals:read"],
            _ => &["evals:read", "evals:write"],
        };
        Ok(Response::new(Identity {
            organization_id: if key(&request) == OTHER { "org_2" } else { "org_1" }.into(),
            organization_name: "Acme".into(),
            organization_slug: "acme".into(),
            key_name: Some("first".into()),
            key_start: "anp_AbCd".into(),
            permissions: permissions.iter().map(|held| (*held).into()).collect(),
        }))
    }
}

/// A scripted scheduler.
pub struct Scheduler {
    pub url: String,
    pub script: Arc<Mutex<Script>>,
    health: tonic_health::server::HealthReporter,
}

impl Scheduler {
    pub async fn start() -> Scheduler {
        let fake = Fake::default();
        let script = fake.0.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (health, health_service) = tonic_health::server::health_reporter();
        let server = tonic::transport::Server::builder()
            .add_service(health_service)
            .add_service(BatchesServer::new(fake.clone()).max_decoding_message_size(70 << 20))
            .add_service(RunnerServer::new(fake.clone()).max_decoding_message_size(70 << 20))
            .add_service(AuthServer::new(fake))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
        tokio::spawn(server);
        Scheduler { url, script, health }
    }

    /// Becomes the active one, or a standby that refuses every call.
    pub async fn set_active(&self, active: bool) {
        let mut refusal = Status::unavailable("a standby");
        refusal
            .metadata_mut()
            .insert("evalgrid-active", "http://elsewhere:1".parse().unwrap());
        self.script.lock().unwrap().standby = (!active).then_some(refusal);
        let status = match active {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        self.health.set_service_status("", status).await;
    }
}

/// The API, serving, in front of a scripted scheduler.
pub struct Api {
    pub script: Arc<Mutex<Script>>,
    pub address: std::net::SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    stop: watch::Sender<bool>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// Status and `_tag`.
    pub fn kind(&self) -> (u16, String) {
        (self.status.as_u16(), self.json()["_tag"].as_str().unwrap_or_default().to_owned())
    }
}

impl Api {
    pub async fn start() -> Api {
        let scheduler = Scheduler::start().await;
        let (api, stop) = Api::in_front_of(vec![scheduler.url]).await;
        Api {
            script: scheduler.script,
            stop,
            ..api
        }
    }

    /// One in front of a cell of these schedulers.
    pub async fn of_cell(schedulers: Vec<String>) -> Api {
        let (api, stop) = Api::in_front_of(schedulers).await;
        Api { stop, ..api }
    }

    /// One in front of several cells, each of one scheduler.
    pub async fn of_cells(schedulers: &[String]) -> Api {
        let cells = schedulers.iter().enumerate().map(|(index, url)| CellAddresses {
            name: format!("cell-{index}"),
            schedulers: vec![url.clone()],
        });
        let (api, stop) = Api::serving(ApiOptions { cells: cells.collect() }).await;
        Api { stop, ..api }
    }

    /// One whose scheduler is not there.
    pub async fn without_scheduler() -> Api {
        let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let (api, stop) = Api::in_front_of(vec![format!("http://{unused}")]).await;
        Api { stop, ..api }
    }

    async fn in_front_of(schedulers: Vec<String>) -> (Api, watch::Sender<bool>) {
        Api::serving(ApiOptions::one_cell(schedulers)).await
    }

    async fn serving(options: ApiOptions) -> (Api, watch::Sender<bool>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(evalgrid_api::serve(listener, options, stopped));
        let api = Api {
            script: Arc::default(),
            address,
            client: Client::builder(TokioExecutor::new()).build_http(),
            stop: watch::channel(false).0,
        };
        (api, stop)
    }

    pub fn shut_down(&self) {
        self.stop.send(true).unwrap();
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        self.try_send(method, path, headers, body).await.unwrap()
    }

    /// The answer, or why the connection broke.
    pub async fn try_send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Result<Answer, String> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).unwrap();
        let response = self.client.request(request).await.map_err(|error| error.to_string())?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body,
        })
    }

    /// An operation with the known key.
    pub async fn op(&self, name: &str, body: Value) -> Answer {
        self.send("POST", &format!("/v1/{name}"), &[("authorization", KEY)], body.to_string())
            .await
    }
}

/// A refusal as the scheduler sends it.
pub fn refusal(code: Code, kind: refusal::Kind, message: &str, issues: &Value) -> Status {
    let refusal = Refusal {
        kind: kind.into(),
        message: message.into(),
        issues_json: issues.to_string(),
    };
    Status::with_details(code, message, refusal.encode_to_vec().into())
}

/// Evidence with one of everything that a settled trial has.
pub fn evidence() -> Value {
    let value = json!({"text": "out", "format": "text", "state": "captured", "truncated": false});
    json!({
        "artifacts": [{"path": "hello.txt", "byteSize": 5, "sha256": "a".repeat(64)}],
        "filesChanged": ["hello.txt"],
        "trajectory": [
            {"_tag": "command", "command": "ls", "exitCode": 0, "finishedAtMillis": 2.5, "output": "", "startedAtMillis": null},
            {"_tag": "message", "finishedAtMillis": null, "text": "done", "role": "assistant"},
            {"_tag": "toolCall", "finishedAtMillis": null, "name": "search", "status": null},
            {"_tag": "fileChange", "finishedAtMillis": null, "paths": ["hello.txt"]},
        ],
        "validations": [{
            "id": "command:0", "index": 0, "name": "verify command", "kind": "command", "status": "passed", "startedAt": 1.0,
            "durationMs": 3, "message": "", "exitCode": 0, "truncated": false, "input": value, "output": value, "error": null,
            "calls": [], "logs": [],
        }],
        "verifySteps": [{"command": "test -f hello.txt", "exitCode": 0}],
        "voidFields": [],
        "diagnostics": [],
        "coverage": {"usage": {"state": "unavailable", "reason": "the agent reported none"}},
    })
}

/// A batch of one case on one variant with a trial of each kind, and the objects behind it.
pub fn batch() -> (Batch, HashMap<String, Vec<u8>>) {
    let request = json!({
        "suite": {"id": "smoke", "prompt": "Do {{ task }}.", "source": {"kind": "files", "files": {"a.txt": "a"}}},
        "cases": [{"id": "add", "name": "Add", "variables": {"task": "it"}, "verify": "test -f hello.txt"}],
        "variants": [{"harness": "command", "model": "m", "profile": {"name": "p", "files": {}, "run": "true"}}],
        "trials": 5,
    });
    let request = evalgrid_domain::request::decode_start(&request).unwrap();
    let request = serde_json::to_vec(&request).unwrap();
    let object = |name: &str, bytes: &[u8]| ObjectRef {
        sha256: name.into(),
        size: bytes.len() as u64,
    };
    let stored = serde_json::to_vec(&evidence()).unwrap();
    let usage = Usage {
        input_tokens: 10,
        output_tokens: 2,
        cache_read_tokens: 0,
        cache_write_tokens: 0,
        total_tokens: 12,
        cost_usd: None,
        ..Usage::default()
    };
    let scored = |status: TrialStatus, exit_code, place: Option<Place>| TrialOutcome {
        status: status.into(),
        exit_code,
        commands: 1,
        failed_commands: 0,
        model_ms: 20,
        sandbox_ms: 30,
        sandbox_id: Some("sandbox".into()),
        timed: true,
        usage: (status == TrialStatus::Passed).then_some(usage),
        failure: None,
        void_fields: vec![],
        evidence: place.map(|place| Evidence { place: Some(place) }),
        ..TrialOutcome::default()
    };
    let void = TrialOutcome {
        status: TrialStatus::Void.into(),
        exit_code: -1,
        failure: Some("The agent ran past its time limit of 5m".into()),
        void_fields: vec!["verify".into()],
        ..TrialOutcome::default()
    };
    let outcomes = [
        Some(scored(TrialStatus::Passed, 0, Some(Place::Inline(stored.clone().into())))),
        Some(scored(TrialStatus::Failed, 1, Some(Place::Object(object("evidence", &stored))))),
        Some(void),
        None,
        None,
    ];
    let statuses = [
        TrialStatus::Passed,
        TrialStatus::Failed,
        TrialStatus::Void,
        TrialStatus::Running,
        TrialStatus::Queued,
    ];
    let trials = outcomes
        .into_iter()
        .zip(statuses)
        .enumerate()
        .map(|(index, (outcome, status))| Trial {
            id: format!("trial_{index}"),
            ordinal: index as u32 + 1,
            status: status.into(),
            outcome,
            attempts: 1,
            lost_attempts: if index == 0 { vec!["the sandbox is gone".into()] } else { vec![] },
        });
    let batch = Batch {
        id: "batch_1".into(),
        status: BatchStatus::Running.into(),
        failure: None,
        started_at_ms: 1_788_429_600_000,
        finished_at_ms: None,
        trigger: Some(Trigger {
            source: "api".into(),
            url: None,
        }),
        request: Some(object("request", &request)),
        suite: Some(Suite {
            id: "smoke".into(),
            name: "smoke".into(),
        }),
        cases: vec![CaseInfo {
            id: "add".into(),
            name: "Add".into(),
            definition_hash: "d".repeat(32),
            timeout_ms: 900_000,
            ..CaseInfo::default()
        }],
        variants: vec![VariantInfo {
            harness: "command".into(),
            model: "m".into(),
            sandbox: "e2b".into(),
            provider: "bubblewrap".into(),
            profile: Some("p".into()),
            profile_version: Some("e".repeat(32)),
            harness_version: "unknown".into(),
            ..VariantInfo::default()
        }],
        runs: vec![Run {
            id: "run_1".into(),
            case_index: 0,
            variant_index: 0,
            variant_id: "variant_1".into(),
            status: BatchStatus::Running.into(),
            finished_at_ms: None,
            trials: trials.collect(),
            distribution: Some(Distribution {
                trials: 5,
                scored: 2,
                passed: 1,
                failed: 1,
                voided: 1,
                cancelled: 0,
                pass_rate: 0.5,
                command_min: 1,
                command_median: 1.0,
                command_max: 1,
                deterministic: false,
            }),
        }],
        ..Batch::default()
    };
    (batch, HashMap::from([("request".into(), request), ("evidence".into(), stored)]))
}
