//! Admission of batches: hosted ones, local ones and retries, all by the same rules in the same order (contract 2.1).
//!
//! A known idempotency key is answered before every other rule. What is refused changes nothing; what is admitted is one event, and its request
//! is a durable object before that.

use std::sync::Arc;

use bytes::Bytes;
use evalgrid_domain::{
    credential,
    decode::parse_json,
    identity,
    ids::{BatchId, OrgId, variant_id},
    limits,
    request::{
        DEFAULT_USER_MODEL, Feature, Harness, JudgeBy, RunnerStart, Sandbox, SuiteBatchRequest, Support, Trigger, TriggerSource, User,
        Validator, check_local_start, check_start, decode_runner_start, decode_start,
    },
};
use evalgrid_proto::{log::v1 as log, v1};
use evalgrid_workflow::{
    Batch,
    decide::{self, Start},
    retry, view,
};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::{
    auth::{Caller, stopping},
    chunks,
    dispatch::{Variables, dispatch},
    engine::Core,
    read::Reader,
    refusals::{bad_request, misshapen, refused, too_large, undecodable},
};

/// Starts decoded at once: each may hold 64 MiB of body and several times that while it is decoded.
const MAX_STARTS_AT_ONCE: usize = 4;

/// What this version of the server can run: the agents that there are, on the providers that the operator has named.
pub fn support(sandboxes: impl IntoIterator<Item = (Sandbox, Sandbox)>, harnesses: impl IntoIterator<Item = (Harness, String)>) -> Support {
    Support {
        harnesses: harnesses.into_iter().collect(),
        sandboxes: sandboxes.into_iter().collect(),
        features: [
            Feature::ScriptedUser,
            Feature::ProfileVariables,
            Feature::CodeValidator,
            Feature::Prepare,
            Feature::Cache,
            Feature::ApiMock,
        ]
        .into(),
    }
}

/// Whoever admits batches.
#[derive(Clone)]
pub struct Admission {
    pub reader: Reader,
    support: Arc<Support>,
    pub variables: Arc<Variables>,
    starts: Arc<Semaphore>,
}

/// The body of which operation a start is.
#[derive(Clone, Copy, PartialEq)]
pub enum Body {
    /// `evals.batches.start`.
    Batch,
    /// `runner.start`.
    Runner,
}

/// A decoded start, not yet checked.
struct Wanted {
    request: SuiteBatchRequest,
    stored: Bytes,
    hash: String,
    local: bool,
    trigger: Trigger,
    retry: Option<(BatchId, Vec<log::CarriedTrial>)>,
}

/// Decoding is work for a thread that may block: a body can be 64 MiB.
fn decode(json: &[u8], body: Body) -> Result<Wanted, Status> {
    if json.len() > limits::MAX_START_BODY_BYTES {
        return Err(too_large(json.len(), limits::MAX_START_BODY_BYTES));
    }
    let value = parse_json(json, limits::MAX_JSON_DEPTH).map_err(|error| undecodable(&error))?;
    let (request, hash, local, trigger) = match body {
        Body::Batch => {
            let request = decode_start(&value).map_err(|issues| misshapen(&issues))?;
            let hash = identity::start_hash(&request);
            (request, hash, false, None)
        }
        Body::Runner => {
            let start = decode_runner_start(&value).map_err(|issues| misshapen(&issues))?;
            let hash = identity::start_hash(&start);
            let RunnerStart { request, local, trigger } = start;
            (request, hash, local, trigger)
        }
    };
    drop(value);
    let stored = serde_json::to_vec(&request).map_err(|error| {
        tracing::error!("a decoded request cannot be written as JSON: {error}");
        Status::internal("the request could not be stored")
    })?;
    Ok(Wanted {
        request,
        stored: stored.into(),
        hash,
        local,
        trigger: trigger.unwrap_or_else(by_api),
        retry: None,
    })
}

/// Who starts a batch that does not say.
fn by_api() -> Trigger {
    Trigger {
        source: TriggerSource::Api,
        url: None,
    }
}

fn check_key(key: Option<&str>) -> Result<(), Status> {
    match key {
        Some(key) if key.is_empty() || key.len() > limits::MAX_IDEMPOTENCY_KEY => Err(bad_request(format!(
            "idempotency-key: 1 to {} characters",
            limits::MAX_IDEMPOTENCY_KEY
        ))),
        _ => Ok(()),
    }
}

impl Admission {
    /// `support` says what may be asked for, `variables` what profiles may name and harnesses sign in with.
    pub fn new(reader: Reader, support: Support, variables: Arc<Variables>) -> Admission {
        Admission {
            reader,
            support: Arc::new(support),
            variables,
            starts: Arc::new(Semaphore::new(MAX_STARTS_AT_ONCE)),
        }
    }

    /// Starts a batch.
    pub async fn start(&self, caller: &Caller, start: v1::StartBatchRequest, body: Body) -> Result<v1::StartedBatch, Status> {
        let key = start.idempotency_key;
        check_key(key.as_deref())?;
        let json = start.json;
        let (wanted, permit) = self.blocking(move || decode(&json, body)).await?;
        let organization = caller.organization;
        if let Some(known) = self.replay(&organization, key.as_deref(), &wanted.hash).await? {
            return Ok(known);
        }
        let started = self.admit(&organization, wanted, key).await;
        drop(permit);
        started
    }

    /// Starts a batch that runs the unscored trials of an ended one again.
    pub async fn retry(&self, caller: &Caller, id: &str, key: Option<String>) -> Result<v1::StartedBatch, Status> {
        check_key(key.as_deref())?;
        let organization = caller.organization;
        let hash = identity::start_hash(&json!({ "retryOf": id }));
        if let Some(known) = self.replay(&organization, key.as_deref(), &hash).await? {
            return Ok(known);
        }
        let batch_id: BatchId = id.parse().map_err(|_| refused(&decide::Refusal::NoBatch))?;
        let batch = self.reader.batch(&organization, &batch_id, None).await?;
        let carried = retry::carried(&batch).map_err(|error| refused(&error))?;
        let reference = batch
            .request
            .ok_or_else(|| Status::data_loss("the batch does not name its start request"))?;
        let stored = chunks::fetch(self.reader.objects.as_ref(), &organization, &reference).await;
        let stored = stored.map_err(|status| match status.code() {
            tonic::Code::NotFound => Status::data_loss("the start request of this batch is missing; start a new batch instead"),
            _ => status,
        })?;
        let decode_stored = move || {
            // As decoded before; rules may have become stricter since, so it is checked like any other.
            let request = serde_json::from_slice(&stored).map_err(|error| {
                tracing::error!(%batch_id, "a stored start request cannot be read: {error}");
                Status::data_loss("the start request of this batch cannot be read; start a new batch instead")
            })?;
            Ok(Wanted {
                request,
                stored,
                hash,
                local: false,
                trigger: by_api(),
                retry: Some((batch_id, carried)),
            })
        };
        let (wanted, permit) = self.blocking(decode_stored).await?;
        let started = self.admit(&organization, wanted, key).await;
        drop(permit);
        started
    }

    async fn blocking(
        &self,
        work: impl FnOnce() -> Result<Wanted, Status> + Send + 'static,
    ) -> Result<(Wanted, OwnedSemaphorePermit), Status> {
        let permit = self.starts.clone().acquire_owned().await.map_err(|_| stopping())?;
        let (wanted, permit) = tokio::task::spawn_blocking(move || (work(), permit))
            .await
            .map_err(|_| stopping())?;
        Ok((wanted?, permit))
    }

    /// The batch that the key has started already.
    async fn replay(&self, organization: &OrgId, key: Option<&str>, hash: &str) -> Result<Option<v1::StartedBatch>, Status> {
        let engine = &self.reader.engine;
        let known = engine.settled_turn(|core| decide::replay(&core.state, organization, key, hash, core.now_ms()));
        match known.await.map_err(|_| stopping())?.map_err(|error| refused(&error))? {
            Some(id) => self.started(organization, &id).await.map(Some),
            None => Ok(None),
        }
    }

    async fn started(&self, organization: &OrgId, id: &BatchId) -> Result<v1::StartedBatch, Status> {
        Ok(view::started(&self.reader.batch(organization, id, None).await?))
    }

    /// The rules behind the replay, in the contract's order; then the event.
    async fn admit(&self, organization: &OrgId, wanted: Wanted, key: Option<String>) -> Result<v1::StartedBatch, Status> {
        let request = &wanted.request;
        match wanted.local {
            true => check_local_start(request),
            false => check_start(request, &self.support),
        }
        .map_err(|error| bad_request(error.message))?;
        self.check_people(request)?;
        if !wanted.local {
            self.check_variables(request)?;
        }
        self.check_user_model(request)?;
        let engine = &self.reader.engine;
        // Asked before anything is written, and again by `decide::start`, which alone counts.
        let busy = engine.settled_turn(|core| {
            let quiet = |batch: &Batch| core.check_ins.is_quiet(batch, core.steady_ms());
            decide::busy(&core.state, organization, key.is_some(), &quiet, core.now_ms())
        });
        if let Some(busy) = busy.await.map_err(|_| stopping())? {
            return Err(refused(&busy));
        }
        let harnesses = request.variants.iter().map(|variant| variant.harness);
        self.check_credentials(harnesses)?;

        // Data first, then the pointer.
        let size = wanted.stored.len() as u64;
        let put = self.reader.objects.put(&organization.to_string(), wanted.stored.clone()).await;
        let object = v1::ObjectRef {
            sha256: put.map_err(|error| chunks::failed(&error))?.to_string(),
            size,
        };
        let mut random = [0; 10];
        engine.world().random(&mut random);
        let admitted = engine.settled_turn(|core: &mut Core| {
            let (now_ms, steady_ms) = (core.now_ms(), core.steady_ms());
            let id = BatchId::new(now_ms, random);
            let started = started_event(&wanted, &self.support, organization, id, object, key);
            let quiet = |batch: &Batch| core.check_ins.is_quiet(batch, steady_ms);
            match decide::start(&core.state, started, organization, &quiet, now_ms)? {
                Start::Replay(id) => Ok(id),
                Start::Admit(events) => {
                    core.commit_all(events);
                    match wanted.local {
                        // The start is the first sign of its machine.
                        true => core.check_ins.hear(id, steady_ms),
                        false => dispatch(core, &self.variables),
                    }
                    Ok(id)
                }
            }
        });
        let id = admitted
            .await
            .map_err(|_| stopping())?
            .map_err(|error: decide::Refusal| refused(&error))?;
        let (cases, variants, trials) = (request.cases.len(), request.variants.len(), request.trials);
        tracing::info!(batch = %id, organization = %organization, local = wanted.local, cases, variants, trials, "a batch has started");
        self.started(organization, &id).await
    }

    /// A harness that plays a person needs its credential.
    fn check_people(&self, request: &SuiteBatchRequest) -> Result<(), Status> {
        let players = request.cases.iter().filter_map(|case| match &case.user {
            Some(User::Simulated { by: Some(player), .. }) => Some(player.harness),
            _ => None,
        });
        self.check_credentials(players)
    }

    fn check_credentials(&self, harnesses: impl Iterator<Item = Harness>) -> Result<(), Status> {
        for harness in harnesses {
            if let Err(variable) = credential::method(harness).values(&self.variables) {
                return Err(bad_request(credential::missing(harness, variable)));
            }
        }
        Ok(())
    }

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
        Err(bad_request(format!(
            "A profile names variables that are not set. Set {} in Settings > Environment (on this server: in the scheduler's own environment).",
            missing.join(", ")
        )))
    }

    /// A person who is played by the server's model needs that model's key.
    fn check_user_model(&self, request: &SuiteBatchRequest) -> Result<(), Status> {
        if plays_people(request) && !self.variables.contains_key(MODEL_KEY) {
            return Err(bad_request(format!(
                "Set {MODEL_KEY} in Settings > Environment to play a simulated person (on this server: in the scheduler's own environment)"
            )));
        }
        Ok(())
    }
}

/// The key of the models that play people and judge.
const MODEL_KEY: &str = "OPENAI_API_KEY";

fn plays_people(request: &SuiteBatchRequest) -> bool {
    let mut people = request.cases.iter().filter_map(|case| case.user.as_ref());
    people.any(|user| matches!(user, User::Simulated { by: None, .. }))
}

/// Harnesses whose credentials a local batch may lease. A model that judges or plays a person answers to the same key as `codex`.
fn leasable(request: &SuiteBatchRequest) -> Vec<String> {
    let mut harnesses = request.harnesses();
    let judged_by_model = request.cases.iter().any(|case| match &case.validator {
        Some(Validator::Judged(validator)) => validator.judges.iter().any(|judge| matches!(judge.by, JudgeBy::Provider { .. })),
        _ => false,
    });
    if judged_by_model || plays_people(request) {
        harnesses.insert(Harness::Codex);
    }
    harnesses.into_iter().map(|harness| harness.name().to_owned()).collect()
}

fn started_event(
    wanted: &Wanted,
    support: &Support,
    organization: &OrgId,
    id: BatchId,
    object: v1::ObjectRef,
    idempotency_key: Option<String>,
) -> log::BatchStarted {
    let request = &wanted.request;
    let cases = request.cases.iter().enumerate().map(|(index, case)| v1::CaseInfo {
        id: case.id.clone(),
        name: case.name.clone(),
        definition_hash: identity::definition_hash(request, index),
        timeout_ms: case.time_limit_ms().into(),
        ..v1::CaseInfo::default()
    });
    let provider = |sandbox: Sandbox| match wanted.local {
        true => Sandbox::Local,
        false => support.provider(sandbox).unwrap_or(sandbox),
    };
    let variants = request.variants.iter().map(|variant| v1::VariantInfo {
        harness: variant.harness.name().to_owned(),
        model: variant.model.clone(),
        sandbox: variant.sandbox.name().to_owned(),
        provider: provider(variant.sandbox).name().to_owned(),
        profile: variant.profile_name().map(str::to_owned),
        profile_version: variant.profile.as_ref().map(identity::profile_version),
        // What runs on a client's machine is not ours to know (decision 6).
        harness_version: support
            .harnesses
            .get(&variant.harness)
            .filter(|_| !wanted.local)
            .map_or_else(|| "unknown".to_owned(), String::clone),
        variables: variant
            .profile
            .as_ref()
            .and_then(|profile| profile.variables.clone())
            .unwrap_or_default(),
    });
    let variant_ids = request.cases.iter().flat_map(|case| {
        let user_model = case.user_model(DEFAULT_USER_MODEL);
        request.variants.iter().map(move |variant| {
            let (harness, sandbox) = (variant.harness.name(), variant.sandbox.name());
            let (profile, user_model) = (variant.profile_name(), user_model.as_deref());
            variant_id(organization, &case.id, harness, &variant.model, sandbox, profile, user_model)
        })
    });
    let (retry_of, carried) = match &wanted.retry {
        Some((id, carried)) => (Some(id.0.to_vec().into()), carried.clone()),
        None => (None, Vec::new()),
    };
    log::BatchStarted {
        batch: id.0.to_vec().into(),
        organization_id: organization.to_string(),
        request: Some(object),
        request_hash: wanted.hash.clone(),
        idempotency_key,
        suite: Some(v1::Suite {
            id: request.suite.id.clone(),
            name: request.suite.name.clone(),
        }),
        cases: cases.collect(),
        variants: variants.collect(),
        trials: request.trials,
        trigger: Some(v1::Trigger {
            source: wanted.trigger.source.name().to_owned(),
            url: wanted.trigger.url.clone(),
        }),
        variant_ids: variant_ids.collect(),
        local: wanted.local,
        checks_in: wanted.local && request.checks_in,
        harnesses: if wanted.local { leasable(request) } else { Vec::new() },
        retry_of,
        carried,
        regrade_of: None,
    }
}
