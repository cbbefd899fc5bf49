//! Worlds that are no power of two, as teams that are.
//!
//! A world is cut into *teams* whose sizes are powers of two, largest first: the binary digits of
//! `n`. The canonical tree over such a world is `team₀ + (team₁ + (team₂ + …))`, and inside a team
//! neighbours combine first.

use std::ops::Range;

use super::Round;

/// The binary digits of the world, as ranges of ranks, largest first.
pub(super) fn teams(world: usize) -> Vec<Range<usize>> {
    let mut teams = Vec::new();
    let mut start = 0;
    while start < world {
        let size = 1 << (world - start).ilog2();
        teams.push(start..start + size);
        start += size;
    }
    teams
}

/// The steps in which the members of a team meet each other, at distances 1, 2, 4, ….
pub(super) fn steps(team: &Range<usize>) -> usize {
    team.len().ilog2() as usize
}

/// Whether a member is the upper one of its pair in a step.
pub(super) fn is_upper(index: usize, step: usize) -> bool {
    index >> step & 1 == 1
}

/// Rounds by number, growing on demand.
#[derive(Default)]
pub(super) struct Timeline {
    rounds: Vec<Round>,
}

impl Timeline {
    pub(super) fn at(&mut self, number: usize) -> &mut Round {
        if self.rounds.len() <= number {
            self.rounds.resize_with(number + 1, Round::default);
        }
        &mut self.rounds[number]
    }

    /// All rounds, as many as the busiest rank has.
    pub(super) fn padded(mut self, rounds: usize) -> Vec<Round> {
        self.rounds.resize_with(rounds, Round::default);
        self.rounds
    }
}
