//! Single trials for the operator: where one stands, and its end by hand where nothing else ends it.

use evalgrid_domain::{ids::TrialId, limits::MAX_FAILURE, redact::Redactor};
use evalgrid_proto::v1;
use evalgrid_workflow::{Phase, TrialKey, decide};
use tonic::Status;

use crate::{
    auth::stopping,
    engine::{Core, Engine},
    refusals::{bad_request, refused},
    waits,
};

fn parse(id: &str) -> Result<TrialKey, Status> {
    let id: TrialId = id.parse().map_err(|_| refused(&decide::Refusal::NoOpenTrial))?;
    Ok(TrialKey {
        batch: id.batch,
        run: id.run,
        ordinal: id.ordinal,
    })
}

/// Where a trial stands. Only those of batches in memory are known here; the others have their verdicts in their batches.
pub async fn show(engine: &Engine, id: &str) -> Result<v1::TrialReport, Status> {
    let key = parse(id)?;
    let found = engine.settled_turn(|core| report(core, key));
    found
        .await
        .map_err(|_| stopping())?
        .ok_or_else(|| refused(&decide::Refusal::NoOpenTrial))
}

/// Settles a trial void with the operator's reason. Its worker, if it has one, is told, and destroys the sandbox as after any verdict.
pub async fn resolve(engine: &Engine, id: &str, reason: &str) -> Result<v1::TrialReport, Status> {
    let key = parse(id)?;
    let length = reason.chars().count();
    if reason.trim().is_empty() || length > MAX_FAILURE {
        return Err(bad_request(format!("reason: 1 to {MAX_FAILURE} characters, and this has {length}")));
    }
    // Everybody who may read the batch reads the reason.
    let reason = Redactor::default().text(reason).into_owned();
    let resolved = engine.settled_turn(|core| {
        let event = decide::resolve(&core.state, key, &reason, core.now_ms())?;
        core.commit(event);
        report(core, key).ok_or(decide::Refusal::NoOpenTrial)
    });
    let report = resolved.await.map_err(|_| stopping())?.map_err(|error| refused(&error))?;
    tracing::warn!(trial = id, reason, "the operator has resolved a trial");
    Ok(report)
}

fn report(core: &Core, key: TrialKey) -> Option<v1::TrialReport> {
    let state = &core.state;
    let batch = state.batch(&key.batch)?;
    let trial = batch.trial(key)?;
    let (case, _) = batch.coordinates(key.run);
    let holder = match trial.phase {
        Phase::Leased { token } => state.lease(token),
        _ => None,
    };
    let asked = waits::asked(core, batch, key);
    Some(v1::TrialReport {
        id: key.id().to_string(),
        organization: state.organization(&batch.organization)?.slug.clone(),
        batch_id: batch.id.to_string(),
        case_id: batch.cases.get(case)?.id.clone(),
        ordinal: key.ordinal.into(),
        status: trial.status().into(),
        failure: trial.outcome().and_then(|outcome| outcome.failure.clone()),
        attempts: trial.attempts,
        idle_leases: trial.idle_leases,
        lost_attempts: trial.lost.clone(),
        progress_at_ms: trial.progress_ms,
        steps: trial.steps.iter().map(|step| step.step.clone()).collect(),
        sandbox: trial.sandbox.clone(),
        worker_id: holder.map(|lease| lease.worker_id.clone()),
        local: batch.local.is_some(),
        waits_for: waits::waits_for(core, batch, key).unwrap_or_default(),
        judged_by: asked.judges,
        answered_by: asked.person,
    })
}
