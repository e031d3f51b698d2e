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
//!
//! Who is asked to judge, or to play a person, reads other lines as well: `evalgrid-modelserver --help` has them.

use std::{borrow::Cow, time::Duration};

use serde_json::{Map, Value, json};

use crate::{
    Mode,
    exchange::{Exchange, Item, Tool, halves},
    judge::{self, Judgment},
    person,
};

/// Longer waits are no longer a slow model but a stuck test.
const MAX_WAIT: Duration = Duration::from_secs(120);
/// Characters of the prompt that an echo repeats.
const ECHO: usize = 200;
/// As the agents call theirs: codex, claude, gemini and qwen; opencode, pi and bub.
const SHELLS: [&str; 6] = ["exec_command", "Bash", "run_shell_command", "bash", "shell", "shell_command"];

/// What the model answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// A final text.
    Text(String),
    /// A text that ends at the limit of output tokens.
    CutOff(String),
    /// The model refuses, in these words.
    Refusal(String),
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
pub(crate) struct Plan {
    /// How long the answer takes.
    pub wait: Duration,
    /// The fault that is asked for.
    pub fault: Option<Mode>,
    /// What is answered where nothing goes wrong.
    answer: Answer,
    /// A tool has answered since the person's last words.
    called: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Reply(Reply),
    Judgment(Judgment),
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
    let (directives, otherwise) = if let Some((brief, reply)) = person::reply(exchange) {
        // The reply's own come first: those of the brief hold for all replies.
        let directives = format!("{reply}\n{brief}");
        (directives, Answer::Reply(Reply::Text(reply)))
    } else if let Some((question, judgment)) = judge::judge(exchange, prompt) {
        (question, Answer::Judgment(judgment))
    } else {
        let said: String = prompt.trim().chars().take(ECHO).collect();
        let echo = format!("[turn {}] You said: {said}", turn(exchange));
        (prompt.to_owned(), Answer::Reply(Reply::Text(echo)))
    };
    let find = |word: &'static str| directives.lines().filter_map(move |line| line.trim().strip_prefix(word));
    let wait = find("WAIT ")
        .find_map(|ms| ms.trim().parse().ok())
        .map_or(Duration::ZERO, Duration::from_millis);
    let ran = find("RUN ").next().is_some();
    let answer = match (find("RUN ").nth(done), find("SAY ").next(), otherwise) {
        (Some(command), ..) => Answer::Reply(call(&exchange.tools, command)),
        (None, Some(text), _) => Answer::Reply(Reply::Text(text.to_owned())),
        (None, None, Answer::Reply(_)) if ran => Answer::Reply(Reply::Text(format!("[turn {}] Done.", turn(exchange)))),
        (None, None, otherwise) => otherwise,
    };
    Plan {
        wait: wait.min(MAX_WAIT),
        fault: find("FAULT ").find_map(|mode| Mode::named(mode.trim())),
        answer,
        called: done > 0,
    }
}

impl Plan {
    /// The answer, as the mode spoils it.
    pub(crate) fn reply(&self, mode: Mode, exchange: &Exchange) -> Reply {
        let text = match (&self.answer, mode) {
            (_, Mode::Tool) if !self.called => return any_call(&exchange.tools),
            (_, Mode::Refusal) => return Reply::Refusal("I cannot help with that.".into()),
            (_, Mode::Empty) => String::new(),
            (Answer::Judgment(judgment), mode) => written(judgment, mode),
            (Answer::Reply(Reply::Text(_)), Mode::Huge) => "x".repeat(Mode::HUGE),
            (Answer::Reply(Reply::Text(text)), _) => text.clone(),
            (Answer::Reply(reply), _) => return reply.clone(),
        };
        match mode {
            Mode::Incomplete => Reply::CutOff(halves(&text).0.to_owned()),
            _ => Reply::Text(text),
        }
    }
}

/// A judgment as a judge writes it.
fn written(judgment: &Judgment, mode: Mode) -> String {
    let Judgment { choice, reason } = judgment;
    let whole = json!({ "choice": choice, "reason": reason });
    match mode {
        Mode::Invalid => halves(&whole.to_string()).0.to_owned(),
        Mode::Extra => json!({ "choice": choice, "reason": reason, "confidence": 1 }).to_string(),
        Mode::Missing => json!({ "choice": choice }).to_string(),
        Mode::Label => json!({ "choice": format!("no {choice}"), "reason": reason }).to_string(),
        Mode::Huge => json!({ "choice": choice, "reason": "x".repeat(Mode::HUGE) }).to_string(),
        Mode::Fenced => format!("```json\n{whole}\n```"),
        _ => whole.to_string(),
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

fn shell(tools: &[Tool]) -> Option<&Tool> {
    SHELLS.iter().find_map(|name| tools.iter().find(|tool| tool.name == *name))
}

/// A call of the shell, or of any tool, or of one that nobody has offered.
fn any_call(tools: &[Tool]) -> Reply {
    const COMMAND: &str = "id";
    match (shell(tools), tools.first()) {
        (Some(_), _) => call(tools, COMMAND),
        (None, first) => Reply::Call {
            name: first.map_or(SHELLS[0], |tool| &tool.name).to_owned(),
            arguments: json!({ "cmd": COMMAND }),
        },
    }
}

/// A call of whatever tool of the client runs shell commands.
fn call(tools: &[Tool], command: &str) -> Reply {
    let Some(tool) = shell(tools) else {
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
            ..Exchange::default()
        }
    }

    fn show(reply: Reply) -> String {
        match reply {
            Reply::Text(text) => text,
            Reply::CutOff(text) => format!("{text}…"),
            Reply::Refusal(text) => format!("refused: {text}"),
            Reply::Call { name, arguments } => format!("{name} {arguments}"),
        }
    }

    fn check(items: &[Item], expected: &str) {
        let shell = json!({"properties": {"command": {"type": "string"}, "description": {"type": "string"}, "background": {"type": "boolean"},
            "timeout": {"type": "number"}}, "required": ["command", "description", "background"]});
        let exchange = exchange(items, &[("read", json!({})), ("bash", shell)]);
        let plan = plan(&exchange);
        let shown = show(plan.reply(Mode::Ok, &exchange));
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
        let reply = |prompt: &str, tools: &[(&str, Value)], mode| {
            let exchange = exchange(&[user(prompt)], tools);
            show(plan(&exchange).reply(mode, &exchange))
        };
        let list = ("shell", json!({"properties": {"command": {"type": "array"}}}));
        assert_eq!(reply("RUN ls", &[], Mode::Ok), "None of your 0 tools runs commands.");
        assert_eq!(
            reply("RUN ls", std::slice::from_ref(&list), Mode::Ok),
            r#"shell {"command":["bash","-lc","ls"]}"#
        );
        assert_eq!(reply("SAY x", &[list], Mode::Tool), r#"shell {"command":["bash","-lc","id"]}"#);
        assert_eq!(reply("SAY x", &[("read", json!({}))], Mode::Tool), r#"read {"cmd":"id"}"#);
        assert_eq!(reply("SAY x", &[], Mode::Tool), r#"exec_command {"cmd":"id"}"#);
    }

    #[test]
    fn judges_and_people() {
        let check = |system: &str, prompt: &str, mode: Mode, expected: &str| {
            let exchange = Exchange {
                system: system.into(),
                ..exchange(&[Item::User(prompt.into())], &[])
            };
            assert_eq!(show(plan(&exchange).reply(mode, &exchange)), expected, "{system} {prompt} {mode}");
        };
        let judgment = r#"{"choice":"good","reason":"no condition"}"#;
        check("", "PICK good", Mode::Ok, judgment);
        check("", "PICK good", Mode::Fenced, &format!("```json\n{judgment}\n```"));
        check(
            "",
            "PICK good",
            Mode::Extra,
            r#"{"choice":"good","confidence":1,"reason":"no condition"}"#,
        );
        check("", "PICK good", Mode::Missing, r#"{"choice":"good"}"#);
        check("", "PICK good", Mode::Label, r#"{"choice":"no good","reason":"no condition"}"#);
        check("", "PICK good", Mode::Invalid, r#"{"choice":"good","re"#);
        check("", "PICK good", Mode::Incomplete, r#"{"choice":"good","re…"#);
        check("", "PICK good", Mode::Refusal, "refused: I cannot help with that.");
        check("", "PICK good\nSAY maybe", Mode::Ok, "maybe");
        check("PERSON: yes | no", "Shall I?", Mode::Ok, "yes");
        check("PERSON: yes | no", "Shall I?", Mode::Empty, "");
        check("PERSON: yes | no", "RUN by the agent", Mode::Incomplete, "y…");
        check("PERSON: RUN ls", "Shall I?", Mode::Ok, "None of your 0 tools runs commands.");
        let exchange = Exchange {
            system: "PERSON: FAULT m500 | no\nWAIT 5".into(),
            ..exchange(&[Item::User("Shall I?".into())], &[])
        };
        let plan = plan(&exchange);
        assert_eq!((plan.fault, plan.wait), (Some(Mode::M500), Duration::from_millis(5)));
    }
}
