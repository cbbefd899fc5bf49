//! Wakes a thread that polls.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Readable from when it is raised until it is cleared. Clones are one signal.
#[derive(Clone, Debug)]
pub struct Signal(Arc<OwnedFd>);

impl Signal {
    /// A signal that is not raised.
    pub fn new() -> io::Result<Signal> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Signal(Arc::new(event)))
    }

    /// Raises it.
    pub fn raise(&self) {
        // An eventfd refuses a write only when its counter is full: then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears it.
    pub fn clear(&self) {
        // Refused if it was not raised, which is fine.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
