//! The command `judge`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, builder::BoolishValueParser};

use super::SandboxFlags;

#[derive(Debug, Subcommand)]
pub(crate) enum Judge {
    /// Ask a judge about examples that a person has labelled, several times each, and show how far it can be trusted. Uses the key of its provider
    /// or its harness (such as OPENAI_API_KEY, and OPENAI_BASE_URL where that is set) from this command's own environment. A judge by a harness is
    /// asked in a fresh sandbox each time.
    #[command(after_help = "Example: evalgrid judge calibrate examples/calibrate.json")]
    Calibrate {
        /// The judge and the examples, as JSON; - for standard input. docs/judges.md describes it.
        file: PathBuf,
        /// Print one JSON object. Example: --json
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        json: bool,
        #[command(flatten)]
        agent: JudgeAgent,
    },
}

/// Where a judge by a harness is asked.
#[derive(Args, Debug)]
pub(crate) struct JudgeAgent {
    /// Where the sandboxes of a judge by a harness live, and its agent without --tools; by default a temporary folder, removed at the end. Example: --work /var/lib/evalgrid-calibrate
    #[arg(long, value_name = "DIR")]
    pub(crate) work: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sandboxes: SandboxFlags,
}
