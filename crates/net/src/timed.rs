//! A connection whose reads and writes end at a deadline.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::connection::Connection;

/// Reads and writes a connection until a deadline; past it, fails with [`io::ErrorKind::TimedOut`].
///
/// It polls before every call instead of setting the socket's own time limits, so it leaves the
/// socket as it found it and the deadline covers the sum of all calls.
pub struct TimedStream<'a> {
    connection: &'a mut Connection,
    deadline: Instant,
}

impl<'a> TimedStream<'a> {
    /// The connection, until `deadline`.
    pub fn new(connection: &'a mut Connection, deadline: Instant) -> TimedStream<'a> {
        TimedStream { connection, deadline }
    }

    /// Waits until `attempt`, which must not block, no longer says that it would.
    fn when<T>(
        &mut self,
        flags: PollFlags,
        mut attempt: impl FnMut(&mut Connection) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match attempt(self.connection) {
                Err(Errno::AGAIN) => self.ready(flags)?,
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    fn ready(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match poll(&mut [PollFd::new(self.connection.socket(), flags)], Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.when(PollFlags::IN, |connection| {
            connection.receiver.receive(into, RecvFlags::DONTWAIT)
        })
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = SendFlags::DONTWAIT;
        let sent = self.when(PollFlags::OUT, |connection| connection.sender.send(bytes, now))?;
        self.when(PollFlags::OUT, |connection| connection.sender.flush(now))?;
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The kernel's form of a duration.
pub fn timespec(duration: Duration) -> Timespec {
    // Waits of centuries may be cut: every caller looks at the clock again.
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX / 2).min(1 << 40),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
