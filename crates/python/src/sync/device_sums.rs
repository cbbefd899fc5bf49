//! Means over shards whose gradients stay on their devices.
//!
//! A worker adds up the gradients of its shards on its device, as its [plan](DeviceSums::plan) says, and what remains
//! travels from there. A [bucket](DeviceSums::layout) is memory of the caller: a row for each of the worker's sums, in
//! which are the sums of its parameters, behind them for each parameter in how many shards it had one, and in the first
//! bucket the sum of the losses. The mean comes to the first row.
//!
//! Buckets are complete in any order, and travel in one that all ranks have in common.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use unisono_collective::{FormError, Group as EngineGroup};
use unisono_cuda::exchange::SumExchange;
use unisono_cuda::{Context, CudaError, DeviceGroup, DevicePtr, Driver, Event, HostMemory};
use unisono_sync::accumulate::Accumulation;
use unisono_sync::bucket::{BucketSizes, Layout, Turns};
use unisono_sync::shards::Shards;
use unisono_sync::{Parameter, Settings, SyncError, expect_equal_models};

use super::device_tasks::{DeviceTasks, Phase, Phases, on_device, sync_error};
use super::member::GroupMember;
use super::record::{BucketTransfer, ReplicaRecord};
use super::saved::{RestoredState, SavedState};
use super::settings;
use super::synchronizer::{StepOutcome, SummingPlan, summing_plan};
use crate::closable::Closable;
use crate::deadline;
use crate::device;
use crate::error::Site;
use crate::group::Group;

/// The sizes of buckets that are not given. No tuning: what a bucket costs on a device besides its bytes is small.
const SIZES: BucketSizes = BucketSizes { first: 1 << 20, others: 25 << 20 };

/// Makes the means over shards of what workers have added up, on their devices.
#[pyclass(frozen)]
pub struct DeviceSums {
    member: GroupMember,
    library: Closable<Library>,
    phase: Phases,
    record: ReplicaRecord,
    /// Of this worker.
    own: Range<usize>,
    accumulation: Accumulation,
    shards: usize,
    /// Parameters whose gradients come during backward, and those which come after it.
    early: usize,
    late: usize,
    layout: Layout,
    turns: Mutex<Travelling>,
}

/// Buckets of the step under way.
struct Travelling {
    turns: Turns,
    /// Those that are complete and not submitted: where, and what computes them.
    complete: Vec<Option<(DevicePtr, Vec<Event>)>>,
    submitted: usize,
}

/// What is under way.
struct Library {
    tasks: DeviceTasks<()>,
    exchange: Arc<Mutex<SumExchange>>,
    /// What is behind the means of each bucket, for the host to read.
    tails: Arc<Vec<HostMemory>>,
    /// The memory of the buckets. After the tasks, whose end waits for what is under way.
    held: Mutex<Option<Py<PyAny>>>,
}

/// A bucket: floats of a row; of those, floats of parameters; its parameters, and where each begins.
type BucketPlan = (usize, usize, Vec<(usize, usize)>);

#[pymethods]
impl DeviceSums {
    /// Joins the workers of a group with a device of each, by its number; without a group, this process is the only
    /// worker. All ranks give the same names, shapes and settings. The last `late` of the parameters are those whose
    /// gradients come after backward. `None`, on all ranks, where gradients have to go through the host: if a rank
    /// gives no device, or there is no engine for the devices.
    #[staticmethod]
    #[pyo3(signature = (group, number, parameters, late, shards, buckets, seconds))]
    #[expect(clippy::too_many_arguments, reason = "one flat call, as Python makes it")]
    fn join(
        py: Python<'_>,
        group: Option<Py<Group>>,
        number: Option<u32>,
        parameters: Vec<(String, Vec<usize>)>,
        late: usize,
        shards: usize,
        buckets: Option<(usize, usize)>,
        seconds: f64,
    ) -> PyResult<Option<DeviceSums>> {
        let mut member = GroupMember::new(py, group);
        let site = member.site("joining the replicas");
        let invalid = |text: String| site.invalid(py, &text);
        let parameters = settings::parameters(parameters).map_err(invalid)?;
        let Some(early) = parameters.len().checked_sub(late) else {
            return Err(invalid(format!("there are {} parameters", parameters.len())));
        };
        let sizes = buckets.map(|(first, others)| BucketSizes { first, others });
        let settings = Settings { buckets: sizes, ..Settings::new(shards) };
        let engine = member.engine(py, site)?;
        member.expect_equal(py, &engine, &format!("{settings:?}"), seconds, site)?;
        let mut devices = vec![0i64; engine.size()];
        let own = number.map_or(-1, i64::from);
        member.within(py, seconds, site, || Ok(engine.all_gather(&[own], &mut devices)?))?;
        let missing = devices.iter().position(|device| *device < 0);
        let (Some(number), None) = (number, missing) else {
            if let (Some(_), Some(rank)) = (number, missing) {
                log::warn!("gradients go through the host: rank {rank} has its model elsewhere");
            }
            return Ok(None);
        };
        let make = device::engine(number).map_err(|error| invalid(error.to_string()))?;
        let formed = member.within(py, seconds, site, || {
            let shards = Shards::new(shards, engine.size())?;
            expect_equal_models(&engine, &parameters)?;
            match engine.beside(make) {
                Ok(group) => {
                    Library::new(group, number, shards, &parameters, early, sizes).map(Some)
                }
                Err(error @ FormError::Device { .. }) => {
                    log::warn!("gradients go through the host: {error}");
                    Ok(None)
                }
                Err(error) => Err(error.into()),
            }
        })?;
        let Some((library, layout)) = formed else { return Ok(None) };
        let (ends, rank) = (library.tasks.abort_handle(), member.rank());
        member.watch(Some(ends.clone()));
        let own =
            Shards::new(shards, engine.size()).expect("it was checked").of(rank, engine.size());
        Ok(Some(DeviceSums {
            member,
            library: Closable::new(library, Some(ends), rank),
            phase: Phases::default(),
            record: ReplicaRecord::default(),
            accumulation: Accumulation::new(shards, own.clone()),
            own,
            shards,
            early,
            late,
            turns: Mutex::new(Travelling::new(layout.buckets().len())),
            layout,
        }))
    }

    /// The shards of this worker: the first, and the one after the last.
    #[getter]
    fn shards(&self) -> (usize, usize) {
        (self.own.start, self.own.end)
    }

    /// How this worker adds up its gradients.
    fn plan(&self) -> SummingPlan {
        summing_plan(&self.accumulation)
    }

    /// The buckets, in the order in which they travel, and where the loss is in the first.
    fn layout(&self) -> (Vec<BucketPlan>, usize) {
        let buckets = self.layout.buckets().iter().map(|bucket| {
            let places = bucket
                .parameters
                .iter()
                .map(|listed| (self.parameter(*listed), self.layout.span(*listed).start));
            (bucket.len, bucket.gradients, places.collect())
        });
        (buckets.collect(), self.layout.scalars().start)
    }

    /// Keeps the memory of all buckets alive, whatever the program does, until this is closed: the device reads and
    /// writes it on a stream that the program's allocator does not know.
    fn hold(&self, py: Python<'_>, memory: Py<PyAny>) -> PyResult<()> {
        let library = self.open(py, self.member.site("the memory of buckets"))?;
        *library.held.lock().expect("no panic while locked") = Some(memory);
        Ok(())
    }

    /// Begins a step.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let site = self.member.site("the beginning of a step");
        self.phase.turn(py, site, Phase::Between, Phase::Backward)?;
        self.travelling().start_over();
        Ok(())
    }

    /// A bucket is complete when the caller's streams come to where they are now: its first row begins at an address,
    /// and the others follow. It is exchanged when its turn comes. The memory is among what is held, and the caller
    /// leaves it alone until the step is finished.
    fn bucket(
        &self,
        py: Python<'_>,
        number: usize,
        address: usize,
        streams: Vec<usize>,
    ) -> PyResult<()> {
        let site = self.member.site("a bucket");
        self.phase.turn(py, site, Phase::Backward, Phase::Backward)?;
        let library = self.open(py, site)?;
        let mut travelling = self.travelling();
        if travelling.complete.get(number).is_none_or(|complete| complete.is_some()) {
            return Err(site.invalid(py, &format!("bucket {number} came twice, or there is none")));
        }
        // SAFETY: the caller's streams are those of the device.
        let reached = streams.iter().map(|stream| unsafe { library.tasks.reached(*stream) });
        let reached = reached.collect::<Result<_, CudaError>>();
        let reached = reached.map_err(|error| site.failed(py, &device::failed(error)))?;
        travelling.complete[number] = Some((DevicePtr(address as u64), reached));
        for number in travelling.turns.ready(number) {
            let complete = &mut travelling.complete[number];
            let (address, reached) = complete.as_mut().expect("it is ready");
            // SAFETY: the memory is held until nothing is under way.
            unsafe { self.submit(&library, number, *address, std::mem::take(reached)) };
            travelling.submitted += 1;
        }
        Ok(())
    }

    /// Ends the step: waits for the other ranks, at most `seconds`, and lets the caller's stream wait for the means.
    /// The mean loss, and the parameters that had a gradient anywhere.
    fn finish(&self, py: Python<'_>, stream: usize, seconds: f64) -> PyResult<StepOutcome> {
        let site = self.member.site("the end of a step");
        // Whatever happens now, this step does not happen again.
        self.phase.turn(py, site, Phase::Backward, Phase::Failed)?;
        let library = self.open(py, site)?;
        let (submitted, buckets) = (self.travelling().submitted, self.layout.buckets().len());
        if submitted < buckets {
            let text = format!("{submitted} of {buckets} buckets are complete");
            return Err(site.invalid(py, &text));
        }
        let times = self.member.within(py, seconds, site, || {
            // SAFETY: the caller gave a stream of the device.
            let (_, times) = unsafe { library.tasks.collect(stream)? };
            // Which parameters have a gradient, only the device knows.
            library.tasks.stream().synchronize().map_err(on_device)?;
            Ok(times)
        })?;
        let mut used = Vec::new();
        let mut loss = 0.0;
        for (number, bucket) in self.layout.buckets().iter().enumerate() {
            let tail = library.tail(number);
            let counted = bucket.parameters.iter().zip(tail).filter(|(_, count)| **count > 0.0);
            used.extend(counted.map(|(listed, _)| self.parameter(*listed)));
            if number == 0 {
                loss = tail[bucket.parameters.len()] / self.shards as f32;
            }
        }
        self.record.note_transfers(&times);
        self.record.note_sent(py.detach(|| lock(&library.exchange).sent()));
        self.record.set_steps(self.record.steps() + 1);
        self.phase.turn(py, site, Phase::Failed, Phase::Between)?;
        Ok((loss, used, None))
    }

    /// What must be remembered besides the weights: nothing. All ranks call it, between steps.
    fn save(&self, py: Python<'_>, seconds: f64) -> PyResult<SavedState> {
        let _ = seconds;
        let site = self.member.site("saving");
        self.phase.turn(py, site, Phase::Between, Phase::Between)?;
        self.open(py, site)?;
        Ok(SavedState::new())
    }

    /// Goes on after so many steps. All ranks call it, between steps, with the same number of steps.
    fn restore(
        &self,
        py: Python<'_>,
        steps: u64,
        saved: RestoredState,
        seconds: f64,
    ) -> PyResult<()> {
        let _ = saved;
        let site = self.member.site("restoring");
        self.phase.turn(py, site, Phase::Between, Phase::Between)?;
        self.open(py, site)?;
        let group = self.member.engine(py, site)?;
        self.member.expect_equal_steps(py, &group, steps, seconds, site)?;
        self.record.set_steps(steps);
        Ok(())
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

    /// The name of the engine that moves sums.
    #[getter]
    fn engine(&self, py: Python<'_>) -> PyResult<&'static str> {
        let site = self.member.site("asking for the engine");
        let library = self.open(py, site)?;
        let name = py.detach(|| lock(&library.exchange).group().engine());
        name.map_err(|error| site.failed(py, &error))
    }

    /// Leaves the workers. If what is under way does not end within `seconds`, ends it for all of them. Other groups
    /// go on.
    fn close(&self, py: Python<'_>, seconds: f64) {
        self.library.close(py, deadline::limit(seconds));
    }
}

impl DeviceSums {
    fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<Library>> {
        self.member.expect_free(py, site)?;
        self.library.open(py, site, "it")
    }

    fn travelling(&self) -> MutexGuard<'_, Travelling> {
        self.turns.lock().expect("no panic while locked")
    }

    /// The caller's number of a parameter of the layout.
    fn parameter(&self, listed: usize) -> usize {
        (listed + self.early) % (self.early + self.late)
    }

    /// # Safety
    /// From the address on are as many rows of the bucket as this worker has sums. They are valid, and left alone,
    /// until what this submits is done on the device.
    unsafe fn submit(
        &self,
        library: &Library,
        number: usize,
        address: DevicePtr,
        reached: Vec<Event>,
    ) {
        let bucket = &self.layout.buckets()[number];
        let (length, divided) = (bucket.len, bucket.gradients);
        let rows = (0..self.accumulation.sums()).map(|row| address.offset(row * length * 4));
        let rows: Vec<DevicePtr> = rows.collect();
        let (exchange, tails) = (library.exchange.clone(), library.tails.clone());
        library.tasks.submit(reached, length * 4, move |ours| {
            let tail = &tails[number];
            // SAFETY: the caller's promise; the tail has room for what is behind the means, and is read when the
            // stream has come to its end.
            unsafe {
                lock(&exchange).exchange(&rows, length, divided, ours)?;
                ours.copy_to_host(tail.as_ptr().cast(), rows[0].offset(divided * 4), tail.bytes())?;
            }
            Ok(())
        });
    }
}

impl Travelling {
    fn new(buckets: usize) -> Travelling {
        let complete = (0..buckets).map(|_| None).collect();
        Travelling { turns: Turns::new(buckets), complete, submitted: 0 }
    }

    fn start_over(&mut self) {
        self.turns.reset();
        self.complete.fill_with(|| None);
        self.submitted = 0;
    }
}

impl Library {
    /// Over a group of ranks with devices; with the layout of the buckets. Parameters that come after backward travel
    /// last.
    fn new(
        group: EngineGroup,
        number: u32,
        shards: Shards,
        parameters: &[Parameter],
        early: usize,
        sizes: Option<BucketSizes>,
    ) -> Result<(Library, Layout), SyncError> {
        let group = Arc::new(group);
        let driver = || Context::new(&Driver::load()?.device(number)?);
        let context = driver().map_err(on_device)?;
        let on_devices = DeviceGroup::new(group.clone(), number);
        let exchange = SumExchange::new(on_devices, &context, shards).map_err(sync_error)?;
        // A layout begins with the last.
        let mut lengths: Vec<usize> = parameters.iter().map(Parameter::elements).collect();
        lengths.rotate_left(early);
        let layout = Layout::new(&lengths, sizes.unwrap_or(SIZES), exchange.alignment());
        let tail = |bucket: &unisono_sync::bucket::Bucket| {
            HostMemory::new(&context, (bucket.scalars.end - bucket.gradients) * 4)
        };
        let tails: Result<_, CudaError> = layout.buckets().iter().map(tail).collect();
        let tails = Arc::new(tails.map_err(on_device)?);
        let tasks = DeviceTasks::new(group, context).map_err(on_device)?;
        let exchange = Arc::new(Mutex::new(exchange));
        Ok((Library { tasks, exchange, tails, held: Mutex::default() }, layout))
    }

    /// What was behind the means of a bucket. Nothing is under way.
    fn tail(&self, bucket: usize) -> &[f32] {
        let tail = &self.tails[bucket];
        // SAFETY: memory of so many floats, aligned for them, into which the device has copied as many; it writes it
        // again in the next step, which cannot begin before this one has ended.
        unsafe { std::slice::from_raw_parts(tail.as_ptr().cast(), tail.bytes() / 4) }
    }
}

fn lock(exchange: &Mutex<SumExchange>) -> MutexGuard<'_, SumExchange> {
    exchange.lock().expect("a thread that panicked is not asked again")
}
