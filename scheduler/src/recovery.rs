//! From the log back to the state, and from the log to the index.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use evalgrid_domain::request::{Sandbox, Support};
use evalgrid_proto::log::v1::{Event, event::Kind};
use evalgrid_store::{FileLog, Index, IndexError, Log, LogError, LogOptions, ObjectError, Opened, Recovery, Replay, SledIndex, index::Row};
use evalgrid_workflow::{BatchPhase, State};
use prost::Message as _;

use crate::{archive, engine::Core, folder::FolderError};

/// Partitions, and the directory's.
const PARTITIONS: usize = evalgrid_domain::ids::DIRECTORY_PARTITION as usize + 1;
/// Rows per batch while the index catches up.
const ROWS_AT_ONCE: usize = 256;

/// Why a scheduler does not start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder or a secret in it.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The index.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The objects.
    #[error(transparent)]
    Objects(#[from] ObjectError),
    /// An index of another log could not be made anew.
    #[error("the index belongs to another log and could not be made anew: {0}")]
    Rebuild(#[from] RebuildError),
    /// The map of sandbox names.
    #[error("the sandbox map: {0:?} is no sandbox; known are {1}")]
    Sandbox(String, String),
    /// The first key.
    #[error("the first API key could not be created: {0}")]
    FirstKey(String),
    /// The committer's thread.
    #[error("the committer's thread could not be started: {0}")]
    Thread(std::io::Error),
    /// The process ends meanwhile.
    #[error("the process is stopping")]
    Stopped,
}

/// What was found in the data folder.
#[derive(Debug)]
pub struct RecoverySummary {
    /// Of the log.
    pub log: Recovery,
    /// How long it took.
    pub took: Duration,
    /// Batches that go on.
    pub running_batches: usize,
    /// Leases that wait for their workers.
    pub leases: usize,
    /// Where a broken index was moved, if it had to be made anew.
    pub index_replaced: Option<PathBuf>,
}

impl fmt::Display for RecoverySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} records read in {} ms, {} batches go on, {} trials wait for their workers",
            self.log.records,
            self.took.as_millis(),
            self.running_batches,
            self.leases
        )?;
        if self.log.torn_bytes > 0 {
            write!(
                f,
                "; a torn last group of {} bytes, never acknowledged, was cut off",
                self.log.torn_bytes
            )?;
        }
        if let Some(moved) = &self.index_replaced {
            write!(f, "; the index was broken, is rebuilt, and the old one lies in {}", moved.display())?;
        }
        Ok(())
    }
}

/// What a scheduler stands on.
pub struct Recovered {
    pub core: Core,
    pub log: Box<dyn Log>,
    pub index: Arc<dyn Index>,
    pub summary: RecoverySummary,
}

/// Replays the log into a state, and what the index lacks into the index.
///
/// An index that reflects more than there is in the log belongs to another log (an older one was put in its place): it is made anew.
pub fn recover(data: &Path) -> Result<Recovered, OpenError> {
    let recovered = replay(data)?;
    if recovered.index.position()? <= recovered.summary.log.position {
        return Ok(recovered);
    }
    tracing::warn!("the index reflects more than the log holds, as after an older log was restored; it is made anew");
    drop(recovered);
    rebuild_index(data)?;
    replay(data)
}

fn replay(data: &Path) -> Result<Recovered, OpenError> {
    let world = crate::clock::Machine::shared();
    let began = world.steady_ms();
    let (index, opened) = SledIndex::open(&data.join("index"))?;
    let reflected = index.position()?;
    let mut state = State::default();
    let mut sequences = vec![0u64; PARTITIONS];
    let mut rows: Vec<Row> = Vec::new();
    let mut archived = Vec::new();
    let mut position = 0;
    let (log, recovery) = FileLog::open(&data.join("log"), LogOptions::default(), |replay| {
        let Replay::Record(at, record) = replay else {
            return Err("this version makes no use of snapshots".into());
        };
        let event = Event::decode(record.payload)?;
        let Some(sequence) = sequences.get_mut(usize::from(record.partition)) else {
            return Err(format!("record {at} is of partition {}, of which there is none", record.partition).into());
        };
        *sequence = record.sequence;
        state.apply(&event)?;
        position = at;
        if let Some(Kind::BatchArchived(done)) = &event.kind {
            if at > reflected {
                rows.extend(archive::row(done));
                if rows.len() >= ROWS_AT_ONCE {
                    index.apply(at, &std::mem::take(&mut rows))?;
                }
            }
            archived.extend(<[u8; 16]>::try_from(done.batch.as_ref()).map(evalgrid_domain::ids::BatchId));
            // Forgetting as we go keeps the memory of a long log small.
            if rows.is_empty() {
                archived.drain(..).for_each(|id| state.forget(&id));
            }
        }
        Ok(())
    })?;
    if !rows.is_empty() {
        index.apply(position, &rows)?;
    }
    archived.iter().for_each(|id| state.forget(id));
    let index_replaced = match opened {
        Opened::Replaced { moved_to, .. } => Some(moved_to),
        Opened::Existing | Opened::Fresh => None,
    };
    let running = state.batches().filter(|batch| batch.phase == BatchPhase::Running).count();
    let ended = state
        .batches()
        .filter(|batch| batch.phase != BatchPhase::Running)
        .map(|batch| batch.id)
        .collect();
    let summary = RecoverySummary {
        log: recovery,
        took: Duration::from_millis(world.steady_ms() - began),
        running_batches: running,
        leases: state.leases().count(),
        index_replaced,
    };
    let mut core = Core::new(state, sequences, position);
    core.ended = ended;
    Ok(Recovered {
        core,
        log: Box::new(log),
        index: Arc::new(index),
        summary,
    })
}

/// Why the index was not rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The log, which is in use while a scheduler runs.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The index.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The old index could not be taken away.
    #[error("the old index could not be moved aside: {0}")]
    Move(#[from] std::io::Error),
}

/// Makes the index anew from the log; answers with the number of rows. Refuses a folder in use. The old index is kept beside it.
pub fn rebuild_index(data: &Path) -> Result<u64, RebuildError> {
    let mut rows: Vec<(u64, Row)> = Vec::new();
    // Reading with the log's lock held proves that no scheduler runs.
    let recovery = evalgrid_store::log::offline::dump(&data.join("log"), |at, record| {
        if let Some(Kind::BatchArchived(done)) = Event::decode(record.payload)?.kind {
            rows.extend(archive::row(&done).map(|row| (at, row)));
        }
        Ok(())
    })?;
    let old = data.join("index");
    if old.exists() {
        std::fs::rename(&old, free_name(data))?;
    }
    let (index, _) = SledIndex::open(&old)?;
    for chunk in rows.chunks(ROWS_AT_ONCE) {
        let batch: Vec<Row> = chunk.iter().map(|(_, row)| row.clone()).collect();
        let position = chunk.last().map_or(recovery.position, |(at, _)| *at);
        index.apply(position, &batch)?;
    }
    index.sync()?;
    Ok(rows.len() as u64)
}

fn free_name(data: &Path) -> PathBuf {
    (1u32..)
        .map(|number| data.join(format!("index.old-{number}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| data.join("index.old"))
}

/// What may be asked for, from the operator's names.
pub fn support(map: &BTreeMap<String, String>) -> Result<Support, OpenError> {
    let parse = |name: &String| {
        let known = || Sandbox::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Sandbox::from_name(name).ok_or_else(|| OpenError::Sandbox(name.clone(), known()))
    };
    let pairs: Result<Vec<(Sandbox, Sandbox)>, OpenError> =
        map.iter().map(|(name, provider)| Ok((parse(name)?, parse(provider)?))).collect();
    Ok(crate::clients::support(pairs?))
}
