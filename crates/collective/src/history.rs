//! The last calls of a rank, written by the thread that runs them, read by its monitor.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, IntoBytes};

use crate::call::{Call, WireCall};
use crate::schedule::Op;

/// Places in the order of calls that are remembered, of which most calls use every second. More:
/// memory. Fewer: a rank that is far ahead of another no longer knows what the other's call should
/// have been.
const REMEMBERED: usize = 128;

const WORDS: usize = size_of::<WireCall>() / 8;

/// What stands in the first word of a call that is being replaced: no operation has this code.
const BLANK: u64 = u64::MAX;

/// Remembers calls by their numbers. Writing costs a few stores and never waits; a reader that
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
        let words: [u64; WORDS] = zerocopy::transmute!(WireCall::from(*call));
        slot[0].store(BLANK, Ordering::Relaxed);
        // A reader that sees one of the new words below also sees that the first one is blank.
        fence(Ordering::Release);
        for (word, value) in slot[1..].iter().zip(&words[1..]) {
            word.store(*value, Ordering::Relaxed);
        }
        slot[0].store(words[0], Ordering::Release);
    }

    /// What was called where a peer made this call: at the same place, or, since only some calls
    /// begin with an exchange of lengths, at the other place of the same number. `None` if this rank
    /// has not come there, or has forgotten.
    pub fn counterpart(&self, theirs: &Call) -> Option<Call> {
        let other = || self.call(theirs.seq ^ 1);
        match self.call(theirs.seq) {
            Some(call) => Some(call),
            // This rank made the call without an exchange of lengths.
            None if theirs.is_exchange_of_lengths() => other(),
            // This rank exchanges lengths; after that, it makes the same call, or it never will.
            None => other().filter(|_| theirs.op != Op::AllToAll),
        }
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
    use crate::dtype::Unit;
    use crate::{Algorithm, Dtype, Reduction};

    fn call(seq: u32) -> Call {
        Call {
            seq,
            op: Op::Broadcast { root: seq as usize % 7 },
            barrier: false,
            dtype: Dtype::F32,
            unit: Unit::OWN,
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
    fn a_call_meets_what_stands_at_its_number() {
        let history = History::new();
        let exchange = Call { op: Op::AllGather, ..call(6) };
        let all_to_all = Call { op: Op::AllToAll, ..call(7) };
        history.record(&exchange);
        assert_eq!(history.counterpart(&exchange), Some(exchange));
        assert_eq!(history.counterpart(&all_to_all), None, "this rank will come there");
        assert_eq!(history.counterpart(&call(7)), Some(exchange), "this rank never will");
        history.record(&all_to_all);
        assert_eq!(history.counterpart(&call(7)), Some(all_to_all));
        history.record(&call(9));
        assert_eq!(history.counterpart(&call(8)), Some(call(9)), "no rank exchanges lengths here");
        assert_eq!(history.counterpart(&call(11)), None);
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
