//! A process that outlives a launcher killed by SIGKILL just long enough to finish its work.
//!
//! The kernel's parent-death signal reaches the ranks, but not the processes they started. The
//! guard is a shell that reads the ranks' process groups from a pipe. The other end is the
//! launcher's alone; when it closes, the launcher is dead, and the guard kills the groups, and then
//! whatever has the launcher's mark in its environment (`strays.rs`), until nothing has. A launcher
//! that ends in an orderly way has done so itself and kills the guard first.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::getpid;

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

/// Ends all processes of the ranks if this process dies before it drops the guard.
pub(super) struct Guard(Option<Child>);

impl Guard {
    /// Starts the guard. A machine without a shell has none, and says so once.
    pub fn start(mark: &Mark) -> Guard {
        let spawned = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "unisono-guard", mark.text()])
            // Above all without the mark of an outer launcher, which must not kill it.
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of a terminal's Ctrl-C, which is meant for the launcher.
            .process_group(0)
            .spawn();
        match spawned {
            Ok(child) => Guard(Some(child)),
            Err(error) => {
                log::warn!("if the launcher is killed, processes started by ranks stay: {error}");
                Guard(None)
            }
        }
    }

    /// Nobody.
    pub fn none() -> Guard {
        Guard(None)
    }

    /// What a new rank, the leader of its process group, does between fork and exec to put the
    /// group into the guard's care: done later, by the launcher, it would come too late for a
    /// launcher that is killed right after the fork. The launcher must not reap the rank while the
    /// guard lives: until then no other group can get its number.
    pub fn enrolment(&self) -> impl Fn() -> io::Result<()> + use<> {
        let pipe = self.0.as_ref().and_then(|child| child.stdin.as_ref()).map(|p| p.as_raw_fd());
        move || {
            let Some(pipe) = pipe else { return Ok(()) };
            // SAFETY: the launcher keeps the pipe open while it starts ranks, and this closure runs
            // in a fork of it.
            let pipe = unsafe { BorrowedFd::borrow_raw(pipe) };
            let mut line = [0; 12];
            let start = decimal_line(getpid().as_raw_nonzero().get().unsigned_abs(), &mut line);
            rustix::io::write(pipe, &line[start..])?;
            Ok(())
        }
    }
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

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Killed before its pipe closes, so that it never acts on an orderly end.
            let _ = child.kill();
            let _ = child.wait();
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
