//! A collective call as Python writes it.

use pyo3::prelude::*;
use unisono_collective::{Dtype, Op, Reduction, Request};

/// Operation, type and reduction by their codes; input, output and count as in [`Request`]; the
/// root, for the operations that have one.
///
/// `unisono/torch/_codes.py` has the codes.
#[derive(FromPyObject)]
pub struct Call(u8, u8, u8, usize, usize, usize, Option<usize>);

/// The code of a barrier, which to the engine is an all-reduce of nothing.
const BARRIER: u8 = 8;

impl Call {
    /// The operation's name, for errors.
    pub fn name(&self) -> &'static str {
        match self.0 {
            BARRIER => "barrier",
            code => op(code, 0).map_or("an unknown operation", Op::name),
        }
    }

    /// What the engine is asked for, or what is wrong with the call.
    pub fn request(&self) -> Result<Request, &'static str> {
        let Call(code, dtype, reduction, input, output, count, root) = *self;
        if code == BARRIER {
            return Ok(Request::barrier());
        }
        let op = op(code, root.unwrap_or(0)).ok_or("no such operation")?;
        if op.root().is_some() && root.is_none() {
            return Err("the operation needs a root");
        }
        Ok(Request {
            op,
            barrier: false,
            dtype: Dtype::from_code(dtype).ok_or("no such type")?,
            reduction: Reduction::from_code(reduction).ok_or("no such reduction")?,
            input: input as *const u8,
            output: output as *mut u8,
            count,
            unequal: None,
            algorithm: None,
        })
    }
}

fn op(code: u8, root: usize) -> Option<Op> {
    Some(match code {
        0 => Op::AllReduce,
        1 => Op::ReduceScatter,
        2 => Op::AllGather,
        3 => Op::Broadcast { root },
        4 => Op::Reduce { root },
        5 => Op::Gather { root },
        6 => Op::Scatter { root },
        7 => Op::AllToAll,
        _ => return None,
    })
}
