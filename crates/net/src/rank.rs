//! The number of a rank in the job, and lists of such numbers.
//!
//! A group numbers its ranks from 0. In a group of all ranks that number is the job's; in a sub-group it is
//! the place among its members. Inside a group, and in what callers ask of it (a root, the rank to send
//! to), a rank is a `usize` of the group. What a group tells its users, in errors and in the log, is a
//! [`Rank`]: the number under which a rank was started.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// A rank as the job numbers it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Rank(pub usize);

impl Rank {
    /// The ranks of a job of `world`.
    pub fn all(world: usize) -> Vec<Rank> {
        (0..world).map(Rank).collect()
    }
}

impl Display for Rank {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Entries of a list of ranks, each a rank or a range of them, that a message spells out. More: longer
/// lines. Fewer: a user has to look for the ranks elsewhere.
const LISTED: usize = 6;

/// Ranks in a sentence: "rank 3", or "ranks 3, 7, 12–40 and 200 more".
pub struct Listed<'a>(pub &'a [Rank]);

impl Display for Listed<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut ranks: Vec<usize> = self.0.iter().map(|rank| rank.0).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut left = match &ranks[..] {
            [] => return f.write_str("no rank"),
            [rank] => return write!(f, "rank {rank}"),
            ranks => ranks,
        };
        // Two neighbours are two entries; more are a range.
        let run = |ranks: &[usize]| match ranks.windows(2).take_while(|w| w[0] + 1 == w[1]).count()
        {
            0 | 1 => 1,
            further => further + 1,
        };
        for entry in 0..LISTED {
            let Some(first) = left.first() else { break };
            let (these, rest) = left.split_at(run(left));
            let before = match entry {
                0 => "ranks ",
                _ if rest.is_empty() => " and ",
                _ => ", ",
            };
            match these {
                [_] => write!(f, "{before}{first}")?,
                these => write!(f, "{before}{first}–{}", these[these.len() - 1])?,
            }
            left = rest;
        }
        match left.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(ranks: impl IntoIterator<Item = usize>) -> String {
        Listed(&ranks.into_iter().map(Rank).collect::<Vec<_>>()).to_string()
    }

    #[test]
    fn a_list_of_ranks_is_short_however_many_there_are() {
        assert_eq!(listed([]), "no rank");
        assert_eq!(listed([3]), "rank 3");
        assert_eq!(listed([3, 1]), "ranks 1 and 3");
        assert_eq!(listed([0, 1, 5]), "ranks 0, 1 and 5");
        assert_eq!(listed(0..3), "ranks 0–2");
        assert_eq!(listed([3, 7].into_iter().chain(12..41)), "ranks 3, 7 and 12–40");
        assert_eq!(listed((0..1000).step_by(2)), "ranks 0, 2, 4, 6, 8, 10 and 494 more");
        let many = [3, 7].into_iter().chain(12..41).chain((50..450).step_by(2));
        assert_eq!(listed(many), "ranks 3, 7, 12–40, 50, 52, 54 and 197 more");
    }
}
