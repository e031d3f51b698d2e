//! Collections over stores in memory, at times of the test's choice: what is named stays, what is not goes, and where that is unsure all stays.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use evalgrid_proto::{
    log::v1::{self as log, event::Kind},
    v1::ObjectRef,
};
use evalgrid_store::{Index as _, MemoryIndex, MemoryLog, MemoryObjects, Objects as _};
use evalgrid_workflow::State;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

use super::*;
use crate::{
    archive,
    clock::Machine,
    engine::{Core, Engine, LockHeld, OnLogFailure},
};

const NOW_MS: u64 = 1_800_000_000_000;
const OLD_MS: u64 = NOW_MS - UNREFERENCED_FOR_MS - 1;
const YOUNG_MS: u64 = NOW_MS - UNREFERENCED_FOR_MS;

fn reference(id: ObjectId) -> ObjectRef {
    ObjectRef {
        sha256: id.to_string(),
        size: 0,
    }
}

fn archived(organization: &OrgId, batch: BatchId, manifest: ObjectId) -> BatchArchived {
    BatchArchived {
        batch: batch.0.to_vec().into(),
        organization_id: organization.to_string(),
        manifest: Some(reference(manifest)),
        ..BatchArchived::default()
    }
}

fn with_evidence(place: Place) -> v1::Trial {
    let outcome = v1::TrialOutcome {
        evidence: Some(v1::Evidence { place: Some(place) }),
        ..v1::TrialOutcome::default()
    };
    v1::Trial {
        outcome: Some(outcome),
        ..v1::Trial::default()
    }
}

/// A scheduler without wires, of one organization.
struct Bench {
    reader: Reader,
    objects: Arc<MemoryObjects>,
    index: Arc<MemoryIndex>,
    organization: OrgId,
    place: String,
    batches: u8,
}

impl Bench {
    fn new() -> Bench {
        let core = Core::new(State::default(), vec![0; 65], 0);
        let log = Box::new(MemoryLog::new());
        let (engine, _) = Engine::start(core, log, Arc::new(LockHeld), OnLogFailure::StepDown, Machine::shared()).unwrap();
        let (objects, index) = (Arc::new(MemoryObjects::new()), Arc::new(MemoryIndex::new()));
        let organization = OrgId::new(1, [7; 10]);
        engine.turn(|core| {
            let created = log::OrganizationCreated {
                organization_id: organization.to_string(),
                name: "acme".to_owned(),
                slug: "acme".to_owned(),
            };
            core.commit(decide::event(1, Kind::OrganizationCreated(created)));
        });
        Bench {
            reader: Reader {
                engine,
                index: index.clone(),
                objects: objects.clone(),
                filing: Arc::default(),
            },
            objects,
            index,
            organization,
            place: organization.to_string(),
            batches: 0,
        }
    }

    async fn put(&self, place: &str, bytes: impl Into<Bytes>, at_ms: u64) -> ObjectId {
        self.objects.set_time(at_ms);
        self.objects.put(place, bytes.into()).await.unwrap()
    }

    /// An ended batch of which only its row is left.
    async fn end(&mut self, batch: v1::Batch, at_ms: u64) -> (ObjectId, BatchArchived) {
        self.batches += 1;
        // No two manifests are alike.
        let batch = v1::Batch {
            id: self.batches.to_string(),
            ..batch
        };
        let manifest = self.put(&self.place, batch.encode_to_vec(), at_ms).await;
        let archived = archived(&self.organization, BatchId([self.batches; 16]), manifest);
        let position = self.index.position().unwrap() + 1;
        self.index.apply(position, &[archive::row(&archived).unwrap()]).unwrap();
        (manifest, archived)
    }

    async fn stored(&self, place: &str) -> BTreeSet<ObjectId> {
        let all = self.objects.put_before(place, u64::MAX, None, usize::MAX).await.unwrap();
        all.into_iter().map(|object| object.id).collect()
    }

    async fn collect(&self, order: Order) -> (Result<(), Status>, Vec<v1::CollectedObjects>) {
        let (listener, mut answers): (Listener, _) = mpsc::channel(TOLD_AHEAD);
        let hear = async {
            let mut done = Vec::new();
            while let Some(told) = answers.recv().await {
                done.extend(told.ok().filter(|told| told.done));
            }
            done
        };
        let collecting = async {
            let listener = listener;
            collect(&self.reader, &order, NOW_MS, &listener).await
        };
        tokio::join!(collecting, hear)
    }

    async fn collect_all(&self) -> Vec<v1::CollectedObjects> {
        let (result, told) = self.collect(order()).await;
        result.unwrap();
        told
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.reader.engine.stop();
    }
}

fn order() -> Order {
    Order {
        organization: None,
        dry_run: false,
        owns_archive: true,
    }
}

#[test]
fn names_are_found_in_json_and_in_protobuf() {
    fn check(bytes: &[u8], expected: &[ObjectId]) {
        assert_eq!(names(bytes).collect::<Vec<_>>(), expected, "{:?}", String::from_utf8_lossy(bytes));
    }
    let (a, b) = (ObjectId::of(b"a"), ObjectId::of(b"b"));
    check(b"", &[]);
    check(&a.to_string().as_bytes()[1..], &[]);
    check(a.to_string().to_uppercase().as_bytes(), &[]);
    check(format!("{a}").as_bytes(), &[a]);
    check(format!("{a}0123456789").as_bytes(), &[a]);
    check(format!(r#"{{"sha256":"{a}","size":3}},"{b}""#).as_bytes(), &[a, b]);
    check(format!("é{a}é{b}").as_bytes(), &[a, b]);
    // Without a size the next byte is the tag of what follows, here ones that look like hex digits.
    let part = ArchivePart {
        previous: Some(reference(a)),
        batches: vec![archived(&OrgId::new(1, [1; 10]), BatchId([b'f'; 16]), b)],
        position: 0,
    };
    check(&part.encode_to_vec(), &[a, b]);
    let batch = log::SavedBatch {
        manifest: Some(reference(a)),
        ended_ms: 0x61,
        ..log::SavedBatch::default()
    };
    check(&batch.encode_to_vec(), &[a]);
    for size in [0, 1, u64::MAX] {
        let request = ObjectRef {
            sha256: a.to_string(),
            size,
        };
        let batch = v1::Batch {
            request: Some(request),
            suite: Some(v1::Suite::default()),
            ..v1::Batch::default()
        };
        check(&batch.encode_to_vec(), &[a]);
    }
}

/// Histories by chance, against what a reader of this test would say.
#[tokio::test]
async fn exactly_what_is_old_and_unnamed_goes() {
    let first: u64 = std::env::var("EVALGRID_SEED").map_or_else(|_| rand::rng().random(), |seed| seed.parse().unwrap());
    for seed in first..first.wrapping_add(25) {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut bench = Bench::new();
        let mut needed = BTreeSet::new();
        let mut leaves = Vec::new();
        for number in 0..rng.random_range(0..30) {
            let at_ms = *[OLD_MS, YOUNG_MS, NOW_MS].choose(&mut rng).unwrap();
            let padding = "x".repeat(if rng.random_bool(0.1) { 100_000 } else { 1 });
            leaves.push((bench.put(&bench.place, format!("leaf {number} {padding}"), at_ms).await, at_ms));
        }
        for number in 0..rng.random_range(0..8) {
            let some = |rng: &mut StdRng| -> Vec<ObjectId> { leaves.iter().filter(|_| rng.random_bool(0.1)).map(|(id, _)| *id).collect() };
            let text = |ids: &[ObjectId]| {
                let padding = "x".repeat(if number % 3 == 0 { 100_000 } else { 1 });
                serde_json::to_vec(&(number, padding, ids.iter().map(ObjectId::to_string).collect::<Vec<_>>())).unwrap()
            };
            let (inside, outside) = (some(&mut rng), some(&mut rng));
            let request = leaves.choose(&mut rng).map(|(id, _)| *id);
            let evidence = bench
                .put(&bench.place, text(&outside), *[OLD_MS, NOW_MS].choose(&mut rng).unwrap())
                .await;
            let run = v1::Run {
                trials: vec![
                    with_evidence(Place::Inline(text(&inside).into())),
                    with_evidence(Place::Object(reference(evidence))),
                ],
                ..v1::Run::default()
            };
            let batch = v1::Batch {
                request: request.map(reference),
                runs: vec![run],
                ..v1::Batch::default()
            };
            let (manifest, _) = bench.end(batch, *[OLD_MS, NOW_MS].choose(&mut rng).unwrap()).await;
            needed.extend(inside.into_iter().chain(outside).chain(request).chain([evidence, manifest]));
        }
        let all = bench.stored(&bench.place).await;
        let young = leaves.iter().filter(|(_, at_ms)| *at_ms != OLD_MS).map(|(id, _)| *id);
        let expected: BTreeSet<ObjectId> = needed.into_iter().chain(young).collect();
        let dry = bench.collect(Order { dry_run: true, ..order() }).await;
        dry.0.unwrap();
        assert!(bench.stored(&bench.place).await == all, "a dry run removes nothing");
        let told = bench.collect_all().await;
        assert_eq!(told, dry.1, "and tells the truth");
        assert_eq!(bench.stored(&bench.place).await, expected);
        let removed: u64 = told.iter().map(|told| told.removed).sum();
        assert_eq!(removed, (all.len() - expected.len()) as u64);
        let again = bench.collect_all().await;
        assert!(again.iter().all(|told| told.removed == 0));
    }
}

/// In each of these something cannot be known, and the old orphan that would go stays, until that is put right.
#[tokio::test]
async fn nothing_goes_while_anything_is_unsure() {
    let refused = async |bench: &Bench, word: &str| {
        let before = bench.stored(&bench.place).await;
        let (result, told) = bench.collect(order()).await;
        let problems = told.into_iter().filter_map(|told| told.problem);
        let said: Vec<String> = problems.chain(result.err().map(|status| status.message().to_owned())).collect();
        assert!(said.len() == 1 && said[0].contains(word), "{word:?} is not in {said:?}");
        assert!(bench.stored(&bench.place).await == before, "{word}");
    };
    let gone = async |bench: &Bench, orphan: ObjectId| {
        let told = bench.collect_all().await;
        assert!(told.iter().all(|told| told.problem.is_none()), "{told:?}");
        assert!(!bench.stored(&bench.place).await.contains(&orphan));
    };

    let mut bench = Bench::new();
    let place = bench.place.clone();
    let orphan = bench.put(&place, "orphan", OLD_MS).await;
    let text = b"evidence".as_slice();
    let run = v1::Run {
        trials: vec![with_evidence(Place::Object(reference(ObjectId::of(text))))],
        ..v1::Run::default()
    };
    let batch = v1::Batch {
        runs: vec![run],
        ..v1::Batch::default()
    };
    let (manifest, of_it) = bench.end(batch, NOW_MS).await;
    refused(&bench, "the evidence").await;
    bench.put(&place, text, NOW_MS).await;
    let bytes = bench.objects.get(&place, &manifest, 10_000).await.unwrap().unwrap();
    bench.objects.remove(&place, &manifest, u64::MAX).await.unwrap();
    refused(&bench, "the manifest").await;
    bench.put(&place, bytes, NOW_MS).await;

    // A part of the archive that is missing, or is of a batch that the index does not know.
    let lost = archived(&bench.organization, BatchId([200; 16]), manifest);
    let part = ArchivePart {
        batches: vec![of_it, lost.clone()],
        ..ArchivePart::default()
    };
    let part = part.encode_to_vec();
    let newest = reference(ObjectId::of(&part));
    bench.reader.engine.turn(|core| core.archive = Some(newest));
    refused(&bench, "the archive's part").await;
    bench.put(ARCHIVE, part, OLD_MS).await;
    refused(&bench, "the index lacks 1").await;
    bench.index.apply(1_000, &[archive::row(&lost).unwrap()]).unwrap();

    // A row that names no manifest, and a manifest that is none.
    let key = row_key(&bench.organization, &BatchId([201; 16]));
    bench.index.apply(1_001, &[(key.clone(), Some(b"nonsense".to_vec()))]).unwrap();
    refused(&bench, "a row of the index").await;
    let none = bench.put(&place, [0xff; 40].as_slice(), NOW_MS).await;
    let row = archive::row(&archived(&bench.organization, BatchId([201; 16]), none)).unwrap();
    bench.index.apply(1_002, &[row]).unwrap();
    refused(&bench, "is not one").await;
    bench.index.apply(1_003, &[(key, None)]).unwrap();
    gone(&bench, orphan).await;
}

#[tokio::test]
async fn what_is_not_ours_stays() {
    let bench = Bench::new();
    let parts: Vec<ArchivePart> = (0..3)
        .map(|position| ArchivePart {
            position,
            ..ArchivePart::default()
        })
        .collect();
    let mut chain = None;
    for part in parts {
        let part = ArchivePart {
            previous: chain.take().map(reference),
            ..part
        };
        chain = Some(bench.put(ARCHIVE, part.encode_to_vec(), OLD_MS).await);
    }
    let orphan = bench.put(ARCHIVE, "a part that no snapshot names", OLD_MS).await;
    bench.put("org_of_another_cell", "orphan", OLD_MS).await;
    bench.put(&bench.place, "orphan", OLD_MS).await;
    bench.reader.engine.turn(|core| core.archive = chain.map(reference));

    let only = |organization: &str| Order {
        organization: Some(organization.to_owned()),
        ..order()
    };
    for unknown in ["nobody", "the archive", ARCHIVE, &bench.place] {
        let (result, told) = bench.collect(only(unknown)).await;
        assert_eq!((result.unwrap_err().code(), told.len()), (tonic::Code::NotFound, 0), "{unknown}");
    }
    let shared = Order {
        owns_archive: false,
        ..order()
    };
    let (result, told) = bench.collect(shared).await;
    result.unwrap();
    assert_eq!(bench.stored(ARCHIVE).await.len(), 4, "others may have named it");
    let of = |name: &str| told.iter().find(|told| told.organization == name).unwrap();
    assert_eq!((of("acme").removed, of("acme").looked_at), (1, 1));
    let foreign = of("org_of_another_cell");
    assert!(foreign.removed == 0 && foreign.problem.as_ref().unwrap().contains("knows no such organization"));
    assert_eq!(bench.stored("org_of_another_cell").await.len(), 1);

    let (result, _) = bench.collect(only("acme")).await;
    result.unwrap();
    assert_eq!(bench.stored(ARCHIVE).await.len(), 4, "it was not asked for");
    let told = bench.collect_all().await;
    assert!(told.iter().any(|told| told.organization == "the archive" && told.removed == 1));
    assert!(!bench.stored(ARCHIVE).await.contains(&orphan));
    assert_eq!(bench.stored(ARCHIVE).await.len(), 3, "parts in the chain stay");
}

#[tokio::test]
async fn an_organization_on_its_way_is_left_alone() {
    let bench = Bench::new();
    let id = || bench.organization.to_string();
    let commit = |kind| bench.reader.engine.turn(|core| core.commit(decide::event(2, kind)));
    let orphan = bench.put(&bench.place, "perhaps of use where it lives now", OLD_MS).await;
    for kind in [
        Kind::OrganizationFrozen(log::OrganizationFrozen { organization_id: id() }),
        Kind::OrganizationMoved(log::OrganizationMoved { organization_id: id() }),
    ] {
        commit(kind);
        let told = bench.collect_all().await;
        assert!(told[0].problem.is_none() && told[0].looked_at == 0, "{told:?}");
        assert!(bench.stored(&bench.place).await.contains(&orphan));
    }

    // It is frozen while its objects are being removed: the rest stays.
    let bench = Bench::new();
    for number in 0..1_000 {
        bench.put(&bench.place, format!("orphan {number}"), OLD_MS).await;
    }
    let (listener, mut answers): (Listener, _) = mpsc::channel(1);
    let hear = async {
        let mut last = None;
        while let Some(told) = answers.recv().await {
            let told = told.unwrap();
            if told.removed > 0 && !told.done {
                let organization_id = bench.organization.to_string();
                let frozen = Kind::OrganizationFrozen(log::OrganizationFrozen { organization_id });
                bench.reader.engine.turn(|core| {
                    if core.state.organization(&bench.organization).unwrap().residence == Residence::Here {
                        core.commit(decide::event(2, frozen));
                    }
                });
            }
            last = Some(told);
        }
        last.unwrap()
    };
    let order = order();
    let collecting = async {
        let listener = listener;
        collect(&bench.reader, &order, NOW_MS, &listener).await
    };
    let (result, last) = tokio::join!(collecting, hear);
    result.unwrap();
    assert!(last.problem.unwrap().contains("begun to move"));
    let left = bench.stored(&bench.place).await.len();
    assert!(left as u64 == 1_000 - last.removed && left > 100, "{left}");
}

#[tokio::test]
async fn one_collection_at_a_time_and_none_at_shutdown() {
    let bench = Bench::new();
    let (stop, shutdown) = watch::channel(false);
    let collector = Collector::new(bench.reader.clone(), true, shutdown);
    for number in 0..1_000 {
        bench.put(&bench.place, format!("orphan {number}"), 1).await;
    }
    let request = || v1::CollectObjectsRequest::default();
    // Nobody reads the first one's answers, so it cannot end.
    let first = collector.start(request()).unwrap();
    let second = collector.start(request()).err().unwrap();
    assert_eq!(second.code(), tonic::Code::ResourceExhausted);
    drop(first);
    let patience = std::time::Duration::from_secs(20);
    let free = tokio::time::timeout(patience, collector.running.clone().acquire_owned()).await;
    drop(free.unwrap().unwrap());
    stop.send_replace(true);
    let mut third = collector.start(request()).unwrap();
    let told = tokio::time::timeout(patience, futures::StreamExt::next(&mut third)).await.unwrap();
    let last = match told {
        Some(Ok(_)) => loop {
            match futures::StreamExt::next(&mut third).await {
                Some(Ok(_)) => {}
                other => break other,
            }
        },
        other => other,
    };
    assert_eq!(last.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
}
