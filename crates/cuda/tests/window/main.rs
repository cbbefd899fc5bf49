//! The device window without a device: the whole engine over a driver whose device is the host.

mod agreement;
mod bits;
mod fake;
mod faults;

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "only the elements are used here")]
mod common;
#[path = "../common/processes.rs"]
mod processes;
