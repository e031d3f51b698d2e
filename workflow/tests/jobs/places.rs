//! Conversations whose person is a harness: they take two sandboxes, and places are few.

use std::collections::BTreeMap;

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::v1;
use evalgrid_workflow::{Limits, Part, ProviderLimits, State, decide};

use super::{asks, key, lease, replied, start, tell};
use crate::support::Cell;

/// A conversation whose person is a harness takes two sandboxes: the people of those that have theirs must find a place, however few there are.
#[test]
fn trials_leave_a_place_for_their_people() {
    for max_living in 1..=4 {
        let limits = Limits {
            providers: BTreeMap::from([(
                "process".to_owned(),
                ProviderLimits {
                    create_per_second: 1_000.0,
                    create_burst: 100,
                    max_starting: 100,
                    max_living,
                },
            )]),
            ..Limits::default()
        };
        let mut cell = Cell::new(1);
        let batches: Vec<BatchId> = (1..=5).map(|number| start(&mut cell, number, &[], Some("codex"))).collect();
        cell.state.configure(limits.clone());
        let settled = |cell: &Cell| batches.iter().filter(|batch| cell.trial(key(**batch)).outcome().is_some()).count();
        for round in 0.. {
            if settled(&cell) == batches.len() {
                break;
            }
            assert!(round < 50, "with {max_living} places, {} of the trials end", settled(&cell));
            cell.now_ms += 60_000;
            // Executors take all that they can get, before anybody speaks.
            while let Some((trial, token)) = cell.lease("w") {
                cell.step("w", token, "turn.1.agent");
                match cell.trial(trial).steps.iter().any(|step| step.step == "turn.1.person") {
                    true => cell.pass("w", token),
                    false => {
                        let awaits = v1::AwaitsReply {
                            token,
                            turn: 1,
                            conversation: Some(v1::Evidence::default()),
                        };
                        let event = decide::awaits_reply(&cell.state, "w", awaits, &mut cell.chance, cell.now_ms).unwrap();
                        cell.commit_all([event]);
                    }
                }
            }
            // What is known of the places outlives a crash.
            cell.state = State::restore(&cell.state.save()).unwrap();
            cell.state.configure(limits.clone());
            while let Some((_, token)) = lease(&mut cell, "j", "1") {
                asks(&mut cell, token);
                tell(&mut cell, token, replied(false));
            }
            let (_, living) = cell.state.sandbox_counts("process");
            assert!(living <= max_living.max(2) as usize, "{living} live, {max_living} may");
            let gone = cell.state.custody().filter(|(name, _)| !decide::needed(&cell.state, name));
            let gone: Vec<(String, String)> = gone.map(|(name, sandbox)| (name.to_owned(), sandbox.worker_id.clone())).collect();
            gone.iter().for_each(|(name, worker)| cell.destroyed(worker, name));
        }
    }
}

#[test]
fn the_person_of_a_lost_conversation_keeps_no_place() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &[], Some("codex"));
    let (_, token) = cell.lease("w").unwrap();
    cell.step("w", token, "turn.1.agent");
    let awaits = v1::AwaitsReply {
        token,
        turn: 1,
        conversation: Some(v1::Evidence::default()),
    };
    let event = decide::awaits_reply(&cell.state, "w", awaits, &mut cell.chance, cell.now_ms).unwrap();
    cell.commit_all([event]);
    lease(&mut cell, "j", "1").unwrap();
    let home = cell.trial(key(batch)).sandbox_of(Part::Reply).unwrap().to_owned();
    let sandbox = cell.sandbox(key(batch));
    cell.destroyed("w", &sandbox);
    assert!(!decide::needed(&cell.state, &home), "the trial starts over, with another person");
}
