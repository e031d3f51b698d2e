//! The scheduler's answers to failures that cannot be brought about from outside: it is deposed in the middle of a read, its log takes nothing, a
//! store refuses one batch, nobody wakes a watcher, a worker is silent for a moment too long.
#![allow(clippy::unwrap_used)]

mod archiving;
mod leases;
mod serving;
mod waiting;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use evalgrid_domain::ids::OrgId;
use evalgrid_proto::v1::{self, auth_server::Auth as _, batches_server::Batches as _};
use evalgrid_store::{
    Index, IndexError, KeyValue, Log, LogError, MemoryIndex, MemoryLog, Record, Row, Snapshots, StoredObjects, log::BoxError,
};
use evalgrid_workflow::State;
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};
use tonic::{Request, Response, Status};

use crate::{
    admin,
    clients::ClientsService,
    clock::World,
    engine::{Core, Engine, OnLogFailure, Tenure},
    read::Reader,
    recovery,
    starts::Admission,
};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const PARTITIONS: usize = evalgrid_domain::ids::DIRECTORY_PARTITION as usize + 1;

async fn eventually(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let patient = async {
        while !look().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(timeout(PATIENCE, patient).await.is_ok(), "waited in vain until {what}");
}

/// Time that goes on when the test says so.
struct Clock {
    ms: AtomicU64,
    chance: AtomicU64,
}

impl World for Clock {
    fn now_ms(&self) -> u64 {
        1_800_000_000_000 + self.steady_ms()
    }

    fn steady_ms(&self) -> u64 {
        self.ms.load(Ordering::SeqCst)
    }

    fn random(&self, bytes: &mut [u8]) {
        for byte in bytes {
            let next = self
                .chance
                .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst)
                .wrapping_mul(0xd134_2543_de82_ef95);
            *byte = (next >> 56) as u8;
        }
    }
}

/// The right to be the active scheduler, until it is taken away.
#[derive(Clone)]
struct Right(watch::Sender<bool>);

#[async_trait::async_trait]
impl Tenure for Right {
    fn holds(&self) -> bool {
        *self.0.borrow()
    }

    async fn lost(&self) {
        let _ = self.0.subscribe().wait_for(|holds| !holds).await;
    }

    fn release(&self) {}
}

/// A log that can be made to take nothing for a while, as a disk that hangs does.
struct Hanging {
    log: MemoryLog,
    hangs: Arc<(Mutex<bool>, Condvar)>,
}

impl Log for Hanging {
    fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        let (hangs, changed) = &*self.hangs;
        drop(changed.wait_while(hangs.lock().unwrap(), |hangs| *hangs).unwrap());
        self.log.append(records)
    }

    fn cut(&mut self, position: u64) -> Result<u64, LogError> {
        self.log.cut(position)
    }

    fn bytes_since_snapshot(&self) -> u64 {
        self.log.bytes_since_snapshot()
    }

    fn snapshots(&self) -> Arc<dyn Snapshots> {
        self.log.snapshots()
    }
}

/// An index that can refuse rows, and whose reader can be deposed just before it is read.
struct Unruly {
    index: MemoryIndex,
    /// So many more rows are refused.
    refuses: AtomicUsize,
    deposes: AtomicBool,
    right: Right,
}

impl Unruly {
    fn read(&self) {
        if self.deposes.load(Ordering::SeqCst) {
            self.right.0.send_replace(false);
            // As a standby does that finds records missing.
            self.index.reset("").unwrap();
        }
    }
}

impl Index for Unruly {
    fn apply(&self, position: u64, rows: &[Row]) -> Result<(), IndexError> {
        let refuses = |left: usize| left.checked_sub(1);
        match self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, refuses) {
            Ok(_) => Err(IndexError::Broken {
                reason: "a fault that was asked for".into(),
            }),
            Err(_) => self.index.apply(position, rows),
        }
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        self.read();
        self.index.get(key)
    }

    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, IndexError> {
        self.read();
        self.index.scan(prefix, after, limit)
    }

    fn position(&self) -> Result<u64, IndexError> {
        self.index.position()
    }

    fn sync(&self) -> Result<(), IndexError> {
        self.index.sync()
    }

    fn origin(&self) -> Result<Option<String>, IndexError> {
        self.index.origin()
    }

    fn reset(&self, origin: &str) -> Result<(), IndexError> {
        self.index.reset(origin)
    }
}

/// A scheduler without a wire, and everything around it that can fail.
struct Site {
    engine: Engine,
    reader: Reader,
    service: ClientsService,
    log: MemoryLog,
    hangs: Arc<(Mutex<bool>, Condvar)>,
    clock: Arc<Clock>,
    right: Right,
    index: Arc<Unruly>,
    /// Where the objects are, a folder for each organization.
    folder: tempfile::TempDir,
    /// Ends what runs until shutdown.
    stop: watch::Sender<bool>,
}

impl Site {
    fn new() -> Site {
        let disk = MemoryLog::new();
        let (log, _) = disk.open(|_| Ok::<(), BoxError>(())).unwrap();
        let right = Right(watch::Sender::new(true));
        let clock = Arc::new(Clock {
            ms: AtomicU64::new(1),
            chance: AtomicU64::new(1),
        });
        let hangs = Arc::new((Mutex::new(false), Condvar::new()));
        let hanging = Box::new(Hanging { log, hangs: hangs.clone() });
        let core = Core::new(State::default(), vec![0; PARTITIONS], 0);
        let (engine, _) = Engine::start(core, hanging, Arc::new(right.clone()), OnLogFailure::StepDown, clock.clone()).unwrap();
        let index = Arc::new(Unruly {
            index: MemoryIndex::new(),
            refuses: AtomicUsize::new(0),
            deposes: AtomicBool::new(false),
            right: right.clone(),
        });
        let folder = tempfile::tempdir().unwrap();
        let reader = Reader {
            engine: engine.clone(),
            index: index.clone(),
            objects: Arc::new(StoredObjects::in_folder(folder.path()).unwrap()),
            filing: Arc::default(),
        };
        let map: BTreeMap<String, String> = [("e2b".to_owned(), "bubblewrap".to_owned())].into();
        let admission = Admission::new(
            reader.clone(),
            recovery::support(
                &map,
                &BTreeMap::from([(evalgrid_domain::request::Harness::Command, "unknown".to_owned())]),
            )
            .unwrap(),
            Arc::default(),
        );
        let (stop, stopping) = watch::channel(false);
        Site {
            engine,
            service: ClientsService::new(admission, stopping),
            reader,
            log: disk,
            hangs,
            clock,
            right,
            index,
            folder,
            stop,
        }
    }

    fn hang(&self, hangs: bool) {
        *self.hangs.0.lock().unwrap() = hangs;
        self.hangs.1.notify_all();
    }

    /// An organization with a key of this secret.
    async fn organization(&self, slug: &str, secret: &str) -> OrgId {
        admin::create_key(&self.engine, slug, "", Vec::new(), secret).await.unwrap();
        let found = self
            .engine
            .turn(|core| core.state.organization_by_slug(slug).map(|organization| organization.id));
        found.0.unwrap()
    }

    async fn start(&self, secret: &str) -> String {
        let started = self.service.start(signed(start_request(None), secret)).await;
        started.unwrap().into_inner().id
    }

    /// A batch that has ended, and nobody has archived.
    async fn ended(&self, secret: &str) -> String {
        let id = self.start(secret).await;
        let cancelled = self.service.cancel(signed(v1::CancelBatchRequest { id: id.clone() }, secret)).await;
        cancelled.unwrap();
        id
    }

    async fn get(&self, id: &str, secret: &str) -> Result<v1::Batch, Status> {
        let answer = self.service.get(signed(v1::GetBatchRequest { id: id.into() }, secret)).await;
        answer.map(Response::into_inner)
    }

    async fn list(&self, secret: &str) -> Result<Vec<String>, Status> {
        let answer = self.service.list(signed(v1::ListBatchesRequest::default(), secret)).await;
        Ok(answer?.into_inner().batches.into_iter().map(|batch| batch.id).collect())
    }

    /// Whether the index knows the batch.
    fn is_filed(&self, organization: &OrgId, id: &str) -> bool {
        let key = crate::read::row_key(organization, &id.parse().unwrap());
        self.index.index.get(&key).unwrap().is_some()
    }
}

fn signed<T>(message: T, secret: &str) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("authorization", format!("Bearer {secret}").parse().unwrap());
    request
}

fn start_request(idempotency_key: Option<&str>) -> v1::StartBatchRequest {
    let body: Value = json!({
        "suite": { "id": "suite", "prompt": "go" },
        "cases": [{ "id": "case", "verify": "true" }],
        "variants": [{ "harness": "command", "model": "m", "profile": { "name": "p", "files": {}, "run": "true" } }],
        "trials": 1,
    });
    v1::StartBatchRequest {
        json: body.to_string().into(),
        idempotency_key: idempotency_key.map(str::to_owned),
    }
}
