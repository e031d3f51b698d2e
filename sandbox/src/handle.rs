//! A living sandbox, as the executor holds it.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;

use crate::{
    Base, Sandbox, SandboxError, StepCommand, StepExit, StepOutput,
    client::Client,
    docker::Engine,
    files::{self, Owner},
    journal, layers,
    layout::{self, Layout},
    protocol::{ExitRecord, Reply, Request},
};

/// Linux starts no program with one argument or variable of this many bytes (its final zero included).
const MAX_ARGUMENT: usize = 128 * 1024;
/// A living supervisor may have dropped us for its connection limit; more often than this it has not.
const RECONNECTS: u32 = 3;
/// Between two of those attempts.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// See the module.
pub struct Handle {
    name: String,
    token: u64,
    layout: Layout,
    inside: Inside,
    base: Option<PathBuf>,
    /// Whose the files are, where they are not this process's.
    owner: Option<Owner>,
    /// Who knows how the container ended, where it is one.
    engine: Option<Arc<Engine>>,
    /// A connection that is not in use.
    idle: Mutex<Option<Client>>,
}

/// Paths as processes inside see them.
pub struct Inside {
    pub home: String,
    pub workspace: String,
    pub shared: String,
    pub tools: String,
}

/// What talking to a supervisor came to.
enum Answer {
    Reply(Reply),
    /// There is no supervisor to talk to.
    Gone(io::Error),
}

impl Handle {
    pub fn new(name: &str, token: u64, layout: Layout, inside: Inside, base: Option<PathBuf>, client: Client) -> Self {
        Self {
            name: name.to_owned(),
            token,
            layout,
            inside,
            base,
            owner: None,
            engine: None,
            idle: Mutex::new(Some(client)),
        }
    }

    /// For a sandbox that is a container.
    pub fn with_container(self, owner: Option<Owner>, engine: Option<Arc<Engine>>) -> Self {
        Self { owner, engine, ..self }
    }

    /// Adds to the loss of a container what the daemon knows about it.
    async fn explained<T>(&self, result: Result<T, SandboxError>) -> Result<T, SandboxError> {
        match (result, &self.engine) {
            (Err(SandboxError::Lost { name, reason }), Some(engine)) => {
                let reason = match engine.end_of(&name).await {
                    Some(end) => format!("{reason}: {end}"),
                    None => reason,
                };
                Err(SandboxError::Lost { name, reason })
            }
            (result, _) => result,
        }
    }

    fn take_idle(&self) -> Option<Client> {
        // The lock guards a plain swap, which cannot panic.
        self.idle.lock().unwrap_or_else(|e| e.into_inner()).take()
    }

    fn put_idle(&self, client: Client) {
        *self.idle.lock().unwrap_or_else(|e| e.into_inner()) = Some(client);
    }

    async fn ask(&self, request: &Request) -> Answer {
        let mut attempts = 0;
        loop {
            let mut client = match self.take_idle() {
                Some(client) => client,
                None => match Client::connect(&self.layout.folder, "control").await {
                    Ok(client) => client,
                    Err(e) => return Answer::Gone(e),
                },
            };
            match client.ask(request).await {
                Ok(reply) => {
                    self.put_idle(client);
                    return Answer::Reply(reply);
                }
                Err(e) => {
                    attempts += 1;
                    if attempts > RECONNECTS {
                        return Answer::Gone(e);
                    }
                    if attempts > 1 {
                        tokio::time::sleep(RECONNECT_PAUSE).await;
                    }
                }
            }
        }
    }

    fn error(&self, operation: &str, reply: Reply) -> SandboxError {
        let failed = |reason| SandboxError::Operation {
            operation: operation.to_owned(),
            reason,
        };
        match reply {
            Reply::Fenced { current } => SandboxError::Fenced { current, ours: self.token },
            Reply::Lost { reason } => SandboxError::Lost {
                name: self.name.clone(),
                reason,
            },
            Reply::Refused { reason } => failed(reason),
            other => failed(format!("the supervisor answered {other:?}")),
        }
    }

    fn gone(&self, error: &io::Error) -> SandboxError {
        lost(&self.name, &self.layout, error)
    }

    async fn with_files<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> String + Send + 'static,
        work: impl FnOnce(&Layout) -> io::Result<T> + Send + 'static,
    ) -> Result<T, SandboxError> {
        let layout = self.layout.clone();
        let name = self.name.clone();
        on_blocking_thread(move || {
            work(&layout).map_err(|e| {
                if layout.folder.exists() {
                    SandboxError::Operation {
                        operation: operation(),
                        reason: e.to_string(),
                    }
                } else {
                    SandboxError::Lost {
                        name,
                        reason: "its folder is gone".to_owned(),
                    }
                }
            })
        })
        .await
    }

    fn exit(&self, step: &str, record: ExitRecord) -> Result<StepExit, SandboxError> {
        step_exit(&self.layout, step, record)
    }
}

/// Tells blocking work, when whoever waits for it is gone, that it is for nothing.
#[derive(Default)]
pub struct Cancel(pub Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Says why there is no supervisor.
pub fn lost(name: &str, layout: &Layout, error: &io::Error) -> SandboxError {
    let reason = match journal::Content::read(&layout.journal()).map(|j| j.ended) {
        Ok(Some(reason)) => reason,
        _ if !layout.folder.exists() => "there is no such sandbox on this host".to_owned(),
        _ => format!("its supervisor does not answer: {error}"),
    };
    SandboxError::Lost {
        name: name.to_owned(),
        reason,
    }
}

/// Runs blocking work off the async threads.
pub async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, SandboxError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| {
        Err(SandboxError::Operation {
            operation: "work on a sandbox's files".to_owned(),
            reason: e.to_string(),
        })
    })
}

/// A finished step as the executor sees it.
pub fn step_exit(layout: &Layout, step: &str, record: ExitRecord) -> Result<StepExit, SandboxError> {
    if let Some(reason) = record.output_error {
        return Err(SandboxError::Operation {
            operation: format!("keep the output of {step}"),
            reason,
        });
    }
    let path = |kind, written| {
        if written { layout.output(step, kind) } else { "/dev/null".into() }
    };
    let has_stdout = record.stdout_bytes > 0;
    Ok(StepExit {
        code: record.code,
        timed_out: record.timed_out,
        out_of_memory: record.out_of_memory,
        left_running: record.left_running,
        started_at_ms: record.started_at_ms,
        finished_at_ms: record.finished_at_ms,
        output: StepOutput {
            stdout: path("stdout", has_stdout),
            stdout_tail: record.stdout_tail.then(|| path("stdout.tail", true)),
            stdout_bytes: record.stdout_bytes,
            stdout_times: path("stdout.times", has_stdout),
            stderr: path("stderr", record.stderr_bytes > 0),
        },
    })
}

/// Refuses what no kernel would start, naming the field.
fn check_command(command: &StepCommand) -> Result<(), String> {
    if !layout::is_step_name(&command.step) {
        return Err(format!("{:?} is not a name for a step", command.step));
    }
    if command.argv.is_empty() {
        return Err("argv is empty".to_owned());
    }
    let check = |field: &dyn Fn() -> String, length: usize, text: &[&str]| {
        if text.iter().any(|t| t.contains('\0')) {
            Err(format!("{} holds a zero byte", field()))
        } else if length >= MAX_ARGUMENT {
            Err(format!(
                "{} is {length} bytes long; Linux takes at most {}",
                field(),
                MAX_ARGUMENT - 1
            ))
        } else {
            Ok(())
        }
    };
    for (i, argument) in command.argv.iter().enumerate() {
        check(&|| format!("argv[{i}]"), argument.len(), &[argument])?;
    }
    for (name, value) in &command.env {
        if name.is_empty() || name.contains('=') {
            return Err(format!("{name:?} is not a name for a variable"));
        }
        check(&|| format!("env[{name:?}]"), name.len() + 1 + value.len(), &[name, value])?;
    }
    Ok(())
}

#[async_trait]
impl Sandbox for Handle {
    fn home(&self) -> &str {
        &self.inside.home
    }

    fn workspace(&self) -> &str {
        &self.inside.workspace
    }

    fn shared(&self) -> &str {
        &self.inside.shared
    }

    fn tools(&self) -> &str {
        &self.inside.tools
    }

    fn base(&self) -> Option<&Path> {
        self.base.as_deref()
    }

    async fn save_base(&self, folder: &Path, without: &[PathBuf], most_bytes: u64) -> Result<u64, SandboxError> {
        let (folder, without) = (folder.to_owned(), without.to_vec());
        let cancel = Cancel::default();
        let cancelled = cancel.0.clone();
        self.with_files(
            || "make a base".to_owned(),
            move |layout| layers::save(layout, &folder, &without, most_bytes, &cancelled),
        )
        .await
    }

    async fn write_files(&self, base: Base, files: &[(String, Vec<u8>)], private: bool) -> Result<(), SandboxError> {
        let (files, owner) = (files.to_vec(), self.owner);
        let write = move |layout: &Layout| {
            for (path, bytes) in &files {
                files::write(&layout.folder, base, path, bytes, private, owner)
                    .map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
            }
            Ok(())
        };
        self.with_files(move || format!("write files in the {base:?} folder"), write).await
    }

    async fn read_file(&self, base: Base, path: &str, limit: u64) -> Result<Option<Vec<u8>>, SandboxError> {
        let (shown, path) = (path.to_owned(), path.to_owned());
        let operation = move || format!("read {shown} in the {base:?} folder");
        self.with_files(operation, move |layout| files::read(&layout.folder, base, &path, limit))
            .await
    }

    async fn remove_file(&self, base: Base, path: &str) -> Result<(), SandboxError> {
        let (shown, path) = (path.to_owned(), path.to_owned());
        let operation = move || format!("remove {shown} in the {base:?} folder");
        self.with_files(operation, move |layout| files::remove(&layout.folder, base, &path))
            .await
    }

    async fn ensure_workspace(&self) -> Result<(), SandboxError> {
        let owner = self.owner;
        let make = move |layout: &Layout| files::ensure_workspace(&layout.folder, owner);
        self.with_files(|| "make the workspace again".to_owned(), make).await
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.layout.folder)
    }

    async fn started(&self) -> Result<BTreeSet<String>, SandboxError> {
        let read = |layout: &Layout| Ok(journal::Content::read(&layout.journal())?.started);
        self.with_files(|| "read what was started".to_owned(), read).await
    }

    async fn run(&self, command: &StepCommand) -> Result<StepExit, SandboxError> {
        let operation = format!("start the step {}", command.step);
        check_command(command).map_err(|reason| SandboxError::Operation {
            operation: operation.clone(),
            reason,
        })?;
        let request = Request::Start {
            token: self.token,
            step: command.step.clone(),
            argv: command.argv.clone(),
            env: command.env.clone(),
            time_limit_ms: command.time_limit.as_millis() as u64,
        };
        let result = match self.ask(&request).await {
            Answer::Reply(Reply::Exited(record)) => self.exit(&command.step, record),
            Answer::Reply(other) => Err(self.error(&operation, other)),
            // What is finished can be read without a supervisor.
            Answer::Gone(e) => match journal::Content::read(&self.layout.journal()).map(|mut j| j.exits.remove(&command.step)) {
                Ok(Some(record)) => self.exit(&command.step, record),
                _ => Err(self.gone(&e)),
            },
        };
        self.explained(result).await
    }

    async fn ended(&self, step: &str) -> Result<Option<StepExit>, SandboxError> {
        let name = step.to_owned();
        let operation = || "read the end of a step".to_owned();
        let read = move |layout: &Layout| Ok(journal::Content::read(&layout.journal())?.exits.remove(&name));
        let record = self.with_files(operation, read).await?;
        record.map(|record| self.exit(step, record)).transpose()
    }

    async fn kill(&self, step: &str) -> Result<(), SandboxError> {
        match self
            .ask(&Request::Kill {
                token: self.token,
                step: step.to_owned(),
            })
            .await
        {
            Answer::Reply(Reply::Done) => Ok(()),
            Answer::Reply(other) => Err(self.error(&format!("kill the step {step}"), other)),
            Answer::Gone(e) => Err(self.gone(&e)),
        }
    }
}
