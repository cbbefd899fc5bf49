//! The encoding of a few elements of many: which, and what they are.
//!
//! ```text
//!  0       4                 4 + p
//!  ┌───────┬─────────────────┬──────────────────────────────┐
//!  │ count │ indices         │ values                       │
//!  │ u32   │ packed: p bytes │ count × f32, or what another │
//!  │       │                 │ codec makes of them: v bytes │
//!  └───────┴─────────────────┴──────────────────────────────┘
//! ```
//!
//! Numbers are little-endian. `v` follows from the count, and `p` is what remains; the packed
//! indices must fill it exactly. The values are in the order of their indices.

use crate::pack::{self, Damage};
use crate::{BadEncoding, Key, Spans};
use std::sync::Arc;

/// How chosen elements are encoded, for the codecs that choose them.
#[derive(Clone, Debug)]
pub(crate) struct Sparse {
    /// Who encodes, for errors.
    codec: &'static str,
    /// What encodes the values, if they do not travel as they are.
    values: Option<Arc<dyn Spans>>,
}

impl Sparse {
    pub(crate) fn new(codec: &'static str, values: Option<Arc<dyn Spans>>) -> Sparse {
        Sparse { codec, values }
    }

    /// About how many bytes it takes to encode `count` of `elements`.
    pub(crate) fn encoded_bytes(&self, elements: usize, count: usize) -> usize {
        let indices = pack::expected_bits(elements, count) * count as f64 / 8.0;
        4 + indices.ceil() as usize + self.value_bytes(count)
    }

    /// Appends the elements of `owed` at these ascending indices to `into`, and leaves at each what
    /// is not encoded of it.
    pub(crate) fn encode(&self, key: Key, indices: &[u32], owed: &mut [f32], into: &mut Vec<u8>) {
        into.extend_from_slice(&(indices.len() as u32).to_le_bytes());
        pack::pack(indices, into);
        let start = into.len();
        into.resize(start + self.value_bytes(indices.len()), 0);
        let bytes = &mut into[start..];
        match &self.values {
            None => {
                for (bytes, &index) in bytes.as_chunks_mut().0.iter_mut().zip(indices) {
                    *bytes = std::mem::take(&mut owed[index as usize]).to_le_bytes();
                }
            }
            Some(codec) => {
                let mut values: Vec<f32> = indices.iter().map(|&i| owed[i as usize]).collect();
                codec.encode_owed(key, 0, &mut values, bytes);
                for (&index, left) in indices.iter().zip(values) {
                    owed[index as usize] = left;
                }
            }
        }
    }

    /// Adds the encoded elements to `into`, or nothing if the encoding is a bad one.
    pub(crate) fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        let (codec, found, elements) = (self.codec, bytes.len(), into.len());
        let length = |expected| BadEncoding::Length { codec, expected, found };

        let (count, rest) = bytes.split_first_chunk().ok_or_else(|| length(4))?;
        let count = u32::from_le_bytes(*count) as usize;
        if count > elements {
            return Err(BadEncoding::Count { codec, found: count, elements });
        }
        let value_bytes = self.value_bytes(count);
        // Nothing is allocated for indices that cannot be there.
        let least = pack::least_bytes(count);
        let packed = rest.len().checked_sub(value_bytes).filter(|&p| p >= least);
        let packed = packed.ok_or_else(|| length(4 + least + value_bytes))?;
        let (packed, values) = rest.split_at(packed);

        let mut indices = Vec::new();
        pack::unpack(packed, count, elements as u64, &mut indices).map_err(
            |damage| match damage {
                Damage::Length(packed) => length(4 + packed + value_bytes),
                Damage::Entry(found) => {
                    BadEncoding::Field { codec, field: "group", found: found.into() }
                }
                Damage::Index(index) => BadEncoding::Index { codec, index, elements },
                Damage::Padding(found) => BadEncoding::Field { codec, field: "padding", found },
            },
        )?;
        match &self.values {
            None => {
                for (&index, bytes) in indices.iter().zip(values.as_chunks().0) {
                    into[index as usize] += f32::from_le_bytes(*bytes);
                }
            }
            Some(codec) => {
                let mut decoded = vec![0.0; count];
                codec.decode(values, &mut decoded)?;
                for (&index, value) in indices.iter().zip(decoded) {
                    into[index as usize] += value;
                }
            }
        }
        Ok(())
    }

    fn value_bytes(&self, count: usize) -> usize {
        self.values.as_ref().map_or(count * 4, |codec| codec.bytes(count))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A value codec to test with: halves of whole numbers in one byte, NaN as 128.
    #[derive(Debug)]
    pub(crate) struct Halves;

    impl Spans for Halves {
        fn block(&self) -> usize {
            1
        }

        fn bytes(&self, elements: usize) -> usize {
            elements
        }

        fn encode(&self, _: Key, _: usize, values: &[f32], into: &mut [u8]) {
            for (byte, value) in into.iter_mut().zip(values) {
                let code = if value.is_nan() { -128.0 } else { (value * 2.0).clamp(-127.0, 127.0) };
                *byte = code as i8 as u8;
            }
        }

        fn encode_owed(&self, key: Key, first: usize, owed: &mut [f32], into: &mut [u8]) {
            self.encode(key, first, owed, into);
            for (owed, &byte) in owed.iter_mut().zip(&*into) {
                *owed -= f32::from(byte as i8) * 0.5;
            }
        }

        fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
            for (value, &byte) in into.iter_mut().zip(bytes) {
                *value = if byte == 128 { f32::NAN } else { f32::from(byte as i8) * 0.5 };
            }
            Ok(())
        }
    }

    fn plain() -> Sparse {
        Sparse::new("test", None)
    }

    fn coded() -> Sparse {
        Sparse::new("test", Some(Arc::new(Halves)))
    }

    #[test]
    fn the_bytes_are_those_of_the_diagram() {
        let mut owed = [1.0, 2.0, 3.0];
        let mut bytes = vec![0xaa];
        plain().encode(Key::new(0), &[0, 2], &mut owed, &mut bytes);
        // Width 0, and above its five bits the sum of high parts. Gaps 0 and 1: 1 and 01, lowest bit first.
        let (entry, packed) = (1 << 5, 0b101);
        let values = [1f32.to_le_bytes(), 3f32.to_le_bytes()].concat();
        assert_eq!(bytes, [&[0xaa, 2, 0, 0, 0, entry, 0, packed], &values[..]].concat());
        assert_eq!(owed, [0.0, 2.0, 0.0]);
    }

    #[test]
    fn a_value_codec_leaves_its_remainder() {
        let mut owed = [1.25, 7.0, -3.1];
        let mut bytes = Vec::new();
        coded().encode(Key::new(0), &[0, 2], &mut owed, &mut bytes);
        assert_eq!(bytes[7..], [2, -6i8 as u8]);
        assert_eq!(owed, [0.25, 7.0, -3.1 + 3.0]);
        let mut decoded = [10.0; 3];
        coded().decode(&bytes, &mut decoded).unwrap();
        assert_eq!(decoded, [11.0, 10.0, 7.0]);
    }

    #[test]
    fn every_kind_of_damage_is_an_error() {
        let mut bytes = Vec::new();
        plain().encode(Key::new(0), &[0, 2], &mut [1.0, 2.0, 3.0], &mut bytes);
        let decode = |bytes: &[u8], elements| {
            let mut into = vec![0.0; elements];
            let result = plain().decode(bytes, &mut into);
            assert!(result.is_ok() || into.iter().all(|&x| x == 0.0));
            result
        };
        assert_eq!(decode(&bytes, 3), Ok(()));
        for length in 0..bytes.len() {
            let error = decode(&bytes[..length], 3);
            assert!(matches!(error, Err(BadEncoding::Length { .. })), "{error:?}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert!(decode(&long, 3).is_err());
        assert!(matches!(decode(&bytes, 2), Err(BadEncoding::Index { index: 2, .. })));
        assert!(matches!(decode(&bytes, 1), Err(BadEncoding::Count { found: 2, .. })));
        let huge = [&u32::MAX.to_le_bytes()[..], &bytes[4..]].concat();
        assert!(matches!(decode(&huge, 1000), Err(BadEncoding::Count { .. })));
    }

    #[test]
    fn nothing_of_nothing() {
        let mut bytes = Vec::new();
        plain().encode(Key::new(0), &[], &mut [], &mut bytes);
        assert_eq!(bytes, [0; 4]);
        assert_eq!(plain().decode(&bytes, &mut []), Ok(()));
    }

    proptest! {
        #[test]
        fn strangers_bytes_never_panic(
            count in prop_oneof![0..40u32, any::<u32>()],
            rest in vec(any::<u8>(), 0..200),
            elements in 0..2000usize,
        ) {
            let bytes = [&count.to_le_bytes()[..], &rest].concat();
            for sparse in [plain(), coded()] {
                let mut into = vec![0.0; elements];
                let _ = sparse.decode(&bytes, &mut into);
                let _ = sparse.decode(&rest, &mut into);
            }
        }
    }
}
