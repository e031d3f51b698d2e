//! Vocabulary, limits, request validation, identity hashes and redaction. No I/O, no clock, no tokio.

pub mod changes;
pub mod coverage;
pub mod credential;
pub mod decode;
pub mod evidence;
pub mod identity;
pub mod ids;
pub mod limits;
pub mod mocks;
pub mod models;
mod names;
pub mod number;
pub mod outcome;
pub mod permission;
pub mod prompt;
pub mod redact;
pub mod report;
pub mod request;
pub mod timestamp;
pub mod timing;
pub mod validator;
pub mod verify;
