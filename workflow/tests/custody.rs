//! The custody ledger: what proves that a sandbox is gone, what is ours to touch, and what must not be lost from sight.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_proto::v1;
use evalgrid_workflow::{Chance, Listing, custody, decide};
use support::{Cell, SMALL, Shape};

#[test]
fn only_a_list_that_proves_absence_closes_custody() {
    fn check(what: &str, provider: &str, listing: impl Fn(&[String]) -> Listing<'_>, present: bool, closes: bool) {
        let mut cell = Cell::new(1);
        let organization = cell.organization(0);
        cell.start(organization, Shape { provider, ..SMALL });
        let (key, token) = cell.lease("w").unwrap();
        let name = cell.sandbox(key);
        cell.pass("w", token);
        let names: Vec<String> = present.then(|| name.clone()).into_iter().collect();
        let events = decide::listed_sandboxes(&cell.state, "w", listing(&names), cell.now_ms);
        cell.commit_all(events);
        assert_eq!(cell.state.sandbox(&name).is_none(), closes, "{what}");
        // Whatever the list was like, a confirmation closes it.
        cell.destroyed("w", &name);
        assert!(cell.state.sandbox(&name).is_none());
    }
    fn folder(names: &[String]) -> Listing<'_> {
        Listing::Folder { boot_id: "boot", names }
    }
    fn later(names: &[String]) -> Listing<'_> {
        Listing::Folder { boot_id: "later", names }
    }
    fn provider(names: &[String]) -> Listing<'_> {
        Listing::Provider { names }
    }
    check("not in the folder", "process", folder, false, true);
    check("in the folder", "process", folder, true, false);
    check("another boot, whatever is left", "process", later, true, true);
    check("a remote one is in no folder", "e2b", folder, false, false);
    check("a remote one outlives the boot", "e2b", later, false, false);
    check("a provider's list lies", "e2b", provider, false, false);
    check("even of local ones", "process", provider, false, false);
}

#[test]
fn a_sandbox_that_an_attempt_may_be_making_is_not_gone() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (_, token) = cell.lease("w").unwrap();
    cell.pass("w", token);
    let check = |what: &str, held: &[u64], provider: &str, boot_id: &str, gone: usize| {
        let hello = v1::Hello {
            worker_id: "w".into(),
            boot_id: boot_id.into(),
            providers: vec![provider.into()],
            held: held.to_vec(),
            ..v1::Hello::default()
        };
        let events = decide::hello_sandboxes(&cell.state, &hello, cell.now_ms);
        assert_eq!(events.len(), gone, "{what}");
    };
    check("its provider does not work there now, and was not asked", &[], "another", "boot", 0);
    let check = |what: &str, held: &[u64], boot_id: &str, gone: usize| check(what, held, SMALL.provider, boot_id, gone);
    check("its worker does not know yet that its lease has ended", &[token], "boot", 0);
    check("its worker has never had it, or is done with it", &[], "boot", 1);
    check("it holds another one", &[token + 1], "boot", 1);
    check("it cannot outlive its boot", &[token], "later", 1);
}

#[test]
fn a_sandbox_under_a_lease_is_left_alone() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (key, token) = cell.lease("w").unwrap();
    let name = cell.sandbox(key);
    let nothing = Listing::Folder {
        boot_id: "boot",
        names: &[],
    };
    assert!(
        decide::listed_sandboxes(&cell.state, "w", nothing, cell.now_ms).is_empty(),
        "it may be about to be made"
    );
    assert!(
        decide::destroyed(&cell.state, &name, "w", cell.now_ms).is_empty(),
        "a confused worker changes nothing"
    );
    assert!(decide::ask_to_destroy(&cell.state, &name, cell.now_ms).is_none(), "it is needed");
    cell.pass("w", token);
    assert!(
        decide::destroyed(&cell.state, &name, "other", cell.now_ms).is_empty(),
        "somebody else's word"
    );
    let asked = decide::ask_to_destroy(&cell.state, &name, cell.now_ms);
    assert!(asked.is_some());
    cell.commit_all(asked);
    assert!(
        decide::ask_to_destroy(&cell.state, &name, cell.now_ms).is_none(),
        "once is on record"
    );
    assert_eq!(cell.state.sandbox(&name).unwrap().destroy_asked_ms, Some(cell.now_ms));
}

/// catalogue 32: what is not recognised is not destroyed.
#[test]
fn names_of_others_are_left_alone() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, Shape { cases: 2, ..SMALL });
    let leased = cell.leases("w");
    let (needed, over) = (cell.sandbox(leased[0].0), cell.sandbox(leased[1].0));
    cell.pass("w", leased[1].1);
    let trial = over.rsplit_once('-').unwrap().0.to_owned();
    let elsewhere = format!("{trial}-99");
    let ours = [over, elsewhere];
    let foreign = [
        trial.clone(),
        format!("{trial}-"),
        format!("{trial}-x"),
        format!("{trial}-007"),
        format!("{trial}-+7"),
        format!("my-{trial}-7"),
        "notes".to_owned(),
        "trial_-1".to_owned(),
        "-1".to_owned(),
        String::new(),
    ];
    let names: Vec<String> = ours.iter().chain(&foreign).chain([&needed]).cloned().collect();
    let listing = Listing::Folder {
        boot_id: "boot",
        names: &names,
    };
    let (unneeded, left) = decide::unneeded(&cell.state, &listing);
    assert_eq!(unneeded, ours);
    assert_eq!(left, foreign);
    assert!(custody::is_ours(&needed));
}

/// catalogue 56: who asked for a sandbox may have lost its lease before it could tell what came of it. It is believed all the same.
#[test]
fn a_sandbox_that_was_made_after_its_lease_had_ended_is_not_lost_from_sight() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, Shape { provider: "e2b", ..SMALL });
    let (key, _) = cell.lease("w").unwrap();
    let name = cell.sandbox(key);
    cell.expire("w");
    cell.now_ms += 60_000;
    let events = decide::give_up_absent(&cell.state, &|_| true, 60_000, &mut cell.chance, cell.now_ms);
    cell.commit_all(events);
    assert!(
        !decide::needed(&cell.state, &name) && cell.state.sandbox(&name).is_some(),
        "given up, and still in custody"
    );
    let report = |provider_id: String| v1::CreatedSandbox {
        sandbox: name.clone(),
        provider_id,
    };
    assert!(decide::created(&cell.state, "other", report("i-1".into()), cell.now_ms).is_none());
    let long = "i".repeat(custody::MAX_PROVIDER_ID_BYTES + 1);
    assert!(decide::created(&cell.state, "w", report(long), cell.now_ms).is_none());
    let event = decide::created(&cell.state, "w", report("i-1".into()), cell.now_ms);
    cell.commit_all(event);
    let sandbox = cell.recovered(Default::default()).state.sandbox(&name).unwrap().clone();
    assert_eq!((sandbox.created, sandbox.provider_id.as_deref()), (true, Some("i-1")));
}

/// A failover has lost a verdict, and the worker that still has the lease, as far as anybody knows, destroys the trial's sandbox.
#[test]
fn a_lease_ends_with_its_sandbox() {
    let mut cell = Cell::new(1);
    let organization = cell.organization(0);
    cell.start(organization, SMALL);
    let (key, token) = cell.lease("w").unwrap();
    cell.step("w", token, "turn.1.agent");
    let sandbox = cell.sandbox(key);
    let gone = |cell: &Cell, worker: &str| decide::gone_under_lease(&cell.state, worker, &sandbox, &mut Chance::new(1), cell.now_ms);
    assert!(gone(&cell, "other").is_none(), "it is not its own");
    let ended = gone(&cell, "w");
    assert!(ended.is_some());
    cell.commit_all(ended);
    cell.destroyed("w", &sandbox);
    assert!(cell.state.lease(token).is_none() && cell.state.sandbox(&sandbox).is_none());
    assert_eq!(cell.trial(key).lost.len(), 1);
    assert!(gone(&cell, "w").is_none(), "told twice");
    cell.now_ms += 60_000;
    assert!(cell.lease("other").is_some(), "the trial starts over");
}
