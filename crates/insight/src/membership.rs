//! The workers of an elastic run, which come and go: what happened to them, and what that amounts to.
//!
//! The launcher appends one [`Event`] per line to `membership.jsonl` as it happens. [`Timeline`] is what
//! follows from them: the lives of the workers, the epochs, and the recoveries with what they cost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::folder::{FolderError, INFO};
use crate::log::{Log, read_lines};
use crate::units::{counted, duration};

/// What it is called in the folder of a run.
pub(crate) const FILE: &str = "membership.jsonl";

/// A worker process: its number, and how often that number was started before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// From 0.
    pub number: u32,
    /// From 0.
    pub life: u32,
}

/// One line of `membership.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds since the start of the launcher that wrote it.
    pub at: f64,
    /// What happened.
    #[serde(flatten)]
    pub what: Happening,
}

/// What can happen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Happening {
    /// A launcher has begun: the first line, and once more for every time that the run was resumed in this
    /// folder.
    Launched(Launcher),
    /// The process of a worker was started.
    Started {
        /// Which.
        worker: WorkerId,
        /// The process.
        pid: u32,
    },
    /// A worker has connected to its coordinator.
    Connected {
        /// Which.
        worker: WorkerId,
    },
    /// A worker wants to be in the next epoch.
    Ready {
        /// Which.
        worker: WorkerId,
    },
    /// An epoch has begun.
    Epoch {
        /// Its number.
        epoch: u64,
        /// Its members, by rank.
        members: Vec<WorkerId>,
    },
    /// The first sign that a member is lost.
    Lost {
        /// Which.
        worker: WorkerId,
        /// Which sign.
        sign: Sign,
    },
    /// The coordinator had a worker killed.
    Killed {
        /// Which.
        worker: WorkerId,
        /// Why.
        sign: Sign,
    },
    /// The process of a worker has ended.
    Ended {
        /// Which.
        worker: WorkerId,
        /// With which code, if it exited.
        code: Option<i32>,
        /// By which signal, if one ended it.
        signal: Option<i32>,
    },
    /// The first step of an epoch is complete.
    Stepped(FirstStep),
    /// The workers have handed in their result.
    Finished,
    /// There were too few workers for too long.
    GaveUp {
        /// How many there were.
        ready: u64,
    },
    /// The launcher has ended: the last line, unless it was killed.
    Over {
        /// Whether the run is complete.
        complete: bool,
        /// How it ended, in words.
        outcome: String,
    },
    /// Something that another version of this program knows of.
    #[serde(other)]
    Unknown,
}

/// The process that started the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launcher {
    /// Its number.
    pub pid: u32,
    /// When it was started, in ticks since the boot of its host: the number alone may become that of another
    /// process.
    pub started: u64,
    /// Which boot that was.
    pub boot: String,
    /// Its host, which is that of its workers.
    pub host: String,
    /// The folder that it was started in.
    pub folder: String,
}

/// How it showed that a worker was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    /// Its process had ended.
    Ended,
    /// Its connection had closed, or brought what made no sense.
    CutOff,
    /// It did not answer.
    Silent,
}

/// The first step of an epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstStep {
    /// The epoch.
    pub epoch: u64,
    /// The step.
    pub step: u64,
    /// Seconds that it took to compute.
    pub compute: f64,
    /// Whether it had been begun in the epoch before.
    pub redone: bool,
    /// Workers that were given the state of another.
    pub behind: u64,
    /// Whether the run went back to its last checkpoint, or its beginning.
    pub from_checkpoint: bool,
    /// If it followed a loss: seconds since then, without the computation of the step.
    pub recovery: Option<f64>,
}

/// Writes `membership.jsonl` of a run whose folder another process makes: keeps events until that has
/// happened.
#[derive(Debug)]
pub struct MembershipLog {
    dir: PathBuf,
    log: Option<Log<Event>>,
    waiting: Vec<Event>,
}

impl MembershipLog {
    /// For the run that has this folder, or will have it.
    pub fn new(dir: impl Into<PathBuf>) -> MembershipLog {
        MembershipLog { dir: dir.into(), log: None, waiting: Vec::new() }
    }

    /// Whether events wait for the folder.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Appends an event, if the folder is there; else keeps it until [`MembershipLog::flush`].
    pub fn append(&mut self, event: Event) -> Result<(), FolderError> {
        self.waiting.push(event);
        self.flush()
    }

    /// Writes what waits, if the folder is there by now.
    pub fn flush(&mut self) -> Result<(), FolderError> {
        if self.log.is_none() && self.dir.join(INFO).exists() {
            self.log = Some(Log::reopen_keeping(self.dir.join(FILE), |_| true)?);
        }
        if let Some(log) = &mut self.log {
            log.append_all(&self.waiting)?;
            self.waiting.clear();
        }
        Ok(())
    }
}

/// What happened to the workers of a run; nothing if it was not elastic.
pub fn read(dir: &Path) -> Result<Vec<Event>, FolderError> {
    read_lines(&dir.join(FILE), "record of a change of members")
}

/// What a worker was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// In the epoch.
    Member,
    /// Ready, but in no epoch.
    Spare,
    /// Started, and not ready yet.
    Starting,
    /// Its process has ended, or the run has.
    Gone,
}

impl State {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            State::Member => "member",
            State::Spare => "spare",
            State::Starting => "starting",
            State::Gone => "gone",
        }
    }
}

/// One life of a worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Life {
    /// Which.
    pub worker: WorkerId,
    /// Its process, if it is known.
    pub pid: Option<u32>,
    /// From when it was in which state, in order; the last lasts until the end.
    pub states: Vec<(f64, State)>,
    /// How it ended, if it has: "killed by signal 9".
    pub ended: Option<String>,
    /// What was the first sign that it was lost, if it was a member then.
    pub sign: Option<Sign>,
}

impl Life {
    /// What it does now.
    pub fn state(&self) -> State {
        self.states.last().map_or(State::Starting, |(_, state)| *state)
    }

    fn set(&mut self, at: f64, state: State) {
        if self.states.last().is_none_or(|(_, last)| *last != state) {
            self.states.push((at, state));
        }
    }
}

/// A membership of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Epoch {
    /// Its number, from 1; again from 1 where the run was resumed.
    pub number: u64,
    /// When it began.
    pub at: f64,
    /// Its members, by rank.
    pub members: Vec<WorkerId>,
}

/// How the run went on after a loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recovery {
    /// When its first step was complete.
    pub at: f64,
    /// Seconds from the loss until then, without the computation of that step.
    pub seconds: f64,
    /// The members that had been lost.
    pub lost: Vec<WorkerId>,
    /// How many members went on.
    pub members: usize,
    /// The step that was complete then.
    pub first: FirstStep,
}

/// What happened to the workers of a run, put together. Seconds since the start of the first launcher.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// The last launcher.
    pub launcher: Option<Launcher>,
    /// The lives of all workers, in the order of their beginning.
    pub lives: Vec<Life>,
    /// The members of the present epoch, by rank.
    pub members: Vec<WorkerId>,
    /// Every epoch, in order.
    pub epochs: Vec<Epoch>,
    /// Every recovery, in order.
    pub recoveries: Vec<Recovery>,
    /// Members that were lost.
    pub workers_lost: u64,
    /// Workers that became members of a later epoch than the first.
    pub workers_joined: u64,
    /// Whether the workers have handed in their result.
    pub is_finished: bool,
    /// How the last launcher ended: whether the run was complete, and in words; `None` as long as it runs, or
    /// if it was killed.
    pub over: Option<(bool, String)>,
    /// When the last event happened.
    pub end: f64,
}

impl Timeline {
    /// Puts events together; `None` without any.
    pub fn of(events: &[Event]) -> Option<Timeline> {
        let mut reader = Reader::default();
        events.iter().for_each(|event| reader.take(event));
        (!events.is_empty()).then_some(reader.timeline)
    }

    /// The last lives that a worker number has, by number.
    pub fn workers(&self) -> BTreeMap<u32, &Life> {
        self.lives.iter().map(|life| (life.worker.number, life)).collect()
    }

    /// Steps that had been begun when a member was lost, and were computed again.
    pub fn steps_redone(&self) -> usize {
        self.recoveries.iter().filter(|recovery| recovery.first.redone).count()
    }

    /// The middle one of the recoveries by duration, and the longest; seconds.
    pub fn recovery_seconds(&self) -> Option<(f64, f64)> {
        let mut seconds: Vec<f64> = self.recoveries.iter().map(|r| r.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        Some((*seconds.get(seconds.len() / 2)?, *seconds.last()?))
    }

    /// In a sentence: "3 workers lost, 3 joined; 3 recoveries, median 48.0 ms, longest 71.0 ms; 2 steps
    /// computed again."
    pub fn sentence(&self) -> String {
        if self.workers_lost == 0 && self.workers_joined == 0 && self.recoveries.is_empty() {
            let members = counted(self.members.len(), "worker");
            return format!("No worker was lost, and none joined: {members} all the time.");
        }
        let lost = counted(self.workers_lost as usize, "worker");
        let mut text = format!("{lost} lost, {} joined", self.workers_joined);
        match (self.recoveries.len(), self.recovery_seconds()) {
            (1, Some((_, longest))) => text += &format!("; 1 recovery in {}", duration(longest)),
            (many, Some((middle, longest))) => {
                let (middle, longest) = (duration(middle), duration(longest));
                text += &format!("; {many} recoveries, median {middle}, longest {longest}");
            }
            (_, None) => {}
        }
        if !self.recoveries.is_empty() {
            text += &match self.steps_redone() {
                0 => "; no step computed again".to_owned(),
                redone => format!("; {} computed again", counted(redone, "step")),
            };
        }
        text + "."
    }
}

#[derive(Default)]
struct Reader {
    timeline: Timeline,
    /// Where each worker's present life is.
    places: BTreeMap<WorkerId, usize>,
    /// When the present launcher began.
    offset: f64,
    /// Members that were lost since a step was last complete.
    lost: Vec<WorkerId>,
}

impl Reader {
    fn take(&mut self, event: &Event) {
        let at = (self.offset + event.at.max(0.0)).max(self.timeline.end);
        self.timeline.end = at;
        match &event.what {
            Happening::Launched(launcher) => self.launched(at, launcher),
            Happening::Started { worker, pid } => {
                self.life(at, *worker).pid = Some(*pid);
            }
            Happening::Connected { worker } => {
                self.life(at, *worker);
            }
            Happening::Ready { worker } => self.life(at, *worker).set(at, State::Spare),
            Happening::Epoch { epoch, members } => self.begin(at, *epoch, members),
            Happening::Lost { worker, sign } => {
                self.life(at, *worker).sign = Some(*sign);
                self.lost.push(*worker);
            }
            Happening::Killed { worker, sign } => {
                self.life(at, *worker).sign.get_or_insert(*sign);
            }
            Happening::Ended { worker, code, signal } => {
                let is_lost = self.timeline.members.contains(worker);
                if is_lost && !self.timeline.is_finished {
                    self.timeline.workers_lost += 1;
                }
                let life = self.life(at, *worker);
                life.set(at, State::Gone);
                life.ended = Some(ending(*code, *signal, life.sign));
            }
            Happening::Stepped(first) => self.stepped(at, first),
            Happening::Finished => self.timeline.is_finished = true,
            Happening::GaveUp { .. } | Happening::Unknown => {}
            Happening::Over { complete, outcome } => {
                self.timeline.over = Some((*complete, outcome.clone()));
                self.end_all(at);
            }
        }
    }

    /// Whatever an earlier launcher had started is gone.
    fn launched(&mut self, at: f64, launcher: &Launcher) {
        self.end_all(at);
        self.offset = at;
        self.places.clear();
        self.lost.clear();
        self.timeline.members.clear();
        self.timeline.launcher = Some(launcher.clone());
        self.timeline.is_finished = false;
        self.timeline.over = None;
    }

    fn end_all(&mut self, at: f64) {
        self.timeline.lives.iter_mut().for_each(|life| life.set(at, State::Gone));
    }

    /// The life of a worker, which begins now if it is new.
    fn life(&mut self, at: f64, worker: WorkerId) -> &mut Life {
        let lives = &mut self.timeline.lives;
        let place = *self.places.entry(worker).or_insert_with(|| {
            let states = vec![(at, State::Starting)];
            lives.push(Life { worker, pid: None, states, ended: None, sign: None });
            lives.len() - 1
        });
        &mut lives[place]
    }

    fn begin(&mut self, at: f64, number: u64, members: &[WorkerId]) {
        let before = std::mem::replace(&mut self.timeline.members, members.to_vec());
        if number > 1 {
            let is_new = |worker: &&WorkerId| !before.contains(worker);
            self.timeline.workers_joined += members.iter().filter(is_new).count() as u64;
        }
        members.iter().for_each(|worker| self.life(at, *worker).set(at, State::Member));
        self.timeline.epochs.push(Epoch { number, at, members: members.to_vec() });
    }

    fn stepped(&mut self, at: f64, first: &FirstStep) {
        let lost = std::mem::take(&mut self.lost);
        if let Some(seconds) = first.recovery {
            let members = self.timeline.members.len();
            let first = first.clone();
            self.timeline.recoveries.push(Recovery { at, seconds, lost, members, first });
        }
    }
}

/// How a process ended, in words.
fn ending(code: Option<i32>, signal: Option<i32>, sign: Option<Sign>) -> String {
    match (signal, code, sign) {
        (Some(9), _, Some(Sign::Silent)) => "did not answer, and was killed".into(),
        (Some(signal), ..) => format!("killed by signal {signal}"),
        (None, Some(code), _) => format!("exited with code {code}"),
        (None, None, _) => "ended".into(),
    }
}

#[cfg(test)]
pub(crate) mod tests;
