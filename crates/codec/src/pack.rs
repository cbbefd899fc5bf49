//! Ascending indices in few bits.
//!
//! The gaps between neighbouring indices are what is written: a *gap* is how many elements lie
//! between an index and the one before it. Gaps follow each other in groups of [`GROUP`], and each
//! group has the *width* that makes it shortest, in 5 bits. A gap's low `width` bits are written as
//! they are, after its high part in unary: as many zeros, then a one (a Golomb-Rice code). For
//! indices that are spread at random this is within a few percent of the least that is possible:
//! 8.2 bits for one of a hundred, 11.5 for one of a thousand. Where they are denser the group's
//! width is smaller, and no group takes more than 3 bits per index above the logarithm of its mean
//! gap.
//!
//! ```text
//! group:  width:5  gap  gap  gap …               up to 128 gaps
//! gap:    0…0 1  low:width                       high part in unary, low part
//! ```
//!
//! Bits fill bytes from the lowest; the last byte is filled up with zeros.

/// Indices that share a width. More adapt less to where the indices are dense; fewer spend more on
/// widths, 5 bits each.
const GROUP: usize = 128;

/// Bits in which a group's width is written.
const WIDTH_BITS: u32 = 5;

/// Bits that [`Reader::peek`] gives at once, at the least.
const PEEKED: u32 = 57;

/// What is wrong with packed indices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// There should be as many bytes; at least as many, where they end too early.
    Length(usize),
    /// This index is beyond the last element.
    Index(u64),
    /// The bits after the last index are not zero.
    Padding(u64),
}

/// Appends strictly ascending indices to `into`.
pub(crate) fn pack(indices: &[u32], into: &mut Vec<u8>) {
    let mut writer = Writer { into, bits: 0, filled: 0 };
    let mut gaps = [0; GROUP];
    let mut next = 0;
    for group in indices.chunks(GROUP) {
        let gaps = &mut gaps[..group.len()];
        for (gap, &index) in gaps.iter_mut().zip(group) {
            // Only the last of all indices can be the largest number, after which nothing comes.
            (*gap, next) = (index - next, index.wrapping_add(1));
        }
        let width = best_width(gaps);
        writer.put(u64::from(width), WIDTH_BITS);
        for &gap in gaps.iter() {
            writer.put_gap(gap, width);
        }
    }
    writer.finish();
}

/// Appends `count` indices below `elements` to `into`, from bytes that hold nothing else. Whatever
/// the bytes, those appended are strictly ascending and below `elements`.
///
/// Every index takes a bit at least: callers that check `count` against the bytes, or against what
/// they expect, bound the memory that `into` takes.
pub(crate) fn unpack(
    bytes: &[u8],
    count: usize,
    elements: u64,
    into: &mut Vec<u32>,
) -> Result<(), Damage> {
    let elements = elements.min(1 << 32);
    let mut reader = Reader { bytes, at: 0 };
    let mut next = 0;
    into.reserve(count);
    for group in (0..count).step_by(GROUP) {
        let width = reader.take(WIDTH_BITS) as u32;
        for _ in group..count.min(group + GROUP) {
            // The sum is at most 2^32 + 2^32 · 2^31 + 2^31: no overflow.
            let index = next + reader.take_gap(width, elements)?;
            if index >= elements {
                return Err(Damage::Index(index));
            }
            into.push(index as u32);
            next = index + 1;
        }
    }
    reader.finish()
}

/// Bits that an index takes on average, if `count` of `elements` are spread at random.
///
/// Only made of operations that give the same result everywhere, for workers decide by it.
pub(crate) fn expected_bits(elements: usize, count: usize) -> f64 {
    if count == 0 || count >= elements {
        return 1.0;
    }
    // The chance that a gap is at least 2^width: squared with every further bit.
    let mut chance = 1.0 - count as f64 / elements as f64;
    let mut best = f64::INFINITY;
    for width in 0..32 {
        best = best.min(f64::from(width) + 1.0 + chance / (1.0 - chance));
        chance *= chance;
    }
    best + f64::from(WIDTH_BITS) / GROUP.min(count) as f64
}

/// The width with which a group of gaps is shortest.
fn best_width(gaps: &[u32]) -> u32 {
    // Gaps lie between different elements, so their sum is less than 2^32.
    let bits = |width: u32| {
        let high: u32 = gaps.iter().map(|gap| gap >> width).sum();
        u64::from(high) + u64::from(width + 1) * gaps.len() as u64
    };
    let mean = gaps.iter().sum::<u32>() / gaps.len() as u32;
    // One more bit than the mean has never pays; from there on downwards the length falls, and then
    // rises again.
    let mut width = (u32::BITS - mean.leading_zeros()).min(31);
    let mut length = bits(width);
    while width > 0 {
        let shorter = bits(width - 1);
        if shorter > length {
            break;
        }
        (width, length) = (width - 1, shorter);
    }
    width
}

/// Appends bits to bytes.
struct Writer<'a> {
    into: &'a mut Vec<u8>,
    /// Those not yet written, in the lowest places.
    bits: u64,
    /// How many those are: less than 8 between calls.
    filled: u32,
}

impl Writer<'_> {
    /// Appends the low `count` bits of `value`, at most 56, of which the others are zero.
    #[inline(always)]
    fn put(&mut self, value: u64, count: u32) {
        self.bits |= value << self.filled;
        self.filled += count;
        let whole = self.filled / 8;
        self.into.extend_from_slice(&self.bits.to_le_bytes());
        self.into.truncate(self.into.len() - 8 + whole as usize);
        // With `filled` at most 63, `whole` is at most 7.
        self.bits >>= whole * 8;
        self.filled %= 8;
    }

    #[inline(always)]
    fn put_gap(&mut self, gap: u32, width: u32) {
        let low = u64::from(gap) & ((1 << width) - 1);
        let mut high = gap >> width;
        while high > 24 {
            self.put(0, 24);
            high -= 24;
        }
        self.put((low << 1 | 1) << high, high + 1 + width);
    }

    fn finish(self) {
        if self.filled > 0 {
            self.into.push(self.bits as u8);
        }
    }
}

/// Takes bits from bytes; after their end there are zeros, which [`Reader::finish`] tells from
/// bits.
struct Reader<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: usize,
}

impl Reader<'_> {
    /// The next [`PEEKED`] bits and perhaps some more.
    #[inline(always)]
    fn peek(&self) -> u64 {
        let rest = self.bytes.get(self.at / 8..).unwrap_or_default();
        let word = match rest.first_chunk() {
            Some(word) => u64::from_le_bytes(*word),
            None => {
                let mut word = [0; 8];
                word[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(word)
            }
        };
        word >> (self.at % 8)
    }

    #[inline(always)]
    fn take(&mut self, count: u32) -> u64 {
        let bits = self.peek() & ((1 << count) - 1);
        self.at += count as usize;
        bits
    }

    /// The next gap, if its high part is at most `limit`.
    #[inline(always)]
    fn take_gap(&mut self, width: u32, limit: u64) -> Result<u64, Damage> {
        let bits = self.peek();
        let zeros = bits.trailing_zeros();
        if zeros + 1 + width <= PEEKED {
            self.at += (zeros + 1 + width) as usize;
            return Ok(u64::from(zeros) << width | (bits >> (zeros + 1)) & ((1 << width) - 1));
        }
        self.take_long_gap(width, limit)
    }

    /// As [`Reader::take_gap`], for those that need not be within what is peeked.
    #[cold]
    fn take_long_gap(&mut self, width: u32, limit: u64) -> Result<u64, Damage> {
        let mut high = 0;
        loop {
            let zeros = self.peek().trailing_zeros().min(PEEKED - 1);
            let ended = self.peek() >> zeros & 1 == 1;
            high += u64::from(zeros);
            self.at += zeros as usize;
            if ended {
                break;
            }
            if self.at >= self.bytes.len() * 8 {
                return Err(Damage::Length(self.at / 8 + 1));
            }
            if high > limit {
                return Err(Damage::Index(high << width));
            }
        }
        self.at += 1;
        Ok(high << width | self.take(width))
    }

    /// Checks that everything was read, and nothing else.
    fn finish(self) -> Result<(), Damage> {
        let read = self.at.div_ceil(8);
        if read != self.bytes.len() {
            return Err(Damage::Length(read));
        }
        // All that can still be seen is the rest of the last byte.
        match self.peek() {
            0 => Ok(()),
            padding => Err(Damage::Padding(padding)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    fn packed(indices: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        pack(indices, &mut bytes);
        bytes
    }

    fn unpacked(bytes: &[u8], count: usize, elements: u64) -> Result<Vec<u32>, Damage> {
        let mut indices = Vec::new();
        unpack(bytes, count, elements, &mut indices).map(|()| indices)
    }

    fn scattered(one_of: u64, elements: u32) -> Vec<u32> {
        let key = Key::new(7);
        (0..elements).filter(|&i| key.at(u64::from(i)).is_multiple_of(one_of)).collect()
    }

    #[test]
    fn sizes_are_near_the_least_possible() {
        for (one_of, elements, most) in
            [(4, 100_000, 3.5), (100, 1_000_000, 8.25), (1000, 8_000_000, 11.6)]
        {
            let indices = scattered(one_of, elements);
            let bits = packed(&indices).len() as f64 * 8.0 / indices.len() as f64;
            let expected = expected_bits(elements as usize, indices.len());
            assert!(bits < most, "{bits} for one of {one_of}");
            assert!((bits / expected - 1.0).abs() < 0.02, "{bits} instead of {expected}");
        }
    }

    #[test]
    fn groups_adapt_to_where_the_indices_are_dense() {
        // Rows of 4096 of which one in 64 is full: all of one row, nothing of the others.
        let rows: Vec<u32> = (0..16).flat_map(|row| row << 18..(row << 18) + 4096).collect();
        // 1.4 bits each, where one width for all would take 7.
        assert!(packed(&rows).len() < rows.len() / 5);
        assert_eq!(unpacked(&packed(&rows), rows.len(), 1 << 22), Ok(rows));
    }

    #[test]
    fn ends_of_the_range() {
        for indices in
            [vec![], vec![0], vec![u32::MAX], vec![0, u32::MAX], vec![u32::MAX - 1, u32::MAX]]
        {
            let bytes = packed(&indices);
            assert_eq!(unpacked(&bytes, indices.len(), 1 << 32), Ok(indices));
        }
        let mut crowded: Vec<u32> = (0..127).collect();
        crowded.push(u32::MAX);
        assert_eq!(unpacked(&packed(&crowded), 128, 1 << 32), Ok(crowded));
    }

    #[test]
    fn damage_is_named() {
        let bytes = packed(&[3, 9, 400]);
        assert_eq!(unpacked(&bytes, 3, 401), Ok(vec![3, 9, 400]));
        assert_eq!(unpacked(&bytes, 3, 400), Err(Damage::Index(400)));
        assert!(matches!(unpacked(&bytes[..1], 3, 401), Err(Damage::Length(2..))));
        let long = [&bytes[..], &[0]].concat();
        assert_eq!(unpacked(&long, 3, 401), Err(Damage::Length(bytes.len())));
        // Width 0, then a one, then padding of 2 bits that should be zeros.
        assert_eq!(unpacked(&[0b0110_0000], 1, 9), Err(Damage::Padding(1)));
        assert_eq!(unpacked(&[0b0010_0000], 1, 9), Ok(vec![0]));
        // A high part that goes on and on, with the largest width.
        let endless = [vec![31], vec![0; 1 << 10], vec![1; 9]].concat();
        assert!(matches!(unpacked(&endless, 1, 100), Err(Damage::Index(101..))));
    }

    proptest! {
        #[test]
        fn comes_back(
            indices in btree_set(any::<u32>(), 0..600),
            shift in 0..32u32,
        ) {
            let indices: std::collections::BTreeSet<u32> =
                indices.iter().map(|i| i >> shift).collect();
            let indices: Vec<u32> = indices.into_iter().collect();
            let elements = indices.last().map_or(0, |&last| u64::from(last) + 1);
            let bytes = packed(&indices);
            prop_assert_eq!(unpacked(&bytes, indices.len(), elements), Ok(indices));
        }

        #[test]
        fn strangers_bytes_never_panic(
            bytes in vec(prop_oneof![3 => any::<u8>(), 2 => Just(0)], 0..300),
            count in 0..700usize,
            elements in prop_oneof![0..1000u64, Just(1 << 32), Just(u64::MAX)],
        ) {
            let mut indices = Vec::new();
            let result = unpack(&bytes, count, elements, &mut indices);
            prop_assert!(indices.is_sorted_by(|a, b| a < b));
            prop_assert!(indices.iter().all(|&i| u64::from(i) < elements));
            if result.is_ok() {
                prop_assert_eq!(indices.len(), count);
            }
        }
    }
}
