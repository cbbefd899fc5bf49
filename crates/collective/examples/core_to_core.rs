//! What two cores can exchange through shared memory: each copies a buffer into memory of its own
//! that the other reads, and copies out what the other wrote. No collective over shared memory can
//! move its bytes faster than this.
//!
//! ```text
//! cargo run --release -p unisono-collective --example core_to_core
//! ```

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Staging buffers per side, so that one is written while another is read.
const BUFFERS: usize = 4;
/// Buffers exchanged per measurement.
const EXCHANGES: usize = 600;
/// Measurements; the quickest counts.
const ROUNDS: usize = 7;

/// One side's staging memory and how many buffers it has written.
#[repr(align(128))]
struct Side {
    written: AtomicUsize,
    staging: Box<[UnsafeCell<u8>]>,
}

// SAFETY: a buffer is written before `written` announces it and not again before the other side
// has announced three more, for which it has read this one.
unsafe impl Sync for Side {}

fn main() {
    println!("{:>8}  {:>12}", "buffer", "each way");
    for buffer in [32 << 10, 64 << 10, 128 << 10, 256 << 10] {
        let sides = [side(buffer), side(buffer)];
        let seconds = std::thread::scope(|scope| {
            let other = scope.spawn(|| exchange(&sides, 1, buffer));
            let seconds = exchange(&sides, 0, buffer);
            other.join().expect("does not panic");
            seconds
        });
        let rate = (EXCHANGES * buffer) as f64 / seconds / 1e9;
        println!("{:>4} KiB  {rate:>7.2} GB/s", buffer >> 10);
    }
}

fn side(buffer: usize) -> Side {
    let staging = (0..BUFFERS * buffer).map(|_| UnsafeCell::new(1)).collect();
    Side { written: AtomicUsize::new(0), staging }
}

/// Seconds of the quickest round.
fn exchange(sides: &[Side; 2], me: usize, buffer: usize) -> f64 {
    let mut core = rustix::thread::CpuSet::new();
    core.set(me);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &core) {
        eprintln!("not bound to core {me}: {error}");
    }
    let (mine, theirs) = (&sides[me], &sides[1 - me]);
    let private = vec![2u8; buffer];
    let mut result = vec![0u8; buffer];
    let mut quickest = f64::INFINITY;
    let mut turn = 0;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..EXCHANGES {
            let at = turn % BUFFERS * buffer;
            // SAFETY: see `Side`; both ranges lie in their slices.
            unsafe {
                let into = UnsafeCell::raw_get(mine.staging.as_ptr().add(at));
                into.copy_from_nonoverlapping(private.as_ptr(), buffer);
            }
            turn += 1;
            mine.written.store(turn, Ordering::Release);
            while theirs.written.load(Ordering::Acquire) < turn {
                std::hint::spin_loop();
            }
            // SAFETY: as above.
            unsafe {
                let from = UnsafeCell::raw_get(theirs.staging.as_ptr().add(at)).cast_const();
                result.as_mut_ptr().copy_from_nonoverlapping(from, buffer);
            }
            std::hint::black_box(&mut result);
        }
        quickest = quickest.min(start.elapsed().as_secs_f64());
    }
    quickest
}
