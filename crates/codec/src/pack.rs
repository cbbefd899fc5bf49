//! Ascending indices in few bits.
//!
//! The gaps between neighbouring indices are what is written: a *gap* is how many elements lie
//! between an index and the one before it. Gaps follow each other in groups of [`GROUP`], and each
//! group has the *width* that makes it shortest. A gap's low `width` bits are written as they are, its
//! high part in unary: as many zeros, then a one (a Golomb-Rice code, with the two parts apart as in
//! an Elias-Fano code). For indices that are spread at random this is within a few percent of the
//! least that is possible: 8.3 bits for one of a hundred, 11.6 for one of a thousand. Where they are
//! denser the group's width is smaller, and no group takes more than 3 bits per index above the
//! logarithm of its mean gap.
//!
//! A directory before all groups has the width of each, and the sum of its high parts. That is how
//! long each group is: so each can be found, and unpacked, without those before it.
//!
//! ```text
//! entry:  width | highs << 5                     2 bytes for each group
//! group:  0…0 1  0…0 1  …  low  low  …           up to 128 high parts, then as many low parts
//! ```
//!
//! Bits fill bytes from the lowest; the last byte is filled up with zeros.

/// Indices that share a width. More adapt less to where the indices are dense; fewer spend more on
/// the directory.
const GROUP: usize = 128;

/// Bytes of a group's entry in the directory.
const ENTRY: usize = 2;

/// Bits in which an entry has the width.
const WIDTH_BITS: u32 = 5;

/// The most that the high parts of `gaps` gaps are together, with the width that makes them shortest. With one bit
/// less they would be twice as much at least, and that is worth it as long as it adds no more than the bit takes from
/// every low part. So with one bit more they were `gaps` at most, and now they are no more than `gaps` beyond that.
const fn most_highs(gaps: usize) -> usize {
    2 * gaps
}

/// Words that the high parts of a group fill.
const HIGH_WORDS: usize = (GROUP + most_highs(GROUP)).div_ceil(64);

/// What is wrong with packed indices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// There should be as many bytes; at least as many, where they end too early.
    Length(usize),
    /// This entry of the directory is not that of a group, or not of the one that is there.
    Entry(u16),
    /// This index is beyond the last element.
    Index(u64),
    /// The bits after the last index are not zero.
    Padding(u64),
}

/// The bytes that `count` indices take at the least.
pub(crate) fn least_bytes(count: usize) -> usize {
    count.div_ceil(GROUP) * ENTRY + count.div_ceil(8)
}

/// Appends strictly ascending indices to `into`.
pub(crate) fn pack(indices: &[u32], into: &mut Vec<u8>) {
    let directory = into.len();
    into.resize(directory + indices.len().div_ceil(GROUP) * ENTRY, 0);
    let mut writer = Writer { into, bits: 0, filled: 0 };
    let mut gaps = [0; GROUP];
    let mut next = 0;
    for (number, group) in indices.chunks(GROUP).enumerate() {
        let gaps = &mut gaps[..group.len()];
        for (gap, &index) in gaps.iter_mut().zip(group) {
            // Only the last of all indices can be the largest number, after which nothing comes.
            (*gap, next) = (index - next, index.wrapping_add(1));
        }
        let width = best_width(gaps);
        let highs = writer.put_highs(gaps, width);
        gaps.iter().for_each(|gap| writer.put(u64::from(gap & ((1 << width) - 1)), width));
        let entry = width as u16 | (highs as u16) << WIDTH_BITS;
        writer.into[directory + number * ENTRY..][..ENTRY].copy_from_slice(&entry.to_le_bytes());
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
    let directory = count.div_ceil(GROUP) * ENTRY;
    let Some((entries, bits)) = bytes.split_at_checked(directory) else {
        return Err(Damage::Length(least_bytes(count)));
    };
    let sizes = (0..count).step_by(GROUP).map(|first| GROUP.min(count - first));
    let entries = entries.as_chunks().0.iter().map(|entry| u16::from_le_bytes(*entry));
    let groups = entries.zip(sizes).map(|(entry, size)| Group::new(entry, size));
    let reader = Reader { bytes: bits };
    let mut end = 0;
    for group in groups.clone() {
        end += group?.bits();
    }
    reader.expect_end(end).map_err(|damage| match damage {
        Damage::Length(bits) => Damage::Length(directory + bits),
        other => other,
    })?;
    let (mut at, mut next) = (0, 0);
    into.reserve(count);
    for group in groups {
        let group = group?;
        let mut ones = Ones::new(reader, at, group.size + group.highs);
        let (mut low_at, low_bits) = (at + group.size + group.highs, (1 << group.width) - 1);
        let mut before = 0;
        for i in 0..group.size {
            let place = ones.next().ok_or(Damage::Entry(group.entry()))?;
            // Of a place, so many are zeros; those of the gaps before were counted with them.
            let (zeros, low) = (place - i, reader.peek(low_at) & low_bits);
            low_at += group.width as usize;
            let index = next + (((zeros - before) as u64) << group.width | low);
            if index >= elements {
                return Err(Damage::Index(index));
            }
            into.push(index as u32);
            (next, before) = (index + 1, zeros);
        }
        if before != group.highs || ones.next().is_some() {
            return Err(Damage::Entry(group.entry()));
        }
        at += group.bits();
    }
    Ok(())
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
    best + (8 * ENTRY) as f64 / GROUP.min(count) as f64
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

/// What the directory says of a group.
#[derive(Clone, Copy)]
struct Group {
    size: usize,
    width: u32,
    highs: usize,
}

impl Group {
    fn new(entry: u16, size: usize) -> Result<Group, Damage> {
        let (width, highs) = (entry & ((1 << WIDTH_BITS) - 1), entry >> WIDTH_BITS);
        let group = Group { size, width: width.into(), highs: highs.into() };
        if group.highs <= most_highs(size) { Ok(group) } else { Err(Damage::Entry(entry)) }
    }

    fn entry(self) -> u16 {
        self.width as u16 | (self.highs as u16) << WIDTH_BITS
    }

    fn bits(self) -> usize {
        self.size + self.highs + self.size * self.width as usize
    }
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

    /// Appends the high parts of gaps; their sum.
    fn put_highs(&mut self, gaps: &[u32], width: u32) -> usize {
        let mut words = [0_u64; HIGH_WORDS];
        let mut end = 0;
        for gap in gaps {
            end += (gap >> width) as usize + 1;
            words[(end - 1) / 64] |= 1 << ((end - 1) % 64);
        }
        let halves = words.iter().flat_map(|word| [word & 0xffff_ffff, word >> 32]);
        for (number, half) in halves.take(end.div_ceil(32)).enumerate() {
            self.put(half, (end - number * 32).min(32) as u32);
        }
        end - gaps.len()
    }

    fn finish(self) {
        if self.filled > 0 {
            self.into.push(self.bits as u8);
        }
    }
}

/// Reads bits of bytes; after their end there are zeros.
#[derive(Clone, Copy)]
struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    /// 57 bits from one on, and perhaps some more.
    #[inline(always)]
    fn peek(self, at: usize) -> u64 {
        let rest = self.bytes.get(at / 8..).unwrap_or_default();
        let word = match rest.first_chunk() {
            Some(word) => u64::from_le_bytes(*word),
            None => {
                let mut word = [0; 8];
                word[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(word)
            }
        };
        word >> (at % 8)
    }

    /// Fails unless the bytes end with this bit, and zeros.
    fn expect_end(self, at: usize) -> Result<(), Damage> {
        let read = at.div_ceil(8);
        if read != self.bytes.len() {
            return Err(Damage::Length(read));
        }
        // All that can still be seen is the rest of the last byte.
        match self.peek(at) {
            0 => Ok(()),
            padding => Err(Damage::Padding(padding)),
        }
    }
}

/// The places of the ones among some bits.
struct Ones<'a> {
    reader: Reader<'a>,
    /// Where the bits begin, how many there are, and the place of the first in `word`.
    start: usize,
    count: usize,
    at: usize,
    word: u64,
}

impl<'a> Ones<'a> {
    const TAKEN: usize = 56;

    fn new(reader: Reader<'a>, start: usize, count: usize) -> Ones<'a> {
        let mut ones = Ones { reader, start, count, at: 0, word: 0 };
        ones.load();
        ones
    }

    fn load(&mut self) {
        let left = (self.count - self.at).min(Self::TAKEN);
        self.word = self.reader.peek(self.start + self.at) & ((1 << left) - 1);
    }
}

impl Iterator for Ones<'_> {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        while self.word == 0 {
            self.at += Self::TAKEN;
            if self.at >= self.count {
                self.at = self.count;
                return None;
            }
            self.load();
        }
        let place = self.at + self.word.trailing_zeros() as usize;
        self.word &= self.word - 1;
        Some(place)
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
            [(4, 100_000, 3.6), (100, 1_000_000, 8.35), (1000, 8_000_000, 11.7)]
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
        assert!(matches!(unpacked(&[], 3, 401), Err(Damage::Length(3))));
        // Width 0 and no zeros, then a one, and padding that should be zeros.
        assert_eq!(unpacked(&[0, 0, 0b0000_0011], 1, 9), Err(Damage::Padding(1)));
        assert_eq!(unpacked(&[0, 0, 0b0000_0001], 1, 9), Ok(vec![0]));
        // More zeros than the shortest group has.
        assert_eq!(unpacked(&[3 << 5, 0, 0b0000_1000], 1, 9), Err(Damage::Entry(3 << 5)));
        // Fewer than the entry says, before the one or in all; and more, so that there is no one.
        for bits in [0b01, 0b11, 0b00] {
            assert_eq!(unpacked(&[1 << 5, 0, bits], 1, 9), Err(Damage::Entry(1 << 5)));
        }
        assert_eq!(unpacked(&[1 << 5, 0, 0b10], 1, 9), Ok(vec![1]));
        // A high part of 2, with the largest width.
        let far = [31 | 2 << 5, 0, 0b0000_0100, 0, 0, 0, 0];
        assert_eq!(unpacked(&far, 1, 1 << 32), Err(Damage::Index(1 << 32)));
    }

    #[test]
    fn high_parts_are_few_with_the_best_width() {
        // One gap is so much longer than the others that a low width leaves most to its high part.
        for (dense, long) in
            [(127, 0), (127, 1 << 15), (127, 1 << 22), (126, u32::MAX - 127), (0, 1 << 31)]
        {
            let mut gaps = vec![0; dense];
            gaps.push(long);
            let highs: u64 = gaps.iter().map(|gap| u64::from(gap >> best_width(&gaps))).sum();
            assert!(highs <= most_highs(gaps.len()) as u64, "{highs} of {dense} and {long}");
        }
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
