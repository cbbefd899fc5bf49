//! Device memory.
//!
//! The CUDA [`Driver`] is loaded when it is asked for, never before: one program runs on machines with
//! and without it, and learns by a typed [`CudaError`] where there is none. Above its functions are
//! values that own what they stand for: a [`Context`] is a device that this process uses, a [`Stream`]
//! an order of work on it, an [`Event`] a point in that order, [`DeviceMemory`] an allocation, and a
//! [`Module`] code for it.
//!
//! [`Folds`] reduce elements on the device with the bits of the host's
//! [kernels](unisono_collective::kernel): the canonical tree, rounded at every node. Its kernels are
//! compiled beforehand to PTX, which the driver turns into the code of the device.
//!
//! A [`DeviceCodec`] encodes gradients on the device, with the bytes of the host's [codecs](unisono_codec).
//!
//! An [`Exchange`] makes one mean of the gradients of all ranks, encoded on their devices.
//!
//! A [`DeviceGroup`] makes collective calls on device memory. Its [engine](DeviceEngine), which all ranks choose together
//! by what they share, is a [`window`], through device memory or host memory that all ranks of a host reach, [`nccl`], for
//! ranks of any hosts, or the host's own collectives, from which calls [`bounce`]. Between hosts of several ranks, a
//! hierarchy has windows inside the hosts and one of the others between them.

mod agreement;
pub mod bounce;
mod choice;
pub mod codec;
mod context;
mod device;
mod driver;
mod error;
mod event;
pub mod exchange;
pub mod fold;
mod group;
mod hierarchy;
mod library;
mod memory;
mod module;
pub mod nccl;
mod order;
mod stream;
pub mod window;

pub use bounce::BounceOptions;
pub use choice::{DeviceEngine, DeviceOptions, ENGINE_VARIABLE, engine};
pub use codec::{CodecError, Codecs, DeviceCodec, DeviceScale, Placement};
pub use context::{Context, Entered};
pub use device::{Attribute, Capability, Device, Uuid};
pub use driver::{DRIVER_VARIABLE, Driver};
pub use error::CudaError;
pub use event::{Event, EventHandle, EventKind};
pub use exchange::{Exchange, ExchangeError};
pub use fold::{FoldError, FoldPlan, Folds};
pub use group::{DeviceGroup, join};
pub use library::DevicePtr;
pub use memory::{
    DeviceMemory, HostMemory, ImportedMemory, MemoryHandle, MemoryKind, Pointer, RegisteredMemory,
};
pub use module::{Kernel, Module};
pub use nccl::{NCCL_VARIABLE, NcclEngine, NcclError, NcclOptions, nccl_engine};
pub use stream::{Capture, Stream};
pub use window::{DeviceCosts, Rounds, Way, WindowOptions};
