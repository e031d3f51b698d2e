//! The agents' programs: installed once per host, in a folder that sandboxes see read-only. Never once per trial.
//!
//! An install is made beside its place and renamed there when its program has printed the pinned version, so whatever has the right name is
//! whole; an operator may as well put it there himself, or name a program of his own. One install at a time per agent, in all processes that
//! share the folder: who comes second waits, and finds it. A failure is kept for a while, so that a hundred trials do not ask a hundred times.

mod fetch;

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use evalgrid_harness::{Install, Source};
use rustix::fs::{FlockOperation, flock};
use tokio::time::{Instant, sleep};

use fetch::Host;

/// An install that takes longer hangs. The largest agents are 400 MB.
const INSTALL_DEADLINE: Duration = Duration::from_secs(900);
/// Registries fail for moments; what fails twice fails for a reason.
const TRIES: u32 = 2;
/// How long a failure answers for the next trials.
const FAILURE_KEPT: Duration = Duration::from_secs(300);
/// How often somebody else's install is looked at.
const LOCK_POLL: Duration = Duration::from_millis(200);
/// How often the log says that an install still runs.
const PROGRESS: Duration = Duration::from_secs(10);
/// In an install's folder: says that its program has printed the right version here.
const MARK: &str = ".evalgrid-verified";
/// Below the tools folder: copies of the operator's own programs.
const OWN: &str = "own";

/// Where agents come from.
#[derive(Clone, Debug, Default)]
pub struct ToolOptions {
    /// The folder of the installs.
    pub folder: PathBuf,
    /// Programs of the operator's own, by the harness's name.
    pub binaries: BTreeMap<String, PathBuf>,
    /// Whether those may be of other versions than the ones that their drivers were tested with (decision 24).
    pub any_version: bool,
}

/// Why an agent cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The folder, or the operator's program.
    #[error("{0}: {1}")]
    Place(PathBuf, String),
    /// The package could not be installed.
    #[error("{package}@{version} could not be installed: {reason}")]
    Install {
        /// As its registry calls it.
        package: String,
        /// The pinned one.
        version: String,
        /// What the package manager said.
        reason: String,
    },
    /// It is there, and is something else.
    #[error("{program} prints the version {found}, and only {wanted} was tested{hint}")]
    Version {
        /// Which program.
        program: String,
        /// What it printed.
        found: String,
        /// The pinned one.
        wanted: String,
        /// What to do.
        hint: &'static str,
    },
    /// There is no package, and the operator has named no program.
    #[error("it has no package to install; its program must be named with --harness-binary {0}=PATH")]
    NoProgram(String),
}

/// What there is of an agent on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolState {
    /// Nothing yet; it is installed when it is first needed.
    Missing,
    /// The pinned version, here.
    Installed(PathBuf),
    /// The operator's program.
    Own(PathBuf),
    /// There is no package, and no program was named.
    NoProgram,
}

/// The agents of this host.
pub struct Tools {
    folder: PathBuf,
    /// The operator's programs, where sandboxes can see them.
    binaries: BTreeMap<String, Own>,
    any_version: bool,
    host: Host,
    known: Mutex<HashMap<&'static str, Arc<tokio::sync::Mutex<Known>>>>,
}

/// A program of the operator's own.
struct Own {
    /// As he named it.
    given: PathBuf,
    /// Where it really is, or was copied to.
    path: PathBuf,
}

/// What this process has found out about one agent.
#[derive(Clone, Debug, Default)]
enum Known {
    #[default]
    Nothing,
    Ready,
    Failed(ToolError, Instant),
}

impl Tools {
    /// Makes the folder and looks at the operator's programs. Blocks for as long as copying them takes.
    pub fn new(options: ToolOptions) -> Result<Tools, ToolError> {
        Self::with_path(options, std::env::var_os("PATH").unwrap_or_default())
    }

    /// `path`: where npm and Python are looked for.
    pub(crate) fn with_path(options: ToolOptions, path: OsString) -> Result<Tools, ToolError> {
        use std::os::unix::fs::DirBuilderExt as _;
        let failed = |error: io::Error| ToolError::Place(options.folder.clone(), error.to_string());
        // Processes of other users (in a container) must be able to read it.
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(&options.folder);
        made.map_err(failed)?;
        let folder = options.folder.canonicalize().map_err(failed)?;
        let binaries = options.binaries.into_iter().map(|(name, given)| {
            let own = place(&folder, &name, &given).map_err(|error| ToolError::Place(given.clone(), error.to_string()))?;
            Ok((name, Own { given, path: own }))
        });
        Ok(Tools {
            binaries: binaries.collect::<Result<_, ToolError>>()?,
            folder,
            any_version: options.any_version,
            host: Host::new(path),
            known: Mutex::default(),
        })
    }

    /// The folder, as providers are given it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What there is. Installs nothing, and starts nothing.
    pub fn state(&self, install: &Install) -> ToolState {
        match (self.binaries.get(install.name), install.source) {
            (Some(own), _) => ToolState::Own(own.given.clone()),
            (None, Source::Configured) => ToolState::NoProgram,
            (None, _) if self.is_there(install) => ToolState::Installed(self.place(install)),
            (None, _) => ToolState::Missing,
        }
    }

    /// The operator's program of an agent as processes inside see it, where the tools folder is `inside`; `None` where the install is used.
    pub fn program(&self, install: &Install, inside: &str) -> Option<String> {
        let path = &self.binaries.get(install.name)?.path;
        let shown = match path.strip_prefix(&self.folder) {
            Ok(rest) => Path::new(inside).join(rest),
            Err(_) => path.clone(),
        };
        Some(shown.to_string_lossy().into_owned())
    }

    /// Whether this process knows already that the agent can be started.
    pub fn is_ready(&self, install: &'static Install) -> bool {
        let known = self.known(install.name);
        known.try_lock().is_ok_and(|known| matches!(*known, Known::Ready))
            && (self.binaries.contains_key(install.name) || self.is_there(install))
    }

    /// Sees to it that the agent can be started: looks at what is there, and installs it where nothing is.
    pub async fn ready(&self, install: &'static Install) -> Result<(), ToolError> {
        let known = self.known(install.name);
        // One flight in this process; the next ones find what it has found out.
        let mut known = known.lock().await;
        match &*known {
            Known::Ready if self.binaries.contains_key(install.name) || self.is_there(install) => return Ok(()),
            Known::Failed(error, until) if Instant::now() < *until => return Err(error.clone()),
            _ => {}
        }
        let result = self.obtain(install).await;
        *known = match &result {
            Ok(()) => Known::Ready,
            Err(error) => {
                tracing::warn!(harness = install.name, %error, "an agent cannot be had");
                Known::Failed(error.clone(), Instant::now() + FAILURE_KEPT)
            }
        };
        result
    }

    fn known(&self, name: &'static str) -> Arc<tokio::sync::Mutex<Known>> {
        // The lock guards a plain look-up, which cannot panic.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(name).or_default().clone()
    }

    fn place(&self, install: &Install) -> PathBuf {
        self.folder.join(install.folder())
    }

    /// Whether the install is in its place.
    pub fn is_there(&self, install: &Install) -> bool {
        self.place(install).join(install.program).is_file()
    }

    async fn obtain(&self, install: &'static Install) -> Result<(), ToolError> {
        if let Some(own) = self.binaries.get(install.name) {
            return self.check_own(install, &own.path).await;
        }
        if matches!(install.source, Source::Configured) {
            return Err(ToolError::NoProgram(install.name.into()));
        }
        if self.is_there(install) {
            return self.check(install).await;
        }
        let lock = self.lock(install).await?;
        // Another process may have been quicker.
        if self.is_there(install) {
            return self.check(install).await;
        }
        #[expect(clippy::disallowed_methods, reason = "an I/O edge: how long an install took, for people")]
        let began = std::time::Instant::now();
        tracing::info!(harness = install.name, version = install.version, "installing an agent");
        let work = self.install(install, &lock);
        tokio::pin!(work);
        loop {
            tokio::select! {
                result = &mut work => {
                    result?;
                    let (seconds, folder) = (began.elapsed().as_secs(), self.place(install));
                    tracing::info!(harness = install.name, version = install.version, seconds, folder = %folder.display(), "installed an agent");
                    return Ok(());
                }
                () = sleep(PROGRESS) => tracing::info!(harness = install.name, seconds = began.elapsed().as_secs(), "still installing"),
            }
        }
    }

    /// The operator's program must be the version that the driver was tested with, unless he says otherwise.
    async fn check_own(&self, install: &Install, program: &Path) -> Result<(), ToolError> {
        if install.version.is_empty() || self.any_version {
            return Ok(());
        }
        let found = self.host.version(install, program, &self.folder).await;
        verify(install, program, found, "; --harness-any-version takes it all the same")
    }

    /// What has the right name, from an earlier run or from the operator, must be what it says.
    async fn check(&self, install: &Install) -> Result<(), ToolError> {
        let place = self.place(install);
        if place.join(MARK).is_file() {
            return Ok(());
        }
        let program = place.join(install.program);
        let found = self.host.version(install, &program, &self.folder).await;
        verify(install, &program, found, "")?;
        // A folder that cannot be written is looked at by each process anew.
        let _ = fs::write(place.join(MARK), install.version);
        Ok(())
    }

    /// Held by whoever installs the agent, in whatever process. It is given to the package manager too, which may outlive a killed worker and
    /// must not write where the next one installs.
    async fn lock(&self, install: &Install) -> Result<fs::File, ToolError> {
        let path = self.folder.join(format!(".lock-{}", install.folder()));
        let failed = |error: io::Error| ToolError::Place(path.clone(), error.to_string());
        let file = fs::File::options().create(true).truncate(false).write(true).read(true).open(&path);
        let file = file.map_err(failed)?;
        let deadline = Instant::now() + INSTALL_DEADLINE * (TRIES + 1);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(LOCK_POLL).await,
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    async fn install(&self, install: &'static Install, lock: &fs::File) -> Result<(), ToolError> {
        let stage = self.folder.join(format!(".stage-{}", install.folder()));
        let mut tried = 1;
        loop {
            let result = self.stage(install, &stage, lock).await;
            let failure = match result {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            // What cannot be removed now is removed by the next install.
            let _ = on_thread({
                let stage = stage.clone();
                move || remove(&stage)
            })
            .await;
            if tried == TRIES {
                return Err(failure);
            }
            tracing::warn!(harness = install.name, error = %failure, "an install has failed; once more");
            tried += 1;
        }
    }

    async fn stage(&self, install: &'static Install, stage: &Path, lock: &fs::File) -> Result<(), ToolError> {
        let failed = |error: io::Error| ToolError::Place(stage.to_owned(), error.to_string());
        let fresh = stage.to_owned();
        on_thread(move || {
            // What a killed install has left.
            remove(&fresh)?;
            fs::create_dir(&fresh)
        })
        .await
        .map_err(failed)?;
        self.host.fetch(install, stage, lock).await?;
        let program = stage.join(install.program);
        let found = self.host.version(install, &program, &self.folder).await;
        verify(install, &program, found, "")?;
        let (stage, place) = (stage.to_owned(), self.place(install));
        on_thread(move || {
            fs::write(stage.join(MARK), "")?;
            // After a power cut the name must not be there without the bytes.
            rustix::fs::syncfs(fs::File::open(&stage)?)?;
            // Something of this name, without a program in it.
            remove(&place)?;
            fs::rename(&stage, &place)
        })
        .await
        .map_err(|error| ToolError::Place(self.place(install), error.to_string()))
    }
}

fn verify(install: &Install, program: &Path, found: Result<String, String>, hint: &'static str) -> Result<(), ToolError> {
    match found {
        Ok(found) if found == install.version => Ok(()),
        Ok(found) => Err(ToolError::Version {
            program: program.display().to_string(),
            found,
            wanted: install.version.into(),
            hint,
        }),
        Err(reason) => Err(ToolError::Place(program.to_owned(), reason)),
    }
}

/// Where sandboxes find the operator's program: as it is if they see its folder anyway, else a copy in the tools folder.
fn place(folder: &Path, name: &str, given: &Path) -> io::Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = given.canonicalize()?;
    let found = fs::metadata(&path)?;
    if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
        return Err(io::Error::other("this is not a program"));
    }
    let seen = [folder, Path::new("/usr"), Path::new("/opt")];
    if seen.iter().any(|seen| path.starts_with(seen)) {
        return Ok(path);
    }
    let file = path.file_name().ok_or_else(|| io::Error::other("a program without a name"))?;
    let own = folder.join(OWN).join(name);
    fs::create_dir_all(&own)?;
    // Renamed, so that a sandbox that runs the old one keeps it.
    let fresh = own.join(format!(".fresh-{}", std::process::id()));
    fs::copy(&path, &fresh)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    fs::rename(&fresh, own.join(file))?;
    Ok(own.join(file))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Hundreds of megabytes are not removed or synced on a thread that others wait for.
async fn on_thread(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests;
