//! One replica's view of a step.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};
use unisono_sync::bucket::BucketSizes;
use unisono_sync::{Parameter, Settings, Synchronizer as Library};

use super::lease::Lease;
use super::places::{Place, Places};
use super::record::{Exchange, Record};
use super::seat::Seat;
use super::settings::{self, Codec};
use crate::deadline;
use crate::error::Site;
use crate::group::Group;

/// Takes the gradients of a worker's shards, and gives back the mean of all workers'.
#[pyclass(frozen)]
pub struct Synchronizer {
    seat: Seat,
    parameters: Vec<Parameter>,
    own: std::ops::Range<usize>,
    library: Lease<Library>,
    /// Locked only by who does not have the interpreter's lock.
    progress: Mutex<Progress>,
    record: Record,
}

/// How far a step has come. The library is only called in the order in which it counts on.
struct Progress {
    /// Shards of this step that have begun.
    begun: usize,
    phase: Phase,
    /// Which parameters have had their gradient in this shard.
    seen: Vec<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
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
type Outcome = (f32, Vec<usize>, Option<(String, String)>);

impl Synchronizer {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("no panic while a step goes on")
    }

    /// The library, if it can be called now.
    fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<Library>> {
        self.seat.expect_free(py, site)?;
        self.library.open(py, site)
    }

    /// Calls the library, without the interpreter's lock. What the call refuses is an
    /// `InvalidCall`.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&Library, &mut Progress) -> Result<R, String> + Send,
    ) -> PyResult<R> {
        let site = self.seat.site(operation);
        let library = self.open(py, site)?;
        let outcome = py.detach(|| {
            let mut progress = self.lock();
            match progress.phase {
                Phase::Failed => {
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
    /// Joins the replicas of a group; without one, there is nobody to wait for. All ranks give the
    /// same names, shapes and settings.
    #[new]
    #[pyo3(signature = (group, parameters, shards, codec, buckets, overlap, seconds))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        group: Option<Py<Group>>,
        parameters: Vec<(String, Vec<usize>)>,
        shards: usize,
        codec: Codec,
        buckets: Option<(usize, usize)>,
        overlap: bool,
        seconds: f64,
    ) -> PyResult<Synchronizer> {
        let rank = group.as_ref().map_or(0, |group| group.bind(py).get().rank());
        let mut seat = Seat::new(py, group, rank);
        let site = seat.site("joining the replicas");
        let invalid = |text: String| site.invalid(py, &text);
        let parameters = settings::parameters(parameters).map_err(invalid)?;
        let settings = Settings {
            buckets: buckets.map(|(first, others)| BucketSizes { first, others }),
            overlap,
            compression: codec.compression().map_err(invalid)?,
            ..Settings::new(shards)
        };
        let engine = seat.engine(py, site)?;
        seat.expect_equal(py, &engine, &format!("{settings:?}"), seconds, site)?;
        let listed = parameters.clone();
        let library =
            seat.within(py, seconds, site, || Library::new(Some(&engine), listed, settings))?;
        let ends = library.abort_handle();
        seat.watch(ends.clone());
        let (begun, phase) = (0, Phase::Between);
        let seen = vec![false; parameters.len()];
        Ok(Synchronizer {
            own: library.shards(),
            library: Lease::new(library, ends, rank),
            progress: Mutex::new(Progress { begun, phase, seen }),
            record: Record::default(),
            parameters,
            seat,
        })
    }

    /// The shards of this worker: the first, and the one after the last.
    #[getter]
    fn shards(&self) -> (usize, usize) {
        (self.own.start, self.own.end)
    }

    /// Steps that have ended.
    #[getter]
    fn steps(&self) -> u64 {
        self.record.steps()
    }

    /// Bytes this rank has sent so far. In the middle of a call that waits, and after the end, what
    /// it was when somebody last looked.
    #[getter]
    fn sent(&self, py: Python<'_>) -> u64 {
        match self.open(py, self.seat.site("counting bytes")) {
            Ok(library) => self.record.note_sent(py.detach(|| library.sent())),
            Err(_) => self.record.sent(),
        }
    }

    /// When the buckets of the last step were under way.
    #[getter]
    fn exchanges(&self) -> Vec<Exchange> {
        self.record.exchanges()
    }

    /// Begins the next of this worker's shards; which one.
    fn begin_shard(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, "begin_shard", |library, progress| {
            if progress.phase != Phase::Between {
                return Err("the shard before was not ended; a backward pass that raised leaves \
                            its step unfinished, and there is no going on from it"
                    .into());
            }
            if progress.begun == self.own.len() {
                return Err("all shards of this step are computed; finish it".into());
            }
            progress.begun += 1;
            progress.phase = Phase::Forward;
            progress.seen.fill(false);
            Ok(library.begin_shard())
        })
    }

    /// The loss of the shard is known; gradients come next.
    fn begin_backward(&self, py: Python<'_>, loss: f32) -> PyResult<()> {
        self.call(py, "begin_backward", |library, progress| {
            if progress.phase != Phase::Forward {
                return Err("a backward pass begins once in every shard".into());
            }
            progress.phase = Phase::Backward;
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
            if progress.phase != Phase::Backward {
                return Err(format!("the gradient of {} came outside of a backward pass", of.name));
            }
            if progress.seen[parameter] {
                return Err(format!("a second gradient of {} came in one shard", of.name));
            }
            let place = Place::new(address, count, of)?;
            progress.seen[parameter] = true;
            // SAFETY: the caller keeps the memory valid and unchanged until this returns.
            library.gradient(parameter, unsafe { place.read() });
            Ok(())
        })
    }

    /// Ends the shard under way. Parameters that got no gradient have none in it.
    fn end_shard(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "end_shard", |library, progress| {
            if progress.phase != Phase::Backward {
                return Err("a shard ends after its backward pass".into());
            }
            progress.phase = Phase::Between;
            library.end_shard();
            Ok(())
        })
    }

    /// Ends the step: waits for the means of all parameters, at most `seconds`, and writes each to
    /// its place. The caller keeps the memory alive, and away from others, meanwhile.
    fn finish(&self, py: Python<'_>, places: Vec<Place>, seconds: f64) -> PyResult<Outcome> {
        let site = self.seat.site("the end of a step");
        self.call(py, "finish", |_, progress| match progress.phase {
            Phase::Between if progress.begun == self.own.len() => Ok(()),
            _ => Err("a step ends after all shards of this worker".into()),
        })?;
        // SAFETY: the caller keeps the memory valid and to itself until this returns.
        let places = unsafe { Places::new(places, &self.parameters) };
        let mut places = places.map_err(|text| site.invalid(py, &text))?;
        let library = self.open(py, site)?;
        self.seat.within(py, seconds, site, || {
            let mut progress = self.lock();
            let mut used = Vec::with_capacity(self.parameters.len());
            // Whatever happens now, this step does not happen again.
            progress.phase = Phase::Failed;
            let outcome = library.finish(|parameter, mean| {
                places.of(parameter).copy_from_slice(mean);
                used.push(parameter);
            })?;
            progress.phase = Phase::Between;
            progress.begun = 0;
            self.record.set_steps(self.record.steps() + 1);
            self.record.note_sent(library.sent());
            self.record.note_exchanges(&outcome.times.buckets);
            let chosen = outcome.advice.map(|advice| {
                let codec = advice.chosen.as_ref().map_or("none".to_owned(), ToString::to_string);
                (codec, advice.reason.clone())
            });
            Ok((outcome.loss, used, chosen))
        })
    }

    /// What must be remembered besides the weights, at rank 0. All ranks call it, between steps.
    fn save<'py>(&self, py: Python<'py>, seconds: f64) -> PyResult<Bound<'py, PyDict>> {
        self.expect_between(py, "save")?;
        let site = self.seat.site("saving");
        let (group, library) = (self.seat.engine(py, site)?, self.open(py, site)?);
        let saved = self.seat.within(py, seconds, site, || {
            let mut saved = Vec::new();
            library.save(&group, &mut |name, _, values| saved.push((name, bytes_of(values))))?;
            Ok(saved)
        })?;
        to_dict(py, saved)
    }

    /// Goes on after so many steps from what was saved, of which rank 0's counts. All ranks call
    /// it, between steps, with the same number of steps.
    fn restore(
        &self,
        py: Python<'_>,
        steps: u64,
        saved: HashMap<String, PyBackedBytes>,
        seconds: f64,
    ) -> PyResult<()> {
        self.expect_between(py, "restore")?;
        let site = self.seat.site("restoring");
        let (group, library) = (self.seat.engine(py, site)?, self.open(py, site)?);
        self.seat.expect_equal_steps(py, &group, steps, seconds, site)?;
        self.seat.within(py, seconds, site, || {
            library.restore(&group, &|name| saved.get(name).map(|bytes| numbers_of(bytes)))?;
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
    fn expect_between(&self, py: Python<'_>, operation: &'static str) -> PyResult<()> {
        self.call(py, operation, |_, progress| match (progress.phase, progress.begun) {
            (Phase::Between, 0) => Ok(()),
            _ => Err("it is done between two steps".into()),
        })
    }
}

/// Numbers as they are saved.
pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Numbers that were saved. Bytes that are left over make a length that nobody expects.
pub fn numbers_of(bytes: &[u8]) -> Vec<f32> {
    let (whole, rest) = bytes.as_chunks::<4>();
    let tail = (!rest.is_empty()).then_some(f32::NAN);
    whole.iter().map(|bytes| f32::from_le_bytes(*bytes)).chain(tail).collect()
}

/// What was saved, by its name.
pub fn to_dict(py: Python<'_>, saved: Vec<(String, Vec<u8>)>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    for (name, bytes) in saved {
        dict.set_item(name, PyBytes::new(py, &bytes))?;
    }
    Ok(dict)
}
