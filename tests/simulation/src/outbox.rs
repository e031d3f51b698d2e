//! What a simulated worker has to tell: as the true worker's outbox, in groups that stay until they are acknowledged.

use std::collections::{BTreeMap, VecDeque};

use evalgrid_proto::v1::{AttemptFailure, AwaitsReply, JobAsked, JobResult, Report, StepRecord, Throttled, TrialResult};

/// Reports on their way at once, as in the worker.
const MAX_IN_FLIGHT: usize = 8;
/// Facts of one report at most.
const MAX_FACTS: usize = 256;

/// One thing to report.
pub enum News {
    /// A step has a result.
    Step(StepRecord),
    /// A trial has its verdict.
    Result(Box<TrialResult>),
    /// An attempt has failed.
    Failure(AttemptFailure),
    /// A model's provider has refused, which ends the attempt.
    Throttled(Throttled),
    /// A trial's person speaks next, which ends the attempt.
    Awaits(AwaitsReply),
    /// A judge or a person is about to be asked.
    Asked(JobAsked),
    /// A job's lease has come to its end.
    Job(Box<JobResult>),
    /// Nothing is left of a sandbox.
    Destroyed(String),
}

/// See the module.
#[derive(Default)]
pub struct Outbox {
    queued: VecDeque<(News, u64)>,
    /// Each with the numbers of its news.
    unacknowledged: BTreeMap<u64, (Report, Vec<u64>)>,
    last_report: u64,
    last_news: u64,
    /// Slots that are taken.
    pub occupied: u32,
    credits: u32,
}

impl Outbox {
    /// Queues one; its number is acknowledged later.
    pub fn push(&mut self, news: News) -> u64 {
        self.last_news += 1;
        self.queued.push_back((news, self.last_news));
        self.last_news
    }

    /// A slot is free again.
    pub fn free_slot(&mut self) {
        self.occupied = self.occupied.saturating_sub(1);
        self.credits += 1;
    }

    /// The next report.
    pub fn next_report(&mut self) -> Option<Report> {
        if self.unacknowledged.len() >= MAX_IN_FLIGHT || (self.queued.is_empty() && self.credits == 0) {
            return None;
        }
        self.last_report += 1;
        let mut report = Report {
            number: self.last_report,
            credits: std::mem::take(&mut self.credits),
            ..Report::default()
        };
        let mut numbers = Vec::new();
        for (news, number) in self.queued.drain(..self.queued.len().min(MAX_FACTS)) {
            numbers.push(number);
            match news {
                News::Step(step) => report.steps.push(step),
                News::Result(result) => report.results.push(*result),
                News::Failure(failure) => report.failures.push(failure),
                News::Throttled(throttled) => report.throttled.push(throttled),
                News::Awaits(awaits) => report.awaiting.push(awaits),
                News::Asked(asked) => report.asked.push(asked),
                News::Job(result) => report.jobs.push(*result),
                News::Destroyed(sandbox) => report.destroyed.push(sandbox),
            }
        }
        self.unacknowledged.insert(report.number, (report.clone(), numbers));
        Some(report)
    }

    /// A report is acknowledged: what it said, and the numbers of its news.
    pub fn acknowledge(&mut self, number: u64) -> Option<(Report, Vec<u64>)> {
        self.unacknowledged.remove(&number)
    }

    /// A new connection: all free slots are told by its greeting, and what is not acknowledged is sent again.
    pub fn greet(&mut self) -> Vec<Report> {
        self.credits = 0;
        let reports = self.unacknowledged.values_mut().map(|(report, _)| {
            report.credits = 0;
            report.clone()
        });
        reports.collect()
    }

    /// No lease holds any more. That sandboxes are gone stays true.
    pub fn forget_leases(&mut self) {
        self.queued.retain(|(news, _)| matches!(news, News::Destroyed(_)));
        for (report, numbers) in self.unacknowledged.values_mut() {
            *report = Report {
                number: report.number,
                destroyed: std::mem::take(&mut report.destroyed),
                credits: report.credits,
                ..Report::default()
            };
            numbers.clear();
        }
    }
}
