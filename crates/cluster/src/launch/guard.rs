//! A process that outlives a launcher killed by SIGKILL just long enough to finish its work.
//!
//! The kernel's parent-death signal reaches the ranks, but not the processes they started. The
//! guard is a shell that reads the ranks' process groups from a socket. The other end is the
//! launcher's alone; when it closes, the launcher is dead, and the guard kills the groups, and then
//! whatever has the launcher's mark in its environment (`strays.rs`), until nothing has. A launcher
//! that ends in an orderly way has done so itself and kills the guard first.
//!
//! The guard may be killed, as by the kernel when memory is short. The launcher then starts
//! another and tells it all groups. Only if it is killed in that moment, too, what ranks have started
//! outlives it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use rustix::net::{SendFlags, send};
use rustix::process::{Pid, getpid};

use super::Event;
use super::process::watch;
use super::strays::Mark;

const SCRIPT: &str = r#"
mark=$1
shift
while read -r group; do set -- "$@" "-$group"; done
[ $# -eq 0 ] || kill -s KILL -- "$@"
passes=0
while [ $passes -lt 100 ]; do
    found=$(grep -lsF -e "$mark" /proc/[0-9]*/environ)
    [ -n "$found" ] || break
    for file in $found; do
        process=${file#/proc/}
        kill -s KILL "${process%/environ}"
    done
    passes=$((passes + 1))
    sleep 0.02
done
"#;

/// Guards that end in a job, one after the other. More survive a user who kills them all;
/// fewer end it sooner that a machine starts one after the other that cannot run.
const MOST_GUARDS: u32 = 100;

/// Ends all processes of the ranks if this process dies before it drops the guard.
pub(super) struct Guard {
    /// How many there were before it, and how many of them have ended by themselves.
    number: u32,
    ended: u32,
    shell: Option<Shell>,
}

struct Shell {
    child: Child,
    /// This end of its standard input. A socket and not a pipe, for a rank that writes to a pipe
    /// without a reader would be killed.
    groups: UnixStream,
}

impl Guard {
    /// Starts a guard. Its end will be an event. A machine without a shell has none, and says so once.
    pub fn start(mark: &Mark, events: Sender<Event>) -> Guard {
        Guard::numbered(0, 0, mark, events)
    }

    /// No guard.
    pub fn none() -> Guard {
        Guard { number: 0, ended: 0, shell: None }
    }

    /// Starts another guard in the place of this one if this one is `ended`, and puts `groups` into its
    /// care.
    pub fn replace(
        &mut self,
        ended: u32,
        mark: &Mark,
        events: Sender<Event>,
        groups: impl Iterator<Item = Pid>,
    ) {
        if self.shell.is_none() || self.number != ended {
            return;
        }
        if self.ended + 1 < MOST_GUARDS {
            log::warn!("the guard of the ranks has ended; starting another");
            self.follow(self.ended + 1, mark, events, groups);
        } else {
            log::warn!(
                "no guard lasts; if the launcher is killed, processes started by ranks stay"
            );
            *self = Guard::none();
        }
    }

    /// Starts another guard that knows of no other groups than these, in the place of this one.
    pub fn renew(&mut self, mark: &Mark, events: Sender<Event>, groups: impl Iterator<Item = Pid>) {
        if self.shell.is_some() {
            self.follow(self.ended, mark, events, groups);
        }
    }

    fn follow(
        &mut self,
        ended: u32,
        mark: &Mark,
        events: Sender<Event>,
        groups: impl Iterator<Item = Pid>,
    ) {
        // The old one ends when the new one has begun.
        *self = Guard::numbered(self.number + 1, ended, mark, events);
        if let Some(shell) = &self.shell {
            let groups = groups.map(|group| format!("{}\n", group.as_raw_nonzero()));
            let groups = groups.collect::<String>();
            // If it has ended, too, the next will be told.
            let _ = send_all(&shell.groups, groups.as_bytes());
        }
    }

    fn numbered(number: u32, ended: u32, mark: &Mark, events: Sender<Event>) -> Guard {
        let shell = Shell::start(mark).and_then(|shell| {
            watch(Pid::from_child(&shell.child), events, move |_| Event::GuardEnded(number))?;
            Ok(shell)
        });
        if let Err(error) = &shell {
            log::warn!("if the launcher is killed, processes started by ranks stay: {error}");
        }
        Guard { number, ended, shell: shell.ok() }
    }

    /// What a new rank, the leader of its process group, does between fork and exec to put the
    /// group into the guard's care: done later, by the launcher, it would come too late for a
    /// launcher that is killed right after the fork. The launcher must not reap the rank while this
    /// guard lives: until then no other group can get its number.
    pub fn enrolment(&self) -> impl Fn() + use<> {
        let socket = self.shell.as_ref().map(|shell| shell.groups.as_raw_fd());
        move || {
            let Some(socket) = socket else { return };
            // SAFETY: the launcher keeps the socket open while it starts ranks, and this closure runs
            // in a fork of it.
            let socket = unsafe { BorrowedFd::borrow_raw(socket) };
            let mut line = [0; 12];
            let start = decimal_line(getpid().as_raw_nonzero().get().unsigned_abs(), &mut line);
            // If the guard has ended, the launcher tells the next one.
            let _ = send_all(socket, &line[start..]);
        }
    }
}

impl Shell {
    fn start(mark: &Mark) -> io::Result<Shell> {
        let (groups, input) = UnixStream::pair()?;
        let child = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "unisono-guard", mark.text()])
            // Above all without the mark of an outer launcher, which must not kill it.
            .env_clear()
            .stdin(OwnedFd::from(input))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of a terminal's Ctrl-C, which is meant for the launcher.
            .process_group(0)
            .spawn()?;
        Ok(Shell { child, groups })
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Killed before its socket closes, so that it never acts on an orderly end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes all of `bytes`; without a signal if the guard is gone. Allocates nothing.
fn send_all(socket: impl std::os::fd::AsFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match send(&socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes a number and a newline to the end of `line` without allocating; where it starts.
fn decimal_line(mut number: u32, line: &mut [u8; 12]) -> usize {
    let mut start = line.len() - 1;
    line[start] = b'\n';
    loop {
        start -= 1;
        line[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_lines() {
        for number in [0, 7, 42, 4_194_304, u32::MAX] {
            let mut line = [0; 12];
            let start = decimal_line(number, &mut line);
            assert_eq!(&line[start..], format!("{number}\n").as_bytes());
        }
    }
}
