//! OpenAI's Codex CLI, by `codex exec --json`.

use std::io;

use evalgrid_domain::{coverage::Channel, outcome::Usage};
use serde_json::{Value, json};

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine, json_file},
    transcript::{self, Event, Outcome, Parser, Transcript, count, usage},
};

/// Its name in a variant.
pub const NAME: &str = "codex";
const AGENT: Agent = Agent {
    name: NAME,
    key: "OPENAI_API_KEY",
};
/// The native program: the package's own launcher is a Node process that would stand beside it for the whole turn.
const PROGRAM: &str = if cfg!(target_arch = "aarch64") {
    "node_modules/@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex"
} else {
    "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
};
static INSTALL: Install = Install {
    name: NAME,
    version: "0.171.0",
    source: Source::Npm { package: "@openai/codex" },
    program: PROGRAM,
    version_args: &["--version"],
    node: false,
};
/// How long a model server of the operator's own may send nothing in the middle of an answer.
const STREAM_IDLE_MS: &str = "stream_idle_timeout_ms=300000";

/// Its own sandbox reads only, nobody is asked for more, and all tools are off that a setting turns off. Models of OpenAI's are still offered
/// `apply_patch`, which may write nothing.
const WORDS: &[&str] = &[
    "sandbox_mode=\"read-only\"",
    "approval_policy=\"never\"",
    "features.shell_tool=false",
    "features.view_image=false",
    "features.multi_agent=false",
    "features.goals=false",
    "features.apps=false",
    "features.plugins=false",
    "features.hooks=false",
    "web_search=\"disabled\"",
    "tools.experimental_request_user_input.enabled=false",
    "tools.update_plan.enabled=false",
    "skills.bundled.enabled=false",
    "skills.include_instructions=false",
];
/// Starts what follows, and prints the tool calls of its own record that are new: it does not tell those that came to nothing, because there is
/// no such tool or it may not do that.
const CALLS: &str = r#"calls() { grep -hE '"type":"response_item","payload":\{"type":"[a-z_]*_call"' "$CODEX_HOME"/sessions/*/*/*/*.jsonl 2> /dev/null; }
before=$(calls | wc -l)
"$@"
status=$?
calls | tail -n +$((before + 1))
exit $status"#;

/// `codex exec`, and `codex exec resume` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Codex;

impl Harness for Codex {
    fn name(&self) -> &'static str {
        NAME
    }

    fn install(&self) -> Option<&'static Install> {
        Some(&INSTALL)
    }

    fn files(&self, setting: &Setting) -> Vec<TextFile> {
        let mut files = agent::system_prompt(setting);
        if let Ok(key) = AGENT.api_key(setting) {
            files.push(TextFile {
                private: true,
                ..json_file(".codex/auth.json", &json!({ "auth_mode": "apikey", "OPENAI_API_KEY": key }))
            });
        }
        files
    }

    fn turn(&self, setting: &Setting, turn: &Turn<'_>) -> Result<TurnCommand, HarnessError> {
        let key = AGENT.api_key(setting)?;
        let mut command = match setting.purpose {
            Purpose::Work => CommandLine::new(&INSTALL, setting)?,
            Purpose::Words => {
                let mut command = CommandLine::shell(setting, CALLS);
                command.args([NAME, INSTALL.program(setting)?.as_str()]);
                command
            }
        };
        command.args(["exec"]);
        if turn.session_id.is_some() {
            command.args(["resume"]);
        }
        command.args(["--json", "--skip-git-repo-check"]);
        match setting.purpose {
            Purpose::Work => command.args(["--dangerously-bypass-approvals-and-sandbox"]),
            Purpose::Words => command.args(WORDS.iter().flat_map(|setting| ["-c", setting])),
        };
        command
            .option("--model", Some(&setting.model))
            .args(["-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"]);
        if let Some(url) = agent::base_url(setting) {
            let url = format!("model_providers.evalgrid.base_url={}", toml(url));
            command.args(["-c", "model_provider=\"evalgrid\"", "-c", &url]);
            for setting in [
                "name=\"evalgrid\"",
                "env_key=\"OPENAI_API_KEY\"",
                "wire_api=\"responses\"",
                "request_max_retries=0",
                "stream_max_retries=0",
                STREAM_IDLE_MS,
            ] {
                command.args(["-c", &format!("model_providers.evalgrid.{setting}")]);
            }
            command.env([("OPENAI_API_KEY", key)]);
        }
        if let Some(text) = &setting.system_prompt {
            command.args(["-c", &format!("developer_instructions={}", toml(text))]);
        }
        command.args(["--"]);
        if let Some(session) = turn.session_id {
            command.args([session]);
        }
        match setting.purpose {
            Purpose::Work => command.args([turn.prompt]),
            Purpose::Words => command.args(["-"]).prompt_from_stdin(NAME, setting, turn),
        };
        command.env([("CODEX_HOME", format!("{}/.codex", setting.home).as_str())]).finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        let mut parser = Reader {
            earlier: output.earlier,
            error: String::new(),
        };
        transcript::read(&AGENT, &mut parser, output, events)
    }
}

/// A TOML string. JSON's escapes are TOML's, but for a few characters that JSON may leave as they are.
fn toml(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

struct Reader {
    /// The earlier turns' usage: codex tells the sum of the whole thread.
    earlier: Option<Usage>,
    /// The last error that was told and not (yet) the end.
    error: String,
}

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        match event.text("type") {
            "thread.started" => to.session(event.text("thread_id"), event.at),
            "item.started" => self.item(event.get("item"), false, event.at, to),
            "item.completed" => self.item(event.get("item"), true, event.at, to),
            "turn.completed" => {
                self.usage(event.get("usage"), to);
                to.close();
            }
            "turn.failed" => {
                let message = event.get("error").get("message").and_then(Value::as_str);
                to.failed(message.unwrap_or(&self.error), None);
                to.close();
            }
            "error" => {
                self.error = event.text("message").to_owned();
                to.waits(Some(&self.error));
                return;
            }
            // Of its record: see `CALLS`.
            "response_item" => {
                recorded(event.get("payload"), event.at, to);
                return;
            }
            _ => return,
        }
        to.waits(None);
    }
}

impl Reader {
    /// Ids of items begin again in each process, so they pair within a turn only.
    fn item(&mut self, item: &Value, completed: bool, at: f64, to: &mut Transcript<'_>) {
        let text = |key: &str| item.get(key).and_then(Value::as_str).unwrap_or_default();
        let id = text("id");
        let status = item.get("status").and_then(Value::as_str).map(str::to_owned);
        let failed = status.as_deref().is_some_and(|status| status == "failed" || status == "declined");
        match text("type") {
            "agent_message" if completed => to.said(text("text"), at),
            "error" if completed => to.note(format!("codex: {}", text("message"))),
            "command_execution" => {
                to.ran(id, text("command"), at);
                let outcome = Outcome {
                    output: text("aggregated_output").to_owned(),
                    exit_code: item.get("exit_code").and_then(Value::as_i64),
                    failed,
                    status,
                };
                if completed {
                    to.returned(id, outcome, at);
                }
            }
            "file_change" if completed => {
                let changes = item.get("changes").and_then(Value::as_array).into_iter().flatten();
                let paths: Vec<_> = changes
                    .filter_map(|change| Some(change.get("path")?.as_str()?.to_owned()))
                    .collect();
                if failed {
                    to.note(format!("codex could not change {}", paths.join(", ")));
                } else {
                    to.wrote(paths, at);
                }
            }
            "mcp_tool_call" => {
                to.called(id, &format!("{}.{}", text("server"), text("tool")), &item["arguments"], at);
                let error = item.get("error").filter(|error| !error.is_null());
                let output = match error {
                    Some(error) => error.get("message").map_or_else(|| error.to_string(), transcript::plain),
                    None => transcript::plain(item.get("result").and_then(|result| result.get("content")).unwrap_or(&Value::Null)),
                };
                if completed {
                    to.returned(
                        id,
                        Outcome {
                            output,
                            failed: failed || error.is_some(),
                            exit_code: None,
                            status,
                        },
                        at,
                    );
                }
            }
            "web_search" if completed => {
                to.called(id, "web_search", &item["query"], at);
                to.returned(
                    id,
                    Outcome {
                        status,
                        ..Outcome::default()
                    },
                    at,
                );
            }
            _ => {}
        }
    }

    /// Cached input is a part of the input, and all counts are sums over the thread.
    fn usage(&self, told: &Value, to: &mut Transcript<'_>) {
        let of = |key: &str| told.get(key).and_then(count);
        let (read, write) = (of("cached_input_tokens").unwrap_or(0), of("cache_write_input_tokens").unwrap_or(0));
        let beyond = of("input_tokens").map(|input| input.saturating_sub(read.saturating_add(write)));
        let Some(sum) = usage(beyond, of("output_tokens"), read, write) else {
            return;
        };
        let before = self.earlier.unwrap_or_default();
        let less = sum.input_tokens < before.input_tokens
            || sum.output_tokens < before.output_tokens
            || read < before.cache_read_tokens
            || write < before.cache_write_tokens;
        if less {
            // Not a sum of what came before, whatever it is.
            to.lower(
                |coverage| &mut coverage.usage,
                Channel::partial("codex reported less than in the turn before"),
            );
        }
        to.used(usage(
            Some(sum.input_tokens.saturating_sub(before.input_tokens)),
            Some(sum.output_tokens.saturating_sub(before.output_tokens)),
            read.saturating_sub(before.cache_read_tokens),
            write.saturating_sub(before.cache_write_tokens),
        ));
    }
}

/// A tool call of codex's own record. It says in the next line what came of it, which does not matter here.
fn recorded(call: &Value, at: f64, to: &mut Transcript<'_>) {
    let text = |key: &str| call.get(key).and_then(Value::as_str);
    let id = text("call_id").unwrap_or_default();
    let name = text("name").or(text("type")).unwrap_or_default();
    let input = ["arguments", "input", "action"].iter().find_map(|key| call.get(*key));
    to.called(id, name, input.unwrap_or(&Value::Null), at);
    to.returned(id, Outcome::default(), at);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_is_a_toml_string() {
        for (text, expected) in [
            ("a", r#""a""#),
            ("say \"hi\" \\ now\n\ttab", r#""say \"hi\" \\ now\n\ttab""#),
            ("\u{1}\u{7f}é", r#""\u0001\u007fé""#),
        ] {
            assert_eq!(toml(text), expected);
        }
    }
}
