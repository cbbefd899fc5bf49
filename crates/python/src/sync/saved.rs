//! What a replica remembers from step to step, by name, as bytes of little-endian floats.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use pyo3::pybacked::PyBackedBytes;
use unisono_sync::SyncError;
use unisono_sync::strategy::Save;

/// What is handed to Python.
pub type SavedState = BTreeMap<String, Cow<'static, [u8]>>;

/// What Python hands back.
pub type RestoredState = HashMap<String, PyBackedBytes>;

/// What `save` calls its argument with.
pub fn saved_by(
    save: impl FnOnce(&mut Save<'_>) -> Result<(), SyncError>,
) -> Result<SavedState, SyncError> {
    let mut saved = SavedState::new();
    save(&mut |name, _, values| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        saved.insert(name, bytes.into());
    })?;
    Ok(saved)
}

/// The numbers that were saved under a name. Bytes that are left over make one number more than any
/// parameter has.
pub fn restored(saved: &RestoredState, name: &str) -> Option<Vec<f32>> {
    let (whole, rest) = saved.get(name)?.as_chunks::<4>();
    let tail = (!rest.is_empty()).then_some(f32::NAN);
    Some(whole.iter().map(|bytes| f32::from_le_bytes(*bytes)).chain(tail).collect())
}
