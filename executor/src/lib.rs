//! A trial, step by step.
//!
//! An executor is a worker (`evalgrid-worker`) that runs each trial in a sandbox whose supervisor outlives it, and reports every step. When it
//! dies, the next one on the same folder takes the sandboxes over and goes on after the last recorded step.

mod account;
mod artifacts;
mod bundle;
mod cache;
mod changes;
mod check;
mod judge_files;
mod layers;
mod mocks;
mod person;
mod prepare;
mod role;
mod setup;
mod source;
mod timing;
mod trial;
mod turn_files;
mod turns;
mod validator;

#[cfg(test)]
mod fake;

use std::{io, time::Duration};

use evalgrid_worker::{FolderError, Sandboxes, Worker, WorkerError, WorkerOptions, output};
use tokio::sync::watch;

use crate::role::Executor;

/// How an executor runs.
#[derive(Clone, Debug)]
pub struct ExecutorOptions {
    /// As a worker. Its slots are trials at once.
    pub worker: WorkerOptions,
    /// How long the sandbox of a trial that did not pass stays, for people to look into; zero: it goes at once.
    pub keep_failed: Duration,
}

/// Runs until `shutdown` says true (or its sender is gone). Loses the scheduler as often as it must, and comes back each time.
pub async fn run(options: ExecutorOptions, shutdown: watch::Receiver<bool>) -> Result<(), WorkerError> {
    let worker = Worker::open(&options.worker, Sandboxes::Needed).await?;
    let opened = tokio::task::spawn_blocking(move || Executor::open(&worker, options.keep_failed).map(|executor| (worker, executor))).await;
    let broken = |error| Err(FolderError::Io(options.worker.work.clone(), io::Error::other(error)));
    let (worker, executor) = opened.unwrap_or_else(broken)?;
    evalgrid_worker::run(worker, executor, shutdown).await
}
