//! One replica's view of a step.

mod sums;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use pyo3::prelude::*;
use unisono_sync::bucket::BucketSizes;
use unisono_sync::{Parameter, Settings, SyncError, Synchronizer as Library};

use self::sums::SumsProgress;
pub use self::sums::{SummingPlan, Sums, summing_plan};
use super::buffers::ParameterBuffers;
use super::member::GroupMember;
use super::record::{BucketTransfer, ReplicaRecord};
use super::saved::{RestoredState, SavedState, restored, saved_by};
use super::settings::{self, CodecSettings};
use crate::closable::Closable;
use crate::deadline;
use crate::error::Site;
use crate::group::Group;
use crate::memory::Buffer;

/// Takes the gradients of a worker's shards, and gives back the mean of all workers'.
#[pyclass(frozen)]
pub struct Synchronizer {
    /// In the present group.
    place: RwLock<Place>,
    parameters: Vec<Parameter>,
    /// What all ranks must have in common, in words.
    settings: String,
    library: Closable<Library>,
    /// Locked only by threads that do not have the interpreter's lock.
    progress: Mutex<StepProgress>,
    record: ReplicaRecord,
    last: Mutex<LastStep>,
}

/// Where this replica is among the others.
#[derive(Clone)]
struct Place {
    member: Arc<GroupMember>,
    /// Its shards.
    own: Range<usize>,
}

/// What is known of the last step besides its outcome.
#[derive(Clone, Copy, Default)]
struct LastStep {
    /// Whether all ranks have agreed to leave the group after it.
    regroup: bool,
    /// Whether a rank has asked to stop after it.
    stop: bool,
    /// Seconds that this rank computed.
    compute: f64,
}

/// How far a step has come. The library is only called in the order in which it counts on.
struct StepProgress {
    /// Shards of this step that have begun.
    begun: usize,
    phase: StepPhase,
    /// Which parameters have had their gradient in this shard.
    seen: Vec<bool>,
    /// Of a worker that sums its gradients itself.
    sums: Option<SumsProgress>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepPhase {
    /// No shard is under way.
    Between,
    /// The loss is being computed.
    Forward,
    /// Gradients come.
    Backward,
    /// A step failed: the replicas are at none.
    Failed,
}

/// What came of a step: the mean loss; the parameters that had a gradient anywhere; the codec that
/// was chosen after it and why, if one was.
pub type StepOutcome = (f32, Vec<usize>, Option<(String, String)>);

impl Synchronizer {
    fn lock(&self) -> MutexGuard<'_, StepProgress> {
        self.progress.lock().expect("no panic while a step goes on")
    }

    fn place(&self) -> Place {
        self.place.read().expect("no panic while locked").clone()
    }

    /// Why the last call that failed did, if that was not asked before.
    pub fn take_failure(&self) -> Option<SyncError> {
        self.place().member.take_failure()
    }

    /// The library, if it can be called now by this member.
    fn open(&self, py: Python<'_>, member: &GroupMember, site: Site) -> PyResult<Arc<Library>> {
        member.expect_free(py, site)?;
        self.library.open(py, site, "it")
    }

    /// Calls the library, without the interpreter's lock. What the call refuses is an
    /// `InvalidCall`.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&Library, &mut StepProgress) -> Result<R, String> + Send,
    ) -> PyResult<R> {
        let member = self.place().member;
        let site = member.site(operation);
        let library = self.open(py, &member, site)?;
        let outcome = py.detach(|| {
            let mut progress = self.lock();
            match progress.phase {
                StepPhase::Failed => {
                    Err("an earlier step failed, and the replicas are at none; start \
                                      again from the last checkpoint"
                        .to_owned())
                }
                _ => call(&library, &mut progress),
            }
        });
        outcome.map_err(|text| site.invalid(py, &text))
    }
}

#[pymethods]
impl Synchronizer {
    /// Joins the replicas of a group; without one, this process is the only replica. All ranks give
    /// the same names, shapes and settings.
    #[new]
    #[pyo3(signature = (group, parameters, shards, codec, buckets, seconds))]
    fn new(
        py: Python<'_>,
        group: Option<Py<Group>>,
        parameters: Vec<(String, Vec<usize>)>,
        shards: usize,
        codec: CodecSettings,
        buckets: Option<(usize, usize)>,
        seconds: f64,
    ) -> PyResult<Synchronizer> {
        let mut member = GroupMember::new(py, group);
        let site = member.site("joining the replicas");
        let invalid = |text: String| site.invalid(py, &text);
        let parameters = settings::parameters(parameters).map_err(invalid)?;
        let settings = Settings {
            buckets: buckets.map(|(first, others)| BucketSizes { first, others }),
            compression: codec.compression().map_err(invalid)?,
            ..Settings::new(shards)
        };
        let text = format!("{settings:?}");
        let engine = member.engine(py, site)?;
        member.expect_equal(py, &engine, &text, seconds, site)?;
        let listed = parameters.clone();
        let library =
            member.within(py, seconds, site, || Library::new(Some(&engine), listed, settings))?;
        let ends = library.abort_handle();
        member.watch(ends.clone());
        let (begun, phase, sums) = (0, StepPhase::Between, None);
        let seen = vec![false; parameters.len()];
        let (own, rank) = (library.shards(), member.rank());
        Ok(Synchronizer {
            place: RwLock::new(Place { member: Arc::new(member), own }),
            library: Closable::new(library, ends, rank),
            progress: Mutex::new(StepProgress { begun, phase, seen, sums }),
            record: ReplicaRecord::default(),
            last: Mutex::default(),
            settings: text,
            parameters,
        })
    }

    /// Goes on in another group, all of whose ranks call this; without one, alone. The step under way is
    /// dropped, and to be computed again. False if a codec of a rank remembered something from step to step:
    /// that is lost, on all ranks, which go on from a checkpoint. After an error this can be called again, with
    /// the next group.
    fn regroup(&self, py: Python<'_>, group: Option<Py<Group>>, seconds: f64) -> PyResult<bool> {
        let mut member = GroupMember::new(py, group);
        let site = member.site("joining the replicas");
        let library = self.open(py, &self.place().member, site)?;
        let engine = member.engine(py, site)?;
        let outcome = member.expect_equal(py, &engine, &self.settings, seconds, site);
        let outcome = outcome.and_then(|()| {
            member.within(py, seconds, site, || match library.regroup(Some(&engine)) {
                Ok(()) => Ok(true),
                Err(SyncError::StateLost { .. }) => Ok(false),
                Err(error) => Err(error),
            })
        });
        if outcome.is_ok() {
            let ends = library.abort_handle();
            member.watch(ends.clone());
            self.library.waits_for(ends);
        }
        let phase = if outcome.is_ok() { StepPhase::Between } else { StepPhase::Failed };
        let own = py.detach(|| {
            let mut progress = self.lock();
            (progress.begun, progress.phase) = (0, phase);
            library.shards()
        });
        // Also where it failed: why is asked of the member of the group that did.
        let place = Place { member: Arc::new(member), own };
        *self.place.write().expect("no panic while locked") = place;
        outcome
    }

    /// So many steps have been made: the next is the one after them.
    fn go_on_from(&self, py: Python<'_>, steps: u64) -> PyResult<()> {
        self.expect_between(py, "go_on_from")?;
        self.call(py, "go_on_from", |library, _| {
            library.go_on_from(steps);
            Ok(())
        })?;
        self.record.set_steps(steps);
        Ok(())
    }

    /// Asks the ranks to leave the group after the next step, so that another one takes its place.
    fn vote_to_regroup(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "vote_to_regroup", |library, _| {
            library.vote_to_regroup();
            Ok(())
        })
    }

    /// Asks the ranks to stop after the step under way, if its last backward pass has not begun, or after the
    /// next.
    fn vote_to_stop(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "vote_to_stop", |library, _| {
            library.vote_to_stop();
            Ok(())
        })
    }

    /// Says that whatever happened since the last step was not part of the next: it begins now.
    fn begin_step(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "begin_step", |library, _| {
            library.begin_step();
            Ok(())
        })
    }

    /// Whether all ranks have agreed, in the last step, to leave the group; the seconds that this rank computed
    /// in it; and whether all have heard that one wants to stop.
    #[getter]
    fn last_step(&self) -> (bool, f64, bool) {
        let last = *self.last.lock().expect("no panic while locked");
        (last.regroup, last.compute, last.stop)
    }

    /// The shards of this worker: the first, and the one after the last.
    #[getter]
    fn shards(&self) -> (usize, usize) {
        let own = self.place().own;
        (own.start, own.end)
    }

    /// Steps that have ended.
    #[getter]
    fn steps(&self) -> u64 {
        self.record.steps()
    }

    /// Bytes this rank has sent so far. In the middle of a call that waits, and after the end, as they
    /// were counted last.
    #[getter]
    fn sent(&self, py: Python<'_>) -> u64 {
        let member = self.place().member;
        match self.open(py, &member, member.site("counting bytes")) {
            Ok(library) => self.record.note_sent(py.detach(|| library.sent())),
            Err(_) => self.record.sent(),
        }
    }

    /// When the buckets of the last step were under way.
    #[getter]
    fn transfers(&self) -> Vec<BucketTransfer> {
        self.record.transfers()
    }

    /// Begins the next of this worker's shards; which one.
    fn begin_shard(&self, py: Python<'_>) -> PyResult<usize> {
        let shards = self.place().own.len();
        self.call(py, "begin_shard", |library, progress| {
            if progress.phase != StepPhase::Between {
                return Err("the shard before was not ended; a backward pass that raised leaves \
                            its step unfinished, and there is no going on from it"
                    .into());
            }
            if progress.begun == shards {
                return Err("all shards of this step are computed; finish it".into());
            }
            if let (0, Some(sums)) = (progress.begun, &mut progress.sums) {
                sums.start_over(&library.accumulation());
            }
            progress.begun += 1;
            progress.phase = StepPhase::Forward;
            progress.seen.fill(false);
            Ok(library.begin_shard())
        })
    }

    /// The loss of the shard is known; gradients come next.
    fn begin_backward(&self, py: Python<'_>, loss: f32) -> PyResult<()> {
        self.call(py, "begin_backward", |library, progress| {
            if progress.phase != StepPhase::Forward {
                return Err("a backward pass begins once in every shard".into());
            }
            progress.phase = StepPhase::Backward;
            library.begin_backward(loss);
            Ok(())
        })
    }

    /// Takes a parameter's gradient in the shard under way, and is done with its memory.
    fn gradient(
        &self,
        py: Python<'_>,
        parameter: usize,
        address: usize,
        count: usize,
    ) -> PyResult<()> {
        self.call(py, "gradient", |library, progress| {
            let Some(of) = self.parameters.get(parameter) else {
                return Err(format!("there are {} parameters", self.parameters.len()));
            };
            if progress.phase != StepPhase::Backward {
                return Err(format!("the gradient of {} came outside of a backward pass", of.name));
            }
            if progress.sums.is_some() {
                return Err(format!(
                    "the gradient of {} came from a worker that sums them",
                    of.name
                ));
            }
            if progress.seen[parameter] {
                return Err(format!("a second gradient of {} came in one shard", of.name));
            }
            let gradient = Buffer::new(address, count, &of.name, of.elements())?;
            progress.seen[parameter] = true;
            // SAFETY: the caller keeps the memory valid and unchanged until this returns.
            library.gradient(parameter, unsafe { gradient.read() });
            Ok(())
        })
    }

    /// Ends the shard under way. Parameters that got no gradient have none in it.
    fn end_shard(&self, py: Python<'_>) -> PyResult<()> {
        let shards = self.place().own.len();
        self.call(py, "end_shard", |library, progress| {
            if progress.phase != StepPhase::Backward {
                return Err("a shard ends after its backward pass".into());
            }
            if let (true, Some(sums)) = (progress.begun == shards, &progress.sums) {
                sums.expect_all(&self.parameters)?;
            }
            progress.phase = StepPhase::Between;
            library.end_shard();
            Ok(())
        })
    }

    /// Ends the step: waits for the means of all parameters, at most `seconds`, and writes each to
    /// its place. The caller keeps the memory alive, and away from others, meanwhile.
    fn finish(&self, py: Python<'_>, buffers: Vec<Buffer>, seconds: f64) -> PyResult<StepOutcome> {
        let (member, site) = self.expect_computed(py)?;
        // SAFETY: the caller keeps the memory valid and to itself until this returns.
        let buffers = unsafe { ParameterBuffers::new(buffers, &self.parameters) };
        let mut buffers = buffers.map_err(|text| site.invalid(py, &text))?;
        self.end_step(py, &member, site, seconds, |parameter, mean| {
            buffers.of(parameter).copy_from_slice(mean);
        })
    }

    /// What must be remembered besides the weights, at rank 0. All ranks call it, between steps.
    fn save(&self, py: Python<'_>, seconds: f64) -> PyResult<SavedState> {
        self.expect_between(py, "save")?;
        let member = self.place().member;
        let site = member.site("saving");
        let (group, library) = (member.engine(py, site)?, self.open(py, &member, site)?);
        member.within(py, seconds, site, || saved_by(|each| library.save(&group, each)))
    }

    /// Goes on after so many steps from what was saved, of which rank 0's counts. All ranks call
    /// it, between steps, with the same number of steps.
    fn restore(
        &self,
        py: Python<'_>,
        steps: u64,
        saved: RestoredState,
        seconds: f64,
    ) -> PyResult<()> {
        self.expect_between(py, "restore")?;
        let member = self.place().member;
        let site = member.site("restoring");
        let (group, library) = (member.engine(py, site)?, self.open(py, &member, site)?);
        member.expect_equal_steps(py, &group, steps, seconds, site)?;
        member.within(py, seconds, site, || {
            library.restore(&group, &|name| restored(&saved, name))?;
            library.go_on_from(steps);
            self.record.set_steps(steps);
            Ok(())
        })
    }

    /// Leaves the replicas. If what is under way does not end within `seconds`, ends it for all of
    /// them. Other groups go on.
    fn close(&self, py: Python<'_>, seconds: f64) {
        self.library.close(py, deadline::limit(seconds));
    }
}

impl Synchronizer {
    /// The member that may end its step now, and where it does.
    fn expect_computed(&self, py: Python<'_>) -> PyResult<(Arc<GroupMember>, Site)> {
        let Place { member, own } = self.place();
        let site = member.site("the end of a step");
        self.call(py, "finish", |_, progress| match progress.phase {
            StepPhase::Between if progress.begun == own.len() => Ok(()),
            _ => Err("a step ends after all shards of this worker".into()),
        })?;
        Ok((member, site))
    }

    /// Waits for the means of all parameters, at most `seconds`, and calls `each` with every one that had a
    /// gradient anywhere, without the interpreter's lock.
    fn end_step(
        &self,
        py: Python<'_>,
        member: &GroupMember,
        site: Site,
        seconds: f64,
        mut each: impl FnMut(usize, &[f32]) + Send,
    ) -> PyResult<StepOutcome> {
        let library = self.open(py, member, site)?;
        member.within(py, seconds, site, || {
            let mut progress = self.lock();
            let mut used = Vec::with_capacity(self.parameters.len());
            // Whatever happens now, this step does not happen again.
            progress.phase = StepPhase::Failed;
            let outcome = library.finish(|parameter, mean| {
                each(parameter, mean);
                used.push(parameter);
            })?;
            progress.phase = StepPhase::Between;
            progress.begun = 0;
            self.record.set_steps(self.record.steps() + 1);
            self.record.note_sent(library.sent());
            self.record.note_transfers(&outcome.times.buckets);
            *self.last.lock().expect("no panic while locked") = LastStep {
                regroup: outcome.regroup,
                stop: outcome.stop,
                compute: outcome.times.compute.as_secs_f64(),
            };
            let chosen = outcome.advice.map(|advice| {
                let codec = advice.chosen.as_ref().map_or("none".to_owned(), ToString::to_string);
                (codec, advice.reason.clone())
            });
            Ok((outcome.loss, used, chosen))
        })
    }

    fn expect_between(&self, py: Python<'_>, operation: &'static str) -> PyResult<()> {
        self.call(py, operation, |_, progress| match (progress.phase, progress.begun) {
            (StepPhase::Between, 0) => Ok(()),
            _ => Err("it is done between two steps".into()),
        })
    }
}
