//! `harness`: which agents there are on this host, and installing them ahead of time.

use std::{path::Path, time::Duration};

use evalgrid_domain::{outcome::humanise_duration, request::Harness};
use evalgrid_harness::{Install, Source};
use evalgrid_worker::{ToolOptions, ToolState, Tools};

use crate::{Failure, options, output, roles};

/// How often an install that runs says so.
const PROGRESS: Duration = Duration::from_secs(5);

pub(crate) async fn run(command: options::Harness) -> Result<(), Failure> {
    match command {
        options::Harness::List(host) => {
            let tools = tools(&host)?;
            let lines = Harness::ALL.iter().filter_map(|(name, _)| {
                let harness = evalgrid_harness::by_name(name)?;
                Some(harness.install().map_or_else(
                    || format!("{name:<10}the program of its profile\n"),
                    |install| line(&tools, install),
                ))
            });
            output::print(&format!("{}\n{}", tools.folder().display(), lines.collect::<String>()))
        }
        options::Harness::Install { names, host } => {
            let tools = tools(&host)?;
            for name in names {
                install(&tools, name, output::line).await?;
            }
            Ok(())
        }
    }
}

fn tools(host: &options::HostFlags) -> Result<Tools, Failure> {
    let options = options(&roles::absolute(&host.data.data).join(roles::WORK), &host.tools);
    Tools::new(options).map_err(|error| Failure::new(error.to_string(), "Check --tools and --harness-binary."))
}

/// What the flags of an executor with this work folder say.
pub(crate) fn options(work: &Path, flags: &options::ToolFlags) -> ToolOptions {
    let binaries = flags.harness_binary.iter();
    ToolOptions {
        folder: flags.tools.as_deref().map_or_else(|| work.join("tools"), roles::absolute),
        binaries: binaries
            .map(|(harness, path)| (harness.name().to_owned(), roles::absolute(path)))
            .collect(),
        any_version: flags.harness_any_version,
    }
}

fn line(tools: &Tools, install: &Install) -> String {
    let state = match tools.state(install) {
        ToolState::Installed(folder) => format!("installed in {}", folder.display()),
        ToolState::Own(path) => format!("your own: {}", path.display()),
        ToolState::Missing => format!("not installed ({})", package(install)),
        ToolState::NoProgram => format!("no package; name its program with --harness-binary {}=PATH", install.name),
    };
    let version = if install.version.is_empty() { "-" } else { install.version };
    format!("{:<10}{version:<10}{state}\n", install.name)
}

fn package(install: &Install) -> String {
    match install.source {
        Source::Npm { package } => format!("npm: {package}"),
        Source::PyPi { package, .. } => format!("PyPI: {package}"),
        Source::Configured => "no package".into(),
    }
}

/// Sees to it that the agent is on this host, and tells how that goes, line by line.
pub(crate) async fn install(tools: &Tools, harness: Harness, say: impl Fn(&str) -> Result<(), Failure>) -> Result<(), Failure> {
    let name = harness.name();
    let Some(install) = evalgrid_harness::by_name(name).and_then(|harness| harness.install()) else {
        return say(&format!("{name}: there is nothing to install"));
    };
    if tools.is_there(install) {
        say(&format!("{name} {}: checking what is there", install.version))?;
    } else {
        say(&format!("{name} {}: installing ({})", install.version, package(install)))?;
    }
    #[expect(clippy::disallowed_methods, reason = "a person wants to know how long it takes")]
    let began = std::time::Instant::now();
    let took = || humanise_duration(began.elapsed().as_secs() * 1000);
    let work = tools.ready(install);
    tokio::pin!(work);
    loop {
        tokio::select! {
            result = &mut work => {
                let next = "Is the package registry reachable? You may also put the folder there yourself: docs/harnesses.md.";
                result.map_err(|error| Failure::new(format!("{name}: {error}"), next))?;
                let state = line(tools, install);
                return say(&format!("{} ({})", state.trim_end(), took()));
            }
            () = tokio::time::sleep(PROGRESS) => say(&format!("{name}: {} so far", took()))?,
        }
    }
}
