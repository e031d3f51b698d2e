//! What follows from what judge runners say: jobs are leased, asked, refused for now, lost and answered, and a trial whose judges have all answered
//! has its verdict.

use bytes::Bytes;
use evalgrid_domain::{
    judge, limits,
    outcome::{self, EXIT_NOT_SCORED},
    person,
};
use evalgrid_proto::{
    log::v1::{
        self as log, Event,
        event::Kind,
        job_answered::Answer,
        job_ended::{self, Why},
    },
    v1::{self, AttemptFailureKind, JudgeVerdict, TrialOutcome, TrialStatus, job_result},
};
use prost::Message as _;

use crate::{
    admission::{MAX_RETRY_AFTER_MS, MIN_RETRY_AFTER_MS},
    apply::trial_ref,
    chance::Chance,
    custody::sandbox_name,
    decide::{Holder, MAX_IDLE_LEASES, MAX_STEP_RESULT_BYTES, RETRY_DELAY_MS, Refusal, event, fruitless_delay_ms, settled},
    faults::{self, Fault},
    jobs::{Job, JobPhase, Judging, Part, Target, job_ref},
    state::{Batch, Phase, State, Trial, TrialKey},
};

/// The pause after a refusal that names no time; each next one is three times as long.
const REFUSED_DELAY_MS: u64 = 2_000;

/// The verdict of a trial's worker where judges have a say: they are asked now. `None` where the case has none, or the trial cannot be scored anyway.
pub(crate) fn checked(state: &State, key: TrialKey, token: u64, outcome: &TrialOutcome, chance: &mut Chance, now_ms: u64) -> Option<Event> {
    let passed = match outcome.status() {
        TrialStatus::Passed => true,
        TrialStatus::Failed => false,
        _ => return None,
    };
    (state.judges_of(key) > 0).then(|| {
        let outcome = TrialOutcome {
            checks_passed: Some(passed),
            ..outcome.clone()
        };
        let checked = log::TrialChecked {
            trial: trial_ref(key),
            token,
            outcome: Some(outcome),
            sandbox_kept_until_ms: None,
            nonce: nonce(chance),
        };
        event(now_ms, Kind::TrialChecked(checked))
    })
}

fn nonce(chance: &mut Chance) -> Bytes {
    let halves = [chance.below(u64::MAX), chance.below(u64::MAX)];
    halves.iter().flat_map(|half| half.to_be_bytes()).collect()
}

/// The agent has answered, and its person speaks next.
pub fn awaits_reply(state: &State, worker_id: &str, awaits: v1::AwaitsReply, chance: &mut Chance, now_ms: u64) -> Result<Event, Refusal> {
    let target = target_of(state, worker_id, awaits.token, |part| part == Part::Trial)?;
    let batch = state.batch(&target.trial.batch).ok_or(Refusal::Stale)?;
    let person = Target {
        part: Part::Reply,
        ..target
    };
    if batch.answerer(person).is_none() {
        return Err(Refusal::StepLimit("the case has no person who could reply".into()));
    }
    let conversation = awaits.conversation.unwrap_or_default();
    within(conversation.encoded_len(), "a conversation")?;
    let awaited = log::ReplyAwaited {
        trial: trial_ref(target.trial),
        token: awaits.token,
        turn: awaits.turn,
        conversation: Some(conversation),
        nonce: nonce(chance),
    };
    Ok(event(now_ms, Kind::ReplyAwaited(awaited)))
}

/// Gives a waiting job to a judge runner. Past the bound of fruitless leases it is answered with that instead.
pub fn grant_job(state: &State, target: Target, holder: Holder<'_>, now_ms: u64) -> Option<Event> {
    let batch = state.batch(&target.trial.batch)?;
    let trial = batch.trial(target.trial)?;
    let job = trial.job(target.part)?;
    let answerer = batch.answerer(target)?;
    if job.idle_leases >= MAX_IDLE_LEASES {
        let text = format!("the judge runner stopped {MAX_IDLE_LEASES} times in a row while it worked on this");
        return given_up(batch, trial, target, &text, now_ms);
    }
    let token = state.last_token.max(state.token_floor) + 1;
    let there = trial.sandbox_of(target.part);
    let (sandbox, adopt) = match (answerer.harness.is_empty(), there) {
        (true, _) => (String::new(), false),
        (false, Some(name)) => (name.to_owned(), true),
        (false, None) => (sandbox_name(target.trial, token), false),
    };
    let leased = log::JobLeased {
        token,
        job: job_ref(target, Some(trial)),
        worker_id: holder.worker_id.to_owned(),
        incarnation: holder.incarnation.to_owned(),
        boot_id: holder.boot_id.to_owned(),
        sandbox,
        adopt,
    };
    Some(event(now_ms, Kind::JobLeased(leased)))
}

/// The end of a job that no judge runner brings to one.
fn given_up(batch: &Batch, trial: &Trial, target: Target, reason: &str, now_ms: u64) -> Option<Event> {
    let answerer = batch.answerer(target)?;
    let answer = match target.part {
        Part::Trial => return None,
        Part::Judge(index) => Answer::Judged(v1::Judged {
            index: index.into(),
            name: answerer.name.clone(),
            verdict: JudgeVerdict::Error.into(),
            error: reason.to_owned(),
            ..v1::Judged::default()
        }),
        Part::Reply => Answer::Replied(v1::Replied {
            record: person::ReplyRecord::stopped(reason).to_json().into(),
            failed: true,
            ..v1::Replied::default()
        }),
    };
    let answered = log::JobAnswered {
        job: job_ref(target, Some(trial)),
        token: trial.job(target.part)?.token().unwrap_or(0),
        answer: Some(answer),
    };
    Some(event(now_ms, Kind::JobAnswered(answered)))
}

/// What follows may be answered without anybody knowing. `None`: that is known already.
pub fn job_asked(state: &State, worker_id: &str, token: u64, now_ms: u64) -> Result<Option<Event>, Refusal> {
    let target = target_of(state, worker_id, token, |part| part != Part::Trial)?;
    let asked = state.trial(target.trial).and_then(|trial| Some(trial.job(target.part)?.asked));
    Ok((asked == Some(false)).then(|| event(now_ms, Kind::JobAsked(log::JobAsked { token }))))
}

/// What came of a job's lease.
pub fn job_result(state: &State, worker_id: &str, result: v1::JobResult, chance: &mut Chance, now_ms: u64) -> Result<Event, Refusal> {
    let token = result.token;
    let target = target_of(state, worker_id, token, |part| part != Part::Trial)?;
    let trial = state.trial(target.trial).ok_or(Refusal::Stale)?;
    let job = trial.job(target.part).ok_or(Refusal::Stale)?;
    let end = JobEnd {
        token,
        target,
        spent_ms: result.spent_ms,
        ..JobEnd::new(token, target, Why::Unclear)
    };
    match (result.result, target.part) {
        (Some(job_result::Result::Judged(judged)), Part::Judge(index)) if judged.index == u32::from(index) => {
            within(judged.encoded_len(), "a judgment")?;
            if matches!(judged.verdict(), JudgeVerdict::Unspecified | JudgeVerdict::Skipped) {
                return Err(Refusal::StepLimit("a judgment without a verdict".into()));
            }
            Ok(answered(trial, target, token, Answer::Judged(judged), now_ms))
        }
        (Some(job_result::Result::Replied(replied)), Part::Reply) => {
            within(replied.encoded_len(), "a reply")?;
            limits::STEPS_PER_TRIAL
                .check(trial.steps.len() as u64 + 1)
                .and(limits::RECORDED_BYTES_PER_TRIAL.check(trial.recorded_bytes() + replied.record.len() as u64))
                .map_err(Refusal::Full)?;
            Ok(answered(trial, target, token, Answer::Replied(replied), now_ms))
        }
        (Some(job_result::Result::NotNow(not_now)), _) => {
            let pause_ms = match not_now.retry_after_ms {
                0 => REFUSED_DELAY_MS * 3_u64.pow(job.refused.min(8)),
                asked => asked,
            };
            let until_ms = now_ms + pause_ms.clamp(MIN_RETRY_AFTER_MS, MAX_RETRY_AFTER_MS);
            let end = JobEnd {
                why: Why::NotNow,
                reason: outcome::failure_text(&not_now.reason),
                // All of them were told the same time: up to a quarter later, not all at once.
                not_before_ms: until_ms + chance.below((until_ms - now_ms) / 4),
                throttled_until_ms: until_ms,
                ..end
            };
            Ok(end.event(trial, now_ms))
        }
        (Some(job_result::Result::Unclear(unclear)), _) => {
            let end = JobEnd {
                reason: outcome::failure_text(&unclear.reason),
                not_before_ms: now_ms + RETRY_DELAY_MS + chance.below(RETRY_DELAY_MS),
                ..end
            };
            Ok(end.event(trial, now_ms))
        }
        _ => Err(Refusal::StepLimit("an answer to another question".into())),
    }
}

fn answered(trial: &Trial, target: Target, token: u64, answer: Answer, now_ms: u64) -> Event {
    let answered = log::JobAnswered {
        job: job_ref(target, Some(trial)),
        token,
        answer: Some(answer),
    };
    event(now_ms, Kind::JobAnswered(answered))
}

/// A judge runner gives a job up: it stops, or its sandbox is gone or could not be made.
pub(crate) fn job_failed(
    state: &State,
    target: Target,
    failure: &v1::AttemptFailure,
    chance: &mut Chance,
    now_ms: u64,
) -> Result<Event, Refusal> {
    let trial = state.trial(target.trial).ok_or(Refusal::Stale)?;
    let why = match failure.kind() {
        AttemptFailureKind::Released => Why::Released,
        AttemptFailureKind::SandboxLost | AttemptFailureKind::SandboxUnavailable | AttemptFailureKind::Unspecified => Why::SandboxLost,
    };
    let not_before_ms = match why {
        Why::Released => 0,
        _ => now_ms + RETRY_DELAY_MS + chance.below(RETRY_DELAY_MS),
    };
    let end = JobEnd {
        reason: outcome::failure_text(&failure.reason),
        not_before_ms,
        ..JobEnd::new(failure.token, target, why)
    };
    Ok(end.event(trial, now_ms))
}

/// A job's lease ended without its worker's word.
pub(crate) fn job_fruitless(state: &State, token: u64, target: Target, why: Why, chance: &mut Chance, now_ms: u64) -> Option<Event> {
    let trial = state.trial(target.trial)?;
    let idle_leases = trial.job(target.part)?.idle_leases;
    let end = JobEnd {
        not_before_ms: now_ms + fruitless_delay_ms(idle_leases, chance),
        ..JobEnd::new(token, target, why)
    };
    Some(end.event(trial, now_ms))
}

/// Jobs that wait for a judge runner which has their sandbox and stays away past the grace: they are asked anew elsewhere.
pub(crate) fn give_up_absent(state: &State, gone: &dyn Fn(&str) -> bool, grace_ms: u64, now_ms: u64) -> Vec<Event> {
    let stranded = state.custody().filter_map(|(name, sandbox)| {
        let trial = state.trial(sandbox.trial)?;
        let part = trial.lives_in(name).filter(|part| *part != Part::Trial)?;
        let JobPhase::Waits { since_ms, .. } = trial.job(part)?.phase else {
            return None;
        };
        let target = Target {
            trial: sandbox.trial,
            part,
        };
        (since_ms + grace_ms <= now_ms && gone(&sandbox.worker_id)).then(|| {
            let end = JobEnd {
                reason: format!("no word from the judge runner for {}", outcome::humanise_duration(grace_ms)),
                ..JobEnd::new(0, target, Why::SandboxLost)
            };
            end.event(trial, now_ms)
        })
    });
    stranded.collect()
}

/// The verdict of a trial whose judges have all answered; `None` as long as one has not.
pub(crate) fn verdict(state: &State, key: TrialKey, now_ms: u64) -> Option<Event> {
    let Phase::Judging(judging) = &state.trial(key)?.phase else {
        return None;
    };
    let judged: Option<Vec<&v1::Judged>> = judging.jobs.iter().map(Job::judged).collect();
    let judged = judged?;
    let mut outcome = TrialOutcome {
        judged: judged.iter().map(|judged| (*judged).clone()).collect(),
        ..judging.outcome.clone()
    };
    let error = judged.iter().find(|judged| judged.verdict() == JudgeVerdict::Error);
    let failed = judged.iter().any(|judged| judged.verdict() != JudgeVerdict::Passed);
    match error {
        Some(judged) if !faults::active(Fault::ErrorFailsTrial) => {
            outcome.status = TrialStatus::Void.into();
            outcome.exit_code = EXIT_NOT_SCORED;
            outcome.failure = Some(judge::trial_failure(&judged.name, &judged.error));
            outcome.void_fields = vec!["validator".into()];
        }
        _ if failed || judging.outcome.checks_passed == Some(false) => {
            outcome.status = TrialStatus::Failed.into();
            outcome.exit_code = 1;
        }
        _ => {
            outcome.status = TrialStatus::Passed.into();
            outcome.exit_code = 0;
        }
    }
    Some(settled(key, 0, outcome, now_ms))
}

/// What is known of a trial that ends while it is being judged: of a judge that was being asked, that no answer of it was waited for; of one whose
/// turn had not come, that it was skipped.
pub(crate) fn cut_short(batch: &Batch, key: TrialKey, judging: &Judging, failure: &str) -> TrialOutcome {
    let judged = (0u8..).zip(&judging.jobs).map(|(index, job)| {
        if let Some(judged) = job.judged() {
            return judged.clone();
        }
        let target = Target {
            trial: key,
            part: Part::Judge(index),
        };
        let answerer = batch.answerer(target);
        let (verdict, when) = match job.has_begun() {
            true => (JudgeVerdict::Error, "had answered"),
            false => (JudgeVerdict::Skipped, "was asked"),
        };
        v1::Judged {
            index: index.into(),
            name: answerer.map_or_else(String::new, |answerer| answerer.name.clone()),
            verdict: verdict.into(),
            error: outcome::failure_text(&format!("the trial ended before this judge {when}: {failure}")),
            // An answer that nobody waits for has used what nobody knows.
            spend: answerer.filter(|_| job.may_have_spent()).map(|answerer| v1::ModelSpend {
                model: answerer.model.clone(),
                usage: None,
            }),
            ..v1::Judged::default()
        }
    });
    TrialOutcome {
        judged: judged.collect(),
        ..judging.outcome.clone()
    }
}

/// What is one message must fit into one.
fn within(bytes: usize, what: &str) -> Result<(), Refusal> {
    match bytes <= MAX_STEP_RESULT_BYTES {
        true => Ok(()),
        false => Err(Refusal::StepLimit(format!(
            "{what} has {bytes} bytes, the limit is {MAX_STEP_RESULT_BYTES}"
        ))),
    }
}

/// What a living lease of this worker is for.
pub(crate) fn target_of(state: &State, worker_id: &str, token: u64, fits: impl Fn(Part) -> bool) -> Result<Target, Refusal> {
    let lease = state.lease(token).filter(|lease| lease.worker_id == worker_id && fits(lease.part));
    lease.map(|lease| lease.target()).ok_or(Refusal::Stale)
}

/// How a job's lease ends without an answer.
struct JobEnd {
    token: u64,
    target: Target,
    why: job_ended::Why,
    reason: String,
    not_before_ms: u64,
    spent_ms: u64,
    throttled_until_ms: u64,
}

impl JobEnd {
    fn new(token: u64, target: Target, why: job_ended::Why) -> JobEnd {
        JobEnd {
            token,
            target,
            why,
            reason: String::new(),
            not_before_ms: 0,
            spent_ms: 0,
            throttled_until_ms: 0,
        }
    }

    fn event(self, trial: &Trial, now_ms: u64) -> Event {
        let ended = log::JobEnded {
            token: self.token,
            why: self.why.into(),
            reason: self.reason,
            not_before_ms: self.not_before_ms,
            spent_ms: self.spent_ms,
            throttled_until_ms: self.throttled_until_ms,
            job: job_ref(self.target, Some(trial)),
        };
        event(now_ms, Kind::JobEnded(ended))
    }
}
