//! A group whose calls are on device memory.

use std::sync::Arc;

use unisono_collective::engine::Memory;
use unisono_collective::fabric::Connector;
use unisono_collective::{Dtype, Epoch, Error, FormError, Group, Op, Options, Reduction, Request};

use crate::choice::{DeviceOptions, engine};
use crate::driver::Driver;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// A rank of a group that has a device: makes calls on the memory of that device, in the order of a stream.
///
/// ```no_run
/// use unisono_collective::fabric::LocalHub;
/// use unisono_collective::{Dtype, Epoch, Options, Reduction};
/// use unisono_cuda::{Context, DeviceMemory, DeviceOptions, Driver, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (connector, rank, world) = (LocalHub::new(1), 0, 1);
/// // As all ranks do, on the first device that each of them sees.
/// let (options, engine) = (Options::default(), DeviceOptions::default());
/// let group = unisono_cuda::join(connector, Epoch::new(0), rank, world, options, 0, engine)?;
///
/// let context = Context::new(&Driver::load()?.device(0)?)?;
/// let stream = Stream::new(&context, 0)?;
/// let count = 1 << 20;
/// let gradient = DeviceMemory::new(&context, 4 * count)?;
/// // SAFETY: the memory has as many elements, and outlives what the stream does.
/// unsafe {
///     stream.fill_words(gradient.pointer(), 1.0f32.to_bits(), count)?;
///     let at = gradient.pointer();
///     group.all_reduce(at, at, count, Dtype::F32, Reduction::Mean, Some(&stream))?;
/// }
/// // What is submitted to the stream from now on sees the mean.
/// stream.synchronize()?;
/// # Ok(())
/// # }
/// ```
pub struct DeviceGroup {
    group: Arc<Group>,
    device: u32,
}

/// Joins the world of a job with a device of this process, by its number. All ranks of the job do so, with equal
/// options; where one cannot use its device, or the engine that is asked for does not open, all get [`FormError::Device`].
pub fn join(
    connector: Arc<dyn Connector>,
    epoch: Arc<Epoch>,
    rank: usize,
    world: usize,
    options: Options,
    device: u32,
    device_options: impl Into<DeviceOptions>,
) -> Result<DeviceGroup, FormError> {
    let engine = engine(move || Driver::load()?.device(device), device_options);
    let group = Group::with_engine(connector, epoch, rank, world, options, engine)?;
    Ok(DeviceGroup::new(group, device))
}

impl DeviceGroup {
    /// A group that has the [engine](crate::engine()) of this device, such as a sub-group of another one.
    pub fn new(group: impl Into<Arc<Group>>, device: u32) -> DeviceGroup {
        DeviceGroup { group: group.into(), device }
    }

    /// The number of its device in this process.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The name of the engine that runs its calls on device memory.
    pub fn engine(&self) -> Result<&'static str, Error> {
        let asked = Request::sized(Op::AllReduce, Dtype::U8, 1);
        // SAFETY: a call that is only explained has no memory.
        let asked = unsafe { asked.in_memory(Memory::Device(self.device)) };
        let engine = self.group.explain(asked)?.engine;
        // After the name comes where the data of such a call goes.
        Ok(engine.split_once(',').map_or(engine, |(name, _)| name))
    }

    /// The group, whose calls are on host memory.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// A call on device memory, to be [run](Group::run) or [submitted](Group::submit). The `count` is that of
    /// [`Request::sized`]; a rank that has no input or no output gives a null pointer, and equal pointers, or those of its own block and the whole, for
    /// a call in place. Without a stream, the input is there when the call is made, and the result when it
    /// has ended.
    ///
    /// # Safety
    /// The memory is of the group's device, and valid for what the operation reads of the input and writes
    /// of the output; nothing else uses it from where the stream is now until where it is when the call has ended, or,
    /// without a stream, until the call has ended.
    pub unsafe fn request(
        &self,
        op: Op,
        dtype: Dtype,
        count: usize,
        input: DevicePtr,
        output: DevicePtr,
        stream: Option<&Stream>,
    ) -> Result<Request<'static>, Error> {
        let (input, output) = (input.0 as *const u8, output.0 as *mut u8);
        // SAFETY: the caller's promise.
        unsafe {
            let request = Request::raw(op, dtype, count, input, output)?;
            let request = request.in_memory(Memory::Device(self.device));
            Ok(match stream {
                Some(stream) => request.on_stream(stream.as_raw()),
                None => request,
            })
        }
    }

    /// The reduction of all inputs, of `count` elements each.
    ///
    /// # Safety
    /// As of [`DeviceGroup::request`].
    pub unsafe fn all_reduce(
        &self,
        input: DevicePtr,
        output: DevicePtr,
        count: usize,
        dtype: Dtype,
        reduction: Reduction,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let request = unsafe { self.request(Op::AllReduce, dtype, count, input, output, stream) }?;
        self.group.run(request.with_reduction(reduction)).map(drop)
    }

    /// Rank `r` gets block `r`, of `count` elements, of the reduction of all inputs.
    ///
    /// # Safety
    /// As of [`DeviceGroup::request`].
    pub unsafe fn reduce_scatter(
        &self,
        input: DevicePtr,
        output: DevicePtr,
        count: usize,
        dtype: Dtype,
        reduction: Reduction,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let request =
            unsafe { self.request(Op::ReduceScatter, dtype, count, input, output, stream) }?;
        self.group.run(request.with_reduction(reduction)).map(drop)
    }

    /// Every rank gets the input of all ranks, of `count` elements each, in rank order.
    ///
    /// # Safety
    /// As of [`DeviceGroup::request`].
    pub unsafe fn all_gather(
        &self,
        input: DevicePtr,
        output: DevicePtr,
        count: usize,
        dtype: Dtype,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let request = unsafe { self.request(Op::AllGather, dtype, count, input, output, stream) }?;
        self.group.run(request).map(drop)
    }

    /// Every rank gets the root's buffer.
    ///
    /// # Safety
    /// As of [`DeviceGroup::request`].
    pub unsafe fn broadcast(
        &self,
        buffer: DevicePtr,
        count: usize,
        dtype: Dtype,
        root: usize,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        let op = Op::Broadcast { root };
        // SAFETY: the caller's promise.
        let request = unsafe { self.request(op, dtype, count, buffer, buffer, stream) }?;
        self.group.run(request).map(drop)
    }
}
