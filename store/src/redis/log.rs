//! The log of a cell as its owner has it: one script call per group, and no guessing about what happened to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value, cmd};

use super::durability::Fsync;
use super::entry::{Chain, Entry, WRITER_BYTES};
use super::error::RedisError;
use super::follower;
use super::link::{CALL_WITHIN, Endpoint, Link, persist};
use super::scripts::{APPEND, CUT, PROBE};
use super::snapshots::{self, RedisSnapshots};
use super::tenure::Tenure;
use super::value;
use super::witness::Witness;
use crate::log::frame::{self, Encoder};
use crate::log::{Log, LogError, MAX_GROUP_BYTES, MAX_GROUP_RECORDS, Record, Recovery, Sequences, Snapshots};

/// How long an owner tries to learn what became of a group; its tenure ends that earlier where Redis is out of reach.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// What replicas, and a sync, get to confirm a group.
const CONFIRM_WITHIN: Duration = Duration::from_secs(1);
/// The same where the sync comes by itself once a second.
const CONFIRM_EVERYSEC_WITHIN: Duration = Duration::from_secs(3);
/// Most entries that one script lets go: more would keep Redis from everything else for milliseconds.
const CUT_ENTRIES: u32 = 256;
/// Most scripts of one cut; what is left goes with the next one.
const CUT_STEPS: u32 = 4096;

/// The log of a cell, open for appending.
pub struct RedisLog {
    endpoint: Arc<Endpoint>,
    link: Link,
    tenure: Tenure,
    witness: Arc<Mutex<Witness>>,
    writer: [u8; WRITER_BYTES],
    position: u64,
    chain: Chain,
    sequences: Sequences,
    encoder: Encoder,
    recovery: Recovery,
    shared: Arc<Progress>,
    snapshots: Arc<RedisSnapshots>,
    poisoned: bool,
}

/// What the log shares with those who save its snapshots.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The last durable position.
    pub(super) durable: AtomicU64,
    /// Bytes of the groups since opening, and of those before that the newest snapshot did not reflect.
    pub(super) written: AtomicU64,
    /// What `written` was when the newest snapshot was asked for.
    pub(super) at_newest: AtomicU64,
}

impl RedisLog {
    /// The log that ends at `end`, for the holder of `tenure`.
    pub(super) fn open(
        endpoint: Arc<Endpoint>,
        tenure: Tenure,
        witness: Arc<Mutex<Witness>>,
        end: (u64, Chain),
        sequences: Sequences,
        since_snapshot: u64,
        mut recovery: Recovery,
    ) -> Result<RedisLog, LogError> {
        let mut link = Link::new(Arc::clone(&endpoint));
        let (position, chain) = end;
        recovery.first_position = first_position(&mut link, position)?;
        recovery.position = position;
        recovery.segments = 1;
        let shared = Arc::new(Progress::default());
        shared.durable.store(position, Ordering::Release);
        shared.written.store(since_snapshot, Ordering::Relaxed);
        let kept = snapshots::kept(&mut link)?;
        let snapshots = Arc::new(RedisSnapshots::new(
            Arc::clone(&endpoint),
            tenure.clone(),
            Arc::clone(&shared),
            kept,
        ));
        let writer = tenure.writer().encode();
        Ok(RedisLog {
            endpoint,
            link,
            tenure,
            witness,
            writer,
            position,
            chain,
            sequences,
            encoder: Encoder::new(crate::log::FORMAT_LEVEL),
            recovery,
            shared,
            snapshots,
            poisoned: false,
        })
    }

    /// What was read when the cell was taken.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Names the cell's history. Another name means that a part of the log was lost to a failover meanwhile: what was derived under
    /// the old name may hold what never happened.
    pub fn history(&self) -> String {
        self.tenure.history()
    }

    fn write(&mut self, records: &[Record]) -> Result<(), LogError> {
        let group = self.encoder.encode(self.endpoint.keys.seed, self.position + 1, records);
        let position = self.position + records.len() as u64;
        let chain = self.chain.then(&self.writer, group);
        let writer = self.tenure.writer();
        let (epoch, expected, new) = (writer.epoch.to_string(), self.position.to_string(), position.to_string());
        let (expected_chain, new_chain) = (self.chain.to_string(), chain.to_string());
        let arguments: [&[u8]; 9] = [
            epoch.as_bytes(),
            writer.nonce.as_bytes(),
            expected.as_bytes(),
            expected_chain.as_bytes(),
            new.as_bytes(),
            new_chain.as_bytes(),
            group,
            self.chain.as_bytes(),
            &self.writer,
        ];
        let keys = &self.endpoint.keys;
        let (endpoint, link, tenure) = (&self.endpoint, &mut self.link, &self.tenure);
        // Sent again after any doubt: the script finds out whether the group is there already.
        let outcome = persist(
            PATIENCE,
            || tenure.holds(),
            || {
                let confirmation = Confirmation::of(endpoint);
                let answers = link.script(
                    &APPEND,
                    &[&keys.owner, &keys.log],
                    &arguments,
                    confirmation.command.as_ref(),
                    confirmation.within,
                )?;
                let Some(answer) = answers.first().and_then(value::items) else {
                    return Err(link.unknown("an append"));
                };
                if let [_, epoch, nonce, position, chain] = answer {
                    let text = |value| value::text(value).unwrap_or_default().to_owned();
                    return Ok(Some([text(epoch), text(nonce), text(position), text(chain)]));
                }
                confirmation.check(answers.get(1))?;
                Ok(None)
            },
        );
        match outcome {
            Ok(None) => {}
            Ok(Some([found_epoch, found_nonce, found, _])) => {
                let reason = if (found_epoch.as_str(), found_nonce.as_str()) == (&epoch, &writer.nonce) {
                    format!(
                        "the log in Redis ends at position {found}, with another history than the one written up to {expected}: a failover lost a part of it"
                    )
                } else if found_epoch.is_empty() {
                    "the cell in Redis is empty: a failover, or somebody, lost all of it".to_owned()
                } else {
                    format!("the owner of epoch {found_epoch} has taken over from epoch {epoch}")
                };
                self.tenure.lose(reason.clone());
                return Err(LogError::Fenced { reason });
            }
            Err(error) => {
                let reason = error.to_string();
                self.tenure.lose(format!("an append had no known outcome: {reason}"));
                return Err(LogError::Unknown { reason });
            }
        }
        let length = group.len() as u64;
        self.witness
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .saw(self.position + 1, position, chain);
        (self.position, self.chain) = (position, chain);
        self.tenure.acknowledged(position);
        self.shared.durable.store(position, Ordering::Release);
        self.shared.written.fetch_add(length, Ordering::Relaxed);
        Ok(())
    }
}

impl Log for RedisLog {
    fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        if records.is_empty() {
            return Ok(());
        }
        let bytes = frame::size_bound(records);
        if records.len() > MAX_GROUP_RECORDS || bytes > MAX_GROUP_BYTES {
            return Err(LogError::TooLarge {
                records: records.len(),
                bytes,
                max_records: MAX_GROUP_RECORDS,
                max_bytes: MAX_GROUP_BYTES,
            });
        }
        self.sequences.advance_all(records)?;
        let result = match self.tenure.holds() {
            true => self.write(records),
            false => Err(LogError::Fenced {
                reason: "the lease has run out".to_owned(),
            }),
        };
        self.poisoned = result.is_err();
        result
    }

    fn cut(&mut self, position: u64) -> Result<u64, LogError> {
        let writer = self.tenure.writer();
        let (epoch, position) = (writer.epoch.to_string(), position.to_string());
        let entries = CUT_ENTRIES.to_string();
        let arguments = [epoch.as_bytes(), writer.nonce.as_bytes(), position.as_bytes(), entries.as_bytes()];
        let keys = &self.endpoint.keys;
        let (link, tenure) = (&mut self.link, &self.tenure);
        for _ in 0..CUT_STEPS {
            let answer = persist(
                PATIENCE,
                || tenure.holds(),
                || link.script_alone(&CUT, &[&keys.owner, &keys.log, &keys.snapshots], &arguments, CALL_WITHIN),
            )?;
            match value::int(&answer) {
                Some(0) => break,
                Some(-1) => {
                    let reason = "another owner has taken over".to_owned();
                    tenure.lose(reason.clone());
                    return Err(LogError::Fenced { reason });
                }
                Some(_) => {}
                None => return Err(link.unknown("a cut").into()),
            }
        }
        first_position(link, self.position)
    }

    fn bytes_since_snapshot(&self) -> u64 {
        self.shared.written.load(Ordering::Relaxed) - self.shared.at_newest.load(Ordering::Relaxed)
    }

    fn snapshots(&self) -> Arc<dyn Snapshots> {
        Arc::clone(&self.snapshots) as Arc<dyn Snapshots>
    }
}

/// The first position that is still in the stream; the one behind `end` in an empty one.
fn first_position(link: &mut Link, end: u64) -> Result<u64, LogError> {
    let header_bytes = frame::HEADER_BYTES.to_string();
    let key = link.keys().log.clone();
    let answer = persist(
        PATIENCE,
        || true,
        || link.script_alone(&PROBE, &[&key], &[b"0", header_bytes.as_bytes()], CALL_WITHIN),
    )?;
    let Some([first, _]) = value::items(&answer) else {
        return Err(link.unknown("a look at an entry").into());
    };
    if value::items(first).is_none_or(<[Value]>::is_empty) {
        return Ok(end + 1);
    }
    let header = Entry::read(first).and_then(|entry| frame::Header::read(link.keys().seed, entry.group));
    let header = header.ok_or_else(|| follower::damaged(&key, 0, "the first entry is not one of this cell"))?;
    Ok(header.first_position)
}

/// What must follow a group before it counts.
struct Confirmation {
    command: Option<Cmd>,
    sync: bool,
    replicas: u32,
    within: Duration,
}

impl Confirmation {
    fn of(endpoint: &Endpoint) -> Confirmation {
        let replicas = endpoint.options.replicas;
        let durability = endpoint.durability();
        let sync = durability.as_ref().is_some_and(|durability| durability.confirms_sync);
        let every_second = durability.is_some_and(|durability| durability.fsync == Fsync::EverySecond);
        let wait = if sync && every_second {
            CONFIRM_EVERYSEC_WITHIN
        } else {
            CONFIRM_WITHIN
        };
        let milliseconds = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let command = match (sync, replicas) {
            (true, _) => Some(cmd("WAITAOF").arg(1).arg(replicas).arg(milliseconds).clone()),
            (false, 0) => None,
            (false, _) => Some(cmd("WAIT").arg(replicas).arg(milliseconds).clone()),
        };
        let within = if command.is_some() { CALL_WITHIN + wait } else { CALL_WITHIN };
        Confirmation {
            command,
            sync,
            replicas,
            within,
        }
    }

    fn check(&self, answer: Option<&Value>) -> Result<(), RedisError> {
        if self.command.is_none() {
            return Ok(());
        }
        let reached = match (self.sync, answer) {
            (false, Some(Value::Int(replicas))) => *replicas,
            (true, Some(answer)) => match value::items(answer) {
                Some([Value::Int(local), Value::Int(replicas)]) if *local >= 1 => *replicas,
                _ => -1,
            },
            _ => -1,
        };
        if reached >= i64::from(self.replicas) {
            return Ok(());
        }
        Err(RedisError::Short {
            reached,
            wanted: self.replicas,
        })
    }
}
