//! Gradients that a worker sums itself, on its device, and means that go back there.

use pyo3::prelude::*;
use unisono_sync::Parameter;
use unisono_sync::accumulate::{Accumulation, Leaf};

use super::{StepOutcome, StepPhase, StepProgress, Synchronizer};
use crate::memory::Buffer;

/// Which sums of the step have come. The library counts on their order.
pub struct SumsProgress {
    /// Sums of every parameter that are complete.
    ended: Vec<usize>,
    /// How many there are to be.
    each: usize,
}

impl SumsProgress {
    /// None of the next step.
    pub fn start_over(&mut self, accumulation: &Accumulation) {
        self.each = accumulation.sums();
        self.ended.fill(0);
    }

    /// Fails if the sums of a parameter are missing.
    pub fn expect_all(&self, parameters: &[Parameter]) -> Result<(), String> {
        match self.ended.iter().position(|ended| *ended != self.each) {
            None => Ok(()),
            Some(missing) => Err(format!("sums of {} are missing", parameters[missing].name)),
        }
    }
}

/// What happens to the gradients of each shard of a worker, as the slot it goes into, whether it is added to what is
/// there, and how many slots are merged after it; and how many sums remain, in the lowest slots.
pub type SummingPlan = (Vec<(usize, bool, usize)>, usize);

/// The plan of an accumulation.
pub fn summing_plan(accumulation: &Accumulation) -> SummingPlan {
    let leaves = (0..accumulation.leaves()).map(|i| {
        let Leaf { slot, add, merges } = accumulation.leaf(i);
        (slot, add, merges)
    });
    (leaves.collect(), accumulation.sums())
}

/// The sums of a worker's own gradients, which it hands over instead of those of every shard.
#[pyclass(frozen)]
pub struct Sums(Py<Synchronizer>);

#[pymethods]
impl Sums {
    /// From the next step on, a synchronizer takes sums.
    #[new]
    fn new(py: Python<'_>, synchronizer: Py<Synchronizer>) -> PyResult<Sums> {
        let of = synchronizer.bind(py).get();
        of.expect_between(py, "handing over sums")?;
        of.call(py, "handing over sums", |library, progress| {
            library.sum_outside();
            progress.sums = Some(SumsProgress { ended: vec![0; of.parameters.len()], each: 0 });
            Ok(())
        })?;
        Ok(Sums(synchronizer))
    }

    /// How this worker sums the gradients of the next step.
    fn plan(&self, py: Python<'_>) -> PyResult<SummingPlan> {
        self.0
            .bind(py)
            .get()
            .call(py, "planning sums", |library, _| Ok(summing_plan(&library.accumulation())))
    }

    /// Takes a part of the next sum of a parameter, from element `at` on, and is done with its memory.
    fn part(
        &self,
        py: Python<'_>,
        parameter: usize,
        sum: usize,
        at: usize,
        address: usize,
        count: usize,
    ) -> PyResult<()> {
        let synchronizer = self.0.bind(py).get();
        synchronizer.call(py, "a part of a sum", |library, progress| {
            let of = synchronizer.expect_next(progress, parameter, sum)?;
            if at.checked_add(count).is_none_or(|end| end > of.elements()) {
                return Err(format!("{count} numbers from {at} on are beyond {}", of.name));
            }
            let part = Buffer::new(address, count, &of.name, count)?;
            // SAFETY: the caller keeps the memory valid and unchanged until this returns.
            library.sum_part(parameter, sum, at, unsafe { part.read() });
            Ok(())
        })
    }

    /// The next sum of a parameter is complete: in so many of its shards there was a gradient. Of none, it is zero.
    fn end(&self, py: Python<'_>, parameter: usize, sum: usize, shards: usize) -> PyResult<()> {
        let synchronizer = self.0.bind(py).get();
        let all = synchronizer.place().own.len();
        synchronizer.call(py, "the end of a sum", |library, progress| {
            let of = synchronizer.expect_next(progress, parameter, sum)?;
            let sums = progress.sums.as_mut().expect("a sum was expected next");
            if sum + 1 == sums.each && progress.begun < all {
                return Err(format!("the last sum of {} came before the last shard", of.name));
            }
            sums.ended[parameter] += 1;
            library.end_sum(parameter, sum, shards);
            Ok(())
        })
    }

    /// Ends the step as `Synchronizer.finish` does, but for where the means go: calls `each` with every parameter
    /// that had a gradient anywhere, its number, and the address and count of its mean, which is there until the
    /// call returns. After an exception of one call there are no more, and it is raised at the end.
    fn finish(&self, py: Python<'_>, each: Py<PyAny>, seconds: f64) -> PyResult<StepOutcome> {
        let synchronizer = self.0.bind(py).get();
        let (member, site) = synchronizer.expect_computed(py)?;
        let mut raised = None;
        let outcome = synchronizer.end_step(py, &member, site, seconds, |parameter, mean| {
            if raised.is_none() {
                let arguments = (parameter, mean.as_ptr() as usize, mean.len());
                raised = Python::attach(|py| each.call1(py, arguments).err());
            }
        })?;
        raised.map_or(Ok(outcome), Err)
    }
}

impl Synchronizer {
    /// The parameter, if this sum of it is the one that comes next.
    fn expect_next(
        &self,
        progress: &StepProgress,
        parameter: usize,
        sum: usize,
    ) -> Result<&Parameter, String> {
        let Some(of) = self.parameters.get(parameter) else {
            return Err(format!("there are {} parameters", self.parameters.len()));
        };
        let Some(sums) = &progress.sums else {
            return Err(format!("a sum of {} came from a worker that sums nothing", of.name));
        };
        if progress.phase != StepPhase::Backward {
            return Err(format!("a sum of {} came outside of a backward pass", of.name));
        }
        if sums.ended[parameter] != sum || sum >= sums.each {
            let (next, each) = (sums.ended[parameter], sums.each);
            return Err(format!("sum {sum} of {} came, where {next} of {each} is next", of.name));
        }
        Ok(of)
    }
}
