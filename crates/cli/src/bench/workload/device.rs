//! The buffers of an operation in memory of a device.
//!
//! The host has buffers like them, which know what the device's must hold: their pattern is copied there once, and
//! from there to where the operation works; what the operation left is copied back to be checked.

use std::rc::Rc;

use anyhow::Context;
use unisono::collective::engine::Memory;
use unisono::{Algorithm, Group, Op, Request};
use unisono_cuda::{CudaError, DeviceMemory, DevicePtr};

use super::{Buffers, Number, Operation, Workload};
use crate::bench::device::Gpu;

/// What an output holds before the operation: no sum of the pattern, in any type.
const STALE: u8 = 0x55;

pub(super) struct DeviceBuffers<T> {
    host: Buffers<T>,
    gpu: Rc<Gpu>,
    /// This rank's pattern.
    pattern: DeviceMemory,
    input: DeviceMemory,
    /// Empty for operations in place.
    output: DeviceMemory,
}

impl<T: Number> DeviceBuffers<T> {
    pub(super) fn new(
        operation: Operation,
        bytes: usize,
        group: &Group,
        algorithm: Option<Algorithm>,
        gpu: &Rc<Gpu>,
    ) -> anyhow::Result<Self> {
        let mut host = Buffers::<T>::new(operation, bytes, group, algorithm, false)?;
        host.fill()?;
        let allocate = |bytes| {
            DeviceMemory::new(&gpu.context, bytes)
                .with_context(|| format!("--sizes: {bytes} bytes of device memory"))
        };
        let (input, output) = (size_of_val(&host.input[..]), size_of_val(&host.output[..]));
        let pattern = allocate(input)?;
        // SAFETY: both have as many bytes, and the copy is waited for.
        unsafe {
            gpu.stream.copy_to_device(pattern.pointer(), host.input.as_ptr().cast(), input)?;
        }
        gpu.stream.synchronize()?;
        let (input, output) = (allocate(input)?, allocate(output)?);
        Ok(DeviceBuffers { host, gpu: gpu.clone(), pattern, input, output })
    }

    /// Where the operation writes.
    fn result(&self) -> &DeviceMemory {
        if self.output.bytes() == 0 { &self.input } else { &self.output }
    }

    fn refill(&self) -> Result<(), CudaError> {
        let stream = &self.gpu.stream;
        // SAFETY: input and pattern have as many bytes, and all is in the order of one stream.
        unsafe {
            stream.copy(self.input.pointer(), self.pattern.pointer(), self.input.bytes())?;
            if self.output.bytes() > 0 {
                stream.fill(self.output.pointer(), STALE, self.output.bytes())?;
            }
        }
        stream.synchronize()
    }

    /// Copies what the operation left to the buffers of the host.
    fn fetch(&mut self) -> Result<(), CudaError> {
        let from = self.result().pointer();
        let into =
            if self.host.output.is_empty() { &mut self.host.input } else { &mut self.host.output };
        let bytes = size_of_val(&into[..]);
        // SAFETY: both have as many bytes, any of which are elements, and the copy is waited for.
        unsafe { self.gpu.stream.copy_to_host(into.as_mut_ptr().cast(), from, bytes)? };
        self.gpu.stream.synchronize()
    }
}

impl<T: Number> Workload for DeviceBuffers<T> {
    fn bytes(&self) -> usize {
        self.host.bytes()
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        Ok(self.refill()?)
    }

    /// From the call until the device has done all of it.
    fn step(&mut self, group: &Group) -> anyhow::Result<()> {
        group.run(self.request())?;
        Ok(self.gpu.stream.synchronize()?)
    }

    fn verify(&mut self, group: &Group) -> anyhow::Result<()> {
        self.fetch()?;
        self.host.verify(group)
    }

    fn endurance(&self) -> usize {
        self.host.endurance()
    }

    fn request(&mut self) -> Request<'_> {
        let Buffers { operation, algorithm, rank, count, .. } = self.host;
        let op = operation.op();
        let nothing = DevicePtr(0);
        let is_root = op.root().is_none_or(|root| root == rank);
        let (input, output) = match op {
            Op::Scatter { .. } if !is_root => (nothing, self.output.pointer()),
            Op::Reduce { .. } | Op::Gather { .. } if !is_root => (self.input.pointer(), nothing),
            _ => (self.input.pointer(), self.result().pointer()),
        };
        let (input, output) = (input.0 as *const u8, output.0 as *mut u8);
        // SAFETY: the memory is of this device, has what the operation reads and writes, and is used by
        // nothing else; it and the stream live as long as `self`, whose next use waits for the stream.
        unsafe {
            Request::raw(op, T::DTYPE, count, input, output)
                .expect("device memory is aligned for every type")
                .in_memory(Memory::Device(self.gpu.number))
                .on_stream(self.gpu.stream.as_raw())
                .with_algorithm(algorithm)
        }
    }
}
