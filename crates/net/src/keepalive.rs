//! Notices that a TCP connection no longer carries anything.
//!
//! A machine that loses its power says no goodbye, and a firewall or a translator of addresses that has
//! forgotten a flow drops its packets in silence; TCP itself retransmits for a quarter of an hour.
//! Keepalive probes find out about it while the connection is idle; they also keep the flow in memory on
//! the way. While data is on its way there are no probes: then the owner of a [`Flow`] looks whether any
//! of it was acknowledged. `TCP_USER_TIMEOUT` would do that, but it also ends a connection whose receiver
//! answers and has no room, because its process computes.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use socket2::{Domain, Socket, TcpKeepalive};

use crate::timed::timespec;

/// How long a connection is idle before it is probed, at most. Longer: something on the way may have
/// forgotten the flow. Shorter: more packets.
const IDLE: Duration = Duration::from_secs(15);

/// After how long a connection that carries nothing breaks, unless its owner says otherwise. Longer: a
/// machine that lost its power is noticed later. Shorter: a network that recovers from a cut by itself is
/// given up.
pub const SILENCE: Duration = Duration::from_secs(60);

/// Probes that must go unanswered.
const PROBES: u32 = 5;

/// Lets the kernel probe a TCP connection while it is idle, so that it breaks about `timeout` after
/// it stops carrying packets. The kernel counts whole seconds. Sockets of one host need no probes.
pub fn keep_alive(socket: &Socket, timeout: Duration) -> io::Result<()> {
    if !is_tcp(socket) {
        return Ok(());
    }
    let second = Duration::from_secs(1);
    let longest = Duration::from_secs(i16::MAX as u64);
    let idle = (timeout / 2).clamp(second, IDLE);
    let interval = (timeout.saturating_sub(idle) / PROBES).clamp(second, longest);
    let settings = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(PROBES);
    socket.set_tcp_keepalive(&settings)
}

/// A TCP connection that carries data. It stays open only as long as someone else has it.
pub struct Flow {
    socket: Weak<Socket>,
    /// Since when nothing was acknowledged that was sent more than once.
    since: Option<Instant>,
}

impl Flow {
    /// The connection; `None` if it is no TCP connection.
    pub fn new(socket: &Arc<Socket>) -> Option<Flow> {
        is_tcp(socket).then(|| Flow { socket: Arc::downgrade(socket), since: None })
    }

    /// Whether someone still has the connection.
    pub fn is_open(&self) -> bool {
        self.socket.strong_count() > 0
    }

    /// For how long the peer's host has acknowledged nothing although it should have; to be asked now
    /// and then.
    pub fn silence(&mut self, now: Instant) -> Option<Duration> {
        let info = tcp_info(&*self.socket.upgrade()?)?;
        if info.tcpi_unacked == 0 || info.tcpi_retransmits == 0 {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(now);
        let silence = now.saturating_duration_since(since);
        if Duration::from_millis(info.tcpi_last_ack_recv.into()) < silence {
            self.since = Some(now);
            return None;
        }
        Some(silence)
    }
}

/// Whether the other side of a connection has ended it, or its process, whatever it said before.
pub fn is_over(socket: &Socket) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
}

/// Whether a socket is one of TCP.
pub fn is_tcp(socket: &Socket) -> bool {
    matches!(socket.domain(), Ok(Domain::IPV4 | Domain::IPV6))
}

fn tcp_info(socket: &Socket) -> Option<libc::tcp_info> {
    // SAFETY: the structure is plain numbers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the structure.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &mut length,
        )
    };
    (outcome == 0).then_some(info)
}
