//! A turn of a built-in agent while its lines of JSON are read: the frame that all drivers share.
//!
//! A driver's [`Parser`] understands one event at a time and tells the [`Transcript`] what it means; tool calls and their results are paired here,
//! by id, and what is missing at the end is said here. A line that is no JSON object is skipped and counted, never fatal.

use std::{
    collections::{HashMap, VecDeque},
    io,
};

use evalgrid_domain::{
    coverage::{Channel, Coverage},
    evidence::Role,
    number::Number,
    outcome::Usage,
    timestamp,
};
use serde_json::{Map, Value};

use crate::{
    HarnessEvent, TurnEnd, TurnOutput,
    agent::Agent,
    event, failure,
    lines::{Arrivals, Lines},
    model,
};

/// Understands one agent's events.
pub(crate) trait Parser {
    /// Takes the next event.
    fn event(&mut self, event: &Event<'_>, to: &mut Transcript<'_>);

    /// The output is over: what was held back is told now.
    fn finish(&mut self, _to: &mut Transcript<'_>) {}

    /// Why the agent waits for its model server, where only its stderr tells.
    fn waits_for<'a>(&self, _stderr: &'a str) -> Option<&'a str> {
        None
    }
}

/// One line: a JSON object, and when it came (milliseconds since the epoch).
pub(crate) struct Event<'a> {
    pub(crate) fields: &'a Map<String, Value>,
    pub(crate) at: f64,
}

impl<'a> Event<'a> {
    /// A string field; empty where there is none.
    pub(crate) fn text(&self, key: &str) -> &'a str {
        self.fields.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// Any field; null where there is none.
    pub(crate) fn get(&self, key: &str) -> &'a Value {
        self.fields.get(key).unwrap_or(&Value::Null)
    }
}

/// How a tool call ended.
#[derive(Default)]
pub(crate) struct Outcome {
    /// What came back.
    pub(crate) output: String,
    /// It went wrong.
    pub(crate) failed: bool,
    /// The exit status of a command, where it is known.
    pub(crate) exit_code: Option<i64>,
    /// In the agent's word.
    pub(crate) status: Option<String>,
}

/// A call whose result has not come.
struct Call {
    id: String,
    at: f64,
    what: What,
}

enum What {
    Command(String),
    Tool {
        name: String,
        input: String,
        writes: Option<String>,
    },
}

/// A turn while it is read.
pub(crate) struct Transcript<'a> {
    agent: &'static Agent,
    /// The variant's model.
    asked: &'a str,
    events: &'a mut dyn FnMut(HarnessEvent),
    end: TurnEnd,
    /// Calls whose results have not come, in their order, by a running number; and where each id is.
    open: VecDeque<Option<Call>>,
    /// The number of the first of `open`.
    first_open: usize,
    by_id: HashMap<String, usize>,
    /// Where the agent works, to make its relative paths whole.
    pub(crate) cwd: String,
    started: bool,
    closed: bool,
    /// The last thing that the agent said about waiting for its model server.
    waiting: Option<String>,
    coverage: Coverage,
}

/// Reads a turn.
pub(crate) fn read(
    agent: &'static Agent,
    parser: &mut dyn Parser,
    output: TurnOutput<'_>,
    events: &mut dyn FnMut(HarnessEvent),
) -> io::Result<TurnEnd> {
    let mut transcript = Transcript {
        agent,
        asked: output.model,
        events,
        end: TurnEnd::default(),
        open: VecDeque::new(),
        first_open: 0,
        by_id: HashMap::new(),
        cwd: String::new(),
        started: false,
        closed: false,
        waiting: None,
        coverage: Coverage::default(),
    };
    let mut arrivals = Arrivals::new(output.stdout_times, output.finished_at_ms);
    let (mut understood, mut odd) = (0_u64, 0_u64);
    let lines = Lines::read(output.stdout, output.stdout_tail, &mut |line, offset| {
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        match event::object(line) {
            Some(fields) => {
                understood += 1;
                let at = arrivals.at(offset) as f64;
                parser.event(&Event { fields: &fields, at }, &mut transcript);
            }
            None => odd += 1,
        }
    })?;
    parser.finish(&mut transcript);
    let lost = lines.diagnostics();
    if odd > 0 || !lost.is_empty() {
        let reason = match lost.first() {
            Some(lost) => lost.clone(),
            None => format!("{odd} lines of the {} agent's output could not be read", agent.name),
        };
        let partial = Channel::partial(reason);
        let coverage = &mut transcript.coverage;
        for channel in [&mut coverage.events, &mut coverage.actions, &mut coverage.messages] {
            channel.lower(&partial);
        }
    }
    if odd > 0 {
        transcript.note(format!("{odd} lines of the agent's output were no JSON objects and were skipped"));
    }
    transcript.end.diagnostics.extend(lost);
    let ended = Ended {
        exit_code: output.exit_code,
        timed_out: output.timed_out,
        at: output.finished_at_ms as f64,
        stderr: output.stderr,
        waits_for: parser.waits_for(output.stderr),
        silent: understood == 0,
    };
    Ok(transcript.finish(&ended))
}

/// How the process ended.
struct Ended<'a> {
    exit_code: i32,
    timed_out: bool,
    at: f64,
    stderr: &'a str,
    waits_for: Option<&'a str>,
    silent: bool,
}

impl Transcript<'_> {
    /// The agent's session; the first one counts.
    pub(crate) fn session(&mut self, id: &str, at: f64) {
        if self.started || id.is_empty() {
            return;
        }
        self.started = true;
        if !is_session(id) {
            self.note("The agent's session id is not one that a later turn could name".into());
            return;
        }
        self.end.session_id = Some(id.to_owned());
        (self.events)(HarnessEvent::Started {
            at,
            model: self.end.model.clone().unwrap_or_else(|| self.asked.to_owned()),
            session_id: id.to_owned(),
        });
    }

    /// Nothing can go on with the session.
    pub(crate) fn no_later_turn(&mut self) {
        self.end.session_id = None;
    }

    /// The model that the agent says it uses. Another one than was asked for is a failure.
    pub(crate) fn model(&mut self, reported: &str) {
        if reported.is_empty() {
            return;
        }
        if !model::is_same(self.asked, reported) {
            self.fail(format!("it used the model {reported} where {} was asked for", self.asked));
        }
        if self.end.model.is_none() {
            self.end.model = Some(reported.to_owned());
        }
    }

    /// The model under a name that cannot be compared.
    pub(crate) fn named(&mut self, model: &str) {
        if self.end.model.is_none() && !model.is_empty() {
            self.end.model = Some(model.to_owned());
        }
    }

    /// Something that the agent said to the person.
    pub(crate) fn said(&mut self, text: &str, at: f64) {
        if !text.trim().is_empty() {
            (self.events)(HarnessEvent::Message {
                at,
                role: Role::Assistant,
                text: text.to_owned(),
                usage: None,
            });
        }
    }

    /// A tool was called. A known name of a shell, with its command, becomes a command.
    pub(crate) fn called(&mut self, id: &str, name: &str, input: &Value, at: f64) {
        let lower = name.to_ascii_lowercase();
        let command = SHELLS.contains(&lower.as_str()).then(|| input.get("command")?.as_str()).flatten();
        let what = match command {
            Some(command) => What::Command(command.to_owned()),
            None => What::Tool {
                name: name.to_owned(),
                input: match input {
                    Value::Null => String::new(),
                    Value::String(text) => text.clone(),
                    input => input.to_string(),
                },
                writes: WRITERS.contains(&lower.as_str()).then(|| path_in(input, &self.cwd)).flatten(),
            },
        };
        self.open(id, at, what);
    }

    /// A command was started.
    pub(crate) fn ran(&mut self, id: &str, command: &str, at: f64) {
        self.open(id, at, What::Command(command.to_owned()));
    }

    fn open(&mut self, id: &str, at: f64, what: What) {
        if !id.is_empty() {
            if self.by_id.contains_key(id) {
                // Told again, in whole.
                return;
            }
            self.by_id.insert(id.to_owned(), self.first_open + self.open.len());
        }
        self.open.push_back(Some(Call {
            id: id.to_owned(),
            at,
            what,
        }));
    }

    /// The result of a call. One without an id belongs to the oldest call; one of an unknown call is told as it is.
    pub(crate) fn returned(&mut self, id: &str, outcome: Outcome, at: f64) {
        let place = match id {
            "" => self.open.iter().position(Option::is_some),
            id => self.by_id.get(id).map(|number| number - self.first_open),
        };
        let call = place.and_then(|place| self.open.get_mut(place)?.take());
        while let Some(None) = self.open.front() {
            self.open.pop_front();
            self.first_open += 1;
        }
        match call {
            Some(call) => {
                self.by_id.remove(&call.id);
                self.tell(call, Some(outcome), at);
            }
            None => {
                let what = What::Tool {
                    name: "unknown".into(),
                    input: String::new(),
                    writes: None,
                };
                let id = id.to_owned();
                self.tell(Call { id, at, what }, Some(outcome), at);
            }
        }
    }

    /// Files that the agent says it wrote.
    pub(crate) fn wrote(&mut self, paths: Vec<String>, at: f64) {
        if !paths.is_empty() {
            let paths = paths.into_iter().map(|path| whole(&path, &self.cwd)).collect();
            (self.events)(HarnessEvent::FileChange { at, paths });
        }
    }

    /// Adds to the turn's usage.
    pub(crate) fn used(&mut self, usage: Option<Usage>) {
        self.end.usage = Usage::sum(self.end.usage, usage);
    }

    /// The trial cannot be scored. The first reason counts.
    pub(crate) fn fail(&mut self, reason: String) {
        self.end.failure.get_or_insert(reason);
    }

    /// The agent's own words for why it failed, with what they mean.
    pub(crate) fn failed(&mut self, message: &str, status: Option<u16>) {
        // The first reason counts, and so does what it means.
        self.end.limited |= self.end.failure.is_none() && failure::is_limit(message, status);
        self.fail(failure::explain(self.agent, message, status));
    }

    /// The event that ends a turn has come.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// It was not the end: the agent goes on.
    pub(crate) fn reopen(&mut self) {
        self.closed = false;
    }

    /// What the agent says while it waits for its model server; `None` when it goes on.
    pub(crate) fn waits(&mut self, message: Option<&str>) {
        self.waiting = message.map(str::to_owned);
    }

    /// Something odd, for people.
    pub(crate) fn note(&mut self, text: String) {
        if self.end.diagnostics.len() < MAX_NOTES {
            self.end.diagnostics.push(text);
        }
    }

    /// A channel of the evidence has less than all.
    pub(crate) fn lower(&mut self, channel: impl FnOnce(&mut Coverage) -> &mut Channel, to: Channel) {
        channel(&mut self.coverage).lower(&to);
    }

    fn tell(&mut self, call: Call, outcome: Option<Outcome>, at: f64) {
        let started_at = Some(call.at);
        let unfinished = outcome.is_none();
        let outcome = outcome.unwrap_or_default();
        match call.what {
            What::Command(command) => (self.events)(HarnessEvent::Command {
                at,
                started_at,
                command,
                exit_code: outcome.exit_code,
                output: outcome.output,
            }),
            What::Tool { name, input, writes } => {
                let failed = outcome.failed;
                let text = (!outcome.output.is_empty()).then_some(outcome.output);
                let (output, error) = if failed { (None, text) } else { (text, None) };
                (self.events)(HarnessEvent::ToolCall {
                    at,
                    started_at,
                    call_id: (!call.id.is_empty()).then_some(call.id),
                    name,
                    input,
                    output,
                    error,
                    status: outcome.status.or_else(|| unfinished.then(|| "unfinished".to_owned())),
                });
                if !failed && !unfinished {
                    self.wrote(writes.into_iter().collect(), at);
                }
            }
        }
    }

    fn finish(mut self, ended: &Ended<'_>) -> TurnEnd {
        let name = self.agent.name;
        let open: Vec<Call> = self.open.drain(..).flatten().collect();
        let busy = !open.is_empty();
        for call in open {
            self.tell(call, None, ended.at);
        }
        let last_words = ended
            .stderr
            .lines()
            .map(str::trim)
            .rfind(|line| !line.is_empty())
            .unwrap_or_default();
        if ended.timed_out {
            let waiting = self.waiting.take().or_else(|| ended.waits_for.map(str::to_owned));
            self.end.stalled = match waiting {
                // While a tool runs, it is not the model that is waited for.
                _ if busy => None,
                Some(words) => Some(format!("{name} was waiting for its model server: {words}")),
                None if ended.silent => Some(format!("{name} had told nothing yet")),
                None => Some(format!("{name} was waiting for its model server")),
            };
        } else if !self.closed && self.end.failure.is_none() {
            let told = self.waiting.take().unwrap_or_else(|| last_words.to_owned());
            self.end.limited = failure::is_limit(&told, None);
            self.fail(format!(
                "it stopped before its turn was over, with status {}: {}",
                ended.exit_code,
                failure::explain(self.agent, &told, None)
            ));
        }
        if ended.silent {
            let nothing = Channel::unavailable(format!("The {name} agent printed no events"));
            let coverage = &mut self.coverage;
            for channel in [
                &mut coverage.events,
                &mut coverage.actions,
                &mut coverage.messages,
                &mut coverage.usage,
            ] {
                channel.lower(&nothing);
            }
        } else if !self.closed {
            let cut = Channel::partial(format!("The {name} agent's output ends before its turn was over"));
            let coverage = &mut self.coverage;
            for channel in [&mut coverage.events, &mut coverage.actions, &mut coverage.messages] {
                channel.lower(&cut);
            }
            let usage = Channel::partial(format!("The {name} agent was stopped before it reported all of its usage"));
            coverage.usage.lower(&usage);
        }
        if busy {
            let running = Channel::partial("The output ends while tool calls were running");
            self.coverage.status.lower(&running);
        }
        match self.end.usage {
            Some(usage) => (self.events)(HarnessEvent::Usage { at: ended.at, usage }),
            None => {
                let none = Channel::unavailable(format!("The {name} agent reported no usage"));
                self.coverage.usage.lower(&none);
            }
        }
        (self.events)(HarnessEvent::Finished {
            at: ended.at,
            reason: match &self.end.failure {
                Some(failure) => format!("failed: {failure}"),
                None => format!("exit {}", ended.exit_code),
            },
        });
        self.end.coverage = self.coverage;
        self.end
    }
}

/// Can a later turn's command line name it? Ids of all agents are letters and digits with a few marks between.
fn is_session(id: &str) -> bool {
    let marks = |byte: u8| matches!(byte, b'-' | b'_' | b'.' | b':');
    id.len() <= MAX_SESSION_ID && !id.starts_with('-') && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || marks(byte))
}

/// Bytes of a session id.
const MAX_SESSION_ID: usize = 256;
/// Diagnostics of one turn; a trial keeps a hundred.
const MAX_NOTES: usize = 20;
/// Tools that run the text in their `command` in a shell.
const SHELLS: &[&str] = &["bash", "shell", "run_shell_command", "exec_command"];
/// Tools that write the file that they name.
const WRITERS: &[&str] = &[
    "write",
    "edit",
    "multiedit",
    "notebookedit",
    "write_file",
    "edit_file",
    "replace",
    "fs.write",
    "fs.edit",
];

/// The file that a tool's input names.
fn path_in(input: &Value, cwd: &str) -> Option<String> {
    let path = ["file_path", "filePath", "path", "notebook_path"]
        .iter()
        .find_map(|key| input.get(key)?.as_str())?;
    Some(whole(path, cwd))
}

/// A path made absolute, as far as it is known where the agent works.
fn whole(path: &str, cwd: &str) -> String {
    match path.starts_with('/') || cwd.is_empty() {
        true => path.to_owned(),
        false => format!("{}/{}", cwd.trim_end_matches('/'), path.trim_start_matches("./")),
    }
}

/// A count of tokens. Anything but a whole number is missing.
pub(crate) fn count(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0).map(|n| n as u64))
}

/// Usage in buckets that share nothing. `input` is beyond the cache, and must be there, as must `output`.
pub(crate) fn usage(input: Option<u64>, output: Option<u64>, cache_read: u64, cache_write: u64) -> Option<Usage> {
    let (input_tokens, output_tokens) = (input?, output?);
    Some(Usage {
        cache_read_tokens: cache_read,
        cache_write_tokens: cache_write,
        input_tokens,
        output_tokens,
        total_tokens: input_tokens
            .saturating_add(output_tokens)
            .saturating_add(cache_read)
            .saturating_add(cache_write),
        cost_usd: None,
    })
}

/// A cost that says something: agents tell 0 where they know no price.
pub(crate) fn cost(value: &Value) -> Option<Number> {
    value.as_f64().filter(|cost| *cost > 0.0).map(Number)
}

/// A result's text: a string, or the text parts of a list.
pub(crate) fn plain(content: &Value) -> String {
    match content {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(parts) if parts.iter().all(Value::is_object) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        other => other.to_string(),
    }
}

/// The exit status that shells' tools put into the text of a failure: `Exit code 3`, `Command exited with code 3`.
pub(crate) fn exit_code_in(text: &str) -> Option<i64> {
    let lower = text.to_ascii_lowercase();
    let found = ["exit code: ", "exit code ", "exited with code "]
        .iter()
        .find_map(|mark| lower.rfind(mark).map(|at| at + mark.len()))?;
    let digits: String = lower[found..].chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Milliseconds since the epoch of a time in UTC as agents write it: `2026-11-30T10:39:53.444Z`, `2026-11-30T19:19:01.099320+00:00`.
pub(crate) fn time(text: &str) -> Option<f64> {
    let utc = text.ends_with('Z') || text.ends_with("+00:00");
    let millis = text.get(..23).filter(|_| utc)?;
    timestamp::parse(&format!("{millis}Z")).map(|at| at as f64)
}
