//! How much may run at once and in which order: fair shares, limits of providers and model keys, refusals, and all of it after a crash.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, HashMap};

use evalgrid_domain::ids::OrgId;
use evalgrid_proto::v1;
use evalgrid_workflow::{Limits, ProviderLimits, decide};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use support::{Cell, MODEL_KEY, SMALL, Shape};

/// Limits that do not limit.
const OPEN: ProviderLimits = ProviderLimits {
    create_per_second: 1_000.0,
    create_burst: 1_000,
    max_starting: 1_000,
    max_living: 1_000,
};

fn of_process(limits: ProviderLimits) -> Limits {
    Limits {
        providers: [("process".to_owned(), limits)].into(),
        ..Limits::default()
    }
}

fn of_model(concurrency: u32) -> Limits {
    Limits {
        models: [(MODEL_KEY.to_owned(), concurrency)].into(),
        ..Limits::default()
    }
}

#[test]
fn a_newcomer_starts_within_two_dispatches() {
    let mut cell = Cell::new(1);
    let (many, one) = (cell.organization(0), cell.organization(1));
    for _ in 0..10 {
        cell.start(
            many,
            Shape {
                cases: 10,
                trials: 10,
                ..SMALL
            },
        );
    }
    for _ in 0..37 {
        cell.lease("w").unwrap();
    }
    cell.start(one, SMALL);
    let served = [(); 2].map(|()| cell.lease("w").unwrap().0).map(|key| cell.organization_of(key));
    assert!(served.contains(&one), "{served:?}");
}

/// Whoever has waited through a whole window has had as much of it as everybody else who has, give or take one.
#[test]
fn shares_are_equal_over_any_window() {
    for seed in 0..60 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cell = Cell::new(seed);
        let organizations: Vec<OrgId> = (0..rng.random_range(2..7)).map(|number| cell.organization(number)).collect();
        // Per dispatch: who was served, and who had something left.
        let mut served: Vec<OrgId> = Vec::new();
        let mut waiting: Vec<Vec<OrgId>> = Vec::new();
        for _ in 0..200 {
            if rng.random_bool(0.3) {
                let organization = organizations[rng.random_range(0..organizations.len())];
                let model = ["maker/small", "other/big"][rng.random_range(0..2)];
                let cases = rng.random_range(1..8);
                cell.start(organization, Shape { cases, model, ..SMALL });
            }
            let Some((key, _)) = cell.lease("w") else { continue };
            served.push(cell.organization_of(key));
            let open = |id: &&OrgId| {
                let batches = cell.state.batches().filter(|batch| batch.organization == **id);
                batches
                    .flat_map(|batch| batch.trials())
                    .any(|(_, trial)| trial.status() == v1::TrialStatus::Queued)
            };
            waiting.push(organizations.iter().filter(open).copied().collect());
        }
        for begin in 0..served.len() {
            let mut backlogged = waiting[begin].clone();
            let mut counts: HashMap<OrgId, i32> = HashMap::new();
            for at in begin + 1..served.len() {
                *counts.entry(served[at]).or_default() += 1;
                backlogged.retain(|id| waiting[at].contains(id));
                let shares = backlogged.iter().map(|id| counts.get(id).copied().unwrap_or(0));
                let (least, most) = shares.fold((i32::MAX, 0), |(least, most), share| (least.min(share), most.max(share)));
                assert!(most - least.min(most) <= 1, "from {begin} to {at}: {counts:?}");
            }
        }
    }
}

#[test]
fn a_bucket_gives_its_burst_and_then_its_rate_also_after_a_crash() {
    let limits = of_process(ProviderLimits {
        create_per_second: 2.0,
        create_burst: 3,
        ..OPEN
    });
    let mut cell = Cell::new(1);
    cell.state.configure(limits.clone());
    let organization = cell.organization(0);
    cell.start(
        organization,
        Shape {
            cases: 10,
            trials: 10,
            ..SMALL
        },
    );
    assert_eq!(cell.leases("w").len(), 3, "the burst");
    // Over ten seconds, with a crash before each look.
    let mut given = 0;
    for _ in 0..100 {
        cell = cell.recovered(limits.clone());
        cell.now_ms += 100;
        given += cell.leases("w").len();
    }
    assert_eq!(given, 20, "two a second");
    let opens = cell.state.next_opening_ms(cell.now_ms).unwrap();
    assert!((1..=500).contains(&(opens - cell.now_ms)), "and it says when it opens");
    cell.now_ms = opens;
    assert_eq!(cell.leases("w").len(), 1);
    cell.now_ms += 3_600_000;
    assert_eq!(cell.leases("w").len(), 3, "a long pause fills it, and no more");
}

/// catalogue 39: letting go twice lets go once. catalogue 40: what crashed holds nothing for ever. catalogue 41: one way back for all.
#[test]
fn starting_and_living_sandboxes_are_sets() {
    let limits = of_process(ProviderLimits {
        max_starting: 2,
        max_living: 4,
        ..OPEN
    });
    let mut cell = Cell::new(1);
    cell.state.configure(limits.clone());
    let organization = cell.organization(0);
    cell.start(
        organization,
        Shape {
            cases: 10,
            trials: 10,
            ..SMALL
        },
    );
    let first = cell.leases("w");
    assert_eq!(
        (first.len(), cell.state.sandbox_counts("process")),
        (2, (2, 2)),
        "two may start at once"
    );
    // A sign of it, twice: its first step, and its id.
    cell.step("w", first[0].1, "sandbox.create");
    let sandbox = cell.sandbox(first[0].0);
    let created = v1::CreatedSandbox {
        sandbox: sandbox.clone(),
        provider_id: "i-1".into(),
    };
    let event = decide::created(&cell.state, "w", created.clone(), cell.now_ms);
    assert!(event.is_some());
    cell.commit_all(event);
    assert!(decide::created(&cell.state, "w", created, cell.now_ms).is_none(), "known by now");
    cell = cell.recovered(limits.clone());
    assert_eq!(cell.leases("w").len(), 1, "one place to start has become free, not two");
    // The worker dies: nobody starts anything any more, but what may live still counts.
    cell.expire("w");
    assert_eq!(cell.state.sandbox_counts("process"), (0, 3));
    cell = cell.recovered(limits.clone());
    assert_eq!(cell.state.sandbox_counts("process"), (0, 3), "also after a crash");
    let other = cell.leases("other");
    assert_eq!(other.len(), 1, "four may live");
    cell.pass("other", other[0].1);
    assert_eq!(cell.leases("other").len(), 0, "a verdict is not the end of a sandbox");
    let gone = cell.sandbox(other[0].0);
    cell.destroyed("other", &gone);
    cell.destroyed("other", &gone);
    assert_eq!(cell.leases("other").len(), 1, "confirmed twice, one place");
}

#[test]
fn a_provider_at_its_limit_keeps_nobody_from_another() {
    let mut cell = Cell::new(1);
    cell.state.configure(of_process(ProviderLimits { max_living: 1, ..OPEN }));
    let organization = cell.organization(0);
    cell.start(organization, Shape { cases: 3, ..SMALL });
    cell.start(
        organization,
        Shape {
            cases: 2,
            provider: "e2b",
            ..SMALL
        },
    );
    let leased = cell.leases("w");
    let mut by_provider: BTreeMap<String, u32> = BTreeMap::new();
    for (key, _) in leased {
        *by_provider
            .entry(cell.state.sandbox(&cell.sandbox(key)).unwrap().provider.clone())
            .or_default() += 1;
    }
    assert_eq!(by_provider, [("e2b".to_owned(), 2), ("process".to_owned(), 1)].into());
}

#[test]
fn a_model_key_at_its_limit_is_passed_over() {
    let mut cell = Cell::new(1);
    cell.state.configure(of_model(2));
    let (first, second) = (cell.organization(0), cell.organization(1));
    cell.start(first, Shape { cases: 9, ..SMALL });
    cell.start(
        second,
        Shape {
            cases: 3,
            model: "other/big",
            ..SMALL
        },
    );
    let leased = cell.leases("w");
    assert_eq!((leased.len(), cell.state.model_holders(MODEL_KEY)), (5, 2));
    let held: Vec<_> = leased.into_iter().filter(|(key, _)| cell.organization_of(*key) == first).collect();
    cell.pass("w", held[0].1);
    assert_eq!(cell.leases("w").len(), 1, "a verdict frees its place at once");
    cell = cell.recovered(of_model(2));
    assert_eq!(
        (cell.leases("w").len(), cell.state.model_holders(MODEL_KEY)),
        (0, 2),
        "and a crash frees none"
    );
}

#[test]
fn a_refusal_cuts_the_limit_once_and_it_grows_again() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(
        organization,
        Shape {
            cases: 10,
            trials: 10,
            ..SMALL
        },
    );
    // No limit is configured: eight slots are eight trials, until the provider refuses.
    let leased: Vec<_> = (0..8).map(|_| cell.lease("w").unwrap()).collect();
    cell.step("w", leased[0].1, "sandbox.create");
    for (_, token) in &leased[..3] {
        cell.throttle("w", *token, 5_000);
    }
    let (key, token) = leased[0];
    assert!(cell.state.lease(token).is_none(), "the slot is given back");
    let trial = cell.trial(key);
    assert_eq!(
        (trial.idle_leases, trial.attempts, trial.lost.len(), trial.steps.len()),
        (0, 1, 0, 1),
        "neither a fruitless lease nor a lost attempt; the sandbox stays"
    );
    let wait_ms = cell.not_before_ms(key) - cell.now_ms;
    assert!((5_000..6_250).contains(&wait_ms), "{wait_ms}");
    assert_eq!(cell.state.model_holders(MODEL_KEY), 5);
    assert!(
        cell.lease("w").is_none(),
        "three refusals are one cut, from eight to four, and five run"
    );
    cell = cell.recovered(Limits::default());
    assert!(cell.lease("w").is_none(), "also after a crash");
    for (_, token) in &leased[3..5] {
        cell.pass("w", *token);
    }
    assert_eq!(cell.leases("w").len(), 1, "three run, four may");
    // The time is over: one more each second, and the first of them goes back to its sandbox.
    cell.now_ms += 5_000;
    assert!(cell.lease("w").is_none());
    let opens = cell.state.next_opening_ms(cell.now_ms).unwrap();
    assert!(opens <= cell.now_ms + 1_250);
    cell.now_ms += 2_000;
    let (again, _) = cell.lease("w").unwrap();
    assert!(
        [leased[0].0, leased[1].0, leased[2].0].contains(&again),
        "those who were refused come first"
    );
    assert_eq!(cell.trial(again).attempts, 1, "in the sandbox that they left");
    assert_eq!(cell.leases("w").len(), 1, "two seconds, two more");
    // A new wave cuts again, and never below one.
    for _ in 0..6 {
        let token = cell.state.leases().next().unwrap().0;
        cell.throttle("w", token, 0);
        cell.now_ms += 1_000;
        cell.leases("w");
    }
    assert!(cell.state.model_holders(MODEL_KEY) >= 1);
}

#[test]
fn what_a_provider_asks_for_is_believed_within_bounds() {
    fn check(retry_after_ms: u64, expected: std::ops::Range<u64>) {
        let mut cell = Cell::new(retry_after_ms);
        let organization = cell.organization(0);
        cell.start(organization, SMALL);
        let (key, token) = cell.lease("w").unwrap();
        cell.throttle("w", token, retry_after_ms);
        let wait_ms = cell.not_before_ms(key) - cell.now_ms;
        assert!(expected.contains(&wait_ms), "{retry_after_ms}: {wait_ms}");
    }
    check(0, 1_000..1_250);
    check(20_000, 20_000..25_000);
    check(u64::MAX, 600_000..750_000);
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (_, token) = cell.lease("w").unwrap();
    let report = |token, model_key: &str| v1::Throttled {
        token,
        model_key: model_key.into(),
        retry_after_ms: 1,
    };
    for (worker_id, report) in [
        ("w", report(token, "command/another")),
        ("other", report(token, MODEL_KEY)),
        ("w", report(token + 1, MODEL_KEY)),
    ] {
        let refused = decide::throttled(&cell.state, worker_id, &report, &mut cell.chance, cell.now_ms);
        assert!(refused.is_err(), "{worker_id} {report:?}");
    }
}

/// A trial that is refused for ever is abandoned like any other that makes no progress.
#[test]
fn refusals_are_no_progress() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (key, token) = cell.lease("w").unwrap();
    cell.step("w", token, "sandbox.create");
    let mut token = token;
    for _ in 0..6 * 6 {
        cell.throttle("w", token, 600_000);
        cell.now_ms = cell.not_before_ms(key);
        token = cell.lease("w").unwrap().1;
    }
    let events = decide::abandon(&cell.state, cell.now_ms);
    cell.commit_all(events);
    assert_eq!(cell.trial(key).status(), v1::TrialStatus::Void);
}
