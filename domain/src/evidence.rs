//! What is kept of a trial, in the JSON shapes that the API answers with: trajectory, validations, verify steps, artifacts.
//!
//! Text from a sandbox enters through `seal`, which redacts first and cuts afterwards, so that a secret that crosses a cut leaves no piece.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub use crate::cutting::cut;
use crate::{
    changes::TurnChanges, coverage::Coverage, decode::utf16_len, judge::JudgeFile, limits::*, mocks::MockCalls, names::names,
    number::Number, outcome::Usage, redact::Redactor, timing::Timing,
};

/// All that is kept of one trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrialEvidence {
    /// What the agent did, in order.
    pub trajectory: Vec<JournalEntry>,
    /// What the checks and judges saw.
    pub validations: Vec<Validation>,
    /// The steps of the verify command that ran.
    pub verify_steps: Vec<VerifyStep>,
    /// Names of the evidence that is missing where a trial is void already when this is stored. What judges make of it later may add some, which its
    /// outcome tells.
    pub void_fields: Vec<String>,
    /// Paths below the workspace.
    pub files_changed: Vec<String>,
    /// Files that were kept.
    pub artifacts: Vec<Artifact>,
    /// Ours: what else went wrong without ending the trial. Redacted.
    #[serde(default)]
    pub diagnostics: Vec<String>,
    /// Ours: how much of the evidence is there. Absent where nobody said: a trial that a client's own machine reported, one without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// Ours: the commit that a repository was cloned at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_commit: Option<String>,
    /// Ours: what the agent did to its workspace, for each turn that was looked at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub file_changes: Vec<TurnChanges>,
    /// Ours: where the time went.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    /// Ours: what the agent asked of the profile's mocks. Absent where there were none, or no calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mock_calls: Option<MockCalls>,
    /// Ours: the files of the workspace that the case's judges read. Whole, so that they can be asked again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub judge_files: Vec<JudgeFile>,
}

/// One entry of a trajectory. Times are in milliseconds since the epoch, and may have a fraction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "_tag", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum JournalEntry {
    /// A command that the agent ran.
    Command {
        /// The command line.
        command: String,
        /// Null when it is not known.
        exit_code: Option<i64>,
        /// Null when it is not known.
        finished_at_millis: Option<Number>,
        /// Standard output and error.
        output: String,
        /// The output was cut.
        #[serde(default, skip_serializing_if = "is_false")]
        output_truncated: bool,
        /// Null when it is not known.
        started_at_millis: Option<Number>,
    },
    /// Something said.
    Message {
        /// Null when it is not known.
        finished_at_millis: Option<Number>,
        /// Who said it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        role: Option<Role>,
        /// All of it: messages are not cut.
        text: String,
        /// Tokens of this message alone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// A tool that the agent used.
    ToolCall {
        /// What the tool said when it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// The error was cut.
        #[serde(default, skip_serializing_if = "is_false")]
        error_truncated: bool,
        /// Null when it is not known.
        finished_at_millis: Option<Number>,
        /// What the tool was given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input: Option<String>,
        /// The input was cut.
        #[serde(default, skip_serializing_if = "is_false")]
        input_truncated: bool,
        /// The tool's name.
        name: String,
        /// What the tool gave.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output: Option<String>,
        /// The output was cut.
        #[serde(default, skip_serializing_if = "is_false")]
        output_truncated: bool,
        /// Absent when it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        started_at_millis: Option<Number>,
        /// As the agent says it.
        status: Option<String>,
    },
    /// Files that the agent wrote.
    FileChange {
        /// Null when it is not known.
        finished_at_millis: Option<Number>,
        /// As the agent says them.
        paths: Vec<String>,
    },
}

fn is_false(value: &bool) -> bool {
    !value
}

names!(
    /// Who speaks.
    Role {
        /// The agent.
        Assistant = "assistant",
        /// The person.
        User = "user",
    }
);

impl JournalEntry {
    /// Redacts every text, then cuts those that have a limit.
    pub fn seal(&mut self, redactor: &Redactor) {
        match self {
            Self::Command {
                command,
                output,
                output_truncated,
                ..
            } => {
                redactor.string(command);
                *output_truncated |= seal_text(output, redactor);
            }
            Self::Message { text, .. } => redactor.string(text),
            Self::ToolCall {
                error,
                error_truncated,
                input,
                input_truncated,
                name,
                output,
                output_truncated,
                status,
                ..
            } => {
                redactor.string(name);
                status.iter_mut().for_each(|text| redactor.string(text));
                for (text, truncated) in [(error, error_truncated), (input, input_truncated), (output, output_truncated)] {
                    *truncated |= text.as_mut().is_some_and(|text| seal_text(text, redactor));
                }
            }
            Self::FileChange { paths, .. } => paths.iter_mut().for_each(|path| redactor.string(path)),
        }
    }

    /// When it was over, in milliseconds since 1970, where that is known.
    pub(crate) fn finished_at(&self) -> Option<f64> {
        match self {
            Self::Command { finished_at_millis, .. }
            | Self::Message { finished_at_millis, .. }
            | Self::ToolCall { finished_at_millis, .. }
            | Self::FileChange { finished_at_millis, .. } => finished_at_millis.as_ref().map(|at| at.0),
        }
    }

    /// How many events it says were left out in its place, where it says that.
    pub(crate) fn left_out(&self) -> Option<u64> {
        match self {
            Self::Message { role: None, text, .. } => text.strip_prefix('[')?.strip_suffix(LEFT_OUT)?.parse().ok(),
            _ => None,
        }
    }

    /// The bytes of its JSON.
    fn json_len(&self) -> usize {
        struct Count(usize);
        impl std::io::Write for Count {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0 += bytes.len();
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut count = Count(0);
        serde_json::to_writer(&mut count, self).expect("counting cannot fail, and all keys are strings");
        count.0
    }
}

/// Redacts, then cuts to [`MAX_EVIDENCE_TEXT`]. True: it was cut.
fn seal_text(text: &mut String, redactor: &Redactor) -> bool {
    redactor.string(text);
    cut(text, MAX_EVIDENCE_TEXT)
}

/// Collects a trajectory in bounded memory: beyond [`MAX_TRAJECTORY_ENTRIES`] or [`MAX_TRAJECTORY_BYTES`] it leaves out the middle and says so
/// in one message.
#[derive(Debug)]
pub struct Trajectory {
    head: Vec<JournalEntry>,
    tail: VecDeque<(JournalEntry, usize)>,
    head_bytes: usize,
    tail_bytes: usize,
    dropped: u64,
    max_entries: usize,
    max_bytes: usize,
}

/// Bytes kept free for the message that tells of the cut, and for the brackets around all.
const MARK_BYTES: usize = 256;

/// Ends the message in the place of events that were left out.
const LEFT_OUT: &str = " events were left out here: the trajectory is too long to keep whole]";

impl Default for Trajectory {
    fn default() -> Self {
        Self::with_limits(MAX_TRAJECTORY_ENTRIES, MAX_TRAJECTORY_BYTES)
    }
}

impl Trajectory {
    fn with_limits(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            head_bytes: 0,
            tail_bytes: 0,
            dropped: 0,
            max_entries,
            max_bytes: max_bytes - MARK_BYTES,
        }
    }

    /// Adds the next entry, which must be sealed.
    pub fn push(&mut self, entry: JournalEntry) {
        let bytes = entry.json_len() + 1;
        let to_head = self.tail.is_empty() && self.dropped == 0;
        if to_head && self.head.len() < self.max_entries / 2 && self.head_bytes + bytes <= self.max_bytes / 2 {
            self.head_bytes += bytes;
            self.head.push(entry);
            return;
        }
        self.tail_bytes += bytes;
        self.tail.push_back((entry, bytes));
        while self.head.len() + self.tail.len() > self.max_entries || self.head_bytes + self.tail_bytes > self.max_bytes {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some((_, bytes)) = self.tail.pop_front() {
            self.tail_bytes -= bytes;
            self.dropped += 1;
        }
    }

    /// All entries, with a message in the place of those left out.
    pub fn finish(mut self) -> Vec<JournalEntry> {
        if self.dropped > 0 && self.head.len() + self.tail.len() == self.max_entries {
            // Room for the message.
            self.drop_oldest();
        }
        let mut entries = self.head;
        if self.dropped > 0 {
            let text = format!("[{}{LEFT_OUT}", self.dropped);
            entries.push(JournalEntry::Message {
                finished_at_millis: None,
                role: None,
                text,
                usage: None,
            });
        }
        entries.extend(self.tail.into_iter().map(|(entry, _)| entry));
        entries
    }
}

/// One step of a verify command that ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyStep {
    /// Its text.
    pub command: String,
    /// How it ended.
    pub exit_code: i64,
}

/// A file that was kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Artifact {
    /// Its size.
    pub byte_size: u64,
    /// Below the workspace.
    pub path: String,
    /// 64 lower-case hex digits.
    pub sha256: String,
    /// Ours: the whole of a short text, which needs no object then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// What one check or judge saw and said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Validation {
    /// What the check asked of the sandbox.
    pub calls: Vec<ValidationCall>,
    /// Null until it ended.
    pub duration_ms: Option<Number>,
    /// What went wrong with the check itself.
    pub error: Option<ValidationValue>,
    /// Of the process, where there was one.
    pub exit_code: Option<i64>,
    /// Unique in the trial: `code:0`, `judge:1`, `command:0`.
    pub id: String,
    /// Its place among the trial's validations.
    pub index: u64,
    /// What it was given.
    pub input: ValidationValue,
    /// The judge's answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judgment: Option<Judgment>,
    /// What kind of check it is.
    pub kind: ValidationKind,
    /// What it printed.
    pub logs: Vec<ValidationLog>,
    /// Its verdict in words.
    pub message: String,
    /// More about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ValidationValue>,
    /// For people.
    pub name: String,
    /// What it gave.
    pub output: ValidationValue,
    /// Null until it started; milliseconds since the epoch.
    pub started_at: Option<Number>,
    /// Where it stands.
    pub status: ValidationStatus,
    /// Something in it was cut or left out.
    pub truncated: bool,
}

names!(
    /// What a validation is made of.
    ValidationKind {
        /// A bundled program.
        Code = "code",
        /// A judge.
        Judge = "judge",
        /// A verify command.
        Command = "command",
    }
);

names!(
    /// Where a validation stands.
    #[derive(Default)]
    ValidationStatus {
        /// Waits.
        #[default]
        Queued = "queued",
        /// Runs.
        Running = "running",
        /// Passed.
        Passed = "passed",
        /// Failed.
        Failed = "failed",
        /// Gave no verdict.
        Error = "error",
        /// Was not asked.
        Skipped = "skipped",
    }
);

/// A value of a validation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationValue {
    /// How to read the text.
    pub format: ValueFormat,
    /// Whether there is a text, and if not, why.
    pub state: ValueState,
    /// At most [`MAX_VALIDATION_VALUE`] characters.
    pub text: String,
    /// The text was cut.
    pub truncated: bool,
}

names!(
    /// How to read a value.
    ValueFormat {
        /// As it is.
        Text = "text",
        /// As JSON.
        Json = "json",
    }
);

names!(
    /// Whether a value was kept.
    ValueState {
        /// It was.
        Captured = "captured",
        /// The validator asked that none be kept.
        Disabled = "disabled",
        /// There is none.
        Unavailable = "unavailable",
    }
);

impl ValidationValue {
    /// No value.
    pub fn unavailable() -> Self {
        Self {
            format: ValueFormat::Text,
            state: ValueState::Unavailable,
            text: String::new(),
            truncated: false,
        }
    }

    /// A value that must not be kept.
    pub fn disabled() -> Self {
        Self {
            state: ValueState::Disabled,
            ..Self::unavailable()
        }
    }

    /// A plain text, not yet sealed.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            state: ValueState::Captured,
            text: text.into(),
            ..Self::unavailable()
        }
    }

    /// Redacts, then cuts to its own limit and to what is left for the whole validation.
    fn seal(&mut self, redactor: &Redactor, left: &mut usize) -> bool {
        redactor.string(&mut self.text);
        self.truncated |= cut(&mut self.text, MAX_VALIDATION_VALUE.min(*left));
        *left -= utf16_len(&self.text);
        self.truncated
    }
}

/// One call of a check to its sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidationCall {
    /// Null until it ended.
    pub duration_ms: Option<Number>,
    /// What went wrong.
    pub error: Option<ValidationValue>,
    /// Its place among the calls.
    pub index: u64,
    /// What it was given.
    pub input: ValidationValue,
    /// What was called.
    pub method: CallMethod,
    /// What it gave.
    pub output: ValidationValue,
    /// Milliseconds since the epoch.
    pub started_at: Number,
}

names!(
    /// What a check may call.
    CallMethod {
        /// The agent's last message.
        Answer = "answer",
        /// All the agent's messages.
        Transcript = "transcript",
        /// The conversation.
        Turns = "turns",
        /// A file's text.
        ReadText = "readText",
        /// Whether a file is there.
        Exists = "exists",
        /// A command.
        Exec = "exec",
        /// Calls of mocked commands.
        CliCalls = "cli.calls",
        /// Calls of mocked HTTP services.
        ApiCalls = "api.calls",
        /// The address of a mocked HTTP service.
        ApiUrl = "api.url",
        /// Calls of mocked MCP servers.
        McpCalls = "mcp.calls",
    }
);

/// One line that a check printed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationLog {
    /// Milliseconds since the epoch.
    pub at: Number,
    /// Its place among the lines.
    pub index: u64,
    /// Where it was printed.
    pub level: LogLevel,
    /// The line.
    pub value: ValidationValue,
}

names!(
    /// Where a line was printed.
    LogLevel {
        /// Standard output.
        Stdout = "stdout",
        /// Standard error.
        Stderr = "stderr",
    }
);

/// What a judge answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Judgment {
    /// The label it picked; null when it gave no valid answer.
    pub choice: Option<String>,
    /// How long it took.
    pub duration_ms: u64,
    /// Why there is no answer.
    pub error: Option<String>,
    /// The harness or the provider that answered.
    pub evaluator: String,
    /// Its model.
    pub model: String,
    /// Its name.
    pub name: String,
    /// Its reason, in its words.
    pub reason: String,
    /// The score of its choice; null when it gave no valid answer.
    pub score: Option<Number>,
    /// The score that passes.
    pub threshold: Number,
    /// What it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<JudgeUsage>,
}

/// Tokens of a judge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JudgeUsage {
    /// As in [`Usage`].
    pub cache_read_tokens: u64,
    /// The part of `cache_write_tokens` that is kept for one hour.
    #[serde(default, rename = "cacheWrite1hTokens", skip_serializing_if = "Option::is_none")]
    pub cache_write_1h_tokens: Option<u64>,
    /// As in [`Usage`].
    pub cache_write_tokens: u64,
    /// As in [`Usage`]; absent when it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<Number>,
    /// As in [`Usage`].
    pub input_tokens: u64,
    /// As in [`Usage`].
    pub output_tokens: u64,
    /// As in [`Usage`].
    pub total_tokens: u64,
}

impl Validation {
    /// Redacts every text, then cuts to the limits of what is stored; `truncated` tells whether anything was cut or left out.
    pub fn seal(&mut self, redactor: &Redactor) {
        let mut left = MAX_VALIDATION_TOTAL;
        let mut cut_any = self.calls.len() > MAX_VALIDATION_CALLS || self.logs.len() > MAX_VALIDATION_CALLS;
        self.calls.truncate(MAX_VALIDATION_CALLS);
        self.logs.truncate(MAX_VALIDATION_CALLS);
        for (text, max) in [
            (&mut self.id, MAX_VALIDATION_ID),
            (&mut self.name, MAX_VALIDATION_NAME),
            (&mut self.message, MAX_VALIDATION_MESSAGE),
        ] {
            redactor.string(text);
            cut_any |= cut(text, max);
        }
        if let Some(judgment) = &mut self.judgment {
            redactor.string(&mut judgment.reason);
            judgment
                .choice
                .iter_mut()
                .chain(judgment.error.iter_mut())
                .for_each(|text| redactor.string(text));
        }
        // What tells most comes first, while there is room.
        let own = [
            Some(&mut self.output),
            self.error.as_mut(),
            Some(&mut self.input),
            self.metadata.as_mut(),
        ];
        let calls = self
            .calls
            .iter_mut()
            .flat_map(|call| [Some(&mut call.input), Some(&mut call.output), call.error.as_mut()]);
        let logs = self.logs.iter_mut().map(|log| Some(&mut log.value));
        for value in own.into_iter().chain(calls).chain(logs).flatten() {
            cut_any |= value.seal(redactor, &mut left);
        }
        self.truncated |= cut_any;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn message(text: &str) -> JournalEntry {
        JournalEntry::Message {
            finished_at_millis: None,
            role: None,
            text: text.into(),
            usage: None,
        }
    }

    fn collect(limits: (usize, usize), texts: &[String]) -> Vec<JournalEntry> {
        let mut trajectory = Trajectory::with_limits(limits.0, limits.1);
        texts.iter().for_each(|text| trajectory.push(message(text)));
        trajectory.finish()
    }

    /// Where the mark is, and how many events it says were left out.
    fn mark(entries: &[JournalEntry]) -> Option<(usize, usize)> {
        entries.iter().enumerate().find_map(|(at, entry)| match entry {
            JournalEntry::Message { text, .. } => Some((at, text.strip_prefix('[')?.split(' ').next()?.parse().ok()?)),
            _ => None,
        })
    }

    #[test]
    fn the_middle_of_a_long_trajectory_goes() {
        let numbered = |count: usize| (0..count).map(|index| format!("{index:06}")).collect::<Vec<_>>();
        let limits = (MAX_TRAJECTORY_ENTRIES, MAX_TRAJECTORY_BYTES);
        for count in [0, 1, MAX_TRAJECTORY_ENTRIES / 2 + 1, MAX_TRAJECTORY_ENTRIES] {
            let kept = collect(limits, &numbered(count));
            assert_eq!((kept.len(), mark(&kept)), (count, None));
        }
        let kept = collect(limits, &numbered(MAX_TRAJECTORY_ENTRIES + 1));
        assert_eq!(
            (kept.len(), mark(&kept)),
            (MAX_TRAJECTORY_ENTRIES, Some((MAX_TRAJECTORY_ENTRIES / 2, 2)))
        );
        assert_eq!((&kept[0], kept.last().unwrap()), (&message("000000"), &message("020000")));
        // One entry alone is larger than everything that may be kept.
        let kept = collect((10, 1_000), &["x".repeat(1_000), "after".into()]);
        assert_eq!((mark(&kept), kept.len(), &kept[1]), (Some((0, 1)), 2, &message("after")));
    }

    proptest! {
        #[test]
        fn trajectories_keep_their_limits(sizes in prop::collection::vec(0usize..400, 0..60)) {
            let texts: Vec<_> = sizes.iter().enumerate().map(|(index, size)| format!("{index}:{}", "x".repeat(*size))).collect();
            let whole: Vec<_> = texts.iter().map(|text| message(text)).collect();
            let kept = collect((20, 6_000), &texts);
            prop_assert!(kept.len() <= 20 && serde_json::to_vec(&kept).unwrap().len() <= 6_000);
            match mark(&kept) {
                None => prop_assert_eq!(kept, whole),
                Some((at, dropped)) => {
                    prop_assert_eq!(kept.len() - 1 + dropped, whole.len());
                    prop_assert_eq!(&kept[..at], &whole[..at]);
                    prop_assert_eq!(&kept[at + 1..], &whole[at + dropped..]);
                }
            }
        }
    }
}
