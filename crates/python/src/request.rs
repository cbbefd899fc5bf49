//! A collective call as Python writes it.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use unisono_collective::{Address, Dtype, Error, Op, Reduction, Request, Unit};

/// The line of the program that made a call, and the type of its tensors: for errors. One value serves
/// all calls from one line.
#[pyclass(frozen)]
pub struct Origin {
    line: Option<Arc<str>>,
    unit: Unit,
}

#[pymethods]
impl Origin {
    /// The line of the program, and the name of the tensors' type; neither need be known.
    #[new]
    fn new(line: Option<String>, dtype: Option<&str>) -> Origin {
        let unit = dtype.and_then(Unit::named).unwrap_or_default();
        Origin { line: line.map(Arc::from), unit }
    }
}

impl Origin {
    /// The line of the program, if it is known.
    pub fn line(&self) -> Option<&Arc<str>> {
        self.line.as_ref()
    }
}

/// A collective call: what to do, and with which memory. `unisono/torch/_backend/codes.py` has the
/// codes.
#[pyclass(frozen)]
pub struct Call {
    kind: CallKind,
}

enum CallKind {
    /// Input, output and count as in [`Request::raw`].
    Plain {
        op: Op,
        dtype: Dtype,
        reduction: Reduction,
        input: Addresses,
        output: Addresses,
        count: usize,
    },
    /// An all-to-all of blocks of different lengths, in bytes.
    Unequal {
        input: usize,
        sent: Vec<usize>,
        output: usize,
        received: Vec<usize>,
    },
    Barrier,
}

/// Where an input or output is: one address, or that of each rank's block.
#[derive(FromPyObject)]
pub enum Addresses {
    Together(usize),
    Apart(Vec<usize>),
}

#[pymethods]
impl Call {
    /// Moves `count` bytes, of the buffer or of a block; with a root, if the operation has one.
    /// Where there is no memory, the address is 0.
    #[staticmethod]
    #[pyo3(signature = (op, input, output, count, root=None))]
    fn moving(
        op: u8,
        input: Addresses,
        output: Addresses,
        count: usize,
        root: Option<usize>,
    ) -> PyResult<Call> {
        Call::reducing(op, Dtype::U8 as u8, Reduction::Sum as u8, input, output, count, root)
    }

    /// Reduces `count` elements, of the buffer or of a block.
    #[staticmethod]
    #[pyo3(signature = (op, dtype, reduction, input, output, count, root=None))]
    fn reducing(
        op: u8,
        dtype: u8,
        reduction: u8,
        input: Addresses,
        output: Addresses,
        count: usize,
        root: Option<usize>,
    ) -> PyResult<Call> {
        let invalid = || PyValueError::new_err("no such operation, type or reduction, or no root");
        let op = Op::from_code(op, root.unwrap_or(0)).ok_or_else(invalid)?;
        if op.root().is_some() && root.is_none() {
            return Err(invalid());
        }
        let dtype = Dtype::from_code(dtype).ok_or_else(invalid)?;
        let reduction = Reduction::from_code(reduction).ok_or_else(invalid)?;
        Ok(Call { kind: CallKind::Plain { op, dtype, reduction, input, output, count } })
    }

    /// Gives each rank its block of every rank's input: so many bytes to and from each.
    #[staticmethod]
    fn unequal(input: usize, sent: Vec<usize>, output: usize, received: Vec<usize>) -> Call {
        Call { kind: CallKind::Unequal { input, sent, output, received } }
    }

    /// Waits for all ranks.
    #[staticmethod]
    fn barrier() -> Call {
        Call { kind: CallKind::Barrier }
    }
}

impl Call {
    /// The operation's name, for errors.
    pub fn name(&self) -> &'static str {
        match &self.kind {
            CallKind::Plain { op, .. } => op.function(),
            CallKind::Unequal { .. } => Op::AllToAll.function(),
            CallKind::Barrier => "barrier",
        }
    }

    /// What the engine is asked for, or what is wrong with the call.
    ///
    /// # Safety
    /// As of [`Request::raw`].
    pub unsafe fn request<'a>(&self, origin: &Origin) -> Result<Request<'a>, Error> {
        let request = match &self.kind {
            CallKind::Plain { op, dtype, reduction, input, output, count } => {
                let (input, output) = (input.address(), output.address());
                // SAFETY: passed on from the caller.
                unsafe { Request::raw(*op, *dtype, *count, input, output) }?
                    .with_reduction(*reduction)
            }
            CallKind::Unequal { input, sent, output, received } => {
                let (input, output) = (*input as *const u8, *output as *mut u8);
                // SAFETY: passed on from the caller.
                unsafe { Request::raw_all_to_all_unequal(input, sent, output, received, None) }?
            }
            CallKind::Barrier => Request::barrier(),
        };
        Ok(request.with_place(origin.line.clone()).with_unit(origin.unit))
    }
}

impl Addresses {
    fn address(&self) -> Address {
        match self {
            Addresses::Together(address) => Address::Together(*address as *mut u8),
            Addresses::Apart(all) => Address::Apart(all.iter().map(|at| *at as *mut u8).collect()),
        }
    }
}
