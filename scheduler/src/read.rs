//! The read side: batches in memory, and those that have left it.

use std::sync::Arc;

use evalgrid_domain::{
    ids::{BatchId, OrgId},
    limits::{DEFAULT_PAGE, MAX_PAGE},
};
use evalgrid_proto::{log::v1::BatchArchived, v1};
use evalgrid_store::{Index, IndexError, Objects};
use evalgrid_workflow::view;
use prost::Message as _;
use tonic::Status;

use crate::{archive::Unfiled, auth::stopping, chunks, engine::Engine};

/// The row of an archived batch: newest first under its organization.
pub fn row_key(organization: &OrgId, batch: &BatchId) -> Vec<u8> {
    let mut key = row_prefix(organization);
    key.extend(batch.0.map(|byte| !byte));
    key
}

/// The rows of an organization begin with this.
pub fn row_prefix(organization: &OrgId) -> Vec<u8> {
    let mut key = b"b/".to_vec();
    key.extend(organization.0);
    key
}

/// Where readers look.
#[derive(Clone)]
pub struct Reader {
    /// Live state.
    pub engine: Engine,
    /// Rows of archived batches.
    pub index: Arc<dyn Index>,
    /// Their results.
    pub objects: Arc<dyn Objects>,
    /// What is not in the index yet. Locked from the event of an archived batch to its row: rows enter the index in the order of the log.
    pub filing: Arc<tokio::sync::Mutex<Vec<Unfiled>>>,
}

impl Reader {
    /// A batch of an organization, or only one run of it.
    pub async fn batch(&self, organization: &OrgId, id: &BatchId, only: Option<u8>) -> Result<v1::Batch, Status> {
        let live = self.engine.settled_turn(|core| {
            let batch = core.state.batch(id).filter(|batch| batch.organization == *organization)?;
            Some(view::batch(batch, only))
        });
        if let Some(batch) = live.await.map_err(|_| stopping())? {
            return Ok(batch);
        }
        let not_found = || Status::not_found(format!("there is no batch with the id {id}"));
        let key = row_key(organization, id);
        let index = self.index.clone();
        let Some(row) = blocking(move || index.get(&key)).await? else {
            self.still_active().await?;
            return Err(not_found());
        };
        let manifest = BatchArchived::decode(row.as_slice())
            .ok()
            .and_then(|archived| archived.manifest)
            .ok_or_else(|| {
                tracing::error!(%id, "the index row of a batch cannot be read");
                Status::internal("the index row of this batch cannot be read; rebuild the index")
            })?;
        let fetched = chunks::fetch(self.objects.as_ref(), organization, &manifest).await;
        let bytes = fetched.map_err(|status| match status.code() {
            // The batch is there; what is gone is its result.
            tonic::Code::NotFound => {
                tracing::error!(%id, object = manifest.sha256, "the manifest of a batch is missing");
                Status::data_loss("the stored result of this batch is missing; the operator must restore it from a backup")
            }
            _ => status,
        })?;
        let mut batch = v1::Batch::decode(bytes).map_err(|error| {
            tracing::error!(%id, %error, "the manifest of a batch cannot be read");
            Status::internal("the manifest of this batch cannot be read")
        })?;
        if let Some(run) = only {
            batch
                .runs
                .retain(|candidate| candidate.id == evalgrid_domain::ids::RunId { batch: *id, run }.to_string());
        }
        Ok(batch)
    }

    /// What the index lacks is not there only as long as this is the active scheduler: one that has been deposed since memory was asked may have
    /// begun to follow another, and to make its index anew.
    async fn still_active(&self) -> Result<(), Status> {
        self.engine.durable(0).await.map_err(|_| stopping())
    }

    /// A page of an organization's batches, newest first.
    pub async fn list(&self, organization: &OrgId, request: &v1::ListBatchesRequest) -> Result<v1::BatchPage, Status> {
        let limit = match request.limit {
            0 => DEFAULT_PAGE,
            asked => asked.clamp(1, MAX_PAGE as i64) as usize,
        };
        let after: Option<BatchId> = match &request.cursor {
            Some(cursor) => Some(
                cursor
                    .id
                    .parse()
                    .map_err(|_| Status::invalid_argument("cursor.id: not the id of a batch"))?,
            ),
            None => None,
        };
        let older = move |id: &BatchId| after.is_none_or(|after| *id < after);
        let live = self.engine.settled_turn(|core| {
            let organization = core.state.organization(organization)?;
            let ids = organization.in_memory.iter().rev().filter(|id| older(id)).take(limit + 1);
            let summaries = ids
                .filter_map(|id| core.state.batch(id))
                .map(|batch| (batch.id, view::summary(batch)));
            Some((summaries.collect::<Vec<_>>(), organization.started))
        });
        let (mut batches, total) = live.await.map_err(|_| stopping())?.unwrap_or_default();
        // Memory was asked first: a batch that moves to the index meanwhile is then seen in both places, never in none.
        let prefix = row_prefix(organization);
        let after_key = after.map(|after| row_key(organization, &after));
        let index = self.index.clone();
        let rows = blocking(move || index.scan(&prefix, after_key.as_deref(), limit + 1)).await?;
        self.still_active().await?;
        for (_, row) in rows {
            let summary = BatchArchived::decode(row.as_slice()).ok().and_then(|archived| archived.summary);
            if let Some((id, summary)) = summary.and_then(|summary| Some((summary.id.parse().ok()?, summary))) {
                batches.push((id, summary));
            }
        }
        batches.sort_by_key(|(id, _): &(BatchId, _)| std::cmp::Reverse(*id));
        batches.dedup_by_key(|(id, _)| *id);
        let more = batches.len() > limit;
        batches.truncate(limit);
        let next = batches.last().filter(|_| more).map(|(id, summary)| v1::PageCursor {
            id: id.to_string(),
            started_at_ms: summary.started_at_ms,
        });
        Ok(v1::BatchPage {
            batches: batches.into_iter().map(|(_, summary)| summary).collect(),
            next,
            total,
        })
    }
}

/// The index blocks; its work goes to the threads for that.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, IndexError> + Send + 'static) -> Result<T, Status> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            tracing::error!("index: {error}");
            Err(Status::unavailable("the index failed; the scheduler's log says why"))
        }
        Err(_) => Err(stopping()),
    }
}
