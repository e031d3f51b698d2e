//! The provider `docker`: each sandbox is a container of a daemon on this machine.
//!
//! The supervisor stays on the host. Process 1 of the container is our own init, the same as in bubblewrap, which connects to the supervisor
//! through a socket in a folder that both see; from then on the daemon is not needed until the sandbox is destroyed. Home and workspace are
//! folders of the host, so that files go in and out as everywhere else.

mod engine;
mod runtime;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bollard::models::{ContainerCreateBody, HealthConfig, HostConfig, HostConfigLogConfig, ImageInspect, Mount, MountType};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;

pub(crate) use engine::Engine;
use runtime::Runtime;

use crate::{
    BaseSupport, Sandbox, SandboxError, SandboxName, SandboxProvider, SandboxSpec,
    handle::on_blocking_thread,
    inner_protocol::{DOOR, DOOR_SOCKET, HOME, InitOptions, SHARE, TOOLS, WORKSPACE},
    layout::{self, Layout},
    network::Network,
    protocol::{Backend, Docker},
    provider::{Core, try_out},
    share,
};

const PROVIDER: &str = "docker";
/// The user inside where neither the image nor this process's own rights say otherwise.
const USER: (u32, u32) = (1000, 1000);
/// A container takes half a second, under load ten; three attempts at creating one have to fit.
const CREATE_PATIENCE: Duration = Duration::from_secs(90);
/// Of the init beyond the sandbox's: the supervisor ends first and says why.
const LIFETIME_MARGIN: Duration = Duration::from_secs(30);
/// Chromium and databases want more than Docker's 64 MB.
const SHARED_MEMORY: i64 = 512 << 20;
/// A part of a sandbox's memory that `/tmp` may take, as a divisor: it counts as memory, and full it is to say so rather than kill.
const TMP_SHARE: u64 = 2;

/// How Docker is used.
#[derive(Clone, Debug)]
pub struct DockerOptions {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// What containers are made of.
    pub image: DockerImage,
    /// Whose containers these are: unique among all executors at this daemon, the same after every start. Letters, digits, `-`, `_`, `.`.
    pub owner: String,
    /// What sandboxes may reach. [`Network::Host`] means the daemon's bridge, where it has one.
    pub network: Network,
    /// Processors that each sandbox may keep busy; no limit if absent.
    pub cpus: Option<f64>,
}

/// What containers are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DockerImage {
    /// An image that is there, by tag, digest or id. It is never pulled.
    Name(String),
    /// Built from this Dockerfile, without a folder to copy from, unless one of the same content was built before.
    File(PathBuf),
}

/// Sandboxes that are containers.
pub struct DockerProvider {
    core: Core,
    engine: Arc<Engine>,
    options: DockerOptions,
    /// The image by its id: a tag may move while sandboxes are made.
    image: String,
    image_name: String,
    user: (u32, u32),
    bridge: bool,
    runtime: Arc<Runtime>,
}

impl DockerProvider {
    /// Sandboxes below `root`, a folder for this provider alone, which is made where it is missing. `executable` is the program whose
    /// `main` calls [`crate::run_if_helper`]: by default this one. Builds the image where that is asked for.
    pub async fn open(root: impl AsRef<Path>, executable: Option<PathBuf>, options: DockerOptions) -> Result<Self, SandboxError> {
        let failed = |reason| SandboxError::Create {
            provider: PROVIDER,
            reason,
        };
        let engine = Arc::new(Engine::connect(&options.socket, &options.owner).await.map_err(failed)?);
        let (image_name, image) = image(&engine, &options.image).await.map_err(failed)?;
        let (env, image_user) = configured(&image);
        let bridge = options.network == Network::Host && engine.has_bridge().await.map_err(failed)?;
        if options.network == Network::Host && !bridge {
            tracing::warn!("this Docker daemon has no bridge network, so its containers have no network at all");
        }
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // Whoever is not root can neither give files away nor read what others keep to themselves.
        let (user, owner) = match own.0 {
            0 => (image_user.unwrap_or(USER), Some(image_user.unwrap_or(USER))),
            _ => (own, None),
        };
        let network = options.network.clone();
        let core = Core::new(
            root.as_ref(),
            executable,
            move |_, executable| {
                Ok(Backend::Docker(Docker {
                    executable: executable.to_owned(),
                    env,
                    owner,
                    network,
                }))
            },
            PROVIDER,
        )?
        .with_engine(engine.clone());
        let (folder, executable) = (core.root.path.clone(), core.executable.clone());
        let runtime = on_blocking_thread(move || Ok(Runtime::prepare(&folder, &executable, user)))
            .await?
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self {
            core,
            engine,
            options,
            image: image.id.unwrap_or_else(|| image_name.clone()),
            image_name,
            user,
            bridge,
            runtime: Arc::new(runtime),
        })
    }

    /// The folder of programs that its sandboxes see, read-only, at [`Sandbox::tools`]; made where it is missing. They run in the image.
    pub fn with_tools(mut self, folder: &Path) -> Result<Self, SandboxError> {
        self.core.use_tools(folder)?;
        Ok(self)
    }

    /// Really makes a sandbox, runs what harnesses need in it and destroys it. `Err` says, for people, why that did not work.
    pub async fn probe(&self) -> Result<(), String> {
        let image = &self.image_name;
        match try_out(self, &["/bin/bash", "-c", ": > ~/.probe && : > .probe"]).await? {
            0 => Ok(()),
            126 | 127 => Err(format!("the image {image} has no /bin/bash, which harnesses need")),
            code => Err(format!(
                "a container of {image} cannot write to its folders (status {code}); is the daemon rootless, or are its users mapped?"
            )),
        }
    }

    /// The container of a sandbox.
    fn container(&self, spec: &SandboxSpec, layout: &Layout) -> Result<ContainerCreateBody, serde_json::Error> {
        let options = InitOptions {
            connect: Some(Path::new(DOOR).join(DOOR_SOCKET)),
            lifetime: Some(spec.lifetime.saturating_add(LIFETIME_MARGIN)),
            listen: self.options.network.listen(),
            ..InitOptions::default()
        };
        let mut line = self.runtime.command(serde_json::to_string(&options)?).into_iter();
        let mount = |source: PathBuf, target: &str, read_only| Mount {
            typ: Some(MountType::BIND),
            source: Some(source.to_string_lossy().into_owned()),
            target: Some(target.to_owned()),
            read_only: Some(read_only),
            ..Mount::default()
        };
        let mut mounts = vec![
            mount(layout.home(), HOME, false),
            mount(layout.workspace(), WORKSPACE, false),
            mount(layout.door(), DOOR, true),
            mount(share::folder(&self.core.root.path), SHARE, true),
            mount(self.core.tools.clone(), TOOLS, true),
        ];
        mounts.extend(
            self.runtime
                .mounts()
                .into_iter()
                .map(|(source, target)| mount(source, &target, true)),
        );
        let mut sysctls = HashMap::new();
        if !self.options.network.endpoints().is_empty() {
            mounts.push(mount(layout.hosts(), "/etc/hosts", true));
            // The init has no capability with which to take a low port.
            sysctls.insert("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned());
        }
        let memory = i64::try_from(spec.limits.memory_bytes).unwrap_or(i64::MAX);
        // Where the image has the folder, its mode wins, so the user must own it.
        let (user, group) = self.user;
        let tmp = format!(
            "rw,exec,nosuid,nodev,mode=1777,uid={user},gid={group},size={}",
            spec.limits.memory_bytes / TMP_SHARE
        );
        let host = HostConfig {
            network_mode: Some(if self.bridge { "bridge" } else { "none" }.to_owned()),
            memory: Some(memory),
            memory_swap: Some(memory),
            pids_limit: Some(spec.limits.pids.into()),
            nano_cpus: self.options.cpus.map(|cpus| (cpus * 1e9) as i64),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec!["no-new-privileges".to_owned()]),
            readonly_rootfs: Some(true),
            init: Some(false),
            auto_remove: Some(false),
            shm_size: Some(SHARED_MEMORY),
            tmpfs: Some(["/tmp", "/var/tmp"].map(|path| (path.to_owned(), tmp.clone())).into()),
            // The init's last words, and nobody else's: it closes its outputs before it starts anything.
            log_config: Some(HostConfigLogConfig {
                typ: Some("json-file".to_owned()),
                config: Some(
                    [("max-size", "64k"), ("max-file", "1")]
                        .map(|(k, v)| (k.to_owned(), v.to_owned()))
                        .into(),
                ),
            }),
            sysctls: Some(sysctls),
            mounts: Some(mounts),
            ..HostConfig::default()
        };
        Ok(ContainerCreateBody {
            image: Some(self.image.clone()),
            hostname: Some("sandbox".to_owned()),
            user: Some(format!("{user}:{group}")),
            entrypoint: Some(line.next().into_iter().collect()),
            cmd: Some(line.collect()),
            working_dir: Some("/".to_owned()),
            healthcheck: Some(HealthConfig {
                test: Some(vec!["NONE".to_owned()]),
                ..HealthConfig::default()
            }),
            host_config: Some(host),
            ..ContainerCreateBody::default()
        })
    }

    fn failed(&self, operation: String, reason: String) -> SandboxError {
        SandboxError::Operation { operation, reason }
    }
}

/// The image and its name, built if need be.
async fn image(engine: &Engine, image: &DockerImage) -> Result<(String, ImageInspect), String> {
    /// Two providers that ask for the same image at once build it once.
    static BUILDING: Mutex<()> = Mutex::const_new(());
    match image {
        DockerImage::Name(name) => match engine.image(name).await? {
            Some(found) => Ok((name.clone(), found)),
            None => Err(format!("there is no image {name}; docs/sandboxes.md tells how to build one")),
        },
        DockerImage::File(path) => {
            let failed = |reason| format!("build an image from {}: {reason}", path.display());
            let content = tokio::fs::read(path).await.map_err(|e| failed(e.to_string()))?;
            let hash: String = Sha256::digest(&content).iter().map(|b| format!("{b:02x}")).collect();
            let tag = format!("evalgrid-built:{hash}");
            let _building = BUILDING.lock().await;
            if engine.image(&tag).await?.is_none() {
                tracing::info!("building {tag} from {}", path.display());
                engine.build(&tag, &content).await.map_err(failed)?;
            }
            match engine.image(&tag).await? {
                Some(found) => Ok((tag, found)),
                None => Err(failed("it was built and is not there".to_owned())),
            }
        }
    }
}

/// The variables and the user that an image sets. A user by name, or root, is none.
fn configured(image: &ImageInspect) -> (BTreeMap<String, String>, Option<(u32, u32)>) {
    let Some(config) = &image.config else { return Default::default() };
    let pairs = config.env.iter().flatten().filter_map(|pair| pair.split_once('='));
    let env = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let user = config.user.as_deref().and_then(|user| {
        let (user, group) = user.split_once(':').unwrap_or((user, user));
        let user = user.parse().ok().filter(|user| *user != 0)?;
        Some((user, group.parse().unwrap_or(user)))
    });
    (env, user)
}

#[async_trait]
impl SandboxProvider for DockerProvider {
    fn name(&self) -> &'static str {
        PROVIDER
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let layout = self.core.layout(&spec.name).map_err(|e| self.core.failed(e))?;
        let body = self.container(spec, &layout).map_err(|e| self.core.failed(e))?;
        let runtime = self.runtime.clone();
        on_blocking_thread(move || Ok(runtime.ensure()))
            .await?
            .map_err(|e| self.core.failed(e))?;
        let made = AtomicBool::new(false);
        let prepared = || async {
            made.store(true, Ordering::Relaxed);
            self.engine.create(&spec.name, spec.token, body).await
        };
        let result = self.core.create_with(spec, CREATE_PATIENCE, prepared).await;
        // Before that, a container of this name is somebody else's sandbox.
        if let (Err(error), true) = (&result, made.into_inner()) {
            let said = self.engine.log(&spec.name).await;
            if let Err(reason) = self.engine.remove(&spec.name).await {
                tracing::warn!(sandbox = spec.name, reason, "a half-made container was left behind");
            }
            if !said.is_empty() {
                return Err(self.core.failed(format!("{error}; the init said: {said}")));
            }
        }
        result
    }

    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.core.attach(name, token).await
    }

    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        let mut names = self.core.list()?;
        match self.engine.list().await {
            Ok(containers) => names.extend(containers.into_iter().filter(|name| layout::is_sandbox_name(name))),
            // A container goes before its folder, so the folders alone name them all, unless somebody has deleted one. A daemon that is
            // stopped must not keep this executor's other sandboxes from their work.
            Err(reason) => tracing::warn!(reason, "containers whose folders were deleted are not listed"),
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        self.core.share(files)
    }

    fn bases(&self) -> Option<BaseSupport> {
        let (user, group) = self.user;
        Some(BaseSupport {
            most_bytes: self.core.means.most_bytes(),
            environment: Some(format!("{PROVIDER} {} {user}:{group}", self.image)),
        })
    }

    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        self.core.bases_in_use()
    }

    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        let Ok(layout) = self.core.layout(name) else { return Ok(()) };
        let is_there = layout.folder.exists();
        let orderly = is_there && self.core.end(&layout).await;
        // The folder goes last: as long as it is there, everybody knows that there may be a container.
        let removed = self.engine.remove(name).await;
        removed.map_err(|reason| self.failed(format!("destroy the sandbox {name}"), reason))?;
        match is_there {
            true => self.core.clear(name, layout, orderly).await,
            false => Ok(()),
        }
    }
}
