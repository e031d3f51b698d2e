//! What this process has seen of a cell's history, so that it notices when a part of it is gone.

use std::collections::VecDeque;

use super::entry::Chain;

/// Ends of groups that are remembered: some minutes of a busy cell, in about 100 KiB.
const REMEMBERED: usize = 4096;

/// The ends of the last groups that were read, or acknowledged.
#[derive(Debug, Default)]
pub(super) struct Witness {
    /// Up to here nothing is remembered.
    base: u64,
    groups: VecDeque<(u64, Chain)>,
    /// The history that these groups belong to.
    pub(super) history: String,
}

impl Witness {
    /// Takes the end of a group, unless it is no news.
    pub(super) fn saw(&mut self, first_position: u64, position: u64, chain: Chain) {
        if self.last().is_some_and(|(last, _)| last >= position) {
            return;
        }
        if self.groups.is_empty() {
            self.base = first_position - 1;
        }
        self.groups.push_back((position, chain));
        if self.groups.len() > REMEMBERED
            && let Some((oldest, _)) = self.groups.pop_front()
        {
            self.base = oldest;
        }
    }

    /// The newest end.
    pub(super) fn last(&self) -> Option<(u64, Chain)> {
        self.groups.back().copied()
    }

    /// The last position that is still the same, as far as is known. Asks `same` of few ends: what two histories share is a beginning.
    pub(super) fn common<E>(&self, mut same: impl FnMut(u64, Chain) -> Result<bool, E>) -> Result<u64, E> {
        let (mut low, mut high) = (0, self.groups.len());
        while low < high {
            let middle = (low + high) / 2;
            let (position, chain) = self.groups[middle];
            if same(position, chain)? {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low.checked_sub(1).map_or(self.base, |last| self.groups[last].0))
    }

    /// Forgets what is behind `position`.
    pub(super) fn forget_behind(&mut self, position: u64) {
        self.groups.retain(|(seen, _)| *seen <= position);
        self.base = self.base.min(position);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_common_beginning_is_found() {
        let chain = |position: u64| Chain::START.then(&[position as u8; 24], b"");
        for count in [0, 1, 2, 3, 100, REMEMBERED as u64 + 10] {
            let mut witness = Witness::default();
            for group in 1..=count {
                witness.saw(2 * group - 1, 2 * group, chain(group));
                witness.saw(2 * group - 1, 2 * group, Chain::START);
            }
            let known = (count.saturating_sub(REMEMBERED as u64)) * 2;
            for kept in (0..=count).step_by(if count > 200 { 997 } else { 1 }) {
                let mut asked = 0;
                let common = witness.common(|position, found| {
                    asked += 1;
                    assert_eq!(found, chain(position / 2));
                    Ok::<bool, ()>(position <= 2 * kept)
                });
                assert_eq!(common.unwrap(), (2 * kept).max(known), "{count} {kept}");
                assert!(asked <= 13);
            }
            witness.forget_behind(4);
            assert_eq!(
                witness.last().map(|(position, _)| position),
                [None, Some(2), Some(4)][count.min(2) as usize].filter(|_| count < 100 || known < 4)
            );
        }
    }
}
