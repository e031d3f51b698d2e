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

/// Text that an agent may have written: no control characters, so that it cannot steer the terminal.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// [`plain`], of at most `width` characters.
pub(crate) fn short(text: &str, width: usize) -> String {
    let text = plain(text);
    match text.char_indices().nth(width) {
        None => text,
        Some(_) => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
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
            ("äöüß", 4, "äöüß"),
            ("äöüßx", 4, "äöü…"),
        ] {
            assert_eq!(short(text, width), expected);
        }
    }
}
