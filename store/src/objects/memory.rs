//! Objects in memory, for tests and simulation.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use super::{MAX_OBJECT_BYTES, ObjectError, ObjectId, Objects, check_org};

/// Objects in memory.
#[derive(Debug, Default)]
pub struct MemoryObjects {
    objects: Mutex<BTreeMap<(String, ObjectId), Bytes>>,
}

impl MemoryObjects {
    /// No objects.
    pub fn new() -> MemoryObjects {
        MemoryObjects::default()
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
        self.objects
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((org.to_owned(), id), bytes);
        Ok(id)
    }

    async fn get(&self, org: &str, id: &ObjectId, limit: usize) -> Result<Option<Bytes>, ObjectError> {
        check_org(org)?;
        let found = self
            .objects
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(org.to_owned(), *id))
            .cloned();
        match found {
            Some(bytes) if bytes.len() > limit => Err(ObjectError::TooLarge { limit }),
            found => Ok(found),
        }
    }
}
