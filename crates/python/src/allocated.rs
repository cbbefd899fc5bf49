//! Memory that the other ranks of a host read in place.

use pyo3::prelude::*;
use unisono_collective::Registered;

/// Memory of this rank that calls of its group read in place. It stays as long as this does, also after the group.
#[pyclass(frozen)]
pub struct Allocated {
    memory: Registered<u8>,
}

impl Allocated {
    pub fn new(memory: Registered<u8>) -> Allocated {
        Allocated { memory }
    }
}

#[pymethods]
impl Allocated {
    /// Where it begins.
    #[getter]
    fn address(&self) -> usize {
        self.memory.as_ptr().addr()
    }
}
