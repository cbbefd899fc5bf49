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
pub(super) enum How {
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
        let (left, right) = (self.left.pointer(), self.right.pointer());
        // SAFETY: the thin matrices have the sizes of the form, and are this codec's own; the rest is the
        // caller's promise.
        unsafe {
            if !self.has_begun {
                let start = self.host.start(&Task { step: 0, ..*task });
                self.remember(stream, &start)?;
            }
            let matrix = match residual {
                None => gradient,
                Some(residual) => {
                    absorb(codecs, stream, gradient, residual, task.elements())?;
                    residual
                }
            };
            self.times(codecs, stream, matrix, left)?;
            self.send(codecs, stream, left, self.left_elements(), encoding)?;
            self.settle(codecs, stream, left)?;

            self.transposed_times(codecs, stream, matrix, left, right)?;
            let after = encoding.offset(self.left_elements() * self.wire.bytes());
            self.send(codecs, stream, right, self.right_elements(), after)?;
            if residual.is_some() {
                self.expand(codecs, stream, left, right, matrix, How::Takes)?;
            }
            self.normalize(codecs, stream, task, right)
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
            self.settle(codecs, stream, left)?;
            let after = encoding.offset(self.left_elements() * self.wire.bytes());
            self.receive(codecs, stream, after, self.right_elements(), right)?;
            self.expand(codecs, stream, left, right, into, how)
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
            cast(codecs, stream, self.wire, false, elements, round, encoding)?;
            match self.wire {
                Wire::F32 => Ok(()),
                _ => self.receive(codecs, stream, encoding, elements, round),
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
        unsafe { cast(codecs, stream, self.wire, true, elements, encoding, round) }
    }

    /// The elements of a round's thin matrix.
    pub(super) fn round_elements(&self, round: usize) -> usize {
        if round == 0 { self.left_elements() } else { self.right_elements() }
    }

    /// What the next round 0 begins with, once that is there.
    pub(super) fn remembered(&self) -> Option<&DeviceMemory> {
        self.has_begun.then_some(&self.remembered)
    }

    /// Makes this what the next round 0 begins with, when the stream has come that far, which is waited for.
    ///
    /// # Panics
    /// If it has another length.
    pub(super) fn remember(&mut self, stream: &Stream, values: &[f32]) -> Result<(), CudaError> {
        assert_eq!(values.len(), self.right_elements(), "as many as the thin matrix has");
        // SAFETY: the memory has as many elements, and the values are there until they are copied.
        unsafe {
            let from = values.as_ptr().cast();
            stream.copy_to_device(self.remembered.pointer(), from, values.len() * 4)?;
        }
        stream.synchronize()?;
        self.has_begun = true;
        Ok(())
    }

    /// left = matrix · remembered
    ///
    /// # Safety
    /// Both are matrices of the form, and nothing else touches the left one.
    pub(super) unsafe fn times(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        matrix: DevicePtr,
        left: DevicePtr,
    ) -> Result<(), CudaError> {
        let blocks = (self.form.rows as usize).div_ceil(THREADS / 32);
        let thin = self.remembered.pointer();
        let call = Product { form: self.form, matrix, thin, into: left };
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::PowerSgd, "powersgd_times", blocks, call) }
    }

    /// right = matrixᵀ · left
    ///
    /// # Safety
    /// All are matrices of the form, and nothing else touches the right one.
    pub(super) unsafe fn transposed_times(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        matrix: DevicePtr,
        left: DevicePtr,
        right: DevicePtr,
    ) -> Result<(), CudaError> {
        let across = (self.form.columns as usize).div_ceil(32);
        let blocks = across * (self.form.rank as usize).div_ceil(RANKS);
        let call = Product { form: self.form, matrix, thin: left, into: right };
        let name = "powersgd_transposed_times";
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::PowerSgd, name, blocks, call) }
    }

    /// Orthonormalizes a left matrix.
    ///
    /// # Safety
    /// It is one of the form, and nothing else touches it.
    pub(super) unsafe fn settle(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        left: DevicePtr,
    ) -> Result<(), CudaError> {
        let Form { rows, rank: columns, .. } = self.form;
        let call = Settle { matrix: left, rows, columns, noise: self.host.noise() };
        // SAFETY: the kernel takes such a call, and the matrix is of this form.
        unsafe { codecs.launch(stream, Family::PowerSgd, "powersgd_settle", 1, call) }
    }

    /// Makes a right matrix what the next round 0 begins with, its columns of length 1.
    ///
    /// # Safety
    /// It is one of the form.
    pub(super) unsafe fn normalize(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        right: DevicePtr,
    ) -> Result<(), CudaError> {
        let Form { columns: rows, rank, .. } = self.form;
        let (into, key) = (self.remembered.pointer(), task.shared_key().bits());
        let call = Normalize { from: right, into, rows, key };
        // SAFETY: the kernel takes such a call, and what is remembered is of this form.
        unsafe {
            codecs.launch(stream, Family::PowerSgd, "powersgd_normalize", rank as usize, call)
        }
    }

    /// # Safety
    /// All are matrices of the form, and nothing else touches the large one.
    pub(super) unsafe fn expand(
        &self,
        codecs: &Codecs,
        stream: &Stream,
        left: DevicePtr,
        right: DevicePtr,
        matrix: DevicePtr,
        how: How,
    ) -> Result<(), CudaError> {
        let form = self.form;
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

/// Casts f32 to the 16-bit float in which they travel, or back; those that travel as they are, are copied.
///
/// # Safety
/// Both are valid for so many elements until it is done; they do not overlap, and nothing else touches the second or
/// writes the first meanwhile.
pub(super) unsafe fn cast(
    codecs: &Codecs,
    stream: &Stream,
    wire: Wire,
    back: bool,
    elements: usize,
    from: DevicePtr,
    into: DevicePtr,
) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    unsafe {
        match (float(wire), back) {
            (None, _) => stream.copy_on_device(into, from, elements * 4),
            (Some(float), false) => {
                float.encode(codecs, stream, Owed::new(Some(from), None), elements, None, into)
            }
            (Some(float), true) => {
                let into = Into::new(into, Placement::Overwrite);
                float.decode(codecs, stream, from, elements, None, into)
            }
        }
    }
}
