//! A collective call as Python writes it.

use std::sync::Arc;

use pyo3::prelude::*;
use unisono_collective::{Dtype, Op, Reduction, Request, Separate, Unequal, Unit};

/// Where a call comes from, in its caller's words: for errors. One serves all calls from one line.
#[pyclass(frozen)]
pub struct Origin {
    place: Option<Arc<str>>,
    unit: Unit,
}

#[pymethods]
impl Origin {
    /// The line of the program, and the name of the tensors' type; neither need be known.
    #[new]
    fn new(place: Option<String>, dtype: Option<&str>) -> Origin {
        let unit = dtype.and_then(Unit::named).unwrap_or_default();
        Origin { place: place.map(Arc::from), unit }
    }
}

impl Origin {
    /// A request that says where it comes from.
    pub fn of(&self, request: Request) -> Request {
        Request { place: self.place.clone(), unit: self.unit, ..request }
    }
}

/// What to do, in the form that fits the operation. `unisono/torch/_backend/codes.py` has the codes.
#[derive(FromPyObject)]
pub enum Call {
    /// Operation, type and reduction by their codes; input, output and count as in [`Request`]; the
    /// root, for the operations that have one.
    Plain(u8, u8, u8, Blocks, Blocks, usize, Option<usize>),
    /// An all-to-all of blocks of different lengths: the input and the bytes for each rank, the
    /// output and the bytes from each.
    Unequal(usize, Vec<usize>, usize, Vec<usize>),
}

/// Where an input or output is: one address, or that of each rank's block.
#[derive(FromPyObject)]
pub enum Blocks {
    Together(usize),
    Apart(Vec<usize>),
}

/// The code of a barrier, which to the engine is an all-reduce of nothing.
const BARRIER: u8 = 8;

impl Call {
    /// The operation's name, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            Call::Plain(BARRIER, ..) => "barrier",
            Call::Plain(code, ..) => {
                Op::from_code(*code, 0).map_or("an unknown operation", Op::function)
            }
            Call::Unequal(..) => Op::AllToAll.function(),
        }
    }

    /// What the engine is asked for in a group of `size` ranks, or what is wrong with the call.
    pub fn request(&self, size: usize) -> Result<Request, &'static str> {
        match self {
            Call::Plain(BARRIER, ..) => Ok(Request::barrier()),
            Call::Plain(code, dtype, reduction, input, output, count, root) => {
                let op = Op::from_code(*code, root.unwrap_or(0)).ok_or("no such operation")?;
                if op.root().is_some() && root.is_none() {
                    return Err("the operation needs a root");
                }
                let dtype = Dtype::from_code(*dtype).ok_or("no such type")?;
                let reduction = Reduction::from_code(*reduction).ok_or("no such reduction")?;
                let (input, inputs) = input.located(dtype.size())?;
                let (output, outputs) = output.located(dtype.size())?;
                let separate = Separate { input: inputs, output: outputs };
                Ok(Request { dtype, reduction, separate, ..moving(op, input, output, *count) })
            }
            Call::Unequal(input, sent, output, received) => {
                if sent.len() != size || received.len() != size {
                    return Err("there must be one block for each rank, and one from each");
                }
                let (from, into) = (offsets(sent)?, offsets(received)?);
                let unequal = Unequal { input: from, output: into, longest: None, shape: 0 };
                let request = moving(Op::AllToAll, *input, *output, 0);
                Ok(Request { unequal: Some(unequal), ..request })
            }
        }
    }
}

impl Blocks {
    /// The address, and where the blocks start from there if they lie apart: then the address is
    /// the lowest of theirs, so that all are ahead of it.
    fn located(&self, size: usize) -> Result<(usize, Option<Vec<usize>>), &'static str> {
        let addresses = match self {
            Blocks::Together(address) => return Ok((*address, None)),
            Blocks::Apart(addresses) => addresses,
        };
        let lowest = addresses.iter().copied().min().unwrap_or(0);
        let start = |address: &usize| {
            let distance = address - lowest;
            distance.is_multiple_of(size).then_some(distance / size)
        };
        let starts: Option<Vec<usize>> = addresses.iter().map(start).collect();
        let starts = starts.ok_or("the blocks lie apart by a part of an element")?;
        Ok((lowest, Some(starts)))
    }
}

/// A call that moves bytes.
fn moving(op: Op, input: usize, output: usize, count: usize) -> Request {
    Request::new(op, input as *const u8, output as *mut u8, count)
}

/// Where blocks of these lengths start, one after the other, and where the last one ends.
fn offsets(lengths: &[usize]) -> Result<Vec<usize>, &'static str> {
    let mut offsets = vec![0];
    let mut end = 0usize;
    for length in lengths {
        let next = end.checked_add(*length).filter(|end| isize::try_from(*end).is_ok());
        end = next.ok_or("the blocks add up to more than there can be")?;
        offsets.push(end);
    }
    Ok(offsets)
}
