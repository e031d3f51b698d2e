//! Admission of batches: hosted ones, local ones, retries and regrades, all by the same rules in the same order (contract 2.1).
//!
//! A known idempotency key is answered before every other rule. What is refused changes nothing; what is admitted is one event, and its request
//! is a durable object before that.

use std::sync::Arc;

use bytes::Bytes;
use evalgrid_domain::{
    credential,
    decode::{Decoder, parse_json},
    identity,
    ids::{BatchId, OrgId, variant_id},
    limits, provider,
    request::{
        Case, DEFAULT_USER_MODEL, Feature, Harness, Judge, JudgeBy, JudgeProvider, Judged, JudgedValidator, RunnerStart, Sandbox,
        SuiteBatchRequest, Support, Trigger, TriggerSource, User, Validator, check_judges, check_local_start, check_start,
        decode_runner_start, decode_start, judges,
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
            Feature::SimulatedUser,
            Feature::HarnessUser,
            Feature::ModelJudge,
            Feature::HarnessJudge,
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
    origin: Origin,
}

/// What a batch comes from.
enum Origin {
    /// Itself.
    Fresh,
    /// The ended batch whose unscored trials it runs again, and what it takes over.
    Retry(BatchId, Vec<log::CarriedTrial>),
    /// The ended batch whose judges it asks again, all of that batch's trials, and of which cases the judges are asked.
    Regrade(BatchId, Vec<log::CarriedTrial>, Vec<bool>),
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
    Ok(Wanted {
        stored: store(&request)?,
        request,
        hash,
        local,
        trigger: trigger.unwrap_or_else(by_api),
        origin: Origin::Fresh,
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
        let (batch_id, batch, stored) = self.ended(&organization, id).await?;
        let carried = retry::carried(&batch).map_err(|error| refused(&error))?;
        let decode_stored = move || {
            Ok(Wanted {
                request: read_stored(&batch_id, &stored)?,
                stored,
                hash,
                local: false,
                trigger: by_api(),
                origin: Origin::Retry(batch_id, carried),
            })
        };
        let (wanted, permit) = self.blocking(decode_stored).await?;
        let started = self.admit(&organization, wanted, key).await;
        drop(permit);
        started
    }

    /// Starts a batch in which the judges of an ended one, or new ones, are asked from its stored evidence.
    pub async fn regrade(&self, caller: &Caller, regrade: v1::RegradeBatchRequest) -> Result<v1::StartedBatch, Status> {
        let key = regrade.idempotency_key;
        check_key(key.as_deref())?;
        let organization = caller.organization;
        let judges = match &regrade.judges_json {
            Some(json) => Some(decode_judges(json)?),
            None => None,
        };
        let wish = json!({ "regradeOf": regrade.id, "judges": judges, "cases": regrade.cases });
        let hash = identity::start_hash(&wish);
        if let Some(known) = self.replay(&organization, key.as_deref(), &hash).await? {
            return Ok(known);
        }
        if let Some(judges) = &judges {
            check_judges("judges", judges, &self.support).map_err(|error| bad_request(error.message))?;
        }
        let (batch_id, batch, stored) = self.ended(&organization, &regrade.id).await?;
        let unknown = regrade.cases.iter().find(|id| batch.cases.iter().all(|case| case.id != **id));
        if let Some(unknown) = unknown {
            return Err(bad_request(format!("cases: the batch has no case {unknown:?}")));
        }
        let cases = regrade.cases;
        let decode_stored = move || {
            let mut request = read_stored(&batch_id, &stored)?;
            let mut judged = Vec::with_capacity(request.cases.len());
            for case in &mut request.cases {
                let wanted = cases.is_empty() || cases.contains(&case.id);
                if let Some(judges) = judges.as_deref().filter(|_| wanted) {
                    rejudge(case, judges);
                }
                judged.push(wanted && !judges_of(case).is_empty());
            }
            let carried = retry::regraded(&batch, &judged).map_err(|error| refused(&error))?;
            Ok(Wanted {
                stored: store(&request)?,
                request,
                hash,
                local: false,
                trigger: by_api(),
                origin: Origin::Regrade(batch_id, carried, judged),
            })
        };
        let (wanted, permit) = self.blocking(decode_stored).await?;
        let started = self.admit(&organization, wanted, key).await;
        drop(permit);
        started
    }

    /// An ended batch with its stored start request.
    async fn ended(&self, organization: &OrgId, id: &str) -> Result<(BatchId, v1::Batch, Bytes), Status> {
        let batch_id: BatchId = id.parse().map_err(|_| refused(&decide::Refusal::NoBatch))?;
        let batch = self.reader.batch(organization, &batch_id, None).await?;
        retry::may_be_continued(&batch).map_err(|error| refused(&error))?;
        let reference = batch
            .request
            .clone()
            .ok_or_else(|| Status::data_loss("the batch does not name its start request"))?;
        let stored = chunks::fetch(self.reader.objects.as_ref(), organization, &reference).await;
        let stored = stored.map_err(|status| match status.code() {
            tonic::Code::NotFound => Status::data_loss("the start request of this batch is missing; start a new batch instead"),
            _ => status,
        })?;
        Ok((batch_id, batch, stored))
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
        match (&wanted.origin, wanted.local) {
            // Nothing of it runs again; its judges are checked.
            (Origin::Regrade(..), _) => {}
            (_, true) => self.check_local(request)?,
            (_, false) => self.check_hosted(request)?,
        }
        let engine = &self.reader.engine;
        // Asked before anything is written, and again by `decide::start`, which alone counts.
        let busy = engine.settled_turn(|core| {
            let quiet = |batch: &Batch| core.check_ins.is_quiet(batch, core.steady_ms());
            decide::busy(&core.state, organization, key.is_some(), &quiet, core.now_ms())
        });
        if let Some(busy) = busy.await.map_err(|_| stopping())? {
            return Err(refused(&busy));
        }
        if !matches!(wanted.origin, Origin::Regrade(..)) {
            self.check_credentials(request.variants.iter().map(|variant| variant.harness))?;
        }

        // Data first, then the pointer.
        let size = wanted.stored.len() as u64;
        let put = self.reader.objects.put(&organization.to_string(), wanted.stored.clone()).await;
        let object = v1::ObjectRef {
            sha256: put.map_err(|error| chunks::failed(&error))?.to_string(),
            size,
        };
        let mut random = [0; 10];
        engine.world().random(&mut random);
        let mut nonce = [0; 16];
        engine.world().random(&mut nonce);
        let admitted = engine.settled_turn(|core: &mut Core| {
            let (now_ms, steady_ms) = (core.now_ms(), core.steady_ms());
            let id = BatchId::new(now_ms, random);
            let started = started_event(&wanted, &self.support, &self.variables, organization, id, object, key);
            let started = log::BatchStarted {
                nonce: Bytes::copy_from_slice(&nonce),
                ..started
            };
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

    fn check_hosted(&self, request: &SuiteBatchRequest) -> Result<(), Status> {
        check_start(request, &self.support).map_err(|error| bad_request(error.message))?;
        self.check_people(request)?;
        self.check_variables(request)?;
        self.check_user_model(request)
    }

    fn check_local(&self, request: &SuiteBatchRequest) -> Result<(), Status> {
        check_local_start(request).map_err(|error| bad_request(error.message))?;
        self.check_people(request)?;
        self.check_user_model(request)
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
        if plays_people(request)
            && let Err(missing) = provider::route(user_model(&self.variables), &self.variables)
        {
            return Err(bad_request(format!(
                "Set {} in Settings > Environment to play a simulated person (on this server: in the scheduler's own environment)",
                missing.variable
            )));
        }
        Ok(())
    }
}

/// The model that plays people where a case names none.
fn user_model(variables: &Variables) -> &str {
    variables
        .get(provider::USER_MODEL_VARIABLE)
        .map_or(DEFAULT_USER_MODEL, String::as_str)
}

fn decode_judges(json: &[u8]) -> Result<Vec<Judge>, Status> {
    if json.len() > limits::MAX_BODY_BYTES {
        return Err(too_large(json.len(), limits::MAX_BODY_BYTES));
    }
    let value = parse_json(json, limits::MAX_JSON_DEPTH).map_err(|error| undecodable(&error))?;
    Decoder::run(&value, judges).map_err(|issues| misshapen(&issues))
}

/// As decoded before; rules may have become stricter since, so what is used of it is checked again.
fn read_stored(id: &BatchId, stored: &[u8]) -> Result<SuiteBatchRequest, Status> {
    serde_json::from_slice(stored).map_err(|error| {
        tracing::error!(batch = %id, "a stored start request cannot be read: {error}");
        Status::data_loss("the start request of this batch cannot be read; start a new batch instead")
    })
}

fn store(request: &SuiteBatchRequest) -> Result<Bytes, Status> {
    let stored = serde_json::to_vec(request).map_err(|error| {
        tracing::error!("a decoded request cannot be written as JSON: {error}");
        Status::internal("the request could not be stored")
    })?;
    Ok(stored.into())
}

fn judges_of(case: &Case) -> &[Judge] {
    match &case.validator {
        Some(Validator::Judged(validator)) => &validator.judges,
        _ => &[],
    }
}

/// Gives a case these judges in place of its own.
fn rejudge(case: &mut Case, judges: &[Judge]) {
    let judges = judges.to_vec();
    if let Some(Validator::Judged(validator)) = &mut case.validator {
        validator.judges = judges;
        return;
    }
    let (checks, name, source_files) = match case.validator.take() {
        Some(Validator::Code(code)) => {
            let name = code.check.name.clone();
            (vec![code.check], name, code.source_files)
        }
        _ => (Vec::new(), "judges".to_owned(), None),
    };
    case.validator = Some(Validator::Judged(JudgedValidator {
        capture: None,
        checks,
        judges,
        kind: Judged::Judged,
        name,
        source_files,
    }));
}

/// Records that a case's checks leave before those of its judges.
fn checks_of(case: &Case) -> usize {
    match &case.validator {
        Some(Validator::Judged(validator)) if validator.checks.is_empty() => usize::from(case.verify.is_some()),
        Some(Validator::Judged(validator)) => {
            let records = validator.checks.iter().map(|check| check.manifest.as_ref().map_or(1, Vec::len));
            records.sum()
        }
        _ => 0,
    }
}

/// Who answers for a judge.
fn judge_info(judge: &Judge) -> v1::AnswererInfo {
    let (harness, provider) = match judge.by {
        JudgeBy::Harness { harness } => (harness.name(), ""),
        JudgeBy::Provider {
            provider: JudgeProvider::Openai,
        } => ("", "openai"),
    };
    v1::AnswererInfo {
        name: judge.name.clone(),
        harness: harness.to_owned(),
        provider: provider.to_owned(),
        model: judge.model.clone(),
    }
}

/// Who plays a case's person, by the name that is part of a variant's identity.
fn person_info(case: &Case, variables: &Variables) -> Option<v1::AnswererInfo> {
    let Some(User::Simulated { by, .. }) = &case.user else {
        return None;
    };
    let default = user_model(variables);
    let name = case.user_model(default)?;
    Some(match by {
        Some(player) => v1::AnswererInfo {
            name,
            harness: player.harness.name().to_owned(),
            provider: String::new(),
            model: player.model.clone(),
        },
        None => {
            // A local batch may name a model whose key only its own machine has.
            let route = provider::route(default, variables).ok();
            v1::AnswererInfo {
                name,
                harness: String::new(),
                provider: route.as_ref().map_or(String::new(), |route| route.provider.id.to_owned()),
                model: route.map_or_else(|| default.to_owned(), |route| route.model),
            }
        }
    })
}

fn plays_people(request: &SuiteBatchRequest) -> bool {
    let mut people = request.cases.iter().filter_map(|case| case.user.as_ref());
    people.any(|user| matches!(user, User::Simulated { by: None, .. }))
}

/// Harnesses whose credentials a local batch may lease. A model that judges or plays a person answers to the same key as `codex`.
fn leasable(request: &SuiteBatchRequest) -> Vec<String> {
    let mut harnesses = request.harnesses();
    let judges = request.cases.iter().flat_map(judges_of);
    let judged_by_model = judges.into_iter().any(|judge| matches!(judge.by, JudgeBy::Provider { .. }));
    if judged_by_model || plays_people(request) {
        harnesses.insert(Harness::Codex);
    }
    harnesses.into_iter().map(|harness| harness.name().to_owned()).collect()
}

fn started_event(
    wanted: &Wanted,
    support: &Support,
    variables: &Variables,
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
        judges: match &wanted.origin {
            Origin::Regrade(_, _, judged) if judged.get(index) != Some(&true) => Vec::new(),
            // The machine that runs a local batch judges its trials, too.
            _ if wanted.local => Vec::new(),
            _ => judges_of(case).iter().map(judge_info).collect(),
        },
        person: person_info(case, variables),
        checks: checks_of(case) as u32,
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
        let user_model = case.user_model(user_model(variables));
        request.variants.iter().map(move |variant| {
            let (harness, sandbox) = (variant.harness.name(), variant.sandbox.name());
            let (profile, user_model) = (variant.profile_name(), user_model.as_deref());
            variant_id(organization, &case.id, harness, &variant.model, sandbox, profile, user_model)
        })
    });
    let (retry_of, regrade_of, carried) = match &wanted.origin {
        Origin::Fresh => (None, None, Vec::new()),
        Origin::Retry(id, carried) => (Some(id.0.to_vec().into()), None, carried.clone()),
        Origin::Regrade(id, carried, _) => (None, Some(id.0.to_vec().into()), carried.clone()),
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
        regrade_of,
        nonce: Bytes::new(),
    }
}
