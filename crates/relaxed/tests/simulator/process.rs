//! A worker in one of its lives, as far as the servers are concerned.
//!
//! It goes through *stages*. **Meeting**: it joins every server and takes the largest of its own clock
//! and those that it is told; it enters every server at that clock. **Reading**: it asks every server for
//! its weights. **Computing**. **Pushing**: every server gets its push, and when all have said what
//! became of it the step is finished; the next begins with a meeting, at which all servers agree
//! already.
//!
//! There is one clock for all servers. Were a worker further at one server than at another, and another
//! worker the other way round, each could wait for the other for ever.
//!
//! It joins a server again whenever the connection is lost or the server takes it for gone. With a
//! push under way, or one being computed, it then enters at the clock of that push and not further, so
//! that no worker's read passes over it. A request that is not answered is sent again.

use unisono_relaxed::Clock;
use unisono_relaxed::server::core::{PushId, Refusal};
use unisono_relaxed::server::outbox::Outbox;

use crate::message::{Answer, Ask, Reply, Request, Sender};
use crate::scenario::Sabotage;

pub struct Process {
    pub me: Sender,
    /// Steps it has finished in this life.
    pub steps: u64,
    /// After how many steps it is done, once that is known.
    pub goal: Option<u64>,
    pub stage: Stage,
    links: Vec<Link>,
    sabotage: Sabotage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Meeting,
    Reading,
    Computing,
    Pushing,
    /// It has left, was replaced, or is dead.
    Over,
}

/// What a process wants of the world.
pub enum Act {
    Send {
        server: usize,
        request: Request,
    },
    Compute,
    /// It knows of this push that it is settled, by its reply or upon joining again.
    Acknowledged {
        server: usize,
        push: PushId,
        by_joining: bool,
    },
    /// A server says that pushes are missing which it had acknowledged.
    Gap {
        server: usize,
        expected: u64,
    },
    Superseded,
    Done,
}

struct Link {
    connection: u64,
    requests: u64,
    asked: Option<(u64, Ask)>,
    joined: bool,
    /// Steps that are finished, and the furthest clock that the server has named.
    clock: Clock,
    told: Clock,
    /// The clock at which the server has it, if it has entered.
    at: Option<Clock>,
    /// The version of the weights of this step.
    version: Option<u64>,
    outbox: Outbox,
}

impl Process {
    pub fn new(me: Sender, servers: usize, sabotage: Sabotage) -> Process {
        let link = || Link {
            connection: 1,
            requests: 0,
            asked: None,
            joined: false,
            clock: Clock::START,
            told: Clock::START,
            at: None,
            version: None,
            outbox: Outbox::new(me.worker, me.life),
        };
        Process {
            me,
            steps: 0,
            goal: None,
            stage: Stage::Meeting,
            links: (0..servers).map(|_| link()).collect(),
            sabotage,
        }
    }

    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// The furthest clock that it has reached or was told of.
    pub fn clock(&self) -> Clock {
        let clocks = self.links.iter().map(|link| link.clock.max(link.told));
        clocks.max().expect("there are servers")
    }

    pub fn connection(&self, server: usize) -> u64 {
        self.links[server].connection
    }

    /// The push under way to a server.
    pub fn pending(&self, server: usize) -> Option<PushId> {
        self.links[server].outbox.pending()
    }

    /// The version of a server's weights from which the present push was computed.
    pub fn version(&self, server: usize) -> Option<u64> {
        self.links[server].version
    }

    /// Does whatever is to be done next.
    pub fn go_on(&mut self, acts: &mut Vec<Act>) {
        while self.next_stage(acts) {}
        for server in 0..self.links.len() {
            if self.links[server].asked.is_none()
                && let Some(ask) = self.wanted(server)
            {
                let request = self.request(server, ask);
                self.links[server].asked = Some((request.id, ask));
                acts.push(Act::Send { server, request });
            }
        }
    }

    /// The gradient is ready.
    pub fn computed(&mut self, acts: &mut Vec<Act>) {
        self.stage = Stage::Pushing;
        for link in &mut self.links {
            link.outbox.begin(link.clock);
        }
        self.go_on(acts);
    }

    pub fn receive(&mut self, server: usize, reply: Reply, acts: &mut Vec<Act>) {
        let link = &mut self.links[server];
        let Some((id, ask)) = link.asked else { return };
        if (link.connection, id) != (reply.connection, reply.id) {
            return;
        }
        link.asked = None;
        match (reply.answer, ask) {
            (Answer::Joined(joined), _) => {
                link.joined = true;
                link.at = None;
                link.told = link.told.max(joined.clock);
                if let Some(push) = link.outbox.pending()
                    && link.outbox.rejoin(joined).is_none()
                {
                    acts.push(Act::Acknowledged { server, push, by_joining: true });
                }
            }
            (Answer::Entered, Ask::Enter(clock)) => link.at = Some(clock),
            (Answer::Weights { version }, Ask::Read(_)) => link.version = Some(version),
            (Answer::Settled, Ask::Push(push)) => {
                link.outbox.settle();
                link.at = Some(push.clock.next());
                acts.push(Act::Acknowledged { server, push, by_joining: false });
            }
            (Answer::Late { clock }, Ask::Push(push)) => {
                link.outbox.settle();
                link.at = None;
                link.told = link.told.max(clock);
                acts.push(Act::Acknowledged { server, push, by_joining: false });
            }
            (Answer::Refused(Refusal::OtherClock { clock }), _) => {
                link.at = None;
                link.told = link.told.max(clock);
            }
            (Answer::Refused(Refusal::Superseded), _) => {
                self.stage = Stage::Over;
                acts.push(Act::Superseded);
            }
            (Answer::Refused(Refusal::Gap { expected }), _) => {
                acts.push(Act::Gap { server, expected });
            }
            (Answer::Refused(_), _) => {
                link.joined = false;
                link.at = None;
            }
            (answer, ask) => unreachable!("{answer:?} to {ask:?}"),
        }
        self.go_on(acts);
    }

    /// A request was not answered for long.
    pub fn retry(&mut self, server: usize, id: u64, acts: &mut Vec<Act>) {
        if self.links[server].asked.is_some_and(|(asked, _)| asked == id) {
            self.links[server].asked = None;
            self.go_on(acts);
        }
    }

    /// A connection is lost, or given up.
    pub fn reconnect(&mut self, server: usize, connection: u64, acts: &mut Vec<Act>) {
        let link = &mut self.links[server];
        if link.connection == connection {
            link.connection += 1;
            link.asked = None;
            link.joined = false;
            link.at = None;
            self.go_on(acts);
        }
    }

    /// A request that expects no answer.
    pub fn request(&mut self, server: usize, ask: Ask) -> Request {
        let link = &mut self.links[server];
        link.requests += 1;
        Request { from: self.me, connection: link.connection, id: link.requests, ask }
    }

    /// Whether the next stage has begun.
    fn next_stage(&mut self, acts: &mut Vec<Act>) -> bool {
        let everywhere = |links: &[Link]| links.iter().all(|link| link.at == Some(link.clock));
        match self.stage {
            Stage::Meeting => {
                if !self.links.iter().all(|link| link.joined) {
                    return false;
                }
                let furthest = self.clock();
                for link in &mut self.links {
                    let clock = match self.sabotage {
                        Sabotage::ClocksApart => link.clock.max(link.told),
                        _ => furthest,
                    };
                    if clock > link.clock {
                        link.clock = clock;
                        // What was asked at another clock is no longer wanted.
                        link.asked = None;
                        link.version = None;
                    }
                }
                if !everywhere(&self.links) {
                    return false;
                }
                self.stage = Stage::Reading;
            }
            Stage::Reading => {
                if !everywhere(&self.links) {
                    self.stage = Stage::Meeting;
                } else if self.links.iter().all(|link| link.version.is_some()) {
                    self.stage = Stage::Computing;
                    acts.push(Act::Compute);
                } else {
                    return false;
                }
            }
            Stage::Pushing => {
                if self.links.iter().any(|link| link.outbox.pending().is_some()) {
                    return false;
                }
                self.steps += 1;
                for link in &mut self.links {
                    link.clock = link.clock.next();
                    link.version = None;
                }
                self.stage = Stage::Meeting;
                if self.goal.is_some_and(|goal| self.steps >= goal) {
                    self.stage = Stage::Over;
                    acts.push(Act::Done);
                }
            }
            Stage::Computing | Stage::Over => return false,
        }
        true
    }

    fn wanted(&self, server: usize) -> Option<Ask> {
        let link = &self.links[server];
        if self.is_over() {
            return None;
        }
        if !link.joined {
            return Some(Ask::Join);
        }
        if let Some(push) = link.outbox.pending() {
            return Some(match (link.at, self.sabotage) {
                (Some(_), _) => Ask::Push(push),
                (None, Sabotage::EnterAhead) => Ask::Enter(link.clock.max(link.told)),
                (None, _) => Ask::Enter(push.clock),
            });
        }
        let all_joined = self.links.iter().all(|link| link.joined);
        match self.stage {
            Stage::Meeting if all_joined && link.at != Some(link.clock) => {
                Some(Ask::Enter(link.clock))
            }
            Stage::Reading if link.version.is_none() => Some(Ask::Read(link.clock)),
            Stage::Computing if link.at.is_none() => Some(Ask::Enter(link.clock)),
            _ => None,
        }
    }
}
