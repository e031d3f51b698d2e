//! OpenCode, by `opencode run --format json`.

use std::io;

use serde_json::{Map, Value, json};

use crate::{
    Harness, HarnessError, HarnessEvent, Install, Purpose, Setting, Source, TextFile, Turn, TurnCommand, TurnEnd, TurnOutput,
    agent::{self, Agent, CommandLine},
    transcript::{self, Event, Outcome, Parser, Transcript, cost, count, plain, usage},
};

/// Its name in a variant.
pub const NAME: &str = "opencode";
const AGENT: Agent = Agent {
    name: NAME,
    key: "OPENCODE_API_KEY",
};
static INSTALL: Install = Install {
    name: NAME,
    version: "1.18.33",
    source: Source::Npm { package: "opencode-ai" },
    program: "node_modules/.bin/opencode",
    version_args: &["--version"],
    node: false,
};
/// Where a profile's own configuration may be, the weaker one first, as in OpenCode itself.
const HOME_CONFIGS: &[&str] = &[".config/opencode/config.json", ".config/opencode/opencode.json"];
const WORKSPACE_CONFIGS: &[&str] = &["opencode.json", ".opencode/opencode.json"];

/// `opencode run`, with `--session` for later turns.
#[derive(Clone, Copy, Debug)]
pub struct Opencode;

impl Harness for Opencode {
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
        let own_server = agent::base_url(setting).is_some();
        let model = match own_server {
            true => format!("evalgrid/{}", setting.model),
            false => setting.model.clone(),
        };
        let config = config(setting).to_string();
        let mut command = CommandLine::new(&INSTALL, setting)?;
        command
            // Errors of requests that it tries again for ever are in its log only.
            .args(["run", "--format", "json", "--print-logs", "--log-level", "ERROR"])
            .option("--model", (!setting.model.is_empty()).then_some(model.as_str()))
            .option("--session", turn.session_id)
            .env([
                ("OPENCODE_API_KEY", key),
                ("OPENCODE_CONFIG_CONTENT", config.as_str()),
                ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
                ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
                ("OPENCODE_DISABLE_SHARE", "1"),
                ("NO_COLOR", "1"),
            ]);
        if own_server {
            command.env([("OPENCODE_DISABLE_MODELS_FETCH", "1")]);
        }
        match setting.purpose {
            Purpose::Work => command.args(["--", turn.prompt]),
            // It would ask its model for a title.
            Purpose::Words => command.args(["--title", "evalgrid"]).prompt_from_stdin(NAME, setting, turn),
        };
        command.finish()
    }

    fn read(&self, output: TurnOutput<'_>, events: &mut dyn FnMut(HarnessEvent)) -> io::Result<TurnEnd> {
        transcript::read(&AGENT, &mut Reader::default(), output, events)
    }
}

/// Our settings with the profile's own over them, and the system prompt's file among its instructions. What we set is stronger than any file
/// for OpenCode, so a profile's file that is no plain JSON is still read by it, under ours.
fn config(setting: &Setting) -> Value {
    let mut config = json!({
        "autoupdate": false,
        "share": "disabled",
        // A tool that is denied is not offered.
        "permission": if agent::in_words(setting) { "deny" } else { "allow" },
    });
    if let Some(url) = agent::base_url(setting) {
        let model = &setting.model;
        config["provider"] = json!({ "evalgrid": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "evalgrid",
            "options": { "baseURL": url, "apiKey": "{env:OPENCODE_API_KEY}" },
            "models": { model.as_str(): { "name": model } },
        }});
        // It asks a small model for the session's title.
        config["small_model"] = json!(format!("evalgrid/{model}"));
    }
    if let Some(profile) = &setting.profile {
        let home = HOME_CONFIGS.iter().filter_map(|path| profile.home.get(*path));
        let workspace = WORKSPACE_CONFIGS.iter().filter_map(|path| profile.workspace.get(*path));
        for file in home.chain(workspace) {
            if let Ok(Value::Object(own)) = serde_json::from_str(file) {
                merge(&mut config, own);
            }
        }
    }
    if let Some(path) = agent::system_prompt_path(setting) {
        match &mut config["instructions"] {
            Value::Array(paths) => paths.push(path.into()),
            instructions => *instructions = json!([path]),
        }
    }
    config
}

/// Puts `over` over `base`: objects field by field, anything else as a whole.
fn merge(base: &mut Value, over: Map<String, Value>) {
    for (key, value) in over {
        match (&mut base[key.as_str()], value) {
            (there @ Value::Object(_), Value::Object(value)) => merge(there, value),
            (there, value) => *there = value,
        }
    }
}

#[derive(Default)]
struct Reader {
    /// The parts of an answer whose step is not over: an answer that was cut short is none.
    answer: Vec<(String, f64)>,
}

impl Parser for Reader {
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>) {
        let at = event.get("timestamp").as_f64().unwrap_or(event.at);
        let part = event.get("part");
        let text = |key: &str| part.get(key).and_then(Value::as_str).unwrap_or_default();
        to.session(event.text("sessionID"), at);
        match event.text("type") {
            "step_start" => to.reopen(),
            "text" => self.answer.push((text("text").to_owned(), at)),
            "tool_use" => tool(part, at, to),
            "step_finish" => self.step_finish(part, to),
            "error" => {
                let error = event.get("error");
                let data = error.get("data").unwrap_or(&Value::Null);
                let message = data.get("message").or_else(|| error.get("name")).map(plain).unwrap_or_default();
                let status = data
                    .get("statusCode")
                    .and_then(Value::as_u64)
                    .and_then(|status| u16::try_from(status).ok());
                to.failed(&message, status);
                to.close();
            }
            _ => {}
        }
    }

    fn waits_for<'a>(&self, stderr: &'a str) -> Option<&'a str> {
        logged_error(stderr)
    }
}

/// What is between the quotes of the last `error.error="…"` of its log.
fn logged_error(stderr: &str) -> Option<&str> {
    let (_, error) = stderr.rsplit_once("error.error=\"")?;
    error.split(['"', '\n']).next()
}

impl Reader {
    fn step_finish(&mut self, part: &Value, to: &mut Transcript<'_>) {
        let tokens = &part["tokens"];
        let cache = &tokens["cache"];
        let thinking = count(&tokens["reasoning"]).unwrap_or(0);
        let output = count(&tokens["output"]).map(|output| output.saturating_add(thinking));
        let step = usage(
            count(&tokens["input"]),
            output,
            count(&cache["read"]).unwrap_or(0),
            count(&cache["write"]).unwrap_or(0),
        );
        to.used(step.filter(|step| step.total_tokens > 0).map(|mut step| {
            step.cost_usd = cost(&part["cost"]);
            step
        }));
        match part.get("reason").and_then(Value::as_str).unwrap_or_default() {
            "tool-calls" => {}
            reason @ ("unknown" | "error" | "other") => {
                // A stream that ended without saying why. It is asked for again, for ever.
                self.answer.clear();
                to.waits(Some(&format!("the answer broke off ({reason})")));
                return;
            }
            _ => to.close(),
        }
        to.waits(None);
        for (text, at) in std::mem::take(&mut self.answer) {
            to.said(&text, at);
        }
    }
}

/// A call with its result, in one event.
fn tool(part: &Value, at: f64, to: &mut Transcript<'_>) {
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let state = &part["state"];
    let status = text(state, "status");
    let failed = status == "error";
    let id = text(part, "callID");
    let started = state["time"]["start"].as_f64().unwrap_or(at);
    to.called(&id, &text(part, "tool"), &state["input"], started);
    let outcome = Outcome {
        output: if failed { plain(&state["error"]) } else { plain(&state["output"]) },
        failed,
        exit_code: state["metadata"]["exit"].as_i64(),
        status: Some(status),
    };
    to.returned(&id, outcome, state["time"]["end"].as_f64().unwrap_or(at));
}
