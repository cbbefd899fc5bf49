//! A worker's way from one group of a job to the next, and what it takes along.
//!
//! Every epoch goes like this. A worker *enters* it, and gets its group. It *goes on* there: workers that are behind
//! get the state of a member that is not. If none has all of it, all go on from what was kept when the members
//! changed, from the last checkpoint, or from the beginning. Then it makes its steps, in which it *votes* to let
//! others in where that is asked for, until all have agreed to *leave*, the group has *failed*, or the run is over.
//!
//! The caller decides what a step is and when the run is over. All the rest is decided here.

use std::time::Duration;

use unisono_cluster::membership::FirstStep;
use unisono_collective::Group;
use unisono_net::crash;
use unisono_sync::{StepOutcome, SyncError, Synchronizer};

use super::kept::Kept;
use super::trainee::{Saved, Trainee};
use super::{ElasticError, ElasticJob};
use crate::job::Job;

/// The exit code of a worker that gives up for a reason that another life of it would meet again. A launcher does not
/// start it again.
pub const GIVES_UP: u8 = 64;

/// How long a worker that leaves in the middle of a run has to end by itself. Longer: the others wait for longer if it
/// does not. Shorter: its launcher does not see the exit code of a process that takes its time to end.
const ENDING: Duration = Duration::from_secs(5);

/// A worker's part of a job whose workers may come and go.
pub struct Session {
    /// `None` where workers do not change.
    job: Option<Box<ElasticJob>>,
    /// The present one.
    group: Option<Group>,
    /// Whether the run is over for this worker.
    is_over: bool,
    /// Whether this worker goes on in the present group.
    has_gone_on: bool,
    /// Whether all members have agreed to leave the present group.
    is_leaving: bool,
    /// A copy of the state, since members have left a group that would have taken a part of it along.
    kept: Option<Kept>,
    /// The last epoch in which this worker has made a step.
    stepped_in: u64,
    /// The steps after which this worker was in the middle of another when its group failed.
    failed_after: Option<u64>,
    /// At rank 0, until the first step of the epoch is complete.
    first: Option<FirstStep>,
}

/// Where the state came from with which the workers of a group go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// One of them, or all, had it.
    Member,
    /// It was kept when members left the group before: the run goes on where it was.
    Kept,
    /// The last checkpoint.
    Checkpoint,
    /// The run begins, or begins anew.
    Beginning,
}

impl Source {
    /// Whether the run has gone back to something earlier, because the state was lost.
    fn is_earlier(self) -> bool {
        matches!(self, Source::Checkpoint | Source::Beginning)
    }
}

impl Session {
    /// That of a worker which an elastic launcher has started.
    pub fn new(job: ElasticJob) -> Session {
        Session::in_group(Some(Box::new(job)), None)
    }

    /// That of a worker in a job whose workers do not change: it is in one group, whose failure is final.
    pub fn fixed(job: Job) -> Session {
        Session::in_group(None, Some(job.into_world()))
    }

    fn in_group(job: Option<Box<ElasticJob>>, group: Option<Group>) -> Session {
        Session {
            job,
            group,
            is_over: false,
            has_gone_on: false,
            is_leaving: false,
            kept: None,
            stepped_in: 0,
            failed_after: None,
            first: None,
        }
    }

    /// Whether workers may come and go.
    pub fn is_elastic(&self) -> bool {
        self.job.is_some()
    }

    /// The number of the epoch that this worker is in, or was in last; 0 where workers do not change.
    pub fn epoch(&self) -> u64 {
        self.job.as_ref().map_or(0, |job| job.epoch())
    }

    /// The present group; `None` between two.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Makes sure that this worker is in a group, in which it may have yet to [go on](Session::go_on); `false` if the
    /// run is over.
    pub fn enter<T: Trainee + ?Sized>(&mut self, trainee: &mut T) -> Result<bool, ElasticError> {
        if let (Some(job), None) = (&mut self.job, &self.group) {
            self.group = trainee.enter(job)?;
            self.is_over = self.group.is_none();
        }
        Ok(!self.is_over)
    }

    /// Goes on in the present group: with the state of a member, with what was kept, with the checkpoint that `find`
    /// returns, which is called at rank 0, or from the beginning. All ranks must call it.
    pub fn go_on<T: Trainee + ?Sized, E: From<T::Error>>(
        &mut self,
        trainee: &mut T,
        find: impl FnOnce() -> Result<Option<Box<dyn Saved>>, E>,
    ) -> Result<Source, E> {
        crash::point("formed");
        let group = self.group.as_ref().expect("it has entered one");
        let regrouped = trainee.regroup(group)?;
        crash::point("regrouped");
        let source = match regrouped.donor {
            Some(_) => Source::Member,
            None => begin(group, trainee, self.kept.as_ref(), self.stepped_in, find)?,
        };
        let is_first = group.rank() == 0;
        if let Some(job) = &self.job {
            trainee.hand_over(job);
            self.first = is_first.then(|| FirstStep {
                epoch: job.epoch(),
                step: 0,
                compute: 0.0,
                redone: self.failed_after.is_some_and(|failed| failed >= trainee.steps()),
                behind: regrouped.behind as u64,
                from_checkpoint: source.is_earlier(),
            });
        }
        if let Some(synchronizer) = trainee.synchronizer() {
            synchronizer.begin_step();
        }
        (self.failed_after, self.has_gone_on) = (None, true);
        Ok(source)
    }

    /// Whether this worker goes on in the present group.
    pub fn has_gone_on(&self) -> bool {
        self.has_gone_on
    }

    /// Before a step: votes to let others in, if they wait for it.
    pub fn vote(&self, synchronizer: &Synchronizer) {
        if self.job.as_ref().is_some_and(|job| job.is_asked_to_regroup()) {
            synchronizer.vote_to_regroup();
        }
    }

    /// Notes which shard this worker begins to compute, or that it has computed all of a step.
    pub fn note_shard(&self, shard: Option<usize>) -> Result<(), ElasticError> {
        self.job.as_ref().map_or(Ok(()), |job| job.note_shard(shard))
    }

    /// Notes a step that was made, the first of which is 1. Rank 0 tells the launcher of the first of an epoch.
    pub fn stepped(&mut self, step: u64, outcome: &StepOutcome) -> Result<(), ElasticError> {
        (self.kept, self.stepped_in, self.is_leaving) = (None, self.epoch(), outcome.regroup);
        match (&self.job, self.first.take()) {
            (Some(job), Some(first)) => {
                let compute = outcome.times.compute.as_secs_f64();
                job.stepped(FirstStep { step, compute, ..first })
            }
            _ => Ok(()),
        }
    }

    /// Whether all members have agreed, in the last step, to leave the present group.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    /// Leaves the present group, as all members have agreed to. What would be lost with it is kept. All ranks must
    /// call it.
    pub fn leave<T: Trainee + ?Sized>(&mut self, trainee: &T) -> Result<(), T::Error> {
        crash::point("leaving");
        let would_lose_state = trainee.synchronizer().is_some_and(Synchronizer::would_lose_state);
        if let (Some(group), true) = (&self.group, would_lose_state) {
            let kept = Kept::of(trainee, group, self.epoch())?;
            // A worker that has its copy must not leave before the others have theirs.
            let all_have_it = group.barrier();
            self.kept = kept;
            all_have_it?;
        }
        self.stand_by();
        Ok(())
    }

    /// Leaves the present group after the last step, to wait for the end of the run, or for the next epoch if rank 0 is
    /// lost before it has handed in the result.
    pub fn stand_by(&mut self) {
        if self.is_elastic() {
            self.group = None;
        }
        (self.has_gone_on, self.is_leaving, self.first) = (false, false, None);
    }

    /// Takes note of why the present group has failed, after so many steps, and leaves it; `false` if no other group
    /// can follow.
    #[must_use]
    pub fn failed(&mut self, error: &SyncError, steps: u64) -> bool {
        let can_follow = self.job.as_mut().is_some_and(|job| job.note_failure(error));
        if self.has_gone_on {
            self.failed_after = Some(steps);
        }
        self.stand_by();
        can_follow
    }

    /// Hands in the result of the run, as rank 0. Where workers do not change, no launcher waits for it.
    pub fn finish(&mut self, result: Vec<u8>) -> Result<(), ElasticError> {
        crash::point("summed-up");
        if let Some(job) = &self.job {
            job.finish(result)?;
        }
        self.is_over = true;
        crash::point("handed-in");
        Ok(())
    }
}

/// A worker that leaves in the middle of a run has failed, and its process is about to end. A launcher that loses the
/// connection before that kills the process, and does not learn with which exit code it would have ended.
impl Drop for Session {
    fn drop(&mut self) {
        self.group = None;
        if let Some(job) = self.job.take().filter(|_| !self.is_over) {
            let lasting = std::thread::Builder::new().name("unisono-ending".into());
            let lasting = lasting.spawn(move || {
                std::thread::sleep(ENDING);
                drop(job);
            });
            if let Err(error) = lasting {
                log::debug!("the launcher may not see how this process ends: {error}");
            }
        }
    }
}

/// Brings workers none of which has all of its state to what is left of it, or to the beginning.
fn begin<T: Trainee + ?Sized, E: From<T::Error>>(
    group: &Group,
    trainee: &mut T,
    kept: Option<&Kept>,
    stepped_in: u64,
    find: impl FnOnce() -> Result<Option<Box<dyn Saved>>, E>,
) -> Result<Source, E> {
    if Kept::restore(kept, stepped_in, trainee, group)? {
        return Ok(Source::Kept);
    }
    let found = if group.rank() == 0 { find()? } else { None };
    let mut is_found = [u8::from(found.is_some())];
    group.broadcast(&mut is_found, 0).map_err(T::Error::from)?;
    if is_found[0] == 1 {
        let (steps, found) = (found.as_ref().map_or(0, |found| found.steps()), found.as_ref());
        trainee.restore(group, steps, &|name| found?.find(name))?;
        return Ok(Source::Checkpoint);
    }
    trainee.begin_anew(group)?;
    Ok(Source::Beginning)
}
