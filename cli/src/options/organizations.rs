//! Flags of `organizations`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Operator;

#[derive(Debug, Subcommand)]
pub(crate) enum Organizations {
    /// List who lives in a cell, who is on the move, and who has left.
    #[command(after_help = "Example: evalgrid organizations list")]
    List {
        #[command(flatten)]
        operator: Operator,
    },
    /// Move an organization to another cell. A move that was interrupted is begun again with the same command.
    #[command(after_help = "Example: evalgrid organizations move acme --from http://10.0.0.5:8701 --to http://10.0.1.5:8701")]
    Move(Box<Move>),
}

#[derive(Args, Debug)]
pub(crate) struct Move {
    /// The organization's slug.
    pub(crate) slug: String,
    /// The schedulers of the cell that it leaves. Example: --from http://10.0.0.5:8701,http://10.0.0.6:8701
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8701", value_delimiter = ',')]
    pub(crate) from: Vec<String>,
    /// The schedulers of the cell that it moves to; none by default. Example: --to http://10.0.1.5:8701
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(crate) to: Vec<String>,
    /// The admin token of the old cell; by default from --from-token-file. Better given as a variable. Example: EVALGRID_FROM_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) from_token: Option<String>,
    /// A file that holds it; none by default. Example: --from-token-file /etc/evalgrid/eu-admin-token
    #[arg(long, value_name = "FILE")]
    pub(crate) from_token_file: Option<PathBuf>,
    /// The admin token of the new cell; by default from --to-token-file. Better given as a variable. Example: EVALGRID_TO_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) to_token: Option<String>,
    /// A file that holds it; none by default. Example: --to-token-file /etc/evalgrid/us-admin-token
    #[arg(long, value_name = "FILE")]
    pub(crate) to_token_file: Option<PathBuf>,
    /// Both cells have the same object store, so nothing is copied; by default every object is. Example: --shared-objects
    #[arg(long)]
    pub(crate) shared_objects: bool,
    /// Call off a move whose organization does not live in the new cell yet; by default it goes on. Example: --abort
    #[arg(long)]
    pub(crate) abort: bool,
}
