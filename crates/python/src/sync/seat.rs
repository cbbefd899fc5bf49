//! A replica's place among the others.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use pyo3::prelude::*;
use unisono_collective::{AbortHandle, Group as Engine, Options};
use unisono_sync::SyncError;

use crate::deadline::{self, Deadlines};
use crate::error::{Operation, Site, not_formed};
use crate::group::Group;

/// A rank in a group, or a process by itself.
pub struct Seat {
    group: Option<Py<Group>>,
    /// Of the group, and of whatever else a call may wait for.
    deadlines: Vec<Arc<Deadlines>>,
    rank: usize,
}

impl Seat {
    /// In a group, if there is one.
    pub fn new(py: Python<'_>, group: Option<Py<Group>>, rank: usize) -> Seat {
        let own = group.as_ref().map(|group| group.bind(py).get().deadlines().clone());
        Seat { group, deadlines: own.into_iter().collect(), rank }
    }

    /// Lets timeouts also end the calls that this handle ends.
    pub fn watch(&mut self, ends: Option<AbortHandle>) {
        self.deadlines.extend(ends.map(Deadlines::new));
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Where an error shows.
    pub fn site(&self, operation: &'static str) -> Site {
        Site { rank: self.rank, operation: Operation::Collective(operation) }
    }

    /// The engine's group; a group of one for a process by itself.
    pub fn engine(&self, py: Python<'_>, site: Site) -> PyResult<Arc<Engine>> {
        match &self.group {
            Some(group) => group.bind(py).get().open(py, site),
            None => {
                let groups = py.detach(|| Engine::local(1, &Options::default()));
                let mut groups = groups.map_err(|error| not_formed(py, &error))?;
                Ok(Arc::new(groups.remove(0)))
            }
        }
    }

    /// Waits for `call`, at most `seconds`, without the interpreter's lock.
    pub fn within<R, C>(&self, py: Python<'_>, seconds: f64, site: Site, call: C) -> PyResult<R>
    where
        R: Send,
        C: FnOnce() -> Result<R, SyncError> + Send,
    {
        let limit = deadline::limit(seconds);
        let outcome = py.detach(|| {
            let _noted: Vec<_> = self.deadlines.iter().map(|watch| watch.note(limit)).collect();
            call()
        });
        outcome.map_err(|error| site.not_synchronized(py, &error))
    }

    /// Fails on all ranks if they were given different settings.
    pub fn expect_equal(
        &self,
        py: Python<'_>,
        group: &Engine,
        settings: &str,
        seconds: f64,
        site: Site,
    ) -> PyResult<()> {
        let mut hasher = DefaultHasher::new();
        settings.hash(&mut hasher);
        let own = hasher.finish() as i64;
        let mut all = vec![0i64; group.size()];
        self.within(py, seconds, site, || Ok(group.all_gather(&[own], &mut all)?))?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let text = format!(
                    "rank {rank} was given other settings than rank 0 (here: {settings}); give all \
                     ranks the same"
                );
                Err(site.invalid(py, &text))
            }
        }
    }
}
