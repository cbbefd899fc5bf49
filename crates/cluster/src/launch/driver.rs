//! Carries out what the [supervisor](super::supervisor) decides about a running job.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::members::Members;
use super::nodes::{JobNode, Message};
use super::output::lock;
use super::stopped::{self, Watch};
use super::supervisor::{Decision, Settings, Supervisor};
use super::{Completion, Ending, Event, Launch, Member, Outcome};
use crate::membership::{Happened, History, Home, Occurrence, Order, Sign, WorkerId};

pub(super) struct Driver<'a> {
    launch: &'a Launch,
    job: JobNode,
    /// Of an elastic job.
    home: Option<Box<dyn Home>>,
    /// The same: for those of its members that do not answer because they have not connected.
    watch: Option<Watch>,
    /// Which life each rank is in.
    lives: Vec<u32>,
    /// What the workers of an elastic job came to.
    result: Option<Vec<u8>>,
    members: Members<'a>,
    inbox: Receiver<Event>,
    /// What the caller wants done at the end begins when something is sent.
    at_end: Option<Sender<()>>,
    began: Instant,
}

/// What a shell would say of a member that cannot be started.
const NOT_STARTED: Ending = Ending::Code(126);

impl<'a> Driver<'a> {
    pub fn new(
        launch: &'a Launch,
        job: JobNode,
        home: Option<Box<dyn Home>>,
        members: Members<'a>,
        inbox: Receiver<Event>,
        at_end: Option<Sender<()>>,
    ) -> Driver<'a> {
        let (lives, began) = (vec![0; launch.ranks as usize], Instant::now());
        let result = None;
        let watch = launch.elastic.as_ref().map(|elastic| Watch::new(elastic.timeout));
        Driver { launch, job, home, watch, lives, result, members, inbox, at_end, began }
    }

    /// Stays with the job until no process of it is left on this node.
    pub fn run(mut self) -> (Outcome, Completion) {
        let mut supervisor = Supervisor::new(Settings {
            node: self.job.place.node,
            nodes: self.job.place.nodes,
            first_rank: self.job.place.first_rank,
            ranks: self.launch.ranks,
            servers: self.launch.server_count(),
            grace: self.launch.grace,
            restarts: self.launch.restarts,
            // Other machines may have the rest.
            least: self.launch.elastic.as_ref().map(|elastic| match self.launch.shared {
                Some(_) => 1,
                None => elastic.least,
            }),
            at_end: self.at_end.is_some(),
        });
        (0..self.launch.ranks).for_each(|number| self.note_started(number));
        while supervisor.outcome().is_none() {
            let of_home = self.home.as_ref().and_then(|home| home.deadline());
            let of_watch = self.watch.as_ref().map(Watch::deadline);
            let due = supervisor.deadline().into_iter().chain(of_home).chain(of_watch);
            let event = match due.min() {
                Some(at) => self.inbox.recv_timeout(at.saturating_sub(self.now())),
                None => self.inbox.recv().map_err(RecvTimeoutError::from),
            };
            match &event {
                Ok(Event::GuardEnded(guard)) => self.members.replace_guard(*guard),
                Ok(Event::Closed { node }) => self.job.links.note_closed(*node),
                _ => {}
            }
            self.end_stopped();
            let (event, orders) = self.ask_home(event);
            for order in orders {
                self.obey(&mut supervisor, order);
            }
            let decisions = match event {
                Ok(event) => supervisor.handle(self.now(), event),
                Err(_) => supervisor.tick(self.now()),
            };
            self.carry_out_all(&mut supervisor, decisions);
        }
        // The members go first: the other nodes may as well hear from this one until then.
        drop(self.members);
        // Ranks may end well before the last of their output has been written, or has not.
        for event in self.inbox.try_iter().filter(|event| matches!(event, Event::OutputLost(_))) {
            supervisor.handle(self.began.elapsed(), event);
        }
        let outcome = supervisor.outcome().expect("nothing begins after the end").clone();
        self.job.links.close(&outcome);
        let history = self.home.as_ref().map_or_else(History::default, |home| home.history());
        // Interrupted while it waits for etcd, a run that is done has a result all the same.
        let result = self.result.or_else(|| self.home.as_mut()?.pending_result());
        (outcome, Completion { result, history })
    }

    /// What the membership of an elastic job makes of what happened; and what is left for the supervisor.
    fn ask_home(
        &mut self,
        event: Result<Event, RecvTimeoutError>,
    ) -> (Result<Event, RecvTimeoutError>, Vec<Order>) {
        let now = self.now();
        if let Ok(Event::Ended { member: Member::Rank(number), ending }) = &event {
            self.note_ended(*number, *ending);
        }
        let worker = match &event {
            Ok(Event::Ended { member: Member::Rank(local), .. }) => Some(self.worker(*local)),
            _ => None,
        };
        let Some(home) = &mut self.home else { return (event, Vec::new()) };
        match (event, worker) {
            (Ok(Event::Membership(heard)), _) => {
                (Err(RecvTimeoutError::Timeout), home.heard(now, heard))
            }
            (Ok(Event::Signal(signal)), _) => match home.leave(now) {
                Some(orders) => (Err(RecvTimeoutError::Timeout), orders),
                None => (Ok(Event::Signal(signal)), Vec::new()),
            },
            (event, Some(worker)) => (event, home.ended(now, worker)),
            (Ok(event), None) => (Ok(event), Vec::new()),
            (Err(error), None) => (Err(error), home.tick(now)),
        }
    }

    /// Ends ranks that stay stopped.
    fn end_stopped(&mut self) {
        let (now, ranks) = (self.now(), 0..self.launch.ranks);
        let Some(watch) = &mut self.watch else { return };
        let pid = |local: u32| self.members.pid(Member::Rank(local));
        let stopped = watch.look(now, ranks.clone().map(pid), stopped::is_stopped);
        for local in ranks.filter(|local| stopped.contains(&pid(*local))) {
            if !self.launch.quiet {
                let number = self.job.place.first_rank + local;
                self.say(&format!("rank {number} is stopped; ending it"));
            }
            self.members.clear(Member::Rank(local));
        }
    }

    fn obey(&mut self, supervisor: &mut Supervisor, order: Order) {
        let event = match order {
            Order::Kill(WorkerId { number, life }, sign) => {
                let local = number.wrapping_sub(self.job.place.first_rank);
                if self.lives.get(local as usize) == Some(&life) {
                    if sign == Sign::Silent && !self.launch.quiet {
                        self.say(&format!("rank {number} does not answer; ending it"));
                    }
                    self.members.clear(Member::Rank(local));
                }
                return;
            }
            Order::Finished(result) => {
                self.result = result;
                Event::Complete
            }
            // As if there had never been other machines.
            Order::Disband => Event::Signal(Signal::TERM.as_raw()),
            Order::Superseded => Event::Superseded,
            Order::GiveUp { ready } => {
                let least = self.launch.elastic.as_ref().map_or(1, |elastic| elastic.least);
                Event::TooFewWorkers { ready, least }
            }
            Order::NoProgress { epochs } => Event::NoProgress { epochs },
        };
        let decisions = supervisor.handle(self.now(), event);
        self.carry_out_all(supervisor, decisions);
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn carry_out_all(&mut self, supervisor: &mut Supervisor, decisions: Vec<Decision>) {
        for decision in decisions {
            if let Some(event) = self.carry_out(decision) {
                let decisions = supervisor.handle(self.now(), event);
                self.carry_out_all(supervisor, decisions);
            }
        }
    }

    /// Does what was decided; returns what happened at once.
    fn carry_out(&mut self, decision: Decision) -> Option<Event> {
        match decision {
            Decision::Clear { member, ending, restart, limit } => {
                self.members.clear(member);
                if !self.launch.quiet {
                    let name = self.members.name(member);
                    self.say(&format!(
                        "{name} {ending}; starting it again (restart {restart} of {limit})"
                    ));
                }
            }
            Decision::LeaveOut { member, ending, limit } => {
                if !self.launch.quiet {
                    let name = self.members.name(member);
                    self.say(&format!(
                        "{name} {ending}; not starting it again ({limit} restarts are allowed), the others go on"
                    ));
                }
            }
            Decision::Start { member, life } => return self.start_again(member, life),
            Decision::Gone { rank } => self.job.gone(rank),
            Decision::Tell(message) => self.job.links.tell(&message),
            Decision::BeginAtEnd => {
                let begun = self.at_end.as_ref().is_some_and(|begin| begin.send(()).is_ok());
                return (!begun).then_some(Event::AtEndDone);
            }
            Decision::Hear { member, ending } => {
                let stderr = self.members.last_words(member);
                return Some(Event::LastWords { member, ending, stderr });
            }
            Decision::Fail(outcome) => {
                // The reader that closed the pipe expects no more words than of other programs.
                if !matches!(outcome, Outcome::OutputLost { closed: true, .. }) {
                    self.report(&outcome);
                }
                self.job.abort(&outcome);
                self.job.links.tell(&Message::Over(outcome));
            }
            Decision::TellToEnd { signal } => {
                let now = self.now();
                if let Some(home) = &mut self.home {
                    home.release(now);
                }
                self.members.tell_to_end(Signal::from_named_raw(signal).unwrap_or(Signal::TERM));
            }
            Decision::Kill => self.members.kill(),
        }
        None
    }

    /// Begins a life of a member. One that cannot begin has ended.
    fn start_again(&mut self, member: Member, life: u32) -> Option<Event> {
        match self.members.start_again(member, life) {
            Ok(()) => {
                if let Member::Rank(number) = member {
                    self.lives[number as usize] = life;
                    self.note_started(number);
                }
                self.launch.restarted.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(error) => {
                self.say(&format!("{}: {error}", self.members.name(member)));
                Some(Event::Ended { member, ending: NOT_STARTED })
            }
        }
    }

    fn note_started(&self, local: u32) {
        let pid = self.members.pid(Member::Rank(local));
        self.note(Occurrence::Started { worker: self.worker(local), pid });
    }

    fn note_ended(&self, number: u32, ending: Ending) {
        let (code, signal) = match ending {
            Ending::Code(code) => (Some(code), None),
            Ending::Signal(signal) => (None, Some(signal)),
        };
        self.note(Occurrence::Ended { worker: self.worker(number), code, signal });
    }

    fn worker(&self, local: u32) -> WorkerId {
        let number = self.job.place.first_rank + local;
        WorkerId { number, life: self.lives[local as usize] }
    }

    /// Tells the observer of an elastic job, if it has one.
    fn note(&self, what: Occurrence) {
        if let (Some(observer), Some(_)) = (&self.launch.observer, &self.home) {
            observer(Happened { at: self.now(), what });
        }
    }

    fn report(&self, outcome: &Outcome) {
        let mut text = outcome.to_string();
        if let Outcome::Failed(failure) = outcome
            && self.job.place.nodes > 1
        {
            text += &format!(" on node {}", failure.node);
        }
        let last_words = outcome.last_words();
        if !last_words.is_empty() {
            text += "; its last lines of stderr:";
        }
        last_words.iter().for_each(|line| text += &format!("\nunisono:   | {line}"));
        self.say(&text);
    }

    fn say(&self, text: &str) {
        let text = format!("unisono: {text}\n");
        // Where the launcher's stderr is closed, there is no reader to tell.
        let mut stderr = lock(&self.launch.stderr);
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
}
