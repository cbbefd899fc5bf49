//! Members of an elastic job that were stopped and stay so.
//!
//! A worker that has connected to its launcher is asked whether it lives. One that was stopped before is not waited for
//! by the others, but would neither train nor end: it is found by looking at its process.

use std::collections::HashMap;
use std::time::Duration;

/// How often a process is looked at within the timeout. More: more system calls. Fewer: a stopped process is ended later.
const LOOKS: u32 = 4;

/// Which processes were stopped when they were looked at last, and how often in a row.
pub(super) struct Watch {
    every: Duration,
    next: Duration,
    stopped: HashMap<u32, u32>,
}

impl Watch {
    /// Of processes that may be stopped for so long.
    pub fn new(timeout: Duration) -> Watch {
        let every = (timeout / LOOKS).max(Duration::from_millis(10));
        Watch { every, next: every, stopped: HashMap::new() }
    }

    /// When to look next.
    pub fn deadline(&self) -> Duration {
        self.next
    }

    /// Looks at processes, if it is time; those that were stopped whenever they were looked at, for longer than the
    /// timeout. What counts is looks, so that a launcher which was stopped itself blames no process for it.
    pub fn look(
        &mut self,
        now: Duration,
        processes: impl Iterator<Item = u32>,
        is_stopped: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        if now < self.next {
            return Vec::new();
        }
        self.next = now.saturating_add(self.every);
        let times = |pid: u32| self.stopped.get(&pid).copied().unwrap_or(0) + 1;
        self.stopped =
            processes.filter(|pid| is_stopped(*pid)).map(|pid| (pid, times(pid))).collect();
        let is_long = |(_, times): &(&u32, &u32)| **times > LOOKS + 1;
        self.stopped.iter().filter(is_long).map(|(pid, _)| *pid).collect()
    }
}

/// Whether a process is stopped, as by SIGSTOP.
pub(super) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program, in parentheses, may contain anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn what_is_stopped_for_longer_than_the_timeout_is_found() {
        let mut watch = Watch::new(ms(400));
        let found: Vec<Vec<u32>> =
            (0..8).map(|i| watch.look(ms(100 * i), [7, 8].into_iter(), |pid| pid == 8)).collect();
        // Looked at from 100 ms on: six times at 600 ms, which is 500 ms after the first.
        assert_eq!(found.iter().position(|found| !found.is_empty()), Some(6));
        assert_eq!(found[6], [8]);
    }

    #[test]
    fn what_goes_on_in_between_is_not() {
        let mut watch = Watch::new(ms(400));
        for i in 0..50 {
            let goes_on = i % 5 == 4;
            assert_eq!(watch.look(ms(100 * i), [8].into_iter(), |_| !goes_on), [0u32; 0]);
        }
    }

    #[test]
    fn a_pause_of_the_launcher_counts_for_one_look() {
        let mut watch = Watch::new(ms(400));
        assert_eq!(watch.look(ms(100), [8].into_iter(), |_| true), [0u32; 0]);
        assert_eq!(watch.look(ms(90_000), [8].into_iter(), |_| true), [0u32; 0]);
        assert_eq!(watch.look(ms(90_001), [8].into_iter(), |_| true), [0u32; 0]);
    }

    #[test]
    fn a_stopped_process_is_known() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!is_stopped(child.id()));
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !is_stopped(child.id()) {
            assert!(std::time::Instant::now() < deadline);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(child.id()));
    }
}
