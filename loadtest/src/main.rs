//! Load and recovery runs over the real interfaces of the real binary, each beside its physical limit measured in the same run.
//!
//! `cargo run --release -p evalgrid-loadtest -- all` prints the whole report; the README says what it needs.
#![allow(
    clippy::unwrap_used,
    reason = "a measurement that cannot be made has nobody to report to but the person who asked for it"
)]
#![allow(clippy::disallowed_methods, reason = "it measures real time")]

mod agents;
mod cell;
mod floor;
mod judges;
mod machine;
mod memory;
mod recovery;
mod restart;
mod stats;
mod steps;
mod trials;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Measures Evalgrid beside what the machine allows.
#[derive(Parser)]
struct Arguments {
    /// Where the data folders of the servers go; must be on a real disk.
    #[arg(long, default_value = "target/loadtest")]
    folder: PathBuf,
    /// Alternating runs; medians are printed.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Clone)]
enum What {
    /// Durable steps per second through the workers' stream, beside a bare synced file.
    Steps {
        /// Trials in flight.
        #[arg(long, value_delimiter = ',', default_value = "1,16,100,256")]
        in_flight: Vec<u32>,
        /// Steps in all, per run and row (a tenth of it with one trial in flight).
        #[arg(long, default_value_t = 120_000)]
        steps: u64,
    },
    /// No-op command trials per second, beside bare processes.
    Trials {
        /// Trials at once.
        #[arg(long, value_delimiter = ',', default_value = "8,16")]
        slots: Vec<u32>,
        /// Trials in all, per run and row.
        #[arg(long, default_value_t = 1200)]
        trials: usize,
    },
    /// What one no-op trial costs more than its bare commands, per provider.
    Overhead {
        /// The providers.
        #[arg(long, value_delimiter = ',', default_value = "process,bubblewrap")]
        providers: Vec<String>,
        /// Trials in all, per run and provider.
        #[arg(long, default_value_t = 100)]
        trials: usize,
    },
    /// Trials per minute with the real codex against a model server on loopback, beside codex alone; memory per running trial.
    Agents {
        /// Where agents are installed.
        #[arg(long, default_value = "target/tools")]
        tools: PathBuf,
        /// Trials at once.
        #[arg(long, value_delimiter = ',', default_value = "1,4")]
        slots: Vec<u32>,
        /// Trials in all, per run and row.
        #[arg(long, default_value_t = 20)]
        trials: usize,
    },
    /// What judges and simulated people by a model cost, beside the bare requests to the same model server.
    Judges {
        /// Trials in all, per run and row: whole hundreds, at most 300.
        #[arg(long, default_value_t = 200)]
        trials: usize,
    },
    /// From `kill -9` with 100 trials in flight to the first new step.
    Restart,
    /// From the start of a killed scheduler to its first answer: a million records, and 100,000 waiting trials.
    Recovery,
    /// A cell over Redis: steps per second, and failover.
    Cell,
    /// Resident memory: idle, per queued trial, under load.
    Memory,
    /// All of them.
    All,
}

#[tokio::main]
async fn main() {
    let arguments = Arguments::parse();
    std::fs::create_dir_all(&arguments.folder).unwrap();
    let folder = arguments.folder.canonicalize().unwrap();
    let runs = arguments.runs;
    println!("binary: {}", evalgrid_tests::server::binary().display());
    match arguments.what {
        What::Steps { in_flight, steps } => steps::report(&folder, runs, &in_flight, steps).await,
        What::Trials { slots, trials } => trials::report(&folder, runs, &slots, trials).await,
        What::Overhead { providers, trials } => {
            let providers: Vec<&str> = providers.iter().map(String::as_str).collect();
            trials::overhead(&folder, runs, trials, &providers).await;
        }
        What::Agents { tools, slots, trials } => {
            std::fs::create_dir_all(&tools).unwrap();
            agents::report(&folder, runs, &tools.canonicalize().unwrap(), &slots, trials).await;
        }
        What::Judges { trials } => judges::report(&folder, runs, trials).await,
        What::Restart => restart::report(&folder, runs).await,
        What::Recovery => recovery::report(&folder, runs).await,
        What::Cell => cell::report(&folder, runs).await,
        What::Memory => memory::report(&folder).await,
        What::All => {
            steps::report(&folder, runs, &[1, 16, 100, 256], 120_000).await;
            trials::report(&folder, runs, &[8, 16], 1200).await;
            judges::report(&folder, runs, 200).await;
            restart::report(&folder, runs).await;
            recovery::report(&folder, runs).await;
            cell::report(&folder, runs).await;
            memory::report(&folder).await;
        }
    }
}
