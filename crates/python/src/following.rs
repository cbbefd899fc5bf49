//! The state of a worker on its way to one that joins, beside the training: the library's handover, for Python.
//!
//! What Python hands over is a text of its own, the *head*, and the memory of tensors, which the head describes. They
//! travel as the library's vectors, whose elements are words of four bytes: the head first, with its length in front,
//! then one vector for every tensor.
//!
//! The library receives on a thread of its own. All that Python does about it, it does on the thread that waits to be
//! let in: optimizers and hooks of a program then run where they always do, and Ctrl-C ends it.

use std::sync::Mutex;
use std::sync::mpsc::{self, Sender};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use unisono::elastic::{Follower, Unfit};

/// Where bytes are: the address of the first, and how many.
type Bytes = (usize, usize);

/// Bytes of a word.
const WORD: usize = size_of::<f32>();

/// Bytes of the length in front of a head.
const LENGTH: usize = 8;

/// A head and the memory of tensors, as they were when this was made.
#[pyclass(frozen)]
pub struct Copies(Mutex<Vec<Vec<f32>>>);

impl Copies {
    /// Takes the vectors, of which then none are left.
    pub fn take(&self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.0.lock().expect("no panic while locked"))
    }
}

#[pymethods]
impl Copies {
    /// Copies a head, and the memory at these addresses, which the caller keeps as it is meanwhile.
    #[new]
    fn new(py: Python<'_>, head: &[u8], buffers: Vec<Bytes>) -> PyResult<Copies> {
        expect_memory(&buffers)?;
        // SAFETY: the caller keeps the memory valid and unchanged until this returns.
        Ok(Copies(Mutex::new(py.detach(|| unsafe { copied(head, &buffers) }))))
    }
}

fn expect_memory(buffers: &[Bytes]) -> PyResult<()> {
    match buffers.iter().any(|(address, bytes)| *address == 0 && *bytes > 0) {
        true => Err(PyValueError::new_err("there is no memory at address 0")),
        false => Ok(()),
    }
}

/// # Safety
/// The memory is there, and no thread changes it, until this returns.
unsafe fn copied(head: &[u8], buffers: &[Bytes]) -> Vec<Vec<f32>> {
    let mut text = Vec::with_capacity(LENGTH + head.len());
    text.extend_from_slice(&(head.len() as u64).to_le_bytes());
    text.extend_from_slice(head);
    let first = (text.as_ptr() as usize, text.len());
    let copy = |(address, bytes): &Bytes| {
        let mut words = vec![0f32; bytes.div_ceil(WORD)];
        if *bytes > 0 {
            // SAFETY: the source is there by the caller's promise, or the text above; the target has as many bytes,
            // and is no part of it. Any bytes are floats.
            unsafe {
                let (from, to) = (*address as *const u8, words.as_mut_ptr().cast::<u8>());
                std::ptr::copy_nonoverlapping(from, to, *bytes);
            }
        }
        words
    };
    std::iter::once(&first).chain(buffers).map(copy).collect()
}

/// A hash of a part of each of these buffers: of the `part`th of `of` parts.
///
/// # Safety
/// The memory is there, and no thread changes it, until this returns.
unsafe fn hash_of_parts(buffers: &[Bytes], part: usize, of: usize) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for (address, bytes) in buffers.iter().filter(|(_, bytes)| *bytes > 0) {
        let bound = |part: usize| (*bytes as u128 * part as u128 / of as u128) as usize;
        let (begin, end) = (bound(part), bound(part + 1));
        // SAFETY: the memory is there by the caller's promise, and this is a part of it.
        hasher.update(unsafe {
            std::slice::from_raw_parts((*address as *const u8).add(begin), end - begin)
        });
    }
    hasher.finalize()
}

/// A hash of a part of each of these buffers, `part` of `of`: which both sides of a handover compare after a step.
#[pyfunction]
pub fn hash_parts<'py>(
    py: Python<'py>,
    buffers: Vec<Bytes>,
    part: usize,
    of: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    expect_memory(&buffers)?;
    if part >= of {
        return Err(PyValueError::new_err(format!("there is no part {part} of {of}")));
    }
    // SAFETY: the caller keeps the memory valid and unchanged until this returns.
    let hash = py.detach(|| unsafe { hash_of_parts(&buffers, part, of) });
    Ok(PyBytes::new(py, hash.as_bytes()))
}

/// What is asked of Python, by the thread that receives.
pub enum Asked {
    /// The state is that of no step, from now on.
    Begin,
    /// The next vector.
    Vector(Vec<f32>),
    /// All vectors of the state after so many steps are there.
    Complete(u64),
    /// All vectors of the step with this number, from 1, are there.
    Stepped(u64),
}

impl Asked {
    /// Asks the follower that Python has given; whether it follows.
    pub fn of(self, follower: &Bound<'_, PyAny>) -> PyResult<bool> {
        match self {
            Asked::Begin => follower.call_method0("begin").map(|_| true),
            Asked::Vector(words) => {
                let length = words.len() * WORD;
                // SAFETY: floats are bytes, of which there are as many.
                let bytes =
                    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), length) };
                let taken = PyByteArray::new(follower.py(), bytes);
                follower.call_method1("take", (taken,)).map(|_| true)
            }
            Asked::Complete(steps) => follower.call_method1("complete", (steps,))?.extract(),
            Asked::Stepped(steps) => follower.call_method1("stepped", (steps,))?.extract(),
        }
    }
}

/// A model of Python's that follows a member.
pub struct PythonFollower {
    pub fingerprint: [u8; 32],
    /// To the thread that runs Python.
    pub ask: Box<dyn Fn(Asked, Sender<bool>) -> bool + Send>,
    /// Whether it does not follow any more.
    pub is_over: bool,
    /// Whether the thread that runs Python has stopped waiting.
    pub is_gone: bool,
}

impl PythonFollower {
    /// Asks, and waits for the answer. There is none if the wait of the other thread has ended.
    fn asked(&mut self, asked: Asked) -> bool {
        if self.is_over {
            return false;
        }
        let (answer, answered) = mpsc::channel();
        let answered = if (self.ask)(asked, answer) { answered.recv().ok() } else { None };
        self.is_gone = answered.is_none();
        self.is_over = answered != Some(true);
        !self.is_over
    }

    fn expect(&mut self, asked: Asked) -> Result<(), Unfit> {
        match self.asked(asked) {
            true => Ok(()),
            false => Err(Unfit("the program does not follow".into())),
        }
    }
}

impl Follower for PythonFollower {
    fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    fn lengths(&self) -> Option<Vec<usize>> {
        None
    }

    fn trained(&self) -> usize {
        0
    }

    fn begin(&mut self) {
        self.asked(Asked::Begin);
    }

    fn set(&mut self, _vector: usize, values: &[f32]) {
        self.asked(Asked::Vector(values.to_vec()));
    }

    fn complete(&mut self, steps: u64) -> Result<(), Unfit> {
        self.expect(Asked::Complete(steps))
    }

    fn update(&mut self, _step: u64, _parameter: usize, _mean: &[f32]) {}

    fn stepped(&mut self, steps: u64) -> Result<(), Unfit> {
        self.expect(Asked::Stepped(steps))
    }

    fn is_gone(&self) -> bool {
        self.is_gone
    }
}
