//! Whom to exchange with, and which exchanges count: no I/O, no clock, no arithmetic.
//!
//! *Partners* are visited in cycles. In each cycle every other worker has one turn, in an order drawn
//! from seed, rank and the number of the cycle, so partners change and none is forgotten. Only those
//! *within reach* (there is a connection) are chosen; the others lose their turn. A partner with whom
//! an exchange failed is out of reach until the worker *knocked* and was answered. Knocking goes on
//! beside the exchanges, so a network that swallows packets holds no worker up, and rests between two
//! attempts for a *backoff*, which doubles with every failure in a row; a sign of life (a reply, or an
//! offer of the partner's own) ends it at once.
//!
//! *Exchanges* are numbered from 1 within a life of a worker. At most one that this worker asked for is
//! under way. What belongs to an exchange that was given up is ignored, and of a partner's only those
//! count whose (life, number) is larger than all before.
//!
//! Time is a [`Duration`] since any fixed moment, passed in.

use std::time::Duration;

use super::stats::{GossipStats, PartnerStats};
use super::wire::Reason;
use crate::{Clock, Life};

/// The bookkeeping of one worker.
pub struct Core {
    rank: u32,
    seed: u64,
    backoff: Backoff,
    /// The other workers: those before `turn` had theirs in this cycle.
    order: Vec<u32>,
    turn: usize,
    cycle: u64,
    begun: u64,
    active: Option<Exchange>,
    /// By rank.
    peers: Vec<Peer>,
    skipped: u64,
    latest: Option<u32>,
}

/// An exchange this worker asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// With whom.
    pub partner: u32,
    /// Its number within this worker's life.
    pub number: u64,
}

/// How an exchange this worker asked for ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The partner moved, and its reply is here.
    Met(Meeting),
    /// The partner is there, but would not.
    Declined,
    /// No reply came. The partner may have moved or not.
    Lost,
}

/// What an exchange brought to light.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meeting {
    /// Clocks between the two workers.
    pub lead: u64,
    /// The distance of their weights before.
    pub distance: f64,
}

/// How long a partner is left alone after a failure.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    first: Duration,
    most: Duration,
}

#[derive(Clone, Default)]
struct Peer {
    /// There is a connection to it.
    within_reach: bool,
    /// This worker is trying to connect.
    knocking: bool,
    /// Failures since its last sign of life.
    failures: u32,
    /// Its backoff ends then.
    rests_until: Duration,
    /// Life and number of the latest offer that counted.
    heard: (Life, u64),
    stats: PartnerStats,
}

impl Core {
    /// The bookkeeping of worker `rank` of `world`. Backoffs are fractions of `timeout`, up to it.
    pub fn new(rank: u32, world: u32, seed: u64, timeout: Duration) -> Core {
        let order: Vec<u32> = (0..world).filter(|&peer| peer != rank).collect();
        Core {
            rank,
            seed,
            backoff: Backoff::within(timeout),
            turn: order.len(),
            order,
            cycle: 0,
            begun: 0,
            active: None,
            peers: vec![Peer::default(); world as usize],
            skipped: 0,
            latest: None,
        }
    }

    /// A worker to knock at now; to be followed by [`Core::reached`] or [`Core::unanswered`].
    pub fn knock(&mut self, now: Duration) -> Option<u32> {
        let due = |peer: &Peer| !peer.within_reach && !peer.knocking && peer.rests_until <= now;
        let mut others = (0..).zip(&mut self.peers).filter(|(rank, _)| *rank != self.rank);
        let (rank, peer) = others.find(|(_, peer)| due(peer))?;
        peer.knocking = true;
        Some(rank)
    }

    /// There is a connection to `peer`.
    pub fn reached(&mut self, peer: u32) {
        let peer = &mut self.peers[peer as usize];
        (peer.within_reach, peer.knocking) = (true, false);
    }

    /// Knocking at `peer` was in vain.
    pub fn unanswered(&mut self, peer: u32, now: Duration) {
        self.peers[peer as usize].fails(self.backoff, now);
    }

    /// Begins an exchange with the next partner, unless one is under way or no partner is within reach.
    pub fn begin(&mut self) -> Option<Exchange> {
        let partner = if self.active.is_none() { self.next_partner() } else { None };
        let Some(partner) = partner else {
            self.skipped += 1;
            return None;
        };
        self.begun += 1;
        self.active = Some(Exchange { partner, number: self.begun });
        self.active
    }

    /// Ends an exchange. Says whether it was still under way: if not, its reply must be ignored.
    #[must_use]
    pub fn finish(&mut self, exchange: Exchange, outcome: Outcome, now: Duration) -> bool {
        if self.active != Some(exchange) {
            return false;
        }
        self.active = None;
        let peer = &mut self.peers[exchange.partner as usize];
        match outcome {
            Outcome::Met(meeting) => {
                peer.lives();
                peer.stats.done += 1;
                self.record(exchange.partner, meeting);
            }
            Outcome::Declined => {
                peer.lives();
                peer.stats.failed += 1;
            }
            Outcome::Lost => {
                peer.stats.failed += 1;
                peer.fails(self.backoff, now);
            }
        }
        true
    }

    /// Judges an offer of another worker that has arrived whole: to be carried out now, or declined for this
    /// reason.
    pub fn offered(&mut self, from: u32, life: Life, number: u64) -> Result<(), Reason> {
        let crossed = self.active.is_some_and(|own| own.partner == from) && self.rank < from;
        let peer = &mut self.peers[from as usize];
        peer.lives();
        if (life, number) <= peer.heard {
            peer.stats.declined += 1;
            return Err(Reason::Repeated);
        }
        peer.heard = (life, number);
        if crossed {
            peer.stats.declined += 1;
            return Err(Reason::Crossed);
        }
        Ok(())
    }

    /// An accepted offer of `from` was carried out.
    pub fn answered(&mut self, from: u32, meeting: Meeting) {
        self.peers[from as usize].stats.answered += 1;
        self.record(from, meeting);
    }

    /// An offer of `from` was declined for what it brought.
    pub fn declined(&mut self, from: u32) {
        self.peers[from as usize].stats.declined += 1;
    }

    /// This many bytes went to or came from `peer`.
    pub fn moved(&mut self, peer: u32, bytes: u64) {
        self.peers[peer as usize].stats.bytes += bytes;
    }

    /// No exchange was asked for where one could have been.
    pub fn skip(&mut self) {
        self.skipped += 1;
    }

    /// What was counted so far, for a worker at `clock`.
    pub fn stats(&self, clock: Clock) -> GossipStats {
        GossipStats {
            clock,
            skipped: self.skipped,
            latest: self.latest,
            partners: self.peers.iter().map(|peer| peer.stats.clone()).collect(),
        }
    }

    fn record(&mut self, partner: u32, meeting: Meeting) {
        self.latest = Some(partner);
        let stats = &mut self.peers[partner as usize].stats;
        (stats.lead, stats.distance) = (meeting.lead, meeting.distance);
    }

    fn next_partner(&mut self) -> Option<u32> {
        // The rest of this cycle, and if no partner in it is within reach, one more.
        for _ in 0..2 {
            while let Some(&partner) = self.order.get(self.turn) {
                self.turn += 1;
                if self.peers[partner as usize].within_reach {
                    return Some(partner);
                }
            }
            self.next_cycle();
        }
        None
    }

    fn next_cycle(&mut self) {
        self.cycle += 1;
        self.turn = 0;
        let mut random = Random::new(&[self.seed, u64::from(self.rank), self.cycle]);
        for place in (1..self.order.len()).rev() {
            self.order.swap(place, random.below(place as u64 + 1) as usize);
        }
    }
}

impl Peer {
    fn lives(&mut self) {
        (self.failures, self.rests_until) = (0, Duration::ZERO);
    }

    fn fails(&mut self, backoff: Backoff, now: Duration) {
        (self.within_reach, self.knocking) = (false, false);
        self.rests_until = now.saturating_add(backoff.after(self.failures));
        self.failures = self.failures.saturating_add(1);
    }
}

impl Backoff {
    /// The first backoff, as a fraction of the timeout. A larger one leaves a partner that stumbled
    /// alone for longer; a smaller one knocks more often where no worker listens.
    const FIRST: u32 = 64;

    fn within(timeout: Duration) -> Backoff {
        Backoff { first: timeout / Backoff::FIRST, most: timeout }
    }

    fn after(self, failures: u32) -> Duration {
        self.first.saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX)).min(self.most)
    }
}

/// SplitMix64.
pub(super) struct Random(u64);

impl Random {
    /// The sequence that belongs to these numbers.
    pub(super) fn new(subject: &[u64]) -> Random {
        let mut random = Random(0);
        for part in subject {
            random.0 = random.bits() ^ part;
        }
        random
    }

    /// A number below `bound`, which is not 0. The bias is below `bound / 2^64`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(64);
    const NOW: Duration = Duration::ZERO;
    const MET: Outcome = Outcome::Met(Meeting { lead: 0, distance: 1.0 });

    /// A core that has all partners within reach.
    fn connected(rank: u32, world: u32) -> Core {
        let mut core = Core::new(rank, world, 5, TIMEOUT);
        while let Some(peer) = core.knock(NOW) {
            core.reached(peer);
        }
        core
    }

    fn partners(core: &mut Core, count: usize) -> Vec<u32> {
        let mut partners = Vec::new();
        for _ in 0..count {
            let exchange = core.begin().unwrap();
            assert!(core.finish(exchange, MET, NOW));
            partners.push(exchange.partner);
        }
        partners
    }

    #[test]
    fn every_partner_has_a_turn_in_every_cycle_and_orders_change() {
        let mut core = connected(2, 7);
        let cycles: Vec<Vec<u32>> = (0..20).map(|_| partners(&mut core, 6)).collect();
        for cycle in &cycles {
            let mut sorted = cycle.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 3, 4, 5, 6]);
        }
        assert!(cycles.windows(2).any(|pair| pair[0] != pair[1]));
        assert_eq!(partners(&mut connected(2, 7), 6), cycles[0]);
    }

    #[test]
    fn one_exchange_at_a_time_and_none_twice() {
        let mut core = connected(0, 3);
        let first = core.begin().unwrap();
        assert_eq!(core.begin(), None);
        assert!(core.finish(first, Outcome::Lost, NOW));
        assert!(!core.finish(first, MET, NOW), "a late reply must be ignored");
        let second = core.begin().unwrap();
        assert!(second.partner != first.partner && second.number > first.number);
        assert!(!core.finish(first, MET, NOW));
        let stats = core.stats(Clock::START);
        assert_eq!((stats.done(), stats.failed(), stats.skipped), (0, 1, 1));
    }

    #[test]
    fn who_fails_is_left_alone_for_longer_and_longer() {
        let mut core = Core::new(0, 2, 1, TIMEOUT);
        let mut now = NOW;
        for rest in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(core.knock(now), Some(1));
            assert_eq!(core.knock(now), None, "one attempt at a time");
            core.unanswered(1, now);
            now += Duration::from_secs(rest);
            assert_eq!(core.knock(now - Duration::from_nanos(1)), None);
        }
        assert_eq!(core.knock(now), Some(1));
        core.unanswered(1, now);
        assert_eq!(core.offered(1, Life(1), 1), Ok(()));
        assert_eq!(core.knock(now), Some(1), "an offer is a sign of life");
        core.reached(1);
        assert_eq!(core.knock(now), None);
        assert!(core.begin().is_some());
    }

    #[test]
    fn others_are_chosen_meanwhile() {
        let mut core = connected(0, 4);
        let lost = core.begin().unwrap();
        assert!(core.finish(lost, Outcome::Lost, NOW));
        assert!(!partners(&mut core, 50).contains(&lost.partner));
        assert_eq!(connected(0, 1).begin(), None);
        assert_eq!(Core::new(0, 4, 1, TIMEOUT).begin(), None, "no partner is within reach yet");
    }

    #[test]
    fn offers_count_once_and_in_order() {
        let mut core = Core::new(0, 2, 1, TIMEOUT);
        assert_eq!(core.offered(1, Life(7), 1), Ok(()));
        assert_eq!(core.offered(1, Life(7), 1), Err(Reason::Repeated));
        assert_eq!(core.offered(1, Life(7), 3), Ok(()));
        assert_eq!(core.offered(1, Life(7), 2), Err(Reason::Repeated));
        assert_eq!(core.offered(1, Life(8), 1), Ok(()), "a new life counts from 1");
        assert_eq!(core.offered(1, Life(7), 4), Err(Reason::Repeated), "the old life is over");
    }

    #[test]
    fn of_two_that_cross_the_lower_rank_goes_first() {
        let (mut low, mut high) = (connected(0, 2), connected(1, 2));
        let ours = low.begin().unwrap();
        let theirs = high.begin().unwrap();
        assert_eq!(low.offered(1, Life(1), theirs.number), Err(Reason::Crossed));
        assert_eq!(high.offered(0, Life(1), ours.number), Ok(()));
    }
}
