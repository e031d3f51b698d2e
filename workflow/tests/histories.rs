//! Random histories of commands: whatever happens in whatever order, the promises of the design hold, and every prefix of the log recovers.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` runs that one alone, `EVALGRID_LONG=1` a hundred times as many.
#![allow(clippy::unwrap_used)]

#[path = "histories/check.rs"]
mod check;
#[path = "histories/world.rs"]
mod world;

use evalgrid_domain::{
    ids::{BatchId, OrgId},
    limits,
};
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, TrialStatus},
};
use evalgrid_workflow::{
    Batch, BatchPhase, Chance, CheckIns, Kind, TrialKey,
    decide::{self, Holder},
    local, retry, view,
};

use crate::{
    check::{check_log, check_prefixes},
    world::{WORKERS, World},
};

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
