//! Which ranks of a group have a control connection to each other.
//!
//! In a group of a few ranks, all have. In a larger one a rank is connected to the ranks at distance 1,
//! 2, 4, … in both directions around the circle of ranks, its *neighbours*: twice the logarithm of the
//! number of ranks. What one rank has to say to all others they pass on from neighbour to neighbour,
//! in half as many steps as there are distances. When ranks leave, the others stay connected: each of
//! `d` neighbours has ways to the rest that do not use the other neighbours.

/// Ranks up to which all are connected with all. Larger: more connections for groups of this size.
/// Smaller: their news take two steps instead of one.
pub const MESH: usize = 16;

/// The ranks to which `rank` has a control connection, ascending.
pub fn neighbours(rank: usize, world: usize) -> Vec<usize> {
    if world <= MESH {
        return (0..world).filter(|other| *other != rank).collect();
    }
    let distances = std::iter::successors(Some(1), |d| Some(2 * d)).take_while(|d| *d < world);
    let mut all: Vec<usize> =
        distances.flat_map(|d| [(rank + d) % world, (rank + world - d) % world]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Steps from `start` to every rank, over ranks that are `present`.
    fn steps(start: usize, world: usize, present: impl Fn(usize) -> bool) -> Vec<Option<usize>> {
        let mut reached = vec![None; world];
        reached[start] = Some(0);
        let mut frontier = vec![start];
        for step in 1.. {
            if frontier.is_empty() {
                break;
            }
            let mut next = Vec::new();
            for other in frontier.into_iter().flat_map(|at| neighbours(at, world)) {
                if reached[other].is_none() && present(other) {
                    reached[other] = Some(step);
                    next.push(other);
                }
            }
            frontier = next;
        }
        reached
    }

    #[test]
    fn a_few_ranks_know_each_other() {
        assert_eq!(neighbours(0, 1), [0; 0]);
        assert_eq!(neighbours(1, 3), [0, 2]);
        assert_eq!(neighbours(3, MESH).len(), MESH - 1);
        assert_eq!(neighbours(0, 20), [1, 2, 4, 8, 12, 16, 18, 19]);
    }

    #[test]
    fn a_thousand_ranks_are_a_few_steps_apart() {
        for world in [17usize, 64, 100, 256, 1000, 1024] {
            let log = world.ilog2() as usize + 1;
            let farthest = steps(0, world, |_| true).into_iter().map(|s| s.unwrap()).max();
            assert!(farthest.unwrap() <= log / 2 + 1, "{world}: {farthest:?}");
        }
    }

    proptest! {
        #[test]
        fn neighbours_name_each_other_and_are_few(world in 1usize..2000, rank in 0usize..2000) {
            let rank = rank % world;
            let all = neighbours(rank, world);
            prop_assert!(all.is_sorted() && !all.contains(&rank));
            prop_assert!(all.iter().all(|other| *other < world));
            prop_assert!(all.iter().all(|other| neighbours(*other, world).contains(&rank)));
            let most = if world <= MESH { MESH } else { 2 * (world.ilog2() as usize + 1) };
            prop_assert!(all.len() <= most, "{}", all.len());
        }

        #[test]
        fn some_departures_cut_no_rank_off(
            world in 17usize..300,
            leavers in prop::collection::vec(0usize..300, 0..6),
        ) {
            let stays = |rank: usize| !leavers.iter().any(|leaver| leaver % world == rank);
            let first = (0..world).find(|rank| stays(*rank)).unwrap();
            let reached = steps(first, world, stays);
            let lonely: Vec<usize> =
                (0..world).filter(|rank| stays(*rank) && reached[*rank].is_none()).collect();
            prop_assert!(lonely.is_empty(), "{lonely:?}");
        }
    }
}
