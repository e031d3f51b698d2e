//! What reading the log brings about: the state, and in the index the rows that it lacks. At recovery, and in a standby that follows.

use std::sync::Arc;

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::{
    log::v1::{ArchivePart, BatchArchived, Event, StateSnapshot, event::Kind},
    v1::ObjectRef,
};
use evalgrid_store::{Index, IndexError, Replay, Row, Snapshot, log::BoxError};
use evalgrid_workflow::{Batch, BatchPhase, State};
use prost::Message as _;

use crate::{archive, engine::Core};

/// Partitions, and the directory's.
const PARTITIONS: usize = evalgrid_domain::ids::DIRECTORY_PARTITION as usize + 1;
/// Rows per batch while the index catches up.
const ROWS_AT_ONCE: usize = 256;

/// Reads a part of the archive. Blocking.
pub type FetchPart = Arc<dyn Fn(&ObjectRef) -> Result<ArchivePart, BoxError> + Send + Sync>;

/// See the module.
pub struct Replica {
    state: State,
    sequences: Vec<u64>,
    position: u64,
    /// Archived batches that are in no part of the archive yet.
    archived: Vec<BatchArchived>,
    /// The newest part.
    archive: Option<ObjectRef>,
    index: Arc<dyn Index>,
    /// What the index reflects.
    reflected: u64,
    rows: Vec<Row>,
    /// Rows that went into the index.
    applied: u64,
    /// Batches that may leave memory once the rows are in the index.
    done: Vec<BatchId>,
    fetch: FetchPart,
}

impl Replica {
    /// An empty one, for a log that is about to be read from its start.
    pub fn new(index: Arc<dyn Index>, fetch: FetchPart) -> Result<Replica, IndexError> {
        let reflected = index.position()?;
        Ok(Replica {
            state: State::default(),
            sequences: vec![0; PARTITIONS],
            position: 0,
            archived: Vec::new(),
            archive: None,
            index,
            reflected,
            rows: Vec::new(),
            applied: 0,
            done: Vec::new(),
            fetch,
        })
    }

    /// The position of the newest record.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// How many rows went into the index.
    pub fn rows(&self) -> u64 {
        self.applied
    }

    /// The state so far.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes the next item. After an error this replica must be thrown away.
    pub fn take(&mut self, item: Replay<'_>) -> Result<(), BoxError> {
        match item {
            Replay::Snapshot(snapshot) => self.restore(snapshot),
            Replay::Record(position, record) => {
                let event = Event::decode(record.payload)?;
                let Some(sequence) = self.sequences.get_mut(usize::from(record.partition)) else {
                    return Err(format!("it is of partition {}, of which there is none", record.partition).into());
                };
                self.state.apply(&event)?;
                *sequence = record.sequence;
                self.position = position;
                match event.kind {
                    Some(Kind::BatchArchived(archived) | Kind::BatchImported(archived)) => self.archived(archived),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Brings what was read into the index, and lets go of the batches that can be read there.
    pub fn flush(&mut self) -> Result<(), IndexError> {
        if !self.rows.is_empty() {
            self.applied += self.rows.len() as u64;
            self.index.apply(self.position, &std::mem::take(&mut self.rows))?;
            self.reflected = self.position;
        }
        self.done.drain(..).for_each(|id| self.state.forget(&id));
        Ok(())
    }

    /// Makes the index that of the log named `origin`: where it came from another one, its rows may tell what never happened, and are made
    /// anew from the archive.
    pub fn claim_index(&mut self, origin: &str) -> Result<(), BoxError> {
        self.flush()?;
        // One that reflects more than there is knows of what was lost, even where nobody was left to notice the loss.
        if self.index.origin()?.as_deref() == Some(origin) && self.index.position()? <= self.position {
            return Ok(());
        }
        self.index.reset(origin)?;
        self.reflected = 0;
        self.fill(self.position)
    }

    /// What an active scheduler goes on with. Nothing is left here.
    pub fn to_core(&mut self) -> Result<Core, IndexError> {
        self.flush()?;
        let ended = self.state.batches();
        let ended = ended.filter(|batch| batch.phase != BatchPhase::Running && !is_archived(batch));
        let ended = ended.map(|batch| batch.id).collect();
        let mut core = Core::new(std::mem::take(&mut self.state), std::mem::take(&mut self.sequences), self.position);
        core.ended = ended;
        core.archived = std::mem::take(&mut self.archived);
        core.archive = self.archive.take();
        Ok(core)
    }

    fn archived(&mut self, archived: BatchArchived) -> Result<(), BoxError> {
        if self.position > self.reflected {
            self.rows.extend(archive::row(&archived));
        }
        self.done.extend(<[u8; 16]>::try_from(archived.batch.as_ref()).map(BatchId));
        self.archived.push(archived);
        // As we go: the memory of a long log stays small.
        if self.rows.is_empty() || self.rows.len() >= ROWS_AT_ONCE {
            self.flush()?;
        }
        Ok(())
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), BoxError> {
        // From a slice, so that small values are copies and none keeps the whole snapshot in memory.
        let saved = StateSnapshot::decode(&snapshot.payload[..])?;
        self.state = State::restore(&saved)?;
        self.sequences.fill(0);
        let known = self.sequences.len().min(snapshot.sequences.len());
        self.sequences[..known].copy_from_slice(&snapshot.sequences[..known]);
        if snapshot.sequences[known..].iter().any(|sequence| *sequence > 0) {
            return Err("it is a snapshot of more partitions than there are".into());
        }
        self.position = snapshot.position;
        self.archived = saved.archived;
        self.archive = saved.archive;
        self.rows.clear();
        // Archived before the snapshot, and not yet forgotten then: to archive them again would be an event that fits no state.
        let archived = self.state.batches().filter(|batch| is_archived(batch));
        self.done = archived.map(|batch| batch.id).collect();
        if self.reflected < snapshot.position {
            self.fill(snapshot.position)?;
        }
        Ok(())
    }

    /// Rows that no record brings any more, from the archive.
    fn fill(&mut self, position: u64) -> Result<(), BoxError> {
        let mut rows: Vec<Row> = self.archived.iter().filter_map(archive::row).collect();
        let mut next = self.archive.clone();
        while let Some(reference) = next.take() {
            let part = (self.fetch)(&reference)?;
            if part.position > self.reflected {
                rows.extend(part.batches.iter().filter_map(archive::row));
                next = part.previous;
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        // Each batch of rows moves the index on by one position at least, and the last one to the snapshot's.
        let room = (position - self.reflected) as usize;
        let size = rows.len().div_ceil(room.min(rows.len().div_ceil(ROWS_AT_ONCE)));
        self.applied += rows.len() as u64;
        let batches = rows.chunks(size);
        let mut at = position - batches.len() as u64;
        for batch in batches {
            at += 1;
            self.index.apply(at, batch)?;
        }
        self.reflected = position;
        Ok(())
    }
}

fn is_archived(batch: &Batch) -> bool {
    matches!(batch.phase, BatchPhase::Ended { manifest: Some(_), .. })
}
