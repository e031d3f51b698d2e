//! The services for clients: batches and who am I.

use std::{pin::Pin, sync::Arc, time::Duration};

use evalgrid_domain::{
    decode::{DecodeError, Issue, IssueTag, parse_json},
    identity,
    ids::{BatchId, OrgId, RunId, variant_id},
    limits,
    request::{Feature, SuiteBatchRequest, Support, check_start, decode_start},
};
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, auth_server::Auth, batches_server::Batches, refusal::Kind},
};
use evalgrid_workflow::{
    decide::{self, Start},
    view,
};
use futures::Stream;
use prost::Message as _;
use tokio::sync::{Semaphore, watch};
use tonic::{Code, Request, Response, Status};

use crate::{
    auth::{self, Caller, stopping},
    chunks,
    dispatch::{Variables, dispatch},
    engine::Core,
    read::Reader,
};

/// Starts decoded at once: each may hold 64 MiB of body and several times that while it is decoded.
const MAX_STARTS_AT_ONCE: usize = 4;
/// A watcher hears of changes this often at the most.
const WATCH_PAUSE: Duration = Duration::from_millis(50);
/// A watcher looks by itself this often: what wakes it is only a hint.
const WATCH_SWEEP: Duration = Duration::from_secs(1);

/// The services.
#[derive(Clone)]
pub struct ClientsService {
    reader: Reader,
    support: Arc<Support>,
    variables: Arc<Variables>,
    starts: Arc<Semaphore>,
    shutdown: watch::Receiver<bool>,
}

impl ClientsService {
    /// `support` says what may be asked for, `variables` what profiles may name.
    pub fn new(reader: Reader, support: Support, variables: Arc<Variables>, shutdown: watch::Receiver<bool>) -> ClientsService {
        let starts = Arc::new(Semaphore::new(MAX_STARTS_AT_ONCE));
        ClientsService {
            reader,
            support: Arc::new(support),
            variables,
            starts,
            shutdown,
        }
    }

    async fn caller<T>(&self, request: &Request<T>, permission: &str) -> Result<Caller, Status> {
        let caller = auth::caller(&self.reader.engine, request.metadata()).await?;
        caller.require(permission)?;
        Ok(caller)
    }
}

fn refusal(code: Code, kind: Kind, message: impl Into<String>, issues: &[Issue]) -> Status {
    let message = message.into();
    let issues_json = match issues {
        [] => String::new(),
        issues => serde_json::to_string(issues).unwrap_or_default(),
    };
    let details = v1::Refusal {
        kind: kind.into(),
        message: message.clone(),
        issues_json,
    };
    Status::with_details(code, message, details.encode_to_vec().into())
}

fn undecodable(error: &DecodeError) -> Status {
    refusal(
        Code::InvalidArgument,
        Kind::Decode,
        error.to_string(),
        &[Issue {
            tag: IssueTag::Unexpected,
            path: Vec::new(),
            message: error.to_string(),
        }],
    )
}

fn refused(error: &decide::Refusal) -> Status {
    match error {
        decide::Refusal::KeyReused => refusal(Code::InvalidArgument, Kind::BadRequest, error.to_string(), &[]),
        decide::Refusal::NoBatch => Status::not_found(error.to_string()),
        _ => refusal(Code::FailedPrecondition, Kind::Conflict, error.to_string(), &[]),
    }
}

/// What this version of the server can run, on the providers that the operator has named.
pub fn support(sandboxes: impl IntoIterator<Item = (evalgrid_domain::request::Sandbox, evalgrid_domain::request::Sandbox)>) -> Support {
    Support {
        harnesses: [evalgrid_domain::request::Harness::Command].into(),
        sandboxes: sandboxes.into_iter().collect(),
        features: [Feature::ScriptedUser, Feature::ProfileVariables].into(),
    }
}

/// A decoded and checked start.
struct Admissible {
    request: SuiteBatchRequest,
    stored: Vec<u8>,
    hash: String,
}

/// Decoding is work for a thread that may block: a body can be 64 MiB.
fn decode(json: &[u8]) -> Result<Admissible, Status> {
    if json.len() > limits::MAX_START_BODY_BYTES {
        let text = format!("The body has {} bytes; the limit is {}", json.len(), limits::MAX_START_BODY_BYTES);
        return Err(refusal(Code::ResourceExhausted, Kind::TooLarge, text, &[]));
    }
    let value = parse_json(json, limits::MAX_JSON_DEPTH).map_err(|error| undecodable(&error))?;
    let request = decode_start(&value).map_err(|issues| {
        let message = issues.first().map_or_else(String::new, |issue| issue.to_string());
        refusal(Code::InvalidArgument, Kind::Decode, message, &issues)
    })?;
    drop(value);
    let hash = identity::start_hash(&request);
    let stored = serde_json::to_vec(&request).map_err(|error| {
        tracing::error!("a decoded request cannot be written as JSON: {error}");
        Status::internal("the request could not be stored")
    })?;
    Ok(Admissible { request, stored, hash })
}

fn started_event(
    request: &SuiteBatchRequest,
    support: &Support,
    organization: &OrgId,
    id: BatchId,
    object: v1::ObjectRef,
    hash: &str,
    idempotency_key: Option<String>,
) -> log::BatchStarted {
    let cases = request.cases.iter().enumerate().map(|(index, case)| v1::CaseInfo {
        id: case.id.clone(),
        name: case.name.clone(),
        definition_hash: identity::definition_hash(request, index),
        timeout_ms: case.time_limit_ms().into(),
    });
    let variants = request.variants.iter().map(|variant| v1::VariantInfo {
        harness: variant.harness.name().to_owned(),
        model: variant.model.clone(),
        sandbox: variant.sandbox.name().to_owned(),
        provider: support.provider(variant.sandbox).unwrap_or(variant.sandbox).name().to_owned(),
        profile: variant.profile_name().map(str::to_owned),
        profile_version: variant.profile.as_ref().map(identity::profile_version),
        // The command harness is the profile's own program: it has no version of ours (decision 6).
        harness_version: "unknown".to_owned(),
        variables: variant
            .profile
            .as_ref()
            .and_then(|profile| profile.variables.clone())
            .unwrap_or_default(),
    });
    let variant_ids = request.cases.iter().flat_map(|case| {
        request.variants.iter().map(|variant| {
            let (harness, sandbox) = (variant.harness.name(), variant.sandbox.name());
            // Only scripts play people yet, and a script is nobody.
            variant_id(
                organization,
                &case.id,
                harness,
                &variant.model,
                sandbox,
                variant.profile_name(),
                None,
            )
        })
    });
    log::BatchStarted {
        batch: id.0.to_vec().into(),
        organization_id: organization.to_string(),
        request: Some(object),
        request_hash: hash.to_owned(),
        idempotency_key,
        suite: Some(v1::Suite {
            id: request.suite.id.clone(),
            name: request.suite.name.clone(),
        }),
        cases: cases.collect(),
        variants: variants.collect(),
        trials: request.trials,
        trigger: Some(v1::Trigger {
            source: "api".to_owned(),
            url: None,
        }),
        variant_ids: variant_ids.collect(),
    }
}

impl ClientsService {
    /// The documented text of a start whose profiles name variables that are not there.
    fn check_variables(&self, request: &SuiteBatchRequest) -> Result<(), Status> {
        let named = request
            .variants
            .iter()
            .filter_map(|variant| variant.profile.as_ref()?.variables.as_ref())
            .flatten();
        let mut missing: Vec<&str> = named
            .map(String::as_str)
            .filter(|name| !self.variables.contains_key(*name))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        missing.dedup();
        let text = format!(
            "A profile names variables that are not set. Set {} in Settings > Environment (on this server: in the scheduler's own environment).",
            missing.join(", ")
        );
        Err(refusal(Code::InvalidArgument, Kind::BadRequest, text, &[]))
    }

    async fn start_batch(&self, caller: &Caller, request: v1::StartBatchRequest) -> Result<v1::StartedBatch, Status> {
        let key = request.idempotency_key;
        if let Some(key) = &key
            && (key.is_empty() || key.len() > limits::MAX_IDEMPOTENCY_KEY)
        {
            let text = format!("idempotency-key: 1 to {} characters", limits::MAX_IDEMPOTENCY_KEY);
            return Err(refusal(Code::InvalidArgument, Kind::BadRequest, text, &[]));
        }
        let permit = self.starts.clone().acquire_owned().await.map_err(|_| stopping())?;
        let json = request.json;
        let decoded = tokio::task::spawn_blocking(move || (decode(&json), permit))
            .await
            .map_err(|_| stopping())?;
        let (Admissible { request, stored, hash }, _permit) = (decoded.0?, decoded.1);

        let organization = caller.organization;
        let engine = &self.reader.engine;
        let known = engine.settled_turn(|core| decide::replay(&core.state, &organization, key.as_deref(), &hash, core.now_ms()));
        if let Some(id) = known.await.map_err(|_| stopping())?.map_err(|error| refused(&error))? {
            return self.started(&organization, &id).await;
        }
        check_start(&request, &self.support).map_err(|error| refusal(Code::InvalidArgument, Kind::BadRequest, error.message, &[]))?;
        self.check_variables(&request)?;
        // Asked before anything is written, and again by `decide::start`, which alone counts.
        let busy = engine.settled_turn(|core| decide::busy(&core.state, &organization, key.is_some()));
        if let Some(busy) = busy.await.map_err(|_| stopping())? {
            return Err(refused(&busy));
        }
        // Data first, then the pointer.
        let size = stored.len() as u64;
        let put = self.reader.objects.put(&organization.to_string(), stored.into()).await;
        let object = v1::ObjectRef {
            sha256: put.map_err(|error| chunks::failed(&error))?.to_string(),
            size,
        };

        let mut random = [0; 10];
        engine.world().random(&mut random);
        let admitted = engine.settled_turn(|core: &mut Core| {
            let now_ms = core.now_ms();
            let id = BatchId::new(now_ms, random);
            let started = started_event(&request, &self.support, &organization, id, object, &hash, key);
            match decide::start(&core.state, started, &organization, now_ms)? {
                Start::Replay(id) => Ok(id),
                Start::Admit(events) => {
                    core.commit_all(events);
                    dispatch(core, &self.variables);
                    Ok(id)
                }
            }
        });
        let id = admitted
            .await
            .map_err(|_| stopping())?
            .map_err(|error: decide::Refusal| refused(&error))?;
        tracing::info!(batch = %id, organization = %organization, cases = request.cases.len(), variants = request.variants.len(), trials = request.trials, "a batch has started");
        self.started(&organization, &id).await
    }

    async fn started(&self, organization: &OrgId, id: &BatchId) -> Result<v1::StartedBatch, Status> {
        Ok(view::started(&self.reader.batch(organization, id, None).await?))
    }
}

fn parse_batch(id: &str) -> Result<BatchId, Status> {
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
        Ok(Response::new(self.start_batch(&caller, request.into_inner()).await?))
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
            let mut next = Ok(first);
            loop {
                let ended = match &next {
                    Ok(progress) => progress.status() != v1::BatchStatus::Running,
                    Err(_) => true,
                };
                let news = next.as_ref().map_or(true, |progress| !progress.trials.is_empty()) || ended;
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
        Some((view::ending(batch).0, trials, batch.unsettled))
    });
    let (status, trials, unsettled) = match live.await.map_err(|_| stopping())? {
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
            (batch.status(), trials.collect(), 0)
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
