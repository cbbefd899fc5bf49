//! Decides what becomes of a running job: which members are started again, and how the job ends.
//! Decisions without I/O, and without a clock of its own.
//!
//! The first thing that goes wrong becomes the *verdict*; nothing that follows from it can change
//! it. With the verdict the members are told to end, with a deadline after which they are killed.
//! A member that is started again has not gone wrong. When all ranks have ended well, the caller has
//! its say, and the verdict is success: of the members, only servers are left to be told.
//!
//! Node 0's verdict holds for all nodes; the others report what happened to them, act on it at
//! once, and end when node 0 says that the job is over.

use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};

use super::nodes::Message;
use super::restarts::{Budget, Life, Restarts, is_final};
use super::{Ending, Event, Failure, Member, Outcome, ServerFailure, output_lost};

/// A job on this node. Times count from the start of its members.
pub(super) struct Supervisor {
    settings: Settings,
    /// The servers, then the ranks.
    slots: Vec<Slot>,
    /// The launchers that this one is connected to: on node 0 all others, elsewhere node 0.
    others: Vec<Other>,
    restarts: Budget,
    at_end: AtEnd,
    /// Whether the workers of an elastic job have come to a result: none is needed any more.
    is_complete: bool,
    verdict: Option<Outcome>,
    /// When members that were told to end are killed.
    kill_at: Option<Duration>,
    /// The first failures, until it is clear which of them is the cause.
    failures: Vec<(Member, Ending)>,
    settle_at: Option<Duration>,
    decisions: Vec<Decision>,
}

/// What is fixed for a job.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub node: u32,
    /// How many nodes there are.
    pub nodes: u32,
    /// The number of the first rank of this node.
    pub first_rank: u32,
    pub ranks: u32,
    pub servers: u32,
    /// How long members may take to end when told to.
    pub grace: Duration,
    pub restarts: Restarts,
    /// The fewest workers of a job in which the others go on when one is lost.
    pub least: Option<u32>,
    /// Whether the caller wants something done between the end of the ranks and that of the servers.
    pub at_end: bool,
}

/// What is to be done now, in this order.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// A member that ended will be started again: what it left running is killed.
    Clear { member: Member, ending: Ending, restart: u32, limit: u32 },
    /// A member that ended will not be started again, and the others go on.
    LeaveOut { member: Member, ending: Ending, limit: u32 },
    /// Start this life of a member. If that fails, it has [ended](Event::Ended).
    Start { member: Member, life: u32 },
    /// The rendezvous does not wait for this rank any longer.
    Gone { rank: u32 },
    /// Say this to the other launchers.
    Tell(Message),
    /// Do what the caller wants done at the end, and tell when it is [done](Event::AtEndDone).
    BeginAtEnd,
    /// A member has failed for good: what were its [last words](Event::LastWords)?
    Hear { member: Member, ending: Ending },
    /// The job fails: call off the rendezvous, and tell people and the other launchers.
    Fail(Outcome),
    /// Tell all members to end, by this signal.
    TellToEnd { signal: i32 },
    /// Kill all members.
    Kill,
}

struct Slot {
    member: Member,
    life: u32,
    /// How many lives in a row before this one ended at once.
    hasty: u32,
    since: Duration,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Ended, and to be started again.
    Pausing {
        until: Duration,
    },
    Ended,
}

struct Other {
    node: u32,
    /// Whether its ranks have all ended well. Node 0 is never finished: it decides.
    finished: bool,
}

/// What the caller wants done between the end of the ranks and that of the servers.
#[derive(PartialEq)]
enum AtEnd {
    Ahead,
    Underway,
    /// Or there is nothing to do.
    Done,
}

/// How long after a member exits with an error others are awaited that were killed by a signal.
///
/// A dying process closes its connections before its end can be seen, so that its peers may fail
/// and exit first. Longer finds the true cause on slower machines; shorter ends the job sooner.
const SETTLE: Duration = Duration::from_millis(50);

/// How long workers may take to leave when they are not needed any more. Longer: a run whose last worker is
/// stopped ends later. Shorter: a worker is killed while it closes its files.
const LEAVING: Duration = Duration::from_secs(5);

impl Supervisor {
    /// All members have just been started.
    pub fn new(settings: Settings) -> Supervisor {
        let Settings { node, nodes, ranks, servers, restarts, at_end, .. } = settings;
        let members = (0..servers).map(Member::Server).chain((0..ranks).map(Member::Rank));
        let others = if node == 0 { 1..nodes } else { 0..1 };
        Supervisor {
            slots: members.map(Slot::new).collect(),
            others: others.map(|node| Other { node, finished: false }).collect(),
            restarts: Budget::new(restarts),
            at_end: if at_end { AtEnd::Ahead } else { AtEnd::Done },
            is_complete: false,
            verdict: None,
            kill_at: None,
            failures: Vec::new(),
            settle_at: None,
            decisions: Vec::new(),
            settings,
        }
    }

    /// The outcome, once no process is left and there is nothing to wait for.
    pub fn outcome(&self) -> Option<&Outcome> {
        self.verdict.as_ref().filter(|_| self.all_ended())
    }

    /// When time alone changes something: see [`Supervisor::tick`].
    pub fn deadline(&self) -> Option<Duration> {
        let pauses = self.slots.iter().filter_map(Slot::pause_end);
        pauses.chain(self.kill_at).chain(self.settle_at).min()
    }

    /// Something happened.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Decision> {
        match event {
            Event::Ended { member, ending } => self.on_ended(now, member, ending),
            Event::LastWords { member, ending, stderr } => {
                self.decide(now, self.failed(member, ending, stderr));
            }
            Event::AtEndDone => self.at_end = AtEnd::Done,
            Event::Signal(signal) => self.on_signal(now, signal),
            Event::Heard { message: Message::Exited { rank }, .. } => {
                self.decisions.push(Decision::Gone { rank });
            }
            Event::Heard { node, message: Message::Finished } => self.on_finished(node),
            Event::Heard { message: Message::Over(outcome), .. } => self.decide(now, outcome),
            Event::Complete => self.on_complete(now),
            Event::TooFewWorkers { ready, least } => {
                self.decide(now, Outcome::TooFewWorkers { ready: ready as u32, least });
            }
            Event::Superseded => self.decide(now, Outcome::Superseded),
            Event::NoProgress { epochs } => self.decide(now, Outcome::NoProgress { epochs }),
            Event::Heard { .. } | Event::GuardEnded(_) | Event::Membership(_) => {}
            Event::Closed { node } => {
                if self.others.iter().any(|other| other.node == node && !other.finished) {
                    self.decide(now, Outcome::NodeLost { node });
                }
            }
            Event::OutputLost(error) => match &mut self.verdict {
                // Servers are being ended, or all are; what was lost is the end of the ranks' output.
                Some(verdict) if *verdict == Outcome::Success => *verdict = output_lost(&error),
                _ => self.decide(now, output_lost(&error)),
            },
        }
        self.take_decisions(now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Decision> {
        if self.settle_at.is_some_and(|at| at <= now) {
            self.settle_at = None;
            if let Some((member, ending)) = cause(&self.failures) {
                // The verdict first: it may be that nothing is started any more.
                return vec![Decision::Hear { member, ending }];
            }
        }
        if self.kill_at.is_some_and(|at| at <= now) {
            self.kill_at = None;
            self.decisions.push(Decision::Kill);
        }
        let is_due = |slot: &&mut Slot| slot.pause_end().is_some_and(|until| until <= now);
        for slot in self.slots.iter_mut().filter(is_due) {
            slot.life += 1;
            slot.since = now;
            slot.state = State::Running;
            self.decisions.push(Decision::Start { member: slot.member, life: slot.life });
        }
        self.take_decisions(now)
    }

    /// What was decided; and success, when nothing is left to wait for.
    fn take_decisions(&mut self, now: Duration) -> Vec<Decision> {
        let has_ended_well = self.verdict.is_none()
            && self.failures.is_empty()
            && self.ranks_ended()
            && self.others.iter().all(|other| other.finished);
        if has_ended_well && self.at_end == AtEnd::Ahead {
            self.at_end = AtEnd::Underway;
            self.decisions.push(Decision::BeginAtEnd);
        } else if has_ended_well && self.at_end == AtEnd::Done {
            self.decide(now, Outcome::Success);
        }
        std::mem::take(&mut self.decisions)
    }

    fn on_ended(&mut self, now: Duration, member: Member, ending: Ending) {
        let slot = self.slot(member);
        slot.state = State::Ended;
        let lasted = now.saturating_sub(slot.since);
        let life = Life { number: slot.life, lasted, hasty: slot.hasty };
        if ending.is_success() || self.is_complete {
            self.on_ended_well(member);
        } else if self.verdict.is_none() && !self.gets_another_life(now, member, &life, ending) {
            self.on_ended_for_good(now, member, &life, ending);
        }
        if self.ranks_ended() && self.verdict.is_none() && self.failures.is_empty() {
            self.report_to_leader(Message::Finished);
        }
    }

    fn on_ended_for_good(&mut self, now: Duration, member: Member, life: &Life, ending: Ending) {
        if self.can_do_without(life, ending) {
            let (_, limit) = self.restarts.spent();
            return self.decisions.push(Decision::LeaveOut { member, ending, limit });
        }
        self.failures.push((member, ending));
        let settled = matches!(ending, Ending::Signal(_)) || self.slots.len() == 1;
        let at = now + if settled { Duration::ZERO } else { SETTLE };
        self.settle_at = Some(self.settle_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn on_ended_well(&mut self, member: Member) {
        if let Member::Rank(local) = member {
            let rank = self.settings.first_rank + local;
            self.decisions.push(Decision::Gone { rank });
            self.report_to_leader(Message::Exited { rank });
        }
    }

    /// Whether a member that failed will be started again. Not in a job that is about to end for
    /// the failure of another.
    fn gets_another_life(
        &mut self,
        now: Duration,
        member: Member,
        life: &Life,
        ending: Ending,
    ) -> bool {
        if !self.failures.is_empty() {
            return false;
        }
        let Some(pause) = self.restarts.spend(life, ending) else { return false };
        let slot = self.slot(member);
        slot.hasty = life.hasty_after();
        slot.state = State::Pausing { until: now + pause };
        let (restart, limit) = self.restarts.spent();
        self.decisions.push(Decision::Clear { member, ending, restart, limit });
        true
    }

    /// Whether enough workers are left of a job in which the others go on. Mistakes would be repeated.
    fn can_do_without(&self, life: &Life, ending: Ending) -> bool {
        let left = self.slots.iter().filter(|slot| slot.state != State::Ended).count();
        let enough = |least: u32| left >= least.max(1) as usize;
        self.settings.least.is_some_and(enough) && !is_final(life, ending)
    }

    fn on_complete(&mut self, now: Duration) {
        self.is_complete = true;
        // One that is stopped does not hear that it may go.
        self.kill_at = Some(now + LEAVING.min(self.settings.grace));
        for slot in self.slots.iter_mut().filter(|slot| slot.pause_end().is_some()) {
            slot.state = State::Ended;
        }
    }

    fn on_finished(&mut self, node: u32) {
        for other in self.others.iter_mut().filter(|other| other.node == node) {
            other.finished = true;
        }
    }

    fn on_signal(&mut self, now: Duration, signal: i32) {
        // A user who asks twice, or while only servers are left, does not want to wait.
        let at_once = matches!(self.verdict, Some(Outcome::Interrupted { .. } | Outcome::Success));
        self.decide(now, Outcome::Interrupted { signal });
        if at_once {
            self.kill_at = Some(now);
        }
    }

    fn report_to_leader(&mut self, message: Message) {
        if self.settings.node != 0 {
            self.decisions.push(Decision::Tell(message));
        }
    }

    fn failed(&self, member: Member, ending: Ending, stderr: Vec<String>) -> Outcome {
        match member {
            Member::Rank(local) => {
                let Settings { node, first_rank, .. } = self.settings;
                Outcome::Failed(Failure { rank: first_rank + local, node, ending, stderr })
            }
            Member::Server(server) => {
                Outcome::ServerFailed(ServerFailure { server, ending, stderr })
            }
        }
    }

    /// Makes `outcome` the verdict if it is the first, and has the members end.
    fn decide(&mut self, now: Duration, outcome: Outcome) {
        if self.verdict.is_some() {
            return;
        }
        self.settle_at = None;
        for slot in self.slots.iter_mut().filter(|slot| slot.pause_end().is_some()) {
            slot.state = State::Ended;
        }
        self.verdict = Some(outcome.clone());
        let signal = match outcome {
            Outcome::Success if self.all_ended() => return,
            Outcome::Interrupted { signal: SIGINT } => SIGINT,
            _ => SIGTERM,
        };
        if outcome != Outcome::Success {
            self.decisions.push(Decision::Fail(outcome));
        }
        self.decisions.push(Decision::TellToEnd { signal });
        // A grace that no clock can tell has no end.
        self.kill_at = now.checked_add(self.settings.grace);
    }

    /// Whether every rank's process has ended, and none is to be started again.
    fn ranks_ended(&self) -> bool {
        let ranks = &self.slots[self.settings.servers as usize..];
        ranks.iter().all(|slot| slot.state == State::Ended)
    }

    /// Whether every process has ended, and none is to be started again.
    fn all_ended(&self) -> bool {
        self.slots.iter().all(|slot| slot.state == State::Ended)
    }

    fn slot(&mut self, member: Member) -> &mut Slot {
        &mut self.slots[member.index(self.settings.servers)]
    }
}

impl Slot {
    fn new(member: Member) -> Slot {
        Slot { member, life: 0, hasty: 0, since: Duration::ZERO, state: State::Running }
    }

    fn pause_end(&self) -> Option<Duration> {
        match self.state {
            State::Pausing { until } => Some(until),
            State::Running | State::Ended => None,
        }
    }
}

/// Which of several failures caused the others: the first member that a signal killed, rather than
/// those that chose to exit; else the first.
fn cause(failures: &[(Member, Ending)]) -> Option<(Member, Ending)> {
    let killed = failures.iter().find(|(_, how)| matches!(how, Ending::Signal(_)));
    killed.or(failures.first()).copied()
}

#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;
