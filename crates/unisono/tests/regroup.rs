//! Workers that agree go on in another group, whatever happened to the one before: a rank is lost at any
//! bucket of a step, some have applied the step and others not, some are new, and the group that follows
//! fails as well. The weights are those of a run that nothing has happened to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};

use unisono::collective::Epoch;
use unisono::collective::cost::Costs;
use unisono::collective::fabric::LocalHub;
use unisono::prelude::*;
use unisono::sync::Synchronizer;
use unisono::sync::bucket::BucketSizes;
use unisono::worker::{Agreeing, Regrouped, WorkerError};

const SHARDS: usize = 4;
const STEPS: u64 = 5;
/// The step in which something happens, counted from 0.
const FAULTY: u64 = 2;
/// One bucket each, the last one first.
const LENGTHS: [usize; 4] = [300, 17, 1000, 64];

fn parameters() -> Vec<Parameter> {
    let named = LENGTHS.iter().enumerate();
    named.map(|(i, length)| Parameter::flat(format!("p{i}"), *length)).collect()
}

fn settings() -> Settings {
    let mut settings = Settings::new(SHARDS);
    settings.buckets = Some(BucketSizes { first: 0, others: 0 });
    settings.withhold = true;
    settings
}

fn initial() -> Vec<Vec<f32>> {
    let weights = |p: usize, length: usize| (0..length).map(move |i| noise((p * 77 + i) as u64));
    LENGTHS.iter().enumerate().map(|(p, length)| weights(p, *length).collect()).collect()
}

/// A number that looks random, in −1..1.
fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// Ranks that are threads of this process. They form groups by the hundred, so they measure the first only.
fn groups(world: usize) -> Vec<Group> {
    static COSTS: OnceLock<Costs> = OnceLock::new();
    let costs = COSTS.get_or_init(|| Group::local(2, &Options::default()).unwrap()[0].costs());
    let mut options = Options::default();
    options.staging = 64 << 10;
    let (hub, epoch) = (LocalHub::new(world), Epoch::new(0));
    let form = |rank| {
        let (hub, epoch, options) = (hub.clone(), epoch.clone(), options.clone());
        move || Group::world_again(hub, epoch, rank, world, options, Some(*costs)).unwrap()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(form(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A worker, and the model it trains.
struct Trainer {
    agreeing: Agreeing,
    weights: Vec<Vec<f32>>,
}

impl Trainer {
    fn new(group: &Group) -> Trainer {
        let mut weights = initial();
        let optimizer = "adamw".parse().unwrap();
        let agreeing =
            Agreeing::new(group, parameters(), settings(), &optimizer, &mut weights).unwrap();
        Trainer { agreeing, weights }
    }

    /// A worker that has nothing of the run.
    fn waiting() -> Trainer {
        let optimizer = "adamw".parse().unwrap();
        let agreeing = Agreeing::waiting(parameters(), settings(), &optimizer).unwrap();
        Trainer { agreeing, weights: LENGTHS.map(|length| vec![f32::NAN; length]).to_vec() }
    }

    /// Computes the shards of a step, and calls `at` in the last one before each gradient, with the bucket
    /// that it completes: if that says so, no more is computed. Whether all was.
    fn compute(&self, at: impl Fn(&Synchronizer, usize) -> bool) -> bool {
        let (sync, step) = (self.agreeing.synchronizer(), self.agreeing.steps());
        let own = sync.shards();
        for _ in own.clone() {
            let shard = sync.begin_shard();
            sync.begin_backward(noise(step + shard as u64));
            for parameter in (0..LENGTHS.len()).rev() {
                if shard + 1 == own.end && at(sync, LENGTHS.len() - 1 - parameter) {
                    return false;
                }
                let seed = ((step * 10 + shard as u64) * 10 + parameter as u64) * 5000;
                let weights = self.weights[parameter].iter().enumerate();
                let gradient: Vec<f32> =
                    weights.map(|(i, w)| w * 0.1 + noise(seed + i as u64)).collect();
                sync.gradient(parameter, &gradient);
            }
            sync.end_shard();
        }
        true
    }

    fn step(&mut self) -> Result<(), WorkerError> {
        self.agreeing.step(&mut self.weights).map(drop)
    }

    fn train(&mut self, until: u64) {
        while self.agreeing.steps() < until {
            assert!(self.compute(|_, _| false));
            self.step().unwrap();
        }
    }

    fn regroup(&mut self, group: &Group) -> Result<Regrouped, WorkerError> {
        self.agreeing.regroup(group, &mut self.weights)
    }

    fn bits(&self) -> Vec<u32> {
        self.weights.iter().flatten().map(|weight| weight.to_bits()).collect()
    }
}

/// What a run on one worker ends with.
fn undisturbed() -> Vec<u32> {
    let group = groups(1).remove(0);
    let mut trainer = Trainer::new(&group);
    trainer.train(STEPS);
    trainer.bits()
}

/// What happens on the faulty rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It ends the group before it completes this bucket, and lives on.
    Abort(usize),
    /// It is gone before it completes this bucket.
    Die(usize),
    /// It gives up the step before it completes this bucket; no other rank knows.
    GiveUp(usize),
    /// It has handed over all gradients, but does not take the step, until all others have taken it.
    Miss,
    /// It is gone as soon as it has taken the step.
    DieAfter,
    /// All take the step and leave the group.
    Leave,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    before: usize,
    after: usize,
    faulty: usize,
    fault: Fault,
}

/// What came of a worker that was in both groups, or in the second.
struct Outcome {
    /// The steps it had taken when the second group formed.
    steps: Option<u64>,
    regrouped: Regrouped,
    bits: Vec<u32>,
}

impl Case {
    /// Whether a rank of the first group is in the second if there is room.
    fn survives(&self, rank: usize) -> bool {
        rank != self.faulty || !matches!(self.fault, Fault::Die(_) | Fault::DieAfter)
    }

    fn run(&self) -> Vec<Outcome> {
        let first = groups(self.before);
        let mut second = groups(self.after).into_iter();
        let taken = &AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for (rank, group) in first.into_iter().enumerate() {
                let next = if self.survives(rank) { second.next() } else { None };
                workers.push(scope.spawn(move || self.survivor(group, next, taken)));
            }
            for group in second {
                workers.push(scope.spawn(move || Some(self.go_on(Trainer::waiting(), &group))));
            }
            let joined = workers.into_iter().map(|worker| worker.join().unwrap());
            joined.flatten().collect()
        })
    }

    fn survivor(&self, group: Group, next: Option<Group>, taken: &AtomicUsize) -> Option<Outcome> {
        let (is_faulty, rank) = (group.rank() == self.faulty, group.rank());
        let mut trainer = Trainer::new(&group);
        trainer.train(FAULTY);
        let computed = trainer.compute(|sync, bucket| match self.fault {
            Fault::Abort(at) if is_faulty && at == bucket => {
                sync.abort_handle().inspect(|group| group.abort("for the test"));
                false
            }
            Fault::Die(at) | Fault::GiveUp(at) => is_faulty && at == bucket,
            _ => false,
        });
        if !self.survives(rank) && self.fault != Fault::DieAfter {
            return None;
        }
        if is_faulty && self.fault == Fault::Miss {
            while taken.load(Ordering::SeqCst) + 1 < self.before {
                std::thread::yield_now();
            }
        } else if computed && trainer.step().is_ok() {
            taken.fetch_add(1, Ordering::SeqCst);
        }
        if !self.survives(rank) {
            return None;
        }
        drop(group);
        next.map(|group| self.go_on(trainer, &group))
    }

    fn go_on(&self, mut trainer: Trainer, group: &Group) -> Outcome {
        let steps = trainer.agreeing.has_state().then(|| trainer.agreeing.steps());
        let regrouped = trainer.regroup(group).unwrap();
        if regrouped.donor.is_none() {
            if group.rank() == 0 {
                trainer.weights = initial();
            }
            trainer.agreeing.begin_anew(group, &mut trainer.weights).unwrap();
        }
        trainer.train(STEPS);
        Outcome { steps, regrouped, bits: trainer.bits() }
    }
}

#[test]
fn any_fault_in_a_step_leaves_the_bits_of_the_undisturbed_run() {
    let expected = undisturbed();
    let (mut cases, mut redone, mut applied, mut mixed, mut lost) = (0, 0, 0, 0, 0);
    for (before, after) in (1..=4).flat_map(|before| (1..=4).map(move |after| (before, after))) {
        for faulty in 0..before {
            // Over the worlds that follow, every bucket sees every kind of fault on every rank.
            let at_buckets = (0..LENGTHS.len()).map(|at| match (at + after) % 3 {
                0 => Fault::Abort(at),
                1 => Fault::Die(at),
                _ => Fault::GiveUp(at),
            });
            for fault in at_buckets.chain([Fault::Miss, Fault::DieAfter, Fault::Leave]) {
                let case = Case { before, after, faulty, fault };
                let outcomes = case.run();
                assert_eq!(outcomes.len(), after, "{case:?}");
                let survivors: Vec<u64> = outcomes.iter().filter_map(|o| o.steps).collect();
                let fails = matches!(fault, Fault::Abort(_) | Fault::Die(_) | Fault::GiveUp(_));
                // A worker that is alone has no group that could be ended.
                if fails && !(before == 1 && matches!(fault, Fault::Abort(_))) {
                    assert!(survivors.iter().all(|steps| *steps == FAULTY), "{case:?}");
                }
                match (survivors.iter().min(), survivors.iter().max()) {
                    (None, _) => lost += 1,
                    (Some(&FAULTY), Some(&FAULTY)) => redone += 1,
                    (Some(&FAULTY), _) => mixed += 1,
                    _ => applied += 1,
                }
                let most = survivors.iter().max().copied();
                let behind = outcomes.iter().filter(|o| o.steps != most || most.is_none()).count();
                let state =
                    if behind > 0 { 3 * 4 * LENGTHS.iter().sum::<usize>() as u64 } else { 0 };
                for Outcome { regrouped, bits, .. } in &outcomes {
                    assert!(*bits == expected, "{case:?}: {regrouped:?}");
                    assert_eq!(regrouped.donor.is_some(), most.is_some(), "{case:?}");
                    assert_eq!((regrouped.steps, regrouped.behind), (most.unwrap_or(0), behind));
                    assert_eq!(regrouped.bytes, if most.is_some() { state } else { 0 });
                }
                cases += 1;
            }
        }
    }
    println!("{cases} cases: {redone} redone, {applied} applied, {mixed} mixed, {lost} lost");
    assert_eq!(cases, (1 + 2 + 3 + 4) * 4 * (LENGTHS.len() + 3));
    // Where one rank alone has missed the step, and it and another are in both groups.
    assert!(mixed >= 3 + 2 * 3 + 4, "{mixed}");
    assert!(redone > 0 && applied > 0 && lost > 0);
}

/// Weights that end a group when one of them is read or written.
struct Tripwire<'a> {
    weights: &'a mut Vec<Vec<f32>>,
    group: &'a Group,
    at: Option<usize>,
}

impl Tripwire<'_> {
    fn touch(&self, parameter: usize) {
        if self.at == Some(parameter) {
            self.group.abort("for the test");
        }
    }
}

impl Weights for Tripwire<'_> {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        self.touch(parameter);
        self.weights.read(parameter, with);
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        self.touch(parameter);
        self.weights.change(parameter, with);
    }
}

/// Three ranks: one has taken a step more than the second, and the third is new. A rank of them ends the
/// group in the middle of the transfer.
#[test]
fn a_transfer_that_fails_anywhere_is_made_again() {
    let expected = undisturbed();
    let (mut without_state, mut faults) = (0, 0);
    for faulty in 0..4 {
        for at in 0..LENGTHS.len() {
            let meet = Barrier::new(3);
            let first = groups(3);
            let second = groups(4);
            let third = groups(4);
            let mut first = first.into_iter();
            let all: Vec<(bool, bool)> = std::thread::scope(|scope| {
                let (meet, expected) = (&meet, &expected);
                let worker = |first: Option<Group>, second: Group, third: Group| {
                    move || {
                        let mut trainer =
                            first.as_ref().map_or_else(Trainer::waiting, Trainer::new);
                        if let Some(group) = &first {
                            trainer.train(FAULTY);
                            assert!(trainer.compute(|_, _| false));
                            if group.rank() != 1 {
                                trainer.step().unwrap();
                            }
                            meet.wait();
                        }
                        let held = trainer.agreeing.steps();
                        let at = (second.rank() == faulty).then_some(at);
                        let weights = &mut trainer.weights;
                        let mut wire = Tripwire { weights, group: &second, at };
                        let failed = trainer.agreeing.regroup(&second, &mut wire).is_err();
                        let has_state = trainer.agreeing.has_state();
                        if second.rank() == 0 || second.rank() == 2 {
                            // Those that had what is handed over have it whatever happens.
                            assert!(has_state && trainer.agreeing.steps() == held);
                        }
                        drop(second);
                        let regrouped = trainer.regroup(&third).unwrap();
                        assert_eq!(regrouped.steps, FAULTY + 1);
                        trainer.train(STEPS);
                        assert!(trainer.bits() == *expected, "{faulty} {at:?}");
                        (failed, has_state)
                    }
                };
                let workers: Vec<_> = second
                    .into_iter()
                    .zip(third)
                    .map(|(second, third)| scope.spawn(worker(first.next(), second, third)))
                    .collect();
                workers.into_iter().map(|worker| worker.join().unwrap()).collect()
            });
            assert!(all[faulty].0, "the rank that ends the group gets an error");
            assert!(all.iter().all(|(failed, has_state)| *failed || *has_state));
            faults += 1;
            without_state += all.iter().filter(|(_, has_state)| !has_state).count();
        }
    }
    assert_eq!(faults, 4 * LENGTHS.len());
    println!("{faults} faults left {without_state} workers without state");
    assert!(without_state > 0);
}

#[test]
fn without_withholding_a_step_that_has_begun_to_update_leaves_no_state() {
    let mut groups = groups(2).into_iter();
    let (first, second) = (groups.next().unwrap(), groups.next().unwrap());
    let trainer = |group: &Group| {
        let (mut weights, optimizer) = (initial(), "adamw".parse().unwrap());
        let settings = Settings { withhold: false, ..settings() };
        let agreeing = Agreeing::new(group, parameters(), settings, &optimizer, &mut weights);
        Trainer { agreeing: agreeing.unwrap(), weights }
    };
    let updated = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let updated = &updated;
        scope.spawn(move || {
            let trainer = trainer(&first);
            // It leaves when the other has applied all buckets but the last.
            trainer.compute(|_, bucket| {
                while bucket == LENGTHS.len() - 1
                    && updated.load(Ordering::SeqCst) < LENGTHS.len() - 1
                {
                    std::thread::yield_now();
                }
                bucket == LENGTHS.len() - 1
            });
        });
        let mut trainer = trainer(&second);
        assert!(trainer.agreeing.has_state() && trainer.compute(|_, _| false));
        let mut weights = Counting(&mut trainer.weights, updated);
        assert!(trainer.agreeing.step(&mut weights).is_err());
        assert!(!trainer.agreeing.has_state());
        assert_eq!(trainer.agreeing.steps(), 0);
    });
}

/// Weights that count their changes.
struct Counting<'a>(&'a mut Vec<Vec<f32>>, &'a AtomicUsize);

impl Weights for Counting<'_> {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        self.0.read(parameter, with);
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        self.0.change(parameter, with);
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}
