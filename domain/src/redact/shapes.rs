//! What looks like a key, whoever's it is.
//!
//! A hand-written scan rather than regular expressions: a shape must not be preceded by a character of its own kind, and a search that restarts
//! after each refused candidate would be quadratic on hostile text. Here every byte is looked at a bounded number of times.

use std::ops::Range;

/// The places of all shapes: sorted, disjoint, on character boundaries (each shape is ASCII, or ends before or after an ASCII character).
pub(super) fn find(text: &str) -> Vec<Range<usize>> {
    let mut scan = Scan {
        bytes: text.as_bytes(),
        places: Vec::new(),
        password: None,
        pem_ends: true,
    };
    let mut at = 0;
    while at < scan.bytes.len() {
        at = scan.step(at);
    }
    scan.places
}

struct Scan<'a> {
    bytes: &'a [u8],
    places: Vec<Range<usize>>,
    /// The password of the URL that the scan is in.
    password: Option<Range<usize>>,
    /// The rest of the text may hold the end of a PEM block: looked for at most once in vain.
    pem_ends: bool,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

fn is_bearer(byte: u8) -> bool {
    is_word(byte) || b".~+/=".contains(&byte)
}

/// A prefix, the characters that follow it, how many at least, and whether one must be a digit.
struct Token {
    prefix: &'static str,
    of: fn(u8) -> bool,
    min: usize,
    digit: bool,
}

const fn token(prefix: &'static str, of: fn(u8) -> bool, min: usize) -> Token {
    Token {
        prefix,
        of,
        min,
        digit: false,
    }
}

fn is_alnum(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

fn is_upper_alnum(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit()
}

const TOKENS: &[Token] = &[
    Token {
        prefix: "sk-",
        of: is_word,
        min: 20,
        digit: true,
    },
    token("sk_live_", is_alnum, 10),
    token("sk_test_", is_alnum, 10),
    token("rk_live_", is_alnum, 10),
    token("rk_test_", is_alnum, 10),
    token("am_sk_", is_word, 1),
    token("anp_", is_word, 16),
    token("ghp_", is_alnum, 20),
    token("gho_", is_alnum, 20),
    token("ghu_", is_alnum, 20),
    token("ghs_", is_alnum, 20),
    token("ghr_", is_alnum, 20),
    token("github_pat_", is_word, 20),
    token("xoxa-", is_word, 10),
    token("xoxb-", is_word, 10),
    token("xoxe-", is_word, 10),
    token("xoxo-", is_word, 10),
    token("xoxp-", is_word, 10),
    token("xoxr-", is_word, 10),
    token("xoxs-", is_word, 10),
    token("AKIA", is_upper_alnum, 16),
    token("ASIA", is_upper_alnum, 16),
    token("AIza", is_word, 35),
];

const PEM_BEGIN: &[u8] = b"-----BEGIN ";
const PEM_END: &[u8] = b"-----END ";
/// Bytes of a PEM label: `RSA PRIVATE KEY` and the like.
const MAX_PEM_LABEL: usize = 64;

impl Scan<'_> {
    /// Looks at one place; gives the next one to look at.
    fn step(&mut self, at: usize) -> usize {
        if let Some(password) = self.password.take_if(|password| password.start <= at)
            && password.start == at
        {
            self.places.push(password.clone());
            return password.end;
        }
        let end = match self.bytes[at] {
            b's' | b'r' | b'a' | b'g' | b'x' | b'A' => self.token(at),
            b'e' => self.jwt(at),
            b'B' | b'b' => return self.bearer(at),
            b':' => {
                self.url(at);
                None
            }
            b'-' => self.pem(at),
            _ => None,
        };
        match end {
            Some(end) => {
                self.places.push(at..end);
                end
            }
            None => at + 1,
        }
    }

    fn run(&self, from: usize, of: fn(u8) -> bool) -> usize {
        self.bytes[from..].iter().take_while(|byte| of(**byte)).count()
    }

    fn token(&self, at: usize) -> Option<usize> {
        let rest = &self.bytes[at..];
        let token = TOKENS.iter().find(|token| rest.starts_with(token.prefix.as_bytes()))?;
        if !self.is_boundary(at) {
            return None;
        }
        let start = at + token.prefix.len();
        let length = self.run(start, token.of);
        let fits = length >= token.min && (!token.digit || self.bytes[start..start + length].iter().any(u8::is_ascii_digit));
        // The whole word goes, so that what is left never begins with a shape that its own beginning hid.
        fits.then(|| start + self.run(start, is_word))
    }

    /// `eyJ…`, three parts joined by dots, each of at least eight characters.
    fn jwt(&self, at: usize) -> Option<usize> {
        if !self.bytes[at..].starts_with(b"eyJ") || !self.is_boundary(at) {
            return None;
        }
        let mut end = at;
        for part in 0..3 {
            if part > 0 {
                if self.bytes.get(end) != Some(&b'.') {
                    return None;
                }
                end += 1;
            }
            let length = self.run(end, is_word);
            if length < 8 {
                return None;
            }
            end += length;
        }
        Some(end)
    }

    /// The token after the word `Bearer`, in whatever case.
    fn bearer(&mut self, at: usize) -> usize {
        const WORD: &[u8] = b"bearer";
        let next = at + 1;
        let after = at + WORD.len();
        if !self.bytes.get(at..after).is_some_and(|word| word.eq_ignore_ascii_case(WORD)) || !self.is_boundary(at) {
            return next;
        }
        let space = self.run(after, |byte| byte == b' ' || byte == b'\t');
        let start = after + space;
        let length = self.run(start, is_bearer);
        if space == 0 || length < 16 || !self.bytes[start..start + length].iter().any(u8::is_ascii_digit) {
            return next;
        }
        self.places.push(start..start + length);
        start + length
    }

    /// Remembers the password of `scheme://user:password@`, so that the user name before it is still looked at.
    fn url(&mut self, at: usize) {
        if !self.bytes[at..].starts_with(b"://") || !at.checked_sub(1).is_some_and(|before| self.bytes[before].is_ascii_alphanumeric()) {
            return;
        }
        let start = at + 3;
        let length = self.run(start, |byte| !byte.is_ascii_whitespace() && !b"/\"'<>`\\".contains(&byte));
        let authority = &self.bytes[start..start + length];
        let Some(end) = authority.iter().rposition(|byte| *byte == b'@') else {
            return;
        };
        let Some(colon) = authority[..end].iter().position(|byte| *byte == b':') else {
            return;
        };
        let password = start + colon + 1..start + end;
        if !password.is_empty() && self.bytes[password.clone()] != *super::REDACTED.as_bytes() {
            self.password = Some(password);
        }
    }

    /// A private-key block, whole. One without an end is taken as far as it looks like one.
    fn pem(&mut self, at: usize) -> Option<usize> {
        let label = self.bytes[at..].strip_prefix(PEM_BEGIN)?;
        let label = &label[..label.len().min(MAX_PEM_LABEL)];
        let label = &label[..label.windows(5).position(|window| window == b"-----")?];
        if !label.windows(11).any(|window| window == b"PRIVATE KEY") {
            return None;
        }
        let body = at + PEM_BEGIN.len() + label.len() + 5;
        if self.pem_ends {
            let rest = &self.bytes[body..];
            match rest.windows(PEM_END.len()).position(|window| window == PEM_END) {
                Some(end) => {
                    let end = body + end + PEM_END.len();
                    let tail = &self.bytes[end..(end + MAX_PEM_LABEL).min(self.bytes.len())];
                    return Some(end + tail.windows(5).position(|window| window == b"-----").map_or(0, |label| label + 5));
                }
                None => self.pem_ends = false,
            }
        }
        Some(body + self.run(body, |byte| byte.is_ascii_alphanumeric() || b"+/=\\:,- \t\r\n".contains(&byte)))
    }

    /// Nothing before `at` belongs to the same word. The letters of an escape (`\n`), of a percent-encoded byte (`%3D`) and of a terminal's
    /// colour (`ESC [ 31 m`) do not.
    fn is_boundary(&self, at: usize) -> bool {
        if self.places.last().is_some_and(|place| place.end == at) {
            return true;
        }
        let before = &self.bytes[at.saturating_sub(MAX_ESCAPE)..at];
        match before {
            [.., last] if !is_word(*last) => true,
            [] => true,
            [.., b'\\', b'n' | b'r' | b't' | b'b' | b'f'] => true,
            [.., b'%', high, low] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => true,
            [.., b'\\', b'u', a, b, c, d] if [a, b, c, d].iter().all(|digit| digit.is_ascii_hexdigit()) => true,
            [start @ .., b'm'] => {
                let digits = start
                    .iter()
                    .rev()
                    .take_while(|byte| byte.is_ascii_digit() || **byte == b';')
                    .count();
                let start = &start[..start.len() - digits];
                start.ends_with(b"\x1b[") || start.ends_with(b"\\u001b[") || start.ends_with(b"\\x1b[")
            }
            _ => false,
        }
    }
}

/// Bytes before a shape that an escape may take.
const MAX_ESCAPE: usize = 24;
