//! A job whose workers may come and go: one group after the other.
//!
//! A worker that waits for its launcher waits for no group, so that no engine asks whether it should stop. Such
//! a wait is made on another thread, while the thread that Python called looks for signals, and answers what the other
//! asks of Python. Where a handler raises, the worker has left the job: what the other thread gets meanwhile is
//! dropped.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use unisono::elastic::{Donor, ElasticError, ElasticJob as Library};
use unisono_cluster::membership::{self, FirstStep, MembershipError};
use unisono_collective::{Options, Rank};
use unisono_sync::SyncError;

use crate::error::{Operation, Site, made, not_begun, not_formed};
use crate::following::{Asked, Copies, PythonFollower};
use crate::group::Group;
use crate::signals::CHECK_EVERY;
use crate::sync::Synchronizer;

/// How long a worker whose wait was interrupted stays connected. Longer: a process that lives on holds up the others for
/// as long. Shorter: one that ends with an error is killed and started again before its exit code is seen.
const PARTING: Duration = Duration::from_secs(5);

/// A worker's membership in a job whose workers may come and go.
#[pyclass(frozen)]
pub struct ElasticJob {
    /// Not there while a thread waits with it, and after such a wait was interrupted.
    library: Mutex<Option<Library>>,
    /// The process that joined. A child of `fork` has its memory, but not its threads.
    process: u32,
}

/// What the thread that waits tells the one that Python called.
enum Told<R> {
    /// It has waited.
    Waited(Box<Library>, Result<R, ElasticError>),
    /// It needs something of Python first.
    Asks(Asked, Sender<bool>),
}

impl ElasticJob {
    fn lock(&self) -> MutexGuard<'_, Option<Library>> {
        self.library.lock().expect("no panic while locked")
    }

    /// Calls the library, which does not wait.
    fn with<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Library) -> R) -> PyResult<R> {
        self.expect_own(py)?;
        match self.lock().as_mut() {
            Some(library) => Ok(call(library)),
            None => Err(not_in(py)),
        }
    }

    /// Calls the library, which waits for the launcher or for other workers, and lets Python handle signals
    /// meanwhile, and what the call asks.
    fn wait<R: Send + 'static>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(
            &mut Library,
            Box<dyn Fn(Asked, Sender<bool>) -> bool + Send>,
        ) -> Result<R, ElasticError>
        + Send
        + 'static,
        answer: impl Fn(Asked) -> PyResult<bool>,
    ) -> PyResult<R> {
        self.expect_own(py)?;
        let mut library = Box::new(self.lock().take().ok_or_else(|| not_in(py))?);
        let (tell, mut told) = mpsc::channel();
        let waiting = move || {
            let asking = tell.clone();
            let ask = move |asked, answer| asking.send(Told::Asks(asked, answer)).is_ok();
            let outcome = call(&mut library, Box::new(ask));
            if let Err(left) = tell.send(Told::Waited(library, outcome)) {
                // The wait was interrupted: this worker leaves the job here. If its process ends now, the launcher
                // is to see how.
                std::thread::sleep(PARTING);
                drop(left);
            }
        };
        let name = "unisono-elastic".into();
        let spawned = std::thread::Builder::new().name(name).spawn(waiting);
        spawned.map_err(|error| not_begun(py, format!("cannot start a thread: {error}")))?;
        loop {
            let told = &mut told;
            match py.detach(move || told.recv_timeout(CHECK_EVERY)) {
                Ok(Told::Waited(library, outcome)) => {
                    *self.lock() = Some(*library);
                    return outcome.map_err(|error| failed(py, &error));
                }
                Ok(Told::Asks(asked, answers)) => {
                    let follows = answer(asked)?;
                    // Fails if the other thread has ended, which is noticed next.
                    let _ = answers.send(follows);
                    py.check_signals()?;
                }
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => return Err(not_in(py)),
            }
        }
    }

    /// What gives this worker's state to workers that join; None before it has entered an epoch.
    fn donor(&self, py: Python<'_>) -> PyResult<Option<Arc<Donor>>> {
        self.with(py, |library| library.donor().cloned())
    }

    fn expect_own(&self, py: Python<'_>) -> PyResult<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        let text = "this process was forked from a worker of an elastic job, and is none itself";
        Err(not_begun(py, text.into()))
    }
}

#[pymethods]
impl ElasticJob {
    /// Connects to the launcher of the job, which coordinates it; None if that did not make the job elastic. A batch
    /// is cut into so many shards: more workers than that wait as spares.
    #[staticmethod]
    fn join(py: Python<'_>, shards: usize) -> PyResult<Option<ElasticJob>> {
        if std::env::var_os(membership::VARIABLE).is_none() {
            return Ok(None);
        }
        let options = Options::from_env().map_err(|error| not_begun(py, error.to_string()))?;
        let joined = py.detach(|| Library::join(options)).map_err(|error| failed(py, &error))?;
        Ok(joined.map(|mut library| {
            library.set_shards(shards);
            ElasticJob { library: Mutex::new(Some(library)), process: std::process::id() }
        }))
    }

    /// Waits until this worker is in an epoch, and forms its group; None when the run is complete. A worker that was in
    /// none yet first gets the state of a member, and follows its steps, if it has a `follower` for that.
    #[pyo3(signature = (follower=None))]
    fn enter(
        &self,
        py: Python<'_>,
        follower: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Group>> {
        let Some(follower) = follower else {
            let never = |_| Ok(false);
            return Ok(self.wait(py, |library, _| library.enter(), never)?.map(Group::new));
        };
        let fingerprint = follower.getattr("fingerprint")?.extract::<[u8; 32]>()?;
        let call = move |library: &mut Library, ask| {
            let (is_over, is_gone) = (false, false);
            library.enter_with(&mut PythonFollower { fingerprint, ask, is_over, is_gone })
        };
        Ok(self.wait(py, call, |asked: Asked| asked.of(follower))?.map(Group::new))
    }

    /// From now on workers that join may ask for the state of this one, if they have the same fingerprint. A step
    /// changes about so many bytes of it.
    fn offer(&self, py: Python<'_>, fingerprint: [u8; 32], bytes: usize) -> PyResult<()> {
        if let Some(donor) = self.donor(py)? {
            donor.offer(fingerprint, bytes.div_ceil(size_of::<f32>()));
        }
        Ok(())
    }

    /// Whether a worker that joins has asked for the state; and whether one follows.
    #[getter]
    fn joiner(&self, py: Python<'_>) -> PyResult<(bool, bool)> {
        let donor = self.donor(py)?;
        Ok(donor.map_or((false, false), |donor| (donor.is_asked(), donor.is_followed())))
    }

    /// Gives the worker that has asked the state after so many steps.
    fn give_state(&self, py: Python<'_>, steps: u64, copies: &Copies) -> PyResult<()> {
        if let Some(donor) = self.donor(py)? {
            donor.tell(steps, copies.take());
        }
        Ok(())
    }

    /// Gives the worker that follows what a step has changed.
    fn give_step(
        &self,
        py: Python<'_>,
        steps: u64,
        copies: Vec<PyRef<'_, Copies>>,
    ) -> PyResult<()> {
        if let Some(donor) = self.donor(py)? {
            donor.tell_step(steps, copies.iter().flat_map(|copies| copies.take()).collect());
        }
        Ok(())
    }

    /// No worker can follow this one: the one that does gets the state in the next group.
    fn refuse(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(donor) = self.donor(py)? {
            donor.refuse();
        }
        Ok(())
    }

    /// The state of this worker is no longer what the worker that follows gets to.
    fn break_off(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(donor) = self.donor(py)? {
            donor.break_off();
        }
        Ok(())
    }

    /// The number of the epoch that this worker is in, or was in last.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |library| library.epoch())
    }

    /// Whether a worker waits to be let in.
    fn is_asked_to_regroup(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |library| library.is_asked_to_regroup())
    }

    /// Takes note of why a synchronizer, or else its group, has failed. False if neither has, or in a way that
    /// the next group would fail as well.
    fn note_failure(
        &self,
        py: Python<'_>,
        group: &Group,
        synchronizer: &Synchronizer,
    ) -> PyResult<bool> {
        let failure = synchronizer.take_failure().or_else(|| group.failure().map(SyncError::Group));
        self.with(py, |library| match &failure {
            Some(SyncError::Group(error)) => library.note_loss(error).is_ok(),
            Some(SyncError::Form(error)) => library.note_unformed(error).is_ok(),
            _ => false,
        })
    }

    /// Notes which shard this worker begins to compute, or that it has computed all of a step. The launcher is told
    /// if epochs end without a step: it names a shard that kills its workers.
    #[pyo3(signature = (shard))]
    fn note_shard(&self, py: Python<'_>, shard: Option<usize>) -> PyResult<()> {
        if let Err(error) = self.with(py, |library| library.note_shard(shard))? {
            // A launcher that is gone is noticed soon enough.
            log::debug!("{error}");
        }
        Ok(())
    }

    /// Tells the launcher that the first step of the epoch is complete, as rank 0: the number of steps, the
    /// seconds that this one took to compute, whether it had been begun before, how many workers were given the
    /// state of another, and whether no worker had any.
    fn stepped(
        &self,
        py: Python<'_>,
        step: u64,
        compute: f64,
        redone: bool,
        behind: u64,
        from_checkpoint: bool,
    ) -> PyResult<()> {
        let outcome = self.with(py, |library| {
            let epoch = library.epoch();
            library.stepped(FirstStep { epoch, step, compute, redone, behind, from_checkpoint })
        })?;
        outcome.map_err(|error| failed(py, &error))
    }

    /// Hands in the result of the run, as rank 0, and waits until the launcher has it.
    fn finish(&self, py: Python<'_>, result: Vec<u8>) -> PyResult<()> {
        self.wait(py, move |library, _| library.finish(result), |_| Ok(false))
    }
}

impl Drop for ElasticJob {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // Leaving would close the connection of the process that this one was forked from.
            std::mem::forget(self.library.get_mut().ok().and_then(Option::take));
        }
    }
}

fn not_in(py: Python<'_>) -> PyErr {
    let text = "this worker has left the elastic job, because a wait for it was interrupted";
    made(py, "Error", text.into(), Ok(pyo3::types::PyDict::new(py)))
}

fn failed(py: Python<'_>, error: &ElasticError) -> PyErr {
    let site = |rank| Site { rank: Rank(rank), operation: Operation::Collective("elastic job") };
    match error {
        ElasticError::Form(error) => not_formed(py, error),
        ElasticError::Group(error) => site(0).failed(py, error),
        ElasticError::Membership(MembershipError::Lost(_)) => {
            made(py, "Aborted", error.to_string(), Ok(pyo3::types::PyDict::new(py)))
        }
        error => not_begun(py, error.to_string()),
    }
}
