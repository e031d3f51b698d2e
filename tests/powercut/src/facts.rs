//! What a client was told, and whether it still is so. Only what was answered is a fact; what was asked and not answered may be or not be, but
//! not be twice.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use evalgrid_proto::v1::{ObjectRef, batches_client::BatchesClient};
use evalgrid_tests::{http::Api, server::Server, suite};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::log::LogView;

/// One answer of a server that has recovered, however busy the machine is.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// A key that was handed out.
#[derive(Clone, Debug)]
pub struct Key {
    /// What it opens.
    pub organization: String,
    /// The key.
    pub secret: String,
}

/// A start that was asked for.
#[derive(Clone, Debug)]
pub struct Start {
    /// Of whom.
    pub key: Key,
    /// Its idempotency key.
    pub once: String,
    /// The request.
    pub body: Value,
    /// The batch, once that was answered.
    pub batch: Option<String>,
}

#[derive(Default)]
struct Facts {
    keys: Vec<Key>,
    starts: Vec<Start>,
    /// By id: trials with a verdict.
    trials: HashMap<String, Value>,
    /// By id: batches that have ended.
    ended: HashMap<String, Value>,
    /// Objects that were read after a cut; they are immutable, so the end of the test reads them once more and no one else does.
    read: HashSet<String>,
}

/// All facts so far.
#[derive(Default)]
pub struct Ledger(Mutex<Facts>);

/// How many facts there are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Keys handed out.
    pub keys: usize,
    /// Batches started.
    pub batches: usize,
    /// Trials seen with a verdict.
    pub trials: usize,
    /// Batches seen ended.
    pub ended: usize,
}

impl Ledger {
    fn with<T>(&self, act: impl FnOnce(&mut Facts) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A key was handed out.
    pub fn key(&self, key: Key) {
        self.with(|facts| facts.keys.push(key));
    }

    /// Every key.
    pub fn keys(&self) -> Vec<Key> {
        self.with(|facts| facts.keys.clone())
    }

    /// A start is about to be asked for.
    pub fn starting(&self, start: Start) {
        self.with(|facts| facts.starts.push(start));
    }

    /// It was answered with this batch.
    pub fn started(&self, once: &str, batch: &str) {
        self.with(|facts| {
            let start = facts.starts.iter_mut().find(|start| start.once == once);
            start.expect("it was asked for").batch = Some(batch.to_owned());
        });
    }

    /// Every start of an organization.
    pub fn starts(&self, organization: &str) -> Vec<Start> {
        let of_it = |facts: &mut Facts| {
            let starts = facts.starts.iter().filter(|start| start.key.organization == organization);
            starts.cloned().collect()
        };
        self.with(of_it)
    }

    /// Batches of an organization that were started and not seen to end.
    pub fn running(&self, organization: &str) -> Vec<String> {
        let starts = self.starts(organization);
        let batches = starts.into_iter().filter_map(|start| start.batch);
        self.with(|facts| batches.filter(|id| !facts.ended.contains_key(id)).collect())
    }

    /// A whole batch was answered.
    pub fn saw(&self, batch: &Value) {
        let id = |value: &Value| value["id"].as_str().unwrap_or_default().to_owned();
        let settled = |trial: &&Value| !matches!(trial["status"].as_str(), Some("queued" | "running"));
        self.with(|facts| {
            for trial in suite::trials(batch).into_iter().filter(settled) {
                facts.trials.entry(id(trial)).or_insert_with(|| trial.clone());
            }
            if batch["status"] != "running" {
                facts.ended.entry(id(batch)).or_insert_with(|| batch.clone());
            }
        });
    }

    /// How many facts there are.
    pub fn size(&self) -> Size {
        self.with(|facts| Size {
            keys: facts.keys.len(),
            batches: facts.starts.iter().filter(|start| start.batch.is_some()).count(),
            trials: facts.trials.len(),
            ended: facts.ended.len(),
        })
    }

    /// Every trial that was seen with a verdict.
    pub fn trials(&self) -> Vec<Value> {
        self.with(|facts| facts.trials.values().cloned().collect())
    }

    /// What is in the log, of what must be: before a server has started on it.
    pub fn missing_in_log(&self, view: &LogView) -> Vec<String> {
        let mut wrong = view.wrong.clone();
        self.with(|facts| {
            let batches = facts.starts.iter().filter_map(|start| start.batch.as_ref());
            wrong.extend(
                batches
                    .filter(|id| !view.batches.contains_key(*id))
                    .map(|id| format!("lost from the log: {id}")),
            );
            let trials = facts.trials.keys().filter(|id| !view.settled.contains(*id));
            wrong.extend(trials.map(|id| format!("lost from the log: the verdict of {id}")));
        });
        wrong
    }

    /// What a running server no longer knows, or tells otherwise. Only the newest so many keys and starts are asked for.
    pub async fn missing_in_answers(&self, server: &Server, newest: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        let (keys, starts) = self.with(|facts| (facts.keys.clone(), facts.starts.clone()));
        for key in keys.iter().rev().take(newest) {
            let known = post(server, key, "auth.whoami", &json!({}), None).await;
            if !matches!(&known, Ok(body) if body["organization"]["id"] == key.organization.as_str()) {
                wrong.push(format!("lost: a key of {}: {known:?}", key.organization));
            }
        }
        for start in starts.iter().rev().take(newest) {
            let Some(id) = &start.batch else { continue };
            let again = post(server, &start.key, "evals.batches.start", &start.body, Some(&start.once)).await;
            if !matches!(&again, Ok(body) if body["id"] == id.as_str()) {
                wrong.push(format!("twice or lost: {id}, started again with its idempotency key: {again:?}"));
            }
            match post(server, &start.key, "evals.batches.get", &json!({ "id": id }), None).await {
                Ok(batch) => wrong.extend(self.with(|facts| facts.differences(&batch))),
                Err(error) => wrong.push(format!("lost: {id}: {error}")),
            }
        }
        wrong
    }

    /// Objects that an event of the log names and that cannot be read byte for byte: all of them, or those not read before.
    pub async fn missing_objects(&self, server: &Server, view: &LogView, all: bool) -> Vec<String> {
        let mut wrong = Vec::new();
        let keys: HashMap<String, Key> = self.keys().into_iter().map(|key| (key.organization.clone(), key)).collect();
        for (kind, organization, object) in &view.objects {
            let name = format!("{organization} {}", object.sha256);
            if !all && self.with(|facts| facts.read.contains(&name)) {
                continue;
            }
            // An organization whose key was created and not handed out has no batches.
            let Some(key) = keys.get(organization) else {
                wrong.push(format!("{name}: nobody has a key"));
                continue;
            };
            let read = tokio::time::timeout(ANSWER_LIMIT, read_object(server, key, object)).await;
            match read.unwrap_or_else(|_| Err("no answer".into())) {
                Ok(()) => drop(self.with(|facts| facts.read.insert(name))),
                Err(error) => wrong.push(format!("the {kind} {name} of {} bytes cannot be read: {error}", object.size)),
            }
        }
        wrong
    }

    /// Batches that exist and that nobody has asked for, or that one asked for once and has twice.
    pub async fn too_many(&self, server: &Server) -> Vec<String> {
        let mut wrong = Vec::new();
        let organizations: HashMap<String, Key> = self.keys().into_iter().map(|key| (key.organization.clone(), key)).collect();
        for (organization, key) in organizations {
            let expected = self.starts(&organization).iter().filter(|start| start.batch.is_some()).count();
            match post(server, &key, "evals.batches.list", &json!({}), None).await {
                Ok(list) if list["total"] == expected => {}
                other => wrong.push(format!("{organization} has started {expected} batches and has: {other:?}")),
            }
        }
        wrong
    }
}

impl Facts {
    fn differences(&self, batch: &Value) -> Vec<String> {
        let id = batch["id"].as_str().unwrap_or_default();
        match self.ended.get(id) {
            Some(known) if known == batch => return Vec::new(),
            Some(known) => return vec![format!("changed: {id} was {known}, is {batch}")],
            None => {}
        }
        let known = |trial: &&Value| {
            trial["id"]
                .as_str()
                .and_then(|id| self.trials.get(id))
                .is_some_and(|known| known != *trial)
        };
        let changed = suite::trials(batch).into_iter().filter(known);
        changed.map(|trial| format!("changed: {} is {trial}", trial["id"])).collect()
    }
}

/// One operation, with a deadline; the body of an answer of the status 200.
pub async fn post(server: &Server, key: &Key, operation: &str, body: &Value, once: Option<&str>) -> Result<Value, String> {
    let api = Api::new(&server.http, &key.secret);
    let headers: Vec<(&str, &str)> = once.map(|once| ("idempotency-key", once)).into_iter().collect();
    let sent = api.send(operation, body.to_string().into_bytes(), &headers);
    let answer = tokio::time::timeout(ANSWER_LIMIT, sent)
        .await
        .map_err(|_| "no answer".to_owned())??;
    match answer.status {
        200 => Ok(answer.body),
        status => Err(format!("{status}: {}", answer.body)),
    }
}

async fn read_object(server: &Server, key: &Key, object: &ObjectRef) -> Result<(), String> {
    let connected = BatchesClient::connect(format!("http://{}", server.grpc)).await;
    let mut client = connected.map_err(|error| error.to_string())?;
    let mut request = tonic::Request::new(object.clone());
    request
        .metadata_mut()
        .insert("authorization", format!("Bearer {}", key.secret).parse().unwrap());
    let mut pieces = client.get_object(request).await.map_err(|status| status.to_string())?.into_inner();
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    while let Some(piece) = pieces.message().await.map_err(|status| status.to_string())? {
        hash.update(&piece.data);
        bytes += piece.data.len() as u64;
    }
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    match digest == object.sha256 && bytes == object.size {
        true => Ok(()),
        false => Err(format!("{bytes} bytes with the hash {digest}")),
    }
}
