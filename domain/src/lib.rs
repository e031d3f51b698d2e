//! Vocabulary, limits, request validation, identity hashes and redaction. No I/O, no clock, no tokio.

pub mod decode;
pub mod ids;
pub mod limits;
pub mod number;
pub mod prompt;
pub mod request;
