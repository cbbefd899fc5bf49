//! A live rank whose peer has gone mad.
//!
//! The first byte says how much of the input is frames of the side channel; the rest changes what
//! an honest peer would answer on the data link: a place, and what to do there.
#![no_main]

#[path = "../../crates/collective/tests/common/tap.rs"]
mod tap;

use libfuzzer_sys::fuzz_target;
use unisono_collective::Error;
use unisono_collective::internals::frame::Frame;

fuzz_target!(|input: &[u8]| {
    let [frames, rest @ ..] = input else { return };
    let cut = (usize::from(*frames) * 4).min(rest.len());
    let (script, changes) = rest.split_at(cut);
    let side = side_channel(script);
    let reply = |mut honest: Vec<u8>| {
        for change in changes.chunks_exact(3) {
            let at =
                (usize::from(change[0]) | usize::from(change[2] & 3) << 8) % honest.len().max(1);
            match change[2] >> 2 & 7 {
                0..=3 => honest[at] ^= change[1],
                4 => honest.truncate(at.max(1)),
                5 if honest.len() < 1 << 16 => honest.extend_from_within(at..),
                5 | 6 => honest.insert(at, change[1]),
                _ => drop(honest.remove(at)),
            }
            if honest.is_empty() {
                break;
            }
        }
        honest
    };
    let outcomes = tap::Tapped::new().attack(&side, reply, tap::Ending::HangUp);
    let errors = [outcomes.all_reduce.err(), outcomes.receive.err(), outcomes.send.err()];
    for error in errors.into_iter().flatten() {
        assert!(!matches!(error, Error::InvalidCall(_)), "the calls were valid: {error}");
    }
});

/// Frames that are right in form, with small numbers so that they hit what is under way, and raw
/// bytes between them.
fn side_channel(script: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for step in script.chunks_exact(4) {
        let [kind, tag, id, length] = *step else { continue };
        let (tag, id) = (u32::from(tag % 4), u32::from(id % 4));
        let small = usize::from(length);
        let frame = match kind % 9 {
            0 => Frame::Heartbeat,
            1 => Frame::Goodbye { seq: tag },
            2 => Frame::Abort { length: small },
            3 => Frame::Announce { tag, id, length: small as u64 },
            4 => Frame::Announce { tag, id, length: tap::MESSAGE as u64 },
            5 => Frame::Clear { id },
            6 => Frame::Data { id, length: small },
            7 => Frame::Stuck,
            _ => {
                bytes.extend(std::iter::repeat_n(tag as u8, small));
                continue;
            }
        };
        bytes.extend(frame.encode());
    }
    bytes
}
