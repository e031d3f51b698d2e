//! Batches that go on from an ended one, which stays as it was: a retry runs its unscored trials again, a regrade asks its judges again. The new
//! one is whole, because everything else is taken over with its evidence.

use evalgrid_domain::ids::RunId;
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, BatchStatus, JudgeVerdict, TrialStatus},
};

use crate::decide::Refusal;

/// Whether another batch may take something over from this one.
pub fn may_be_continued(batch: &v1::Batch) -> Result<(), Refusal> {
    if batch.local {
        return Err(Refusal::LocalRetry);
    }
    match batch.status() {
        BatchStatus::Running => Err(Refusal::StillRunning),
        _ => Ok(()),
    }
}

/// What a retry of `batch` takes over: every scored trial.
pub fn carried(batch: &v1::Batch) -> Result<Vec<log::CarriedTrial>, Refusal> {
    may_be_continued(batch)?;
    let mut carried = Vec::new();
    let mut unscored = 0;
    for run in &batch.runs {
        let position = run.id.parse::<RunId>().map_err(|_| Refusal::NoBatch)?.run;
        for trial in &run.trials {
            match &trial.outcome {
                Some(outcome) if is_scored(outcome.status()) => carried.push(log::CarriedTrial {
                    run: position.into(),
                    ordinal: trial.ordinal,
                    outcome: Some(v1::TrialOutcome {
                        carried: true,
                        ..outcome.clone()
                    }),
                }),
                _ => unscored += 1,
            }
        }
    }
    match unscored {
        0 => Err(Refusal::NothingUnscored),
        _ => Ok(carried),
    }
}

/// What a regrade of `batch` takes over: every trial, with what its checks said where its judges are asked again. `judged` tells of which cases they are.
pub fn regraded(batch: &v1::Batch, judged: &[bool]) -> Result<Vec<log::CarriedTrial>, Refusal> {
    may_be_continued(batch)?;
    let mut carried = Vec::new();
    let mut asked = 0;
    for run in &batch.runs {
        let position = run.id.parse::<RunId>().map_err(|_| Refusal::NoBatch)?.run;
        let judges = judged.get(run.case_index as usize) == Some(&true);
        for trial in &run.trials {
            let outcome = trial.outcome.clone().unwrap_or_default();
            let checks = match (outcome.checks_passed, outcome.status()) {
                (Some(true), _) | (None, TrialStatus::Passed) => Some(TrialStatus::Passed),
                (Some(false), _) | (None, TrialStatus::Failed) => Some(TrialStatus::Failed),
                // It never came to a verdict, so there is nothing to judge.
                (None, _) => None,
            };
            let outcome = match checks.filter(|_| judges) {
                Some(checks) => {
                    asked += 1;
                    ungraded(outcome, checks)
                }
                None => outcome,
            };
            carried.push(log::CarriedTrial {
                run: position.into(),
                ordinal: trial.ordinal,
                outcome: Some(v1::TrialOutcome {
                    carried: true,
                    // That was the old batch. This one is not.
                    cancelled: false,
                    ..outcome
                }),
            });
        }
    }
    match asked {
        0 => Err(Refusal::NothingToJudge),
        _ => Ok(carried),
    }
}

/// An outcome as it was before its judges were asked, and what they made of it.
fn ungraded(outcome: v1::TrialOutcome, checks: TrialStatus) -> v1::TrialOutcome {
    let judged = outcome.judged.iter().filter(|judged| judged.verdict() != JudgeVerdict::Skipped);
    let marks = judged.map(|judged| v1::Judged {
        validation: None,
        spend: None,
        ..judged.clone()
    });
    let before = v1::Before {
        status: outcome.status,
        judged: marks.collect(),
    };
    v1::TrialOutcome {
        status: checks.into(),
        exit_code: i32::from(checks == TrialStatus::Failed),
        checks_passed: Some(checks == TrialStatus::Passed),
        failure: None,
        void_fields: Vec::new(),
        judged: Vec::new(),
        before: Some(before),
        ..outcome
    }
}

/// How many trials of a batch that regrades another have their judges asked.
pub(crate) fn judged(started: &log::BatchStarted) -> usize {
    let variants = started.variants.len().max(1);
    let judges = |run: u32| {
        started
            .cases
            .get(run as usize / variants)
            .is_some_and(|case| !case.judges.is_empty())
    };
    let carried = started.carried.iter();
    carried
        .filter(|trial| judges(trial.run) && trial.outcome.as_ref().is_some_and(|outcome| is_scored(outcome.status())))
        .count()
}

pub(crate) fn is_scored(status: TrialStatus) -> bool {
    matches!(status, TrialStatus::Passed | TrialStatus::Failed)
}
