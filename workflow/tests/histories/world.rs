//! A cell with its workers, and the moves that chance makes in it.

use std::collections::{HashMap, HashSet};

use evalgrid_domain::{
    ids::{BatchId, OrgId, RunId},
    limits,
};
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, TrialStatus},
};
use evalgrid_workflow::{
    Batch, BatchPhase, Chance, CheckIns, Event, Kind, Listing, State, admission,
    decide::{self, Holder},
    local, retry, view,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

pub(crate) const WORKERS: [&str; 3] = ["alpha", "beta", "gamma"];

pub(crate) struct World {
    pub(crate) rng: StdRng,
    pub(crate) state: State,
    pub(crate) log: Vec<Event>,
    pub(crate) now_ms: u64,
    pub(crate) organizations: Vec<OrgId>,
    pub(crate) incarnations: HashMap<&'static str, u32>,
    /// Sandboxes whose folder is there, by worker.
    pub(crate) folders: HashMap<&'static str, HashSet<String>>,
    /// Every token ever granted: old ones are tried again and again.
    pub(crate) tokens: Vec<(u64, &'static str)>,
    pub(crate) check_ins: CheckIns,
    /// Batches that ended, as readers saw them: what may be retried.
    pub(crate) ended: Vec<(OrgId, v1::Batch)>,
}

impl World {
    pub(crate) fn new(seed: u64) -> World {
        let mut world = World {
            rng: StdRng::seed_from_u64(seed),
            state: State::default(),
            log: Vec::new(),
            now_ms: 1_800_000_000_000,
            organizations: Vec::new(),
            incarnations: WORKERS.map(|worker| (worker, 0)).into(),
            folders: WORKERS.map(|worker| (worker, HashSet::new())).into(),
            tokens: Vec::new(),
            check_ins: CheckIns::default(),
            ended: Vec::new(),
        };
        for number in 0..2u8 {
            let id = OrgId::new(world.now_ms, [number; 10]);
            let created = decide::create_organization(&world.state, &format!("org-{number}"), id, world.now_ms);
            world.commit_all(created);
            world.organizations.push(id);
        }
        world
    }

    /// As the engine does: apply, append, and what follows from it.
    pub(crate) fn commit_all(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            let mut next = Some(event);
            while let Some(event) = next {
                self.state.apply(&event).unwrap();
                next = decide::after(&self.state, &event);
                if let Some(Kind::BatchEnded(ended)) = &event.kind {
                    let batch = self.state.batch(&BatchId(ended.batch.as_ref().try_into().unwrap())).unwrap();
                    self.ended.push((batch.organization, view::batch(batch, None)));
                }
                self.log.push(event);
            }
        }
    }

    pub(crate) fn chance(&mut self) -> Chance {
        Chance::new(self.rng.random())
    }

    pub(crate) fn worker(&mut self) -> &'static str {
        WORKERS[self.rng.random_range(0..WORKERS.len())]
    }

    pub(crate) fn token(&mut self) -> Option<(u64, &'static str)> {
        (!self.tokens.is_empty()).then(|| {
            // Mostly young ones, so that most of them live.
            let back = self.rng.random_range(0..self.tokens.len().min(8));
            self.tokens[self.tokens.len() - 1 - back]
        })
    }

    pub(crate) fn turn(&mut self) {
        self.now_ms += self.rng.random_range(0..2_000);
        match self.rng.random_range(0..100) {
            0..4 => self.start(),
            4..6 => self.retry(),
            6..9 => self.report(),
            9..11 => self.beat(),
            11..12 => self.finish(),
            12..13 => self.sweep(),
            13..14 => self.resolve(),
            14..30 => self.grant(),
            30..60 => self.step(),
            60..70 => self.result(),
            70..73 => self.throttle(),
            73..75 => self.custody(),
            75..82 => self.fail(),
            82..88 => self.hello(),
            88..91 => self.expire(),
            91..94 => self.destroy(),
            94..96 => self.cancel(),
            96..97 => self.give_up(),
            97..98 => self.archive(),
            98 => self.now_ms += [11 * 60_000, 80 * 3_600_000][self.rng.random_range(0..2)],
            _ => {
                let events = decide::abandon(&self.state, self.now_ms);
                self.commit_all(events);
            }
        }
    }

    pub(crate) fn start(&mut self) {
        let organization = self.organizations[self.rng.random_range(0..self.organizations.len())];
        let (cases, variants, trials) = (
            self.rng.random_range(1..4),
            self.rng.random_range(1..3),
            self.rng.random_range(1..4),
        );
        let key = self.rng.random_bool(0.5).then(|| format!("key-{}", self.rng.random_range(0..4)));
        let started = log::BatchStarted {
            batch: BatchId::new(self.now_ms, self.rng.random()).0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            request_hash: format!("{}", self.rng.random_range(0..2)),
            idempotency_key: key,
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default(); cases],
            variants: vec![
                v1::VariantInfo {
                    provider: "process".into(),
                    ..Default::default()
                };
                variants
            ],
            trials,
            trigger: None,
            variant_ids: vec![String::new(); cases * variants],
            local: self.rng.random_bool(0.3),
            checks_in: self.rng.random_bool(0.7),
            ..Default::default()
        };
        self.admit(organization, started);
    }

    /// As the scheduler does: what counts is who is running and has not gone quiet.
    pub(crate) fn admit(&mut self, organization: OrgId, started: log::BatchStarted) {
        let id = BatchId(started.batch.as_ref().try_into().unwrap());
        let (check_ins, now_ms) = (&self.check_ins, self.now_ms);
        let quiet = |batch: &Batch| check_ins.is_quiet(batch, now_ms);
        if let Ok(decide::Start::Admit(events)) = decide::start(&self.state, started, &organization, &quiet, now_ms) {
            let running = &self.state.organization(&organization).unwrap().running;
            let counted = running.iter().filter(|id| !quiet(self.state.batch(id).unwrap())).count();
            assert!(counted < limits::MAX_RUNNING_BATCHES, "three batches run at once at the most");
            self.commit_all(events);
            self.check_ins.hear(id, self.now_ms);
        }
    }

    pub(crate) fn retry(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let (organization, batch) = self.ended[self.rng.random_range(0..self.ended.len())].clone();
        let Ok(carried) = retry::carried(&batch) else { return };
        let started = log::BatchStarted {
            batch: BatchId::new(self.now_ms, self.rng.random()).0.to_vec().into(),
            organization_id: organization.to_string(),
            request: batch.request,
            request_hash: "retry".into(),
            suite: batch.suite,
            trials: batch.runs[0].trials.len() as u32,
            variant_ids: batch.runs.iter().map(|run| run.variant_id.clone()).collect(),
            cases: batch.cases,
            variants: batch.variants,
            retry_of: Some(batch.id.parse::<BatchId>().unwrap().0.to_vec().into()),
            carried,
            ..Default::default()
        };
        self.admit(organization, started);
    }

    /// A local batch that has not been archived, open or not.
    pub(crate) fn local(&mut self) -> Option<(OrgId, BatchId)> {
        let mut known: Vec<_> = self
            .state
            .batches()
            .filter(|batch| batch.local.is_some())
            .map(|batch| batch.id)
            .collect();
        known.sort();
        let id = (!known.is_empty()).then(|| known[self.rng.random_range(0..known.len())])?;
        Some((self.state.batch(&id).unwrap().organization, id))
    }

    /// Whether the batch's machine is heard, as the scheduler decides it.
    pub(crate) fn heard(&mut self, organization: &OrgId, id: &BatchId) -> bool {
        let Ok(batch) = local::open(&self.state, organization, id) else {
            return false;
        };
        if self.check_ins.is_quiet(batch, self.now_ms) {
            let closed = local::close_quiet(batch, self.now_ms);
            self.commit_all([closed]);
            assert!(local::open(&self.state, organization, id).is_err(), "it came back too late");
            return false;
        }
        let recorded = local::checked_in(batch, self.now_ms);
        self.check_ins.hear(*id, self.now_ms);
        self.commit_all(recorded);
        true
    }

    pub(crate) fn beat(&mut self) {
        if let Some((organization, id)) = self.local() {
            self.heard(&organization, &id);
        }
    }

    pub(crate) fn report(&mut self) {
        let Some((organization, id)) = self.local() else { return };
        if !self.heard(&organization, &id) {
            return;
        }
        let run = RunId {
            batch: id,
            run: self.rng.random_range(0..4),
        };
        let ordinal = self.rng.random_range(0..4);
        let status = [TrialStatus::Passed, TrialStatus::Failed, TrialStatus::Void][self.rng.random_range(0..3)];
        let outcome = || v1::TrialOutcome {
            status: status.into(),
            ..Default::default()
        };
        if let Ok(event) = local::report(&self.state, &organization, run, ordinal, outcome(), self.now_ms) {
            self.commit_all(event);
            let again = local::report(&self.state, &organization, run, ordinal, outcome(), self.now_ms);
            assert_eq!(again, Ok(None), "the same report again changes nothing");
        }
    }

    pub(crate) fn finish(&mut self) {
        let Some((organization, id)) = self.local() else { return };
        if let Ok(event) = local::finish(&self.state, &organization, &id, self.now_ms) {
            self.commit_all(event);
            let again = local::finish(&self.state, &organization, &id, self.now_ms);
            assert_eq!(again, Ok(None), "finishing twice is finishing once");
        }
    }

    pub(crate) fn sweep(&mut self) {
        if self.rng.random_bool(0.2) {
            // The scheduler has started anew: nobody has been heard yet.
            self.check_ins = CheckIns::default();
        }
        let events = self.check_ins.sweep(&self.state, self.now_ms, self.now_ms);
        self.commit_all(events);
    }

    pub(crate) fn resolve(&mut self) {
        let mut open: Vec<_> = self.state.batches().flat_map(Batch::trials).map(|(key, _)| key).collect();
        open.sort();
        if open.is_empty() {
            return;
        }
        let key = open[self.rng.random_range(0..open.len())];
        let before = self.state.trial(key).unwrap().outcome().is_some();
        match decide::resolve(&self.state, key, "stuck", self.now_ms) {
            Ok(event) => self.commit_all([event]),
            Err(refusal) => assert_eq!((before, refusal), (true, decide::Refusal::Settled)),
        }
    }

    pub(crate) fn grant(&mut self) {
        let worker = self.worker();
        let Some(key) = self.state.next_for(worker, &["process".into()], self.now_ms) else {
            return;
        };
        let incarnation = self.incarnations[worker].to_string();
        let holder = Holder {
            worker_id: worker,
            incarnation: &incarnation,
            boot_id: "boot",
        };
        for event in decide::grant(&self.state, key, holder, self.now_ms) {
            if let Some(Kind::LeaseGranted(granted)) = &event.kind {
                self.tokens.push((granted.token, worker));
                // The worker may die before it has made the folder.
                if self.rng.random_bool(0.8) {
                    self.folders.get_mut(worker).unwrap().insert(granted.sandbox.clone());
                }
            }
            self.commit_all([event]);
        }
    }

    pub(crate) fn step(&mut self) {
        let Some((token, worker)) = self.token() else { return };
        let step = format!("step.{}", self.rng.random_range(0..6));
        let record = v1::StepRecord {
            token,
            step,
            outcome: 1,
            result: vec![7; 10].into(),
        };
        if let Ok(Some(event)) = decide::step(&self.state, worker, record, self.now_ms) {
            self.commit_all([event]);
        }
    }

    pub(crate) fn result(&mut self) {
        let Some((token, worker)) = self.token() else { return };
        let status = [TrialStatus::Passed, TrialStatus::Failed, TrialStatus::Void][self.rng.random_range(0..3)];
        let outcome = v1::TrialOutcome {
            status: status.into(),
            ..Default::default()
        };
        let mut chance = self.chance();
        if let Ok(event) = decide::result(&self.state, worker, token, outcome, &mut chance, self.now_ms) {
            let keep_ms = [0, 60_000, u64::MAX][self.rng.random_range(0..3)];
            let event = decide::keep_sandbox(&self.state, worker, event, keep_ms, self.now_ms);
            self.commit_all([event]);
        }
    }

    pub(crate) fn fail(&mut self) {
        let Some((token, worker)) = self.token() else { return };
        let failure = v1::AttemptFailure {
            token,
            kind: self.rng.random_range(1..4),
            reason: "it broke".into(),
        };
        let mut chance = self.chance();
        if let Ok(Some(event)) = decide::attempt_failed(&self.state, worker, &failure, &mut chance, self.now_ms) {
            self.commit_all([event]);
        }
    }

    pub(crate) fn hello(&mut self) {
        let worker = self.worker();
        let mut chance = self.chance();
        if self.rng.random_bool(0.5) {
            *self.incarnations.get_mut(worker).unwrap() += 1;
        }
        let living = self.state.leases().map(|(token, _)| token).collect::<Vec<_>>();
        let held = living.into_iter().filter(|_| self.rng.random_bool(0.7)).collect();
        let hello = v1::Hello {
            worker_id: worker.into(),
            incarnation: self.incarnations[worker].to_string(),
            boot_id: if self.rng.random_bool(0.9) { "boot".into() } else { "later".into() },
            slots: 4,
            providers: vec!["process".into()],
            held,
            sandboxes: self.folders[worker].iter().cloned().collect(),
            role: evalgrid_proto::v1::WorkerRole::Executor.into(),
        };
        let events = decide::hello_leases(&self.state, &hello, &mut chance, self.now_ms);
        self.commit_all(events);
        let events = decide::hello_sandboxes(&self.state, &hello, self.now_ms);
        self.commit_all(events);
        let listing = Listing::Folder {
            boot_id: &hello.boot_id,
            names: &hello.sandboxes,
        };
        let (unneeded, foreign) = decide::unneeded(&self.state, &listing);
        assert!(foreign.is_empty(), "every name here is ours: {foreign:?}");
        for name in unneeded {
            self.folders.get_mut(worker).unwrap().remove(name);
        }
    }

    pub(crate) fn expire(&mut self) {
        let worker = self.worker();
        let mut chance = self.chance();
        let events = decide::expire_worker(&self.state, worker, &mut chance, self.now_ms);
        self.commit_all(events);
    }

    pub(crate) fn destroy(&mut self) {
        let worker = self.worker();
        let name = self
            .state
            .custody()
            .map(|(name, _)| name.to_owned())
            .find(|name| !decide::needed(&self.state, name));
        if let Some(name) = name {
            let events = decide::destroyed(&self.state, &name, worker, self.now_ms);
            self.commit_all(events);
        }
    }

    pub(crate) fn throttle(&mut self) {
        let Some((token, worker)) = self.token() else { return };
        let throttled = v1::Throttled {
            token,
            model_key: admission::model_key(&v1::VariantInfo::default()),
            retry_after_ms: self.rng.random_range(0..3_000),
        };
        let mut chance = self.chance();
        if let Ok(event) = decide::throttled(&self.state, worker, &throttled, &mut chance, self.now_ms) {
            self.commit_all([event]);
        }
    }

    /// Something is heard of a sandbox, or its worker is asked to destroy it.
    pub(crate) fn custody(&mut self) {
        let worker = self.worker();
        let names: Vec<String> = self.state.custody().map(|(name, _)| name.to_owned()).collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.rng.random_range(0..names.len())].clone();
        let event = if self.rng.random_bool(0.5) {
            let provider_id = format!("id-{}", self.rng.random_range(0..2));
            let created = v1::CreatedSandbox {
                sandbox: name,
                provider_id,
            };
            decide::created(&self.state, worker, created, self.now_ms)
        } else {
            decide::ask_to_destroy(&self.state, &name, self.now_ms)
        };
        self.commit_all(event);
    }

    pub(crate) fn cancel(&mut self) {
        let Some((id, organization)) = self.state.batches().map(|batch| (batch.id, batch.organization)).min() else {
            return;
        };
        if let Ok(events) = decide::cancel(&self.state, &organization, &id, self.now_ms) {
            self.commit_all(events);
        }
    }

    pub(crate) fn give_up(&mut self) {
        let mut chance = self.chance();
        let events = decide::give_up_absent(&self.state, &|worker| worker == "alpha", 1_000, &mut chance, self.now_ms);
        self.commit_all(events);
    }

    pub(crate) fn archive(&mut self) {
        let ended = self
            .state
            .batches()
            .filter(|batch| batch.phase != BatchPhase::Running)
            .map(|batch| batch.id)
            .min();
        let Some(id) = ended else { return };
        let batch = self.state.batch(&id).unwrap();
        if matches!(&batch.phase, BatchPhase::Ended { manifest: None, .. }) {
            let event = decide::archived(batch, v1::ObjectRef::default(), view::summary(batch), self.now_ms);
            self.commit_all([event]);
        }
    }
}
