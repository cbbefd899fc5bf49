//! The variables of a model, and the tensors it computes with.
//!
//! A hooked parameter has its values twice: in the variable, where the user looks for them, and in
//! the tensor behind the hook, with which the model computes. Updates go to the second and are
//! copied to the first.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};

use super::hook::{Hook, Sink, change, read};

/// The parameters of one model, in the order in which it was built.
#[derive(Clone)]
pub struct Parameters {
    shared: Arc<Shared>,
}

struct Shared {
    variables: VarMap,
    initializer: Initializer,
    frozen: Box<dyn Fn(&str) -> bool + Send + Sync>,
    sink: Arc<Sink>,
    entries: Mutex<Vec<Entry>>,
}

type Initializer = Option<Box<dyn Fn(&str, &Shape, Init) -> Vec<f32> + Send + Sync>>;

/// One parameter.
#[derive(Clone)]
pub(super) struct Entry {
    pub name: String,
    pub variable: Var,
    /// What the model computes with.
    pub live: Tensor,
    pub frozen: bool,
}

impl Parameters {
    /// Those in `variables`: the ones that are there, and the ones that the model adds to it.
    pub fn of(variables: &VarMap) -> Parameters {
        Parameters::make(variables, None, Box::new(|_| false))
    }

    /// As [`Parameters::of`]; parameters whose names `frozen` accepts stay as they are. They are
    /// equal on all workers, have no gradient, and take no part in communication.
    pub fn with_frozen(
        variables: &VarMap,
        frozen: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Parameters {
        Parameters::make(variables, None, Box::new(frozen))
    }

    /// As [`Parameters::of`]; new parameters get the values that `initializer` makes of their name,
    /// shape and kind. candle's own initial values differ from run to run.
    pub fn with_initializer(
        variables: &VarMap,
        initializer: impl Fn(&str, &Shape, Init) -> Vec<f32> + Send + Sync + 'static,
    ) -> Parameters {
        Parameters::make(variables, Some(Box::new(initializer)), Box::new(|_| false))
    }

    /// Builds the model: what [`VarBuilder::from_varmap`] is for one worker.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    fn make(
        variables: &VarMap,
        initializer: Initializer,
        frozen: Box<dyn Fn(&str) -> bool + Send + Sync>,
    ) -> Parameters {
        let (variables, sink, entries) = (variables.clone(), Arc::default(), Mutex::default());
        Parameters { shared: Arc::new(Shared { variables, initializer, frozen, sink, entries }) }
    }

    pub(super) fn sink(&self) -> &Arc<Sink> {
        &self.shared.sink
    }

    /// All parameters, in order of registration.
    pub(super) fn entries(&self) -> Vec<Entry> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        self.shared.entries.lock().expect("no panic while locked")
    }

    fn variable(&self, name: &str) -> Option<Var> {
        self.shared.variables.data().lock().expect("no panic while locked").get(name).cloned()
    }

    fn register(&self, name: &str, variable: Var) -> Result<Tensor> {
        let mut entries = self.lock();
        if let Some(entry) = entries.iter().find(|entry| entry.name == name) {
            // The model uses one parameter in two places.
            return Ok(entry.live.clone());
        }
        if self.shared.sink.gradients.get().is_some() {
            bail!("{name} was added after the replica was made; build the whole model first")
        }
        let frozen = (self.shared.frozen)(name);
        let live = if frozen {
            variable.as_detached_tensor().copy()?
        } else {
            let parameter = entries.iter().filter(|entry| !entry.frozen).count();
            variable.apply_op1(Hook { parameter, sink: self.shared.sink.clone() })?
        };
        entries.push(Entry { name: name.to_owned(), variable, live: live.clone(), frozen });
        Ok(live)
    }
}

impl SimpleBackend for Parameters {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if dtype != DType::F32 || !device.is_cpu() {
            bail!("{name} is {dtype:?} on {device:?}; parameters must be f32 on the CPU")
        }
        if self.variable(name).is_none()
            && let Some(initializer) = &self.shared.initializer
        {
            let values = initializer(name, &shape, init);
            let variable = Var::from_vec(values, shape.clone(), device)?;
            let mut variables = self.shared.variables.data().lock().expect("no panic while locked");
            variables.insert(name.to_owned(), variable);
        }
        self.shared.variables.get(shape, name, init, dtype, device)?;
        let variable = self.variable(name).expect("it was just made");
        self.register(name, variable)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        match self.variable(name) {
            Some(variable) => self.register(name, variable),
            None => bail!("there is no parameter {name}"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.variable(name).is_some()
    }
}

impl Entry {
    /// Calls `read` with the values.
    pub fn read<R>(&self, then: impl FnOnce(&[f32]) -> R) -> R {
        read(&self.live, then)
    }

    /// Changes the values, for the model and in the variable. All are copied, and nobody
    /// can read them meanwhile: many small changes are better made at once.
    pub fn change(&self, how: impl FnOnce(&mut [f32])) -> Result<()> {
        change(&self.live, how)?;
        read(&self.live, |values| {
            change(self.variable.as_tensor(), |variable| variable.copy_from_slice(values))
        })
    }
}
