//! powersgd: two thin matrices whose product is near the gradient (`kernels/powersgd.cu`).
//!
//! The rounds follow each other as for one sender: what a round sends is narrowed to the type in which it
//! travels, and the next goes on from what will arrive.

use unisono_codec::powersgd::PowerSgd;
use unisono_codec::{Summed, Task, Wire, elements};

use super::Placement;
use super::cast::Float;
use super::code::{Codecs, Family, THREADS};
use super::randk::absorb;
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;

/// Rows of the product that a thread has, as the kernel has it.
const EXPANDED: usize = 4;
/// Columns of the thin matrix that a block sums for.
const RANKS: usize = 4;

/// The codec of one matrix, with its thin ones.
#[derive(Debug)]
pub(super) struct LowRank {
    host: PowerSgd,
    wire: Wire,
    form: Form,
    left: DeviceMemory,
    right: DeviceMemory,
    /// What rounds begin with, and whether it is there.
    remembered: DeviceMemory,
    has_begun: bool,
}

/// `Form` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Form {
    rows: u64,
    columns: u64,
    rank: u64,
}

/// `Times` and `TransposedTimes`.
#[repr(C)]
struct Product {
    form: Form,
    matrix: DevicePtr,
    thin: DevicePtr,
    into: DevicePtr,
}

#[repr(C)]
struct Expand {
    form: Form,
    left: DevicePtr,
    right: DevicePtr,
    matrix: DevicePtr,
    how: u64,
}

/// What becomes of the product of the thin matrices.
#[derive(Clone, Copy)]
#[repr(u64)]
enum How {
    Writes = 0,
    Adds = 1,
    Takes = 2,
}

#[repr(C)]
struct Settle {
    matrix: DevicePtr,
    rows: u64,
    columns: u64,
    noise: f64,
}

#[repr(C)]
struct Normalize {
    from: DevicePtr,
    into: DevicePtr,
    rows: u64,
    key: u64,
}

impl LowRank {
    pub(super) fn new(
        codecs: &Codecs,
        rank: usize,
        wire: Wire,
        shape: &[usize],
    ) -> Result<LowRank, CudaError> {
        let (rows, columns) = match shape {
            [] => (1, 1),
            [rows, others @ ..] => (*rows, elements(others)),
        };
        let rank = rank.min(rows).min(columns);
        let thin = |side: usize| DeviceMemory::new(codecs.context(), side * rank * 4);
        let form = Form { rows: rows as u64, columns: columns as u64, rank: rank as u64 };
        Ok(LowRank {
            host: PowerSgd::new(rank.max(1), wire),
            wire,
            form,
            left: thin(rows)?,
            right: thin(columns)?,
            remembered: thin(columns)?,
            has_begun: false,
        })
    }

    /// # Safety
    /// As for [`DeviceCodec::encode`](super::DeviceCodec::encode).
    pub(super) unsafe fn encode(
        &mut self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        gradient: DevicePtr,
        residual: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        if task.elements() == 0 {
            return Ok(());
        }
        let form = self.form;
        let (left, right) = (self.left.pointer(), self.right.pointer());
        let remembered = self.remembered.pointer();
        // SAFETY: the thin matrices have the sizes of the form, and are this codec's own; the rest is the
        // caller's promise. The driver has read host memory when the copy from it returns.
        unsafe {
            if !self.has_begun {
                let start = self.host.start(&Task { step: 0, ..*task });
                stream.copy_to_device(remembered, start.as_ptr().cast(), start.len() * 4)?;
                stream.synchronize()?;
                self.has_begun = true;
            }
            let matrix = match residual {
                None => gradient,
                Some(residual) => {
                    absorb(codecs, stream, gradient, residual, task.elements())?;
                    residual
                }
            };
            let blocks = (form.rows as usize).div_ceil(THREADS / 32);
            let call = Product { form, matrix, thin: remembered, into: left };
            codecs.launch(stream, Family::PowerSgd, "powersgd_times", blocks, call)?;
            self.send(codecs, stream, left, self.left_elements(), encoding)?;
            self.settle(codecs, stream)?;

            let across = (form.columns as usize).div_ceil(32);
            let blocks = across * (form.rank as usize).div_ceil(RANKS);
            let call = Product { form, matrix, thin: left, into: right };
            codecs.launch(stream, Family::PowerSgd, "powersgd_transposed_times", blocks, call)?;
            let after = encoding.offset(self.left_elements() * self.wire.bytes());
            self.send(codecs, stream, right, self.right_elements(), after)?;
            if residual.is_some() {
                self.expand(codecs, stream, matrix, How::Takes)?;
            }
            let key = task.shared_key().bits();
            let call = Normalize { from: right, into: remembered, rows: form.columns, key };
            codecs.launch(stream, Family::PowerSgd, "powersgd_normalize", form.rank as usize, call)
        }
    }

    /// # Safety
    /// As for [`DeviceCodec::decode`](super::DeviceCodec::decode).
    pub(super) unsafe fn decode(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        encoding: DevicePtr,
        into: DevicePtr,
        placement: Placement,
    ) -> Result<(), CudaError> {
        if task.elements() == 0 {
            return Ok(());
        }
        let how = match placement {
            Placement::Overwrite => How::Writes,
            Placement::Add => How::Adds,
        };
        // SAFETY: the thin matrices have the sizes of the form, and are this codec's own; the rest is the
        // caller's promise.
        unsafe {
            let (left, right) = (self.left.pointer(), self.right.pointer());
            self.receive(codecs, stream, encoding, self.left_elements(), left)?;
            self.settle(codecs, stream)?;
            let after = encoding.offset(self.left_elements() * self.wire.bytes());
            self.receive(codecs, stream, after, self.right_elements(), right)?;
            self.expand(codecs, stream, into, how)
        }
    }

    fn left_elements(&self) -> usize {
        (self.form.rows * self.form.rank) as usize
    }

    fn right_elements(&self) -> usize {
        (self.form.columns * self.form.rank) as usize
    }

    /// Writes a round as it travels, and leaves what will arrive.
    ///
    /// # Safety
    /// Both are valid for so many elements, and nothing else touches them.
    unsafe fn send(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        round: DevicePtr,
        elements: usize,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match float(self.wire) {
                None => stream.copy_on_device(encoding, round, elements * 4),
                Some(float) => {
                    let owed = Owed::new(Some(round), None);
                    float.encode(codecs, stream, owed, elements, None, encoding)?;
                    self.receive(codecs, stream, encoding, elements, round)
                }
            }
        }
    }

    /// Reads a round as it travels.
    ///
    /// # Safety
    /// As for `send`.
    unsafe fn receive(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        encoding: DevicePtr,
        elements: usize,
        round: DevicePtr,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match float(self.wire) {
                None => stream.copy_on_device(round, encoding, elements * 4),
                Some(float) => {
                    let into = Into::new(round, Placement::Overwrite);
                    float.decode(codecs, stream, encoding, elements, None, into)
                }
            }
        }
    }

    /// Orthonormalizes the left matrix.
    ///
    /// # Safety
    /// The stream is one of the context.
    unsafe fn settle(&self, codecs: &Codecs, stream: &Stream) -> Result<(), CudaError> {
        let Form { rows, rank: columns, .. } = self.form;
        let call = Settle { matrix: self.left.pointer(), rows, columns, noise: self.host.noise() };
        // SAFETY: the kernel takes such a call, and the matrix is of this form.
        unsafe { codecs.launch(stream, Family::PowerSgd, "powersgd_settle", 1, call) }
    }

    /// # Safety
    /// The matrix is valid for all elements of the form, and nothing else touches it.
    unsafe fn expand(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        matrix: DevicePtr,
        how: How,
    ) -> Result<(), CudaError> {
        let (left, right, form) = (self.left.pointer(), self.right.pointer(), self.form);
        let across = (form.columns as usize).div_ceil(THREADS);
        let blocks = across * (form.rows as usize).div_ceil(EXPANDED);
        let call = Expand { form, left, right, matrix, how: how as u64 };
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::PowerSgd, "powersgd_expand", blocks, call) }
    }
}

fn float(wire: Wire) -> Option<Float> {
    match wire {
        Wire::F32 => None,
        Wire::Fp16 => Some(Float::Fp16),
        Wire::Bf16 => Some(Float::Bf16),
    }
}
