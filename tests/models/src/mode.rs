//! Faults, chosen by the first part of a request's path, or by the prompt.

use std::fmt;

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// As the prompt says: `/ok`, or no prefix.
    Ok,
    /// The key is refused: `/m401`.
    M401,
    /// Too many requests, with a Retry-After: `/m429`.
    M429,
    /// The server fails: `/m500`.
    M500,
    /// The server is overloaded, in OpenAI's words: `/m503`.
    M503,
    /// The server is overloaded, in Anthropic's words: `/m529`.
    M529,
    /// The connection breaks in the middle of the answer: `/mcut`.
    Cut,
    /// Each part of the answer takes its time, [`Mode::PAUSE`]: `/mslow`.
    Slow,
    /// No answer ever comes: `/mhang`.
    Hang,
    /// The first byte of the answer comes, and nothing after it: `/mstall`.
    Stall,
    /// The answer comes after so many milliseconds: `/mwait1500`.
    Wait(u32),
    /// The model refuses: `/mrefusal`.
    Refusal,
    /// The answer is cut off at the limit of output tokens: `/mincomplete`.
    Incomplete,
    /// The answer is empty: `/mempty`.
    Empty,
    /// The answer is [`Mode::HUGE`] bytes long: `/mhuge`.
    Huge,
    /// The model calls a tool first, the client's shell where it has one: `/mtool`.
    Tool,
    /// A judge's answer is no JSON: `/minvalid`.
    Invalid,
    /// A judge's answer has a key too many: `/mextra`.
    Extra,
    /// A judge's answer gives no reason: `/mmissing`.
    Missing,
    /// A judge chooses what is no choice: `/mlabel`.
    Label,
    /// A judge's answer stands in a code fence: `/mfenced`.
    Fenced,
    /// So at the first N asks of one job, and [`Mode::Ok`] then: `/mfirst2-m429`, `/mfirst1-mcut`. Asks are of one job where they have the
    /// same `idempotency-key`, or no such key and the same step of the same conversation.
    First(u32, &'static Mode),
}

impl Mode {
    /// Between two parts of a slow answer.
    pub const PAUSE: std::time::Duration = std::time::Duration::from_millis(300);
    /// Bytes of a huge answer's text.
    pub const HUGE: usize = 1 << 20;

    const PREFIXES: [(&'static str, Mode); 20] = [
        ("ok", Mode::Ok),
        ("m401", Mode::M401),
        ("m429", Mode::M429),
        ("m500", Mode::M500),
        ("m503", Mode::M503),
        ("m529", Mode::M529),
        ("mcut", Mode::Cut),
        ("mslow", Mode::Slow),
        ("mhang", Mode::Hang),
        ("mstall", Mode::Stall),
        ("mrefusal", Mode::Refusal),
        ("mincomplete", Mode::Incomplete),
        ("mempty", Mode::Empty),
        ("mhuge", Mode::Huge),
        ("mtool", Mode::Tool),
        ("minvalid", Mode::Invalid),
        ("mextra", Mode::Extra),
        ("mmissing", Mode::Missing),
        ("mlabel", Mode::Label),
        ("mfenced", Mode::Fenced),
    ];

    /// The mode of a path, and the path without its prefix.
    pub fn of(path: &str) -> (Mode, &str) {
        let found = path.strip_prefix('/').and_then(|path| {
            let end = path.find('/').unwrap_or(path.len());
            Some((Self::named(&path[..end])?, &path[end..]))
        });
        found.unwrap_or((Mode::Ok, path))
    }

    /// By its name in a path.
    pub(crate) fn named(name: &str) -> Option<Mode> {
        if let Some(ms) = name.strip_prefix("mwait") {
            return ms.parse().ok().map(Mode::Wait);
        }
        if let Some((times, mode)) = name.strip_prefix("mfirst").and_then(|rest| rest.split_once('-')) {
            return Some(Mode::First(times.parse().ok()?, Self::simple(mode)?));
        }
        Self::simple(name).copied()
    }

    fn simple(name: &str) -> Option<&'static Mode> {
        Self::PREFIXES.iter().find(|(prefix, _)| *prefix == name).map(|(_, mode)| mode)
    }
}

/// The name in a path.
impl fmt::Display for Mode {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Wait(ms) => write!(to, "mwait{ms}"),
            Mode::First(times, mode) => write!(to, "mfirst{times}-{mode}"),
            simple => {
                let found = Self::PREFIXES.iter().find(|(_, mode)| mode == simple);
                to.write_str(found.map_or("ok", |(prefix, _)| prefix))
            }
        }
    }
}

impl serde::Serialize for Mode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_paths() {
        for (path, mode, rest) in [
            ("/v1/responses", Mode::Ok, "/v1/responses"),
            ("/ok/v1/responses", Mode::Ok, "/v1/responses"),
            ("/m429/v1", Mode::M429, "/v1"),
            ("/mcut", Mode::Cut, ""),
            ("/mwait250/v1", Mode::Wait(250), "/v1"),
            ("/mfirst2-m429/v1", Mode::First(2, &Mode::M429), "/v1"),
            ("/mfirst2-mwait9/v1", Mode::Ok, "/mfirst2-mwait9/v1"),
            ("/m4290/v1", Mode::Ok, "/m4290/v1"),
        ] {
            assert_eq!(Mode::of(path), (mode, rest), "{path}");
            if mode != Mode::Ok {
                assert_eq!(format!("/{mode}{rest}"), path);
            }
        }
        let help: Vec<_> = include_str!("help.txt").split_whitespace().collect();
        for (name, mode) in Mode::PREFIXES {
            assert_eq!((Mode::named(name), mode.to_string().as_str()), (Some(mode), name));
            assert!(help.contains(&name), "--help does not tell of {name}");
        }
    }
}
