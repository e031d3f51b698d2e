//! The data folder and the secrets in it. Each is a file of mode 0600 (decision 13: the only secrets in clear text).

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::clock::World;

/// The first organization's first API key.
pub const API_KEY: &str = "api-key";
const ADMIN_TOKEN: &str = "admin-token";
const WORKER_TOKEN: &str = "worker-token";

/// The data folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}; choose another folder with --data, or make this one readable and writable", path.display())]
pub struct FolderError {
    path: PathBuf,
    source: io::Error,
}

/// Tokens that the operator has chosen, the same for every scheduler of a cell. Those that are not given are made up and kept.
#[derive(Clone, Default)]
pub struct Tokens {
    /// The operator's.
    pub admin: Option<String>,
    /// The workers'.
    pub worker: Option<String>,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let given = |token: &Option<String>| if token.is_some() { "given" } else { "kept" };
        write!(f, "Tokens {{ admin: {}, worker: {} }}", given(&self.admin), given(&self.worker))
    }
}

/// An open data folder.
pub struct Folder {
    path: PathBuf,
    admin_token: String,
    worker_token: String,
}

impl Folder {
    /// Creates what is missing. A token that is given is used, and none is kept.
    pub fn open(path: &Path, tokens: &Tokens, world: &dyn World) -> Result<Folder, FolderError> {
        let at = |source| FolderError {
            path: path.to_owned(),
            source,
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at)?;
        Ok(Folder {
            path: path.to_owned(),
            admin_token: given_or_kept(tokens.admin.as_deref(), &path.join(ADMIN_TOKEN), world)?,
            worker_token: given_or_kept(tokens.worker.as_deref(), &path.join(WORKER_TOKEN), world)?,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The operator's token.
    pub fn admin_token(&self) -> &str {
        &self.admin_token
    }

    /// The workers' token.
    pub fn worker_token(&self) -> &str {
        &self.worker_token
    }

    /// A secret that is there already.
    pub fn secret(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.path.join(name)).ok()?;
        (!text.trim().is_empty()).then(|| text.trim().to_owned())
    }

    /// Writes a secret, durably.
    pub fn write_secret(&self, name: &str, secret: &str) -> Result<(), FolderError> {
        write(&self.path.join(name), secret)
    }
}

fn given_or_kept(given: Option<&str>, path: &Path, world: &dyn World) -> Result<String, FolderError> {
    given.map_or_else(|| read_or_create(path, world), |token| Ok(token.to_owned()))
}

fn read_or_create(path: &Path, world: &dyn World) -> Result<String, FolderError> {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FolderError {
            path: path.to_owned(),
            source: error,
        }),
        _ => {
            let mut bytes = [0; 32];
            world.random(&mut bytes);
            let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            write(path, &token)?;
            Ok(token)
        }
    }
}

/// Whole or not at all, and only for its owner.
fn write(path: &Path, secret: &str) -> Result<(), FolderError> {
    let at = |source| FolderError {
        path: path.to_owned(),
        source,
    };
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .map_err(at)?;
    file.write_all(secret.as_bytes())
        .and_then(|()| file.write_all(b"\n"))
        .and_then(|()| file.sync_all())
        .map_err(at)?;
    fs::rename(&new, path).map_err(at)?;
    if let Some(folder) = path.parent() {
        fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(at)?;
    }
    Ok(())
}
