//! Whether this worker offers Docker sandboxes.

use std::path::{Path, PathBuf};

use evalgrid_sandbox::{DockerImage, DockerOptions, DockerProvider};
use tokio::time::timeout;

use crate::{WorkerError, WorkerOptions, providers::PROBE_DEADLINE};

/// Where daemons listen.
const USUAL_SOCKET: &str = "/var/run/docker.sock";
/// Below the worker's folder.
const FOLDER: &str = "docker";

/// Whether Docker sandboxes are offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DockerPolicy {
    /// Never.
    Off,
    /// Where a daemon answers at `DOCKER_HOST` or the usual place, and has the image.
    Auto,
    /// By the daemon at this socket, or not at all: then the worker does not start.
    At(PathBuf),
}

/// How Docker is used, where it is.
#[derive(Clone, Debug)]
pub struct DockerUse {
    /// Whether at all.
    pub policy: DockerPolicy,
    /// What containers are made of.
    pub image: DockerImage,
    /// Processors that each sandbox may keep busy; no limit if absent.
    pub cpus: Option<f64>,
}

impl DockerPolicy {
    /// The socket to try, if any.
    fn socket(&self) -> Option<PathBuf> {
        match self {
            Self::Off => None,
            Self::At(socket) => Some(socket.clone()),
            Self::Auto => {
                let named = std::env::var("DOCKER_HOST").ok();
                let socket = match &named {
                    Some(url) => url.strip_prefix("unix://")?,
                    None => USUAL_SOCKET,
                };
                Path::new(socket).exists().then(|| socket.into())
            }
        }
    }
}

/// Opens the provider below `work`, and tries it out. `Err` says, for people, why that is none; nobody is there to be asked: `None`.
pub async fn open_docker(options: &WorkerOptions, worker: &str) -> Option<Result<DockerProvider, String>> {
    let socket = options.docker.policy.socket()?;
    let docker = DockerOptions {
        socket,
        image: options.docker.image.clone(),
        owner: worker.to_owned(),
        network: options.network.clone(),
        cpus: options.docker.cpus,
    };
    let executable = Some(options.supervisor_executable.clone());
    let open = async {
        // Building an image may take long, and has a deadline of its own.
        let provider = DockerProvider::open(options.work.join(FOLDER), executable, docker)
            .await
            .map_err(|error| error.to_string())?;
        match timeout(PROBE_DEADLINE, provider.probe()).await {
            Ok(result) => result.map(|()| provider),
            Err(_) => Err("making a container takes too long".to_owned()),
        }
    };
    Some(open.await)
}

/// The provider, with this folder of agents, where it is offered.
pub(crate) async fn provider(options: &WorkerOptions, tools: &Path, worker: &str) -> Result<Option<DockerProvider>, WorkerError> {
    let reason = match open_docker(options, worker).await {
        Some(Ok(provider)) => {
            let provider = provider.with_tools(tools);
            return provider.map(Some).map_err(|error| WorkerError::Provider("docker", error));
        }
        Some(Err(reason)) => reason,
        None => "there is no daemon to be asked".to_owned(),
    };
    if let DockerPolicy::At(_) = options.docker.policy {
        return Err(WorkerError::Docker(reason));
    }
    // Whoever could not see these would tell the scheduler that they are gone.
    let folder = options.work.join(FOLDER);
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    if entries
        .map(|entry| entry.file_name())
        .any(|name| !name.to_string_lossy().starts_with('.'))
    {
        return Err(WorkerError::DockerLeft { folder, reason });
    }
    tracing::info!("Docker sandboxes are not offered: {reason}");
    Ok(None)
}
