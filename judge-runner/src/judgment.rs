//! A judgment: what the judge is shown, the ask, and the record of what it said.

use std::{collections::BTreeMap, time::Duration};

use evalgrid_domain::{
    answerer::Failure,
    evidence::{TrialEvidence, ValidationValue},
    judge::{self, Answer, Asked, Concluded, Place, Question, Verdict, question, read_answer},
    outcome, prompt,
    request::{Case, Harness, Judge, JudgeBy, JudgedValidator, SuiteBatchRequest, Validator},
};
use evalgrid_proto::v1::{JudgeJob, JudgeVerdict, Judged, job_result};
use evalgrid_worker::{End, Then};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::{
    harness::{self, Talk},
    job::{Answered, Job, Stop, now_ms},
    model::Ended,
    openai,
};

/// The answer in what a judge has said, or why there is none.
pub fn answer(judge: &Judge, said: Result<String, Failure>) -> Result<Answer, Failure> {
    Ok(read_answer(judge, &said?)?)
}

/// What is kept beside an answer, to find it again: what the provider or the harness said about it, and the hash of the question.
pub fn metadata(question: &Question, mut said: Map<String, Value>) -> Value {
    let hash = Sha256::digest(judge::prompt(question));
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    said.insert("questionSha256".into(), hash.into());
    Value::Object(said)
}

/// How an agent that judges is asked. `prompt`: what [`judge::prompt`] makes of the question. `left`: what of the judge's time is left.
pub(crate) fn talk<'a>(
    judge: &'a Judge,
    harness: Harness,
    credential: &'a BTreeMap<String, String>,
    prompt: &'a str,
    left: Duration,
) -> Talk<'a> {
    Talk {
        harness: harness.name(),
        model: &judge.model,
        credential,
        step: harness::JUDGE_STEP,
        number: 1,
        prompt,
        session_id: None,
        limit_ms: judge.timeout_ms.into(),
        left,
    }
}

/// Asks the judge of a lease.
pub(crate) async fn run(job: &Job<'_>, judgment: &JudgeJob) -> End {
    let request = match job.request().await.map_err(|stop| job.settled(stop, "")) {
        Ok(request) => request,
        Err(Stop::Final(failure)) => return nameless(job, judgment, &failure),
        Err(stop) => return job.given_up(stop, Then::Destroy),
    };
    let Some(found) = Found::of(&request, job.lease.case_index, judgment.index) else {
        let failure = Failure::Uncallable {
            reason: "the start request has no such judge".into(),
        };
        return nameless(job, judgment, &failure);
    };
    found.judged(job, judgment).await
}

/// The end of a judgment whose judge nobody can know: not even its name is there.
fn nameless(job: &Job<'_>, judgment: &JudgeJob, failure: &Failure) -> End {
    let judged = Judged {
        index: judgment.index,
        verdict: JudgeVerdict::Error.into(),
        error: outcome::failure_text(&job.redactor.text(&failure.to_string())),
        ..Judged::default()
    };
    job.end(job_result::Result::Judged(judged), 0, Then::Destroy)
}

/// The judge, and what it stands in.
struct Found<'a> {
    request: &'a SuiteBatchRequest,
    case: &'a Case,
    validator: &'a JudgedValidator,
    judge: &'a Judge,
}

impl<'a> Found<'a> {
    fn of(request: &'a SuiteBatchRequest, case: u32, judge: u32) -> Option<Self> {
        let case = request.cases.get(case as usize)?;
        let Some(Validator::Judged(validator)) = &case.validator else {
            return None;
        };
        Some(Self {
            request,
            case,
            validator,
            judge: validator.judges.get(judge as usize)?,
        })
    }

    async fn judged(&self, job: &Job<'_>, judgment: &JudgeJob) -> End {
        let harness = match self.judge.by {
            JudgeBy::Harness { harness } => harness.name(),
            JudgeBy::Provider { .. } => "",
        };
        let mut shown = None;
        let asked = self.ask(job, judgment, &mut shown).await.map_err(|stop| job.settled(stop, harness));
        let (ended, started_at_ms, spent_ms, has_asked) = match asked {
            Ok(Answered {
                ended,
                started_at_ms,
                spent_ms,
                ..
            }) => (ended, started_at_ms, spent_ms, true),
            Err(Stop::Final(failure)) => (Ended::failed(failure), now_ms(), 0, false),
            Err(stop) => return job.given_up(stop, Then::Destroy),
        };
        let spend = job.spend(&self.judge.model, has_asked, ended.usage);
        let asked = Asked {
            started_at_ms,
            duration_ms: job.lease.spent_ms + spent_ms,
            question: shown.as_ref(),
            raw: ended.raw.as_deref(),
            metadata: shown.as_ref().map(|question| metadata(question, ended.metadata)),
            usage: ended.usage,
        };
        let place = Place {
            judge: judgment.index,
            validation: judgment.validation_index.into(),
        };
        let capture = self.validator.capture.unwrap_or(true);
        let concluded = judge::conclude(self.judge, place, asked, answer(self.judge, ended.said), capture, &job.redactor);
        let judged = self.record(job, judgment, concluded, spend).await;
        job.end(job_result::Result::Judged(judged), spent_ms, Then::Destroy)
    }

    async fn ask(&self, job: &Job<'_>, judgment: &JudgeJob, shown: &mut Option<Question>) -> Result<Answered, Stop> {
        let judge = self.judge;
        job.may_ask(judge.by.evaluator())?;
        let evidence: TrialEvidence = job.read(judgment.evidence.as_ref()).await?;
        let rendered = prompt::render(&self.request.suite.prompt, &self.case.variables);
        let material = judge::material(&rendered, &evidence, judge, &job.redactor).map_err(Failure::from)?;
        let question = &*shown.insert(question(judge, &material, &job.lease.nonce));
        let limit_ms = judge.timeout_ms.into();
        match judge.by {
            JudgeBy::Provider { .. } => {
                job.ask_model(limit_ms, |endpoint, terms| openai::judge(job.http, endpoint, question, terms))
                    .await
            }
            JudgeBy::Harness { harness } => {
                let prompt = judge::prompt(question);
                let talk = talk(judge, harness, &job.credential, &prompt, job.left(limit_ms)?);
                harness::ask(job, talk, talk.left + harness::LIFETIME_MARGIN).await
            }
        }
    }

    /// What is reported of a judgment. The answer is paid for: where its record cannot be stored, it is reported with a record without values.
    async fn record(
        &self,
        job: &Job<'_>,
        judgment: &JudgeJob,
        concluded: Concluded,
        spend: Option<evalgrid_proto::v1::ModelSpend>,
    ) -> Judged {
        let mut validation = concluded.validation;
        let mut kept = job.keep(&validation).await;
        if let Err(error) = &kept {
            tracing::warn!(%error, "a judgment's record cannot be stored, and goes without what the judge was given and gave");
            for value in [&mut validation.input, &mut validation.output] {
                *value = ValidationValue::unavailable();
            }
            validation.metadata = None;
            validation.truncated = true;
            kept = job.keep(&validation).await;
        }
        Judged {
            index: judgment.index,
            name: self.judge.name.clone(),
            verdict: match concluded.verdict {
                Verdict::Passed => JudgeVerdict::Passed,
                Verdict::Failed => JudgeVerdict::Failed,
                Verdict::Error => JudgeVerdict::Error,
            }
            .into(),
            choice: concluded.choice,
            score: concluded.score,
            error: concluded.error,
            validation: kept.ok(),
            spend,
        }
    }
}
