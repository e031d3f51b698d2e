//! Qwen Code, by `qwen` with `stream-json` output: events like Claude Code's, with differences that matter.

use std::{collections::BTreeMap, io};

use evalgrid_domain::{coverage::Channel, outcome::Usage};
use serde_json::{Value, json};

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine, json_file},
    claude::assistant,
    transcript::{self, Event, Outcome, Parser, Transcript, count, plain, usage},
};

/// Its name in a variant.
pub const NAME: &str = "qwen";
const AGENT: Agent = Agent {
    name: NAME,
    key: "DASHSCOPE_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "0.15.10",
    source: Source::Npm {
        package: "@qwen-code/qwen-code",
    },
    program: "node_modules/.bin/qwen",
    version_args: &["--version"],
    node: true,
};
/// The vendor's own address for keys of DashScope.
const DASHSCOPE: &str = "https://dashscope.aliyuncs.com/compatible-mode/v1";

/// `--bare` knows three tools, and none of these may be used. Without it there are more, which no flag turns off, and requests beside the
/// conversation.
const WORDS: &[&str] = &[
    "--bare",
    "--exclude-tools",
    "read_file,edit,run_shell_command",
    "--approval-mode",
    "default",
];

/// `qwen PROMPT`, with `--resume` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Qwen;

impl Harness for Qwen {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        let mut files = agent::instructions(setting, "AGENTS.md");
        files.push(json_file(
            ".qwen/settings.json",
            &json!({
                "general": { "enableAutoUpdate": false, "disableAutoUpdate": true },
                "privacy": { "usageStatisticsEnabled": false },
                "telemetry": { "enabled": false },
                "model": { "generationConfig": { "maxRetries": 0 } },
            }),
        ));
        files
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let mut command = CommandLine::new(&INSTALL, setting)?;
        let permissions: &[&str] = match setting.purpose {
            Purpose::Work => &["--yolo"],
            Purpose::Words => WORDS,
        };
        command
            .args(["--auth-type", "openai"])
            .args(permissions.iter().copied())
            .args(["--output-format", "stream-json"])
            .option("--model", Some(&setting.model))
            .option("--resume", turn.session_id)
            .env([
                ("OPENAI_API_KEY", key),
                ("OPENAI_BASE_URL", agent::base_url(setting).unwrap_or(DASHSCOPE)),
                ("OPENAI_MODEL", setting.model.as_str()),
                // It would start a second process of itself for more memory.
                ("QWEN_CODE_NO_RELAUNCH", "1"),
                ("NO_COLOR", "1"),
            ]);
        match setting.purpose {
            Purpose::Work => command.args([agent::not_an_option(turn).as_ref()]),
            Purpose::Words => command.prompt_from_stdin(NAME, setting, turn),
        };
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        let mut parser = Reader {
            earlier: output.earlier.unwrap_or_default(),
            ..Reader::default()
        };
        transcript::read(&AGENT, &mut parser, output, events)
    }
}

#[derive(Default)]
struct Reader {
    /// Usage by message: one message may come in several events, and `result` holds the sum of more than this turn.
    messages: BTreeMap<String, Usage>,
    /// A message has come.
    answered: bool,
    /// The earlier turns' usage.
    earlier: Usage,
    /// Input of the whole session, which `result` tells.
    session_input: u64,
}

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let main_line = event.get("parent_tool_use_id").is_null();
        match event.text("type") {
            "system" if event.text("subtype") == "init" => {
                to.cwd = event.text("cwd").to_owned();
                to.model(event.text("model"));
                to.session(event.text("session_id"), event.at);
            }
            "assistant" => self.assistant(event.get("message"), main_line, event.at, to),
            "user" => results(event.get("message"), event.at, to),
            "result" => {
                to.session(event.text("session_id"), event.at);
                to.close();
                self.session_input = event.get("usage").get("input_tokens").and_then(count).unwrap_or(0);
                let text = event.text("result");
                let error = event.get("error").get("message").and_then(Value::as_str);
                if event.get("is_error").as_bool().unwrap_or(false) {
                    to.failed(error.unwrap_or(text), None);
                } else if let (false, Some(error)) = (self.answered, api_error(text)) {
                    to.failed(error, None);
                }
            }
            _ => {}
        }
    }

    fn finish(&mut self, to: &mut Transcript<'_>) {
        let mut input = self.earlier.input_tokens.saturating_add(self.earlier.cache_read_tokens);
        for usage in self.messages.values() {
            input = input.saturating_add(usage.input_tokens).saturating_add(usage.cache_read_tokens);
            to.used(Some(*usage));
        }
        let beside = self.session_input.saturating_sub(input);
        if beside > 0 {
            let reason = format!("qwen made requests beside the conversation, with {beside} tokens of input, of which no event tells more");
            to.lower(|coverage| &mut coverage.usage, Channel::partial(reason));
        }
        to.lower(
            |coverage| &mut coverage.status,
            Channel::partial("qwen does not tell the exit status of its commands"),
        );
    }
}

impl Reader {
    fn assistant(&mut self, message: &Value, main_line: bool, at: f64, to: &mut Transcript<'_>) {
        if main_line {
            to.model(message.get("model").and_then(Value::as_str).unwrap_or_default());
        }
        let told = &message["usage"];
        let of = |key: &str| told.get(key).and_then(count);
        let read = of("cache_read_input_tokens").unwrap_or(0);
        let beyond = of("input_tokens").map(|input| input.saturating_sub(read));
        let usage = usage(beyond, of("output_tokens"), read, 0).filter(|usage| usage.total_tokens > 0);
        let texts = message.get("content").and_then(Value::as_array).into_iter().flatten();
        let error = texts.filter_map(|part| part.get("text")?.as_str()).find_map(api_error);
        match (error, usage) {
            // With it goes the part of the answer before it, which was cut short. An answer that only quotes an error has used tokens.
            (Some(error), None) => to.failed(error, None),
            _ => assistant(message, main_line, at, to),
        }
        if let Some(usage) = usage {
            let id = message.get("id").and_then(Value::as_str).unwrap_or_default();
            self.messages.insert(id.to_owned(), usage);
        }
        self.answered = true;
    }
}

/// Results of calls. That a command failed is told in its text only.
fn results(message: &Value, at: f64, to: &mut Transcript<'_>) {
    for part in message.get("content").and_then(Value::as_array).into_iter().flatten() {
        if part.get("type").and_then(Value::as_str) != Some("tool_result") {
            continue;
        }
        let failed = part.get("is_error").and_then(Value::as_bool).unwrap_or(false);
        let outcome = Outcome {
            output: plain(&part["content"]),
            failed,
            exit_code: None,
            status: Some(if failed { "failed" } else { "completed" }.to_owned()),
        };
        to.returned(part.get("tool_use_id").and_then(Value::as_str).unwrap_or_default(), outcome, at);
    }
}

/// The error that qwen tells as an answer, or behind the part of one: `[API Error: 401 …]`, and perhaps advice on the next line.
fn api_error(text: &str) -> Option<&str> {
    let (_, error) = text.rsplit_once("[API Error: ")?;
    let line = error.lines().next()?;
    Some(line.strip_suffix(']').unwrap_or(line))
}
