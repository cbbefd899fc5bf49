//! The local ranks as processes: started with their place in the environment, ended without
//! remainder.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group,
    set_parent_process_death_signal, waitid,
};

use super::binding;
use super::guard::Guard;
use super::nodes::NodePlace;
use super::output::Forwarding;
use super::strays::Mark;
use super::{Ending, Event, Launch, LaunchError};

/// All ranks of this node.
pub(super) struct Ranks {
    ranks: Vec<RankProcess>,
    mark: Mark,
    guard: Guard,
}

struct RankProcess {
    /// Not reaped before the end, so that the number of its group stays its own.
    child: Child,
    group: Pid,
    stdout: Forwarding,
    stderr: Forwarding,
    ended: bool,
}

/// How long to wait for the last output of processes that have all been killed: only one that hid
/// from the launcher can still hold a pipe.
const DRAIN: Duration = Duration::from_secs(1);

impl Ranks {
    /// Starts every rank of this node; either all of them run, or none is left.
    pub fn start(
        launch: &Launch,
        place: &NodePlace,
        events: &Sender<Event>,
    ) -> Result<Ranks, LaunchError> {
        let mark = Mark::new()?;
        let guard = Guard::start(&mark);
        let mut ranks = Ranks { ranks: Vec::new(), mark, guard };
        for local in 0..launch.ranks {
            let rank = RankProcess::start(launch, place, local, &ranks)?;
            let group = rank.group;
            ranks.ranks.push(rank);
            watch(local, group, events.clone())?;
        }
        Ok(ranks)
    }

    /// Notes that a rank's process ended.
    pub fn note_ended(&mut self, local: u32) {
        self.ranks[local as usize].ended = true;
    }

    /// Whether every rank's process has ended.
    pub fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended)
    }

    /// Tells every rank, and the processes it started, to end.
    pub fn tell_to_end(&self, signal: Signal) {
        let groups: Vec<Pid> = self.ranks.iter().map(|rank| rank.group).collect();
        // A process that is stopped hears nothing before it continues.
        for signal in [signal, Signal::CONT] {
            self.signal_groups(signal);
            self.mark.signal_strays(&groups, signal);
        }
    }

    /// Kills every rank and the processes it started.
    pub fn kill(&self) {
        self.signal_groups(Signal::KILL);
        self.mark.kill_all();
    }

    fn signal_groups(&self, signal: Signal) {
        for rank in &self.ranks {
            // Fails if the group has no process left: nothing to end.
            let _ = kill_process_group(rank.group, signal);
        }
    }

    /// The last lines of a rank's stderr, complete if it closed its stderr by now.
    pub fn last_words(&self, local: u32) -> Vec<String> {
        let stderr = &self.ranks[local as usize].stderr;
        stderr.wait_end(Duration::from_millis(250));
        stderr.tail()
    }
}

impl Drop for Ranks {
    /// Kills what is left of every rank, lets the output drain, reaps.
    fn drop(&mut self) {
        self.kill();
        let deadline = Instant::now() + DRAIN;
        for pipe in self.ranks.iter().flat_map(|rank| [&rank.stdout, &rank.stderr]) {
            pipe.wait_end(deadline.saturating_duration_since(Instant::now()));
        }
        // Before the groups' numbers become free.
        self.guard = Guard::none();
        for rank in &mut self.ranks {
            if let Err(error) = rank.child.wait() {
                log::warn!("cannot reap process {}: {error}", rank.child.id());
            }
        }
    }
}

impl RankProcess {
    fn start(
        launch: &Launch,
        place: &NodePlace,
        local: u32,
        all: &Ranks,
    ) -> Result<RankProcess, LaunchError> {
        let launcher = getpid();
        let mut command = Command::new(&launch.command[0]);
        command
            .args(&launch.command[1..])
            .envs(launch.vars.iter().map(|(name, value)| (name, value)))
            .envs(environment(launch, place, local))
            .envs([all.mark.variable()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let cores = launch.bind.then(|| binding::share(local, launch.ranks)).flatten();
        let enrol = all.guard.enrolment();
        let prepare = move || {
            enrol()?;
            if let Some(cores) = &cores {
                rustix::thread::sched_setaffinity(None, cores)?;
            }
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the launcher died before the call above, nobody will send the signal.
            match getppid() {
                Some(parent) if parent == launcher => Ok(()),
                _ => Err(io::ErrorKind::BrokenPipe.into()),
            }
        };
        // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes
        // system calls and allocates nothing: errors made of an errno or a kind are plain data.
        unsafe { command.pre_exec(prepare) };
        let spawn_error = |cause| LaunchError::Spawn {
            command: launch.command[0].to_string_lossy().into_owned(),
            cause,
        };
        let mut child = command.spawn().map_err(spawn_error)?;
        match RankProcess::attach(launch, place.first_rank + local, place.world, &mut child) {
            Ok((stdout, stderr)) => {
                let group = Pid::from_child(&child);
                Ok(RankProcess { child, group, stdout, stderr, ended: false })
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.into())
            }
        }
    }

    fn attach(
        launch: &Launch,
        rank: u32,
        world: u32,
        child: &mut Child,
    ) -> io::Result<(Forwarding, Forwarding)> {
        let label = |wanted: bool| if wanted { format!("[rank {rank}] ") } else { String::new() };
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(io::Error::other("a rank without pipes"));
        };
        Ok((
            Forwarding::start(stdout, launch.stdout.clone(), label(launch.label_stdout))?,
            Forwarding::start(stderr, launch.stderr.clone(), label(world > 1))?,
        ))
    }
}

/// What a rank finds in its environment.
fn environment(
    launch: &Launch,
    place: &NodePlace,
    local: u32,
) -> impl Iterator<Item = (&'static str, OsString)> {
    [
        ("RANK", (place.first_rank + local).to_string()),
        ("WORLD_SIZE", place.world.to_string()),
        ("LOCAL_RANK", local.to_string()),
        ("LOCAL_WORLD_SIZE", launch.ranks.to_string()),
        ("GROUP_RANK", place.node.to_string()),
        ("GROUP_WORLD_SIZE", place.nodes.to_string()),
        ("MASTER_ADDR", place.rendezvous.ip().to_string()),
        ("MASTER_PORT", place.master_port.to_string()),
        ("UNISONO_RENDEZVOUS", place.rendezvous.to_string()),
        ("UNISONO_TOKEN", place.token.to_hex()),
    ]
    .into_iter()
    .map(|(name, value)| (name, value.into()))
}

/// Reports the end of a process without reaping it.
fn watch(local: u32, pid: Pid, events: Sender<Event>) -> io::Result<()> {
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
                // Reaped by someone else: how it ended is not known, that it did is.
                Err(_) => break Ending::Code(1),
            }
        };
        let _ = events.send(Event::Ended { local, ending });
    };
    std::thread::Builder::new().name("unisono-wait".into()).spawn(wait).map(drop)
}
