//! What plain TCP does.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use unisono::net::pace::send_unpaced_within_machine;
use unisono::{Group, Reduction};

use super::BUDGET;

/// Streams to the next rank, each with a thread of its own at both ends. More: threads take cores from each other.
/// Fewer: one thread moves no more bytes than one core can.
const STREAMS: usize = 4;

/// Bytes from which on several streams are tried.
const LONG: usize = 256 << 10;

/// Bytes of a message from which on only the rate counts.
const RATE: usize = 4 << 20;

/// Bytes that are handed to the kernel at once. More: they fall out of the cache. Fewer: more system calls.
const CHUNK: usize = 128 << 10;

/// Measurements, of which the quickest counts: others may have been disturbed.
const MOST_BATCHES: usize = 5;

/// Bytes that the ranks of a ring pass on.
#[derive(Clone, Copy)]
pub enum Flow {
    /// Every rank sends so many to the next.
    Around(usize),
    /// Every rank but one does: the next of that one needs nothing from it.
    Along(usize),
}

/// What a thread does while its sockets have nothing for it. Which is quickest depends on how many threads there are for every
/// core, and on what it costs to wake one.
#[derive(Clone, Copy)]
enum Wait {
    /// Looks again.
    Spin,
    /// Looks again when others have had the core.
    Yield,
    /// Sleeps until there is something.
    Sleep,
}

/// Every rank's plain connections to the next one and from the one before.
pub struct Ring {
    streams: Vec<(TcpStream, TcpStream)>,
}

impl Ring {
    /// All ranks connect to the next.
    pub fn connect(group: &Group, ip: IpAddr) -> anyhow::Result<Ring> {
        let (rank, world) = (group.rank(), group.size());
        let listener =
            TcpListener::bind((ip, 0)).context("listening for the limit's measurement")?;
        let mut place = [0u8; 18];
        match ip {
            IpAddr::V4(v4) => place[..16].copy_from_slice(&v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => place[..16].copy_from_slice(&v6.octets()),
        }
        place[16..].copy_from_slice(&listener.local_addr()?.port().to_le_bytes());
        let mut places = vec![0u8; place.len() * world];
        group.all_gather(&place, &mut places)?;
        let next = &places[(rank + 1) % world * place.len()..][..place.len()];
        let octets: [u8; 16] = next[..16].try_into().expect("sixteen bytes");
        let port = u16::from_le_bytes([next[16], next[17]]);
        let next = IpAddr::from(Ipv6Addr::from(octets)).to_canonical();
        let mut streams = Vec::with_capacity(STREAMS);
        for _ in 0..STREAMS {
            let connect =
                || TcpStream::connect((next, port)).context("connecting to the next rank");
            let accept = || listener.accept().context("accepting the previous rank");
            let (out, input) = match (world, rank) {
                // Of two ranks each is the next of the other: one connection carries both directions, and what
                // is sent says as well what was received.
                (2, 0) => twice(connect()?)?,
                (2, _) => twice(accept()?.0)?,
                _ => (connect()?, accept()?.0),
            };
            for stream in [&out, &input] {
                stream.set_nodelay(true)?;
                send_unpaced_within_machine(stream);
                stream.set_nonblocking(true)?;
            }
            streams.push((out, input));
        }
        Ok(Ring { streams })
    }

    /// Seconds that it takes at least to pass so many bytes on, over and over: in the quickest of several ways, over one
    /// stream or several.
    pub fn seconds(&mut self, group: &Group, flow: Flow) -> anyhow::Result<f64> {
        let (Flow::Around(bytes) | Flow::Along(bytes)) = flow;
        let pilots = if bytes < LONG { 3 } else { 1 };
        let mut best = f64::INFINITY;
        for streams in [1, 2, STREAMS] {
            if streams > 1 && bytes < LONG {
                break;
            }
            for wait in [Wait::Sleep, Wait::Yield, Wait::Spin] {
                let pilot = self.pass(group, flow, streams, wait, pilots)?;
                best = best.min(pilot);
                let in_budget = BUDGET.as_secs_f64() / pilot;
                // Threads that spin on the cores of those they wait for are slower by orders of magnitude.
                if in_budget < 1.0 && pilot > 2.0 * best {
                    continue;
                }
                let times = (in_budget / MOST_BATCHES as f64).clamp(1.0, 10_000.0) as usize;
                let batches = (in_budget as usize).clamp(2, MOST_BATCHES);
                for _ in 0..batches {
                    best = best.min(self.pass(group, flow, streams, wait, times)?);
                }
            }
        }
        Ok(best)
    }

    /// Seconds of one of so many times, on the slowest rank.
    fn pass(
        &mut self,
        group: &Group,
        flow: Flow,
        streams: usize,
        wait: Wait,
        times: usize,
    ) -> anyhow::Result<f64> {
        let share = |bytes: usize| bytes.div_ceil(streams).max(1);
        let (to_send, to_receive) = match flow {
            Flow::Around(bytes) => (share(bytes), share(bytes)),
            Flow::Along(bytes) => {
                let (is_first, is_last) = (group.rank() == 0, group.rank() + 1 == group.size());
                (if is_last { 0 } else { share(bytes) }, if is_first { 0 } else { share(bytes) })
            }
        };
        group.barrier()?;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let pass = |(out, input): &mut (TcpStream, TcpStream)| {
                pass_on(out, input, [to_send, to_receive], times, wait)
            };
            let mut used = self.streams[..streams].iter_mut();
            let own = used.next().expect("at least one stream");
            let others: Vec<_> = used.map(|pair| scope.spawn(move || pass(pair))).collect();
            let own = pass(own);
            let all = others.into_iter().map(|other| other.join().expect("does not panic"));
            all.fold(own, |all, one| all.and(one))
        })
        .context("measuring the limit of TCP")?;
        let mut seconds = [start.elapsed().as_secs_f64() / times as f64];
        group.all_reduce(&mut seconds, Reduction::Max)?;
        Ok(seconds[0])
    }
}

/// Two handles to a connection.
fn twice(stream: TcpStream) -> anyhow::Result<(TcpStream, TcpStream)> {
    Ok((stream.try_clone().context("a second handle to a connection")?, stream))
}

/// Bytes that every rank can send per second to the next one while all do so, over plain TCP.
pub fn link_rate(group: &Group, ip: IpAddr) -> anyhow::Result<f64> {
    Ok(RATE as f64 / Ring::connect(group, ip)?.seconds(group, Flow::Around(RATE))?)
}

/// Sends and receives so many bytes, so many times; the next time begins when those of the last have come. The memory is
/// short enough for a core's cache.
fn pass_on(
    out: &mut TcpStream,
    input: &mut TcpStream,
    [to_send, to_receive]: [usize; 2],
    times: usize,
    wait: Wait,
) -> std::io::Result<()> {
    let memory = [7u8; CHUNK];
    let mut arrived = [0u8; CHUNK];
    for _ in 0..times {
        let (mut unsent, mut awaited) = (to_send, to_receive);
        while unsent > 0 || awaited > 0 {
            let (mut sent, mut received) = (0, 0);
            if unsent > 0 {
                sent = unless_blocked(out.write(&memory[..unsent.min(CHUNK)]))?;
            }
            if awaited > 0 {
                received = unless_blocked(input.read(&mut arrived[..awaited.min(CHUNK)]))?;
            }
            unsent -= sent;
            awaited -= received;
            if sent + received == 0 {
                match wait {
                    Wait::Spin => std::hint::spin_loop(),
                    Wait::Yield => std::thread::yield_now(),
                    Wait::Sleep => sleep(out, unsent > 0, input, awaited > 0)?,
                }
            }
        }
    }
    Ok(())
}

/// Until one of the sockets that are waited for is ready.
fn sleep(
    out: &TcpStream,
    is_sending: bool,
    input: &TcpStream,
    is_receiving: bool,
) -> std::io::Result<()> {
    let if_so = |is_wanted, flags| if is_wanted { flags } else { PollFlags::empty() };
    let mut sockets = [
        PollFd::new(out, if_so(is_sending, PollFlags::OUT)),
        PollFd::new(input, if_so(is_receiving, PollFlags::IN)),
    ];
    match rustix::event::poll(&mut sockets, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The bytes that were moved, none if the socket was not ready.
fn unless_blocked(moved: std::io::Result<usize>) -> std::io::Result<usize> {
    match moved {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        moved => moved,
    }
}
