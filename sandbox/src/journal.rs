//! What a supervisor keeps about its sandbox: one file of JSON lines, each appended by one write. A line without its end was being written
//! when the supervisor died, so it never became true. Only the supervisor writes; whoever comes after its death reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{layers::Based, protocol::ExitRecord};

/// A step takes half a kilobyte; this is more steps than any trial has.
const READ_LIMIT: u64 = 16 * 1024 * 1024;

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
    /// What its folders were made from.
    #[serde(default)]
    pub base: Option<Based>,
}

/// One line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Record {
    /// The first.
    Made(Meta),
    /// A higher fencing token was seen.
    Token(u64),
    /// A step is about to be started.
    Started(String),
    /// It was not, and nothing of it ran.
    NotStarted(String),
    /// A step ended.
    Exited { step: String, exit: ExitRecord },
    /// Why the supervisor ended, where it was not destroyed.
    Ended(String),
}

/// What the lines come to.
#[derive(Debug, Default)]
pub struct Content {
    /// None: half-made, so nothing was started either.
    pub meta: Option<Meta>,
    /// Steps that were started.
    pub started: BTreeSet<String>,
    /// The ends of those that ended.
    pub exits: BTreeMap<String, ExitRecord>,
    pub ended: Option<String>,
}

impl Content {
    /// Reads a journal. Empty if there is none.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut bytes = Vec::new();
        match File::open(path) {
            Ok(file) => file.take(READ_LIMIT).read_to_end(&mut bytes)?,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Self::default()),
            Err(e) => return Err(e),
        };
        let mut content = Self::default();
        for line in bytes.split_inclusive(|b| *b == b'\n').filter(|l| l.ends_with(b"\n")) {
            content.apply(serde_json::from_slice(line)?);
        }
        Ok(content)
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Made(meta) => self.meta = Some(meta),
            Record::Token(token) => {
                if let Some(meta) = &mut self.meta {
                    meta.token = token;
                }
            }
            Record::Started(step) => drop(self.started.insert(step)),
            Record::NotStarted(step) => drop(self.started.remove(&step)),
            Record::Exited { step, exit } => drop(self.exits.insert(step, exit)),
            Record::Ended(reason) => self.ended = Some(reason),
        }
    }
}

/// A journal that is being written.
pub struct Journal {
    file: File,
    length: u64,
    /// The end of the file is half a line that could not be taken back: anything after it would make no sense.
    torn: bool,
    content: Content,
}

impl Journal {
    /// A new one.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?,
            length: 0,
            torn: false,
            content: Content::default(),
        })
    }

    /// What has been written.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// Whether `path` still leads to this file, or that cannot be told.
    pub fn is_at(&self, path: &Path) -> bool {
        match (self.file.metadata(), path.symlink_metadata()) {
            // As long as it is open nobody else gets its number.
            (Ok(own), Ok(found)) => (own.dev(), own.ino()) == (found.dev(), found.ino()),
            (_, Err(e)) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
            (Err(_), Ok(_)) => true,
        }
    }

    /// Writes a record. After an error it is as if it had never been tried.
    pub fn append(&mut self, record: Record) -> io::Result<()> {
        if self.torn {
            return Err(io::Error::other("the journal broke earlier"));
        }
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        if let Err(e) = self.file.write_all(&line) {
            // A full disk takes half a line.
            self.torn = self.file.set_len(self.length).is_err();
            return Err(e);
        }
        self.length += line.len() as u64;
        self.content.apply(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_journal_torn_anywhere_holds_its_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        assert!(Content::read(&path).unwrap().meta.is_none());
        let meta = Meta {
            name: "n".into(),
            provider: "process".into(),
            supervisor: 1,
            boot_id: "b".into(),
            created_at_ms: 1,
            lifetime_ms: 2,
            token: 3,
            cgroups: Vec::new(),
            base: None,
        };
        let exit = ExitRecord {
            code: 7,
            timed_out: false,
            out_of_memory: false,
            left_running: false,
            started_at_ms: 1,
            finished_at_ms: 2,
            stdout_bytes: 0,
            stdout_tail: false,
            stderr_bytes: 0,
            output_error: Some("line\nbreak".into()),
        };
        let mut journal = Journal::create(&path).unwrap();
        assert!(Journal::create(&path).is_err());
        for record in [
            Record::Made(meta),
            Record::Started("a".into()),
            Record::Token(9),
            Record::NotStarted("a".into()),
            Record::Started("b".into()),
            Record::Exited { step: "b".into(), exit },
            Record::Ended("over".into()),
        ] {
            journal.append(record).unwrap();
        }
        let bytes = std::fs::read(&path).unwrap();
        for length in 0..=bytes.len() {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let lines = bytes[..length].iter().filter(|b| **b == b'\n').count();
            let read = Content::read(&path).unwrap();
            assert_eq!(
                (
                    read.meta.as_ref().map(|m| m.token),
                    read.started.len(),
                    read.exits.get("b").map(|e| e.code),
                    read.ended.is_some()
                ),
                (
                    [None, Some(3), Some(9)][usize::from(lines > 0) + usize::from(lines > 2)],
                    usize::from(lines > 1 && lines != 4),
                    (lines > 5).then_some(7),
                    lines > 6
                ),
                "{length} bytes"
            );
        }
        std::fs::write(&path, "nonsense\n").unwrap();
        assert!(Content::read(&path).is_err());
    }
}
