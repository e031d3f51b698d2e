//! What judgments and replies have in common: how often and how long one may be asked, that each ask is on record before it is made, and what is
//! reported of it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use evalgrid_domain::{
    answerer::Failure,
    evidence::JudgeUsage,
    limits::{INLINE_JUDGMENT_BYTES, MAX_REFUSED_ASKS, MAX_UNCLEAR_ASKS},
    outcome,
    redact::Redactor,
    request::SuiteBatchRequest,
};
use evalgrid_proto::v1::{
    AttemptFailure, AttemptFailureKind, Evidence, JobAsked, JobLease, JobResult, ModelSpend, NotNow, Unclear, Usage, evidence::Place,
    job_result,
};
use evalgrid_sandbox::SandboxError;
use evalgrid_worker::{End, Fact, ObjectError, Then, Worker};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::Instant;

use crate::{
    http::Http,
    model::{Ended, Endpoint, Met, Terms},
};

/// A job under one lease.
pub(crate) struct Job<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) http: &'a Http,
    pub(crate) lease: &'a JobLease,
    /// Of whom is asked.
    pub(crate) credential: BTreeMap<String, String>,
    /// Of the secrets that the lease brings: those of whom is asked, and those of the trial.
    pub(crate) redactor: Redactor,
    /// This lease has said that it asks.
    announced: AtomicBool,
}

/// Why a job comes to no answer under this lease.
#[derive(Debug)]
pub(crate) enum Stop {
    /// There will be no other: it is the answer.
    Final(Failure),
    /// To be asked again.
    Again {
        /// Why.
        result: Box<job_result::Result>,
        /// How long it was being asked.
        spent_ms: u64,
    },
    /// Something around it does not work.
    Failed(AttemptFailureKind, String),
    /// Somebody else goes on with it.
    Fenced,
}

impl From<SandboxError> for Stop {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::Fenced { .. } => Self::Fenced,
            SandboxError::Create { .. } => Self::unavailable(error.to_string()),
            SandboxError::Lost { .. } | SandboxError::Operation { .. } => Self::Failed(AttemptFailureKind::SandboxLost, error.to_string()),
        }
    }
}

impl From<ObjectError> for Stop {
    fn from(error: ObjectError) -> Self {
        match error {
            ObjectError::Unreachable(_) => Self::unavailable(error.to_string()),
            ObjectError::Refused(_) | ObjectError::Corrupt(_) | ObjectError::Unreadable(..) => Self::uncallable(error.to_string()),
        }
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Final(failure)
    }
}

impl Stop {
    /// Another worker, or another moment, may do better.
    pub(crate) fn unavailable(reason: impl Into<String>) -> Self {
        Self::Failed(AttemptFailureKind::SandboxUnavailable, reason.into())
    }

    /// Nobody will ever be able to ask this.
    pub(crate) fn uncallable(reason: impl Into<String>) -> Self {
        Self::Final(Failure::Uncallable { reason: reason.into() })
    }
}

/// One ask that has come to its end.
pub(crate) struct Answered {
    pub(crate) ended: Ended,
    /// The session that a harness can go on with.
    pub(crate) session_id: Option<String>,
    pub(crate) started_at_ms: u64,
    /// In this lease.
    pub(crate) spent_ms: u64,
}

impl<'a> Job<'a> {
    pub(crate) fn new(worker: &'a Worker, http: &'a Http, lease: &'a JobLease) -> Self {
        Self {
            worker,
            http,
            lease,
            credential: lease.credential.clone().into_iter().collect(),
            redactor: Redactor::new(lease.credential.values().chain(&lease.trial_secrets)),
            announced: AtomicBool::new(false),
        }
    }

    /// The start request, which defines the judge or the person.
    pub(crate) async fn request(&self) -> Result<Arc<SuiteBatchRequest>, Stop> {
        let Some(object) = &self.lease.request else {
            return Err(Stop::uncallable("the lease names no start request"));
        };
        Ok(self.worker.objects.request(&self.lease.organization_id, object).await?)
    }

    /// What came with the lease, as the JSON of something.
    pub(crate) async fn read<T: DeserializeOwned>(&self, evidence: Option<&Evidence>) -> Result<T, Stop> {
        let bytes = match evidence.and_then(|evidence| evidence.place.as_ref()) {
            Some(Place::Inline(bytes)) => bytes.clone(),
            Some(Place::Object(object)) => self.worker.objects.get(&self.lease.organization_id, object).await?,
            None => return Err(Stop::uncallable("nothing to ask about came with the job")),
        };
        serde_json::from_slice(&bytes).map_err(|error| Stop::uncallable(format!("what it is about cannot be read: {error}")))
    }

    /// Refuses what has been asked often enough, or has no key to be asked with. `answerer`: the harness or the provider.
    pub(crate) fn may_ask(&self, answerer: &str) -> Result<(), Failure> {
        let lease = self.lease;
        let reason = || lease.reason.clone();
        if !lease.missing.is_empty() {
            return Err(Failure::MissingCredential {
                answerer: answerer.to_owned(),
                variable: lease.missing.clone(),
            });
        }
        if lease.unclear >= MAX_UNCLEAR_ASKS {
            let tries = lease.unclear;
            return Err(match lease.reason.is_empty() {
                true => Failure::Stopped { tries },
                false => Failure::Unclear { tries, reason: reason() },
            });
        }
        match lease.refused >= MAX_REFUSED_ASKS {
            true => Err(Failure::Limited {
                tries: lease.refused,
                reason: reason(),
            }),
            false => Ok(()),
        }
    }

    /// What is left of a time limit.
    pub(crate) fn left(&self, limit_ms: u64) -> Result<Duration, Failure> {
        match limit_ms.saturating_sub(self.lease.spent_ms) {
            0 => Err(Failure::TimedOut { limit_ms }),
            left => Ok(Duration::from_millis(left)),
        }
    }

    /// Puts on record that what follows may be answered without anybody knowing. Whoever asks waits for this.
    pub(crate) async fn announce(&self) -> Result<(), Stop> {
        self.may_act()?;
        self.announced.store(true, Ordering::Release);
        let asked = JobAsked { token: self.lease.token };
        // An error says that the lease is gone, and with it the right to ask.
        self.worker
            .outbox
            .push_awaited(Fact::Asked(asked))
            .await
            .map_err(|_| Stop::Fenced)?;
        self.may_act()
    }

    /// Nothing is begun under a lease that has ended, however late this process hears of its end.
    pub(crate) fn may_act(&self) -> Result<(), Stop> {
        match self.worker.leases_hold() {
            true => Ok(()),
            false => Err(Stop::Fenced),
        }
    }

    /// Asks the model of the lease, once.
    pub(crate) async fn ask_model<F: Future<Output = Met>>(
        &self,
        limit_ms: u64,
        ask: impl FnOnce(Endpoint<'a>, Terms<'a>) -> F,
    ) -> Result<Answered, Stop> {
        let left = self.left(limit_ms)?;
        let field = |name: &str| self.lease.credential.get(name).map(String::as_str);
        let (Some(key), Some(base_url)) = (field("apiKey"), field("baseUrl")) else {
            return Err(Stop::uncallable("no key and address of its provider came with the job"));
        };
        let endpoint = Endpoint {
            provider: &self.lease.model_provider,
            base_url,
            key,
            model: &self.lease.model,
        };
        self.announce().await?;
        let (began, started_at_ms) = (Instant::now(), now_ms());
        let terms = Terms {
            idempotency_key: &self.lease.idempotency_key,
            deadline: began + left,
            limit_ms,
        };
        let met = ask(endpoint, terms).await;
        let spent_ms = began.elapsed().as_millis() as u64;
        Ok(Answered {
            ended: self.bounded(met, spent_ms)?,
            session_id: None,
            started_at_ms,
            spent_ms,
        })
    }

    /// The end of an ask; what did not end it is asked again, unless that was the last time.
    pub(crate) fn bounded(&self, met: Met, spent_ms: u64) -> Result<Ended, Stop> {
        let text = |reason: &str| outcome::failure_text(&self.redactor.text(reason));
        let again = |result| Stop::Again {
            result: Box::new(result),
            spent_ms,
        };
        match met {
            Met::Ended(ended) => Ok(ended),
            Met::NotNow { retry_after_ms, reason } => match self.lease.refused + 1 {
                tries @ MAX_REFUSED_ASKS.. => Ok(Ended::failed(Failure::Limited { tries, reason })),
                _ => Err(again(job_result::Result::NotNow(NotNow {
                    retry_after_ms,
                    reason: text(&reason),
                }))),
            },
            Met::Unclear { reason } => match self.lease.unclear + 1 {
                tries @ MAX_UNCLEAR_ASKS.. => Ok(Ended::failed(Failure::Unclear { tries, reason })),
                _ => Err(again(job_result::Result::Unclear(Unclear { reason: text(&reason) }))),
            },
        }
    }

    /// What a stop comes to where it was the last try.
    pub(crate) fn settled(&self, stop: Stop, harness: &str) -> Stop {
        let Stop::Failed(kind, reason) = stop else { return stop };
        // As the scheduler counts it.
        let last = match kind == AttemptFailureKind::SandboxLost && self.announced.load(Ordering::Acquire) {
            true => self.lease.unclear + 1 >= MAX_UNCLEAR_ASKS,
            false => self.lease.refused + 1 >= MAX_REFUSED_ASKS,
        };
        match (last, harness) {
            (false, _) => Stop::Failed(kind, reason),
            (true, "") => Stop::uncallable(reason),
            (true, harness) => Stop::Final(Failure::Harness {
                harness: harness.to_owned(),
                reason,
            }),
        }
    }

    /// The end of a lease that brought an answer, of whatever kind.
    pub(crate) fn end(&self, result: job_result::Result, spent_ms: u64, then: Then) -> End {
        let result = JobResult {
            token: self.lease.token,
            spent_ms,
            result: Some(result),
        };
        End {
            fact: Fact::Job(Box::new(result)),
            then,
        }
    }

    /// The end of a lease that gave the job up. `then`: of the sandbox, where it is to be asked again.
    pub(crate) fn given_up(&self, stop: Stop, then: Then) -> End {
        let (kind, reason, then) = match stop {
            Stop::Again { result, spent_ms } => return self.end(*result, spent_ms, then),
            Stop::Failed(kind, reason) => (kind, reason, Then::Destroy),
            // Where there is a newer one, this comes under an old token and is refused. Whose the sandbox is, only the scheduler can tell.
            Stop::Fenced => (
                AttemptFailureKind::SandboxLost,
                "its sandbox obeys a newer attempt".into(),
                Then::Keep,
            ),
            Stop::Final(failure) => (AttemptFailureKind::SandboxLost, failure.to_string(), Then::Destroy),
        };
        let reason = outcome::failure_text(&self.redactor.text(&reason));
        tracing::warn!(?kind, reason, "a job was given up");
        let failure = AttemptFailure {
            token: self.lease.token,
            kind: kind.into(),
            reason,
        };
        End {
            fact: Fact::Failure(failure),
            then,
        }
    }

    /// What asking has used. `asked`: this lease has asked. `None`: nobody did.
    pub(crate) fn spend(&self, model: &str, asked: bool, usage: Option<JudgeUsage>) -> Option<ModelSpend> {
        (asked || self.lease.unclear > 0).then(|| ModelSpend {
            model: model.to_owned(),
            // An answer that was lost has used what nobody knows.
            usage: usage.map(told),
        })
    }

    /// Keeps the record of a judgment with the job's result: in it where it is short, else as an object.
    pub(crate) async fn keep(&self, value: &impl Serialize) -> Result<Evidence, ObjectError> {
        let bytes = json(value);
        let place = match bytes.len() {
            ..=INLINE_JUDGMENT_BYTES => Place::Inline(bytes),
            _ => Place::Object(self.worker.objects.put(&self.lease.organization_id, bytes).await?),
        };
        Ok(Evidence { place: Some(place) })
    }
}

fn told(usage: JudgeUsage) -> Usage {
    Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        total_tokens: usage.total_tokens,
        cost_usd: usage.cost_usd.map(|cost| cost.0),
        cache_write_1h_tokens: usage.cache_write_1h_tokens,
    }
}

pub(crate) fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value)
        .expect("our own types have string keys and no failing serializers")
        .into()
}

#[expect(
    clippy::disallowed_methods,
    reason = "an I/O edge: when something was asked, and deadlines told to agents"
)]
pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
