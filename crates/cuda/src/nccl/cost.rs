//! What a call through NCCL costs.
//!
//! A *group* of messages, however many, takes a time of its own: until the kernels of all ranks run and have found
//! each other. To that, what a rank sends or receives, whichever is more, adds the time of its bytes, and the last
//! fold the time of those that it reads and writes; other folds hide behind messages.

use unisono_collective::schedule::{Blocks, Layout, Round, Send};

use super::run::STRIDE;

/// Measured constants, in seconds. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NcclCosts {
    /// A group of messages of no length. Too large: small calls move more bytes than they need to. Too
    /// small: they take more groups.
    pub group: f64,
    /// A byte that a rank sends, or receives.
    pub byte: f64,
    /// The same in an all-gather by NCCL, if all ranks get the same number of bytes. As large as the other: NCCL's own
    /// all-gather is not used.
    pub gathered: f64,
    /// A byte that a fold reads or writes.
    pub folded: f64,
}

impl Default for NcclCosts {
    /// What is typical of GPUs of one server that reach each other's memory.
    fn default() -> NcclCosts {
        let byte = 1.0 / 150e9;
        NcclCosts { group: 40e-6, byte, gathered: byte, folded: 1.0 / 3e12 }
    }
}

impl NcclCosts {
    /// The time of a call by the rounds of one of the ranks, on elements of this size whose blocks are cut like
    /// this; the other ranks' are taken to be like it.
    pub fn predict(
        &self,
        rounds: &[Round],
        layout: &Layout<'_>,
        size: usize,
        gathers: bool,
    ) -> f64 {
        let segments = layout.segments();
        let (mut seconds, mut last_fold) = (0.0, 0);
        for step in 0..segments + STRIDE * rounds.len().saturating_sub(1) {
            let (mut sent, mut received, mut is_gather) = (0, 0, gathers && segments == 1);
            for (number, round) in rounds.iter().enumerate() {
                let segment = step.checked_sub(STRIDE * number);
                let Some(segment) = segment.filter(|segment| *segment < segments) else { continue };
                let bytes = |blocks: &Blocks| {
                    let spans =
                        blocks.clone().map(|block| layout.span(segment, block as usize).len());
                    size * spans.sum::<usize>()
                };
                sent += round.sends.iter().map(|send| bytes(&send.blocks)).sum::<usize>();
                received += round.recvs.iter().map(|recv| bytes(&recv.blocks)).sum::<usize>();
                is_gather &= is_all_gather(round);
                let folds = round.folds.iter();
                let folded: usize =
                    folds.map(|fold| (fold.inputs.len() + 1) * bytes(&fold.blocks)).sum();
                last_fold = if folded > 0 { folded } else { last_fold };
            }
            if sent + received > 0 {
                let byte = if is_gather { self.gathered } else { self.byte };
                seconds += self.group + sent.max(received) as f64 * byte;
            }
        }
        seconds + last_fold as f64 * self.folded
    }

    /// The time of NCCL's own all-reduce of so many bytes: a ring, whose messages are one group.
    pub fn predict_own(&self, bytes: usize, world: usize) -> f64 {
        let moved = 2.0 * (world - 1) as f64 / world as f64 * bytes as f64;
        self.group + moved * self.byte
    }
}

/// Whether a rank sends the same to all that it hears of, and folds nothing.
fn is_all_gather(round: &Round) -> bool {
    let same = |pair: &[Send]| pair[0].from == pair[1].from && pair[0].blocks == pair[1].blocks;
    round.folds.is_empty()
        && round.sends.len() == round.recvs.len()
        && round.sends.windows(2).all(same)
}

#[cfg(test)]
mod tests {
    use unisono_collective::schedule::{Phase, Problem, Topology, build};
    use unisono_collective::{Algorithm, Op};

    use super::*;

    /// The time of an all-reduce of bytes, in so many segments.
    fn all_reduce(algorithm: Algorithm, world: usize, bytes: usize, segments: usize) -> f64 {
        let problem = Problem { op: Op::AllReduce, rank: 0, world };
        let schedule = build(algorithm, &problem, &Topology::one_host(world)).unwrap();
        let [Phase::Rounds(rounds)] = &schedule.phases[..] else { panic!("{schedule:?}") };
        let parts = schedule.parts as usize;
        let layout = Layout::tiled(bytes, parts, bytes.div_ceil(parts * segments));
        NcclCosts::default().predict(&rounds.rounds, &layout, 1, false)
    }

    #[test]
    fn little_data_goes_to_all_ranks_and_much_to_one_each() {
        for world in [3, 4, 8, 64] {
            let prefers_direct = |bytes| {
                all_reduce(Algorithm::Direct, world, bytes, 1)
                    < all_reduce(Algorithm::Pairwise, world, bytes, 1)
            };
            assert!(prefers_direct(1 << 10), "{world}");
            assert!(!prefers_direct(1 << 30), "{world}");
        }
    }

    #[test]
    fn much_data_takes_what_its_bytes_take() {
        let NcclCosts { byte, group, .. } = NcclCosts::default();
        for world in [2, 4, 8] {
            let bytes = 1 << 30;
            let least = 2.0 * (world - 1) as f64 / world as f64 * bytes as f64 * byte;
            for segments in [1, 8] {
                let predicted = all_reduce(Algorithm::Pairwise, world, bytes, segments);
                assert!(predicted > least + 2.0 * group && predicted < 1.2 * least, "{predicted}");
            }
        }
    }
}
