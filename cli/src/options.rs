//! Every command and flag. A flag is also a variable `EVALGRID_<NAME>` and a key of the configuration file; `config` does that for all of them.

mod api;
mod batch;
mod harness;
mod judge;
mod operator;
mod organizations;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum, builder::BoolishValueParser};
use evalgrid_sandbox::Network;
use evalgrid_scheduler::{MAX_CREATE_BURST, ProviderLimits};
use evalgrid_worker::DockerPolicy;

pub(crate) use api::{ApiRole, SchedulerAddress};
pub(crate) use batch::Batch;
pub(crate) use harness::{Harness, HostFlags, ToolFlags};
pub(crate) use judge::{Judge, JudgeAgent};
pub(crate) use operator::{Keys, Objects, Operator, Sandboxes, Trial};
pub(crate) use organizations::Organizations;

/// Runs evals of coding agents: every trial in its own sandbox, every result on record.
#[derive(Debug, Parser)]
#[command(
    name = "evalgrid",
    version,
    after_help = "Each flag may also be given as a variable (EVALGRID_SLOTS=8) or as a key of the configuration file (slots = 8).\n\
                  A flag outranks a variable, a variable outranks the file.\n\nTo see it work: evalgrid demo"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Without --log.
pub(crate) const DEFAULT_LOG: &str = "info";

#[derive(Args, Debug)]
pub(crate) struct Global {
    /// A TOML file with values for flags, by their names; none by default. Example: --config /etc/evalgrid.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Which log lines to write to stderr: a level, or targets with levels. Example: --log warn,evalgrid_scheduler=debug
    #[arg(long, global = true, value_name = "FILTER", default_value = DEFAULT_LOG)]
    pub(crate) log: String,
    /// How log lines look. Example: --log-format json
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a small suite here and now, with everything it needs in a temporary folder.
    Demo(Demo),
    /// Run scheduler, executor, judge runner and API in one process.
    Serve(Serve),
    /// Run the scheduler alone.
    Scheduler(SchedulerRole),
    /// Run an executor alone.
    Executor(ExecutorRole),
    /// Run a judge runner alone: it asks judges, and plays simulated people.
    JudgeRunner(JudgeRunnerRole),
    /// Run the HTTP API alone.
    Api(ApiRole),
    /// Look at the agents of this host, and install them.
    #[command(subcommand)]
    Harness(Harness),
    /// Measure how good a judge is.
    #[command(subcommand)]
    Judge(Judge),
    /// Start, watch and read batches.
    #[command(subcommand)]
    Batch(Batch),
    /// Look at single trials of a running server, and end one that is stuck.
    #[command(subcommand)]
    Trial(Trial),
    /// Make, list and revoke API keys of a running server.
    #[command(subcommand)]
    Keys(Keys),
    /// List the organizations of a running server, and move one to another cell.
    #[command(subcommand)]
    Organizations(Organizations),
    /// Show the sandboxes in custody of a running server, and have those removed that nobody needs.
    #[command(subcommand)]
    Sandboxes(Sandboxes),
    /// Remove objects of a running server that nothing refers to.
    #[command(subcommand)]
    Objects(Objects),
    /// Look into the log of a server that is not running.
    #[command(subcommand)]
    Log(Log),
    /// Repair the index of a server that is not running.
    #[command(subcommand)]
    Index(Index),
    /// Finish the upgrade of a server that is not running.
    #[command(subcommand)]
    Upgrade(Upgrade),
}

#[derive(Args, Debug)]
pub(crate) struct Data {
    /// The folder that holds everything: log, index, objects, keys. Example: --data /var/lib/evalgrid
    #[arg(long, value_name = "DIR", default_value = "evalgrid-data")]
    pub(crate) data: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct HttpListen {
    /// Where the HTTP API listens. Example: --http 0.0.0.0:8700
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8700")]
    pub(crate) http: SocketAddr,
}

#[derive(Args, Debug)]
pub(crate) struct GrpcListen {
    /// Where the scheduler listens for workers, the API and clients (gRPC, without TLS). Example: --grpc 10.0.0.5:8701
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8701")]
    pub(crate) grpc: SocketAddr,
}

#[derive(Args, Debug)]
pub(crate) struct SchedulerFlags {
    /// How long a silent worker keeps its trials before others may take them. Example: --lease 30s
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) lease: Duration,
    /// How long an interrupted trial waits for the machine that still has its sandbox. Example: --affinity-grace 5m
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration)]
    pub(crate) affinity_grace: Duration,
    /// How much log may gather before the state is written down as a snapshot and the log is cut behind it. Example: --snapshot-every 16MiB
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size)]
    pub(crate) snapshot_every: u64,
    /// Sandbox names of requests and what runs them here; by default e2b runs on this machine. Example: --sandbox-map e2b=bubblewrap,daytona=bubblewrap
    #[arg(long, value_name = "NAME=PROVIDER", value_delimiter = ',', value_parser = mapping)]
    pub(crate) sandbox_map: Vec<(String, String)>,
    /// Variables of this process that profiles may ask for, beside the known keys of agents; none by default. Example: --variables NPM_TOKEN,SENTRY_DSN
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) variables: Vec<String>,
    /// Agents without a package that executors elsewhere have by --harness-binary, so that they may be asked for; none by default. Example: --own-harnesses cursor
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = harness::name)]
    pub(crate) own_harnesses: Vec<evalgrid_domain::request::Harness>,
    /// How fast a provider's sandboxes may be made (per second, and at once), how many may be on their way, and how many may live; no limit by default. Example: --provider-limit e2b=2:10:20:100
    #[arg(long, value_name = "NAME=RATE:BURST:STARTING:LIVING", value_delimiter = ',', value_parser = provider_limit)]
    pub(crate) provider_limit: Vec<(String, ProviderLimits)>,
    /// How many trials may run at once on a model key, which is the harness and the model's name up to its first slash; no limit by default. Example: --model-limit claude/anthropic=20
    #[arg(long, value_name = "NAME=N", value_delimiter = ',', value_parser = model_limit)]
    pub(crate) model_limit: Vec<(String, u32)>,
}

impl SchedulerFlags {
    /// Their defaults.
    pub(crate) fn default_for_demo() -> SchedulerFlags {
        SchedulerFlags {
            lease: Duration::from_secs(15),
            affinity_grace: Duration::from_secs(60),
            snapshot_every: evalgrid_scheduler::SNAPSHOT_BYTES,
            sandbox_map: Vec::new(),
            variables: Vec::new(),
            own_harnesses: Vec::new(),
            provider_limit: Vec::new(),
            model_limit: Vec::new(),
        }
    }
}

/// Several schedulers, of which one is active, over a log in Redis.
#[derive(Args, Debug)]
pub(crate) struct CellFlags {
    /// The Redis that holds the log, for several schedulers of which one is active; by default the log is in --data and there is one scheduler. Also redis-sentinel://HOST:PORT,…/NAME and redis-cluster://HOST:PORT,…. Example: --store redis://10.0.0.9:6379
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
    /// The name of the cell in that Redis: schedulers of one cell share it. Example: --cell-name eu-1
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub(crate) cell_name: String,
    /// How the others reach this scheduler; by default its --grpc address. Example: --advertise http://10.0.0.5:8701
    #[arg(long, value_name = "URL")]
    pub(crate) advertise: Option<String>,
    /// Where evidence and results are kept, a folder or s3://BUCKET/PREFIX (credentials from the usual AWS_* variables); by default in --data. With --store all schedulers of the cell must share it. Example: --objects /mnt/shared/evalgrid
    #[arg(long, value_name = "PLACE")]
    pub(crate) objects: Option<String>,
    /// How long the active scheduler may be silent before a standby takes over; the same for the whole cell. Example: --redis-lease 5s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration)]
    pub(crate) redis_lease: Duration,
    /// Replicas of the Redis that must have a record before it is acknowledged. Example: --redis-replicas 1
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(crate) redis_replicas: u32,
    /// Put up with appendfsync everysec, which can lose two seconds of acknowledged records. Example: --redis-allow-everysec
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        action = ArgAction::Set, value_parser = BoolishValueParser::new()
    )]
    pub(crate) redis_allow_everysec: bool,
    /// Vouch for a managed Redis that does not show its settings: it has an append-only file, always synced, and evicts nothing. Example: --redis-assume-durable
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        action = ArgAction::Set, value_parser = BoolishValueParser::new()
    )]
    pub(crate) redis_assume_durable: bool,
    /// The workers' token; by default it is made up and kept in --data. The same for the whole cell. Better given as a variable. Example: EVALGRID_WORKER_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) worker_token: Option<String>,
    /// The operator's token; by default it is made up and kept in --data. The same for the whole cell. Better given as a variable. Example: EVALGRID_ADMIN_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) admin_token: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ExecutorFlags {
    /// How many trials run at once; by default 4 per processor, at least 4. Example: --slots 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) slots: Option<u32>,
    /// How many minutes the sandbox of a trial that did not pass stays, for `sandboxes enter`; 0: it is destroyed at once. Example: --keep-failed 30
    #[arg(long, value_name = "MINUTES", default_value = "0", value_parser = clap::value_parser!(u64).range(0..=1_440))]
    pub(crate) keep_failed: u64,
    #[command(flatten)]
    pub(crate) sandboxes: SandboxFlags,
}

/// The sandboxes of a worker, and the agents in them.
#[derive(Args, Debug)]
pub(crate) struct SandboxFlags {
    /// Let agents run as bare processes, which protects this machine from nothing that an agent does. Example: --enable-process-sandbox
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        action = ArgAction::Set, value_parser = BoolishValueParser::new()
    )]
    pub(crate) enable_process_sandbox: bool,
    /// What isolated sandboxes may reach: host (all that this machine does; agents need their models), off, or a list. Example: --sandbox-network allow=api.openai.com:443,localhost:8080
    #[arg(long, value_name = "NETWORK", default_value = "host")]
    pub(crate) sandbox_network: Network,
    /// Whether Docker sandboxes are offered: auto (where a daemon answers and has the image), off, or the daemon's socket. Example: --docker unix:///var/run/docker.sock
    #[arg(long, value_name = "DOCKER", default_value = "auto", value_parser = docker)]
    pub(crate) docker: DockerPolicy,
    /// The image of Docker sandboxes, by tag or digest; docs/sandboxes.md tells how to build it. Example: --docker-image my-agents:7
    #[arg(long, value_name = "IMAGE", default_value = "evalgrid/agents:1")]
    pub(crate) docker_image: String,
    /// A Dockerfile that the image is built from instead, once for each content, without files to copy; none by default. Example: --docker-file agents.Dockerfile
    #[arg(long, value_name = "FILE")]
    pub(crate) docker_file: Option<PathBuf>,
    /// Processors that each Docker sandbox may keep busy; no limit by default. Example: --docker-cpus 1.5
    #[arg(long, value_name = "N", value_parser = cpus)]
    pub(crate) docker_cpus: Option<f64>,
    /// Memory that a sandbox may use, where this machine can limit it, in MiB. Example: --sandbox-memory 8192
    #[arg(long, value_name = "MIB", default_value = "4096", value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub(crate) sandbox_memory: u64,
    /// Processes and threads that a sandbox may have, where this machine can limit it. Example: --sandbox-pids 4096
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub(crate) sandbox_pids: u32,
    #[command(flatten)]
    pub(crate) tools: ToolFlags,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: evalgrid demo")]
pub(crate) struct Demo {
    #[command(flatten)]
    pub(crate) executor: ExecutorFlags,
    #[command(flatten)]
    pub(crate) judges: JudgeFlags,
}

/// The judge runner in a process with other roles.
#[derive(Args, Debug)]
pub(crate) struct JudgeFlags {
    /// How many judges and simulated people are asked at once; 0: none here, for judge runners elsewhere. Example: --judge-slots 64
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub(crate) judge_slots: u32,
    #[command(flatten)]
    pub(crate) models: ModelFlags,
}

/// How models are called that judge or play people.
#[derive(Args, Debug)]
pub(crate) struct ModelFlags {
    /// The HTTP proxy through which models are called that judge or play people; none by default. Example: --model-proxy http://10.0.0.9:3128
    #[arg(long, value_name = "URL")]
    pub(crate) model_proxy: Option<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: evalgrid serve --data /var/lib/evalgrid --http 0.0.0.0:8700")]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) data: Data,
    #[command(flatten)]
    pub(crate) http: HttpListen,
    #[command(flatten)]
    pub(crate) grpc: GrpcListen,
    #[command(flatten)]
    pub(crate) scheduler: SchedulerFlags,
    #[command(flatten)]
    pub(crate) executor: ExecutorFlags,
    #[command(flatten)]
    pub(crate) judges: JudgeFlags,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: evalgrid scheduler --data /var/lib/evalgrid --grpc 10.0.0.5:8701")]
pub(crate) struct SchedulerRole {
    #[command(flatten)]
    pub(crate) data: Data,
    #[command(flatten)]
    pub(crate) grpc: GrpcListen,
    #[command(flatten)]
    pub(crate) scheduler: SchedulerFlags,
    #[command(flatten)]
    pub(crate) cell: CellFlags,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: EVALGRID_WORKER_TOKEN=… evalgrid executor --scheduler http://10.0.0.5:8701 --work /var/lib/evalgrid-work")]
pub(crate) struct ExecutorRole {
    /// The executor's own folder, where sandboxes live. Example: --work /var/lib/evalgrid-work
    #[arg(long, value_name = "DIR", default_value = "evalgrid-work")]
    pub(crate) work: PathBuf,
    #[command(flatten)]
    pub(crate) scheduler: SchedulerAddress,
    /// The workers' token; by default the file worker-token in --data. Better given as a variable. Example: EVALGRID_WORKER_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) worker_token: Option<String>,
    #[command(flatten)]
    pub(crate) data: Data,
    #[command(flatten)]
    pub(crate) executor: ExecutorFlags,
}

#[derive(Args, Debug)]
#[command(
    after_help = "Example: EVALGRID_WORKER_TOKEN=… evalgrid judge-runner --scheduler http://10.0.0.5:8701 --work /var/lib/evalgrid-judges"
)]
pub(crate) struct JudgeRunnerRole {
    /// The judge runner's own folder, where its sandboxes live. Example: --work /var/lib/evalgrid-judges
    #[arg(long, value_name = "DIR", default_value = "evalgrid-judges")]
    pub(crate) work: PathBuf,
    #[command(flatten)]
    pub(crate) scheduler: SchedulerAddress,
    /// The workers' token; by default the file worker-token in --data. Better given as a variable. Example: EVALGRID_WORKER_TOKEN=…
    #[arg(long, value_name = "TOKEN")]
    pub(crate) worker_token: Option<String>,
    #[command(flatten)]
    pub(crate) data: Data,
    /// How many judges and simulated people are asked at once. Example: --slots 64
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) slots: u32,
    #[command(flatten)]
    pub(crate) models: ModelFlags,
    #[command(flatten)]
    pub(crate) sandboxes: SandboxFlags,
}

/// How a client finds the server, and says who it is.
#[derive(Args, Debug)]
pub(crate) struct Client {
    #[command(flatten)]
    pub(crate) scheduler: SchedulerAddress,
    /// An API key; by default the file api-key in --data. Better given as a variable. Example: EVALGRID_API_KEY=anp_…
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    #[command(flatten)]
    pub(crate) data: Data,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Log {
    /// Check every record of the log.
    #[command(after_help = "Example: evalgrid log verify --data /var/lib/evalgrid")]
    Verify(Data),
    /// Print every event, one per line.
    #[command(after_help = "Example: evalgrid log dump --data /var/lib/evalgrid | less")]
    Dump(Data),
    /// Cut a log that is damaged in the middle before the damage. Shows what that would lose, and does it with --yes only.
    #[command(after_help = "Example: evalgrid log repair --data /var/lib/evalgrid")]
    Repair {
        #[command(flatten)]
        data: Data,
        /// Do it, and keep what is taken out in a folder `damaged-N` beside the segments; by default nothing is changed. Example: --yes
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Upgrade {
    /// Write the newest format from now on. Until then, a server writes what the version before can read, so that you can go back to it.
    #[command(after_help = "Example: evalgrid upgrade finalize --data /var/lib/evalgrid")]
    Finalize(Data),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Index {
    /// Make the index anew from the log.
    #[command(after_help = "Example: evalgrid index rebuild --data /var/lib/evalgrid")]
    Rebuild(Data),
}

/// The longest duration that a flag takes: a day. Longer ones are typing errors.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// A snapshot costs as much as the state is big: more often than this it would be made all the time, and more rarely a start takes minutes.
const SNAPSHOT_EVERY: std::ops::RangeInclusive<u64> = 64 << 10..=16 << 30;

/// `500ms`, `15s`, `2m`, `1h`.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let wrong = || "expected a number with ms, s, m or h, such as 15s".to_owned();
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let scale = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    let duration = Duration::from_millis(number.saturating_mul(scale));
    if duration.is_zero() || duration > LONGEST {
        return Err("expected more than zero and at most 24h".to_owned());
    }
    Ok(duration)
}

/// In bytes.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let scale: Option<u64> = match unit {
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    };
    let size = number
        .parse::<u64>()
        .ok()
        .zip(scale)
        .and_then(|(number, scale)| number.checked_mul(scale));
    let size = size.ok_or("expected a number with KiB, MiB or GiB, such as 64MiB")?;
    if !SNAPSHOT_EVERY.contains(&size) {
        return Err("expected at least 64KiB and at most 16GiB".to_owned());
    }
    Ok(size)
}

/// From 0 to 1.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
    rate.ok_or_else(|| "expected a number from 0 to 1, such as 0.9".to_owned())
}

fn docker(text: &str) -> Result<DockerPolicy, String> {
    match (text, text.strip_prefix("unix://")) {
        ("auto", _) => Ok(DockerPolicy::Auto),
        ("off", _) => Ok(DockerPolicy::Off),
        (_, Some(path)) if path.starts_with('/') => Ok(DockerPolicy::At(path.into())),
        _ => Err("expected auto, off, or unix:///PATH of a daemon on this machine".to_owned()),
    }
}

fn cpus(text: &str) -> Result<f64, String> {
    let cpus = text.parse().ok().filter(|cpus| (0.01..=1024.0).contains(cpus));
    cpus.ok_or_else(|| "expected a number from 0.01 to 1024, such as 1.5".to_owned())
}

fn mapping(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, provider)) if !name.is_empty() && !provider.is_empty() => Ok((name.to_owned(), provider.to_owned())),
        _ => Err("expected NAME=PROVIDER, such as e2b=bubblewrap".to_owned()),
    }
}

fn provider_limit(text: &str) -> Result<(String, ProviderLimits), String> {
    let wrong = || {
        format!(
            "expected NAME=RATE:BURST:STARTING:LIVING, such as e2b=2:10:20:100; a rate from 0.001 to 1000, a burst up to {MAX_CREATE_BURST}, and none of them 0"
        )
    };
    let (name, limits) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(wrong)?;
    let [rate, counts @ ..] = &limits.split(':').collect::<Vec<_>>()[..] else {
        return Err(wrong());
    };
    let counts: Option<Vec<u32>> = counts.iter().map(|count| count.parse().ok().filter(|count| *count > 0)).collect();
    match (rate.parse(), counts.as_deref()) {
        (Ok(create_per_second), Some(&[create_burst, max_starting, max_living]))
            if (0.001..=1_000.0).contains(&create_per_second) && create_burst <= MAX_CREATE_BURST =>
        {
            let limits = ProviderLimits {
                create_per_second,
                create_burst,
                max_starting,
                max_living,
            };
            Ok((name.to_owned(), limits))
        }
        _ => Err(wrong()),
    }
}

fn model_limit(text: &str) -> Result<(String, u32), String> {
    let parse = || {
        let (name, count) = text.rsplit_once('=')?;
        let count = count.parse().ok().filter(|count| *count > 0)?;
        // A key without a harness in front matches nothing, and would be a limit that never limits.
        name.contains('/').then(|| (name.to_owned(), count))
    };
    parse().ok_or_else(|| "expected HARNESS/MODEL=N, such as claude/anthropic=20".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in [("500ms", 500), ("15s", 15_000), ("2m", 120_000), ("24h", 86_400_000)] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "",
            "s",
            "15",
            "15 s",
            "-1s",
            "0s",
            "25h",
            "1.5s",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("64KiB", Some(65_536)),
            ("64MiB", Some(67_108_864)),
            ("16GiB", Some(17_179_869_184)),
        ] {
            assert_eq!(size(text).ok(), bytes, "{text}");
        }
        for text in ["", "64", "MiB", "64MB", "-1MiB", "63KiB", "17GiB", "1.5MiB", "99999999999999GiB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rates() {
        for (text, expected) in [
            ("0", Some(0.0)),
            ("0.9", Some(0.9)),
            ("1", Some(1.0)),
            ("1.1", None),
            ("-0.1", None),
            ("NaN", None),
            ("90%", None),
        ] {
            assert_eq!(rate(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn mappings() {
        assert_eq!(mapping("e2b=process"), Ok(("e2b".into(), "process".into())));
        for text in ["", "e2b", "=process", "e2b="] {
            assert!(mapping(text).is_err(), "{text}");
        }
    }
    #[test]
    fn limits() {
        let expected = ProviderLimits {
            create_per_second: 0.5,
            create_burst: 10,
            max_starting: 20,
            max_living: 100,
        };
        assert_eq!(provider_limit("e2b=0.5:10:20:100"), Ok(("e2b".into(), expected)));
        for text in [
            "",
            "e2b",
            "=1:1:1:1",
            "e2b=1:1:1",
            "e2b=1:1:1:1:1",
            "e2b=0:1:1:1",
            "e2b=1:0:1:1",
            "e2b=inf:1:1:1",
            "e2b=NaN:1:1:1",
            "e2b=1:1025:1:1",
            "e2b=1:-1:1:1",
        ] {
            assert!(provider_limit(text).is_err(), "{text}");
        }
        assert_eq!(model_limit("claude/anthropic=20"), Ok(("claude/anthropic".into(), 20)));
        for text in ["", "claude/anthropic", "claude/anthropic=0", "claude=3", "claude/anthropic=x"] {
            assert!(model_limit(text).is_err(), "{text}");
        }
    }
}
