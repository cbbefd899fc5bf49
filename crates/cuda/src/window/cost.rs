//! What a call through the window costs.
//!
//! A call takes *rounds*: from the moment at which a rank submits its work until the others know on their hosts that
//! it is done, and have submitted what follows. How long that takes depends on what no rank can see: processes that
//! use a device through MPS use it at once, others take turns. So a group [measures](super::measure) it when it
//! forms, for each [`Way`]: a call of one round, what a second round adds, and what each further segment adds.
//!
//! To that come the bytes. Staged on the device, all ranks share the rate of its memory, at which all that they read
//! and write together takes its time. Staged on the host, a rank's bytes go down and up over the bus at once, and
//! the processor may fold in between; the segments of a call overlap, so that the longest of these takes all its time,
//! and the others that of a segment.

use unisono_collective::schedule::{Source, Window};

use super::way::Way;

/// Measured constants, in seconds. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceCosts {
    /// Of calls staged on the device.
    pub device: Rounds,
    /// Of calls staged on the host whose folds are kernels.
    pub host: Rounds,
    /// Of calls staged on the host that run no kernel.
    pub folded: Rounds,
    /// A byte of device memory, read or written.
    pub byte: f64,
    /// A byte over the bus, one way, while all ranks use it.
    pub bus: f64,
    /// A byte read or written by a processor that folds.
    pub core: f64,
}

/// What the rounds of a call take, beside its bytes. Too large: small calls move more bytes than they need to. Too
/// small: they wait more often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounds {
    /// A call of one round.
    pub first: f64,
    /// What a second round adds.
    pub second: f64,
    /// What each segment but the first adds.
    pub segment: f64,
}

impl Default for DeviceCosts {
    /// What is typical of a server's GPU of today; the rounds are those of processes that use it through MPS.
    fn default() -> DeviceCosts {
        let rounds = |first, second, segment| Rounds { first, second, segment };
        DeviceCosts {
            device: rounds(25e-6, 15e-6, 10e-6),
            host: rounds(40e-6, 25e-6, 15e-6),
            folded: rounds(30e-6, 20e-6, 15e-6),
            byte: 1.0 / 3.5e12,
            bus: 1.0 / 25e9,
            core: 1.0 / 15e9,
        }
    }
}

impl DeviceCosts {
    /// Of these ways, the rounds.
    pub fn rounds(&self, way: Way) -> Rounds {
        match way {
            Way::Device => self.device,
            Way::Copied | Way::Mapped => self.host,
            Way::Folded => self.folded,
        }
    }

    /// The time of a call of so many segments, each with columns of so many bytes, by the schedule of one
    /// of the ranks; the others' are taken to be like it.
    pub fn predict(
        &self,
        way: Way,
        window: &Window,
        world: usize,
        column: usize,
        segments: usize,
    ) -> f64 {
        let Rounds { first, second, segment } = self.rounds(way);
        let rounds =
            first + if window.publishes { second } else { 0.0 } + segment * (segments - 1) as f64;
        let columns = Columns::of(window);
        let bytes = |columns: usize| (columns * segments) as f64 * column as f64;
        let Columns { staged, copied, collected, fetched, published, folded, results } = columns;
        if way == Way::Device {
            let moved = 2 * (staged + copied + collected) + folded + published;
            return rounds + bytes(moved * world) * self.byte;
        }
        let (down, up, core) = match way {
            // What a rank folds of its own is staged as well, in a cell of its own or in the common one.
            Way::Folded if window.cells > 1 => (staged + results, collected + results, folded),
            Way::Folded => (staged.max(results), collected + results, folded),
            _ => (staged + published, collected + fetched, 0),
        };
        let parts = [bytes(down) * self.bus, bytes(up) * self.bus, bytes(core) * self.core];
        let longest = parts.iter().copied().fold(0.0, f64::max);
        let all: f64 = parts.iter().sum();
        rounds + longest + (all - longest) / segments as f64
    }
}

/// Columns that a rank moves in a segment.
struct Columns {
    staged: usize,
    /// Within the caller's memory.
    copied: usize,
    collected: usize,
    /// Inputs of folds that others staged.
    fetched: usize,
    published: usize,
    /// Read and written by folds, but for what is published.
    folded: usize,
    /// Results of folds that the caller gets.
    results: usize,
}

impl Columns {
    fn of(window: &Window) -> Columns {
        let staged_by_others = |source: &&Source| matches!(source, Source::Staged { .. });
        let sum = |part: &dyn Fn(&unisono_collective::schedule::WindowFold) -> usize| {
            window.folds.iter().map(|fold| part(fold) * fold.blocks.len()).sum::<usize>()
        };
        Columns {
            staged: window.stages.iter().map(|stage| stage.blocks.len()).sum(),
            copied: window.copies.iter().map(|copy| copy.blocks.len()).sum(),
            collected: window.collects.iter().map(|collect| collect.blocks.len()).sum(),
            fetched: sum(&|fold| fold.inputs.iter().filter(staged_by_others).count()),
            published: sum(&|fold| usize::from(fold.publish.is_some())),
            folded: sum(&|fold| fold.inputs.len() + 1),
            results: sum(&|_| 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use unisono_collective::schedule::{Phase, Problem, Topology, build};
    use unisono_collective::{Algorithm, Op};

    use super::*;

    fn all_reduce(way: Way, algorithm: Algorithm, world: usize, bytes: usize) -> f64 {
        let problem = Problem { op: Op::AllReduce, rank: 0, world };
        let schedule = build(algorithm, &problem, &Topology::one_host(world)).unwrap();
        let [Phase::Window(window)] = &schedule.phases[..] else { panic!("{schedule:?}") };
        let column = bytes / schedule.parts as usize;
        DeviceCosts::default().predict(way, window, world, column, 1)
    }

    #[test]
    fn little_data_is_folded_by_every_rank_and_much_by_one_each() {
        for world in [2, 3, 4, 8] {
            let prefers_direct = |bytes| {
                all_reduce(Way::Device, Algorithm::WindowDirect, world, bytes)
                    < all_reduce(Way::Device, Algorithm::Window, world, bytes)
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
        let predicted = all_reduce(Way::Device, Algorithm::Window, 2, bytes);
        assert!((predicted / least - 1.0).abs() < 0.02, "{predicted}");
    }

    #[test]
    fn through_the_host_the_longer_direction_counts() {
        let costs = DeviceCosts::default();
        let problem = Problem { op: Op::AllReduce, rank: 0, world: 2 };
        let schedule = build(Algorithm::Window, &problem, &Topology::one_host(2)).unwrap();
        let [Phase::Window(window)] = &schedule.phases[..] else { panic!("{schedule:?}") };
        // Half is staged and half published, half fetched and half collected.
        let (column, segments) = (4 << 20, 64);
        let one_way = (2 * column * segments) as f64 * costs.bus;
        let predicted = costs.predict(Way::Copied, window, 2, column, segments);
        assert!((predicted / one_way - 1.0).abs() < 0.1, "{predicted} {one_way}");
    }
}
