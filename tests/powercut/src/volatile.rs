//! The disk's memory: what was written, what of it is durable, and what a power cut leaves.

use std::collections::VecDeque;

use rand::Rng;
use serde::{Deserialize, Serialize};

/// What a disk writes at once, or loses at once.
pub const BLOCK: usize = 4096;
/// What even a torn block keeps whole.
pub const SECTOR: usize = 512;

/// Bytes that may wait for a flush. A real disk's cache is finite, too: above this, the oldest write becomes durable by itself.
const CACHE_BYTES: usize = 128 << 20;
/// Of the blocks that a cut does not keep whole, one in this many is torn.
const TORN_ONE_IN: u32 = 8;

/// What a power cut did to the blocks that had not been flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// Writes of a block that had reached the disk all the same.
    pub kept: u64,
    /// Those of which nothing had.
    pub dropped: u64,
    /// Those of which some sectors had.
    pub torn: u64,
}

/// What happened since the disk was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// The disk's content. Offsets are bytes.
pub struct Image {
    /// What a reader sees.
    current: Vec<u8>,
    /// What is sure to survive.
    durable: Vec<u8>,
    /// The writes since the last flush, in their order: a cut may leave an earlier version of a block.
    pending: VecDeque<(usize, Vec<u8>)>,
    pending_bytes: usize,
    counts: Counts,
}

impl Image {
    /// A disk of zeros. Its memory is the system's only as far as it is written.
    pub fn new(bytes: usize) -> Image {
        Image {
            current: vec![0; bytes],
            durable: vec![0; bytes],
            pending: VecDeque::new(),
            pending_bytes: 0,
            counts: Counts::default(),
        }
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.current.len()
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many blocks wait for a flush; one that was written twice counts twice.
    pub fn pending_blocks(&self) -> usize {
        self.pending_bytes.div_ceil(BLOCK)
    }

    /// Reads, less than asked for at the end of the disk.
    pub fn read(&self, offset: usize, bytes: usize) -> &[u8] {
        let start = offset.min(self.bytes());
        let end = offset.saturating_add(bytes).min(self.bytes());
        &self.current[start..end]
    }

    /// Writes; false where that would be behind the end of the disk, and nothing was written.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let end = offset.saturating_add(data.len());
        let Some(place) = self.current.get_mut(offset..end) else {
            return false;
        };
        place.copy_from_slice(data);
        self.counts.writes += 1;
        self.pending_bytes += data.len();
        self.pending.push_back((offset, data.to_vec()));
        while self.pending_bytes > CACHE_BYTES {
            self.settle_oldest();
        }
        true
    }

    /// Makes durable what was written so far.
    pub fn flush(&mut self) {
        self.counts.flushes += 1;
        while !self.pending.is_empty() {
            self.settle_oldest();
        }
    }

    fn settle_oldest(&mut self) {
        if let Some((offset, data)) = self.pending.pop_front() {
            self.pending_bytes -= data.len();
            self.durable[offset..offset + data.len()].copy_from_slice(&data);
        }
    }

    /// The power goes, and comes back. Of the writes that were not flushed, each block stays with the probability `keep`.
    pub fn cut(&mut self, rng: &mut impl Rng, keep: f64) -> Cut {
        let mut cut = Cut::default();
        let pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        for (offset, data) in &pending {
            for (at, block) in pieces(*offset, data, BLOCK) {
                if rng.random_bool(keep) {
                    cut.kept += 1;
                    self.durable[at..at + block.len()].copy_from_slice(block);
                } else if rng.random_ratio(1, TORN_ONE_IN) {
                    cut.torn += 1;
                    for (at, sector) in pieces(at, block, SECTOR).filter(|_| rng.random()) {
                        self.durable[at..at + sector.len()].copy_from_slice(sector);
                    }
                } else {
                    cut.dropped += 1;
                }
            }
        }
        for (offset, data) in &pending {
            let place = *offset..offset + data.len();
            self.current[place.clone()].copy_from_slice(&self.durable[place]);
        }
        cut
    }
}

/// `data` cut where the disk's units of `size` bytes end, each piece with its offset.
fn pieces(offset: usize, data: &[u8], size: usize) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = offset;
    let mut rest = data;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, behind) = rest.split_at(rest.len().min(size - at % size));
        let found = (at, piece);
        at += piece.len();
        rest = behind;
        Some(found)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{SeedableRng as _, rngs::StdRng};

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Write(usize, usize),
        Flush,
        Cut(f64),
    }

    const SIZE: usize = 5 * BLOCK;

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let write = (0..SIZE, 1..4 * BLOCK).prop_map(|(offset, length)| Act::Write(offset, length.min(SIZE - offset)));
        let keep = prop_oneof![Just(0.0), Just(0.5), Just(1.0)];
        let act = prop_oneof![6 => write, 2 => Just(Act::Flush), 1 => keep.prop_map(Act::Cut)];
        prop::collection::vec(act, 1..25)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Each byte that a cut leaves is the last flushed one or one of those written since; all or nothing where all or nothing is kept.
        #[test]
        fn a_cut_leaves_what_was_flushed_or_written_since(acts in acts(), seed: u64) {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut image = Image::new(SIZE);
            // For each byte: the flushed value, then those written since.
            let mut allowed: Vec<Vec<u8>> = vec![vec![0]; SIZE];
            for (number, act) in acts.into_iter().enumerate() {
                let value = (number + 1) as u8;
                match act {
                    Act::Write(offset, length) => {
                        prop_assert!(image.write(offset, &vec![value; length]));
                        allowed[offset..offset + length].iter_mut().for_each(|values| values.push(value));
                    }
                    Act::Flush => {
                        image.flush();
                        allowed.iter_mut().for_each(|values| *values = vec![values[values.len() - 1]]);
                    }
                    Act::Cut(keep) => {
                        let cut = image.cut(&mut rng, keep);
                        prop_assert!(keep != 0.0 || cut.kept == 0);
                        prop_assert!(keep != 1.0 || cut.dropped + cut.torn == 0);
                        for (byte, values) in image.read(0, SIZE).iter().zip(&mut allowed) {
                            prop_assert!(values.contains(byte));
                            prop_assert!(keep != 1.0 || *byte == values[values.len() - 1]);
                            *values = vec![*byte];
                        }
                    }
                }
                for (byte, values) in image.read(0, SIZE).iter().zip(&allowed) {
                    prop_assert_eq!(*byte, values[values.len() - 1], "a reader sees the newest");
                }
            }
        }
    }

    #[test]
    fn the_ends_of_the_disk() {
        let mut image = Image::new(BLOCK);
        assert!(!image.write(BLOCK - 1, &[1, 2]));
        assert!(!image.write(usize::MAX, &[1]));
        assert_eq!(image.read(BLOCK - 1, 9), [0]);
        assert!(image.read(BLOCK + 5, 9).is_empty());
        assert_eq!(image.counts(), Counts::default());
    }
}
