//! Snapshots: once enough log has gathered, the state is written down, so that a start reads little and the log can be cut.
//!
//! What a cut takes away of batches that have ended is first put into the archive: a chain of objects from which an index can be made anew.

use std::{sync::Arc, time::Duration};

use evalgrid_proto::{
    log::v1::{ArchivePart, StateSnapshot},
    v1::ObjectRef,
};
use evalgrid_store::{IndexError, LogError, ObjectError, ObjectId, Objects, Snapshot, log::BoxError};
use prost::Message as _;
use tokio::{runtime::Handle, sync::watch};

use crate::{
    engine::{Core, Stopping},
    read::Reader,
    replica::FetchPart,
};

/// Between two looks at the length of the log, and between two tries.
const LOOK: Duration = Duration::from_millis(250);
/// Where the archive lies among the objects: a name that no organization's id can be.
pub const ARCHIVE: &str = "archive";
/// Reading one part while recovering.
const FETCH_DEADLINE: Duration = Duration::from_secs(60);

/// Why a snapshot was not made. The log grows until the next try.
#[derive(Debug, thiserror::Error)]
enum SnapshotError {
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error(transparent)]
    Objects(#[from] ObjectError),
    #[error(transparent)]
    Stopping(#[from] Stopping),
}

/// Runs until shutdown: a snapshot whenever `every_bytes` of log have gathered since the last.
pub async fn snapshot_loop(reader: Reader, every_bytes: u64, mut shutdown: watch::Receiver<bool>) {
    let mut last = 0;
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        if reader.engine.log_bytes() < every_bytes {
            continue;
        }
        let (position, _) = reader.engine.turn(|core| core.position());
        if position == last {
            continue;
        }
        match take(&reader).await {
            Ok(position) => last = position,
            Err(SnapshotError::Stopping(_)) => return,
            Err(error) => tracing::warn!("no snapshot yet, so the log grows: {error}"),
        }
    }
}

/// Data first, then the pointer: the archive, the index, the snapshot that names both, and only then the cut.
async fn take(reader: &Reader) -> Result<u64, SnapshotError> {
    let engine = &reader.engine;
    let (previous, batches, position) = engine
        .settled_turn(|core| (core.archive.clone(), core.archived.clone(), core.position()))
        .await?;
    let taken = batches.len();
    let archive = match taken {
        0 => previous,
        _ => {
            let part = ArchivePart {
                previous,
                batches,
                position,
            };
            Some(put(reader.objects.as_ref(), &part).await?)
        }
    };
    let saved = engine.settled_turn(|core| {
        core.archived.drain(..taken);
        core.archive = archive;
        save(core)
    });
    let (saved, sequences, position) = saved.await?;
    let (index, snapshots) = (reader.index.clone(), engine.snapshots());
    let bytes = tokio::task::spawn_blocking(move || {
        index.sync()?;
        let payload = saved.encode_to_vec();
        let bytes = payload.len();
        snapshots.save(&Snapshot {
            position,
            sequences,
            payload: payload.into(),
        })?;
        Ok::<_, SnapshotError>(bytes)
    });
    let bytes = bytes.await.map_err(|_| Stopping)??;
    tracing::info!(position, bytes, "a snapshot was taken");
    engine.cut(position);
    Ok(position)
}

/// The state, and what only the scheduler knows.
pub fn save(core: &Core) -> (StateSnapshot, Vec<u64>, u64) {
    let saved = StateSnapshot {
        archive: core.archive.clone(),
        archived: core.archived.clone(),
        ..core.state.save()
    };
    (saved, core.sequences().to_vec(), core.position())
}

async fn put(objects: &dyn Objects, part: &ArchivePart) -> Result<ObjectRef, ObjectError> {
    let bytes = part.encode_to_vec();
    let size = bytes.len() as u64;
    let id = objects.put(ARCHIVE, bytes.into()).await?;
    Ok(ObjectRef {
        sha256: id.to_string(),
        size,
    })
}

/// Reads parts of the archive from a thread that may block, of a runtime that runs.
pub fn fetch_parts(objects: Arc<dyn Objects>, runtime: Handle) -> FetchPart {
    Arc::new(move |reference| {
        let id: ObjectId = reference.sha256.parse()?;
        let get = objects.get(ARCHIVE, &id, evalgrid_store::objects::MAX_OBJECT_BYTES);
        let bytes = runtime.block_on(async { tokio::time::timeout(FETCH_DEADLINE, get).await })??;
        let missing = || {
            BoxError::from(format!(
                "the archive's part {id} is missing among the objects; restore it from a backup"
            ))
        };
        Ok(ArchivePart::decode(&bytes.ok_or_else(missing)?[..])?)
    })
}
