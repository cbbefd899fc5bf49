//! Memory that Python owns: the weights, gradient or mean of every parameter.

use pyo3::prelude::*;
use unisono_sync::Parameter;
use unisono_sync::strategy::Weights;

/// Where the numbers of a parameter are: the address of the first, and how many.
#[derive(Clone, Copy, Debug, FromPyObject)]
pub struct Place(usize, usize);

impl Place {
    /// Numbers at an address, or what is wrong with it.
    pub fn new(address: usize, count: usize, parameter: &Parameter) -> Result<Place, String> {
        Place(address, count).checked(parameter)
    }

    fn checked(self, parameter: &Parameter) -> Result<Place, String> {
        let Place(address, count) = self;
        let (name, elements) = (&parameter.name, parameter.elements());
        if count != elements {
            return Err(format!("{count} numbers for {name}, which has {elements}"));
        }
        if count > 0 && (address == 0 || !address.is_multiple_of(align_of::<f32>())) {
            return Err(format!("the address for {name} is not one of 32-bit floats"));
        }
        Ok(self)
    }

    /// The numbers.
    ///
    /// # Safety
    /// They are there, and nobody changes them, for as long as the result is used.
    pub unsafe fn read<'a>(self) -> &'a [f32] {
        match self.1 {
            0 => &[],
            // SAFETY: passed on from the caller; the address was checked.
            count => unsafe { std::slice::from_raw_parts(self.0 as *const f32, count) },
        }
    }

    /// The numbers, to be changed.
    ///
    /// # Safety
    /// They are there, and nobody else uses them, for as long as the result is used.
    unsafe fn write<'a>(self) -> &'a mut [f32] {
        match self.1 {
            0 => &mut [],
            // SAFETY: passed on from the caller; the address was checked.
            count => unsafe { std::slice::from_raw_parts_mut(self.0 as *mut f32, count) },
        }
    }
}

/// One place for every parameter, which its owner leaves to us.
pub struct Places(Vec<Place>);

impl Places {
    /// The places of these parameters, or what is wrong with them.
    ///
    /// # Safety
    /// The memory is there, no two places overlap, and nobody else uses it, for as long as the
    /// result lives.
    pub unsafe fn new(places: Vec<Place>, parameters: &[Parameter]) -> Result<Places, String> {
        if places.len() != parameters.len() {
            let (given, expected) = (places.len(), parameters.len());
            return Err(format!("{given} places for {expected} parameters"));
        }
        let checked = places.into_iter().zip(parameters).map(|(place, of)| place.checked(of));
        checked.collect::<Result<_, _>>().map(Places)
    }

    /// The numbers of a parameter.
    pub fn of(&mut self, parameter: usize) -> &mut [f32] {
        // SAFETY: the memory is ours, as `new` was promised, and borrowed with `self`.
        unsafe { self.0[parameter].write() }
    }
}

impl Weights for Places {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        // SAFETY: the memory is ours, as `new` was promised, and borrowed with `self`.
        with(unsafe { self.0[parameter].read() });
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        with(self.of(parameter));
    }
}
