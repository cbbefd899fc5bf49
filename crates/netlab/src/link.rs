//! What a link can carry, and how the kernel is told.
//!
//! A token bucket (`tbf`) at each end of a link shapes what leaves through it: at the host what
//! the host sends, at the switch what the host receives. It earns tokens at the rate of the link,
//! up to its burst, and a packet leaves once the bucket holds as many tokens as the packet has
//! bytes, Ethernet header included. A full frame of 1514 bytes carries 1448 bytes of a TCP stream,
//! so a stream gets at most 95.6 % of the rate, as it would on a wire.

use std::time::Duration;

use crate::relay::Path;

/// How late the kernel may serve a waiting queue before the link loses part of its rate.
///
/// Larger, and a link that was idle lets that much more pass at once, so that short messages are
/// faster than the rate allows. Smaller, and a timer that fires late on a busy machine lets the
/// bucket overflow, so that a single stream no longer fills the link: at 1 Gbit/s a burst of
/// 0.13 ms costs a fifth of it.
const BURST: Duration = Duration::from_millis(1);

/// The least burst, in bytes: about ten frames. With less, the timer runs for every frame.
const MIN_BURST: u64 = 16 << 10;

/// How long a packet may wait at the switch before the queue is full and drops it.
///
/// Larger, and a packet behind a bulk transfer waits longer; smaller, and hosts that all send to
/// one lose packets that a switch would have kept.
const SWITCH_QUEUE: Duration = Duration::from_millis(10);

/// The least queue at the switch, in bytes: what a few hosts send before they notice each other.
const MIN_SWITCH_QUEUE: u64 = 256 << 10;

/// The queue of a host, in bytes. A host does not drop what it sends, it holds the sender back:
/// TCP does so by itself long before this many bytes wait, at most 4 MiB for one connection.
/// Smaller, and TCP drops its own packets while it finds out the rate.
const HOST_QUEUE: u64 = 16 << 20;

/// The most that TCP hands to a device as one packet for the device to split.
const MAX_PACKET: u64 = 64 << 10;

/// A number of bits each second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate {
    bits_per_second: u64,
}

impl Rate {
    /// `n` bits each second.
    ///
    /// # Panics
    ///
    /// If `n` is zero, here and below: a link without a rate is a cut link.
    pub const fn bits_per_second(n: u64) -> Rate {
        assert!(n > 0, "a rate is positive");
        Rate { bits_per_second: n }
    }

    /// `n` million bits each second.
    pub const fn mbit(n: u64) -> Rate {
        Rate::bits_per_second(n * 1_000_000)
    }

    /// `n` thousand million bits each second.
    pub const fn gbit(n: u64) -> Rate {
        Rate::mbit(n * 1_000)
    }

    /// The rate in bits each second.
    pub const fn as_bits_per_second(self) -> u64 {
        self.bits_per_second
    }

    /// The bytes that pass in `time`.
    fn bytes_in(self, time: Duration) -> u64 {
        let bytes =
            u128::from(self.bits_per_second).saturating_mul(time.as_nanos()) / 8_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// The time that `bytes` bytes take, rounded up to nanoseconds.
    pub(crate) fn time_of(self, bytes: usize) -> Duration {
        let bits = (bytes as u128).saturating_mul(8);
        let nanoseconds = bits.saturating_mul(1_000_000_000).div_ceil(self.bits_per_second.into());
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// What connects a host to the switch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// The rate in each direction; both directions carry it at the same time.
    pub rate: Rate,
    /// How long a packet travels from its host to any other, besides waiting for the rate.
    /// A round trip takes twice as long. `None` adds nothing.
    pub delay: Option<Duration>,
    /// The part of the packets that is lost on the way from the host, from 0 to 1. TCP hands over up to 64 KiB as one
    /// packet, which is lost as a whole.
    pub loss: f64,
    /// The time for which an idle link saves up its rate, see [`Link::with_burst`].
    pub burst: Duration,
    /// The rate of each single TCP connection in each direction, see [`Link::with_flow_rate`].
    /// `None` leaves a connection all that the others do not use.
    pub flow_rate: Option<Rate>,
}

impl Link {
    /// A link of `rate` without delay.
    pub const fn new(rate: Rate) -> Link {
        Link { rate, delay: None, loss: 0.0, burst: BURST, flow_rate: None }
    }

    /// The same link with `delay`.
    pub const fn with_delay(self, delay: Duration) -> Link {
        Link { delay: Some(delay), ..self }
    }

    /// The same link, which loses this part of the packets.
    pub const fn with_loss(self, loss: f64) -> Link {
        Link { loss, ..self }
    }

    /// The same link with another burst: after a pause, what would have passed in this time
    /// passes at once. The default, 1 ms, is the least with which one TCP stream fills a link.
    pub const fn with_burst(self, burst: Duration) -> Link {
        Link { burst, ..self }
    }

    /// The same link, over which no single TCP connection sends faster than `rate`, as in some
    /// clouds: several connections at once get that much each, up to the rate of the link. What a
    /// connection sends faster waits in a queue of 200 ms of its own, and is lost when that is full.
    ///
    /// The limit counts the bytes of a packet as TCP hands it over, up to 64 KiB with one header.
    /// It holds for TCP over IPv4 alone; datagrams and IPv6 pass as if there were none.
    pub const fn with_flow_rate(self, rate: Rate) -> Link {
        Link { flow_rate: Some(rate), ..self }
    }

    /// What packets meet on their way from the host, besides the rate of the link, if there is
    /// anything.
    pub(crate) fn path(&self) -> Option<Path> {
        let Link { loss, flow_rate, .. } = *self;
        let delay = self.delay.unwrap_or_default();
        let is_plain = delay.is_zero() && loss <= 0.0 && flow_rate.is_none();
        (!is_plain).then_some(Path { delay, loss, flow_rate })
    }

    /// The command lines that shape what leaves the host through `device`.
    pub(crate) fn shape_host(&self, namespace: &str, device: &str) -> [String; 2] {
        let bucket = self.bucket(HOST_QUEUE);
        // A packet larger than the bucket would be split before it is queued. Its parts cost an
        // acknowledgement each, which takes 2 % of the opposite direction. The eighth is for
        // headers: the bucket counts them for every frame, the device for none.
        let packet = (self.burst_bytes() / 8 * 7).min(MAX_PACKET);
        [
            format!("tc -n {namespace} qdisc add dev {device} root {bucket}"),
            format!("ip -n {namespace} link set {device} gso_max_size {packet}"),
        ]
    }

    /// The command line that shapes what leaves the switch through `device`.
    pub(crate) fn shape_switch(&self, namespace: &str, device: &str) -> String {
        let queue = self.rate.bytes_in(SWITCH_QUEUE).max(MIN_SWITCH_QUEUE);
        format!("tc -n {namespace} qdisc add dev {device} root {}", self.bucket(queue))
    }

    fn bucket(&self, queue: u64) -> String {
        let rate = self.rate.as_bits_per_second();
        format!("tbf rate {rate}bit burst {} limit {queue}", self.burst_bytes())
    }

    fn burst_bytes(&self) -> u64 {
        self.rate.bytes_in(self.burst).max(MIN_BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_and_queue_follow_the_rate_above_their_floors() {
        let shape = |rate| Link::new(rate).shape_switch("s", "p0");
        let bucket = "tbf rate 1000000000bit burst 125000 limit 1250000";
        assert_eq!(shape(Rate::gbit(1)), format!("tc -n s qdisc add dev p0 root {bucket}"));
        let bucket = "tbf rate 10000000bit burst 16384 limit 262144";
        assert_eq!(shape(Rate::mbit(10)), format!("tc -n s qdisc add dev p0 root {bucket}"));
    }

    #[test]
    fn a_rate_gives_bytes_their_time() {
        assert_eq!(Rate::mbit(8).time_of(1), Duration::from_micros(1));
        assert_eq!(Rate::gbit(3).time_of(1), Duration::from_nanos(3));
        let forever = Duration::from_nanos(u64::MAX);
        assert_eq!(Rate::bits_per_second(1).time_of(usize::MAX), forever);
    }

    #[test]
    fn a_packet_fits_the_bucket() {
        let packet = |rate| Link::new(rate).shape_host("h", "eth0")[1].clone();
        assert_eq!(packet(Rate::gbit(1)), "ip -n h link set eth0 gso_max_size 65536");
        assert_eq!(packet(Rate::mbit(10)), "ip -n h link set eth0 gso_max_size 14336");
    }
}
