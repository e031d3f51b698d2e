//! Snapshots of a cell: their bytes in chunks, each a bounded step, and a pointer that is switched once all are there.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use redis::{Value, cmd};

use super::entry::Keys;
use super::error::RedisError;
use super::link::{CALL_WITHIN, Endpoint, Link, persist};
use super::log::{PATIENCE, Progress};
use super::scripts::{SNAPSHOT_BEGIN, SNAPSHOT_CHUNK, SNAPSHOT_END, Script};
use super::tenure::Tenure;
use super::value;
use crate::log::snapshot::{self, Unusable};
use crate::log::{FORMAT_LEVEL, LogError, MAX_SNAPSHOT_BYTES, Recovery, Snapshot, Snapshots};

/// Bytes of a chunk: a script that stores one takes well below a millisecond.
const CHUNK_BYTES: usize = 256 * 1024;
/// Chunks that are fetched in one go.
const CHUNKS_AT_ONCE: usize = 8;
/// Most chunks of one snapshot: the largest payload, and what its framing can add.
const MAX_CHUNKS: usize = MAX_SNAPSHOT_BYTES as usize / CHUNK_BYTES + 64;

/// Positions of the snapshots that are there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    newest: Option<u64>,
    older: Option<u64>,
    /// One that was begun and not finished.
    pending: Option<u64>,
    /// The newest is this owner's own: it need not be read to know that it is whole.
    own: bool,
}

/// Which snapshots there are.
pub(super) fn kept(link: &mut Link) -> Result<Kept, RedisError> {
    let read = cmd("HMGET")
        .arg(&link.keys().snapshots)
        .arg(&["newest", "older", "pending"])
        .clone();
    let answers = link.call(&[read], CALL_WITHIN)?;
    match answers.first().and_then(value::items) {
        Some([newest, older, pending]) => Ok(Kept {
            newest: value::number(newest),
            older: value::number(older),
            pending: value::number(pending),
            own: false,
        }),
        _ => Err(link.unknown("HMGET")),
    }
}

/// The newest intact snapshot. Damaged ones are noted in `recovery`.
pub(super) fn newest(link: &mut Link, recovery: &mut Recovery) -> Result<Option<Snapshot>, LogError> {
    let kept = kept(link)?;
    for position in [kept.newest, kept.older].into_iter().flatten() {
        let key = link.keys().snapshot(position);
        match load(link, &key, position)? {
            Ok(snapshot) => return Ok(Some(snapshot)),
            Err(Unusable::Damaged(reason)) => recovery.skipped_snapshots.push(format!("{key}: {reason}")),
            Err(Unusable::Io(error)) => recovery.skipped_snapshots.push(format!("{key}: {error}")),
            Err(Unusable::Newer(found)) => {
                return Err(LogError::NewerFormat {
                    segment: key.into(),
                    offset: 0,
                    found,
                    supported: FORMAT_LEVEL,
                });
            }
        }
    }
    Ok(None)
}

fn load(link: &mut Link, key: &str, position: u64) -> Result<Result<Snapshot, Unusable>, RedisError> {
    let mut bytes = Vec::new();
    for first in (0..MAX_CHUNKS).step_by(CHUNKS_AT_ONCE) {
        let numbers: Vec<usize> = (first..first + CHUNKS_AT_ONCE).collect();
        let answers = link.call(&[cmd("HMGET").arg(key).arg(numbers).clone()], CALL_WITHIN)?;
        let chunks = answers.first().and_then(value::items).ok_or_else(|| link.unknown("HMGET"))?;
        let mut taken = 0;
        for chunk in chunks.iter().map_while(value::bytes) {
            bytes.extend_from_slice(chunk);
            taken += 1;
        }
        if taken < CHUNKS_AT_ONCE {
            break;
        }
    }
    Ok(
        snapshot::decode(&mut &bytes[..]).and_then(|snapshot| match snapshot.position == position {
            true => Ok(snapshot),
            false => Err(Unusable::Damaged(format!("it says that it is of position {}", snapshot.position))),
        }),
    )
}

/// Saves snapshots, on a connection of its own.
pub(super) struct RedisSnapshots {
    tenure: Tenure,
    progress: Arc<Progress>,
    /// One snapshot is saved at a time.
    saving: Mutex<(Link, Kept)>,
}

impl RedisSnapshots {
    pub(super) fn new(endpoint: Arc<Endpoint>, tenure: Tenure, progress: Arc<Progress>, kept: Kept) -> RedisSnapshots {
        RedisSnapshots {
            tenure,
            progress,
            saving: Mutex::new((Link::new(endpoint), kept)),
        }
    }

    /// A step of saving; the script says 0 where we are not the owner.
    fn step(&self, link: &mut Link, script: &Script, keys: &[&str], arguments: &[&[u8]]) -> Result<i64, LogError> {
        let writer = self.tenure.writer();
        let epoch = writer.epoch.to_string();
        let mut all = vec![epoch.as_bytes(), writer.nonce.as_bytes()];
        all.extend_from_slice(arguments);
        let answer = persist(
            PATIENCE,
            || self.tenure.holds(),
            || link.script_alone(script, keys, &all, CALL_WITHIN),
        )?;
        match answer {
            Value::Int(0) => {
                let reason = "another owner has taken over".to_owned();
                self.tenure.lose(reason.clone());
                Err(LogError::Fenced { reason })
            }
            Value::Int(done) => Ok(done),
            _ => Err(link.unknown("a snapshot").into()),
        }
    }

    fn write(&self, link: &mut Link, kept: &mut Kept, snapshot: &Snapshot) -> Result<(), LogError> {
        let mut bytes = Vec::new();
        snapshot::encode(&mut bytes, FORMAT_LEVEL, snapshot).map_err(|source| LogError::Io {
            action: "encode",
            path: "a snapshot".into(),
            source,
        })?;
        let names = Keys::clone(link.keys());
        let (key, position) = (names.snapshot(snapshot.position), snapshot.position.to_string());
        let unfinished = names.snapshot(kept.pending.unwrap_or(snapshot.position));
        let keys = [names.owner.as_str(), &names.snapshots, &key, &unfinished];
        self.step(link, &SNAPSHOT_BEGIN, &keys, &[position.as_bytes()])?;
        kept.pending = Some(snapshot.position);
        let chunks = bytes.chunks(CHUNK_BYTES);
        let count = chunks.len().to_string();
        for (number, chunk) in chunks.enumerate() {
            self.step(
                link,
                &SNAPSHOT_CHUNK,
                &[&names.owner, &key],
                &[number.to_string().as_bytes(), chunk],
            )?;
        }
        // What is kept to fall back to must be whole: a damaged newest goes, and the one before it stays.
        let whole = match kept.newest {
            Some(newest) if !kept.own => match load(link, &names.snapshot(newest), newest)? {
                Ok(_) => true,
                Err(_) => {
                    tracing::warn!(
                        position = newest,
                        "the newest snapshot is damaged; the one before it is kept in its place"
                    );
                    false
                }
            },
            _ => true,
        };
        let dropped = if whole { kept.older } else { kept.newest };
        let dropped = names.snapshot(dropped.unwrap_or(snapshot.position));
        let older = kept.older.map(|older| older.to_string()).unwrap_or_default();
        let keep_newest: &[u8] = if whole { b"1" } else { b"0" };
        let keys = [names.owner.as_str(), &names.snapshots, &key, &dropped];
        let done = self.step(
            link,
            &SNAPSHOT_END,
            &keys,
            &[position.as_bytes(), count.as_bytes(), older.as_bytes(), keep_newest],
        )?;
        if done < 0 {
            return Err(RedisError::Damaged {
                place: key,
                reason: "somebody changed it while it was written".to_owned(),
            }
            .into());
        }
        *kept = Kept {
            newest: Some(snapshot.position),
            older: if whole { kept.newest } else { kept.older },
            pending: None,
            own: true,
        };
        Ok(())
    }
}

impl Snapshots for RedisSnapshots {
    fn save(&self, snapshot: &Snapshot) -> Result<(), LogError> {
        let mut saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let (link, kept) = &mut *saving;
        snapshot::check(snapshot, kept.newest.unwrap_or(0), self.progress.durable.load(Ordering::Acquire))?;
        let written = self.progress.written.load(Ordering::Relaxed);
        self.write(link, kept, snapshot)?;
        self.progress.at_newest.store(written, Ordering::Relaxed);
        Ok(())
    }
}
