//! Random histories of commands: whatever happens in whatever order, the promises of the design hold, and every prefix of the log recovers.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` runs that one alone, `EVALGRID_LONG=1` a hundred times as many.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};

use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1::{self as log},
    v1::{self, TrialStatus},
};
use evalgrid_workflow::{
    Chance, Event, Kind, Listing, Phase, State, TrialKey, admission,
    decide::{self, Holder},
    view,
};
use prost::Message as _;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

const WORKERS: [&str; 3] = ["alpha", "beta", "gamma"];

struct World {
    rng: StdRng,
    state: State,
    log: Vec<Event>,
    now_ms: u64,
    organizations: Vec<OrgId>,
    incarnations: HashMap<&'static str, u32>,
    /// Sandboxes whose folder is there, by worker.
    folders: HashMap<&'static str, HashSet<String>>,
    /// Every token ever granted: old ones are tried again and again.
    tokens: Vec<(u64, &'static str)>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut world = World {
            rng: StdRng::seed_from_u64(seed),
            state: State::default(),
            log: Vec::new(),
            now_ms: 1_800_000_000_000,
            organizations: Vec::new(),
            incarnations: WORKERS.map(|worker| (worker, 0)).into(),
            folders: WORKERS.map(|worker| (worker, HashSet::new())).into(),
            tokens: Vec::new(),
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
    fn commit_all(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            let mut next = Some(event);
            while let Some(event) = next {
                self.state.apply(&event).unwrap();
                next = decide::after(&self.state, &event);
                self.log.push(event);
            }
        }
    }

    fn chance(&mut self) -> Chance {
        Chance::new(self.rng.random())
    }

    fn worker(&mut self) -> &'static str {
        WORKERS[self.rng.random_range(0..WORKERS.len())]
    }

    fn token(&mut self) -> Option<(u64, &'static str)> {
        (!self.tokens.is_empty()).then(|| {
            // Mostly young ones, so that most of them live.
            let back = self.rng.random_range(0..self.tokens.len().min(8));
            self.tokens[self.tokens.len() - 1 - back]
        })
    }

    fn turn(&mut self) {
        self.now_ms += self.rng.random_range(0..2_000);
        match self.rng.random_range(0..100) {
            0..6 => self.start(),
            6..30 => self.grant(),
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
            98..99 => self.now_ms += 80 * 3_600_000,
            _ => {
                let events = decide::abandon(&self.state, self.now_ms);
                self.commit_all(events);
            }
        }
    }

    fn start(&mut self) {
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
        };
        if let Ok(decide::Start::Admit(events)) = decide::start(&self.state, started, &organization, self.now_ms) {
            self.commit_all(events);
        }
    }

    fn grant(&mut self) {
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

    fn step(&mut self) {
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

    fn result(&mut self) {
        let Some((token, worker)) = self.token() else { return };
        let status = [TrialStatus::Passed, TrialStatus::Failed, TrialStatus::Void][self.rng.random_range(0..3)];
        let outcome = v1::TrialOutcome {
            status: status.into(),
            ..Default::default()
        };
        if let Ok(event) = decide::result(&self.state, worker, token, outcome, self.now_ms) {
            self.commit_all([event]);
        }
    }

    fn fail(&mut self) {
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

    fn hello(&mut self) {
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

    fn expire(&mut self) {
        let worker = self.worker();
        let mut chance = self.chance();
        let events = decide::expire_worker(&self.state, worker, &mut chance, self.now_ms);
        self.commit_all(events);
    }

    fn destroy(&mut self) {
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

    fn throttle(&mut self) {
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
    fn custody(&mut self) {
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

    fn cancel(&mut self) {
        let Some((id, organization)) = self.state.batches().map(|batch| (batch.id, batch.organization)).min() else {
            return;
        };
        if let Ok(events) = decide::cancel(&self.state, &organization, &id, self.now_ms) {
            self.commit_all(events);
        }
    }

    fn give_up(&mut self) {
        let mut chance = self.chance();
        let events = decide::give_up_absent(&self.state, &|worker| worker == "alpha", 1_000, &mut chance, self.now_ms);
        self.commit_all(events);
    }

    fn archive(&mut self) {
        let ended = self
            .state
            .batches()
            .filter(|batch| batch.unsettled == 0)
            .map(|batch| batch.id)
            .min();
        let Some(id) = ended else { return };
        let batch = self.state.batch(&id).unwrap();
        if matches!(&batch.phase, evalgrid_workflow::BatchPhase::Ended { manifest: None, .. }) {
            let event = decide::archived(batch, v1::ObjectRef::default(), view::summary(batch), self.now_ms);
            self.commit_all([event]);
        }
    }
}

/// What section 1 of the design promises, from the log alone.
fn check_log(log: &[Event]) {
    let mut verdicts = HashSet::new();
    let mut steps = HashSet::new();
    let mut sandbox_of = HashMap::new();
    let mut custody = HashSet::new();
    let mut last_token = 0;
    let mut last_ms = 0;
    for event in log {
        assert!(event.at_ms >= last_ms, "time does not go back");
        last_ms = event.at_ms;
        match event.kind.as_ref().unwrap() {
            Kind::LeaseGranted(granted) => {
                assert!(granted.token > last_token, "tokens only grow");
                last_token = granted.token;
                sandbox_of.insert(granted.token, granted.sandbox.clone());
                assert_eq!(
                    custody.insert(granted.sandbox.clone()),
                    !granted.adopt,
                    "custody begins once, with the first lease"
                );
            }
            Kind::StepRecorded(step) => {
                let sandbox = &sandbox_of[&step.token];
                assert!(
                    steps.insert((sandbox.clone(), step.step.clone())),
                    "{} is recorded twice in {sandbox}",
                    step.step
                );
            }
            Kind::TrialSettled(settled) => {
                let trial = settled.trial.clone().unwrap();
                assert!(verdicts.insert((trial.batch, trial.run, trial.ordinal)), "a trial has one verdict");
            }
            Kind::SandboxDestroyed(gone) => assert!(custody.remove(&gone.sandbox), "custody ends once"),
            _ => {}
        }
    }
}

/// What must hold in every state.
fn check_state(state: &State) {
    let mut leased = HashSet::new();
    for (token, lease) in state.leases() {
        assert!(leased.insert(lease.trial), "a trial has one lease");
        let trial = state.trial(lease.trial).unwrap();
        assert!(
            matches!(trial.phase, Phase::Leased { token: held } if held == token),
            "lease and trial agree"
        );
        let name = trial.sandbox.as_deref().unwrap();
        assert!(
            state
                .custody()
                .any(|(known, sandbox)| known == name && sandbox.trial == lease.trial),
            "a leased sandbox is in custody"
        );
    }
    // catalogue 39, 40: the holders of every limit are those who live, after whatever has happened.
    let starting = state.leases().filter(|(_, lease)| {
        let name = state.trial(lease.trial).and_then(|trial| trial.sandbox.as_deref());
        name.and_then(|name| state.sandbox(name)).is_some_and(|sandbox| !sandbox.created)
    });
    let (starting, living) = (starting.count(), state.custody().count());
    let (counted_starting, counted_living) = state.sandbox_counts("process");
    assert_eq!(counted_living, living, "living sandboxes are those in custody");
    assert_eq!(
        counted_starting, starting,
        "who starts a sandbox has a lease, and there is no sign of it yet"
    );
    let key = admission::model_key(&v1::VariantInfo::default());
    assert_eq!(state.model_holders(&key), leased.len(), "holders of a model key are living leases");
    let queued = state.batches().flat_map(|batch| batch.trials());
    let queued = queued.filter(|(_, trial)| matches!(trial.phase, Phase::Queued { .. })).count();
    assert_eq!(state.waiting(), queued, "the queue holds those who wait, each once");
    for batch in state.batches() {
        let open = batch.trials().filter(|(_, trial)| trial.outcome().is_none()).count();
        assert_eq!(open, batch.unsettled as usize, "the count of open trials is right");
        let running = state.organization(&batch.organization).unwrap().running.contains(&batch.id);
        assert_eq!(running, open > 0, "a batch holds its organization's slot exactly while it runs");
        for run in view::batch(batch, None).runs {
            let counts = run.distribution.unwrap();
            assert_eq!(counts.trials, counts.scored + counts.voided, "denominators are honest");
        }
    }
}

fn describe(state: &State) -> String {
    let mut batches: Vec<_> = state.batches().map(|batch| (batch.id, format!("{batch:?}"))).collect();
    batches.sort();
    let leases: Vec<_> = state.leases().map(|(token, lease)| format!("{token} {lease:?}")).collect();
    let custody: Vec<_> = state.custody().map(|(name, sandbox)| format!("{name} {sandbox:?}")).collect();
    format!("{batches:?} {leases:?} {custody:?}")
}

/// Whoever waits before a snapshot waits behind it: nobody is forgotten, nobody comes in from nowhere.
fn check_waiting(restored: &State, replayed: &State) {
    let waiting = |state: &State| {
        let mut state = state.clone();
        let (mut now_ms, mut keys) = (state.last_ms() + 3_600_000, Vec::new());
        while let Some((worker, key)) = WORKERS
            .iter()
            .find_map(|worker| Some((*worker, state.next_for(worker, &["process".into()], now_ms)?)))
        {
            let holder = Holder {
                worker_id: worker,
                incarnation: "x",
                boot_id: "boot",
            };
            now_ms += 1;
            for event in decide::grant(&state, key, holder, now_ms) {
                state.apply(&event).unwrap();
            }
            keys.push(key);
        }
        keys.sort();
        keys
    };
    assert_eq!(waiting(restored), waiting(replayed), "the same trials wait");
}

/// A replay of the log is the state; so is a replay of any prefix, and it can go on from there.
fn check_prefixes(log: &[Event], end: &State) {
    let mut replayed = State::default();
    // A snapshot of any prefix, and the rest of the log behind it, is the state as well.
    let mut from_snapshot = State::default();
    for (index, event) in log.iter().enumerate() {
        replayed.apply(event).unwrap();
        from_snapshot.apply(event).unwrap();
        if index % 41 == 0 {
            let saved = replayed.save().encode_to_vec();
            assert_eq!(from_snapshot.save().encode_to_vec(), saved, "snapshot and replay agree");
            from_snapshot = State::restore(&log::StateSnapshot::decode(saved.as_slice()).unwrap()).unwrap();
            assert_eq!(describe(&from_snapshot), describe(&replayed), "a snapshot keeps everything");
            check_waiting(&from_snapshot, &replayed);
        }
        let missing = decide::catch_up(&replayed, replayed.last_ms());
        if missing.is_empty() {
            check_state(&replayed);
            continue;
        }
        let mut recovered = replayed.clone();
        missing.iter().for_each(|event| recovered.apply(event).unwrap());
        check_state(&recovered);
    }
    assert_eq!(describe(&replayed), describe(end), "replay and life agree");
    assert_eq!(from_snapshot.save(), end.save(), "a snapshot and its tail agree with life");
}

fn run(seed: u64) {
    println!("seed {seed}");
    let mut world = World::new(seed);
    for _ in 0..400 {
        world.turn();
    }
    check_log(&world.log);
    check_prefixes(&world.log, &world.state);
    // Nothing new comes, the workers are gone, time goes on: every batch ends.
    for _ in 0..60 {
        world.now_ms += 80 * 3_600_000;
        for worker in WORKERS {
            let events = decide::expire_worker(&world.state, worker, &mut Chance::new(0), world.now_ms);
            world.commit_all(events);
        }
        let events = decide::give_up_absent(&world.state, &|_| true, 0, &mut Chance::new(0), world.now_ms);
        world.commit_all(events);
        let events = decide::abandon(&world.state, world.now_ms);
        world.commit_all(events);
    }
    assert!(world.state.batches().all(|batch| batch.unsettled == 0), "every batch ends");
    check_log(&world.log);
}

#[test]
fn random_histories_keep_every_promise() {
    if let Ok(seed) = std::env::var("EVALGRID_SEED") {
        return run(seed.parse().unwrap());
    }
    let seeds = if std::env::var_os("EVALGRID_LONG").is_some() { 20_000 } else { 200 };
    (0..seeds).for_each(run);
}

#[test]
fn an_event_that_does_not_fit_is_refused() {
    fn check(what: &str, kind: Kind) {
        let mut world = World::new(1);
        world.start();
        let event = decide::event(world.now_ms, kind);
        assert!(world.state.apply(&event).is_err(), "{what}");
    }
    let nowhere = Some(log::TrialRef {
        batch: vec![0; 16].into(),
        run: 0,
        ordinal: 1,
    });
    check(
        "a step without a lease",
        Kind::StepRecorded(log::StepRecorded {
            token: 9,
            ..Default::default()
        }),
    );
    check(
        "a verdict for no batch",
        Kind::TrialSettled(log::TrialSettled {
            trial: nowhere.clone(),
            token: 0,
            outcome: Some(Default::default()),
        }),
    );
    check(
        "a lease for no batch",
        Kind::LeaseGranted(log::LeaseGranted {
            token: 1,
            trial: nowhere,
            ..Default::default()
        }),
    );
    check(
        "a batch that ends early",
        Kind::BatchEnded(log::BatchEnded {
            batch: vec![0; 16].into(),
            ..Default::default()
        }),
    );
    check(
        "custody that was never taken",
        Kind::SandboxDestroyed(log::SandboxDestroyed {
            sandbox: "x".into(),
            worker_id: "y".into(),
        }),
    );
    check(
        "a short id",
        Kind::BatchEnded(log::BatchEnded {
            batch: vec![0; 3].into(),
            ..Default::default()
        }),
    );
}

#[test]
fn fairness_between_organizations() {
    let mut world = World::new(7);
    let start = |world: &mut World, organization: usize, trials: u32| {
        let organization = world.organizations[organization];
        let started = log::BatchStarted {
            batch: BatchId::new(world.now_ms, [trials as u8; 10]).0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default(); 10],
            variants: vec![v1::VariantInfo {
                provider: "process".into(),
                ..Default::default()
            }],
            trials,
            variant_ids: vec![String::new(); 10],
            ..Default::default()
        };
        let decide::Start::Admit(events) = decide::start(&world.state, started, &organization, world.now_ms).unwrap() else {
            panic!()
        };
        world.commit_all(events);
    };
    start(&mut world, 0, 10);
    let holder = Holder {
        worker_id: "alpha",
        incarnation: "0",
        boot_id: "boot",
    };
    let grant = |world: &mut World| -> TrialKey {
        let key = world.state.next_for("alpha", &["process".into()], world.now_ms).unwrap();
        let events = decide::grant(&world.state, key, holder, world.now_ms);
        world.commit_all(events);
        key
    };
    grant(&mut world);
    start(&mut world, 1, 1);
    let served = [grant(&mut world), grant(&mut world)].map(|key| world.state.batch(&key.batch).unwrap().organization);
    assert!(
        served.contains(&world.organizations[1]),
        "the newcomer starts within two dispatches"
    );
}
