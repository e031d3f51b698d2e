//! What an attempt may rely on that follows another one: its whole time, and what was recorded before it; and that waiting ends.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_domain::{
    limits::{ABANDONED_AFTER_MS, MAX_WAIT_FOR_SLOT_MS},
    outcome,
};
use evalgrid_proto::v1;
use evalgrid_workflow::{Limits, ProviderLimits, decide};
use support::{Cell, SMALL, Shape};

const MINUTE_MS: u64 = 60_000;

fn lose(cell: &mut Cell, worker_id: &str, token: u64) {
    let failure = v1::AttemptFailure {
        token,
        kind: v1::AttemptFailureKind::SandboxLost.into(),
        reason: "the machine is gone".into(),
    };
    let event = decide::attempt_failed(&cell.state, worker_id, &failure, &mut cell.chance, cell.now_ms).unwrap();
    cell.commit_all(event);
}

fn abandon(cell: &mut Cell) {
    let events = decide::abandon(&cell.state, cell.now_ms);
    cell.commit_all(events);
}

/// catalogue 18: an attempt that follows a lost one does not inherit what was left of its time.
#[test]
fn a_fresh_attempt_has_its_whole_time() {
    for step in [Some("source"), None] {
        let mut cell = Cell::new(1);
        let organization = cell.organization(0);
        cell.start(organization, SMALL);
        let (key, token) = cell.lease("w").unwrap();
        if let Some(step) = step {
            cell.step("w", token, step);
        }
        let mut tokens = vec![token];
        // Each attempt is lost ten minutes before its time is up.
        for lost in 1..=2 {
            cell.now_ms += ABANDONED_AFTER_MS - 10 * MINUTE_MS;
            abandon(&mut cell);
            lose(&mut cell, "w", *tokens.last().unwrap());
            assert_eq!(cell.trial(key).lost.len(), lost);
            cell.now_ms += MINUTE_MS;
            tokens.push(cell.lease("w").unwrap().1);
            cell.now_ms += 30 * MINUTE_MS;
            abandon(&mut cell);
            assert!(
                cell.trial(key).outcome().is_none(),
                "lost {lost} times: it has most of its time left"
            );
            cell.now_ms -= 31 * MINUTE_MS;
        }
        // The third one is the last, and its time is as long.
        cell.now_ms += ABANDONED_AFTER_MS - MINUTE_MS;
        abandon(&mut cell);
        assert!(cell.trial(key).outcome().is_none());
        cell.now_ms += MINUTE_MS;
        abandon(&mut cell);
        let outcome = cell.trial(key).outcome().expect("time is up");
        assert_eq!(outcome.status(), v1::TrialStatus::Void);
    }
}

/// catalogue 17: in every state that waits, time alone ends it.
#[test]
fn time_alone_ends_every_wait() {
    type Wait = fn(&mut Cell);
    let waits: [(&str, Wait, u64); 6] = [
        ("for a slot", |_| {}, MAX_WAIT_FOR_SLOT_MS),
        (
            "under a lease that never speaks",
            |cell| assert!(cell.lease("w").is_some()),
            ABANDONED_AFTER_MS,
        ),
        (
            "under a lease that has spoken once",
            |cell| {
                let (_, token) = cell.lease("w").unwrap();
                cell.step("w", token, "source");
            },
            ABANDONED_AFTER_MS,
        ),
        (
            "for a worker that is away",
            |cell| {
                let (_, token) = cell.lease("w").unwrap();
                cell.step("w", token, "source");
                cell.expire("w");
            },
            ABANDONED_AFTER_MS,
        ),
        (
            "for a model's provider",
            |cell| {
                let (_, token) = cell.lease("w").unwrap();
                cell.throttle("w", token, u64::MAX / 2);
            },
            ABANDONED_AFTER_MS,
        ),
        (
            "to start over",
            |cell| {
                let (_, token) = cell.lease("w").unwrap();
                lose(cell, "w", token);
            },
            ABANDONED_AFTER_MS,
        ),
    ];
    for (wait, begin, limit_ms) in waits {
        let mut cell = Cell::new(1);
        let organization = cell.organization(0);
        let batch = cell.start(organization, SMALL);
        begin(&mut cell);
        let open = |cell: &Cell| cell.state.batch(&batch).unwrap().unsettled;
        cell.now_ms += limit_ms - 1;
        abandon(&mut cell);
        assert_eq!(open(&cell), 1, "{wait}: not yet");
        // Across a crash, too: the limit counts from what the log says.
        let mut cell = cell.recovered(Limits::default());
        cell.now_ms += 1;
        abandon(&mut cell);
        assert_eq!(open(&cell), 0, "{wait}");
        let expected = match limit_ms {
            MAX_WAIT_FOR_SLOT_MS => outcome::never_started(limit_ms),
            _ => outcome::abandoned(limit_ms),
        };
        let (_, trial) = cell.state.batch(&batch).unwrap().trials().next().unwrap();
        assert_eq!(trial.outcome().unwrap().failure.as_ref(), Some(&expected), "{wait}");
    }
}

/// catalogue 28: what somebody said is recorded once; whoever asks later, or again, goes on with that.
#[test]
fn the_first_reply_that_is_recorded_stands() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (key, first) = cell.lease("w").unwrap();
    let reply = |token, text: &str| v1::StepRecord {
        token,
        step: "turn.1.person".into(),
        outcome: 1,
        result: text.as_bytes().to_vec().into(),
    };
    let event = decide::step(&cell.state, "w", reply(first, "yes"), cell.now_ms).unwrap();
    cell.commit_all(event);
    cell.expire("w");
    let (_, second) = cell.lease("w").unwrap();
    for _ in 0..2 {
        let event = decide::step(&cell.state, "w", reply(second, "no"), cell.now_ms).unwrap();
        assert_eq!(event, None, "only acknowledged");
    }
    assert_eq!(
        decide::step(&cell.state, "w", reply(first, "no"), cell.now_ms),
        Err(decide::Refusal::Stale)
    );
    assert_eq!(
        decide::step(&cell.state, "another", reply(second, "no"), cell.now_ms),
        Err(decide::Refusal::Stale)
    );
    let recorded: Vec<_> = cell.trial(key).steps.iter().map(|step| step.result.clone()).collect();
    assert_eq!(recorded, ["yes"], "and this comes with every lease");
}

/// catalogue 44: however many wait after a crash, they are let in no faster than the limits allow, and in their order.
#[test]
fn a_crowd_after_a_crash_is_admitted_by_the_limits() {
    let limits = ProviderLimits {
        create_per_second: 10.0,
        create_burst: 20,
        max_starting: 15,
        max_living: 1_000,
    };
    let limits = Limits {
        providers: [("process".to_owned(), limits)].into(),
        ..Limits::default()
    };
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    for _ in 0..100 {
        cell.start(
            organization,
            Shape {
                cases: 10,
                trials: 10,
                ..SMALL
            },
        );
    }
    let mut cell = cell.recovered(limits);
    assert_eq!(decide::catch_up(&cell.state, cell.now_ms), [], "recovery itself writes nothing");
    assert_eq!(cell.state.waiting(), 10_000);
    let first = cell.leases("w");
    assert_eq!(first.len(), 15);
    for (_, token) in &first {
        cell.step("w", *token, "sandbox.create");
    }
    assert_eq!(cell.leases("w").len(), 5, "what is left of the burst");
    cell.now_ms += 1_000;
    assert_eq!(cell.leases("w").len(), 10, "a second's worth");
}

/// catalogue 43: trials that a provider refuses in the same moment, with the same advice, do not come back in the same moment.
#[test]
fn refused_together_they_come_back_apart() {
    let mut cell = Cell::new(3);
    let organization = cell.organization(0);
    cell.start(
        organization,
        Shape {
            cases: 10,
            trials: 10,
            ..SMALL
        },
    );
    let leased = cell.leases("w");
    assert_eq!(leased.len(), 100);
    for (_, token) in &leased {
        cell.throttle("w", *token, 10_000);
    }
    let mut returns: Vec<u64> = leased.iter().map(|(key, _)| cell.not_before_ms(*key) - cell.now_ms).collect();
    returns.sort_unstable();
    assert!(returns[0] >= 10_000, "not before they were told to");
    let busiest = returns
        .iter()
        .map(|from| returns.iter().filter(|at| (*from..from + 250).contains(*at)).count())
        .max();
    assert!(busiest < Some(40), "of 100, {busiest:?} in a quarter of a second");
}
