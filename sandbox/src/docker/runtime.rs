//! What a container is given so that our init runs in it, whatever image it has: the executable, and where that is linked dynamically the
//! loader and the libraries that it has on this host. So an image needs no C library of ours, nor any at all.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::helpers;

/// Where the parts are inside.
const INSIDE: &str = "/opt/evalgrid";
/// The loader's name among the libraries.
const LOADER: &str = "loader";
/// Libraries are megabytes; this is not one.
const FILE_LIMIT: u64 = 256 * 1024 * 1024;

/// See the module.
pub struct Runtime {
    /// `<root>/.docker`.
    folder: PathBuf,
    executable: PathBuf,
    /// The loader and the libraries: the name inside, and where it is on this host.
    libraries: Vec<(String, PathBuf)>,
    /// User and group of the processes inside, for whom there is a line in `/etc/passwd`.
    user: (u32, u32),
}

impl Runtime {
    /// Finds the parts and copies them below `root`. Blocks.
    pub fn prepare(root: &Path, executable: &Path, user: (u32, u32)) -> io::Result<Self> {
        let mut libraries = Vec::new();
        if let Some(loader) = interpreter(&fs::read(executable)?)? {
            let listed = Command::new(&loader).arg("--list").arg(executable).stdin(Stdio::null()).output()?;
            if !listed.status.success() {
                return Err(io::Error::other(format!(
                    "{} cannot list the libraries of {}: {}",
                    loader.display(),
                    executable.display(),
                    String::from_utf8_lossy(&listed.stderr).trim()
                )));
            }
            libraries = parse_list(&String::from_utf8_lossy(&listed.stdout));
            libraries.push((LOADER.to_owned(), loader));
        }
        let runtime = Self {
            folder: root.join(".docker"),
            executable: executable.to_owned(),
            libraries,
            user,
        };
        runtime.ensure()?;
        Ok(runtime)
    }

    /// Brings back what somebody has deleted. Costs a few `stat` calls when nothing is missing. Blocks.
    pub fn ensure(&self) -> io::Result<()> {
        let libraries = self.folder.join("lib");
        fs::create_dir_all(&libraries)?;
        for folder in [&self.folder, &libraries] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        }
        for (name, source) in &self.libraries {
            let (target, metadata) = (libraries.join(name), fs::metadata(source)?);
            let is_fresh = |m: fs::Metadata| m.len() == metadata.len() && m.modified().ok() >= metadata.modified().ok();
            if !target.metadata().is_ok_and(is_fresh) {
                if metadata.len() > FILE_LIMIT {
                    return Err(io::Error::other(format!("{} is too large for a library", source.display())));
                }
                replace(&target, &fs::read(source)?, 0o755)?;
            }
        }
        let (user, group) = self.user;
        for (name, text) in [
            (
                "passwd",
                format!(
                    "root:x:0:0:root:/root:/bin/sh\nagent:x:{user}:{group}:agent:/home/agent:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
                ),
            ),
            ("group", format!("root:x:0:\nagent:x:{group}:\nnogroup:x:65534:\n")),
        ] {
            let path = self.folder.join(name);
            if !path.exists() {
                replace(&path, text.as_bytes(), 0o644)?;
            }
        }
        Ok(())
    }

    /// The command line of the init with these options.
    pub fn command(&self, options: String) -> Vec<String> {
        let executable = format!("{INSIDE}/evalgrid");
        let mut line = Vec::new();
        if !self.libraries.is_empty() {
            let libraries = format!("{INSIDE}/lib");
            line.extend([format!("{libraries}/{LOADER}"), "--library-path".into(), libraries]);
        }
        line.extend([executable, helpers::INIT.to_owned(), options]);
        line
    }

    /// What is shown inside, read-only: where it is on this host, and where inside.
    pub fn mounts(&self) -> Vec<(PathBuf, String)> {
        let at = |name: &str| format!("{INSIDE}/{name}");
        vec![
            (self.executable.clone(), at("evalgrid")),
            (self.folder.join("lib"), at("lib")),
            (self.folder.join("passwd"), "/etc/passwd".to_owned()),
            (self.folder.join("group"), "/etc/group".to_owned()),
        ]
    }
}

/// Replaces a file as a whole: containers that run show the old one.
fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    // Two openings in one process must not take each other's.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
    fs::write(&temporary, bytes)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))?;
    fs::rename(&temporary, path)
}

/// The lines of `loader --list` that name files.
fn parse_list(text: &str) -> Vec<(String, PathBuf)> {
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.trim().split_once(" => ")?;
            let path = rest.rsplit_once(" (").map_or(rest, |(path, _)| path);
            (path.starts_with('/') && !name.contains('/')).then(|| (name.to_owned(), path.into()))
        })
        .collect()
}

/// The loader that an executable asks for; `None` if it is linked statically.
fn interpreter(elf: &[u8]) -> io::Result<Option<PathBuf>> {
    const INTERPRETER: u64 = 3;
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "the executable is no 64-bit little-endian ELF file");
    let number = |at: usize, width: usize| -> io::Result<u64> {
        let bytes = at.checked_add(width).and_then(|end| elf.get(at..end)).ok_or_else(wrong)?;
        Ok(bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    };
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return Err(wrong());
    }
    let (table, size, count) = (number(32, 8)? as usize, number(54, 2)? as usize, number(56, 2)? as usize);
    for i in 0..count {
        let at = i.checked_mul(size).and_then(|offset| table.checked_add(offset)).ok_or_else(wrong)?;
        if number(at, 4)? == INTERPRETER {
            let (offset, length) = (number(at + 8, 8)? as usize, number(at + 32, 8)? as usize);
            let name = offset.checked_add(length).and_then(|end| elf.get(offset..end)).ok_or_else(wrong)?;
            let name = name.strip_suffix(b"\0").unwrap_or(name);
            return Ok(Some(String::from_utf8(name.to_vec()).map_err(|_| wrong())?.into()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_parts_of_this_test() {
        let own = std::env::current_exe().unwrap();
        let root = tempfile::tempdir().unwrap();
        let runtime = Runtime::prepare(root.path(), &own, (7, 8)).unwrap();
        let passwd = root.path().join(".docker/passwd");
        assert!(fs::read_to_string(&passwd).unwrap().contains("agent:x:7:8:agent:"));
        // Run as a container would run it: no search path but ours.
        let listed = root.path().join(".docker/lib");
        let line = runtime.command("x".into());
        assert_eq!(line[line.len() - 3..], ["/opt/evalgrid/evalgrid", "sandbox-init", "x"]);
        if line.len() > 3 {
            let said = Command::new(listed.join(LOADER))
                .args(["--inhibit-cache", "--library-path"])
                .arg(&listed)
                .arg(&own)
                .arg("--list")
                .env_clear()
                .output()
                .unwrap();
            assert!(String::from_utf8_lossy(&said.stdout).contains("the_parts_of_this_test"), "{said:?}");
        }
        fs::remove_dir_all(root.path().join(".docker")).unwrap();
        runtime.ensure().unwrap();
        assert!(runtime.mounts().iter().all(|(path, _)| path.exists()));
    }

    #[test]
    fn nonsense_is_an_error() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [0, 4, 40, 63, 70, 200] {
            assert!(interpreter(&own[..length]).is_err(), "{length} bytes");
        }
        let mut far = own[..64].to_vec();
        far[32..40].fill(0xff);
        assert!(interpreter(&far).is_err());
    }

    #[test]
    fn lines_of_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld.so (0x3)\n\tlibodd.so => not found\n";
        assert_eq!(parse_list(text), [("libc.so.6".to_owned(), PathBuf::from("/lib/x/libc.so.6"))]);
    }
}
