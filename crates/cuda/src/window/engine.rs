//! The engine of the device window: plans calls and puts them into the order of the caller's stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::cost::Prediction;
use unisono_collective::engine::{CallPlan, Engine, HostEngine, Memory};
use unisono_collective::schedule::{self, Phase, Problem, Schedule};
use unisono_collective::{
    Algorithm, Call, Checked, Error, Explanation, FormError, InvalidCall, Op, Request,
};

use super::cost::DeviceCosts;
use super::measure;
use super::opening::{self, Reason};
use super::run::Lane;
use super::{BUFFERS, WindowOptions};
use crate::context::Context;
use crate::device::Device;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::fold::{FoldError, Folds};
use crate::stream::{Capture, Stream};

/// How long a rank that leaves waits for the others to close its memory. The driver keeps memory that
/// another process has open, but does not promise to. Longer: a rank whose peers keep the group leaves later.
const LINGER: Duration = Duration::from_millis(500);

/// The same when the group has failed: a rank that died closes nothing.
const LINGER_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// The algorithms that go through memory that all ranks reach.
const ALGORITHMS: [Algorithm; 2] = [Algorithm::Window, Algorithm::WindowDirect];

/// Runs calls on the memory of one device, and gives those on host memory to the host's engine.
pub struct DeviceWindow {
    host: HostEngine,
    /// Bytes of a staging buffer.
    buffer: usize,
    costs: DeviceCosts,
    device: u32,
    lane: Lane,
    /// Where the caller's stream is when a call begins.
    begin: Event,
    /// Where the engine's stream is when a call ends.
    end: Event,
    schedules: BTreeMap<(Op, Algorithm), Arc<Schedule>>,
    plans: BTreeMap<(Op, usize, usize, Option<Algorithm>), CallPlan>,
}

/// Plans remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

impl DeviceWindow {
    /// Shares staging memory with the other ranks.
    pub fn open(
        mut host: HostEngine,
        device: &dyn Fn() -> Result<Device, CudaError>,
        options: WindowOptions,
    ) -> Result<DeviceWindow, FormError> {
        // A cell for every rank has at least a line.
        let least = 64 * host.topology().world();
        let buffer = options.buffer.max(least).next_multiple_of(256);
        let prepare = || {
            let context = Context::new(&device()?)?;
            let (_, urgent) = context.priorities()?;
            let stream = Stream::new(&context, urgent)?;
            let event = || Event::new(&context, EventKind::Ordering);
            let (begin, end, folds) = (event()?, event()?, Folds::load(&context)?);
            let ticks = Lane::events(&context)?;
            Ok::<_, Reason>((context, (stream, folds, begin, end, ticks)))
        };
        let (shared, prepared) = opening::share(&mut host, BUFFERS * buffer, prepare)?;
        let (stream, folds, begin, end, ticks) = prepared;
        let device = stream.context().device().number();
        let mut lane = Lane::new(stream, folds, ticks, shared, buffer, &host);
        let costs = match options.costs {
            Some(costs) => costs,
            None if host.topology().world() == 1 => DeviceCosts::default(),
            None => {
                let round = measure::round(&mut host, &mut lane)?;
                DeviceCosts { round, ..DeviceCosts::default() }
            }
        };
        let (schedules, plans) = Default::default();
        Ok(DeviceWindow { host, buffer, costs, device, lane, begin, end, schedules, plans })
    }

    fn schedule(&mut self, op: Op, algorithm: Algorithm) -> Result<Arc<Schedule>, Error> {
        if let Some(schedule) = self.schedules.get(&(op, algorithm)) {
            return Ok(schedule.clone());
        }
        let topology = self.host.topology();
        let problem = Problem { op, rank: self.host.rank(), world: topology.world() };
        let schedule = schedule::build(algorithm, &problem, topology)
            .ok_or(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() })?;
        let schedule = Arc::new(schedule);
        self.schedules.insert((op, algorithm), schedule.clone());
        Ok(schedule)
    }

    /// Elements of a column, and segments: of nothing that differs between ranks.
    fn cut(&self, request: &Request<'_>, schedule: &Schedule) -> (usize, usize) {
        let size = request.dtype().size();
        let line = 64 / size;
        let parts = if request.op().has_blocks() { 1 } else { schedule.parts as usize };
        let longest = request.extent().div_ceil(parts);
        let cells = (schedule.staging as usize).max(1);
        let most = (self.buffer / cells / 64 * line).max(line);
        let column = most.min(longest.next_multiple_of(line)).max(line);
        (column, longest.div_ceil(column).max(1))
    }

    /// The algorithms that can do a call, best first. The root's part, or rank 0's, is priced by all ranks alike.
    fn predictions(&self, request: &Request<'_>) -> Vec<Prediction> {
        let (op, topology) = (request.op(), self.host.topology());
        let rank = op.root().unwrap_or(0);
        let problem = Problem { op, rank, world: topology.world() };
        let price = |algorithm: Algorithm| {
            let schedule = schedule::build(algorithm, &problem, topology)?;
            let (column, segments) = self.cut(request, &schedule);
            let seconds = match &schedule.phases[..] {
                [Phase::Window(window)] => {
                    let column = column * request.dtype().size();
                    self.costs.predict(window, problem.world, column, segments)
                }
                // Alone.
                _ => self.costs.launch,
            };
            Some(Prediction { algorithm, seconds })
        };
        let mut predictions: Vec<_> = ALGORITHMS.into_iter().filter_map(price).collect();
        predictions.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        predictions
    }

    /// Whether the stream of a call can be waited for on the host.
    fn check_stream(&self, request: &Request<'_>) -> Result<(), Error> {
        let Some(stream) = request.stream() else { return Ok(()) };
        // SAFETY: the maker of the request has promised that it is a stream of the device.
        let stream = unsafe { Stream::borrowed(self.lane.context(), stream) };
        match stream.capture().map_err(failed)? {
            Capture::None => Ok(()),
            Capture::Active | Capture::Invalidated => Err(InvalidCall::Recording.into()),
        }
    }

    /// Lets the caller's stream go on when the engine's has come this far, or waits for it.
    fn hand_over(&self, caller: Option<&Stream>) -> Result<(), CudaError> {
        match caller {
            Some(caller) => {
                self.lane.stream.record(&self.end)?;
                caller.wait(&self.end)
            }
            None => self.lane.settle(),
        }
    }
}

impl Engine for DeviceWindow {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, Memory::Device(self.device)]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.host.plan(request);
        }
        self.check_stream(request)?;
        // An algorithm that is forced for all calls may be none that goes through device memory.
        let able = |algorithm: &Algorithm| ALGORITHMS.contains(algorithm);
        let forced = request.algorithm().or(self.host.options().algorithm.filter(able));
        let key = (request.op(), request.extent(), request.dtype().size(), forced);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(*plan);
        }
        let algorithm = match forced {
            Some(algorithm) if !able(&algorithm) => {
                let op = request.name();
                return Err(InvalidCall::UnsupportedAlgorithm { algorithm, op }.into());
            }
            Some(algorithm) if algorithm.supports(request.op(), self.host.topology()) => algorithm,
            _ => self.predictions(request).first().expect("the window does everything").algorithm,
        };
        let schedule = self.schedule(request.op(), algorithm)?;
        let (column, _) = self.cut(request, &schedule);
        let plan = CallPlan { algorithm, column, canonical: true };
        if self.plans.len() >= REMEMBERED {
            self.plans.clear();
        }
        self.plans.insert(key, plan);
        Ok(plan)
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        if request.memory() == Memory::Host {
            return self.host.explain(request);
        }
        let chosen = self.plan(request)?.algorithm;
        Ok(Explanation { candidates: self.predictions(request), others: Vec::new(), chosen })
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host {
            return self.host.run(call, request);
        }
        let schedule = self.schedule(request.op(), call.algorithm)?;
        let (buffers, segments) = request.cut(&schedule, call.column as usize, 1);
        let context = self.lane.context().clone();
        let _entered = context.enter().map_err(failed)?;
        // SAFETY: the maker of the request has promised that it is a stream of the device.
        let caller = request.stream().map(|raw| unsafe { Stream::borrowed(&context, raw) });
        if let Some(caller) = &caller {
            let ordered =
                caller.record(&self.begin).and_then(|()| self.lane.stream.wait(&self.begin));
            ordered.map_err(failed)?;
        }
        // SAFETY: the request was checked, and its memory stays until the caller's stream has come to the
        // end of the call, or until this returns.
        let outcome =
            unsafe { self.lane.run(call, &schedule, &buffers, segments, self.host.state()) };
        // Also after an error: what was submitted may still use the caller's memory.
        let handed_over = self.hand_over(caller.as_ref()).map_err(failed);
        outcome.and(handed_over)
    }
}

impl Drop for DeviceWindow {
    fn drop(&mut self) {
        match self.lane.settle() {
            // Memory and clocks are the parent's, which goes on.
            Err(CudaError::Forked { .. }) => return,
            Err(error) => log::debug!("device {}: {error}", self.device),
            Ok(()) => {}
        }
        self.lane.close();
        let over = self.host.state().is_over();
        let deadline = Instant::now() + if over { LINGER_AFTER_FAILURE } else { LINGER };
        while !self.lane.all_closed() {
            if Instant::now() > deadline {
                log::debug!("device {}: not all ranks have closed the staging memory", self.device);
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The driver refused something in the middle of a call.
pub fn failed(error: impl Into<FoldError>) -> Error {
    Error::System { what: "a call on a device", reason: error.into().to_string() }
}
