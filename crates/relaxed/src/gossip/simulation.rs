//! The core among many workers, on a network that delays, loses and cuts, all drawn from a seed.
//!
//! One event after the other happens on a clock of its own; nothing sleeps. A worker ticks, knocks
//! and offers; offers and replies arrive late, out of order, twice or never; workers crash and start
//! again. The ledger holds the half of every exchange whose other half did not happen, so that the sum
//! of all weights can be demanded exactly: it is what it was plus the ledger.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use super::core::{Core, Exchange, Meeting, Outcome, Random};
use super::merge;
use super::wire::Reason;
use crate::Life;

const TIMEOUT: Duration = Duration::from_millis(200);
const ELEMENTS: usize = 3;

type Weights = [f32; ELEMENTS];

#[derive(Clone, Copy, Debug)]
struct World {
    workers: u32,
    seed: u64,
    /// A message takes up to this long.
    delay: Duration,
    /// One of so many messages is lost, and one arrives twice; 0: none.
    loses: u64,
    /// Every tick of every worker at the same moment, every message equally fast.
    lock_step: bool,
    /// Whether workers obey the rule about crossing.
    ordered: bool,
}

struct Simulation {
    world: World,
    random: Random,
    now: Duration,
    /// By time, and among equal times in the order they were scheduled.
    events: BTreeMap<(Duration, u64), Event>,
    scheduled: u64,
    workers: Vec<Worker>,
    /// The side of a cut each worker is on; all on one: no cut.
    side: Vec<u32>,
    /// What the sum of all weights was changed by on purpose or by loss.
    ledger: [f64; ELEMENTS],
    lost_replies: u64,
    duplicates: u64,
    /// Halves that happened: which of the two, whose exchange, in which life, with which number.
    carried_out: HashSet<(bool, u32, Life, u64)>,
    history: Vec<(Duration, u32, u32, u64)>,
}

struct Worker {
    core: Core,
    life: Life,
    weights: Weights,
    up: bool,
}

#[derive(Clone)]
enum Event {
    Tick(u32, Life),
    Offer { from: u32, to: u32, life: Life, number: u64, weights: Weights },
    Reply { from: u32, to: u32, life: Life, number: u64, half: Option<Weights> },
    GiveUp { worker: u32, life: Life, exchange: Exchange },
}

impl Simulation {
    fn new(world: World) -> Simulation {
        let mut random = Random::new(&[world.seed, 0xd15c]);
        let workers = (0..world.workers)
            .map(|rank| Worker {
                core: Core::new(rank, world.workers, world.seed, TIMEOUT),
                life: Life(1),
                weights: std::array::from_fn(|_| random.below(2000) as f32 / 1000.0 - 1.0),
                up: true,
            })
            .collect();
        let mut simulation = Simulation {
            world,
            random,
            now: Duration::ZERO,
            events: BTreeMap::new(),
            scheduled: 0,
            workers,
            side: vec![0; world.workers as usize],
            ledger: [0.0; ELEMENTS],
            lost_replies: 0,
            duplicates: 0,
            carried_out: HashSet::new(),
            history: Vec::new(),
        };
        for rank in 0..world.workers {
            simulation.tick_later(rank);
        }
        simulation
    }

    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(next) = self.events.first_entry().filter(|next| next.key().0 <= until) {
            let ((at, _), event) = next.remove_entry();
            self.now = at;
            self.happen(event);
        }
        self.now = until;
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Tick(rank, life) => {
                if self.lives(rank, life) {
                    self.tick(rank);
                    self.tick_later(rank);
                }
            }
            Event::Offer { from, to, life, number, weights } => {
                if self.delivers(from, to) {
                    self.take_offer(from, to, life, number, weights);
                }
            }
            Event::Reply { from, to, life, number, half } => {
                self.take_reply(from, to, life, number, half);
            }
            Event::GiveUp { worker, life, exchange } => {
                if self.lives(worker, life) {
                    let now = self.now;
                    let _ = self.worker(worker).core.finish(exchange, Outcome::Lost, now);
                }
            }
        }
    }

    fn tick(&mut self, rank: u32) {
        let now = self.now;
        while let Some(peer) = self.worker(rank).core.knock(now) {
            match self.connected(rank, peer) {
                true => self.worker(rank).core.reached(peer),
                false => self.worker(rank).core.unanswered(peer, now),
            }
        }
        let worker = self.worker(rank);
        let (life, weights) = (worker.life, worker.weights);
        let Some(exchange) = worker.core.begin() else { return };
        self.history.push((now, rank, exchange.partner, exchange.number));
        let (to, number) = (exchange.partner, exchange.number);
        self.send(Event::Offer { from: rank, to, life, number, weights });
        self.later(TIMEOUT, Event::GiveUp { worker: rank, life, exchange });
    }

    fn take_offer(&mut self, from: u32, to: u32, life: Life, number: u64, mut message: Weights) {
        let ordered = self.world.ordered;
        let worker = self.worker(to);
        let half = match worker.core.offered(from, life, number) {
            Err(Reason::Repeated) => None,
            Err(_) if ordered => None,
            Ok(()) | Err(_) => {
                let squares = merge::meet(&mut worker.weights, &mut message);
                worker.core.answered(from, Meeting { lead: 0, distance: squares });
                Some(message)
            }
        };
        if let Some(half) = half {
            assert!(self.carried_out.insert((false, from, life, number)), "moved twice");
            self.note(half, 1.0);
        }
        self.send(Event::Reply { from: to, to: from, life, number, half });
    }

    fn take_reply(&mut self, from: u32, to: u32, life: Life, number: u64, half: Option<Weights>) {
        let (delivered, now) = (self.delivers(from, to) && self.lives(to, life), self.now);
        let exchange = Exchange { partner: from, number };
        let Some(half) = half else {
            if delivered {
                let _ = self.worker(to).core.finish(exchange, Outcome::Declined, now);
            }
            return;
        };
        let met = Outcome::Met(Meeting { lead: 0, distance: 0.0 });
        if delivered && self.worker(to).core.finish(exchange, met, now) {
            assert!(self.carried_out.insert((true, to, life, number)), "followed twice");
            merge::follow(&mut self.worker(to).weights, &half);
            self.note(half, -1.0);
        } else {
            self.lost_replies += 1;
        }
    }

    /// The network is fast and reliable from now on.
    fn calm(&mut self) {
        (self.world.loses, self.world.delay) = (0, Duration::from_millis(2));
    }

    fn crash(&mut self, rank: u32) {
        self.worker(rank).up = false;
    }

    /// Starts a worker again, with the weights of one that is up.
    fn restart(&mut self, rank: u32) {
        let (world, now) = (self.world, self.now);
        let peer = (0..world.workers).find(|&peer| peer != rank && self.connected(rank, peer));
        let taken_over = peer.map(|peer| self.worker(peer).weights);
        let worker = self.worker(rank);
        worker.core = Core::new(rank, world.workers, world.seed ^ now.as_nanos() as u64, TIMEOUT);
        worker.life = worker.life.next();
        worker.up = true;
        worker.weights = taken_over.unwrap_or([5.0; ELEMENTS]);
        self.tick_later(rank);
    }

    fn send(&mut self, event: Event) {
        if self.world.loses > 0 && self.random.below(self.world.loses) == 0 {
            if matches!(event, Event::Reply { half: Some(_), .. }) {
                self.lost_replies += 1;
            }
            return;
        }
        if self.world.loses > 0 && self.random.below(self.world.loses) == 0 {
            self.duplicates += 1;
            let delay = self.up_to(2 * self.world.delay);
            self.later(delay, event.clone());
        }
        let delay = match self.world.lock_step {
            true => self.world.delay,
            false => self.up_to(self.world.delay),
        };
        self.later(delay, event);
    }

    fn tick_later(&mut self, rank: u32) {
        let pause = match self.world.lock_step {
            true => Duration::from_millis(20),
            // Workers differ in speed, up to fourfold.
            false => self.up_to(Duration::from_millis(10 * (1 + u64::from(rank % 4)))),
        };
        let life = self.worker(rank).life;
        self.later(pause, Event::Tick(rank, life));
    }

    fn later(&mut self, delay: Duration, event: Event) {
        self.scheduled += 1;
        self.events.insert((self.now + delay, self.scheduled), event);
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        Duration::from_nanos(1 + self.random.below(most.as_nanos() as u64))
    }

    fn note(&mut self, half: Weights, sign: f64) {
        for (sum, half) in self.ledger.iter_mut().zip(half) {
            *sum += sign * f64::from(half);
        }
    }

    fn worker(&mut self, rank: u32) -> &mut Worker {
        &mut self.workers[rank as usize]
    }

    fn lives(&self, rank: u32, life: Life) -> bool {
        let worker = &self.workers[rank as usize];
        worker.up && worker.life == life
    }

    fn connected(&self, one: u32, other: u32) -> bool {
        let up = |rank: u32| self.workers[rank as usize].up;
        up(one) && up(other) && self.side[one as usize] == self.side[other as usize]
    }

    fn delivers(&self, from: u32, to: u32) -> bool {
        // A message of a worker that crashed meanwhile still arrives.
        self.workers[to as usize].up && self.side[from as usize] == self.side[to as usize]
    }

    fn sum(&self) -> [f64; ELEMENTS] {
        let column =
            |at: usize| self.workers.iter().map(move |worker| f64::from(worker.weights[at]));
        std::array::from_fn(|at| column(at).sum())
    }

    /// The largest difference between two of these workers.
    fn spread(&self, ranks: impl Iterator<Item = u32> + Clone) -> f32 {
        let column =
            |at: usize| ranks.clone().map(move |rank| self.workers[rank as usize].weights[at]);
        (0..ELEMENTS)
            .map(|at| column(at).fold(f32::MIN, f32::max) - column(at).fold(f32::MAX, f32::min))
            .fold(0.0, f32::max)
    }

    fn assert_sum(&self, before: [f64; ELEMENTS]) {
        for ((before, shift), sum) in before.iter().zip(self.ledger).zip(self.sum()) {
            let expected = before + shift;
            assert!((expected - sum).abs() < 1e-3, "{:?}: sum {sum}, not {expected}", self.world);
        }
    }
}

fn worlds(count: u64, loses: u64) -> impl Iterator<Item = World> {
    (0..count).map(move |seed| World {
        workers: 2 + (seed % 7) as u32,
        seed,
        // Where messages are lost, some also arrive after they were given up.
        delay: Duration::from_millis(if loses > 0 && seed % 8 == 0 { 300 } else { 1 + seed % 40 }),
        loses,
        lock_step: false,
        ordered: true,
    })
}

const WHILE: Duration = Duration::from_secs(2);

#[test]
fn without_loss_the_mean_stays_and_replicas_meet() {
    for world in worlds(2000, 0) {
        let mut simulation = Simulation::new(world);
        let (before, apart) = (simulation.sum(), simulation.spread(0..world.workers));
        simulation.run(WHILE);
        simulation.assert_sum(before);
        assert_eq!(simulation.lost_replies, 0);
        assert!(simulation.ledger.iter().all(|half| half.abs() < 1e-3), "half an exchange");
        let spread = simulation.spread(0..world.workers);
        assert!(spread < 1e-3 * apart, "{world:?}: {spread} of {apart}");
    }
}

#[test]
fn a_lost_reply_shifts_the_mean_by_its_half_and_no_more() {
    let (mut lost, mut duplicates) = (0, 0);
    for world in worlds(2000, 5) {
        let mut simulation = Simulation::new(world);
        let before = simulation.sum();
        simulation.run(WHILE);
        simulation.assert_sum(before);
        lost += simulation.lost_replies;
        duplicates += simulation.duplicates;
        simulation.calm();
        simulation.run(WHILE);
        assert!(simulation.spread(0..world.workers) < 1e-3, "{world:?}");
    }
    assert!(lost > 2000 && duplicates > 2000, "{lost} lost, {duplicates} twice");
}

#[test]
fn both_sides_of_a_cut_go_on_and_mix_when_it_heals() {
    for world in worlds(800, 0).filter(|world| world.workers >= 4) {
        let mut simulation = Simulation::new(world);
        let half = world.workers / 2;
        simulation.run(Duration::from_millis(20));
        for rank in half..world.workers {
            simulation.side[rank as usize] = 1;
            simulation.worker(rank).weights = [10.0; ELEMENTS];
        }
        simulation.run(2 * WHILE);
        let sides = [0..half, half..world.workers];
        for side in sides {
            assert!(simulation.spread(side) < 1e-3, "{world:?}: a side does not agree");
        }
        assert!(simulation.spread(0..world.workers) > 1.0, "{world:?}: the cut leaks");
        simulation.side.fill(0);
        simulation.run(2 * WHILE);
        assert!(simulation.spread(0..world.workers) < 1e-3, "{world:?}: not mixed");
    }
}

#[test]
fn the_others_agree_without_those_that_crashed_and_with_those_that_came_back() {
    for world in worlds(800, 10).filter(|world| world.workers >= 3) {
        let mut simulation = Simulation::new(world);
        let crashed = world.seed as u32 % world.workers;
        simulation.run(Duration::from_millis(50));
        simulation.crash(crashed);
        // Where most replies come too late, it takes a while.
        simulation.run(if world.delay > TIMEOUT { 6 } else { 2 } * WHILE);
        let others = (0..world.workers).filter(|&rank| rank != crashed);
        assert!(simulation.spread(others) < 1e-2, "{world:?}: the others do not agree");
        let begun = simulation.history.len();
        simulation.restart(crashed);
        simulation.run(2 * WHILE);
        let came_back = simulation.history[begun..].iter().filter(|event| event.1 == crashed);
        assert!(came_back.count() > 0, "{world:?}: it does not take part");
        assert!(simulation.history[begun..].iter().any(|event| event.2 == crashed), "{world:?}");
        simulation.calm();
        simulation.run(WHILE);
        assert!(simulation.spread(0..world.workers) < 1e-3, "{world:?}");
    }
}

#[test]
fn crossing_exchanges_would_swap_replicas_for_ever() {
    for workers in [2, 3, 4, 7] {
        for ordered in [true, false] {
            let delay = Duration::from_millis(3);
            let world = World { workers, seed: 1, delay, loses: 0, lock_step: true, ordered };
            let mut simulation = Simulation::new(world);
            let (before, apart) = (simulation.sum(), simulation.spread(0..workers));
            simulation.run(WHILE);
            simulation.assert_sum(before);
            let spread = simulation.spread(0..workers);
            if ordered {
                assert!(spread < 1e-3, "{workers} workers in step: {spread}");
            } else if workers == 2 {
                assert!(spread > 0.5 * apart, "the rule about crossing is of no use");
            }
        }
    }
}

#[test]
fn a_seed_is_a_history() {
    let history = |seed: u64| {
        let world = worlds(seed + 1, 7).last().expect("at least one");
        let mut simulation = Simulation::new(world);
        simulation.run(WHILE);
        simulation.crash(0);
        simulation.run(WHILE);
        simulation.restart(0);
        simulation.run(WHILE);
        let weights: Vec<Weights> =
            simulation.workers.iter().map(|worker| worker.weights).collect();
        (simulation.history, weights)
    };
    for seed in 0..50 {
        assert_eq!(history(seed), history(seed));
    }
    assert_ne!(history(4), history(11));
}
