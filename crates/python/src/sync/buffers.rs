//! The weights or means of all parameters, in memory that Python owns.

use unisono_sync::Parameter;
use unisono_sync::strategy::Weights;

use crate::memory::Buffer;

/// One buffer for every parameter, which only this value uses.
pub struct ParameterBuffers(Vec<Buffer>);

impl ParameterBuffers {
    /// The buffers of these parameters, or what is wrong with them.
    ///
    /// # Safety
    /// The memory is there, no two buffers overlap, and no other thread uses it, for as long as the
    /// result lives.
    pub unsafe fn new(
        buffers: Vec<Buffer>,
        parameters: &[Parameter],
    ) -> Result<ParameterBuffers, String> {
        if buffers.len() != parameters.len() {
            let (given, expected) = (buffers.len(), parameters.len());
            return Err(format!("{given} buffers for {expected} parameters"));
        }
        let both = buffers.into_iter().zip(parameters);
        let checked = both.map(|(buffer, of)| buffer.checked(&of.name, of.elements()));
        checked.collect::<Result<_, _>>().map(ParameterBuffers)
    }

    /// The numbers of a parameter.
    pub fn of(&mut self, parameter: usize) -> &mut [f32] {
        // SAFETY: `new` checked the buffer and was promised the memory, which is borrowed with `self`.
        unsafe { self.0[parameter].write() }
    }
}

impl Weights for ParameterBuffers {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        // SAFETY: `new` checked the buffer and was promised the memory, which is borrowed with `self`.
        with(unsafe { self.0[parameter].read() });
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        with(self.of(parameter));
    }
}
