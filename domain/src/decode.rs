//! Decoding untrusted JSON into typed values, collecting every issue with its path.
//!
//! [`parse_json`] turns bytes into a tree without ever overflowing the stack or the memory; [`Decoder`] walks the tree. A decoding function
//! returns `Option`: `None` means that an issue was recorded. Unknown keys are ignored; of duplicate keys the last wins.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    limits::{MAX_ECHOED_KEY, MAX_ISSUES, MAX_JSON_VALUES},
    number::MAX_SAFE_INTEGER,
};

/// What kind of fault an [`Issue`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IssueTag {
    /// A pointer to a nested issue.
    Pointer,
    /// A value that is not expected.
    Unexpected,
    /// A required key is absent.
    Missing,
    /// Several issues in one.
    Composite,
    /// The right type, but a rule is broken.
    Refinement,
    /// A value could not be converted.
    Transformation,
    /// The wrong type.
    Type,
    /// Not allowed here.
    Forbidden,
}

/// One step of a path: a key or an index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PathSegment {
    /// The place in an array.
    Index(usize),
    /// The key in an object.
    Key(String),
}

impl From<usize> for PathSegment {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

impl From<&str> for PathSegment {
    fn from(key: &str) -> Self {
        Self::Key(shorten(key))
    }
}

/// One fault of a request, as the contract's `Issue`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issue {
    /// Its kind.
    #[serde(rename = "_tag")]
    pub tag: IssueTag,
    /// Where it is; empty for the whole body.
    pub path: Vec<PathSegment>,
    /// What is wrong, for people. Never repeats a value, which may be a secret.
    pub message: String,
}

impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.is_empty() {
            true => f.write_str(&self.message),
            false => write!(f, "{}: {}", format_path(&self.path), self.message),
        }
    }
}

/// A path for people: `cases[0].user.replies[3]`, `variants[1].profile.files["home/a.txt"]`.
pub fn format_path(path: &[PathSegment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            PathSegment::Index(index) => text.push_str(&format!("[{index}]")),
            PathSegment::Key(key) if is_plain(key) => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(key);
            }
            PathSegment::Key(key) => text.push_str(&format!("[{}]", Value::from(key.as_str()))),
        }
    }
    text
}

fn is_plain(key: &str) -> bool {
    let mut bytes = key.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn shorten(key: &str) -> String {
    match key.char_indices().nth(MAX_ECHOED_KEY) {
        Some((end, _)) => format!("{}…", &key[..end]),
        None => key.to_owned(),
    }
}

/// The length of a text in UTF-16 code units, as JavaScript counts it.
pub fn utf16_len(text: &str) -> usize {
    // Every byte that starts a character counts one; one that starts a character beyond the basic plane counts two.
    text.bytes()
        .map(|byte| usize::from(byte & 0xc0 != 0x80) + usize::from(byte >= 0xf0))
        .sum()
}

/// Bytes that are not a JSON document we read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes are not UTF-8.
    #[error("The body is not UTF-8: byte {offset} is not valid")]
    NotUtf8 {
        /// Where the first bad byte is.
        offset: usize,
    },
    /// The text is not JSON.
    #[error("The body is not JSON: {message} at line {line}, column {column}")]
    NotJson {
        /// The parser's words.
        message: String,
        /// From 1.
        line: usize,
        /// From 1, in bytes.
        column: usize,
    },
    /// Arrays and objects nest too deeply.
    #[error("The body nests deeper than {limit} levels")]
    TooDeep {
        /// The allowed depth.
        limit: usize,
    },
    /// There are too many values for the memory that a request may take.
    #[error("The body holds more than {limit} values")]
    TooManyValues {
        /// The allowed number.
        limit: usize,
    },
}

/// Parses a JSON document. Depth and number of values are checked before a tree is built.
pub fn parse_json(bytes: &[u8], max_depth: usize) -> Result<Value, DecodeError> {
    std::str::from_utf8(bytes).map_err(|error| DecodeError::NotUtf8 {
        offset: error.valid_up_to(),
    })?;
    check_size(bytes, max_depth)?;
    serde_json::from_slice(bytes).map_err(|error| {
        let text = error.to_string();
        let message = text.split(" at line ").next().unwrap_or(&text).to_owned();
        DecodeError::NotJson {
            message,
            line: error.line(),
            column: error.column(),
        }
    })
}

/// Counts brackets and separators outside strings. What is not JSON may be miscounted, but then the parser refuses it, and never deeper or
/// larger than counted here: every container and every further element needs a byte that is counted.
fn check_size(bytes: &[u8], max_depth: usize) -> Result<(), DecodeError> {
    let (mut depth, mut values, mut in_string, mut escaped) = (0usize, 0usize, false, false);
    for byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                values += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' | b':' => values += 1,
            _ => {}
        }
        if depth > max_depth {
            return Err(DecodeError::TooDeep { limit: max_depth });
        }
        if values > MAX_JSON_VALUES {
            return Err(DecodeError::TooManyValues { limit: MAX_JSON_VALUES });
        }
    }
    Ok(())
}

/// A check, and what completes "Expected …" where it fails.
type Pattern = (fn(&str) -> bool, &'static str);

/// The rules of one string.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    min: usize,
    max: usize,
    nul: bool,
    max_bytes: usize,
    pattern: Option<Pattern>,
}

impl Text {
    /// Any string of at most `max` UTF-16 code units, without NUL: a process or a file name could not receive it.
    pub const fn max(max: usize) -> Self {
        Self {
            min: 0,
            max,
            nul: false,
            max_bytes: usize::MAX,
            pattern: None,
        }
    }

    /// Any string without NUL.
    pub const fn any() -> Self {
        Self::max(usize::MAX)
    }

    /// At least `min` UTF-16 code units.
    pub const fn min(self, min: usize) -> Self {
        Self { min, ..self }
    }

    /// NUL is harmless here: the content of a file.
    pub const fn with_nul(self) -> Self {
        Self { nul: true, ..self }
    }

    /// At most this many bytes of UTF-8.
    pub const fn bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Must satisfy `check`; `expected` completes "Expected …".
    pub const fn matching(self, check: fn(&str) -> bool, expected: &'static str) -> Self {
        Self {
            pattern: Some((check, expected)),
            ..self
        }
    }

    /// What the text breaks, if anything.
    pub fn fault(&self, text: &str) -> Option<String> {
        let length = utf16_len(text);
        if length < self.min {
            return Some(match self.min {
                1 => "Expected a non-empty string".to_owned(),
                min => format!("Expected at least {min} characters"),
            });
        }
        if length > self.max {
            return Some(format!("Expected at most {} characters, got {length}", self.max));
        }
        if !self.nul && text.contains('\0') {
            return Some("Expected no NUL character".to_owned());
        }
        if text.len() > self.max_bytes {
            return Some(format!("Expected at most {} bytes, got {}", self.max_bytes, text.len()));
        }
        self.pattern
            .filter(|(check, _)| !check(text))
            .map(|(_, expected)| format!("Expected {expected}"))
    }
}

/// Walks a tree, remembers where it is, and collects issues.
#[derive(Debug, Default)]
pub struct Decoder {
    path: Vec<PathSegment>,
    issues: Vec<Issue>,
}

impl Decoder {
    /// Decodes a whole value: the result, or every issue found (at most [`MAX_ISSUES`]).
    pub fn run<T>(value: &Value, decode: impl FnOnce(&mut Self, &Value) -> Option<T>) -> Result<T, Vec<Issue>> {
        let mut decoder = Self::default();
        match decode(&mut decoder, value) {
            Some(result) if decoder.issues.is_empty() => Ok(result),
            _ => Err(decoder.issues),
        }
    }

    /// Records an issue at the present path.
    pub fn issue(&mut self, tag: IssueTag, message: impl Into<String>) {
        if self.issues.len() < MAX_ISSUES {
            self.issues.push(Issue {
                tag,
                path: self.path.clone(),
                message: message.into(),
            });
        }
    }

    /// Records a broken rule at the present path.
    pub fn refine(&mut self, message: impl Into<String>) {
        self.issue(IssueTag::Refinement, message);
    }

    /// Decodes one level deeper.
    pub fn at<T>(&mut self, segment: impl Into<PathSegment>, decode: impl FnOnce(&mut Self) -> T) -> T {
        self.path.push(segment.into());
        let result = decode(self);
        self.path.pop();
        result
    }

    fn wrong_type<T>(&mut self, expected: &str, value: &Value) -> Option<T> {
        let actual = match value {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::String(_) => "a string",
            Value::Array(_) => "an array",
            Value::Object(_) => "an object",
        };
        self.issue(IssueTag::Type, format!("Expected {expected}, got {actual}"));
        None
    }

    /// An object.
    pub fn object<'v>(&mut self, value: &'v Value) -> Option<&'v Map<String, Value>> {
        value.as_object().or_else(|| self.wrong_type("an object", value))
    }

    /// A key that must be there.
    pub fn required<'v, T>(
        &mut self,
        map: &'v Map<String, Value>,
        key: &str,
        decode: impl FnOnce(&mut Self, &'v Value) -> Option<T>,
    ) -> Option<T> {
        self.at(key, |d| match map.get(key) {
            Some(value) => decode(d, value),
            None => {
                d.issue(IssueTag::Missing, "is missing");
                None
            }
        })
    }

    /// A key that may be absent, but is not null.
    pub fn optional<'v, T>(
        &mut self,
        map: &'v Map<String, Value>,
        key: &str,
        decode: impl FnOnce(&mut Self, &'v Value) -> Option<T>,
    ) -> Option<Option<T>> {
        match map.get(key) {
            Some(value) => self.at(key, |d| decode(d, value)).map(Some),
            None => Some(None),
        }
    }

    /// A key that may be absent or null.
    pub fn nullable<'v, T>(
        &mut self,
        map: &'v Map<String, Value>,
        key: &str,
        decode: impl FnOnce(&mut Self, &'v Value) -> Option<T>,
    ) -> Option<Option<T>> {
        match map.get(key) {
            None | Some(Value::Null) => Some(None),
            Some(value) => self.at(key, |d| decode(d, value)).map(Some),
        }
    }

    /// A string.
    pub fn string(&mut self, value: &Value, rules: Text) -> Option<String> {
        let Some(text) = value.as_str() else {
            return self.wrong_type("a string", value);
        };
        match rules.fault(text) {
            None => Some(text.to_owned()),
            Some(fault) => {
                self.refine(fault);
                None
            }
        }
    }

    /// True or false.
    pub fn boolean(&mut self, value: &Value) -> Option<bool> {
        value.as_bool().or_else(|| self.wrong_type("a boolean", value))
    }

    /// A whole number: `3` and `3.0`, not `3.5`, and none beyond what a double holds exactly.
    pub fn integer(&mut self, value: &Value, range: RangeInclusive<i64>) -> Option<i64> {
        let Some(number) = value.as_f64() else {
            return self.wrong_type("an integer", value);
        };
        if number.fract() != 0.0 || number.abs() > MAX_SAFE_INTEGER as f64 {
            self.refine("Expected an integer");
            return None;
        }
        let number = number as i64;
        if range.contains(&number) {
            return Some(number);
        }
        self.refine(match (*range.start(), *range.end()) {
            (start, i64::MAX) => format!("Expected an integer of at least {start}, got {number}"),
            (start, end) => format!("Expected an integer between {start} and {end}, got {number}"),
        });
        None
    }

    /// A number in a range.
    pub fn number(&mut self, value: &Value, range: RangeInclusive<f64>) -> Option<f64> {
        let Some(number) = value.as_f64() else {
            return self.wrong_type("a number", value);
        };
        if range.contains(&number) {
            return Some(number);
        }
        self.refine(format!(
            "Expected a number between {} and {}, got {number}",
            range.start(),
            range.end()
        ));
        None
    }

    /// One of a fixed set of strings.
    pub fn one_of<T: Copy>(&mut self, value: &Value, known: &[(&str, T)]) -> Option<T> {
        let Some(text) = value.as_str() else {
            return self.wrong_type("a string", value);
        };
        let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<_> = known.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            self.issue(IssueTag::Type, format!("Expected {}", names.join(" | ")));
        }
        found
    }

    /// An array whose length is in `length`. Elements of one that is too long are not looked at.
    pub fn array<'v, T>(
        &mut self,
        value: &'v Value,
        length: RangeInclusive<usize>,
        mut decode: impl FnMut(&mut Self, &'v Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(values) = value.as_array() else {
            return self.wrong_type("an array", value);
        };
        if !length.contains(&values.len()) {
            self.refine(match (*length.start(), values.len()) {
                (min, got) if got < min => format!("Expected at least {min} items, got {got}"),
                (_, got) => format!("Expected at most {} items, got {got}", length.end()),
            });
            return None;
        }
        // Every element is visited, so that one answer lists every issue.
        let decoded: Vec<_> = values
            .iter()
            .enumerate()
            .map(|(index, value)| self.at(index, |d| decode(d, value)))
            .collect();
        decoded.into_iter().collect()
    }

    /// An object used as a map; keys obey `keys`.
    pub fn map<'v, T>(
        &mut self,
        value: &'v Value,
        keys: Text,
        mut decode: impl FnMut(&mut Self, &'v Value) -> Option<T>,
    ) -> Option<BTreeMap<String, T>> {
        let map = self.object(value)?;
        let mut decoded = BTreeMap::new();
        for (key, value) in map {
            self.at(key.as_str(), |d| {
                if let Some(fault) = keys.fault(key) {
                    d.refine(format!("The key: {fault}"));
                }
                if let Some(value) = decode(d, value) {
                    decoded.insert(key.clone(), value);
                }
            });
        }
        (decoded.len() == map.len()).then_some(decoded)
    }
}
