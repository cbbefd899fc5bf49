//! The algorithms by name, and which of them can do what.

use super::{
    Area, Fold, Op, Phase, Problem, Round, Schedule, Topology, agreement, block, direct,
    double_tree, halving_doubling, hierarchical, pairwise, recursive_doubling, regional, ring,
    tree, window,
};
use crate::tree::Tree;

/// A way to do a collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Blocks travel around a ring of ranks. Not canonical.
    Ring,
    /// Binomial tree.
    Tree,
    /// Two binary trees that carry half of the data each. Not canonical.
    DoubleTree,
    /// Recursive halving, then recursive doubling.
    HalvingDoubling,
    /// Every rank exchanges one block with every other.
    Pairwise,
    /// Every rank sends all its data to the ranks that need it, in one round.
    Direct,
    /// Shared memory; every rank reduces one block for all.
    Window,
    /// Shared memory; every rank reduces everything for itself.
    WindowDirect,
    /// Shared memory inside the hosts, pairwise exchange between them.
    Hierarchical,
    /// In every step, pairs of ranks exchange all they have added so far.
    RecursiveDoubling,
    /// Inside the regions, then between counterparts of different regions, then inside the regions.
    Regional,
}

impl Algorithm {
    /// Every algorithm, in the order of their wire codes.
    pub const ALL: [Algorithm; 11] = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::DoubleTree,
        Algorithm::HalvingDoubling,
        Algorithm::Pairwise,
        Algorithm::Direct,
        Algorithm::Window,
        Algorithm::WindowDirect,
        Algorithm::Hierarchical,
        Algorithm::RecursiveDoubling,
        Algorithm::Regional,
    ];

    /// The algorithm with this wire code, which is its place in [`Algorithm::ALL`].
    pub fn from_code(code: u8) -> Option<Algorithm> {
        Algorithm::ALL.get(code as usize).copied()
    }

    /// The name used on the command line, in the environment and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::DoubleTree => "double-tree",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Direct => "direct",
            Algorithm::Window => "window",
            Algorithm::WindowDirect => "window-direct",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Regional => "regional",
        }
    }

    /// Whether its reductions evaluate the canonical tree.
    pub const fn is_canonical(self) -> bool {
        !matches!(self, Algorithm::Ring | Algorithm::DoubleTree)
    }

    /// Whether it can do the operation among these ranks.
    pub fn supports(self, op: Op, topology: &Topology) -> bool {
        let world = topology.world();
        if world == 1 {
            return true;
        }
        match self {
            Algorithm::Ring => {
                matches!(op, Op::AllReduce | Op::ReduceScatter | Op::AllGather)
            }
            Algorithm::Tree => !matches!(op, Op::ReduceScatter | Op::AllGather | Op::AllToAll),
            Algorithm::DoubleTree | Algorithm::RecursiveDoubling => op == Op::AllReduce,
            Algorithm::HalvingDoubling => match op {
                Op::AllReduce => true,
                Op::ReduceScatter | Op::AllGather => world.is_power_of_two(),
                _ => false,
            },
            Algorithm::Pairwise => true,
            Algorithm::Direct => !op.has_blocks(),
            Algorithm::Window => topology.is_one_host(),
            Algorithm::WindowDirect => {
                topology.is_one_host() && matches!(op, Op::AllReduce | Op::Reduce { .. })
            }
            Algorithm::Hierarchical => {
                !matches!(op, Op::Gather { .. } | Op::Scatter { .. } | Op::AllToAll)
            }
            Algorithm::Regional => op == Op::AllReduce && topology.regions() > 1,
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no algorithm's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown algorithm {name:?}; expected one of {}", Algorithm::ALL.map(Algorithm::name).join(", "))]
pub struct UnknownAlgorithm {
    /// The name.
    pub name: String,
}

impl std::str::FromStr for Algorithm {
    type Err = UnknownAlgorithm;
    fn from_str(s: &str) -> Result<Algorithm, UnknownAlgorithm> {
        let found = Algorithm::ALL.into_iter().find(|a| a.name() == s);
        found.ok_or_else(|| UnknownAlgorithm { name: s.to_owned() })
    }
}

/// What `problem.rank` does; `None` if the algorithm [does not do this](Algorithm::supports).
///
/// # Panics
/// If the problem's world is not the topology's.
pub fn build(algorithm: Algorithm, problem: &Problem, topology: &Topology) -> Option<Schedule> {
    assert_eq!(problem.world, topology.world(), "a topology of another world");
    if !algorithm.supports(problem.op, topology) {
        return None;
    }
    if problem.world == 1 {
        return Some(alone(problem.op));
    }
    let mut schedule = match algorithm {
        Algorithm::Ring => ring::build(problem),
        Algorithm::Tree => tree::build(problem),
        Algorithm::DoubleTree => double_tree::build(problem),
        Algorithm::HalvingDoubling => halving_doubling::build(problem),
        Algorithm::Pairwise => Some(pairwise::build(problem)),
        Algorithm::Direct => direct::build(problem),
        Algorithm::Window => Some(window::build(problem)),
        Algorithm::WindowDirect => window::build_direct(problem),
        Algorithm::RecursiveDoubling => recursive_doubling::build(problem),
        // Its leaders agree among themselves.
        Algorithm::Hierarchical => return hierarchical::build(problem, topology),
        Algorithm::Regional => regional::build(problem, topology),
    }?;
    // Memory that is shared shows every rank's call to all.
    if problem.op.root().is_some()
        && let [Phase::Rounds(rounds)] = &mut schedule.phases[..]
    {
        let all: Vec<usize> = (0..problem.world).collect();
        agreement::weave(&mut rounds.rounds, &all, problem.rank);
    }
    Some(schedule)
}

/// The algorithms that can do an operation and, where the reduction must be `canonical`, are.
pub fn able(op: Op, topology: &Topology, canonical: bool) -> Vec<Algorithm> {
    // Alone, they all do the same.
    if topology.world() == 1 {
        return vec![Algorithm::Direct];
    }
    Algorithm::ALL
        .into_iter()
        .filter(|a| a.supports(op, topology))
        .filter(|a| a.is_canonical() || !canonical || !op.reduces())
        .collect()
}

/// Ranks up to which each may have a link to each other one only because that is quicker. More: larger
/// groups open more connections. Fewer: they are kept from what may be quicker.
const LINKED: usize = 64;

/// Those of the [`able`] ones that are worth pricing. Hierarchies of one level are left out, and
/// sockets where all ranks share memory: they would win only on a machine too busy to measure. In a large
/// world, so is what needs links between all ranks, if anything with fewer messages can do it.
pub fn candidates(op: Op, topology: &Topology, canonical: bool) -> Vec<Algorithm> {
    let able = able(op, topology, canonical);
    if topology.world() == 1 {
        return able;
    }
    let flat = topology.is_one_host() || topology.is_all_apart();
    // Two ranks move the same bytes either way, but wait half as often if both reduce everything.
    let pair = topology.world() == 2 && op == Op::AllReduce;
    let mut able: Vec<Algorithm> = able
        .into_iter()
        .filter(|a| *a != Algorithm::Hierarchical || !flat)
        .filter(|a| {
            !topology.is_one_host() || matches!(a, Algorithm::Window | Algorithm::WindowDirect)
        })
        .filter(|a| *a != Algorithm::Window || !pair)
        .collect();
    let needs_all = |a: &Algorithm| matches!(a, Algorithm::Direct | Algorithm::Pairwise);
    let has_fewer = |a: &Algorithm| !needs_all(a) && *a != Algorithm::Ring;
    if topology.world() > LINKED && able.iter().any(has_fewer) {
        able.retain(|a| !needs_all(a));
    }
    able
}

/// A world of one has no peer: the input is the output.
fn alone(op: Op) -> Schedule {
    let fold = Fold {
        inputs: vec![Area::Input],
        tree: Tree::canonical(1),
        blocks: block(0),
        into: Area::Output,
        root: op.reduces(),
    };
    Schedule::of_rounds(vec![Round { folds: vec![fold], ..Round::default() }], 1, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.name().parse(), Ok(algorithm));
            assert_eq!(Algorithm::from_code(algorithm as u8), Some(algorithm));
        }
        let error = "rings".parse::<Algorithm>().unwrap_err();
        assert!(error.to_string().contains("double-tree"), "{error}");
    }

    #[test]
    fn what_is_supported_is_built() {
        let ops = [
            Op::AllReduce,
            Op::ReduceScatter,
            Op::AllGather,
            Op::Broadcast { root: 0 },
            Op::Reduce { root: 0 },
            Op::Gather { root: 0 },
            Op::Scatter { root: 0 },
            Op::AllToAll,
        ];
        for world in [1, 2, 3, 4] {
            for topology in [Topology::one_host(world), Topology::all_apart(world)] {
                for (op, algorithm) in
                    ops.iter().flat_map(|op| Algorithm::ALL.map(|algorithm| (*op, algorithm)))
                {
                    let built = build(algorithm, &Problem { op, rank: 0, world }, &topology);
                    assert_eq!(built.is_some(), algorithm.supports(op, &topology));
                }
            }
        }
    }

    #[test]
    fn large_worlds_have_few_links_where_they_can() {
        let large = Topology::all_apart(100);
        let reduces = candidates(Op::AllReduce, &large, true);
        assert!(reduces.contains(&Algorithm::Tree) && !reduces.contains(&Algorithm::Pairwise));
        // A ring has as many messages, one after the other.
        assert!(candidates(Op::AllGather, &large, true).contains(&Algorithm::Pairwise));
        assert!(candidates(Op::AllToAll, &large, true).contains(&Algorithm::Pairwise));
    }

    #[test]
    fn canonical_candidates_are_canonical() {
        let topology = Topology::all_apart(4);
        let canonical = candidates(Op::AllReduce, &topology, true);
        assert!(!canonical.contains(&Algorithm::Ring));
        assert!(candidates(Op::AllReduce, &topology, false).contains(&Algorithm::Ring));
        assert!(candidates(Op::AllGather, &topology, true).contains(&Algorithm::Ring));
    }
}
