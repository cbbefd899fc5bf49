//! Whose a namespace is.
//!
//! A process that is killed cannot delete its namespaces, so their names tell who made them:
//! `unisono-lab-<pid>-<start>-<lab>-<role>`. Process numbers are used again; the number together
//! with the time the process started, in clock ticks since boot, is not. The process that builds a lab
//! first deletes the namespaces whose owner is no more.

use std::fmt;
use std::fs;
use std::io;
use std::process;

const PREFIX: &str = "unisono-lab-";

/// One process, past or present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pid: u32,
    start: u64,
}

impl Owner {
    /// This process.
    pub(crate) fn current() -> io::Result<Owner> {
        let pid = process::id();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let (_, start) = parse_stat(&stat).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Owner { pid, start })
    }

    /// The owner that the name of a namespace tells, if the namespace belongs to a lab.
    pub(crate) fn of(namespace: &str) -> Option<Owner> {
        let mut words = namespace.strip_prefix(PREFIX)?.split('-');
        let pid = words.next()?.parse().ok()?;
        let start = words.next()?.parse().ok()?;
        Some(Owner { pid, start })
    }

    /// The name of the namespace that plays `role` in the `lab`-th lab of this owner.
    pub(crate) fn name(&self, lab: u64, role: impl fmt::Display) -> String {
        let Owner { pid, start } = self;
        format!("{PREFIX}{pid}-{start}-{lab}-{role}")
    }

    /// Whether the process still runs. One that ended and waits to be reaped does not.
    pub(crate) fn is_alive(&self) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", self.pid))
            .ok()
            .and_then(|stat| parse_stat(&stat))
            .is_some_and(|(state, start)| start == self.start && !matches!(state, 'Z' | 'X'))
    }
}

/// The state and the start time in a line of `/proc/<pid>/stat`. The second field is the name of
/// the program in parentheses, which may itself hold spaces and parentheses.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start = fields.nth(18)?.parse().ok()?;
    Some((state, start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_owner() {
        let owner = Owner { pid: 17, start: 4711 };
        assert_eq!(owner.name(3, "switch"), "unisono-lab-17-4711-3-switch");
        assert_eq!(Owner::of(&owner.name(3, 12)), Some(owner));
        assert_eq!(Owner::of("another-program"), None);
        assert_eq!(Owner::of("unisono-lab-17-x-1-0"), None);
    }

    #[test]
    fn a_process_is_alive_until_it_ends_and_its_number_alone_is_not_it() {
        let current = Owner::current().unwrap();
        assert!(current.is_alive());
        assert!(!Owner { start: current.start + 1, ..current }.is_alive());

        let mut child =
            process::Command::new("cat").stdin(process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let owner = Owner { pid, start: parse_stat(&stat).unwrap().1 };
        assert!(owner.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!owner.is_alive());
    }

    #[test]
    fn a_program_may_be_called_anything() {
        let stat = "9 (a) Z (b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20 21";
        assert_eq!(parse_stat(stat), Some(('S', 777)));
        assert_eq!(parse_stat("9 (short) S 1"), None);
    }
}
