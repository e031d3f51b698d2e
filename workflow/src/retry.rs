//! Running the unscored trials of an ended batch again, in a batch of its own: the old one stays as it was, and the new one is whole, because
//! what was scored is taken over with its evidence.

use evalgrid_domain::ids::RunId;
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, BatchStatus, TrialStatus},
};

use crate::decide::Refusal;

/// What a retry of `batch` takes over: every scored trial.
pub fn carried(batch: &v1::Batch) -> Result<Vec<log::CarriedTrial>, Refusal> {
    if batch.local {
        return Err(Refusal::LocalRetry);
    }
    if batch.status() == BatchStatus::Running {
        return Err(Refusal::StillRunning);
    }
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
