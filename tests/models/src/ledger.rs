//! Every request, counted; the newest ones, kept.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

use crate::{Format, Mode};

/// More than any test sends; a soak run keeps the newest.
const KEPT: usize = 10_000;

/// One request for an answer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// From 1, over all requests of the server.
    pub number: u64,
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
    /// The same for the same step of the same conversation: a hash that is there twice is a request that was made twice.
    pub prompt_hash: String,
    /// The beginning of the last thing that the person said.
    pub prompt: String,
    /// How much was said so far.
    pub items: usize,
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
}

impl Ledger {
    /// Writes it down; gives its number.
    pub fn add(&self, mut request: Request) -> u64 {
        let mut book = self.book();
        book.totals.requests += 1;
        request.number = book.totals.requests;
        let kind = format!("{:?} {:?}", request.format, request.mode).to_lowercase();
        *book.totals.by_kind.entry(kind).or_default() += 1;
        if book.kept.len() == KEPT {
            book.kept.pop_front();
        }
        let number = request.number;
        book.kept.push_back(request);
        number
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
