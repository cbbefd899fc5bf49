//! What goes wrong. Each fault is counted; a process or server that it hits notices what it could
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
        let server = self.random.below(self.servers.len() as u64) as usize;
        let process = self.workers[worker].process;
        let alive = process.filter(|process| !self.processes[*process].is_over());
        match (self.random.below(100), alive) {
            (0..25, Some(process)) => self.break_connection(process, server),
            (25..35, Some(process)) => {
                self.tally.reconnects += 1;
                let connection = self.processes[process].connection(server);
                self.plan(0, Event::Lost { process, server, connection });
                self.close(process, server);
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
            (80.., _) if self.servers[server].is_up => {
                self.tally.server_crashes += 1;
                self.crash(server);
            }
            _ => {}
        }
    }

    /// Workers that are not dead for good.
    fn living(&self) -> usize {
        self.workers.iter().filter(|worker| !worker.is_dead).count()
    }

    fn break_connection(&mut self, process: usize, server: usize) {
        self.tally.breaks += 1;
        let connection = self.processes[process].connection(server);
        self.conditions[process].broken[server] = connection;
        let noticed = self.random.between(1, 50);
        self.plan(noticed, Event::Lost { process, server, connection });
        // Sometimes only silence tells the server.
        if self.random.chance(700) {
            self.close(process, server);
        }
    }

    /// The server is going to notice that the present connection is closed.
    fn close(&mut self, process: usize, server: usize) {
        let (from, connection) =
            (self.processes[process].me, self.processes[process].connection(server));
        let noticed = self.random.between(1, 50);
        self.plan(noticed, Event::Closed { server, from, connection });
    }

    fn kill(&mut self, process: usize) {
        self.processes[process].stage = Stage::Over;
        for server in 0..self.servers.len() {
            if self.random.chance(700) {
                self.close(process, server);
            }
        }
        let worker = self.processes[process].me.worker as usize;
        self.workers[worker].process = None;
    }

    fn pause(&mut self, process: usize) {
        let duration = self.random.between(10, 250);
        self.conditions[process].paused_until = self.now + duration;
    }

    fn crash(&mut self, server: usize) {
        self.servers[server].crash();
        let rest = self.random.between(1, 80);
        self.plan(rest, Event::Restart { server });
        for process in 0..self.processes.len() {
            let connection = self.processes[process].connection(server);
            self.conditions[process].broken[server] = connection;
            let noticed = self.random.between(1, 50);
            self.plan(noticed, Event::Lost { process, server, connection });
        }
    }

    /// Nothing goes wrong any more, and every process has so many steps to do.
    pub(super) fn heal(&mut self) {
        self.healed = true;
        for (process, condition) in self.processes.iter_mut().zip(&mut self.conditions) {
            process.goal = Some(process.steps + STEPS);
            condition.paused_until = self.now;
        }
    }
}
