//! `demo`: the real roles in a temporary folder, a small suite over the real API, its results, and where it all is.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use evalgrid_proto::v1::{Batch, BatchStatus, CancelBatchRequest, ListBatchesRequest, ListSandboxesRequest, Run, TrialStatus};
use evalgrid_worker::ProcessPolicy;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    Failure, batch, client, http,
    options::{self, SchedulerFlags},
    output, progress,
    roles::{self, All, Workers},
    stop,
};

const REQUEST: &str = include_str!("../../examples/hello/request.json");
/// How long a stopped demo takes to end what it has started.
const CLEAN_UP: Duration = Duration::from_secs(15);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How each run must end: case, variant, then for example `3 passed`.
const EXPECTED: &str = include_str!("../../examples/hello/expected.json");

pub(crate) async fn run(options: options::Demo) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let data = folder()?;
    let isolated = roles::bubblewrap_works(&options.executor.sandboxes).await;
    if let Err(reason) = &isolated {
        eprintln!("warning: bubblewrap does not work here ({reason}).");
        eprintln!(
            "warning: the demo's agents run as plain processes, not isolated from this machine. They are harmless; others may not be."
        );
    }
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    let (grpc, http) = (roles::listen(free, "--grpc").await?, roles::listen(free, "--http").await?);
    let flags = SchedulerFlags::default_for_demo();
    let policy = match options.executor.sandboxes.enable_process_sandbox {
        true => ProcessPolicy::On,
        false => ProcessPolicy::IfNoBubblewrap,
    };
    let sandboxes: &[&str] = if isolated.is_ok() { &["bubblewrap"] } else { &[] };
    let workers = Workers {
        executor: &options.executor,
        judges: &options.judges,
        policy,
        isolated: sandboxes,
    };
    let mut all = All::start(&data, grpc, http, &flags, workers).await?;
    let key = client::secret(&all.data.join("api-key"), "the API key", "EVALGRID_API_KEY")?;
    let places = Places {
        data: all.data.clone(),
        http: all.http.clone(),
        grpc: all.grpc.clone(),
        again: match isolated {
            Ok(()) => "",
            Err(_) => " --enable-process-sandbox",
        },
    };
    let outcome = tokio::select! {
        outcome = show(&places, &key) => outcome,
        ended = all.ended() => ended.map(|()| Vec::new()),
        () = asked(stopped) => {
            let cleaned = clean_up(&places, &key).await;
            eprintln!("The demo was stopped. Its folder is kept: {}", places.data.display());
            cleaned.and(Err(Failure::Bad))
        }
    };
    all.stop().await?;
    let surprises = outcome?;
    match surprises.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(
            format!("the demo did not end as it must:\n  {}", surprises.join("\n  ")),
            format!("Its folder is kept for a look: {}", places.data.display()),
        )),
    }
}

async fn asked(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Nothing of the demo goes on when it was stopped: its batch is cancelled, and what was running is waited for.
async fn clean_up(places: &Places, key: &str) -> Result<(), Failure> {
    let cancel = async {
        let mut batches = client::batches_at(std::slice::from_ref(&places.grpc), key).await?;
        let page = batches
            .list(ListBatchesRequest::default())
            .await
            .map_err(|status| client::refused(&status))?
            .into_inner();
        for batch in page.batches.iter().filter(|batch| batch.status() == BatchStatus::Running) {
            let request = CancelBatchRequest { id: batch.id.clone() };
            batches.cancel(request).await.map_err(|status| client::refused(&status))?;
        }
        // What has just been asked for is in custody before it is a folder: an empty folder alone proves nothing yet.
        let token = client::secret(&places.data.join("admin-token"), "the admin token", "EVALGRID_ADMIN_TOKEN")?;
        let mut admin = client::admin_at(std::slice::from_ref(&places.grpc), &token).await?;
        loop {
            let custody = admin.list_sandboxes(ListSandboxesRequest {}).await;
            let custody = custody.map_err(|status| client::refused_to_operator(&status))?.into_inner();
            if custody.total == 0 && roles::sandboxes(&places.data).is_empty() {
                return Ok(());
            }
            sleep(LOOK_AGAIN).await;
        }
    };
    timeout(CLEAN_UP, cancel).await.unwrap_or_else(|_| {
        let left = roles::sandboxes(&places.data).join(", ");
        Err(Failure::new(
            format!("sandboxes of the demo are still there: {left}"),
            format!(
                "To end them: {} serve --data {}{}",
                output::program(),
                places.data.display(),
                places.again
            ),
        ))
    })
}

struct Places {
    data: PathBuf,
    http: String,
    grpc: String,
    /// What else `serve` needs on this machine.
    again: &'static str,
}

fn folder() -> Result<PathBuf, Failure> {
    let folder = tempfile::Builder::new().prefix("evalgrid-").tempdir();
    let folder = folder.map_err(|error| {
        Failure::new(
            format!("no temporary folder could be made: {error}"),
            format!("Name another place for it: TMPDIR=… {} demo", output::program()),
        )
    })?;
    Ok(folder.keep())
}

/// Starts the batch, follows it, tells of it; answers with what was not as expected.
async fn show(places: &Places, key: &str) -> Result<Vec<String>, Failure> {
    output::line(&format!(
        "Evalgrid runs in {} (HTTP {}, gRPC {}).",
        places.data.display(),
        places.http,
        places.grpc
    ))?;
    let started = http::post_json(&places.http, "evals.batches.start", key, REQUEST).await?;
    let id = started["id"].as_str().unwrap_or_default().to_owned();
    let runs = started["runs"].as_array().map_or(0, Vec::len);
    output::line(&format!(
        "Started {id} with {} over HTTP: examples/hello/request.json.\n",
        output::count(runs, "run")
    ))?;
    let mut batches = client::batches_at(std::slice::from_ref(&places.grpc), key).await?;
    let batch = progress::follow(&mut batches, &id).await?;
    batch::show(&mut batches, &batch).await?;
    let data = places.data.display();
    let program = output::program();
    output::print(&format!(
        "\nEverything is kept in {data}. To serve it again, and look at every trial:\n\
         \x20 {program} serve --data {data}{}\n\
         \x20 curl -s http://127.0.0.1:8700/v1/evals.batches.get -H \"authorization: Bearer $(cat {data}/api-key)\" -d '{{\"id\":\"{id}\"}}'\n\
         \x20 {program} batch get {id} --data {data}\n",
        places.again
    ))?;
    surprises(&batch)
}

/// The runs that did not end as expected, each told in a line.
fn surprises(batch: &Batch) -> Result<Vec<String>, Failure> {
    let expected: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_str(EXPECTED).map_err(|error| {
        Failure::new(
            format!("the demo's expectations: {error}"),
            "This is a defect of evalgrid; please report it.",
        )
    })?;
    let mut surprises = Vec::new();
    for (case, variants) in &expected {
        for (variant, expected) in variants {
            let found = batch.runs.iter().find(|run| {
                let case_id = batch.cases.get(run.case_index as usize).map(|case| case.id.as_str());
                let model = batch.variants.get(run.variant_index as usize).map(|variant| variant.model.as_str());
                (case_id, model) == (Some(case), Some(variant))
            });
            let got = found.map_or_else(|| "no run".to_owned(), count);
            if got != *expected {
                surprises.push(format!("{case} × {variant}: {got}, expected {expected}"));
            }
        }
    }
    Ok(surprises)
}

/// `3 passed`, or `2 passed, 1 void`.
fn count(run: &Run) -> String {
    let kinds = [
        (TrialStatus::Passed, "passed"),
        (TrialStatus::Failed, "failed"),
        (TrialStatus::Void, "void"),
        (TrialStatus::Running, "running"),
        (TrialStatus::Queued, "queued"),
    ];
    let counts = kinds.map(|(status, word)| (run.trials.iter().filter(|trial| trial.status() == status).count(), word));
    let parts: Vec<_> = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, word)| format!("{count} {word}"))
        .collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_domain::{
        decode::parse_json,
        limits::{MAX_JSON_DEPTH, MAX_TRIALS_PER_BATCH},
        request::{SuiteBatchRequest, decode_start},
    };

    use super::*;

    fn request() -> SuiteBatchRequest {
        decode_start(&parse_json(REQUEST.as_bytes(), MAX_JSON_DEPTH).unwrap()).unwrap()
    }

    #[test]
    fn the_request_carries_the_agent() {
        let agent = include_str!("../../examples/hello/agent.sh");
        for variant in request().variants {
            assert_eq!(variant.profile.unwrap().files["home/agent.sh"], agent);
        }
    }

    #[test]
    fn the_request_gives_no_warnings() {
        assert_eq!(crate::warnings::of(REQUEST.as_bytes()), Vec::<String>::new());
    }

    #[test]
    fn every_run_has_an_expectation() {
        let request = request();
        assert!(request.total_trials() <= MAX_TRIALS_PER_BATCH);
        let expected: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_str(EXPECTED).unwrap();
        let cases: Vec<_> = request.cases.iter().map(|case| case.id.clone()).collect();
        let mut known: Vec<_> = expected.keys().cloned().collect();
        known.sort();
        let mut sorted = cases.clone();
        sorted.sort();
        assert_eq!(known, sorted);
        let models: Vec<_> = request.variants.iter().map(|variant| variant.model.clone()).collect();
        for variants in expected.values() {
            assert_eq!(variants.keys().cloned().collect::<Vec<_>>(), models);
        }
        assert_eq!(surprises(&Batch::default()).unwrap().len(), cases.len() * models.len());
    }
}
