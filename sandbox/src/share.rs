//! Files that all sandboxes of a provider may read: `<root>/.share/current`, a symlink that is replaced as a whole.
//!
//! Sandboxes see the folder around the link, so those that run already see the new files too, and never some of each.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use rustix::fs::FlockOperation;

use crate::{files, layout};

/// The link, in the shared folder.
pub const CURRENT: &str = "current";

/// The shared folder of a provider.
pub fn folder(root: &Path) -> PathBuf {
    root.join(".share")
}

/// Makes the shared folder, so that sandboxes can show it before there is anything in it.
pub fn prepare(root: &Path) -> io::Result<()> {
    let folder = folder(root);
    match fs::DirBuilder::new().mode(0o755).create(&folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        // Whatever the umask made of it.
        _ => fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)),
    }
}

/// Replaces what is shared. Files get mode 0444, folders 0555.
pub fn replace(root: &Path, shared: &[(String, Vec<u8>)]) -> io::Result<()> {
    let folder = folder(root);
    // Several executors may start over one root.
    let lock = fs::File::open(&folder)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let current = fs::read_link(folder.join(CURRENT)).ok();
    // Under the lock two names are enough: the one that is shown, and the other.
    let fresh = if current.as_deref() == Some(Path::new("a")) { "b" } else { "a" };
    let link = folder.join("link");
    layout::remove_tree(&folder.join(fresh))?;
    fill(&folder.join(fresh), shared)?;
    match fs::remove_file(&link) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(fresh, &link)?;
    fs::rename(link, folder.join(CURRENT))?;
    current.map_or(Ok(()), |old| layout::remove_tree(&folder.join(old)))
}

fn fill(top: &Path, shared: &[(String, Vec<u8>)]) -> io::Result<()> {
    fs::create_dir(top)?;
    let mut folders = vec![top.to_owned()];
    for (path, bytes) in shared {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{path}: {e}"));
        let path = top.join(files::relative(path).map_err(named)?);
        for parent in path.ancestors().skip(1).take_while(|p| *p != top) {
            folders.push(parent.to_owned());
        }
        let write = || -> io::Result<()> {
            fs::create_dir_all(path.parent().unwrap_or(top))?;
            let mut file = fs::File::options().write(true).create_new(true).mode(0o400).open(&path)?;
            io::Write::write_all(&mut file, bytes)?;
            file.set_permissions(fs::Permissions::from_mode(0o444))
        };
        write().map_err(named)?;
    }
    folders
        .iter()
        .try_for_each(|folder| fs::set_permissions(folder, fs::Permissions::from_mode(0o555)))
}
