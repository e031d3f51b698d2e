//! The two providers that need nothing but this host: plain processes, and bubblewrap. What they share with `docker`.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::Mutex,
};

use crate::{
    BaseSupport, Enforcement, Limits, Sandbox, SandboxError, SandboxName, SandboxProvider, SandboxSpec, StepCommand, StepExit, cgroup,
    client::Client,
    destroy,
    docker::Engine,
    handle::{self, Cancel, Handle, Inside},
    helpers,
    inner_protocol::{HOME, SHARE, TOOLS, WORKSPACE},
    journal,
    layers::{self, Based, Means},
    layout::{self, Layout},
    network::Network,
    protocol::{Backend, Bubblewrap, Create, Reply, Request},
    root::Root,
    share,
};

/// Forking takes a millisecond, bubblewrap 30; a machine under full load takes seconds.
const CREATE_PATIENCE: Duration = Duration::from_secs(30);
/// Starting the zygote is one exec.
const ZYGOTE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a supervisor may take to say that everything is dead. After that it is killed itself.
const DESTROY_PATIENCE: Duration = Duration::from_secs(20);
/// A living supervisor answers at once.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);
/// The tools folder of a provider that was given no other, below its root. Empty.
const OWN_TOOLS: &str = ".tools";

/// Sandboxes that are nothing but folders and process trees: no isolation at all.
pub struct ProcessProvider {
    core: Core,
}

/// Sandboxes in user, pid, mount, uts and ipc namespaces, made by bubblewrap, without any privilege.
pub struct BubblewrapProvider {
    core: Core,
}

/// How bubblewrap is used.
#[derive(Clone, Debug)]
pub struct BubblewrapOptions {
    /// The `bwrap` program: a path, or a name to look up in `PATH`.
    pub program: PathBuf,
    /// What sandboxes may reach.
    pub network: Network,
}

impl Default for BubblewrapOptions {
    fn default() -> Self {
        Self {
            program: "bwrap".into(),
            network: Network::Host,
        }
    }
}

impl ProcessProvider {
    /// Sandboxes below `root`, a folder for this provider alone, which is made where it is missing. `executable` is the program whose
    /// `main` calls [`crate::run_if_helper`]: by default this one.
    pub fn new(root: impl AsRef<Path>, executable: Option<PathBuf>) -> Result<Self, SandboxError> {
        let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".to_owned());
        Ok(Self {
            core: Core::new(root.as_ref(), executable, |_, _| Ok(Backend::Process { path }), "process")?,
        })
    }

    /// The folder of programs that its sandboxes see, read-only where the provider isolates, at [`Sandbox::tools`]; made where it is missing.
    pub fn with_tools(mut self, folder: &Path) -> Result<Self, SandboxError> {
        self.core.use_tools(folder)?;
        Ok(self)
    }

    /// Makes sandboxes from bases by copying them, even where overlayfs works.
    pub fn with_copied_bases(mut self) -> Self {
        self.core.means = Means::Copy;
        self
    }

    /// What this host enforces.
    pub fn enforcement(&self) -> &Enforcement {
        &self.core.enforcement
    }

    /// A finished step, whether its supervisor still lives or not. `None`: not started, not finished, or no such sandbox.
    pub fn finished_step(&self, name: &str, step: &str) -> Result<Option<StepExit>, SandboxError> {
        self.core.finished_step(name, step)
    }
}

impl BubblewrapProvider {
    /// Sandboxes below `root`, a folder for this provider alone, which is made where it is missing. `executable` is the program whose
    /// `main` calls [`crate::run_if_helper`]: by default this one.
    pub fn new(root: impl AsRef<Path>, executable: Option<PathBuf>, options: BubblewrapOptions) -> Result<Self, SandboxError> {
        let backend = |root: &Path, executable: &Path| {
            let program = find_program(&options.program)
                .ok_or_else(|| io::Error::other(format!("{} is not installed (package bubblewrap)", options.program.display())))?;
            Ok(Backend::Bubblewrap(Bubblewrap {
                program,
                executable: executable.to_owned(),
                etc: root.join(".etc"),
                share: share::folder(root),
                tools: root.join(OWN_TOOLS),
                network: options.network.clone(),
            }))
        };
        Ok(Self {
            core: Core::new(root.as_ref(), executable, backend, "bubblewrap")?,
        })
    }

    /// The folder of programs that its sandboxes see, read-only where the provider isolates, at [`Sandbox::tools`]; made where it is missing.
    pub fn with_tools(mut self, folder: &Path) -> Result<Self, SandboxError> {
        self.core.use_tools(folder)?;
        Ok(self)
    }

    /// Makes sandboxes from bases by copying them, even where overlayfs works.
    pub fn with_copied_bases(mut self) -> Self {
        self.core.means = Means::Copy;
        self
    }

    /// What this host enforces.
    pub fn enforcement(&self) -> &Enforcement {
        &self.core.enforcement
    }

    /// A finished step, whether its supervisor still lives or not. `None`: not started, not finished, or no such sandbox.
    pub fn finished_step(&self, name: &str, step: &str) -> Result<Option<StepExit>, SandboxError> {
        self.core.finished_step(name, step)
    }

    /// Really makes a sandbox, runs `true` in it and destroys it. `Err` says, for people, why that did not work.
    pub async fn probe(&self) -> Result<(), String> {
        match try_out(self, &["true"]).await? {
            0 => Ok(()),
            code => Err(format!("`true` ended with status {code} in bubblewrap")),
        }
    }
}

/// Makes a sandbox, runs a command in it, destroys it. The command's exit status, or, for people, what did not work.
pub(crate) async fn try_out(provider: &dyn SandboxProvider, argv: &[&str]) -> Result<i32, String> {
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let name = format!("probe-{}-{}", std::process::id(), PROBES.fetch_add(1, Ordering::Relaxed));
    let spec = SandboxSpec {
        name: name.clone(),
        token: 1,
        lifetime: Duration::from_secs(60),
        limits: Limits {
            memory_bytes: 256 << 20,
            pids: 32,
        },
        base: None,
    };
    let command = StepCommand {
        step: "probe".into(),
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        env: Default::default(),
        time_limit: Duration::from_secs(30),
    };
    let result = async {
        let exit = provider.create(&spec).await?.run(&command).await?;
        Ok::<_, SandboxError>(exit.code)
    }
    .await;
    match (result, provider.destroy(&name).await) {
        (Ok(code), Ok(())) => Ok(code),
        (Err(e), _) | (_, Err(e)) => Err(e.to_string()),
    }
}

#[async_trait]
impl SandboxProvider for ProcessProvider {
    fn name(&self) -> &'static str {
        self.core.provider
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.core.create(spec).await
    }

    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.core.attach(name, token).await
    }

    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        self.core.list()
    }

    fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        self.core.share(files)
    }

    fn bases(&self) -> Option<BaseSupport> {
        Some(BaseSupport {
            most_bytes: self.core.means.most_bytes(),
            environment: None,
        })
    }

    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        self.core.bases_in_use()
    }

    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        self.core.destroy(name).await
    }
}

#[async_trait]
impl SandboxProvider for BubblewrapProvider {
    fn name(&self) -> &'static str {
        self.core.provider
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.core.create(spec).await
    }

    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.core.attach(name, token).await
    }

    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        self.core.list()
    }

    fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        self.core.share(files)
    }

    fn bases(&self) -> Option<BaseSupport> {
        Some(BaseSupport {
            most_bytes: self.core.means.most_bytes(),
            environment: Some(self.name().to_owned()),
        })
    }

    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        self.core.bases_in_use()
    }

    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        self.core.destroy(name).await
    }
}

/// What all providers share.
pub(crate) struct Core {
    pub provider: &'static str,
    pub root: Arc<Root>,
    /// Absolute. Whoever makes a sandbox sees to it that it is there.
    pub tools: PathBuf,
    pub executable: PathBuf,
    boot_id: String,
    backend: Backend,
    plan: cgroup::Plan,
    enforcement: Enforcement,
    /// How sandboxes are made from bases.
    pub means: Means,
    /// Who knows how a container ended.
    engine: Option<Arc<Engine>>,
    zygote: Mutex<Option<Zygote>>,
}

/// The running helper that supervisors are forked from. Dropping it closes its lifeline, so it exits.
struct Zygote {
    socket: String,
    _lifeline: ChildStdin,
    _child: Child,
}

impl Core {
    pub fn new(
        root: &Path,
        executable: Option<PathBuf>,
        backend: impl FnOnce(&Path, &Path) -> io::Result<Backend>,
        provider: &'static str,
    ) -> Result<Self, SandboxError> {
        let prepare = || -> io::Result<(Root, PathBuf, String, Backend)> {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
            let root = root.canonicalize()?;
            let executable = executable.map_or_else(std::env::current_exe, Ok)?.canonicalize()?;
            let backend = backend(&root, &executable)?;
            let etc = match &backend {
                Backend::Bubblewrap(bubblewrap) => Some(bubblewrap.etc.clone()),
                Backend::Process { .. } | Backend::Docker(_) => None,
            };
            Ok((Root::new(root, etc)?, executable, layout::boot_id()?, backend))
        };
        let (root, executable, boot_id, backend) = prepare().map_err(|e| SandboxError::Create {
            provider,
            reason: e.to_string(),
        })?;
        // A container comes with groups of its own, and where its daemon lives nobody may see mounts that are made here.
        let (plan, enforcement, means, bases) = match backend {
            Backend::Docker(_) => (Default::default(), Default::default(), Means::Copy, "copies".to_owned()),
            _ => {
                let (plan, enforcement) = cgroup::probe();
                let (means, bases) = layers::choose(&root.path);
                (plan, enforcement, means, bases)
            }
        };
        tracing::info!(provider, enforcement = enforcement.description, bases, "sandbox provider is ready");
        Ok(Self {
            provider,
            tools: root.path.join(OWN_TOOLS),
            root: Arc::new(root),
            executable,
            boot_id,
            backend,
            plan,
            enforcement,
            means,
            engine: None,
            zygote: Mutex::new(None),
        })
    }

    pub fn use_tools(&mut self, folder: &Path) -> Result<(), SandboxError> {
        let found = make_tools(folder).and_then(|()| folder.canonicalize());
        self.tools = found.map_err(|e| self.failed(format!("the tools folder {}: {e}", folder.display())))?;
        if let Backend::Bubblewrap(bubblewrap) = &mut self.backend {
            bubblewrap.tools.clone_from(&self.tools);
        }
        Ok(())
    }

    /// With somebody who knows how a container ended.
    pub fn with_engine(self, engine: Arc<Engine>) -> Self {
        Self {
            engine: Some(engine),
            ..self
        }
    }

    pub fn failed(&self, reason: impl ToString) -> SandboxError {
        SandboxError::Create {
            provider: self.provider,
            reason: reason.to_string(),
        }
    }

    fn handle(&self, name: &str, token: u64, layout: Layout, base: Option<PathBuf>, client: Client) -> Box<dyn Sandbox> {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let inside = match &self.backend {
            Backend::Process { .. } => Inside {
                home: text(layout.home()),
                workspace: text(layout.workspace()),
                shared: text(share::folder(&self.root.path).join(share::CURRENT)),
                tools: text(self.tools.clone()),
            },
            Backend::Bubblewrap(_) | Backend::Docker(_) => Inside {
                home: HOME.to_owned(),
                workspace: WORKSPACE.to_owned(),
                shared: format!("{SHARE}/{}", share::CURRENT),
                tools: TOOLS.to_owned(),
            },
        };
        let owner = match &self.backend {
            Backend::Docker(docker) => docker.owner,
            _ => None,
        };
        Box::new(Handle::new(name, token, layout, inside, base, client).with_container(owner, self.engine.clone()))
    }

    pub async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.create_with(spec, CREATE_PATIENCE, || async { Ok(()) }).await
    }

    /// `prepared` runs when the folders are there and the supervisor waits for what comes of it. After an error everything is gone but what
    /// `prepared` has made.
    pub async fn create_with<F: Future<Output = Result<(), String>>>(
        &self,
        spec: &SandboxSpec,
        patience: Duration,
        prepared: impl FnOnce() -> F,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        if !layout::is_sandbox_name(&spec.name) {
            return Err(self.failed(format!("{:?} is not a name for a sandbox", spec.name)));
        }
        let (root, tools) = (self.root.clone(), self.tools.clone());
        handle::on_blocking_thread(move || Ok(root.ensure().and_then(|()| make_tools(&tools))))
            .await?
            .map_err(|e| self.failed(format!("prepare {}: {e}", self.root.path.display())))?;
        let create = Create {
            name: spec.name.clone(),
            token: spec.token,
            lifetime: spec.lifetime,
            memory_bytes: spec.limits.memory_bytes,
            pids: spec.limits.pids,
            boot_id: self.boot_id.clone(),
            cgroups: self.plan.clone(),
            base: spec.base.clone().map(|folder| Based { folder, means: self.means }),
            backend: self.backend.clone(),
        };
        let mut client = self
            .connect_zygote()
            .await
            .map_err(|e| self.failed(format!("start a supervisor: {e}")))?;
        let answer = async {
            client.send(&create).await?;
            match client.receive().await? {
                Reply::Prepared => {
                    prepared().await.map_err(io::Error::other)?;
                    client.receive().await
                }
                reply => Ok(reply),
            }
        };
        let reason = match tokio::time::timeout(patience, answer).await {
            Ok(Ok(Reply::Done)) => {
                let layout = Layout::new(&self.root.path, &spec.name);
                match self.fill(&layout, spec.base.as_deref()).await {
                    Ok(()) => return Ok(self.handle(&spec.name, spec.token, layout, spec.base.clone(), client)),
                    Err(e) => e.to_string(),
                }
            }
            // Somebody else's: leave it alone.
            Ok(Ok(Reply::Exists)) => return Err(self.failed(format!("there is a sandbox {} already", spec.name))),
            Ok(Ok(Reply::Refused { reason })) => reason,
            Ok(Ok(other)) => format!("the supervisor answered {other:?}"),
            Ok(Err(e)) if e.kind() == io::ErrorKind::Other => e.to_string(),
            Ok(Err(e)) => format!("the supervisor died: {e}"),
            Err(_) => format!("no answer within {patience:?}"),
        };
        // A supervisor that still waits learns that nobody else does.
        drop(client);
        if let Err(e) = self.destroy(&spec.name).await {
            tracing::warn!(sandbox = spec.name, error = %e, "a half-made sandbox was left behind");
        }
        Err(self.failed(reason))
    }

    /// Copies the base into a sandbox that was just made, where the supervisor has not mounted it.
    async fn fill(&self, layout: &Layout, base: Option<&Path>) -> Result<(), SandboxError> {
        let Some(base) = base.filter(|_| self.means == Means::Copy) else {
            return Ok(());
        };
        let (layout, base, cancel) = (layout.clone(), base.to_owned(), Cancel::default());
        let cancelled = cancel.0.clone();
        handle::on_blocking_thread(move || {
            layers::fill(&layout, &base, &cancelled).map_err(|e| SandboxError::Operation {
                operation: format!("copy {}", base.display()),
                reason: e.to_string(),
            })
        })
        .await
    }

    async fn connect_zygote(&self) -> io::Result<Client> {
        let mut zygote = self.zygote.lock().await;
        if let Some(running) = zygote.as_ref() {
            match Client::connect(&self.root.path, &running.socket).await {
                Ok(client) => return Ok(client),
                Err(e) => tracing::warn!(error = %e, "the sandbox zygote is gone; starting another"),
            }
        }
        let started = tokio::time::timeout(ZYGOTE_PATIENCE, self.start_zygote())
            .await
            .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "the zygote does not start")))?;
        let client = Client::connect(&self.root.path, &started.socket).await;
        *zygote = Some(started);
        client
    }

    async fn start_zygote(&self) -> io::Result<Zygote> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        self.sweep_sockets().await;
        let socket = format!(".zygote-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let _ = fs::remove_file(self.root.path.join(&socket));
        let mut child = Command::new(&self.executable)
            .arg(helpers::ZYGOTE)
            .arg(&self.root.path)
            .arg(&socket)
            .current_dir(&self.root.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(lifeline), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a child without its pipes"));
        };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).await?;
        if line != "ready\n" {
            return Err(io::Error::other(format!(
                "{} does not serve {}",
                self.executable.display(),
                helpers::ZYGOTE
            )));
        }
        Ok(Zygote {
            socket,
            _lifeline: lifeline,
            _child: child,
        })
    }

    /// Removes sockets of zygotes that were killed.
    async fn sweep_sockets(&self) {
        let Ok(entries) = fs::read_dir(&self.root.path) else { return };
        for entry in entries.flatten() {
            if let Some(name) = entry.file_name().to_str().filter(|n| n.starts_with(".zygote-"))
                && Client::connect(&self.root.path, name)
                    .await
                    .is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    pub async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        let layout = self.layout(name)?;
        let mut client = Client::connect(&layout.folder, "control")
            .await
            .map_err(|e| handle::lost(name, &layout, &e))?;
        let answer = tokio::time::timeout(ATTACH_PATIENCE, client.ask(&Request::Hello { token })).await;
        let failed = |reason| SandboxError::Operation {
            operation: format!("attach to the sandbox {name}"),
            reason,
        };
        match answer {
            Ok(Ok(Reply::Done)) => self.taken_over(name, token, layout, client),
            Ok(Ok(Reply::Fenced { current })) => Err(SandboxError::Fenced { current, ours: token }),
            Ok(Ok(other)) => Err(failed(format!("the supervisor answered {other:?}"))),
            Ok(Err(e)) => Err(handle::lost(name, &layout, &e)),
            Err(_) => Err(failed(format!("no answer within {ATTACH_PATIENCE:?}"))),
        }
    }

    fn taken_over(&self, name: &str, token: u64, layout: Layout, client: Client) -> Result<Box<dyn Sandbox>, SandboxError> {
        let base = self.meta(&layout)?.and_then(|meta| meta.base);
        match base {
            Some(based) if !based.is_whole(&layout) => Err(SandboxError::Lost {
                name: name.to_owned(),
                reason: "what it was made from is not all there for this executor".to_owned(),
            }),
            base => Ok(self.handle(name, token, layout, base.map(|based| based.folder), client)),
        }
    }

    fn meta(&self, layout: &Layout) -> Result<Option<journal::Meta>, SandboxError> {
        let content = journal::Content::read(&layout.journal()).map_err(|e| SandboxError::Operation {
            operation: format!("read {}", layout.journal().display()),
            reason: e.to_string(),
        })?;
        Ok(content.meta)
    }

    pub fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        let mut used = BTreeSet::new();
        for name in self.list()? {
            let meta = self.meta(&Layout::new(&self.root.path, &name))?;
            used.extend(meta.and_then(|meta| meta.base).map(|based| based.folder));
        }
        Ok(used)
    }

    pub fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        self.root.share(files).map_err(|e| SandboxError::Operation {
            operation: "share files with all sandboxes".to_owned(),
            reason: e.to_string(),
        })
    }

    pub fn layout(&self, name: &str) -> Result<Layout, SandboxError> {
        if layout::is_sandbox_name(name) {
            Ok(Layout::new(&self.root.path, name))
        } else {
            Err(SandboxError::Lost {
                name: name.to_owned(),
                reason: "there can be no sandbox of this name".to_owned(),
            })
        }
    }

    pub fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        let failed = |e: io::Error| SandboxError::Operation {
            operation: "list sandboxes".to_owned(),
            reason: e.to_string(),
        };
        let mut names = Vec::new();
        let entries = match fs::read_dir(&self.root.path) {
            // Deleted with all that was in it; the next sandbox brings it back.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(names),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            if let Ok(name) = entry.map_err(failed)?.file_name().into_string()
                && layout::is_sandbox_name(&name)
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    pub async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        let Ok(layout) = self.layout(name) else { return Ok(()) };
        if !layout.folder.exists() {
            return Ok(());
        }
        let orderly = self.end(&layout).await;
        self.clear(name, layout, orderly).await
    }

    /// Asks the supervisor to end everything. Whether it says that it has.
    pub async fn end(&self, layout: &Layout) -> bool {
        // No supervisor, or one that hangs: `remove` sees to that.
        let asked = async {
            let mut client = Client::connect(&layout.folder, "control").await?;
            let reply = client.ask(&Request::Destroy).await?;
            // It exits now.
            client.closed().await;
            io::Result::Ok(reply)
        };
        matches!(tokio::time::timeout(DESTROY_PATIENCE, asked).await, Ok(Ok(Reply::Done)))
    }

    /// Removes what is left; `orderly` is what [`Self::end`] said.
    pub async fn clear(&self, name: &str, layout: Layout, orderly: bool) -> Result<(), SandboxError> {
        let (name, boot_id) = (name.to_owned(), self.boot_id.clone());
        handle::on_blocking_thread(move || {
            destroy::remove(&layout, &boot_id, orderly).map_err(|e| SandboxError::Operation {
                operation: format!("destroy the sandbox {name}"),
                reason: e.to_string(),
            })
        })
        .await
    }

    pub fn finished_step(&self, name: &str, step: &str) -> Result<Option<StepExit>, SandboxError> {
        let layout = self.layout(name)?;
        if !layout::is_step_name(step) {
            return Ok(None);
        }
        match journal::Content::read(&layout.journal()) {
            Ok(mut journal) => journal.exits.remove(step).map(|r| handle::step_exit(&layout, step, r)).transpose(),
            Err(e) => Err(SandboxError::Operation {
                operation: format!("read the end of {step}"),
                reason: e.to_string(),
            }),
        }
    }
}

/// Other users' processes (a container's) must be able to read it.
fn make_tools(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

/// The absolute path of a program.
pub(crate) fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.exists().then(|| program.to_owned());
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}
