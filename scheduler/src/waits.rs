//! What trials wait for, and who is being asked about them, in words for people.

use std::collections::{BTreeMap, BTreeSet};

use evalgrid_domain::outcome::humanise_duration;
use evalgrid_proto::v1::{AnswererInfo, Missing, WorkerRole};
use evalgrid_workflow::{Batch, Job, JobPhase, Part, Phase, Target, TrialKey, jobs};

use crate::engine::Core;

/// How long jobs wait for a kind of judge runner before the operator is told that there is none: after a restart of the scheduler, those that are
/// there have come back by then.
const MISSED_AFTER_MS: u64 = 5_000;

/// Who is being asked about a trial now, in words.
#[derive(Default)]
pub struct Asked {
    /// Its judges.
    pub judges: Vec<String>,
    /// Who plays its person; empty where nobody is asked.
    pub person: String,
}

/// Whose lease on a job of the trial lives, since when, and what came of earlier asks.
pub fn asked(core: &Core, batch: &Batch, key: TrialKey) -> Asked {
    let mut asked = Asked::default();
    for (part, job) in batch.trial(key).into_iter().flat_map(|trial| trial.jobs()) {
        let JobPhase::Leased { token, since_ms } = job.phase else {
            continue;
        };
        let Some(answerer) = batch.answerer(Target { trial: key, part }) else {
            continue;
        };
        let mut said = vec![match since_ms {
            0 => who(part, answerer),
            since_ms => format!("{}, for {}", who(part, answerer), seconds(core.now_ms().saturating_sub(since_ms))),
        }];
        said.extend(earlier(job).map(|met| format!("before that {met}")));
        let away = core.state.lease(token).filter(|lease| !core.sessions.is_here(&lease.worker_id));
        said.extend(away.map(|lease| format!("its judge runner {} is not connected", lease.worker_id)));
        match part {
            Part::Reply => asked.person = said.join("; "),
            Part::Judge(_) | Part::Trial => asked.judges.push(said.join("; ")),
        }
    }
    asked
}

/// Whom a trial, or each of its jobs, waits for, and whether there is one. `None`: nobody waits.
pub fn waits_for(core: &Core, batch: &Batch, key: TrialKey) -> Option<String> {
    let trial = batch.trial(key).filter(|_| batch.local.is_none())?;
    match &trial.phase {
        Phase::Queued { .. } => {
            let provider = batch.variants.get(batch.coordinates(key.run).1)?.provider.as_str();
            Some(place_at(core, WorkerRole::Executor, provider))
        }
        Phase::Conversing(_) | Phase::Judging(_) => {
            let mut waits = Vec::new();
            for (part, job) in trial.jobs() {
                let wait = job_waits_for(core, batch, Target { trial: key, part }, job);
                // Without a judge runner all of them wait for the same.
                waits.extend(wait.filter(|wait| !waits.contains(wait)));
            }
            (!waits.is_empty()).then(|| waits.join("; "))
        }
        Phase::Leased { .. } | Phase::Settled(_) => None,
    }
}

fn job_waits_for(core: &Core, batch: &Batch, target: Target, job: &Job) -> Option<String> {
    let JobPhase::Waits { not_before_ms, .. } = job.phase else {
        return None;
    };
    let now_ms = core.now_ms();
    let trial = batch.trial(target.trial)?;
    let answerer = batch.answerer(target)?;
    let who = who(target.part, answerer);
    if not_before_ms > now_ms {
        let pause = seconds(not_before_ms - now_ms);
        return Some(match earlier(job) {
            Some(met) => format!("{who}: {met}, next try in {pause}"),
            None if job.idle_leases > 0 => format!("{who}: its judge runner stopped before it asked, next try in {pause}"),
            // The only pause before the first ask.
            None => format!("the end of the trial's sandbox, for {pause} at most"),
        });
    }
    let custody = trial.sandbox_of(target.part).and_then(|name| core.state.sandbox(name));
    if let Some(sandbox) = custody.filter(|sandbox| !core.sessions.is_here(&sandbox.worker_id)) {
        return Some(format!(
            "{who}: the judge runner {}, which has its sandbox and is not connected",
            sandbox.worker_id
        ));
    }
    let provider = provider_of(batch, target)?;
    let place = place_at(core, WorkerRole::JudgeRunner, provider);
    let model_key = jobs::model_key(target.part, answerer);
    let closed = core.sessions.offers(WorkerRole::JudgeRunner, provider) && !core.state.model_open(&model_key, now_ms);
    Some(match earlier(job) {
        _ if closed => format!("{who}: the limit of {model_key}, which is reached or was cut"),
        Some(met) => format!("{who}: {met}; next try with {place}"),
        None => place,
    })
}

/// What kinds of judge runners a batch's trials wait for, of which none is connected.
pub fn missing(core: &Core, batch: &Batch) -> Vec<Missing> {
    let mut trials: BTreeMap<&str, u32> = BTreeMap::new();
    for (key, trial) in batch.trials() {
        let waiting = trial.jobs().filter(|(_, job)| matches!(job.phase, JobPhase::Waits { .. }));
        let providers = waiting.filter_map(|(part, _)| provider_of(batch, Target { trial: key, part }));
        for provider in providers.collect::<BTreeSet<_>>() {
            *trials.entry(provider).or_default() += 1;
        }
    }
    let mut trials: Vec<_> = trials.into_iter().collect();
    trials.retain(|(provider, _)| !core.sessions.offers(WorkerRole::JudgeRunner, provider));
    let missing = trials.into_iter().map(|(provider, trials)| Missing {
        what: kind(WorkerRole::JudgeRunner, provider),
        trials,
    });
    missing.collect()
}

/// What the operator was told of jobs that nobody can take. Each kind of judge runner is missed once, however many jobs wait for it.
#[derive(Default)]
pub struct Missed {
    /// Since when jobs have waited for a kind that is not connected, steady milliseconds; by the provider of its sandboxes.
    since_ms: BTreeMap<String, u64>,
    /// Those that the operator knows of.
    told: BTreeSet<String>,
}

impl Missed {
    /// The kinds that the operator knows of, by the provider of their sandboxes.
    #[cfg(test)]
    pub fn told(&self) -> impl Iterator<Item = &String> {
        self.told.iter()
    }
}

/// Tells the operator what is missed, and what has come. To be called now and then.
pub fn tell_missed(core: &mut Core) {
    let steady_ms = core.steady_ms();
    let waited_for = core.state.judge_runners_waited_for(core.now_ms());
    let here = |provider: &str| core.sessions.offers(WorkerRole::JudgeRunner, provider);
    let lacking: Vec<String> = waited_for.into_iter().filter(|provider| !here(provider)).collect();
    let come: Vec<String> = core
        .sessions
        .missed
        .told
        .iter()
        .filter(|provider| here(provider))
        .cloned()
        .collect();
    let missed = &mut core.sessions.missed;
    for provider in come {
        tracing::info!(
            "{} is connected: jobs that waited for it are taken",
            kind(WorkerRole::JudgeRunner, &provider)
        );
        missed.told.remove(&provider);
    }
    missed.since_ms.retain(|provider, _| lacking.contains(provider));
    for provider in lacking {
        let since_ms = *missed.since_ms.entry(provider.clone()).or_insert(steady_ms);
        if since_ms + MISSED_AFTER_MS <= steady_ms && missed.told.insert(provider.clone()) {
            tracing::warn!(
                "judgments or replies wait for {}, and none is connected (evalgrid judge-runner)",
                kind(WorkerRole::JudgeRunner, &provider)
            );
        }
    }
}

/// A worker that could take it, and whether there is one.
fn place_at(core: &Core, role: WorkerRole, provider: &str) -> String {
    let kind = kind(role, provider);
    match core.sessions.offers(role, provider) {
        true => format!("a free place at {kind}"),
        false => format!("{kind}, and none is connected"),
    }
}

/// A kind of worker. `provider`: of its sandboxes; empty where any will do.
fn kind(role: WorkerRole, provider: &str) -> String {
    let who = match role {
        WorkerRole::JudgeRunner => "a judge runner",
        WorkerRole::Executor | WorkerRole::Unspecified => "an executor",
    };
    match provider {
        "" => who.to_owned(),
        provider => format!("{who} with {provider} sandboxes"),
    }
}

/// What kind of sandboxes a judge runner needs for a job; empty where it calls a model.
fn provider_of(batch: &Batch, target: Target) -> Option<&str> {
    let variant = batch.variants.get(batch.coordinates(target.trial.run).1)?;
    Some(match batch.answerer(target)?.harness.as_str() {
        "" => "",
        _ => variant.provider.as_str(),
    })
}

/// Who answers for a job.
fn who(part: Part, answerer: &AnswererInfo) -> String {
    let AnswererInfo {
        name,
        harness,
        provider,
        model,
    } = answerer;
    let through = if harness.is_empty() { provider } else { harness };
    match part {
        Part::Reply => format!("the person by {model} ({through})"),
        Part::Judge(_) | Part::Trial => format!("\"{name}\" by {model} ({through})"),
    }
}

/// How often it was tried without an answer, and what the last try met. `None`: not yet.
fn earlier(job: &Job) -> Option<String> {
    let times = match job.refused + job.unclear {
        0 => return None,
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        tries => format!("{tries} times"),
    };
    Some(match (job.reason.as_str(), job.refused, job.unclear) {
        ("", ..) => format!("tried {times}, by a judge runner that stopped"),
        (reason, _, 0) => format!("tried {times}: {reason}"),
        (reason, 0, _) => format!("tried {times}, without a known answer: {reason}"),
        // Which of them has the reason is not known: a judge runner that stops gives none.
        (reason, _, unclear) => format!("tried {times}, {unclear} without a known answer; last told: {reason}"),
    })
}

/// Whole ones: nobody waits for a judge by the millisecond.
fn seconds(ms: u64) -> String {
    humanise_duration(ms.div_ceil(1000) * 1000)
}
