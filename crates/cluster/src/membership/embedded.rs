//! A job on one machine: its launcher coordinates it, and what the coordinator decides holds at once.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use unisono_net::Token;

use super::agent::{Agent, FromWorker};
use super::coordinator::{Act, Coordinator, History, Report};
use super::core::{Settings, WorkerId};
use super::events::Observer;
use super::{Brought, Heard, Home, Order, ToWorker};

/// The membership of a job on one machine.
pub struct Embedded {
    agent: Agent,
    coordinator: Coordinator,
}

impl Embedded {
    /// Listens at `ip`, on any free port, for workers that hold the token. What they bring goes to `hear`, on
    /// other threads; the owner hands it [on](Home::heard).
    pub fn open(
        ip: IpAddr,
        token: &Token,
        settings: Settings,
        now: Duration,
        hear: impl Fn(Heard) + Send + Sync + 'static,
    ) -> io::Result<Embedded> {
        let agent = Agent::open(ip, token, move |from| hear(Heard(Brought::Worker(from))))?;
        Ok(Embedded { agent, coordinator: Coordinator::new(settings, now) })
    }

    /// From now on tells `observer` what happens.
    pub fn observe(&mut self, observer: Observer) {
        self.coordinator.observe(observer);
    }

    fn report(&mut self, now: Duration, worker: WorkerId, report: Report) -> Vec<Order> {
        let acts = self.coordinator.report(now, worker, report);
        self.carry_out(now, acts)
    }

    fn carry_out(&mut self, now: Duration, acts: Vec<Act>) -> Vec<Order> {
        let mut orders = Vec::new();
        for act in acts {
            match act {
                Act::Tell(worker, message) => self.agent.tell(worker, &message),
                Act::Confirm { epoch } => {
                    let acts = self.coordinator.confirmed(epoch);
                    orders.extend(self.carry_out(now, acts));
                }
                Act::Disband => orders.push(Order::Disband),
                Act::Commit(change) => {
                    let acts = self.coordinator.committed(now, &change);
                    orders.extend(self.carry_out(now, acts));
                }
                Act::Complete { epoch } => {
                    let result = self.agent.result(epoch).unwrap_or_default();
                    self.agent.tell_all(&ToWorker::Finish);
                    orders.push(Order::Finished(Some(result)));
                }
                Act::Kill(worker, sign) => orders.push(Order::Kill(worker, sign)),
                Act::GiveUp { ready } => orders.push(Order::GiveUp { ready }),
                Act::NoProgress { epochs } => orders.push(Order::NoProgress { epochs }),
            }
        }
        orders
    }

    fn on_worker(&mut self, now: Duration, from: FromWorker) -> Vec<Order> {
        match self.agent.heard(from) {
            Some((worker, report)) => self.report(now, worker, report),
            None => Vec::new(),
        }
    }
}

impl Home for Embedded {
    fn address(&self) -> SocketAddr {
        self.agent.address()
    }

    fn history(&self) -> History {
        self.coordinator.history().clone()
    }

    fn deadline(&self) -> Option<Duration> {
        self.coordinator.deadline()
    }

    fn heard(&mut self, now: Duration, heard: Heard) -> Vec<Order> {
        match heard.0 {
            Brought::Worker(from) => self.on_worker(now, from),
            // Jobs of several machines bring these.
            Brought::Link(_) | Brought::Store(_) => Vec::new(),
        }
    }

    fn ended(&mut self, now: Duration, worker: WorkerId) -> Vec<Order> {
        self.report(now, worker, Report::Ended)
    }

    fn tick(&mut self, now: Duration) -> Vec<Order> {
        let acts = self.coordinator.tick(now);
        self.carry_out(now, acts)
    }

    fn release(&mut self, now: Duration) {
        self.agent.tell_all(&ToWorker::Stop);
        let acts = self.coordinator.release();
        self.carry_out(now, acts);
    }

    fn leave(&mut self, _: Duration) -> Option<Vec<Order>> {
        None
    }
}
