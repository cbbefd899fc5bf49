//! A replica as a member of its group.
//!
//! While a call waits, its thread lets Python handle signals (see [`signals`]). What a handler asks
//! then is asked on a thread that is in the middle of a call: to wait for that would be to wait for
//! itself.

use std::cell::Cell;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use unisono_collective::{AbortHandle, Group as EngineGroup, Options, Rank};
use unisono_sync::SyncError;

use crate::deadline::{self, Deadlines};
use crate::error::{Operation, Site, not_formed};
use crate::group::Group;
use crate::signals;

thread_local! {
    /// The member in whose call this thread waits.
    static WAITING: Cell<*const GroupMember> = const { Cell::new(std::ptr::null()) };
}

/// A rank in a group, or a process by itself.
pub struct GroupMember {
    group: Option<Py<Group>>,
    /// Of the group, and of whatever else a call may wait for.
    deadlines: Vec<Arc<Deadlines>>,
    rank: usize,
    /// The rank, as errors name it.
    named: Rank,
    /// Why the last call that failed did.
    failure: Mutex<Option<SyncError>>,
}

impl GroupMember {
    /// Of a group, if there is one.
    pub fn new(py: Python<'_>, group: Option<Py<Group>>) -> GroupMember {
        let own = group.as_ref().map(|group| group.bind(py).get());
        let rank = own.map_or(0, Group::rank);
        let deadlines = own.map(|own| own.deadlines().clone()).into_iter().collect();
        let named = own.map_or(Rank(rank), |own| own.job_rank(rank));
        GroupMember { group, deadlines, rank, named, failure: Mutex::default() }
    }

    /// Lets timeouts and Ctrl-C also end the calls that this handle ends.
    pub fn watch(&mut self, ends: Option<AbortHandle>) {
        if let Some(ends) = ends {
            ends.stop_waiting_if(signals::interrupt);
            self.deadlines.push(Deadlines::new(ends));
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Fails if this very thread waits in a call of it: then a handler of a signal asks.
    pub fn expect_free(&self, py: Python<'_>, site: Site) -> PyResult<()> {
        if std::ptr::eq(WAITING.get(), self) {
            let text = "a handler of a signal asks for it in the middle of another call; let the \
                        handler make a note, and ask after the call";
            return Err(site.invalid(py, text));
        }
        Ok(())
    }

    /// Where an error shows.
    pub fn site(&self, operation: &'static str) -> Site {
        Site { rank: self.named, operation: Operation::Collective(operation) }
    }

    /// The engine's group; a group of one for a process by itself.
    pub fn engine(&self, py: Python<'_>, site: Site) -> PyResult<Arc<EngineGroup>> {
        match &self.group {
            Some(group) => group.bind(py).get().open(py, site),
            None => {
                let groups = py.detach(|| EngineGroup::local(1, &Options::default()));
                let mut groups = groups.map_err(|error| not_formed(py, &error))?;
                Ok(Arc::new(groups.remove(0)))
            }
        }
    }

    /// Waits for `call`, at most `seconds` and until Ctrl-C, without the interpreter's lock.
    pub fn within<R, C>(&self, py: Python<'_>, seconds: f64, site: Site, call: C) -> PyResult<R>
    where
        R: Send,
        C: FnOnce() -> Result<R, SyncError> + Send,
    {
        let limit = deadline::limit(seconds);
        let (outcome, interruption) = py.detach(|| {
            let _noted: Vec<_> = self.deadlines.iter().map(|watch| watch.note(limit)).collect();
            let outer = WAITING.replace(self as *const GroupMember);
            let outcome = signals::during(call);
            WAITING.set(outer);
            outcome
        });
        match interruption {
            Some(raised) => Err(raised),
            None => outcome.map_err(|error| {
                let raised = site.not_synchronized(py, &error);
                *self.failure.lock().expect("no panic while locked") = Some(error);
                raised
            }),
        }
    }

    /// Why the last call that failed did, if that was not asked before.
    pub fn take_failure(&self) -> Option<SyncError> {
        self.failure.lock().expect("no panic while locked").take()
    }

    /// Fails on all ranks if they were given different settings.
    pub fn expect_equal(
        &self,
        py: Python<'_>,
        group: &EngineGroup,
        settings: &str,
        seconds: f64,
        site: Site,
    ) -> PyResult<()> {
        let mut hasher = DefaultHasher::new();
        settings.hash(&mut hasher);
        let own = hasher.finish() as i64;
        self.expect_agreement(py, group, own, seconds, site, |rank, _| {
            format!(
                "rank {rank} was given other settings than rank 0 (here: {settings}); give all \
                 ranks the same"
            )
        })
    }

    /// Fails on all ranks if they go on after different numbers of steps.
    pub fn expect_equal_steps(
        &self,
        py: Python<'_>,
        group: &EngineGroup,
        steps: u64,
        seconds: f64,
        site: Site,
    ) -> PyResult<()> {
        self.expect_agreement(py, group, steps as i64, seconds, site, |rank, all| {
            format!(
                "rank 0 would go on after step {}, and rank {rank} after step {}; load what was \
                 saved after the same step on all ranks",
                all[0], all[rank]
            )
        })
    }

    /// Fails on all ranks if they have different numbers; `explain` gets the first rank that has
    /// not that of rank 0, and all numbers.
    fn expect_agreement(
        &self,
        py: Python<'_>,
        group: &EngineGroup,
        own: i64,
        seconds: f64,
        site: Site,
        explain: impl FnOnce(usize, &[i64]) -> String,
    ) -> PyResult<()> {
        let mut all = vec![0i64; group.size()];
        self.within(py, seconds, site, || Ok(group.all_gather(&[own], &mut all)?))?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => Err(site.invalid(py, &explain(rank, &all))),
        }
    }
}
