//! What a call through the device window costs.
//!
//! All ranks use one device, or devices that are alike, and so share its memory: what all of them read and
//! write together, at the memory's rate, takes as long as the call if it is large. If it is small, the
//! *rounds* take that long: from the moment at which a rank submits its work until the others know on their
//! hosts that it is done. Between the two there are the *launches* of a rank, one after the other, which
//! hide behind the memory's work or are waited for.

use unisono_collective::schedule::Window;

/// Measured constants, in seconds. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceCosts {
    /// Until work that was submitted is done and known to all. Too large: small calls move more bytes
    /// than they need to. Too small: they wait more often.
    pub round: f64,
    /// Submitting a copy or a kernel.
    pub launch: f64,
    /// A byte read or written.
    pub byte: f64,
}

impl Default for DeviceCosts {
    /// What is typical of a server's GPU of today; the rounds are those of processes that use it through MPS.
    fn default() -> DeviceCosts {
        DeviceCosts { round: 12e-6, launch: 2.5e-6, byte: 1.0 / 3.5e12 }
    }
}

impl DeviceCosts {
    /// The time of a call of so many segments, each with columns of so many bytes, by the schedule of one
    /// of the ranks; the others' are taken to be like it.
    pub fn predict(&self, window: &Window, world: usize, column: usize, segments: usize) -> f64 {
        let rounds = if window.publishes { 2.0 } else { 1.0 };
        let staged: usize = window.stages.iter().map(|stage| stage.blocks.len()).sum();
        let copied: usize = window.copies.iter().map(|copy| copy.blocks.len()).sum();
        let collected: usize = window.collects.iter().map(|collect| collect.blocks.len()).sum();
        let folded: usize = window
            .folds
            .iter()
            .map(|fold| {
                (fold.inputs.len() + 1 + usize::from(fold.publish.is_some())) * fold.blocks.len()
            })
            .sum();
        let columns = 2 * (staged + copied + collected) + folded;
        let launches =
            window.stages.len() + window.copies.len() + window.folds.len() + window.collects.len();
        let memory = (columns * world * segments) as f64 * column as f64 * self.byte;
        let host = (launches * segments) as f64 * self.launch;
        rounds * self.round + memory.max(host)
    }
}

#[cfg(test)]
mod tests {
    use unisono_collective::schedule::{Phase, Problem, Topology, build};
    use unisono_collective::{Algorithm, Op};

    use super::*;

    fn all_reduce(algorithm: Algorithm, world: usize, bytes: usize) -> f64 {
        let problem = Problem { op: Op::AllReduce, rank: 0, world };
        let schedule = build(algorithm, &problem, &Topology::one_host(world)).unwrap();
        let [Phase::Window(window)] = &schedule.phases[..] else { panic!("{schedule:?}") };
        let column = bytes / schedule.parts as usize;
        DeviceCosts::default().predict(window, world, column, 1)
    }

    #[test]
    fn little_data_is_folded_by_every_rank_and_much_by_one_each() {
        for world in [2, 3, 4, 8] {
            let prefers_direct = |bytes| {
                all_reduce(Algorithm::WindowDirect, world, bytes)
                    < all_reduce(Algorithm::Window, world, bytes)
            };
            assert!(prefers_direct(1 << 10), "{world}");
            assert!(!prefers_direct(1 << 30), "{world}");
        }
    }

    #[test]
    fn much_data_takes_what_its_bytes_take() {
        // Two ranks stage half, fold half of two inputs into two places, and collect half, each.
        let bytes = 1 << 30;
        let least = 8.0 * bytes as f64 * DeviceCosts::default().byte;
        let predicted = all_reduce(Algorithm::Window, 2, bytes);
        assert!((predicted / least - 1.0).abs() < 0.02, "{predicted}");
    }
}
