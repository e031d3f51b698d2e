//! What the tests of both providers share.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, dead_code)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use evalgrid_sandbox::*;

/// Everything in these tests ends within this, on a loaded machine too.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The executable with the helpers.
pub fn helper() -> Option<PathBuf> {
    Some(env!("CARGO_BIN_EXE_evalgrid-sandbox-host").into())
}

/// A provider over a folder.
pub type Make = fn(&Path) -> Arc<dyn SandboxProvider>;

/// Both providers, as functions of their root.
pub fn makers() -> [(&'static str, Make); 2] {
    [("process", make_process), ("bubblewrap", make_bubblewrap)]
}

pub fn make_process(root: &Path) -> Arc<dyn SandboxProvider> {
    let provider = ProcessProvider::new(root.join("process"), helper()).unwrap();
    Arc::new(provider.with_tools(&root.join("tools")).unwrap())
}

pub fn make_bubblewrap(root: &Path) -> Arc<dyn SandboxProvider> {
    let provider = BubblewrapProvider::new(root.join("bubblewrap"), helper(), BubblewrapOptions::default());
    let provider = provider.expect("bubblewrap must be installed for these tests (Debian: apt-get install bubblewrap)");
    Arc::new(provider.with_tools(&root.join("tools")).unwrap())
}

/// One sandbox with its provider, removed at the end of a test.
pub struct World {
    pub root: tempfile::TempDir,
    pub provider: Arc<dyn SandboxProvider>,
    pub make: Make,
    pub name: String,
}

impl World {
    pub fn new(make: Make, name: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let provider = make(root.path());
        Self {
            root,
            provider,
            make,
            name: name.to_owned(),
        }
    }

    /// `<root>/<name>`.
    pub fn folder(&self) -> PathBuf {
        self.root.path().join(self.provider.name()).join(&self.name)
    }

    pub fn spec(&self) -> SandboxSpec {
        let limits = Limits {
            memory_bytes: 512 << 20,
            pids: 100,
        };
        SandboxSpec {
            name: self.name.clone(),
            token: 5,
            lifetime: Duration::from_secs(300),
            limits,
            base: None,
        }
    }

    pub async fn create(&self) -> Box<dyn Sandbox> {
        self.provider.create(&self.spec()).await.unwrap()
    }

    pub async fn destroy(&self) {
        self.provider.destroy(&self.name).await.unwrap();
        self.provider.destroy(&self.name).await.unwrap();
        assert_eq!(self.provider.list().await.unwrap(), Vec::<String>::new());
        assert!(!self.folder().exists());
    }

    /// The supervisor's process id.
    pub fn supervisor(&self) -> i32 {
        let journal = fs::read_to_string(self.folder().join("journal")).unwrap();
        let made: serde_json::Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
        made["Made"]["supervisor"].as_i64().unwrap() as i32
    }
}

/// A step that runs a bash script.
pub fn bash(step: &str, script: &str) -> StepCommand {
    command(step, &["bash", "-c", script])
}

pub fn command(step: &str, argv: &[&str]) -> StepCommand {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    StepCommand {
        step: step.to_owned(),
        argv,
        env: BTreeMap::new(),
        time_limit: PATIENCE,
    }
}

pub fn stdout(exit: &StepExit) -> String {
    fs::read_to_string(&exit.output.stdout).unwrap()
}

pub fn stderr(exit: &StepExit) -> String {
    fs::read_to_string(&exit.output.stderr).unwrap()
}

/// Waits for a condition.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Processes with `mark` in their environment or arguments, whatever namespace they are in. Ended ones do not count.
pub fn marked(mark: &str) -> BTreeSet<i32> {
    let own = std::process::id() as i32;
    let has_mark = |path: PathBuf| fs::read(path).is_ok_and(|b| b.windows(mark.len()).any(|w| w == mark.as_bytes()));
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| *pid != own && (has_mark(format!("/proc/{pid}/environ").into()) || has_mark(format!("/proc/{pid}/cmdline").into())))
        .collect()
}

/// Control groups of a sandbox.
pub fn cgroups(name: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, wanted: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with(wanted) {
                    found.push(entry.path());
                }
                walk(&entry.path(), wanted, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), &format!("evalgrid-{name}."), &mut found);
    found
}

/// Mounts of this mount namespace.
pub fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count()
}
