//! What can be known of device memory without a device.

mod driver;
mod kernels;
mod order;

#[path = "../common/mod.rs"]
mod common;
