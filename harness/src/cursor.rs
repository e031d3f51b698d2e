//! Cursor's agent, by `cursor-agent -p` with `stream-json` output. There is no package: the operator configures the program. Written from its
//! documentation, not from a run of it.

use std::io;

use serde_json::Value;

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine},
    claude::assistant,
    transcript::{self, Event, Outcome, Parser, Transcript, count, plain, usage},
};

/// Its name in a variant.
pub const NAME: &str = "cursor";
const AGENT: Agent = Agent {
    name: NAME,
    key: "CURSOR_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "",
    source: Source::Configured,
    program: "",
    version_args: &["--version"],
    node: false,
};

/// `cursor-agent -p`, with `--resume` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Cursor;

impl Harness for Cursor {
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
        let permissions: &[&str] = match setting.purpose {
            Purpose::Work => &["--force"],
            Purpose::Words => &["--mode", "ask", "--trust"],
        };
        command
            .args(["-p", "--output-format", "stream-json"])
            .args(permissions.iter().copied())
            .option("--model", Some(&setting.model))
            .option("--resume", turn.session_id)
            .args(["--", turn.prompt])
            .env([("CURSOR_API_KEY", key), ("NO_COLOR", "1"), ("NO_OPEN_BROWSER", "1")])
            .finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        transcript::read(&AGENT, &mut Reader, output, events)
    }
}

struct Reader;

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let at = event.get("timestamp_ms").as_f64().unwrap_or(event.at);
        match event.text("type") {
            "system" if event.text("subtype") == "init" => {
                to.cwd = event.text("cwd").to_owned();
                // A name for people (`Claude 4.6 Sonnet`), so it is kept and not compared.
                to.named(event.text("model"));
                to.session(event.text("session_id"), at);
            }
            "assistant" => assistant(event.get("message"), true, at, to),
            "tool_call" => call(event, at, to),
            "result" => {
                to.session(event.text("session_id"), at);
                to.close();
                let told = event.get("usage");
                let of = |key: &str| told.get(key).and_then(count);
                to.used(usage(
                    of("inputTokens"),
                    of("outputTokens"),
                    of("cacheReadTokens").unwrap_or(0),
                    of("cacheWriteTokens").unwrap_or(0),
                ));
                if event.get("is_error").as_bool().unwrap_or(false) {
                    to.failed(event.text("result"), None);
                }
            }
            _ => {}
        }
    }
}

/// `{"tool_call": {"shellToolCall": {"args": …, "result": {"success": …}}}}`: the tool is the one key, the verdict the one key of its result.
fn call(event: &Event<'_>, at: f64, to: &mut Transcript<'_>) {
    let id = event.text("call_id");
    let Some((key, body)) = event.get("tool_call").as_object().and_then(|calls| calls.iter().next()) else {
        return;
    };
    let name = match key.strip_suffix("ToolCall").unwrap_or(key) {
        "function" => body["name"].as_str().unwrap_or("function"),
        name => name,
    };
    let input = body.get("args").or_else(|| body.get("arguments")).unwrap_or(&Value::Null);
    to.called(id, name, input, at);
    if event.text("subtype") != "completed" {
        return;
    }
    let (verdict, result) = match body
        .get("result")
        .and_then(Value::as_object)
        .and_then(|result| result.iter().next())
    {
        Some((verdict, result)) => (verdict.as_str(), result),
        None => ("completed", &Value::Null),
    };
    let failed = !matches!(verdict, "success" | "completed");
    let texts = ["stdout", "stderr", "interleavedOutput", "content", "errorMessage", "message"];
    let output: Vec<_> = texts
        .iter()
        .filter_map(|key| result.get(*key)?.as_str())
        .filter(|text| !text.is_empty())
        .collect();
    let outcome = Outcome {
        output: match (output.is_empty(), result) {
            (false, _) => output.join("\n"),
            (true, result) => plain(result),
        },
        failed,
        exit_code: result["exitCode"].as_i64(),
        status: Some(verdict.to_owned()),
    };
    to.returned(id, outcome, at);
}
