//! 32-bit floats in memory that Python owns.

use pyo3::prelude::*;

/// Where floats are: the address of the first, and how many.
#[derive(Clone, Copy, Debug, FromPyObject)]
pub struct Buffer(usize, usize);

impl Buffer {
    /// So many floats at an address, for what is called `name`; or what is wrong with them.
    pub fn new(
        address: usize,
        count: usize,
        name: &str,
        expected: usize,
    ) -> Result<Buffer, String> {
        Buffer(address, count).checked(name, expected)
    }

    /// Itself, if it can hold the floats that `name` has; or what is wrong with it.
    pub fn checked(self, name: &str, expected: usize) -> Result<Buffer, String> {
        let Buffer(address, count) = self;
        if count != expected {
            return Err(format!("{count} numbers for {name}, which has {expected}"));
        }
        if count > 0 && (address == 0 || !address.is_multiple_of(align_of::<f32>())) {
            return Err(format!("the address for {name} is not one of 32-bit floats"));
        }
        Ok(self)
    }

    /// The floats.
    ///
    /// # Safety
    /// The buffer was checked, the floats are there, and no thread changes them, for as long as the
    /// result is used.
    pub unsafe fn read<'a>(self) -> &'a [f32] {
        match self.1 {
            0 => &[],
            // SAFETY: passed on from the caller; the address was checked.
            count => unsafe { std::slice::from_raw_parts(self.0 as *const f32, count) },
        }
    }

    /// The floats, to be changed.
    ///
    /// # Safety
    /// The buffer was checked, the floats are there, and no other thread uses them, for as long as
    /// the result is used.
    pub unsafe fn write<'a>(self) -> &'a mut [f32] {
        match self.1 {
            0 => &mut [],
            // SAFETY: passed on from the caller; the address was checked.
            count => unsafe { std::slice::from_raw_parts_mut(self.0 as *mut f32, count) },
        }
    }
}
