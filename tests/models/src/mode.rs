//! Faults, chosen by the first part of a request's path, or by the prompt.

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// As the prompt says: `/ok`, or no prefix.
    Ok,
    /// The key is refused: `/m401`.
    M401,
    /// Too many requests, with a Retry-After: `/m429`.
    M429,
    /// The server fails: `/m500`.
    M500,
    /// The connection breaks in the middle of the answer: `/mcut`.
    Cut,
    /// Each part of the answer takes its time, [`Mode::PAUSE`]: `/mslow`.
    Slow,
    /// No answer ever comes: `/mhang`.
    Hang,
}

impl Mode {
    /// Between two parts of a slow answer.
    pub const PAUSE: std::time::Duration = std::time::Duration::from_millis(300);

    const PREFIXES: [(&'static str, Mode); 7] = [
        ("/ok", Mode::Ok),
        ("/m401", Mode::M401),
        ("/m429", Mode::M429),
        ("/m500", Mode::M500),
        ("/mcut", Mode::Cut),
        ("/mslow", Mode::Slow),
        ("/mhang", Mode::Hang),
    ];

    /// The path's prefix that asks for this.
    pub fn prefix(self) -> &'static str {
        Self::PREFIXES
            .iter()
            .find(|(_, mode)| *mode == self)
            .map_or("", |(prefix, _)| prefix)
    }

    /// The mode of a path, and the path without its prefix.
    pub fn of(path: &str) -> (Mode, &str) {
        let found = Self::PREFIXES.iter().find_map(|(prefix, mode)| {
            let rest = path.strip_prefix(prefix)?;
            (rest.is_empty() || rest.starts_with('/')).then_some((*mode, rest))
        });
        found.unwrap_or((Mode::Ok, path))
    }
}
