//! How each agent is started and read.
//!
//! A [`Harness`] turns a trial's settings into command lines and files, and what a finished turn has printed into [`HarnessEvent`]s. It runs
//! nothing itself and knows no sandbox provider: the executor does what it says and hands it the output.

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use evalgrid_domain::outcome::Usage;

pub mod command;
pub mod event;
pub mod lines;
pub mod recorder;

pub use command::Command;
pub use event::HarnessEvent;

/// What every turn of a trial has in common. Paths are absolute, as processes inside the sandbox see them.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The sandbox's HOME.
    pub home: String,
    /// The workspace.
    pub workspace: String,
    /// Where [`shared_files`] are.
    pub shared: String,
    /// The variant's model, verbatim.
    pub model: String,
    /// The profile's `run`.
    pub run: Option<String>,
    /// The profile's system prompt.
    pub system_prompt: Option<String>,
    /// The trial's own environment: the profile's `env` and the variables that it names. A harness's own names win over it.
    pub env: BTreeMap<String, String>,
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
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment, beyond what the sandbox itself sets.
    pub env: BTreeMap<String, String>,
}

/// A text file that a harness needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFile {
    /// Relative to the folder that it is for.
    pub path: String,
    /// Its content.
    pub content: Vec<u8>,
}

/// What a finished turn has left behind.
pub struct TurnOutput<'a> {
    /// Stdout from its start.
    pub stdout: &'a mut dyn Read,
    /// The last bytes of a stdout that was longer than what `stdout` holds, and the offset of their first one. It may lie within `stdout`.
    pub stdout_tail: Option<(&'a mut dyn Read, u64)>,
    /// When stdout arrived: see [`lines::Arrivals`].
    pub stdout_times: &'a mut dyn Read,
    /// The recorder's log; empty where there is none.
    pub trace: &'a [u8],
    /// The process's exit status.
    pub exit_code: i32,
    /// When the process ended, in milliseconds since the epoch.
    pub finished_at_ms: u64,
}

/// How a turn ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TurnEnd {
    /// The session that a next turn can go on with.
    pub session_id: Option<String>,
    /// The agent said that the trial cannot be scored; its reason, which may be empty.
    pub failure: Option<String>,
    /// The sum of all usage reported; `None` where none was.
    pub usage: Option<Usage>,
    /// What was lost or odd in the output, for people.
    pub diagnostics: Vec<String>,
}

/// One kind of agent.
pub trait Harness: Send + Sync {
    /// The name as in a variant.
    fn name(&self) -> &'static str;

    /// Files that must be in HOME before the first turn.
    fn home_files(&self, setting: &Setting) -> Vec<TextFile>;

    /// The process of one turn.
    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError>;

    /// The recorder's log of a turn, below HOME. Each turn has its own, so that it records only its own commands and can be read again.
    fn trace_log(&self, turn: u32) -> Option<String>;

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
}

/// The shell of every command line, by its full name: a profile's `PATH` is for what runs in the shell, and must not decide whether it starts.
pub const SHELL: &str = "/bin/bash";

/// Read-only files that every sandbox must have, whatever runs in it; [`Setting::shared`] says where.
pub fn shared_files() -> Vec<TextFile> {
    recorder::start_files()
}

/// The harness of a variant, by its name; `None` where it is not supported.
pub fn by_name(name: &str) -> Option<&'static dyn Harness> {
    match name {
        command::NAME => Some(&Command),
        _ => None,
    }
}
