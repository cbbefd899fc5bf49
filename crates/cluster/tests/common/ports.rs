//! Ports for tests, of which several may run at once, also of several checkouts.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// The first of the ports that tests use. Those that the system gives out begin above the last.
const FIRST: u32 = 10_000;
const COUNT: u32 = 20_000;

/// Ports in a row at which nothing listens now. Processes that were started one after the other
/// begin to look at different places.
pub fn free_ports(count: u16) -> Vec<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    loop {
        let offset = std::process::id().wrapping_mul(61) % COUNT
            + NEXT.fetch_add(u32::from(count), Ordering::Relaxed);
        let first = (FIRST + offset % COUNT) as u16;
        let ports: Vec<u16> = (first..first + count).collect();
        if ports.iter().all(is_free) {
            return ports;
        }
    }
}
