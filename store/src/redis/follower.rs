//! A standby: reads what the owner appends, notices when the owner is gone or a part of the log is, and takes over.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Value;

use super::clock;
use super::entry::{Chain, Entry, Writer, random_id};
use super::error::RedisError;
use super::link::{CALL_WITHIN, Endpoint, Link};
use super::log::RedisLog;
use super::scripts::{NEW_HISTORY, PROBE, READ, TAKE};
use super::tenure::Tenure;
use super::witness::Witness;
use super::{snapshots, value};
use crate::log::frame::{self, Decoder};
use crate::log::{BoxError, FORMAT_LEVEL, LogError, Recovery, Replay, Sequences};

/// Most entries that one script reads.
const PAGE_ENTRIES: u64 = 256;
/// Bytes after which a page takes no further entry: Redis serves nobody else while it collects them.
const PAGE_BYTES: u64 = 2 * 1024 * 1024;
/// How often reading begins anew within one poll, because what was read is being cut away, before something else must be wrong.
const RESTARTS: u32 = 3;

/// Who acts, or acted last, for a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Higher with each owner.
    pub epoch: u64,
    /// Where it can be reached, as it said itself.
    pub address: String,
}

/// Positions that were in the log and are there no more, or hold something else. Their owner may have acknowledged them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The first one. Where too much was lost for this process to remember, earlier ones may be gone, too.
    pub from: u64,
    /// The last one that this process knows of.
    pub to: u64,
}

/// What a follower found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// Up to here the log was handed on.
    pub position: u64,
    /// Who took the cell last; None where nobody ever did.
    pub owner: Option<Owner>,
    /// Whether nobody holds the lease. Never while a loss is reported.
    pub free: bool,
    /// A failover lost a part of the log. Nothing was handed on: forget all; the next call begins from the snapshot, or from position
    /// 1 where there is none.
    pub loss: Option<Loss>,
}

/// Takes what is in the log, in order.
type Visit<'a> = &'a mut dyn FnMut(Replay<'_>) -> Result<(), BoxError>;

/// A standby of a cell.
pub struct Follower {
    endpoint: Arc<Endpoint>,
    link: Link,
    witness: Arc<Mutex<Witness>>,
    /// Reading begins anew with the next page.
    fresh: bool,
    at: u64,
    /// None behind a snapshot: the next entry tells.
    chain: Option<Chain>,
    sequences: Sequences,
    since_snapshot: u64,
    recovery: Recovery,
    decoder: Decoder,
    owner: Option<Owner>,
    /// Found while taking over; to be reported by the next poll.
    unreported: Option<Loss>,
    /// A history that ended with a loss, which is not written down in Redis yet.
    ended: Option<String>,
}

/// One answer of the reading script.
struct Page {
    history: String,
    position: u64,
    chain: Chain,
    held: bool,
    entries: Vec<Value>,
}

impl Follower {
    pub(super) fn new(endpoint: Arc<Endpoint>, witness: Arc<Mutex<Witness>>) -> Follower {
        Follower {
            link: Link::new(Arc::clone(&endpoint)),
            endpoint,
            witness,
            fresh: true,
            at: 0,
            chain: None,
            sequences: Sequences::default(),
            since_snapshot: 0,
            recovery: Recovery::default(),
            decoder: Decoder::new(),
            owner: None,
            unreported: None,
            ended: None,
        }
    }

    /// Hands on what is new, and returns at once where nothing is. An error that [passes](RedisError::passes) ends nothing: call
    /// again. After the visitor's refusal, reading begins anew.
    pub fn poll(&mut self, mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>) -> Result<Followed, LogError> {
        if let Some(loss) = self.unreported.take() {
            return Ok(self.followed(false, Some(loss)));
        }
        self.advance(&mut visit)
    }

    /// Tries to become the owner; None where somebody else is, or where a loss must be reported first: poll on.
    ///
    /// The log is read to its end before this returns. The follower is done then; an owner that steps down begins a new one.
    pub fn take(
        &mut self,
        address: &str,
        mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>,
    ) -> Result<Option<(RedisLog, Tenure)>, LogError> {
        // Most is read before there is a lease that could run out.
        let followed = self.advance(&mut visit)?;
        if followed.loss.is_some() {
            self.unreported = followed.loss;
            return Ok(None);
        }
        if !followed.free {
            return Ok(None);
        }
        let Some((tenure, position, chain)) = self.claim(address)? else {
            return Ok(None);
        };
        let read = self.read_to_the_end(&tenure, position, chain, &mut visit);
        match read {
            Ok(true) => {}
            Ok(false) | Err(_) => {
                if let Err(error) = tenure.release() {
                    tracing::warn!(%error, "the lease could not be given back; it runs out by itself");
                }
                return read.map(|_| None);
            }
        }
        let log = RedisLog::open(
            Arc::clone(&self.endpoint),
            tenure.clone(),
            Arc::clone(&self.witness),
            (position, chain),
            self.sequences.clone(),
            self.since_snapshot,
            self.recovery.clone(),
        )?;
        Ok(Some((log, tenure)))
    }

    /// Takes the lease and a new epoch, if nobody holds the lease. With the log's end.
    fn claim(&mut self, address: &str) -> Result<Option<(Tenure, u64, Chain)>, LogError> {
        let nonce = random_id();
        let asked = clock::now();
        let milliseconds = self.endpoint.options.lease.as_millis().to_string();
        let ended = self.ended.clone().unwrap_or_default();
        let keys = &self.endpoint.keys;
        let answer = self.link.script_alone(
            &TAKE,
            &[&keys.owner, &keys.lease],
            &[
                nonce.as_bytes(),
                address.as_bytes(),
                milliseconds.as_bytes(),
                random_id().as_bytes(),
                ended.as_bytes(),
            ],
            CALL_WITHIN,
        )?;
        let taken = || {
            let [_, epoch, position, chain, history] = value::items(&answer)? else {
                return None;
            };
            let chain = Chain::parse(value::text(chain)?)?;
            Some((
                value::number(epoch)?,
                value::number(position)?,
                chain,
                value::text(history)?.to_owned(),
            ))
        };
        if matches!(value::items(&answer), Some([_])) {
            return Ok(None);
        }
        let (epoch, position, chain, history) = taken().ok_or_else(|| self.link.unknown("a request to take the cell"))?;
        self.ended = None;
        self.witness().history.clone_from(&history);
        let writer = Writer { epoch, nonce };
        let tenure = Tenure::begin(&self.endpoint, writer, asked, position, history)?;
        Ok(Some((tenure, position, chain)))
    }

    /// Reads what was appended before the lease was taken. False where a loss must be reported first.
    fn read_to_the_end(&mut self, tenure: &Tenure, position: u64, chain: Chain, visit: Visit<'_>) -> Result<bool, LogError> {
        let followed = self.advance(visit)?;
        if followed.loss.is_some() {
            self.unreported = followed.loss;
            return Ok(false);
        }
        if !tenure.holds() {
            return Err(LogError::Fenced {
                reason: "the lease ran out while the log was read".to_owned(),
            });
        }
        if (self.at, self.chain) != (position, Some(chain)) {
            return Err(LogError::Fenced {
                reason: format!(
                    "the log ended at position {position} when it was taken, and at {} when it was read",
                    self.at
                ),
            });
        }
        Ok(true)
    }

    fn advance(&mut self, visit: Visit<'_>) -> Result<Followed, LogError> {
        self.end_history();
        let mut restarts = 0;
        loop {
            let page = self.read_page()?;
            if self.fresh || !self.continues(&page)? {
                self.fresh = true;
                if let Some(loss) = self.find_loss(&page)? {
                    return Ok(self.followed(false, Some(loss)));
                }
                if restarts == RESTARTS {
                    let reason = format!("no snapshot and no entry holds what follows position {}", self.at);
                    return Err(self.damaged(self.at + 1, reason).into());
                }
                restarts += 1;
                self.begin(visit)?;
                continue;
            }
            self.witness().history.clone_from(&page.history);
            for entry in &page.entries {
                self.take_entry(entry, visit)?;
            }
            if self.at >= page.position {
                if (self.at, self.chain) != (page.position, Some(page.chain)) {
                    return Err(self.damaged(self.at, "it is not what the owner says that it wrote").into());
                }
                return Ok(self.followed(!page.held, None));
            }
        }
    }

    fn read_page(&mut self) -> Result<Page, RedisError> {
        let from = (self.at + 1).to_string();
        let keys = &self.endpoint.keys;
        let answer = self.link.script_on_master(
            &READ,
            &[&keys.owner, &keys.lease, &keys.log],
            &[
                from.as_bytes(),
                PAGE_ENTRIES.to_string().as_bytes(),
                PAGE_BYTES.to_string().as_bytes(),
            ],
            CALL_WITHIN,
        )?;
        let unknown = self.link.unknown("a reading");
        let Value::Array(parts) = answer else { return Err(unknown) };
        let Ok([owner, held, Value::Array(entries)]) = <[Value; 3]>::try_from(parts) else {
            return Err(unknown);
        };
        let Some([epoch, address, history, position, chain]) = value::items(&owner) else {
            return Err(unknown);
        };
        // A cell that nobody ever took has none of these.
        let text = |value| value::text(value).unwrap_or_default();
        let (position, chain) = match (text(position), text(chain)) {
            ("", "") => (0, Chain::START),
            (position, chain) => match (position.parse(), Chain::parse(chain)) {
                (Ok(position), Some(chain)) => (position, chain),
                _ => return Err(unknown),
            },
        };
        self.owner = value::number(epoch).map(|epoch| Owner {
            epoch,
            address: text(address).to_owned(),
        });
        Ok(Page {
            history: text(history).to_owned(),
            position,
            chain,
            held: value::int(&held) != Some(0),
            entries,
        })
    }

    /// Whether the page goes on where this follower is. If not, the log was cut, or it is another one.
    fn continues(&mut self, page: &Page) -> Result<bool, LogError> {
        if page.position <= self.at {
            let same = page.position == self.at && self.chain.is_none_or(|chain| chain == page.chain);
            if same {
                self.chain = Some(page.chain);
            }
            return Ok(same);
        }
        let Some(first) = page.entries.first() else {
            let reason = format!("it is missing, though the owner wrote up to position {}", page.position);
            return Err(self.damaged(self.at + 1, reason).into());
        };
        let entry = self.read_entry(first)?;
        let header = self.read_header(&entry)?;
        let expected = self.at + 1;
        Ok(match self.chain {
            Some(chain) => header.first_position == expected && entry.before == chain,
            None => header.first_position <= expected,
        })
    }

    /// Whether something that this process saw is gone.
    fn find_loss(&mut self, page: &Page) -> Result<Option<Loss>, LogError> {
        let Some((last, chain)) = self.witness().last() else {
            return Ok(None);
        };
        let same = match last.cmp(&page.position) {
            std::cmp::Ordering::Greater => false,
            std::cmp::Ordering::Equal => chain == page.chain,
            std::cmp::Ordering::Less => self.is_there(last, chain)?,
        };
        if same {
            return Ok(None);
        }
        let witness = std::mem::take(&mut *self.witness());
        let common = witness.common(|position, chain| Ok::<bool, LogError>(position <= page.position && self.is_there(position, chain)?));
        let ended = witness.history.clone();
        *self.witness() = witness;
        let common = common?;
        self.witness().forget_behind(common);
        self.ended = Some(ended);
        self.end_history();
        let loss = Loss {
            from: common + 1,
            to: last,
        };
        tracing::error!(from = loss.from, to = loss.to, "a failover of Redis lost a part of the log");
        Ok(Some(loss))
    }

    /// Whether the group that ends at `position` is the one with this chain. What was cut is taken to be.
    fn is_there(&mut self, position: u64, chain: Chain) -> Result<bool, LogError> {
        let header_bytes = frame::HEADER_BYTES.to_string();
        let answer = self.link.script_alone(
            &PROBE,
            &[&self.endpoint.keys.log],
            &[position.to_string().as_bytes(), header_bytes.as_bytes()],
            CALL_WITHIN,
        )?;
        let Some([first, found]) = value::items(&answer) else {
            return Err(self.link.unknown("a look at an entry").into());
        };
        if value::items(found).is_some_and(|found| !found.is_empty()) {
            return Ok(self.read_entry(found)?.after() == chain);
        }
        if value::items(first).is_none_or(<[Value]>::is_empty) {
            return Ok(false);
        }
        let entry = self.read_entry(first)?;
        Ok(position < self.read_header(&entry)?.first_position)
    }

    /// Begins with the newest snapshot, or with nothing.
    fn begin(&mut self, visit: Visit<'_>) -> Result<(), LogError> {
        self.recovery = Recovery {
            first_position: 1,
            ..Recovery::default()
        };
        self.since_snapshot = 0;
        let snapshot = snapshots::newest(&mut self.link, &mut self.recovery)?;
        match &snapshot {
            Some(snapshot) => {
                self.at = snapshot.position;
                self.chain = None;
                self.sequences = Sequences(snapshot.sequences.clone());
                self.recovery.snapshot = Some(snapshot.position);
                self.recovery.position = snapshot.position;
                let position = snapshot.position;
                visit(Replay::Snapshot(snapshot)).map_err(|source| LogError::Refused { position, source })?;
            }
            None => {
                self.at = 0;
                self.chain = Some(Chain::START);
                self.sequences = Sequences::default();
            }
        }
        self.fresh = false;
        Ok(())
    }

    /// Checks one entry and hands its records on.
    fn take_entry(&mut self, value: &Value, visit: Visit<'_>) -> Result<(), LogError> {
        let entry = self.read_entry(value)?;
        let header = self.read_header(&entry)?;
        let expected = self.at + 1;
        let follows = match self.chain {
            Some(chain) => entry.before == chain && header.first_position == expected,
            None => header.first_position <= expected && entry.position >= expected,
        };
        if !follows {
            return Err(self
                .damaged(entry.position, format!("it does not follow position {}", self.at))
                .into());
        }
        let damaged = |reason: &str| LogError::from(damaged(&self.endpoint.keys.log, entry.position, reason));
        let body = &entry.group[frame::HEADER_BYTES..];
        let body = match header.body(body) {
            Some(checked) if checked.len() == body.len() => checked,
            _ => return Err(damaged("its checksum is wrong")),
        };
        // Until all of the group was handed on, a refusal leaves this follower in the middle of nowhere.
        self.fresh = true;
        let mut position = header.first_position - 1;
        for record in self.decoder.decode(&header, body).map_err(damaged)? {
            let record = record.map_err(damaged)?;
            position += 1;
            if position < expected {
                continue;
            }
            self.sequences.advance(record.partition, record.sequence).map_err(|expected| {
                damaged(&format!(
                    "partition {} goes on with {}, not {expected}",
                    record.partition, record.sequence
                ))
            })?;
            visit(Replay::Record(position, record)).map_err(|source| LogError::Refused { position, source })?;
            self.recovery.records += 1;
        }
        self.fresh = false;
        self.at = position;
        let chain = entry.after();
        self.chain = Some(chain);
        self.recovery.position = position;
        self.recovery.groups += 1;
        self.recovery.bytes += entry.group.len() as u64;
        self.since_snapshot += entry.group.len() as u64;
        self.witness().saw(header.first_position, position, chain);
        Ok(())
    }

    fn read_entry<'a>(&self, value: &'a Value) -> Result<Entry<'a>, RedisError> {
        Entry::read(value).ok_or_else(|| self.damaged(self.at + 1, "an entry is not one of Evalgrid"))
    }

    fn read_header(&self, entry: &Entry<'_>) -> Result<frame::Header, LogError> {
        let header = frame::Header::read(self.endpoint.keys.seed, entry.group)
            .ok_or_else(|| self.damaged(entry.position, "it does not begin with the header of a group of this cell"))?;
        if header.level > FORMAT_LEVEL {
            return Err(LogError::NewerFormat {
                segment: format!("{} entry {}-0", self.endpoint.keys.log, entry.position).into(),
                offset: 0,
                found: header.level,
                supported: FORMAT_LEVEL,
            });
        }
        let last = header
            .first_position
            .checked_add(u64::from(header.records))
            .and_then(|end| end.checked_sub(1));
        if header.first_position == 0 || header.records == 0 || last != Some(entry.position) {
            return Err(self.damaged(entry.position, "its header is of another position").into());
        }
        Ok(header)
    }

    /// Writes down that a history ended with a loss. Tried again with each poll, and by whoever takes the cell.
    fn end_history(&mut self) {
        let Some(ended) = self.ended.clone() else { return };
        let keys = &self.endpoint.keys;
        let begun = random_id();
        let arguments = [ended.as_bytes(), begun.as_bytes()];
        match self.link.script_alone(&NEW_HISTORY, &[&keys.owner], &arguments, CALL_WITHIN) {
            Ok(_) => self.ended = None,
            Err(error) => tracing::warn!(%error, "the loss could not be noted in Redis yet"),
        }
    }

    fn followed(&self, free: bool, loss: Option<Loss>) -> Followed {
        Followed {
            position: if loss.is_some() { 0 } else { self.at },
            owner: self.owner.clone(),
            free,
            loss,
        }
    }

    fn damaged(&self, position: u64, reason: impl Into<String>) -> RedisError {
        damaged(&self.endpoint.keys.log, position, reason)
    }

    fn witness(&self) -> MutexGuard<'_, Witness> {
        self.witness.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn damaged(key: &str, position: u64, reason: impl Into<String>) -> RedisError {
    RedisError::Damaged {
        place: format!("{key}, position {position}"),
        reason: reason.into(),
    }
}
