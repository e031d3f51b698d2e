//! A judge as a measured instrument: it is asked about examples that a person has labelled, several times each, and what it says is compared.
//!
//! [`decode`] reads the examples, [`run`] asks, [`Report::of`] counts. [`Agent`] asks a judge that is an agent. How sure a number is, is part of the number: each has its interval, and what cannot
//! be known from the examples is said to be unknown.

mod agent;
mod ask;
mod file;
mod report;
mod statistics;

pub use agent::{Agent, Left};
pub use ask::{Observed, Unreachable, run};
pub use file::{Calibration, Item, decode};
pub use report::{Agreement, Consistency, Length, Measure, Position, Report};
pub use statistics::Interval;
