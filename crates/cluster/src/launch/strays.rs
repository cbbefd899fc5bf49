//! Finding the processes of a job, wherever they went.
//!
//! A rank's children are in its process group, unless one of them makes a group or a session of its
//! own, as `timeout`, `setsid`, and shells with job control do. But whatever a process starts
//! inherits its environment. So every launcher makes up a *mark* that no other has, puts it there,
//! and at the end looks through `/proc` for it. A process that also discards its environment
//! escapes.
//!
//! A launcher that is itself a rank of another adds its mark to that of the other: the outer one
//! finds the processes of both, but leaves it to the inner one to tell its ranks to end.

use std::ffi::OsString;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpgid, pidfd_open, pidfd_send_signal};

/// The variable that holds the marks of all launchers above a process, the innermost last.
const VARIABLE: &str = "UNISONO_LAUNCH";

const SEPARATOR: u8 = b':';

/// How long to look for processes that were killed and do not end. Longer finds no more: only a process
/// that hangs in the kernel is left by then.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the processes of one launcher have in common.
pub(super) struct Mark {
    own: String,
    /// Those of the launchers above this one.
    above: Option<OsString>,
}

impl Mark {
    pub fn new() -> io::Result<Mark> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(io::Error::from)?;
        let own = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Mark { own, above: std::env::var_os(VARIABLE) })
    }

    /// Text that only the environment of this launcher's processes contains.
    pub fn text(&self) -> &str {
        &self.own
    }

    /// What to put into the environment of a rank.
    pub fn variable(&self) -> (&'static str, OsString) {
        let mut value = self.above.clone().unwrap_or_default();
        if !value.is_empty() {
            value.push(":");
        }
        value.push(&self.own);
        (VARIABLE, value)
    }

    /// Sends a signal to the processes of this launcher, but not to those of launchers below it,
    /// that are in none of `groups`.
    pub fn signal_strays(&self, groups: &[Pid], signal: Signal) {
        let innermost = |marks: &[u8]| marks.ends_with(self.own.as_bytes());
        for process in find(innermost) {
            if !getpgid(Some(process)).is_ok_and(|group| groups.contains(&group)) {
                send(process, signal, innermost);
            }
        }
    }

    /// Kills every process of this launcher and of those below it, until none is left.
    pub fn kill_all(&self) {
        let ours = |marks: &[u8]| {
            marks.split(|byte| *byte == SEPARATOR).any(|mark| mark == self.own.as_bytes())
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = find(ours);
            if found.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                log::warn!("these processes were killed and do not end: {found:?}");
                return;
            }
            found.into_iter().for_each(|process| send(process, Signal::KILL, ours));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The processes whose marks are `wanted`.
fn find(wanted: impl Fn(&[u8]) -> bool) -> Vec<Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
        .filter(|process| is_marked(*process, &wanted))
        .collect()
}

/// Whether a process has such marks. One that has ended, or is another user's, has none.
fn is_marked(process: Pid, wanted: impl Fn(&[u8]) -> bool) -> bool {
    let path = format!("/proc/{}/environ", process.as_raw_nonzero());
    let environment = std::fs::read(path).unwrap_or_default();
    let marks = |variable: &[u8]| {
        let value = variable.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"=")?;
        Some(wanted(value))
    };
    environment.split(|byte| *byte == 0).find_map(marks).unwrap_or(false)
}

/// Sends a signal to a process that was found. Its number may be another's by now: that one is
/// asked again once it is held fast.
fn send(process: Pid, signal: Signal, wanted: impl Fn(&[u8]) -> bool) {
    let Ok(held) = pidfd_open(process, PidfdFlags::empty()) else { return };
    if is_marked(process, wanted) {
        // Fails if it has ended meanwhile, which is what was wanted.
        let _ = pidfd_send_signal(&held, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn sleeper(marks: &OsString) -> std::process::Child {
        Command::new("sleep")
            .arg("1000")
            .env(VARIABLE, marks)
            .stdin(Stdio::null())
            .spawn()
            .expect("there is a sleep")
    }

    #[test]
    fn a_mark_finds_its_own_processes_and_those_below() {
        let (outer, other) = (Mark::new().unwrap(), Mark::new().unwrap());
        let inner = Mark { above: Some(outer.variable().1), ..Mark::new().unwrap() };
        let mut processes = [&outer, &inner, &other].map(|mark| sleeper(&mark.variable().1));
        // Until its program runs, a process has the environment of this one.
        for (process, mark) in processes.iter().zip([&outer, &inner, &other]) {
            let pid = Pid::from_child(process);
            while !is_marked(pid, |marks| marks.ends_with(mark.own.as_bytes())) {
                std::thread::yield_now();
            }
        }
        let ended = |process: &mut std::process::Child| process.try_wait().unwrap().is_some();
        outer.signal_strays(&[], Signal::TERM);
        processes[0].wait().unwrap();
        assert!(!ended(&mut processes[1]), "an inner launcher's process");
        outer.kill_all();
        processes[1].wait().unwrap();
        assert!(!ended(&mut processes[2]), "another launcher's process");
        let group = getpgid(Some(Pid::from_child(&processes[2]))).unwrap();
        other.signal_strays(&[group], Signal::KILL);
        assert!(!ended(&mut processes[2]), "not a stray");
        other.kill_all();
        processes[2].wait().unwrap();
    }
}
