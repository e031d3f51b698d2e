//! `batch`: starting, following, reading and cancelling batches of a running server.

use std::{io::Read as _, path::Path};

use evalgrid_domain::timestamp;
use evalgrid_proto::v1::{
    Batch, BatchStatus, BatchSummary, CancelBatchRequest, ListBatchesRequest, RegradeBatchRequest, RetryBatchRequest, StartBatchRequest,
    StartedBatch, TrialStatus,
};
use http_body_util::BodyExt as _;

use crate::{
    Failure,
    client::{self, Batches},
    grid, http, options, output, progress, reasons, regrade, warnings,
};

pub(crate) async fn run(command: options::Batch) -> Result<(), Failure> {
    match command {
        options::Batch::Start {
            file,
            client,
            watch,
            fail_under,
            idempotency_key,
        } => {
            check_fail_under(watch, fail_under)?;
            start(&file, &client, watch, fail_under, idempotency_key).await
        }
        options::Batch::Watch { id, fail_under, client } => {
            let mut batches = client::batches(&client).await?;
            let batch = progress::follow(&mut batches, &id).await?;
            conclude(&mut batches, &batch, fail_under).await
        }
        options::Batch::Get { id, client, json, api } => match json {
            true => whole(&id, &client, &api).await,
            false => {
                let mut batches = client::batches(&client).await?;
                let batch = progress::get(&mut batches, &id).await?;
                show(&mut batches, &batch).await
            }
        },
        options::Batch::List { client, limit } => list(&client, limit).await,
        options::Batch::Retry {
            id,
            client,
            watch,
            fail_under,
            idempotency_key,
        } => {
            check_fail_under(watch, fail_under)?;
            let mut batches = client::batches(&client).await?;
            let answer = batches.retry(RetryBatchRequest { id, idempotency_key }).await;
            let started = answer.map_err(|status| client::refused(&status))?.into_inner();
            started_as(&mut batches, &started, watch, fail_under).await
        }
        options::Batch::Regrade {
            id,
            judges,
            cases,
            client,
            watch,
            fail_under,
            idempotency_key,
        } => {
            check_fail_under(watch, fail_under)?;
            let request = RegradeBatchRequest {
                id,
                idempotency_key,
                judges_json: judges.map(|file| regrade::asked(&file)).transpose()?,
                cases,
            };
            let mut batches = client::batches(&client).await?;
            let answer = batches.regrade(request).await;
            let started = answer.map_err(|status| client::refused(&status))?.into_inner();
            started_as(&mut batches, &started, watch, fail_under).await
        }
        options::Batch::Cancel { id, client } => {
            let mut batches = client::batches(&client).await?;
            let answer = batches.cancel(CancelBatchRequest { id }).await;
            let batch = answer.map_err(|status| client::refused(&status))?.into_inner();
            show(&mut batches, &batch).await
        }
    }
}

fn check_fail_under(watch: bool, fail_under: Option<f64>) -> Result<(), Failure> {
    match fail_under.is_some() && !watch {
        true => Err(Failure::usage(
            "--fail-under without --watch: nothing would be there to judge",
            "Add --watch, or give it to `batch watch`.",
        )),
        false => Ok(()),
    }
}

async fn start(
    file: &Path,
    client: &options::Client,
    watch: bool,
    fail_under: Option<f64>,
    idempotency_key: Option<String>,
) -> Result<(), Failure> {
    let json = read(file)?;
    warnings::tell(&warnings::of(&json));
    let mut batches = client::batches(client).await?;
    let request = StartBatchRequest {
        json: json.into(),
        idempotency_key,
    };
    let started = batches
        .start(request)
        .await
        .map_err(|status| client::refused(&status))?
        .into_inner();
    started_as(&mut batches, &started, watch, fail_under).await
}

/// Names the new batch, and follows it where that is wanted.
async fn started_as(batches: &mut Batches, started: &StartedBatch, watch: bool, fail_under: Option<f64>) -> Result<(), Failure> {
    output::line(&started.id)?;
    if watch {
        let batch = progress::follow(batches, &started.id).await?;
        return conclude(batches, &batch, fail_under).await;
    }
    eprintln!(
        "Started {}. To follow: {} batch watch {}",
        output::count(started.runs.len(), "run"),
        output::program(),
        started.id
    );
    Ok(())
}

/// A file, or standard input, up to the size of a request.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let limit = evalgrid_domain::limits::MAX_START_BODY_BYTES as u64;
    // One byte above the limit is enough to see that the file is too large; the scheduler says so in its own words.
    let read = match file.as_os_str() == "-" {
        true => std::io::stdin().lock().take(limit + 1).read_to_end(&mut bytes),
        false => std::fs::File::open(file).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes)),
    };
    read.map_err(|error| {
        Failure::usage(
            format!("{}: {error}", file.display()),
            "Name a request file, or - for standard input.",
        )
    })?;
    if bytes.len() as u64 > limit {
        return Err(Failure::usage(
            format!("{} is larger than {} MiB", file.display(), limit >> 20),
            "Make the request smaller, for example with sources in a repository.",
        ));
    }
    Ok(bytes)
}

/// Shows the results so far.
pub(crate) async fn show(batches: &mut Batches, batch: &Batch) -> Result<(), Failure> {
    let reasons = reasons::of(batches, batch).await;
    output::print(&(grid::render(batch, &reasons) + &regrade::changes(batch)))
}

/// Shows the results. A batch that ended early is a failure of the command; trials that failed are results, unless `fail_under` says how many may.
async fn conclude(batches: &mut Batches, batch: &Batch, fail_under: Option<f64>) -> Result<(), Failure> {
    show(batches, batch).await?;
    if batch.status() == BatchStatus::Failed {
        return Err(Failure::Bad);
    }
    match fail_under.and_then(|rate| too_few(batch, rate)) {
        Some(why) => Err(Failure::new(why, "The trials that failed are listed above.")),
        None => Ok(()),
    }
}

/// Why the pass rate is not enough. Where nothing was scored there is none, which is not enough either.
fn too_few(batch: &Batch, rate: f64) -> Option<String> {
    let count = |status: TrialStatus| {
        let trials = batch.runs.iter().flat_map(|run| &run.trials);
        trials.filter(|trial| trial.status() == status).count()
    };
    let (passed, failed) = (count(TrialStatus::Passed), count(TrialStatus::Failed));
    match passed + failed {
        0 => Some("no trial was scored".to_owned()),
        scored if (passed as f64) < rate * scored as f64 => {
            Some(format!("{passed} of {scored} scored trials passed, fewer than {rate} of them"))
        }
        _ => None,
    }
}

async fn whole(id: &str, client: &options::Client, api: &str) -> Result<(), Failure> {
    let body = serde_json::json!({"id": id}).to_string();
    let mut body = http::post(api, "evals.batches.get", &client::api_key(client)?, body).await?;
    // Piece by piece: a batch's evidence can be larger than this machine's memory.
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            Failure::new(
                format!("the batch broke off: {error}"),
                "Try again; see the API's log if it stays so.",
            )
        })?;
        if let Some(data) = frame.data_ref() {
            output::bytes(data)?;
        }
    }
    output::line("")
}

async fn list(client: &options::Client, limit: i64) -> Result<(), Failure> {
    let request = ListBatchesRequest { cursor: None, limit };
    let answer = client::batches(client)
        .await?
        .list(request)
        .await
        .map_err(|status| client::refused(&status))?;
    let page = answer.into_inner();
    let text: String = page.batches.iter().map(row).collect();
    output::print(&text)?;
    eprintln!("{} of {}.", page.batches.len(), output::count(page.total, "batch"));
    Ok(())
}

fn row(batch: &BatchSummary) -> String {
    let status = match batch.status() {
        BatchStatus::Finished => "finished",
        BatchStatus::Failed => "failed",
        BatchStatus::Running | BatchStatus::Unspecified => "running",
    };
    let failure = batch
        .failure
        .as_deref()
        .map(|failure| format!("  {}", output::short(failure, 80)))
        .unwrap_or_default();
    let regrade = batch
        .regrade_of
        .as_deref()
        .map(|of| format!("  regrades {}", output::plain(of)))
        .unwrap_or_default();
    format!(
        "{}  {}  {status:8}  {} passed of {} scored, {} void  ({}, {}){regrade}{failure}\n",
        batch.id,
        timestamp::format(batch.started_at_ms),
        batch.passed,
        batch.scored,
        batch.voided,
        output::count(batch.cases, "case"),
        output::count(batch.runs, "run"),
    )
}

#[cfg(test)]
mod tests {
    use evalgrid_proto::v1::{Run, Trial};

    use super::*;

    #[test]
    fn rows() {
        let mut batch = BatchSummary {
            id: "batch_2".into(),
            status: BatchStatus::Failed.into(),
            scored: 2,
            cases: 1,
            runs: 2,
            ..BatchSummary::default()
        };
        let start = "batch_2  1970-01-01T00:00:00.000Z  failed    0 passed of 2 scored, 0 void  (1 case, 2 runs)";
        assert_eq!(row(&batch), format!("{start}\n"));
        batch.regrade_of = Some("batch_1".into());
        batch.failure = Some("Cancelled".into());
        assert_eq!(row(&batch), format!("{start}  regrades batch_1  Cancelled\n"));
    }

    #[test]
    fn pass_rates() {
        fn check(passed: usize, failed: usize, void: usize, rate: f64, enough: bool) {
            let trials = [
                (TrialStatus::Passed, passed),
                (TrialStatus::Failed, failed),
                (TrialStatus::Void, void),
            ];
            let trials = trials.iter().flat_map(|(status, count)| {
                let trial = Trial {
                    status: (*status).into(),
                    ..Trial::default()
                };
                vec![trial; *count]
            });
            let run = Run {
                trials: trials.collect(),
                ..Run::default()
            };
            let batch = Batch {
                runs: vec![run],
                ..Batch::default()
            };
            assert_eq!(too_few(&batch, rate).is_none(), enough, "{passed} {failed} {void} {rate}");
        }
        check(9, 1, 0, 0.9, true);
        check(8, 2, 0, 0.9, false);
        check(1, 0, 9, 1.0, true);
        check(0, 3, 0, 0.0, true);
        check(0, 0, 3, 0.0, false);
        check(0, 0, 0, 0.5, false);
    }
}
