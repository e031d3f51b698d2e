//! What an agent says it did, and the documented lines of the command harness.

use std::borrow::Cow;

use evalgrid_domain::{
    evidence::{JournalEntry, Role},
    number::Number,
    outcome::Usage,
};
use serde_json::{Map, Value};

/// One thing that happened in a turn. Times are milliseconds since the epoch, and may have a fraction.
#[derive(Clone, Debug, PartialEq)]
pub enum HarnessEvent {
    /// The agent's session.
    Started {
        /// When.
        at: f64,
        /// The model that the agent says it uses.
        model: String,
        /// What a next turn can go on with.
        session_id: String,
    },
    /// A turn of the conversation.
    Message {
        /// When.
        at: f64,
        /// Who spoke.
        role: Role,
        /// The words.
        text: String,
        /// What this message alone has used; never part of the trial's sum.
        usage: Option<Usage>,
    },
    /// A shell command.
    Command {
        /// When it ended.
        at: f64,
        /// When it began.
        started_at: Option<f64>,
        /// Its text.
        command: String,
        /// Its exit status, where known.
        exit_code: Option<i64>,
        /// What it printed.
        output: String,
    },
    /// Files written.
    FileChange {
        /// When.
        at: f64,
        /// Absolute paths.
        paths: Vec<String>,
    },
    /// A tool call.
    ToolCall {
        /// When it ended.
        at: f64,
        /// When it began.
        started_at: Option<f64>,
        /// The agent's id of the call.
        call_id: Option<String>,
        /// The tool.
        name: String,
        /// As the agent wrote it, often JSON.
        input: String,
        /// What came back.
        output: Option<String>,
        /// What went wrong.
        error: Option<String>,
        /// As the agent wrote it.
        status: Option<String>,
    },
    /// Tokens of one turn.
    Usage {
        /// When.
        at: f64,
        /// How many.
        usage: Usage,
    },
    /// The turn is over.
    Finished {
        /// When.
        at: f64,
        /// Why; `failed:` means that the trial cannot be scored.
        reason: String,
    },
}

impl HarnessEvent {
    /// Reads one line of output. `None` for everything that is not a documented line: logging, unknown tags, wrong types. `arrived_at` stamps
    /// a line that has no `at` of its own.
    pub fn from_line(line: &[u8], arrived_at: u64) -> Option<Self> {
        Self::from_fields(&Fields(&object(line)?), arrived_at as f64)
    }

    /// What a trajectory keeps of it, not yet sealed. `None`: the session's begin and end, and usage, are no entries.
    pub fn into_entry(self) -> Option<JournalEntry> {
        let time = |at: f64| Some(Number(at));
        Some(match self {
            Self::Started { .. } | Self::Usage { .. } | Self::Finished { .. } => return None,
            Self::Message { at, role, text, usage } => JournalEntry::Message {
                finished_at_millis: time(at),
                role: Some(role),
                text,
                usage,
            },
            Self::Command {
                at,
                started_at,
                command,
                exit_code,
                output,
            } => JournalEntry::Command {
                command,
                exit_code,
                finished_at_millis: time(at),
                output,
                output_truncated: false,
                started_at_millis: started_at.map(Number),
            },
            Self::FileChange { at, paths } => JournalEntry::FileChange {
                finished_at_millis: time(at),
                paths,
            },
            Self::ToolCall {
                at,
                started_at,
                call_id: _,
                name,
                input,
                output,
                error,
                status,
            } => JournalEntry::ToolCall {
                error,
                error_truncated: false,
                finished_at_millis: time(at),
                input: Some(input),
                input_truncated: false,
                name,
                output,
                output_truncated: false,
                started_at_millis: started_at.map(Number),
                status,
            },
        })
    }

    fn from_fields(fields: &Fields<'_>, arrived_at: f64) -> Option<Self> {
        let tag = fields.text("_tag")?;
        let at = fields.time("at")?.unwrap_or(arrived_at);
        Some(match tag.as_str() {
            "Started" => Self::Started {
                at,
                model: fields.text("model")?,
                session_id: fields.text("sessionId")?,
            },
            "Message" => Self::Message {
                at,
                role: match fields.text("role")?.as_str() {
                    "assistant" => Role::Assistant,
                    "user" => Role::User,
                    _ => return None,
                },
                text: fields.text("text")?,
                usage: match fields.0.get("usage") {
                    None | Some(Value::Null) => None,
                    Some(Value::Object(usage)) => Some(Fields(usage).usage()?),
                    Some(_) => return None,
                },
            },
            "Command" => Self::Command {
                at,
                started_at: fields.time("startedAt")?,
                command: fields.text("command")?,
                exit_code: match fields.0.get("exitCode")? {
                    Value::Null => None,
                    code => Some(integer(code)?),
                },
                output: fields.text("output")?,
            },
            "FileChange" => Self::FileChange {
                at,
                paths: fields
                    .0
                    .get("paths")?
                    .as_array()?
                    .iter()
                    .map(|path| path.as_str().map(str::to_owned))
                    .collect::<Option<_>>()?,
            },
            "ToolCall" => Self::ToolCall {
                at,
                started_at: fields.time("startedAt")?,
                call_id: fields.nullable_text("callId")?,
                name: fields.text("name")?,
                input: fields.text("input")?,
                output: fields.optional_text("output")?,
                error: fields.optional_text("error")?,
                status: fields.nullable_text("status")?,
            },
            "Usage" => Self::Usage {
                at,
                usage: fields.usage()?,
            },
            "Finished" => Self::Finished {
                at,
                reason: fields.text("reason")?,
            },
            _ => return None,
        })
    }
}

/// A line that is a JSON object, read lossily.
pub(crate) fn object(line: &[u8]) -> Option<Map<String, Value>> {
    // Most of a chatty agent's output ends here, unparsed.
    if line.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return None;
    }
    let text = String::from_utf8_lossy(line);
    // A client that cuts a text in the middle of a surrogate pair writes half of it as an escape, which only JavaScript accepts.
    let value = serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(&without_lone_surrogates(&text)))
        .ok()?;
    match value {
        Value::Object(fields) => Some(fields),
        _ => None,
    }
}

/// The fields of a line. The outer `Option` of each answer is `None` where the line is not one of ours.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// Required.
    fn text(&self, key: &str) -> Option<String> {
        self.0.get(key)?.as_str().map(str::to_owned)
    }

    /// Required, but may be null.
    fn nullable_text(&self, key: &str) -> Option<Option<String>> {
        match self.0.get(key)? {
            Value::Null => Some(None),
            value => value.as_str().map(|text| Some(text.to_owned())),
        }
    }

    /// May be left out, or null.
    fn optional_text(&self, key: &str) -> Option<Option<String>> {
        if self.0.contains_key(key) {
            self.nullable_text(key)
        } else {
            Some(None)
        }
    }

    /// May be left out, or null. A time that no calendar holds is as good as none.
    fn time(&self, key: &str) -> Option<Option<f64>> {
        match self.0.get(key) {
            None | Some(Value::Null) => Some(None),
            Some(value) => value.as_f64().map(|at| (0.0..=MAX_TIME_MS).contains(&at).then_some(at)),
        }
    }

    fn count(&self, key: &str) -> Option<Option<u64>> {
        match self.0.get(key) {
            None => Some(None),
            Some(value) => Some(Some(u64::try_from(integer(value)?).ok()?)),
        }
    }

    fn usage(&self) -> Option<Usage> {
        let input_tokens = self.count("inputTokens")??;
        let output_tokens = self.count("outputTokens")??;
        Some(Usage {
            input_tokens,
            output_tokens,
            cache_read_tokens: self.count("cacheReadTokens")?.unwrap_or(0),
            cache_write_tokens: self.count("cacheWriteTokens")?.unwrap_or(0),
            total_tokens: self.count("totalTokens")?.unwrap_or(input_tokens + output_tokens),
            cost_usd: match self.0.get("costUsd") {
                None | Some(Value::Null) => None,
                Some(cost) => Some(Number(cost.as_f64().filter(|cost| *cost >= 0.0)?)),
            },
        })
    }
}

/// The last millisecond of a JavaScript date.
const MAX_TIME_MS: f64 = 8.64e15;

/// `3` and `3.0` alike, as JavaScript sees it.
fn integer(value: &Value) -> Option<i64> {
    Number(value.as_f64()?).as_integer()
}

/// `\ud83d` without its other half becomes `\ufffd`.
fn without_lone_surrogates(json: &str) -> Cow<'_, str> {
    if !json.contains("\\u") {
        return Cow::Borrowed(json);
    }
    let surrogate = |at: usize, kinds: [u8; 4]| {
        let escape = json.as_bytes().get(at..at + 6)?;
        let hex = escape.iter().skip(2).all(u8::is_ascii_hexdigit);
        (escape.starts_with(b"\\u") && hex && escape[2].eq_ignore_ascii_case(&b'd') && kinds.contains(&escape[3].to_ascii_lowercase()))
            .then_some(())
    };
    let mut fixed = String::with_capacity(json.len());
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'\\', &json.as_bytes()[at..]) {
        fixed.push_str(&json[at..at + found]);
        at += found;
        let length = if surrogate(at, HIGH).is_some() && surrogate(at + 6, LOW).is_some() {
            12
        } else if surrogate(at, HIGH).is_some() || surrogate(at, LOW).is_some() {
            fixed.push_str("\\ufffd");
            at += 6;
            continue;
        } else {
            // The backslash and the (whole) character behind it.
            1 + json[at + 1..].chars().next().map_or(0, char::len_utf8)
        };
        fixed.push_str(&json[at..at + length]);
        at += length;
    }
    fixed.push_str(&json[at..]);
    Cow::Owned(fixed)
}

/// The second hex digit of the first half of a pair.
const HIGH: [u8; 4] = *b"89ab";
/// The second hex digit of the second half.
const LOW: [u8; 4] = *b"cdef";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn check(line: &str, expected: Option<HarnessEvent>) {
        assert_eq!(HarnessEvent::from_line(line.as_bytes(), 7), expected, "{line}");
    }

    #[test]
    fn documented_lines() {
        check(
            r#"{"_tag":"Started","sessionId":"run-42","model":"openai/gpt-5.5"}"#,
            Some(HarnessEvent::Started {
                at: 7.0,
                model: "openai/gpt-5.5".into(),
                session_id: "run-42".into(),
            }),
        );
        check(
            " {\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"Reading.\",\"at\":5.5}\r",
            Some(HarnessEvent::Message {
                at: 5.5,
                role: Role::Assistant,
                text: "Reading.".into(),
                usage: None,
            }),
        );
        check(
            r#"{"_tag":"Command","command":"bun test","exitCode":1.0,"output":"no\n","startedAt":3}"#,
            Some(HarnessEvent::Command {
                at: 7.0,
                started_at: Some(3.0),
                command: "bun test".into(),
                exit_code: Some(1),
                output: "no\n".into(),
            }),
        );
        check(
            r#"{"_tag":"FileChange","paths":["/workspace/src/total.ts"]}"#,
            Some(HarnessEvent::FileChange {
                at: 7.0,
                paths: vec!["/workspace/src/total.ts".into()],
            }),
        );
        check(
            r#"{"_tag":"ToolCall","callId":null,"name":"search","input":"{\"query\":1}","status":"completed","error":"e"}"#,
            Some(HarnessEvent::ToolCall {
                at: 7.0,
                started_at: None,
                call_id: None,
                name: "search".into(),
                input: r#"{"query":1}"#.into(),
                output: None,
                error: Some("e".into()),
                status: Some("completed".into()),
            }),
        );
        check(
            r#"{"_tag":"Usage","inputTokens":9120,"outputTokens":312,"cacheReadTokens":8000}"#,
            Some(HarnessEvent::Usage {
                at: 7.0,
                usage: Usage {
                    input_tokens: 9120,
                    output_tokens: 312,
                    cache_read_tokens: 8000,
                    cache_write_tokens: 0,
                    total_tokens: 9432,
                    cost_usd: None,
                },
            }),
        );
        check(
            r#"{"_tag":"Finished","reason":"done","at":1788300005000,"more":[1]}"#,
            Some(HarnessEvent::Finished {
                at: 1788300005000.0,
                reason: "done".into(),
            }),
        );
    }

    #[test]
    fn everything_else_is_ignored() {
        for line in [
            "",
            "   ",
            "plain logging",
            "{",
            "{}",
            "[1]",
            "{\"a\":",
            "null",
            r#"{"_tag":5}"#,
            r#"{"_tag":"Unknown"}"#,
            r#"{"_tag":"message","role":"assistant","text":"x"}"#,
            r#"{"_tag":"Message","role":"system","text":"x"}"#,
            r#"{"_tag":"Message","text":"x"}"#,
            r#"{"_tag":"Message","role":"assistant","text":3}"#,
            r#"{"_tag":"Message","role":"assistant","text":"x","at":"now"}"#,
            r#"{"_tag":"Command","command":"ls","output":""}"#,
            r#"{"_tag":"Command","command":"ls","exitCode":null}"#,
            r#"{"_tag":"Command","command":"ls","exitCode":"1","output":""}"#,
            r#"{"_tag":"Command","command":"ls","exitCode":1.5,"output":""}"#,
            r#"{"_tag":"FileChange","paths":["a",1]}"#,
            r#"{"_tag":"ToolCall","name":"x","input":"","status":null}"#,
            r#"{"_tag":"ToolCall","callId":null,"name":"x","input":{},"status":null}"#,
            r#"{"_tag":"Usage","inputTokens":-1,"outputTokens":0}"#,
            r#"{"_tag":"Usage","inputTokens":1}"#,
            r#"{"_tag":"Usage","inputTokens":1e300,"outputTokens":0}"#,
            r#"{"_tag":"Usage","inputTokens":1.5,"outputTokens":0}"#,
            "{\"_tag\":\"Finished\",\"reason\":\"a raw \u{0} in a string\"}",
        ] {
            check(line, None);
        }
        let deep = format!("{{\"_tag\":\"Finished\",\"reason\":\"x\",\"d\":{}", "[".repeat(100_000));
        check(&deep, None);
    }

    #[test]
    fn bytes_that_are_no_text_are_read_lossily() {
        let line = b"{\"_tag\":\"Finished\",\"reason\":\"a\xffb\\u0000\"}";
        let expected = HarnessEvent::Finished {
            at: 0.0,
            reason: "a\u{fffd}b\0".into(),
        };
        assert_eq!(HarnessEvent::from_line(line, 0), Some(expected));
    }

    #[test]
    fn half_a_surrogate_pair_costs_one_character_only() {
        for (escaped, expected) in [
            (r"cut \ud83d", "cut \u{fffd}"),
            (r"\ud83d\ude00", "\u{1f600}"),
            (r"\ude00\ud83d\ude00x", "\u{fffd}\u{1f600}x"),
            (r"\ud83d\ud83d\ude00", "\u{fffd}\u{1f600}"),
            (r"\\ud83d \ud83d\n", "\\ud83d \u{fffd}\n"),
            (r"ü\ud83dü", "ü\u{fffd}ü"),
        ] {
            let line = format!(r#"{{"_tag":"Finished","reason":"{escaped}"}}"#);
            check(
                &line,
                Some(HarnessEvent::Finished {
                    at: 7.0,
                    reason: expected.into(),
                }),
            );
        }
        for broken in ["\\", "{\\u", "{\\ud83", "{\"\\ud83d\\", "{\\ü\\u"] {
            check(broken, None);
        }
    }

    #[test]
    fn times_outside_the_calendar_are_stamped() {
        for at in ["-1", "1e300"] {
            let line = format!(r#"{{"_tag":"Finished","reason":"","at":{at}}}"#);
            check(
                &line,
                Some(HarnessEvent::Finished {
                    at: 7.0,
                    reason: String::new(),
                }),
            );
        }
    }
}
