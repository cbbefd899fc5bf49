//! What the tests of this crate need to train: variables with seeded values, and two optimizers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use unisono_workload::data::{Batch, Kind};
use unisono_workload::init::initialize;
use unisono_workload::model::{Model, ModelSpec};

/// The variables of one model, by name.
pub type Variables = BTreeMap<String, Var>;

/// Builds a model and keeps hold of its variables.
pub fn build(spec: &ModelSpec, kind: Kind, seed: u64, dtype: DType) -> (Box<dyn Model>, Variables) {
    let made = Arc::new(Mutex::new(Variables::new()));
    let backend = Box::new(Seeded { seed, made: made.clone() });
    let builder = VarBuilder::from_backend(backend, dtype, Device::Cpu);
    let model = spec.build(kind, builder).expect("the sizes fit the data");
    let variables = made.lock().expect("no test panics while building").clone();
    (model, variables)
}

struct Seeded {
    seed: u64,
    made: Arc<Mutex<Variables>>,
}

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let values = initialize(self.seed, name, &shape, init);
        let variable =
            Var::from_tensor(&Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?)?;
        let tensor = variable.as_tensor().clone();
        let previous = self.made.lock().expect("not poisoned").insert(name.into(), variable);
        assert!(previous.is_none(), "{name} was asked for twice");
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("the shape of {name} is unknown")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

/// `velocity = 0.9 velocity + gradient; weights -= rate × velocity`.
pub struct Momentum<'a> {
    variables: &'a Variables,
    velocities: BTreeMap<&'a str, Tensor>,
}

impl<'a> Momentum<'a> {
    pub fn new(variables: &'a Variables) -> Self {
        Self { variables, velocities: BTreeMap::new() }
    }

    /// One step along the gradient of the batch; its loss before the step.
    pub fn step(&mut self, model: &dyn Model, batch: &Batch, rate: f64) -> Result<f32> {
        let loss = model.loss(batch)?;
        let gradients = loss.backward()?;
        for (name, variable) in self.variables {
            let gradient = gradient(&gradients, name, variable);
            let velocity = match self.velocities.get(name.as_str()) {
                Some(velocity) => ((velocity * 0.9)? + gradient)?,
                None => gradient.clone(),
            };
            variable.set(&(variable.as_tensor() - (&velocity * rate)?)?)?;
            self.velocities.insert(name, velocity);
        }
        loss.to_scalar()
    }
}

/// The gradient of a variable, which every variable of a model must have.
pub fn gradient<'g>(gradients: &'g GradStore, name: &str, variable: &Var) -> &'g Tensor {
    gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient"))
}
