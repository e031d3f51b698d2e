//! Asks judges, and plays people.
//!
//! A judge runner is told by the scheduler whom to ask, about what, and how long it may take. It asks once, says what came of it, and never
//! asks again by itself: whether an ask is repeated is the scheduler's to decide.

pub mod calibrate;
pub mod chat;
pub mod http;
pub mod model;
pub mod openai;
