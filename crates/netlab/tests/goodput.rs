//! A link carries its rate: not less, and never more. In a test binary of its own, so that no
//! other test competes with the streams for the processor.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use unisono_netlab::{Host, Link, Rate, lab_or_skip};

/// How long anything may take before the test calls it hung.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often a transfer is tried. TCP takes the first to find out the rate, and a busy machine
/// may slow one down, but nothing can make one too fast.
const ATTEMPTS: usize = 20;

#[test]
fn a_stream_fills_a_link() {
    // Two directions that shared one rate would carry 1.0 between them. Two that do not carry 1.9,
    // if the processor keeps up with both: at 50 Mbit/s any does, at 1 Gbit/s a shared one may not.
    let cases = [(Rate::gbit(1), 32 << 20, 0.8), (Rate::mbit(50), 2 << 20, 1.5)];
    for (rate, bytes, both_ways) in cases {
        let Some(lab) = lab_or_skip(2, Link::new(rate)) else { return };
        let there = Stream::connect(lab.host(0), lab.host(1));
        let back = Stream::connect(lab.host(1), lab.host(0));
        // A quiet machine reaches 95 %; a shared one has the processor for half of that at times.
        assert_filled("one way", rate, 0.5, || vec![there.transfer(bytes)]);
        assert_filled("both ways", rate, both_ways, || {
            thread::scope(|scope| {
                let there = scope.spawn(|| there.transfer(bytes));
                let back = scope.spawn(|| back.transfer(bytes));
                vec![there.join().unwrap(), back.join().unwrap()]
            })
        });
    }
}

/// Asserts that each stream carries at most the rate each time, and all together at least `least`
/// times the rate once. `transfer` returns the bits that each carried in a second.
fn assert_filled(what: &str, rate: Rate, least: f64, transfer: impl Fn() -> Vec<f64>) {
    let filled = (0..ATTEMPTS).any(|_| {
        let bits = rate.as_bits_per_second();
        let shares: Vec<f64> = transfer().iter().map(|carried| carried / bits as f64).collect();
        println!("{what} at {} Mbit/s: {shares:.3?} of the rate", bits / 1_000_000);
        assert!(shares.iter().all(|share| *share <= 1.0), "more than the rate: {shares:?}");
        shares.iter().sum::<f64>() >= least
    });
    assert!(filled, "less than {least} of {rate:?} {what} in {ATTEMPTS} attempts");
}

struct Stream {
    sender: TcpStream,
    receiver: TcpStream,
}

impl Stream {
    fn connect(from: &Host, to: &Host) -> Stream {
        let listener = to.run(|| TcpListener::bind((to.address(), 0)).unwrap()).unwrap();
        let target = listener.local_addr().unwrap();
        let sender = from.run(|| TcpStream::connect_timeout(&target, PATIENCE).unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        sender.set_write_timeout(Some(PATIENCE)).unwrap();
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        Stream { sender, receiver }
    }

    /// Sends `bytes` bytes and returns the bits that arrived in a second.
    fn transfer(&self, bytes: usize) -> f64 {
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| (&self.sender).write_all(&vec![0; bytes]).unwrap());
            let mut buffer = vec![0; 256 << 10];
            let mut left = bytes;
            while left > 0 {
                let wanted = left.min(buffer.len());
                let received = (&self.receiver).read(&mut buffer[..wanted]).unwrap();
                assert!(received > 0, "the stream ended {left} bytes early");
                left -= received;
            }
        });
        bytes as f64 * 8.0 / start.elapsed().as_secs_f64()
    }
}
