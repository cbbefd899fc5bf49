//! Workers that train by themselves and agree now and then.

use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use unisono_sync::Parameter;
use unisono_sync::strategy::{LocalSteps as Library, Strategy, StrategySpec, Votes};

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

/// Synchronizes the weights of workers that train by themselves.
#[pyclass(frozen)]
pub struct LocalSteps {
    member: GroupMember,
    parameters: Vec<Parameter>,
    state: Closable<Mutex<LocalState>>,
    record: ReplicaRecord,
}

/// Locked only by threads that do not have the interpreter's lock.
struct LocalState {
    library: Library,
    /// Whether a synchronization failed: nothing is agreed any more.
    failed: bool,
}

impl LocalSteps {
    /// The state, if it can be looked at now.
    fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<Mutex<LocalState>>> {
        self.member.expect_free(py, site)?;
        self.state.open(py, site, "it")
    }

    /// Whether something may be under way.
    fn has_begun(&self, py: Python<'_>, site: Site) -> PyResult<bool> {
        let state = self.open(py, site)?;
        let delay = py.detach(|| lock(&state).library.schedule().delay());
        Ok(self.record.steps() > 0 && delay > 0)
    }

    /// The buffers of all parameters, for as long as a call lasts.
    fn buffers(
        &self,
        py: Python<'_>,
        site: Site,
        buffers: Vec<Buffer>,
    ) -> PyResult<ParameterBuffers> {
        // SAFETY: the caller keeps the memory valid and to itself until its call returns.
        let buffers = unsafe { ParameterBuffers::new(buffers, &self.parameters) };
        buffers.map_err(|text| site.invalid(py, &text))
    }

    /// Calls the library, at most for so long, without the interpreter's lock.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        seconds: f64,
        site: Site,
        call: impl FnOnce(&mut LocalState) -> Result<R, unisono_sync::SyncError> + Send,
    ) -> PyResult<R> {
        let state = self.open(py, site)?;
        if py.detach(|| lock(&state).failed) {
            let text = "an earlier synchronization failed, and nothing is agreed any more; start \
                        again from the last checkpoint";
            return Err(site.invalid(py, text));
        }
        self.member.within(py, seconds, site, || {
            let mut state = lock(&state);
            let outcome = call(&mut state);
            state.failed = outcome.is_err();
            outcome
        })
    }
}

#[pymethods]
impl LocalSteps {
    /// Joins the workers of a group; without one, this process is the only worker. All ranks give the
    /// same names, shapes and settings. The weights in `buffers` become rank 0's.
    #[new]
    #[pyo3(signature = (group, parameters, strategy, codec, buffers, seconds))]
    fn new(
        py: Python<'_>,
        group: Option<Py<Group>>,
        parameters: Vec<(String, Vec<usize>)>,
        strategy: &str,
        codec: CodecSettings,
        buffers: Vec<Buffer>,
        seconds: f64,
    ) -> PyResult<LocalSteps> {
        let mut member = GroupMember::new(py, group);
        let site = member.site("joining the workers");
        let invalid = |text: String| site.invalid(py, &text);
        let parameters = settings::parameters(parameters).map_err(invalid)?;
        let spec: StrategySpec = strategy.parse().map_err(|e| invalid(format!("{e}")))?;
        let plan =
            spec.local_steps().ok_or_else(|| invalid(format!("{spec} has no local steps")))?;
        let compression = codec.compression().map_err(invalid)?;
        if compression.as_ref().is_some_and(|compression| compression.auto) {
            return Err(invalid(
                "a codec is chosen where workers agree in every step; name one".into(),
            ));
        }
        // SAFETY: the caller keeps the memory valid and to itself until this returns.
        let buffers = unsafe { ParameterBuffers::new(buffers, &parameters) };
        let mut buffers = buffers.map_err(invalid)?;
        let engine = member.engine(py, site)?;
        let shapes: Vec<_> = parameters.iter().map(|p| (&p.name, &p.shape)).collect();
        let settings = format!("{spec}, {compression:?}, {shapes:?}");
        member.expect_equal(py, &engine, &settings, seconds, site)?;
        let library = member.within(py, seconds, site, || {
            for parameter in 0..parameters.len() {
                engine.broadcast(buffers.of(parameter), 0)?;
            }
            let mut library = Library::new(Some(&engine), &parameters, plan, compression)?;
            library.begin(&buffers);
            Ok(library)
        })?;
        let ends = library.abort_handle();
        member.watch(ends.clone());
        let state = Mutex::new(LocalState { library, failed: false });
        let state = Closable::new(state, ends, member.rank());
        Ok(LocalSteps { member, parameters, state, record: ReplicaRecord::default() })
    }

    /// Steps that this worker has finished.
    #[getter]
    fn steps(&self) -> u64 {
        self.record.steps()
    }

    /// Bytes this rank has sent so far. In the middle of a call that waits, and after the end, as they
    /// were counted last.
    #[getter]
    fn sent(&self, py: Python<'_>) -> u64 {
        match self.open(py, self.member.site("counting bytes")) {
            Ok(state) => self.record.note_sent(py.detach(|| lock(&state).library.sent())),
            Err(_) => self.record.sent(),
        }
    }

    /// When the buckets that were agreed on last were under way.
    #[getter]
    fn transfers(&self) -> Vec<BucketTransfer> {
        self.record.transfers()
    }

    /// Whether the workers' weights are read or changed after the next step.
    fn is_due(&self, py: Python<'_>) -> PyResult<bool> {
        let state = self.open(py, self.member.site("looking at the schedule"))?;
        let next = self.record.steps() + 1;
        let due = py.detach(|| lock(&state).library.schedule().after(next));
        Ok(due.submit.is_some() || due.apply.is_some())
    }

    /// This worker has finished a step in which nothing was due.
    fn skip(&self, py: Python<'_>) -> PyResult<()> {
        let site = self.member.site("a local step");
        if self.is_due(py)? {
            return Err(site.invalid(py, "something is due after this step; give the weights"));
        }
        self.record.set_steps(self.record.steps() + 1);
        Ok(())
    }

    /// This worker has finished a step: does what is due after it, and waits for it, at most
    /// `seconds`. Whether the workers agreed on something. The caller keeps the weights alive, and
    /// away from others, meanwhile.
    fn step(&self, py: Python<'_>, buffers: Vec<Buffer>, seconds: f64) -> PyResult<bool> {
        let site = self.member.site("a local step");
        let mut buffers = self.buffers(py, site, buffers)?;
        self.call(py, seconds, site, |state| {
            let step = self.record.steps() + 1;
            let outcome = state.library.step(step, &mut buffers, 0.0, Votes::default())?;
            self.record.set_steps(step);
            self.record.note_sent(state.library.sent());
            self.record.note_transfers(&outcome.buckets);
            Ok(outcome.agreed.is_some())
        })
    }

    /// Makes the weights of all workers equal, at the end of training. All ranks call it.
    fn settle(&self, py: Python<'_>, buffers: Vec<Buffer>, seconds: f64) -> PyResult<()> {
        let site = self.member.site("settling");
        let mut buffers = self.buffers(py, site, buffers)?;
        self.call(py, seconds, site, |state| {
            let outcome = state.library.settle(self.record.steps(), &mut buffers)?;
            self.record.note_sent(state.library.sent());
            self.record.note_transfers(&outcome.buckets);
            Ok(())
        })
    }

    /// What must be remembered besides the workers' own weights, at rank 0. All ranks call it,
    /// after the same step.
    fn save(&self, py: Python<'_>, seconds: f64) -> PyResult<SavedState> {
        let site = self.member.site("saving");
        let group = self.member.engine(py, site)?;
        self.call(py, seconds, site, |state| saved_by(|each| state.library.save(&group, each)))
    }

    /// Goes on after so many steps from what was saved, of which rank 0's counts. All ranks call
    /// it, with the same number of steps.
    fn restore(
        &self,
        py: Python<'_>,
        steps: u64,
        saved: RestoredState,
        seconds: f64,
    ) -> PyResult<()> {
        let site = self.member.site("restoring");
        if self.has_begun(py, site)? {
            let text =
                "what is under way cannot be taken back; load the state before the first step";
            return Err(site.invalid(py, text));
        }
        let group = self.member.engine(py, site)?;
        self.member.expect_equal_steps(py, &group, steps, seconds, site)?;
        self.call(py, seconds, site, |state| {
            state.library.restore(&group, &|name| restored(&saved, name))?;
            self.record.set_steps(steps);
            Ok(())
        })
    }

    /// Leaves the workers. If what is under way does not end within `seconds`, ends it for all of
    /// them. Other groups go on.
    fn close(&self, py: Python<'_>, seconds: f64) {
        self.state.close(py, deadline::limit(seconds));
    }
}

fn lock(state: &Mutex<LocalState>) -> MutexGuard<'_, LocalState> {
    state.lock().expect("no panic while weights are synchronized")
}
