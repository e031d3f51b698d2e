//! What a judge by a harness needs on this machine: a folder, a kind of sandbox that works, the agent. Nothing of it but installed agents, where a
//! folder was named for them, outlives the command.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use evalgrid_domain::request::{Harness, Judge};
use evalgrid_judge_runner::calibrate::Agent;
use evalgrid_worker::{FolderError, Host, Sandboxes, WorkerError};
use tokio::{sync::watch, time::sleep};

use super::{asked_to_stop, say, was_stopped};
use crate::{Failure, harness, options, roles};

/// Tries to remove the temporary folder: a helper or an install that has just been ended may still write.
const REMOVE_TRIES: u32 = 5;
/// Between tries.
const REMOVE_PAUSE: Duration = Duration::from_millis(100);

/// The folder of the sandboxes.
pub(super) struct Place {
    path: PathBuf,
    is_temporary: bool,
}

impl Place {
    /// The folder of that name, or a temporary one.
    pub(super) fn new(named: Option<&Path>) -> Result<Place, Failure> {
        if let Some(path) = named {
            return Ok(Place {
                path: roles::absolute(path),
                is_temporary: false,
            });
        }
        let folder = tempfile::Builder::new().prefix("evalgrid-calibrate-").tempdir();
        let folder = folder.map_err(|error| {
            Failure::new(
                format!("no temporary folder could be made: {error}"),
                "Name another place for it with --work.",
            )
        })?;
        Ok(Place {
            path: folder.keep(),
            is_temporary: true,
        })
    }

    async fn remove(&self) -> Result<(), Failure> {
        if !self.is_temporary {
            return Ok(());
        }
        let mut tries = 1;
        loop {
            let path = self.path.clone();
            let removed = tokio::task::spawn_blocking(move || evalgrid_sandbox::remove_tree(&path)).await;
            match removed.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
                Ok(()) => return Ok(()),
                Err(_) if tries < REMOVE_TRIES => sleep(REMOVE_PAUSE).await,
                Err(error) => {
                    return Err(Failure::new(
                        format!("the temporary folder {} cannot be removed: {error}", self.path.display()),
                        "Remove it by hand.",
                    ));
                }
            }
            tries += 1;
        }
    }
}

/// Finds out which sandboxes work here, and installs the agent where it is not there yet. After an error nothing is left.
pub(super) async fn open(
    place: &Place,
    flags: &options::SandboxFlags,
    judge: &Judge,
    harness: Harness,
    credential: &BTreeMap<String, String>,
    stopped: &watch::Receiver<bool>,
) -> Result<Agent, Failure> {
    let opened = try_open(place, flags, judge, harness, credential, stopped.clone()).await;
    if opened.is_err() {
        // Why it was not opened is what a person wants to know.
        let _ = place.remove().await;
    }
    opened
}

async fn try_open(
    place: &Place,
    flags: &options::SandboxFlags,
    judge: &Judge,
    harness: Harness,
    credential: &BTreeMap<String, String>,
    mut stopped: watch::Receiver<bool>,
) -> Result<Agent, Failure> {
    let options = roles::host_options(&place.path, flags)?;
    // Not stopped in the middle: what it tries out, it also removes.
    let host = Host::open(&options, Sandboxes::Needed).await.map_err(|error| refused(&error))?;
    let tell = |line: &str| {
        say(format_args!("{line}\n"));
        Ok(())
    };
    tokio::select! {
        installed = harness::install(&host.tools, harness, tell) => installed.map_err(elsewhere)?,
        () = asked_to_stop(&mut stopped) => return Err(was_stopped()),
    }
    let agent = Agent::new(host, judge.clone(), harness, credential.clone()).await;
    let agent = agent.ok_or_else(|| Failure::unavailable("no kind of sandbox works here", roles::NO_SANDBOX))?;
    say(format_args!(
        "Each ask has a {} sandbox of its own, in {}.\n",
        agent.kind(),
        place.path.display()
    ));
    Ok(agent)
}

/// An agent that cannot be had is as a provider that cannot be reached.
fn elsewhere(failure: Failure) -> Failure {
    match failure {
        Failure::Failed { message, next } => Failure::Unavailable { message, next },
        other => other,
    }
}

fn refused(error: &WorkerError) -> Failure {
    let text = error.to_string();
    match error {
        WorkerError::NoSandbox(_) => Failure::unavailable(text, roles::NO_SANDBOX),
        WorkerError::Tools(_) => Failure::unavailable(text, "Check --tools and --harness-binary."),
        WorkerError::Folder(FolderError::InUse(_)) => Failure::new(text, "Name another folder with --work."),
        _ => Failure::new(text, "Check --work, --tools and --docker."),
    }
}

/// Ends what is being asked, and removes what there is.
pub(super) async fn close(agent: Agent, place: &Place) -> Result<(), Failure> {
    let closed = agent.close().await;
    let removed = place.remove().await;
    closed.map_err(|left| {
        Failure::new(
            left.to_string(),
            "They end by themselves within minutes; look for what keeps them, such as a full disk.",
        )
    })?;
    removed
}
