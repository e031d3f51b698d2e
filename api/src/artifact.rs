//! `evals.artifacts.get`: one file that was kept of a trial.

use axum::response::Response;
use evalgrid_domain::{
    decode::{Decoder, Text},
    evidence::Artifact,
    ids::TrialId,
    limits::MAX_ARTIFACT_BYTES,
};
use evalgrid_proto::v1::{GetRunRequest, ObjectRef, evidence::Place};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    cell::call,
    failure::Failure,
    limits,
    ops::{App, Caller, answered},
    result::{Broken, Object},
};

/// Which file.
pub(crate) struct Wanted {
    trial_id: String,
    path: String,
}

pub(crate) fn wanted(d: &mut Decoder, value: &Value) -> Option<Wanted> {
    let map = d.object(value)?;
    let trial_id = d.required(map, "trialId", |d, value| d.string(value, Text::any()));
    let path = d.required(map, "path", |d, value| d.string(value, Text::any()));
    Some(Wanted {
        trial_id: trial_id?,
        path: path?,
    })
}

/// What is wanted of a trial's evidence; the rest is skipped while it is read.
#[derive(Default, Deserialize)]
struct Evidence {
    #[serde(default)]
    artifacts: Vec<Artifact>,
}

/// The file with its text.
pub(crate) async fn get(app: &App, caller: Caller, wanted: Wanted) -> Result<Response, Failure> {
    let no_trial = || Failure::NotFound("There is no trial with this id.".into());
    let id: TrialId = wanted.trial_id.parse().map_err(|_| no_trial())?;
    let run = id.run_id().to_string();
    let get_run = call!(batches, get_run, caller.request(GetRunRequest { id: run.clone() }));
    let found = app.cells.read(&caller, limits::CALL_DEADLINE, get_run).await?;
    let trials = found.batch.into_iter().flat_map(|batch| batch.runs).flat_map(|run| run.trials);
    let trial = trials.into_iter().find(|trial| trial.id == wanted.trial_id).ok_or_else(no_trial)?;
    let place = trial.outcome.and_then(|outcome| outcome.evidence?.place);
    let evidence: Evidence = match place {
        None => Evidence::default(),
        Some(Place::Inline(bytes)) => serde_json::from_slice(&bytes).map_err(|error| broken(&error))?,
        Some(Place::Object(object)) => {
            let size = usize::try_from(object.size).unwrap_or(usize::MAX);
            let _memory = app.requests.take(size).await?;
            let bytes = whole(app, &caller, object).await?.ok_or_else(Failure::lost)?;
            serde_json::from_slice(&bytes).map_err(|error| broken(&error))?
        }
    };
    let no_artifact = || Failure::NotFound("There is no artifact of this path in the trial.".into());
    let artifact = evidence.artifacts.into_iter().find(|artifact| artifact.path == wanted.path);
    // Those that a client's own machine has reported are not here.
    let artifact = artifact
        .filter(|artifact| artifact.byte_size <= MAX_ARTIFACT_BYTES)
        .ok_or_else(no_artifact)?;
    let object = ObjectRef {
        sha256: artifact.sha256.clone(),
        size: artifact.byte_size,
    };
    let content = match artifact.text {
        Some(text) => text,
        None => {
            let bytes = whole(app, &caller, object).await?.ok_or_else(no_artifact)?;
            String::from_utf8(bytes).map_err(|error| broken(&error))?
        }
    };
    Ok(answered(&json!({
        "byteSize": artifact.byte_size,
        "content": content,
        "path": artifact.path,
        "sha256": artifact.sha256,
    })))
}

/// An object, in memory; `None` where there is none.
async fn whole(app: &App, caller: &Caller, object: ObjectRef) -> Result<Option<Vec<u8>>, Failure> {
    let read = async {
        let mut object = Object::open(app, caller, object).await?;
        let mut bytes = Vec::new();
        while let Some(chunk) = object.next().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    match timeout(limits::RESULT_DEADLINE, read).await {
        Ok(Ok(bytes)) => Ok(Some(bytes)),
        Ok(Err(Broken::Scheduler(status))) if status.code() == tonic::Code::NotFound => Ok(None),
        Ok(Err(Broken::Scheduler(status))) => Err(Failure::from_status(&status)),
        Ok(Err(error)) => Err(broken(&error)),
        Err(_) => Err(Failure::Unavailable("The result could not be read in time. Try again.".into())),
    }
}

fn broken(error: &dyn std::error::Error) -> Failure {
    tracing::error!(%error, "an artifact could not be read");
    Failure::Internal
}
