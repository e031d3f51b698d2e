//! The roles as long-running commands: each alone, or all in one process that talk to each other over loopback.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use evalgrid_api::{ApiOptions, CellAddresses};
use evalgrid_domain::{credential, provider, request::Harness};
use evalgrid_harness::Source;
use evalgrid_judge_runner::{JudgeRunnerError, JudgeRunnerOptions};
use evalgrid_scheduler::{CellOptions, OpenError, Scheduler, SchedulerOptions, Tokens};
use evalgrid_store::{
    IndexError, LogError,
    redis::{RedisOptions, RedisUrlError},
};
use evalgrid_worker::{ProcessPolicy, WorkerError, WorkerOptions};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};

pub(crate) use self::workers::{bubblewrap_works, host_options};
use self::workers::{docker_works, executor_options, http_options, process_policy, worker_options};
use crate::{Failure, client, options, output, stop};

mod workers;

/// Below the data folder: where the executor of `serve` lives.
pub(crate) const WORK: &str = "work";
/// Below the data folder: where the judge runner of `serve` lives.
const JUDGES: &str = "judges";
/// What to do where no sandbox works.
pub(crate) const NO_SANDBOX: &str =
    "Install bubblewrap; or, where agents are trusted as much as you are, let them run as plain processes with --enable-process-sandbox.";

/// `serve`.
pub(crate) async fn serve(options: options::Serve) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let grpc = listen(options.grpc.grpc, "--grpc").await?;
    let http = listen(options.http.http, "--http").await?;
    let sandboxes = &options.executor.sandboxes;
    let policy = process_policy(sandboxes);
    let mut isolated = Vec::new();
    let bubblewrap = bubblewrap_works(sandboxes).await;
    isolated.extend(bubblewrap.is_ok().then_some("bubblewrap"));
    isolated.extend(docker_works(sandboxes).await?.then_some("docker"));
    if let (Err(reason), true, ProcessPolicy::Off) = (&bubblewrap, isolated.is_empty(), policy) {
        return Err(Failure::new(format!("no sandbox works here: {reason}"), NO_SANDBOX));
    }
    let all = All::start(
        &options.data.data,
        grpc,
        http,
        &options.scheduler,
        Workers {
            executor: &options.executor,
            judges: &options.judges,
            policy,
            isolated: &isolated,
        },
    )
    .await?;
    let data = all.data.display();
    let key_file = all.data.join("api-key");
    let mut text = format!(
        "Evalgrid runs.\n  HTTP API  {}\n  gRPC      {}\n  data      {data}\n",
        all.http, all.grpc
    );
    match &all.first_key {
        Some(key) => text.push_str(&format!(
            "  API key   {key}\n            shown this once; it is kept in {} (mode 0600)\n",
            key_file.display()
        )),
        None => text.push_str(&format!("  API key   the first one is kept in {}\n", key_file.display())),
    }
    text.push_str(&format!(
        "Try it:\n  {} batch start examples/hello/request.json --watch --data {data} --scheduler {}\n",
        output::program(),
        all.grpc
    ));
    // A server does not end because nobody reads its first words.
    let _ = output::print(&text);
    all.run(stopped).await
}

/// `scheduler`.
pub(crate) async fn scheduler(options: options::SchedulerRole) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let listener = listen(options.grpc.grpc, "--grpc").await?;
    let address = local(&listener)?;
    let cell = cell(&options.cell, &url(address))?;
    let shared = cell.is_some();
    let scheduler = open(&options.data.data, &options.scheduler, &["bubblewrap"], |choices| {
        choices.objects = options.cell.objects.clone();
        let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        choices.aws = variables.filter(|(name, _)| name.starts_with("AWS_")).collect();
        choices.cell = cell;
        choices.tokens = Tokens {
            admin: options.cell.admin_token.clone(),
            worker: options.cell.worker_token.clone(),
        };
    })
    .await?;
    let data = absolute(&options.data.data);
    let mut text = format!("The scheduler runs.\n  gRPC  {}\n  data  {}\n", url(address), data.display());
    if let Some(key) = scheduler.first_key() {
        text.push_str(&format!(
            "  API key, shown this once: {key} (kept in {})\n",
            data.join("api-key").display()
        ));
    }
    let token = match (shared, &options.cell.worker_token) {
        (false, None) => format!("$(cat {})", data.join("worker-token").display()),
        _ => "…".to_owned(),
    };
    if shared {
        text.push_str(&format!("  log   in Redis, cell {}\n", options.cell.cell_name));
    }
    text.push_str(&format!(
        "Next:\n  EVALGRID_WORKER_TOKEN={token} {} executor --scheduler {}\n",
        output::program(),
        url(address)
    ));
    let _ = output::print(&text);
    scheduler.serve(listener, stopped).await.map_err(|error| ended("scheduler", &error))
}

/// `executor`.
pub(crate) async fn executor(options: options::ExecutorRole) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let token = worker_token(options.worker_token, &options.data.data)?;
    let policy = process_policy(&options.executor.sandboxes);
    let executor = executor_options(options.work, options.scheduler.schedulers, token, &options.executor, policy)?;
    evalgrid_executor::run(executor, stopped)
        .await
        .map_err(|error| executor_ended(&error))
}

/// `judge-runner`.
pub(crate) async fn judge_runner(options: options::JudgeRunnerRole) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let token = worker_token(options.worker_token, &options.data.data)?;
    let flags = &options.sandboxes;
    let worker = worker_options(
        options.work,
        options.scheduler.schedulers,
        token,
        options.slots,
        flags,
        process_policy(flags),
    )?;
    let judge_runner = JudgeRunnerOptions {
        worker,
        http: http_options(&options.models),
    };
    evalgrid_judge_runner::run(judge_runner, stopped)
        .await
        .map_err(|error| judge_runner_ended(&error))
}

/// The workers' token as given, or as the scheduler on this machine keeps it.
fn worker_token(given: Option<String>, data: &Path) -> Result<String, Failure> {
    match given {
        Some(token) => Ok(token),
        None => client::secret(&data.join("worker-token"), "the workers' token", "EVALGRID_WORKER_TOKEN"),
    }
}

/// `api`.
pub(crate) async fn api(options: options::ApiRole) -> Result<(), Failure> {
    let stopped = stop::on_signal()?;
    let listener = listen(options.http.http, "--http").await?;
    let _ = output::line(&format!("The API runs at {}.", url(local(&listener)?)));
    let api = match options.cells.is_empty() {
        true => ApiOptions::one_cell(options.scheduler.schedulers),
        false => ApiOptions {
            cells: cells(&options.cells)?,
        },
    };
    evalgrid_api::serve(listener, api, stopped)
        .await
        .map_err(|error| ended("API", &error))
}

/// The cells in a list of `NAME=URL` and of more URLs of the cell before.
fn cells(given: &[String]) -> Result<Vec<CellAddresses>, Failure> {
    let mut cells: Vec<CellAddresses> = Vec::new();
    for text in given {
        let named = text.split_once('=').filter(|(name, _)| !name.contains(':'));
        match (named, cells.last_mut()) {
            (Some((name, url)), _) if !name.is_empty() => cells.push(CellAddresses {
                name: name.to_owned(),
                schedulers: vec![url.to_owned()],
            }),
            (None, Some(cell)) => cell.schedulers.push(text.clone()),
            _ => {
                return Err(Failure::usage(
                    format!("--cell {text}: a cell without a name"),
                    "Expected --cell NAME=http://host:port, and more schedulers of it with commas between.",
                ));
            }
        }
    }
    Ok(cells)
}

/// The workers of [`All`].
pub(crate) struct Workers<'a> {
    pub(crate) executor: &'a options::ExecutorFlags,
    pub(crate) judges: &'a options::JudgeFlags,
    pub(crate) policy: ProcessPolicy,
    /// Providers that isolate and work here; the first runs what asks for e2b.
    pub(crate) isolated: &'a [&'static str],
}

/// All roles in this process.
pub(crate) struct All {
    pub(crate) data: PathBuf,
    pub(crate) http: String,
    pub(crate) grpc: String,
    pub(crate) first_key: Option<String>,
    stop_front: watch::Sender<bool>,
    stop_scheduler: watch::Sender<bool>,
    front: JoinSet<Result<(), Failure>>,
    scheduler: JoinSet<Result<(), Failure>>,
}

impl All {
    /// Opens the data folder and starts the roles on the listeners.
    pub(crate) async fn start(
        data: &Path,
        grpc: TcpListener,
        http: TcpListener,
        scheduler: &options::SchedulerFlags,
        workers: Workers<'_>,
    ) -> Result<All, Failure> {
        let Workers {
            executor,
            judges,
            policy,
            isolated,
        } = workers;
        let mut providers = isolated.to_vec();
        if isolated.is_empty() || policy == ProcessPolicy::On {
            providers.push("process");
        }
        let (grpc_url, http_url) = (url(local(&grpc)?), url(local(&http)?));
        for (name, provider) in scheduler
            .sandbox_map
            .iter()
            .filter(|(_, provider)| !providers.contains(&provider.as_str()))
        {
            let offered = providers.join(", ");
            tracing::warn!(
                "--sandbox-map lets {name} run on {provider}, which does not work here ({offered} does): its trials wait for another executor"
            );
        }
        let own = executor.sandboxes.tools.harness_binary.iter().map(|(harness, _)| harness);
        let own = harnesses(scheduler.own_harnesses.iter().chain(own));
        let opened = open(data, scheduler, &providers, |choices| choices.harnesses = own).await?;
        let data = absolute(data);
        let token = client::secret(&data.join("worker-token"), "the workers' token", "EVALGRID_WORKER_TOKEN")?;
        let schedulers = vec![grpc_url.clone()];
        let executor = executor_options(data.join(WORK), schedulers.clone(), token.clone(), executor, policy)?;
        let judge_runner = (judges.judge_slots > 0).then(|| JudgeRunnerOptions {
            worker: WorkerOptions {
                work: data.join(JUDGES),
                slots: judges.judge_slots,
                // Its agents are the executor's: installed once.
                ..executor.worker.clone()
            },
            http: http_options(&judges.models),
        });
        let (stop_front, front_stopped) = watch::channel(false);
        let (stop_scheduler, scheduler_stopped) = watch::channel(false);
        let first_key = opened.first_key().map(str::to_owned);

        let mut scheduler = JoinSet::new();
        scheduler.spawn(async move {
            opened
                .serve(grpc, scheduler_stopped)
                .await
                .map_err(|error| ended("scheduler", &error))
        });
        let mut front = JoinSet::new();
        let api = ApiOptions::one_cell(vec![grpc_url.clone()]);
        let stopped = front_stopped.clone();
        front.spawn(async move { evalgrid_api::serve(http, api, stopped).await.map_err(|error| ended("API", &error)) });
        if let Some(judge_runner) = judge_runner {
            let stopped = front_stopped.clone();
            front.spawn(async move {
                evalgrid_judge_runner::run(judge_runner, stopped)
                    .await
                    .map_err(|error| judge_runner_ended(&error))
            });
        }
        front.spawn(async move {
            evalgrid_executor::run(executor, front_stopped)
                .await
                .map_err(|error| executor_ended(&error))
        });
        Ok(All {
            data,
            http: http_url,
            grpc: grpc_url,
            first_key,
            stop_front,
            stop_scheduler,
            front,
            scheduler,
        })
    }

    /// Runs until `stopped` says true, or a role ends by itself, which is a failure.
    pub(crate) async fn run(mut self, mut stopped: watch::Receiver<bool>) -> Result<(), Failure> {
        let first = tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
            first = self.ended() => first,
        };
        let rest = self.stop().await;
        first.and(rest)
    }

    /// Waits until a role ends by itself.
    pub(crate) async fn ended(&mut self) -> Result<(), Failure> {
        let first = tokio::select! {
            Some(first) = self.front.join_next() => first,
            Some(first) = self.scheduler.join_next() => first,
        };
        match first {
            Ok(Err(failure)) => Err(failure),
            Ok(Ok(())) => Err(Failure::new("a role ended by itself", "See the log above for the reason.")),
            Err(error) => Err(Failure::new(
                format!("a role broke: {error}"),
                "This is a defect of evalgrid; please report it.",
            )),
        }
    }

    /// Ends the roles: first those that still have something to say to the scheduler.
    pub(crate) async fn stop(mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        for (stop, roles) in [(self.stop_front, &mut self.front), (self.stop_scheduler, &mut self.scheduler)] {
            // Where nobody listens any more, there is nothing to stop.
            let _ = stop.send(true);
            while let Some(ended) = roles.join_next().await {
                result = result.and(ended.unwrap_or_else(|error| {
                    Err(Failure::new(
                        format!("a role broke: {error}"),
                        "This is a defect of evalgrid; please report it.",
                    ))
                }));
            }
        }
        result
    }
}

/// Opens a scheduler; `choose` changes what the flags for all schedulers do not say.
async fn open(
    data: &Path,
    flags: &options::SchedulerFlags,
    providers: &[&str],
    choose: impl FnOnce(&mut SchedulerOptions),
) -> Result<Scheduler, Failure> {
    let mut options = SchedulerOptions {
        data: data.to_owned(),
        lease: flags.lease,
        sandbox_map: sandbox_map(&flags.sandbox_map, providers),
        harnesses: harnesses(&flags.own_harnesses),
        affinity_grace: flags.affinity_grace,
        environment: environment(&flags.variables, |name| std::env::var(name).ok())?,
        cell: None,
        objects: None,
        aws: BTreeMap::new(),
        tokens: Tokens::default(),
        snapshot_bytes: flags.snapshot_every,
        limits: evalgrid_scheduler::Limits {
            providers: flags.provider_limit.iter().cloned().collect(),
            models: flags.model_limit.iter().cloned().collect(),
        },
    };
    choose(&mut options);
    let scheduler = Scheduler::open(options).await.map_err(|error| match error {
        OpenError::Log(LogError::InUse { .. }) | OpenError::Index(IndexError::InUse { .. }) => Failure::new(
            format!("another server uses {} already", data.display()),
            "Stop that one first, or name another folder with --data.",
        ),
        OpenError::Redis(error) => Failure::new(
            format!("the log's Redis cannot be used: {error}"),
            "Check --store, and that server's settings.",
        ),
        error @ OpenError::NotShared(_) => Failure::usage(error.to_string(), "docs/redis.md shows a whole cell."),
        error => Failure::new(
            error.to_string(),
            "Check the data folder (--data): the server must be able to read and write there.",
        ),
    })?;
    tracing::info!("{}", scheduler.recovery());
    Ok(scheduler)
}

/// The cell that the flags name, if they do.
fn cell(flags: &options::CellFlags, address: &str) -> Result<Option<CellOptions>, Failure> {
    let Some(store) = &flags.store else { return Ok(None) };
    let url = store
        .parse()
        .map_err(|error: RedisUrlError| Failure::usage(format!("--store: {error}"), "Example: --store redis://10.0.0.9:6379"))?;
    Ok(Some(CellOptions {
        url,
        cell: flags.cell_name.clone(),
        redis: RedisOptions {
            assume_durable: flags.redis_assume_durable,
            allow_everysec: flags.redis_allow_everysec,
            replicas: flags.redis_replicas,
            lease: flags.redis_lease,
        },
        advertise: flags.advertise.clone().unwrap_or_else(|| address.to_owned()),
    }))
}

/// Names that requests may use: each provider's own, and `e2b`, which a request gets that names none and which the first provider runs.
fn sandbox_map(given: &[(String, String)], providers: &[&str]) -> BTreeMap<String, String> {
    let mut map: BTreeMap<String, String> = providers.iter().map(|name| ((*name).to_owned(), (*name).to_owned())).collect();
    map.extend(providers.first().map(|first| ("e2b".to_owned(), (*first).to_owned())));
    map.extend(given.iter().cloned());
    let providers: Vec<_> = map.values().cloned().collect();
    for provider in providers {
        map.entry(provider.clone()).or_insert(provider);
    }
    map
}

/// Agents that can be asked for, by the version that executors install. The command harness has none that we could know.
///
/// `own`: programs that the operator has named. Of what version they are, only the executors know.
fn harnesses<'a>(own: impl IntoIterator<Item = &'a Harness>) -> BTreeMap<Harness, String> {
    let version = |name: &str| match evalgrid_harness::by_name(name)?.install() {
        None => Some("unknown"),
        Some(install) => (install.source != Source::Configured).then_some(install.version),
    };
    let all = Harness::ALL.iter();
    let mut all: BTreeMap<Harness, String> = all
        .filter_map(|(name, harness)| Some((*harness, version(name)?.to_owned())))
        .collect();
    for harness in own {
        all.entry(*harness).or_insert_with(|| "unknown".to_owned());
    }
    all
}

/// Values for what harnesses and models sign in with, which profiles may ask for too, and for the variables that the operator names, which must be there.
fn environment(named: &[String], read: impl Fn(&str) -> Option<String>) -> Result<BTreeMap<String, String>, Failure> {
    let mut values = BTreeMap::new();
    let harnesses = Harness::ALL.iter().flat_map(|(_, harness)| credential::method(*harness).fields);
    let harnesses = harnesses.map(|(name, field)| (*name, *field == "baseUrl"));
    let providers = provider::PROVIDERS.iter();
    let providers = providers.flat_map(|provider| [(provider.key, false), (provider.base_url_variable, true)]);
    let others = [(provider::USER_MODEL_VARIABLE, false)];
    for (name, is_url) in harnesses.chain(providers).chain(others) {
        let Some(value) = read(name).filter(|value| !value.is_empty()) else {
            continue;
        };
        // Agents tell such a mistake in words that lead elsewhere.
        if is_url && !["http://", "https://"].iter().any(|scheme| value.starts_with(scheme)) {
            return Err(Failure::usage(
                format!("{name} is not a URL: {value:?}"),
                format!("Set it to an address with its scheme, such as {name}=https://models.example.org/v1, or leave it out."),
            ));
        }
        values.insert(name.to_owned(), value);
    }
    for name in named {
        let value = read(name).ok_or_else(|| {
            Failure::usage(
                format!("--variables names {name}, which is not set"),
                format!("Set {name} for this process, or leave it out."),
            )
        })?;
        values.insert(name.clone(), value);
    }
    Ok(values)
}

/// Names of the sandboxes that the executor of [`All`] has on this machine.
pub(crate) fn sandboxes(data: &Path) -> Vec<String> {
    let folders = ["bubblewrap", "docker", "process"].map(|provider| data.join(WORK).join(provider));
    // A folder that cannot be read holds nothing that could be waited for.
    let entries = folders
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with('.')).collect()
}

/// A listener, or what to do about the address.
pub(crate) async fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "something else listens there".to_owned(),
            _ => error.to_string(),
        };
        Failure::new(
            format!("cannot listen at {address}: {why}"),
            format!("Choose another address with {flag}, or stop what listens there."),
        )
    })
}

fn local(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    listener
        .local_addr()
        .map_err(|error| Failure::new(format!("the listener has no address: {error}"), "Try again."))
}

/// How others on this machine reach a listener.
fn url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
        IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
    };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

/// Shown and handed to processes that work elsewhere, a path must not depend on where this process was started.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn executor_ended(error: &WorkerError) -> Failure {
    match error {
        WorkerError::NoSandbox(_) => Failure::new(error.to_string(), NO_SANDBOX),
        error => ended("executor", error),
    }
}

fn judge_runner_ended(error: &JudgeRunnerError) -> Failure {
    match error {
        JudgeRunnerError::Worker(WorkerError::NoSandbox(_)) => Failure::new(error.to_string(), NO_SANDBOX),
        error => ended("judge runner", error),
    }
}

fn ended(role: &str, error: &dyn std::error::Error) -> Failure {
    Failure::new(
        format!("the {role} has ended: {error}"),
        "See the log above for the reason, then start it again.",
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn providers_have_their_own_names() {
        fn check(given: &[(&str, &str)], providers: &[&str], expected: &[(&str, &str)]) {
            let own = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
                pairs
                    .iter()
                    .map(|(name, provider)| ((*name).to_owned(), (*provider).to_owned()))
                    .collect()
            };
            assert_eq!(sandbox_map(&own(given), providers), own(expected).into_iter().collect());
        }
        let bubblewrap = ("bubblewrap", "bubblewrap");
        let process = ("process", "process");
        check(&[], &["bubblewrap"], &[bubblewrap, ("e2b", "bubblewrap")]);
        check(&[], &["process"], &[("e2b", "process"), process]);
        check(&[], &["bubblewrap", "process"], &[bubblewrap, ("e2b", "bubblewrap"), process]);
        check(
            &[("e2b", "process"), ("modal", "bubblewrap")],
            &["bubblewrap"],
            &[bubblewrap, ("e2b", "process"), ("modal", "bubblewrap"), process],
        );
    }

    #[test]
    fn variables_come_from_the_environment() {
        let read = |name: &str| match name {
            "OPENAI_API_KEY" => Some("secret".to_owned()),
            "GEMINI_API_KEY" => Some(String::new()),
            "ANTHROPIC_BASE_URL" => Some("https://models.example.org".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        let names = |named: &[&str]| {
            let named: Vec<_> = named.iter().map(|name| (*name).to_owned()).collect();
            environment(&named, read).map(|values| values.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap(), ["ANTHROPIC_BASE_URL", "OPENAI_API_KEY"]);
        assert_eq!(names(&["EMPTY"]).unwrap(), ["ANTHROPIC_BASE_URL", "EMPTY", "OPENAI_API_KEY"]);
        let bare = |name: &str| (name == "OPENAI_BASE_URL").then(|| "localhost:80/v1".to_owned());
        assert!(environment(&[], bare).is_err_and(|failure| failure.to_string().contains("OPENAI_BASE_URL is not a URL")));
        assert!(names(&["MISSING"]).is_err_and(|failure| failure.to_string().contains("MISSING")));
    }

    #[test]
    fn addresses_that_others_can_use() {
        for (address, expected) in [
            ("127.0.0.1:80", "http://127.0.0.1:80"),
            ("0.0.0.0:80", "http://127.0.0.1:80"),
            ("[::]:80", "http://[::1]:80"),
            ("10.1.2.3:80", "http://10.1.2.3:80"),
        ] {
            assert_eq!(url(address.parse().unwrap()), expected);
        }
    }

    #[test]
    fn cells_by_name() {
        fn check(given: &[&str], expected: Option<&[(&str, &[&str])]>) {
            let given: Vec<_> = given.iter().map(|text| (*text).to_owned()).collect();
            let got = cells(&given).ok();
            let expected = expected.map(|cells| {
                let cell = |(name, urls): &(&str, &[&str])| CellAddresses {
                    name: (*name).to_owned(),
                    schedulers: urls.iter().map(|url| (*url).to_owned()).collect(),
                };
                cells.iter().map(cell).collect::<Vec<_>>()
            });
            assert_eq!(got, expected, "{given:?}");
        }
        check(
            &["eu=http://a:1", "http://b:1", "us=http://c:1"],
            Some(&[("eu", &["http://a:1", "http://b:1"]), ("us", &["http://c:1"])]),
        );
        check(&["http://a:1"], None);
        check(&["=http://a:1"], None);
    }
}
