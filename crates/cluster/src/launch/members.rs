//! The members of the job on this node: all are started, some are started again, none is left
//! behind.

use std::mem;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::guard::Guard;
use super::listeners::Listeners;
use super::nodes::NodePlace;
use super::process::{Process, Starter};
use super::strays::Mark;
use super::{Event, Launch, LaunchError, Member};

/// All servers and ranks of this node.
pub(super) struct Members<'a> {
    /// The servers, then the ranks.
    slots: Vec<Slot>,
    servers: u32,
    starter: Starter<'a>,
}

/// The place of one member, filled by one process after the other.
struct Slot {
    process: Process,
    /// Processes of earlier lives: the guard still knows their groups, whose numbers must not
    /// become another's.
    past: Vec<Process>,
}

/// Lives that have ended and are kept until the guard forgets them. More: more processes that have ended stay
/// in the system's table. Fewer: another guard is started more often.
const PAST_LIVES: usize = 64;

/// How long to wait for the last output of processes that have all been killed: only one that hid
/// from the launcher can still hold a pipe.
const DRAIN: Duration = Duration::from_secs(1);

impl<'a> Members<'a> {
    /// Starts every member, the servers first; either all of them run, or none is left.
    pub fn start(
        launch: &'a Launch,
        place: NodePlace,
        events: Sender<Event>,
    ) -> Result<Members<'a>, LaunchError> {
        let listeners = match launch.listeners_for_ranks {
            true => Some(Listeners::bind(launch.ranks as usize)?),
            false => None,
        };
        let mark = Mark::new()?;
        let guard = Guard::start(&mark, events.clone());
        let servers = launch.server_count();
        let members = (servers + launch.ranks) as usize;
        let starter = Starter { launch, place, members, listeners, mark, guard, events };
        let mut members = Members { slots: Vec::new(), servers, starter };
        let order = (0..servers).map(Member::Server);
        for member in order.chain((0..launch.ranks).map(Member::Rank)) {
            let process = members.starter.start(member, 0)?;
            members.slots.push(Slot { process, past: Vec::new() });
        }
        Ok(members)
    }

    /// What people call a member.
    pub fn name(&self, member: Member) -> String {
        self.starter.name(member)
    }

    /// The process of the present life of a member.
    pub fn pid(&self, member: Member) -> u32 {
        self.slot(member).process.child.id()
    }

    /// Kills what a member that has ended left in its group.
    pub fn clear(&self, member: Member) {
        self.slot(member).process.signal_group(Signal::KILL);
    }

    /// Begins a life of a member that has ended.
    pub fn start_again(&mut self, member: Member, life: u32) -> Result<(), LaunchError> {
        let process = self.starter.start(member, life)?;
        let slot = &mut self.slots[member.index(self.servers)];
        let past = mem::replace(&mut slot.process, process);
        slot.past.push(past);
        if self.slots.iter().map(|slot| slot.past.len()).sum::<usize>() >= PAST_LIVES {
            self.forget_past();
        }
        Ok(())
    }

    /// Reaps past lives, once no guard knows their groups any more.
    fn forget_past(&mut self) {
        let groups: Vec<Pid> = self.slots.iter().map(|slot| slot.process.group).collect();
        let Starter { guard, mark, events, .. } = &mut self.starter;
        guard.renew(mark, events.clone(), groups.into_iter());
        for mut past in self.slots.iter_mut().flat_map(|slot| slot.past.drain(..)) {
            past.signal_group(Signal::KILL);
            let _ = past.child.wait();
        }
    }

    /// Starts another guard in the place of one that ended.
    pub fn replace_guard(&mut self, ended: u32) {
        let groups: Vec<Pid> = self.processes().map(|process| process.group).collect();
        let Starter { guard, mark, events, .. } = &mut self.starter;
        guard.replace(ended, mark, events.clone(), groups.into_iter());
    }

    /// Tells every member, and the processes it started, to end.
    pub fn tell_to_end(&self, signal: Signal) {
        let groups: Vec<Pid> = self.processes().map(|process| process.group).collect();
        // A process that is stopped hears nothing before it continues.
        for signal in [signal, Signal::CONT] {
            self.signal_groups(signal);
            self.starter.mark.signal_strays(&groups, signal);
        }
    }

    /// Kills every member and the processes it started.
    pub fn kill(&self) {
        self.signal_groups(Signal::KILL);
        self.starter.mark.kill_all();
    }

    fn signal_groups(&self, signal: Signal) {
        self.processes().for_each(|process| process.signal_group(signal));
    }

    /// The last lines of a member's stderr, complete if it closed its stderr by now.
    pub fn last_words(&self, member: Member) -> Vec<String> {
        let stderr = &self.slot(member).process.stderr;
        stderr.wait_end(Duration::from_millis(250));
        stderr.tail()
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        self.slots.iter().flat_map(|slot| slot.past.iter().chain([&slot.process]))
    }

    fn slot(&self, member: Member) -> &Slot {
        &self.slots[member.index(self.servers)]
    }
}

impl Drop for Members<'_> {
    /// Kills what is left of every member, lets the output drain, reaps.
    fn drop(&mut self) {
        self.kill();
        let deadline = Instant::now() + DRAIN;
        for pipe in self.processes().flat_map(|process| [&process.stdout, &process.stderr]) {
            pipe.wait_end(deadline.saturating_duration_since(Instant::now()));
        }
        // Before the groups' numbers become free.
        self.starter.guard = Guard::none();
        for slot in &mut self.slots {
            for process in slot.past.iter_mut().chain([&mut slot.process]) {
                if let Err(error) = process.child.wait() {
                    log::warn!("cannot reap process {}: {error}", process.child.id());
                }
            }
        }
    }
}
