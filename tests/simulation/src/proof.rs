//! What is proved of a whole log at the end: every prefix recovers, and so does every snapshot with the records behind it.

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::log::v1::{Event, StateSnapshot, event::Kind};
use evalgrid_store::{Record, Snapshot};
use evalgrid_workflow::{Part, State, decide};
use prost::Message as _;

use crate::check::{Violation, broken};

const RULE: &str = "every prefix recovers";

fn event(record: &Record) -> Result<Event, Violation> {
    Event::decode(record.payload.clone()).or_else(|error| broken("a record can be read", error.to_string()))
}

/// The state without what may be read elsewhere: replay does not know when that left memory.
fn essence(mut state: State) -> StateSnapshot {
    let ids: Vec<BatchId> = state.batches().map(|batch| batch.id).collect();
    ids.iter().for_each(|id| state.forget(id));
    StateSnapshot {
        archive: None,
        archived: Vec::new(),
        ..state.save()
    }
}

/// Reads the log from the beginning and from each snapshot. With `thorough`, recovery goes on from every single prefix.
pub fn prove(records: &[Record], snapshots: &[Snapshot], living: Option<State>, thorough: bool) -> Result<(), Violation> {
    let mut state = State::default();
    let mut restored: Vec<(u64, State)> = Vec::new();
    let mut snapshots = snapshots.iter().peekable();
    for (index, record) in records.iter().enumerate() {
        let event = event(record)?;
        let position = index as u64 + 1;
        if let Err(error) = state.apply(&event) {
            return broken(RULE, format!("at {position}: {error}"));
        }
        for (from, state) in &mut restored {
            if let Err(error) = state.apply(&event) {
                return broken(RULE, format!("at {position}, from the snapshot at {from}: {error}"));
            }
        }
        while snapshots.peek().is_some_and(|snapshot| snapshot.position == position)
            && let Some(snapshot) = snapshots.next()
        {
            let saved = StateSnapshot::decode(snapshot.payload.clone()).or_else(|error| broken(RULE, error.to_string()))?;
            let again = State::restore(&saved).or_else(|error| broken(RULE, error.to_string()))?;
            compare(&again, &state, position)?;
            restored.push((position, again));
        }
        // What should have followed from the last event of a log that was cut behind it, follows.
        if thorough || matches!(event.kind, Some(Kind::TrialSettled(_))) {
            let missing = decide::catch_up(&state, state.last_ms());
            if thorough || !missing.is_empty() {
                let mut recovered = state.clone();
                for event in missing {
                    // As the engine does: with what follows from each.
                    let mut next = Some(event);
                    while let Some(event) = next {
                        recovered
                            .apply(&event)
                            .or_else(|error| broken(RULE, format!("behind {position}: {error}")))?;
                        next = decide::after(&recovered, &event);
                    }
                }
                consistent(&recovered)?;
            }
        }
    }
    for (from, again) in restored.iter().chain(&living.map(|living| (0, living))) {
        compare(again, &state, *from)?;
    }
    Ok(())
}

fn compare(one: &State, other: &State, from: u64) -> Result<(), Violation> {
    let (one, other) = (essence(one.clone()), essence(other.clone()));
    match one == other {
        true => Ok(()),
        false => broken(
            "snapshot, memory and replay agree",
            format!("from {from}: {}", difference(&one, &other)),
        ),
    }
}

fn difference(one: &StateSnapshot, other: &StateSnapshot) -> String {
    let (one, other) = (format!("{one:?}"), format!("{other:?}"));
    let same = one.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count();
    let from = same.saturating_sub(200);
    let part = |text: &str| String::from_utf8_lossy(&text.as_bytes()[from.min(text.len())..(same + 200).min(text.len())]).into_owned();
    format!("…{}… instead of …{}…", part(&one), part(&other))
}

/// What must hold in every state.
fn consistent(state: &State) -> Result<(), Violation> {
    for (token, lease) in state.leases() {
        let works = state.trial(lease.trial).and_then(|trial| trial.sandbox_of(lease.part));
        let Some(name) = works else {
            if lease.part == Part::Trial {
                return broken(RULE, format!("the lease {token} is on no sandbox"));
            }
            continue;
        };
        if !state
            .custody()
            .any(|(known, sandbox)| known == name && sandbox.trial == lease.trial)
        {
            return broken(RULE, format!("{name} works, and is not in custody"));
        }
    }
    for batch in state.batches() {
        let open = batch.trials().filter(|(_, trial)| trial.outcome().is_none()).count();
        let runs = state
            .organization(&batch.organization)
            .is_some_and(|organization| organization.running.contains(&batch.id));
        if open != batch.unsettled as usize || runs != (open > 0) {
            let detail = format!("{} has {open} open trials, counts {}, and runs: {runs}", batch.id, batch.unsettled);
            return broken(RULE, detail);
        }
    }
    Ok(())
}
