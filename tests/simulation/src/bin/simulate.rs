//! Runs one seed and says what came of it: `cargo run -p evalgrid-simulation --profile sim -- SEED`. `EVALGRID_TRACE=1` prints every event.

use std::process::ExitCode;

use evalgrid_simulation::{Options, run};

fn main() -> ExitCode {
    let Some(seed) = std::env::args().nth(1).and_then(|seed| seed.parse().ok()) else {
        eprintln!("simulate SEED");
        return ExitCode::from(2);
    };
    let print = std::env::var_os("EVALGRID_TRACE").is_some();
    let report = run(
        seed,
        Options {
            trace: true,
            print,
            defect: None,
        },
    );
    println!("{report}");
    match report.violation {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}
