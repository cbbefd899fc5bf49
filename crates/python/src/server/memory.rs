//! Weights and gradients at addresses that Python gave.

/// The numbers at an address.
///
/// # Safety
/// `length` of them are there, and nobody changes them, for as long as the result is used.
pub unsafe fn numbers<'a>(address: usize, length: usize) -> Result<&'a [f32], String> {
    if length == 0 {
        return Ok(&[]);
    }
    check(address)?;
    // SAFETY: passed on from the caller; aligned and not null, as checked.
    Ok(unsafe { std::slice::from_raw_parts(address as *const f32, length) })
}

/// Room for numbers at an address.
///
/// # Safety
/// `length` of them are there, and nobody else uses them, for as long as the result is used.
pub unsafe fn room<'a>(address: usize, length: usize) -> Result<&'a mut [f32], String> {
    if length == 0 {
        return Ok(&mut []);
    }
    check(address)?;
    // SAFETY: passed on from the caller; aligned and not null, as checked.
    Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut f32, length) })
}

fn check(address: usize) -> Result<(), String> {
    match address != 0 && address.is_multiple_of(align_of::<f32>()) {
        true => Ok(()),
        false => {
            Err(format!("no number can be at the address {address:#x}; give tensors with data"))
        }
    }
}
