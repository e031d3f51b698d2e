//! A shell for a person in a sandbox that was left where it is. It needs neither the sandbox's supervisor nor an executor, and changes nothing of theirs.

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    SandboxError,
    layout::{self, Layout},
    network::Network,
    protocol::Bubblewrap,
    provider::find_program,
    share, supervisor,
};

/// The command of a shell in a bubblewrap sandbox below `root`, its provider's folder: in namespaces of its own over the same files. `tools` is the
/// executor's folder of agents; `network`, whether the shell may use this machine's. To be run on a terminal.
pub fn bubblewrap_shell(root: &Path, name: &str, tools: &Path, network: bool) -> Result<Command, SandboxError> {
    let layout = find(root, name)?;
    let spec = || -> io::Result<Bubblewrap> {
        let root = root.canonicalize()?;
        Ok(Bubblewrap {
            program: find_program(Path::new("bwrap")).ok_or_else(|| io::Error::other("bwrap is not installed (package bubblewrap)"))?,
            executable: std::env::current_exe()?.canonicalize()?,
            etc: root.join(".etc"),
            share: share::folder(&root),
            tools: tools.canonicalize()?,
            network: if network { Network::Host } else { Network::Off },
        })
    };
    match spec() {
        Ok(spec) => Ok(supervisor::shell(&spec, &layout)),
        Err(error) => Err(SandboxError::Operation {
            operation: format!("prepare a shell in {name}"),
            reason: error.to_string(),
        }),
    }
}

/// The same for a sandbox of plain processes: no more isolated than that was.
pub fn process_shell(root: &Path, name: &str) -> Result<Command, SandboxError> {
    let layout = find(root, name)?;
    let mut command = Command::new("/bin/bash");
    command
        .args(["--norc", "--noprofile", "-i"])
        .current_dir(layout.workspace())
        .env_clear()
        .env("HOME", layout.home())
        .env("TMPDIR", layout.tmp())
        .env("PS1", "sandbox:\\w$ ")
        .envs(
            ["PATH", "TERM"]
                .into_iter()
                .filter_map(|name| Some((name, std::env::var_os(name)?))),
        );
    Ok(command)
}

fn find(root: &Path, name: &str) -> Result<Layout, SandboxError> {
    let lost = |reason: String| SandboxError::Lost {
        name: name.to_owned(),
        reason,
    };
    if !layout::is_sandbox_name(name) {
        return Err(lost("there can be no sandbox of this name".to_owned()));
    }
    let root: PathBuf = root.canonicalize().map_err(|error| lost(format!("{}: {error}", root.display())))?;
    let layout = Layout::new(&root, name);
    match layout.workspace().is_dir() {
        true => Ok(layout),
        false => Err(lost("its workspace is not there".to_owned())),
    }
}
