//! The windows, and calls through the host's collectives, without a device: whole engines over a driver whose device is
//! the host.

mod agreement;
mod bits;
mod fake;
mod faults;
mod host;

#[path = "../common/behaviour.rs"]
mod behaviour;
#[path = "../common/calls.rs"]
mod calls;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "only the elements are used here")]
mod common;
#[path = "../common/member.rs"]
mod member;
#[path = "../common/processes.rs"]
mod processes;
