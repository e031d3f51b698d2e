//! Vocabulary, limits, request validation, identity hashes and redaction. No I/O, no clock, no tokio.
