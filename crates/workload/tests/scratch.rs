#![allow(missing_docs)]
mod support;
use candle_core::{DType, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use support::{build, gradient};
use unisono_workload::data::*;
use unisono_workload::model::*;

#[derive(Clone, Copy, Debug)]
enum Opt { Momentum(f64, f64), AdamW(f64, f64) }

fn run(data: &Dataset, spec: &ModelSpec, opt: Opt, steps: u64, decay: bool, fold: usize, seed: u64) -> f64 {
    let all: Vec<usize> = (0..data.train_len()).collect();
    // five folds over training data, blocks of residues
    let (train, valid): (Vec<usize>, Vec<usize>) = if fold < 5 { all.iter().partition(|i| *i % 5 != fold) } else { (all, vec![]) };
    let (model, vars) = build(spec, data.kind(), seed, DType::F32);
    let mut order = SampleOrder::new(seed, train.len());
    let mut adam = AdamW::new(vars.values().cloned().collect(), ParamsAdamW::default()).unwrap();
    let mut vel: Vec<Option<Tensor>> = vec![None; vars.len()];
    for step in 0..steps {
        let idx: Vec<usize> = (step * 64..step * 64 + 64).map(|p| train[order.sample(p)]).collect();
        let b = data.batch(Split::Train, &idx).unwrap();
        let grads = model.loss(&b).unwrap().backward().unwrap();
        let k = if decay { 1.0 - step as f64 / steps as f64 } else { 1.0 };
        match opt {
            Opt::AdamW(lr, wd) => {
                adam.set_params(ParamsAdamW { lr: lr * k, weight_decay: wd, ..Default::default() });
                adam.step(&grads).unwrap();
            }
            Opt::Momentum(lr, wd) => for ((n, v), vel) in vars.iter().zip(&mut vel) {
                let g = (gradient(&grads, n, v) + (v.as_tensor() * wd).unwrap()).unwrap();
                let new = match vel.take() { Some(o) => ((o * 0.9).unwrap() + g).unwrap(), None => g };
                v.set(&(v.as_tensor() - (&new * (lr * k)).unwrap()).unwrap()).unwrap();
                *vel = Some(new.detach());
            },
        }
    }
    let b = if fold < 5 { data.batch(Split::Train, &valid).unwrap() } else { data.batch(Split::Test, &(0..data.test_len()).collect::<Vec<_>>()).unwrap() };
    let (h, n) = accuracy(model.as_ref(), &b).unwrap();
    h as f64 / n as f64
}

#[test]
fn scratch() {
    let data = DataSpec::Digits.load(0).unwrap();
    let hidden: Vec<usize> = std::env::var("HIDDEN").unwrap_or("128,64".into()).split(',').map(|s| s.parse().unwrap()).collect();
    let spec = ModelSpec::Mlp { hidden };
    let folds: Vec<usize> = match std::env::var("FOLDS") { Ok(s) => s.split(',').map(|s| s.parse().unwrap()).collect(), _ => (0..5).collect() };
    let steps: u64 = std::env::var("STEPS").unwrap_or("300".into()).parse().unwrap();
    let opts = [Opt::Momentum(0.1, 0.0), Opt::Momentum(0.2, 0.0), Opt::Momentum(0.3, 0.0), Opt::Momentum(0.2, 1e-3), Opt::AdamW(1e-2, 0.1)];
    for opt in opts { for decay in [false, true] {
        let mut a: Vec<f64> = folds.iter().map(|&f| run(&data, &spec, opt, steps, decay, f, f as u64)).collect();
        let mean = a.iter().sum::<f64>() / a.len() as f64;
        a.sort_by(f64::total_cmp);
        println!("{spec} {opt:?} decay {decay} steps {steps}: mean {mean:.4} {a:.3?}");
    }}
}
