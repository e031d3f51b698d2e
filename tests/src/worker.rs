//! A worker that speaks the real protocol and does no work: it records steps as fast as they are acknowledged. For load and recovery.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;
use evalgrid_proto::v1::{
    FromWorker, Heartbeat, Hello, Report, StepOutcome, StepRecord, ToWorker, TrialOutcome, TrialResult, TrialStatus,
    from_worker::Message as Up, to_worker::Message as Down, workers_client::WorkersClient,
};
use rand::{RngCore as _, SeedableRng as _, rngs::StdRng};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};

/// Facts in one message, as the protocol allows.
const GROUP: usize = 256;

/// What the worker is like.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Trials in flight.
    pub slots: u32,
    /// Steps of each trial.
    pub steps: u32,
    /// Bytes of each step's result.
    pub result_bytes: usize,
    /// Ends after this many trials.
    pub trials: u64,
    /// Seeds the results, which do not compress.
    pub seed: u64,
}

/// What it saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Steps acknowledged as durable.
    pub steps: u64,
    /// Trials acknowledged as settled.
    pub trials: u64,
    /// From sending a step to its acknowledgement.
    pub step_latency: Vec<Duration>,
    /// From receiving a lease to its verdict's acknowledgement.
    pub trial_latency: Vec<Duration>,
    /// Tokens that the scheduler called stale.
    pub stale: u64,
    /// From the first lease to the last acknowledgement.
    pub took: Duration,
}

struct Trial {
    began: Instant,
    sandbox: String,
    step: u32,
}

/// The worker. It survives the loss of its connection, as a real one does.
pub struct Worker {
    shape: Shape,
    /// The schedulers of its cell, of which one is active.
    endpoints: Vec<String>,
    token: String,
    id: String,
    trials: HashMap<u64, Trial>,
    queued: VecDeque<Fact>,
    sent: VecDeque<(u64, Vec<Fact>, Instant)>,
    destroyed: Vec<String>,
    next_number: u64,
    began: Option<Instant>,
    rng: StdRng,
    /// Verdicts that were recorded, as far as can be told, without an acknowledgement that arrived.
    settled_unseen: u64,
    /// What it saw so far.
    pub seen: Seen,
    /// When the first acknowledgement after the newest connection came.
    pub first_ack: Option<Instant>,
}

#[derive(Clone)]
enum Fact {
    Step(StepRecord),
    Result(u64),
}

impl Worker {
    /// A worker of the scheduler at `grpc`, or of whichever of several, with commas between them, is active.
    pub fn new(grpc: &str, token: &str, id: &str, shape: Shape) -> Worker {
        Worker {
            rng: StdRng::seed_from_u64(shape.seed),
            shape,
            endpoints: grpc.split(',').map(|address| format!("http://{address}")).collect(),
            token: token.to_owned(),
            id: id.to_owned(),
            trials: HashMap::new(),
            queued: VecDeque::new(),
            sent: VecDeque::new(),
            destroyed: Vec::new(),
            next_number: 0,
            began: None,
            settled_unseen: 0,
            seen: Seen::default(),
            first_ack: None,
        }
    }

    /// Works until its trials are done; comes back whenever the connection breaks.
    pub async fn run(&mut self) {
        while !self.is_done() {
            for number in 0..self.endpoints.len() {
                // A standby, or one that is gone, ends it at once.
                let _ = self.session(number).await;
                if self.is_done() {
                    break;
                }
            }
            if !self.is_done() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        self.seen.took = self.began.map_or(Duration::ZERO, |began| began.elapsed());
    }

    fn is_done(&self) -> bool {
        self.seen.trials.saturating_add(self.settled_unseen) >= self.shape.trials
    }

    async fn session(&mut self, number: usize) -> Result<(), tonic::Status> {
        let channel = Channel::from_shared(self.endpoints[number].clone())
            .unwrap()
            .tcp_nodelay(true)
            .connect()
            .await
            .map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        let mut client = WorkersClient::new(channel);
        let (up, outbound) = mpsc::channel::<FromWorker>(64);
        let send = |message| FromWorker { message: Some(message) };
        let held: Vec<u64> = self.trials.keys().copied().collect();
        let hello = Hello {
            worker_id: self.id.clone(),
            incarnation: "one".into(),
            boot_id: "boot".into(),
            slots: self.shape.slots - held.len() as u32,
            providers: vec!["bubblewrap".into(), "process".into()],
            held,
            sandboxes: self.trials.values().map(|trial| trial.sandbox.clone()).collect(),
            role: evalgrid_proto::v1::WorkerRole::Executor.into(),
        };
        up.send(send(Up::Hello(hello)))
            .await
            .map_err(|_| tonic::Status::unavailable("gone"))?;
        let mut request = tonic::Request::new(ReceiverStream::new(outbound));
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {}", self.token).parse().unwrap());
        let mut down: Streaming<ToWorker> = client.work(request).await?.into_inner();
        self.first_ack = None;
        // What was not acknowledged is reported again.
        for (_, facts, _) in std::mem::take(&mut self.sent) {
            self.queued.extend(facts);
        }
        let mut heartbeat = tokio::time::interval(Duration::from_secs(1));
        loop {
            self.flush(&up).await?;
            if self.is_done() {
                return Ok(());
            }
            tokio::select! {
                message = down.message() => match message? {
                    Some(ToWorker { message: Some(message) }) => self.take(message),
                    Some(_) => {}
                    None => return Ok(()),
                },
                _ = heartbeat.tick() => {
                    let _ = up.send(send(Up::Heartbeat(Heartbeat { number: 0 }))).await;
                }
            }
        }
    }

    fn take(&mut self, message: Down) {
        match message {
            Down::Lease(lease) => {
                let now = Instant::now();
                self.began.get_or_insert(now);
                let done = lease.steps.len() as u32;
                self.trials.insert(
                    lease.token,
                    Trial {
                        began: now,
                        sandbox: lease.sandbox,
                        step: done,
                    },
                );
                self.next(lease.token);
            }
            // What ended before this connection began: its reports come again, and are told to be stale.
            Down::Ack(ack) if ack.number == 0 => {}
            Down::Ack(ack) => {
                self.first_ack.get_or_insert_with(Instant::now);
                while let Some((number, facts, sent)) = self.sent.pop_front() {
                    self.acknowledged(&facts, sent, &ack.stale);
                    if number == ack.number {
                        break;
                    }
                }
            }
            Down::Revoke(revoke) => {
                if let Some(trial) = self.trials.remove(&revoke.token) {
                    self.destroyed.push(trial.sandbox);
                }
            }
            Down::Destroy(destroy) => self.destroyed.push(destroy.sandbox),
            // Jobs are for judge runners.
            Down::Welcome(_) | Down::Heartbeat(_) | Down::Job(_) => {}
        }
    }

    fn acknowledged(&mut self, facts: &[Fact], sent: Instant, stale: &[u64]) {
        for fact in facts {
            let token = match fact {
                Fact::Step(step) => step.token,
                Fact::Result(token) => *token,
            };
            if stale.contains(&token) {
                self.seen.stale += 1;
                // A verdict that was recorded, and whose acknowledgement was lost, has ended its lease.
                self.settled_unseen += u64::from(matches!(fact, Fact::Result(_)));
                if let Some(trial) = self.trials.remove(&token) {
                    self.destroyed.push(trial.sandbox);
                }
                continue;
            }
            match fact {
                Fact::Step(_) => {
                    self.seen.steps += 1;
                    self.seen.step_latency.push(sent.elapsed());
                    if let Some(trial) = self.trials.get_mut(&token) {
                        trial.step += 1;
                    }
                    self.next(token);
                }
                Fact::Result(_) => {
                    if let Some(trial) = self.trials.remove(&token) {
                        self.seen.trials += 1;
                        self.seen.trial_latency.push(trial.began.elapsed());
                        self.destroyed.push(trial.sandbox);
                    }
                }
            }
        }
    }

    fn next(&mut self, token: u64) {
        let Some(trial) = self.trials.get(&token) else { return };
        if trial.step >= self.shape.steps {
            return self.queued.push_back(Fact::Result(token));
        }
        let mut result = vec![0; self.shape.result_bytes];
        self.rng.fill_bytes(&mut result);
        self.queued.push_back(Fact::Step(StepRecord {
            token,
            step: format!("turn.{}.agent", trial.step + 1),
            outcome: StepOutcome::Done.into(),
            result: Bytes::from(result),
        }));
    }

    async fn flush(&mut self, up: &mpsc::Sender<FromWorker>) -> Result<(), tonic::Status> {
        while !self.queued.is_empty() || !self.destroyed.is_empty() {
            let facts: Vec<Fact> = self.queued.drain(..self.queued.len().min(GROUP)).collect();
            self.next_number += 1;
            let mut report = Report {
                number: self.next_number,
                ..Report::default()
            };
            for fact in &facts {
                match fact {
                    Fact::Step(step) => report.steps.push(step.clone()),
                    Fact::Result(token) => report.results.push(TrialResult {
                        token: *token,
                        outcome: Some(passed()),
                        keep_sandbox_ms: 0,
                    }),
                }
            }
            report.destroyed = std::mem::take(&mut self.destroyed);
            report.credits = report.destroyed.len() as u32;
            self.sent.push_back((report.number, facts, Instant::now()));
            let message = FromWorker {
                message: Some(Up::Report(report)),
            };
            up.send(message)
                .await
                .map_err(|_| tonic::Status::unavailable("the stream has ended"))?;
        }
        Ok(())
    }
}

fn passed() -> TrialOutcome {
    TrialOutcome {
        status: TrialStatus::Passed.into(),
        ..TrialOutcome::default()
    }
}
