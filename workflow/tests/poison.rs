//! Trials that kill their workers, and workers that take many trials with them.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_proto::v1;
use evalgrid_workflow::{decide, view};
use support::{Cell, SMALL, Shape};

/// catalogue 34, 35: after a bounded number of leases it ends, with the reason. catalogue 36: a worker that dies without a word counts.
/// catalogue 4: the count is shown while it grows.
#[test]
fn a_poisonous_trial_ends_after_a_bounded_number_of_leases() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    let batch = cell.start(organization, SMALL);
    let (key, mut token) = cell.lease("w").unwrap();
    let mut waits = Vec::new();
    for number in 1.. {
        assert_eq!(cell.trial(key).idle_leases, number, "counted when it is granted");
        cell.expire("w");
        let wait_ms = cell.not_before_ms(key).saturating_sub(cell.now_ms);
        waits.push(wait_ms);
        if number == 3 {
            let shown = view::batch(cell.state.batch(&batch).unwrap(), None).runs[0].trials[0]
                .lost_attempts
                .clone();
            assert_eq!(
                shown,
                ["3 leases in a row ended without a recorded step, of at most 16: no word from the worker for a whole lease"]
            );
        }
        cell.now_ms += wait_ms;
        match cell.lease("w") {
            Some((_, next)) => {
                assert!(next > token);
                token = next;
            }
            None => break,
        }
    }
    assert_eq!(waits.len() as u32, decide::MAX_IDLE_LEASES);
    assert_eq!(waits[0], 0, "the first time at once");
    assert!(
        waits.windows(2).skip(1).all(|pair| pair[1] * 2 >= pair[0]),
        "longer and longer: {waits:?}"
    );
    assert!((60_000..600_000).contains(&waits.iter().sum::<u64>()) && waits.iter().all(|wait| *wait <= decide::MAX_DELAY_MS));
    let outcome = cell.trial(key).outcome().unwrap();
    assert_eq!(outcome.status(), v1::TrialStatus::Void);
    let text = outcome.failure.as_deref().unwrap();
    assert!(
        text.contains("16 times in a row") && text.contains("no word from the worker"),
        "{text}"
    );
}

#[test]
fn a_step_or_an_orderly_end_starts_the_count_anew() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (key, token) = cell.lease("w").unwrap();
    cell.expire("w");
    let (_, second) = cell.lease("w").unwrap();
    assert!(second > token);
    cell.step("w", second, "source");
    assert_eq!(cell.trial(key).idle_leases, 0);
    for _ in 0..2 * decide::MAX_IDLE_LEASES {
        let released = v1::AttemptFailure {
            token: cell.state.leases().next().map(|(token, _)| token).unwrap(),
            kind: v1::AttemptFailureKind::Released.into(),
            reason: "the worker is stopping".into(),
        };
        let event = decide::attempt_failed(&cell.state, "w", &released, &mut cell.chance, cell.now_ms).unwrap();
        cell.commit_all(event);
        assert!(cell.lease("w").is_some(), "a worker that stops in order is no sign of poison");
    }
}

/// catalogue 42: those that one worker took with it do not start over all at once; the first does.
#[test]
fn a_mass_expiry_is_spread() {
    for recorded in [true, false] {
        let mut cell = Cell::new(7);
        let organization = cell.organization(0);
        for _ in 0..3 {
            cell.start(
                organization,
                Shape {
                    cases: 10,
                    trials: 10,
                    ..SMALL
                },
            );
        }
        let leased = cell.leases("w");
        assert_eq!(leased.len(), 300);
        if recorded {
            leased.iter().for_each(|(_, token)| cell.step("w", *token, "source"));
        }
        cell.expire("w");
        cell.now_ms += 60_000;
        let events = decide::give_up_absent(&cell.state, &|_| true, 60_000, &mut cell.chance, cell.now_ms);
        cell.commit_all(events);
        let mut starts: Vec<u64> = leased.iter().map(|(key, _)| cell.not_before_ms(*key) - cell.now_ms).collect();
        starts.sort_unstable();
        assert!(starts[0] < 1_000, "{}", starts[0]);
        let busiest = starts
            .iter()
            .map(|from| starts.iter().filter(|at| (*from..from + 500).contains(*at)).count())
            .max();
        assert!(busiest < Some(100), "of 300, {busiest:?} within half a second");
        assert!(*starts.last().unwrap() <= decide::MAX_DELAY_MS);
    }
}
