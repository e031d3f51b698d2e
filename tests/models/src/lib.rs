//! A model server for tests: the four wire formats that real agents and judges speak, on loopback, with answers that the prompt decides.
//!
//! The last thing that the person said may hold directives, one a line (see [`script`]), and so may a judge's question and a person's brief;
//! `help.txt`, which `evalgrid-modelserver --help` prints, has all of them. The first part of the path may ask for a fault
//! (see [`Mode`]), so that a base URL is all that a test chooses. Every request is counted, so that a test can prove that none was repeated.
//! What no real client would send is refused as the vendor would refuse it.

mod anthropic;
mod chat;
mod exchange;
mod gemini;
mod judge;
mod ledger;
mod mode;
mod person;
mod responses;
pub mod script;
mod server;
pub mod usage;

pub use exchange::Format;
pub use ledger::{Request, Totals};
pub use mode::Mode;
pub use server::ModelServer;
