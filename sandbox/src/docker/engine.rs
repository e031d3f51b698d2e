//! What we ask of a Docker daemon, each with a deadline, and never of a container that is not this executor's.

use std::{collections::HashMap, io, path::Path, time::Duration};

use bollard::{
    API_DEFAULT_VERSION, Docker, body_full,
    errors::Error,
    models::{ContainerCreateBody, ContainerInspectResponse, ImageInspect},
    query_parameters::{
        BuildImageOptions, CreateContainerOptions, InspectContainerOptions, InspectNetworkOptions, ListContainersOptions, LogsOptions,
        RemoveContainerOptions, StartContainerOptions,
    },
};
use futures::{StreamExt, TryStreamExt};
use tokio::time::{Instant, sleep, timeout};

/// Any one answer. A daemon under full load takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// The first one: whether there is a daemon at all.
const GREETING_PATIENCE: Duration = Duration::from_secs(10);
/// Until a container that was removed is not found any more.
const REMOVE_PATIENCE: Duration = Duration::from_secs(60);
/// Until the daemon knows that a container has ended. It is told by containerd within milliseconds.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// Pulling and building from scratch.
const BUILD_PATIENCE: Duration = Duration::from_secs(30 * 60);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// An answer to "create" is lost now and then; more often than this something is wrong.
const CREATE_ATTEMPTS: usize = 3;
/// The init writes at most one line.
const LOG_LIMIT: usize = 2 * 1024;

/// On all our containers: the executor's folder that they belong to.
const OWNER: &str = "evalgrid.owner";
/// The sandbox.
const SANDBOX: &str = "evalgrid.sandbox";
/// The fencing token under which it was made.
const TOKEN: &str = "evalgrid.token";

/// A daemon, as one executor uses it.
pub struct Engine {
    docker: Docker,
    owner: String,
}

/// Whether the daemon itself said that it has no such thing.
fn is_missing(error: &Error) -> bool {
    matches!(error, Error::DockerResponseServerError { status_code: 404, .. })
}

/// The daemon's own words where it has some.
fn text(error: Error) -> String {
    match error {
        Error::DockerResponseServerError { message, .. } => message,
        error => format!("Docker does not answer: {error}"),
    }
}

/// One call with its deadline. The outer error is one of the way, so that what came of the call is unknown.
async fn answer<T>(call: impl Future<Output = Result<T, Error>>) -> Result<Result<T, Error>, String> {
    match timeout(PATIENCE, call).await {
        Ok(Err(error @ Error::DockerResponseServerError { .. })) => Ok(Err(error)),
        Ok(Err(error)) => Err(text(error)),
        Ok(Ok(value)) => Ok(Ok(value)),
        Err(_) => Err(format!("Docker has not answered within {PATIENCE:?}")),
    }
}

impl Engine {
    /// Reaches the daemon behind a socket. `owner`: letters, digits, `-`, `_` and `.`.
    pub async fn connect(socket: &Path, owner: &str) -> Result<Self, String> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if owner.is_empty() || !owner.bytes().all(plain) {
            return Err(format!("{owner:?} cannot be a part of a container's name"));
        }
        let path = socket.to_str().ok_or("the socket's path is not text")?;
        let nobody = |error: Error| format!("nobody answers at {path}: {error}");
        let docker = Docker::connect_with_unix(path, PATIENCE.as_secs(), API_DEFAULT_VERSION).map_err(nobody)?;
        let greeted = timeout(GREETING_PATIENCE, docker.negotiate_version()).await;
        let docker = greeted
            .map_err(|_| format!("nobody answers at {path} within {GREETING_PATIENCE:?}"))?
            .map_err(nobody)?;
        Ok(Self {
            docker,
            owner: owner.to_owned(),
        })
    }

    /// The name of a sandbox's container: the intent in the log, as the daemon sees it.
    fn container(&self, name: &str) -> String {
        format!("evalgrid-{}-{name}", self.owner)
    }

    /// Makes a sandbox's container and starts it. An earlier one of the same name that is ours is removed before.
    pub async fn create(&self, name: &str, token: u64, mut body: ContainerCreateBody) -> Result<(), String> {
        let container = self.container(name);
        body.labels = Some(HashMap::from([
            (OWNER.to_owned(), self.owner.clone()),
            (SANDBOX.to_owned(), name.to_owned()),
            (TOKEN.to_owned(), token.to_string()),
        ]));
        let mut attempts = 0;
        loop {
            attempts += 1;
            let options = CreateContainerOptions {
                name: Some(container.clone()),
                ..CreateContainerOptions::default()
            };
            let reason = match answer(self.docker.create_container(Some(options), body.clone())).await {
                Ok(Ok(_)) => break,
                // Left over from a call whose answer was lost.
                Ok(Err(error @ Error::DockerResponseServerError { status_code: 409, .. })) => text(error),
                Ok(Err(error)) => return Err(text(error)),
                Err(reason) => {
                    tracing::warn!(sandbox = name, reason, "whether a container was made is unknown; looking");
                    reason
                }
            };
            if attempts == CREATE_ATTEMPTS {
                return Err(reason);
            }
            self.remove(name).await?;
        }
        match answer(self.docker.start_container(&container, None::<StartContainerOptions>)).await {
            Ok(result) => result.map_err(text),
            // If it did start, its init comes to the supervisor; if not, that says so.
            Err(reason) => {
                tracing::warn!(sandbox = name, reason, "whether a container was started is unknown");
                Ok(())
            }
        }
    }

    /// What the daemon knows of a sandbox's container; `None`: nothing. What is not ours is an error.
    async fn inspect(&self, name: &str) -> Result<Option<ContainerInspectResponse>, String> {
        let container = self.container(name);
        match answer(self.docker.inspect_container(&container, None::<InspectContainerOptions>)).await? {
            Ok(found) => {
                let labels = found.config.as_ref().and_then(|config| config.labels.as_ref());
                if labels.and_then(|labels| labels.get(OWNER)) != Some(&self.owner) {
                    return Err(format!("the container {container} has not our label, so it is left alone"));
                }
                Ok(Some(found))
            }
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(text(error)),
        }
    }

    /// Kills and removes a sandbox's container. On `Ok` the daemon has said that there is none.
    pub async fn remove(&self, name: &str) -> Result<(), String> {
        let until = Instant::now() + REMOVE_PATIENCE;
        while let Some(found) = self.inspect(name).await? {
            // By its id: what came later under the same name is not meant.
            let Some(id) = found.id else {
                return Err("Docker has a container without an id".to_owned());
            };
            let options = RemoveContainerOptions {
                force: true,
                v: true,
                ..RemoveContainerOptions::default()
            };
            match answer(self.docker.remove_container(&id, Some(options))).await? {
                // 409: somebody else is removing it already.
                Ok(())
                | Err(Error::DockerResponseServerError {
                    status_code: 404 | 409, ..
                }) => {}
                Err(error) => return Err(text(error)),
            }
            if Instant::now() > until {
                return Err(format!("the container {} is still there", self.container(name)));
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Sandboxes that have a container.
    pub async fn list(&self) -> Result<Vec<String>, String> {
        let options = ListContainersOptions {
            all: true,
            filters: Some(HashMap::from([("label".to_owned(), vec![format!("{OWNER}={}", self.owner)])])),
            ..ListContainersOptions::default()
        };
        let found = answer(self.docker.list_containers(Some(options))).await?.map_err(text)?;
        Ok(found.into_iter().filter_map(|c| c.labels?.remove(SANDBOX)).collect())
    }

    /// For people: how a sandbox's container ended. `None`: it lives, or the daemon does not know it.
    pub async fn end_of(&self, name: &str) -> Option<String> {
        let until = Instant::now() + END_PATIENCE;
        loop {
            let state = match self.inspect(name).await {
                Ok(found) => found?.state?,
                Err(reason) => return Some(reason),
            };
            if state.running != Some(true) {
                let memory = match state.oom_killed {
                    Some(true) => ", and memory ran out in it",
                    _ => "",
                };
                return Some(format!("the container ended with status {}{memory}", state.exit_code.unwrap_or(-1)));
            }
            if Instant::now() > until {
                return None;
            }
            sleep(PAUSE).await;
        }
    }

    /// What a sandbox's init has written, which is why it did not start.
    pub async fn log(&self, name: &str) -> String {
        let options = LogsOptions {
            stdout: true,
            stderr: true,
            tail: "10".to_owned(),
            ..LogsOptions::default()
        };
        let container = self.container(name);
        let mut said = Vec::new();
        let read = async {
            let mut lines = std::pin::pin!(self.docker.logs(&container, Some(options)));
            while let Some(Ok(line)) = lines.next().await {
                said.extend_from_slice(&line.into_bytes());
                if said.len() > LOG_LIMIT {
                    break;
                }
            }
        };
        // What has come until then is better than nothing.
        let _ = timeout(PATIENCE, read).await;
        said.truncate(LOG_LIMIT);
        String::from_utf8_lossy(&said).trim().to_owned()
    }

    /// An image that is there; `None` if it is not.
    pub async fn image(&self, image: &str) -> Result<Option<ImageInspect>, String> {
        match answer(self.docker.inspect_image(image)).await? {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(text(error)),
        }
    }

    /// Whether the daemon has the network through which containers reach the host's.
    pub async fn has_bridge(&self) -> Result<bool, String> {
        match answer(self.docker.inspect_network("bridge", None::<InspectNetworkOptions>)).await? {
            Ok(_) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(text(error)),
        }
    }

    /// Builds an image from a Dockerfile alone, without a folder to copy from.
    pub async fn build(&self, tag: &str, dockerfile: &[u8]) -> Result<(), String> {
        let options = BuildImageOptions {
            dockerfile: DOCKERFILE.to_owned(),
            t: Some(tag.to_owned()),
            rm: true,
            forcerm: true,
            ..BuildImageOptions::default()
        };
        let context = archive(dockerfile).map_err(|e| e.to_string())?;
        let progress = self.docker.build_image(options, None, Some(body_full(context.into())));
        let build = progress.try_for_each(|info| async move {
            if let Some(line) = info.stream.as_deref().map(str::trim).filter(|line| !line.is_empty()) {
                tracing::info!("docker build: {line}");
            }
            Ok(())
        });
        match timeout(BUILD_PATIENCE, build).await {
            Ok(result) => result.map_err(|error| match error {
                Error::DockerStreamError { error } => error,
                error => text(error),
            }),
            Err(_) => Err(format!("it takes longer than {BUILD_PATIENCE:?}")),
        }
    }
}

const DOCKERFILE: &str = "Dockerfile";

/// A tar archive with a Dockerfile and nothing else.
fn archive(dockerfile: &[u8]) -> io::Result<Vec<u8>> {
    const BLOCK: usize = 512;
    // Eleven octal digits hold 8 GiB; this is a text.
    const LIMIT: usize = 1024 * 1024;
    if dockerfile.len() > LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is over 1 MiB long"));
    }
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, DOCKERFILE);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", dockerfile.len()));
    put(136, "00000000000\0");
    // The sum is made as if its own field were blank.
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\0");
    put(263, "00");
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.extend_from_slice(dockerfile);
    // Up to a whole block, and two empty ones.
    archive.resize(archive.len().next_multiple_of(BLOCK) + 2 * BLOCK, 0);
    Ok(archive)
}
