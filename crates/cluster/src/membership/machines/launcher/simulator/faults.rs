//! What goes wrong, to which machine, and until when.

use super::hosts::{Brought, Host};
use super::world::{Event, MS, Time, World};

/// Which machine.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    Leader,
    Any(u64),
    Host(usize),
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    KillLauncher(Target),
    LoseMachine(Target),
    StopLauncher(Target, Time),
    /// With all its workers.
    Suspend(Target, Time),
    KillWorker(u64),
    StopWorker(u64, Time),
    /// Two machines lose each other, for so long.
    Cut(Target, u64, Time),
    /// A machine loses all others, and maybe the store.
    Isolate(Target, bool, Time),
    StoreAway(Time),
    StoreCut(Target, Time),
    Flaky(Time),
    Blip(Target),
    Join(u32),
    Leave(Target),
    LeaveAll,
    LoseAll,
}

/// A fault that waits for a launcher to come to a point.
pub struct Trap {
    pub point: &'static str,
    pub after: u64,
    pub delay: Time,
    pub fault: Fault,
}

impl World {
    pub fn draw_fault(&mut self, target: Option<Target>) -> Fault {
        let length = match self.random.below(4) {
            0 => 5_000 * MS,
            1 => self.random.between(1, 200 * MS),
            2 => self.random.between(1, self.timeout),
            _ => self.random.between(self.timeout, 3 * self.timeout),
        };
        let other = self.random.below(64);
        let target = target.unwrap_or(match self.random.one_in(2) {
            true => Target::Leader,
            false => Target::Any(self.random.below(64)),
        });
        match self.random.below(if matches!(target, Target::Host(_)) { 14 } else { 26 }) {
            0 | 1 => Fault::KillLauncher(target),
            2 => Fault::LoseMachine(target),
            3 | 4 => Fault::StopLauncher(target, length),
            5 => Fault::Suspend(target, length),
            6 => Fault::Cut(target, other, length),
            7 => Fault::Isolate(target, false, length),
            8 => Fault::Isolate(target, true, length),
            9 => Fault::StoreAway(length),
            10 => Fault::StoreCut(target, length),
            11 => Fault::Flaky(length),
            12 => Fault::Blip(target),
            13 => Fault::Leave(target),
            14..17 => Fault::KillWorker(other),
            17 | 18 => Fault::StopWorker(other, length),
            19 | 20 => Fault::Join(self.random.between(1, 3) as u32),
            21 => Fault::LeaveAll,
            22 => Fault::LoseAll,
            23 => Fault::Blip(Target::Any(other)),
            24 => Fault::Leave(Target::Leader),
            _ => Fault::Cut(Target::Any(other), other / 8, length),
        }
    }

    /// A launcher has come to a point.
    pub fn spring(&mut self, point: &'static str, host: usize) {
        for index in (0..self.traps.len()).rev() {
            if self.traps[index].point != point {
                continue;
            }
            if self.traps[index].after > 0 {
                self.traps[index].after -= 1;
                continue;
            }
            let Trap { delay, mut fault, .. } = self.traps.swap_remove(index);
            match &mut fault {
                Fault::KillLauncher(target)
                | Fault::LoseMachine(target)
                | Fault::StopLauncher(target, _)
                | Fault::Suspend(target, _)
                | Fault::Cut(target, ..)
                | Fault::Isolate(target, ..)
                | Fault::StoreCut(target, _)
                | Fault::Blip(target)
                | Fault::Leave(target) => *target = Target::Host(host),
                _ => {}
            }
            self.plan(self.now + delay, Event::Fault(fault));
        }
    }

    /// Machines that take part.
    fn up(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|host| self.hosts[*host].launcher.is_some()).collect()
    }

    fn host_of(&self, target: Target) -> Option<usize> {
        let up = self.up();
        match target {
            Target::Leader => self.leader(),
            Target::Any(number) if !up.is_empty() => Some(up[number as usize % up.len()]),
            Target::Any(_) => None,
            Target::Host(host) => Some(host).filter(|host| up.contains(host)),
        }
    }

    pub fn strike(&mut self, fault: Fault) {
        if self.is_told {
            println!("{:>12} µs {fault:?}", self.now);
        }
        match fault {
            Fault::KillLauncher(target) => self.lose(target, false),
            Fault::LoseMachine(target) => self.lose(target, true),
            Fault::StopLauncher(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.stop_host(host, length);
                }
            }
            Fault::Suspend(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.stop_host(host, length);
                    let workers = self.of_host(host);
                    workers.into_iter().for_each(|index| self.stop_worker(index, length));
                }
            }
            Fault::KillWorker(number) => {
                if let Some(index) = self.worker(number) {
                    self.tally.count("workers killed");
                    self.end_worker(index, false);
                }
            }
            Fault::StopWorker(number, length) => {
                if let Some(index) = self.worker(number) {
                    self.stop_worker(index, length);
                }
            }
            Fault::Cut(target, other, length) => {
                if let (Some(one), Some(other)) =
                    (self.host_of(target), self.host_of(Target::Any(other)))
                    && one != other
                {
                    if self.up().len() > 2 {
                        self.tally.count("asymmetric partitions");
                    }
                    self.cut(one, other, length);
                }
            }
            Fault::Isolate(target, with_store, length) => {
                let Some(one) = self.host_of(target) else { return };
                if self.up().len() > 2 {
                    self.tally.count("minorities cut off");
                }
                (0..self.hosts.len()).for_each(|other| self.cut(one, other, length));
                if with_store {
                    self.hosts[one].no_store_until = self.now + length;
                }
            }
            Fault::StoreAway(length) => {
                self.tally.count("the store is away");
                self.store.away_until = self.now + length;
            }
            Fault::StoreCut(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.tally.count("machines without the store");
                    self.hosts[host].no_store_until = self.now + length;
                }
            }
            Fault::Flaky(length) => self.store.flaky_until = self.now + length,
            Fault::Blip(target) => {
                if let Some(host) = self.host_of(target) {
                    self.blip(host);
                }
            }
            Fault::Join(workers) => self.join(workers, 0),
            Fault::Leave(target) => {
                if let Some(host) = self.host_of(target) {
                    self.plan(self.now, Event::Deliver(host, Brought::Leave));
                }
            }
            Fault::LeaveAll => {
                let up = self.up();
                // Others take over, or all is stopped for a while.
                if (self.now / MS).is_multiple_of(3) {
                    self.tally.count("all machines told to leave");
                    let delay = 1_000 * MS + self.random.below(2_000 * MS);
                    self.join(3, delay);
                } else {
                    self.join(3, 0);
                }
                for host in up {
                    let at = self.now + 50 * MS + self.random.below(500 * MS);
                    self.plan(at, Event::Deliver(host, Brought::Leave));
                }
            }
            Fault::LoseAll => {
                self.tally.count("all machines lost");
                for host in self.up() {
                    let is_lost = self.random.one_in(2);
                    self.end_host(host, is_lost);
                }
                for _ in 0..2 {
                    let delay = self.random.below(3_000 * MS);
                    self.join(3, delay);
                }
            }
        }
    }

    fn lose(&mut self, target: Target, is_lost: bool) {
        let Some(host) = self.host_of(target) else { return };
        let is_leading = self.hosts[host].is_leading();
        self.tally.count(if is_leading { "leaders killed" } else { "followers killed" });
        self.end_host(host, is_lost);
        if self.random.one_in(2) {
            let delay = self.random.below(2_000 * MS);
            self.join(self.hosts[host].workers, delay);
        }
    }

    fn cut(&mut self, one: usize, other: usize, length: Time) {
        if one != other {
            let until = self.cuts.entry((one.min(other), one.max(other))).or_default();
            *until = (*until).max(self.now + length);
        }
    }

    fn worker(&self, number: u64) -> Option<usize> {
        let count = self.living.len();
        (count > 0).then(|| self.living[number as usize % count])
    }

    fn join(&mut self, workers: u32, delay: Time) {
        self.hosts.push(Host::new(workers));
        self.plan(self.now + delay, Event::Apply(self.hosts.len() - 1));
    }

    /// All faults are over, and there are enough machines.
    pub fn heal(&mut self) {
        let stays = |host: &&Host| host.is_alive && !host.is_leaving;
        let mut workers: u32 = self.hosts.iter().filter(stays).map(|host| host.workers).sum();
        while workers < (self.settings.least as u32).max(1) {
            self.join(3, 0);
            workers += 3;
        }
    }
}
