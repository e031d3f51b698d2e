//! Pi, by `pi --mode json -p`.

use std::io;

use serde_json::{Value, json};

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine, json_file},
    transcript::{self, Event, Outcome, Parser, Transcript, cost, count, exit_code_in, plain, usage},
};

/// Its name in a variant.
pub const NAME: &str = "pi";
const AGENT: Agent = Agent {
    name: NAME,
    key: "PI_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "0.73.1",
    source: Source::Npm {
        package: "@mariozechner/pi-coding-agent",
    },
    program: "node_modules/.bin/pi",
    version_args: &["--version"],
    node: true,
};

/// Starts what follows without its updates: each piece of an answer comes with all of the answer so far, twice, so that an answer of some
/// thousand words would fill all of what is kept of an output. A `grep` that cannot hand on line by line hands on late.
const FILTERED: &str = r#"line=--line-buffered
grep $line . /dev/null 2> /dev/null
[ $? -le 1 ] || line=
"$@" | grep $line -v -E '^\{"type":"(message_update|tool_execution_update)"'
exit ${PIPESTATUS[0]}"#;

/// No tools of its own, and nobody else's.
const WORDS: &[&str] = &[
    "--no-tools",
    "--no-extensions",
    "--no-skills",
    "--no-prompt-templates",
    "--no-context-files",
];

/// `pi -p`, with `--session` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Pi;

impl Harness for Pi {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        let mut files = agent::instructions(setting, "AGENTS.md");
        files.push(json_file(
            ".pi/agent/settings.json",
            &json!({ "retry": { "enabled": false, "provider": { "maxRetries": 0 } } }),
        ));
        if let Some(url) = agent::base_url(setting) {
            files.push(json_file(
                ".pi/agent/models.json",
                &json!({ "providers": { "evalgrid": {
                    "baseUrl": url,
                    "api": "openai-completions",
                    // The variable that holds it.
                    "apiKey": AGENT.key,
                    "models": [{ "id": setting.model }],
                }}}),
            ));
        } else if let Ok(key) = AGENT.api_key(setting) {
            let provider = setting.model.split_once('/').map_or("openai", |(provider, _)| provider);
            files.push(TextFile {
                private: true,
                ..json_file(".pi/agent/auth.json", &json!({ provider: { "type": "api_key", "key": key } }))
            });
        }
        files
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let program = INSTALL.program(setting)?;
        let mut command = CommandLine::shell(setting, FILTERED);
        command.args([NAME, program.as_str(), "--mode", "json", "-p"]);
        if agent::base_url(setting).is_some() {
            command.args(["--provider", "evalgrid"]);
        }
        command
            .option("--model", Some(&setting.model))
            .option("--session", turn.session_id)
            .env([("PI_API_KEY", key), ("PI_OFFLINE", "1"), ("PI_TELEMETRY", "0"), ("NO_COLOR", "1")]);
        match setting.purpose {
            Purpose::Work => command.args([agent::not_an_option(turn).as_ref()]),
            Purpose::Words => command.args(WORDS.iter().copied()).prompt_from_stdin(NAME, setting, turn),
        };
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        transcript::read(&AGENT, &mut Reader, output, events)
    }
}

struct Reader;

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        match event.text("type") {
            "session" => {
                to.cwd = event.text("cwd").to_owned();
                to.session(event.text("id"), event.at);
            }
            "message_end" => message(event.get("message"), event.at, to),
            "tool_execution_start" => to.called(event.text("toolCallId"), event.text("toolName"), event.get("args"), event.at),
            "tool_execution_end" => {
                let failed = event.get("isError").as_bool().unwrap_or(false);
                let output = plain(event.get("result").get("content").unwrap_or(&Value::Null));
                let outcome = Outcome {
                    // A command of a status other than 0 is an error whose text ends with the status.
                    exit_code: if failed {
                        exit_code_in(output.lines().last().unwrap_or_default())
                    } else {
                        Some(0)
                    },
                    output,
                    failed,
                    status: Some(if failed { "failed" } else { "completed" }.to_owned()),
                };
                to.returned(event.text("toolCallId"), outcome, event.at);
            }
            "auto_retry_start" => to.waits(Some(event.text("errorMessage"))),
            "auto_retry_end" => to.waits(None),
            "agent_end" => to.close(),
            _ => {}
        }
    }
}

fn message(message: &Value, at: f64, to: &mut Transcript<'_>) {
    let text = |key: &str| message.get(key).and_then(Value::as_str).unwrap_or_default();
    if text("role") != "assistant" {
        return;
    }
    // `responseModel` is there only where the server names another one than was asked for.
    to.model(if text("responseModel").is_empty() {
        text("model")
    } else {
        text("responseModel")
    });
    let told = &message["usage"];
    let of = |key: &str| told.get(key).and_then(count);
    let used = usage(
        of("input"),
        of("output"),
        of("cacheRead").unwrap_or(0),
        of("cacheWrite").unwrap_or(0),
    );
    let used = used.filter(|used| used.total_tokens > 0);
    to.used(used.map(|mut used| {
        used.cost_usd = cost(&told["cost"]["total"]);
        used
    }));
    match text("stopReason") {
        "error" => to.failed(text("errorMessage"), None),
        "aborted" => to.failed("the request was aborted", None),
        // An answer's end brings its usage. Without one the stream was cut, and what came of the answer is none.
        "stop" if used.is_none() => to.failed("stream ended without usage", None),
        _ => {
            let parts = message.get("content").and_then(Value::as_array).into_iter().flatten();
            for part in parts {
                if part.get("type").and_then(Value::as_str) == Some("text") {
                    to.said(part.get("text").and_then(Value::as_str).unwrap_or_default(), at);
                }
            }
        }
    }
}
