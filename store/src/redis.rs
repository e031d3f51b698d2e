//! The log of a cell in Redis, for those who outgrow one machine: one active owner, standbys that follow, and takeover.
//!
//! A cell is one stream, and every change of it is one script that compares the owner's epoch and nonce, and for an append the
//! log's end. So whoever is not the owner any more writes nothing, and no owner writes over a hole that a failover left. What a failover loses is
//! noticed by every process that had seen it, reported as a [`Loss`], and gives the cell another history.
//!
//! Everything here blocks; each call has a deadline.

mod clock;
mod durability;
mod entry;
mod error;
mod follower;
mod link;
mod log;
mod scripts;
mod snapshots;
mod tenure;
mod url;
mod value;
mod witness;

use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use durability::{Durability, Fsync};
pub use error::RedisError;
pub use follower::{Followed, Follower, Loss, Owner};
pub use log::RedisLog;
pub use tenure::Tenure;
pub use url::{RedisUrl, RedisUrlError};

use link::{CONNECT_WITHIN, Endpoint, Link};
use witness::Witness;

/// How long a lease lasts unless something else is asked for: a dead owner's cell is taken within 3 s.
pub const LEASE: Duration = Duration::from_secs(2);
/// Longest name of a cell.
const MAX_CELL: usize = 32;

/// What is asked of a Redis, and what is put up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedisOptions {
    /// The operator vouches for a server that does not show its settings.
    pub assume_durable: bool,
    /// `appendfsync everysec` will do.
    pub allow_everysec: bool,
    /// Replicas that must have a group before it is acknowledged.
    pub replicas: u32,
    /// How long the owner's lease lasts, from 500 ms to 60 s. All processes of a cell must agree on it.
    pub lease: Duration,
}

impl Default for RedisOptions {
    fn default() -> RedisOptions {
        RedisOptions {
            assume_durable: false,
            allow_everysec: false,
            replicas: 0,
            lease: LEASE,
        }
    }
}

/// A cell in Redis, as one process sees it. Its followers and logs share what they have seen, so one handle lives as long as the process.
#[derive(Clone)]
pub struct RedisStore {
    endpoint: Arc<Endpoint>,
    witness: Arc<Mutex<Witness>>,
    durability: Durability,
}

impl RedisStore {
    /// Finds the server, checks that it is a master and keeps what it acknowledges, and opens the cell `cell` in it. Writes nothing.
    pub fn connect(url: RedisUrl, cell: &str, options: RedisOptions) -> Result<RedisStore, RedisError> {
        let good = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        if cell.is_empty() || cell.len() > MAX_CELL || !cell.bytes().all(good) {
            return Err(RedisError::Cell);
        }
        if options.lease < Duration::from_millis(500) || options.lease > Duration::from_secs(60) {
            return Err(RedisError::Lease(options.lease));
        }
        let endpoint = Arc::new(Endpoint::new(url, cell, options));
        let mut link = Link::new(Arc::clone(&endpoint));
        link.connect(CONNECT_WITHIN)?;
        let durability = endpoint.durability().ok_or_else(|| link.unknown("CONFIG GET"))?;
        Ok(RedisStore {
            endpoint,
            witness: Arc::default(),
            durability,
        })
    }

    /// What the server gave when it was connected to. Servers that a failover brings later are examined, too, and refused alike.
    pub fn durability(&self) -> &Durability {
        &self.durability
    }

    /// A standby, which begins from the snapshot.
    pub fn follow(&self) -> Follower {
        Follower::new(Arc::clone(&self.endpoint), Arc::clone(&self.witness))
    }
}
