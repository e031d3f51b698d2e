//! What all schedulers of a cell share: the durable log with its snapshots, and the objects.
//!
//! Two kinds. `File`: the store's `MemoryLog`, for one scheduler that crashes and comes back. `Stream`: what the design asks of Redis, where
//! an append compares the owner and the last position, and a failover may take the last groups away. Beside either, the whole history is
//! kept for the checker, which nothing ever cuts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use evalgrid_store::{
    Log as _, MemoryLog, Record, Replay, Snapshot,
    log::{BoxError, Fault},
};

use crate::{
    check::{Fact, Ledger, Violation, broken},
    defect::Defect,
};

/// The stored objects, by name.
pub type Objects = Arc<Mutex<HashMap<String, Bytes>>>;

/// What becomes of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It succeeds.
    Fine,
    /// It fails, and the group is not there.
    Lost,
    /// It fails, and a part of the group is there.
    Torn,
    /// It fails, and the group is there.
    Kept,
}

/// Why a group was not written, or is not known to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// Somebody else owns the log, or it is not as its owner knew it.
    Fenced,
    /// It may be there.
    Unknown,
}

/// Tells owners apart: an epoch that a failover took back is given out again, so it alone does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Higher with each owner, but for those whom a failover took back.
    pub epoch: u64,
    nonce: u64,
}

/// A failover that took something away.
pub struct Loss {
    /// What is left.
    pub position: u64,
    /// Somebody has noticed.
    pub noticed: bool,
    /// Somebody has reported it, or nobody is left who could.
    pub settled: bool,
}

/// The right to append.
pub struct Handle {
    file: Option<MemoryLog>,
    /// Whose it is.
    pub owner: Owner,
    /// The last position, as its owner knows it.
    position: u64,
}

/// See the module.
pub struct Disk {
    file: Option<MemoryLog>,
    /// The whole history.
    pub records: Vec<Record>,
    /// End of each group and the checksum over all groups up to it.
    groups: Vec<(u64, u64)>,
    /// What the history says.
    pub ledger: Ledger,
    /// What failovers have taken away and somebody may know of.
    pub lost: BTreeSet<Fact>,
    /// Failovers that took something away that people were told.
    pub losses: Vec<Loss>,
    /// Which history this is: another one once a loss was noticed.
    pub history: u64,
    /// What clients and workers were told, and when.
    pub told: BTreeMap<Fact, u64>,
    /// Every snapshot that was saved and that no failover took away.
    pub saved: Vec<Snapshot>,
    /// Bytes that have gathered since the newest snapshot.
    pub bytes_since_snapshot: u64,
    cut: u64,
    /// Who has owned it since which number of groups, the newest last: a failover takes owners back, too.
    owners: Vec<(usize, Owner)>,
    /// Until when the owner's lease holds, by the store's clock.
    pub leased_until: u64,
    /// For all cells' schedulers.
    pub objects: Objects,
    defect: Option<Defect>,
}

impl Disk {
    /// An empty one.
    pub fn new(stream: bool, defect: Option<Defect>) -> Disk {
        Disk {
            file: (!stream).then(MemoryLog::new),
            records: Vec::new(),
            groups: Vec::new(),
            ledger: Ledger::default(),
            lost: BTreeSet::new(),
            losses: Vec::new(),
            history: 0,
            told: BTreeMap::new(),
            saved: Vec::new(),
            bytes_since_snapshot: 0,
            cut: 0,
            owners: Vec::new(),
            leased_until: 0,
            objects: Objects::default(),
            defect,
        }
    }

    /// Whether it is of the kind that several schedulers share.
    pub fn is_stream(&self) -> bool {
        self.file.is_none()
    }

    /// The last position.
    pub fn position(&self) -> u64 {
        self.records.len() as u64
    }

    /// The checksum over all groups up to the one that ends at `position`, if one does.
    pub fn chain(&self, position: u64) -> Option<u64> {
        if position == 0 {
            return Some(0);
        }
        let found = self.groups.binary_search_by_key(&position, |(end, _)| *end);
        found.ok().map(|index| self.groups[index].1)
    }

    /// The hash of the whole history.
    pub fn hash(&self) -> u64 {
        self.groups.last().map_or(0, |(_, chain)| *chain)
    }

    /// How many groups there are.
    pub fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// Opens a file log, as its only owner does at its start.
    pub fn open(&mut self, visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>) -> Result<Handle, Violation> {
        let Some(file) = &self.file else {
            return broken("the simulator is right", "a stream is not opened");
        };
        let (file, recovery) = match file.open(visit) {
            Ok(opened) => opened,
            Err(error) => return broken("every prefix recovers", error.to_string()),
        };
        if recovery.position != self.position() {
            let detail = format!("{} of {} records are there", recovery.position, self.position());
            return broken("an acknowledged fact survives", detail);
        }
        Ok(Handle {
            file: Some(file),
            owner: Owner { epoch: 0, nonce: 0 },
            position: recovery.position,
        })
    }

    /// Reads a stream behind `from`: the newest snapshot first, where what follows `from` has been cut.
    pub fn read(&self, from: u64, mut visit: impl FnMut(Replay<'_>) -> Result<(), BoxError>) -> Result<(), Violation> {
        let mut reached = from;
        let mut give = |item: Replay<'_>| match visit(item) {
            Ok(()) => Ok(()),
            Err(error) => broken("every prefix recovers", error.to_string()),
        };
        let newest = self
            .saved
            .last()
            .filter(|snapshot| from == 0 || from < self.cut || snapshot.position > self.position());
        if let Some(snapshot) = newest {
            reached = snapshot.position;
            give(Replay::Snapshot(snapshot))?;
        }
        if reached < self.cut || reached > self.position() {
            let detail = format!("{reached} is reached, {} is cut, {} is the end", self.cut, self.position());
            return broken("no record follows a hole", detail);
        }
        for (index, record) in self.records.iter().enumerate().skip(reached as usize) {
            give(Replay::Record(index as u64 + 1, record.as_ref()))?;
        }
        Ok(())
    }

    /// Takes a stream over, if its owner's lease has run out.
    pub fn take_over(&mut self, nonce: u64, now: u64, lease: u64) -> Option<Handle> {
        if self.leased_until > now {
            return None;
        }
        self.leased_until = now + lease;
        let epoch = self.owners.last().map_or(0, |(_, owner)| owner.epoch) + 1;
        let owner = Owner { epoch, nonce };
        self.owners.push((self.groups.len(), owner));
        Some(Handle {
            file: None,
            owner,
            position: self.position(),
        })
    }

    fn is_owner(&self, owner: Owner) -> bool {
        self.owners.last().is_some_and(|(_, current)| *current == owner)
    }

    /// Renews the lease of an owner that still is one.
    pub fn renew(&mut self, owner: Owner, now: u64, lease: u64) -> bool {
        let ours = self.is_owner(owner) && now < self.leased_until;
        if ours {
            self.leased_until = now + lease;
        }
        ours
    }

    /// Appends a group. What became durable is at the end of `records`, whatever is answered.
    pub fn append(&mut self, handle: &mut Handle, group: &[Record], fate: Fate) -> Result<(), Failed> {
        if let Some(file) = &mut handle.file {
            match fate {
                Fate::Fine => {}
                Fate::Lost => file.fail_next(Fault::Lost),
                Fate::Torn => file.fail_next(Fault::Torn),
                Fate::Kept => file.fail_next(Fault::Kept),
            }
            let done = file.append(group);
            if matches!(fate, Fate::Fine | Fate::Kept) {
                self.write(group);
            }
            return done.map_err(|_| Failed::Unknown);
        }
        let unfenced = self.defect == Some(Defect::NoFence);
        if !self.is_owner(handle.owner) && !unfenced {
            return Err(Failed::Fenced);
        }
        let unchecked = unfenced || matches!(self.defect, Some(Defect::AppendedOverHole | Defect::AppendedTwice));
        if self.position() != handle.position && !unchecked {
            // The answer to this very group may have been lost.
            let there = self.position() == handle.position + group.len() as u64 && self.records.ends_with(group);
            if !there {
                return Err(Failed::Fenced);
            }
            handle.position = self.position();
            return Ok(());
        }
        if matches!(fate, Fate::Fine | Fate::Kept) {
            self.write(group);
        }
        match fate {
            Fate::Fine => {
                handle.position = self.position();
                Ok(())
            }
            _ => Err(Failed::Unknown),
        }
    }

    fn write(&mut self, group: &[Record]) {
        let mut hasher = DefaultHasher::new();
        self.hash().hash(&mut hasher);
        for record in group {
            (record.partition, record.sequence, &record.payload[..]).hash(&mut hasher);
        }
        self.bytes_since_snapshot += group.iter().map(|record| record.payload.len() as u64).sum::<u64>();
        self.records.extend_from_slice(group);
        self.groups.push((self.position(), hasher.finish()));
    }

    /// Fails over to a replica that lags by so many groups. The next owner may find fewer records than people were told of.
    pub fn lose_last(&mut self, groups: usize) -> Result<(), Violation> {
        let left = self.groups.len().saturating_sub(groups);
        self.groups.truncate(left);
        let position = self.groups.last().map_or(0, |(end, _)| *end);
        self.records.truncate(position as usize);
        self.saved.retain(|snapshot| snapshot.position <= position);
        // The replica lags in everything: it has not cut yet what only a lost snapshot reflects.
        self.cut = self.cut.min(self.older_snapshot());
        self.owners.retain(|(groups, _)| *groups <= left);
        let before = std::mem::take(&mut self.ledger);
        for record in &self.records {
            self.ledger.take(record)?;
        }
        let gone = before.facts().difference(self.ledger.facts());
        self.lost.extend(gone.cloned());
        let known = self.told.len();
        self.told.retain(|fact, _| self.ledger.says(fact));
        if self.told.len() < known {
            self.losses.push(Loss {
                position,
                noticed: false,
                settled: false,
            });
        }
        Ok(())
    }

    /// Somebody has noticed that what it knew is gone.
    pub fn report_loss(&mut self) {
        self.history += 1;
        self.losses.iter_mut().for_each(|loss| loss.settled = true);
    }

    /// Somebody is told a fact. It must be in the log, or have been until a failover.
    pub fn tell(&mut self, fact: Fact, now: u64) -> Result<(), Violation> {
        if self.ledger.says(&fact) {
            self.told.entry(fact).or_insert(now);
            return Ok(());
        }
        match self.lost.contains(&fact) {
            true => Ok(()),
            false => broken("an acknowledged fact survives", format!("{fact:?} is told, and not in the log")),
        }
    }

    /// Saves a snapshot; false where it is refused.
    pub fn save(&mut self, handle: &Handle, snapshot: Snapshot) -> bool {
        let ahead = snapshot.position > self.position() && self.defect != Some(Defect::SnapshotAhead);
        let old = self.saved.last().is_some_and(|last| last.position >= snapshot.position);
        let done = match &handle.file {
            Some(file) => file.snapshots().save(&snapshot).is_ok(),
            None => self.is_owner(handle.owner) && !ahead && !old,
        };
        if done {
            self.saved.push(snapshot);
            self.bytes_since_snapshot = 0;
        }
        done
    }

    /// Position of the older of the two kept snapshots.
    fn older_snapshot(&self) -> u64 {
        self.saved.iter().rev().nth(1).map_or(0, |snapshot| snapshot.position)
    }

    /// Lets go of what the older of the two kept snapshots reflects.
    pub fn cut(&mut self, handle: &mut Handle, position: u64) {
        if let Some(file) = &mut handle.file {
            // Whatever it answers, the history is kept here.
            let _ = file.cut(position);
            return;
        }
        let upto = match self.defect {
            Some(Defect::CutFirst) => position,
            _ => position.min(self.older_snapshot()),
        };
        if self.is_owner(handle.owner) {
            let whole = self.groups.iter().rev().map(|(end, _)| *end).find(|end| *end <= upto);
            self.cut = self.cut.max(whole.unwrap_or_default());
        }
    }
}

/// Puts an object.
pub fn put(objects: &Objects, name: String, bytes: Bytes) {
    objects.lock().unwrap_or_else(PoisonError::into_inner).insert(name, bytes);
}

/// Gets one.
pub fn get(objects: &Objects, name: &str) -> Option<Bytes> {
    objects.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
}
