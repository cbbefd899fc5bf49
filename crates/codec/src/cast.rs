//! 16-bit floats as codecs: what [`fp16`](crate::fp16) and [`bf16`](crate::bf16) share.
//!
//! Each is a [`Format`]: two functions between f32 and 16 bits, without branches, so that a loop
//! over them compiles to the vector instructions of every CPU. The encodings can be summed: the
//! codec hands the gradient on as it is, and the strategy that sends it casts it. As the values of a sparse
//! codec they are bytes, two for each element, little-endian.

use crate::{BadEncoding, Codec, Key, Passage, Spans, Summed, Task, Wire, elements};
use multiversion::multiversion;
use std::fmt;

/// A 16-bit float.
pub trait Format: fmt::Debug + Send + Sync {
    /// The codec, in errors.
    const NAME: &'static str;
    /// The type in which it travels.
    const WIRE: Wire;

    /// The nearest 16-bit float, ties to even. What is too large becomes infinity. A NaN becomes
    /// quiet and keeps the upper bits of its payload, as the instructions of all CPUs have it.
    fn narrow(value: f32) -> u16;

    /// The same value.
    fn widen(bits: u16) -> f32;
}

impl<F: Format> Codec for F {
    fn is_biased(&self) -> bool {
        false
    }

    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        elements(shape) * F::WIRE.bytes()
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Summed(self)
    }
}

impl<F: Format> Summed for F {
    fn is_identity(&self) -> bool {
        true
    }

    fn wire(&self) -> Wire {
        F::WIRE
    }

    fn encoded(&self, shape: &[usize], _: usize) -> usize {
        elements(shape)
    }

    fn encode(&self, _: usize, _: &Task, values: &[f32], _: &[f32], into: &mut [f32]) {
        into.copy_from_slice(values);
    }

    fn decode(&self, _: &Task, means: &[&[f32]], _: &mut Vec<f32>, into: &mut [f32]) {
        into.copy_from_slice(means[0]);
    }

    /// Everything was sent. What rounding lost goes both ways alike and is not owed.
    fn pay(&self, _: &Task, residual: &mut [f32], _: &[f32]) {
        residual.fill(0.0);
    }
}

impl<F: Format> Spans for F {
    /// Every element stands for itself. Whole vectors of elements are faster than single ones.
    fn block(&self) -> usize {
        256
    }

    fn bytes(&self, elements: usize) -> usize {
        elements * F::WIRE.bytes()
    }

    fn encode(&self, _: Key, _: usize, values: &[f32], into: &mut [u8]) {
        map(values, into.as_chunks_mut().0, |value| F::narrow(value).to_le_bytes());
    }

    fn encode_owed(&self, _: Key, _: usize, owed: &mut [f32], into: &mut [u8]) {
        update(owed, into.as_chunks_mut().0, |owed| {
            let bits = F::narrow(*owed);
            *owed -= F::widen(bits);
            bits.to_le_bytes()
        });
    }

    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        let expected = Spans::bytes(self, into.len());
        if bytes.len() != expected {
            return Err(BadEncoding::Length { codec: F::NAME, expected, found: bytes.len() });
        }
        map(bytes.as_chunks().0, into, |bytes| F::widen(u16::from_le_bytes(bytes)));
        Ok(())
    }
}

/// Casts `values` to 16-bit floats.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn narrow<F: Format>(values: &[f32], into: &mut [u16]) {
    sweep(values, into, |values, into| {
        for (value, into) in values.iter().zip(into) {
            *into = F::narrow(*value);
        }
    });
}

/// Casts 16-bit floats to f32.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn widen<F: Format>(values: &[u16], into: &mut [f32]) {
    sweep(values, into, |values, into| {
        for (bits, into) in values.iter().zip(into) {
            *into = F::widen(*bits);
        }
    });
}

/// Has `cast` make all of `into` from the elements of `from`, in parts of equal lengths.
///
/// Casts are limited by memory, and what it costs to write depends on how: stores that straddle
/// cache lines are slow, so the first part ends at the beginning of a line. And a line that is
/// written is first read, for nothing, unless the stores bypass the caches. Large results do so;
/// their beginning would not be in any cache at their end anyway.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn sweep<A, B: Plain>(from: &[A], into: &mut [B], cast: impl Fn(&[A], &mut [B])) {
    assert_eq!(from.len(), into.len(), "an element for every element");
    let head = into.as_ptr().align_offset(LINE).min(into.len());
    let (first, from) = from.split_at(head);
    let (into_first, into) = into.split_at_mut(head);
    cast(first, into_first);
    if size_of_val(into) < BYPASS {
        return cast(from, into);
    }
    let mut tile = [B::default(); TILE];
    let (tiles, rest) = from.as_chunks::<TILE>();
    let (into_tiles, into_rest) = into.as_chunks_mut::<TILE>();
    for (from, into) in tiles.iter().zip(into_tiles) {
        cast(from, &mut tile);
        bypass(&tile, into);
    }
    fence();
    cast(rest, into_rest);
}

/// Any bits are an element, and there are no others between them.
///
/// # Safety
/// So it is.
pub unsafe trait Plain: Copy + Default {}
// SAFETY: integers and floats have no padding.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Elements that are cast at once before they are written past the caches. More would not stay in
/// the first-level cache; with fewer, starting a loop for each shows.
const TILE: usize = 1024;

/// Bytes of the smallest result that bypasses the caches. A smaller limit is slower where the
/// result would have stayed in the last-level cache until it is sent; a larger one wastes a third
/// of the bandwidth on results that would not.
const BYPASS: usize = 16 << 20;

/// Copies a tile to memory past the caches. [`fence`] must follow the last.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn bypass<B: Plain>(tile: &[B; TILE], into: &mut [B; TILE]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let from = tile.as_ptr().cast::<__m128i>();
    let into = into.as_mut_ptr().cast::<__m128i>();
    assert!(into.is_aligned(), "tiles begin where lines do");
    for i in 0..size_of_val(tile) / size_of::<__m128i>() {
        // SAFETY: both are plain bytes of this length, a multiple of a vector's, and the
        // destination is aligned. SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(into.add(i), _mm_loadu_si128(from.add(i))) };
    }
}

/// Orders what was written past the caches before everything written later, as other threads expect
/// of ordinary stores.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn bypass<B: Plain>(tile: &[B; TILE], into: &mut [B; TILE]) {
    *into = *tile;
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}

/// Makes every element of `into` from its counterpart. `each` is inlined, and so compiled for every
/// instruction set.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn map<A: Copy, B, F: Fn(A) -> B>(from: &[A], into: &mut [B], each: F) {
    assert_eq!(from.len(), into.len(), "an element for every element");
    for (from, into) in from.iter().zip(into) {
        *into = each(*from);
    }
}

/// As [`map`], and `each` may change what it reads.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn update<A, B, F: Fn(&mut A) -> B>(from: &mut [A], into: &mut [B], each: F) {
    assert_eq!(from.len(), into.len(), "an element for every element");
    for (from, into) in from.iter_mut().zip(into) {
        *into = each(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::Bf16;
    use crate::fp16::{self, Fp16};
    use half::slice::HalfBitsSliceExt;

    /// Long enough for results past the caches, and beginning and ending within a line.
    const LONG: std::ops::Range<usize> = 3..(BYPASS / 2 + 5 * TILE + 7);

    fn values() -> Vec<f32> {
        let key = Key::new(9);
        let bits = LONG.map(|i| key.at(i as u64) as u32);
        bits.map(f32::from_bits).collect()
    }

    #[test]
    fn long_vectors_are_cast_like_their_elements() {
        fn check<F: Format>(
            narrow: impl Fn(&[f32], &mut [u16]),
            widen: impl Fn(&[u16], &mut [f32]),
        ) {
            let values = values();
            let mut encoded = vec![0; LONG.end];
            narrow(&values, &mut encoded[LONG]);
            assert!(values.iter().zip(&encoded[LONG]).all(|(v, bits)| F::narrow(*v) == *bits));
            let mut decoded = vec![0.0; LONG.end];
            widen(&encoded[LONG], &mut decoded[LONG]);
            let mut pairs = encoded.iter().zip(&decoded);
            assert!(pairs.all(|(bits, v)| F::widen(*bits).to_bits() == v.to_bits()));
        }
        check::<Fp16>(narrow::<Fp16>, widen::<Fp16>);
        check::<Bf16>(narrow::<Bf16>, widen::<Bf16>);
        // As they are called from outside, with the instructions of this CPU.
        check::<Fp16>(
            |values, into| fp16::encode(values, into.reinterpret_cast_mut()),
            |values, into| fp16::decode(values.reinterpret_cast(), into),
        );
    }
}
