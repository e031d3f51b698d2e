//! What every answered request is said to have used. Fixed, so that a test can multiply: requests × these numbers is what a trial must report.

/// Tokens of the request, cached ones included where the format counts so (all but Anthropic's, which counts the three kinds apart).
pub const INPUT: u64 = 1_000;
/// Of them, or beside them, those that were read from a cache.
pub const CACHE_READ: u64 = 400;
/// Those that were written to a cache; only Anthropic's format tells them.
pub const CACHE_WRITE: u64 = 200;
/// Tokens of the answer, reasoning included where the format counts so (all but Gemini's).
pub const OUTPUT: u64 = 50;
/// Of them, or beside them, those of reasoning; Anthropic's format does not tell them.
pub const REASONING: u64 = 7;
