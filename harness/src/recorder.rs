//! The shell recorder: start files for bash and zsh that write down each command, and the reader of that log.
//!
//! bash sources `trace.sh` through `BASH_ENV`, zsh its own `.zshenv` through `ZDOTDIR`; both set a `DEBUG` trap. They use builtins only, so a
//! command costs microseconds and no process. An agent may well break or forge the log: it is a hint about what ran, never a fact.

use serde_json::Value;

use crate::{Place, TextFile};

/// The log of a turn, below HOME. One file per turn, where the documentation has one that is emptied: nothing is lost when the executor dies
/// between reading and recording a turn, and what an earlier turn left running does not speak in a later one.
pub fn log(turn: u32) -> String {
    match turn {
        1 => ".sphynx-trace.ndjson".into(),
        turn => format!(".sphynx-trace-{turn}.ndjson"),
    }
}
/// bash's start file, below the shared folder.
pub const BASH_START: &str = "recorder/trace.sh";
/// zsh's start folder, below the shared folder.
pub const ZSH_FOLDER: &str = "recorder/zsh";
/// Bytes of the log that are read after a turn. One shell stops at 20,000 commands, but there may be many shells.
pub const LOG_LIMIT: u64 = 8 << 20;

/// The start files: the same for all trials, so they are written once, not per trial.
pub fn start_files() -> Vec<TextFile> {
    vec![
        TextFile::new(Place::Shared, BASH_START, include_bytes!("recorder/trace.sh")),
        TextFile::new(
            Place::Shared,
            format!("{ZSH_FOLDER}/.zshenv"),
            include_bytes!("recorder/zshenv.zsh"),
        ),
    ]
}

/// A command that a shell was about to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traced {
    /// Milliseconds since the epoch, where the line says so.
    pub at_ms: Option<u64>,
    /// Its text as the shell prints it.
    pub command: String,
}

/// Reads a log, in order. Lines that are not ours are ignored, and so is a last line that was cut.
pub fn read_log(log: &[u8]) -> Vec<Traced> {
    log.split(|byte| *byte == b'\n').filter_map(read_line).collect()
}

fn read_line(line: &[u8]) -> Option<Traced> {
    if line.is_empty() {
        return None;
    }
    let line: Value = serde_json::from_str(&String::from_utf8_lossy(line)).ok()?;
    let argv = line
        .get("argv")?
        .as_array()?
        .iter()
        .map(Value::as_str)
        .collect::<Option<Vec<_>>>()?;
    (!argv.is_empty()).then(|| Traced {
        at_ms: line.get("at").and_then(Value::as_u64),
        command: argv.join(" "),
    })
}
