//! Bub, by `bub run`, whose tape tells what happened.
//!
//! Bub prints only the last answer; the rest it appends to the session's tape when the turn ends, even one that failed. So a line of shell runs
//! it and then prints what is new on the tape.

use std::io;

use serde_json::Value;

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine},
    transcript::{self, Event, Outcome, Parser, Transcript, count, exit_code_in, plain, time, usage},
};

/// Its name in a variant.
pub const NAME: &str = "bub";
const AGENT: Agent = Agent {
    name: NAME,
    key: "BUB_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "0.5.1",
    source: Source::PyPi {
        package: "bub",
        python_minor: 12,
    },
    // Not `bin/bub`, which names the folder in which it was installed.
    program: "bin/python",
    version_args: &["-c", "import importlib.metadata as m; print(m.version('bub'))"],
    node: false,
};
/// The session of a trial: a sandbox has one.
const SESSION: &str = "evalgrid";
/// The tape's name ends with the first 16 hex digits of the MD5 sum of the session's name.
const TAPES: &str = "tapes/*__d6caab75c70bf768.jsonl";

/// Bub with the tools of its agent taken away, and the message read from the file that the last argument names: it has a setting for neither.
const WORDS: &str = r#"import runpy, sys
import bub.builtin.agent as agent
assert callable(agent.Agent._allowed_tools)
agent.Agent._allowed_tools = lambda *_: []
with open(sys.argv.pop(), encoding="utf-8", newline="") as prompt:
    sys.argv.append(prompt.read())
runpy.run_module("bub", run_name="__main__")"#;

/// `bub run`, with the same session for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Bub;

impl Harness for Bub {
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
        // Bub's own words go to stderr, where an error's last line is kept.
        let script = format!(
            "tape() {{ cat \"$BUB_HOME\"/{TAPES} 2>/dev/null; }}\nbefore=$(tape | wc -l)\n\"$@\" >&2\nstatus=$?\ntape | tail -n +$((before + 1))\nexit $status"
        );
        let program = INSTALL.program(setting)?;
        let mut command = CommandLine::shell(setting, &script);
        command.args([NAME, program.as_str()]);
        // Whatever an operator's own program is, it takes no Python.
        let from_file = agent::in_words(setting) && setting.program.is_none();
        let prompt = match from_file {
            true => command.prompt_file(setting, turn),
            false => turn.prompt.to_owned(),
        };
        if from_file {
            command.args(["-c", WORDS]);
        } else if setting.program.is_none() {
            command.args(["-m", "bub"]);
        }
        let home = format!("{}/.bub", setting.home);
        let model = model(setting);
        command
            .args([
                "--workspace",
                &setting.workspace,
                "run",
                "--session-id",
                SESSION,
                "--",
                prompt.as_str(),
            ])
            .env([
                ("BUB_HOME", home.as_str()),
                ("BUB_API_KEY", key),
                ("BUB_MODEL", model.as_str()),
                ("BUB_CLIENT_ARGS", r#"{"max_retries":0}"#),
                // A prompt that begins with its prefix (a comma) would be a command to bub itself.
                ("BUB_COMMAND_PREFIX", "/evalgrid-no-command/"),
                ("PYTHONDONTWRITEBYTECODE", "1"),
                ("NO_COLOR", "1"),
            ]);
        if let Some(url) = agent::base_url(setting) {
            command.env([("BUB_API_BASE", url)]);
        }
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        transcript::read(&AGENT, &mut Reader::default(), output, events)
    }
}

/// Bub's `provider:model`. A model server of the operator's own speaks OpenAI's chat completions.
fn model(setting: &Setting) -> String {
    let model = &setting.model;
    match model.split_once('/') {
        _ if agent::base_url(setting).is_some() => format!("openai:{model}"),
        _ if model.contains(':') => model.clone(),
        Some((provider, model)) => format!("{provider}:{model}"),
        None => format!("openai:{model}"),
    }
}

#[derive(Default)]
struct Reader {
    /// The last answer, which counts once its run has told its usage.
    answer: Option<(String, f64)>,
    /// The calls of the last batch, by position.
    calls: Vec<String>,
}

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let at = time(event.text("date")).unwrap_or(event.at);
        let payload = event.get("payload");
        to.session(SESSION, at);
        match event.text("kind") {
            "message" if payload["role"] == "assistant" => self.answer = Some((plain(&payload["content"]), at)),
            "tool_call" => {
                to.said(payload.get("content").and_then(Value::as_str).unwrap_or_default(), at);
                self.calls.clear();
                for call in payload["calls"].as_array().into_iter().flatten() {
                    let id = call["id"].as_str().unwrap_or_default();
                    let function = &call["function"];
                    let written = function["arguments"].as_str().unwrap_or_default();
                    let input = serde_json::from_str(written).unwrap_or_else(|_| Value::from(written));
                    to.called(id, function["name"].as_str().unwrap_or_default(), &input, at);
                    self.calls.push(id.to_owned());
                }
            }
            // Results stand in the order of their calls.
            "tool_result" => {
                let results = payload["results"].as_array().into_iter().flatten();
                let mut calls = std::mem::take(&mut self.calls).into_iter();
                for result in results {
                    let output = plain(result);
                    let failed = is_error(&output);
                    let outcome = Outcome {
                        exit_code: if failed { exit_code_in(&output) } else { Some(0) },
                        output,
                        failed,
                        status: Some(if failed { "failed" } else { "completed" }.to_owned()),
                    };
                    to.returned(&calls.next().unwrap_or_default(), outcome, at);
                }
            }
            "error" => to.failed(payload["message"].as_str().unwrap_or_default(), None),
            "event" => self.named(payload["name"].as_str().unwrap_or_default(), &payload["data"], to),
            _ => {}
        }
    }
}

/// A tool that failed gives an object instead of its output.
fn is_error(result: &str) -> bool {
    let object: Option<Value> = result.starts_with('{').then(|| serde_json::from_str(result).ok()).flatten();
    object.is_some_and(|object| object["kind"] == "tool" && object["message"].is_string())
}

impl Reader {
    fn named(&mut self, name: &str, data: &Value, to: &mut Transcript<'_>) {
        match name {
            "run" => {
                let model = data["model"].as_str().unwrap_or_default();
                to.model(model.split_once(':').map_or(model, |(_, model)| model));
                let told = &data["usage"];
                let read = told["prompt_tokens_details"].get("cached_tokens").and_then(count).unwrap_or(0);
                let beyond = told.get("prompt_tokens").and_then(count).map(|input| input.saturating_sub(read));
                let used = usage(beyond, told.get("completion_tokens").and_then(count), read, 0);
                to.used(used);
                match self.answer.take() {
                    Some((text, at)) if used.is_some() => to.said(&text, at),
                    // An answer's end brings its usage. Without one the stream was cut, and what came of the answer is none.
                    Some(_) => to.failed("stream ended without usage", None),
                    None => {}
                }
            }
            "loop.step" => match data["status"].as_str().unwrap_or_default() {
                "error" => {
                    to.failed(data["error"].as_str().unwrap_or_default(), None);
                    to.close();
                }
                "ok" => to.close(),
                _ => {}
            },
            _ => {}
        }
    }
}
