//! The command harness: the profile's own process, which prints documented lines.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use evalgrid_domain::coverage::Channel;

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Place, Setting, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    lines::{Arrivals, Lines},
    recorder,
};

/// Its name in a variant.
pub const NAME: &str = "command";
/// The system prompt, below HOME.
pub const SYSTEM_PROMPT: &str = ".sphynx/system-prompt.md";
/// A reason that begins so leaves the trial unscored.
const FAILED: &str = "failed:";

/// Runs `bash -c RUN` in the workspace.
///
/// One turn only, unless the process has printed `Started` with a session id: then it is started again for each turn, with
/// `SPHYNX_SESSION_ID` set to it. That, and `SPHYNX_DEADLINE_MS`, are ours beyond the documented interface.
#[derive(Clone, Copy, Debug)]
pub struct Command;

impl Harness for Command {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        None
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        let system_prompt = setting.system_prompt.iter();
        system_prompt
            .map(|text| TextFile::new(Place::Home, SYSTEM_PROMPT, text.as_str()))
            .collect()
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let run = setting.run.as_ref().ok_or(HarnessError::NoRun)?;
        let below_home = |path: &str| format!("{}/{path}", setting.home);
        let mut env: BTreeMap<String, String> = setting.env.clone();
        env.extend(
            [
                ("SPHYNX_PROMPT", turn.prompt.to_owned()),
                ("SPHYNX_MODEL", setting.model.clone()),
                ("SPHYNX_HOME", setting.home.clone()),
                ("SPHYNX_WORKSPACE", setting.workspace.clone()),
                ("SPHYNX_TRACE_LOG", below_home(&recorder::log(turn.number))),
                ("SPHYNX_DEADLINE_MS", turn.deadline_ms.to_string()),
                ("BASH_ENV", format!("{}/{}", setting.shared, recorder::BASH_START)),
                ("ZDOTDIR", format!("{}/{}", setting.shared, recorder::ZSH_FOLDER)),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        if setting.system_prompt.is_some() {
            env.insert("SPHYNX_SYSTEM_PROMPT_FILE".into(), below_home(SYSTEM_PROMPT));
        }
        if let Some(session) = turn.session_id {
            env.insert("SPHYNX_SESSION_ID".into(), session.to_owned());
        }
        Ok(TurnCommand {
            files: Vec::new(),
            argv: vec![crate::SHELL.into(), "-c".into(), run.clone()],
            env,
        })
    }

    fn trace_log(&self, turn: u32) -> Option<String> {
        Some(recorder::log(turn))
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        let traced = recorder::read_log(output.trace);
        let mut journal = Journal {
            end: TurnEnd::default(),
            finished: None,
            after: 0,
            traced: traced.iter().map(|traced| (traced.command.as_str(), false)).collect(),
            events,
        };
        let mut arrivals = Arrivals::new(output.stdout_times, output.finished_at_ms);
        let lines = Lines::read(output.stdout, output.stdout_tail, &mut |line, offset| {
            if let Some(event) = HarnessEvent::from_line(line, arrivals.at(offset)) {
                journal.take(event);
            }
        })?;
        journal.end.diagnostics = lines.diagnostics();
        if journal.after > 0 {
            journal
                .end
                .diagnostics
                .push(format!("{} lines came after Finished and were not recorded", journal.after));
        }
        if journal.finished.is_none() {
            let reason = format!("exit {}", output.exit_code);
            journal.take(HarnessEvent::Finished {
                at: output.finished_at_ms as f64,
                reason,
            });
        }
        for traced in &traced {
            if !journal.traced.get(traced.command.as_str()).copied().unwrap_or(false) {
                (journal.events)(HarnessEvent::Command {
                    at: traced.at_ms.unwrap_or(output.finished_at_ms) as f64,
                    started_at: None,
                    command: traced.command.clone(),
                    exit_code: None,
                    output: String::new(),
                });
            }
        }
        let mut end = journal.end;
        if let Some(lost) = end.diagnostics.first().cloned().filter(|_| lines.lost()) {
            let lost = Channel::partial(lost);
            for channel in [&mut end.coverage.events, &mut end.coverage.actions, &mut end.coverage.messages] {
                channel.lower(&lost);
            }
        }
        if end.usage.is_none() {
            end.coverage.usage.lower(&Channel::unavailable("The command printed no Usage"));
        }
        Ok(end)
    }
}

/// A turn while it is read.
struct Journal<'a> {
    end: TurnEnd,
    /// The reason of the first Finished, which ends the journal: what comes after it is not recorded.
    finished: Option<String>,
    /// How much came after it.
    after: u64,
    /// What the recorder saw, and whether the agent has reported it with identical text.
    traced: HashMap<&'a str, bool>,
    events: &'a mut dyn FnMut(HarnessEvent),
}

impl Journal<'_> {
    fn take(&mut self, event: HarnessEvent) {
        if self.finished.is_some() {
            self.after += 1;
            return;
        }
        match &event {
            HarnessEvent::Started { session_id, .. } => {
                // The first one counts, as in every harness; an empty one continues nothing.
                if self.end.session_id.is_none() && is_session(session_id) {
                    self.end.session_id = Some(session_id.clone());
                }
            }
            HarnessEvent::Command { command, .. } => {
                if let Some(reported) = self.traced.get_mut(command.as_str()) {
                    *reported = true;
                }
            }
            HarnessEvent::Usage { usage, .. } => {
                self.end.usage = Some(self.end.usage.map_or(*usage, |sum| sum.add(usage)));
            }
            HarnessEvent::Finished { reason, .. } => {
                self.end.failure = reason.strip_prefix(FAILED).map(|rest| rest.trim().to_owned());
                self.finished = Some(reason.clone());
            }
            HarnessEvent::Message { .. } | HarnessEvent::FileChange { .. } | HarnessEvent::ToolCall { .. } => {}
        }
        (self.events)(event);
    }
}

/// Bytes of a session id at most: it becomes an environment variable, which Linux limits to 128 KiB, and a recorded step's result.
const MAX_SESSION_ID: usize = 4_096;

/// Can it be an environment variable?
fn is_session(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_SESSION_ID && !id.contains('\0')
}
