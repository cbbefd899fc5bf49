//! What a checkpoint holds, before it is written and after it is read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use safetensors::Dtype;
use zerocopy::IntoBytes;

use super::CheckpointError;

/// The state of a run: tensors, and strings about them. It borrows the tensors' data, which is
/// written from where it lies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot<'a> {
    /// What else is to be known, such as seed, data position, shards or a fingerprint of the
    /// model. Keys that begin with `unisono.` are taken.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, under different names, in any order.
    pub tensors: Vec<Tensor<'a>>,
}

impl<'a> Snapshot<'a> {
    /// An empty one.
    pub fn new() -> Snapshot<'a> {
        Snapshot::default()
    }

    /// Notes one thing; [`Loaded::value`] reads it back.
    pub fn set(&mut self, key: impl Into<String>, value: impl ToString) {
        self.metadata.insert(key.into(), value.to_string());
    }
}

/// A named tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: Cow<'a, str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extents, the slowest first.
    pub shape: Cow<'a, [usize]>,
    /// Its elements in row-major order, little-endian.
    pub data: Cow<'a, [u8]>,
}

impl<'a> Tensor<'a> {
    /// A tensor of floats.
    pub fn from_f32(
        name: impl Into<Cow<'a, str>>,
        shape: impl Into<Cow<'a, [usize]>>,
        values: &'a [f32],
    ) -> Tensor<'a> {
        let data = if cfg!(target_endian = "little") {
            Cow::Borrowed(values.as_bytes())
        } else {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        Tensor { name: name.into(), dtype: Dtype::F32, shape: shape.into(), data }
    }

    /// Its elements, if they are floats.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let (values, []) = self.data.as_chunks() else { return None };
        let values = || values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        (self.dtype == Dtype::F32).then(values)
    }

    /// How many bytes shape and type ask for; `None` for more than a machine can address, and
    /// for types that do not fill their last byte.
    pub(super) fn size(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent))?;
        let bits = elements.checked_mul(self.dtype.bitsize())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// A checkpoint that was read and found good.
#[derive(Debug)]
pub struct Loaded {
    pub(super) path: PathBuf,
    pub(super) step: u64,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
    /// The data of all tensors.
    pub(super) data: Vec<u8>,
}

/// Where a tensor's data is, and what it is.
#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
}

impl Loaded {
    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The step it was saved at.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What the snapshot's metadata was.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// One entry of the metadata, parsed.
    ///
    /// # Errors
    ///
    /// If there is none, or one of another type.
    pub fn value<T: FromStr>(&self, key: &str) -> Result<T, CheckpointError> {
        let value = self.metadata.get(key).and_then(|text| text.parse().ok());
        value.ok_or_else(|| CheckpointError::Entry { path: self.path.clone(), key: key.to_owned() })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, stored) = self.tensors.get_key_value(name)?;
        Some(self.view(name, stored))
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|(name, stored)| self.view(name, stored))
    }

    fn view<'a>(&'a self, name: &'a str, stored: &'a StoredTensor) -> Tensor<'a> {
        Tensor {
            name: name.into(),
            dtype: stored.dtype,
            shape: (&stored.shape).into(),
            data: (&self.data[stored.range.clone()]).into(),
        }
    }
}
