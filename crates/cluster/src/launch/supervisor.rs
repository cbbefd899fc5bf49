//! Watches a running job and decides how it ends.
//!
//! The first thing that goes wrong becomes the *verdict*; nothing that follows from it can change
//! it. With the verdict the members are told to end, with a deadline after which they are killed.
//! A member that is started again has not gone wrong. When all ranks have ended well, the caller has
//! its say, and the verdict is success: of the members, only servers are left to be told.
//!
//! Node 0's verdict holds for all nodes; the others report what happened to them, act on it at
//! once, and end when node 0 says that the job is over.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::SIGINT;

use super::members::Members;
use super::nodes::{Job, Message};
use super::output::lock;
use super::restarts::{Budget, Life};
use super::{Ending, Event, Failure, Launch, Member, Outcome, ServerFailure};

pub(super) struct Supervisor<'a> {
    launch: &'a Launch,
    job: Job,
    members: Members<'a>,
    inbox: Receiver<Event>,
    restarts: Budget,
    at_end: AtEnd,
    verdict: Option<Outcome>,
    /// When members that were told to end are killed.
    kill_at: Option<Instant>,
    /// The first failures, until it is clear which of them is the cause.
    failures: Vec<(Member, Ending)>,
    settle_at: Option<Instant>,
}

/// What the caller wants done between the end of the ranks and that of the servers.
enum AtEnd {
    /// Begins when something is sent.
    Ahead(Sender<()>),
    Underway,
    /// Or there is nothing to do.
    Done,
}

/// What a shell would say of a member that cannot be started.
const NOT_STARTED: Ending = Ending::Code(126);

/// How long after a member exits with an error others are awaited that were killed by a signal.
///
/// A dying process closes its connections before its end can be seen, so that its peers may fail
/// and exit first. Longer finds the true cause on slower machines; shorter ends the job sooner.
const SETTLE: Duration = Duration::from_millis(50);

impl<'a> Supervisor<'a> {
    pub fn new(
        launch: &'a Launch,
        job: Job,
        members: Members<'a>,
        inbox: Receiver<Event>,
        at_end: Option<Sender<()>>,
    ) -> Supervisor<'a> {
        Supervisor {
            launch,
            job,
            members,
            inbox,
            restarts: Budget::new(launch.restarts),
            at_end: at_end.map_or(AtEnd::Done, AtEnd::Ahead),
            verdict: None,
            kill_at: None,
            failures: Vec::new(),
            settle_at: None,
        }
    }

    /// Stays with the job until no process of it is left on this node.
    pub fn run(mut self) -> Outcome {
        loop {
            if let Some(outcome) = self.over() {
                // The members go first: the other nodes may as well hear from this one until then.
                drop(self.members);
                let outcome = with_last_output(outcome, &self.inbox);
                self.job.links.close(&outcome);
                return outcome;
            }
            let deadlines = [self.kill_at, self.settle_at, self.members.next_start()];
            let deadline = deadlines.into_iter().flatten().min();
            let event = match deadline {
                Some(at) => self.inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => self.inbox.recv().map_err(RecvTimeoutError::from),
            };
            match event {
                Ok(event) => self.handle(event),
                Err(_) => self.on_deadline(Instant::now()),
            }
        }
    }

    /// The outcome, once there is nothing left to wait for.
    fn over(&mut self) -> Option<Outcome> {
        if !self.members.ranks_ended() || self.settle_at.is_some() {
            return None;
        }
        if self.verdict.is_none() && self.job.links.everyone_finished() && self.at_end_done() {
            self.decide(Outcome::Success);
        }
        self.verdict.clone().filter(|_| self.members.all_ended())
    }

    /// Whether the caller wants nothing (more) done; begins it when asked first.
    fn at_end_done(&mut self) -> bool {
        if let AtEnd::Ahead(begin) = &self.at_end {
            let begun = begin.send(()).is_ok();
            self.at_end = if begun { AtEnd::Underway } else { AtEnd::Done };
        }
        matches!(self.at_end, AtEnd::Done)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Ended { member, ending } => self.on_ended(member, ending),
            Event::AtEndDone => self.at_end = AtEnd::Done,
            Event::Signal(signal) => self.on_signal(signal),
            Event::Heard { message: Message::Exited { rank }, .. } => self.job.gone(rank),
            Event::Heard { node, message: Message::Finished } => {
                self.job.links.note_finished(node);
            }
            Event::Heard { message: Message::Over(outcome), .. } => self.decide(outcome),
            Event::Heard { .. } => {}
            Event::Closed { node } => {
                if self.job.links.note_closed(node) {
                    self.decide(Outcome::NodeLost { node });
                }
            }
            Event::OutputLost(error) => {
                let lost = output_lost(&error);
                match &mut self.verdict {
                    // Servers are being ended; what was lost is the end of the ranks' output.
                    Some(verdict) if *verdict == Outcome::Success => *verdict = lost,
                    _ => self.decide(lost),
                }
            }
            Event::GuardEnded(guard) => self.members.replace_guard(guard),
        }
    }

    fn on_ended(&mut self, member: Member, ending: Ending) {
        let life = self.members.note_ended(member);
        if ending.is_success() {
            self.on_ended_well(member);
        } else if self.verdict.is_none() && !self.gets_another_life(member, &life, ending) {
            self.failures.push((member, ending));
            let settled = matches!(ending, Ending::Signal(_)) || self.members.count() == 1;
            let wait = if settled { Duration::ZERO } else { SETTLE };
            let at = Instant::now() + wait;
            self.settle_at = Some(self.settle_at.map_or(at, |earlier| earlier.min(at)));
        }
        if self.members.ranks_ended() && self.verdict.is_none() && self.failures.is_empty() {
            self.report_to_leader(&Message::Finished);
        }
    }

    fn on_ended_well(&self, member: Member) {
        if let Member::Rank(local) = member {
            let rank = self.job.place.first_rank + local;
            self.job.gone(rank);
            self.report_to_leader(&Message::Exited { rank });
        }
    }

    /// Whether a member that failed will be started again. Not in a job that is about to end for
    /// the failure of another.
    fn gets_another_life(&mut self, member: Member, life: &Life, ending: Ending) -> bool {
        if !self.failures.is_empty() {
            return false;
        }
        let Some(pause) = self.restarts.spend(life, ending) else { return false };
        if !self.launch.quiet {
            let (name, (nth, limit)) = (self.members.name(member), self.restarts.spent());
            self.say(&format!("{name} {ending}; starting it again (restart {nth} of {limit})"));
        }
        self.members.start_later(member, life, pause);
        true
    }

    /// Begins the next life of a member whose pause is over. One that cannot begin has failed.
    fn start_again(&mut self, member: Member) {
        match self.members.start_again(member) {
            Ok(()) => {
                self.launch.restarted.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                self.say(&format!("{}: {error}", self.members.name(member)));
                self.on_ended(member, NOT_STARTED);
            }
        }
    }

    fn report_to_leader(&self, message: &Message) {
        if self.job.place.node != 0 {
            self.job.links.tell(message);
        }
    }

    fn on_signal(&mut self, signal: i32) {
        // Whoever asks twice, or while only servers are left, does not want to wait.
        let at_once = matches!(self.verdict, Some(Outcome::Interrupted { .. } | Outcome::Success));
        self.decide(Outcome::Interrupted { signal });
        if at_once {
            self.kill_at = Some(Instant::now());
        }
    }

    fn on_deadline(&mut self, now: Instant) {
        if self.settle_at.is_some_and(|at| at <= now) {
            self.settle_at = None;
            self.settle();
        }
        if self.kill_at.is_some_and(|at| at <= now) {
            self.kill_at = None;
            self.members.kill();
        }
        while let Some(member) = self.members.due(now) {
            self.start_again(member);
        }
    }

    fn settle(&mut self) {
        let Some((member, ending)) = cause(&self.failures) else { return };
        let stderr = self.members.last_words(member);
        self.decide(match member {
            Member::Rank(local) => {
                let place = &self.job.place;
                let (rank, node) = (place.first_rank + local, place.node);
                Outcome::Failed(Failure { rank, node, ending, stderr })
            }
            Member::Server(server) => {
                Outcome::ServerFailed(ServerFailure { server, ending, stderr })
            }
        });
    }

    /// Makes `outcome` the verdict if it is the first: says so here and to the other nodes, and
    /// tells the members to end.
    fn decide(&mut self, outcome: Outcome) {
        if self.verdict.is_some() {
            return;
        }
        self.verdict = Some(outcome.clone());
        self.settle_at = None;
        self.members.start_nobody_again();
        if outcome != Outcome::Success {
            // Whoever closed the pipe knows, and expects no more words than of other programs.
            if !matches!(outcome, Outcome::OutputLost { closed: true, .. }) {
                self.report(&outcome);
            }
            self.job.abort(&outcome);
            self.job.links.tell(&Message::Over(outcome.clone()));
        } else if self.members.all_ended() {
            return;
        }
        let signal = match outcome {
            Outcome::Interrupted { signal: SIGINT } => Signal::INT,
            _ => Signal::TERM,
        };
        self.members.tell_to_end(signal);
        // A grace that no clock can tell has no end.
        self.kill_at = Instant::now().checked_add(self.launch.grace);
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
        // Whoever closed the launcher's stderr does not want to know.
        let mut stderr = lock(&self.launch.stderr);
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
}

/// The outcome of a job whose output met this error.
fn output_lost(error: &io::Error) -> Outcome {
    let closed = error.kind() == io::ErrorKind::BrokenPipe;
    Outcome::OutputLost { closed, reason: error.to_string() }
}

/// What becomes of an outcome when the last output has been written, or has not: ranks may end well
/// before that.
fn with_last_output(outcome: Outcome, inbox: &Receiver<Event>) -> Outcome {
    let lost = inbox.try_iter().find_map(|event| match event {
        Event::OutputLost(error) => Some(output_lost(&error)),
        _ => None,
    });
    lost.filter(|_| outcome == Outcome::Success).unwrap_or(outcome)
}

/// Which of several failures caused the others: the first member that a signal killed, rather than
/// those that chose to exit; else the first.
fn cause(failures: &[(Member, Ending)]) -> Option<(Member, Ending)> {
    let killed = failures.iter().find(|(_, how)| matches!(how, Ending::Signal(_)));
    killed.or(failures.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_the_cause_and_exit_codes_the_consequence() {
        let (exit, killed) = (Ending::Code(3), Ending::Signal(11));
        let [server, first, second] = [Member::Server(0), Member::Rank(0), Member::Rank(1)];
        let failures = [(first, exit), (server, killed), (second, killed)];
        assert_eq!(cause(&failures), Some((server, killed)));
        assert_eq!(cause(&[(second, exit), (first, exit)]), Some((second, exit)));
        assert_eq!(cause(&[]), None);
    }
}
