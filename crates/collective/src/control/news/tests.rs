//! Many ranks that tell each other news, over connections of any speed.

use std::collections::HashMap;

use super::*;
use crate::control::overlay::neighbours;
use crate::dtype::Unit;
use crate::{Algorithm, Dtype, Op, Reduction};

fn call(number: u32, root: usize) -> Call {
    Call {
        seq: 2 * number + 1,
        op: Op::Broadcast { root },
        barrier: false,
        dtype: Dtype::F32,
        unit: Unit::OWN,
        reduction: Reduction::Sum,
        count: 4,
        shape: 0,
        algorithm: Algorithm::Direct,
        column: 64,
    }
}

fn stuck(rank: usize, number: u32, root: usize) -> Fact {
    Fact::Stuck { rank: rank as u32, call: call(number, root) }
}

fn left(rank: usize) -> Fact {
    Fact::Left { rank: rank as u32, seq: 5, why: None }
}

/// Ranks, and what is under way between them.
struct World {
    seed: u64,
    ranks: Vec<News>,
    present: Vec<bool>,
    heard: Vec<Vec<Event>>,
    under_way: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// Connections on which something is under way.
    busy: Vec<(usize, usize)>,
    facts: usize,
}

impl World {
    fn new(world: usize, seed: u64) -> World {
        let mut ranks: Vec<News> = (0..world).map(|_| News::new(Rank::all(world))).collect();
        for (rank, news) in ranks.iter_mut().enumerate() {
            neighbours(rank, world).into_iter().for_each(|other| news.connect(other));
        }
        World {
            seed,
            ranks,
            present: vec![true; world],
            heard: vec![Vec::new(); world],
            under_way: HashMap::new(),
            busy: Vec::new(),
            facts: 0,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 33) as usize % n
    }

    /// A rank tells a fact of its own.
    fn tell(&mut self, rank: usize, fact: Fact) {
        let event = self.ranks[rank].hear(None, fact).unwrap();
        self.heard[rank].extend(event);
    }

    /// A rank is gone; what it had sent still arrives.
    fn depart(&mut self, rank: usize) {
        self.flush(rank);
        self.present[rank] = false;
        for other in 0..self.ranks.len() {
            self.ranks[other].disconnect(rank);
        }
    }

    fn flush(&mut self, rank: usize) {
        for to in neighbours(rank, self.ranks.len()) {
            if let Some(bytes) = self.ranks[rank].due(to) {
                let queue = self.under_way.entry((rank, to)).or_default();
                if queue.is_empty() {
                    self.busy.push((rank, to));
                }
                queue.push_back(bytes);
            }
        }
    }

    /// Moves a frame from anywhere to where it goes, or lets a rank say what it has to; whether there
    /// was anything to do.
    fn step(&mut self) -> bool {
        let world = self.ranks.len();
        let talks = self.below(world);
        if self.present[talks] {
            self.flush(talks);
        }
        if self.busy.is_empty() {
            let present: Vec<usize> = (0..world).filter(|rank| self.present[*rank]).collect();
            present.into_iter().for_each(|rank| self.flush(rank));
        }
        if self.busy.is_empty() {
            return false;
        }
        let at = self.below(self.busy.len());
        let (from, to) = self.busy[at];
        let queue = self.under_way.get_mut(&(from, to)).unwrap();
        let bytes = queue.pop_front().unwrap();
        if queue.is_empty() {
            self.busy.swap_remove(at);
        }
        if self.present[to] {
            for fact in decode(&bytes).unwrap() {
                self.facts += 1;
                let event = self.ranks[to].hear(Some(from), fact).unwrap();
                self.heard[to].extend(event);
            }
        }
        true
    }

    /// Some steps, fewer than `most`.
    fn steps(&mut self, most: usize) {
        for _ in 0..self.below(most) {
            self.step();
        }
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn edges(&self) -> usize {
        let world = self.ranks.len();
        (0..world).map(|rank| neighbours(rank, world).len()).sum()
    }
}

#[test]
fn every_rank_hears_a_fact_once() {
    for world in [2, 3, 16, 17, 100, 256, 1024] {
        let mut all = World::new(world, 7);
        all.tell(world / 3, left(world / 3));
        all.settle();
        for heard in &all.heard {
            assert_eq!(heard, &[Event::New(left(world / 3))], "{world} ranks");
        }
        // Over every connection once in each direction at most.
        assert!(all.facts <= all.edges(), "{world} ranks: {} facts", all.facts);
    }
}

#[test]
fn a_thousand_that_wait_for_one_say_so_once() {
    let world = 1024;
    let mut all = World::new(world, 3);
    for rank in 1..world {
        all.tell(rank, stuck(rank, 9, 0));
        all.tell(rank, Fact::Awaited { rank: 0, number: 9 });
        all.steps(40);
    }
    all.settle();
    assert!(all.facts <= 2 * all.edges(), "{} facts", all.facts);
    let awaited = Event::New(Fact::Awaited { rank: 0, number: 9 });
    assert!(all.heard.iter().all(|heard| heard.contains(&awaited)));
    let differ = |event: &Event| matches!(event, Event::Differ(_));
    assert!(!all.heard.iter().flatten().any(differ));
}

/// Wherever two statements are made, and in whichever order they travel, one rank at least hears both.
#[test]
fn statements_that_differ_meet() {
    for seed in 0..200 {
        let mut all = World::new([5, 40, 130][seed as usize % 3], seed);
        let world = all.ranks.len();
        let odd = all.below(world);
        for rank in 0..world {
            let rank = (rank + odd) % world;
            all.tell(rank, stuck(rank, 4, usize::from(rank == odd)));
            all.steps(5);
        }
        all.settle();
        let found: Vec<&Event> =
            all.heard.iter().flatten().filter(|event| matches!(event, Event::Differ(_))).collect();
        assert!(!found.is_empty(), "seed {seed}: no rank noticed rank {odd}");
        for event in found {
            let Event::Differ([(one, a), (other, b)]) = event else { unreachable!() };
            assert_ne!(a, b);
            assert!((*one == odd) != (*other == odd), "{event:?}");
        }
        assert!(all.facts <= 2 * all.edges());
    }
}

/// All leave, one after the other, while what they said is under way: no rank that is still there
/// misses any of it.
#[test]
fn who_stays_hears_of_all_who_leave() {
    for seed in 0..30 {
        let world = [4, 16, 33, 90][seed as usize % 4];
        let mut all = World::new(world, seed);
        let leavers: Vec<usize> = (0..world).filter(|rank| rank % 3 == 0).collect();
        for &rank in &leavers {
            all.tell(rank, left(rank));
            all.depart(rank);
            all.steps(world);
        }
        all.settle();
        for rank in (0..world).filter(|rank| rank % 3 != 0) {
            assert!(
                leavers.iter().all(|gone| all.ranks[rank].left[*gone].is_some()),
                "{seed}: {rank}"
            );
        }
    }
}

#[test]
fn the_first_failure_reaches_all_and_the_rest_are_few() {
    let world = 300;
    let mut all = World::new(world, 1);
    for rank in 0..world {
        let reason = Reason::Aborted { peer: Rank(rank), reason: format!("reason {rank}") };
        all.tell(rank, Fact::Failed(reason));
    }
    all.settle();
    assert!(all.heard.iter().all(|heard| (1..=FAILURES).contains(&heard.len())));
    assert!(all.facts <= FAILURES * all.edges());
}

#[test]
fn a_late_connection_brings_what_matters() {
    let mut known = News::new(Rank::all(40));
    let failed = Fact::Failed(Reason::Lost { peer: Rank(3), silent_ms: None });
    for fact in [left(7), failed.clone(), stuck(1, 1, 0)] {
        known.hear(None, fact).unwrap();
    }
    known.connect(30);
    assert_eq!(decode(&known.due(30).unwrap()).unwrap(), [failed, left(7)]);
    assert_eq!(known.due(30), None);
}

#[test]
fn old_statements_do_not_go_round_for_ever() {
    let mut news = News::new(Rank::all(3));
    news.connect(1);
    for number in 0..1000 {
        assert!(news.hear(None, stuck(2, number, 0)).unwrap().is_some());
    }
    while news.due(1).is_some() {}
    for number in 0..900 {
        assert_eq!(news.hear(Some(1), stuck(2, number, 0)), Ok(None), "{number}");
    }
    assert_eq!(news.due(1), None);
    assert!(matches!(news.hear(Some(1), stuck(0, 999, 1)), Ok(Some(Event::Differ(_)))));
}

#[test]
fn many_facts_travel_in_frames_that_are_not_too_long() {
    let mut news = News::new(Rank::all(5000));
    news.connect(1);
    for rank in 0..5000 {
        let why = Some("x".repeat(MAX_TEXT));
        news.hear(None, Fact::Left { rank, seq: 1, why }).unwrap();
    }
    let mut facts = 0;
    while let Some(bytes) = news.due(1) {
        assert!(bytes.len() <= MAX_NEWS);
        facts += decode(&bytes).unwrap().len();
    }
    assert_eq!(facts, 5000);
}

#[test]
fn what_is_not_of_this_group_is_refused() {
    let mut news = News::new(Rank::all(3));
    let lost = Fact::Failed(Reason::Lost { peer: Rank(3), silent_ms: None });
    for fact in [left(3), stuck(3, 1, 0), Fact::Awaited { rank: 9, number: 1 }, lost] {
        assert_eq!(news.hear(Some(1), fact), Err(Malformed));
    }
    assert_eq!(decode(&[99, 1, 2]), Err(Malformed));
}
