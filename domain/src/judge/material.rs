//! What a judge is shown of a trial (contract 2.7).

use serde::Serialize;

use crate::{
    cutting::{cut_middle, prefix},
    decode::utf16_len,
    evidence::{JournalEntry, Role, TrialEvidence},
    judge::JudgeFile,
    limits::{MAX_JUDGE_CONVERSATION, MAX_JUDGE_ENTRY, MAX_JUDGE_FILES_TOTAL, MAX_JUDGE_OUTPUT},
    redact::Redactor,
    request::Judge,
};

/// What a judge is shown. Its JSON is the documented evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Material {
    /// The case's prompt, with its variables filled in.
    pub input: String,
    /// The agent's last message; empty where it said nothing.
    pub output: String,
    /// What a good answer looks like.
    pub expected: Option<String>,
    /// What happened, in order.
    pub conversation: Vec<Entry>,
    /// The files that the judge names.
    pub files: Vec<File>,
}

impl Material {
    /// An answer to a prompt, without a trial: as of an agent that said nothing else. The texts are taken as they are.
    pub fn of_answer(input: &str, output: &str, expected: Option<&str>) -> Self {
        Self {
            input: input.to_owned(),
            output: cut_middle(output, MAX_JUDGE_OUTPUT).into_owned(),
            expected: expected.map(str::to_owned),
            conversation: vec![
                Entry::User { user: shown(input, false) },
                Entry::Agent {
                    agent: shown(output, false),
                },
            ],
            files: Vec::new(),
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum Entry {
    /// The person said something.
    User {
        /// What.
        user: String,
    },
    /// The agent said something.
    Agent {
        /// What.
        agent: String,
    },
    /// The agent ran a command.
    Command {
        /// The command line.
        command: String,
        /// Null when it is not known.
        exit_code: Option<i64>,
        /// What it printed.
        output: String,
    },
    /// The agent used a tool.
    Tool {
        /// Its name.
        tool: String,
        /// What it was given.
        #[serde(skip_serializing_if = "Option::is_none")]
        input: Option<String>,
        /// What it gave.
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<String>,
        /// Why it failed.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The agent wrote files.
    Wrote {
        /// Their paths.
        wrote: Vec<String>,
    },
    /// Something is left out here.
    Omitted {
        /// How many entries.
        omitted: u64,
    },
}

/// A file of the workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct File {
    /// As the judge names it.
    pub path: String,
    /// All of it.
    pub text: String,
}

/// A judge cannot be shown what it should read, so it is not asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MaterialError {
    /// A file was not read.
    #[error("the file {path} {problem}")]
    Missing {
        /// As the judge names it.
        path: String,
        /// Completes "the file PATH".
        problem: String,
    },
    /// With this file, the files of the case's judges are too large.
    #[error("with the file {path}, the files of the case's judges have more than {MAX_JUDGE_FILES_TOTAL} characters")]
    TooMuch {
        /// As the judge names it.
        path: String,
    },
}

/// What a judge is shown of a trial: from the evidence that was kept of it, which is redacted. `rendered` is the case's prompt with its variables
/// filled in; it and the judge's `expected` are redacted here.
pub fn material(rendered: &str, evidence: &TrialEvidence, judge: &Judge, redactor: &Redactor) -> Result<Material, MaterialError> {
    let files = judge.files.iter().flatten().map(|path| file(path, &evidence.judge_files));
    let input = redactor.text(rendered).into_owned();
    let said = evidence.trajectory.iter().rev().find_map(agents_text).unwrap_or_default();
    Ok(Material {
        output: cut_middle(said, MAX_JUDGE_OUTPUT).into_owned(),
        expected: judge.expected.as_deref().map(|text| redactor.text(text).into_owned()),
        files: files.collect::<Result<_, _>>()?,
        conversation: within_limit(conversation(&input, &evidence.trajectory)),
        input,
    })
}

/// The file of that name, if it and those before it are within the limit of a case.
fn file(path: &str, files: &[JudgeFile]) -> Result<File, MaterialError> {
    let mut total = 0;
    for file in files {
        match file {
            JudgeFile::Text { path: name, text } => {
                total += utf16_len(text);
                match name == path {
                    true if total > MAX_JUDGE_FILES_TOTAL => return Err(MaterialError::TooMuch { path: path.to_owned() }),
                    true => {
                        return Ok(File {
                            path: path.to_owned(),
                            text: text.clone(),
                        });
                    }
                    false => {}
                }
            }
            JudgeFile::Missing { path: name, problem } if name == path => {
                return Err(MaterialError::Missing {
                    path: path.to_owned(),
                    problem: problem.clone(),
                });
            }
            JudgeFile::Missing { .. } => {}
        }
    }
    Err(MaterialError::Missing {
        path: path.to_owned(),
        problem: "was not kept with the trial".to_owned(),
    })
}

fn agents_text(entry: &JournalEntry) -> Option<&str> {
    text_of(entry).filter(|_| !is_users(entry) && entry.left_out().is_none())
}

/// What happened, beginning with the prompt: a case without a person has no entry of it. An agent may report words of a "person" itself, so only
/// the prompt's own words count as the prompt.
fn conversation(input: &str, trajectory: &[JournalEntry]) -> Vec<Entry> {
    let is_prompt = trajectory
        .first()
        .is_some_and(|entry| is_users(entry) && text_of(entry) == Some(input));
    let prompt = (!is_prompt).then(|| Entry::User { user: shown(input, false) });
    let turns = trajectory.chunk_by(|_, next| !is_users(next));
    prompt.into_iter().chain(turns.flat_map(in_time).map(entry)).collect()
}

/// A turn in the order of time: a trajectory has the commands that the recorder saw behind all that the agent printed. What has no time stays
/// behind what it stands behind. What a user said stays in front: it began the turn.
fn in_time(turn: &[JournalEntry]) -> Vec<&JournalEntry> {
    let mut now = f64::NEG_INFINITY;
    let mut timed: Vec<_> = turn
        .iter()
        .map(|entry| {
            now = if is_users(entry) {
                f64::NEG_INFINITY
            } else {
                entry.finished_at().unwrap_or(now)
            };
            (now, entry)
        })
        .collect();
    timed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    timed.into_iter().map(|(_, entry)| entry).collect()
}

fn is_users(entry: &JournalEntry) -> bool {
    matches!(
        entry,
        JournalEntry::Message {
            role: Some(Role::User),
            ..
        }
    )
}

fn text_of(entry: &JournalEntry) -> Option<&str> {
    match entry {
        JournalEntry::Message { text, .. } => Some(text),
        _ => None,
    }
}

fn entry(entry: &JournalEntry) -> Entry {
    if let Some(omitted) = entry.left_out() {
        return Entry::Omitted { omitted };
    }
    let maybe = |text: &Option<String>, cut| text.as_ref().map(|text| shown(text, cut));
    match entry {
        JournalEntry::Message {
            role: Some(Role::User),
            text,
            ..
        } => Entry::User { user: shown(text, false) },
        JournalEntry::Message { text, .. } => Entry::Agent { agent: shown(text, false) },
        JournalEntry::Command {
            command,
            exit_code,
            output,
            output_truncated,
            ..
        } => Entry::Command {
            command: shown(command, false),
            exit_code: *exit_code,
            output: shown(output, *output_truncated),
        },
        JournalEntry::ToolCall {
            error,
            error_truncated,
            input,
            input_truncated,
            name,
            output,
            output_truncated,
            ..
        } => Entry::Tool {
            tool: shown(name, false),
            input: maybe(input, *input_truncated),
            output: maybe(output, *output_truncated),
            error: maybe(error, *error_truncated),
        },
        JournalEntry::FileChange { paths, .. } => Entry::Wrote {
            wrote: paths.iter().map(|path| shown(path, false)).collect(),
        },
    }
}

/// Ends a text that was cut.
const CUT: &str = "… [the rest was cut]";

/// A text as it is shown: cut to its limit, and marked where it was cut here or before.
fn shown(text: &str, cut_before: bool) -> String {
    let start = prefix(text, MAX_JUDGE_ENTRY);
    match cut_before || start.len() < text.len() {
        true => format!("{start}{CUT}"),
        false => text.to_owned(),
    }
}

/// Whole entries from both ends, half of the limit each, with one mark in the place of the others.
fn within_limit(mut entries: Vec<Entry>) -> Vec<Entry> {
    let lengths: Vec<usize> = entries.iter().map(|entry| json_len(entry) + 1).collect();
    if lengths.iter().sum::<usize>() <= MAX_JUDGE_CONVERSATION {
        return entries;
    }
    let fitting = |lengths: &mut dyn Iterator<Item = &usize>| {
        let mut room = MAX_JUDGE_CONVERSATION / 2;
        let fits = |length: &&usize| room.checked_sub(**length).map(|left| room = left).is_some();
        lengths.take_while(fits).count()
    };
    // Each half takes at most half of what is too much for both together: they cannot meet.
    let start = fitting(&mut lengths.iter());
    let end = entries.len() - fitting(&mut lengths.iter().rev());
    let left_out = |entry: &Entry| match entry {
        Entry::Omitted { omitted } => *omitted,
        _ => 1,
    };
    let omitted = entries[start..end].iter().map(left_out).sum();
    entries.splice(start..end, [Entry::Omitted { omitted }]);
    entries
}

fn json_len(entry: &Entry) -> usize {
    let json = serde_json::to_string(entry).expect("an entry has only strings as keys");
    utf16_len(&json)
}
