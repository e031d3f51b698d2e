//! Workers as the flags describe them, and what works on this machine.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use evalgrid_executor::ExecutorOptions;
use evalgrid_judge_runner::http::HttpOptions;
use evalgrid_sandbox::{BubblewrapOptions, BubblewrapProvider, DockerImage, Limits};
use evalgrid_worker::{DockerUse, ProcessPolicy, WorkerOptions};
use tokio::time::timeout;

use super::absolute;
use crate::{Failure, harness, options};

/// Trials at once per processor: an agent mostly waits for its model.
const SLOTS_PER_PROCESSOR: usize = 4;
const FEWEST_SLOTS: usize = 4;
/// Making one sandbox to see whether bubblewrap works.
const PROBE_DEADLINE: Duration = Duration::from_secs(30);

pub(super) fn process_policy(flags: &options::SandboxFlags) -> ProcessPolicy {
    match flags.enable_process_sandbox {
        true => ProcessPolicy::On,
        false => ProcessPolicy::Off,
    }
}

pub(super) fn http_options(flags: &options::ModelFlags) -> HttpOptions {
    HttpOptions {
        proxy: flags.model_proxy.clone(),
        ..HttpOptions::default()
    }
}

pub(super) fn executor_options(
    work: PathBuf,
    schedulers: Vec<String>,
    worker_token: String,
    flags: &options::ExecutorFlags,
    process_sandbox: ProcessPolicy,
) -> Result<ExecutorOptions, Failure> {
    let slots = flags.slots.unwrap_or_else(default_slots);
    Ok(ExecutorOptions {
        worker: worker_options(work, schedulers, worker_token, slots, &flags.sandboxes, process_sandbox)?,
        keep_failed: Duration::from_secs(60 * flags.keep_failed),
    })
}

pub(super) fn worker_options(
    work: PathBuf,
    schedulers: Vec<String>,
    worker_token: String,
    slots: u32,
    flags: &options::SandboxFlags,
    process_sandbox: ProcessPolicy,
) -> Result<WorkerOptions, Failure> {
    let supervisor_executable = std::env::current_exe()
        .map_err(|error| Failure::new(format!("this program cannot find its own file: {error}"), "Is /proc mounted?"))?;
    Ok(WorkerOptions {
        work: absolute(&work),
        schedulers,
        worker_token,
        slots,
        process_sandbox,
        docker: DockerUse {
            policy: flags.docker.clone(),
            image: match &flags.docker_file {
                Some(path) => DockerImage::File(absolute(path)),
                None => DockerImage::Name(flags.docker_image.clone()),
            },
            cpus: flags.docker_cpus,
        },
        network: flags.sandbox_network.clone(),
        supervisor_executable,
        limits: Limits {
            memory_bytes: flags.sandbox_memory << 20,
            pids: flags.sandbox_pids,
        },
        tools: harness::options(&absolute(&work), &flags.tools),
    })
}

/// For sandboxes and agents of a command that is no worker.
pub(crate) fn host_options(work: &Path, flags: &options::SandboxFlags) -> Result<WorkerOptions, Failure> {
    worker_options(work.to_owned(), Vec::new(), String::new(), 1, flags, process_policy(flags))
}

fn default_slots() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from((processors * SLOTS_PER_PROCESSOR).max(FEWEST_SLOTS)).unwrap_or(u32::MAX)
}

/// Whether bubblewrap can make a sandbox here; if not, why.
pub(crate) async fn bubblewrap_works(flags: &options::SandboxFlags) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let options = BubblewrapOptions {
        network: flags.sandbox_network.clone(),
        ..BubblewrapOptions::default()
    };
    let provider = BubblewrapProvider::new(folder.path(), None, options).map_err(|error| error.to_string())?;
    timeout(PROBE_DEADLINE, provider.probe())
        .await
        .unwrap_or_else(|_| Err("making a sandbox takes too long".to_owned()))
}

/// Whether Docker makes sandboxes here, as the flags have it.
pub(super) async fn docker_works(flags: &options::SandboxFlags) -> Result<bool, Failure> {
    let failed = |error: io::Error| Failure::new(format!("no temporary folder can be made: {error}"), "Is the disk full?");
    let folder = tempfile::tempdir().map_err(failed)?;
    let options = worker_options(folder.path().to_owned(), Vec::new(), String::new(), 1, flags, ProcessPolicy::Off)?;
    // The worker says why not.
    Ok(matches!(evalgrid_worker::open_docker(&options, "probe").await, Some(Ok(_))))
}
