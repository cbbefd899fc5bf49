//! A rate for each single flow, as some clouds have it.
//!
//! A flow is what one TCP connection sends in one direction. Its packets leave the host one after the other, each as
//! long after the one before as its bytes take at the rate of a flow. A flow that paused saves up nothing. Flows know
//! nothing of each other: while the next packet of one waits for its turn, those of the others leave.
//!
//! Only TCP over IPv4 has flows here. Whatever else a host sends is not limited.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::link::Rate;

/// How long a packet may wait until the one before it has left. The relay drops one that would wait longer, as a cloud
/// drops what overflows the queue of a flow.
///
/// Larger, and a sender that finds out the rate learns later that it is too fast: the relay holds more bytes, and a
/// message behind a bulk transfer on its connection waits longer. Smaller, and a sender whose packets come
/// in bursts loses some though it is no faster than the rate on the whole.
const QUEUE: Duration = Duration::from_millis(200);

/// How many flows may be known before those that have paused are forgotten.
///
/// Larger, and flows that have ended take up memory for longer; smaller, and the thread looks through all of
/// them more often.
const FLOWS: usize = 1024;

/// The sender, the receiver and the ports of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Flow {
    /// As in the IPv4 header: source, then destination.
    addresses: [u8; 8],
    /// As in the TCP header: source, then destination.
    ports: [u8; 4],
}

impl Flow {
    /// The flow of an Ethernet frame; `None` if the frame is no TCP over IPv4, or too short to tell.
    pub(crate) fn of(frame: &[u8]) -> Option<Flow> {
        const IPV4: [u8; 2] = [0x08, 0x00];
        const TCP: u8 = 6;
        const FRAGMENT_OFFSET: u16 = 0x1fff;
        // Two hardware addresses, and the type of what follows.
        let (ethernet, packet) = frame.split_at_checked(14)?;
        let header = packet.first_chunk::<20>()?;
        // The header says its version and its length, in words of four bytes: options may follow.
        let (version, words) = (header[0] >> 4, usize::from(header[0] & 0xf));
        // Only the first fragment of a packet has the ports.
        let offset = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT_OFFSET;
        let has_ports = version == 4 && words >= 5 && header[9] == TCP && offset == 0;
        if !ethernet.ends_with(&IPV4) || !has_ports {
            return None;
        }
        let addresses = *header.last_chunk()?;
        let ports = *packet.get(words * 4..)?.first_chunk()?;
        Some(Flow { addresses, ports })
    }
}

/// When the packets of each flow leave.
#[derive(Debug)]
pub(crate) struct Pacer {
    rate: Rate,
    /// When the latest packet of a flow has left, or will have.
    left: HashMap<Flow, Instant>,
    /// Flows from which on those that are done are forgotten.
    most: usize,
}

impl Pacer {
    pub(crate) fn new(rate: Rate) -> Pacer {
        Pacer { rate, left: HashMap::new(), most: FLOWS }
    }

    /// When a packet that a host sends `now` leaves; `None` if it would wait too long and is lost. A lost packet takes
    /// no time of its flow.
    pub(crate) fn departure(&mut self, flow: Flow, bytes: usize, now: Instant) -> Option<Instant> {
        if self.left.len() >= self.most {
            // A flow whose packets have all left is as good as one that was never seen.
            self.left.retain(|_, left| *left > now);
            self.most = FLOWS.max(2 * self.left.len());
        }
        let left = self.left.entry(flow).or_insert(now);
        let turn = now.max(*left);
        if turn - now > QUEUE {
            return None;
        }
        // The time that the packet itself takes does not count as waiting: at a low rate no large packet
        // would ever pass.
        *left = turn + self.rate.time_of(bytes);
        Some(*left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame from 10.77.0.1 to 10.77.0.2 whose IPv4 header has so many words of options.
    fn frame(protocol: u8, options: usize, [source, destination]: [u16; 2]) -> Vec<u8> {
        let mut frame = vec![0xee; 12];
        frame.extend([0x08, 0x00]);
        frame.extend([0x45 + options as u8, 0, 0, 40, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
        frame.extend([10, 77, 0, 1, 10, 77, 0, 2]);
        frame.extend(vec![1; 4 * options]);
        frame.extend(source.to_be_bytes());
        frame.extend(destination.to_be_bytes());
        frame.extend([0; 16]);
        frame
    }

    fn flow(source: u16) -> Flow {
        Flow::of(&frame(6, 0, [source, 80])).unwrap()
    }

    #[test]
    fn a_flow_is_two_addresses_and_two_ports() {
        let flow = Flow { addresses: [10, 77, 0, 1, 10, 77, 0, 2], ports: [0x12, 0x34, 0, 80] };
        let same = |options| Flow::of(&frame(6, options, [0x1234, 80])) == Some(flow);
        assert!(same(0) && same(1) && same(10));

        let change = |byte: usize, to: u8| {
            let mut frame = frame(6, 0, [0x1234, 80]);
            frame[byte] = to;
            Flow::of(&frame)
        };
        let others = [change(29, 9), change(33, 9), change(35, 9), change(37, 9)];
        assert!(others.iter().all(|other| other.is_some_and(|other| other != flow)), "{others:?}");
        // Neither the hardware addresses nor the bytes of the stream matter.
        assert!(
            [change(0, 9), change(11, 9), change(38, 9)].iter().all(|same| *same == Some(flow))
        );
        // The first fragment has the ports, a later one has bytes of the stream in their place.
        assert_eq!(change(20, 0x20), Some(flow));
        assert_eq!(change(21, 1), None);
    }

    #[test]
    fn what_is_no_tcp_over_ipv4_has_no_flow() {
        assert_eq!(Flow::of(&frame(17, 0, [1, 2])), None, "UDP");
        let change = |byte: usize, to: u8| {
            let mut frame = frame(6, 0, [1, 2]);
            frame[byte] = to;
            Flow::of(&frame)
        };
        assert_eq!(change(12, 0x86), None, "not IPv4 by the Ethernet header");
        assert_eq!(change(14, 0x65), None, "not IPv4 by its own");
        assert_eq!(change(14, 0x44), None, "a header that is shorter than any");
        assert_eq!(change(14, 0x4f), None, "a header that is longer than the frame");
        for options in [0, 3] {
            let frame = frame(6, options, [1, 2]);
            let ports_end = 38 + 4 * options;
            for length in 0..=frame.len() {
                assert_eq!(Flow::of(&frame[..length]).is_some(), length >= ports_end, "{length}");
            }
        }
    }

    #[test]
    fn packets_of_a_flow_leave_at_the_rate_and_hold_up_no_other() {
        let start = Instant::now();
        let ms = |ms| start + Duration::from_millis(ms);
        // A byte each microsecond.
        let mut pacer = Pacer::new(Rate::mbit(8));
        assert_eq!(pacer.departure(flow(1), 1000, ms(0)), Some(ms(1)));
        assert_eq!(pacer.departure(flow(1), 2000, ms(0)), Some(ms(3)));
        assert_eq!(pacer.departure(flow(2), 1000, ms(0)), Some(ms(1)));
        assert_eq!(pacer.departure(flow(1), 1000, ms(2)), Some(ms(4)));
        // The pause before has earned nothing.
        assert_eq!(pacer.departure(flow(1), 1000, ms(50)), Some(ms(51)));
        assert_eq!(pacer.departure(flow(1), 1000, ms(50)), Some(ms(52)));
    }

    #[test]
    fn a_packet_that_would_wait_too_long_is_lost() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Rate::mbit(8));
        let mut departure = |flow, bytes, ms| {
            let left = pacer.departure(flow, bytes, start + Duration::from_millis(ms));
            left.map(|left| (left - start).as_millis())
        };
        assert_eq!(departure(flow(1), 200_000, 0), Some(200));
        assert_eq!(departure(flow(1), 50_000, 0), Some(250), "it waits no longer than it may");
        assert_eq!(departure(flow(1), 1_000, 0), None);
        assert_eq!(departure(flow(2), 1_000, 0), Some(1));
        assert_eq!(departure(flow(1), 1_000, 50), Some(251), "the lost one took no time");
    }

    #[test]
    fn flows_that_have_paused_are_forgotten() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Rate::mbit(8));
        let waits = pacer.departure(flow(0), 100_000, start);
        let later = start + Duration::from_millis(30);
        for source in 1..=20_000 {
            pacer.departure(flow(source), 1, start + Duration::from_micros(source.into()));
            assert!(pacer.left.len() <= FLOWS);
        }
        let next = pacer.departure(flow(0), 1_000, later);
        assert_eq!(next, waits.map(|waits| waits + Duration::from_millis(1)));
    }
}
