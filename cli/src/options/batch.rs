//! The command `batch`.

use std::path::PathBuf;

use clap::{ArgAction, Subcommand, builder::BoolishValueParser};

use super::{Client, rate};

#[derive(Debug, Subcommand)]
pub(crate) enum Batch {
    /// Start a batch from a request file.
    #[command(after_help = "Example: evalgrid batch start examples/hello/request.json --watch")]
    Start {
        /// The request, as JSON; - for standard input.
        file: PathBuf,
        #[command(flatten)]
        client: Client,
        /// Stay until the batch has ended, and show its results. Example: --watch
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        watch: bool,
        /// Fail (exit code 1) where fewer of the scored trials pass, or none was scored; by default any result is fine. Only with --watch. Example: --watch --fail-under 0.9
        #[arg(long, value_name = "RATE", value_parser = rate)]
        fail_under: Option<f64>,
        /// A second start with the same key answers with the first one's batch; none by default. Example: --idempotency-key nightly-2026-09-03
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<String>,
    },
    /// Follow a batch until it has ended, then show its results.
    #[command(after_help = "Example: evalgrid batch watch batch_…")]
    Watch {
        /// The batch's id.
        id: String,
        /// Fail (exit code 1) where fewer of the scored trials pass, or none was scored; by default any result is fine. Example: --fail-under 0.9
        #[arg(long, value_name = "RATE", value_parser = rate)]
        fail_under: Option<f64>,
        #[command(flatten)]
        client: Client,
    },
    /// Show the results of a batch so far.
    #[command(after_help = "Example: evalgrid batch get batch_… --json > batch.json")]
    Get {
        /// The batch's id.
        id: String,
        #[command(flatten)]
        client: Client,
        /// Print the whole batch with all evidence, as the HTTP API answers it. Example: --json
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        json: bool,
        /// Where the HTTP API is; only for --json. Example: --api http://10.0.0.5:8700
        #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8700")]
        api: String,
    },
    /// List batches, newest first.
    #[command(after_help = "Example: evalgrid batch list --limit 5")]
    List {
        #[command(flatten)]
        client: Client,
        /// How many. Example: --limit 100
        #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(i64).range(1..=100))]
        limit: i64,
    },
    /// Run the unscored trials of an ended batch again, in a new batch that takes the scored ones over.
    #[command(after_help = "Example: evalgrid batch retry batch_… --watch")]
    Retry {
        /// The ended batch's id.
        id: String,
        #[command(flatten)]
        client: Client,
        /// Stay until the new batch has ended, and show its results. Example: --watch
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        watch: bool,
        /// Fail (exit code 1) where fewer of the scored trials pass, or none was scored; by default any result is fine. Only with --watch. Example: --watch --fail-under 0.9
        #[arg(long, value_name = "RATE", value_parser = rate)]
        fail_under: Option<f64>,
        /// A second retry with the same key answers with the first one's batch; none by default. Example: --idempotency-key nightly-2026-09-03-again
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<String>,
    },
    /// Ask the judges of an ended batch again, or other ones, from its stored evidence, in a new batch. No agent runs.
    #[command(after_help = "Example: evalgrid batch regrade batch_… --judges stricter.json --watch")]
    Regrade {
        /// The ended batch's id.
        id: String,
        /// A JSON array of judges, as in a request, for every case in place of its own; - for standard input; by default the batch's own. Example: --judges stricter.json
        #[arg(long, value_name = "FILE")]
        judges: Option<PathBuf>,
        /// A case whose trials are judged, by its id, as often as needed; all by default. Example: --case greet --case add
        #[arg(long = "case", value_name = "ID")]
        cases: Vec<String>,
        #[command(flatten)]
        client: Client,
        /// Stay until the new batch has ended, and show its results and what is another verdict than before. Example: --watch
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        watch: bool,
        /// Fail (exit code 1) where fewer of the scored trials pass, or none was scored; by default any result is fine. Only with --watch. Example: --watch --fail-under 0.9
        #[arg(long, value_name = "RATE", value_parser = rate)]
        fail_under: Option<f64>,
        /// A second regrade with the same key answers with the first one's batch; none by default. Example: --idempotency-key stricter-judges
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<String>,
    },
    /// Cancel a batch: its unfinished trials become void.
    #[command(after_help = "Example: evalgrid batch cancel batch_…")]
    Cancel {
        /// The batch's id.
        id: String,
        #[command(flatten)]
        client: Client,
    },
}
