//! One network namespace, and the processes in it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::LabError;
use crate::iproute::iproute;
use crate::owner::Owner;

/// Where `ip netns` keeps the names of namespaces.
const NAMES: &str = "/run/netns";

/// How long killed processes may take to be gone. The kernel needs milliseconds; a process that
/// is still there after this hangs in a device.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A named network namespace. Dropping it kills its processes and deletes it.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
    door: Door,
    identity: Identity,
}

impl Namespace {
    /// Makes a namespace in which only the loopback device is, and up.
    pub(crate) fn create(name: String) -> Result<Namespace, LabError> {
        iproute(&format!("ip netns add {name}"))?;
        let namespace = Namespace::open(name).map_err(|(name, error)| LabError::Tool {
            command: format!("ip netns add {name}"),
            reason: format!("the namespace cannot be opened: {error}"),
        })?;
        iproute(&format!("ip -n {} link set lo up", namespace.name))?;
        Ok(namespace)
    }

    /// Takes over a namespace that exists.
    fn open(name: String) -> Result<Namespace, (String, io::Error)> {
        let open = || {
            let file = File::open(Path::new(NAMES).join(&name))?;
            let identity = Identity::of(&file.metadata()?);
            Ok((Door(Arc::new(file.into())), identity))
        };
        match open() {
            Ok((door, identity)) => Ok(Namespace { name, door, identity }),
            Err(error) => Err((name, error)),
        }
    }

    /// Deletes the namespaces that processes left behind when they were killed.
    ///
    /// What cannot be deleted stays: it belongs to another user, or another process is deleting
    /// it at the same time.
    pub(crate) fn sweep() {
        let Ok(entries) = fs::read_dir(NAMES) else { return };
        for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            if Owner::of(&name).is_some_and(|owner| !owner.is_alive()) {
                drop(Namespace::open(name));
            }
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn door(&self) -> &Door {
        &self.door
    }

    /// Kills every process of the namespace and returns, once all are gone, how many there were.
    /// This process is left alone, also when some of its threads are in the namespace.
    pub(crate) fn kill_all(&self) -> io::Result<usize> {
        let deadline = Instant::now() + KILL_TIMEOUT;
        let mut killed = 0;
        // A process may have forked while they were counted, hence the rounds.
        loop {
            let members = self.members()?;
            if members.is_empty() {
                return Ok(killed);
            }
            for member in &members {
                match pidfd_send_signal(member, Signal::KILL) {
                    Ok(()) => killed += 1,
                    Err(rustix::io::Errno::SRCH) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            for member in &members {
                wait_for_exit(member, deadline)?;
            }
        }
    }

    /// The processes of which at least one thread is in the namespace. A process that has ended
    /// and waits to be reaped is in none.
    pub(crate) fn members(&self) -> io::Result<Vec<OwnedFd>> {
        let mut members = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if u32::try_from(number) == Ok(process::id()) {
                continue;
            }
            // Opened before it is looked at: should the number pass to another process between
            // the two, the signal goes to the one that is gone, never to a stranger.
            let Some(pid) = Pid::from_raw(number) else { continue };
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            if self.has_thread_of(&entry.path()) {
                members.push(process);
            }
        }
        Ok(members)
    }

    fn has_thread_of(&self, process: &Path) -> bool {
        let Ok(threads) = fs::read_dir(process.join("task")) else { return false };
        threads
            .flatten()
            .filter_map(|thread| fs::metadata(thread.path().join("ns/net")).ok())
            .any(|metadata| Identity::of(&metadata) == self.identity)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let killed = self.kill_all().map_err(|error| error.to_string());
        let deleted = iproute(&format!("ip netns del {}", self.name))
            .map_err(|error| error.to_string())
            // Another process that sweeps may have come first.
            .or_else(|error| match Path::new(NAMES).join(&self.name).exists() {
                true => Err(error),
                false => Ok(String::new()),
            });
        if let Err(error) = killed.and(deleted) {
            eprintln!("network namespace {} is left behind: {error}", self.name);
        }
    }
}

/// The way into a namespace. It stays open after the namespace has lost its name.
#[derive(Debug, Clone)]
pub(crate) struct Door(Arc<OwnedFd>);

impl Door {
    /// Moves the calling thread into the namespace. One system call and no allocation, so a
    /// child may do it between fork and exec.
    pub(crate) fn enter(&self) -> io::Result<()> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(())
    }
}

/// What the kernel knows a namespace by.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(metadata: &fs::Metadata) -> Identity {
        Identity { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Returns once the process has ended, its sockets closed.
fn wait_for_exit(process: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "a process does not die")),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
