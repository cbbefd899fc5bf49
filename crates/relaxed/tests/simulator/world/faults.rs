//! What goes wrong. Each fault is counted; a process or shard that it hits notices what it could
//! notice, when it could.

use super::{Event, STEPS, World};
use crate::process::Stage;

impl World {
    /// One of the things that go wrong.
    pub(super) fn fault(&mut self) {
        if self.healed {
            return;
        }
        let pause = self.random.between(1, 2 * self.scenario.fault_every);
        self.plan(pause, Event::Fault);
        let worker = self.random.below(self.scenario.workers) as usize;
        let shard = self.random.below(self.shards.len() as u64) as usize;
        let process = self.workers[worker].process;
        let alive = process.filter(|process| !self.processes[*process].is_over());
        match (self.random.below(100), alive) {
            (0..25, Some(process)) => self.break_connection(process, shard),
            (25..35, Some(process)) => {
                self.tally.reconnects += 1;
                let connection = self.processes[process].connection(shard);
                self.plan(0, Event::Lost { process, shard, connection });
                self.close(process, shard);
            }
            (35..50, Some(process)) => {
                self.tally.worker_crashes += 1;
                self.kill(process);
                let rest = self.random.between(1, 150);
                self.plan(rest, Event::Start { worker });
            }
            (50..55, Some(process)) if self.living() > 1 => {
                self.tally.worker_deaths += 1;
                self.workers[worker].is_dead = true;
                self.kill(process);
            }
            (55..70, Some(process)) => {
                self.tally.pauses += 1;
                self.pause(process);
            }
            (70..75, Some(process)) => {
                self.tally.replacements += 1;
                self.pause(process);
                let rest = self.random.between(0, 50);
                self.workers[worker].process = None;
                self.plan(rest, Event::Start { worker });
            }
            (80.., _) if self.shards[shard].is_up => {
                self.tally.shard_crashes += 1;
                self.crash(shard);
            }
            _ => {}
        }
    }

    /// Workers that are not dead for good.
    fn living(&self) -> usize {
        self.workers.iter().filter(|worker| !worker.is_dead).count()
    }

    fn break_connection(&mut self, process: usize, shard: usize) {
        self.tally.breaks += 1;
        let connection = self.processes[process].connection(shard);
        self.conditions[process].broken[shard] = connection;
        let noticed = self.random.between(1, 50);
        self.plan(noticed, Event::Lost { process, shard, connection });
        // Sometimes only silence tells the shard.
        if self.random.chance(700) {
            self.close(process, shard);
        }
    }

    /// The shard is going to notice that the present connection is closed.
    fn close(&mut self, process: usize, shard: usize) {
        let (from, connection) =
            (self.processes[process].me, self.processes[process].connection(shard));
        let noticed = self.random.between(1, 50);
        self.plan(noticed, Event::Closed { shard, from, connection });
    }

    fn kill(&mut self, process: usize) {
        self.processes[process].stage = Stage::Over;
        for shard in 0..self.shards.len() {
            if self.random.chance(700) {
                self.close(process, shard);
            }
        }
        let worker = self.processes[process].me.worker as usize;
        self.workers[worker].process = None;
    }

    fn pause(&mut self, process: usize) {
        let duration = self.random.between(10, 250);
        self.conditions[process].paused_until = self.now + duration;
    }

    fn crash(&mut self, shard: usize) {
        self.shards[shard].crash();
        let rest = self.random.between(1, 80);
        self.plan(rest, Event::Restart { shard });
        for process in 0..self.processes.len() {
            let connection = self.processes[process].connection(shard);
            self.conditions[process].broken[shard] = connection;
            let noticed = self.random.between(1, 50);
            self.plan(noticed, Event::Lost { process, shard, connection });
        }
    }

    /// Nothing goes wrong any more, and everybody has so many steps to do.
    pub(super) fn heal(&mut self) {
        self.healed = true;
        for (process, condition) in self.processes.iter_mut().zip(&mut self.conditions) {
            process.goal = Some(process.steps + STEPS);
            condition.paused_until = self.now;
        }
    }
}
