//! Reading a shell command just far enough: where its top-level `&&` are, and where it pipes.
//!
//! This is no shell parser. It knows quotes, substitutions, groups, tests, comments and here-documents; at anything else that could change the
//! meaning of an `&&` it stops splitting, and at anything that could change the meaning of a `|` it stops looking for pipes.

use std::ops::Range;

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Scan {
    /// The steps between top-level `&&`; empty where the command cannot be split with certainty.
    pub steps: Vec<Range<usize>>,
    /// The first unquoted `|` of a pipeline outside substitutions.
    pub pipe: Option<usize>,
}

/// Substitutions inside substitutions that we follow.
const MAX_DEPTH: usize = 32;

/// Words after which `&&` or the exit status may not be what they seem, or that would take our reports away.
const UNSPLITTABLE: &[&str] = &[
    "if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "select", "function", "coproc", "trap",
    "exec", "return", "break", "continue", "logout", "alias", "shopt", "enable",
];

pub(super) fn scan(command: &str) -> Scan {
    let mut scanner = Scanner {
        bytes: command.as_bytes(),
        at: 0,
        groups: Vec::new(),
        command_position: true,
        step_start: 0,
        steps: Vec::new(),
        splittable: true,
        pipes_known: true,
        pipe: None,
    };
    let whole = scanner.run().is_some() && scanner.groups.is_empty() && scanner.splittable;
    let text = &command[scanner.step_start..];
    scanner.steps.push(scanner.step_start..command.len());
    let complete = whole && !text.trim().is_empty() && scanner.steps.iter().all(|step| !command[step.clone()].trim().is_empty());
    Scan {
        steps: if complete { scanner.steps } else { Vec::new() },
        pipe: scanner.pipe,
    }
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The closing character of each open group.
    groups: Vec<u8>,
    /// The next word is the name of a command, or a reserved word.
    command_position: bool,
    step_start: usize,
    steps: Vec<Range<usize>>,
    splittable: bool,
    pipes_known: bool,
    pipe: Option<usize>,
}

impl Scanner<'_> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    /// None: something is not closed, or nests too deeply; then nothing after it can be trusted.
    fn run(&mut self) -> Option<()> {
        while self.at < self.bytes.len() && self.pipes_known {
            match self.peek(0) {
                b' ' | b'\t' => self.at += 1,
                b'\\' if self.peek(1) == b'\n' => self.at += 2,
                b'\n' => self.newline(),
                b'#' => {
                    // A comment may hide what follows on its line; steps with comments in them are not worth the trouble.
                    self.splittable = false;
                    while self.at < self.bytes.len() && self.peek(0) != b'\n' {
                        self.at += 1;
                    }
                }
                b';' | b'&' | b'|' => self.operator(),
                b'(' => self.open_parenthesis()?,
                b')' => {
                    self.at += 1;
                    if self.groups.pop() != Some(b')') {
                        return None;
                    }
                    // A function's body may follow.
                    self.command_position = true;
                }
                b'<' | b'>' => self.redirection()?,
                _ => self.word()?,
            }
        }
        Some(())
    }

    fn is_top(&self) -> bool {
        self.groups.is_empty()
    }

    fn newline(&mut self) {
        self.at += 1;
        let pending = self.is_top() && self.bytes[self.step_start..self.at].iter().all(u8::is_ascii_whitespace);
        let rest_blank = self.bytes[self.at..].iter().all(u8::is_ascii_whitespace);
        if self.is_top() && !pending && !rest_blank {
            self.splittable = false;
        }
        self.command_position = true;
    }

    fn operator(&mut self) {
        let (first, second) = (self.peek(0), self.peek(1));
        match (first, second) {
            (b'&', b'&') => {
                if self.is_top() {
                    self.steps.push(self.step_start..self.at);
                    self.step_start = self.at + 2;
                }
                self.at += 2;
            }
            (b'|', b'|') => {
                // Only left of every `&&` does `a || b && c` fall apart into `a || b` and `c`.
                self.splittable &= !self.is_top() || self.steps.is_empty();
                self.at += 2;
            }
            (b'|', _) => {
                self.pipe.get_or_insert(self.at);
                self.at += if second == b'&' { 2 } else { 1 };
            }
            (b'&', b'>') => {
                // `&>file`
                self.at += 2;
                return;
            }
            _ => {
                // `;` and `&` make a list of lists. In a group they are the group's own affair.
                self.splittable &= !self.is_top();
                self.at += 1;
            }
        }
        self.command_position = true;
    }

    fn open_parenthesis(&mut self) -> Option<()> {
        let before = self.at.checked_sub(1).map(|at| self.bytes[at]);
        match before {
            // An extended pattern, or the value of an array.
            Some(b'@' | b'?' | b'*' | b'+' | b'!' | b'=') => self.at = self.skip_parentheses(self.at + 1, 0)?,
            _ if self.command_position && self.peek(1) == b'(' => self.at = self.skip_arithmetic(self.at + 2)?,
            _ => {
                self.at += 1;
                self.groups.push(b')');
                self.command_position = true;
            }
        }
        Some(())
    }

    fn redirection(&mut self) -> Option<()> {
        match (self.peek(0), self.peek(1), self.peek(2)) {
            (b'<', b'<', b'<') => self.at += 3,
            (b'<', b'<', _) => {
                // The rest of this line may still pipe; the document after it is text.
                self.splittable = false;
                let end = self.bytes[self.at..]
                    .iter()
                    .position(|byte| *byte == b'\n')
                    .map_or(self.bytes.len(), |length| self.at + length);
                let line = &self.bytes[..end];
                self.at += 2;
                let mut rest = Scanner {
                    bytes: line,
                    groups: self.groups.clone(),
                    steps: Vec::new(),
                    ..*self
                };
                let known = rest.run().is_some();
                self.pipe = rest.pipe.filter(|_| known).or(self.pipe);
                self.pipes_known = false;
            }
            (b'<' | b'>', b'(', _) => self.at = self.skip_parentheses(self.at + 2, 0)?,
            (b'>', b'|' | b'>' | b'&', _) | (b'<', b'&' | b'>', _) => self.at += 2,
            _ => self.at += 1,
        }
        // The target is a word, not a command's name.
        while matches!(self.peek(0), b' ' | b'\t') {
            self.at += 1;
        }
        let position = self.command_position;
        if !matches!(self.peek(0), b';' | b'&' | b'|' | b'(' | b')' | b'<' | b'>' | b'\n' | 0) {
            self.command_position = false;
            self.word()?;
        }
        self.command_position = position;
        Some(())
    }

    fn word(&mut self) -> Option<()> {
        let start = self.at;
        let end = self.skip_word(start)?;
        // A word that holds a NUL or the like would not end; but a command has none.
        self.at = end.max(start + 1);
        if !self.command_position {
            return Some(());
        }
        let word = &self.bytes[start..end];
        match word {
            b"{" => {
                self.groups.push(b'}');
                return Some(());
            }
            b"}" => return (self.groups.pop() == Some(b'}')).then(|| self.command_position = false),
            b"!" => return Some(()),
            b"[[" => {
                self.command_position = false;
                return self.skip_test();
            }
            b"set" => self.splittable &= self.is_harmless_set(),
            _ => {}
        }
        let text = std::str::from_utf8(word).unwrap_or_default();
        if UNSPLITTABLE.contains(&text) {
            self.splittable = false;
            // In `case x in a|b)` a bar is no pipe.
            self.pipes_known &= text != "case";
        }
        // An assignment before a command leaves the next word in its place; so do words that begin a list.
        let assignment = text
            .split_once('=')
            .is_some_and(|(name, _)| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_+[]".contains(&byte)));
        let opens = matches!(text, "if" | "then" | "elif" | "else" | "while" | "until" | "do" | "time");
        self.command_position = assignment || opens;
        Some(())
    }

    /// `set` with options that print nothing: tracing would print our reports, too.
    fn is_harmless_set(&self) -> bool {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| b";&|\n)".contains(byte)).unwrap_or(rest.len());
        let words = String::from_utf8_lossy(&rest[..end]).into_owned();
        words.split_ascii_whitespace().all(|word| match word.strip_prefix(['-', '+']) {
            Some(letters) => letters.bytes().all(|letter| b"euo".contains(&letter)),
            None => matches!(word, "pipefail" | "errexit" | "nounset"),
        })
    }

    fn skip_test(&mut self) -> Option<()> {
        while self.at < self.bytes.len() {
            while self.peek(0).is_ascii_whitespace() || b"()<>|&;!".contains(&self.peek(0)) {
                self.at += 1;
            }
            let start = self.at;
            self.at = self.skip_word(start)?;
            if &self.bytes[start..self.at] == b"]]" {
                return Some(());
            }
            if self.at == start {
                return None;
            }
        }
        None
    }

    /// Where the word that begins at `at` ends.
    fn skip_word(&self, mut at: usize) -> Option<usize> {
        while let Some(byte) = self.bytes.get(at) {
            match byte {
                b' ' | b'\t' | b'\n' | b';' | b'&' | b'|' | b'(' | b')' | b'<' | b'>' => break,
                _ => at = self.skip_piece(at, 0)?,
            }
        }
        Some(at)
    }

    /// One character, or one whole quotation or substitution.
    fn skip_piece(&self, at: usize, depth: usize) -> Option<usize> {
        if depth > MAX_DEPTH {
            return None;
        }
        match (self.bytes.get(at)?, self.bytes.get(at + 1)) {
            (b'\\', _) => Some((at + 2).min(self.bytes.len())),
            (b'\'', _) => self.find(at + 1, b'\'').map(|end| end + 1),
            (b'"', _) => self.skip_until(at + 1, b'"', depth),
            (b'`', _) => self.skip_backticks(at + 1),
            (b'$', Some(b'\'')) => self.skip_ansi(at + 2),
            (b'$', Some(b'(')) => self.skip_parentheses(at + 2, depth + 1),
            (b'$', Some(b'{')) => self.skip_braces(at + 2, depth + 1),
            _ => Some(at + 1),
        }
    }

    fn find(&self, from: usize, byte: u8) -> Option<usize> {
        self.bytes
            .get(from..)?
            .iter()
            .position(|found| *found == byte)
            .map(|length| from + length)
    }

    /// The rest of a double quotation: single quotes mean nothing in it.
    fn skip_until(&self, mut at: usize, close: u8, depth: usize) -> Option<usize> {
        loop {
            match self.bytes.get(at)? {
                byte if *byte == close => return Some(at + 1),
                b'\'' => at += 1,
                b'$' if self.bytes.get(at + 1) == Some(&b'\'') => at += 1,
                _ => at = self.skip_piece(at, depth + 1)?,
            }
        }
    }

    fn skip_backticks(&self, mut at: usize) -> Option<usize> {
        loop {
            match self.bytes.get(at)? {
                b'`' => return Some(at + 1),
                b'\\' => at += 2,
                _ => at += 1,
            }
        }
    }

    fn skip_ansi(&self, mut at: usize) -> Option<usize> {
        loop {
            match self.bytes.get(at)? {
                b'\'' => return Some(at + 1),
                b'\\' => at += 2,
                _ => at += 1,
            }
        }
    }

    fn skip_braces(&self, mut at: usize, depth: usize) -> Option<usize> {
        loop {
            match self.bytes.get(at)? {
                b'}' => return Some(at + 1),
                _ => at = self.skip_piece(at, depth)?,
            }
        }
    }

    /// The rest of a substitution. A `case`, a comment or a here-document in it may hold a parenthesis that closes nothing: then we do not know.
    fn skip_parentheses(&self, mut at: usize, depth: usize) -> Option<usize> {
        if depth > MAX_DEPTH {
            return None;
        }
        let (start, mut open) = (at, 1usize);
        loop {
            match self.bytes.get(at)? {
                b'(' => {
                    open += 1;
                    at += 1;
                }
                b')' => {
                    open -= 1;
                    at += 1;
                    if open == 0 {
                        break;
                    }
                }
                _ => at = self.skip_piece(at, depth)?,
            }
        }
        let inside = String::from_utf8_lossy(&self.bytes[start..at]).into_owned();
        let comment = inside.contains(" #") || inside.contains("\n#") || inside.starts_with('#');
        let unsure = comment || inside.contains("<<") || inside.split(|c: char| !c.is_alphanumeric()).any(|word| word == "case");
        (!unsure).then_some(at)
    }

    fn skip_arithmetic(&self, mut at: usize) -> Option<usize> {
        let mut open = 2usize;
        while open > 0 {
            match self.bytes.get(at)? {
                b'(' => open += 1,
                b')' => open -= 1,
                _ => {}
            }
            at += 1;
        }
        self.bytes[..at].ends_with(b"))").then_some(at)
    }
}
