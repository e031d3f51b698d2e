//! What readers see of a batch: the state of one moment as the messages of `client.proto`.

use evalgrid_domain::outcome::{self, Distribution};
use evalgrid_proto::v1::{self, BatchStatus, TrialStatus};

use crate::{
    decide, jobs,
    state::{Batch, BatchPhase, Phase, Trial, TrialKey},
};

/// The whole batch, or only the run at `only`.
pub fn batch(batch: &Batch, only: Option<u8>) -> v1::Batch {
    let (status, failure, finished_at_ms) = ending(batch);
    let positions = match only {
        Some(run) => run..run.saturating_add(1),
        None => 0..batch.runs.len() as u8,
    };
    v1::Batch {
        id: batch.id.to_string(),
        status: status.into(),
        failure,
        started_at_ms: batch.started_ms,
        finished_at_ms,
        trigger: batch.trigger.clone(),
        request: Some(batch.request.clone()),
        suite: Some(batch.suite.clone()),
        cases: batch.cases.clone(),
        variants: batch.variants.clone(),
        runs: positions.filter_map(|position| run(batch, position)).collect(),
        local: batch.local.is_some(),
        retry_of: batch.retry_of.map(|id| id.to_string()),
        regrade_of: batch.regrade_of.map(|id| id.to_string()),
    }
}

/// A line of the list.
pub fn summary(batch: &Batch) -> v1::BatchSummary {
    let (status, failure, finished_at_ms) = ending(batch);
    let all = distribution(batch.runs.iter().flat_map(|run| &run.trials));
    v1::BatchSummary {
        id: batch.id.to_string(),
        status: status.into(),
        failure,
        started_at_ms: batch.started_ms,
        finished_at_ms,
        trigger: batch.trigger.clone(),
        cases: batch.cases.len() as u32,
        runs: batch.runs.len() as u32,
        passed: all.passed,
        scored: all.scored,
        voided: all.voided,
        cancelled: all.cancelled,
        regrade_of: batch.regrade_of.map(|id| id.to_string()),
    }
}

/// The runs of a fresh start, in the documented order.
pub fn started(batch: &v1::Batch) -> v1::StartedBatch {
    let runs = batch.runs.iter().map(|run| v1::StartedRun {
        case_id: batch
            .cases
            .get(run.case_index as usize)
            .map(|case| case.id.clone())
            .unwrap_or_default(),
        id: run.id.clone(),
        variant_id: run.variant_id.clone(),
    });
    v1::StartedBatch {
        id: batch.id.clone(),
        runs: runs.collect(),
    }
}

/// Where one trial stands, for a watcher.
pub fn progress(batch: &Batch, key: TrialKey, trial: &Trial) -> v1::TrialProgress {
    let (case_index, variant_index) = batch.coordinates(key.run);
    v1::TrialProgress {
        case_index: case_index as u32,
        variant_index: variant_index as u32,
        ordinal: key.ordinal.into(),
        status: trial.status().into(),
        failure: trial.outcome().and_then(|outcome| outcome.failure.clone()),
        step: step(trial),
    }
}

/// What a trial is about: its newest recorded step, or what it waits for others to do.
fn step(trial: &Trial) -> String {
    match &trial.phase {
        Phase::Conversing(conversing) => jobs::reply_step(conversing.turn),
        Phase::Judging(judging) => {
            let open = judging.jobs.iter().position(|job| job.judged().is_none());
            format!("judge.{}", open.unwrap_or_default())
        }
        _ => trial.steps.last().map(|step| step.step.clone()).unwrap_or_default(),
    }
}

/// Status, failure and end of a batch.
pub fn ending(batch: &Batch) -> (BatchStatus, Option<String>, Option<u64>) {
    match &batch.phase {
        BatchPhase::Running => (BatchStatus::Running, None, None),
        BatchPhase::Ended {
            status, failure, at_ms, ..
        } => (*status, failure.clone(), Some(*at_ms)),
    }
}

fn run(batch: &Batch, position: u8) -> Option<v1::Run> {
    let state = batch.runs.get(usize::from(position))?;
    let (case, variant) = batch.coordinates(position);
    let (_, failure, _) = ending(batch);
    // A run that the batch's early end cut short: its trials say why in the batch's own words.
    let cut_short = |why: &String| {
        let mut outcomes = state.trials.iter().filter_map(Trial::outcome);
        outcomes.any(|outcome| outcome.failure.as_ref() == Some(why))
    };
    let status = match state.finished_ms {
        None => BatchStatus::Running,
        Some(_) if failure.as_ref().is_some_and(cut_short) => BatchStatus::Failed,
        Some(_) => BatchStatus::Finished,
    };
    Some(v1::Run {
        id: batch.run_id(position).to_string(),
        case_index: case as u32,
        variant_index: variant as u32,
        variant_id: batch.variant_ids[usize::from(position)].clone(),
        status: status.into(),
        finished_at_ms: state.finished_ms,
        distribution: Some(distribution(state.trials.iter())),
        trials: (1u8..)
            .zip(&state.trials)
            .map(|(ordinal, trial)| v1::Trial {
                id: TrialKey {
                    batch: batch.id,
                    run: position,
                    ordinal,
                }
                .id()
                .to_string(),
                ordinal: ordinal.into(),
                status: trial.status().into(),
                outcome: match &trial.phase {
                    Phase::Settled(outcome) => Some((**outcome).clone()),
                    _ => None,
                },
                attempts: trial.attempts,
                lost_attempts: lost_attempts(trial),
            })
            .collect(),
    })
}

/// Why attempts were lost, and, of a trial that is not over, how its leases keep ending.
fn lost_attempts(trial: &Trial) -> Vec<String> {
    let over = trial.idle_leases.saturating_sub(matches!(trial.phase, Phase::Leased { .. }).into());
    let repeated = (over > 1 && trial.outcome().is_none()).then(|| {
        let of = decide::MAX_IDLE_LEASES;
        format!(
            "{over} leases in a row ended without a recorded step, of at most {of}: {}",
            trial.idle_end
        )
    });
    trial.lost.iter().cloned().chain(repeated).collect()
}

/// Counts over settled trials.
pub fn distribution<'a>(trials: impl Iterator<Item = &'a Trial>) -> v1::Distribution {
    let outcomes: Vec<&v1::TrialOutcome> = trials.filter_map(Trial::outcome).collect();
    let counts = Distribution::of(outcomes.iter().map(|outcome| {
        let status = match outcome.status() {
            TrialStatus::Passed => outcome::TrialStatus::Passed,
            TrialStatus::Failed => outcome::TrialStatus::Failed,
            _ => outcome::TrialStatus::Void,
        };
        (status, u64::from(outcome.commands))
    }));
    v1::Distribution {
        trials: counts.trials as u32,
        scored: counts.scored as u32,
        passed: counts.passed as u32,
        failed: counts.failed as u32,
        voided: counts.voided as u32,
        cancelled: outcomes.iter().filter(|outcome| outcome.cancelled).count() as u32,
        pass_rate: counts.pass_rate.0,
        command_min: counts.command_min as u32,
        command_median: counts.command_median.0,
        command_max: counts.command_max as u32,
        deterministic: counts.deterministic,
    }
}
