//! Anthropic's Claude Code, by `claude -p` with `stream-json` output.

use std::io;

use evalgrid_domain::number::Number;
use serde_json::Value;

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine},
    transcript::{self, Event, Outcome, Parser, Transcript, count, exit_code_in, plain, time, usage},
};

/// Its name in a variant.
pub const NAME: &str = "claude";
const AGENT: Agent = Agent {
    name: NAME,
    key: "ANTHROPIC_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "2.1.197",
    source: Source::Npm {
        package: "@anthropic-ai/claude-code",
    },
    program: "node_modules/.bin/claude",
    version_args: &["--version"],
    node: false,
};

/// No tools, no slash commands; what it cannot ask for it may not do.
const WORDS: &[&str] = &["--tools", "", "--permission-mode", "dontAsk", "--disable-slash-commands"];

/// `claude -p`, with `--resume` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Claude;

impl Harness for Claude {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        agent::system_prompt(setting)
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let mut command = CommandLine::new(&INSTALL, setting)?;
        let permissions: &[&str] = match setting.purpose {
            Purpose::Work => &["--dangerously-skip-permissions"],
            Purpose::Words => WORDS,
        };
        command
            .args(["-p", "--output-format", "stream-json", "--verbose", "--bare"])
            .args(permissions.iter().copied())
            .option("--model", Some(&setting.model))
            .option("--append-system-prompt-file", agent::system_prompt_path(setting).as_deref());
        if setting.profile.is_some() {
            // `--bare` finds nothing by itself: what a profile ships must be named.
            command
                .args(["--add-dir", &setting.workspace])
                .option("--settings", shipped(setting, ".claude/settings.json").as_deref())
                .option("--mcp-config", shipped(setting, ".mcp.json").as_deref());
        }
        command.option("--resume", turn.session_id).env([
            ("ANTHROPIC_API_KEY", key),
            // Root may not skip permissions elsewhere.
            ("IS_SANDBOX", "1"),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("DISABLE_AUTOUPDATER", "1"),
            ("DISABLE_TELEMETRY", "1"),
            ("DISABLE_ERROR_REPORTING", "1"),
            ("CLAUDE_CODE_MAX_RETRIES", "0"),
        ]);
        if let Some(url) = agent::base_url(setting) {
            command.env([("ANTHROPIC_BASE_URL", url)]);
        }
        match setting.purpose {
            Purpose::Work => command.args(["--", turn.prompt]),
            Purpose::Words => command.prompt_from_stdin(NAME, setting, turn),
        };
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        transcript::read(&AGENT, &mut Reader, output, events)
    }
}

/// The path of a profile's file: the workspace's goes before HOME's, as in Claude Code itself.
fn shipped(setting: &Setting, path: &str) -> Option<String> {
    let profile = setting.profile.as_ref()?;
    if profile.workspace.contains_key(path) {
        Some(format!("{}/{path}", setting.workspace))
    } else {
        profile.home.contains_key(path).then(|| format!("{}/{path}", setting.home))
    }
}

struct Reader;

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let main_line = event.get("parent_tool_use_id").is_null();
        match event.text("type") {
            "system" => match event.text("subtype") {
                "init" => {
                    to.cwd = event.text("cwd").to_owned();
                    to.model(event.text("model"));
                    to.session(event.text("session_id"), event.at);
                }
                "api_retry" => to.waits(Some(&format!("{} ({})", event.text("error"), event.get("error_status")))),
                _ => {}
            },
            "assistant" => {
                to.waits(None);
                let message = event.get("message");
                if message.get("model").and_then(Value::as_str) == Some(SYNTHETIC) {
                    // The CLI's own words about an error; `result` tells it too.
                    return;
                }
                if main_line {
                    to.model(message.get("model").and_then(Value::as_str).unwrap_or_default());
                }
                assistant(message, main_line, event.at, to);
            }
            "user" => results(event.get("message"), time(event.text("timestamp")).unwrap_or(event.at), to),
            "result" => result(event, to),
            _ => {}
        }
    }
}

/// The model of messages that no model wrote.
const SYNTHETIC: &str = "<synthetic>";

/// What the model said and called; text of a helper agent's line is no word to the person.
pub(crate) fn assistant(message: &Value, main_line: bool, at: f64, to: &mut Transcript<'_>) {
    let text = |part: &Value, key: &str| part.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    for part in message.get("content").and_then(Value::as_array).into_iter().flatten() {
        match text(part, "type").as_str() {
            "text" if main_line => to.said(&text(part, "text"), at),
            "tool_use" => to.called(&text(part, "id"), &text(part, "name"), &part["input"], at),
            _ => {}
        }
    }
}

/// Results of calls. A command of a status other than 0 is an error whose text begins with the status.
pub(crate) fn results(message: &Value, at: f64, to: &mut Transcript<'_>) {
    for part in message.get("content").and_then(Value::as_array).into_iter().flatten() {
        if part.get("type").and_then(Value::as_str) != Some("tool_result") {
            continue;
        }
        let output = plain(&part["content"]);
        let failed = part.get("is_error").and_then(Value::as_bool).unwrap_or(false);
        let outcome = Outcome {
            exit_code: if failed {
                exit_code_in(output.lines().next().unwrap_or_default())
            } else {
                Some(0)
            },
            output,
            failed,
            status: Some(if failed { "failed" } else { "completed" }.to_owned()),
        };
        to.returned(part.get("tool_use_id").and_then(Value::as_str).unwrap_or_default(), outcome, at);
    }
}

/// Only here are the true sums; they are of this turn alone.
fn result(event: &Event<'_>, to: &mut Transcript<'_>) {
    to.session(event.text("session_id"), event.at);
    to.close();
    let told = event.get("usage");
    let of = |key: &str| told.get(key).and_then(count);
    let sum = usage(
        of("input_tokens"),
        of("output_tokens"),
        of("cache_read_input_tokens").unwrap_or(0),
        of("cache_creation_input_tokens").unwrap_or(0),
    );
    // After an error before the first answer all is 0, which says nothing.
    if let Some(mut sum) = sum.filter(|sum| sum.total_tokens > 0) {
        sum.cost_usd = event.get("total_cost_usd").as_f64().filter(|cost| *cost >= 0.0).map(Number);
        to.used(Some(sum));
    }
    let subtype = event.text("subtype");
    match subtype {
        // The profile's own limits: the agent has ended in order, before it was done.
        "error_max_turns" | "error_max_budget_usd" => to.note(format!("claude ended at a limit of its settings: {subtype}")),
        _ if event.get("is_error").as_bool().unwrap_or(false) || subtype.starts_with("error") => {
            let errors = event.get("errors").as_array().into_iter().flatten().filter_map(Value::as_str);
            let message = match event.text("result") {
                "" => errors.collect::<Vec<_>>().join("; "),
                text => text.to_owned(),
            };
            let message = if message.is_empty() { subtype.to_owned() } else { message };
            let status = event.get("api_error_status").as_u64().and_then(|status| u16::try_from(status).ok());
            to.failed(&message, status);
        }
        _ => {}
    }
    let denied = event.get("permission_denials").as_array().map_or(0, Vec::len);
    if denied > 0 {
        to.note(format!("claude was denied {denied} tool calls by its permissions"));
    }
}
