//! The binary `evalgrid`: demo, serve, one subcommand per role, and the client commands. No rule of the product lives here.

mod batch;
mod client;
mod config;
mod demo;
mod events;
mod failure;
mod grid;
mod harness;
mod http;
mod judge;
mod keys;
mod objects;
mod offline;
mod options;
mod organizations;
mod output;
mod progress;
mod reasons;
mod regrade;
mod roles;
mod sandboxes;
mod stop;
mod trial;
mod warnings;

use std::{ffi::OsString, process::ExitCode};

use tracing_subscriber::EnvFilter;

use crate::{
    failure::Failure,
    options::{Cli, Command, Global, LogFormat},
};

/// Everything behind `main`: reads the command line, runs it, tells of a failure in plain words.
pub fn main() -> ExitCode {
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .collect();
    let args: Vec<OsString> = std::env::args_os().collect();
    let odd = config::unknown_variables(&variables);
    match config::read(args, &variables).and_then(|cli| run(cli, &odd)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}

fn run(cli: Cli, odd_variables: &[String]) -> Result<(), Failure> {
    // The output of these is their progress; the log of a healthy server would only get in its way.
    let quieter = matches!(cli.command, Command::Demo(_) | Command::Judge(_)) && cli.global.log == options::DEFAULT_LOG;
    start_log(&cli.global, quieter.then_some("warn"))?;
    for name in odd_variables {
        tracing::warn!("{name} is the variable of no flag");
    }
    match cli.command {
        Command::Log(options::Log::Verify(data)) => return offline::verify(&data.data),
        Command::Log(options::Log::Dump(data)) => return offline::dump(&data.data),
        Command::Log(options::Log::Repair { data, yes }) => return offline::repair(&data.data, yes),
        Command::Index(options::Index::Rebuild(data)) => return offline::rebuild(&data.data),
        Command::Upgrade(options::Upgrade::Finalize(data)) => return offline::finalize(&data.data),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|error| {
        Failure::new(
            format!("the runtime could not be started: {error}"),
            "Check the limits of this process (ulimit -a).",
        )
    })?;
    let result = runtime.block_on(async {
        match cli.command {
            Command::Demo(demo) => demo::run(demo).await,
            Command::Serve(serve) => roles::serve(serve).await,
            Command::Scheduler(role) => roles::scheduler(role).await,
            Command::Executor(role) => roles::executor(role).await,
            Command::JudgeRunner(role) => roles::judge_runner(role).await,
            Command::Api(role) => roles::api(role).await,
            Command::Harness(command) => harness::run(command).await,
            Command::Judge(command) => judge::run(command).await,
            Command::Batch(command) => batch::run(command).await,
            Command::Trial(command) => trial::run(command).await,
            Command::Keys(command) => keys::run(command).await,
            Command::Organizations(command) => organizations::run(command).await,
            Command::Sandboxes(command) => sandboxes::run(command).await,
            Command::Objects(command) => objects::run(command).await,
            Command::Log(_) | Command::Index(_) | Command::Upgrade(_) => unreachable!("handled above, without a runtime"),
        }
    });
    // What still runs has had its time to end; a blocked thread must not hold the process.
    runtime.shutdown_background();
    result
}

fn start_log(global: &Global, filter: Option<&str>) -> Result<(), Failure> {
    let filter = filter.unwrap_or(&global.log);
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Failure::usage(
            format!("--log {filter}: {error}"),
            "Expected a level such as info, or target=level,target=level.",
        )
    })?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match global.log_format {
        LogFormat::Text => subscriber.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => subscriber.json().init(),
    }
    Ok(())
}
