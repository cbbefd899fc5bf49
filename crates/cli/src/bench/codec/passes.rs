//! Passes over a gradient that do nothing else: what no codec can be faster than.
//!
//! A copy reads and writes at the same time, and a core does not get twice as far with either when it leaves the other
//! out. Encoding hardly writes and decoding hardly reads, so beside a copy each would look slower than memory lets it be.

use unisono_codec::stream::{TILE, ask_ahead, bypass, bypasses, fence};

/// Reads all elements once, as codecs do: one group of pages after the other, asked for ahead.
pub fn read(values: &[f32]) {
    const LANES: usize = 64;
    let mut all = [0; LANES];
    for (tile, of) in values.chunks(TILE).enumerate() {
        ask_ahead(values, tile * TILE..tile * TILE + of.len());
        for row in of.as_chunks::<LANES>().0 {
            for (all, value) in all.iter_mut().zip(row) {
                *all |= value.to_bits();
            }
        }
    }
    std::hint::black_box(all);
}

/// Writes all elements once, past the caches where codecs do so.
pub fn write(values: &mut [f32]) {
    let tile = std::hint::black_box([0.5; TILE]);
    let is_long = bypasses(values);
    for into in values.chunks_mut(TILE) {
        let tile = &tile[..into.len()];
        if is_long { bypass(tile, into) } else { into.copy_from_slice(tile) }
    }
    fence();
}
