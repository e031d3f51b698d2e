//! From the log back to the state, and from the log to the index.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use evalgrid_domain::request::{Harness, Sandbox, Support};
use evalgrid_store::{
    FileLog, Index as _, IndexError, LogError, LogOptions, ObjectError, Objects, Opened, Recovery, SledIndex, StoredObjects,
};
use evalgrid_store::{
    log::{FORMAT_LEVEL, MAX_GROUP_BYTES},
    redis::RedisError,
};
use evalgrid_workflow::BatchPhase;

use crate::{
    MAX_LEASE, MIN_LEASE,
    engine::Core,
    folder::FolderError,
    replica::{FetchPart, Replica},
    snapshot,
};

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
    /// There was a log, and there is none.
    #[error(
        "{} is empty, but the index beside it knows of {records} records: a file system that is not mounted? Put the log back; to begin anew, use another folder",
        log.display()
    )]
    LogGone {
        /// The log's folder.
        log: PathBuf,
        /// The position that the index reflects.
        records: u64,
    },
    /// The cell's Redis.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// The archive, or the index that is made from it.
    #[error("the index could not be made from the archive: {0}")]
    Archive(evalgrid_store::log::BoxError),
    /// Something that all schedulers of a cell must share was not named.
    #[error("{0}")]
    NotShared(&'static str),
    /// The lease.
    #[error("a lease of {0:?} cannot be kept by heartbeats: use one from {MIN_LEASE:?} to {MAX_LEASE:?}")]
    Lease(Duration),
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
        for skipped in &self.log.skipped_snapshots {
            write!(f, "; a damaged snapshot was passed over: {skipped}")?;
        }
        for passed in &self.log.passed_damage {
            write!(f, "; damage that a snapshot makes good was passed over: {passed}")?;
        }
        if (1..FORMAT_LEVEL).contains(&self.log.level) {
            write!(
                f,
                "; the log is of format level {} and is not cut until `evalgrid upgrade finalize`",
                self.log.level
            )?;
        }
        if let Some(moved) = &self.index_replaced {
            write!(f, "; the index was broken, is rebuilt, and the old one lies in {}", moved.display())?;
        }
        Ok(())
    }
}

/// What was recovered from a folder.
pub struct Recovered {
    pub core: Core,
    pub log: FileLog,
    pub index: Arc<SledIndex>,
    pub summary: RecoverySummary,
}

/// Replays the log into a state, and what the index lacks into the index.
///
/// An index that reflects more than there is in the log belongs to another log (an older one was put in its place): it is made anew.
pub fn recover(data: &Path, snapshot_bytes: u64, fetch: &FetchPart) -> Result<Recovered, OpenError> {
    let recovered = replay(data, snapshot_bytes, fetch)?;
    if recovered.index.position()? <= recovered.summary.log.position {
        return Ok(recovered);
    }
    if recovered.summary.log.position == 0 {
        return Err(OpenError::LogGone {
            log: data.join("log"),
            records: recovered.index.position()?,
        });
    }
    tracing::warn!("the index reflects more than the log holds, as after an older log was restored; it is made anew");
    drop(recovered);
    move_index_aside(data).map_err(RebuildError::Move)?;
    replay(data, snapshot_bytes, fetch)
}

fn replay(data: &Path, snapshot_bytes: u64, fetch: &FetchPart) -> Result<Recovered, OpenError> {
    let world = crate::clock::Machine::shared();
    let began = world.steady_ms();
    let (index, opened) = SledIndex::open(&data.join("index"))?;
    let index = Arc::new(index);
    let mut replica = Replica::new(index.clone(), fetch.clone())?;
    let (log, recovery) = FileLog::open(&data.join("log"), log_options(snapshot_bytes), |item| replica.take(item))?;
    let index_replaced = match opened {
        Opened::Replaced { moved_to, .. } => Some(moved_to),
        Opened::Existing | Opened::Fresh => None,
    };
    let core = replica.to_core()?;
    let running = core.state.batches().filter(|batch| batch.phase == BatchPhase::Running).count();
    let summary = RecoverySummary {
        log: recovery,
        took: Duration::from_millis(world.steady_ms() - began),
        running_batches: running,
        leases: core.state.leases().count(),
        index_replaced,
    };
    Ok(Recovered { core, log, index, summary })
}

/// A segment can only go as a whole: where snapshots are more frequent, segments are smaller, down to what a few of the largest groups need.
fn log_options(snapshot_bytes: u64) -> LogOptions {
    let mut options = LogOptions::default();
    options.segment_bytes = snapshot_bytes.clamp(2 * MAX_GROUP_BYTES as u64, options.segment_bytes);
    options
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
    /// The objects, where the archive lies.
    #[error(transparent)]
    Objects(#[from] ObjectError),
    /// The threads that read objects.
    #[error("the threads that read objects could not be started: {0}")]
    Runtime(std::io::Error),
    /// The old index could not be taken away.
    #[error("the old index could not be moved aside: {0}")]
    Move(#[from] std::io::Error),
}

/// Makes the index anew from snapshot, archive and log; answers with the number of its rows. Refuses a folder in use. The old index is kept
/// beside it. Blocking, and not for a thread of a runtime.
pub fn rebuild_index(data: &Path) -> Result<u64, RebuildError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(RebuildError::Runtime)?;
    let objects: Arc<dyn Objects> = Arc::new(StoredObjects::in_folder(&data.join("objects"))?);
    let fetch = snapshot::fetch_parts(objects, runtime.handle().clone());
    let new = data.join("index.new");
    if new.exists() {
        std::fs::remove_dir_all(&new)?;
    }
    let rows = {
        let (index, _) = SledIndex::open(&new)?;
        let index = Arc::new(index);
        let mut replica = Replica::new(index.clone(), fetch)?;
        // Reading with the log's lock held proves that no scheduler runs.
        evalgrid_store::log::offline::replay(&data.join("log"), |item| replica.take(item))?;
        replica.flush()?;
        index.sync()?;
        replica.rows()
    };
    move_index_aside(data)?;
    std::fs::rename(&new, data.join("index"))?;
    Ok(rows)
}

fn move_index_aside(data: &Path) -> std::io::Result<()> {
    let old = data.join("index");
    match old.exists() {
        true => std::fs::rename(&old, free_name(data)),
        false => Ok(()),
    }
}

fn free_name(data: &Path) -> PathBuf {
    (1u32..)
        .map(|number| data.join(format!("index.old-{number}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| data.join("index.old"))
}

/// What may be asked for, from the operator's names.
pub fn support(map: &BTreeMap<String, String>, harnesses: &BTreeMap<Harness, String>) -> Result<Support, OpenError> {
    let parse = |name: &String| {
        let known = || Sandbox::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Sandbox::from_name(name).ok_or_else(|| OpenError::Sandbox(name.clone(), known()))
    };
    let pairs: Result<Vec<(Sandbox, Sandbox)>, OpenError> =
        map.iter().map(|(name, provider)| Ok((parse(name)?, parse(provider)?))).collect();
    Ok(crate::starts::support(pairs?, harnesses.clone()))
}
