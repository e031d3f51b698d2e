//! What the worker has to tell the scheduler: facts wait here, leave in groups, and stay until the scheduler has made them durable.
//!
//! The free slots are counted here too, because a Hello tells all of them and a report only the new ones: one lock keeps the two apart.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use evalgrid_proto::v1::{AttemptFailure, AwaitsReply, JobAsked, JobResult, Report, StepRecord, Throttled, TrialResult};
use prost::Message as _;
use tokio::sync::{Notify, oneshot};

/// Facts of one report at most (worker.proto).
const MAX_GROUP_FACTS: usize = 256;
/// Bytes of one report at most (worker.proto). A single fact may be bigger than what is left, never bigger than this.
const MAX_GROUP_BYTES: usize = 256 << 10;
/// Reports on their way at once. The scheduler answers one per commit group; more would only wait there instead of here.
const MAX_IN_FLIGHT: usize = 8;

/// One thing to report.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A step of a trial.
    Step(StepRecord),
    /// A trial's end.
    Result(Box<TrialResult>),
    /// The end of a lease without a result.
    Failure(AttemptFailure),
    /// The end of an attempt: its model's provider refuses for now.
    Throttled(Throttled),
    /// The end of an attempt: the simulated person speaks next.
    Awaits(AwaitsReply),
    /// A judge or a person is about to be asked.
    Asked(JobAsked),
    /// The end of a job's lease.
    Job(Box<JobResult>),
    /// A sandbox is gone.
    Destroyed(String),
}

impl Fact {
    fn size(&self) -> usize {
        // With its tag and length.
        6 + match self {
            Self::Step(step) => step.encoded_len(),
            Self::Result(result) => result.encoded_len(),
            Self::Failure(failure) => failure.encoded_len(),
            Self::Throttled(throttled) => throttled.encoded_len(),
            Self::Awaits(awaits) => awaits.encoded_len(),
            Self::Asked(asked) => asked.encoded_len(),
            Self::Job(result) => result.encoded_len(),
            Self::Destroyed(sandbox) => sandbox.len(),
        }
    }

    fn add_to(self, report: &mut Report) {
        match self {
            Self::Step(step) => report.steps.push(step),
            Self::Result(result) => report.results.push(*result),
            Self::Failure(failure) => report.failures.push(failure),
            Self::Throttled(throttled) => report.throttled.push(throttled),
            Self::Awaits(awaits) => report.awaiting.push(awaits),
            Self::Asked(asked) => report.asked.push(asked),
            Self::Job(result) => report.jobs.push(*result),
            Self::Destroyed(sandbox) => report.destroyed.push(sandbox),
        }
    }
}

/// See the top of this file.
pub struct Outbox {
    state: Mutex<State>,
    /// Something may be sent.
    ready: Notify,
    /// Everything has been acknowledged.
    empty: Notify,
}

struct State {
    queued: VecDeque<(Fact, Option<oneshot::Sender<()>>)>,
    unacknowledged: BTreeMap<u64, Group>,
    next_number: u64,
    slots: u32,
    occupied: u32,
    /// Slots freed since the scheduler was last told.
    credits: u32,
}

struct Group {
    report: Report,
    waiting: Vec<oneshot::Sender<()>>,
}

/// What a Hello says of the outbox.
#[derive(Debug, PartialEq)]
pub(crate) struct Greeting {
    /// Free slots, all of them.
    pub(crate) slots: u32,
    /// Reports to send again, in order.
    pub(crate) unacknowledged: Vec<Report>,
}

impl Outbox {
    /// Empty, of a worker with that many slots.
    pub fn new(slots: u32) -> Self {
        let state = State {
            queued: VecDeque::new(),
            unacknowledged: BTreeMap::new(),
            next_number: 1,
            slots,
            occupied: 0,
            credits: 0,
        };
        Self {
            state: Mutex::new(state),
            ready: Notify::new(),
            empty: Notify::new(),
        }
    }

    /// Queues a fact.
    pub fn push(&self, fact: Fact) {
        self.state().queued.push_back((fact, None));
        self.ready.notify_one();
    }

    /// Queues a fact; the receiver hears when it is durable, or an error if it never will be.
    pub fn push_awaited(&self, fact: Fact) -> oneshot::Receiver<()> {
        let (acknowledged, receiver) = oneshot::channel();
        self.state().queued.push_back((fact, Some(acknowledged)));
        self.ready.notify_one();
        receiver
    }

    pub(crate) fn take_slot(&self) {
        self.state().occupied += 1;
    }

    pub(crate) fn free_slot(&self) {
        let mut state = self.state();
        state.occupied = state.occupied.saturating_sub(1);
        state.credits += 1;
        drop(state);
        self.ready.notify_one();
    }

    /// The next report, if there is something to say and room to say it.
    pub fn next_report(&self) -> Option<Report> {
        let mut state = self.state();
        let state = &mut *state;
        if state.unacknowledged.len() >= MAX_IN_FLIGHT || (state.queued.is_empty() && state.credits == 0) {
            return None;
        }
        let mut report = Report {
            number: state.next_number,
            credits: std::mem::take(&mut state.credits),
            ..Report::default()
        };
        let mut waiting = Vec::new();
        let (mut facts, mut bytes) = (0, report.encoded_len());
        while let Some((fact, _)) = state.queued.front() {
            bytes += fact.size();
            if facts > 0 && (facts == MAX_GROUP_FACTS || bytes > MAX_GROUP_BYTES) {
                break;
            }
            if let Some((fact, acknowledged)) = state.queued.pop_front() {
                fact.add_to(&mut report);
                waiting.extend(acknowledged);
                facts += 1;
            }
        }
        state.next_number += 1;
        state.unacknowledged.insert(
            report.number,
            Group {
                report: report.clone(),
                waiting,
            },
        );
        Some(report)
    }

    /// A report is durable.
    pub fn acknowledge(&self, number: u64) {
        let mut state = self.state();
        let group = state.unacknowledged.remove(&number);
        let empty = state.is_empty();
        drop(state);
        for waiting in group.into_iter().flat_map(|group| group.waiting) {
            // Nobody waits any more where the lease was lost.
            let _ = waiting.send(());
        }
        self.ready.notify_one();
        if empty {
            self.empty.notify_waiters();
        }
    }

    /// A new connection begins. All free slots are told at once, so no report may tell of them again.
    pub(crate) fn greet(&self) -> Greeting {
        let mut state = self.state();
        state.credits = 0;
        let unacknowledged = state.unacknowledged.values_mut().map(|group| {
            group.report.credits = 0;
            group.report.clone()
        });
        let unacknowledged = unacknowledged.collect();
        Greeting {
            slots: state.slots.saturating_sub(state.occupied),
            unacknowledged,
        }
    }

    /// No lease holds any more: what was to be said under one is worth nothing now. That sandboxes are gone stays true.
    pub(crate) fn forget_leases(&self) {
        let mut state = self.state();
        state.queued.retain(|(fact, _)| matches!(fact, Fact::Destroyed(_)));
        for group in state.unacknowledged.values_mut() {
            let report = &mut group.report;
            *report = Report {
                number: report.number,
                destroyed: std::mem::take(&mut report.destroyed),
                credits: report.credits,
                ..Report::default()
            };
            group.waiting.clear();
        }
    }

    /// Returns when there may be something for [`Self::next_report`].
    pub async fn ready(&self) {
        self.ready.notified().await;
    }

    /// Returns when everything queued has been acknowledged.
    pub(crate) async fn emptied(&self) {
        loop {
            let emptied = self.empty.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            if self.state().is_empty() {
                return;
            }
            emptied.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.unacknowledged.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn step(token: u64, bytes: usize) -> Fact {
        Fact::Step(StepRecord {
            token,
            step: "s".into(),
            outcome: 1,
            result: vec![0; bytes].into(),
        })
    }

    #[test]
    fn groups_are_bounded_by_count_and_bytes() {
        let outbox = Outbox::new(4);
        assert_eq!(outbox.next_report(), None);
        (0..300).for_each(|token| outbox.push(step(token, 1)));
        assert_eq!(outbox.next_report().unwrap().steps.len(), MAX_GROUP_FACTS);
        assert_eq!(outbox.next_report().unwrap().steps.len(), 300 - MAX_GROUP_FACTS);
        (0..9).for_each(|token| outbox.push(step(token, 60_000)));
        for expected in [4, 4, 1] {
            let report = outbox.next_report().unwrap();
            assert_eq!(report.steps.len(), expected);
            assert!(report.encoded_len() <= MAX_GROUP_BYTES);
        }
        // One that is too big for any group still goes, alone.
        outbox.push(step(1, MAX_GROUP_BYTES + 1));
        outbox.push(step(2, 1));
        assert_eq!(outbox.next_report().unwrap().steps.len(), 1);
        assert_eq!(outbox.next_report().unwrap().number, 7);
    }

    #[test]
    fn at_most_so_many_are_on_their_way() {
        let outbox = Outbox::new(4);
        for token in 0..=MAX_IN_FLIGHT as u64 {
            outbox.push(step(token, MAX_GROUP_BYTES));
        }
        let sent: Vec<_> = std::iter::from_fn(|| outbox.next_report()).collect();
        assert_eq!(sent.len(), MAX_IN_FLIGHT);
        outbox.acknowledge(3);
        assert_eq!(outbox.next_report().unwrap().number, MAX_IN_FLIGHT as u64 + 1);
    }

    #[test]
    fn credits_are_told_once() {
        let outbox = Outbox::new(3);
        outbox.take_slot();
        outbox.take_slot();
        assert_eq!(outbox.greet().slots, 1);
        outbox.free_slot();
        assert_eq!(outbox.next_report().unwrap().credits, 1);
        outbox.free_slot();
        // The connection breaks: both slots are in the next Hello, and in no report.
        let greeting = outbox.greet();
        assert_eq!(
            (greeting.slots, greeting.unacknowledged.len(), greeting.unacknowledged[0].credits),
            (3, 1, 0)
        );
        assert_eq!(outbox.next_report(), None);
    }

    #[tokio::test]
    async fn those_who_wait_hear_of_it() {
        let outbox = Outbox::new(1);
        let durable = outbox.push_awaited(step(1, 1));
        let forgotten = outbox.push_awaited(step(2, 1));
        assert_eq!(outbox.next_report().unwrap().number, 1);
        outbox.acknowledge(1);
        durable.await.unwrap();
        forgotten.await.unwrap();
        outbox.emptied().await;
        let lost = outbox.push_awaited(step(3, 1));
        outbox.push(Fact::Destroyed("a".into()));
        outbox.forget_leases();
        lost.await.unwrap_err();
        let report = outbox.next_report().unwrap();
        assert_eq!((report.steps.len(), report.destroyed.as_slice()), (0, &["a".to_owned()][..]));
        let sent = outbox.push_awaited(step(4, 1));
        outbox.next_report().unwrap();
        outbox.forget_leases();
        sent.await.unwrap_err();
        assert_eq!(outbox.greet().unacknowledged[1].steps, []);
    }
}
