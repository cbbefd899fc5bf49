//! The connections between launchers: each carries messages in order, late, and not while its machines are cut off
//! from each other.

use std::collections::VecDeque;

use super::hosts::Brought;
use super::world::{Event, MS, Time, World};
use crate::membership::machines::launcher::Message;
use crate::membership::machines::record::Machine;

/// How long a launcher tries to open a connection.
const DIALING: Time = 2_000 * MS;

/// A connection from one launcher to another, or an attempt.
pub struct Link {
    pub from: usize,
    pub to: usize,
    pub is_open: bool,
    pub up: VecDeque<Option<Message>>,
    pub down: VecDeque<Option<Message>>,
    pub last_up: Time,
    pub last_down: Time,
    pub closed_up: bool,
    pub closed_down: bool,
}

impl World {
    pub fn open(&mut self, host: usize, leader: &Machine) {
        self.unlink(host);
        let std::net::IpAddr::V4(ip) = leader.address.ip() else { unreachable!("they are V4") };
        let [_, _, high, low] = ip.octets();
        let to = usize::from(high) << 8 | usize::from(low);
        self.links.push(Link {
            from: host,
            to,
            is_open: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
            last_up: 0,
            last_down: 0,
            closed_up: false,
            closed_down: false,
        });
        let link = self.links.len() - 1;
        self.hosts[host].attempt = Some(link);
        let at = self.now + self.random.below(self.message);
        self.plan(at, Event::Dial(link));
    }

    pub fn dial(&mut self, link: usize) {
        let Link { from, to, .. } = self.links[link];
        let target = &self.hosts[to];
        let at = self.now + self.random.below(self.message);
        if target.is_lost || (target.is_alive && target.is_stopped) || self.are_cut(from, to) {
            let at = self.now + DIALING;
            return self.plan(at, Event::Deliver(from, Brought::Unreachable(link, false)));
        }
        if !target.is_alive {
            return self.plan(at, Event::Deliver(from, Brought::Unreachable(link, true)));
        }
        let open = &mut self.links[link];
        open.is_open = true;
        (open.last_up, open.last_down) = (at, at);
        self.plan(at, Event::Deliver(to, Brought::Arrived(link)));
        self.plan(at, Event::Deliver(from, Brought::Linked(link)));
    }

    pub fn send_up(&mut self, link: usize, message: Option<Message>) {
        let delay = self.random.below(self.message);
        let Link { closed_up, last_up, up, .. } = &mut self.links[link];
        if !*closed_up {
            *closed_up = message.is_none();
            up.push_back(message);
            *last_up = (*last_up).max(self.now + delay);
            let at = *last_up;
            self.plan(at, Event::Up(link));
        }
    }

    pub fn send_down(&mut self, link: usize, message: Option<Message>) {
        let delay = self.random.below(self.message);
        let Link { closed_down, last_down, down, .. } = &mut self.links[link];
        if !*closed_down {
            *closed_down = message.is_none();
            down.push_back(message);
            *last_down = (*last_down).max(self.now + delay);
            let at = *last_down;
            self.plan(at, Event::Down(link));
        }
    }

    /// The next message of a link arrives, or waits until the network is there again.
    pub fn arrive(&mut self, link: usize, is_up: bool) {
        let Link { from, to, .. } = self.links[link];
        if self.are_cut(from, to) {
            let until = self.cuts[&(from.min(to), from.max(to))];
            let open = &mut self.links[link];
            let last = if is_up { &mut open.last_up } else { &mut open.last_down };
            *last = (*last).max(until);
            let event = if is_up { Event::Up(link) } else { Event::Down(link) };
            return self.plan(until, event);
        }
        let open = &mut self.links[link];
        let brought = match is_up {
            true => match open.up.pop_front().expect("it was sent") {
                Some(message) => Brought::Said(link, message),
                None => Brought::Closed(link),
            },
            false => match open.down.pop_front().expect("it was sent") {
                Some(message) => Brought::LeaderSaid(link, message),
                None => Brought::LeaderClosed(link),
            },
        };
        self.plan(self.now, Event::Deliver(if is_up { to } else { from }, brought));
    }

    /// The follower's end closes.
    pub fn unlink(&mut self, host: usize) {
        self.hosts[host].is_linked = false;
        if let Some(link) = self.hosts[host].attempt.take()
            && self.links[link].is_open
        {
            self.links[link].closed_down = true;
            self.send_up(link, None);
        }
    }

    /// The leader's end closes.
    pub fn close(&mut self, host: usize, number: u32) {
        if let Some(link) = self.hosts[host].followers.remove(&number) {
            self.links[link].closed_up = true;
            self.send_down(link, None);
        }
    }

    /// The network closes the connection of a machine with its leader.
    pub fn blip(&mut self, host: usize) {
        let link = self.hosts[host].attempt.filter(|_| self.hosts[host].is_linked);
        if let Some(link) = link {
            self.tally.count("blips");
            self.send_up(link, None);
            self.send_down(link, None);
        }
    }
}
