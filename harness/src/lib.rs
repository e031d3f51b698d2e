//! How each agent is started and read.
//!
//! A [`Harness`] turns a trial's settings into command lines and files, and what a finished turn has printed into [`HarnessEvent`]s. It runs
//! nothing itself and knows no sandbox provider: the executor does what it says and hands it the output.

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use evalgrid_domain::{coverage::Coverage, limits::MAX_PROCESS_STRING_BYTES, outcome::Usage};

mod agent;
pub mod bub;
pub mod claude;
pub mod codex;
pub mod command;
pub mod cursor;
pub mod event;
mod failure;
pub mod fx;
pub mod gemini;
pub mod install;
pub mod lines;
mod model;
pub mod opencode;
pub mod pi;
pub mod qwen;
pub mod recorder;
mod transcript;
pub mod words;

pub use command::Command;
pub use event::HarnessEvent;
pub use install::{Install, Source};
pub use words::Spoken;

/// What an agent is started for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// To do a trial's work, with all its tools.
    #[default]
    Work,
    /// To answer in words, as a judge or a simulated person. What it is told comes from the trial, and is hostile: its tools are off as far as
    /// it lets us, and what it calls nevertheless is in its events. Its prompt may be longer than an argument, so it comes from a file where the
    /// agent can read one. The command harness knows only work.
    Words,
}

/// What every turn of a trial has in common. Paths are absolute, as processes inside the sandbox see them.
#[derive(Clone, Debug, Default)]
pub struct Setting {
    /// What it is for.
    pub purpose: Purpose,
    /// The sandbox's HOME.
    pub home: String,
    /// The workspace.
    pub workspace: String,
    /// Where [`shared_files`] are.
    pub shared: String,
    /// The folder of the installs: `TOOLS/<name>-<version>/…`, see [`Install`].
    pub tools: String,
    /// The program that the operator has configured for this harness; it wins over the install.
    pub program: Option<String>,
    /// The variant's model, verbatim.
    pub model: String,
    /// How the harness signs in: `apiKey`, and `baseUrl` where the operator names a model server of his own. Empty for the command harness.
    pub credential: BTreeMap<String, String>,
    /// The files of the variant's profile, where it has one.
    pub profile: Option<ProfileFiles>,
    /// The profile's `run`.
    pub run: Option<String>,
    /// The profile's system prompt.
    pub system_prompt: Option<String>,
    /// The trial's own environment: the profile's `env` and the variables that it names. A harness's own names win over it.
    pub env: BTreeMap<String, String>,
}

/// The files that a profile ships, by path.
#[derive(Clone, Debug, Default)]
pub struct ProfileFiles {
    /// Below HOME.
    pub home: BTreeMap<String, String>,
    /// Below the workspace.
    pub workspace: BTreeMap<String, String>,
}

/// One turn to start.
#[derive(Clone, Debug)]
pub struct Turn<'a> {
    /// From 1.
    pub number: u32,
    /// What the person says: the case's prompt, or a later reply.
    pub prompt: &'a str,
    /// The session to go on with; `None` on the first turn.
    pub session_id: Option<&'a str>,
    /// When the supervisor will stop the agent, in milliseconds since the epoch.
    pub deadline_ms: u64,
}

/// The process of one turn. It runs in the workspace with closed stdin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnCommand {
    /// Files that must be there before it starts, beyond [`Harness::files`]; none for [`Purpose::Work`].
    pub files: Vec<TextFile>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment, beyond what the sandbox itself sets.
    pub env: BTreeMap<String, String>,
}

/// A text file that a harness needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFile {
    /// The folder that it is for.
    pub place: Place,
    /// Relative to that folder.
    pub path: String,
    /// Its content.
    pub content: Vec<u8>,
    /// Mode 0600: it holds a credential.
    pub private: bool,
    /// What the file holds already, from the source or the profile, stays and comes after `content`; without it the profile's own file wins.
    pub prepend: bool,
}

/// Where a [`TextFile`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The sandbox's HOME.
    Home,
    /// The workspace.
    Workspace,
    /// The folder of [`shared_files`].
    Shared,
}

impl TextFile {
    /// A file of mode 0644 that a profile may replace.
    pub fn new(place: Place, path: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        Self {
            place,
            path: path.into(),
            content: content.into(),
            private: false,
            prepend: false,
        }
    }
}

/// What a finished turn has left behind.
pub struct TurnOutput<'a> {
    /// Stdout from its start.
    pub stdout: &'a mut dyn Read,
    /// The last bytes of a stdout that was longer than what `stdout` holds, and the offset of their first one. It may lie within `stdout`.
    pub stdout_tail: Option<(&'a mut dyn Read, u64)>,
    /// When stdout arrived: see [`lines::Arrivals`].
    pub stdout_times: &'a mut dyn Read,
    /// The end of stderr.
    pub stderr: &'a str,
    /// The recorder's log; empty where there is none.
    pub trace: &'a [u8],
    /// The process's exit status.
    pub exit_code: i32,
    /// The supervisor stopped it at the time limit.
    pub timed_out: bool,
    /// When the process ended, in milliseconds since the epoch.
    pub finished_at_ms: u64,
    /// The variant's model, verbatim.
    pub model: &'a str,
    /// What the earlier turns of the session have used, as far as they said: some agents report the sum of the whole session.
    pub earlier: Option<Usage>,
}

/// How a turn ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TurnEnd {
    /// The session that a next turn can go on with.
    pub session_id: Option<String>,
    /// The model that the agent says it used.
    pub model: Option<String>,
    /// The agent said, or its output shows, that the trial cannot be scored; the reason, which may be empty.
    pub failure: Option<String>,
    /// The failure is that the model server limits requests (429): the same turn may go well later.
    pub limited: bool,
    /// What the agent was waiting for when the time limit stopped it: its model server, as far as its output shows that.
    pub stalled: Option<String>,
    /// The sum of all usage reported; `None` where none was.
    pub usage: Option<Usage>,
    /// What was lost or odd in the output, for people.
    pub diagnostics: Vec<String>,
    /// How much of the turn the output tells; its reasons are not redacted yet. `files` is not the harness's to say.
    pub coverage: Coverage,
}

/// One kind of agent.
pub trait Harness: Send + Sync {
    /// The name as in a variant.
    fn name(&self) -> &'static str;

    /// What must be on the executor's host before a trial of it runs; `None` where it needs nothing.
    fn install(&self) -> Option<&'static Install>;

    /// Files that must be there before the first turn. Those of HOME are written before the profile's, which win; those of the workspace
    /// after the profile's.
    fn files(&self, setting: &Setting) -> Vec<TextFile>;

    /// The process of one turn.
    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError>;

    /// The recorder's log of a turn, below HOME. Each turn has its own, so that it records only its own commands and can be read again.
    /// Agents that tell their commands themselves have none.
    fn trace_log(&self, turn: u32) -> Option<String> {
        let _ = turn;
        None
    }

    /// Reads a finished turn. Events come in order, one at a time, as big as the agent made them; nothing in the output is an error, only
    /// failing to read it is.
    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd>;
}

/// A setting that this harness cannot start.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HarnessError {
    /// The command harness runs what the profile says.
    #[error("the command harness needs a profile with `run`")]
    NoRun,
    /// Nothing to start.
    #[error("this worker has no {0}: its operator must configure the program")]
    NoProgram(&'static str),
    /// The lease brought no key.
    #[error("{0} needs a key, and none came with the trial")]
    NoKey(&'static str),
    /// Linux refuses longer ones.
    #[error("{what} is {bytes} bytes long, and a process takes at most {MAX_PROCESS_STRING_BYTES} at once")]
    TooLong {
        /// Which text.
        what: &'static str,
        /// How long it is.
        bytes: usize,
    },
}

/// The shell of every command line, by its full name: a profile's `PATH` is for what runs in the shell, and must not decide whether it starts.
pub const SHELL: &str = "/bin/bash";

/// Read-only files that every sandbox must have, whatever runs in it; [`Setting::shared`] says where.
pub fn shared_files() -> Vec<TextFile> {
    recorder::start_files()
}

/// The harness of a variant, by its name; `None` where it is not supported.
pub fn by_name(name: &str) -> Option<&'static dyn Harness> {
    all().into_iter().find(|harness| harness.name() == name)
}

/// Every harness.
pub fn all() -> [&'static dyn Harness; 10] {
    [
        &Command,
        &codex::Codex,
        &claude::Claude,
        &opencode::Opencode,
        &gemini::Gemini,
        &qwen::Qwen,
        &pi::Pi,
        &bub::Bub,
        &cursor::Cursor,
        &fx::Fx,
    ]
}
