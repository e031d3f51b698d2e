//! The command `judge`.

use std::path::PathBuf;

use clap::{ArgAction, Subcommand, builder::BoolishValueParser};

#[derive(Debug, Subcommand)]
pub(crate) enum Judge {
    /// Ask a judge about examples that a person has labelled, several times each, and show how far it can be trusted. Uses the key of its provider
    /// (OPENAI_API_KEY, and OPENAI_BASE_URL where that is set) from this command's own environment.
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
    },
}
