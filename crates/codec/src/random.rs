//! Randomness that follows from where it is used.
//!
//! A [`Key`] is a hash of everything that names one use: seed, step, parameter, shard. The `i`-th
//! number of a key is a hash of both, so that any part of a sequence can be made alone, in any
//! order, on any worker.

/// Names one sequence of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// The root of all keys of a run.
    pub fn new(seed: u64) -> Key {
        Key(mix(seed ^ 0x756e_6973_6f6e_6f00))
    }

    /// The key that belongs to one of many things within this one's.
    pub fn with(self, which: u64) -> Key {
        Key(mix(self.0 ^ mix(which.wrapping_add(0x9e37_79b9_7f4a_7c15))))
    }

    /// The number at a place of the sequence.
    #[inline(always)]
    pub fn at(self, place: u64) -> u64 {
        mix(self.0.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// The 64 bits that all numbers of the sequence follow from, for loops that hash by themselves.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        self.0
    }
}

/// The finalizer of SplitMix64: every bit of the input changes half of the output's.
#[inline(always)]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_differ_and_are_even() {
        let keys = [Key::new(1), Key::new(2), Key::new(1).with(0), Key::new(1).with(1)];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a.at(0) != b.at(0)));
            let ones: u32 = (0..1000).map(|place| a.at(place).count_ones()).sum();
            assert!((31_000..33_000).contains(&ones), "{ones}");
        }
    }
}
