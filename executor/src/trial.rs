//! A trial, step by step: set-up, the agent's turns, the check, the outcome.
//!
//! A recorded step is never run again; its result is used. Steps that run processes are started once by the sandbox's supervisor, the others
//! may run again until the first process starts; so there is one wait for acknowledgements, between the two.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use evalgrid_domain::{
    limits::INLINE_EVIDENCE_BYTES,
    outcome,
    redact::Redactor,
    request::{Case, Profile, SuiteBatchRequest, VariantRequest, effective_source},
    timing::Timing,
};
use evalgrid_proto::v1::{AttemptFailureKind, Evidence, Lease, ObjectRef, RecordedStep, StepOutcome, StepRecord, TrialOutcome};
use evalgrid_sandbox::{Sandbox, SandboxError, SandboxProvider, SandboxSpec, StepCommand, StepExit};
use evalgrid_worker::{Fact, ObjectError, Worker};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{sync::oneshot, time::timeout};

use crate::{
    account::Account,
    artifacts, cache, check, judge_files,
    layers::Layers,
    mocks, person,
    prepare::{self, Prepared},
    role::Executor,
    setup,
    timing::{self, Timed},
    turns,
};

/// What a sandbox lives longer than all its steps may take: waiting for a worker that crashed, for evidence that must be stored, for a retry.
const LIFETIME_MARGIN: Duration = Duration::from_secs(3_600);
/// How much longer than its time limit a step may be awaited: proving a tree dead takes seconds at worst.
const STEP_GRACE: Duration = Duration::from_secs(60);
/// Any other call to a sandbox. The providers have shorter deadlines of their own.
const CALL_DEADLINE: Duration = Duration::from_secs(120);

/// How an attempt at a trial ended.
pub(crate) enum Ended {
    /// The trial is over.
    Outcome(Box<TrialOutcome>),
    /// This attempt is.
    Failed(AttemptFailureKind, String),
    /// The model's provider wants fewer requests: the trial goes on later, in the same sandbox.
    Throttled {
        /// When to ask again.
        retry_after_ms: u64,
    },
    /// The case's simulated person speaks next: the trial goes on with the reply, in the same sandbox.
    AwaitsReply {
        /// The turn that has ended.
        turn: u32,
        /// Everything said so far.
        conversation: Box<Evidence>,
    },
    /// Somebody else goes on with it.
    Fenced,
}

/// Why an attempt cannot go on. Never anything about the agent.
#[derive(Debug)]
pub(crate) enum Stop {
    Failed(AttemptFailureKind, String),
    /// See [`Ended::Throttled`].
    Throttled {
        retry_after_ms: u64,
    },
    /// See [`Ended::AwaitsReply`].
    AwaitsReply {
        turn: u32,
        conversation: Box<Evidence>,
    },
    Fenced,
}

impl Stop {
    pub(crate) fn lost(reason: impl Into<String>) -> Self {
        Self::Failed(AttemptFailureKind::SandboxLost, reason.into())
    }

    fn unavailable(reason: impl Into<String>) -> Self {
        Self::Failed(AttemptFailureKind::SandboxUnavailable, reason.into())
    }
}

impl From<SandboxError> for Stop {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::Fenced { .. } => Self::Fenced,
            SandboxError::Create { .. } => Self::unavailable(error.to_string()),
            SandboxError::Lost { .. } | SandboxError::Operation { .. } => Self::lost(error.to_string()),
        }
    }
}

impl From<ObjectError> for Stop {
    fn from(error: ObjectError) -> Self {
        Self::lost(error.to_string())
    }
}

/// What a step has to say when it is recorded.
pub(crate) trait StepResult: Serialize + DeserializeOwned {
    /// The trial cannot be scored after this step.
    fn failed(&self) -> bool;

    /// When it really began and ended, in milliseconds since the epoch, where it knows better than whoever waited for it.
    fn times(&self) -> Option<(u64, u64)> {
        None
    }
}

/// The result of `sandbox.create`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    created_at_ms: u64,
    /// When it was asked for; 0 in older records.
    #[serde(default)]
    asked_at_ms: u64,
}

impl StepResult for Created {
    fn failed(&self) -> bool {
        false
    }

    fn times(&self) -> Option<(u64, u64)> {
        Some((self.asked_at_ms, self.created_at_ms))
    }
}

/// A result that was too big to travel with its event.
#[derive(Serialize, Deserialize)]
struct Pointer {
    object: Place,
}

/// What is on record of a step, beside its result or the pointer to it.
#[derive(Serialize)]
struct Stamped<'a, T> {
    #[serde(flatten)]
    result: &'a T,
    /// When it began, in milliseconds since the epoch, and how long it took.
    at: (u64, u64),
}

#[derive(Deserialize)]
struct Stamp {
    #[serde(default)]
    at: Option<(u64, u64)>,
}

#[derive(Serialize, Deserialize)]
struct Place {
    sha256: String,
    size: u64,
}

/// One attempt, once its sandbox is there.
pub(crate) struct Attempt<'a> {
    pub(crate) executor: &'a Executor,
    pub(crate) worker: &'a Worker,
    pub(crate) lease: &'a Lease,
    pub(crate) request: &'a SuiteBatchRequest,
    pub(crate) case: &'a Case,
    pub(crate) variant: &'a VariantRequest,
    pub(crate) sandbox: Box<dyn Sandbox>,
    pub(crate) redactor: Arc<Redactor>,
    pub(crate) prepared: Prepared,
    recorded: HashMap<&'a str, &'a RecordedStep>,
    /// Tells when the newest record is durable, and so all before it.
    newest: Mutex<Option<oneshot::Receiver<()>>>,
    /// The steps so far.
    timed: Mutex<Vec<Timed>>,
}

/// Every secret that a lease brings. Whoever makes another redactor for the trial begins with these.
pub(crate) fn secrets(lease: &Lease) -> impl Iterator<Item = &str> {
    lease.variables.values().chain(lease.credential.values()).map(String::as_str)
}

/// Runs the trial of a lease, or what is left of it.
pub(crate) async fn run(executor: &Executor, worker: &Worker, lease: &Lease) -> Ended {
    let redactor = Arc::new(Redactor::new(secrets(lease)));
    match attempt(executor, worker, lease, redactor.clone()).await {
        Ok(outcome) => Ended::Outcome(Box::new(outcome)),
        Err(Stop::Failed(kind, reason)) => Ended::Failed(kind, outcome::failure_text(&redactor.text(&reason))),
        Err(Stop::Throttled { retry_after_ms }) => Ended::Throttled { retry_after_ms },
        Err(Stop::AwaitsReply { turn, conversation }) => Ended::AwaitsReply { turn, conversation },
        Err(Stop::Fenced) => Ended::Fenced,
    }
}

async fn attempt(executor: &Executor, worker: &Worker, lease: &Lease, redactor: Arc<Redactor>) -> Result<TrialOutcome, Stop> {
    let object = lease
        .request
        .as_ref()
        .ok_or_else(|| Stop::unavailable("the lease names no start request"))?;
    let request = worker.objects.request(&lease.organization_id, object).await;
    let request = request.map_err(|error| Stop::unavailable(error.to_string()))?;
    let case = request.cases.get(lease.case_index as usize);
    let variant = request.variants.get(lease.variant_index as usize);
    let (Some(case), Some(variant)) = (case, variant) else {
        return Err(Stop::unavailable("the start request has no such case or variant"));
    };
    let provider = worker.providers.get(lease.provider.as_str());
    let provider = provider.ok_or_else(|| Stop::unavailable(format!("this worker has no {} sandboxes", lease.provider)))?;
    let asked_at_ms = now_ms();
    let (sandbox, mut layers) = sandbox((executor, worker), lease, &request, case, provider.as_ref()).await?;
    let recorded = lease.steps.iter().map(|step| (step.step.as_str(), step)).collect();
    let mut attempt = Attempt {
        executor,
        worker,
        lease,
        request: &request,
        case,
        variant,
        sandbox,
        prepared: Prepared::nothing(redactor.clone()),
        redactor,
        recorded,
        newest: Mutex::new(None),
        timed: Mutex::default(),
    };

    let create = async {
        Ok(Created {
            created_at_ms: now_ms(),
            asked_at_ms,
        })
    };
    let created: Created = attempt.once("sandbox.create", create).await?;
    let mut account = Account::default();
    setup::run(&attempt, &mut layers, &mut account).await?;
    cache::restore(&attempt, &mut account).await?;
    mocks::start(&attempt, &mut account).await?;
    prepare::run(&mut attempt, &mut account).await?;
    cache::save(&attempt, &mut account).await?;
    if !account.is_void() {
        turns::run(&attempt, &mut account).await?;
    }
    artifacts::keep(&attempt, &mut account).await?;
    mocks::keep_calls(&attempt, &mut account).await?;
    check::run(&attempt, &mut account).await?;
    judge_files::keep(&attempt, &mut account).await?;
    let sandbox_ms = now_ms().saturating_sub(created.created_at_ms);
    account.outcome(&attempt, sandbox_ms).await
}

/// Makes the sandbox, or takes over the one that an earlier attempt has left.
async fn sandbox(
    (executor, worker): (&Executor, &Worker),
    lease: &Lease,
    request: &SuiteBatchRequest,
    case: &Case,
    provider: &dyn SandboxProvider,
) -> Result<(Box<dyn Sandbox>, Layers), Stop> {
    may_act(worker)?;
    if lease.adopt {
        let sandbox = called("attach", provider.attach(&lease.sandbox, lease.token)).await?;
        let layers = Layers::of_sandbox(&executor.bases, lease, request, provider, sandbox.base()).map_err(Stop::lost)?;
        return Ok((sandbox, layers));
    }
    let layers = Layers::find(&executor.bases, lease, request, provider).await;
    may_act(worker)?;
    let working = Duration::from_millis(case.time_limit_ms().into());
    let spec = SandboxSpec {
        name: lease.sandbox.clone(),
        token: lease.token,
        lifetime: setup::CLONE_LIMIT
            + setup::INSTALL_LIMIT
            + mocks::LIMIT
            + prepare::LIMIT
            + working
            + person::limit(case)
            + check::limit(case)
            + LIFETIME_MARGIN,
        limits: worker.limits,
        base: layers.folder(),
    };
    match called("create", provider.create(&spec)).await {
        Ok(sandbox) => Ok((sandbox, layers)),
        // Whatever went wrong before there was a sandbox, no sandbox was lost.
        Err(Stop::Failed(_, reason)) => {
            layers.distrust();
            Err(Stop::unavailable(reason))
        }
        Err(stop) => Err(stop),
    }
}

impl Attempt<'_> {
    /// The step's recorded result, or else what `run` gives, which is then recorded.
    pub(crate) async fn once<T: StepResult>(&self, step: &str, run: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        if let Some(recorded) = self.recorded.get(step) {
            let stamp = serde_json::from_slice::<Stamp>(&recorded.result).ok().and_then(|stamp| stamp.at);
            // Records of older versions have none.
            if let Some(at) = stamp {
                self.note(step, at, recorded.outcome() == StepOutcome::Failed);
            }
            return self.read(&recorded.result).await;
        }
        may_act(self.worker)?;
        let began_ms = now_ms();
        let result = run.await?;
        let (began_ms, ended_ms) = result.times().unwrap_or_else(|| (began_ms, now_ms()));
        let at = (began_ms, ended_ms.saturating_sub(began_ms));
        self.note(step, at, result.failed());
        let outcome = if result.failed() { StepOutcome::Failed } else { StepOutcome::Done };
        let bytes = self.stored(&result, at).await?;
        let record = StepRecord {
            token: self.lease.token,
            step: step.to_owned(),
            outcome: outcome.into(),
            result: bytes,
        };
        *self.newest() = Some(self.worker.outbox.push_awaited(Fact::Step(record)));
        Ok(result)
    }

    /// Whether an earlier attempt has recorded the step.
    pub(crate) fn is_recorded(&self, step: &str) -> bool {
        self.recorded.contains_key(step)
    }

    /// What an earlier attempt has recorded of the step, if it has.
    pub(crate) async fn recalled<T: DeserializeOwned>(&self, step: &str) -> Result<Option<T>, Stop> {
        match self.recorded.get(step) {
            Some(recorded) => self.read(&recorded.result).await.map(Some),
            None => Ok(None),
        }
    }

    /// Waits until everything recorded so far is durable.
    pub(crate) async fn durable(&self) -> Result<(), Stop> {
        let newest = self.newest().take();
        match newest {
            // An error says that the lease is gone, and with it the right to act.
            Some(acknowledged) => acknowledged.await.map_err(|_| Stop::Fenced),
            None => Ok(()),
        }
    }

    fn newest(&self) -> MutexGuard<'_, Option<oneshot::Receiver<()>>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read<T: DeserializeOwned>(&self, bytes: &Bytes) -> Result<T, Stop> {
        let unreadable = |error: serde_json::Error| Stop::lost(format!("a recorded step cannot be read: {error}"));
        match serde_json::from_slice::<Pointer>(bytes) {
            Ok(Pointer { object }) => {
                let object = ObjectRef {
                    sha256: object.sha256,
                    size: object.size,
                };
                let bytes = self.worker.objects.get(&self.lease.organization_id, &object).await?;
                serde_json::from_slice(&bytes).map_err(unreadable)
            }
            Err(_) => serde_json::from_slice(bytes).map_err(unreadable),
        }
    }

    /// The JSON of a value, or of a pointer to it where it is big: data first, then the pointer.
    async fn stored(&self, value: &impl Serialize, at: (u64, u64)) -> Result<Bytes, Stop> {
        let bytes = json(&Stamped { result: value, at });
        if bytes.len() <= INLINE_EVIDENCE_BYTES {
            return Ok(bytes);
        }
        let object = self.worker.objects.put(&self.lease.organization_id, bytes).await?;
        let pointer = Pointer {
            object: Place {
                sha256: object.sha256,
                size: object.size,
            },
        };
        Ok(json(&Stamped { result: &pointer, at }))
    }

    /// Notes when a step was, where [`Self::once`] does not.
    pub(crate) fn note(&self, step: &str, (started_at_ms, duration_ms): (u64, u64), failed: bool) {
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        timed.push(Timed {
            step: step.to_owned(),
            started_at_ms,
            duration_ms,
            failed,
        });
    }

    /// Where the time went so far.
    pub(crate) fn timing(&self) -> Option<Timing> {
        let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        timing::tree(&timed, self.lease.waiting_since_ms)
    }

    /// Runs a process of the trial, or waits for the one that an earlier attempt has started.
    pub(crate) async fn process(&self, command: StepCommand) -> Result<StepExit, Stop> {
        may_act(self.worker)?;
        match timeout(command.time_limit + STEP_GRACE, self.sandbox.run(&command)).await {
            Ok(exit) => Ok(exit?),
            Err(_) => Err(Stop::lost(format!("the supervisor did not end {} in time", command.step))),
        }
    }

    pub(crate) fn profile(&self) -> Option<&Profile> {
        self.variant.profile.as_ref()
    }

    pub(crate) fn source(&self) -> &evalgrid_domain::request::Source {
        effective_source(self.request, self.lease.case_index as usize)
    }

    /// The environment of everything that the trial runs: the profile's own, and the variables that it names.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.profile().and_then(|profile| profile.env.clone()).unwrap_or_default();
        env.extend(self.lease.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        env
    }
}

/// Nothing is begun under a lease that has ended, however late this process hears of its end.
fn may_act(worker: &Worker) -> Result<(), Stop> {
    match worker.leases_hold() {
        true => Ok(()),
        false => Err(Stop::Fenced),
    }
}

/// A call to a sandbox or its provider, with a deadline.
pub(crate) async fn called<T>(operation: &str, call: impl Future<Output = Result<T, SandboxError>>) -> Result<T, Stop> {
    match timeout(CALL_DEADLINE, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(Stop::lost(format!("{operation}: no answer in time"))),
    }
}

pub(crate) fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value)
        .expect("our own types have string keys and no failing serializers")
        .into()
}

#[expect(
    clippy::disallowed_methods,
    reason = "an I/O edge: deadlines told to agents, and how long a sandbox was used"
)]
pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
