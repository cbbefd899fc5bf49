//! The generator behind initial weights and sample order: xoshiro256++ by Blackman and Vigna,
//! started from a BLAKE3 hash of what the numbers are for.
//!
//! A run must repeat to the bit years later, so the generator is written out here rather than taken
//! from a library that may improve it. BLAKE3 is fixed by its specification. Streams of different
//! purposes, seeds or subjects share nothing.

/// A stream of random numbers that only its three names determine.
pub(crate) struct Random {
    state: [u64; 4],
}

impl Random {
    /// The stream for one `subject` (a parameter, an epoch) of one `purpose` under one `seed`.
    pub(crate) fn new(purpose: &str, seed: u64, subject: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        hasher.update(&seed.to_le_bytes()).update(subject);
        let hash = *hasher.finalize().as_bytes();
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| hash[i * 8 + b]));
        Self { state: std::array::from_fn(word) }
    }

    /// The next 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `bound`, by scaling; the bias of at most `bound / 2^64` is beyond notice.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn uniform(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.bits() >> 11) as f64 * SCALE
    }

    /// Mean 0, variance 1, nearly normal: the sum of twelve uniform numbers of 16 bits.
    ///
    /// Unlike the textbook transforms this needs no logarithm or cosine, whose last bits differ
    /// between math libraries. That nothing lies beyond six deviations does initial weights no harm.
    pub(crate) fn normal(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / 65536.0;
        let mut sum = 0;
        for _ in 0..3 {
            let bits = self.bits();
            sum += (0..4).map(|lane| (bits >> (16 * lane)) & 0xffff).sum::<u64>();
        }
        // Each number stands for the middle of its cell; twelve middles add up to six cells.
        (sum as f64 + 6.0) * SCALE - 6.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generates_the_published_sequence() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let expected = [41943041, 58720359, 3588806011781223, 3591011842654386];
        assert_eq!(std::array::from_fn(|_| random.bits()), expected);
    }

    #[test]
    fn streams_differ_by_purpose_seed_and_subject() {
        let first =
            |purpose, seed, subject: &str| Random::new(purpose, seed, subject.as_bytes()).bits();
        let origin = first("a", 1, "x");
        assert_eq!(origin, first("a", 1, "x"));
        assert_ne!(origin, first("b", 1, "x"));
        assert_ne!(origin, first("a", 2, "x"));
        assert_ne!(origin, first("a", 1, "y"));
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let mut random = Random::new("moments", 0, b"");
        let moments = |draws: Vec<f64>| {
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
            (mean, variance / draws.len() as f64)
        };
        let (mean, variance) = moments((0..100_000).map(|_| random.uniform()).collect());
        assert!((mean - 0.5).abs() < 0.01 && (variance - 1.0 / 12.0).abs() < 0.01);
        let (mean, variance) = moments((0..100_000).map(|_| random.normal()).collect());
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn numbers_below_a_bound_reach_all_of_it() {
        let mut random = Random::new("below", 0, b"");
        let mut seen = [false; 7];
        (0..1000).for_each(|_| seen[random.below(7)] = true);
        assert_eq!(seen, [true; 7]);
    }
}
