//! The binary `evalgrid`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Sandboxes start this same program as their helper; such a process must stay single-threaded and small.
    evalgrid_sandbox::run_if_helper();
    evalgrid_cli::main()
}
