//! Chance as a value: whoever decides is handed it, and the same seed decides the same.

/// Numbers that follow from a seed (SplitMix64: short, and good enough to keep waits apart).
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// From a seed.
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// From 0 to `bound`, itself not included; 0 where the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        // For waits of at most minutes the bias of a remainder is far below a microsecond.
        mixed.checked_rem(bound).unwrap_or(0)
    }
}
