//! The order in which a rank starts the rounds of its segments.
//!
//! Several segments are in flight, each in another round. If every rank started rounds as soon
//! as its own data allowed, two ranks could put messages into a stream in an order in which a
//! third cannot take them out. So all ranks start rounds in one global order: segment `s` starts
//! its round `k` in *wave* `s·stride + k`, and inside a wave the older segment goes first. With
//! `depth` segments in flight and `stride = ⌈rounds / depth⌉`, whatever a start depends on comes
//! earlier in that order: the segment's previous round, and the last round of the segment whose
//! place it takes. So the earliest unfinished start can always proceed, and there is no deadlock.

/// Where a start comes in the global order: after whatever is smaller. Its wave, and its segment.
pub type Turn = (usize, usize);

/// Iterates over (segment, round) in the global order.
#[derive(Clone, Debug)]
pub struct Waves {
    segments: usize,
    rounds: usize,
    stride: usize,
    wave: usize,
    segment: usize,
}

impl Waves {
    /// The order for `segments` segments of `rounds` rounds, `depth` in flight.
    pub fn new(segments: usize, rounds: usize, depth: usize) -> Waves {
        assert!(rounds > 0 && depth > 0);
        Waves { segments, rounds, stride: rounds.div_ceil(depth), wave: 0, segment: 0 }
    }

    /// The place of a start in the order.
    pub fn place(&self, segment: usize, round: usize) -> Turn {
        (segment * self.stride + round, segment)
    }

    /// The next start, or `None` when all have been taken.
    pub fn peek(&self) -> Option<(usize, usize)> {
        (self.segment < self.segments)
            .then(|| (self.segment, self.wave - self.segment * self.stride))
    }

    /// Takes the next start.
    pub fn advance(&mut self) {
        let next = self.segment + 1;
        if next < self.segments && next * self.stride <= self.wave {
            self.segment = next;
            return;
        }
        self.wave += 1;
        // The oldest segment that still has a round in this wave.
        let passed = (self.wave + 1).saturating_sub(self.rounds);
        self.segment = passed.div_ceil(self.stride);
        if self.segment * self.stride > self.wave {
            // No segment is in this wave: the next segment has not started yet.
            self.wave = self.segment * self.stride;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_comes_once_and_after_what_it_depends_on() {
        for segments in 1..8 {
            for rounds in 1..9 {
                for depth in 1..6 {
                    let mut waves = Waves::new(segments, rounds, depth);
                    let mut order = Vec::new();
                    while let Some(start) = waves.peek() {
                        order.push(start);
                        waves.advance();
                    }
                    assert_eq!(order.len(), segments * rounds, "{segments} {rounds} {depth}");
                    assert!(order.is_sorted_by_key(|&(s, k)| waves.place(s, k)));
                    let at =
                        |start| order.iter().position(|&s| s == start).expect("each start occurs");
                    for s in 0..segments {
                        for k in 0..rounds {
                            if k > 0 {
                                assert!(at((s, k - 1)) < at((s, k)));
                            }
                            if s >= depth {
                                assert!(at((s - depth, rounds - 1)) < at((s, 0)));
                            }
                        }
                    }
                }
            }
        }
    }
}
