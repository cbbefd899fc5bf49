//! NCCL as an engine without NCCL and without a device: the whole engine over libraries for which the host is the
//! device.

mod agreement;
mod fake;
mod faults;
mod opening;
mod own;

/// What every engine of a device does.
#[path = "../common/behaviour.rs"]
mod behaviour;
#[path = "../window/bits.rs"]
mod bits;
#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "only the elements are used here")]
mod common;
/// The driver whose device is the host.
#[path = "../window/fake.rs"]
#[allow(dead_code, reason = "only the driver is used here")]
mod driver;
#[path = "../common/member.rs"]
mod member;
#[path = "../common/processes.rs"]
mod processes;
