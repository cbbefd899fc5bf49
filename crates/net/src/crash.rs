//! Named points at which a test can end or stop a process.
//!
//! Only builds with the feature `crash-points` have them: `UNISONO_TEST_CRASH=NAME,RANK,NUMBER,kill` kills the
//! process with `RANK` in its environment, in its first life, when it gets to the point `NAME` for the
//! `NUMBER`th time, counted from 1; `stop` stops it. `RANK/LIFE` is a process in a later life, counted from 0,
//! `*/LIFE` those of all ranks in that life, and `*` is every rank, in every life. Several plans are separated by
//! semicolons. In other builds a point is nothing.

/// A point that a test may name with a number, as `NAME-NUMBER`.
#[inline(always)]
pub fn numbered(name: &str, number: usize) {
    #[cfg(feature = "crash-points")]
    if armed::is_planned() {
        armed::reach(&format!("{name}-{number}"));
    }
    #[cfg(not(feature = "crash-points"))]
    let _ = (name, number);
}

/// A point that a test may name.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(feature = "crash-points")]
    armed::reach(name);
    #[cfg(not(feature = "crash-points"))]
    let _ = name;
}

#[cfg(feature = "crash-points")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    /// By when a signal has been taken by one of the threads.
    const TAKEN: Duration = Duration::from_secs(1);

    struct Crash {
        name: String,
        left: AtomicU32,
        signal: Signal,
    }

    static CRASHES: OnceLock<Vec<Crash>> = OnceLock::new();

    pub fn reach(name: &str) {
        for crash in CRASHES.get_or_init(planned).iter().filter(|crash| crash.name == name) {
            if crash.left.fetch_sub(1, Ordering::Relaxed) == 1 {
                // So that a test can tell that it happened.
                eprintln!("unisono: crash point {name} reached");
                // One's own process can always be signalled.
                let _ = kill_process(getpid(), crash.signal);
                // Another thread may be the one that takes the signal, and may be late.
                std::thread::sleep(TAKEN);
            }
        }
    }

    pub fn is_planned() -> bool {
        !CRASHES.get_or_init(planned).is_empty()
    }

    /// What this process is to do.
    fn planned() -> Vec<Crash> {
        let plan = std::env::var("UNISONO_TEST_CRASH").unwrap_or_default();
        plan.split(';').filter_map(own).collect()
    }

    /// What one of the plans is to this process, if it is meant.
    fn own(plan: &str) -> Option<Crash> {
        let mut words = plan.split(',');
        let (name, rank, number, how) =
            (words.next()?, words.next()?, words.next()?, words.next()?);
        let is = |variable: &str, value: &str| std::env::var(variable).is_ok_and(|it| it == value);
        let (rank, life) = match rank.split_once('/') {
            Some((rank, life)) => (rank, Some(life)),
            None => (rank, (rank != "*").then_some("0")),
        };
        let is_meant =
            (rank == "*" || is("RANK", rank)) && life.is_none_or(|life| is("UNISONO_LIFE", life));
        is_meant.then_some(Crash {
            name: name.to_owned(),
            left: AtomicU32::new(number.parse().ok()?),
            signal: if how == "stop" { Signal::STOP } else { Signal::KILL },
        })
    }
}
