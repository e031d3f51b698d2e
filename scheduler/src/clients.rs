//! The services for clients: batches and who am I.

use std::{pin::Pin, time::Duration};

use evalgrid_domain::{
    ids::{BatchId, OrgId, RunId},
    models,
    request::Harness,
};
use evalgrid_proto::v1::{self, auth_server::Auth, batches_server::Batches};
use evalgrid_workflow::{decide, view};
use futures::Stream;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use crate::{
    auth::{self, Caller, stopping},
    chunks,
    read::Reader,
    refusals::refused,
    starts::{Admission, Body},
    waits,
};

/// A watcher hears of changes this often at the most.
const WATCH_PAUSE: Duration = Duration::from_millis(50);
/// A watcher looks by itself this often: what wakes it is only a hint.
const WATCH_SWEEP: Duration = Duration::from_secs(1);

/// The services.
#[derive(Clone)]
pub struct ClientsService {
    reader: Reader,
    admission: Admission,
    shutdown: watch::Receiver<bool>,
}

impl ClientsService {
    /// `admission` says what may be started.
    pub fn new(admission: Admission, shutdown: watch::Receiver<bool>) -> ClientsService {
        ClientsService {
            reader: admission.reader.clone(),
            admission,
            shutdown,
        }
    }

    async fn caller<T>(&self, request: &Request<T>, permission: &str) -> Result<Caller, Status> {
        let caller = auth::caller(&self.reader.engine, request.metadata()).await?;
        caller.require(permission)?;
        Ok(caller)
    }
}

/// A batch's id, or the answer where it is none.
pub(crate) fn parse_batch(id: &str) -> Result<BatchId, Status> {
    id.parse()
        .map_err(|_| Status::not_found(format!("there is no batch with the id {}", echo(id))))
}

/// A stranger's text, short enough to say back.
fn echo(text: &str) -> String {
    text.chars().take(100).collect()
}

type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::BatchProgress, Status>> + Send>>;

#[tonic::async_trait]
impl Batches for ClientsService {
    type WatchStream = WatchStream;
    type GetObjectStream = chunks::ChunkStream;

    async fn start(&self, request: Request<v1::StartBatchRequest>) -> Result<Response<v1::StartedBatch>, Status> {
        let caller = self.caller(&request, "evals:write").await?;
        let started = self.admission.start(&caller, request.into_inner(), Body::Batch).await?;
        Ok(Response::new(started))
    }

    async fn retry(&self, request: Request<v1::RetryBatchRequest>) -> Result<Response<v1::StartedBatch>, Status> {
        let caller = self.caller(&request, "evals:write").await?;
        let v1::RetryBatchRequest { id, idempotency_key } = request.into_inner();
        Ok(Response::new(self.admission.retry(&caller, &id, idempotency_key).await?))
    }

    async fn regrade(&self, request: Request<v1::RegradeBatchRequest>) -> Result<Response<v1::StartedBatch>, Status> {
        let caller = self.caller(&request, "evals:write").await?;
        Ok(Response::new(self.admission.regrade(&caller, request.into_inner()).await?))
    }

    async fn get(&self, request: Request<v1::GetBatchRequest>) -> Result<Response<v1::Batch>, Status> {
        let caller = self.caller(&request, "evals:read").await?;
        let id = parse_batch(&request.into_inner().id)?;
        Ok(Response::new(self.reader.batch(&caller.organization, &id, None).await?))
    }

    async fn get_run(&self, request: Request<v1::GetRunRequest>) -> Result<Response<v1::RunInBatch>, Status> {
        let caller = self.caller(&request, "evals:read").await?;
        let id = request.into_inner().id;
        let not_found = || Status::not_found(format!("there is no run with the id {}", echo(&id)));
        let run: RunId = id.parse().map_err(|_| not_found())?;
        let found = self.reader.batch(&caller.organization, &run.batch, Some(run.run)).await;
        let batch = found.map_err(|status| if status.code() == Code::NotFound { not_found() } else { status })?;
        if batch.runs.is_empty() {
            return Err(not_found());
        }
        Ok(Response::new(v1::RunInBatch { batch: Some(batch) }))
    }

    async fn list(&self, request: Request<v1::ListBatchesRequest>) -> Result<Response<v1::BatchPage>, Status> {
        let caller = self.caller(&request, "evals:read").await?;
        Ok(Response::new(self.reader.list(&caller.organization, &request.into_inner()).await?))
    }

    async fn list_models(&self, request: Request<v1::ListModelsRequest>) -> Result<Response<v1::ModelCatalogue>, Status> {
        self.caller(&request, "evals:read").await?;
        let v1::ListModelsRequest { harness, query } = request.into_inner();
        let harness = Harness::from_name(&harness)
            .ok_or_else(|| Status::invalid_argument(format!("there is no harness of the name {}", echo(&harness))))?;
        let models = models::catalogue(harness, &query).into_iter().map(|model| v1::CatalogueModel {
            id: model.id,
            display_name: model.display_name,
            vendor: model.vendor.to_owned(),
        });
        Ok(Response::new(v1::ModelCatalogue { models: models.collect() }))
    }

    async fn cancel(&self, request: Request<v1::CancelBatchRequest>) -> Result<Response<v1::Batch>, Status> {
        let caller = self.caller(&request, "evals:write").await?;
        let id = parse_batch(&request.into_inner().id)?;
        let cancelled = self.reader.engine.settled_turn(|core| {
            let events = decide::cancel(&core.state, &caller.organization, &id, core.now_ms())?;
            core.commit_all(events);
            Ok(())
        });
        match cancelled.await.map_err(|_| stopping())? {
            Ok(()) => {}
            // It may have left memory.
            Err(decide::Refusal::NoBatch) => {
                let batch = self.reader.batch(&caller.organization, &id, None).await?;
                if batch.failure.as_deref() != Some(evalgrid_domain::outcome::CANCELLED) {
                    return Err(refused(&decide::Refusal::Ended));
                }
                return Ok(Response::new(batch));
            }
            Err(error) => return Err(refused(&error)),
        }
        Ok(Response::new(self.reader.batch(&caller.organization, &id, None).await?))
    }

    async fn watch(&self, request: Request<v1::WatchBatchRequest>) -> Result<Response<WatchStream>, Status> {
        let caller = self.caller(&request, "evals:read").await?;
        let id = parse_batch(&request.into_inner().id)?;
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let first = watched(&self.reader, &caller.organization, &id, &mut Vec::new()).await?;
        let service = self.clone();
        tokio::spawn(async move {
            let mut shutdown = service.shutdown.clone();
            let mut durable = service.reader.engine.watch();
            let mut seen = Vec::new();
            let mut missing = Vec::new();
            let mut next = Ok(first);
            loop {
                let ended = match &next {
                    Ok(progress) => progress.status() != v1::BatchStatus::Running,
                    Err(_) => true,
                };
                let has_news = |progress: &v1::BatchProgress| !progress.trials.is_empty() || progress.missing != missing;
                let news = next.as_ref().map_or(true, has_news) || ended;
                if let Ok(progress) = &next {
                    missing.clone_from(&progress.missing);
                }
                if seen.is_empty()
                    && let Ok(progress) = &next
                {
                    seen = progress.trials.clone();
                }
                if news && sender.send(next).await.is_err() || ended {
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(WATCH_PAUSE) => {}
                    _ = shutdown.wait_for(|stop| *stop) => return,
                }
                tokio::select! {
                    _ = durable.changed() => {}
                    () = tokio::time::sleep(WATCH_SWEEP) => {}
                    () = sender.closed() => return,
                    _ = shutdown.wait_for(|stop| *stop) => return,
                }
                next = watched(&service.reader, &caller.organization, &id, &mut seen).await;
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn get_object(&self, request: Request<v1::ObjectRef>) -> Result<Response<chunks::ChunkStream>, Status> {
        let caller = self.caller(&request, "evals:read").await?;
        let read = chunks::read(self.reader.objects.as_ref(), &caller.organization, request.get_ref());
        Ok(Response::new(read.await?))
    }
}

/// Where the batch stands; of its trials, those that differ from `seen`.
async fn watched(
    reader: &Reader,
    organization: &OrgId,
    id: &BatchId,
    seen: &mut Vec<v1::TrialProgress>,
) -> Result<v1::BatchProgress, Status> {
    let live = reader.engine.settled_turn(|core| {
        let batch = core.state.batch(id).filter(|batch| batch.organization == *organization)?;
        let trials: Vec<_> = batch.trials().map(|(key, trial)| view::progress(batch, key, trial)).collect();
        Some((view::ending(batch).0, trials, batch.unsettled, waits::missing(core, batch)))
    });
    let (status, trials, unsettled, missing) = match live.await.map_err(|_| stopping())? {
        Some(live) => live,
        None => {
            let batch = reader.batch(organization, id, None).await?;
            let trials = batch.runs.iter().flat_map(|run| {
                run.trials.iter().map(|trial| v1::TrialProgress {
                    case_index: run.case_index,
                    variant_index: run.variant_index,
                    ordinal: trial.ordinal,
                    status: trial.status,
                    failure: trial.outcome.as_ref().and_then(|outcome| outcome.failure.clone()),
                    step: String::new(),
                })
            });
            (batch.status(), trials.collect(), 0, Vec::new())
        }
    };
    let total = trials.len() as u32;
    let changed = match seen.len() == trials.len() {
        true => trials
            .iter()
            .zip(seen.iter())
            .filter(|(now, before)| now != before)
            .map(|(now, _)| now.clone())
            .collect(),
        false => trials.clone(),
    };
    *seen = trials;
    Ok(v1::BatchProgress {
        status: status.into(),
        trials: changed,
        settled: total - unsettled,
        total,
        missing,
    })
}

#[tonic::async_trait]
impl Auth for ClientsService {
    async fn whoami(&self, request: Request<v1::WhoamiRequest>) -> Result<Response<v1::Identity>, Status> {
        let engine = &self.reader.engine;
        let caller = auth::caller(engine, request.metadata()).await?;
        let found = engine.settled_turn(|core| {
            core.state
                .organization(&caller.organization)
                .map(|organization| (organization.name.clone(), organization.slug.clone()))
        });
        let (name, slug) = found
            .await
            .map_err(|_| stopping())?
            .ok_or_else(|| Status::not_found("the organization of this key is gone"))?;
        Ok(Response::new(v1::Identity {
            organization_id: caller.organization.to_string(),
            organization_name: name,
            organization_slug: slug,
            key_name: (!caller.key_name.is_empty()).then_some(caller.key_name),
            key_start: caller.key_start,
            permissions: caller.permissions,
        }))
    }
}
