//! Commands of the operator, who has the admin token of a running server.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, builder::BoolishValueParser};

use super::{Data, SchedulerAddress};

#[derive(Debug, Subcommand)]
pub(crate) enum Trial {
    /// Show where a trial stands: its attempts, steps, worker and sandbox while its batch runs; once it has ended, what its time went into and what
    /// is worth knowing of its evidence.
    #[command(after_help = "Example: evalgrid trial show trial_… --artifact src/main.rs")]
    Show {
        /// The trial's id.
        id: String,
        /// Print this file that was kept of the trial, and nothing else; by default the trial is shown. Example: --artifact report.md
        #[arg(long, value_name = "PATH")]
        artifact: Option<String>,
        /// An API key of the trial's organization, for its evidence; by default the file api-key in --data. Better given as a variable. Example: EVALGRID_API_KEY=anp_…
        #[arg(long, value_name = "KEY")]
        api_key: Option<String>,
        #[command(flatten)]
        operator: Operator,
    },
    /// End a trial that nothing else ends. It is void with the reason given; its sandbox is destroyed.
    #[command(after_help = "Example: evalgrid trial resolve trial_… --void \"its repository is gone\"")]
    Resolve {
        /// The trial's id.
        id: String,
        /// Why the trial is not scored, for everybody who reads the batch; must be given, there is no reason by default. Example: --void "its repository is gone"
        #[arg(long, value_name = "REASON")]
        void: String,
        #[command(flatten)]
        operator: Operator,
    },
}

/// How the operator finds the server, and proves to be the operator.
#[derive(Args, Debug)]
pub(crate) struct Operator {
    #[command(flatten)]
    pub(crate) scheduler: SchedulerAddress,
    /// The admin token; by default the file admin-token in --data. Better given as a variable. Example: EVALGRID_ADMIN_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) admin_token: Option<String>,
    #[command(flatten)]
    pub(crate) data: Data,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Keys {
    /// Make a key, and its organization where there is none of that name. The key is shown once.
    #[command(after_help = "Example: evalgrid keys create --org acme --name ci --permissions evals:read,evals:write")]
    Create {
        /// The organization. Example: --org acme
        #[arg(long, value_name = "NAME", default_value = "default")]
        org: String,
        /// What the key is for. Example: --name ci
        #[arg(long, value_name = "TEXT", default_value = "key")]
        name: String,
        /// What the key may do; everything by default. Example: --permissions evals:read,evals:write
        #[arg(long, value_name = "PERMISSIONS", value_delimiter = ',')]
        permissions: Vec<String>,
        #[command(flatten)]
        operator: Operator,
    },
    /// List keys. Only their first characters are known.
    #[command(after_help = "Example: evalgrid keys list --org acme")]
    List {
        /// Only those of this organization; of every organization by default. Example: --org acme
        #[arg(long, value_name = "NAME")]
        org: Option<String>,
        #[command(flatten)]
        operator: Operator,
    },
    /// Revoke a key at once.
    #[command(after_help = "Example: evalgrid keys revoke key_…")]
    Revoke {
        /// The key's id, from `keys list`.
        id: String,
        #[command(flatten)]
        operator: Operator,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Objects {
    /// Remove objects that were last put more than 7 days ago and that nothing refers to. Reads every result once.
    #[command(after_help = "Example: evalgrid objects collect --dry-run")]
    Collect {
        /// Only those of this organization; by default of every one, and the archive's. Example: --org acme
        #[arg(long, value_name = "NAME")]
        org: Option<String>,
        /// Only tell what would be removed. Example: --dry-run
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        dry_run: bool,
        #[command(flatten)]
        operator: Operator,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Sandboxes {
    /// List every sandbox that may exist, and names in workers' folders that are no sandboxes of ours.
    #[command(after_help = "Example: evalgrid sandboxes list --json")]
    List {
        #[command(flatten)]
        operator: Operator,
        /// Print one JSON object. Example: --json
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        json: bool,
    },
    /// Open a shell in a sandbox on this machine, with its home and its workspace, as its agent had them. What runs in it is not seen. Meant for
    /// those that --keep-failed has kept.
    #[command(after_help = "Example: evalgrid sandboxes enter trial_…-7 --work /var/lib/evalgrid-work")]
    Enter {
        /// The sandbox's name, from `sandboxes list`.
        name: String,
        /// The folder of the executor whose sandbox it is; that of `serve` is the folder work in its data folder. Example: --work /var/lib/evalgrid-work
        #[arg(long, value_name = "DIR", default_value = "evalgrid-data/work")]
        work: PathBuf,
        /// That executor's --tools, if it has one; by default the folder tools in its work folder. Example: --tools /var/cache/evalgrid/tools
        #[arg(long, value_name = "DIR")]
        tools: Option<PathBuf>,
        /// Whether the shell may use the network. Example: --network
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        network: bool,
    },
    /// Ask workers now to destroy the sandboxes that no trial needs. It is done anyway after a while; this only does not wait.
    #[command(after_help = "Example: evalgrid sandboxes reap --dry-run")]
    Reap {
        #[command(flatten)]
        operator: Operator,
        /// Only tell what would be asked. Example: --dry-run
        #[arg(
            long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
            action = ArgAction::Set, value_parser = BoolishValueParser::new()
        )]
        dry_run: bool,
    },
}
