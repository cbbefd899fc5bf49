//! Lock-step: the bits of the canonical sum over all shards of the batch.

use std::ops::Range;

use unisono_collective::shards::Shards;
use unisono_collective::tree;
use unisono_optimizer::{LearningRate, OptimizerSpec};
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{Client, Gradient, Run};

use crate::lab::{Lab, NEVER, TRANSPORTS, within};

const STEPS: u64 = 4;

/// What is trained: gradients that follow from the weights, so that a wrong read shows.
pub struct Problem {
    pub run: Run,
}

impl Problem {
    pub fn new(optimizer: &str, workers: u32, shards: u32, steps: u64) -> Problem {
        let optimizer = optimizer.parse::<OptimizerSpec>().unwrap();
        let optimizer = optimizer.with_learning_rate(LearningRate::Constant(0.03));
        let shapes = vec![vec![13, 3], vec![5], vec![], vec![2, 4, 3], vec![0]];
        let mut run = Run::new(shapes, optimizer, "bsp".parse().unwrap());
        (run.workers, run.shards, run.total, run.timeout) = (workers, shards, steps, NEVER);
        Problem { run }
    }

    pub fn initial(&self, parameter: usize) -> Vec<f32> {
        (0..self.length(parameter)).map(|i| noise(parameter as u64, i as u64)).collect()
    }

    fn length(&self, parameter: usize) -> usize {
        self.run.shapes[parameter].iter().product()
    }

    fn gradient(&self, shard: usize, step: u64, parameter: usize, weights: &[f32]) -> Vec<f32> {
        let at = |i| noise(100 + shard as u64 * 31 + step * 977, (parameter * 1000 + i) as u64);
        weights.iter().enumerate().map(|(i, weight)| at(i) + 0.1 * weight).collect()
    }

    /// The canonical sum of the gradients of some shards.
    fn sum(&self, of: Range<usize>, step: u64, parameter: usize, weights: &[f32]) -> Vec<f32> {
        if of.len() == 1 {
            return self.gradient(of.start, step, parameter, weights);
        }
        let middle = tree::split(of.clone());
        let left = self.sum(of.start..middle, step, parameter, weights);
        let right = self.sum(middle..of.end, step, parameter, weights);
        left.iter().zip(&right).map(|(a, b)| a + b).collect()
    }

    /// The weights after all steps, by hand.
    pub fn expected(&self) -> Vec<Vec<f32>> {
        let parameters = self.run.shapes.len();
        let lengths: Vec<usize> = (0..parameters).map(|p| self.length(p)).collect();
        let mut optimizer = self.run.optimizer.build(&lengths).unwrap();
        let mut weights: Vec<Vec<f32>> = (0..parameters).map(|p| self.initial(p)).collect();
        let shards = self.run.shards as usize;
        for step in 0..self.run.total {
            for (parameter, weights) in weights.iter_mut().enumerate() {
                let mut mean = self.sum(0..shards, step, parameter, weights);
                mean.iter_mut().for_each(|x| *x /= shards as f32);
                optimizer.update(parameter, step + 1, weights, &mean);
            }
        }
        weights
    }

    /// What one worker does. Returns the weights that it sees in the end.
    pub fn work(&self, client: Client, worker: usize) -> Vec<Vec<f32>> {
        self.work_at_pace(client, worker, |_| ())
    }

    /// The same, where `pace` is told of every step before it begins.
    pub fn work_at_pace(
        &self,
        mut client: Client,
        worker: usize,
        pace: impl Fn(u64),
    ) -> Vec<Vec<f32>> {
        let workers = self.run.workers as usize;
        let shards = Shards::new(self.run.shards as usize, workers).unwrap();
        let subtrees = shards.subtrees(workers).swap_remove(worker);
        let parameters = self.run.shapes.len();
        let mut weights: Vec<Vec<f32>> =
            (0..parameters).map(|parameter| vec![f32::NAN; self.length(parameter)]).collect();
        let put = |weights: &mut [Vec<f32>], parameter: usize, start: usize, values: &[f32]| {
            weights[parameter][start..start + values.len()].copy_from_slice(values);
        };
        client.pull(None, &mut |p, start, values| put(&mut weights, p, start, values)).unwrap();
        while !client.is_finished() {
            let step = client.clock().0;
            pace(step);
            let sums: Vec<Vec<Vec<f32>>> = (0..parameters)
                .map(|parameter| {
                    let of = |subtree: &Range<usize>| {
                        self.sum(subtree.clone(), step, parameter, &weights[parameter])
                    };
                    subtrees.iter().map(of).collect()
                })
                .collect();
            let gradients: Vec<Gradient<'_>> =
                sums.iter().enumerate().map(|(p, sums)| (p, slices(sums))).collect();
            let pushed = client
                .push_pull(&gradients, Measured::default(), &mut |p, start, values| {
                    put(&mut weights, p, start, values);
                })
                .unwrap();
            assert!(pushed.applied);
            assert_eq!(client.clock().0, step + 1);
        }
        client.leave();
        weights
    }
}

fn slices(vectors: &[Vec<f32>]) -> Vec<&[f32]> {
    vectors.iter().map(Vec::as_slice).collect()
}

/// A number between -1 and 1 that follows from two.
fn noise(a: u64, b: u64) -> f32 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 32;
    (x as u32 as f32 / u32::MAX as f32) * 2.0 - 1.0
}

fn run(lab: &Lab, problem: &Problem) {
    let expected = problem.expected();
    std::thread::scope(|scope| {
        let work = |worker: u32| {
            let join = move || {
                let initial = |parameter| problem.initial(parameter);
                let client = Client::join(&problem.run, lab.options(worker), &initial).unwrap();
                problem.work(client, worker as usize)
            };
            scope.spawn(join)
        };
        let workers: Vec<_> = (0..problem.run.workers).map(work).collect();
        for worker in workers {
            assert_eq!(worker.join().unwrap(), expected);
        }
    });
    assert_eq!(lab.weights(&problem.run), expected);
    for report in lab.reports(&problem.run) {
        assert!(report.finished);
        assert_eq!(report.updates, problem.run.total);
        assert_eq!(report.ledger.applied, problem.run.total * u64::from(problem.run.workers));
    }
}

#[test]
fn every_split_has_the_bits_of_one_worker() {
    for transport in TRANSPORTS {
        for servers in 1..=3 {
            for (workers, shards) in
                [(1, 1), (2, 2), (3, 3), (4, 4), (1, 8), (2, 8), (3, 8), (4, 6)]
            {
                within("lock-step", move || {
                    let problem = Problem::new("momentum", workers, shards, STEPS);
                    run(&Lab::start(servers, transport), &problem);
                });
            }
        }
    }
}

#[test]
fn every_optimizer_has_the_bits_of_one_worker() {
    for transport in TRANSPORTS {
        for optimizer in ["sgd", "momentum", "adamw", "adagrad"] {
            within(optimizer, move || {
                let problem = Problem::new(optimizer, 3, 8, STEPS);
                run(&Lab::start(2, transport), &problem);
            });
        }
    }
}

/// The sum over the same shards does not depend on the workers: what makes lock-step equal to one
/// worker, and so to any other strategy that sums in this order.
#[test]
fn the_hand_made_sum_is_the_canonical_one() {
    let problem = Problem::new("sgd", 1, 8, 1);
    let weights = problem.initial(1);
    let sum = |of| problem.sum(of, 0, 1, &weights);
    let halves: Vec<f32> = sum(0..4).iter().zip(&sum(4..8)).map(|(a, b)| a + b).collect();
    assert_eq!(sum(0..8), halves);
    let chain = (1..8).fold(sum(0..1), |all, shard| {
        all.iter().zip(&sum(shard..shard + 1)).map(|(a, b)| a + b).collect()
    });
    assert_ne!(sum(0..8), chain, "the order makes no difference, so nothing is tested");
}
