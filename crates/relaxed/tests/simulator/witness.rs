//! What the simulator knows by itself about one server, and holds against what the server says and does.
//!
//! The witness sees everything and forgets nothing. It keeps its own account of who sits at the server
//! and at which clock, of every push that was settled and every one that was acknowledged, and derives
//! from that what must be true:
//!
//! - **Reads.** When a worker reads at clock `c` with bound `S`, every member that is present has clock
//!   `c − S` or more, and there is no push of a present life for a clock below `c − S` that is under
//!   way and not yet settled; those that are not under way are acknowledged, and so contained. In
//!   lock-step the weights contain the rounds below `c` and no other.
//! - **Pushes.** None is settled twice, and the numbers of a life are settled without gaps. One that
//!   was acknowledged is contained from then on.
//! - **Commits.** All pushes of a round are for that round, and every worker has one that is present
//!   and was so when the round began or entered at it.
//! - **Ages** are what is counted here, and decide about dropping.

use std::collections::{BTreeMap, BTreeSet};

use unisono_relaxed::server::core::{Age, Core, Entry, PushId};
use unisono_relaxed::staleness::StalenessPolicy;
use unisono_relaxed::{Clock, Life};

use crate::message::Sender;
use crate::process::Process;
use crate::server::Weights;

/// What was found to be wrong.
pub type Violation = String;

/// Ends the caller with a violation if the condition does not hold.
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use require;

pub struct Witness {
    pub lockstep: bool,
    pub stale: StalenessPolicy,
    seats: BTreeMap<u32, Seat>,
    settled: BTreeSet<(u32, Life, u64)>,
    /// The last number settled of each life.
    last: BTreeMap<(u32, Life), u64>,
    acknowledged: BTreeSet<(u32, Life, u64)>,
    updates: u64,
    applied: u64,
    dropped: u64,
    duplicates: u64,
    /// In lock-step: for which round each commit was, and whose pushes it contains.
    pub commits: Vec<(Clock, Vec<u32>)>,
}

#[derive(Clone, Copy)]
struct Seat {
    life: Life,
    present: bool,
    clock: Clock,
    /// The version that it read last, and its lead then.
    read: Option<(u64, u64)>,
    /// Whether the server still knows what it read, or takes the time of its joining for that.
    is_known: bool,
}

impl Witness {
    pub fn new(lockstep: bool, stale: StalenessPolicy) -> Witness {
        Witness {
            lockstep,
            stale,
            seats: BTreeMap::new(),
            settled: BTreeSet::new(),
            last: BTreeMap::new(),
            acknowledged: BTreeSet::new(),
            updates: 0,
            applied: 0,
            dropped: 0,
            duplicates: 0,
            commits: Vec::new(),
        }
    }

    pub fn joined(&mut self, who: Sender) {
        let seat = self.seats.entry(who.worker).or_insert(Seat::new(who.life));
        if seat.life != who.life {
            *seat = Seat::new(who.life);
        }
        seat.present = false;
        if seat.read.is_none() {
            seat.read = Some((self.updates, 0));
        }
    }

    pub fn entered(&mut self, who: Sender, clock: Clock, round: Clock) {
        if let Some(seat) = self.seats.get_mut(&who.worker) {
            seat.present = true;
            seat.clock =
                seat.clock.max(clock).max(if self.lockstep { round } else { Clock::START });
        }
    }

    /// A worker has left, in this life if one is given.
    pub fn left(&mut self, worker: u32, life: Option<Life>) {
        if let Some(seat) = self.seats.get_mut(&worker)
            && life.is_none_or(|life| life == seat.life)
        {
            seat.present = false;
        }
    }

    /// A read was admitted.
    pub fn read(
        &mut self,
        who: Sender,
        clock: Clock,
        bound: Option<u64>,
        round: Clock,
        (server, processes): (usize, &[Process]),
    ) -> Result<(), Violation> {
        let slowest = self.slowest().unwrap_or(clock);
        if let Some(bound) = bound {
            let least = Clock(clock.0.saturating_sub(bound));
            require!(
                slowest >= least,
                "worker {} reads at clock {clock} while the slowest is at {slowest}: more than {bound} \
                 behind",
                who.worker
            );
            for process in processes.iter().filter(|_| !self.lockstep) {
                let me = process.me;
                let sits = |seat: &Seat| seat.present && seat.life == me.life;
                let present = self.seats.get(&me.worker).is_some_and(sits);
                let missing = process.pending(server).filter(|push| {
                    present && push.clock < least && !self.settled.contains(&identity(push))
                });
                require!(
                    missing.is_none(),
                    "worker {} reads at clock {clock} with bound {bound} without {missing:?}",
                    who.worker
                );
            }
        }
        if self.lockstep {
            require!(round == clock, "a read at clock {clock} saw the weights of round {round}");
        }
        let seat = self.seats.get_mut(&who.worker);
        let seat = seat.filter(|seat| seat.present && seat.life == who.life);
        let Some(seat) = seat else { return Err(format!("{who:?} reads without being present")) };
        require!(seat.clock == clock, "{who:?} is at clock {} and reads at {clock}", seat.clock);
        seat.read = Some((self.updates, clock.lead_over(slowest)));
        seat.is_known = true;
        Ok(())
    }

    /// A push was found to be settled already.
    pub fn duplicate(&mut self) {
        self.duplicates += 1;
    }

    /// Pushes are settled; `contents` are those whose gradients went into the weights or were dropped.
    pub fn settle(
        &mut self,
        entry: &Entry,
        contents: &[PushId],
        round: Clock,
        processes: &[Process],
        server: usize,
    ) -> Result<(), Violation> {
        let present = self.present();
        for push in contents {
            require!(self.settled.insert(identity(push)), "{push:?} is settled twice");
            let last = self.last.entry((push.worker, push.life)).or_insert(0);
            require!(
                push.number == *last + 1,
                "after push {last} of this life {push:?} was settled"
            );
            *last = push.number;
        }
        if self.lockstep && entry.update > 0 {
            self.commit(entry, round, present)?;
        } else if self.lockstep {
            require!(contents.iter().all(|push| push.clock != round), "{entry:?} in round {round}");
        } else {
            let [(push, age)] = entry.pushes[..] else {
                return Err(format!("an update of {} pushes", entry.pushes.len()));
            };
            self.judge(entry, push, age, present)?;
            let process = processes.iter().find(|p| (p.me.worker, p.me.life) == of(&push));
            self.age_as_the_worker_sees_it(push, age, process, server)?;
        }
        match entry.update {
            0 => self.dropped += contents.len() as u64,
            update => {
                require!(update == self.updates + 1, "update {update} follows {}", self.updates);
                self.updates = update;
                self.applied += contents.len() as u64;
            }
        }
        for push in contents {
            if let Some(seat) = self.seats.get_mut(&push.worker)
                && (self.lockstep || seat.life == push.life)
            {
                seat.clock = seat.clock.max(push.clock.next());
            }
        }
        Ok(())
    }

    /// A worker was told that its push is settled.
    pub fn acknowledge(&mut self, push: &PushId) -> Result<(), Violation> {
        self.acknowledged.insert(identity(push));
        require!(
            self.settled.contains(&identity(push)),
            "{push:?} is acknowledged, but not settled"
        );
        Ok(())
    }

    /// The server's memory is gone.
    pub fn crashed(&mut self) {
        self.duplicates = 0;
        for seat in self.seats.values_mut() {
            *seat = Seat::new(seat.life);
        }
    }

    /// The server has restored these weights.
    pub fn restored(&self, weights: &Weights) -> Result<(), Violation> {
        let contents = weights.applied.iter().chain(&weights.dropped);
        let contents: BTreeSet<_> = contents.map(identity).collect();
        let lost = self.acknowledged.difference(&contents).next();
        require!(lost.is_none(), "after a crash push {lost:?} is missing, and was acknowledged");
        Ok(())
    }

    /// What must hold after every event.
    pub fn compare(&self, core: &Core, weights: &Weights) -> Result<(), Violation> {
        let ledger = core.ledger();
        let ours = (self.applied, self.dropped, self.duplicates);
        let theirs = (ledger.applied, ledger.dropped, ledger.duplicates);
        require!(ours == theirs, "the ledger says {ledger:?}, counted were {ours:?}");
        let held = (weights.applied.len() as u64, weights.dropped.len() as u64);
        require!(held == (self.applied, self.dropped), "the weights hold {held:?} of {ours:?}");
        require!(
            core.updates() == self.updates,
            "{} updates, counted were {}",
            core.updates(),
            self.updates
        );
        let (ours, theirs) =
            ((self.present(), self.slowest()), (core.present_members(), core.slowest()));
        require!(ours == theirs, "members and the slowest are {theirs:?}, counted were {ours:?}");
        Ok(())
    }

    fn commit(&mut self, entry: &Entry, round: Clock, present: u32) -> Result<(), Violation> {
        // The round has gone on with the commit.
        let clock = Clock(round.0 - 1);
        let workers: Vec<u32> = entry.pushes.iter().map(|(push, _)| push.worker).collect();
        let distinct: BTreeSet<u32> = workers.iter().copied().collect();
        require!(distinct.len() == workers.len(), "two pushes of a worker in {entry:?}");
        for (push, age) in &entry.pushes {
            require!(push.clock == clock, "{push:?} in round {clock}");
            require!(*age == Age { lead: 0, delay: 0, present }, "{age:?} of {present}");
        }
        for (worker, seat) in self.seats.iter().filter(|(_, seat)| seat.present) {
            require!(
                seat.clock > clock || distinct.contains(worker),
                "worker {worker} is present at clock {} and missing in round {clock}",
                seat.clock
            );
        }
        let last = self.commits.last().map(|(last, _)| *last);
        require!(last.is_none_or(|last| last < clock), "round {clock} after {last:?}");
        self.commits.push((clock, workers));
        Ok(())
    }

    fn judge(&self, entry: &Entry, push: PushId, age: Age, present: u32) -> Result<(), Violation> {
        let seat = self.seats.get(&push.worker).filter(|seat| seat.life == push.life);
        let Some((version, lead)) = seat.and_then(|seat| seat.read) else {
            return Err(format!("{push:?} of a worker that has not joined"));
        };
        let counted = Age { lead, delay: self.updates - version, present };
        require!(age == counted, "{push:?} is {age:?}, counted was {counted:?}");
        let limit = if let StalenessPolicy::Drop(limit) = self.stale { Some(limit) } else { None };
        // More than the limit, in clocks, without rounding.
        let drop = limit.is_some_and(|limit| age.delay > limit * u64::from(present.max(1)));
        require!(
            drop == (entry.update == 0),
            "{push:?} with {age:?} became update {}",
            entry.update
        );
        Ok(())
    }

    /// The delay is that since the weights which the worker has used; a crash may hide a part of it.
    fn age_as_the_worker_sees_it(
        &self,
        push: PushId,
        age: Age,
        process: Option<&Process>,
        server: usize,
    ) -> Result<(), Violation> {
        let is_known = self.seats.get(&push.worker).is_some_and(|seat| seat.is_known);
        let version = process.and_then(|process| process.version(server));
        let Some(version) = version.filter(|_| is_known) else { return Ok(()) };
        let delay = self.updates - version;
        require!(
            age.delay == delay,
            "{push:?} is {age:?}, and the worker's weights {delay} behind"
        );
        Ok(())
    }

    fn present(&self) -> u32 {
        self.seats.values().filter(|seat| seat.present).count() as u32
    }

    fn slowest(&self) -> Option<Clock> {
        self.seats.values().filter(|seat| seat.present).map(|seat| seat.clock).min()
    }
}

impl Seat {
    fn new(life: Life) -> Seat {
        Seat { life, present: false, clock: Clock::START, read: None, is_known: false }
    }
}

fn identity(push: &PushId) -> (u32, Life, u64) {
    (push.worker, push.life, push.number)
}

fn of(push: &PushId) -> (u32, Life) {
    (push.worker, push.life)
}
