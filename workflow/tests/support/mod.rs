//! A cell without threads, clocks or disks: the state, its log, and the moves of workers, as the engine makes them.
#![allow(clippy::unwrap_used, dead_code, reason = "each test file uses its part")]

use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{log::v1 as log, v1};
use evalgrid_workflow::{
    Chance, Event, Kind, Limits, Phase, State, Trial, TrialKey,
    decide::{self, Holder},
};

pub struct Cell {
    pub state: State,
    pub log: Vec<Event>,
    pub now_ms: u64,
    pub chance: Chance,
    batches: u64,
}

/// What a batch is like.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    pub cases: usize,
    pub trials: u32,
    pub provider: &'a str,
    pub model: &'a str,
}

pub const SMALL: Shape<'_> = Shape {
    cases: 1,
    trials: 1,
    provider: "process",
    model: "maker/small",
};

pub const MODEL_KEY: &str = "command/maker";

impl Cell {
    pub fn new(seed: u64) -> Cell {
        Cell {
            state: State::default(),
            log: Vec::new(),
            now_ms: 1_800_000_000_000,
            chance: Chance::new(seed),
            batches: 0,
        }
    }

    pub fn commit_all(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            let mut next = Some(event);
            while let Some(event) = next {
                self.state.apply(&event).unwrap();
                next = decide::after(&self.state, &event);
                self.log.push(event);
            }
        }
    }

    /// The same cell after a crash: only its log is left, and the operator's limits.
    pub fn recovered(&self, limits: Limits) -> Cell {
        let mut cell = Cell::new(1);
        cell.now_ms = self.now_ms;
        for event in &self.log {
            cell.state.apply(event).unwrap();
        }
        cell.log = self.log.clone();
        cell.state.configure(limits);
        cell
    }

    pub fn organization(&mut self, number: u32) -> OrgId {
        let mut random = [0; 10];
        random[..4].copy_from_slice(&number.to_be_bytes());
        let id = OrgId::new(self.now_ms, random);
        let created = decide::create_organization(&self.state, &format!("org-{number}"), id, self.now_ms);
        self.commit_all(created);
        id
    }

    /// Past the limit of running batches, so that few organizations can have many trials.
    pub fn start(&mut self, organization: OrgId, shape: Shape<'_>) -> BatchId {
        self.batches += 1;
        let mut random = [0; 10];
        random[..8].copy_from_slice(&self.batches.to_be_bytes());
        let id = BatchId::new(self.now_ms, random);
        let variant = v1::VariantInfo {
            harness: "command".into(),
            model: shape.model.into(),
            provider: shape.provider.into(),
            ..Default::default()
        };
        let started = log::BatchStarted {
            batch: id.0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default(); shape.cases],
            variants: vec![variant],
            trials: shape.trials,
            variant_ids: vec![String::new(); shape.cases],
            ..Default::default()
        };
        self.commit_all([decide::event(self.now_ms, Kind::BatchStarted(started))]);
        id
    }

    /// The next lease for a worker that has every provider of these tests, if there is one now.
    pub fn lease(&mut self, worker_id: &str) -> Option<(TrialKey, u64)> {
        let providers = ["process".to_owned(), "e2b".to_owned()];
        let key = self.state.next_for(worker_id, &providers, self.now_ms)?;
        let holder = Holder {
            worker_id,
            incarnation: "1",
            boot_id: "boot",
        };
        let events = decide::grant(&self.state, key, holder, self.now_ms);
        self.commit_all(events);
        match self.trial(key).phase {
            Phase::Leased { token } => Some((key, token)),
            _ => None,
        }
    }

    /// As many as there are now.
    pub fn leases(&mut self, worker_id: &str) -> Vec<(TrialKey, u64)> {
        std::iter::from_fn(|| self.lease(worker_id)).collect()
    }

    pub fn trial(&self, key: TrialKey) -> &Trial {
        self.state.trial(key).unwrap()
    }

    pub fn sandbox(&self, key: TrialKey) -> String {
        self.trial(key).sandbox.clone().unwrap()
    }

    pub fn organization_of(&self, key: TrialKey) -> OrgId {
        self.state.batch(&key.batch).unwrap().organization
    }

    pub fn step(&mut self, worker_id: &str, token: u64, step: &str) {
        let record = v1::StepRecord {
            token,
            step: step.into(),
            outcome: 1,
            ..Default::default()
        };
        let event = decide::step(&self.state, worker_id, record, self.now_ms).unwrap();
        self.commit_all(event);
    }

    pub fn pass(&mut self, worker_id: &str, token: u64) {
        let outcome = v1::TrialOutcome {
            status: v1::TrialStatus::Passed.into(),
            ..Default::default()
        };
        let event = decide::result(&self.state, worker_id, token, outcome, &mut self.chance, self.now_ms).unwrap();
        self.commit_all([event]);
    }

    pub fn destroyed(&mut self, worker_id: &str, name: &str) {
        let events = decide::destroyed(&self.state, name, worker_id, self.now_ms);
        self.commit_all(events);
    }

    pub fn throttle(&mut self, worker_id: &str, token: u64, retry_after_ms: u64) {
        let report = v1::Throttled {
            token,
            model_key: MODEL_KEY.into(),
            retry_after_ms,
        };
        let event = decide::throttled(&self.state, worker_id, &report, &mut self.chance, self.now_ms).unwrap();
        self.commit_all([event]);
    }

    pub fn expire(&mut self, worker_id: &str) {
        let events = decide::expire_worker(&self.state, worker_id, &mut self.chance, self.now_ms);
        self.commit_all(events);
    }

    /// When a trial that waits may be leased again.
    pub fn not_before_ms(&self, key: TrialKey) -> u64 {
        match self.trial(key).phase {
            Phase::Queued { not_before_ms, .. } => not_before_ms,
            ref other => panic!("it does not wait: {other:?}"),
        }
    }
}
