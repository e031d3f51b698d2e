//! What is stored of a trial, put into the answer as it streams by: the inside of one JSON object into another that is open, and more elements at
//! the end of arrays in it. Nothing is parsed but what tells where that is.

use crate::result::{Broken, Writer};

/// Puts the inside of one JSON object into another that is open: its braces are taken off.
#[derive(Default)]
pub(crate) struct Splice {
    begun: bool,
    inside: bool,
    last: Option<u8>,
}

impl Splice {
    pub(crate) async fn push(&mut self, writer: &mut Writer, mut bytes: &[u8]) -> Result<(), Broken> {
        if !self.begun && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b"{").ok_or(Broken::Evidence)?;
            self.begun = true;
        }
        // The last byte is held back: it may be the closing brace.
        let Some((last, rest)) = bytes.split_last() else { return Ok(()) };
        if let Some(held) = self.last.replace(*last) {
            self.inner(writer, &[held]).await?;
        }
        self.inner(writer, rest).await
    }

    /// Writes what is held back, which is not the end: more will be pushed.
    pub(crate) async fn release(&mut self, writer: &mut Writer) -> Result<(), Broken> {
        match self.last.take() {
            Some(held) => self.inner(writer, &[held]).await,
            None => Ok(()),
        }
    }

    async fn inner(&mut self, writer: &mut Writer, bytes: &[u8]) -> Result<(), Broken> {
        if bytes.is_empty() {
            return Ok(());
        }
        if !self.inside {
            self.inside = true;
            writer.text(b",").await?;
        }
        writer.text(bytes).await
    }

    pub(crate) fn end(self) -> Result<(), Broken> {
        (self.last == Some(b'}')).then_some(()).ok_or(Broken::Evidence)
    }
}

/// Finds the closing bracket of one array of the outermost object, in pieces that may break off anywhere.
#[derive(Default)]
pub(crate) struct ArrayEnd {
    /// Its name.
    name: &'static [u8],
    depth: u32,
    /// Within a string.
    string: bool,
    /// Behind a backslash.
    escaped: bool,
    /// How much of the name the string is so far; `None` where it is another one.
    named: Option<usize>,
    /// The value that begins next is the array.
    next: bool,
    /// Within the array.
    within: bool,
    /// The array has an element.
    filled: bool,
}

impl ArrayEnd {
    pub(crate) fn of(name: &'static str) -> Self {
        Self {
            name: name.as_bytes(),
            ..Self::default()
        }
    }

    /// Where the bracket is in `bytes`, and whether something is before it in the array. To be asked about no more bytes after that.
    pub(crate) fn find(&mut self, bytes: &[u8]) -> Option<(usize, bool)> {
        bytes.iter().position(|byte| self.is_at(*byte)).map(|at| (at, self.filled))
    }

    fn is_at(&mut self, byte: u8) -> bool {
        if self.string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => (self.escaped, self.named) = (true, None),
                b'"' => self.string = false,
                _ => self.named = self.named.filter(|at| self.name.get(*at) == Some(&byte)).map(|at| at + 1),
            }
            return false;
        }
        if self.within && !byte.is_ascii_whitespace() && !(byte == b']' && self.depth == 2) {
            self.filled = true;
        }
        match byte {
            b'"' => (self.string, self.named) = (true, (self.depth == 1).then_some(0)),
            b':' => self.next = self.named == Some(self.name.len()),
            b'{' | b'[' => {
                self.depth += 1;
                self.within |= self.next && self.depth == 2 && byte == b'[';
                self.next = false;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.within && self.depth == 1;
            }
            b',' => (self.named, self.next) = (None, false),
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Puts `1` at the end of the array, with the text cut into pieces of `size`.
    fn added(text: &str, size: usize) -> Option<String> {
        let (mut end, mut seen) = (ArrayEnd::of("validations"), 0);
        for piece in text.as_bytes().chunks(size) {
            if let Some((at, filled)) = end.find(piece) {
                let (before, after) = text.split_at(seen + at);
                return Some(format!("{before}{}1{after}", if filled { "," } else { "" }));
            }
            seen += piece.len();
        }
        None
    }

    fn check(text: &str, expected: Option<&str>) {
        for size in 1..=text.len() {
            assert_eq!(added(text, size).as_deref(), expected, "{text} in pieces of {size}");
        }
    }

    #[test]
    fn the_end_of_the_array() {
        check(r#"{"validations":[]}"#, Some(r#"{"validations":[1]}"#));
        check(r#"{ "validations" : [ ] , "z": 0}"#, Some(r#"{ "validations" : [ 1] , "z": 0}"#));
        check(
            r#"{"validations":[{"a":[]}],"z":[]}"#,
            Some(r#"{"validations":[{"a":[]},1],"z":[]}"#),
        );
        check(
            r#"{"a":"validations","b":[],"validations":["]"]}"#,
            Some(r#"{"a":"validations","b":[],"validations":["]",1]}"#),
        );
        check(
            r#"{"a":{"validations":[]},"validations":[0]}"#,
            Some(r#"{"a":{"validations":[]},"validations":[0,1]}"#),
        );
        check(
            r#"{"a":["validations",[]],"validations":[]}"#,
            Some(r#"{"a":["validations",[]],"validations":[1]}"#),
        );
        check(
            r#"{"a":"\",\"validations\":[]","validations":[]}"#,
            Some(r#"{"a":"\",\"validations\":[]","validations":[1]}"#),
        );
        for none in [
            r#"{}"#,
            r#"{"validations":{"a":[]},"b":[]}"#,
            r#"{"validation":[],"validationss":[]}"#,
            r#"{"\validations":[]}"#,
            "[[]]",
        ] {
            check(none, None);
        }
    }

    proptest! {
        #[test]
        fn nothing_else_in_the_evidence_is_taken_for_it(text in r#"[\[\]{}",:\\a-z]{0,20}"#, key in r#"[\[\]{}",:\\a-z]{0,12}"#, size in 1usize..40, elements in 0usize..3) {
            let nested = json!({"validations": [text.clone()], key.clone(): [{"validations": []}]});
            let mut value = json!({"trajectory": [text, nested], "validations": vec![nested.clone(); elements], "verifySteps": [key]});
            let added: Value = serde_json::from_str(&added(&value.to_string(), size).unwrap()).unwrap();
            value["validations"].as_array_mut().unwrap().push(json!(1));
            prop_assert_eq!(added, value);
        }
    }
}
