//! Ranks of several hosts, with a window on each, without a device: the whole engine over libraries for which the host is
//! the device.

mod agreement;
mod bits;
mod choice;
mod faults;
mod worlds;

/// What every engine of a device does.
#[path = "../common/behaviour.rs"]
#[allow(dead_code, reason = "every program uses another part")]
mod behaviour;
#[path = "../common/calls.rs"]
#[allow(dead_code, reason = "every program uses another part")]
mod calls;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "only the elements are used here")]
mod common;
/// The driver whose device is the host.
#[path = "../window/fake.rs"]
#[allow(dead_code, reason = "only the driver is used here")]
mod driver;
/// The NCCL for it.
#[path = "../nccl/fake.rs"]
#[allow(dead_code, unused_imports, reason = "only the library is used here")]
mod fake;
#[path = "../common/member.rs"]
mod member;
#[path = "../common/processes.rs"]
mod processes;
