//! Gradients that are encoded, exchanged and decoded on a device.
//!
//! Buckets are those of the caller, in an order that all ranks have in common.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use unisono_collective::{FormError, Group as EngineGroup};
use unisono_cuda::exchange::{
    DeviceGradient, Encoded, Exchange, ExchangeError, Exchanged, Remembered,
};
use unisono_cuda::{CodecError, Context, CudaError, DeviceGroup, DevicePtr, Driver};
use unisono_sync::shards::Shards;
use unisono_sync::strategy::{Compressed, Compression, Remembered as OnHost, Strategy};
use unisono_sync::{Parameter, SyncError};

use super::device_tasks::{DeviceTasks, Phase, Phases, on_device, sync_error};
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
    phase: Phases,
    record: ReplicaRecord,
}

/// What is encoded where, and what is under way.
struct Library {
    /// Of each bucket, the parameters that had a gradient anywhere.
    tasks: DeviceTasks<Vec<usize>>,
    sides: Arc<Mutex<Sides>>,
}

/// The two sides of what is encoded: the device's, and the host's, which knows under which names it is saved.
struct Sides {
    exchange: Exchange,
    host: Compressed,
}

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
        let (ends, rank) = (library.tasks.abort_handle(), member.rank());
        member.watch(Some(ends.clone()));
        Ok(Some(DeviceExchange {
            member,
            parameters,
            library: Closable::new(library, Some(ends), rank),
            phase: Phases::default(),
            record: ReplicaRecord::default(),
        }))
    }

    /// Begins a step.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let site = self.member.site("the beginning of a step");
        self.phase.turn(py, site, Phase::Between, Phase::Backward)
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
        self.phase.turn(py, site, Phase::Backward, Phase::Backward)?;
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
        self.phase.turn(py, site, Phase::Backward, Phase::Failed)?;
        let library = self.open(py, site)?;
        let (used, times) = self.member.within(py, seconds, site, || {
            // SAFETY: the caller gave a stream of the device.
            unsafe { library.tasks.collect(stream) }
        })?;
        self.record.note_transfers(&times);
        self.record.note_sent(py.detach(|| library.sides().exchange.sent()));
        self.record.set_steps(self.record.steps() + 1);
        self.phase.turn(py, site, Phase::Failed, Phase::Between)?;
        Ok(used.concat())
    }

    /// What must be remembered besides the weights, at rank 0. All ranks call it, between steps.
    fn save(&self, py: Python<'_>, seconds: f64) -> PyResult<SavedState> {
        let site = self.member.site("saving");
        self.phase.turn(py, site, Phase::Between, Phase::Between)?;
        let (group, library) = (self.member.engine(py, site)?, self.open(py, site)?);
        let parameters = self.parameters.len();
        self.member.within(py, seconds, site, || {
            let mut sides = library.sides();
            for parameter in 0..parameters {
                let own = sides.exchange.remembered(parameter, library.tasks.stream());
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
        self.phase.turn(py, site, Phase::Between, Phase::Between)?;
        let (group, library) = (self.member.engine(py, site)?, self.open(py, site)?);
        self.member.expect_equal_steps(py, &group, steps, seconds, site)?;
        let parameters = self.parameters.len();
        self.member.within(py, seconds, site, || {
            let mut sides = library.sides();
            sides.host.restore(&group, &|name| restored(&saved, name))?;
            for parameter in 0..parameters {
                let OnHost { residual, mean, common, scale } = sides.host.remembered(parameter);
                let own = Remembered { residual, mean, common, scale };
                let set = sides.exchange.remember(parameter, &own, library.tasks.stream());
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
        let tasks = DeviceTasks::new(group, context).map_err(on_device)?;
        Ok(Some(Library { tasks, sides: Arc::new(Mutex::new(Sides { exchange, host })) }))
    }

    fn sides(&self) -> MutexGuard<'_, Sides> {
        lock(&self.sides)
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
        // SAFETY: the caller's promise.
        let computed = unsafe { self.tasks.reached(stream)? };
        let sides = self.sides.clone();
        self.tasks.submit(vec![computed], bytes, move |ours| {
            // SAFETY: the caller's promise.
            let are_used = unsafe { lock(&sides).exchange.exchange(step, &bucket, used, ours)? };
            let used = bucket.iter().zip(are_used).filter(|(_, is_used)| *is_used);
            Ok(used.map(|(of, _)| of.parameter).collect())
        });
        Ok(())
    }
}

fn lock(sides: &Mutex<Sides>) -> MutexGuard<'_, Sides> {
    sides.lock().expect("a thread that panicked is not asked again")
}
