//! A live rank whose peer has gone mad.
//!
//! The first byte says how much of the input is control frames and frames of messages; the rest changes what
//! an honest peer would answer on the data link: a place, and what to do there.
#![no_main]

#[path = "../../crates/collective/tests/common/tap.rs"]
mod tap;

use libfuzzer_sys::fuzz_target;
use unisono_collective::Error;
use unisono_collective::internals::frame::Frame;
use unisono_collective::internals::message_frame::Frame as MessageFrame;

fuzz_target!(|input: &[u8]| {
    let [frames, rest @ ..] = input else { return };
    let cut = (usize::from(*frames) * 4).min(rest.len());
    let (script, changes) = rest.split_at(cut);
    let lines = lines(script);
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
    let outcomes = tap::Tapped::new().attack(&lines, reply, tap::Ending::HangUp);
    let errors = [outcomes.all_reduce.err(), outcomes.receive.err(), outcomes.send.err()];
    for error in errors.into_iter().flatten() {
        assert!(!matches!(error, Error::InvalidCall(_)), "the calls were valid: {error}");
    }
});

/// Frames that are right in form, with small numbers so that they hit what is under way, and raw
/// bytes between them.
fn lines(script: &[u8]) -> tap::Lines {
    let mut lines = tap::Lines::default();
    for step in script.chunks_exact(4) {
        let [kind, tag, id, length] = *step else { continue };
        let (tag, id) = (u32::from(tag % 4), u32::from(id % 4));
        let small = usize::from(length);
        let line = match kind % 3 {
            0 => &mut lines.control,
            1 => &mut lines.incoming,
            _ => &mut lines.outgoing,
        };
        let announce = |length| MessageFrame::Announce { tag, id, length };
        match kind / 3 % 7 {
            0 => line.extend(Frame::Heartbeat.encode()),
            1 => line.extend(Frame::News { length: small }.encode()),
            2 => line.extend(announce(small as u64).encode()),
            3 => line.extend(announce(tap::MESSAGE as u64).encode()),
            4 => line.extend(MessageFrame::Clear { id }.encode()),
            5 => line.extend(MessageFrame::Data { id, length: small }.encode()),
            _ => line.extend(std::iter::repeat_n(tag as u8, small)),
        }
    }
    lines
}
