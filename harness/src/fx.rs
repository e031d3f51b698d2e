//! Vercel's fx, by `fx ask --json`. There is no package: the operator configures the program. Written from its documentation, not from a run
//! of it.

use std::io::{self, Read as _};

use evalgrid_domain::{coverage::Channel, limits::MAX_OUTPUT_LINE_BYTES};
use serde_json::Value;

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine},
    transcript::{self, Event, Outcome, Parser, Transcript, plain},
};

/// Its name in a variant.
pub const NAME: &str = "fx";
const AGENT: Agent = Agent {
    name: NAME,
    key: "AI_GATEWAY_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "",
    source: Source::Configured,
    program: "",
    version_args: &["--version"],
    node: false,
};

/// `fx ask`, one turn.
#[derive(Clone, Copy, Debug)]
pub struct Fx;

impl Harness for Fx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        agent::instructions(setting, "AGENTS.md")
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let mut command = CommandLine::new(&INSTALL, setting)?;
        command.args(["ask", "--json", agent::not_an_option(turn).as_ref()]).env([
            ("AI_GATEWAY_API_KEY", key),
            ("FX_AUTO_UPGRADE", "0"),
            ("FX_NO_OPEN_BROWSER", "1"),
            ("FX_SOUND", "0"),
            ("NO_COLOR", "1"),
        ]);
        if !agent::in_words(setting) {
            command.env([("FX_PERMISSION_MODE", "yolo")]);
        }
        if !setting.model.is_empty() {
            command.env([("FX_MODEL", setting.model.as_str())]);
        }
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        // One object, which may be spread over lines: made one line, as the frame wants it.
        let mut bytes = Vec::new();
        output.stdout.take(MAX_OUTPUT_LINE_BYTES as u64).read_to_end(&mut bytes)?;
        if let Ok(object) = serde_json::from_slice::<serde_json::Map<String, Value>>(&bytes) {
            bytes = Value::Object(object).to_string().into_bytes();
        }
        let mut one_line = bytes.as_slice();
        let output = TurnOutput {
            stdout: &mut one_line,
            stdout_tail: None,
            stdout_times: output.stdout_times,
            stderr: output.stderr,
            trace: output.trace,
            exit_code: output.exit_code,
            timed_out: output.timed_out,
            finished_at_ms: output.finished_at_ms,
            model: output.model,
            earlier: output.earlier,
        };
        transcript::read(&AGENT, &mut Reader, output, events)
    }
}

struct Reader;

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let answer = ["final_output", "output"].iter().find_map(|key| event.fields.get(*key)?.as_str());
        let error = event.fields.get("error").filter(|error| !error.is_null());
        if answer.is_none() && error.is_none() {
            return;
        }
        to.model(event.text("model"));
        for tool in event
            .get("tools")
            .as_array()
            .or(event.get("tool_calls").as_array())
            .into_iter()
            .flatten()
        {
            let name = tool.as_str().or_else(|| tool.get("name")?.as_str()).unwrap_or("unknown");
            to.called("", name, tool.get("input").unwrap_or(&Value::Null), event.at);
            to.returned("", Outcome::default(), event.at);
        }
        match error {
            Some(error) => to.failed(&error.get("message").map_or_else(|| plain(error), plain), None),
            None => to.said(answer.unwrap_or_default(), event.at),
        }
        if error.is_none() && event.get("exit_code").as_i64().is_some_and(|code| code != 0) {
            to.failed(answer.unwrap_or_default(), None);
        }
        to.close();
    }

    fn finish(&mut self, to: &mut Transcript<'_>) {
        let names = || Channel::partial("fx tells the names of its tools and its answer only");
        to.lower(|coverage| &mut coverage.actions, names());
        to.lower(|coverage| &mut coverage.status, names());
    }
}
