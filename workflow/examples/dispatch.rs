//! How fast the state machine gives out leases: 100,000 trials of 1,000 organizations wait, some of them for a model that is at its limit.
//!
//! `cargo run --release -p evalgrid-workflow --example dispatch`
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a measurement")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use evalgrid_workflow::Limits;
use support::{Cell, Shape};

fn main() {
    for organizations in [10, 100, 1_000] {
        let trials = 100_000;
        let mut cell = Cell::new(1);
        cell.state.configure(Limits {
            models: [("command/full".to_owned(), 1)].into(),
            ..Limits::default()
        });
        for number in 0..organizations {
            let id = cell.organization(number);
            for batch in 0..trials / 10 / organizations {
                // In every organization some trials wait for the model that is full.
                let model = if batch % 4 == 0 { "full/m" } else { "open/m" };
                let shape = Shape {
                    cases: 1,
                    trials: 10,
                    provider: "process",
                    model,
                };
                cell.start(id, shape);
            }
        }
        let waiting = cell.state.waiting();
        let began = Instant::now();
        let leased = cell.leases("w").len();
        let each = began.elapsed() / leased as u32;
        println!(
            "{organizations} organizations, {waiting} trials wait: {leased} leases, {:.0}/s ({each:?} each)",
            1.0 / each.as_secs_f64()
        );
    }
}
