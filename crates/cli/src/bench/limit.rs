//! What the machine could do at best, measured in the same run.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use unisono::collective::cost::WindowCost;
use unisono::{Group, Reduction};

use super::workload::Operation;

/// Time spent on one measurement of a limit.
const BUDGET: Duration = Duration::from_millis(60);

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

/// The bus bandwidth, in bytes per second, of an operation that does nothing but move between
/// cores what it must: staging a byte, publishing a result, collecting or folding what another
/// rank staged, each at the rate measured when the group formed.
pub fn shared_memory_bus(operation: Operation, world: usize, costs: &WindowCost) -> f64 {
    let (copy, fold) = (costs.copy, costs.fold);
    let n = world as f64;
    let rest = (n - 1.0) / n;
    // Seconds per byte of the buffer.
    let scatter = rest * (copy + fold);
    let seconds = match operation {
        Operation::AllReduce => {
            let each_rank_all = copy + (n - 1.0) * fold;
            (scatter + copy / n + rest * copy).min(each_rank_all)
        }
        Operation::Reduce => scatter + copy / n,
        Operation::ReduceScatter => scatter,
        Operation::AllGather => copy / n + rest * copy,
        Operation::AllToAll => 2.0 * rest * copy,
        Operation::Broadcast | Operation::Gather | Operation::Scatter => copy,
        Operation::Barrier => return f64::INFINITY,
    };
    operation.bus_factor(world) / seconds
}

fn slowest(group: &Group, rate: f64) -> anyhow::Result<f64> {
    let mut rates = [rate];
    group.all_reduce(&mut rates, Reduction::Min)?;
    Ok(rates[0])
}
