//! The files of a sandbox on the host: `<root>/<name>/{home,workspace,tmp}` for the agent, beside them ours.
//!
//! As few as can be: where thousands of files come and go, ext4 skips over each one that was deleted lately, and that is most of their cost.
//! So the lock is on the folder itself, one journal holds all that is known, and an output has a file from its first byte on.
//!
//! Nothing here is synced: after a power cut the boot id differs, and whatever the files say, the sandbox is gone.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::FlockOperation;

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

    pub fn journal(&self) -> PathBuf {
        self.folder.join("journal")
    }

    /// What is shown as `/etc/hosts`, where the provider does not show the host's.
    pub fn hosts(&self) -> PathBuf {
        self.folder.join("hosts")
    }

    /// The folder of the socket that a container's init connects to; gone when it has.
    pub fn door(&self) -> PathBuf {
        self.folder.join("door")
    }

    /// The supervisor's socket.
    pub fn control(&self) -> PathBuf {
        self.folder.join("control")
    }

    /// What a supervisor that broke had to say; usually not there.
    pub fn log(&self) -> PathBuf {
        self.folder.join("supervisor.log")
    }

    /// A file of a step's output.
    pub fn output(&self, step: &str, kind: &str) -> PathBuf {
        self.folder.join(format!("{step}.{kind}"))
    }
}

/// Takes the lock on the folder that a supervisor holds while it lives. `None`: somebody holds it.
pub fn try_lock(folder: &Path) -> io::Result<Option<File>> {
    let folder = File::open(folder)?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Asks ext4 to put the folders made in this one far from each other, with what they hold, as it does for those of its own root. Else all
/// sandboxes share a few block groups, where every new file is searched for among all that were deleted in the last seconds.
pub fn spread(root: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    // Best effort: other file systems neither know this nor need it.
    let Ok(folder) = File::open(root) else { return };
    let _ = ioctl_getflags(&folder).and_then(|flags| ioctl_setflags(&folder, flags | IFlags::TOPDIR));
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
