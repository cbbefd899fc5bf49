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
use super::restarts::Life;
use super::strays::Mark;
use super::{Event, Launch, LaunchError, Member};

/// All servers and ranks of this node.
pub(super) struct Members<'a> {
    /// The servers, then the ranks.
    slots: Vec<Slot>,
    servers: usize,
    starter: Starter<'a>,
}

/// The place of one member, filled by one process after the other.
struct Slot {
    member: Member,
    process: Process,
    /// Processes of earlier lives: the guard still knows their groups, whose numbers must not
    /// become another's.
    past: Vec<Process>,
    life: u32,
    /// How many lives in a row before this one ended at once.
    hasty: u32,
    since: Instant,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Ended, and to be started again.
    Pausing {
        until: Instant,
    },
    Ended,
}

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
        let servers = launch.servers.as_ref().map_or(0, |servers| servers.commands().len());
        let members = servers + launch.ranks as usize;
        let starter = Starter { launch, place, members, listeners, mark, guard, events };
        let mut members = Members { slots: Vec::new(), servers, starter };
        let order = (0..).take(servers).map(Member::Server);
        for member in order.chain((0..launch.ranks).map(Member::Rank)) {
            let process = members.starter.start(member, 0)?;
            members.slots.push(Slot::new(member, process));
        }
        Ok(members)
    }

    /// What people call a member.
    pub fn name(&self, member: Member) -> String {
        self.starter.name(member)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Notes that a member's process ended; returns the life that this was.
    pub fn note_ended(&mut self, member: Member) -> Life {
        let slot = self.slot_mut(member);
        slot.state = State::Ended;
        Life { number: slot.life, lasted: slot.since.elapsed(), hasty: slot.hasty }
    }

    /// Whether every rank's process has ended, and none is to be started again.
    pub fn ranks_ended(&self) -> bool {
        self.slots[self.servers..].iter().all(|slot| slot.state == State::Ended)
    }

    /// Whether every process has ended, and none is to be started again.
    pub fn all_ended(&self) -> bool {
        self.slots.iter().all(|slot| slot.state == State::Ended)
    }

    /// Prepares the next life of a member that has ended: what the last one left in its group is
    /// killed now, the next begins after a pause.
    pub fn start_later(&mut self, member: Member, last: &Life, pause: Duration) {
        let slot = self.slot_mut(member);
        slot.process.signal_group(Signal::KILL);
        slot.hasty = last.hasty_after();
        slot.state = State::Pausing { until: Instant::now() + pause };
    }

    /// When the next pause is over.
    pub fn next_start(&self) -> Option<Instant> {
        self.slots.iter().filter_map(Slot::pause_end).min()
    }

    /// A member whose pause is over.
    pub fn due(&self, now: Instant) -> Option<Member> {
        let is_due = |slot: &&Slot| slot.pause_end().is_some_and(|until| until <= now);
        self.slots.iter().find(is_due).map(|slot| slot.member)
    }

    /// Begins the next life of a member. If that fails, it has ended at once.
    pub fn start_again(&mut self, member: Member) -> Result<(), LaunchError> {
        let slot = self.slot_mut(member);
        slot.life += 1;
        slot.since = Instant::now();
        slot.state = State::Ended;
        let life = slot.life;
        let process = self.starter.start(member, life)?;
        let slot = self.slot_mut(member);
        let past = mem::replace(&mut slot.process, process);
        slot.past.push(past);
        slot.state = State::Running;
        Ok(())
    }

    /// Starts another guard in the place of one that ended.
    pub fn replace_guard(&mut self, ended: u32) {
        let groups: Vec<Pid> = self.processes().map(|process| process.group).collect();
        let Starter { guard, mark, events, .. } = &mut self.starter;
        guard.replace(ended, mark, events.clone(), groups.into_iter());
    }

    /// Those who wait for their next life have had their last.
    pub fn start_nobody_again(&mut self) {
        for slot in self.slots.iter_mut().filter(|slot| slot.pause_end().is_some()) {
            slot.state = State::Ended;
        }
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
        &self.slots[self.index(member)]
    }

    fn slot_mut(&mut self, member: Member) -> &mut Slot {
        let index = self.index(member);
        &mut self.slots[index]
    }

    fn index(&self, member: Member) -> usize {
        match member {
            Member::Server(server) => server as usize,
            Member::Rank(local) => self.servers + local as usize,
        }
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

impl Slot {
    fn new(member: Member, process: Process) -> Slot {
        Slot {
            member,
            process,
            past: Vec::new(),
            life: 0,
            hasty: 0,
            since: Instant::now(),
            state: State::Running,
        }
    }

    fn pause_end(&self) -> Option<Instant> {
        match self.state {
            State::Pausing { until } => Some(until),
            State::Running | State::Ended => None,
        }
    }
}
