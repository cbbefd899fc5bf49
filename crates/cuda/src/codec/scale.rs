//! Gradients in units of their usual size (`kernels/scale.cu`).

use unisono_codec::scale::Scale;

use super::CodecError;
use super::code::{Codecs, Family, THREADS};
use super::raw::expect_f32;
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;

/// Rows that a block of threads measures, as the kernel has it.
const ROWS: usize = THREADS / 16;

/// The usual size of a parameter's gradient, and its units on the device.
#[derive(Debug)]
pub struct DeviceScale {
    codecs: Codecs,
    known: Scale,
    units: DeviceMemory,
}

#[repr(C)]
struct Measure {
    matrix: DevicePtr,
    into: DevicePtr,
    rows: u64,
    columns: u64,
    count: f32,
    unused: u32,
}

#[repr(C)]
struct Convert {
    values: DevicePtr,
    units: DevicePtr,
    rows: u64,
    columns: u64,
    first: u64,
    elements: u64,
}

/// Elements on the device that are converted: so many, of which the first is the parameter's number `first`.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where they are.
    pub values: DevicePtr,
    /// Which is the first.
    pub first: usize,
    /// How many.
    pub elements: usize,
}

impl DeviceScale {
    /// Nothing is known yet of a parameter of this shape. Waits for the stream.
    pub fn new(codecs: &Codecs, stream: &Stream, shape: &[usize]) -> Result<Self, CodecError> {
        let known = Scale::new(shape);
        let units = DeviceMemory::new(codecs.context(), known.len() * 4)?;
        let scale = DeviceScale { codecs: codecs.clone(), known, units };
        scale.upload(stream)?;
        Ok(scale)
    }

    /// What is known.
    pub fn known(&self) -> &Scale {
        &self.known
    }

    /// Goes on with what was known. Waits for the stream.
    ///
    /// # Panics
    /// If it has another length.
    pub fn restore(&mut self, stream: &Stream, known: &[f32]) -> Result<(), CodecError> {
        self.known.restore(known);
        self.upload(stream)
    }

    /// Submits to a stream: measures a gradient, as [`Scale::measure`].
    ///
    /// # Safety
    /// The gradient is valid for as many f32 as the parameter has, and `into` for [`Scale::len`], on the device,
    /// until it is done; they do not overlap, and nothing else touches `into` or writes the gradient meanwhile. The
    /// stream is one of this device's context.
    pub unsafe fn measure(
        &self,
        stream: &Stream,
        gradient: DevicePtr,
        into: DevicePtr,
    ) -> Result<(), CodecError> {
        expect_f32(Some(gradient))?;
        expect_f32(Some(into))?;
        let (rows, columns) = self.known.form();
        let call = |into: DevicePtr, count: usize| Measure {
            matrix: gradient,
            into,
            rows: rows as u64,
            columns: columns as u64,
            count: count as f32,
            unused: 0,
        };
        // SAFETY: the kernels take such calls; the rest is the caller's promise.
        unsafe {
            let (blocks, of_rows) = (rows.div_ceil(ROWS), call(into, columns));
            self.codecs.launch(stream, Family::Scale, "scale_measure_rows", blocks, of_rows)?;
            let (blocks, of_columns) =
                (columns.div_ceil(THREADS), call(into.offset(rows * 4), rows));
            self.codecs.launch(
                stream,
                Family::Scale,
                "scale_measure_columns",
                blocks,
                of_columns,
            )?;
        }
        Ok(())
    }

    /// Takes note of a step's measurement, the mean over all shards, and converts what is owed from earlier units to
    /// the new ones. Waits for the stream.
    ///
    /// # Safety
    /// The runs are valid on the device, and nothing else touches them until it is done. The stream is one of this
    /// device's context.
    pub unsafe fn note(
        &mut self,
        stream: &Stream,
        step: u64,
        measured: &[f32],
        owed: &[Run],
    ) -> Result<(), CodecError> {
        // SAFETY: the caller's promise.
        unsafe {
            owed.iter().try_for_each(|run| self.multiply(stream, *run))?;
            // What reads the units is done before they change, for it is in the same stream.
            self.known.note(step, measured);
            self.upload(stream)?;
            owed.iter().try_for_each(|run| self.divide(stream, *run))
        }
    }

    /// Submits to a stream: divides by the usual.
    ///
    /// # Safety
    /// The run is valid on the device until it is done, and nothing else touches it meanwhile. The stream is one of
    /// this device's context.
    pub unsafe fn divide(&self, stream: &Stream, run: Run) -> Result<(), CodecError> {
        // SAFETY: the caller's promise.
        unsafe { self.convert(stream, run, "scale_divide") }
    }

    /// Submits to a stream: multiplies by the usual what was divided by it.
    ///
    /// # Safety
    /// As for [`DeviceScale::divide`].
    pub unsafe fn multiply(&self, stream: &Stream, run: Run) -> Result<(), CodecError> {
        // SAFETY: the caller's promise.
        unsafe { self.convert(stream, run, "scale_multiply") }
    }

    /// # Safety
    /// As for [`DeviceScale::divide`].
    unsafe fn convert(&self, stream: &Stream, run: Run, kernel: &str) -> Result<(), CodecError> {
        expect_f32(Some(run.values))?;
        let (rows, columns) = self.known.form();
        let call = Convert {
            values: run.values,
            units: self.units.pointer(),
            rows: rows as u64,
            columns: columns as u64,
            first: run.first as u64,
            elements: run.elements as u64,
        };
        let blocks = run.elements.div_ceil(THREADS);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { Ok(self.codecs.launch(stream, Family::Scale, kernel, blocks, call)?) }
    }

    fn upload(&self, stream: &Stream) -> Result<(), CodecError> {
        let units = self.known.units();
        let copied = |()| -> Result<(), CudaError> { stream.synchronize() };
        // SAFETY: the memory has as many elements, and the units are there until they are copied.
        unsafe {
            let from = units.as_ptr().cast();
            stream.copy_to_device(self.units.pointer(), from, units.len() * 4).and_then(copied)?;
        }
        Ok(())
    }
}
