//! What the tests of this crate share.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its part")]

pub mod provider;
pub mod scheduler;
