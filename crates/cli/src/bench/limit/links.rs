//! What plain TCP does.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::Context;
use unisono::{Group, Reduction};

use super::{BUDGET, slowest};

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
const BATCHES: usize = 5;

/// Looks at a socket with nothing in it before others may have the core.
const SPINS: u32 = 200;

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
                stream.set_nonblocking(true)?;
            }
            streams.push((out, input));
        }
        Ok(Ring { streams })
    }

    /// Bytes per second at which every rank sends so many to the next and receives as many from the one before, over and
    /// over, while all do so: over one stream or several, whichever is quicker.
    pub fn rate(&mut self, group: &Group, bytes: usize) -> anyhow::Result<f64> {
        let bytes = bytes.max(1);
        let mut best: f64 = 0.0;
        for streams in [1, 2, STREAMS] {
            if streams > 1 && bytes < LONG {
                break;
            }
            let pilot = self.exchange(group, bytes, streams, 3)?;
            let times = (BUDGET.as_secs_f64() / BATCHES as f64 / pilot).clamp(1.0, 10_000.0);
            for _ in 0..BATCHES {
                let seconds = self.exchange(group, bytes, streams, times as usize)?;
                best = best.max(bytes as f64 / seconds);
            }
        }
        Ok(best)
    }

    /// Seconds of one of so many exchanges, on the slowest rank.
    fn exchange(
        &mut self,
        group: &Group,
        bytes: usize,
        streams: usize,
        times: usize,
    ) -> anyhow::Result<f64> {
        let share = bytes.div_ceil(streams);
        group.barrier()?;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let mut used = self.streams[..streams].iter_mut();
            let (out, input) = used.next().expect("at least one stream");
            let others: Vec<_> = used
                .map(|(out, input)| scope.spawn(move || pass_on(out, input, share, times)))
                .collect();
            let own = pass_on(out, input, share, times);
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
    let rate = Ring::connect(group, ip)?.rate(group, RATE)?;
    slowest(group, rate)
}

/// Sends and receives so many bytes, so many times; the next time begins when those of the last have come. The memory is
/// short enough for a core's cache.
fn pass_on(
    out: &mut TcpStream,
    input: &mut TcpStream,
    bytes: usize,
    times: usize,
) -> std::io::Result<()> {
    let memory = [7u8; CHUNK];
    let mut arrived = [0u8; CHUNK];
    for _ in 0..times {
        let (mut unsent, mut awaited, mut idle) = (bytes, bytes, 0);
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
            idle = if sent + received > 0 { 0 } else { idle + 1 };
            if idle > SPINS {
                std::thread::yield_now();
            }
        }
    }
    Ok(())
}

/// The bytes that were moved, none if the socket was not ready.
fn unless_blocked(moved: std::io::Result<usize>) -> std::io::Result<usize> {
    match moved {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        moved => moved,
    }
}
