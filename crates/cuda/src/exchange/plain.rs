//! What travels as it is, in one exact all-reduce: gradients that are not encoded, and the measurements of those whose
//! usual size is due.

use super::scratch::Use;
use super::{DeviceGradient, Exchange, ExchangeError};
use crate::codec::{CodecError, DeviceScale, Run};
use crate::library::DevicePtr;
use crate::stream::Stream;
use unisono_collective::Dtype;

impl Exchange {
    /// Which parameters have a gradient on any rank. Gradients that this rank has not are zeros from now on.
    ///
    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn find_used(
        &mut self,
        gradients: &[DeviceGradient],
        used: DevicePtr,
        stream: &Stream,
    ) -> Result<Vec<bool>, ExchangeError> {
        let count = gradients.len();
        let (mut own, mut all) = (vec![0f32; count], vec![0f32; count]);
        // SAFETY: the caller's promise; what is copied to the host is waited for.
        unsafe {
            stream.copy_to_host(own.as_mut_ptr().cast(), used, count * 4)?;
            self.calls.all_reduce(used, count, Dtype::F32, stream)?;
            stream.copy_to_host(all.as_mut_ptr().cast(), used, count * 4)?;
            stream.synchronize()?;
            for (gradient, _) in gradients.iter().zip(own).filter(|(_, own)| *own == 0.0) {
                let elements = self.held[gradient.parameter].elements;
                if elements > 0 {
                    stream.fill_words(gradient.pointer, 0, elements)?;
                }
            }
        }
        Ok(all.iter().map(|ranks| *ranks > 0.0).collect())
    }

    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn exchange_plain(
        &mut self,
        step: u64,
        plain: &[DeviceGradient],
        encoded: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let measured: Vec<DeviceGradient> =
            encoded.iter().filter(|of| self.is_measured(of.parameter, step)).copied().collect();
        let values: usize = plain.iter().map(|of| self.held[of.parameter].elements).sum();
        let numbers: usize = measured.iter().map(|of| self.measurement(of.parameter)).sum();
        let all = self.scratch.of(Use::Plain, (values + numbers) * 4)?;
        let mut at = all;
        // SAFETY: the caller's promise; the scratch memory has room for all.
        unsafe {
            for of in plain {
                let bytes = self.held[of.parameter].elements * 4;
                stream.copy_on_device(at, of.pointer, bytes)?;
                at = at.offset(bytes);
            }
            for of in &measured {
                let scale = self.held[of.parameter].scale.as_ref();
                let scale = scale.expect("only those that have one are measured");
                scale.measure(stream, of.pointer, at)?;
                at = at.offset(scale.known().len() * 4);
            }
            self.calls.all_reduce(all, values + numbers, Dtype::F32, stream)?;
            self.divide(all, all, values + numbers, stream)?;
            let mut at = all;
            for of in plain {
                let bytes = self.held[of.parameter].elements * 4;
                stream.copy_on_device(of.pointer, at, bytes)?;
                at = at.offset(bytes);
            }
            if measured.is_empty() {
                return Ok(());
            }
            let mut means = vec![0f32; numbers];
            stream.copy_to_host(means.as_mut_ptr().cast(), at, numbers * 4)?;
            stream.synchronize()?;
            let mut rest = &means[..];
            for of in &measured {
                let (own, after) = rest.split_at(self.measurement(of.parameter));
                rest = after;
                self.note_scale(step, of.parameter, own, stream)?;
            }
        }
        Ok(())
    }

    /// Takes note of the usual size of a parameter's gradient, and converts what is owed to the new units.
    ///
    /// # Safety
    /// As for [`Exchange::exchange`].
    unsafe fn note_scale(
        &mut self,
        step: u64,
        parameter: usize,
        mean: &[f32],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let part = self.mean_part(parameter);
        let held = &mut self.held[parameter];
        let residual = held.residual.as_ref().map(|residual| Run {
            values: residual.pointer(),
            first: 0,
            elements: held.elements,
        });
        let of_mean = held.mean.as_ref().map(|mean| Run {
            values: mean.pointer(),
            first: part.start,
            elements: part.len(),
        });
        let owed: Vec<Run> = residual.into_iter().chain(of_mean).collect();
        let scale = held.scale.as_mut().expect("only those that have one are measured");
        // SAFETY: the runs are the parameter's own memory; the rest is the caller's promise.
        unsafe { Ok(scale.note(stream, step, mean, &owed)?) }
    }

    fn is_measured(&self, parameter: usize, step: u64) -> bool {
        self.held[parameter].scale.as_ref().is_some_and(|scale| scale.known().is_due(step))
    }

    fn measurement(&self, parameter: usize) -> usize {
        self.held[parameter].scale.as_ref().map_or(0, |scale| scale.known().len())
    }

    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn divide_by_scale(
        &self,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        // SAFETY: the caller's promise.
        self.each_scaled(gradients, |scale, run| unsafe { scale.divide(stream, run) })
    }

    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn multiply_by_scale(
        &self,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        // SAFETY: the caller's promise.
        self.each_scaled(gradients, |scale, run| unsafe { scale.multiply(stream, run) })
    }

    /// Does something to each of the gradients that has a scale.
    fn each_scaled(
        &self,
        gradients: &[DeviceGradient],
        action: impl Fn(&DeviceScale, Run) -> Result<(), CodecError>,
    ) -> Result<(), ExchangeError> {
        for of in gradients {
            let held = &self.held[of.parameter];
            let run = Run { values: of.pointer, first: 0, elements: held.elements };
            if let Some(scale) = &held.scale {
                action(scale, run)?;
            }
        }
        Ok(())
    }
}
