//! Objects in memory, for tests and simulation.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use super::{MAX_OBJECT_BYTES, ObjectError, ObjectId, Objects, OldObject, check_org};

/// Objects in memory.
#[derive(Debug, Default)]
pub struct MemoryObjects {
    /// With the time of the last put.
    objects: Mutex<BTreeMap<(String, ObjectId), (u64, Bytes)>>,
    now_ms: AtomicU64,
}

impl MemoryObjects {
    /// No objects.
    pub fn new() -> MemoryObjects {
        MemoryObjects::default()
    }

    /// The time of every put from now on, milliseconds since the epoch; 0 at first.
    pub fn set_time(&self, now_ms: u64) {
        self.now_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Makes an object look as if it had last been put at this time.
    pub fn age(&self, org: &str, id: &ObjectId, put_ms: u64) {
        if let Some((at, _)) = self.lock().get_mut(&(org.to_owned(), *id)) {
            *at = put_ms;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, ObjectId), (u64, Bytes)>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Objects for MemoryObjects {
    async fn put(&self, org: &str, bytes: Bytes) -> Result<ObjectId, ObjectError> {
        check_org(org)?;
        if bytes.len() > MAX_OBJECT_BYTES {
            return Err(ObjectError::TooLarge { limit: MAX_OBJECT_BYTES });
        }
        let id = ObjectId::of(&bytes);
        let now_ms = self.now_ms.load(Ordering::Relaxed);
        self.lock().insert((org.to_owned(), id), (now_ms, bytes));
        Ok(id)
    }

    async fn get(&self, org: &str, id: &ObjectId, limit: usize) -> Result<Option<Bytes>, ObjectError> {
        check_org(org)?;
        let found = self.lock().get(&(org.to_owned(), *id)).map(|(_, bytes)| bytes.clone());
        match found {
            Some(bytes) if bytes.len() > limit => Err(ObjectError::TooLarge { limit }),
            found => Ok(found),
        }
    }

    async fn organizations(&self) -> Result<Vec<String>, ObjectError> {
        let names: BTreeSet<String> = self.lock().keys().map(|(org, _)| org.clone()).collect();
        Ok(names.into_iter().collect())
    }

    async fn put_before(&self, org: &str, before_ms: u64, after: Option<&ObjectId>, limit: usize) -> Result<Vec<OldObject>, ObjectError> {
        check_org(org)?;
        let first = match after {
            Some(after) => Bound::Excluded((org.to_owned(), *after)),
            None => Bound::Included((org.to_owned(), ObjectId::from_bytes([0; 32]))),
        };
        let last = Bound::Included((org.to_owned(), ObjectId::from_bytes([255; 32])));
        let objects = self.lock();
        let old = objects.range((first, last)).filter(|(_, (put_ms, _))| *put_ms < before_ms);
        Ok(old
            .map(|((_, id), (_, bytes))| OldObject {
                id: *id,
                bytes: bytes.len() as u64,
            })
            .take(limit)
            .collect())
    }

    async fn remove(&self, org: &str, id: &ObjectId, before_ms: u64) -> Result<bool, ObjectError> {
        check_org(org)?;
        let (mut objects, key) = (self.lock(), (org.to_owned(), *id));
        match objects.get(&key) {
            Some((put_ms, _)) if *put_ms < before_ms => Ok(objects.remove(&key).is_some()),
            _ => Ok(false),
        }
    }
}
