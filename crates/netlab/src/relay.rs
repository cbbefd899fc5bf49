//! Delay, loss and the rate of single flows, in user space.
//!
//! The kernel's own queue for that (`netem`) is missing on many machines. Where a link has a delay, loses packets or limits
//! flows, its two ends are not two ends of a cable but two network devices (TAP) whose packets a thread of this process reads
//! and writes: what the host sends waits there until its time has come, or is lost; what the host receives passes at once.
//! Packets of one flow stay in order; where flows are not limited, all do. The rate of the link is the kernel's as ever, at both ends.
//!
//! Packets pass as TCP hands them to a device, up to 64 KiB at once: a loss is one of such packets. That keeps up
//! with some gigabits each second.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::ioctl::{IntegerSetter, Setter, ioctl};

use crate::flow::{Flow, Pacer};
use crate::link::Rate;
use crate::namespace::Door;

/// The most that a device hands over as one packet, with what goes before it.
const PACKET: usize = (64 << 10) + 256;

/// What a device puts before each packet: the kernel's `virtio_net_hdr`, in the size that it has unless it is told another.
const BEFORE_PACKET: usize = 10;

/// Packets that pass in one direction before the thread looks at the other.
const TURN: usize = 64;

/// What packets meet on their way from a host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Path {
    pub(crate) delay: Duration,
    /// The part of the packets that is lost.
    pub(crate) loss: f64,
    /// At which the packets of one flow leave the host, see [`crate::flow`].
    pub(crate) flow_rate: Option<Rate>,
}

/// A link whose packets pass through a thread, which ends with this value.
#[derive(Debug)]
pub(crate) struct Relay {
    /// Closed to end the thread.
    end: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Connects a device of a host with one of the switch; makes both.
    pub(crate) fn start(
        host: (&Door, &str),
        switch: (&Door, &str),
        path: Path,
    ) -> io::Result<Relay> {
        let [host, switch] = [host, switch].map(|(door, name)| open_behind(door, name));
        let (ended, end) = rustix::pipe::pipe()?;
        let pacer = path.flow_rate.map(Pacer::new);
        let wire = Wire { host: host?, switch: switch?, ended, path, pacer, state: 1 };
        let thread = thread::Builder::new().name("netlab-relay".into()).spawn(|| wire.run())?;
        Ok(Relay { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            // A relay that panicked has carried nothing since, which its test has noticed.
            let _ = thread.join();
        }
    }
}

struct Wire {
    host: File,
    switch: File,
    /// Readable when the relay is to end.
    ended: OwnedFd,
    path: Path,
    /// Where the path limits flows.
    pacer: Option<Pacer>,
    /// Of the numbers by which packets are lost: the same in every run.
    state: u64,
}

impl Wire {
    fn run(mut self) {
        // The packet that is due first is on top. Those due at the same time leave in the order in which they came,
        // by which they are numbered.
        let mut waiting: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>> = BinaryHeap::new();
        let mut number = 0;
        let mut spare: Vec<Vec<u8>> = Vec::new();
        let mut packet = vec![0; PACKET];
        loop {
            let now = Instant::now();
            let left = waiting.peek().map(|Reverse((due, ..))| due.saturating_duration_since(now));
            let left = left.map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut ready = [
                PollFd::new(&self.ended, PollFlags::IN),
                PollFd::new(&self.host, PollFlags::IN),
                PollFd::new(&self.switch, PollFlags::IN),
            ];
            // Interrupted: what is ready is ready the next time.
            let _ = poll(&mut ready, left.as_ref());
            if !ready[0].revents().is_empty() {
                return;
            }
            for _ in 0..TURN {
                let Ok(bytes) = self.host.read(&mut packet) else { break };
                let Some(due) = self.due(&packet[..bytes], Instant::now()) else { continue };
                let mut copy: Vec<u8> = spare.pop().unwrap_or_default();
                copy.clear();
                copy.extend_from_slice(&packet[..bytes]);
                waiting.push(Reverse((due, number, copy)));
                number += 1;
            }
            for _ in 0..TURN {
                let Ok(bytes) = self.switch.read(&mut packet) else { break };
                // A device that is down takes nothing: the packet is lost, as on a cable that is cut.
                let _ = self.host.write(&packet[..bytes]);
            }
            while waiting.peek().is_some_and(|Reverse((due, ..))| *due <= Instant::now()) {
                let Some(Reverse((_, _, packet))) = waiting.pop() else { break };
                let _ = self.switch.write(&packet);
                spare.push(packet);
            }
        }
    }

    /// When a packet that the host sends `now` reaches the switch; `None` if it is lost.
    fn due(&mut self, packet: &[u8], now: Instant) -> Option<Instant> {
        if self.is_lost() {
            return None;
        }
        let frame = packet.get(BEFORE_PACKET..).unwrap_or_default();
        let left = match (&mut self.pacer, Flow::of(frame)) {
            (Some(pacer), Some(flow)) => pacer.departure(flow, frame.len(), now)?,
            _ => now,
        };
        Some(left + self.path.delay)
    }

    fn is_lost(&mut self) -> bool {
        // A linear congruential generator, of which the upper bits are good enough here.
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.state >> 11) as f64) < self.path.loss * (1_u64 << 53) as f64
    }
}

/// Makes a device in the namespace behind a door.
fn open_behind(door: &Door, name: &str) -> io::Result<File> {
    thread::scope(|scope| {
        let opened = scope.spawn(|| {
            door.enter()?;
            open(name)
        });
        opened.join().expect("opening does not panic")
    })
}

/// Makes a device, which lasts as long as the file is open.
fn open(name: &str) -> io::Result<File> {
    /// As the kernel has it (`linux/if_tun.h`, `linux/if.h`).
    const TUNSETIFF: u32 = 0x4004_54ca;
    const TUNSETOFFLOAD: u32 = 0x4004_54d0;
    const IFF_TAP: u16 = 0x0002;
    const IFF_NO_PI: u16 = 0x1000;
    const IFF_VNET_HDR: u16 = 0x4000;
    const CHECKSUMS_AND_SEGMENTS: usize = 1 | 2 | 4;
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: u16,
        rest: [u8; 22],
    }
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let device =
        OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open("/dev/net/tun")?;
    let mut request =
        Request { name: [0; 16], flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, rest: [0; 22] };
    // One byte is left, for the name's end.
    request.name[..15].iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    // SAFETY: the first of these takes a request of this layout, the second a number.
    unsafe {
        ioctl(&device, Setter::<TUNSETIFF, Request>::new(request))?;
        ioctl(&device, IntegerSetter::<TUNSETOFFLOAD>::new_usize(CHECKSUMS_AND_SEGMENTS))?;
    }
    Ok(device)
}
