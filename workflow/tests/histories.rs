//! Random histories of commands: whatever happens in whatever order, the promises of the design hold, and every prefix of the log recovers.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` runs that one alone, `EVALGRID_LONG=1` a hundred times as many.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};

use evalgrid_domain::{
    ids::{BatchId, OrgId, RunId},
    limits,
};
use evalgrid_proto::{
    log::v1::{self as log},
    v1::{self, TrialStatus},
};
use evalgrid_workflow::{
    Batch, BatchPhase, Chance, CheckIns, Event, Kind, Listing, Phase, State, TrialKey, admission,
    decide::{self, Holder},
    local, retry, view,
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
    check_ins: CheckIns,
    /// Batches that ended, as readers saw them: what may be retried.
    ended: Vec<(OrgId, v1::Batch)>,
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
    fn commit_all(&mut self, events: impl IntoIterator<Item = Event>) {
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
            local: self.rng.random_bool(0.3),
            checks_in: self.rng.random_bool(0.7),
            ..Default::default()
        };
        self.admit(organization, started);
    }

    /// As the scheduler does: what counts is who is running and has not gone quiet.
    fn admit(&mut self, organization: OrgId, started: log::BatchStarted) {
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

    fn retry(&mut self) {
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
    fn local(&mut self) -> Option<(OrgId, BatchId)> {
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
    fn heard(&mut self, organization: &OrgId, id: &BatchId) -> bool {
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

    fn beat(&mut self) {
        if let Some((organization, id)) = self.local() {
            self.heard(&organization, &id);
        }
    }

    fn report(&mut self) {
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

    fn finish(&mut self) {
        let Some((organization, id)) = self.local() else { return };
        if let Ok(event) = local::finish(&self.state, &organization, &id, self.now_ms) {
            self.commit_all(event);
            let again = local::finish(&self.state, &organization, &id, self.now_ms);
            assert_eq!(again, Ok(None), "finishing twice is finishing once");
        }
    }

    fn sweep(&mut self) {
        if self.rng.random_bool(0.2) {
            // The scheduler has started anew: nobody has been heard yet.
            self.check_ins = CheckIns::default();
        }
        let events = self.check_ins.sweep(&self.state, self.now_ms, self.now_ms);
        self.commit_all(events);
    }

    fn resolve(&mut self) {
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
        let mut chance = self.chance();
        if let Ok(event) = decide::result(&self.state, worker, token, outcome, &mut chance, self.now_ms) {
            let keep_ms = [0, 60_000, u64::MAX][self.rng.random_range(0..3)];
            let event = decide::keep_sandbox(&self.state, worker, event, keep_ms, self.now_ms);
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

/// What section 1 of the design promises, from the log alone.
fn check_log(log: &[Event]) {
    let mut verdicts = HashSet::new();
    let mut local = HashMap::new();
    let mut steps = HashSet::new();
    let mut sandbox_of = HashMap::new();
    let mut custody = HashSet::new();
    let mut kept_until = HashMap::new();
    let mut last_token = 0;
    let mut last_ms = 0;
    for event in log {
        assert!(event.at_ms >= last_ms, "time does not go back");
        last_ms = event.at_ms;
        match event.kind.as_ref().unwrap() {
            Kind::BatchStarted(started) => {
                let all = (0..started.variant_ids.len() as u32).flat_map(|run| (1..=started.trials).map(move |ordinal| (run, ordinal)));
                let all: Vec<_> = all.map(|(run, ordinal)| (started.batch.clone(), run, ordinal)).collect();
                if started.local {
                    local.insert(started.batch.clone(), all);
                }
                for trial in &started.carried {
                    assert!(verdicts.insert((started.batch.clone(), trial.run, trial.ordinal)), "carried once");
                }
            }
            Kind::LocalBatchClosed(closed) => {
                let all = local.get_mut(&closed.batch).expect("only local batches are closed");
                for trial in std::mem::take(all) {
                    verdicts.insert(trial);
                }
            }
            Kind::LeaseGranted(granted) => {
                let trial = granted.trial.clone().unwrap();
                assert!(!local.contains_key(&trial.batch), "a local trial is never leased");
                assert!(
                    !verdicts.contains(&(trial.batch, trial.run, trial.ordinal)),
                    "a scored trial does not run again"
                );
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
                if let Some(until_ms) = settled.sandbox_kept_until_ms {
                    assert!(until_ms <= event.at_ms + limits::MAX_KEEP_MS, "nothing is kept for ever");
                    kept_until.insert(sandbox_of[&settled.token].clone(), until_ms);
                }
            }
            Kind::SandboxDestroyAsked(asked) => {
                let until_ms = kept_until.get(&asked.sandbox).copied().unwrap_or_default();
                assert!(event.at_ms >= until_ms, "what is kept stays");
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
    let hosted = state.batches().filter(|batch| batch.local.is_none());
    let queued = hosted.flat_map(|batch| batch.trials());
    let queued = queued.filter(|(_, trial)| matches!(trial.phase, Phase::Queued { .. })).count();
    assert_eq!(state.waiting(), queued, "the queue holds those who wait, each once");
    for batch in state.batches() {
        let open = batch.trials().filter(|(_, trial)| trial.outcome().is_none()).count();
        assert_eq!(open, batch.unsettled as usize, "the count of open trials is right");
        let running = state.organization(&batch.organization).unwrap().running.contains(&batch.id);
        let runs = match &batch.local {
            Some(local) => local.closed.is_none(),
            None => open > 0,
        };
        assert_eq!(running, runs, "a batch holds its organization's slot exactly while it runs");
        assert_eq!(running, batch.phase == BatchPhase::Running);
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
    let running = |batch: &Batch| batch.phase == BatchPhase::Running;
    assert!(!world.state.batches().any(running), "every batch ends");
    check_log(&world.log);
}

/// catalogue 1: who waits is in the log, so a replay finds everybody. catalogue 11: every prefix recovers. catalogue 17: every batch ends.
/// catalogue 39, 40: in every state the holders of every limit are those who live.
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
            sandbox_kept_until_ms: None,
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
    for (what, run, ordinal, status, retry_of) in [
        ("a trial that is not there", 7, 1, TrialStatus::Passed, true),
        ("a trial without a score", 0, 1, TrialStatus::Void, true),
        ("a trial of no batch", 0, 1, TrialStatus::Passed, false),
    ] {
        check(
            &format!("carrying over {what}"),
            Kind::BatchStarted(log::BatchStarted {
                batch: vec![5; 16].into(),
                organization_id: World::new(1).organizations[0].to_string(),
                request: Some(v1::ObjectRef::default()),
                suite: Some(v1::Suite::default()),
                cases: vec![v1::CaseInfo::default()],
                variants: vec![v1::VariantInfo::default()],
                trials: 2,
                variant_ids: vec![String::new()],
                retry_of: retry_of.then(|| vec![4; 16].into()),
                carried: vec![log::CarriedTrial {
                    run,
                    ordinal,
                    outcome: Some(v1::TrialOutcome {
                        status: status.into(),
                        ..Default::default()
                    }),
                }],
                ..Default::default()
            }),
        );
    }
    let (mut hosted, _, id) = one_batch(false, false);
    let closed = log::LocalBatchClosed {
        batch: id.0.to_vec().into(),
        ..Default::default()
    };
    let closed = decide::event(hosted.now_ms, Kind::LocalBatchClosed(closed));
    assert!(hosted.state.apply(&closed).is_err(), "a hosted batch is not closed");
    check(
        "a short id",
        Kind::BatchEnded(log::BatchEnded {
            batch: vec![0; 3].into(),
            ..Default::default()
        }),
    );
}

/// A world with one batch of two trials.
fn one_batch(local: bool, checks_in: bool) -> (World, OrgId, BatchId) {
    let mut world = World::new(3);
    let (organization, id) = (world.organizations[0], BatchId::new(world.now_ms, [9; 10]));
    let started = log::BatchStarted {
        batch: id.0.to_vec().into(),
        organization_id: organization.to_string(),
        request: Some(v1::ObjectRef::default()),
        suite: Some(v1::Suite::default()),
        cases: vec![v1::CaseInfo::default()],
        variants: vec![v1::VariantInfo {
            provider: "process".into(),
            ..Default::default()
        }],
        trials: 2,
        variant_ids: vec![String::new()],
        local,
        checks_in,
        ..Default::default()
    };
    world.admit(organization, started);
    (world, organization, id)
}

#[test]
fn a_machine_that_is_quiet_for_ten_minutes_is_gone() {
    use limits::{ABANDONED_AFTER_MS, LOCAL_QUIET_MS};
    // (promised to check in, milliseconds until the sweep, restarted meanwhile, whether it is closed)
    let check = |checks_in: bool, after_ms: u64, restarted: bool, closed: bool| {
        let (mut world, organization, id) = one_batch(true, checks_in);
        world.now_ms += after_ms;
        if restarted {
            world.check_ins = CheckIns::default();
        }
        let quiet = world.check_ins.is_quiet(world.state.batch(&id).unwrap(), world.now_ms);
        let mut events = world.check_ins.sweep(&world.state, world.now_ms, world.now_ms);
        assert_eq!(quiet, !events.is_empty(), "admission and sweep agree");
        if events.is_empty() {
            events = decide::abandon(&world.state, world.now_ms);
        }
        world.commit_all(events);
        let what = format!("{checks_in} {after_ms} {restarted}");
        assert_eq!(local::open(&world.state, &organization, &id).is_err(), closed, "{what}");
        if closed {
            let batch = view::batch(world.state.batch(&id).unwrap(), None);
            assert_eq!(
                (batch.status(), batch.runs[0].status()),
                (v1::BatchStatus::Failed, v1::BatchStatus::Failed),
                "{what}"
            );
            assert_eq!(batch.runs[0].trials[1].outcome.as_ref().unwrap().failure, batch.failure, "{what}");
            let refusal = local::finish(&world.state, &organization, &id, world.now_ms).unwrap_err();
            assert_eq!(
                (&refusal, local::too_late(&batch)),
                (&decide::Refusal::Closed(batch.failure.unwrap()), refusal.clone())
            );
        }
    };
    check(true, LOCAL_QUIET_MS - 1, false, false);
    check(true, LOCAL_QUIET_MS, false, true);
    check(true, LOCAL_QUIET_MS, true, false);
    check(true, ABANDONED_AFTER_MS, true, true);
    check(false, LOCAL_QUIET_MS, false, false);
    check(false, ABANDONED_AFTER_MS - 1, false, false);
    check(false, ABANDONED_AFTER_MS, false, true);
}

#[test]
fn check_ins_are_recorded_often_enough_for_the_six_hour_rule() {
    let (mut world, organization, id) = one_batch(true, true);
    let before = world.log.len();
    // A day of beats, once a minute, with a restart every hour.
    for minute in 0..24 * 60 {
        world.now_ms += 60_000;
        if minute % 60 == 0 {
            world.check_ins = CheckIns::default();
        }
        assert!(world.heard(&organization, &id));
        let events = [
            world.check_ins.sweep(&world.state, world.now_ms, world.now_ms),
            decide::abandon(&world.state, world.now_ms),
        ];
        assert_eq!(events.concat(), [], "it is there");
    }
    assert_eq!(world.log.len() - before, 48, "one record per half hour");
}

/// catalogue 37: early, and with a name.
#[test]
fn what_grows_is_warned_of_once_and_refused_when_full() {
    let (mut world, ..) = one_batch(false, false);
    let key = world.state.next_for("alpha", &["process".into()], world.now_ms).unwrap();
    let holder = Holder {
        worker_id: "alpha",
        incarnation: "0",
        boot_id: "boot",
    };
    let granted = decide::grant(&world.state, key, holder, world.now_ms);
    world.commit_all(granted);
    let mut warned = Vec::new();
    let full = loop {
        let record = v1::StepRecord {
            token: 1,
            step: format!("step.{}", world.log.len()),
            outcome: 1,
            result: vec![0; 20_000].into(),
        };
        match decide::step(&world.state, "alpha", record, world.now_ms) {
            Ok(event) => {
                let event = event.unwrap();
                warned.extend(evalgrid_workflow::growth::near(&world.state, &event));
                world.commit_all([event]);
            }
            Err(decide::Refusal::Full(full)) => break full,
            Err(other) => panic!("{other}"),
        }
    };
    let trial = world.state.trial(key).unwrap();
    let bytes = trial.steps.len() as u64 * 20_000;
    assert_eq!(full.0, limits::RECORDED_BYTES_PER_TRIAL);
    assert!(bytes <= full.0.limit && bytes + 20_000 > full.0.limit);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert_eq!((warned[0].growth, warned[0].whose.clone()), (full.0, Some(key.id().to_string())));
    let refusal = decide::Refusal::Full(full);
    let void = decide::unacceptable(&world.state, "alpha", 1, &refusal, world.now_ms).unwrap();
    world.commit_all([void]);
    let failure = world.state.trial(key).unwrap().outcome().unwrap().failure.clone().unwrap();
    assert!(failure.contains("that is the limit; split the case"), "{failure}");
}

#[test]
fn idempotency_keys_that_have_expired_take_no_room() {
    let (mut world, organization, id) = one_batch(false, false);
    let limit = limits::IDEMPOTENCY_KEYS.limit as usize;
    let cancelled = decide::cancel(&world.state, &organization, &id, world.now_ms).unwrap();
    world.commit_all(cancelled);
    for number in 0..limit {
        let id = BatchId::new(world.now_ms, [(number % 251) as u8, (number / 251) as u8, 1, 1, 1, 1, 1, 1, 1, 1]);
        let started = log::BatchStarted {
            batch: id.0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            idempotency_key: Some(format!("key-{number}")),
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default()],
            variants: vec![v1::VariantInfo::default()],
            trials: 1,
            variant_ids: vec![String::new()],
            ..Default::default()
        };
        let started = decide::event(world.now_ms, Kind::BatchStarted(started));
        world.commit_all([started]);
        let cancelled = decide::cancel(&world.state, &organization, &id, world.now_ms).unwrap();
        world.commit_all(cancelled);
        let archived = decide::archived(
            world.state.batch(&id).unwrap(),
            v1::ObjectRef::default(),
            v1::BatchSummary::default(),
            world.now_ms,
        );
        world.commit_all([archived]);
        world.state.forget(&id);
    }
    let busy = |world: &World, with_key| decide::busy(&world.state, &organization, with_key, &|_| false, world.now_ms);
    assert_eq!(
        busy(&world, true),
        Some(decide::Refusal::Full(limits::Full(limits::IDEMPOTENCY_KEYS)))
    );
    assert_eq!(busy(&world, false), None, "without a key there is room");
    world.now_ms += limits::IDEMPOTENCY_KEY_MS;
    assert_eq!(busy(&world, true), None, "72 hours later there is room again");
}

#[test]
fn a_retry_takes_over_what_was_scored() {
    let (mut world, organization, id) = one_batch(false, false);
    let key = |batch, ordinal| TrialKey { batch, run: 0, ordinal };
    let refused = |world: &World| retry::carried(&view::batch(world.state.batch(&id).unwrap(), None)).unwrap_err();
    assert_eq!(refused(&world), decide::Refusal::StillRunning);
    let holder = Holder {
        worker_id: "alpha",
        incarnation: "0",
        boot_id: "boot",
    };
    let granted = decide::grant(&world.state, key(id, 1), holder, world.now_ms);
    world.commit_all(granted);
    let outcome = v1::TrialOutcome {
        status: TrialStatus::Passed.into(),
        commands: 5,
        evidence: Some(v1::Evidence {
            place: Some(v1::evidence::Place::Inline(vec![1, 2, 3].into())),
        }),
        ..Default::default()
    };
    let event = decide::result(&world.state, "alpha", 1, outcome, &mut Chance::new(1), world.now_ms).unwrap();
    world.commit_all([event]);
    let event = decide::resolve(&world.state, key(id, 2), "stuck", world.now_ms).unwrap();
    world.commit_all([event]);
    let before = world.ended[0].1.clone();
    world.retry();
    let second = world.state.batches().find(|batch| batch.id != id).unwrap().id;
    let batch = view::batch(world.state.batch(&second).unwrap(), None);
    assert_eq!(batch.retry_of.as_deref(), Some(before.id.as_str()));
    let (carried, fresh) = (&batch.runs[0].trials[0], &batch.runs[0].trials[1]);
    let expected = v1::TrialOutcome {
        carried: true,
        ..before.runs[0].trials[0].outcome.clone().unwrap()
    };
    assert_eq!((carried.outcome.as_ref(), fresh.status()), (Some(&expected), TrialStatus::Queued));
    assert_eq!(
        view::batch(world.state.batch(&id).unwrap(), None),
        before,
        "the old batch stays as it was"
    );
    let next = world.state.next_for("alpha", &["process".into()], world.now_ms);
    assert_eq!(next, Some(key(second, 2)), "only the unscored trial waits");
    let granted = decide::grant(&world.state, key(second, 2), holder, world.now_ms);
    world.commit_all(granted);
    let verdict = v1::TrialOutcome {
        status: TrialStatus::Failed.into(),
        commands: 1,
        ..Default::default()
    };
    let event = decide::result(&world.state, "alpha", 2, verdict, &mut Chance::new(1), world.now_ms).unwrap();
    world.commit_all([event]);
    let (_, whole) = world.ended.last().unwrap().clone();
    let counts = whole.runs[0].distribution.unwrap();
    assert_eq!((counts.trials, counts.passed, counts.failed, counts.voided), (2, 1, 1, 0));
    assert_eq!(retry::carried(&whole), Err(decide::Refusal::NothingUnscored));
    let _ = organization;
    check_prefixes(&world.log, &world.state);
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
        let decide::Start::Admit(events) = decide::start(&world.state, started, &organization, &|_| false, world.now_ms).unwrap() else {
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
