use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often a pause looks at the abort flag.
const GLANCE: Duration = Duration::from_millis(20);

/// How long a call may take: until a moment, or until another thread sets a flag.
///
/// The flag is looked at between attempts, so a call ends within about half a second after it was set.
/// While all endpoints are silent, attempts become longer, up to two seconds.
#[derive(Clone, Copy, Debug)]
pub struct Until<'a> {
    deadline: Instant,
    abort: Option<&'a AtomicBool>,
}

impl<'a> Until<'a> {
    /// Until this much time has passed.
    pub fn within(time: Duration) -> Until<'a> {
        Until::deadline(Instant::now() + time)
    }

    /// Until this moment.
    pub fn deadline(deadline: Instant) -> Until<'a> {
        Until { deadline, abort: None }
    }

    /// And no longer than until `flag` is true.
    pub fn or_abort(self, flag: &'a AtomicBool) -> Until<'a> {
        Until { abort: Some(flag), ..self }
    }

    /// The time left, if any.
    pub(super) fn left(&self) -> Result<Duration, Ended> {
        if self.abort.is_some_and(|flag| flag.load(Ordering::Acquire)) {
            return Err(Ended::Aborted);
        }
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(Ended::Late),
            left => Ok(left),
        }
    }

    /// Waits this long, or for less if the end comes first.
    pub(super) fn pause(&self, time: Duration) -> Result<(), Ended> {
        let end = Instant::now() + time;
        loop {
            let left = self.left()?.min(end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(GLANCE));
        }
    }
}

/// Why there is no time left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Late,
    Aborted,
}
