//! candle models whose parameters are shared, unused and frozen, on any number of workers.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use unisono::Rank;
use unisono::candle::{Parameters, Replica, ReplicaError};
use unisono::prelude::*;
use unisono::sync::SyncError;
use unisono::worker::WorkerError;

const SHARDS: usize = 6;
const STEPS: usize = 8;

/// A model that uses one parameter twice, one never, and one only for some inputs.
struct Model {
    first: Linear,
    frozen: Linear,
    tied: Tensor,
    rare: Tensor,
}

impl Model {
    fn new(builder: &VarBuilder<'_>) -> Result<Model> {
        builder.get((5, 5), "unused")?;
        Ok(Model {
            first: candle_nn::linear(4, 8, builder.pp("first"))?,
            frozen: candle_nn::linear(8, 8, builder.pp("frozen"))?,
            tied: builder.get((8, 8), "tied")?,
            rare: builder.get(8, "rare")?,
        })
    }

    fn loss(&self, inputs: &Tensor, use_rare: bool) -> Result<Tensor> {
        let hidden = self.frozen.forward(&self.first.forward(inputs)?.tanh()?)?;
        let hidden = hidden.matmul(&self.tied)?.tanh()?.matmul(&self.tied.t()?)?;
        let hidden = if use_rare { hidden.broadcast_add(&self.rare)? } else { hidden };
        (hidden - 0.3)?.sqr()?.mean_all()
    }
}

fn initial(name: &str, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((i * 37 + name.len() * 11) % 23) as f32 / 23.0 - 0.4).collect()
}

fn inputs(step: usize, shard: usize) -> Tensor {
    let value = |i: usize| ((step * 57 + shard * 13 + i * 29) % 17) as f32 / 17.0 - 0.5;
    Tensor::from_vec((0..12).map(value).collect::<Vec<_>>(), (3, 4), &Device::Cpu).unwrap()
}

fn parameters(variables: &VarMap) -> Parameters {
    Parameters::with_frozen(variables, |name| name.starts_with("frozen"))
}

/// Variables as the model makes them, with known values.
fn variables() -> VarMap {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    Model::new(&builder).unwrap();
    for (name, variable) in variables.data().lock().unwrap().iter() {
        let values = initial(name, variable.elem_count());
        variable.set(&Tensor::from_vec(values, variable.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    variables
}

fn values(variables: &VarMap, name: &str) -> Vec<f32> {
    variables.data().lock().unwrap()[name].flatten_all().unwrap().to_vec1().unwrap()
}

/// Trains on one rank; the hash, and the variables as the user sees them.
fn train(group: &Group, variables: &VarMap) -> String {
    let parameters = parameters(variables);
    let model = Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
    let optimizer = "adamw".parse().unwrap();
    let mut replica = Replica::new(group, &parameters, Settings::new(SHARDS), optimizer).unwrap();
    for step in 0..STEPS {
        while let Some(shard) = replica.next_shard() {
            let loss = model.loss(&inputs(step, shard), step == 3 && shard == 4).unwrap();
            replica.backward(&loss).unwrap();
        }
        replica.step().unwrap();
    }
    replica.check(group).unwrap();
    replica.weights_hash().to_hex().to_string()
}

fn train_on(workers: usize) -> Vec<(String, VarMap)> {
    let groups = Group::local(workers, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        let rank = |group: &'static Group| {
            move || {
                let variables = variables();
                (train(group, &variables), variables)
            }
        };
        // Groups outlive the threads either way; leaking them keeps this function short.
        let ranks: Vec<_> = groups.leak().iter().map(|group| scope.spawn(rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn weights_are_equal_for_any_number_of_workers() {
    let (expected, variables) = train_on(1).remove(0);
    for workers in [2, 3, 4, 6] {
        for (rank, (hash, of_rank)) in train_on(workers).into_iter().enumerate() {
            assert_eq!(hash, expected, "{workers} workers, rank {rank}");
            assert_eq!(values(&of_rank, "tied"), values(&variables, "tied"));
        }
    }
    for untouched in ["unused", "frozen.weight", "frozen.bias"] {
        let before = initial(untouched, values(&variables, untouched).len());
        assert_eq!(values(&variables, untouched), before, "{untouched}");
    }
    for trained in ["tied", "rare", "first.weight", "first.bias"] {
        let before = initial(trained, values(&variables, trained).len());
        assert_ne!(values(&variables, trained), before, "{trained}");
    }
}

#[test]
fn a_shared_parameter_has_the_sum_of_its_gradients() {
    // One step of plain descent by hand, with candle's own backward.
    let by_hand = variables();
    let builder = VarBuilder::from_varmap(&by_hand, DType::F32, &Device::Cpu);
    let model = Model::new(&builder).unwrap();
    let gradients = model.loss(&inputs(0, 0), false).unwrap().backward().unwrap();
    let tied: Var = by_hand.data().lock().unwrap()["tied"].clone();
    let expected = (tied.as_tensor() - (gradients.get(&tied).unwrap() * 0.01).unwrap()).unwrap();
    let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();

    let ours = variables();
    let parameters = parameters(&ours);
    let model = Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
    let group = Group::local(1, &Options::default()).unwrap().remove(0);
    let optimizer: unisono::optimizer::OptimizerSpec = "sgd".parse().unwrap();
    let rate = unisono::optimizer::LearningRate::Constant(0.01);
    let optimizer = optimizer.with_learning_rate(rate).with_weight_decay(0.0);
    let mut replica = Replica::new(&group, &parameters, Settings::new(1), optimizer).unwrap();
    assert_eq!(replica.next_shard(), Some(0));
    replica.backward(&model.loss(&inputs(0, 0), false).unwrap()).unwrap();
    replica.step().unwrap();
    for (ours, expected) in values(&ours, "tied").iter().zip(expected) {
        assert!((ours - expected).abs() < 1e-6, "{ours} {expected}");
    }
}

#[test]
fn workers_start_with_the_weights_of_rank_0() {
    let groups = Group::local(2, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                // candle's initial values are random.
                let variables = VarMap::new();
                let parameters = parameters(&variables);
                Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
                let optimizer = "sgd".parse().unwrap();
                let settings = Settings::new(2);
                let replica = Replica::new(group, &parameters, settings, optimizer).unwrap();
                replica.check(group).unwrap();
            });
        }
    });
}

#[test]
fn a_diverged_replica_is_named() {
    let groups = Group::local(3, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let variables = variables();
                let parameters = parameters(&variables);
                Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
                let optimizer = "sgd".parse().unwrap();
                let settings = Settings::new(3);
                let mut replica = Replica::new(group, &parameters, settings, optimizer).unwrap();
                let mut saved = std::collections::HashMap::new();
                // Each by itself, so that they can differ.
                let alone = Group::local(1, &Options::default()).unwrap().remove(0);
                let save = |name, _: &[usize], values: &[f32]| {
                    saved.insert(name, values.to_vec());
                };
                replica.save(&alone, save).unwrap();
                if group.rank() == 1 {
                    saved.get_mut("weights.tied").unwrap()[7] += 1.0;
                }
                replica.restore(&alone, 5, |name: &str| saved.get(name).cloned()).unwrap();
                match replica.check(group) {
                    Err(ReplicaError::Worker(WorkerError::Sync(SyncError::Diverged {
                        step: 5,
                        rank: Rank(1),
                        parameter,
                    }))) => assert_eq!(parameter, "tied"),
                    other => panic!("{other:?}"),
                }
            });
        }
    });
}

/// Two replicas train; one is lost in the middle of a backward pass, the other goes on alone; two more
/// join, with other weights, also of what is not trained. The hash is that of the undisturbed run.
#[test]
fn a_replica_goes_on_in_other_groups() {
    let expected = train_on(1).remove(0).0;
    let settings = || Settings { withhold: true, ..Settings::new(SHARDS) };
    let shard = |model: &Model, replica: &mut Replica<'_>| {
        let (step, shard) = (replica.steps() as usize, replica.next_shard()?);
        let loss = model.loss(&inputs(step, shard), step == 3 && shard == 4).unwrap();
        Some(replica.backward(&loss).unwrap())
    };
    let train = |model: &Model, replica: &mut Replica<'_>, until: u64| {
        while replica.steps() < until {
            while shard(model, replica).is_some() {}
            replica.step().unwrap();
        }
    };
    let mut first = Group::local(2, &Options::default()).unwrap();
    let alone = Group::local(1, &Options::default()).unwrap().remove(0);
    let mut last = Group::local(3, &Options::default()).unwrap();
    // The survivor is not the first of the last group.
    let own = last.remove(1);
    let hashes: Vec<String> = std::thread::scope(|scope| {
        let lost = first.remove(0);
        scope.spawn(move || {
            let (variables, optimizer) = (variables(), "adamw".parse().unwrap());
            let parameters = parameters(&variables);
            let model = Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
            let mut replica = Replica::new(&lost, &parameters, settings(), optimizer).unwrap();
            train(&model, &mut replica, 2);
            shard(&model, &mut replica);
        });
        let survivor = first.remove(0);
        let survivor = scope.spawn(move || {
            let (variables, optimizer) = (variables(), "adamw".parse().unwrap());
            let parameters = parameters(&variables);
            let model = Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
            let mut replica = Replica::new(&survivor, &parameters, settings(), optimizer).unwrap();
            train(&model, &mut replica, 2);
            while shard(&model, &mut replica).is_some() {}
            replica.step().unwrap_err();
            let regrouped = replica.regroup(&alone).unwrap();
            assert_eq!((regrouped.steps, regrouped.donor, regrouped.behind), (2, Some(0), 0));
            train(&model, &mut replica, 4);
            // Its own error in the middle of a shard.
            assert_eq!(replica.next_shard(), Some(0));
            let regrouped = replica.regroup(&own).unwrap();
            assert_eq!((regrouped.steps, regrouped.donor, regrouped.behind), (4, Some(1), 2));
            assert_eq!(replica.worker().rank(), 1);
            train(&model, &mut replica, STEPS as u64);
            replica.check(&own).unwrap();
            replica.weights_hash().to_hex().to_string()
        });
        let joiners = last.into_iter().map(|group| {
            scope.spawn(move || {
                let variables = VarMap::new();
                let parameters = parameters(&variables);
                let model = Model::new(&parameters.builder(DType::F32, &Device::Cpu)).unwrap();
                let optimizer = "adamw".parse().unwrap();
                let mut replica = Replica::waiting(&parameters, settings(), &optimizer).unwrap();
                let regrouped = replica.regroup(&group).unwrap();
                assert_eq!((regrouped.steps, regrouped.donor), (4, Some(1)));
                train(&model, &mut replica, STEPS as u64);
                replica.check(&group).unwrap();
                replica.weights_hash().to_hex().to_string()
            })
        });
        let all: Vec<_> = joiners.chain([survivor]).collect();
        all.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    assert_eq!(hashes, vec![expected; 3]);
}
