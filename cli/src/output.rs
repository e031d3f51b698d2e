//! Standard output, and text from elsewhere made fit for a terminal.

use std::io::{self, Write as _};

use crate::Failure;

/// Prints to stdout and flushes. A reader that has gone ends the command quietly.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    bytes(text.as_bytes())
}

/// As [`print`], whatever the bytes are.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::BrokenPipe,
        _ => Failure::new(format!("standard output: {error}"), "Check where the output goes."),
    })
}

/// Prints a line to stdout.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    print(&format!("{text}\n"))
}

/// Text that an agent may have written: no control characters, so that it cannot steer the terminal, and none that hide or turn round what
/// stands beside them.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_unseen(c) { ' ' } else { c }).collect()
}

/// Characters without a width, those that turn the direction of writing, and line ends that are no control characters.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// [`plain`], of at most `width` characters.
pub(crate) fn short(text: &str, width: usize) -> String {
    let text = plain(text);
    match text.char_indices().nth(width) {
        None => text,
        Some(_) => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// `1 run`, `2 runs`.
pub(crate) fn count(number: impl TryInto<u64> + std::fmt::Display, noun: &str) -> String {
    let shown = number.to_string();
    match number.try_into() {
        Ok(1) => format!("{shown} {noun}"),
        _ if noun.ends_with("ch") || noun.ends_with('x') => format!("{shown} {noun}es"),
        _ => format!("{shown} {noun}s"),
    }
}

/// How this program was started, for commands that a person may copy.
pub(crate) fn program() -> String {
    let name = std::env::args_os().next().unwrap_or_default();
    named(&name.to_string_lossy())
}

fn named(name: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+@%~".contains(c);
    match name {
        "" => "evalgrid".to_owned(),
        name if name.chars().all(plain) => name.to_owned(),
        name => format!("'{}'", name.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_made_fit() {
        for (text, width, expected) in [
            ("", 3, ""),
            ("abc", 3, "abc"),
            ("abcd", 3, "ab…"),
            ("a\x1b[2Jb\n", 9, "a [2Jb "),
            ("a\u{202e}b\u{200b}c\u{2028}", 9, "a b c "),
            ("äöüß", 4, "äöüß"),
            ("äöüßx", 4, "äöü…"),
        ] {
            assert_eq!(short(text, width), expected);
        }
    }

    #[test]
    fn counts() {
        for (number, noun, expected) in [
            (0, "run", "0 runs"),
            (1, "run", "1 run"),
            (2, "batch", "2 batches"),
            (1, "batch", "1 batch"),
        ] {
            assert_eq!(count(number, noun), expected);
        }
    }

    #[test]
    fn programs_can_be_copied_into_a_shell() {
        for (name, expected) in [
            ("", "evalgrid"),
            ("target/release/evalgrid", "target/release/evalgrid"),
            ("/my folder/evalgrid", "'/my folder/evalgrid'"),
            ("it's", "'it'\\''s'"),
        ] {
            assert_eq!(named(name), expected);
        }
    }
}
