//! Asks judges, and plays people.
//!
//! A judge runner is a worker (`evalgrid-worker`) that is told by the scheduler whom to ask, about what, and how long that may take. It asks once,
//! says what came of it, and never asks again by itself: whether an ask is repeated is the scheduler's to decide.

pub mod calibrate;
pub mod chat;
pub mod harness;
pub mod http;
mod job;
pub mod judgment;
pub mod model;
pub mod openai;
mod reply;
mod role;

use evalgrid_worker::{Sandboxes, Worker, WorkerError, WorkerOptions};
use tokio::sync::watch;

use crate::{
    http::{Http, HttpError, HttpOptions},
    role::JudgeRunner,
};

/// How a judge runner runs.
#[derive(Clone, Debug)]
pub struct JudgeRunnerOptions {
    /// As a worker. Its slots are asks at once.
    pub worker: WorkerOptions,
    /// How models are called.
    pub http: HttpOptions,
}

/// Why a judge runner cannot run, or goes no further.
#[derive(Debug, thiserror::Error)]
pub enum JudgeRunnerError {
    /// As a worker.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Models cannot be called.
    #[error(transparent)]
    Http(#[from] HttpError),
}

/// Runs until `shutdown` says true (or its sender is gone). Loses the scheduler as often as it must, and comes back each time.
pub async fn run(options: JudgeRunnerOptions, shutdown: watch::Receiver<bool>) -> Result<(), JudgeRunnerError> {
    let http = Http::new(options.http)?;
    let worker = Worker::open(&options.worker, Sandboxes::Optional).await?;
    Ok(evalgrid_worker::run(worker, JudgeRunner { http }, shutdown).await?)
}
