//! How the ranks of a group that forms find out that all are there.
//!
//! Every rank connects to its [neighbours](crate::control::overlay) and tells them what it knows: which
//! have come (*here*), which have all their connections and their memory (*ready*), the *instance* of the group,
//! and the first failure. What it hears, it adds to that and passes on. All of it only grows, so the order
//! in which it travels does not matter, and no rank waits for a particular other one.
//!
//! A list of ranks may form a group again and again, also while an earlier one is in use, and members may
//! have tried without the others before. So rank 0 draws a number for the instance when it comes, and
//! whatever is opened later (memory, links, messages) carries it. A rank asks for the memory only once
//! all are here and it knows the instance.
//!
//! A rank has formed the group when all are ready and every neighbour has said so: from then on, what
//! comes on that connection are control frames. A failure before ends the attempt on all ranks. A rank that has
//! said that all are ready says nothing more here, whatever happens to it: those it said it to may have formed the
//! group, and learn by control frames that it has not.
//!
//! No clock, no sockets.

use serde::{Deserialize, Serialize};

use crate::error::FormError;
use crate::excerpt::beginning;
use unisono_net::rank::Rank;

/// A set of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks(Vec<u64>);

/// What a rank tells its neighbours: all it knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    /// A hash of its settings.
    settings: [u8; 32],
    here: Ranks,
    ready: Ranks,
    instance: Option<u64>,
    failure: Option<Failure>,
}

/// Why the group does not form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Two ranks came with different settings, these hashes of them.
    Settings {
        /// The two.
        ranks: [Rank; 2],
        /// Their settings.
        hashes: [[u8; 32]; 2],
    },
    /// Ranks did not come in time.
    Missing {
        /// Which.
        missing: Vec<Rank>,
    },
    /// A rank could not do its part, for this reason; empty if it vanished.
    Rank {
        /// Which.
        rank: Rank,
        /// Why.
        reason: String,
    },
}

/// An update that no rank of this group would send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Bytes of a reason.
const REASON: usize = 512;

/// Bytes of an update of a group of `world` ranks, at most: sets of ranks as 64 bits in 10 bytes each, a
/// list of missing ranks in 5 bytes each.
pub fn longest_update(world: usize) -> usize {
    256 + REASON + 2 * 10 * world.div_ceil(64) + 5 * world
}

/// What one rank knows about a group that forms.
pub struct Gathering {
    me: usize,
    members: Vec<Rank>,
    known: Update,
    /// How often that has changed.
    version: u64,
    neighbours: Vec<Neighbour>,
}

struct Neighbour {
    rank: usize,
    connected: bool,
    heard: bool,
    /// Whether it has said that all are ready.
    is_final: bool,
    /// The version and the stage it was told last.
    told: Option<(u64, Stage)>,
}

/// How far the group is. Neighbours hear of a new stage at once, of other news now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Coming,
    Here,
    Ready,
    Failed,
}

impl Gathering {
    /// Rank `me` of a group of these ranks comes, with these settings; the group's rank 0 with the number
    /// of the instance.
    pub fn new(
        me: usize,
        members: Vec<Rank>,
        neighbours: &[usize],
        settings: [u8; 32],
        instance: Option<u64>,
    ) -> Gathering {
        let world = members.len();
        let (mut here, ready) = (Ranks::none(world), Ranks::none(world));
        here.insert(me);
        let neighbour =
            |&rank| Neighbour { rank, connected: false, heard: false, is_final: false, told: None };
        let known = Update { settings, here, ready, instance, failure: None };
        let neighbours = neighbours.iter().map(neighbour).collect();
        Gathering { me, members, known, version: 0, neighbours }
    }

    /// There is a connection to a neighbour.
    pub fn connect(&mut self, rank: usize) {
        if let Some(neighbour) = self.neighbour(rank) {
            // If it replaces one of an earlier attempt, that one's words do not count.
            let fresh =
                Neighbour { rank, connected: true, heard: false, is_final: false, told: None };
            *neighbour = fresh;
        }
    }

    /// Whether there are connections to all neighbours.
    pub fn is_connected(&self) -> bool {
        self.neighbours.iter().all(|neighbour| neighbour.connected)
    }

    /// The connection to a neighbour is gone.
    pub fn lose(&mut self, rank: usize) {
        // A rank that has formed the group may leave it before this one has formed it.
        if self.neighbour(rank).is_some_and(|neighbour| !neighbour.is_final) {
            self.fail_for(rank, "");
        }
    }

    /// This rank has all it needs.
    pub fn set_ready(&mut self) {
        if self.known.ready.insert(self.me) {
            self.version += 1;
        }
    }

    /// The attempt has failed; the first failure counts.
    pub fn fail(&mut self, failure: Failure) {
        if self.known.failure.is_none() {
            self.known.failure = Some(failure.shortened());
            self.version += 1;
        }
    }

    /// The attempt has failed because of this rank.
    pub fn fail_for(&mut self, rank: usize, reason: &str) {
        self.fail(Failure::Rank { rank: self.members[rank], reason: reason.into() });
    }

    /// Takes what a neighbour tells.
    pub fn hear(&mut self, from: usize, update: Update) -> Result<(), Malformed> {
        let Update { settings, here, ready, instance, failure } = update;
        let world = self.members.len();
        if !here.is_of(world) || !ready.is_of(world) {
            return Err(Malformed);
        }
        let is_final = ready.is_full(world) && failure.is_none();
        let neighbour = self.neighbour(from).ok_or(Malformed)?;
        neighbour.heard = true;
        neighbour.is_final |= is_final;
        if settings != self.known.settings {
            self.differ(from, settings);
            return Ok(());
        }
        if let Some(failure) = failure {
            self.fail(failure.of(&self.members)?);
        }
        if self.known.here.add(&here) | self.known.ready.add(&ready) {
            self.version += 1;
        }
        match (self.known.instance, instance) {
            (Some(own), Some(theirs)) if own != theirs => {
                self.fail_for(from, "it took part in another attempt to form the group");
            }
            (None, Some(_)) => {
                self.known.instance = instance;
                self.version += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// What to tell a neighbour now. News that are no new stage of the group wait until `now_and_then`.
    pub fn due(&mut self, rank: usize, now_and_then: bool) -> Option<Update> {
        let (version, stage) = (self.version, self.stage());
        let neighbour = self.neighbour(rank).filter(|neighbour| neighbour.connected)?;
        let due = match neighbour.told {
            None => true,
            Some((_, Stage::Ready)) => false,
            Some((told, _)) if now_and_then => told < version,
            Some((_, told)) => told < stage,
        };
        if !due {
            return None;
        }
        neighbour.told = Some((version, stage));
        Some(self.known.clone())
    }

    /// Whether a neighbour does not know all that this rank knows.
    pub fn has_news(&self) -> bool {
        let is_behind = |neighbour: &Neighbour| match neighbour.told {
            Some((_, Stage::Ready)) => false,
            Some((told, _)) => told < self.version,
            None => true,
        };
        self.neighbours.iter().any(|neighbour| neighbour.connected && is_behind(neighbour))
    }

    /// Whether all ranks have come, as far as this rank knows.
    pub fn are_all_here(&self) -> bool {
        self.known.here.is_full(self.members.len())
    }

    /// Whether a neighbour will send no more updates: what follows is something else.
    pub fn is_final(&self, rank: usize) -> bool {
        self.neighbours.iter().any(|neighbour| neighbour.rank == rank && neighbour.is_final)
    }

    /// Whether a neighbour was told that all are ready, and takes what follows for control frames.
    pub fn has_told_all_ready(&self, rank: usize) -> bool {
        let told = |neighbour: &Neighbour| matches!(neighbour.told, Some((_, Stage::Ready)));
        self.neighbours.iter().any(|neighbour| neighbour.rank == rank && told(neighbour))
    }

    /// The instance, once all ranks are here.
    pub fn instance(&self) -> Option<u64> {
        self.known.instance.filter(|_| self.are_all_here())
    }

    /// The ranks that have not come, as far as this rank knows.
    pub fn missing(&self) -> Vec<usize> {
        self.known.here.missing(self.members.len())
    }

    /// The ranks that are not ready.
    pub fn unready(&self) -> Vec<usize> {
        self.known.ready.missing(self.members.len())
    }

    /// Whether the group has formed, as seen from here.
    pub fn is_formed(&self) -> bool {
        let knows = |neighbour: &Neighbour| {
            neighbour.is_final && neighbour.told.is_some_and(|(_, stage)| stage >= Stage::Ready)
        };
        self.stage() == Stage::Ready && self.neighbours.iter().all(knows)
    }

    /// Whether the attempt has failed. Ranks whose settings differ hear each other out first, so that all
    /// of them name the same ranks.
    pub fn has_failed(&self) -> bool {
        match self.known.failure {
            Some(Failure::Settings { .. }) => self.neighbours.iter().all(|n| n.heard),
            Some(_) => true,
            None => false,
        }
    }

    /// The error of this rank, if the attempt has failed.
    pub fn error(&self, after: std::time::Duration) -> Option<FormError> {
        Some(match self.known.failure.clone()? {
            Failure::Settings { ranks, hashes } => {
                let other = match ranks.iter().position(|rank| *rank == self.members[self.me]) {
                    Some(own) => 1 - own,
                    None => usize::from(hashes[1] != self.known.settings),
                };
                FormError::Settings { peer: ranks[other] }
            }
            Failure::Missing { missing } => FormError::Missing { missing, after },
            Failure::Rank { rank, reason } => FormError::Peer { peer: rank, reason },
        })
    }

    /// A neighbour came with other settings.
    fn differ(&mut self, from: usize, settings: [u8; 32]) {
        let ranks = [self.members[self.me], self.members[from]];
        let differ = Failure::Settings { ranks, hashes: [self.known.settings, settings] };
        match &self.known.failure {
            // All of them differ from this rank: the lowest is named.
            Some(Failure::Settings { ranks: [own, other], .. })
                if *own == ranks[0] && ranks[1] < *other =>
            {
                self.known.failure = Some(differ);
                self.version += 1;
            }
            _ => self.fail(differ),
        }
    }

    fn stage(&self) -> Stage {
        match &self.known {
            Update { failure: Some(_), .. } => Stage::Failed,
            Update { ready, .. } if ready.is_full(self.members.len()) => Stage::Ready,
            _ if self.instance().is_some() => Stage::Here,
            _ => Stage::Coming,
        }
    }

    fn neighbour(&mut self, rank: usize) -> Option<&mut Neighbour> {
        self.neighbours.iter_mut().find(|neighbour| neighbour.rank == rank)
    }
}

impl Failure {
    /// The failure, if its ranks are of a group with these members.
    fn of(self, members: &[Rank]) -> Result<Failure, Malformed> {
        let is_rank = |rank: &Rank| members.contains(rank);
        let is_valid = match &self {
            Failure::Settings { ranks, .. } => ranks.iter().all(is_rank),
            Failure::Missing { missing } => {
                missing.len() <= members.len() && missing.iter().all(is_rank)
            }
            Failure::Rank { rank, .. } => is_rank(rank),
        };
        if is_valid { Ok(self) } else { Err(Malformed) }
    }

    fn shortened(self) -> Failure {
        match self {
            Failure::Rank { rank, reason } => {
                Failure::Rank { rank, reason: beginning(&reason, REASON) }
            }
            failure => failure,
        }
    }
}

impl Ranks {
    fn none(world: usize) -> Ranks {
        Ranks(vec![0; world.div_ceil(64)])
    }

    fn is_full(&self, world: usize) -> bool {
        self.0.iter().map(|word| word.count_ones() as usize).sum::<usize>() == world
    }

    fn insert(&mut self, rank: usize) -> bool {
        let (word, bit) = (&mut self.0[rank / 64], 1 << (rank % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Adds those of another set; whether one of them is new.
    fn add(&mut self, other: &Ranks) -> bool {
        let mut is_new = false;
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            is_new |= theirs & !*mine != 0;
            *mine |= theirs;
        }
        is_new
    }

    fn is_of(&self, world: usize) -> bool {
        let last = 64 * self.0.len() - world.min(64 * self.0.len());
        self.0.len() == world.div_ceil(64)
            && self.0.last().is_none_or(|word| last == 0 || *word >> (64 - last) == 0)
    }

    fn missing(&self, world: usize) -> Vec<usize> {
        (0..world).filter(|rank| self.0[rank / 64] >> (rank % 64) & 1 == 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};
    use std::time::Duration;

    use super::*;
    use crate::control::overlay::neighbours;

    const AFTER: Duration = Duration::from_secs(1);

    /// Ranks that come, connect and tell each other, in any order.
    struct World {
        seed: u64,
        ranks: Vec<Gathering>,
        came: Vec<bool>,
        gone: Vec<bool>,
        under_way: HashMap<(usize, usize), VecDeque<Update>>,
        /// Connections on which something is under way.
        busy: Vec<(usize, usize)>,
        updates: usize,
    }

    impl World {
        fn new(world: usize, seed: u64) -> World {
            let settings = |_| [1; 32];
            World::with(world, seed, settings)
        }

        fn with(world: usize, seed: u64, settings: impl Fn(usize) -> [u8; 32]) -> World {
            let rank = |me: usize| {
                let instance = (me == 0).then_some(77);
                Gathering::new(me, Rank::all(world), &neighbours(me, world), settings(me), instance)
            };
            World {
                seed,
                ranks: (0..world).map(rank).collect(),
                came: vec![false; world],
                gone: vec![false; world],
                under_way: HashMap::new(),
                busy: Vec::new(),
                updates: 0,
            }
        }

        fn below(&mut self, n: usize) -> usize {
            self.seed =
                self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.seed >> 33) as usize % n
        }

        fn come(&mut self, rank: usize) {
            self.came[rank] = true;
            for other in neighbours(rank, self.ranks.len()) {
                if self.came[other] && !self.gone[other] {
                    self.ranks[rank].connect(other);
                    self.ranks[other].connect(rank);
                }
            }
        }

        /// One rank acts, and one update arrives.
        fn step(&mut self, now_and_then: bool) -> bool {
            let world = self.ranks.len();
            let rank = self.below(world);
            let mut acted = false;
            if self.came[rank] && !self.gone[rank] {
                if self.ranks[rank].instance().is_some() && self.ranks[rank].is_connected() {
                    self.ranks[rank].set_ready();
                }
                for to in neighbours(rank, world) {
                    if let Some(update) = self.ranks[rank].due(to, now_and_then) {
                        self.updates += 1;
                        acted = true;
                        let queue = self.under_way.entry((rank, to)).or_default();
                        if queue.is_empty() {
                            self.busy.push((rank, to));
                        }
                        queue.push_back(update);
                    }
                }
            }
            if self.busy.is_empty() {
                return acted;
            }
            let at = self.below(self.busy.len());
            let (from, to) = self.busy[at];
            let queue = self.under_way.get_mut(&(from, to)).unwrap();
            let update = queue.pop_front().unwrap();
            if queue.is_empty() {
                self.busy.swap_remove(at);
            }
            if !self.gone[to] {
                let bytes = postcard::to_stdvec(&update).unwrap();
                assert!(bytes.len() <= longest_update(world));
                assert!(!self.ranks[to].is_final(from), "an update among control frames");
                self.ranks[to].hear(from, postcard::from_bytes(&bytes).unwrap()).unwrap();
            }
            true
        }

        /// Some steps, fewer than `most`.
        fn steps(&mut self, most: usize) {
            for _ in 0..self.below(most) {
                self.step(false);
            }
        }

        /// Until nothing has happened for a while.
        fn settle(&mut self) {
            let mut idle = 0;
            while idle < 40 * self.ranks.len() {
                let now_and_then = self.below(30) == 0;
                idle = if self.step(now_and_then) { 0 } else { idle + 1 };
            }
        }
    }

    #[test]
    fn all_form_the_group_in_whichever_order_they_come() {
        for (seed, world) in [2, 3, 16, 17, 60, 130, 300].into_iter().enumerate() {
            let mut all = World::new(world, seed as u64);
            let mut order: Vec<usize> = (0..world).collect();
            for i in (1..world).rev() {
                let other = all.below(i + 1);
                order.swap(i, other);
            }
            for rank in order {
                all.come(rank);
                all.steps(20);
                assert!(
                    all.ranks.iter().all(|rank| !rank.is_formed()) || all.came.iter().all(|c| *c)
                );
            }
            all.settle();
            for rank in &all.ranks {
                assert!(rank.is_formed() && rank.instance() == Some(77), "{world} ranks");
                assert_eq!(rank.error(AFTER), None);
            }
            let edges: usize = (0..world).map(|rank| neighbours(rank, world).len()).sum();
            assert!(all.updates <= 12 * edges, "{world} ranks: {} updates", all.updates);
        }
    }

    #[test]
    fn exactly_those_are_missing_that_never_came() {
        for seed in 0..20 {
            let world = [5, 16, 40, 200][seed as usize % 4];
            let mut all = World::new(world, seed);
            let mut missing: Vec<usize> = (0..4).map(|_| all.below(world)).collect();
            missing.sort_unstable();
            missing.dedup();
            (0..world).filter(|rank| !missing.contains(rank)).for_each(|rank| all.come(rank));
            all.settle();
            let waits = (0..world).find(|rank| !missing.contains(rank)).unwrap();
            assert_eq!(all.ranks[waits].missing(), missing);
            // The first whose time is up tells all others.
            let missing_ranks: Vec<Rank> = missing.iter().copied().map(Rank).collect();
            all.ranks[waits].fail(Failure::Missing { missing: missing_ranks.clone() });
            all.settle();
            for rank in (0..world).filter(|rank| !missing.contains(rank)) {
                let error = FormError::Missing { missing: missing_ranks.clone(), after: AFTER };
                assert_eq!(all.ranks[rank].error(AFTER), Some(error));
            }
        }
    }

    /// Of small groups many, for it takes one moment of few: some ranks have formed the group when another fails.
    #[test]
    fn a_rank_that_dies_ends_the_attempt_on_all() {
        let (mut formed, mut failed) = (0, 0);
        for seed in 0..2000 {
            let world =
                if seed < 1980 { 3 + seed as usize % 4 } else { [16, 33, 150][seed as usize % 3] };
            let mut all = World::new(world, seed);
            (0..world).for_each(|rank| all.come(rank));
            all.steps(20 * world);
            let victim = all.below(world);
            all.gone[victim] = true;
            neighbours(victim, world).into_iter().for_each(|rank| all.ranks[rank].lose(victim));
            all.settle();
            let others = || (0..world).filter(|rank| *rank != victim);
            // Too late: all had heard that it was ready. Then the group forms, and notices.
            if others().all(|rank| all.ranks[rank].is_formed()) {
                continue;
            }
            let is_some_formed = others().any(|rank| all.ranks[rank].is_formed());
            (formed, failed) = (formed + u32::from(is_some_formed), failed + 1);
            for rank in others().filter(|rank| !all.ranks[*rank].is_formed()) {
                let error = FormError::Peer { peer: Rank(victim), reason: String::new() };
                assert_eq!(all.ranks[rank].error(AFTER), Some(error), "seed {seed}, rank {rank}");
            }
        }
        assert!(formed > 0 && formed < failed, "{formed} of {failed}");
    }

    #[test]
    fn other_settings_are_named_alike_by_all() {
        for seed in 0..10 {
            let world = 3 + seed as usize;
            let odd = seed as usize % world;
            let mut all = World::with(world, seed, |rank| [u8::from(rank == odd); 32]);
            (0..world).for_each(|rank| all.come(rank));
            all.settle();
            for rank in 0..world {
                assert!(all.ranks[rank].has_failed());
                let peer = if rank == odd { usize::from(odd == 0) } else { odd };
                assert_eq!(
                    all.ranks[rank].error(AFTER),
                    Some(FormError::Settings { peer: Rank(peer) })
                );
            }
        }
    }

    #[test]
    fn two_instances_do_not_mix() {
        let come =
            |me, instance| Gathering::new(me, Rank::all(3), &neighbours(me, 3), [0; 32], instance);
        let (mut one, mut two) = (come(0, Some(5)), come(1, Some(6)));
        two.connect(0);
        one.hear(1, two.due(0, false).unwrap()).unwrap();
        assert!(matches!(one.error(AFTER), Some(FormError::Peer { peer: Rank(1), .. })));
    }

    #[test]
    fn sets_of_ranks_that_cannot_be_are_refused() {
        for world in [1, 2, 63, 64, 65, 128, 130] {
            let mut ranks = Ranks::none(world);
            assert!(ranks.is_of(world) && !ranks.is_of(world + 64));
            assert!((0..world).all(|rank| ranks.insert(rank)));
            assert!(ranks.is_of(world) && ranks.missing(world).is_empty());
            let beyond = Ranks(vec![u64::MAX; world.div_ceil(64)]);
            assert_eq!(beyond.is_of(world), world % 64 == 0);
        }
    }
}
