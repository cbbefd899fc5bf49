//! 16-bit floats as codecs: what [`fp16`](crate::fp16) and [`bf16`](crate::bf16) share.
//!
//! Each is a [`Format`]: two functions between f32 and 16 bits, without branches, so that a loop
//! over them compiles to the vector instructions of every CPU. The encodings can be summed: the
//! codec hands the gradient on as it is, and the strategy that sends it casts it. As the values of a sparse
//! codec they are bytes, two for each element, little-endian.

use crate::stream::{TILE, sweep};
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

    fn encode_fed(&self, key: Key, first: usize, fed: &[f32], owed: &mut [f32], into: &mut [u8]) {
        assert_eq!(fed.len(), owed.len(), "something fed for every element");
        let tiles = into.chunks_mut(TILE * F::WIRE.bytes()).zip(owed.chunks_mut(TILE));
        for ((into, owed), fed) in tiles.zip(fed.chunks(TILE)) {
            add(fed, owed, |fed| fed);
            self.encode_owed(key, first, owed, into);
        }
    }

    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        let whole = whole::<F>(bytes, into.len())?;
        map(whole, into, |bytes| F::widen(u16::from_le_bytes(bytes)));
        Ok(())
    }

    /// All bits are a number.
    fn check(&self, bytes: &[u8], elements: usize) -> Result<(), BadEncoding> {
        whole::<F>(bytes, elements).map(drop)
    }

    fn decode_add(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        let whole = whole::<F>(bytes, into.len())?;
        add(whole, into, |bytes| F::widen(u16::from_le_bytes(bytes)));
        Ok(())
    }
}

/// The encodings of as many elements, if the bytes are that.
fn whole<F: Format>(bytes: &[u8], elements: usize) -> Result<&[[u8; 2]], BadEncoding> {
    let expected = elements * F::WIRE.bytes();
    if bytes.len() != expected {
        return Err(BadEncoding::Length { codec: F::NAME, expected, found: bytes.len() });
    }
    Ok(bytes.as_chunks().0)
}

/// Casts `values`, each times a factor, to 16-bit floats.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn narrow<F: Format>(values: &[f32], factor: f32, into: &mut [u16]) {
    sweep(values, into, |values, into| {
        for (value, into) in values.iter().zip(into) {
            *into = F::narrow(*value * factor);
        }
    });
}

/// Casts 16-bit floats to f32 and makes means of them.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn widen<F: Format>(values: &[u16], mean: Mean, into: &mut [f32]) {
    sweep(values, into, |values, into| {
        for (bits, into) in values.iter().zip(into.iter_mut()) {
            *into = F::widen(*bits);
        }
        mean.make(into);
    });
}

/// How a sum of what was scaled becomes a mean.
#[derive(Clone, Copy, Debug)]
pub struct Mean {
    factor: f32,
    shards: f32,
}

impl Mean {
    /// Of so many shards, whose values were divided by `factor` before they were summed.
    pub fn new(factor: f32, shards: usize) -> Mean {
        Mean { factor, shards: shards as f32 }
    }

    /// Of one, that was not scaled.
    pub const NONE: Mean = Mean { factor: 1.0, shards: 1.0 };

    /// Makes means of sums.
    #[inline(always)]
    pub fn make(self, sums: &mut [f32]) {
        let Mean { factor, shards } = self;
        if factor != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= factor);
        }
        divide(sums, shards);
    }
}

/// Divides all by the same number.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn divide_all(values: &mut [f32], by: f32) {
    divide(values, by);
}

/// As [`divide_all`], compiled with its caller.
#[inline(always)]
fn divide(values: &mut [f32], by: f32) {
    // The inverse of a power of two is exact, and so both round the same number; multiplying is much faster.
    let inverse = 1.0 / by;
    let is_exact = by.to_bits() & 0x007f_ffff == 0 && by.is_normal() && inverse.is_normal();
    match is_exact {
        true if by == 1.0 => {}
        true => values.iter_mut().for_each(|value| *value *= inverse),
        false => values.iter_mut().for_each(|value| *value /= by),
    }
}

/// Makes every element of `into` from its counterpart. `each` is inlined, and so compiled for every
/// instruction set.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn map<A: Copy, B, F: Fn(A) -> B>(from: &[A], into: &mut [B], each: F) {
    assert_eq!(from.len(), into.len(), "an element for every element");
    for (from, into) in from.iter().zip(into) {
        *into = each(*from);
    }
}

/// As [`map`], and adds to what is there.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn add<A: Copy, F: Fn(A) -> f32>(from: &[A], into: &mut [f32], each: F) {
    assert_eq!(from.len(), into.len(), "an element for every element");
    for (from, into) in from.iter().zip(into) {
        *into += each(*from);
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
    use crate::stream::BYPASS;
    use half::slice::HalfBitsSliceExt;

    /// Long enough for results past the caches, and beginning and ending within a line.
    const LONG: std::ops::Range<usize> = 3..(BYPASS / 2 + 5 * 1024 + 7);

    fn plain_narrow<F: Format>(values: &[f32], into: &mut [u16]) {
        narrow::<F>(values, 1.0, into);
    }

    fn plain_widen<F: Format>(values: &[u16], into: &mut [f32]) {
        widen::<F>(values, Mean::NONE, into);
    }

    fn values() -> Vec<f32> {
        let key = Key::new(9);
        let bits = LONG.map(|i| key.at(i as u64) as u32);
        bits.map(f32::from_bits).collect()
    }

    #[test]
    fn means_are_quotients_to_the_bit() {
        let values = values();
        for shards in [1usize, 2, 3, 4, 6, 7, 8, 1000] {
            let factor = shards.next_power_of_two() as f32;
            let mut means = values.clone();
            Mean::new(factor, shards).make(&mut means);
            let mut quotients = values.clone();
            divide_all(&mut quotients, shards as f32);
            for ((value, mean), quotient) in values.iter().zip(&means).zip(&quotients) {
                let expected = value / (1.0 / factor) / shards as f32;
                assert!(
                    mean.to_bits() == expected.to_bits() || value.is_nan(),
                    "{value:e} {shards}"
                );
                let expected = value / shards as f32;
                assert!(quotient.to_bits() == expected.to_bits() || value.is_nan(), "{value:e}");
            }
        }
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
        check::<Fp16>(plain_narrow::<Fp16>, plain_widen::<Fp16>);
        check::<Bf16>(plain_narrow::<Bf16>, plain_widen::<Bf16>);
        // As they are called from outside, with the instructions of this CPU.
        check::<Fp16>(
            |values, into| fp16::encode(values, into.reinterpret_cast_mut()),
            |values, into| fp16::decode(values.reinterpret_cast(), into),
        );
    }
}
