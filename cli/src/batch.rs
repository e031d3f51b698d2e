//! `batch`: starting, following, reading and cancelling batches of a running server.

use std::{io::Read as _, path::Path};

use evalgrid_domain::timestamp;
use evalgrid_proto::v1::{Batch, BatchStatus, BatchSummary, CancelBatchRequest, ListBatchesRequest, StartBatchRequest};
use http_body_util::BodyExt as _;

use crate::{
    Failure,
    client::{self, Batches},
    grid, http, options, output, progress, reasons, warnings,
};

pub(crate) async fn run(command: options::Batch) -> Result<(), Failure> {
    match command {
        options::Batch::Start {
            file,
            client,
            watch,
            idempotency_key,
        } => start(&file, &client, watch, idempotency_key).await,
        options::Batch::Watch { id, client } => {
            let mut batches = client::batches(&client).await?;
            let batch = progress::follow(&mut batches, &id).await?;
            conclude(&mut batches, &batch).await
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
        options::Batch::Cancel { id, client } => {
            let mut batches = client::batches(&client).await?;
            let answer = batches.cancel(CancelBatchRequest { id }).await;
            let batch = answer.map_err(|status| client::refused(&status))?.into_inner();
            show(&mut batches, &batch).await
        }
    }
}

async fn start(file: &Path, client: &options::Client, watch: bool, idempotency_key: Option<String>) -> Result<(), Failure> {
    let json = read(file)?;
    for warning in warnings::of(&json) {
        eprintln!("warning: {}", output::plain(&warning));
    }
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
    output::line(&started.id)?;
    if watch {
        let batch = progress::follow(&mut batches, &started.id).await?;
        return conclude(&mut batches, &batch).await;
    }
    eprintln!(
        "Started {}. To follow: {} batch watch {}",
        output::count(started.runs.len(), "run"),
        output::program(),
        started.id
    );
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
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
    output::print(&grid::render(batch, &reasons))
}

/// Shows the results. A batch that ended early is a failure of the command; trials that failed are results.
async fn conclude(batches: &mut Batches, batch: &Batch) -> Result<(), Failure> {
    show(batches, batch).await?;
    match batch.status() {
        BatchStatus::Failed => Err(Failure::Bad),
        _ => Ok(()),
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
    format!(
        "{}  {}  {status:8}  {} passed of {} scored, {} void  ({}, {}){failure}\n",
        batch.id,
        timestamp::format(batch.started_at_ms),
        batch.passed,
        batch.scored,
        batch.voided,
        output::count(batch.cases, "case"),
        output::count(batch.runs, "run"),
    )
}
