//! Before the agent: the workspace's source, the profile's files, its install command.

use std::{collections::BTreeMap, time::Duration};

use evalgrid_domain::{outcome, redact::Redactor, request::Source};
use evalgrid_harness::{Install, Place, TextFile};
use evalgrid_sandbox::{Base, SandboxError, StepCommand, StepExit};
use serde::{Deserialize, Serialize};

use crate::{
    account::Account,
    layers::{Layers, Saved, hex, is_commit},
    output,
    source::Repository,
    trial::{Attempt, StepResult, Stop, called},
    turns,
};

/// A clone that takes longer hangs.
pub(crate) const CLONE_LIMIT: Duration = Duration::from_secs(300);
/// Installing what an agent needs, from slow mirrors.
pub(crate) const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// An instructions file that a system prompt is put before. No agent reads one that is longer.
const MAX_INSTRUCTIONS_BYTES: u64 = 1 << 20;

/// Files of a profile that were skipped, by name; more would hide the other diagnostics.
const MAX_SKIPPED_NAMED: usize = 20;

/// What a step before the agent records. A failure leaves the trial void.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SetUp {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
    /// That the repository was cloned at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    /// It was there already, in the base that the sandbox was made from.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    cached: bool,
    /// What it has made may stand for other trials: it has left nothing running and nothing to say. Not known of a recorded step.
    #[serde(skip)]
    clean: bool,
}

impl StepResult for SetUp {
    fn failed(&self) -> bool {
        self.failure.is_some()
    }
}

impl SetUp {
    fn done() -> Self {
        Self::default()
    }

    fn cached(commit: Option<String>) -> Self {
        Self {
            commit,
            cached: true,
            ..Self::default()
        }
    }

    fn failed(failure: String) -> Self {
        Self {
            failure: Some(failure),
            ..Self::default()
        }
    }
}

/// Runs the set-up steps, in order, until one fails.
pub(crate) async fn run(attempt: &Attempt<'_>, layers: &mut Layers, account: &mut Account) -> Result<(), Stop> {
    steps(attempt, layers, account).await?;
    layers.end();
    Ok(())
}

async fn steps(attempt: &Attempt<'_>, layers: &mut Layers, account: &mut Account) -> Result<(), Stop> {
    match attempt.source() {
        Source::Empty => {}
        Source::Files { .. } if layers.base().is_some() => {
            take(account, attempt.once("source", async { Ok(SetUp::cached(None)) }).await?);
        }
        Source::Files { files } => {
            let files = files
                .iter()
                .map(|(path, content)| (path.clone(), content.clone().into_bytes()))
                .collect();
            take(
                account,
                attempt
                    .once("source", write(attempt, Base::Workspace, files, false, "source's"))
                    .await?,
            );
        }
        Source::Repo { url, reference } => {
            let source = async {
                match layers.base() {
                    Some(base) => Ok(SetUp::cached(base.commit.clone())),
                    None => clone(attempt, url, reference.as_deref(), layers.commit()).await,
                }
            };
            let source = attempt.once("source", source).await?;
            layers.cloned(attempt, source.commit.as_deref(), source.clean).await;
            take(account, source);
        }
    }
    if let (false, Some(install)) = (account.is_void(), turns::install(attempt))
        && !attempt.worker.tools.is_ready(install)
    {
        take(account, attempt.once("harness.install", have(attempt, install)).await?);
    }
    if account.is_void() {
        return Ok(());
    }
    let (home, workspace): (Vec<_>, Vec<_>) = turns::files(attempt).into_iter().partition(|file| file.place == Place::Home);
    let profile: Vec<_> = profile_files(attempt, "home/").collect();
    if !home.is_empty() || !profile.is_empty() {
        take(
            account,
            attempt
                .once("profile.home", set_up(attempt, layers, Base::Home, profile, home))
                .await?,
        );
    }
    let profile: Vec<_> = profile_files(attempt, "workspace/").collect();
    if !account.is_void() && (!workspace.is_empty() || !profile.is_empty()) {
        take(
            account,
            attempt
                .once("profile.workspace", set_up(attempt, layers, Base::Workspace, profile, workspace))
                .await?,
        );
    }
    let skipped = attempt.profile().into_iter().flat_map(|profile| &profile.files);
    let skipped = skipped.filter(|(_, content)| content.contains('\0')).take(MAX_SKIPPED_NAMED);
    account.diagnostics(
        skipped
            .map(|(path, _)| {
                attempt
                    .redactor
                    .text(&format!(
                        "The profile's file {path} was skipped: it holds a NUL byte, and profiles are text"
                    ))
                    .into_owned()
            })
            .collect(),
    );
    // From here on processes of the trial run: whoever comes after a crash must not write files over what they have made of them.
    attempt.durable().await?;
    if let (false, Some(command)) = (account.is_void(), attempt.profile().and_then(|profile| profile.install.as_deref())) {
        let install = async {
            match layers.installed() {
                Some(_) => Ok(SetUp::cached(None)),
                None => install(attempt, command).await,
            }
        };
        let install = attempt.once("profile.install", install).await?;
        layers.was_installed(attempt, install.clean, || saved(attempt)).await;
        take(account, install);
    }
    Ok(())
}

fn take(account: &mut Account, result: SetUp) {
    account.source_commit(result.commit);
    account.diagnostics(result.diagnostics);
    if let Some(failure) = result.failure {
        account.void(failure, &[]);
    }
}

fn profile_files<'a>(attempt: &'a Attempt<'_>, folder: &'static str) -> impl Iterator<Item = (String, Vec<u8>)> + 'a {
    let files = attempt.profile().into_iter().flat_map(|profile| &profile.files);
    // Text only: what holds a NUL is a binary that got into the folder, and no reason to lose the trial.
    let files = files.filter(|(_, content)| !content.contains('\0'));
    files.filter_map(move |(path, content)| Some((path.strip_prefix(folder)?.to_owned(), content.clone().into_bytes())))
}

/// The agent's program, installed on this host by the first trial that needs it.
async fn have(attempt: &Attempt<'_>, install: &'static Install) -> Result<SetUp, Stop> {
    match attempt.worker.tools.ready(install).await {
        Ok(()) => Ok(SetUp::done()),
        Err(error) => Ok(SetUp::failed(outcome::harness_unavailable(
            install.name,
            &attempt.redactor.text(&error.to_string()),
        ))),
    }
}

/// Files that cannot be written are the request's fault (a file in the place of a folder), or the disk's: void either way.
async fn write(attempt: &Attempt<'_>, base: Base, files: Vec<(String, Vec<u8>)>, private: bool, whose: &str) -> Result<SetUp, Stop> {
    if files.is_empty() {
        return Ok(SetUp::done());
    }
    match called("write files", async {
        Ok(attempt.sandbox.write_files(base, &files, private).await)
    })
    .await?
    {
        Ok(()) => Ok(SetUp::done()),
        Err(SandboxError::Operation { reason, .. }) => {
            let reason = format!("The {whose} files could not be written: {}", attempt.redactor.text(&reason));
            Ok(SetUp::failed(outcome::failure_text(&reason)))
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes the profile's files, and the harness's where the profile has none of that name. What a harness puts before a file is put before
/// whatever is there by then.
async fn set_up(
    attempt: &Attempt<'_>,
    layers: &Layers,
    base: Base,
    mut profile: Vec<(String, Vec<u8>)>,
    harness: Vec<TextFile>,
) -> Result<SetUp, Stop> {
    let (mut prepended, mut whole): (Vec<_>, Vec<_>) = harness.into_iter().partition(|file| file.prepend);
    whole.retain(|file| profile.iter().all(|(path, _)| *path != file.path));
    let (private, mut open): (Vec<_>, Vec<_>) = whole.into_iter().partition(|file| file.private);
    // The install may have made something of what is there: only what is this trial's own is written.
    if let Some(installed) = layers.installed() {
        prepended.clear();
        profile.clear();
        open.retain(|file| installed.written.get(&named(file)) != Some(&hex(&file.content)));
    }
    let content = |files: Vec<TextFile>| files.into_iter().map(|file| (file.path, file.content)).collect::<Vec<_>>();
    let harness = format!("{} agent's", attempt.variant.harness.name());
    for (files, private, whose) in [
        (content(open), false, harness.as_str()),
        (content(private), true, &harness),
        (profile, false, "profile's"),
    ] {
        let done = write(attempt, base, files, private, whose).await?;
        if done.failed() {
            return Ok(done);
        }
    }
    let mut files = Vec::new();
    for file in prepended {
        let read = called("read a file", async {
            Ok(attempt.sandbox.read_file(base, &file.path, MAX_INSTRUCTIONS_BYTES + 1).await)
        });
        let there = match read.await? {
            Ok(there) => there.unwrap_or_default(),
            Err(SandboxError::Operation { reason, .. }) => {
                let reason = format!("{} could not be read: {}", file.path, attempt.redactor.text(&reason));
                return Ok(SetUp::failed(outcome::failure_text(&reason)));
            }
            Err(error) => return Err(error.into()),
        };
        if there.len() as u64 > MAX_INSTRUCTIONS_BYTES {
            return Ok(SetUp::failed(outcome::failure_text(&format!(
                "{} is over {} KiB, too long to put the system prompt before it",
                file.path,
                MAX_INSTRUCTIONS_BYTES >> 10
            ))));
        }
        // After a crash the step may run again.
        if !there.starts_with(&file.content) {
            files.push((file.path, [file.content, there].concat()));
        }
    }
    let mut done = write(attempt, base, files, false, &harness).await?;
    done.cached = layers.installed().is_some();
    Ok(done)
}

/// A harness's file, as bases name it.
fn named(file: &TextFile) -> String {
    let place = if file.place == Place::Home { "home" } else { "workspace" };
    format!("{place}/{}", file.path)
}

/// What [`set_up`] has written of the harness's own.
fn saved(attempt: &Attempt<'_>) -> Saved {
    let mut saved = Saved::default();
    let profile = attempt.profile().map(|profile| &profile.files);
    let files = turns::files(attempt).into_iter().filter(|file| !file.prepend);
    for file in files.filter(|file| profile.is_none_or(|profile| !profile.contains_key(&named(file)))) {
        let name = named(&file);
        match file.private {
            true => saved.private.push(name.into()),
            false => drop(saved.written.insert(name, hex(&file.content))),
        }
    }
    saved
}

async fn clone(attempt: &Attempt<'_>, url: &str, reference: Option<&str>, at: Option<&str>) -> Result<SetUp, Stop> {
    let shown = attempt.redactor.text(url).into_owned();
    let repository = match Repository::parse(url, reference) {
        Ok(repository) => repository,
        Err(reason) => return Ok(SetUp::failed(outcome::source_failed(&shown, reason))),
    };
    let exit = attempt
        .process(command("source", repository.script(at), repository.env(at), CLONE_LIMIT))
        .await?;
    let failure = if exit.timed_out {
        let reason = format!("it took longer than {}", outcome::humanise_duration(CLONE_LIMIT.as_millis() as u64));
        Some(outcome::source_failed(&shown, &reason))
    } else if exit.code != 0 {
        let stderr = output::stderr_tail(&exit.output).unwrap_or_default();
        // The URL's own password is a secret of this trial too.
        let stderr = Redactor::new(repository.password()).text(&stderr).into_owned();
        let stderr = attempt.redactor.text(&stderr);
        Some(outcome::source_failed(&shown, output::git_reason(&stderr)))
    } else {
        None
    };
    let mut diagnostics = memory_diagnostics(&exit, "source");
    let mut commit = None;
    if failure.is_none() {
        let printed = output::stdout(&exit.output).map_err(|error| Stop::lost(format!("the clone's output cannot be read: {error}")))?;
        commit = printed.lines().last().map(str::to_owned).filter(|line| is_commit(line));
        if let (Some(at), Some(commit)) = (at, &commit)
            && at != commit
        {
            diagnostics.push(format!(
                "The source is at {commit}: {at}, where other trials of the batch are, cannot be had any more"
            ));
        }
    }
    Ok(SetUp {
        clean: failure.is_none() && diagnostics.is_empty() && !exit.left_running,
        failure,
        diagnostics,
        commit,
        cached: false,
    })
}

async fn install(attempt: &Attempt<'_>, install: &str) -> Result<SetUp, Stop> {
    let exit = attempt
        .process(command("profile.install", install.to_owned(), attempt.env(), INSTALL_LIMIT))
        .await?;
    let failure = if exit.timed_out {
        Some(outcome::set_up_timed_out("profile's install", INSTALL_LIMIT.as_millis() as u64))
    } else {
        (exit.code != 0).then(|| outcome::install_failed(exit.code))
    };
    let mut diagnostics = memory_diagnostics(&exit, "profile.install");
    if failure.is_some() {
        diagnostics.push(output::last_words(
            "The profile's install",
            exit.code,
            &exit.output,
            &attempt.redactor,
        ));
    }
    Ok(SetUp {
        clean: diagnostics.is_empty() && !exit.left_running,
        failure,
        diagnostics,
        ..SetUp::default()
    })
}

/// A step that is `bash -c SCRIPT` in the workspace.
pub(crate) fn command(step: &str, script: String, env: BTreeMap<String, String>, time_limit: Duration) -> StepCommand {
    StepCommand {
        step: step.to_owned(),
        argv: vec![evalgrid_harness::SHELL.into(), "-c".into(), script],
        env,
        time_limit,
    }
}

/// Goes before what judges the agent's work: programs that the agent may have put into HOME must not stand in for those of the system.
pub(crate) const OWN_PROGRAMS_LAST: &str = "PATH=\"${PATH#\"$HOME/.local/bin:\"}:$HOME/.local/bin\"\n";

/// Running out of memory ends no trial, but explains much.
pub(crate) fn memory_diagnostics(exit: &StepExit, step: &str) -> Vec<String> {
    exit.out_of_memory
        .then(|| format!("The sandbox ran out of memory during {step}"))
        .into_iter()
        .collect()
}
