//! The operation between a variable and the model, which does nothing but see the gradient.
//!
//! candle computes the gradients of a graph node by node, from the loss backwards. An operation's
//! own gradient is asked for once its output's is complete, however often the output was used.
//! So the identity on a parameter sees that parameter's whole gradient, in the middle of backward.

use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor, bail};
use unisono_sync::accumulate::Values;

use super::gradient::{Visitor, visit};
use crate::worker::GradientSink;

/// Where gradients go, once there is a replica.
#[derive(Default)]
pub struct Sink {
    pub gradients: OnceLock<GradientSink>,
}

/// The identity on one parameter.
pub struct Hook {
    /// Its number, in order of registration.
    pub parameter: usize,
    pub sink: Arc<Sink>,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "unisono-hook"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let CpuStorage::F32(values) = storage else { bail!("parameters must be f32") };
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a variable lies in order")
        };
        Ok((CpuStorage::F32(values[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        if let Some(sink) = self.sink.gradients.get()
            && visit(gradient, Taker { sink, parameter: self.parameter })?
        {
            return Ok(None);
        }
        // A backward pass outside of a shard: the gradient is for the variable.
        Ok(Some(gradient.clone()))
    }
}

/// Hands a gradient over; whether it was taken.
struct Taker<'a> {
    sink: &'a GradientSink,
    parameter: usize,
}

impl Visitor for Taker<'_> {
    type Output = bool;

    fn visit(self, values: &impl Values) -> bool {
        self.sink.gradient_from(self.parameter, values)
    }
}

/// Calls `change` with the elements of a tensor, in place.
pub fn change(tensor: &Tensor, change: impl FnOnce(&mut [f32])) -> Result<()> {
    tensor.inplace_op1(&InPlace(Mutex::new(Some(change))))
}

/// Calls `read` with the elements of a tensor that lies in order, as parameters do.
pub fn read<R>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> R) -> R {
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets().expect("a parameter lies in order");
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => read(&values[start..end]),
        _ => unreachable!("parameters are f32 on the CPU since they were registered"),
    }
}

struct InPlace<F>(Mutex<Option<F>>);

impl<F: FnOnce(&mut [f32])> candle_core::InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "unisono-update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let change = self.0.lock().expect("no panic while locked").take();
        match (storage, layout.contiguous_offsets(), change) {
            (CpuStorage::F32(values), Some((start, end)), Some(change)) => {
                change(&mut values[start..end]);
                Ok(())
            }
            _ => bail!("parameters are f32 and lie in order"),
        }
    }
}
