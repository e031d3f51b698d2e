//! An ended batch becomes one object that holds its whole result; then an event names it, a row lists it, and it leaves memory.

use std::time::Duration;

use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1::{BatchArchived, event::Kind},
    v1,
};
use evalgrid_workflow::{BatchPhase, decide, view};
use prost::Message as _;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    auth::stopping,
    read::{Reader, row_key},
};

/// Between two tries when the object store or the index fails.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// One try to store a result. A store that says nothing must not keep the other batches waiting for longer.
const PUT_DEADLINE: Duration = Duration::from_secs(30);

/// An archived batch on its way into the index.
pub struct Unfiled {
    batch: BatchId,
    row: evalgrid_store::Row,
}

impl Unfiled {
    /// What `archived` adds to the index.
    pub fn of(archived: &BatchArchived) -> Option<Unfiled> {
        let batch = BatchId(archived.batch.as_ref().try_into().ok()?);
        Some(Unfiled {
            batch,
            row: row(archived)?,
        })
    }
}

/// Runs until shutdown, and then once more over what has ended by then. What is missed is seen again at the next start. A batch that cannot be
/// archived is tried again and again, and keeps none of the others.
pub async fn archive_loop(reader: Reader, mut shutdown: watch::Receiver<bool>) {
    let mut durable = reader.engine.watch();
    // Bounded as the batches in memory are: they stay there until they are archived.
    let mut failed: Vec<BatchId> = Vec::new();
    let mut retry_at = Instant::now();
    loop {
        let stops = *shutdown.borrow();
        let (mut due, _) = reader.engine.turn(|core| std::mem::take(&mut core.ended));
        if stops || retry_at <= Instant::now() {
            due.append(&mut failed);
        }
        for id in due {
            if let Err(error) = archive(&reader, id).await {
                tracing::warn!(batch = %id, "the batch could not be archived yet: {error}");
                failed.push(id);
                retry_at = Instant::now() + RETRY_DELAY;
            }
        }
        if stops {
            return;
        }
        tokio::select! {
            changed = durable.changed() => if changed.is_err() { return },
            () = sleep_until(retry_at), if !failed.is_empty() => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    }
}

async fn archive(reader: &Reader, id: BatchId) -> Result<(), tonic::Status> {
    let view = reader
        .engine
        .settled_turn(|core| core.state.batch(&id).map(|batch| (batch.organization, view::batch(batch, None))));
    let Some((organization, batch)) = view.await.map_err(|_| stopping())? else {
        return Ok(());
    };
    let put = timeout(PUT_DEADLINE, put(reader, &organization, batch.encode_to_vec())).await;
    let manifest = put.map_err(|_| tonic::Status::deadline_exceeded("the object store took too long"))??;
    let mut unfiled = reader.filing.lock().await;
    let (archived, position) = reader.engine.turn(|core| {
        let batch = core.state.batch(&id)?;
        // The event of an earlier try, whose row is not in the index yet.
        if matches!(batch.phase, BatchPhase::Ended { manifest: Some(_), .. }) {
            return None;
        }
        let event = decide::archived(batch, manifest, view::summary(batch), core.now_ms());
        let archived = match &event.kind {
            Some(Kind::BatchArchived(archived)) => archived.clone(),
            _ => return None,
        };
        core.commit(event);
        Some(archived)
    });
    unfiled.extend(archived.as_ref().and_then(Unfiled::of));
    reader.engine.durable(position).await.map_err(|_| stopping())?;
    file(reader, &mut unfiled, position).await
}

/// Brings everything into the index that is not there yet: it follows the log, so no row may pass one that failed.
pub async fn file(reader: &Reader, unfiled: &mut Vec<Unfiled>, position: u64) -> Result<(), tonic::Status> {
    let rows: Vec<_> = unfiled.iter().map(|batch| batch.row.clone()).collect();
    if !rows.is_empty() {
        let index = reader.index.clone();
        crate::read::blocking(move || index.apply(position, &rows)).await?;
    }
    reader
        .engine
        .turn(|core| unfiled.drain(..).for_each(|filed| core.state.forget(&filed.batch)));
    Ok(())
}

async fn put(reader: &Reader, organization: &OrgId, bytes: Vec<u8>) -> Result<v1::ObjectRef, tonic::Status> {
    let size = bytes.len() as u64;
    let put = reader.objects.put(&organization.to_string(), bytes.into()).await;
    let id = put.map_err(|error| crate::chunks::failed(&error))?;
    Ok(v1::ObjectRef {
        sha256: id.to_string(),
        size,
    })
}

/// The row of an archived batch.
pub fn row(archived: &BatchArchived) -> Option<evalgrid_store::Row> {
    let organization: OrgId = archived.organization_id.parse().ok()?;
    let batch = BatchId(archived.batch.as_ref().try_into().ok()?);
    Some((row_key(&organization, &batch), Some(archived.encode_to_vec())))
}
