//! What is stored in Redis: names, and the chain that tells one history of a cell from another. Pure.
//!
//! | key | what |
//! |---|---|
//! | `evalgrid:{CELL}:log` | the stream: one entry per group, its id is the position of the group's last record |
//! | `evalgrid:{CELL}:owner` | hash: `epoch`, `nonce` and `address` of the last owner, `position` and `chain` at the log's end, `history` |
//! | `evalgrid:{CELL}:lease` | `epoch:nonce` of the living owner, with an expiry |
//! | `evalgrid:{CELL}:snapshots` | hash: positions of the `newest` and the `older` snapshot, and of one that is being written (`pending`) |
//! | `evalgrid:{CELL}:snapshot:POSITION` | hash: the snapshot's bytes in chunks, by number |
//!
//! An entry has three fields: `g`, the group as in a file; `p`, the chain before it (16 bytes); `o`, who wrote it: epoch (8 bytes,
//! little-endian) and nonce (16). The chain after it is the hash of all three (of the group, its header, which holds the body's
//! checksum). Two owners never share a nonce, so equal chains mean equal histories.

use std::fmt;

use redis::Value;
use sha2::{Digest, Sha256};

use super::value;
use crate::log::frame;

/// The names of a cell's keys. All have the cell in braces, so that a cluster keeps them in one place.
#[derive(Clone)]
pub(super) struct Keys {
    pub(super) log: String,
    pub(super) owner: String,
    pub(super) lease: String,
    pub(super) snapshots: String,
    prefix: String,
    /// What the checksums of this cell's groups start from: an entry copied from another cell does not pass.
    pub(super) seed: u32,
}

impl Keys {
    pub(super) fn new(cell: &str) -> Keys {
        let prefix = format!("evalgrid:{{{cell}}}");
        Keys {
            log: format!("{prefix}:log"),
            owner: format!("{prefix}:owner"),
            lease: format!("{prefix}:lease"),
            snapshots: format!("{prefix}:snapshots"),
            seed: crc32c::crc32c(cell.as_bytes()),
            prefix,
        }
    }

    /// The key of the snapshot at `position`.
    pub(super) fn snapshot(&self, position: u64) -> String {
        format!("{}:snapshot:{position}", self.prefix)
    }
}

/// A hash over a history up to one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain([u8; 16]);

impl Chain {
    /// Of a log without records.
    pub(super) const START: Chain = Chain([0; 16]);

    /// With one more group, written by `writer`.
    pub(super) fn then(&self, writer: &[u8; WRITER_BYTES], group: &[u8]) -> Chain {
        let header = &group[..group.len().min(frame::HEADER_BYTES)];
        let hash = Sha256::new()
            .chain_update(self.0)
            .chain_update(writer)
            .chain_update(header)
            .finalize();
        let mut chain = [0; 16];
        chain.copy_from_slice(&hash[..16]);
        Chain(chain)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn from_bytes(bytes: &[u8]) -> Option<Chain> {
        Some(Chain(bytes.try_into().ok()?))
    }

    /// Reads what `Display` wrote.
    pub(super) fn parse(text: &str) -> Option<Chain> {
        let mut chain = [0; 16];
        if text.len() != 32 || !text.is_ascii() {
            return None;
        }
        for (at, byte) in chain.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        Some(Chain(chain))
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Length of a writer in an entry.
pub(super) const WRITER_BYTES: usize = 24;

/// One owner at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Writer {
    pub(super) epoch: u64,
    /// 32 hex digits, drawn anew whenever somebody becomes the owner.
    pub(super) nonce: String,
}

impl Writer {
    /// As in an entry.
    pub(super) fn encode(&self) -> [u8; WRITER_BYTES] {
        let mut bytes = [0; WRITER_BYTES];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        if let Some(nonce) = Chain::parse(&self.nonce) {
            bytes[8..].copy_from_slice(nonce.as_bytes());
        }
        bytes
    }

    /// As in the lease.
    pub(super) fn token(&self) -> String {
        format!("{}:{}", self.epoch, self.nonce)
    }
}

/// 128 random bits as hex digits.
pub(super) fn random_id() -> String {
    Chain(rand::random()).to_string()
}

/// One entry of the stream: what a chain and a group are made of.
pub(super) struct Entry<'a> {
    /// Position of the last record, from the id.
    pub(super) position: u64,
    pub(super) group: &'a [u8],
    pub(super) before: Chain,
    pub(super) writer: [u8; WRITER_BYTES],
}

impl<'a> Entry<'a> {
    /// Takes `[id, [name, value, …]]` apart.
    pub(super) fn read(value: &'a Value) -> Option<Entry<'a>> {
        let [id, fields] = value::items(value)? else { return None };
        let (position, "0") = value::text(id)?.split_once('-')? else {
            return None;
        };
        let pairs = value::items(fields)?.as_chunks::<2>().0;
        let field = |name: &[u8]| {
            pairs
                .iter()
                .find_map(|[key, found]| (value::bytes(key)? == name).then(|| value::bytes(found))?)
        };
        Some(Entry {
            position: position.parse().ok()?,
            group: field(b"g")?,
            before: Chain::from_bytes(field(b"p")?)?,
            writer: field(b"o")?.try_into().ok()?,
        })
    }

    /// The chain with this entry.
    pub(super) fn after(&self) -> Chain {
        self.before.then(&self.writer, self.group)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn chains_tell_histories_apart() {
        let writer = Writer {
            epoch: 1,
            nonce: random_id(),
        };
        let other = Writer {
            nonce: random_id(),
            ..writer.clone()
        };
        let chain = Chain::START.then(&writer.encode(), b"group");
        assert_eq!(chain, Chain::START.then(&writer.encode(), b"group"));
        assert_ne!(chain, Chain::START.then(&other.encode(), b"group"));
        assert_ne!(chain, Chain::START.then(&writer.encode(), b"grouq"));
        assert_ne!(chain, chain.then(&writer.encode(), b"group"));
        assert_eq!(Chain::parse(&chain.to_string()), Some(chain));
        for bad in ["", "0", &"g".repeat(32), &"é".repeat(16), &"0".repeat(33)] {
            assert_eq!(Chain::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn keys_share_a_slot() {
        let keys = Keys::new("blue-1");
        for key in [&keys.log, &keys.owner, &keys.lease, &keys.snapshots, &keys.snapshot(7)] {
            assert!(key.starts_with("evalgrid:{blue-1}:"), "{key}");
        }
        assert_ne!(keys.seed, Keys::new("blue-2").seed);
    }
}
