//! Flags of `api`, and where schedulers are.

use clap::Args;

use super::HttpListen;

#[derive(Args, Debug)]
#[command(after_help = "Example: evalgrid api --http 0.0.0.0:8700 --scheduler http://10.0.0.5:8701")]
pub(crate) struct ApiRole {
    #[command(flatten)]
    pub(crate) http: HttpListen,
    #[command(flatten)]
    pub(crate) scheduler: SchedulerAddress,
    /// A cell by name, with all of its schedulers; once for each cell that organizations live in; by default the one of --scheduler. Example: --cell eu=http://10.0.0.5:8701,http://10.0.0.6:8701
    #[arg(long = "cell", value_name = "NAME=URL", value_delimiter = ',', conflicts_with = "schedulers")]
    pub(crate) cells: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct SchedulerAddress {
    /// Where the scheduler is (gRPC); of a cell with standbys, all of them. Example: --scheduler http://10.0.0.5:8701,http://10.0.0.6:8701
    #[arg(
        long = "scheduler",
        value_name = "URL",
        default_value = "http://127.0.0.1:8701",
        value_delimiter = ','
    )]
    pub(crate) schedulers: Vec<String>,
}
