//! Local steps of a made-up model: what the workers agree on, when, and that a run can be
//! interrupted anywhere.

use std::collections::HashMap;

use unisono_collective::{Group, Options, Transport};
use unisono_optimizer::{Optimizer, OptimizerSpec};
use unisono_sync::strategy::{
    Agreed, Compression, LocalSteps, LocalStepsSpec, Round, Strategy, StrategySpec, Votes, Weights,
};
use unisono_sync::{Parameter, SyncError};

const LENGTHS: [usize; 6] = [300, 1, 2000, 0, 64, 600];

/// What is kept of a run, by name.
type Saved = HashMap<String, Vec<f32>>;

#[derive(Clone, Debug, PartialEq)]
struct Model(Vec<Vec<f32>>);

impl Model {
    /// The same on all workers.
    fn new() -> Model {
        let weights = |(p, len): (usize, &usize)| (0..*len).map(|i| noise(p * 31 + i)).collect();
        Model(LENGTHS.iter().enumerate().map(weights).collect())
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        self.0.iter().map(|w| w.iter().map(|x| x.to_bits()).collect()).collect()
    }
}

impl Weights for Model {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        with(&self.0[parameter]);
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        with(&mut self.0[parameter]);
    }
}

/// A worker with its inner optimizer.
struct Worker {
    rank: usize,
    own: Model,
    inner: Box<dyn Optimizer>,
    local: LocalSteps,
}

impl Worker {
    fn new(group: &Group, spec: &str, inner: &str, codec: Option<&str>) -> Worker {
        let own = Model::new();
        let inner = inner.parse::<OptimizerSpec>().unwrap().build(&LENGTHS).unwrap();
        let compression = codec.map(|codec| Compression::new(codec.parse().unwrap()));
        let local = LocalSteps::new(Some(group), &parameters(), local_steps(spec), compression);
        let mut local = local.unwrap();
        local.begin(&own);
        Worker { rank: group.rank(), own, inner, local }
    }

    /// Finishes a step.
    fn step(&mut self, step: u64) -> Round {
        for (parameter, weights) in self.own.0.iter_mut().enumerate() {
            let gradient = gradient(step, self.rank, parameter, weights);
            self.inner.update(parameter, step, weights, &gradient);
        }
        self.local.step(step, &mut self.own, loss(step, self.rank), Votes::default()).unwrap()
    }

    fn agreed(&self) -> Model {
        Model((0..LENGTHS.len()).map(|p| self.local.agreed(p).unwrap().to_vec()).collect())
    }
}

fn parameters() -> Vec<Parameter> {
    let shape = |len: usize| if len == 2000 { vec![40, 50] } else { vec![len] };
    let parameter =
        |(i, len): (usize, &usize)| Parameter { name: format!("p{i}"), shape: shape(*len) };
    LENGTHS.iter().enumerate().map(parameter).collect()
}

fn local_steps(spec: &str) -> LocalStepsSpec {
    spec.parse::<StrategySpec>().unwrap().local_steps().unwrap()
}

/// Runs a body on every worker; what came of each.
fn on_workers<T: Send>(
    workers: usize,
    transport: Transport,
    body: impl Fn(&Group) -> T + Sync,
) -> Vec<T> {
    let mut options = Options::default();
    options.transport = transport;
    let groups = Group::local(workers, &options).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A number that looks random, in −1..1.
fn noise(seed: usize) -> f32 {
    let mut x = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// A worker's gradient: it depends on the weights, so that differences stay.
fn gradient(step: u64, worker: usize, parameter: usize, weights: &[f32]) -> Vec<f32> {
    let seed = ((step as usize * 100 + worker) * 10 + parameter) * 5000;
    weights.iter().enumerate().map(|(i, w)| w * 0.1 + noise(seed + i)).collect()
}

fn loss(step: u64, worker: usize) -> f32 {
    noise(step as usize * 10 + worker)
}

fn close(left: &Model, right: &Model) -> bool {
    let pairs = left.0.iter().flatten().zip(right.0.iter().flatten());
    pairs.map(|(left, right)| (left - right).abs()).fold(0.0, f32::max) < 1e-4
}

/// All workers of a run in one thread, by the definition: own weights and agreed ones after the
/// last step. `due` says, for a step, which parameters are submitted and which are applied.
fn reference(
    workers: usize,
    steps: u64,
    (rate, momentum): (f32, f32),
    due: impl Fn(u64) -> (Vec<usize>, Vec<usize>),
) -> (Vec<Model>, Model) {
    let mut own = vec![Model::new(); workers];
    let (mut agreed, mut submitted) = (Model::new(), own.clone());
    let mut velocity: Vec<Vec<f32>> = LENGTHS.iter().map(|len| vec![0.0; *len]).collect();
    for step in 1..=steps {
        for (worker, Model(own)) in own.iter_mut().enumerate() {
            for (parameter, weights) in own.iter_mut().enumerate() {
                let gradient = gradient(step, worker, parameter, weights);
                weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= 0.1 * g);
            }
        }
        let (submit, apply) = due(step);
        for parameter in submit {
            for (submitted, own) in submitted.iter_mut().zip(&own) {
                submitted.0[parameter].clone_from(&own.0[parameter]);
            }
        }
        for p in apply {
            for (i, velocity) in velocity[p].iter_mut().enumerate() {
                let sum: f32 = submitted.iter().map(|s| agreed.0[p][i] - s.0[p][i]).sum();
                let mean = sum / workers as f32;
                *velocity = momentum * *velocity + mean;
                agreed.0[p][i] -= rate * (mean + momentum * *velocity);
                for (own, submitted) in own.iter_mut().zip(&submitted) {
                    own.0[p][i] = agreed.0[p][i] + (own.0[p][i] - submitted.0[p][i]);
                }
            }
        }
    }
    (own, agreed)
}

#[test]
fn one_local_step_is_synchronous_averaging() {
    for workers in [1, 2, 3] {
        let mut expected = Model::new();
        for step in 1..=10 {
            for (parameter, weights) in expected.0.iter_mut().enumerate() {
                let mut mean = vec![0.0; weights.len()];
                for worker in 0..workers {
                    let gradient = gradient(step, worker, parameter, weights);
                    mean.iter_mut().zip(gradient).for_each(|(m, g)| *m += g / workers as f32);
                }
                weights.iter_mut().zip(&mean).for_each(|(w, m)| *w -= 0.1 * m);
            }
        }
        let own = on_workers(workers, Transport::Auto, |group| {
            let mut worker = Worker::new(group, "local:1", "sgd", None);
            (1..=10).for_each(|step| drop(worker.step(step)));
            worker.own
        });
        assert!(own.iter().all(|own| close(own, &expected)), "{workers} workers");
    }
}

#[test]
fn workers_are_equal_after_a_synchronization_and_only_then() {
    for spec in ["local:4", "local:2..5", "diloco:4"] {
        for workers in [2, 3, 4] {
            let after_steps = on_workers(workers, Transport::Auto, |group| {
                let mut worker = Worker::new(group, spec, "adamw", None);
                let step = |step| {
                    let agreed = worker.step(step).agreed;
                    (agreed, worker.agreed().bits(), worker.own.bits())
                };
                (1..=14).map(step).collect::<Vec<_>>()
            });
            let mut synchronized = Vec::new();
            for i in 0..14 {
                let step = i as u64 + 1;
                let (outcome, agreed, own) = &after_steps[0][i];
                synchronized.extend(outcome.map(|_| step));
                assert_eq!(outcome.is_some(), own == agreed, "{spec}, step {step}");
                for other in &after_steps[1..] {
                    assert_eq!(other[i].0, *outcome, "{spec}, step {step}");
                    assert!(other[i].1 == *agreed, "{spec}, step {step}: agreed weights differ");
                    assert_eq!(other[i].2 == *own, outcome.is_some(), "{spec}, step {step}");
                }
                if let Some(Agreed { loss: mean, votes }) = outcome {
                    let sum: f32 = (0..workers).map(|worker| loss(step, worker)).sum();
                    assert!(
                        (mean - sum / workers as f32).abs() < 1e-6 && *votes == Votes::default()
                    );
                }
            }
            let expected = if spec == "local:2..5" { vec![2, 5, 9, 14] } else { vec![4, 8, 12] };
            assert_eq!(synchronized, expected, "{spec}");
        }
    }
}

#[test]
fn every_strategy_does_what_its_definition_says() {
    let all = || (0..LENGTHS.len()).collect::<Vec<_>>();
    let every = move |period| {
        move |step: u64| {
            if step.is_multiple_of(period) { (all(), all()) } else { Default::default() }
        }
    };
    // The large parameter has a group for itself, which is the second of three.
    let group = |step: u64| match step % 9 {
        3 => vec![0, 1],
        6 => vec![2],
        0 if step > 0 => vec![3, 4, 5],
        _ => vec![],
    };
    let streams = move |delay| {
        move |step: u64| (group(step), step.checked_sub(delay).map(group).unwrap_or_default())
    };
    type Due = Box<dyn Fn(u64) -> (Vec<usize>, Vec<usize>)>;
    let cases: [(&str, (f32, f32), Due); 7] = [
        ("local:5", (1.0, 0.0), Box::new(every(5))),
        ("diloco:5", (0.7, 0.9), Box::new(every(5))),
        ("diloco:5,streams=1,delay=0", (0.7, 0.9), Box::new(every(5))),
        ("diloco:6,rate=0.5,momentum=0.3", (0.5, 0.3), Box::new(every(6))),
        ("diloco:9,streams=3,delay=0", (0.7, 0.9), Box::new(streams(0))),
        ("diloco:9,streams=3", (0.7, 0.9), Box::new(streams(1))),
        ("diloco:9,streams=3,delay=7,rate=1,momentum=0", (1.0, 0.0), Box::new(streams(7))),
    ];
    for (spec, outer, due) in cases {
        for workers in [1, 3] {
            let (own, agreed) = reference(workers, 32, outer, &due);
            let trained = on_workers(workers, Transport::Auto, |group| {
                let mut worker = Worker::new(group, spec, "sgd", None);
                (1..=32).for_each(|step| drop(worker.step(step)));
                (worker.agreed(), worker.own)
            });
            for ((its_agreed, its_own), own) in trained.iter().zip(&own) {
                assert!(close(its_agreed, &agreed), "agreed weights, {spec}, {workers} workers");
                assert!(close(its_own, own), "own weights, {spec}, {workers} workers");
            }
        }
    }
}

#[test]
fn progress_during_the_delay_is_kept() {
    // Worker r moves every weight by r + 1 per step: whole numbers, of which nothing is rounded.
    on_workers(2, Transport::Auto, |group| {
        let plan = local_steps("diloco:8,streams=2,delay=3,rate=1,momentum=0");
        let parameters = [Parameter::flat("a", 3), Parameter::flat("b", 3)];
        let mut local = LocalSteps::new(Some(group), &parameters, plan, None).unwrap();
        let mut own = Model(vec![vec![0.0; 3]; 2]);
        local.begin(&own);
        let pace = group.rank() as f32 + 1.0;
        let mut expected = [0.0; 2];
        for step in 1..=40 {
            own.0.iter_mut().flatten().for_each(|w| *w += pace);
            let outcome = local.step(step, &mut own, step as f32, Votes::default()).unwrap();
            expected.iter_mut().for_each(|w| *w += pace);
            let applied = match step % 8 {
                7 => Some(0),
                3 if step > 8 => Some(1),
                _ => None,
            };
            if let Some(group) = applied {
                // The mean pace is 1.5, and the agreed weights know nothing of the last three steps.
                assert_eq!(
                    local.agreed(group).unwrap(),
                    [1.5 * (step - 3) as f32; 3],
                    "step {step}"
                );
                expected[group] = 1.5 * (step - 3) as f32 + 3.0 * pace;
                assert_eq!(
                    outcome.agreed,
                    Some(Agreed { loss: step as f32 - 3.0, votes: Votes::default() })
                );
                assert_eq!(outcome.buckets.len(), 1);
            } else {
                assert_eq!(outcome.agreed, None);
            }
            for (weights, expected) in own.0.iter().zip(expected) {
                assert_eq!(*weights, [expected; 3], "step {step}");
            }
        }
    });
}

#[test]
fn bits_do_not_depend_on_the_transport() {
    for spec in ["local:3", "diloco:6,streams=2,delay=2"] {
        let train = |transport| {
            on_workers(3, transport, |group| {
                let mut worker = Worker::new(group, spec, "adamw", None);
                (1..=20).for_each(|step| drop(worker.step(step)));
                worker.own.bits()
            })
        };
        assert!(train(Transport::Shm) == train(Transport::Tcp), "{spec}");
    }
}

#[test]
fn a_run_goes_on_from_any_step_with_the_same_bits() {
    const STEPS: u64 = 14;
    let cases = [
        ("local:3..6", None),
        ("diloco:5", None),
        ("diloco:8,streams=4,delay=5", None),
        ("diloco:6,streams=2", Some("int8")),
        ("diloco:4", Some("topk:0.1")),
    ];
    for (spec, codec) in cases {
        on_workers(3, Transport::Auto, |group| {
            let train = |worker: &mut Worker, steps: std::ops::RangeInclusive<u64>| {
                let mut agreed: Vec<Option<Agreed>> = Vec::new();
                for step in steps {
                    agreed.push(worker.step(step).agreed);
                }
                worker.local.settle(STEPS, &mut worker.own).unwrap();
                (agreed, worker.own.bits(), worker.agreed().bits())
            };
            let mut whole = Worker::new(group, spec, "adamw", codec);
            let expected = train(&mut whole, 1..=STEPS);

            let mut saving = Worker::new(group, spec, "adamw", codec);
            for step in 1..=STEPS {
                saving.step(step);
                let mut saved = Saved::new();
                let mut keep = |name: String, _: usize, values: &[f32]| {
                    assert_eq!(group.rank(), 0, "{name}");
                    assert_eq!(saved.insert(name, values.to_vec()), None);
                };
                saving.local.save(group, &mut keep).unwrap();

                let mut resumed = Worker::new(group, spec, "adamw", codec);
                resumed.own = saving.own.clone();
                for parameter in 0..LENGTHS.len() {
                    let state = saving.inner.state(parameter);
                    resumed.inner.restore(parameter, &state).unwrap();
                }
                resumed.local.restore(group, &|name| saved.get(name).cloned()).unwrap();
                let actual = train(&mut resumed, step + 1..=STEPS);
                assert_eq!(actual.0, expected.0[step as usize..], "{spec}, from step {step}");
                assert!(actual.1 == expected.1, "own weights, {spec}, from step {step}");
                assert!(actual.2 == expected.2, "agreed weights, {spec}, from step {step}");
            }
            // Saving changed nothing.
            saving.local.settle(STEPS, &mut saving.own).unwrap();
            assert!(saving.own.bits() == expected.1, "{spec}");
        });
    }
}

#[test]
fn a_state_that_lacks_something_is_refused_on_all_ranks() {
    let spec = "diloco:8,streams=2,delay=3";
    for lacking in ["agreed.p1", "outer.p2", "flight.p2", "submitted.0.p2", "numbers.p0"] {
        on_workers(2, Transport::Auto, |group| {
            let mut worker = Worker::new(group, spec, "sgd", None);
            (1..=5).for_each(|step| drop(worker.step(step)));
            let mut saved = Saved::new();
            let mut keep = |name: String, _: usize, values: &[f32]| {
                saved.insert(name, values.to_vec());
            };
            worker.local.save(group, &mut keep).unwrap();
            match lacking {
                // Without its numbers a group is not in flight; in another size they are refused.
                "numbers.p0" => drop(saved.insert(lacking.to_owned(), vec![1.0])),
                _ => assert_eq!(saved.remove(lacking).is_some(), group.rank() == 0, "{lacking}"),
            }
            let mut resumed = Worker::new(group, spec, "sgd", None);
            match resumed.local.restore(group, &|name| saved.get(name).cloned()) {
                Err(SyncError::MissingState { name }) => assert_eq!(name, lacking),
                other => panic!("{lacking}: {other:?}"),
            }
        });
    }
}

#[test]
fn one_vote_is_heard_by_all_where_it_is_applied() {
    let stop = Votes { stop: true, regroup: false };
    let regroup = Votes { stop: false, regroup: true };
    // Submitted after steps 3, 6, 9, …, applied two steps later.
    for (voted, heard, vote) in
        [(3, 5, stop), (4, 8, stop), (6, 8, stop), (7, 11, stop), (3, 5, regroup), (7, 11, regroup)]
    {
        let all_heard = on_workers(3, Transport::Auto, |group| {
            let plan = local_steps("diloco:6,streams=2,delay=2");
            let mut local = LocalSteps::new(Some(group), &parameters(), plan, None).unwrap();
            let mut own = Model::new();
            local.begin(&own);
            let hears = |step: &u64| {
                let votes = *step == voted && group.rank() == 1;
                let votes = if votes { vote } else { Votes::default() };
                let outcome = local.step(*step, &mut own, 0.0, votes).unwrap();
                outcome.agreed.is_some_and(|agreed| agreed.votes == vote)
            };
            (1..20).filter(hears).collect::<Vec<_>>()
        });
        assert_eq!(all_heard, vec![vec![heard]; 3], "voted after step {voted}");
    }
}

#[test]
fn settled_workers_are_equal() {
    for spec in ["local:4", "diloco:4", "diloco:4,streams=4,delay=3", "diloco:4,delay=2"] {
        for steps in [1, 4, 6, 9] {
            let settled = on_workers(3, Transport::Auto, |group| {
                let mut worker = Worker::new(group, spec, "sgd", None);
                (1..=steps).for_each(|step| drop(worker.step(step)));
                worker.local.settle(steps, &mut worker.own).unwrap();
                let settled = worker.own.bits();
                assert!(settled == worker.agreed().bits(), "{spec}, {steps} steps");
                // There is nothing left to settle, and the run may go on.
                worker.local.settle(steps, &mut worker.own).unwrap();
                assert!(settled == worker.own.bits(), "{spec}, {steps} steps");
                for step in steps + 1..steps + 9 {
                    worker.step(step);
                }
                settled
            });
            assert!(settled.iter().all(|own| *own == settled[0]), "{spec}, {steps} steps");
        }
    }
}

#[test]
fn settling_averages_what_was_not_yet_synchronized() {
    let settled = on_workers(3, Transport::Auto, |group| {
        let mut worker = Worker::new(group, "diloco:4", "sgd", None);
        (1..=6).for_each(|step| drop(worker.step(step)));
        let own = worker.own.clone();
        worker.local.settle(6, &mut worker.own).unwrap();
        (own, worker.own)
    });
    let mut mean = Model(LENGTHS.map(|len| vec![0.0; len]).to_vec());
    for (own, _) in &settled {
        let pairs = mean.0.iter_mut().flatten().zip(own.0.iter().flatten());
        pairs.for_each(|(mean, own)| *mean += own / 3.0);
    }
    assert!(settled.iter().all(|(_, settled)| close(settled, &mean)));
}

#[test]
fn what_is_synchronized_is_not_settled_again() {
    on_workers(2, Transport::Auto, |group| {
        let mut worker = Worker::new(group, "diloco:4", "sgd", None);
        (1..=8).for_each(|step| drop(worker.step(step)));
        let (own, sent) = (worker.own.bits(), worker.local.sent());
        let outcome = worker.local.settle(8, &mut worker.own).unwrap();
        assert!(own == worker.own.bits());
        assert_eq!((worker.local.sent(), outcome.buckets.len()), (sent, 0));
    });
}
