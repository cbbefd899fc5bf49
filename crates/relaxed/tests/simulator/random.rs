//! Numbers that follow from a seed.

/// SplitMix64: small, and good enough to choose what happens next.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// From 0 to `limit − 1`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From `least` to `most`.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// True in so many of 1000 cases.
    pub fn chance(&mut self, of_1000: u64) -> bool {
        self.below(1000) < of_1000
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
