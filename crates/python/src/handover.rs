//! The state of a worker, as bytes, on its way to another; and the few numbers by which workers find out which
//! of them have it.
//!
//! A state travels as a header, which has its length and its hash, and then in pieces of equal size but the
//! last. What arrives is given to Python only if it has that hash.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use unisono_collective::{Error, Group as EngineGroup};

use crate::deadline;
use crate::error::{Operation, Site};
use crate::group::Group;
use crate::signals;

/// Tells the messages of a state from others between the same ranks.
const TAG: u32 = 0x5e1f;

/// The largest piece. Larger: a worker that is interrupted waits longer. Smaller: more messages.
const PIECE: usize = 16 << 20;

/// The length of a state, and its hash.
const HEADER: usize = 8 + blake3::OUT_LEN;

/// The numbers of all ranks of a group, by rank; each gives as many.
#[pyfunction]
pub fn exchange(
    py: Python<'_>,
    group: &Group,
    numbers: Vec<i64>,
    seconds: f64,
) -> PyResult<Vec<Vec<i64>>> {
    let mut all = vec![0; numbers.len() * group.size()];
    waited(py, group, "an exchange of steps", seconds, |group| {
        group.all_gather(&numbers, &mut all)
    })?;
    Ok(all.chunks(numbers.len().max(1)).map(<[i64]>::to_vec).collect())
}

/// Sends a state to these ranks, one after the other.
#[pyfunction]
pub fn send_state(
    py: Python<'_>,
    group: &Group,
    to: Vec<usize>,
    state: PyBackedBytes,
    seconds: f64,
) -> PyResult<()> {
    waited(py, group, "handing over the state", seconds, |group| {
        let mut header = [0u8; HEADER];
        header[..8].copy_from_slice(&(state.len() as u64).to_le_bytes());
        header[8..].copy_from_slice(blake3::hash(&state).as_bytes());
        for to in to {
            group.send(&header, to, TAG)?;
            for piece in state.chunks(PIECE) {
                group.send(piece, to, TAG)?;
            }
        }
        Ok(())
    })
}

/// The state that a rank sends.
#[pyfunction]
pub fn receive_state<'py>(
    py: Python<'py>,
    group: &Group,
    from: usize,
    seconds: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let operation = "receiving the state";
    let mut header = [0u8; HEADER];
    waited(py, group, operation, seconds, |group| group.receive(&mut header, from, TAG))?;
    let (length, hash) = header.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    let wrong = |text: String| site(group, operation).unusable(py, &text);
    let mut state = Vec::new();
    // Piece by piece: a length that is wrong costs no more memory than what arrives.
    let fits = waited(py, group, operation, seconds, |group| {
        while (state.len() as u64) < length {
            let (begun, left) = (state.len(), length - state.len() as u64);
            let piece = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            if state.try_reserve(piece).is_err() {
                return Ok(false);
            }
            state.resize(begun + piece, 0);
            group.receive(&mut state[begun..], from, TAG)?;
        }
        Ok(true)
    })?;
    if !fits {
        return Err(wrong(format!(
            "the state of rank {from} has {length} bytes, for which there is no memory"
        )));
    }
    if py.detach(|| blake3::hash(&state)).as_bytes() != hash {
        return Err(wrong(format!(
            "the state of rank {from} was damaged on its way: its hash is another than it was"
        )));
    }
    Ok(PyBytes::new(py, &state))
}

fn site(group: &Group, operation: &'static str) -> Site {
    let rank = group.job_rank(group.rank());
    Site { rank, operation: Operation::Collective(operation) }
}

/// Makes calls of a group, at most for so long and until Ctrl-C, without the interpreter's lock.
fn waited<R: Send>(
    py: Python<'_>,
    group: &Group,
    operation: &'static str,
    seconds: f64,
    call: impl FnOnce(&EngineGroup) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let site = site(group, operation);
    let engine = group.open(py, site)?;
    let (outcome, interruption) = py.detach(|| {
        let _noted = group.deadlines().note(deadline::limit(seconds));
        signals::during(|| call(&engine))
    });
    match interruption {
        Some(raised) => Err(raised),
        None => outcome.map_err(|error| {
            let raised = site.failed(py, &error);
            group.note_failure(error);
            raised
        }),
    }
}
