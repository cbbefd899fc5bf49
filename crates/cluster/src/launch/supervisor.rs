//! Watches a running job and decides how it ends.
//!
//! The first thing that goes wrong becomes the *verdict*; nothing that follows from it can change
//! it. With the verdict the ranks are told to end, with a deadline after which they are killed.
//! Node 0's verdict holds for all nodes; the others report what happened to them, act on it at
//! once, and end when node 0 says that the job is over.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::SIGINT;

use super::nodes::{Job, Message};
use super::output::lock;
use super::ranks::Ranks;
use super::{Ending, Event, Failure, Launch, Outcome};

pub(super) struct Supervisor<'a> {
    launch: &'a Launch,
    job: Job,
    ranks: Ranks,
    inbox: Receiver<Event>,
    verdict: Option<Outcome>,
    /// When ranks that were told to end are killed.
    kill_at: Option<Instant>,
    /// The first failures, until it is clear which of them is the cause.
    failures: Vec<(u32, Ending)>,
    settle_at: Option<Instant>,
}

/// How long after a rank exits with an error others are awaited that were killed by a signal.
///
/// A dying process closes its connections before its end can be seen, so that its peers may fail
/// and exit first. Longer finds the true cause on slower machines; shorter ends the job sooner.
const SETTLE: Duration = Duration::from_millis(50);

impl<'a> Supervisor<'a> {
    pub fn new(
        launch: &'a Launch,
        job: Job,
        ranks: Ranks,
        inbox: Receiver<Event>,
    ) -> Supervisor<'a> {
        Supervisor {
            launch,
            job,
            ranks,
            inbox,
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
                // The ranks go first: the other nodes may as well hear from this one until then.
                drop(self.ranks);
                self.job.links.close(&outcome);
                return outcome;
            }
            let deadline = [self.kill_at, self.settle_at].into_iter().flatten().min();
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
        if !self.ranks.all_ended() || self.settle_at.is_some() {
            return None;
        }
        if self.verdict.is_none() && self.job.links.everyone_finished() {
            self.verdict = Some(Outcome::Success);
        }
        self.verdict.clone()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Ended { local, ending } => self.on_ended(local, ending),
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
        }
    }

    fn on_ended(&mut self, local: u32, ending: Ending) {
        self.ranks.note_ended(local);
        let rank = self.job.place.first_rank + local;
        if ending.is_success() {
            self.job.gone(rank);
            self.report_to_leader(&Message::Exited { rank });
        } else if self.verdict.is_none() {
            self.failures.push((local, ending));
            let settled = matches!(ending, Ending::Signal(_)) || self.launch.ranks == 1;
            let wait = if settled { Duration::ZERO } else { SETTLE };
            let at = Instant::now() + wait;
            self.settle_at = Some(self.settle_at.map_or(at, |earlier| earlier.min(at)));
        }
        if self.ranks.all_ended() && self.verdict.is_none() && self.failures.is_empty() {
            self.report_to_leader(&Message::Finished);
        }
    }

    fn report_to_leader(&self, message: &Message) {
        if self.job.place.node != 0 {
            self.job.links.tell(message);
        }
    }

    fn on_signal(&mut self, signal: i32) {
        let again = matches!(self.verdict, Some(Outcome::Interrupted { .. }));
        self.decide(Outcome::Interrupted { signal });
        if again {
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
            self.ranks.kill();
        }
    }

    fn settle(&mut self) {
        let Some((local, ending)) = cause(&self.failures) else { return };
        self.decide(Outcome::Failed(Failure {
            rank: self.job.place.first_rank + local,
            node: self.job.place.node,
            ending,
            stderr: self.ranks.last_words(local),
        }));
    }

    /// Makes `outcome` the verdict if it is the first: says so here and to the other nodes, and
    /// tells the ranks to end.
    fn decide(&mut self, outcome: Outcome) {
        if self.verdict.is_some() {
            return;
        }
        self.verdict = Some(outcome.clone());
        self.settle_at = None;
        if outcome == Outcome::Success {
            return;
        }
        self.report(&outcome);
        self.job.abort(&outcome);
        self.job.links.tell(&Message::Over(outcome.clone()));
        let signal = match outcome {
            Outcome::Interrupted { signal: SIGINT } => Signal::INT,
            _ => Signal::TERM,
        };
        self.ranks.tell_to_end(signal);
        // A grace that no clock can tell has no end.
        self.kill_at = Instant::now().checked_add(self.launch.grace);
    }

    fn report(&self, outcome: &Outcome) {
        let mut text = format!("unisono: {outcome}");
        if let Outcome::Failed(failure) = outcome {
            if self.job.place.nodes > 1 {
                text += &format!(" on node {}", failure.node);
            }
            if !failure.stderr.is_empty() {
                text += "; its last lines of stderr:";
            }
            failure.stderr.iter().for_each(|line| text += &format!("\nunisono:   | {line}"));
        }
        text.push('\n');
        // Whoever closed the launcher's stderr does not want to know.
        let mut stderr = lock(&self.launch.stderr);
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
}

/// Which of several failures caused the others: the first rank that a signal killed, rather than
/// those that chose to exit; else the first.
fn cause(failures: &[(u32, Ending)]) -> Option<(u32, Ending)> {
    let killed = failures.iter().find(|(_, how)| matches!(how, Ending::Signal(_)));
    killed.or(failures.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_the_cause_and_exit_codes_the_consequence() {
        let (exit, killed) = (Ending::Code(3), Ending::Signal(11));
        assert_eq!(cause(&[(0, exit), (2, killed), (1, killed)]), Some((2, killed)));
        assert_eq!(cause(&[(4, exit), (2, exit)]), Some((4, exit)));
        assert_eq!(cause(&[]), None);
    }
}
