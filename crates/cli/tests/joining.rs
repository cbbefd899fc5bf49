//! Workers that wait for others to come.

mod common;

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;

use common::Desk;
use rustix::process::Signal;

/// A worker has nothing to finish before all have come, and ends as soon as it is told to.
#[test]
fn a_worker_that_waits_for_others_ends_when_told_to() {
    for signal in [Signal::TERM, Signal::INT] {
        let desk = Desk::new();
        // Where it looks for rank 0, which never comes.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut command = desk.command("train --steps 1");
        command.env("RANK", "1").env("WORLD_SIZE", "2").env("UNISONO_TIMEOUT", "1000");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", (port - 1).to_string());
        let mut job = desk.start(&mut command);
        job.wait_until("it knocks", || listener.accept().is_ok());
        job.signal(signal);
        let ended = job.wait();
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{}", ended.stderr);
    }
}
