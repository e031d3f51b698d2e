//! Bundles: whole ES modules of the request that node runs in the workspace (contract 2.4). They speak by lines of stdout.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    time::Duration,
};

use evalgrid_harness::lines::Lines;
use evalgrid_sandbox::{Base, SandboxError, StepCommand, StepExit, StepOutput};
use sha2::{Digest as _, Sha256};

use crate::{
    output,
    setup::OWN_PROGRAMS_LAST,
    trial::{Attempt, Stop, called},
};

/// The kind of bundle that judges.
pub(crate) const VALIDATOR: &str = "validator";
/// Looked up in the sandbox's `PATH`.
const NODE: &str = "node";
/// Bytes of output that are read at once; more would keep other trials waiting and goes to a thread of its own.
const INLINE_READ_BYTES: u64 = 256 << 10;
/// The status of a program that is not there, as a shell gives it and the supervisor too.
const NOT_FOUND: i32 = 127;

/// A bundle to run, once per step.
pub(crate) struct Bundle<'a> {
    /// Part of its file's name.
    pub(crate) kind: &'a str,
    pub(crate) step: &'a str,
    pub(crate) source: &'a str,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) limit: Duration,
}

/// Runs a bundle, or waits for the one that an earlier attempt has started. `Err`: it could not be written, and why.
pub(crate) async fn run(attempt: &Attempt<'_>, bundle: Bundle<'_>) -> Result<Result<StepExit, String>, Stop> {
    // An agent that deletes its workspace fails the checks; it does not break them.
    called("make the workspace", attempt.sandbox.ensure_workspace()).await?;
    let file = format!(".sphynx-{}-{}.mjs", bundle.kind, word(attempt, bundle.step));
    if let Err(reason) = write(attempt, &file, bundle.source.as_bytes()).await? {
        return Ok(Err(reason));
    }
    let command = StepCommand {
        step: bundle.step.to_owned(),
        argv: vec![
            evalgrid_harness::SHELL.into(),
            "-c".into(),
            format!("{OWN_PROGRAMS_LAST}exec {NODE} \"$0\""),
            format!("{}/{file}", attempt.sandbox.home()),
        ],
        env: bundle.env,
        time_limit: bundle.limit,
    };
    let exit = attempt.process(command).await?;
    // It runs as the agent's user does: a process that the agent has left behind could have put a program of its own in its place.
    let found = attempt.sandbox.read_file(Base::Home, &file, bundle.source.len() as u64 + 1);
    let found = called("read a file", async { Ok(found.await) }).await?;
    if bundle.kind == VALIDATOR && !found.is_ok_and(|found| found.as_deref() == Some(bundle.source.as_bytes())) {
        return Ok(Err("its file was changed while it ran".into()));
    }
    // What comes after has no business in it; that it is left there is no reason to lose the trial.
    if let Err(error) = called("remove a bundle", attempt.sandbox.remove_file(Base::Home, &file)).await {
        tracing::debug!(?error, "a bundle was not removed");
    }
    Ok(Ok(exit))
}

/// Writes a file into HOME, unless it is there already: a process that an earlier attempt has started may be reading it.
pub(crate) async fn write(attempt: &Attempt<'_>, path: &str, content: &[u8]) -> Result<Result<(), String>, Stop> {
    let found = attempt.sandbox.read_file(Base::Home, path, content.len() as u64 + 1);
    let found = called("read a file", async { Ok(found.await) }).await?;
    if found.is_ok_and(|found| found.as_deref() == Some(content)) {
        return Ok(Ok(()));
    }
    let files = [(path.to_owned(), content.to_owned())];
    let written = attempt.sandbox.write_files(Base::Home, &files, true);
    match called("write a file", async { Ok(written.await) }).await? {
        Ok(()) => Ok(Ok(())),
        Err(SandboxError::Operation { reason, .. }) => Ok(Err(reason)),
        Err(error) => Err(error.into()),
    }
}

/// Part of a file's name that no agent can know, because the worker's id is in no sandbox, and that stays when another attempt goes on.
fn word(attempt: &Attempt<'_>, step: &str) -> String {
    let secret = Sha256::new()
        .chain_update("bundle")
        .chain_update(&attempt.worker.folder.worker_id)
        .chain_update(&attempt.lease.sandbox)
        .chain_update(step);
    secret.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether it was node that could not be found, and not something that the bundle looked for.
pub(crate) fn is_without_node(exit: &StepExit) -> bool {
    let says_so = |stderr: String| stderr.lines().next().is_some_and(|line| line.ends_with("exec: node: not found"));
    exit.code == NOT_FOUND && output::stderr(&exit.output).is_ok_and(says_so)
}

/// Reads an output line by line, in a thread of its own where it is long. Of one that was not kept whole, the line that was cut is left out.
pub(crate) async fn read<T: Send + 'static>(
    output: &StepOutput,
    mut reader: T,
    line: impl Fn(&mut T, &[u8]) + Send + 'static,
) -> Result<T, Stop> {
    let output = output.clone();
    let is_short = output.stdout_bytes <= INLINE_READ_BYTES;
    let work = move || -> io::Result<T> {
        let mut stdout: Box<dyn Read> = match output.stdout_bytes {
            0 => Box::new(io::empty()),
            _ => Box::new(File::open(&output.stdout)?),
        };
        let mut tail = None;
        if let Some(path) = &output.stdout_tail {
            let file = File::open(path)?;
            let start = output.stdout_bytes.saturating_sub(file.metadata()?.len());
            tail = Some((file, start));
        }
        let tail = tail.as_mut().map(|(file, start)| (file as &mut dyn Read, *start));
        Lines::read(&mut stdout, tail, &mut |bytes, _| line(&mut reader, bytes))?;
        Ok(reader)
    };
    let read = match is_short {
        true => work(),
        false => tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error))),
    };
    read.map_err(|error| Stop::lost(format!("a bundle's output cannot be read: {error}")))
}
