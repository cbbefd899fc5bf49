//! What the machine could do at best, measured in the same run.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use unisono::{Group, Reduction};

use super::workload::Operation;

/// Time spent on one measurement of a limit.
const BUDGET: Duration = Duration::from_millis(60);

/// Bytes that every rank can copy per second while all ranks copy buffers of this size.
pub fn copy_rate(group: &Group, bytes: usize) -> anyhow::Result<f64> {
    let bytes = bytes.clamp(64 << 10, 64 << 20);
    let from = vec![1u8; bytes];
    let mut into = vec![2u8; bytes];
    group.barrier()?;
    let start = Instant::now();
    let mut copied = 0;
    while start.elapsed() < BUDGET || copied == 0 {
        into.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut into);
        copied += bytes;
    }
    slowest(group, copied as f64 / start.elapsed().as_secs_f64())
}

/// Bytes that every rank can send per second to the next one while all do so, over plain TCP.
pub fn link_rate(group: &Group, ip: IpAddr) -> anyhow::Result<f64> {
    let (rank, world) = (group.rank(), group.size());
    let listener = TcpListener::bind((ip, 0)).context("listening for the limit's measurement")?;
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
    let next = IpAddr::from(std::net::Ipv6Addr::from(octets)).to_canonical();
    let mut out = TcpStream::connect((next, port)).context("connecting to the next rank")?;
    let (mut input, _) = listener.accept().context("accepting the previous rank")?;
    group.barrier()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let chunk = vec![7u8; 256 << 10];
        let start = Instant::now();
        while start.elapsed() < 2 * BUDGET {
            out.write_all(&chunk)?;
        }
        Ok(())
    });
    let mut chunk = vec![0u8; 256 << 10];
    let start = Instant::now();
    let mut received = 0;
    loop {
        match input.read(&mut chunk)? {
            0 => break,
            n => received += n,
        }
    }
    let rate = received as f64 / start.elapsed().as_secs_f64();
    sender.join().expect("the sender does not panic")?;
    slowest(group, rate)
}

/// The bus bandwidth, in bytes per second, of an operation that does nothing but copy what it
/// must through shared memory.
pub fn shared_memory_bus(operation: Operation, world: usize, copy_rate: f64) -> f64 {
    let n = world as f64;
    // What a rank moves per byte of the buffer, counted in copies of a byte: staging, reading n
    // inputs and writing two outputs of its own block, collecting.
    let fold = (n + 2.0) / (2.0 * n);
    let rest = (n - 1.0) / n;
    let copies = match operation {
        Operation::AllReduce => rest + fold + rest,
        Operation::ReduceScatter | Operation::Reduce => rest + fold,
        Operation::AllGather | Operation::AllToAll => 1.0 + rest,
        Operation::Broadcast => 1.0,
        Operation::Gather | Operation::Scatter => rest,
        Operation::Barrier => return f64::INFINITY,
    };
    operation.bus_factor(world) * copy_rate / copies
}

fn slowest(group: &Group, rate: f64) -> anyhow::Result<f64> {
    let mut rates = [rate];
    group.all_reduce(&mut rates, Reduction::Min)?;
    Ok(rates[0])
}
