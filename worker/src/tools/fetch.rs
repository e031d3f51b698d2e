//! The package managers of the host, run with a deadline, and what they say when they fail.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use evalgrid_domain::redact::Redactor;
use evalgrid_harness::{Install, Source};
use tokio::{process::Command, time::timeout};

use super::{INSTALL_DEADLINE, ToolError};

/// A program that starts; the slowest takes 5 s on a busy machine.
const PROBE_DEADLINE: Duration = Duration::from_secs(60);
/// Characters of what a package manager said.
const REASON: usize = 400;
/// What a package manager may know of this process's environment: how to reach its registry. Nothing else: it runs the packages' scripts, and
/// this process may hold keys.
const PASSED: &[&str] = &[
    "HOME",
    "LANG",
    "TMPDIR",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "NODE_EXTRA_CA_CERTS",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
];
/// And whatever begins so: its own settings.
const PASSED_PREFIXES: [&str; 3] = ["npm_config_", "NPM_CONFIG_", "PIP_"];

/// Finds and runs the host's programs.
pub struct Host {
    /// As `PATH`.
    pub path: OsString,
    /// For one run of a package manager.
    pub deadline: Duration,
}

impl Host {
    pub fn new(path: OsString) -> Host {
        Host {
            path,
            deadline: INSTALL_DEADLINE,
        }
    }

    /// Installs the package into `stage`, an empty folder. `lock` is held by the package manager too.
    pub async fn fetch(&self, install: &Install, stage: &Path, lock: &fs::File) -> Result<(), ToolError> {
        let (package, result) = match install.source {
            Source::Npm { package } => (package, self.npm(package, install, stage, lock).await),
            Source::PyPi { package, python_minor } => (package, self.pip(package, python_minor, install, stage, lock).await),
            Source::Configured => return Err(ToolError::NoProgram(install.name.into())),
        };
        result.map_err(|reason| {
            // A registry's URL may hold its password.
            let reason = Redactor::new(std::iter::empty::<&str>()).text(&reason).into_owned();
            ToolError::Install {
                package: package.into(),
                version: install.version.into(),
                reason: reason.chars().take(REASON).collect(),
            }
        })
    }

    async fn npm(&self, package: &str, install: &Install, stage: &Path, lock: &fs::File) -> Result<(), String> {
        let npm = self.find("npm").ok_or("npm is not installed on this host")?;
        if install.node && self.find("node").is_none() {
            return Err("node is not installed on this host".into());
        }
        // Without it npm looks for a project in the folders above.
        fs::write(stage.join("package.json"), "{}").map_err(|error| error.to_string())?;
        let mut command = self.command(&npm, stage);
        command.args(["install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]);
        command.arg(format!("{package}@{}", install.version));
        let output = run(command, lock, self.deadline).await?;
        match output.status.success() {
            true => Ok(()),
            false => Err(npm_reason(&String::from_utf8_lossy(&output.stderr))),
        }
    }

    /// A virtual environment where sandboxes see the host's Python; else a copy of that Python with the package in it. Either way the program is
    /// `bin/python`: the package's own scripts name the folder in which they were made.
    async fn pip(&self, package: &str, minor: u32, install: &Install, stage: &Path, lock: &fs::File) -> Result<(), String> {
        let (python, prefix) = self.python(minor, stage, lock).await?;
        let seen = ["/usr", "/opt"].iter().any(|seen| Path::new(&prefix).starts_with(seen));
        let mut make = self.command(if seen { &python } else { Path::new("cp") }, stage);
        match seen {
            true => make.args(["-m", "venv"]).arg(stage),
            false => make.arg("-a").arg(&prefix).arg(stage.join("python")),
        };
        let output = run(make, lock, self.deadline).await?;
        if !output.status.success() {
            return Err(format!("a Python of its own could not be made: {}", last_line(&output.stderr)));
        }
        if !seen {
            let made = fs::create_dir(stage.join("bin")).and_then(|()| write_program(&stage.join("bin/python"), OWN_PYTHON));
            made.map_err(|error| error.to_string())?;
        }
        let mut command = self.command(&stage.join("bin/python"), stage);
        command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
        command.arg(format!("{package}=={}", install.version));
        let output = run(command, lock, self.deadline).await?;
        match output.status.success() {
            true => Ok(()),
            false => Err(last_line(&output.stderr)),
        }
    }

    /// A Python that is new enough, and the folder that holds all of it.
    async fn python(&self, minor: u32, stage: &Path, lock: &fs::File) -> Result<(PathBuf, String), String> {
        /// Newer ones than this are tried when they exist.
        const NEWEST: u32 = 16;
        let mut candidates: Vec<PathBuf> = Vec::new();
        candidates.extend(self.find("python3"));
        candidates.extend((minor..=NEWEST).filter_map(|minor| self.find(&format!("python3.{minor}"))));
        // Those of pyenv are not in the path, or only as scripts that choose one.
        let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
        let pyenv = pyenv.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
        let versions = pyenv
            .and_then(|folder| fs::read_dir(folder.join("versions")).ok())
            .into_iter()
            .flatten()
            .flatten();
        let mut versions: Vec<PathBuf> = versions.map(|version| version.path().join("bin/python3")).collect();
        versions.sort();
        candidates.extend(versions);
        for python in candidates {
            let mut command = self.command(&python, stage);
            command.args([
                "-c",
                "import sys; print(sys.version_info[1], sys.executable, sys.base_prefix, sep='\\n')",
            ]);
            let Ok(output) = run(command, lock, PROBE_DEADLINE).await else {
                continue;
            };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if let [found, executable, prefix] = text.lines().collect::<Vec<_>>()[..]
                && found.parse::<u32>().is_ok_and(|found| found >= minor)
            {
                return Ok((executable.into(), prefix.to_owned()));
            }
        }
        Err(format!("it needs Python 3.{minor} or newer, and this host has none"))
    }

    /// The version that a program prints. Its HOME is a folder that is thrown away: some write into it even for that.
    pub async fn version(&self, install: &Install, program: &Path, folder: &Path) -> Result<String, String> {
        let home = tempfile(folder).map_err(|error| error.to_string())?;
        let mut command = self.command(program, &home.0);
        command
            .env_clear()
            .env("PATH", &self.path)
            .env("HOME", &home.0)
            .args(install.version_args);
        let lock = fs::File::open("/dev/null").map_err(|error| error.to_string())?;
        let output = run(command, &lock, PROBE_DEADLINE).await?;
        let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        match printed.iter().find_map(|text| install.version_in(text)) {
            Some(version) => Ok(version.to_owned()),
            None => Err(format!("it does not tell its version ({})", output.status)),
        }
    }

    fn find(&self, program: &str) -> Option<PathBuf> {
        let mut found = std::env::split_paths(&self.path).map(|folder| folder.join(program));
        found.find(|path| fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0))
    }

    fn command(&self, program: &Path, folder: &Path) -> Command {
        let mut command = Command::new(program);
        let passed = std::env::vars_os().filter(|(name, _)| {
            let name = name.to_string_lossy();
            PASSED.contains(&name.as_ref()) || PASSED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        });
        command.env_clear().envs(passed).env("PATH", &self.path).current_dir(folder);
        command
    }
}

/// Runs the copied Python wherever its folder is shown. Its library would be looked for where it was made.
const OWN_PYTHON: &str = "\
#!/bin/sh
here=$(dirname \"$(readlink -f \"$0\")\")/../python
LD_LIBRARY_PATH=\"$here/lib\" exec \"$here/bin/python3\" \"$@\"
";

/// A folder that goes with this.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// In the tools folder where it can be written, else where temporary files go.
fn tempfile(folder: &Path) -> io::Result<Temporary> {
    let name = format!(".probe-{:016x}", rand::random::<u64>());
    let make = |folder: &Path| {
        let path = folder.join(&name);
        fs::create_dir(&path).map(|()| Temporary(path))
    };
    make(folder).or_else(|_| make(&std::env::temp_dir()))
}

/// Runs a command to its end, or kills it with all its children at the deadline. Its standard input is the lock, which is an empty file.
async fn run(mut command: Command, lock: &fs::File, deadline: Duration) -> Result<Output, String> {
    let name = command.as_std().get_program().to_string_lossy().into_owned();
    let lock = lock.try_clone().map_err(|error| error.to_string())?;
    command.stdin(Stdio::from(lock)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.process_group(0).kill_on_drop(true).spawn();
    let child = child.map_err(|error| format!("{name} could not be started: {error}"))?;
    let mut group = Group(child.id());
    match timeout(deadline, child.wait_with_output()).await {
        Ok(output) => {
            group.0 = None;
            output.map_err(|error| format!("{name}: {error}"))
        }
        Err(_) => Err(format!("{name} took longer than {} s", deadline.as_secs())),
    }
}

/// A process group, killed when this is dropped before its leader has ended.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0.and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?)) {
            // An error says that nobody is there.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

/// What matters in what npm prints: its error's lines, without the one that names a log file.
fn npm_reason(stderr: &str) -> String {
    let lines = stderr
        .lines()
        .filter_map(|line| line.strip_prefix("npm error").or_else(|| line.strip_prefix("npm ERR!")));
    let lines = lines
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("A complete log"));
    let reason = lines.take(4).collect::<Vec<_>>().join("; ");
    match reason.is_empty() {
        true => last_line(stderr.as_bytes()),
        false => reason,
    }
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    line.unwrap_or("it failed without a word").to_owned()
}

fn write_program(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}
