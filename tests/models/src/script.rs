//! What the model does: the last thing that the person said decides, line by line.
//!
//! | line | what it does |
//! |---|---|
//! | `RUN <command>` | one call of the client's own shell tool; several lines: one call after the other |
//! | `SAY <text>` | the final text, word for word |
//! | `WAIT <milliseconds>` | before each answer |
//! | `FAULT <mode>` | as if the path had begun so: `FAULT m429` |
//!
//! Without `SAY` the final text is `[turn N] Done.` after commands, and `[turn N] You said: …` where there was no directive at all; N counts
//! the answers of the conversation, so a client that has lost what was said before is found out.

use std::{borrow::Cow, time::Duration};

use serde_json::{Map, Value, json};

use crate::{
    Mode,
    exchange::{Exchange, Item, Tool},
};

/// Longer waits are no longer a slow model but a stuck test.
const MAX_WAIT: Duration = Duration::from_secs(120);
/// Characters of the prompt that an echo repeats.
const ECHO: usize = 200;

/// What the model answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// A final text.
    Text(String),
    /// The call of a tool with these arguments.
    Call {
        /// The tool's name.
        name: String,
        /// An object.
        arguments: Value,
    },
}

/// What is done with one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// How long the answer takes.
    pub wait: Duration,
    /// The answer.
    pub reply: Reply,
    /// The fault that is asked for.
    pub fault: Option<Mode>,
}

/// What the person's last words ask for, at this point of the conversation.
pub(crate) fn plan(exchange: &Exchange) -> Plan {
    let last = exchange
        .items
        .iter()
        .rposition(|item| matches!(item, Item::User(text) if !is_context(text)));
    let prompt = match last.map(|at| &exchange.items[at]) {
        Some(Item::User(text)) => text.as_str(),
        _ => "",
    };
    let prompt = unquoted(prompt);
    let prompt = prompt.as_ref();
    let after = last.map_or(&[][..], |at| &exchange.items[at..]);
    let done = after.iter().filter(|item| matches!(item, Item::Result(_))).count();
    let directives = |word: &'static str| prompt.lines().filter_map(move |line| line.trim().strip_prefix(word));
    let wait = directives("WAIT ")
        .find_map(|ms| ms.trim().parse().ok())
        .map_or(Duration::ZERO, Duration::from_millis);
    let fault = directives("FAULT ").next().map(|mode| Mode::of(&format!("/{}", mode.trim())).0);
    let mut commands = directives("RUN ");
    let ran = directives("RUN ").next().is_some();
    let reply = match (commands.nth(done), directives("SAY ").next()) {
        (Some(command), _) => call(&exchange.tools, command),
        (None, Some(text)) => Reply::Text(text.to_owned()),
        (None, None) if ran => Reply::Text(format!("[turn {}] Done.", turn(exchange))),
        (None, None) => {
            let said: String = prompt.trim().chars().take(ECHO).collect();
            Reply::Text(format!("[turn {}] You said: {said}", turn(exchange)))
        }
    };
    Plan {
        wait: wait.min(MAX_WAIT),
        reply,
        fault,
    }
}

/// Clients put what they know of the machine into user messages, beside or after the person's words: `<environment_context>…`.
fn is_context(text: &str) -> bool {
    let text = text.trim_start();
    text.is_empty() || text.starts_with('<')
}

/// opencode puts quotes around a prompt that it was given as one argument, and a backslash before each one within.
fn unquoted(prompt: &str) -> Cow<'_, str> {
    match prompt.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(inner) => inner.replace("\\\"", "\"").into(),
        None => prompt.into(),
    }
}

/// From 1.
fn turn(exchange: &Exchange) -> usize {
    let ours = |item: &&Item| matches!(item, Item::Assistant(text) if text.trim_start().starts_with("[turn "));
    1 + exchange.items.iter().filter(ours).count()
}

/// A call of whatever tool of the client runs shell commands.
fn call(tools: &[Tool], command: &str) -> Reply {
    /// As the agents call theirs: codex, claude, gemini and qwen; opencode, pi and bub.
    const SHELLS: [&str; 6] = ["exec_command", "Bash", "run_shell_command", "bash", "shell", "shell_command"];
    let Some(tool) = SHELLS.iter().find_map(|name| tools.iter().find(|tool| tool.name == *name)) else {
        return Reply::Text(format!("None of your {} tools runs commands.", tools.len()));
    };
    let properties = tool.parameters["properties"].as_object().cloned().unwrap_or_default();
    let required = tool.parameters["required"].as_array().cloned().unwrap_or_default();
    let mut arguments = Map::new();
    for (name, schema) in &properties {
        let is_command = matches!(name.as_str(), "cmd" | "command");
        if !is_command && !required.iter().any(|required| required == name.as_str()) {
            continue;
        }
        let value = match (is_command, schema["type"].as_str()) {
            (true, Some("array")) => json!(["bash", "-lc", command]),
            (true, _) => json!(command),
            (false, Some("boolean")) => json!(false),
            (false, Some("number" | "integer")) => json!(60),
            (false, _) => json!("as asked"),
        };
        arguments.insert(name.clone(), value);
    }
    Reply::Call {
        name: tool.name.clone(),
        arguments: arguments.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn exchange(items: &[Item], tools: &[(&str, Value)]) -> Exchange {
        let tools = tools.iter().map(|(name, parameters)| Tool {
            name: (*name).into(),
            parameters: parameters.clone(),
        });
        Exchange {
            model: "m".into(),
            stream: true,
            tools: tools.collect(),
            items: items.to_vec(),
        }
    }

    fn check(items: &[Item], expected: &str) {
        let shell = json!({"properties": {"command": {"type": "string"}, "description": {"type": "string"}, "background": {"type": "boolean"},
            "timeout": {"type": "number"}}, "required": ["command", "description", "background"]});
        let plan = plan(&exchange(items, &[("read", json!({})), ("bash", shell)]));
        let shown = match plan.reply {
            Reply::Text(text) => text,
            Reply::Call { name, arguments } => format!("{name} {arguments}"),
        };
        let shown = if plan.wait.is_zero() {
            shown
        } else {
            format!("{:?} {shown}", plan.wait)
        };
        assert_eq!(shown, expected, "{items:?}");
    }

    #[test]
    fn the_last_words_decide() {
        let user = |text: &str| Item::User(text.into());
        let model = |text: &str| Item::Assistant(text.into());
        let (call, result) = (|| Item::Call("1".into()), || Item::Result("1".into()));
        let run = r#"{"background":false,"command":"ls -l","description":"as asked"}"#;
        check(&[user("hello")], "[turn 1] You said: hello");
        check(&[user("a"), model("[turn 1] You said: a"), user("b")], "[turn 2] You said: b");
        check(&[user("a"), model("Got it."), user("b")], "[turn 1] You said: b");
        check(&[user("Please:\n  RUN ls -l\n")], &format!("bash {run}"));
        check(&[user("\"SAY a \\\"word\\\"\"")], "a \"word\"");
        check(&[user("RUN ls -l"), user("<env>os</env>")], &format!("bash {run}"));
        check(&[user("RUN ls -l"), call(), result()], "[turn 1] Done.");
        check(&[user("RUN ls -l"), call(), result(), user("<reminder/>")], "[turn 1] Done.");
        check(&[user("RUN true\nRUN ls -l\nSAY ok"), call(), result()], &format!("bash {run}"));
        check(&[user("RUN true\nSAY  ok "), call(), result()], " ok");
        check(
            &[user("RUN x"), call(), result(), model("[turn 1] Done."), user("RUN ls -l")],
            &format!("bash {run}"),
        );
        check(&[user("WAIT 20\nSAY {\"a\": 1}")], "20ms {\"a\": 1}");
        check(&[user("WAIT 99999999\nSAY x")], "120s x");
        let faults = [
            ("FAULT m429", Some(Mode::M429)),
            ("FAULT mcut\nSAY x", Some(Mode::Cut)),
            ("SAY x", None),
        ];
        for (prompt, expected) in faults {
            assert_eq!(plan(&exchange(&[user(prompt)], &[])).fault, expected, "{prompt}");
        }
        let plain = plan(&exchange(&[user("RUN ls")], &[]));
        assert_eq!(plain.reply, Reply::Text("None of your 0 tools runs commands.".into()));
        let list = plan(&exchange(
            &[user("RUN ls")],
            &[("shell", json!({"properties": {"command": {"type": "array"}}}))],
        ));
        let Reply::Call { arguments, .. } = list.reply else {
            panic!("a call")
        };
        assert_eq!(arguments, json!({"command": ["bash", "-lc", "ls"]}));
    }
}
