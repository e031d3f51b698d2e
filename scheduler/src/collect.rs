//! Collection: removes objects that nothing refers to any more. The operator asks for it; no timer does, for it reads every result once.
//!
//! What counts as a reference is wide on purpose: 64 hex digits at the start of any run of them, which is how all that is kept writes an
//! object's name (JSON in quotes, protobuf behind the length, which is no hex digit). They are looked for in
//!
//! - the live batches of one moment, whole, as a snapshot would keep them: request, evidence, manifest, results of recorded steps;
//! - every row of ended batches, and every manifest;
//! - every object that those name. One level is enough: evidence may name further objects, and those name none.
//!
//! One moment of the live batches is enough, too. What is named later was put later, and an object that was put within
//! [`UNREFERENCED_FOR_MS`] stays anyway; or it was named before, by what this moment holds or by a result, and results are for ever.
//! Trials that have shown no sign for hours are settled first: whoever comes back to one after a week brings the names of old objects,
//! and is refused.
//!
//! Where anything that may hold references cannot be read, nothing of the organization is removed; nor of one that is on its way to another
//! cell, lives there, or that the log does not know: cells may keep their objects in one place.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;
use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1::{ArchivePart, BatchArchived, StateSnapshot, saved_organization, saved_trial::Phase},
    v1::{self, evidence::Place},
};
use evalgrid_store::{IndexError, ObjectError, ObjectId, objects::MAX_OBJECT_BYTES};
use evalgrid_workflow::{Residence, decide};
use futures::Stream;
use prost::Message as _;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{
    engine::{Core, Stopping},
    read::{Reader, row_key, row_prefix},
    snapshot::{self, ARCHIVE},
};

/// Only what was last put longer ago is collected: 7 days. Between a put and the event that names it lie seconds, or as long as a machine
/// was off; a week leaves time to notice that, and to put an older log back beside newer objects.
pub const UNREFERENCED_FOR_MS: u64 = 7 * 24 * 3_600_000;
/// Candidates at a time, about 50 bytes of memory each. Where there are more, the results are read once per so many. Tests always have more.
const MAX_CANDIDATES: usize = if cfg!(test) { 5 } else { 500_000 };
/// Rows of the index read at a time; a row has at most 8 KiB.
const ROWS_AT_ONCE: usize = 64;
/// The caller hears of progress once per this many objects read or removed.
const TELL_EVERY: u64 = 100;
/// Up to this much is searched at once; more would keep others waiting and goes to a thread for that.
const INLINE_SEARCH_BYTES: usize = 64 * 1024;

/// Messages that a caller may be behind.
const TOLD_AHEAD: usize = 4;

/// Who hears of progress.
pub type Listener = mpsc::Sender<Result<v1::CollectedObjects, Status>>;

/// What shall be collected.
#[derive(Clone, Debug)]
pub struct Order {
    /// The slug of one organization; None: all of them, and the archive.
    pub organization: Option<String>,
    /// Only tell what would be removed.
    pub dry_run: bool,
    /// Whether the archive among the objects is of this scheduler alone: others may have named parts that it has never heard of.
    pub owns_archive: bool,
}

/// Why nothing, or nothing more, is removed.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{what} {id} is missing, so what it names is unknown; restore it from a backup and collect again")]
    Missing { what: &'static str, id: ObjectId },
    #[error("the manifest {0} is not one, so what it names is unknown; restore it from a backup and collect again")]
    NoManifest(ObjectId),
    #[error("an object may name others and cannot be read: {0}; put that right, or restore the object from a backup, and collect again")]
    Objects(#[from] ObjectError),
    #[error("a row of the index cannot be read; rebuild the index and collect again")]
    NoRow,
    #[error("the index lacks {0} of the results that the archive names; rebuild the index and collect again")]
    Lacking(u64),
    #[error("the index cannot be read: {0}; rebuild it and collect again")]
    Index(#[from] IndexError),
    #[error("the log knows no such organization, so nothing is known of its objects; they are left alone")]
    Unknown,
    #[error("the organization has begun to move to another cell; the rest of its objects are left alone")]
    Moving,
    #[error("the scheduler is stopping")]
    Stopping,
    #[error("nobody listens any more")]
    Gone,
}

impl From<Stopping> for Refusal {
    fn from(_: Stopping) -> Refusal {
        Refusal::Stopping
    }
}

/// Starts collections, one at a time.
#[derive(Clone)]
pub struct Collector {
    reader: Reader,
    owns_archive: bool,
    running: Arc<Semaphore>,
    shutdown: watch::Receiver<bool>,
}

/// How far a collection is.
pub type CollectStream = Pin<Box<dyn Stream<Item = Result<v1::CollectedObjects, Status>> + Send>>;

impl Collector {
    /// `owns_archive` as in [`Order`].
    pub fn new(reader: Reader, owns_archive: bool, shutdown: watch::Receiver<bool>) -> Collector {
        Collector {
            reader,
            owns_archive,
            running: Arc::new(Semaphore::new(1)),
            shutdown,
        }
    }

    /// Starts one; it ends early once nobody reads the answer, or at shutdown.
    pub fn start(&self, request: v1::CollectObjectsRequest) -> Result<CollectStream, Status> {
        let busy = |_| Status::resource_exhausted("objects are being collected already");
        let permit = self.running.clone().try_acquire_owned().map_err(busy)?;
        let order = Order {
            organization: Some(request.organization).filter(|slug| !slug.is_empty()),
            dry_run: request.dry_run,
            owns_archive: self.owns_archive,
        };
        let (listener, answers) = mpsc::channel(TOLD_AHEAD);
        let (reader, mut shutdown) = (self.reader.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            let _permit = permit;
            // The wall clock: a log may hold a time from the future, by which everything would be old.
            let now_ms = reader.engine.world().now_ms();
            let result = tokio::select! {
                result = collect(&reader, &order, now_ms, &listener) => result,
                _ = shutdown.wait_for(|stop| *stop) => Err(crate::auth::stopping()),
                () = listener.closed() => Ok(()),
            };
            if let Err(status) = result {
                // Nobody may listen any more.
                let _ = listener.send(Err(status)).await;
            }
        });
        Ok(Box::pin(ReceiverStream::new(answers)))
    }
}

/// The names that `bytes` hold.
fn names(bytes: &[u8]) -> impl Iterator<Item = ObjectId> {
    bytes
        .split(|byte| !matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        .filter_map(|run| std::str::from_utf8(run.get(..64)?).ok()?.parse().ok())
}

/// What is known of one organization before its results are read.
#[derive(Default)]
struct Known {
    slug: String,
    /// Whether it lives in this cell, and how often it has arrived here.
    here: bool,
    generation: u64,
    /// Named by its live batches.
    named: BTreeSet<ObjectId>,
    /// Those of them that are evidence.
    evidence: BTreeSet<ObjectId>,
    /// Manifests of batches that have not left memory.
    manifests: BTreeSet<ObjectId>,
    live: BTreeSet<BatchId>,
    /// Results that the archive names and the index does not.
    lacking: u64,
}

/// One moment: who there is and what is live, and what the archive holds.
struct Moment {
    organizations: BTreeMap<String, Known>,
    parts: HashSet<ObjectId>,
    /// Of the log; the right to act on this is checked by it.
    position: u64,
}

fn evidence_of(outcome: Option<&v1::TrialOutcome>) -> Option<ObjectId> {
    match outcome?.evidence.as_ref()?.place.as_ref()? {
        Place::Object(reference) => reference.sha256.parse().ok(),
        Place::Inline(_) => None,
    }
}

fn known(saved: &StateSnapshot) -> BTreeMap<String, Known> {
    let mut organizations: BTreeMap<String, Known> = BTreeMap::new();
    for organization in &saved.organizations {
        let known = organizations.entry(organization.id.clone()).or_default();
        known.slug = organization.slug.clone();
        known.here = organization.residence() == saved_organization::Residence::Here;
        known.generation = organization.generation;
    }
    for batch in &saved.batches {
        let Some(started) = &batch.started else { continue };
        let known = organizations.entry(started.organization_id.clone()).or_default();
        known.live.extend(<[u8; 16]>::try_from(started.batch.as_ref()).map(BatchId));
        known.named.extend(names(&batch.encode_to_vec()));
        let manifest = batch.manifest.as_ref();
        known
            .manifests
            .extend(manifest.and_then(|manifest| manifest.sha256.parse::<ObjectId>().ok()));
        let trials = batch.runs.iter().flat_map(|run| &run.trials);
        known.evidence.extend(trials.filter_map(|trial| match &trial.phase {
            Some(Phase::Settled(outcome)) => evidence_of(Some(outcome)),
            Some(Phase::Judging(judging)) => evidence_of(judging.outcome.as_ref()),
            _ => None,
        }));
    }
    organizations
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Refusal::Stopping)
}

/// One collection.
struct Collection<'a> {
    reader: &'a Reader,
    order: &'a Order,
    before_ms: u64,
    listener: &'a Listener,
}

/// Collects what `order` says, with the wall clock at `now_ms`, and tells of each organization.
pub async fn collect(reader: &Reader, order: &Order, now_ms: u64, listener: &Listener) -> Result<(), Status> {
    let collection = Collection {
        reader,
        order,
        before_ms: now_ms.saturating_sub(UNREFERENCED_FOR_MS),
        listener,
    };
    match collection.run().await {
        Ok(()) | Err(Refusal::Gone) => Ok(()),
        Err(Refusal::Stopping) => Err(crate::auth::stopping()),
        Err(Refusal::Unknown) => Err(Status::not_found("organization: there is none of this name")),
        Err(refusal) => Err(Status::data_loss(format!("nothing was collected: {refusal}"))),
    }
}

impl Collection<'_> {
    async fn run(&self) -> Result<(), Refusal> {
        let moment = self.moment().await?;
        let places = match &self.order.organization {
            Some(slug) => {
                let named = moment.organizations.iter().find(|(_, known)| known.slug == *slug);
                vec![named.ok_or(Refusal::Unknown)?.0.clone()]
            }
            None => self.reader.objects.organizations().await?,
        };
        for place in places {
            let slug = moment.organizations.get(&place).map(|known| known.slug.clone());
            let mut told = v1::CollectedObjects {
                organization: match place == ARCHIVE {
                    true => "the archive".to_owned(),
                    false => slug.unwrap_or_else(|| place.clone()),
                },
                ..v1::CollectedObjects::default()
            };
            self.tell(&told).await?;
            match self.place(&moment, &place, &mut told).await {
                Ok(()) => {}
                Err(refusal @ (Refusal::Stopping | Refusal::Gone)) => return Err(refusal),
                Err(refusal) => {
                    tracing::error!(organization = told.organization, "objects are not collected: {refusal}");
                    told.problem = Some(refusal.to_string());
                }
            }
            told.done = true;
            let v1::CollectedObjects {
                organization,
                looked_at,
                removed,
                bytes,
                ..
            } = &told;
            let dry_run = self.order.dry_run;
            tracing::info!(organization, looked_at, removed, bytes, dry_run, "objects were looked through");
            self.tell(&told).await?;
        }
        Ok(())
    }

    async fn tell(&self, told: &v1::CollectedObjects) -> Result<(), Refusal> {
        self.listener.send(Ok(told.clone())).await.map_err(|_| Refusal::Gone)
    }

    async fn moment(&self) -> Result<Moment, Refusal> {
        let engine = &self.reader.engine;
        let (saved, position) = engine.turn(|core| {
            if !self.order.dry_run {
                let abandoned = decide::abandon(&core.state, core.now_ms());
                core.commit_all(abandoned);
            }
            snapshot::save(core).0
        });
        engine.durable(position).await?;
        let (archive, archived) = (saved.archive.clone(), saved.archived.clone());
        let mut moment = Moment {
            organizations: blocking(move || known(&saved)).await?,
            parts: HashSet::new(),
            position,
        };
        self.compare(&mut moment, archived).await?;
        let mut next = archive;
        while let Some(reference) = next.take() {
            let id: ObjectId = reference.sha256.parse().map_err(|_| Refusal::NoRow)?;
            moment.parts.insert(id);
            let bytes = self.must_read(ARCHIVE, "the archive's part", &id).await?;
            let part = ArchivePart::decode(bytes).map_err(|_| Refusal::NoManifest(id))?;
            self.compare(&mut moment, part.batches).await?;
            next = part.previous;
        }
        Ok(moment)
    }

    /// An index that has lost rows would make whole results look unreferenced: what is archived must be in it, or still in memory.
    async fn compare(&self, moment: &mut Moment, archived: Vec<BatchArchived>) -> Result<(), Refusal> {
        let keys: Vec<(String, Vec<u8>)> = archived
            .iter()
            .filter_map(|archived| {
                let organization: OrgId = archived.organization_id.parse().ok()?;
                let batch = BatchId(archived.batch.as_ref().try_into().ok()?);
                let live = moment.organizations.get(&archived.organization_id)?.live.contains(&batch);
                (!live).then(|| (archived.organization_id.clone(), row_key(&organization, &batch)))
            })
            .collect();
        let index = self.reader.index.clone();
        let lacking = blocking(move || {
            let mut lacking = Vec::new();
            for (organization, key) in keys {
                if index.get(&key)?.is_none() {
                    lacking.push(organization);
                }
            }
            Ok::<_, IndexError>(lacking)
        });
        for organization in lacking.await?? {
            moment.organizations.entry(organization).or_default().lacking += 1;
        }
        Ok(())
    }

    async fn must_read(&self, place: &str, what: &'static str, id: &ObjectId) -> Result<Bytes, Refusal> {
        let found = self.reader.objects.get(place, id, MAX_OBJECT_BYTES).await?;
        found.ok_or(Refusal::Missing { what, id: *id })
    }

    /// The objects of one organization, or the archive's.
    async fn place(&self, moment: &Moment, place: &str, told: &mut v1::CollectedObjects) -> Result<(), Refusal> {
        if place == ARCHIVE && !self.order.owns_archive {
            return Ok(());
        }
        let known = match moment.organizations.get(place) {
            _ if place == ARCHIVE => None,
            // The cell where it lives may keep its objects in the same place, and alone knows which of them it needs.
            Some(known) if !known.here => return Ok(()),
            Some(known) if known.lacking > 0 => return Err(Refusal::Lacking(known.lacking)),
            Some(known) => Some((known, place.parse::<OrgId>().map_err(|_| Refusal::Unknown)?)),
            None => return Err(Refusal::Unknown),
        };
        let (mut after, mut done) = (None, 0);
        loop {
            let objects = &self.reader.objects;
            let old = objects.put_before(place, self.before_ms, after.as_ref(), MAX_CANDIDATES).await?;
            let Some(last) = old.last() else { return Ok(()) };
            after = Some(last.id);
            told.looked_at += old.len() as u64;
            let mut walk = Walk {
                collection: self,
                place,
                told: &mut *told,
                candidates: old.iter().map(|old| (old.id, Candidate::new(old.bytes))).collect(),
                done: &mut done,
            };
            match known {
                Some((known, organization)) => walk.organization(known, &organization).await?,
                None => moment.parts.iter().for_each(|part| walk.name(part)),
            }
            walk.remove(moment.position, known).await?;
            if old.len() < MAX_CANDIDATES {
                return Ok(());
            }
        }
    }
}

/// An object that is removed unless something names it.
struct Candidate {
    bytes: u64,
    named: bool,
    /// It was searched: evidence that many results share is read once.
    read: bool,
}

impl Candidate {
    fn new(bytes: u64) -> Candidate {
        Candidate {
            bytes,
            named: false,
            read: false,
        }
    }
}

/// A way through everything that may name one of the candidates.
struct Walk<'a> {
    collection: &'a Collection<'a>,
    place: &'a str,
    told: &'a mut v1::CollectedObjects,
    candidates: HashMap<ObjectId, Candidate>,
    /// Objects read or removed.
    done: &'a mut u64,
}

impl Walk<'_> {
    fn name(&mut self, id: &ObjectId) {
        if let Some(candidate) = self.candidates.get_mut(id) {
            candidate.named = true;
        }
    }

    async fn organization(&mut self, known: &Known, organization: &OrgId) -> Result<(), Refusal> {
        // Memory was asked before the index is: a batch that moves there meanwhile is then seen in both places, never in none.
        for manifest in &known.manifests {
            self.result(manifest).await?;
        }
        for id in &known.named {
            self.follow(id, known.evidence.contains(id)).await?;
        }
        let prefix = row_prefix(organization);
        let mut after: Option<Vec<u8>> = None;
        loop {
            let (index, prefix, behind) = (self.collection.reader.index.clone(), prefix.clone(), after.take());
            let rows = blocking(move || index.scan(&prefix, behind.as_deref(), ROWS_AT_ONCE)).await??;
            let Some((last, _)) = rows.last() else { return Ok(()) };
            after = Some(last.clone());
            for (_, row) in &rows {
                names(row).for_each(|id| self.name(&id));
                let archived = BatchArchived::decode(row.as_slice()).map_err(|_| Refusal::NoRow)?;
                let manifest = archived.manifest.and_then(|manifest| manifest.sha256.parse().ok());
                self.result(&manifest.ok_or(Refusal::NoRow)?).await?;
            }
        }
    }

    /// The manifest of an ended batch, and all that it names.
    async fn result(&mut self, id: &ObjectId) -> Result<(), Refusal> {
        self.name(id);
        let bytes = self.collection.must_read(self.place, "the manifest", id).await?;
        let searched = blocking(move || {
            let batch = v1::Batch::decode(bytes.clone()).ok()?;
            let trials = batch.runs.iter().flat_map(|run| &run.trials);
            let evidence: BTreeSet<ObjectId> = trials.filter_map(|trial| evidence_of(trial.outcome.as_ref())).collect();
            Some((names(&bytes).collect::<BTreeSet<_>>(), evidence))
        });
        let (named, evidence) = searched.await?.ok_or(Refusal::NoManifest(*id))?;
        self.told.results += 1;
        self.step().await?;
        for id in named {
            self.follow(&id, evidence.contains(&id)).await?;
        }
        Ok(())
    }

    /// An object that is named, and what it names in turn. 64 hex digits that are no object of ours are none; evidence must be there.
    async fn follow(&mut self, id: &ObjectId, evidence: bool) -> Result<(), Refusal> {
        if let Some(candidate) = self.candidates.get_mut(id) {
            candidate.named = true;
            if std::mem::replace(&mut candidate.read, true) {
                return Ok(());
            }
        }
        let bytes = match evidence {
            true => self.collection.must_read(self.place, "the evidence", id).await?,
            false => match self.collection.reader.objects.get(self.place, id, MAX_OBJECT_BYTES).await? {
                Some(bytes) => bytes,
                None => return Ok(()),
            },
        };
        if bytes.len() <= INLINE_SEARCH_BYTES {
            names(&bytes).for_each(|id| self.name(&id));
        } else {
            let mut candidates = std::mem::take(&mut self.candidates);
            self.candidates = blocking(move || {
                for id in names(&bytes) {
                    if let Some(candidate) = candidates.get_mut(&id) {
                        candidate.named = true;
                    }
                }
                candidates
            })
            .await?;
        }
        self.step().await
    }

    /// Removes what nothing has named.
    async fn remove(&mut self, position: u64, known: Option<(&Known, OrgId)>) -> Result<(), Refusal> {
        let Collection {
            reader, order, before_ms, ..
        } = self.collection;
        let unnamed = self.candidates.iter().filter(|(_, candidate)| !candidate.named);
        let unnamed: Vec<(ObjectId, u64)> = unnamed.map(|(id, candidate)| (*id, candidate.bytes)).collect();
        for (id, bytes) in unnamed {
            if !order.dry_run {
                // All puts go through the active scheduler, and the store lets none pass between its look at the time and the removal. Of a
                // scheduler that is no longer active only a removal that it was in the middle of can still happen.
                reader.engine.durable(position).await?;
                let still_here = known.is_none_or(|(known, id)| {
                    let lives_here = |core: &mut Core| {
                        let organization = core.state.organization(&id)?;
                        Some(organization.residence == Residence::Here && organization.generation == known.generation)
                    };
                    reader.engine.turn(lives_here).0 == Some(true)
                });
                if !still_here {
                    return Err(Refusal::Moving);
                }
            }
            if order.dry_run || reader.objects.remove(self.place, &id, *before_ms).await? {
                self.told.removed += 1;
                self.told.bytes += bytes;
            }
            self.step().await?;
        }
        Ok(())
    }

    async fn step(&mut self) -> Result<(), Refusal> {
        *self.done += 1;
        match self.done.is_multiple_of(TELL_EVERY) {
            true => self.collection.tell(self.told).await,
            false => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "collect_tests.rs"]
mod tests;
