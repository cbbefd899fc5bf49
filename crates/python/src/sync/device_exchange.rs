//! Gradients that are encoded, exchanged and decoded on a device.
//!
//! Buckets are those of the caller, in an order that all ranks have in common. Each is a task of a group that serves
//! nothing else, on whose thread it waits for the other ranks, while the caller goes on. On the device they are in the
//! order of one stream of our own, which waits for where the caller's stream was when it handed a bucket over; at the end
//! of the step, the caller's stream waits for ours.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_collective::{Error, FormError, Group as EngineGroup, Work};
use unisono_cuda::exchange::{
    DeviceGradient, Encoded, Exchange, ExchangeError, Exchanged, Remembered,
};
use unisono_cuda::{
    CodecError, Context, CudaError, DeviceGroup, DevicePtr, Driver, Event, EventKind, Stream,
};
use unisono_sync::shards::Shards;
use unisono_sync::strategy::{Compressed, Compression, Remembered as OnHost, Strategy};
use unisono_sync::{BucketTimes, Parameter, SyncError};

use super::member::GroupMember;
use super::record::{BucketTransfer, ReplicaRecord};
use super::saved::{RestoredState, SavedState, restored, saved_by};
use super::settings::{self, CodecSettings};
use crate::closable::Closable;
use crate::deadline;
use crate::device;
use crate::error::Site;
use crate::group::Group;

/// Replaces the gradients of a step by the means of all ranks, on a device.
#[pyclass(frozen)]
pub struct DeviceExchange {
    member: GroupMember,
    parameters: Vec<Parameter>,
    library: Closable<Library>,
    phase: Mutex<Phase>,
    record: ReplicaRecord,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Between,
    /// Buckets come.
    Backward,
    /// A step failed: the replicas are at none.
    Failed,
}

/// What is encoded where, and what is under way.
struct Library {
    group: Arc<EngineGroup>,
    context: Context,
    ours: Arc<Stream>,
    sides: Arc<Mutex<Sides>>,
    pending: Mutex<VecDeque<Work>>,
    outcomes: (Sender<Outcome>, Mutex<Receiver<Outcome>>),
}

/// The two sides of what is encoded: the device's, and the host's, which knows under which names it is saved.
struct Sides {
    exchange: Exchange,
    host: Compressed,
}

/// What came of a bucket: its parameters that had a gradient anywhere, and when that was.
type Outcome = Result<(Vec<usize>, BucketTimes), SyncError>;

#[pymethods]
impl DeviceExchange {
    /// Joins the replicas of a group with a device of each, by its number; without one, this process is the only
    /// replica. All ranks give the same names, shapes and settings. `None`, on all ranks, where gradients have to go
    /// through the host: if a codec has no kernels or is yet to be chosen, or there is no engine for the devices.
    #[staticmethod]
    fn join(
        py: Python<'_>,
        group: Option<Py<Group>>,
        number: u32,
        parameters: Vec<(String, Vec<usize>)>,
        codec: CodecSettings,
        seconds: f64,
    ) -> PyResult<Option<DeviceExchange>> {
        let mut member = GroupMember::new(py, group);
        let site = member.site("joining the replicas");
        let invalid = |text: String| site.invalid(py, &text);
        let parameters = settings::parameters(parameters).map_err(invalid)?;
        let compression = codec.compression().map_err(invalid)?;
        let compression = compression.unwrap_or_else(Compression::none);
        let engine = member.engine(py, site)?;
        member.expect_equal(py, &engine, &format!("{compression:?}"), seconds, site)?;
        let mut hasher = DefaultHasher::new();
        parameters.iter().for_each(|of| (&of.name, &of.shape).hash(&mut hasher));
        let model = format!("a model of {} parameters, {:x}", parameters.len(), hasher.finish());
        member.expect_equal(py, &engine, &model, seconds, site)?;
        if compression.auto {
            return Ok(None);
        }
        let make = device::engine(number).map_err(|error| invalid(error.to_string()))?;
        let listed = parameters.clone();
        let formed = member.within(py, seconds, site, || {
            compression.rules.expect_fits(listed.iter().map(|of| of.name.as_str()))?;
            let group = match engine.beside(make) {
                Ok(group) => group,
                Err(error @ FormError::Device { .. }) => {
                    log::warn!("gradients are encoded by the host: {error}");
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            Library::new(group, number, &listed, compression)
        })?;
        let Some(library) = formed else { return Ok(None) };
        let (ends, rank) = (library.group.abort_handle(), member.rank());
        member.watch(Some(ends.clone()));
        Ok(Some(DeviceExchange {
            member,
            parameters,
            library: Closable::new(library, Some(ends), rank),
            phase: Mutex::new(Phase::Between),
            record: ReplicaRecord::default(),
        }))
    }

    /// Begins a step.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let site = self.member.site("the beginning of a step");
        self.turn(py, site, Phase::Between, Phase::Backward)
    }

    /// Takes gradients, as number, address and count, which the caller's stream has computed when it comes to here, and
    /// starts to exchange them. The caller keeps the memory, and leaves it alone, until the step is finished or this is
    /// closed. With `used`, that is the address of a float for each of them, 0 if this rank has no gradient of it.
    #[pyo3(signature = (gradients, used, stream))]
    fn bucket(
        &self,
        py: Python<'_>,
        gradients: Vec<(usize, usize, usize)>,
        used: Option<usize>,
        stream: usize,
    ) -> PyResult<()> {
        let site = self.member.site("a bucket");
        self.turn(py, site, Phase::Backward, Phase::Backward)?;
        let library = self.open(py, site)?;
        let mut bucket = Vec::with_capacity(gradients.len());
        for (parameter, address, count) in gradients {
            let of = self.parameters.get(parameter);
            if of.is_none_or(|of| of.elements() != count) {
                let text = format!("parameter {parameter} has another number of elements");
                return Err(site.invalid(py, &text));
            }
            bucket.push(DeviceGradient { parameter, pointer: DevicePtr(address as u64) });
        }
        let bytes =
            4 * bucket.iter().map(|of| self.parameters[of.parameter].elements()).sum::<usize>();
        let (step, used) = (self.record.steps(), used.map(|used| DevicePtr(used as u64)));
        // SAFETY: the caller's stream is one of the device, and the memory is kept until the step is over.
        let submitted = unsafe { library.submit(step, bucket, used, bytes, stream) };
        submitted.map_err(|error| site.failed(py, &device::failed(error)))
    }

    /// Ends the step: waits for the other ranks, at most `seconds`, and lets the caller's stream wait for the means.
    /// The parameters that had a gradient anywhere.
    fn finish(&self, py: Python<'_>, stream: usize, seconds: f64) -> PyResult<Vec<usize>> {
        let site = self.member.site("the end of a step");
        // Whatever happens now, this step does not happen again.
        self.turn(py, site, Phase::Backward, Phase::Failed)?;
        let library = self.open(py, site)?;
        let (used, times) = self.member.within(py, seconds, site, || library.collect(stream))?;
        self.record.note_transfers(&times);
        self.record.note_sent(py.detach(|| library.sides().exchange.sent()));
        self.record.set_steps(self.record.steps() + 1);
        self.turn(py, site, Phase::Failed, Phase::Between)?;
        Ok(used)
    }

    /// What must be remembered besides the weights, at rank 0. All ranks call it, between steps.
    fn save(&self, py: Python<'_>, seconds: f64) -> PyResult<SavedState> {
        let site = self.member.site("saving");
        self.turn(py, site, Phase::Between, Phase::Between)?;
        let (group, library) = (self.member.engine(py, site)?, self.open(py, site)?);
        let parameters = self.parameters.len();
        self.member.within(py, seconds, site, || {
            let mut sides = library.sides();
            for parameter in 0..parameters {
                let own = sides.exchange.remembered(parameter, &library.ours);
                let Remembered { residual, mean, common, scale } = own.map_err(sync_error)?;
                sides.host.remember(parameter, OnHost { residual, mean, common, scale });
            }
            saved_by(|each| sides.host.save(&group, each))
        })
    }

    /// Goes on after so many steps from what was saved, of which rank 0's counts. All ranks call it, between steps,
    /// with the same number of steps.
    fn restore(
        &self,
        py: Python<'_>,
        steps: u64,
        saved: RestoredState,
        seconds: f64,
    ) -> PyResult<()> {
        let site = self.member.site("restoring");
        self.turn(py, site, Phase::Between, Phase::Between)?;
        let (group, library) = (self.member.engine(py, site)?, self.open(py, site)?);
        self.member.expect_equal_steps(py, &group, steps, seconds, site)?;
        let parameters = self.parameters.len();
        self.member.within(py, seconds, site, || {
            let mut sides = library.sides();
            sides.host.restore(&group, &|name| restored(&saved, name))?;
            for parameter in 0..parameters {
                let OnHost { residual, mean, common, scale } = sides.host.remembered(parameter);
                let own = Remembered { residual, mean, common, scale };
                let set = sides.exchange.remember(parameter, &own, &library.ours);
                set.map_err(sync_error)?;
            }
            self.record.set_steps(steps);
            Ok(())
        })
    }

    /// Steps that have ended.
    #[getter]
    fn steps(&self) -> u64 {
        self.record.steps()
    }

    /// Bytes this rank has sent so far, as they were counted at the end of the last step.
    #[getter]
    fn sent(&self) -> u64 {
        self.record.sent()
    }

    /// When the buckets of the last step were under way.
    #[getter]
    fn transfers(&self) -> Vec<BucketTransfer> {
        self.record.transfers()
    }

    /// The name of the engine that moves encodings.
    #[getter]
    fn engine(&self, py: Python<'_>) -> PyResult<&'static str> {
        let site = self.member.site("asking for the engine");
        let library = self.open(py, site)?;
        let name = py.detach(|| library.sides().exchange.group().engine());
        name.map_err(|error| site.failed(py, &error))
    }

    /// Leaves the replicas. If what is under way does not end within `seconds`, ends it for all of them. Other groups
    /// go on.
    fn close(&self, py: Python<'_>, seconds: f64) {
        self.library.close(py, deadline::limit(seconds));
    }
}

impl DeviceExchange {
    fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<Library>> {
        self.member.expect_free(py, site)?;
        self.library.open(py, site, "it")
    }

    /// Goes on to another phase from the only one in which that is due.
    fn turn(&self, py: Python<'_>, site: Site, from: Phase, to: Phase) -> PyResult<()> {
        let mut phase = self.phase.lock().expect("no panic while locked");
        if *phase == from {
            *phase = to;
            return Ok(());
        }
        let text = match *phase {
            Phase::Failed => {
                "an earlier step failed, and the replicas are at none; start again from the last checkpoint"
            }
            Phase::Backward => {
                "the step before was not finished; a backward pass that raised leaves its step unfinished, and \
                 there is no going on from it"
            }
            Phase::Between => "it is due after a step has begun",
        };
        Err(site.invalid(py, text))
    }
}

impl Library {
    /// `None` if a codec has no kernels.
    fn new(
        group: EngineGroup,
        number: u32,
        parameters: &[Parameter],
        compression: Compression,
    ) -> Result<Option<Library>, SyncError> {
        let (warm_up, seed) = (compression.warm_up, compression.seed);
        let shards = Shards::new(group.size(), group.size())?;
        let host = Compressed::new(group, shards, parameters, compression);
        let group = host.group().expect("it exchanges over a group").clone();
        let encoded = |number: usize| {
            let (spec, feeds_back, relative) = host.encoding(number)?;
            Some(Encoded { spec: spec.clone(), feeds_back, relative })
        };
        let listed = parameters.iter().enumerate();
        let listed: Vec<Exchanged> = listed
            .map(|(number, of)| Exchanged { shape: of.shape.clone(), codec: encoded(number) })
            .collect();
        let driver = || Context::new(&Driver::load()?.device(number)?);
        let context = driver().map_err(on_device)?;
        let on_devices = DeviceGroup::new(group.clone(), number);
        let exchange = match Exchange::new(on_devices, &context, &listed, warm_up, seed) {
            Ok(exchange) => exchange,
            Err(ExchangeError::Codec(error @ CodecError::NotOnDevice { .. })) => {
                log::info!("gradients are encoded by the host: {error}");
                return Ok(None);
            }
            Err(error) => return Err(sync_error(error)),
        };
        let ours = Arc::new(Stream::new(&context, 0).map_err(on_device)?);
        let (to, from) = channel();
        Ok(Some(Library {
            group,
            context,
            ours,
            sides: Arc::new(Mutex::new(Sides { exchange, host })),
            pending: Mutex::default(),
            outcomes: (to, Mutex::new(from)),
        }))
    }

    fn sides(&self) -> MutexGuard<'_, Sides> {
        lock(&self.sides)
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.pending.lock().expect("no panic while locked")
    }

    /// # Safety
    /// The stream is one of the device; the gradients and flags are valid, and left alone, until what this submits is
    /// done on the device.
    unsafe fn submit(
        &self,
        step: u64,
        bucket: Vec<DeviceGradient>,
        used: Option<DevicePtr>,
        bytes: usize,
        stream: usize,
    ) -> Result<(), CudaError> {
        let computed = Event::new(&self.context, EventKind::Ordering)?;
        // SAFETY: the caller's promise.
        unsafe { Stream::borrowed(&self.context, stream as *mut c_void) }.record(&computed)?;
        let (sides, ours, to) = (self.sides.clone(), self.ours.clone(), self.outcomes.0.clone());
        let (ends, submitted) = (self.group.abort_handle(), Instant::now());
        let work = self.group.submit_task(move || {
            let started = Instant::now();
            let exchanged = ours.wait(&computed).map_err(ExchangeError::from).and_then(|()| {
                // SAFETY: the caller's promise.
                unsafe { lock(&sides).exchange.exchange(step, &bucket, used, &ours) }
            });
            let outcome = exchanged.map_err(sync_error).map(|are_used| {
                let (ended, none) = (Instant::now(), Duration::ZERO);
                let times =
                    BucketTimes { bytes, submitted, started, ended, folding: none, coding: none };
                let used = bucket.iter().zip(are_used).filter(|(_, is_used)| *is_used);
                (used.map(|(of, _)| of.parameter).collect(), times)
            });
            if let Err(error) = &outcome {
                // The others would wait for this rank.
                ends.abort(&error.to_string());
            }
            to.send(outcome).expect("the receiver waits for its tasks");
        });
        self.pending().push_back(work);
        Ok(())
    }

    /// Waits for all buckets, and lets the caller's stream wait for their means.
    fn collect(&self, stream: usize) -> Result<(Vec<usize>, Vec<BucketTimes>), SyncError> {
        let works: Vec<Work> = self.pending().drain(..).collect();
        let (mut used, mut times, mut failed) = (Vec::new(), Vec::new(), None);
        for work in works {
            // An exchange that fails has an outcome of its own, and one that panics has none.
            let _ = work.wait();
            let from = self.outcomes.1.lock().expect("no panic while locked");
            match from.try_recv().expect("every bucket is answered") {
                Ok((of_bucket, of_times)) => {
                    used.extend(of_bucket);
                    times.push(of_times);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            // The program may free the memory of its gradients now.
            let _ = self.ours.synchronize();
            return Err(error);
        }
        let there = || {
            let means = Event::new(&self.context, EventKind::Ordering)?;
            self.ours.record(&means)?;
            // SAFETY: the caller gave a stream of the device.
            unsafe { Stream::borrowed(&self.context, stream as *mut c_void) }.wait(&means)
        };
        there().map_err(on_device)?;
        Ok((used, times))
    }
}

impl Drop for Library {
    /// The other ranks count on what was submitted, and its memory may be freed after this.
    fn drop(&mut self) {
        self.pending().drain(..).for_each(|work| drop(work.wait()));
        let _ = self.ours.synchronize();
    }
}

fn lock(sides: &Mutex<Sides>) -> MutexGuard<'_, Sides> {
    sides.lock().expect("a thread that panicked is not asked again")
}

fn on_device(error: CudaError) -> SyncError {
    SyncError::Group(device::failed(error))
}

/// As the host's strategy says it.
fn sync_error(error: ExchangeError) -> SyncError {
    match error {
        ExchangeError::Group(error) => SyncError::Group(error),
        ExchangeError::Encoding { shard, source } => SyncError::Encoding { shard, source },
        ExchangeError::EncodingOfMean { rank, source } => {
            SyncError::EncodingOfMean { rank, source }
        }
        other => SyncError::Group(Error::System {
            what: "a call on a device",
            reason: other.to_string(),
        }),
    }
}
