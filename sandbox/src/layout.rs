//! The files of a sandbox on the host: `<root>/<name>/{home,workspace,tmp}` for the agent and `<root>/<name>/run` for us.
//!
//! As few as can be: where thousands of files come and go, ext4 skips over each one that was deleted lately, and that is most of their cost.
//! So the lock is on the folder itself, a step's folder says that it was started, and the end of a sandbox is only written down if it was
//! not asked for.
//!
//! Nothing here is synced: after a power cut the boot id differs, and whatever the files say, the sandbox is gone.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::protocol::ExitRecord;

/// Who supervises a sandbox, and what was made for it outside its folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meta {
    pub name: String,
    pub provider: String,
    /// The supervisor's process id on this host: means something only while the lock is held, under this boot id.
    pub supervisor: u32,
    pub boot_id: String,
    pub created_at_ms: u64,
    pub lifetime_ms: u64,
    /// The highest fencing token seen.
    pub token: u64,
    /// The control groups that were, or were about to be, made.
    pub cgroups: Vec<PathBuf>,
}

/// Whether `name` is `[a-z0-9_-]{1,80}`: such a name is one harmless path component and never one of ours, which start with a dot.
pub fn is_sandbox_name(name: &str) -> bool {
    (1..=80).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-')
}

/// Whether `step` is one harmless path component of at most 120 bytes.
pub fn is_step_name(step: &str) -> bool {
    (1..=120).contains(&step.len())
        && !step.starts_with('.')
        && step.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The paths of one sandbox.
#[derive(Clone, Debug)]
pub struct Layout {
    pub folder: PathBuf,
}

impl Layout {
    pub fn new(root: &Path, name: &str) -> Self {
        Self { folder: root.join(name) }
    }

    pub fn home(&self) -> PathBuf {
        self.folder.join("home")
    }

    pub fn workspace(&self) -> PathBuf {
        self.folder.join("workspace")
    }

    pub fn tmp(&self) -> PathBuf {
        self.folder.join("tmp")
    }

    pub fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    pub fn meta(&self) -> PathBuf {
        self.run().join("meta.json")
    }

    /// What a supervisor that broke had to say; usually not there.
    pub fn log(&self) -> PathBuf {
        self.run().join("supervisor.log")
    }

    /// Why the supervisor ended, where it was not destroyed.
    pub fn ended(&self) -> PathBuf {
        self.run().join("ended")
    }

    pub fn steps(&self) -> PathBuf {
        self.run().join("steps")
    }

    pub fn step(&self, step: &str) -> PathBuf {
        self.steps().join(step)
    }

    /// The end of a step, if it has one.
    pub fn exit(&self, step: &str) -> io::Result<Option<ExitRecord>> {
        read_json(&self.step(step).join("exit.json"))
    }
}

/// Reads a JSON file; `None` if it is not there.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes a JSON file so that it is there whole or not at all.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, serde_json::to_vec(value)?)?;
    fs::rename(&temporary, path)
}

/// A new private file to append to.
pub fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Takes the lock on the `run` folder that a supervisor holds while it lives. `None`: somebody holds it.
pub fn try_lock(run: &Path) -> io::Result<Option<File>> {
    let folder = File::open(run)?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Identifies this run of the machine's kernel.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64)
}

/// Removes a folder and everything in it, whatever modes the agent has set. Follows no symlink. Fine when it is not there.
pub fn remove_tree(folder: &Path) -> io::Result<()> {
    // Twice: the first failure opens the folders up, the second attempt then succeeds.
    for attempt in 0..2 {
        match fs::remove_dir_all(folder) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) if attempt == 0 && e.kind() == io::ErrorKind::PermissionDenied => open_up(folder)?,
            Err(e) => return Err(e),
        }
    }
    unreachable!("the second attempt returns")
}

/// Gives the owner every right on every folder of a tree.
fn open_up(top: &Path) -> io::Result<()> {
    let mut open = vec![top.to_owned()];
    while let Some(folder) = open.pop() {
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names() {
        for (name, sandbox, step) in [
            ("a", true, true),
            ("trial_01-x", true, true),
            ("turn.1.agent", false, true),
            ("A", false, true),
            ("", false, false),
            (".", false, false),
            ("..", false, false),
            (".hidden", false, false),
            ("a/b", false, false),
            ("a\0b", false, false),
            ("é", false, false),
        ] {
            assert_eq!((is_sandbox_name(name), is_step_name(name)), (sandbox, step), "{name:?}");
        }
        assert!(is_sandbox_name(&"a".repeat(80)) && !is_sandbox_name(&"a".repeat(81)));
    }

    #[test]
    fn odd_modes_are_removed_and_symlinks_kept_out() {
        let base = tempfile::tempdir().unwrap();
        let outside = base.path().join("outside");
        fs::create_dir_all(outside.join("kept")).unwrap();
        let tree = base.path().join("tree");
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        fs::write(tree.join("a/b/c/file"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        for folder in ["a/b/c", "a/b", "a"] {
            fs::set_permissions(tree.join(folder), fs::Permissions::from_mode(0o000)).unwrap();
        }
        remove_tree(&tree).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && outside.join("kept").exists());
    }
}
