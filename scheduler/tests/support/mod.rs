//! A scheduler on a folder, its clients, and workers in the test's hands.
#![allow(clippy::unwrap_used, dead_code, reason = "each test file uses its part")]

use std::{collections::BTreeMap, path::Path, time::Duration};

use evalgrid_proto::v1::{
    self, FromWorker, Hello, Report, StepRecord, ToWorker, TrialOutcome, TrialResult, TrialStatus, admin_client::AdminClient,
    batches_client::BatchesClient, from_worker, to_worker::Message, workers_client::WorkersClient,
};
use evalgrid_scheduler::{Scheduler, SchedulerOptions};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc, sync::watch, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, transport::Channel};

/// Nothing in these tests takes longer than this.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Server {
    pub address: String,
    pub data: std::path::PathBuf,
    pub stop: watch::Sender<bool>,
    pub serving: JoinHandle<()>,
}

impl Server {
    pub async fn start(data: &Path) -> Server {
        Server::with(data, Duration::from_secs(30), Duration::from_secs(60)).await
    }

    pub async fn with(data: &Path, lease: Duration, affinity_grace: Duration) -> Server {
        Server::open(SchedulerOptions {
            lease,
            affinity_grace,
            ..options(data)
        })
        .await
    }

    pub async fn open(options: SchedulerOptions) -> Server {
        let data = options.data.clone();
        let scheduler = Scheduler::open(options).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (stop, shutdown) = watch::channel(false);
        let serving = tokio::spawn(async move { scheduler.serve(listener, shutdown).await.unwrap() });
        Server {
            address,
            data,
            stop,
            serving,
        }
    }

    pub async fn stop(self) {
        self.stop.send_replace(true);
        timeout(PATIENCE, self.serving).await.unwrap().unwrap();
    }

    pub fn secret(&self, name: &str) -> String {
        std::fs::read_to_string(self.data.join(name)).unwrap().trim().to_owned()
    }

    pub async fn channel(&self) -> Channel {
        Channel::from_shared(self.address.clone()).unwrap().connect().await.unwrap()
    }

    pub async fn client(&self) -> Client {
        Client {
            batches: BatchesClient::new(self.channel().await).max_decoding_message_size(1 << 26),
            key: self.secret("api-key"),
        }
    }

    pub async fn admin(&self) -> (AdminClient<Channel>, String) {
        (AdminClient::new(self.channel().await), self.secret("admin-token"))
    }

    pub async fn worker(&self, hello: Hello) -> Worker {
        Worker::connect(self, hello).await
    }
}

pub fn options(data: &Path) -> SchedulerOptions {
    let sandbox_map: BTreeMap<String, String> = [("e2b", "bubblewrap"), ("bubblewrap", "bubblewrap"), ("process", "process")]
        .map(|(a, b)| (a.into(), b.into()))
        .into();
    SchedulerOptions {
        data: data.into(),
        lease: Duration::from_secs(30),
        sandbox_map,
        harnesses: [(evalgrid_domain::request::Harness::Command, "unknown".to_owned())].into(),
        affinity_grace: Duration::from_secs(60),
        environment: [("OPENAI_API_KEY".to_owned(), "sk-secret-value".to_owned())].into(),
        cell: None,
        objects: None,
        aws: Default::default(),
        tokens: Default::default(),
        snapshot_bytes: evalgrid_scheduler::SNAPSHOT_BYTES,
        limits: Default::default(),
    }
}

pub fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

#[derive(Clone)]
pub struct Client {
    pub batches: BatchesClient<Channel>,
    pub key: String,
}

impl Client {
    pub async fn try_start(&mut self, body: &Value, key: Option<&str>) -> Result<v1::StartedBatch, Status> {
        let message = v1::StartBatchRequest {
            json: body.to_string().into(),
            idempotency_key: key.map(str::to_owned),
        };
        self.batches
            .start(with_token(message, &self.key))
            .await
            .map(tonic::Response::into_inner)
    }

    pub async fn start(&mut self, body: &Value) -> v1::StartedBatch {
        self.try_start(body, None).await.unwrap()
    }

    pub async fn get(&mut self, id: &str) -> v1::Batch {
        self.batches
            .get(with_token(v1::GetBatchRequest { id: id.into() }, &self.key))
            .await
            .unwrap()
            .into_inner()
    }

    pub async fn cancel(&mut self, id: &str) -> Result<v1::Batch, Status> {
        let message = v1::CancelBatchRequest { id: id.into() };
        self.batches
            .cancel(with_token(message, &self.key))
            .await
            .map(tonic::Response::into_inner)
    }

    /// Follows the batch to its end.
    pub async fn ended(&mut self, id: &str) -> v1::Batch {
        let mut watch = self
            .batches
            .watch(with_token(v1::WatchBatchRequest { id: id.into() }, &self.key))
            .await
            .unwrap()
            .into_inner();
        while let Some(progress) = timeout(PATIENCE, watch.message()).await.unwrap().unwrap() {
            if progress.status() != v1::BatchStatus::Running {
                assert_eq!(progress.settled, progress.total);
                return self.get(id).await;
            }
        }
        panic!("the watch ended before the batch");
    }
}

/// A worker in the test's hands.
pub struct Worker {
    pub up: mpsc::Sender<FromWorker>,
    pub down: Streaming<ToWorker>,
    pub number: u64,
}

pub fn hello(worker_id: &str, incarnation: &str) -> Hello {
    Hello {
        worker_id: worker_id.into(),
        incarnation: incarnation.into(),
        boot_id: "boot".into(),
        slots: 1,
        providers: vec!["bubblewrap".into()],
        held: vec![],
        sandboxes: vec![],
        role: evalgrid_proto::v1::WorkerRole::Executor.into(),
    }
}

impl Worker {
    pub async fn connect(server: &Server, hello: Hello) -> Worker {
        let (up, outbound) = mpsc::channel(16);
        up.send(FromWorker {
            message: Some(from_worker::Message::Hello(hello)),
        })
        .await
        .unwrap();
        let request = with_token(ReceiverStream::new(outbound), &server.secret("worker-token"));
        let down = WorkersClient::new(server.channel().await).work(request).await.unwrap().into_inner();
        let mut worker = Worker { up, down, number: 0 };
        assert!(matches!(worker.next().await, Some(Message::Welcome(_))));
        worker
    }

    pub async fn next(&mut self) -> Option<Message> {
        timeout(PATIENCE, self.down.message())
            .await
            .unwrap()
            .ok()
            .flatten()
            .and_then(|message| message.message)
    }

    /// Waits for a lease, alive all the while.
    pub async fn lease(&mut self) -> v1::Lease {
        let mut heartbeat = tokio::time::interval(Duration::from_millis(100));
        let up = self.up.clone();
        let beating = async move {
            loop {
                heartbeat.tick().await;
                let beat = from_worker::Message::Heartbeat(v1::Heartbeat { number: 1 });
                let _ = up.send(FromWorker { message: Some(beat) }).await;
            }
        };
        let waiting = async {
            loop {
                match self.next().await {
                    Some(Message::Lease(lease)) => return lease,
                    Some(Message::Heartbeat(_)) => {}
                    other => panic!("expected a lease, got {other:?}"),
                }
            }
        };
        tokio::select! {
            lease = waiting => lease,
            () = beating => unreachable!(),
        }
    }

    pub async fn report(&mut self, report: Report) -> v1::Ack {
        self.number += 1;
        let report = Report {
            number: self.number,
            ..report
        };
        self.up
            .send(FromWorker {
                message: Some(from_worker::Message::Report(report)),
            })
            .await
            .unwrap();
        loop {
            match self.next().await {
                Some(Message::Ack(ack)) => return ack,
                Some(_) => {}
                None => panic!("the stream ended before the acknowledgement"),
            }
        }
    }

    pub async fn step(&mut self, token: u64, step: &str) -> v1::Ack {
        let step = StepRecord {
            token,
            step: step.into(),
            outcome: 1,
            result: b"{}".to_vec().into(),
        };
        self.report(Report {
            steps: vec![step],
            ..Report::default()
        })
        .await
    }

    pub async fn pass(&mut self, lease: &v1::Lease) -> v1::Ack {
        let outcome = TrialOutcome {
            status: TrialStatus::Passed.into(),
            commands: 2,
            ..TrialOutcome::default()
        };
        let results = vec![TrialResult {
            token: lease.token,
            outcome: Some(outcome),
            keep_sandbox_ms: 0,
        }];
        self.report(Report {
            results,
            destroyed: vec![lease.sandbox.clone()],
            credits: 1,
            ..Report::default()
        })
        .await
    }
}

pub fn batch(cases: usize, trials: u32) -> Value {
    let cases: Vec<Value> = (0..cases)
        .map(|case| json!({ "id": format!("case-{case}"), "verify": "true" }))
        .collect();
    json!({
        "suite": { "id": "suite", "prompt": "go" },
        "cases": cases,
        "variants": [{ "harness": "command", "model": "m", "profile": { "name": "p", "files": {}, "run": "true" } }],
        "trials": trials,
    })
}

pub fn refusal(status: &Status) -> v1::Refusal {
    v1::Refusal::decode(status.details()).unwrap()
}
