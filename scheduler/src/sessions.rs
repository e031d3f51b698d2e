//! Workers that are connected now. Not part of the durable state: rebuilt from their greetings.

use std::collections::{BTreeMap, BTreeSet};

use evalgrid_proto::v1::{self, to_worker::Message};
use evalgrid_workflow::faults::{self, Fault};
use tokio::sync::mpsc;

use crate::{reaper::Asks, waits::Missed};

/// Messages on their way to one worker. It holds at most its slots in leases and its window of reports in acknowledgements; a worker that
/// lets this run full is not reading and is cut off.
pub const MAX_OUTBOUND: usize = 4096;

/// A message, and the position that must be durable before it leaves.
pub type Outbound = (u64, Message);

/// One connected worker.
pub struct Session {
    /// Tells this connection from an earlier one of the same worker.
    pub number: u64,
    /// The process.
    pub incarnation: String,
    /// Its boot.
    pub boot_id: String,
    /// What it does with what it is given.
    pub role: v1::WorkerRole,
    /// Providers that work there.
    pub providers: Vec<String>,
    /// Leases that it can still take.
    pub credits: u32,
    /// When it was last heard, steady milliseconds.
    pub heard_ms: u64,
    /// What lies in its folder and is not ours: left alone, and told to the operator.
    pub foreign: Vec<String>,
    outbound: mpsc::Sender<Outbound>,
}

/// See the module.
#[derive(Default)]
pub struct Sessions {
    /// Ordered, so that the same history gives out the same leases in every process.
    by_worker: BTreeMap<String, Session>,
    /// Since when workers that hold something are away, steady milliseconds.
    absent_since: BTreeMap<String, u64>,
    last_number: u64,
    /// Sandboxes that workers are asked to destroy.
    pub asks: Asks,
    /// Kinds of workers that are waited for and are not here.
    pub missed: Missed,
}

impl Sessions {
    /// A worker has come. An earlier connection of it is replaced and ends.
    pub fn join(&mut self, hello: &v1::Hello, outbound: mpsc::Sender<Outbound>, steady_ms: u64) -> u64 {
        self.last_number += 1;
        self.absent_since.remove(&hello.worker_id);
        self.by_worker.insert(
            hello.worker_id.clone(),
            Session {
                number: self.last_number,
                incarnation: hello.incarnation.clone(),
                boot_id: hello.boot_id.clone(),
                role: hello.role(),
                providers: hello.providers.clone(),
                credits: hello.slots,
                heard_ms: steady_ms,
                foreign: Vec::new(),
                outbound,
            },
        );
        self.last_number
    }

    /// A connection has ended. The worker's leases live on until it comes back or its lease runs out.
    pub fn leave(&mut self, worker_id: &str, number: u64) {
        if self.by_worker.get(worker_id).is_some_and(|session| session.number == number)
            && let Some(session) = self.by_worker.remove(worker_id)
        {
            self.absent_since.insert(worker_id.to_owned(), session.heard_ms);
        }
    }

    /// This scheduler is no longer the one to talk to: every connection ends once what was said on it is out, and its worker looks for another.
    pub fn end_all(&mut self) {
        self.by_worker.clear();
    }

    /// The session, if this connection is still the worker's current one.
    pub fn current(&mut self, worker_id: &str, number: u64) -> Option<&mut Session> {
        self.by_worker.get_mut(worker_id).filter(|session| session.number == number)
    }

    /// Queues a message. A worker that does not read is cut off.
    pub fn send(&mut self, worker_id: &str, position: u64, message: Message) {
        let Some(session) = self.by_worker.get(worker_id) else { return };
        let position = if faults::active(Fault::ToldBeforeDurable) { 0 } else { position };
        if session.outbound.try_send((position, message)).is_err() {
            tracing::warn!(worker_id, "the worker does not read what it is sent; its connection is cut");
            let number = session.number;
            self.leave(worker_id, number);
        }
    }

    /// Takes a lease away from a worker.
    pub fn revoke(&mut self, worker_id: &str, token: u64, reason: String, position: u64) {
        self.send(worker_id, position, Message::Revoke(v1::Revoke { token, reason }));
    }

    /// Workers with a free slot.
    pub fn free(&self) -> Vec<String> {
        self.by_worker
            .iter()
            .filter(|(_, session)| session.credits > 0)
            .map(|(worker_id, _)| worker_id.clone())
            .collect()
    }

    /// A worker's session, if it still has a free slot.
    pub fn with_credit(&self, worker_id: &str) -> Option<&Session> {
        self.by_worker.get(worker_id).filter(|session| session.credits > 0)
    }

    /// Takes one slot.
    pub fn take_credit(&mut self, worker_id: &str) {
        if let Some(session) = self.by_worker.get_mut(worker_id) {
            session.credits = session.credits.saturating_sub(1);
        }
    }

    /// Keeps what lies in a worker's folder and is not ours.
    pub fn note_foreign<'a>(&mut self, worker_id: &str, names: impl Iterator<Item = &'a str>) {
        if let Some(session) = self.by_worker.get_mut(worker_id) {
            session.foreign = names.map(str::to_owned).collect();
        }
    }

    /// What lies with the workers that are here and is not ours: (worker, name).
    pub fn foreign(&self) -> impl Iterator<Item = (&str, &str)> {
        let sessions = self.by_worker.iter();
        sessions.flat_map(|(worker_id, session)| session.foreign.iter().map(move |name| (worker_id.as_str(), name.as_str())))
    }

    /// Whether some connected worker of a role has sandboxes of a provider; of any where `provider` is empty.
    pub fn offers(&self, role: v1::WorkerRole, provider: &str) -> bool {
        let fits = |session: &Session| {
            let asks = session.role == v1::WorkerRole::JudgeRunner;
            asks == (role == v1::WorkerRole::JudgeRunner) && (provider.is_empty() || session.providers.iter().any(|name| name == provider))
        };
        self.by_worker.values().any(fits)
    }

    /// Whether a connected worker asks judges and people.
    pub fn is_judge_runner(&self, worker_id: &str) -> bool {
        let session = self.by_worker.get(worker_id);
        session.is_some_and(|session| session.role == v1::WorkerRole::JudgeRunner)
    }

    /// Whether a worker is connected.
    pub fn is_here(&self, worker_id: &str) -> bool {
        self.by_worker.contains_key(worker_id)
    }

    /// Cuts connections that were silent for a whole lease, and names all workers out of `holders` that have been away as long.
    pub fn overdue(&mut self, holders: BTreeSet<String>, lease_ms: u64, steady_ms: u64) -> Vec<String> {
        let silent: Vec<(String, u64)> = self
            .by_worker
            .iter()
            .filter(|(_, session)| session.heard_ms + lease_ms <= steady_ms)
            .map(|(worker_id, session)| (worker_id.clone(), session.number))
            .collect();
        for (worker_id, number) in silent {
            self.leave(&worker_id, number);
        }
        self.absent_since.retain(|worker_id, _| holders.contains(worker_id));
        let mut overdue = Vec::new();
        for worker_id in holders {
            if faults::active(Fault::AbsenceNotCounted) && !self.absent_since.contains_key(&worker_id) {
                continue;
            }
            if !self.by_worker.contains_key(&worker_id) {
                // After recovery nobody has been seen yet: everyone gets one full period.
                let since = *self.absent_since.entry(worker_id.clone()).or_insert(steady_ms);
                if since + lease_ms <= steady_ms {
                    overdue.push(worker_id);
                }
            }
        }
        overdue
    }
}
