//! A job whose workers may come and go: one group after the other.
//!
//! A worker that waits for its launcher waits for no group, so that no engine asks whether it should stop. Such
//! a wait is made on another thread, while the thread that Python called looks for signals. Where a handler
//! raises, the worker has left the job: what the other thread gets meanwhile is dropped.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use unisono::elastic::{ElasticError, ElasticJob as Library};
use unisono_cluster::membership::{self, FirstStep, MembershipError};
use unisono_collective::{Options, Rank};
use unisono_sync::SyncError;

use crate::error::{Operation, Site, made, not_begun, not_formed};
use crate::group::Group;
use crate::signals::CHECK_EVERY;
use crate::sync::Synchronizer;

/// A worker's membership in a job whose workers may come and go.
#[pyclass(frozen)]
pub struct ElasticJob {
    /// Not there while a thread waits with it, and after such a wait was interrupted.
    library: Mutex<Option<Library>>,
    /// The process that joined. A child of `fork` has its memory, but not its threads.
    process: u32,
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
    /// meanwhile.
    fn wait<R: Send + 'static>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Library) -> Result<R, ElasticError> + Send + 'static,
    ) -> PyResult<R> {
        self.expect_own(py)?;
        let mut library = self.lock().take().ok_or_else(|| not_in(py))?;
        let (tell, mut told) = mpsc::channel();
        let waiting = move || {
            let outcome = call(&mut library);
            // Fails if the wait was interrupted: then this worker leaves the job here.
            let _ = tell.send((library, outcome));
        };
        let name = "unisono-elastic".into();
        let spawned = std::thread::Builder::new().name(name).spawn(waiting);
        spawned.map_err(|error| not_begun(py, format!("cannot start a thread: {error}")))?;
        loop {
            let told = &mut told;
            match py.detach(move || told.recv_timeout(CHECK_EVERY)) {
                Ok((library, outcome)) => {
                    *self.lock() = Some(library);
                    return outcome.map_err(|error| failed(py, &error));
                }
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => return Err(not_in(py)),
            }
        }
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

    /// Waits until this worker is in an epoch, and forms its group; None when the run is complete.
    fn enter(&self, py: Python<'_>) -> PyResult<Option<Group>> {
        Ok(self.wait(py, Library::enter)?.map(Group::new))
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
        self.wait(py, move |library| library.finish(result))
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
