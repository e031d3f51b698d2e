//! A provider's root folder and what all its sandboxes use in it. Somebody may delete it under a running executor: it is looked at before each
//! sandbox is made, and brought back where something is missing.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use crate::{etc, layout, share};

/// Relative paths and their bytes.
type Files = Vec<(String, Vec<u8>)>;

/// See the module.
pub struct Root {
    /// Absolute.
    pub path: PathBuf,
    /// Where the copy of `/etc` is, for a provider that shows one.
    etc: Option<PathBuf>,
    /// What was last given to [`Self::share`]. The lock is held while anything is made, so that nothing older is put over something newer.
    shared: Mutex<Option<Files>>,
}

impl Root {
    /// Makes what is missing and brings the copy of `/etc` up to date. `path` is absolute.
    pub fn new(path: PathBuf, etc: Option<PathBuf>) -> io::Result<Self> {
        let root = Self {
            path,
            etc,
            shared: Mutex::new(None),
        };
        root.prepare()?;
        Ok(root)
    }

    /// Sees to it that everything is there that a new sandbox needs. Costs a handful of `stat` calls when it is. Blocks.
    pub fn ensure(&self) -> io::Result<()> {
        self.ensure_with(self.lock().as_ref())?;
        self.etc.as_deref().map_or(Ok(()), etc::refresh_volatile)
    }

    /// Replaces the shared files, here and for whenever the root must be made again. Blocks.
    pub fn share(&self, files: &[(String, Vec<u8>)]) -> io::Result<()> {
        let mut shared = self.lock();
        self.ensure_with(shared.as_ref())?;
        share::replace(&self.path, files)?;
        *shared = Some(files.to_vec());
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Files>> {
        // It is set as a whole, so whoever panicked left it whole.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ensure_with(&self, shared: Option<&Files>) -> io::Result<()> {
        let folder = share::folder(&self.path);
        let current = folder.join(share::CURRENT);
        if folder.is_dir() && (shared.is_none() || current.is_dir()) && self.etc.as_deref().is_none_or(etc::is_there) {
            return Ok(());
        }
        tracing::warn!(root = %self.path.display(), "somebody has deleted the sandboxes' folder or a part of it; making it again");
        self.prepare()?;
        match shared {
            // Another executor over this root may have been quicker.
            Some(files) if !current.is_dir() => share::replace(&self.path, files),
            _ => Ok(()),
        }
    }

    fn prepare(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        share::prepare(&self.path)?;
        layout::spread(&self.path);
        self.etc.as_deref().map_or(Ok(()), etc::refresh)
    }
}
