//! Objects: immutable bytes of one organization, named by their SHA-256. Request bodies, transcripts, evidence, finished batches.
//!
//! Names are per organization, since a shared one would tell others what exists. An object is always put, never skipped because one
//! is there: the one that is there may be damaged, or about to be collected.

mod memory;
#[cfg(test)]
mod s3_tests;
mod stored;

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use bytes::Bytes;
use sha2::{Digest, Sha256};

pub use memory::MemoryObjects;
pub use stored::StoredObjects;

/// Largest object in bytes: the largest artifact archive that is taken, with room to spare. It passes through memory.
pub const MAX_OBJECT_BYTES: usize = 256 * 1024 * 1024;
/// Longest organization id.
pub const MAX_ORG_ID: usize = 64;

/// The name of an object in its organization: the SHA-256 of its bytes. Written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId([u8; 32]);

impl ObjectId {
    /// The name that `bytes` have.
    pub fn of(bytes: &[u8]) -> ObjectId {
        ObjectId(Sha256::digest(bytes).into())
    }

    /// The hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The id with this hash.
    pub fn from_bytes(hash: [u8; 32]) -> ObjectId {
        ObjectId(hash)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectId({self})")
    }
}

/// A text that is not an object's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an object id is 64 lower-case hex digits")]
pub struct NotAnObjectId;

impl FromStr for ObjectId {
    type Err = NotAnObjectId;

    fn from_str(text: &str) -> Result<ObjectId, NotAnObjectId> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(NotAnObjectId),
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return Err(NotAnObjectId);
        }
        let mut hash = [0; 32];
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(ObjectId(hash))
    }
}

/// An object that was last put before some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldObject {
    /// Its name.
    pub id: ObjectId,
    /// What it takes in the store: less than its own length where it is compressed.
    pub bytes: u64,
}

/// Immutable bytes by organization and hash.
///
/// Times are the store's own, in milliseconds since the epoch; some stores cut them to
/// seconds. They are compared with times that are days away, so clocks need not agree.
#[async_trait]
pub trait Objects: Send + Sync {
    /// Stores `bytes` for `org`, durably when it returns, and names them. The object's time is that of its last put.
    async fn put(&self, org: &str, bytes: Bytes) -> Result<ObjectId, ObjectError>;

    /// The bytes of `id` in `org`, checked against the hash; None if there is no such object. One of more than `limit` bytes is an error,
    /// not memory.
    async fn get(&self, org: &str, id: &ObjectId, limit: usize) -> Result<Option<Bytes>, ObjectError>;

    /// Every organization that has objects, or once had, in order.
    async fn organizations(&self) -> Result<Vec<String>, ObjectError>;

    /// At most `limit` objects of `org` that were last put before `before_ms`, in the order of their names; with `after`, only those
    /// behind it. Fewer than `limit` are the last.
    async fn put_before(&self, org: &str, before_ms: u64, after: Option<&ObjectId>, limit: usize) -> Result<Vec<OldObject>, ObjectError>;

    /// Removes an object that was last put before `before_ms`. False: there is none, or it was put again since.
    ///
    /// It and the puts of the same process exclude each other: what a put has acknowledged is never taken away by a removal that had
    /// looked before it. A removal that was begun is brought to its end even if the caller goes away.
    async fn remove(&self, org: &str, id: &ObjectId, before_ms: u64) -> Result<bool, ObjectError>;
}

/// Why an object could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Not an organization's id: 1 to 64 of a-z, 0-9 and _.
    #[error("not an organization id: {org:?}")]
    BadOrganization {
        /// What was given, cut to a readable length.
        org: String,
    },
    /// More bytes than may be stored, or than the reader wants.
    #[error("the object has more than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// The bytes that are there are not those that were put.
    #[error("the object {id} of {org} is damaged: {reason}")]
    Damaged {
        /// The organization.
        org: String,
        /// The object.
        id: ObjectId,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Not a place where objects can be kept.
    #[error("{reason}")]
    BadLocation {
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// The store did not answer in time. What was put may be there.
    #[error("the object store did not answer within {within:?}")]
    TimedOut {
        /// The deadline.
        within: std::time::Duration,
    },
    /// The store refused or could not be reached.
    #[error("the object store failed: {0}")]
    Store(#[from] object_store::Error),
    /// The runtime is shutting down.
    #[error("the work on the object was abandoned")]
    Abandoned,
}

/// Checks an organization's id, so that none can name a folder outside its own.
fn check_org(org: &str) -> Result<(), ObjectError> {
    let good = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
    if org.is_empty() || org.len() > MAX_ORG_ID || !org.bytes().all(good) {
        return Err(ObjectError::BadOrganization {
            org: org.chars().take(MAX_ORG_ID).collect(),
        });
    }
    Ok(())
}
