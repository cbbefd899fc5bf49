//! Random choices that a seed repeats.

/// SplitMix64.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// `UNISONO_TEST_SEED`, or a new seed; printed, so that a failure can be repeated.
pub fn seed() -> u64 {
    let given = std::env::var("UNISONO_TEST_SEED").ok();
    let seed = given.map(|text| text.parse().expect("UNISONO_TEST_SEED is a number"));
    let seed = seed.unwrap_or_else(|| super::machine::now().as_nanos() as u64);
    println!("UNISONO_TEST_SEED={seed}");
    seed
}
