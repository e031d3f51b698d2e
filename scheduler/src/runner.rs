//! The service for local batches: their machine leases what it needs, reports each trial, checks in, and finishes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use evalgrid_domain::{
    credential,
    decode::parse_json,
    ids::{BatchId, OrgId, RunId},
    limits,
    outcome::{EXIT_NOT_SCORED, TrialStatus},
    redact::Redactor,
    report::{Kept, ReportedResult, ReportedTrial, ReportedUsage, decode_report},
    request::Harness,
};
use evalgrid_proto::v1::{self, evidence::Place, runner_server::Runner};
use evalgrid_workflow::{Batch, decide::Refusal, local};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use crate::{
    admin::new_secret,
    auth::{self, Caller, stopping},
    chunks,
    clients::parse_batch,
    engine::Core,
    read::Reader,
    refusals::{bad_request, conflict, misshapen, refused, too_large, undecodable},
    starts::{Admission, Body},
};

/// Reports decoded at once: each may hold 8 MiB of body and several times that while it is decoded and redacted.
const MAX_REPORTS_AT_ONCE: usize = 16;
/// Tails read at once: each may hold the evidence of one trial, at most 64 MiB and a bit.
const MAX_TAILS_AT_ONCE: usize = 4;
/// Tokens for tails that live at once, about 100 bytes each; one more is refused until some have expired.
const MAX_SUBSCRIPTIONS: usize = 10_000;

/// The service.
#[derive(Clone)]
pub struct RunnerService {
    reader: Reader,
    admission: Admission,
    reports: Arc<Semaphore>,
    tails: Arc<Semaphore>,
    subscriptions: Arc<Mutex<HashMap<[u8; 32], Subscription>>>,
}

/// What a tail's token opens. Tokens live in memory: after a restart a reader subscribes again.
struct Subscription {
    organization: OrgId,
    batch: BatchId,
    expires_ms: u64,
}

impl RunnerService {
    /// `admission` says what may be started.
    pub fn new(admission: Admission) -> RunnerService {
        RunnerService {
            reader: admission.reader.clone(),
            admission,
            reports: Arc::new(Semaphore::new(MAX_REPORTS_AT_ONCE)),
            tails: Arc::new(Semaphore::new(MAX_TAILS_AT_ONCE)),
            subscriptions: Arc::default(),
        }
    }

    async fn caller<T>(&self, request: &Request<T>, permissions: &[&str]) -> Result<Caller, Status> {
        let caller = auth::caller(&self.reader.engine, request.metadata()).await?;
        permissions.iter().try_for_each(|permission| caller.require(permission))?;
        Ok(caller)
    }

    /// A look at, or a change of, an open local batch. One that has left memory says so in the same words as one that is still in it.
    async fn local<T>(&self, organization: &OrgId, id: &BatchId, turn: impl FnOnce(&mut Core) -> Result<T, Refusal>) -> Result<T, Refused> {
        let answer = self.reader.engine.settled_turn(turn);
        match answer.await.map_err(|_| stopping())? {
            Ok(value) => Ok(value),
            Err(Refusal::NoBatch) => {
                let batch = self.reader.batch(organization, id, None).await?;
                Err(Refused::Rule(local::too_late(&batch)))
            }
            Err(refusal) => Err(Refused::Rule(refusal)),
        }
    }

    fn now_ms(&self) -> u64 {
        self.reader.engine.turn(|core| core.now_ms()).0
    }
}

/// Why a machine is refused.
enum Refused {
    /// The state machine says no.
    Rule(Refusal),
    /// Something else is wrong.
    Status(Status),
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Refused::Status(status)
    }
}

impl From<Refused> for Status {
    fn from(refused_: Refused) -> Status {
        match refused_ {
            Refused::Rule(refusal) => refused(&refusal),
            Refused::Status(status) => status,
        }
    }
}

/// A sign of a machine: one that comes too late closes its batch and is refused, whether the sweep has been by or not.
fn heard(core: &mut Core, organization: &OrgId, id: &BatchId) -> Result<(), Refusal> {
    let (now_ms, steady_ms) = (core.now_ms(), core.steady_ms());
    let batch = local::open(&core.state, organization, id)?;
    if core.check_ins.is_quiet(batch, steady_ms) {
        let closed = local::close_quiet(batch, now_ms);
        core.commit(closed);
        return local::open(&core.state, organization, id).map(|_| ());
    }
    let recorded = local::checked_in(batch, now_ms);
    core.check_ins.hear(*id, steady_ms);
    core.commit_all(recorded);
    Ok(())
}

/// What must not reach the evidence of a run: values that its machine may have leased.
fn secrets(batch: &Batch, run: u8, variables: &BTreeMap<String, String>) -> Vec<String> {
    let harnesses = batch.local.iter().flat_map(|local| &local.harnesses);
    let methods = harnesses.filter_map(|name| Some(credential::method(Harness::from_name(name)?)));
    let keys = methods.flat_map(|method| method.fields.iter().map(|(name, _)| *name));
    let (_, variant) = batch.coordinates(run);
    let named = batch.variants.get(variant).into_iter().flat_map(|variant| &variant.variables);
    let names = keys.chain(named.map(String::as_str));
    names.filter_map(|name| variables.get(name).cloned()).collect()
}

fn decoded(json: &[u8]) -> Result<ReportedTrial, Status> {
    if json.len() > limits::MAX_BODY_BYTES {
        return Err(too_large(json.len(), limits::MAX_BODY_BYTES));
    }
    let value = parse_json(json, limits::MAX_JSON_DEPTH).map_err(|error| undecodable(&error))?;
    decode_report(&value).map_err(|issues| misshapen(&issues))
}

fn status_of(report: &ReportedTrial) -> Result<v1::TrialStatus, Status> {
    let ReportedResult::Ended(outcome) = &report.result else {
        return Ok(v1::TrialStatus::Void);
    };
    match outcome.status {
        TrialStatus::Passed => Ok(v1::TrialStatus::Passed),
        TrialStatus::Failed => Ok(v1::TrialStatus::Failed),
        TrialStatus::Void => Ok(v1::TrialStatus::Void),
        TrialStatus::Queued | TrialStatus::Running => Err(bad_request(format!(
            "outcome.status: a report is of a trial that has ended, and this is \"{}\"",
            outcome.status.name()
        ))),
    }
}

fn usage_message(reported: &ReportedUsage) -> v1::Usage {
    let usage = &reported.usage;
    v1::Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        total_tokens: usage.total_tokens,
        cost_usd: usage.cost_usd.map(|cost| cost.0),
        cache_write_1h_tokens: reported.cache_write_1h_tokens,
    }
}

/// The verdict as the log keeps it.
fn outcome(report: &ReportedTrial, status: v1::TrialStatus, kept: &Kept, place: Place) -> v1::TrialOutcome {
    let common = v1::TrialOutcome {
        status: status.into(),
        exit_code: EXIT_NOT_SCORED,
        failed_commands: kept.failed_commands,
        sandbox_id: kept.sandbox_id.clone(),
        timed: kept.timed,
        usage: report.usage.as_ref().map(usage_message),
        failure: kept.failure.clone(),
        evidence: Some(v1::Evidence { place: Some(place) }),
        journal_entries: Some(kept.evidence.trajectory.len() as u64),
        ..v1::TrialOutcome::default()
    };
    match &report.result {
        ReportedResult::Broken(_) => common,
        ReportedResult::Ended(ended) => v1::TrialOutcome {
            exit_code: ended.exit_code,
            commands: ended.commands,
            model_ms: ended.model_ms,
            sandbox_ms: ended.sandbox_ms,
            void_fields: ended.void_fields.clone(),
            user_spend: ended.user_spend.as_ref().map(|(model, usage)| {
                Box::new(v1::ModelSpend {
                    model: model.clone(),
                    usage: usage.as_ref().map(usage_message),
                })
            }),
            ..common
        },
    }
}

impl RunnerService {
    async fn report_trial(&self, caller: &Caller, json: Bytes) -> Result<(), Status> {
        let permit = self.reports.clone().acquire_owned().await.map_err(|_| stopping())?;
        let decode = tokio::task::spawn_blocking(move || decoded(&json));
        let mut report = decode.await.map_err(|_| stopping())??;
        let status = status_of(&report)?;
        let (organization, run, ordinal) = (caller.organization, report.run, report.ordinal);
        let variables = self.admission.variables.clone();
        let wanted = self.local(&organization, &run.batch, |core| {
            heard(core, &organization, &run.batch)?;
            let takes = local::takes_report(&core.state, &organization, run, ordinal, status)?;
            let batch = local::open(&core.state, &organization, &run.batch)?;
            Ok(takes.then(|| secrets(batch, run.run, &variables)))
        });
        let Some(secrets) = wanted.await.map_err(|refused| no_run(refused, &run))? else {
            return Ok(());
        };
        let keep = tokio::task::spawn_blocking(move || {
            let kept = report.keep(&Redactor::new(secrets));
            let bytes = serde_json::to_vec(&kept.evidence);
            (report, kept, bytes)
        });
        let (report, kept, bytes) = keep.await.map_err(|_| stopping())?;
        let bytes = bytes.map_err(|error| {
            tracing::error!("evidence cannot be written as JSON: {error}");
            Status::internal("the evidence could not be stored")
        })?;
        // Data first, then the pointer.
        let place = match bytes.len() <= limits::INLINE_EVIDENCE_BYTES {
            true => Place::Inline(bytes.into()),
            false => {
                let size = bytes.len() as u64;
                let put = self.reader.objects.put(&organization.to_string(), bytes.into()).await;
                let sha256 = put.map_err(|error| chunks::failed(&error))?.to_string();
                Place::Object(v1::ObjectRef { sha256, size })
            }
        };
        let outcome = outcome(&report, status, &kept, place);
        let recorded = self.local(&organization, &run.batch, |core| {
            let event = local::report(&core.state, &organization, run, ordinal, outcome, core.now_ms())?;
            core.commit_all(event);
            Ok(())
        });
        recorded.await.map_err(|refused| no_run(refused, &run))?;
        drop(permit);
        Ok(())
    }

    async fn finished(&self, caller: &Caller, id: &BatchId) -> Result<v1::Batch, Status> {
        let organization = caller.organization;
        let finished = self.local(&organization, id, |core| {
            heard(core, &organization, id)?;
            let event = local::finish(&core.state, &organization, id, core.now_ms())?;
            core.commit_all(event);
            Ok(())
        });
        match finished.await {
            // Finished before, or closed with every trial reported: either way this is what was asked for.
            Ok(()) | Err(Refused::Rule(Refusal::Finished)) => {}
            Err(refused) => return Err(refused.into()),
        }
        self.reader.batch(&organization, id, None).await
    }

    /// Whose batch a tail is read of: by a key that may read, or by a token for this very batch.
    async fn reader_of<T>(&self, request: &Request<T>, id: &BatchId) -> Result<OrgId, Status> {
        let hash = auth::hash(auth::bearer(request.metadata())?);
        let now_ms = self.now_ms();
        let subscribed = {
            let subscriptions = self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner);
            let found = subscriptions.get(&hash);
            found
                .filter(|subscription| subscription.batch == *id && now_ms < subscription.expires_ms)
                .map(|subscription| subscription.organization)
        };
        match subscribed {
            Some(organization) => Ok(organization),
            None => Ok(self.caller(request, &["evals:read"]).await?.organization),
        }
    }

    fn subscribe_to(&self, organization: OrgId, batch: BatchId) -> Result<v1::Subscription, Status> {
        let now_ms = self.now_ms();
        let token = new_secret(self.reader.engine.world());
        let expires_ms = now_ms + limits::LEASED_VALUES_MS;
        let mut subscriptions = self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner);
        if subscriptions.len() >= MAX_SUBSCRIPTIONS {
            subscriptions.retain(|_, subscription| now_ms < subscription.expires_ms);
        }
        if subscriptions.len() >= MAX_SUBSCRIPTIONS {
            return Err(Status::resource_exhausted(format!(
                "{MAX_SUBSCRIPTIONS} tails are subscribed to, which is the limit; read with an API key instead"
            )));
        }
        let subscription = Subscription {
            organization,
            batch,
            expires_ms,
        };
        subscriptions.insert(auth::hash(&token), subscription);
        Ok(v1::Subscription {
            expires_at_ms: expires_ms,
            tag: format!("batch_{batch}"),
            token,
        })
    }

    async fn page(&self, organization: &OrgId, id: &BatchId, after: Vec<v1::TailMark>) -> Result<v1::TailPage, Status> {
        let batch = self.reader.batch(organization, id, None).await?;
        let mut page = Page {
            seen: after.into_iter().map(|mark| ((mark.run_id, mark.ordinal), mark.seq)).collect(),
            events: Vec::new(),
            bytes: 0,
        };
        let mut trials = Vec::new();
        for run in &batch.runs {
            trials.extend(run.trials.iter().map(|trial| (run, trial)));
        }
        let settled = trials.iter().filter(|(_, trial)| trial.outcome.is_some()).count();
        for (run, trial) in trials {
            let Some(outcome) = &trial.outcome else { continue };
            let next = page.next(&run.id, trial.ordinal);
            if outcome.journal_entries.is_some_and(|entries| entries <= next) {
                continue;
            }
            let evidence = match outcome.evidence.as_ref().and_then(|evidence| evidence.place.as_ref()) {
                None => continue,
                Some(Place::Inline(bytes)) => bytes.clone(),
                Some(Place::Object(reference)) => chunks::fetch(self.reader.objects.as_ref(), organization, reference).await?,
            };
            let journal: Journal<'_> = serde_json::from_slice(&evidence).map_err(|error| {
                tracing::error!(trial = trial.id, "evidence cannot be read: {error}");
                Status::data_loss("the evidence of a trial cannot be read; the operator must restore it from a backup")
            })?;
            let entries = (0u64..).zip(journal.trajectory).skip(next as usize);
            for (seq, entry) in entries {
                if !page.push(&run.id, trial.ordinal, seq, entry.get()) {
                    return Ok(page.finish(&batch, settled));
                }
            }
        }
        Ok(page.finish(&batch, settled))
    }
}

/// A run of nobody's is told from a batch of nobody's: the caller has named a run.
fn no_run(refused: Refused, run: &RunId) -> Status {
    match refused {
        Refused::Status(status) if status.code() == tonic::Code::NotFound => {
            Status::not_found(format!("there is no run with the id {run}"))
        }
        refused => refused.into(),
    }
}

/// The part of evidence that a tail reads.
#[derive(Deserialize)]
struct Journal<'a> {
    #[serde(borrow)]
    trajectory: Vec<&'a RawValue>,
}

/// A page of a tail while it fills.
struct Page {
    /// The newest entry given, by run and ordinal.
    seen: BTreeMap<(String, u32), u64>,
    events: Vec<v1::TailEvent>,
    bytes: usize,
}

impl Page {
    /// The next entry to give of a trial.
    fn next(&self, run: &str, ordinal: u32) -> u64 {
        let seen = self.seen.get(&(run.to_owned(), ordinal));
        seen.map_or(0, |seq| seq.saturating_add(1))
    }

    /// Adds an entry; false where the page is full.
    fn push(&mut self, run: &str, ordinal: u32, seq: u64, entry: &str) -> bool {
        let full = self.events.len() >= limits::MAX_TAIL_EVENTS || self.bytes + entry.len() > limits::MAX_TAIL_BYTES;
        if full && !self.events.is_empty() {
            return false;
        }
        self.bytes += entry.len();
        self.seen.insert((run.to_owned(), ordinal), seq);
        self.events.push(v1::TailEvent {
            mark: Some(v1::TailMark {
                run_id: run.to_owned(),
                ordinal,
                seq,
            }),
            entry: Bytes::copy_from_slice(entry.as_bytes()),
        });
        true
    }

    fn finish(self, batch: &v1::Batch, settled: usize) -> v1::TailPage {
        let marks = self.seen.into_iter();
        v1::TailPage {
            events: self.events,
            next: marks
                .map(|((run_id, ordinal), seq)| v1::TailMark { run_id, ordinal, seq })
                .collect(),
            running: batch.status() == v1::BatchStatus::Running,
            settled: settled as u32,
        }
    }
}

#[tonic::async_trait]
impl Runner for RunnerService {
    async fn start(&self, request: Request<v1::StartBatchRequest>) -> Result<Response<v1::StartedBatch>, Status> {
        let caller = self.caller(&request, &["evals:write"]).await?;
        let started = self.admission.start(&caller, request.into_inner(), Body::Runner).await?;
        Ok(Response::new(started))
    }

    async fn lease(&self, request: Request<v1::LeaseCredentialRequest>) -> Result<Response<v1::LeasedValues>, Status> {
        let caller = self.caller(&request, &["evals:write", "credentials:use"]).await?;
        let v1::LeaseCredentialRequest { batch_id, harness } = request.into_inner();
        let id = parse_batch(&batch_id)?;
        let used = self.local(&caller.organization, &id, |core| {
            let batch = local::open(&core.state, &caller.organization, &id)?;
            let used = batch.local.iter().any(|local| local.harnesses.contains(&harness));
            Ok((used, core.now_ms()))
        });
        let (used, now_ms) = used.await?;
        let harness = Harness::from_name(&harness)
            .filter(|_| used)
            .ok_or_else(|| conflict("the batch does not use this harness, so its credential is not leased to it"))?;
        let method = credential::method(harness);
        let values = method
            .values(&self.admission.variables)
            .map_err(|variable| Status::not_found(credential::missing(harness, variable)))?;
        Ok(Response::new(v1::LeasedValues {
            auth_method_id: method.id.to_owned(),
            expires_at_ms: now_ms + limits::LEASED_VALUES_MS,
            values: values.into_iter().collect(),
        }))
    }

    async fn lease_variables(&self, request: Request<v1::LeaseVariablesRequest>) -> Result<Response<v1::LeasedValues>, Status> {
        let caller = self.caller(&request, &["evals:write", "credentials:use"]).await?;
        let v1::LeaseVariablesRequest { batch_id, names } = request.into_inner();
        if names.is_empty() || names.len() > limits::MAX_LEASED_VARIABLES {
            return Err(bad_request(format!("names: 1 to {} names", limits::MAX_LEASED_VARIABLES)));
        }
        let id = parse_batch(&batch_id)?;
        let undeclared = self.local(&caller.organization, &id, |core| {
            let batch = local::open(&core.state, &caller.organization, &id)?;
            let declared = |name: &String| batch.variants.iter().any(|variant| variant.variables.contains(name));
            let undeclared: Vec<String> = names.iter().filter(|name| !declared(name)).cloned().collect();
            Ok((undeclared, core.now_ms()))
        });
        let (undeclared, now_ms) = undeclared.await?;
        if !undeclared.is_empty() {
            let text = format!("No profile of this batch names {}", undeclared.join(", "));
            return Err(conflict(&text));
        }
        let unset = |name: &&String| !self.admission.variables.contains_key(*name);
        let missing: Vec<&str> = names.iter().filter(unset).map(String::as_str).collect();
        if !missing.is_empty() {
            let text = format!(
                "Set {} in Settings > Environment (on this server: in the scheduler's own environment), or in your shell",
                missing.join(", ")
            );
            return Err(Status::not_found(text));
        }
        let values = names.into_iter().filter_map(|name| {
            let value = self.admission.variables.get(&name)?.clone();
            Some((name, value))
        });
        Ok(Response::new(v1::LeasedValues {
            auth_method_id: String::new(),
            expires_at_ms: now_ms + limits::LEASED_VALUES_MS,
            values: values.collect(),
        }))
    }

    async fn report(&self, request: Request<v1::ReportTrialRequest>) -> Result<Response<v1::ReportTrialReply>, Status> {
        let caller = self.caller(&request, &["evals:write"]).await?;
        self.report_trial(&caller, request.into_inner().json).await?;
        Ok(Response::new(v1::ReportTrialReply {}))
    }

    async fn beat(&self, request: Request<v1::BeatRequest>) -> Result<Response<v1::BeatReply>, Status> {
        let caller = self.caller(&request, &["evals:write"]).await?;
        let id = parse_batch(&request.into_inner().batch_id)?;
        self.local(&caller.organization, &id, |core| heard(core, &caller.organization, &id))
            .await?;
        Ok(Response::new(v1::BeatReply {}))
    }

    async fn finish(&self, request: Request<v1::FinishBatchRequest>) -> Result<Response<v1::Batch>, Status> {
        let caller = self.caller(&request, &["evals:write"]).await?;
        let id = parse_batch(&request.into_inner().batch_id)?;
        Ok(Response::new(self.finished(&caller, &id).await?))
    }

    async fn subscribe(&self, request: Request<v1::SubscribeRequest>) -> Result<Response<v1::Subscription>, Status> {
        let caller = self.caller(&request, &["evals:read"]).await?;
        let id = parse_batch(&request.into_inner().batch_id)?;
        self.reader.batch(&caller.organization, &id, Some(0)).await?;
        Ok(Response::new(self.subscribe_to(caller.organization, id)?))
    }

    async fn tail(&self, request: Request<v1::TailRequest>) -> Result<Response<v1::TailPage>, Status> {
        let id = parse_batch(&request.get_ref().batch_id)?;
        let organization = self.reader_of(&request, &id).await?;
        let after = request.into_inner().after;
        if after.len() as u64 > limits::MAX_TRIALS_PER_BATCH {
            return Err(bad_request(format!(
                "after: at most one mark per trial, {}",
                limits::MAX_TRIALS_PER_BATCH
            )));
        }
        let _permit = self.tails.acquire().await.map_err(|_| stopping())?;
        Ok(Response::new(self.page(&organization, &id, after).await?))
    }
}
