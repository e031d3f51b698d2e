//! An ended batch becomes one object that holds its whole result; then an event names it, a row lists it, and it leaves memory.

use std::time::Duration;

use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1::{BatchArchived, event::Kind},
    v1,
};
use evalgrid_workflow::{decide, view};
use prost::Message as _;
use tokio::sync::watch;

use crate::{read::Reader, read::row_key};

/// Between two tries when the object store or the index fails.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// Runs until shutdown, and then once more over what has ended by then. What is missed is seen again at the next start.
pub async fn archive_loop(reader: Reader, mut shutdown: watch::Receiver<bool>) {
    let mut durable = reader.engine.watch();
    loop {
        let stopping = *shutdown.borrow();
        let (ended, _) = reader.engine.turn(|core| std::mem::take(&mut core.ended));
        for id in ended {
            while let Err(error) = archive(&reader, id).await {
                tracing::warn!(batch = %id, "the batch could not be archived yet: {error}");
                tokio::select! {
                    () = tokio::time::sleep(RETRY_DELAY) => {}
                    _ = shutdown.wait_for(|stop| *stop) => return,
                }
            }
        }
        if stopping {
            return;
        }
        tokio::select! {
            changed = durable.changed() => if changed.is_err() { return },
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    }
}

async fn archive(reader: &Reader, id: BatchId) -> Result<(), tonic::Status> {
    let stopping = |_| crate::auth::stopping();
    let view = reader
        .engine
        .settled_turn(|core| core.state.batch(&id).map(|batch| (batch.organization, view::batch(batch, None))));
    let Some((organization, batch)) = view.await.map_err(stopping)? else {
        return Ok(());
    };
    let manifest = put(reader, &organization, batch.encode_to_vec()).await?;
    let filing = reader.filing.lock().await;
    let (archived, position) = reader.engine.turn(|core| {
        let event = core
            .state
            .batch(&id)
            .map(|batch| decide::archived(batch, manifest, view::summary(batch), core.now_ms()))?;
        let archived = match &event.kind {
            Some(Kind::BatchArchived(archived)) => archived.clone(),
            _ => return None,
        };
        core.commit(event);
        Some(archived)
    });
    reader.engine.durable(position).await.map_err(stopping)?;
    let Some(archived) = archived else { return Ok(()) };
    let index = reader.index.clone();
    crate::read::blocking(move || match row(&archived) {
        Some(row) => index.apply(position, &[row]),
        None => Ok(()),
    })
    .await?;
    drop(filing);
    reader.engine.turn(|core| core.state.forget(&id));
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
