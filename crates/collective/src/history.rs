//! The last calls of a rank, written by whoever runs them, read by its monitor.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, IntoBytes};

use crate::call::{Call, WireCall};

/// Calls remembered. More: memory. Fewer: a rank that is far ahead of another no longer knows
/// what the other's call should have been.
const REMEMBERED: usize = 64;

const WORDS: usize = size_of::<WireCall>() / 8;

/// What stands in the first word of a call that is being replaced: no operation has this code.
const BLANK: u64 = u64::MAX;

/// Remembers calls by their numbers. Writing costs a few stores and never waits; a reader who
/// comes in between finds nothing.
pub struct History {
    calls: [[AtomicU64; WORDS]; REMEMBERED],
}

impl History {
    pub fn new() -> History {
        let blank = || std::array::from_fn(|_| AtomicU64::new(BLANK));
        History { calls: std::array::from_fn(|_| blank()) }
    }

    /// Remembers a call; only one thread at a time may.
    pub fn record(&self, call: &Call) {
        let slot = &self.calls[call.seq as usize % REMEMBERED];
        let wire = WireCall::from(*call);
        let mut words = [0u64; WORDS];
        words.as_mut_bytes().copy_from_slice(wire.as_bytes());
        slot[0].store(BLANK, Ordering::Relaxed);
        // Whoever sees one of the new words below also sees that the first one is blank.
        fence(Ordering::Release);
        for (word, value) in slot.iter().zip(words).skip(1) {
            word.store(value, Ordering::Relaxed);
        }
        slot[0].store(words[0], Ordering::Release);
    }

    /// The call with this number, if it was made and is not forgotten.
    pub fn call(&self, seq: u32) -> Option<Call> {
        let slot = &self.calls[seq as usize % REMEMBERED];
        let mut words = [slot[0].load(Ordering::Acquire); WORDS];
        for (word, value) in slot.iter().zip(&mut words).skip(1) {
            *value = word.load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        if slot[0].load(Ordering::Relaxed) != words[0] {
            return None;
        }
        let call = Call::try_from(WireCall::read_from_bytes(words.as_bytes()).ok()?).ok()?;
        (call.seq == seq).then_some(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Dtype, Op, Reduction};

    fn call(seq: u32) -> Call {
        Call {
            seq,
            op: Op::Broadcast { root: seq as usize % 7 },
            barrier: false,
            dtype: Dtype::F32,
            reduction: Reduction::Sum,
            shape: 0,
            count: u64::from(seq) * 3,
            algorithm: Algorithm::Tree,
            column: seq + 1,
        }
    }

    #[test]
    fn the_last_calls_are_remembered() {
        let history = History::new();
        assert_eq!(history.call(0), None);
        for seq in 0..1000 {
            history.record(&call(seq));
        }
        assert_eq!(history.call(999), Some(call(999)));
        assert_eq!(history.call(1000 - REMEMBERED as u32), Some(call(1000 - REMEMBERED as u32)));
        assert_eq!(history.call(1000 - REMEMBERED as u32 - 1), None);
        assert_eq!(history.call(1000), None);
    }

    #[test]
    fn a_reader_finds_whole_calls_or_none() {
        let history = History::new();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..200_000).for_each(|seq| history.record(&call(seq))));
            for seq in 0..200_000 {
                if let Some(found) = history.call(seq) {
                    assert_eq!(found, call(seq));
                }
            }
        });
    }
}
