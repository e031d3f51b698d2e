//! Ended batches on their way out of memory, and back into the index.

use std::fs;

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::log::v1::{self as log, event::Kind};
use evalgrid_store::Replay;
use evalgrid_workflow::{Event, decide, view};
use prost::Message as _;

use super::*;
use crate::{archive::archive_loop, replica::Replica};

/// The batches that the log says are archived, in its order.
fn archived(site: &Site) -> Vec<String> {
    let mut archived = Vec::new();
    let taken = site.log.clone().open(|item| {
        if let Replay::Record(_, record) = item
            && let Some(Kind::BatchArchived(event)) = Event::decode(record.payload)?.kind
        {
            archived.push(BatchId(event.batch.as_ref().try_into()?).to_string());
        }
        Ok(())
    });
    taken.unwrap();
    archived
}

/// catalogue 9: a batch whose result cannot be stored keeps no other. catalogue 14: it is tried until it is, not only once.
#[tokio::test]
async fn a_batch_that_cannot_be_stored_keeps_no_other() {
    let site = Site::new();
    let stuck = site.organization("stuck", "anp_stuck").await;
    let other = site.organization("other", "anp_other").await;
    let first = site.ended("anp_stuck").await;
    // Where its organization's folder must be, there is something else.
    let (place, aside) = (site.folder.path().join(stuck.to_string()), site.folder.path().join("aside"));
    fs::rename(&place, &aside).unwrap();
    fs::write(&place, "in the way").unwrap();
    let archiving = tokio::spawn(archive_loop(site.reader.clone(), site.stop.subscribe()));
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(site.ended("anp_other").await);
    }
    eventually("the others are archived", async || {
        others.iter().all(|id| site.is_filed(&other, id))
    })
    .await;
    assert!(!site.is_filed(&stuck, &first));
    assert_eq!(
        site.get(&first, "anp_stuck").await.unwrap().id,
        first,
        "and this one is read from memory"
    );
    fs::remove_file(&place).unwrap();
    fs::rename(&aside, &place).unwrap();
    // Nothing else happens that could remind anybody of it.
    eventually("the last one is archived, too", async || site.is_filed(&stuck, &first)).await;
    site.stop.send_replace(true);
    timeout(PATIENCE, archiving).await.unwrap().unwrap();
}

/// catalogue 9, 14: rows that the index refuses are not forgotten, pass no other, and are no second event.
#[tokio::test]
async fn rows_that_the_index_refuses_come_in_later() {
    for refused in [1, 2, 5] {
        let site = Site::new();
        let one = site.organization("one", "anp_one").await;
        let mut ids = Vec::new();
        for _ in 0..3 {
            ids.push(site.ended("anp_one").await);
        }
        site.index.refuses.store(refused, Ordering::SeqCst);
        let archiving = tokio::spawn(archive_loop(site.reader.clone(), site.stop.subscribe()));
        eventually("all are archived", async || ids.iter().all(|id| site.is_filed(&one, id))).await;
        eventually("all have left memory", async || {
            site.engine.turn(|core| core.state.batches().count()).0 == 0
        })
        .await;
        for id in &ids {
            assert_eq!(site.get(id, "anp_one").await.unwrap().id, *id);
        }
        site.stop.send_replace(true);
        timeout(PATIENCE, archiving).await.unwrap().unwrap();
        let mut told = archived(&site);
        told.sort();
        ids.sort();
        assert_eq!(told, ids, "each has one event");
    }
}

/// catalogue 58: at shutdown everything that has ended is archived, and then the loop ends.
#[tokio::test]
async fn whatever_has_ended_is_archived_at_shutdown() {
    let site = Site::new();
    let one = site.organization("one", "anp_one").await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(site.ended("anp_one").await);
    }
    site.stop.send_replace(true);
    timeout(PATIENCE, archive_loop(site.reader.clone(), site.stop.subscribe()))
        .await
        .unwrap();
    assert!(ids.iter().all(|id| site.is_filed(&one, id)));
}

/// A log in which so many batches have been archived.
fn history(batches: usize) -> Vec<Event> {
    let mut state = State::default();
    let mut log: Vec<Event> = Vec::new();
    let mut commit = |state: &mut State, event: Event| {
        state.apply(&event).unwrap();
        log.push(event);
    };
    let organization = OrgId::new(1, [7; 10]);
    commit(
        &mut state,
        decide::create_organization(&State::default(), "one", organization, 1).unwrap(),
    );
    for number in 0..batches {
        let mut random = [0; 10];
        random[..8].copy_from_slice(&(number as u64).to_be_bytes());
        let id = BatchId::new(2, random);
        let started = log::BatchStarted {
            batch: id.0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default()],
            variants: vec![v1::VariantInfo::default()],
            trials: 1,
            variant_ids: vec![String::new()],
            ..Default::default()
        };
        commit(&mut state, decide::event(2, Kind::BatchStarted(started)));
        for event in decide::cancel(&state, &organization, &id, 2).unwrap() {
            commit(&mut state, event.clone());
            let ended = decide::after(&state, &event).unwrap();
            commit(&mut state, ended);
        }
        let batch = state.batch(&id).unwrap();
        let archived = decide::archived(batch, v1::ObjectRef::default(), view::summary(batch), 2);
        commit(&mut state, archived);
    }
    log
}

/// catalogue 10: rows go into the index by the page, and no number of them loses one, whatever the index had of them before.
#[test]
fn pages_of_rows_lose_none() {
    for batches in [0, 1, 255, 256, 257, 511, 512, 513] {
        let log = history(batches);
        for had in [0, 1, batches / 2, batches] {
            let index = Arc::new(MemoryIndex::new());
            let fetch: crate::replica::FetchPart = Arc::new(|_| Err("there is no archive".into()));
            let replay = |until: usize| {
                let mut replica = Replica::new(index.clone(), fetch.clone()).unwrap();
                for (place, event) in log.iter().enumerate().take(until) {
                    let record = Record {
                        partition: 0,
                        sequence: place as u64 + 1,
                        payload: event.encode_to_vec().into(),
                    };
                    replica.take(Replay::Record(place as u64 + 1, record.as_ref())).unwrap();
                }
                replica.to_core().unwrap()
            };
            replay(1 + had * 4);
            let core = replay(log.len());
            let rows = index.scan(b"b/", None, usize::MAX).unwrap().len();
            assert_eq!(
                (rows, core.state.batches().count()),
                (batches, 0),
                "{batches} batches, {had} of them known before"
            );
        }
    }
}
