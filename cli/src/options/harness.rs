//! Where agents come from: flags of executors, and the commands that look at it and install ahead of time.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, builder::BoolishValueParser};
use evalgrid_domain::request::Harness as Name;

use super::Data;

#[derive(Args, Debug)]
pub(crate) struct ToolFlags {
    /// Where agents are installed, once for all trials; by default the folder tools in the work folder. Example: --tools /var/cache/evalgrid/tools
    #[arg(long, value_name = "DIR")]
    pub(crate) tools: Option<PathBuf>,
    /// Programs of your own for agents, in place of the installs; the only way for agents without a package. None by default. Example: --harness-binary cursor=/opt/cursor/agent
    #[arg(long, value_name = "NAME=PATH", value_delimiter = ',', value_parser = binary)]
    pub(crate) harness_binary: Vec<(Name, PathBuf)>,
    /// Take those programs in other versions than the ones that this version of Evalgrid was tested with. Example: --harness-any-version
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        action = ArgAction::Set, value_parser = BoolishValueParser::new()
    )]
    pub(crate) harness_any_version: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Harness {
    /// List the agents: the version that is used, and whether it is here.
    #[command(after_help = "Example: evalgrid harness list --data /var/lib/evalgrid")]
    List(HostFlags),
    /// Install agents ahead of time; otherwise the first trial that needs one installs it.
    #[command(after_help = "Example: evalgrid harness install codex claude --data /var/lib/evalgrid")]
    Install {
        /// Which, as in a variant.
        #[arg(required = true, value_parser = name)]
        names: Vec<Name>,
        #[command(flatten)]
        host: HostFlags,
    },
}

/// Whose agents are meant.
#[derive(Args, Debug)]
pub(crate) struct HostFlags {
    #[command(flatten)]
    pub(crate) data: Data,
    #[command(flatten)]
    pub(crate) tools: ToolFlags,
}

pub(crate) fn name(text: &str) -> Result<Name, String> {
    let known = || Name::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    Name::from_name(text).ok_or_else(|| format!("expected one of {}", known()))
}

fn binary(text: &str) -> Result<(Name, PathBuf), String> {
    match text.split_once('=') {
        Some((harness, path)) if !path.is_empty() => Ok((name(harness)?, path.into())),
        _ => Err("expected NAME=PATH, such as cursor=/opt/cursor/agent".to_owned()),
    }
}
