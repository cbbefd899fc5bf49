//! How long the other side of a connection may say nothing.
//!
//! A server says now and then that it lives, to all workers that are connected. So a worker that waits for
//! one hears something in every timeout, however long the reply takes; a server that says nothing is
//! stopped, cut off, or gone without a word.
//!
//! Only time counts in which this process listened. It waits in slices, and of each no more than its
//! length counts: a process that was itself stopped wakes up to find one slice gone, and what was said
//! meanwhile in the buffer of its socket.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use unisono_net::Receiver;

/// Slices of a timeout. More: a process that waits wakes up more often. Fewer: silence is noticed later.
const SLICES: u32 = 4;

/// The system cannot wait for less.
const SHORTEST_SLICE: Duration = Duration::from_millis(1);

/// How long it has been silent.
#[derive(Debug)]
pub struct Silence {
    limit: Duration,
    quiet: Duration,
}

impl Silence {
    /// Of a peer that was heard just now, and may be silent for so long.
    pub fn new(limit: Duration) -> Silence {
        Silence { limit, quiet: Duration::ZERO }
    }

    /// Of the same limit, counted from now.
    pub fn fresh(&self) -> Silence {
        Silence::new(self.limit)
    }

    /// How long to wait at a time.
    pub fn slice(&self) -> Duration {
        (self.limit / SLICES).max(SHORTEST_SLICE)
    }

    /// Something was heard.
    pub fn heard(&mut self) {
        self.quiet = Duration::ZERO;
    }

    /// Nothing was heard for so long: an error once that is too long.
    pub fn waited(&mut self, time: Duration) -> io::Result<()> {
        self.quiet += time.min(self.slice());
        match self.quiet < self.limit {
            true => Ok(()),
            false => {
                let what = format!("nothing was heard of it for {:?}", self.limit);
                Err(io::Error::new(io::ErrorKind::TimedOut, what))
            }
        }
    }
}

/// Whether a call on a socket with a timeout ended without anything but time having passed. A signal
/// ends it as well, even that by which a stopped process goes on.
pub fn has_waited(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Reads from a connection whose waits take a slice each, for as long as the silence lasts.
pub struct Listener<'a> {
    pub receiver: &'a mut Receiver,
    pub silence: Option<&'a mut Silence>,
}

impl Read for Listener<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let receiver = &mut *self.receiver;
        let Some(silence) = &mut self.silence else { return receiver.read(into) };
        loop {
            let start = Instant::now();
            match receiver.read(into) {
                Err(error) if has_waited(&error) => silence.waited(start.elapsed())?,
                read => {
                    silence.heard();
                    return read;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_in_which_this_process_listened_counts() {
        let mut silence = Silence::new(Duration::from_secs(8));
        assert_eq!(silence.slice(), Duration::from_secs(2));
        for _ in 0..3 {
            silence.waited(Duration::from_secs(2)).unwrap();
        }
        silence.heard();
        // Stopped for an hour.
        silence.waited(Duration::from_secs(3600)).unwrap();
        silence.waited(Duration::from_secs(5)).unwrap();
        silence.waited(Duration::from_secs(1)).unwrap();
        silence.waited(Duration::from_secs(1)).unwrap();
        let error = silence.waited(Duration::from_secs(2)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("8s"), "{error}");
    }
}
