//! Agreement on the root.
//!
//! Which ranks exchange messages in a rooted operation depends on the root. Ranks that name different roots may
//! find no rank to contradict them: each sends to those it believes to be waiting, and is content.
//! So the participants also exchange messages of no blocks, in a pattern that depends on nothing but
//! their order; every message names the whole call, and a receiver refuses another one than its
//! own.
//!
//! The pattern is *dissemination*: in round `k`, participant `i` sends to `i + 2ᵏ` and hears from
//! `i − 2ᵏ`, around the circle. After `⌈log₂ n⌉` rounds every rank has heard from every other, directly
//! or through others that agreed, so that none succeeds unless all made the same call. They are
//! woven into the rounds that move the data, and cost no latency of their own where those are as
//! many.

use super::{Area, Blocks, Recv, Round, Send};

const NOTHING: Blocks = 0..0;

/// Weaves the messages of participant `own` into its rounds; the ranks of all are `participants`.
pub(super) fn weave(rounds: &mut Vec<Round>, participants: &[usize], own: usize) {
    let count = participants.len();
    let needed = extend(rounds, count);
    for (k, round) in rounds.iter_mut().take(needed).enumerate() {
        let distance = 1 << k;
        let to = participants[(own + distance) % count];
        let from = participants[(own + count - distance) % count];
        round.sends.push(Send { to, blocks: NOTHING, from: Area::Input });
        round.recvs.push(Recv { from, blocks: NOTHING, into: Area::Output });
    }
}

/// Makes room for the messages of `count` participants; the rounds they take.
pub(super) fn extend(rounds: &mut Vec<Round>, count: usize) -> usize {
    let needed = count.next_power_of_two().trailing_zeros() as usize;
    if rounds.len() < needed {
        rounds.resize(needed, Round::default());
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that has gone through all rounds has heard, directly or not, from every other.
    #[test]
    fn every_rank_hears_from_every_other() {
        for count in 1..=33_usize {
            let participants: Vec<usize> = (0..count).map(|i| 10 * i).collect();
            let all: Vec<Vec<Round>> = (0..count)
                .map(|own| {
                    let mut rounds = vec![Round::default(); 2];
                    weave(&mut rounds, &participants, own);
                    rounds
                })
                .collect();
            let mut heard: Vec<Vec<bool>> =
                (0..count).map(|i| (0..count).map(|j| i == j).collect()).collect();
            for k in 0..all[0].len() {
                let before = heard.clone();
                for (own, rounds) in all.iter().enumerate() {
                    for recv in &rounds[k].recvs {
                        let from = recv.from / 10;
                        assert!(all[from][k].sends.iter().any(|send| send.to == 10 * own));
                        (0..count).for_each(|j| heard[own][j] |= before[from][j]);
                    }
                }
            }
            assert!(heard.iter().flatten().all(|heard| *heard), "{count}");
        }
    }
}
