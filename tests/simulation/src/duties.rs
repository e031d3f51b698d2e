//! What a scheduler does on its own beside its turns: results of ended batches become objects, and the state becomes snapshots. The same order
//! of writes as in the product, with room for a crash between any two of them.

use std::{
    collections::VecDeque,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use bytes::Bytes;
use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1::{ArchivePart, BatchArchived, StateSnapshot, event::Kind},
    v1::ObjectRef,
};
use evalgrid_scheduler::heart::{row_key, save};
use evalgrid_store::{Index as _, Snapshot};
use evalgrid_workflow::{decide, view};
use prost::Message as _;
use rand::Rng as _;

use crate::{
    check::broken,
    defect::Defect,
    disk,
    node::{NodeEvent, Waiter},
    sim::{MS, SECOND, Sim},
    trouble::Trouble,
};

/// Between two tries when an object is not stored.
const RETRY: u64 = 2 * SECOND;

/// Where these works are.
#[derive(Default)]
pub struct Duties {
    ended: VecDeque<BatchId>,
    archiving: bool,
    snapshot: bool,
}

impl Duties {
    /// Whether nothing is to be done.
    pub fn idle(&self) -> bool {
        self.ended.is_empty() && !self.archiving && !self.snapshot
    }
}

/// What is next in one of these works.
pub enum Duty {
    /// The result of a batch is stored.
    ArchivePut(BatchId, OrgId, Bytes),
    /// An event names it.
    ArchiveName(BatchId, ObjectRef),
    /// A row lists it, and it leaves memory.
    ArchiveRow(Box<BatchArchived>, BatchId, OrgId, u64),
    /// What the snapshot will no longer hold is stored.
    SnapshotPart(Box<ArchivePart>),
    /// The state is written down.
    SnapshotState(usize, Option<ObjectRef>),
    /// It is durable; the index is synced.
    SnapshotSync(Box<StateSnapshot>, Vec<u64>, u64),
    /// The snapshot is saved, and the log may be cut.
    SnapshotSave(Box<Snapshot>),
}

impl Sim {
    fn put(&mut self, bytes: Bytes) -> ObjectRef {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let reference = ObjectRef {
            sha256: format!("{:016x}", hasher.finish()),
            size: bytes.len() as u64,
        };
        disk::put(&self.disk.objects, reference.sha256.clone(), bytes);
        reference
    }

    /// Looks what is to be done.
    pub fn begin_duties(&mut self, node: usize) {
        let due = self.disk.bytes_since_snapshot >= self.setup.snapshot_bytes;
        let Some(active) = self.nodes[node].active() else { return };
        active.duties.ended.extend(std::mem::take(&mut active.core.ended));
        let snapshot = due && !active.duties.snapshot;
        active.duties.snapshot |= snapshot;
        if snapshot
            && let Some((part, position)) = self.turn(node, |core| ArchivePart {
                previous: core.archive.clone(),
                batches: core.archived.clone(),
                position: core.position(),
            })
        {
            self.wait(node, position, Waiter::Duty(Duty::SnapshotPart(Box::new(part))));
        }
        self.archive_next(node);
    }

    fn archive_next(&mut self, node: usize) {
        let Some(active) = self.nodes[node].active() else { return };
        if active.duties.archiving {
            return;
        }
        let Some(id) = active.duties.ended.pop_front() else { return };
        active.duties.archiving = true;
        let seen = self.turn(node, |core| {
            core.state.batch(&id).map(|batch| (batch.organization, view::batch(batch, None)))
        });
        match seen {
            Some((Some((organization, batch)), position)) => {
                let put = Duty::ArchivePut(id, organization, batch.encode_to_vec().into());
                self.wait(node, position, Waiter::Duty(put));
            }
            _ => self.archived(node),
        }
    }

    fn archived(&mut self, node: usize) {
        if let Some(active) = self.nodes[node].active() {
            active.duties.archiving = false;
            self.archive_next(node);
        }
    }

    /// One of these works goes on.
    pub fn do_duty(&mut self, node: usize, duty: Duty) {
        match duty {
            Duty::ArchivePut(id, organization, bytes) => {
                if self.strike(Trouble::ObjectsFailed, 0.1) {
                    return self.at_node(node, RETRY, NodeEvent::Duty(Duty::ArchivePut(id, organization, bytes)));
                }
                let manifest = self.put(bytes);
                if self.strike(Trouble::KilledWhileArchiving, 0.02) {
                    return self.kill(node);
                }
                let wait = self.rng.random_range(MS..200 * MS);
                self.at_node(node, wait, NodeEvent::Duty(Duty::ArchiveName(id, manifest)));
            }
            Duty::ArchiveName(id, manifest) => self.archive_name(node, id, manifest),
            Duty::ArchiveRow(archived, id, organization, position) => {
                let row = (row_key(&organization, &id), Some(archived.encode_to_vec()));
                if let Err(error) = self.nodes[node].index.apply(position, &[row]) {
                    return self
                        .check(broken("an ended batch can be read", error.to_string()))
                        .unwrap_or_default();
                }
                self.turn(node, |core| core.state.forget(&id));
                self.archived(node);
            }
            Duty::SnapshotPart(part) => self.snapshot_part(node, *part),
            Duty::SnapshotState(taken, archive) => self.snapshot_state(node, taken, archive),
            Duty::SnapshotSync(saved, sequences, position) => {
                // It cannot fail; in the product a failure means no snapshot.
                let _ = self.nodes[node].index.sync();
                let snapshot = Snapshot {
                    position,
                    sequences,
                    payload: saved.encode_to_vec().into(),
                };
                let wait = self.rng.random_range(MS..SECOND);
                self.at_node(node, wait, NodeEvent::Duty(Duty::SnapshotSave(Box::new(snapshot))));
            }
            Duty::SnapshotSave(snapshot) => self.snapshot_save(node, *snapshot),
        }
    }

    fn archive_name(&mut self, node: usize, id: BatchId, manifest: ObjectRef) {
        let named = self.turn(node, |core| {
            let batch = core.state.batch(&id)?;
            let organization = batch.organization;
            let event = decide::archived(batch, manifest, view::summary(batch), core.now_ms());
            let Some(Kind::BatchArchived(archived)) = &event.kind else {
                return None;
            };
            let archived = archived.clone();
            core.commit(event);
            Some((archived, organization))
        });
        match named {
            Some((Some((archived, organization)), position)) => {
                let row = Duty::ArchiveRow(Box::new(archived), id, organization, position);
                self.wait(node, position, Waiter::Duty(row));
            }
            _ => self.archived(node),
        }
    }

    fn snapshot_part(&mut self, node: usize, part: ArchivePart) {
        let taken = part.batches.len();
        if self.strike(Trouble::ObjectsFailed, 0.1) {
            return self.no_snapshot(node);
        }
        let archive = match taken {
            0 => part.previous,
            _ => Some(self.put(part.encode_to_vec().into())),
        };
        let wait = self.rng.random_range(MS..200 * MS);
        self.at_node(node, wait, NodeEvent::Duty(Duty::SnapshotState(taken, archive)));
    }

    fn snapshot_state(&mut self, node: usize, taken: usize, archive: Option<ObjectRef>) {
        let saved = self.turn(node, |core| {
            core.archived.drain(..taken);
            core.archive = archive;
            save(core)
        });
        let Some(((saved, sequences, position), _)) = saved else { return };
        let sync = Duty::SnapshotSync(Box::new(saved), sequences, position);
        if self.defect == Some(Defect::CutFirst)
            && let Some(active) = self.nodes[node].active()
        {
            active.cut = position;
        }
        match self.defect {
            Some(Defect::SnapshotAhead) => self.do_duty(node, sync),
            _ => self.wait(node, position, Waiter::Duty(sync)),
        }
    }

    fn snapshot_save(&mut self, node: usize, snapshot: Snapshot) {
        if self.strike(Trouble::KilledBeforeSave, 0.05) {
            return self.kill(node);
        }
        let position = snapshot.position;
        let Some(active) = self.nodes[node].active() else { return };
        let saved = self.disk.save(&active.handle, snapshot);
        if saved {
            self.tell(|| format!("scheduler {node} has saved a snapshot at {position}"));
            if self.strike(Trouble::KilledBeforeCut, 0.05) {
                return self.kill(node);
            }
            if let Some(active) = self.nodes[node].active() {
                active.cut = position;
            }
        }
        self.no_snapshot(node);
    }

    fn no_snapshot(&mut self, node: usize) {
        if let Some(active) = self.nodes[node].active() {
            active.duties.snapshot = false;
        }
    }

    /// The row of an ended batch that has left memory.
    pub fn row(&self, node: usize, organization: &OrgId, id: &BatchId) -> Option<BatchArchived> {
        let index = Arc::clone(&self.nodes[node].index);
        let row = index.get(&row_key(organization, id)).ok()??;
        BatchArchived::decode(row.as_slice()).ok()
    }
}
