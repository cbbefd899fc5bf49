//! How codecs pass over memory that no cache holds: what makes the difference once a gradient is larger than the caches.
//!
//! **Reading.** A core that reads one line after the other waits for memory most of the time: hardware fetches ahead, but
//! never into the next page, and learns every page anew. So while one group of pages is worked on, the next is asked
//! for, [line by line from all its pages by turns](ask_ahead), which keeps several of them under way at once.
//!
//! **Writing.** A line that is written is first read, for nothing, unless the stores go past the caches. Large results
//! [do so](bypass); their beginning would not be in any cache at their end anyway.

use std::ops::Range;

use crate::BadEncoding;

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Numbers in a line.
const IN_LINE: usize = LINE / size_of::<f32>();

/// Bytes of a page.
const PAGE: usize = 4096;

/// Pages that are asked for by turns. Fewer: less is under way at once. More: what was asked for first is no longer in
/// the first-level cache when its turn comes.
const PAGES: usize = 4;

/// Bytes of the shortest memory that is asked for ahead. What is shorter is probably in a cache, where that only
/// costs instructions.
const FAR: usize = 1 << 20;

/// Bytes of the smallest result that bypasses the caches. A smaller limit is slower where the
/// result would have stayed in the last-level cache until it is sent; a larger one wastes a third
/// of the bandwidth on results that would not.
pub const BYPASS: usize = 16 << 20;

/// Elements that are worked on at once, at most: a multiple of every codec's block. More would not stay in the first-level
/// cache with all that belongs to them.
pub const TILE: usize = 2048;

/// Asks for what will be worked on when this is done, while the elements `now` of `all` are.
#[inline(always)]
pub fn ask_ahead<T>(all: &[T], now: Range<usize>) {
    let length = size_of_val(all);
    if length < FAR {
        return;
    }
    // For every so many lines that are worked on, one of each page of the next group.
    const LINES: usize = PAGE / LINE;
    let turn = |element: usize| element * size_of::<T>() / (PAGES * LINE);
    for turn in turn(now.start)..turn(now.end) {
        let at = (turn / LINES + 1) * PAGES * PAGE + turn % LINES * LINE;
        if at < length {
            let line = all.as_ptr().cast::<u8>().wrapping_add(at);
            (0..PAGES).for_each(|page| ask_for(line.wrapping_add(page * PAGE)));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ask_for(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE is part of x86-64, and any address may be asked for.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn ask_for(_: *const u8) {}

/// Any bits are an element, and there are no others between them.
///
/// # Safety
/// So it is.
pub unsafe trait Plain: Copy + Default {}
// SAFETY: integers and floats have no padding.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// Whether a result as long as this one goes past the caches.
#[inline(always)]
pub fn bypasses<T: Plain>(into: &[T]) -> bool {
    size_of_val(into) >= BYPASS
}

/// Copies to memory past the caches, but for the ends where a line is not whole: to write a part of one past the caches
/// takes as long as several whole ones. [`fence`] must follow the last.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn bypass<T: Plain>(from: &[T], into: &mut [T]) {
    const { assert!(LINE.is_multiple_of(size_of::<T>())) };
    assert_eq!(from.len(), into.len(), "an element for every element");
    let head = into.as_ptr().align_offset(LINE).min(into.len());
    let whole = (into.len() - head) * size_of::<T>() / LINE * LINE / size_of::<T>();
    let ((first, from), (into_first, into)) = (from.split_at(head), into.split_at_mut(head));
    let ((lines, last), (into_lines, into_last)) = (from.split_at(whole), into.split_at_mut(whole));
    into_first.copy_from_slice(first);
    bypass_many(lines, into_lines);
    into_last.copy_from_slice(last);
}

/// As [`bypass`], of many whole lines: each at once, if the CPU can do that.
#[inline(always)]
fn bypass_many<T: Plain>(from: &[T], into: &mut [T]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: this CPU has it.
        return unsafe { bypass_whole(from, into) };
    }
    bypass_lines(from, into);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn bypass_whole<T: Plain>(from: &[T], into: &mut [T]) {
    use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_stream_si512};
    let length = size_of_val(from);
    assert!(length.is_multiple_of(LINE) && length == size_of_val(into));
    let (from, into) = (from.as_ptr().cast::<__m512i>(), into.as_mut_ptr().cast::<__m512i>());
    assert!(length == 0 || into.is_aligned(), "a line begins here");
    for i in 0..length / LINE {
        // SAFETY: both are plain bytes of as many vectors, and the destination is aligned.
        unsafe { _mm512_stream_si512(into.add(i), _mm512_loadu_si512(from.add(i))) };
    }
}

/// As [`bypass`], of whole lines.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn bypass_lines<T: Plain>(from: &[T], into: &mut [T]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let length = size_of_val(from);
    assert!(length.is_multiple_of(size_of::<__m128i>()) && length == size_of_val(into));
    let (from, into) = (from.as_ptr().cast::<__m128i>(), into.as_mut_ptr().cast::<__m128i>());
    assert!(length == 0 || into.is_aligned(), "a line begins here");
    for i in 0..length / size_of::<__m128i>() {
        // SAFETY: both are plain bytes of as many vectors, and the destination is aligned. SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(into.add(i), _mm_loadu_si128(from.add(i))) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn bypass_lines<T: Plain>(from: &[T], into: &mut [T]) {
    into.copy_from_slice(from);
}

/// Orders what was written past the caches before everything written later, as other threads expect
/// of ordinary stores.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn fence() {}

/// A copy in the way of [`sweep`], for comparison: what moves as many bytes cannot be much faster.
///
/// # Panics
/// If the lengths differ.
pub fn copy(from: &[f32], into: &mut [f32]) {
    sweep(from, into, |from, into| into.copy_from_slice(from));
}

/// Has `cast` make all of `into` from the elements of `from`, in parts of equal lengths.
///
/// Four pages are worked on by turns, a strip of each, so that all of them are under way at once. Stores that straddle
/// cache lines are slow, so the first part ends at the beginning of a line.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn sweep<A, B: Plain>(from: &[A], into: &mut [B], cast: impl Fn(&[A], &mut [B])) {
    /// Elements of one turn: some lines. With more, the pages are less under way at once; with fewer, what is
    /// written past the caches is in shorter pieces.
    const STRIP: usize = 64;
    const STRIPS: usize = PAGE / size_of::<f32>() / STRIP;
    assert_eq!(from.len(), into.len(), "an element for every element");
    let head = into.as_ptr().align_offset(LINE).min(into.len());
    let (first, from) = from.split_at(head);
    let (into_first, into) = into.split_at_mut(head);
    cast(first, into_first);
    let (is_long, is_far) = (bypasses(into), size_of_val(from) >= FAR);
    let mut buffer = [B::default(); STRIP];
    let (strips, rest) = from.as_chunks::<STRIP>();
    let (into_strips, into_rest) = into.as_chunks_mut::<STRIP>();
    let (groups, strips) = strips.as_chunks::<{ PAGES * STRIPS }>();
    let (into_groups, into_strips) = into_strips.as_chunks_mut::<{ PAGES * STRIPS }>();
    for (group, into) in groups.iter().zip(into_groups) {
        for turn in 0..PAGES * STRIPS {
            let place = turn % PAGES * STRIPS + turn / PAGES;
            let strip = &group[place];
            if is_far {
                // What is at the same place of the next group.
                let next = strip.as_ptr().wrapping_add(PAGES * STRIPS * STRIP).cast::<u8>();
                for line in 0..size_of_val(strip) / LINE {
                    ask_for(next.wrapping_add(line * LINE));
                }
            }
            if is_long {
                cast(strip, &mut buffer);
                bypass_lines(&buffer, &mut into[place]);
            } else {
                cast(strip, &mut into[place]);
            }
        }
    }
    if is_long {
        fence();
    }
    for (strip, into) in strips.iter().zip(into_strips) {
        cast(strip, into);
    }
    cast(rest, into_rest);
}

/// What decodes tile by tile. Not a closure: those are compiled once for all instruction sets, unless they happen to be
/// inlined.
pub trait DecodeTile {
    /// Elements of a tile: whole blocks and whole lines, at most [`TILE`]. The fewer are written past the caches at a
    /// time, the less that is in the way of reading.
    const ELEMENTS: usize;

    /// Bytes of the encoding of so many elements.
    fn bytes(&self, elements: usize) -> usize;

    /// Decodes a tile, or what is left after the last. To be `#[inline(always)]`. The bytes are as many as the elements
    /// take.
    fn decode(&mut self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding>;
}

/// Decodes all of `bytes`, which are as many as the elements of `into` take.
#[inline(always)]
pub fn decode_tiles<D: DecodeTile>(
    mut codec: D,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    const { assert!(D::ELEMENTS <= TILE && D::ELEMENTS.is_multiple_of(IN_LINE)) };
    // Not a tile at a time, if it is short: that takes time to begin with.
    if size_of_val(into) < FAR {
        return codec.decode(bytes, into);
    }
    let is_long = bypasses(into);
    // Lines begin where they begin in memory, and not where tiles do: what is not a whole line yet is held back. The
    // first tile is written plainly.
    let first = D::ELEMENTS;
    let held = into[first..].as_ptr().addr() % LINE / size_of::<f32>();
    let mut buffer = [0.0; TILE + IN_LINE];
    for start in (0..into.len()).step_by(D::ELEMENTS) {
        let end = (start + D::ELEMENTS).min(into.len());
        let encoded = codec.bytes(start)..codec.bytes(end);
        ask_ahead(bytes, encoded.clone());
        let bytes = &bytes[encoded];
        if !is_long || start == 0 {
            codec.decode(bytes, &mut into[start..end])?;
            if is_long {
                buffer[..held].copy_from_slice(&into[first - held..first]);
            }
        } else if end - start == D::ELEMENTS {
            codec.decode(bytes, &mut buffer[held..held + D::ELEMENTS])?;
            bypass_many(&buffer[..D::ELEMENTS], &mut into[start - held..end - held]);
            buffer.copy_within(D::ELEMENTS..D::ELEMENTS + IN_LINE, 0);
        } else {
            codec.decode(bytes, &mut into[start..end])?;
        }
    }
    if is_long {
        let last = into.len() / D::ELEMENTS * D::ELEMENTS;
        into[last - held..last].copy_from_slice(&buffer[..held]);
        fence();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_past_the_caches_are_copies() {
        let from: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for start in 0..20 {
            for length in [0, 1, 15, 16, 17, 64, 500] {
                let mut into = vec![0; 600];
                bypass(&from[start..start + length], &mut into[2 * start..2 * start + length]);
                fence();
                assert_eq!(into[2 * start..2 * start + length], from[start..start + length]);
                let outside = into[..2 * start].iter().chain(&into[2 * start + length..]);
                assert!(outside.copied().all(|byte| byte == 0), "{start} {length}");
            }
        }
    }
}
