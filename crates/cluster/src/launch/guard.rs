//! A process that outlives a launcher killed by SIGKILL just long enough to finish its work.
//!
//! The kernel's parent-death signal reaches the ranks, but not the processes they started. The
//! guard is a shell that reads the ranks' process groups from a pipe. The other end is the
//! launcher's alone; when it closes, the launcher is dead, and the guard kills the groups. A
//! launcher that ends in an orderly way has ended the groups itself and kills the guard first.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

const SCRIPT: &str = r#"
while read -r group; do set -- "$@" "-$group"; done
[ $# -eq 0 ] || kill -s KILL -- "$@"
"#;

/// Ends the ranks' process groups if this process dies before it drops the guard.
pub(super) struct Guard(Option<Child>);

impl Guard {
    /// Starts the guard. A machine without a shell has none, and says so once.
    pub fn start() -> Guard {
        let spawned = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "unisono-guard"])
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

    /// Puts a rank's process group into the guard's care. The caller must not reap the group's
    /// leader while the guard lives: until then no other group can get its number.
    pub fn watch(&mut self, group: Pid) {
        let Some(pipe) = self.0.as_mut().and_then(|child| child.stdin.as_mut()) else { return };
        if let Err(error) = writeln!(pipe, "{}", group.as_raw_nonzero()) {
            log::warn!("the launcher's guard is gone: {error}");
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
