//! Finds out, when a group forms, how many streams a link between hosts needs.
//!
//! Some networks, those of large clouds above all, give a single TCP connection a fraction of a host's rate, and several
//! together all of it. So pairs of hosts exchange the same bytes over one stream, and then over several, one rank of each
//! host and one thread of it: what more threads gain is known without that (`Costs::streams`). All pairs do so at
//! once, so that nobody takes for its own what others leave idle. The ranks average what they found, so that all of
//! them choose alike, and close what they have opened in vain.

use super::HostEngine;
use super::tune::exchange_with;
use crate::error::Error;

/// Bytes of an exchange. Larger: groups on slow networks form later. Smaller: the latency hides what streams carry.
pub const BYTES: usize = 512 << 10;

/// Seconds that one stream may take for these bytes at most, or nothing is tried: 350 Mbit/s. Larger: groups on slow
/// networks form later, and there one stream has always carried all.
pub const SLOWEST: f64 = 12e-3;

/// Numbers of streams that are tried, ascending: one for all, or lanes, half of which go each way. More: what large calls send
/// at a time, 256 KiB to each of up to eight ranks, is not cut into more than four.
pub const TRIED: [usize; 3] = [1, 4, 8];

/// How much quicker more streams have to be. Larger: links carry less than they could. Smaller: noise chooses, and each
/// stream has a price, in sockets, memory and system calls.
const GAIN: f64 = 1.25;

/// Exchanges over each number of streams: the first lets TCP find out the rate, the quickest counts.
const ROUNDS: usize = 3;

/// Seconds that this rank and a partner on another host take for an exchange over each number of streams. They name each
/// other.
pub fn try_streams(engine: &mut HostEngine, partner: usize) -> Result<[f64; TRIED.len()], Error> {
    let mut seconds = [0.0; TRIED.len()];
    let most = TRIED[TRIED.len() - 1];
    engine.helpers.engage(0);
    // All are opened at once, by an empty message; fewer are the first of them.
    engine.links.set_lanes(most);
    engine.links.begin(most * BYTES);
    exchange_with(engine, &[partner], 0, 1, 1)?;
    // One stream comes first: networks that let a burst pass must not make more of them look quicker.
    for (number, seconds) in TRIED.into_iter().zip(&mut seconds) {
        engine.links.set_lanes(number);
        engine.links.begin(most * BYTES);
        *seconds = exchange_with(engine, &[partner], BYTES, 1, ROUNDS)?;
    }
    engine.links.begin(0);
    Ok(seconds)
}

/// Which of the numbers of streams is the smallest that larger ones are not much quicker than.
pub fn needed(seconds: &[f64; TRIED.len()]) -> usize {
    let mut best = 0;
    for more in 1..TRIED.len() {
        if seconds[best] > GAIN * seconds[more] {
            best = more;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_needed_where_they_carry_more() {
        let streams = |seconds| TRIED[needed(&seconds)];
        assert_eq!(streams([1.0, 1.0, 1.0]), 1);
        assert_eq!(streams([1.0, 0.9, 0.82]), 1, "not worth their price");
        assert_eq!(streams([1.0, 0.5, 0.45]), 4, "half of the rate for each");
        assert_eq!(streams([1.0, 0.5, 0.25]), 8);
        assert_eq!(streams([1.0, 1.1, 0.7]), 8, "whatever was in the way of four");
        assert_eq!(streams([f64::INFINITY; 3]), 1, "nothing is known");
    }

    #[test]
    fn fewer_come_first() {
        assert!(TRIED.is_sorted() && TRIED[0] == 1);
    }
}
