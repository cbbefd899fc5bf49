//! One life of one member as a process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group,
    set_parent_process_death_signal, waitid,
};

use super::guard::Guard;
use super::listeners::Listeners;
use super::nodes::NodePlace;
use super::output::{Destination, Forwarding, Sink, longest_line};
use super::strays::Mark;
use super::{Ending, Event, Launch, LaunchError, Member, binding};
use crate::membership;

/// What ranks find in their environment unless the launcher was given another: bytes that NCCL sends to another host at a
/// time. Its usual 128 KiB make messages slower than NCCL's own all-reduce. NCCL reads the variable once in a process, so
/// a program that is running cannot set it.
const NCCL_CHUNK: (&str, &str) = ("NCCL_P2P_NET_CHUNKSIZE", "524288");

/// Ranks of a job that gets it at most: NCCL has eight chunks for each rank that another sends to.
const MOST_WITH_CHUNK: u32 = 64;

/// All that is needed to start a member of the job on this node, now and again.
pub(super) struct Starter<'a> {
    pub launch: &'a Launch,
    pub place: NodePlace,
    /// How many ranks and servers this node has.
    pub members: usize,
    /// The sockets of the ranks, if they have any.
    pub listeners: Option<Listeners>,
    pub mark: Mark,
    pub guard: Guard,
    pub events: Sender<Event>,
}

/// A process that was started, whether or not it still runs.
pub(super) struct Process {
    /// Not reaped before the end, so that the number of its group stays its own.
    pub child: Child,
    pub group: Pid,
    pub stdout: Forwarding,
    pub stderr: Forwarding,
}

impl Process {
    /// Sends a signal to the process and those it started.
    pub fn signal_group(&self, signal: Signal) {
        // Fails if the group has no process left: nothing to end.
        let _ = kill_process_group(self.group, signal);
    }
}

impl Starter<'_> {
    /// Starts a member. Its end will be an event.
    pub fn start(&self, member: Member, life: u32) -> Result<Process, LaunchError> {
        let launcher = getpid();
        let argv = self.command(member);
        let mut command = Command::new(&argv[0]);
        command
            .args(&argv[1..])
            .envs(self.launch.vars.iter().map(|(name, value)| (name, value)))
            .envs(self.environment(member, life))
            .envs([self.mark.variable()])
            // Only launchers talk to etcd.
            .env_remove("UNISONO_ETCD_PASSWORD")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let cores = match member {
            Member::Rank(local) if self.launch.bind => binding::share(local, self.launch.ranks),
            _ => None,
        };
        let enrol = self.guard.enrolment();
        let socket = self.socket(member);
        let prepare = move || {
            enrol();
            if let Some(socket) = socket {
                // SAFETY: the launcher keeps the socket open while it starts members, and this
                // closure runs in a fork of it.
                let socket = unsafe { BorrowedFd::borrow_raw(socket) };
                // Here and not in the launcher, whose other children must not inherit it.
                fcntl_setfd(socket, FdFlags::empty())?;
            }
            if let Some(cores) = &cores {
                rustix::thread::sched_setaffinity(None, cores)?;
            }
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the launcher died before the call above, the system will not send the signal.
            match getppid() {
                Some(parent) if parent == launcher => Ok(()),
                _ => Err(io::ErrorKind::BrokenPipe.into()),
            }
        };
        // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes
        // system calls and allocates nothing: errors made of an errno or a kind are plain data.
        unsafe { command.pre_exec(prepare) };
        let spawn_error =
            |cause| LaunchError::Spawn { command: argv[0].to_string_lossy().into_owned(), cause };
        let mut child = command.spawn().map_err(spawn_error)?;
        match self.attach(member, &mut child) {
            Ok((stdout, stderr)) => {
                let group = Pid::from_child(&child);
                Ok(Process { child, group, stdout, stderr })
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.into())
            }
        }
    }

    /// What people call a member.
    pub fn name(&self, member: Member) -> String {
        match member {
            Member::Rank(local) => format!("rank {}", self.place.first_rank + local),
            Member::Server(server) => format!("server {server}"),
        }
    }

    /// Watches a process and passes on what it writes.
    fn attach(&self, member: Member, child: &mut Child) -> io::Result<(Forwarding, Forwarding)> {
        let launch = self.launch;
        let label = |wanted: bool| match wanted {
            true => format!("[{}] ", self.name(member)),
            false => String::new(),
        };
        let several = self.place.world > 1 || launch.servers.is_some();
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(io::Error::other("a process without pipes"));
        };
        let to = |sink: &Sink| Destination {
            sink: sink.clone(),
            events: self.events.clone(),
            longest_line: longest_line(self.members),
        };
        let stdout = Forwarding::start(stdout, to(&launch.stdout), label(launch.label_stdout))?;
        let stderr = Forwarding::start(stderr, to(&launch.stderr), label(several))?;
        watch(Pid::from_child(child), self.events.clone(), move |ending| Event::Ended {
            member,
            ending,
        })?;
        Ok((stdout, stderr))
    }

    fn command(&self, member: Member) -> &[OsString] {
        match member {
            Member::Rank(_) => &self.launch.command,
            Member::Server(server) => {
                let servers = self.launch.servers.as_ref().expect("a server is one of these");
                &servers.commands()[server as usize]
            }
        }
    }

    /// The open file of the socket a member inherits.
    fn socket(&self, member: Member) -> Option<RawFd> {
        match member {
            Member::Rank(local) => Some(self.listeners.as_ref()?.file(local)),
            Member::Server(server) => Some(self.launch.servers.as_ref()?.listeners().file(server)),
        }
    }

    /// What a member finds in its environment.
    fn environment(&self, member: Member, life: u32) -> Vec<(&'static str, OsString)> {
        let mut vars = match member {
            Member::Rank(local) => self.place_variables(local),
            Member::Server(server) => vec![("UNISONO_SERVER", server.to_string())],
        };
        vars.push(("UNISONO_TOKEN", self.place.token.to_hex()));
        if self.launch.encrypt {
            vars.push(("UNISONO_ENCRYPT", true.to_string()));
        }
        if let Some(servers) = &self.launch.servers {
            vars.push(("UNISONO_SERVERS", servers.listeners().variable()));
        }
        if let (Some(peers), Member::Rank(_)) = (&self.listeners, member) {
            vars.push(("UNISONO_PEERS", peers.variable()));
        }
        if let Some(socket) = self.socket(member) {
            vars.push(("UNISONO_LISTEN_FD", socket.to_string()));
        }
        let is_set = std::env::var_os(NCCL_CHUNK.0).is_some();
        if !is_set && self.place.world <= MOST_WITH_CHUNK {
            vars.push((NCCL_CHUNK.0, NCCL_CHUNK.1.to_owned()));
        }
        if self.launch.is_relaxed() {
            vars.push(("UNISONO_LIFE", life.to_string()));
        }
        vars.into_iter().map(|(name, value)| (name, value.into())).collect()
    }

    /// Where a rank finds its place.
    fn place_variables(&self, local: u32) -> Vec<(&'static str, String)> {
        let place = &self.place;
        [
            ("RANK", (place.first_rank + local).to_string()),
            ("WORLD_SIZE", place.world.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", self.launch.ranks.to_string()),
            ("GROUP_RANK", place.node.to_string()),
            ("GROUP_WORLD_SIZE", place.nodes.to_string()),
            ("MASTER_ADDR", place.rendezvous.ip().to_string()),
            ("MASTER_PORT", place.master_port.to_string()),
            ("UNISONO_RENDEZVOUS", place.rendezvous.to_string()),
        ]
        .into_iter()
        .chain(place.membership.map(|address| (membership::VARIABLE, address.to_string())))
        .collect()
    }
}

/// Reports the end of a process as an event, without reaping it.
pub(super) fn watch(
    pid: Pid,
    events: Sender<Event>,
    event: impl FnOnce(Ending) -> Event + Send + 'static,
) -> io::Result<()> {
    let wait = move || {
        let ending = loop {
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
                Ok(Some(status)) => {
                    break match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => Ending::Code(code),
                        (None, Some(signal)) => Ending::Signal(signal),
                        (None, None) => continue,
                    };
                }
                Ok(None) | Err(rustix::io::Errno::INTR) => continue,
                // Reaped by another thread: how it ended is not known, that it did is.
                Err(_) => break Ending::Code(1),
            }
        };
        let _ = events.send(event(ending));
    };
    std::thread::Builder::new().name("unisono-wait".into()).spawn(wait).map(drop)
}
