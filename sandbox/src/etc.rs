//! The `/etc` of a bubblewrap sandbox: copies of what programs need, and nothing that only root may read.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

/// Names in `/etc` that are shown inside, where the host has them.
const SHOWN: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "gai.conf",
    "host.conf",
    "java-17-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki",
    "profile",
    "protocols",
    "python3",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "ssl",
    "terminfo",
    "timezone",
];

/// What the network setup of the host may change at any time.
const VOLATILE: &[&str] = &["hosts", "resolv.conf"];

const PASSWD: &str = "root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n\
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n";

/// A copy larger than this is left out: nothing in the list above comes near it.
const FILE_LIMIT: u64 = 8 * 1024 * 1024;
/// Folders nest this deep at most.
const DEPTH_LIMIT: u32 = 8;

/// Makes or refreshes the copy in `folder`. Each file is replaced as a whole, because running sandboxes show this folder.
pub fn refresh(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    for name in SHOWN {
        copy(&Path::new("/etc").join(name), &folder.join(name), DEPTH_LIMIT)?;
    }
    for (name, text) in [("passwd", PASSWD), ("group", GROUP), ("hostname", "sandbox\n")] {
        replace(&folder.join(name), text.as_bytes())?;
    }
    for name in VOLATILE {
        copy_followed(&Path::new("/etc").join(name), &folder.join(name))?;
    }
    // A sandbox with an allowed network puts its own over it.
    if !folder.join("hosts").exists() {
        replace(&folder.join("hosts"), b"127.0.0.1 localhost\n")?;
    }
    Ok(())
}

/// Whether the copy has been made and not been deleted since.
pub fn is_there(folder: &Path) -> bool {
    folder.join("passwd").is_file()
}

/// Brings files up to date that change while the host runs. Costs two `stat` pairs when nothing changed.
pub fn refresh_volatile(folder: &Path) -> io::Result<()> {
    for name in VOLATILE {
        copy_followed(&Path::new("/etc").join(name), &folder.join(name))?;
    }
    Ok(())
}

/// Copies a file behind whatever symlinks, if it is newer or of another size than the copy.
fn copy_followed(from: &Path, to: &Path) -> io::Result<()> {
    let Ok(source) = fs::metadata(from) else { return Ok(()) };
    if !is_for_everybody(&source) || !source.is_file() || source.len() > FILE_LIMIT {
        return Ok(());
    }
    if to
        .metadata()
        .is_ok_and(|m| m.len() == source.len() && m.modified().ok() >= source.modified().ok())
    {
        return Ok(());
    }
    replace(to, &fs::read(from)?)
}

fn copy(from: &Path, to: &Path, depth: u32) -> io::Result<()> {
    let Ok(source) = from.symlink_metadata() else { return Ok(()) };
    if source.is_symlink() {
        let target = fs::read_link(from)?;
        if fs::read_link(to).ok().as_ref() != Some(&target) {
            let _ = fs::remove_file(to);
            symlink(target, to)?;
        }
    } else if !is_for_everybody(&source) {
        // Not for the agent either, even where its user id outside is root's.
    } else if source.is_dir() && depth > 0 {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()), depth - 1)?;
        }
    } else if source.is_file() {
        copy_followed(from, to)?;
    }
    Ok(())
}

fn is_for_everybody(metadata: &fs::Metadata) -> bool {
    let needed = if metadata.is_dir() { 0o005 } else { 0o004 };
    metadata.mode() & needed == needed
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    // Several executors may refresh one folder at once.
    temporary.push(format!(".{}.tmp", std::process::id()));
    fs::write(&temporary, bytes)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o644))?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nothing_private_is_shown() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("etc");
        refresh(&folder).unwrap();
        refresh(&folder).unwrap();
        assert_eq!(fs::read_to_string(folder.join("passwd")).unwrap(), PASSWD);
        for name in ["shadow", "gshadow", "ssl/private", "ssh", "sudoers"] {
            assert!(folder.join(name).symlink_metadata().is_err(), "{name}");
        }
    }
}
