//! Every request, counted; the newest ones, kept.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

use crate::{Format, Mode};

/// More than any test sends; a soak run keeps the newest.
const KEPT: usize = 10_000;
/// Of one body: a judge's longest question is about 300 KB.
pub(crate) const KEPT_BODY: usize = 1 << 20;
/// Of all bodies together; those of the oldest requests go first.
const KEPT_BODIES: usize = 64 << 20;

/// One request for an answer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// From 1, over all requests of the server.
    pub number: u64,
    /// The HTTP method.
    pub method: String,
    /// The path as it came, with its prefix and query.
    pub path: String,
    /// Who says it is asking.
    pub user_agent: String,
    /// The `idempotency-key`, where one came: the same for each ask of one job.
    pub idempotency_key: Option<String>,
    /// How it was written.
    pub format: Format,
    /// How it was to be answered.
    pub mode: Mode,
    /// What the answer was, e.g. `call bash`, `text`, `401`; `refused: …` where the request made no sense.
    pub answer: String,
    /// The model asked for.
    pub model: String,
    /// The key sent. Tests use made-up ones.
    pub key: String,
    /// The names of all tools that the model was offered; those that the server itself would run are named by their type (`web_search`).
    pub tools: Vec<String>,
    /// The same for the same step of the same conversation: a hash that is there twice is a request that was made twice.
    pub prompt_hash: String,
    /// The beginning of the last thing that the person said.
    pub prompt: String,
    /// How much was said so far.
    pub items: usize,
    /// The body; no more than a MiB of it, and empty where newer ones needed the room.
    pub body: Arc<str>,
}

/// Counts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Of all requests.
    pub requests: u64,
    /// By `FORMAT MODE`.
    pub by_kind: BTreeMap<String, u64>,
}

#[derive(Default)]
pub(crate) struct Ledger(Mutex<Book>);

#[derive(Default)]
struct Book {
    totals: Totals,
    kept: VecDeque<Request>,
    /// Bytes of the kept bodies, and how many of `kept` have lost theirs.
    bodies: usize,
    emptied: usize,
    /// How often each job was asked in a mode that ends after some asks.
    asked: HashMap<(Mode, String), u32>,
}

impl Ledger {
    /// Writes it down; gives its number.
    pub fn add(&self, mut request: Request) -> u64 {
        let mut book = self.book();
        book.totals.requests += 1;
        request.number = book.totals.requests;
        let kind = format!("{:?} {}", request.format, request.mode).to_lowercase();
        *book.totals.by_kind.entry(kind).or_default() += 1;
        if book.kept.len() == KEPT
            && let Some(oldest) = book.kept.pop_front()
        {
            book.bodies -= oldest.body.len();
            book.emptied = book.emptied.saturating_sub(1);
        }
        let number = request.number;
        book.bodies += request.body.len();
        book.kept.push_back(request);
        while book.bodies > KEPT_BODIES {
            let at = book.emptied;
            let Some(oldest) = book.kept.get_mut(at) else { break };
            let body = std::mem::take(&mut oldest.body);
            book.bodies -= body.len();
            book.emptied += 1;
        }
        number
    }

    /// Counts an ask of a job; gives how often it was asked before in this mode.
    pub fn ask(&self, mode: Mode, job: &str) -> u32 {
        let mut book = self.book();
        let asked = book.asked.entry((mode, job.to_owned())).or_default();
        *asked += 1;
        *asked - 1
    }

    pub fn totals(&self) -> Totals {
        self.book().totals.clone()
    }

    pub fn read(&self) -> (Totals, Vec<Request>) {
        let book = self.book();
        (book.totals.clone(), book.kept.iter().cloned().collect())
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Nothing panics between two of its changes.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
