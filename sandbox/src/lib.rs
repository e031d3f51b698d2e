//! Sandbox providers and the supervisor that outlives the executor.
//!
//! A *sandbox* is a folder (`home`, `workspace`, a journal and outputs) plus one small supervisor process. The supervisor starts each step at
//! most once, keeps its output and exit status where the agent cannot write, kills the tree at the deadline, and goes on when the executor
//! dies. An executor creates a sandbox or attaches to one, starts steps, waits for them, and destroys it.

#![expect(
    clippy::disallowed_methods,
    reason = "this crate is an edge: it waits for real processes, by the real clock"
)]

mod cgroup;
mod client;
mod destroy;
mod docker;
mod etc;
mod files;
mod gate;
mod handle;
mod helpers;
mod init;
mod inner_protocol;
mod journal;
mod layers;
mod layout;
mod network;
mod protocol;
mod provider;
mod root;
mod share;
mod shell;
mod supervisor;
mod sys;
mod tree;
mod zygote;

pub use cgroup::Enforcement;
pub use docker::{DockerImage, DockerOptions, DockerProvider};
pub use helpers::{init_main, run_if_helper, zygote_main};
pub use layout::{is_sandbox_name, remove_tree, spread};
pub use network::{Endpoint, Network, NetworkError};
pub use provider::{BubblewrapOptions, BubblewrapProvider, ProcessProvider};
pub use shell::{bubblewrap_shell, process_shell};
pub use tree::{Budget as CopyBudget, copy as copy_tree};

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;

/// The name of a sandbox: the scheduler derives it from the attempt, so it is in the log before the sandbox exists. `[a-z0-9_-]{1,80}`.
pub type SandboxName = String;

/// What a sandbox is made of.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// Its name, unique for ever.
    pub name: SandboxName,
    /// The fencing token of the attempt that creates it.
    pub token: u64,
    /// After this long the supervisor kills everything and exits, whoever is still interested.
    pub lifetime: Duration,
    /// Limits on everything inside, together.
    pub limits: Limits,
    /// What its home and workspace are made from instead of being empty: an absolute folder with `home` and `workspace` in it, as
    /// [`Sandbox::save_base`] makes it. Nobody may change it while a sandbox lives that is made from it.
    pub base: Option<PathBuf>,
}

/// What a provider can do with a [`SandboxSpec::base`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseSupport {
    /// Bytes of files that a base may hold.
    pub most_bytes: u64,
    /// What programs find around them, the same in every sandbox of this provider: another text where that is another. `None`: sandboxes
    /// differ in their paths, so that what was installed in one may not run in another.
    pub environment: Option<String>,
}

/// Limits on the whole of a sandbox. Enforced where the host lets us make cgroups; a provider says at start-up what it can enforce.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
}

/// One command of a step. Runs in the workspace with closed stdin.
#[derive(Clone, Debug)]
pub struct StepCommand {
    /// The step's name, e.g. `turn.1.agent`. At most one command per name ever runs in a sandbox.
    pub step: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment, beyond what the provider itself sets (`HOME`, `PATH`, `TMPDIR`, `LANG`).
    pub env: BTreeMap<String, String>,
    /// When the supervisor kills the step's tree, counted from its first start.
    pub time_limit: Duration,
}

/// How a step's process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepExit {
    /// The exit status; 128 + signal where a signal ended it.
    pub code: i32,
    /// The time limit ran out and the whole tree is proven dead.
    pub timed_out: bool,
    /// The kernel killed something in the sandbox for memory during the step.
    pub out_of_memory: bool,
    /// Other processes of the sandbox were there when the step's own ended: it has left something running, or earlier steps have.
    pub left_running: bool,
    /// Milliseconds since the epoch.
    pub started_at_ms: u64,
    /// Milliseconds since the epoch.
    pub finished_at_ms: u64,
    /// Where the outputs are, on the executor's side.
    pub output: StepOutput,
}

/// The captured output of a step. All paths can be read; they are `/dev/null` where nothing was written, for which no file is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOutput {
    /// At most [`STDOUT_HEAD_LIMIT`] bytes from the start.
    pub stdout: PathBuf,
    /// The last bytes (at most [`STDOUT_TAIL_LIMIT`]) when stdout was longer than the head, else absent.
    pub stdout_tail: Option<PathBuf>,
    /// How many bytes were written in all.
    pub stdout_bytes: u64,
    /// Arrival times: pairs of little-endian u64 (offset of the end of a chunk in stdout, milliseconds since the epoch).
    pub stdout_times: PathBuf,
    /// At most [`STDERR_LIMIT`] bytes from the start.
    pub stderr: PathBuf,
}

/// 200 MB of output is a legitimate agent; four times that on every slot would fill a disk.
pub const STDOUT_HEAD_LIMIT: u64 = 256 * 1024 * 1024;
/// Enough for the last events of an agent that printed more than the head holds.
pub const STDOUT_TAIL_LIMIT: usize = 1024 * 1024;
/// Stderr is diagnostics for people.
pub const STDERR_LIMIT: u64 = 1024 * 1024;

/// What can go wrong with a sandbox. Every kind is infrastructure: it never says anything about the agent.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The sandbox, or its supervisor, is gone; nothing more can be learned from it.
    #[error("the sandbox {name} is gone: {reason}")]
    Lost {
        /// Which.
        name: SandboxName,
        /// What was seen.
        reason: String,
    },
    /// It could not be made.
    #[error("the {provider} sandbox could not be created: {reason}")]
    Create {
        /// Which provider.
        provider: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// Somebody with a newer token has taken over; the caller must stop acting.
    #[error("a newer attempt holds the sandbox (token {current}, ours {ours})")]
    Fenced {
        /// The newest token the supervisor has seen.
        current: u64,
        /// The caller's.
        ours: u64,
    },
    /// An operation on a living sandbox failed.
    #[error("{operation}: {reason}")]
    Operation {
        /// What was tried.
        operation: String,
        /// What went wrong.
        reason: String,
    },
}

/// A place that sandboxes come from.
#[async_trait]
pub trait SandboxProvider: Send + Sync {
    /// The name as in a variant: `bubblewrap`, `docker`, `process`.
    fn name(&self) -> &'static str;
    /// Makes it and its supervisor. The caller has recorded the intent.
    /// Brings back what of the provider's own folder, shared files included, somebody has deleted meanwhile.
    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError>;
    /// Takes over a living sandbox with a newer (or the same) token.
    async fn attach(&self, name: &str, token: u64) -> Result<Box<dyn Sandbox>, SandboxError>;
    /// Names of all sandboxes that left anything behind on this host.
    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError>;
    /// Makes `files` (relative paths and their bytes) the read-only files that all sandboxes see at [`Sandbox::shared`], those that live already
    /// too, in place of what was there. Files have mode 0444, folders 0555. Blocks for as long as writing them takes.
    fn share(&self, files: &[(String, Vec<u8>)]) -> Result<(), SandboxError>;
    /// What it can do with bases; `None`: nothing.
    fn bases(&self) -> Option<BaseSupport> {
        None
    }
    /// The bases of the sandboxes that left anything behind on this host. Blocks for as long as reading a file of each takes.
    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        Ok(BTreeSet::new())
    }
    /// Kills everything inside and removes it. Fine when already gone. On `Ok` nothing of it is left.
    async fn destroy(&self, name: &str) -> Result<(), SandboxError>;
}

/// A living sandbox under one token.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Absolute path of HOME as processes inside see it.
    fn home(&self) -> &str;
    /// Absolute path of the workspace as processes inside see it.
    fn workspace(&self) -> &str;
    /// Absolute path of the files of [`SandboxProvider::share`] as processes inside see it. It is there from the first call of that on.
    fn shared(&self) -> &str;
    /// Absolute path of the provider's folder of programs (agents, installed once per host) as processes inside see it. What is added to the
    /// folder shows in living sandboxes too; nothing inside can change it where the provider isolates.
    fn tools(&self) -> &str;
    /// What its folders were made from.
    fn base(&self) -> Option<&Path>;
    /// Makes a base: copies home and workspace into `folder`, which is not there yet, without the files that `without` names (`home/…`,
    /// `workspace/…`). Gives the bytes of its files; above `most_bytes` it fails. Where it fails, or its future is dropped, nothing of
    /// `folder` stays. Processes inside must not write meanwhile.
    async fn save_base(&self, folder: &Path, without: &[PathBuf], most_bytes: u64) -> Result<u64, SandboxError>;
    /// Writes text files below `base`, making folders; never follows a symlink out of `base`. Mode 0644 (0600 if `private`), folders 0755.
    async fn write_files(&self, base: Base, files: &[(String, Vec<u8>)], private: bool) -> Result<(), SandboxError>;
    /// At most `limit` bytes of a file below `base`; `None` if there is no such regular file. Never follows a symlink out of `base`.
    async fn read_file(&self, base: Base, path: &str, limit: u64) -> Result<Option<Vec<u8>>, SandboxError>;
    /// Removes a file below `base` if it is there.
    async fn remove_file(&self, base: Base, path: &str) -> Result<(), SandboxError>;
    /// Makes the workspace and the home again, empty, where they have been deleted or replaced by something that is not a folder, and opens
    /// them to their owner where they have been closed.
    async fn ensure_workspace(&self) -> Result<(), SandboxError>;
    /// The sandbox's folder as the executor itself finds it: `home` and `workspace` are in it, and room for files of the executor's own, whose
    /// names start with `changes.`. They go with the sandbox, and nothing inside can reach them where the provider isolates. `None` where the
    /// files are not on this host.
    fn folder(&self) -> Option<&Path>;
    /// The steps that were ever started here.
    async fn started(&self) -> Result<BTreeSet<String>, SandboxError>;
    /// Starts the step, or attaches to it where it was started before, and waits for its end. Dropping the future leaves the step running.
    async fn run(&self, command: &StepCommand) -> Result<StepExit, SandboxError>;
    /// How a step ended, if it has; starts nothing.
    async fn ended(&self, step: &str) -> Result<Option<StepExit>, SandboxError>;
    /// Ends one running step's tree now (cancel). Fine when it is not running.
    async fn kill(&self, step: &str) -> Result<(), SandboxError>;
}

/// The two folders a trial may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The sandbox's HOME.
    Home,
    /// The workspace.
    Workspace,
}
