//! What ranks of every engine are given, and what they do until one of them is killed.

use std::time::Instant;

use unisono_collective::{Dtype, Error, Reduction};
use unisono_cuda::{DeviceGroup, DeviceMemory, Stream};

use crate::processes::say;

/// Elements that are no NaN in any type: of every 16 bits, neither float format has all exponent bits set. Sums and
/// products of these stay finite.
pub fn patterns(rank: usize, dtype: Dtype, bytes: usize) -> Vec<u64> {
    let clear = match dtype {
        Dtype::I8 | Dtype::U8 | Dtype::I32 | Dtype::I64 => u64::MAX,
        _ => 0xbbff_bbff_bbff_bbff,
    };
    (0..bytes.div_ceil(8) as u64 + 1)
        .map(|i| {
            (i * 4 + rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) & clear
        })
        .collect()
}

/// Makes calls until a peer is killed, and says so, after so many that it is under way. Then shows that the device works.
pub fn call_until_lost(
    group: DeviceGroup,
    stream: &Stream,
    bytes: usize,
    calls_before: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let memory = DeviceMemory::new(stream.context(), bytes)?;
    let at = memory.pointer();
    let mut calls = 0;
    let error: Error = loop {
        if calls == calls_before {
            say("under way")?;
        }
        // SAFETY: the memory has as many bytes, and outlives what the stream does.
        let reduced = unsafe {
            group.all_reduce(at, at, bytes / 4, Dtype::F32, Reduction::Max, Some(stream))
        };
        match reduced {
            Ok(()) => calls += 1,
            Err(error) => break error,
        }
    };
    match &error {
        Error::PeerLost { peer, .. } => say(&format!("lost rank {peer} in call {calls}"))?,
        other => say(&format!("{other:?}"))?,
    }
    let begun = Instant::now();
    stream.synchronize()?;
    drop(group);
    let mut word = 0u32;
    // SAFETY: the memory has as many words, and the copy is waited for.
    unsafe {
        stream.fill_words(at, 0x1234_5678, bytes / 4)?;
        stream.copy_to_host((&raw mut word).cast(), at.offset(bytes - 4), 4)?;
    }
    stream.synchronize()?;
    if word != 0x1234_5678 {
        return say(&format!("the device wrote {word:#x}"));
    }
    let took = begun.elapsed().as_secs_f64() * 1e3;
    say(&format!("the device works; stream, group and memory took {took:.1} ms"))
}
