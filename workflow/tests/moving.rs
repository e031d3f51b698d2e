//! Moving an organization between two states, with every order of steps that a mover and its crashes can bring about.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` runs that one alone.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::ids::{KeyId, OrgId};
use evalgrid_proto::{log::v1 as log, v1};
use evalgrid_workflow::{
    BatchPhase, Event, Kind, Residence, State,
    decide::{self, Start},
    moving::{self, Refusal},
};
use prost::Message as _;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

const SEEDS: u64 = 500;
const SLUG: &str = "acme";
const HASH: [u8; 32] = [7; 32];

/// A cell: its state, and the log that made it.
struct Cell {
    state: State,
    log: Vec<Event>,
}

impl Cell {
    fn new() -> Cell {
        Cell {
            state: State::default(),
            log: Vec::new(),
        }
    }

    fn commit(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            self.state.apply(&event).unwrap();
            next = decide::after(&self.state, &event);
            self.log.push(event);
        }
    }

    fn try_commit(&mut self, decided: Result<Option<Event>, Refusal>) -> Result<(), Refusal> {
        decided.map(|event| event.into_iter().for_each(|event| self.commit(event)))
    }

    fn residence(&self) -> Option<Residence> {
        self.state.organization_by_slug(SLUG).map(|organization| organization.residence)
    }

    /// As the command finds out.
    fn has_arrived_from(&self, old: &Cell) -> bool {
        let generation = |cell: &Cell| cell.state.organization_by_slug(SLUG).map(|organization| organization.generation);
        generation(self) > generation(old)
    }

    fn opens(&self) -> bool {
        self.state.key_by_hash(&HASH).is_some() && self.residence() != Some(Residence::Moved)
    }

    /// The log, and a snapshot, bring the same state back.
    fn recovers(&self) {
        let mut replayed = State::default();
        for event in &self.log {
            replayed.apply(event).unwrap();
            if let Some(Kind::BatchArchived(archived)) = &event.kind {
                replayed.forget(&evalgrid_domain::ids::BatchId(archived.batch.as_ref().try_into().unwrap()));
            }
        }
        let saved = self.state.save();
        assert_eq!(replayed.save(), saved);
        assert_eq!(State::restore(&saved).unwrap().save(), saved);
    }
}

fn with_acme() -> (Cell, OrgId) {
    let mut cell = Cell::new();
    let id = OrgId::new(1, [1; 10]);
    cell.commit(decide::create_organization(&cell.state, SLUG, id, 1).unwrap());
    let key = log::KeyCreated {
        key_id: KeyId::new(1, [2; 10]).to_string(),
        organization_id: id.to_string(),
        name: "first".into(),
        start: "anp_".into(),
        hash: HASH.to_vec().into(),
        permissions: vec!["evals:write".into()],
    };
    cell.commit(decide::event(1, Kind::KeyCreated(key)));
    (cell, id)
}

fn start(cell: &State, organization: OrgId, number: u8, now_ms: u64) -> Result<Start, decide::Refusal> {
    let started = log::BatchStarted {
        batch: vec![number; 16].into(),
        organization_id: organization.to_string(),
        request: Some(v1::ObjectRef::default()),
        request_hash: "hash".into(),
        idempotency_key: Some(format!("key-{number}")),
        suite: Some(v1::Suite::default()),
        cases: vec![v1::CaseInfo::default()],
        variants: vec![v1::VariantInfo::default()],
        trials: 1,
        trigger: None,
        variant_ids: vec!["variant".into()],
        ..log::BatchStarted::default()
    };
    decide::start(cell, started, &organization, &|_| false, now_ms)
}

/// Starts a batch and brings it to its archived end.
fn run_batch(cell: &mut Cell, organization: OrgId, number: u8, now_ms: u64) {
    let Start::Admit(events) = start(&cell.state, organization, number, now_ms).unwrap() else {
        panic!("a fresh key")
    };
    events.into_iter().for_each(|event| cell.commit(event));
    let id = evalgrid_domain::ids::BatchId([number; 16]);
    let cancelled = decide::cancel(&cell.state, &organization, &id, now_ms).unwrap();
    cancelled.into_iter().for_each(|event| cell.commit(event));
    assert_ne!(cell.state.batch(&id).unwrap().phase, BatchPhase::Running);
    let archived = {
        let batch = cell.state.batch(&id).unwrap();
        decide::archived(batch, v1::ObjectRef::default(), evalgrid_workflow::view::summary(batch), now_ms)
    };
    cell.commit(archived);
    cell.state.forget(&id);
}

#[test]
fn a_move_step_by_step() {
    let (mut old, id) = with_acme();
    let mut new = Cell::new();
    run_batch(&mut old, id, 1, 2);
    assert_eq!(moving::export(&old.state, SLUG).unwrap_err(), Refusal::NotFrozen);
    assert_eq!(moving::leave(&old.state, SLUG, 3).unwrap_err(), Refusal::NotFrozen);

    let Start::Admit(running) = start(&old.state, id, 2, 3).unwrap() else {
        panic!()
    };
    let before = old.state.clone();
    running.into_iter().for_each(|event| old.commit(event));
    assert_eq!(moving::freeze(&old.state, SLUG, 3).unwrap_err(), Refusal::Running { running: 1 });
    old.state = before;
    old.log.pop();

    let frozen = moving::freeze(&old.state, SLUG, 3);
    old.try_commit(frozen).unwrap();
    assert!(moving::freeze(&old.state, SLUG, 3).unwrap().is_none());
    assert!(matches!(start(&old.state, id, 3, 3), Err(decide::Refusal::OnTheMove)));
    assert!(
        matches!(start(&old.state, id, 1, 3), Ok(Start::Replay(_))),
        "what was started is still answered"
    );
    assert!(old.opens());
    let key = KeyId::new(1, [2; 10]);
    assert!(matches!(decide::revoke_key(&old.state, &key, 3), Err(decide::Refusal::OnTheMove)));

    let (_, travelling) = moving::export(&old.state, SLUG).unwrap();
    let travelling = travelling.encode_to_vec();
    assert_eq!(moving::arrival(&new.state, &travelling).unwrap(), Some(id));
    new.commit(moving::arrived(travelling.clone().into(), 1));
    assert_eq!(moving::arrival(&new.state, &travelling).unwrap(), None);
    assert!(new.opens());
    assert!(
        matches!(start(&new.state, id, 1, 4), Ok(Start::Replay(_))),
        "the idempotency key has moved"
    );
    assert_eq!(new.state.organization(&id).unwrap().started, 1);

    let left = moving::leave(&old.state, SLUG, 4);
    old.try_commit(left).unwrap();
    assert!(!old.opens());
    assert!(matches!(start(&old.state, id, 4, 4), Err(decide::Refusal::Elsewhere)));
    assert_eq!(moving::unfreeze(&old.state, SLUG, 4).unwrap_err(), Refusal::Moved);
    for cell in [&old, &new] {
        cell.recovers();
    }

    // And back, with what has happened meanwhile.
    run_batch(&mut new, id, 5, 5);
    let frozen = moving::freeze(&new.state, SLUG, 6);
    new.try_commit(frozen).unwrap();
    let travelling = moving::export(&new.state, SLUG).unwrap().1.encode_to_vec();
    old.commit(moving::arrived(travelling.into(), 6));
    assert!(old.opens());
    assert_eq!(old.state.organization(&id).unwrap().started, 2);
    old.recovers();
}

#[test]
fn who_cannot_arrive() {
    let (mut old, id) = with_acme();
    let frozen = moving::freeze(&old.state, SLUG, 2);
    old.try_commit(frozen).unwrap();
    let (_, travelling) = moving::export(&old.state, SLUG).unwrap();
    let check = |state: &State, travelling: &log::TravellingOrganization, expected: fn(&Refusal) -> bool| {
        let refusal = moving::arrival(state, &travelling.encode_to_vec()).unwrap_err();
        assert!(expected(&refusal), "{refusal}");
    };
    check(&old.state, &travelling, |refusal| *refusal == Refusal::LivesHere);
    let mut other = Cell::new();
    let stranger = OrgId::new(9, [9; 10]);
    other.commit(decide::create_organization(&other.state, SLUG, stranger, 1).unwrap());
    check(&other.state, &travelling, |refusal| matches!(refusal, Refusal::SlugTaken(_)));
    let (taken, _) = with_acme();
    let mut renamed = travelling.clone();
    let organization = renamed.organization.as_mut().unwrap();
    (organization.id, organization.slug) = (stranger.to_string(), "other".into());
    renamed.keys[0].created.as_mut().unwrap().organization_id = stranger.to_string();
    check(&taken.state, &renamed, |refusal| *refusal == Refusal::KeyTaken);
    renamed.keys[0].created.as_mut().unwrap().organization_id = id.to_string();
    check(&taken.state, &renamed, |refusal| matches!(refusal, Refusal::Unreadable(_)));
    check(&taken.state, &log::TravellingOrganization::default(), |refusal| {
        matches!(refusal, Refusal::Unreadable(_))
    });
}

/// A mover that is killed anywhere and begun again, called off, or sent the other way: the organization can be changed in one cell at most,
/// it opens in one at least, and no batch that was started is forgotten.
#[test]
fn movers_in_any_order() {
    let seeds = match std::env::var("EVALGRID_SEED") {
        Ok(seed) => seed.parse().unwrap()..=seed.parse().unwrap(),
        Err(_) => 1..=SEEDS,
    };
    for seed in seeds {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let (first, id) = with_acme();
        let mut cells = [first, Cell::new()];
        let mut batches = 0u8;
        for now_ms in 10..70 {
            let from = rng.random_range(0..2);
            let [old, new] = match (from, &mut cells) {
                (0, [old, new]) | (_, [new, old]) => [old, new],
            };
            // As the command does: each step only where the one before is known to be done.
            match rng.random_range(0..5) {
                0 => drop(moving::freeze(&old.state, SLUG, now_ms).map(|event| event.into_iter().for_each(|event| old.commit(event)))),
                1 => {
                    if let Ok((_, travelling)) = moving::export(&old.state, SLUG) {
                        let travelling = travelling.encode_to_vec();
                        if moving::arrival(&new.state, &travelling).is_ok_and(|arrival| arrival.is_some()) {
                            new.commit(moving::arrived(travelling.into(), now_ms));
                        }
                    }
                }
                2 if new.has_arrived_from(old) => {
                    drop(moving::leave(&old.state, SLUG, now_ms).map(|event| event.into_iter().for_each(|event| old.commit(event))));
                }
                3 if !new.has_arrived_from(old) => {
                    drop(moving::unfreeze(&old.state, SLUG, now_ms).map(|event| event.into_iter().for_each(|event| old.commit(event))));
                }
                _ => {
                    let key = batches + 1;
                    if old.residence().is_some() && start(&old.state, id, key, now_ms).is_ok() {
                        run_batch(old, id, key, now_ms);
                        batches = key;
                    }
                }
            }
            let residences = [cells[0].residence(), cells[1].residence()];
            let changeable = residences.iter().filter(|residence| **residence == Some(Residence::Here)).count();
            assert!(changeable <= 1, "{residences:?}");
            assert!(cells[0].opens() || cells[1].opens(), "{residences:?}");
            if let Some(home) = cells.iter().find(|cell| cell.residence() == Some(Residence::Here)) {
                assert_eq!(home.state.organization(&id).unwrap().started, u64::from(batches));
                for number in 1..=batches {
                    assert!(
                        matches!(start(&home.state, id, number, now_ms), Ok(Start::Replay(_))),
                        "batch {number}"
                    );
                }
            }
        }
        cells.iter().for_each(Cell::recovers);
    }
}
