//! What a validator reads of the conversation: three files in HOME (contract 2.4), named by variables.
//!
//! Checks read what the agent really wrote, so that redaction never changes a verdict. That is in no record; the outputs of the turns are read
//! again, which lie in the sandbox's folder for as long as there can be a check.

use std::{collections::BTreeMap, io};

use evalgrid_domain::{
    evidence::{JournalEntry, Role, Trajectory, cut},
    limits::{MAX_EVIDENCE_TEXT, MAX_TRAJECTORY_BYTES},
};
use evalgrid_harness::{Harness, HarnessEvent, recorder};
use evalgrid_sandbox::{Base, StepExit};
use serde::Serialize;

use crate::{
    bundle,
    trial::{Attempt, Stop, called},
    turns,
};

/// The files, by the variable that says where they are.
const FILES: [(&str, &str); 3] = [
    ("SPHYNX_ANSWER_FILE", ".sphynx-answer.txt"),
    ("SPHYNX_TRANSCRIPT_FILE", ".sphynx-transcript.txt"),
    ("SPHYNX_TURNS_FILE", ".sphynx-turns.json"),
];
/// Bytes of all turns as JSON: as much as a whole trajectory may have.
const MAX_BYTES: usize = MAX_TRAJECTORY_BYTES;
/// Between two messages of the agent.
const BETWEEN: &str = "\n\n";

/// One turn, as a validator gets it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TurnView<'a> {
    index: usize,
    user_text: &'a str,
    agent_text: &'a str,
    command_count: u32,
    events: &'a [JournalEntry],
}

/// Writes the files, and says under which variables they are found. `asked`: what the person said in each turn. `Err`: why they cannot be written.
pub(crate) async fn write(attempt: &Attempt<'_>, asked: &[String]) -> Result<Result<BTreeMap<String, String>, String>, Stop> {
    let Some(harness) = turns::harness(attempt) else {
        return Ok(Err("this worker does not have the harness".to_owned()));
    };
    let mut turns = Vec::new();
    for (prompt, number) in asked.iter().zip(1..) {
        let exit = called("read a turn again", attempt.sandbox.ended(&turns::step(number))).await?;
        let exit = exit.ok_or_else(|| Stop::lost(format!("the output of turn {number} is not there any more")))?;
        let mut trace = Vec::new();
        if let Some(log) = harness.trace_log(number) {
            // That it is not there, or no file, was said when the turn was recorded.
            let found = attempt.sandbox.read_file(Base::Home, &log, recorder::LOG_LIMIT);
            trace = called("read the recorder's log", async { Ok(found.await) })
                .await?
                .ok()
                .flatten()
                .unwrap_or_default();
        }
        turns.push(Ran {
            prompt: prompt.clone(),
            exit,
            trace,
        });
    }
    let model = attempt.variant.model.clone();
    let texts = tokio::task::spawn_blocking(move || texts(harness, &model, &turns)).await;
    let texts = texts.unwrap_or_else(|error| Err(io::Error::other(error)));
    let texts = texts.map_err(|error| Stop::lost(format!("the agent's output cannot be read: {error}")))?;
    let mut env = BTreeMap::new();
    for ((name, path), text) in FILES.into_iter().zip(texts) {
        if let Err(reason) = bundle::write(attempt, path, &text).await? {
            return Ok(Err(format!("what the agent said could not be written: {reason}")));
        }
        env.insert(name.to_owned(), format!("{}/{path}", attempt.sandbox.home()));
    }
    Ok(Ok(env))
}

struct Ran {
    prompt: String,
    exit: StepExit,
    trace: Vec<u8>,
}

/// The agent's last message, all of its messages, and the turns as JSON.
fn texts(harness: &'static dyn Harness, model: &str, turns: &[Ran]) -> io::Result<[Vec<u8>; 3]> {
    let (mut answer, mut transcript, mut json) = (String::new(), Vec::<String>::new(), b"[".to_vec());
    for (index, turn) in turns.iter().enumerate() {
        let mut trajectory = Trajectory::default();
        trajectory.push(message(Role::User, turn.prompt.clone()));
        let mut command_count = 0;
        evalgrid_worker::output::read_turn(harness, &turn.exit, &turn.trace, model, None, &mut |event| {
            command_count += u32::from(matches!(event, HarnessEvent::Command { .. }));
            if let Some(mut entry) = event.into_entry() {
                cut_long(&mut entry);
                trajectory.push(entry);
            }
        })?;
        let events = trajectory.finish();
        let said: Vec<&str> = events.iter().filter_map(agents_text).collect();
        let mut agent_text = said.join(BETWEEN);
        if let Some(last) = said.last() {
            answer = (*last).to_owned();
        }
        let mut view = TurnView {
            index,
            user_text: &turn.prompt,
            agent_text: &agent_text,
            command_count,
            events: &events,
        };
        let mut bytes = serde_json::to_vec(&view)?;
        let left_out = [message(Role::User, "[this turn was left out: the conversation is too long]".into())];
        if json.len() + bytes.len() > MAX_BYTES {
            (view.agent_text, view.events) = ("", &left_out);
            bytes = serde_json::to_vec(&view)?;
            agent_text.clear();
        }
        if index > 0 {
            json.push(b',');
        }
        json.extend(bytes);
        transcript.extend((!agent_text.is_empty()).then_some(agent_text));
    }
    json.push(b']');
    Ok([answer.into_bytes(), transcript.join(BETWEEN).into_bytes(), json])
}

fn message(role: Role, text: String) -> JournalEntry {
    JournalEntry::Message {
        finished_at_millis: None,
        role: Some(role),
        text,
        usage: None,
    }
}

fn agents_text(entry: &JournalEntry) -> Option<&str> {
    match entry {
        JournalEntry::Message { role, text, .. } if *role != Some(Role::User) => Some(text),
        _ => None,
    }
}

/// Cuts the texts that have a limit. They are not redacted, so an entry that went through here is never kept.
fn cut_long(entry: &mut JournalEntry) {
    match entry {
        JournalEntry::Command {
            output, output_truncated, ..
        } => *output_truncated |= cut(output, MAX_EVIDENCE_TEXT),
        JournalEntry::ToolCall {
            error,
            error_truncated,
            input,
            input_truncated,
            output,
            output_truncated,
            ..
        } => {
            for (text, truncated) in [(error, error_truncated), (input, input_truncated), (output, output_truncated)] {
                *truncated |= text.as_mut().is_some_and(|text| cut(text, MAX_EVIDENCE_TEXT));
            }
        }
        JournalEntry::Message { .. } | JournalEntry::FileChange { .. } => {}
    }
}
