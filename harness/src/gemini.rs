//! Google's Gemini CLI, by `gemini --prompt` with `stream-json` output.

use std::io;

use evalgrid_domain::coverage::Channel;
use serde_json::{Value, json};

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine, json_file},
    model,
    transcript::{self, Event, Outcome, Parser, Transcript, count, plain, time, usage},
};

/// Its name in a variant.
pub const NAME: &str = "gemini";
const AGENT: Agent = Agent {
    name: NAME,
    key: "GEMINI_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "0.61.0",
    source: Source::Npm {
        package: "@google/gemini-cli",
    },
    program: "node_modules/.bin/gemini",
    version_args: &["--version"],
    node: true,
};

/// `gemini --prompt`, one turn: its `--resume` sends the result of each earlier tool call twice, which a model server that counts them refuses.
#[derive(Clone, Copy, Debug)]
pub struct Gemini;

impl Harness for Gemini {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        let mut files = agent::instructions(setting, "GEMINI.md");
        let mut settings = json!({
            "security": { "auth": { "selectedType": "gemini-api-key" } },
            "privacy": { "usageStatisticsEnabled": false },
            "telemetry": { "enabled": false },
            "general": { "enableAutoUpdate": false, "enableAutoUpdateNotification": false, "maxAttempts": 1 },
        });
        if agent::in_words(setting) {
            // Of its own tools none.
            settings["tools"] = json!({ "core": [] });
        }
        files.push(json_file(".gemini/settings.json", &settings));
        files
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let mut command = CommandLine::new(&INSTALL, setting)?;
        let permissions: &[&str] = match setting.purpose {
            Purpose::Work => &["--yolo"],
            Purpose::Words => &["--approval-mode", "default"],
        };
        command
            .args(["--skip-trust"])
            .args(permissions.iter().copied())
            .args(["--output-format", "stream-json"])
            .option("--model", Some(&setting.model))
            .env([
                ("GEMINI_API_KEY", key),
                // It would start a second process of itself for more memory.
                ("GEMINI_CLI_NO_RELAUNCH", "true"),
                ("NO_COLOR", "1"),
            ]);
        if let Some(url) = agent::base_url(setting) {
            command.env([("GOOGLE_GEMINI_BASE_URL", url)]);
        }
        match setting.purpose {
            // One argument, so that a prompt with a dash in front is none of its own.
            Purpose::Work => command.args([format!("--prompt={}", turn.prompt).as_str()]),
            Purpose::Words => command.prompt_from_stdin(NAME, setting, turn),
        };
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        let mut parser = Reader {
            asked: output.model.to_owned(),
            ..Reader::default()
        };
        transcript::read(&AGENT, &mut parser, output, events)
    }
}

#[derive(Default)]
struct Reader {
    asked: String,
    /// The answer so far, which comes in pieces.
    answer: String,
    /// The last error told.
    error: String,
}

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let at = time(event.text("timestamp")).unwrap_or(event.at);
        match event.text("type") {
            "init" => to.session(event.text("session_id"), at),
            "message" if event.text("role") == "assistant" => self.answer.push_str(event.text("content")),
            "tool_use" => {
                self.tell(at, to);
                to.called(event.text("tool_id"), event.text("tool_name"), event.get("parameters"), at);
            }
            "tool_result" => {
                let status = event.text("status");
                let failed = status == "error";
                let error = event.get("error").get("message").and_then(Value::as_str);
                let outcome = Outcome {
                    output: error.map_or_else(|| plain(event.get("output")), str::to_owned),
                    failed,
                    exit_code: None,
                    status: Some(status.to_owned()),
                };
                to.returned(event.text("tool_id"), outcome, at);
            }
            "error" => {
                self.error = event.text("message").to_owned();
                to.waits(Some(&self.error));
                to.note(format!("gemini: {}", self.error));
            }
            "result" => self.result(event, at, to),
            _ => {}
        }
    }

    fn finish(&mut self, to: &mut Transcript<'_>) {
        to.no_later_turn();
        // Exit statuses are in no event.
        to.lower(
            |coverage| &mut coverage.status,
            Channel::partial("gemini does not tell the exit status of its commands"),
        );
    }
}

impl Reader {
    fn tell(&mut self, at: f64, to: &mut Transcript<'_>) {
        to.said(&std::mem::take(&mut self.answer), at);
    }

    fn result(&mut self, event: &Event<'_>, at: f64, to: &mut Transcript<'_>) {
        to.close();
        if event.text("status") == "error" {
            // What there is of an answer was cut short.
            self.answer.clear();
            let error = event.get("error").get("message").and_then(Value::as_str);
            to.failed(error.unwrap_or(&self.error), None);
        } else {
            self.tell(at, to);
        }
        let stats = event.get("stats");
        let of = |key: &str| stats.get(key).and_then(count);
        let (input, read, total) = (of("input_tokens"), of("cached").unwrap_or(0), of("total_tokens"));
        // Thinking is paid as output, and told in the total only.
        let output = match (total, input) {
            (Some(total), Some(input)) => of("output_tokens").map(|output| output.max(total.saturating_sub(input))),
            _ => of("output_tokens"),
        };
        let beyond = input.map(|input| input.saturating_sub(read));
        to.used(usage(beyond, output, read, 0).filter(|usage| usage.total_tokens > 0));
        // `init` repeats what was asked for; here are the models that answered, the CLI's own helpers among them.
        let models: Vec<&String> = stats
            .get("models")
            .and_then(Value::as_object)
            .into_iter()
            .flat_map(|models| models.keys())
            .collect();
        match models.iter().find(|used| model::is_same(&self.asked, used)) {
            Some(used) => to.model(used),
            None => models.first().into_iter().for_each(|used| to.model(used)),
        }
    }
}
