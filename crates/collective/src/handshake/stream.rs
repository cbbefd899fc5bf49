//! A blocking socket whose reads and writes end at a deadline.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};
use socket2::Socket;

/// Reads and writes a socket until a deadline; past it, fails with [`io::ErrorKind::TimedOut`].
///
/// It polls before every call instead of setting the socket's own time limits, so it leaves the
/// socket as it found it and the deadline covers the sum of all calls.
pub struct TimedStream<'a> {
    socket: &'a Socket,
    deadline: Instant,
}

impl<'a> TimedStream<'a> {
    /// The socket, until `deadline`.
    pub fn new(socket: &'a Socket, deadline: Instant) -> TimedStream<'a> {
        TimedStream { socket, deadline }
    }

    fn ready(&self, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.socket, flags)];
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until `attempt`, which must not block, no longer says that it would.
    fn when<T>(
        &self,
        flags: PollFlags,
        mut attempt: impl FnMut() -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        loop {
            self.ready(flags)?;
            match attempt() {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                result => return result.map_err(io::Error::from),
            }
        }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.when(PollFlags::IN, || {
            rustix::net::recv(self.socket, &mut *buffer, RecvFlags::DONTWAIT).map(|(n, _)| n)
        })
    }
}

impl Write for TimedStream<'_> {
    /// A peer that is gone is an error, never a signal.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.when(PollFlags::OUT, || {
            rustix::net::send(self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The kernel's form of a duration.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    // Waits of centuries may be cut: every caller looks at the clock again.
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX / 2).min(1 << 40),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
