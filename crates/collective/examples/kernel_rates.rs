//! Prints how fast the reduction kernels are, next to a plain copy in the same run.
//!
//! Rates are bytes read and written per second: a fold of n inputs moves n + 1 buffers, a copy
//! two. Times are medians of interleaved rounds.
//!
//! ```text
//! cargo run --release -p unisono-collective --example kernel_rates
//! ```

use std::time::Instant;
use unisono_collective::dtype::{Dtype, Reduction};
use unisono_collective::kernel::{copy, fold};
use unisono_collective::tree::Tree;

const INPUTS: [usize; 4] = [2, 4, 8, 16];
const TYPES: [Dtype; 5] = [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16, Dtype::I32];
const ROUNDS: usize = 15;

fn main() {
    // The first fits the second-level cache with all inputs, the last no cache of most machines.
    for (bytes, label) in [(64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")] {
        table(bytes, label);
    }
    pipeline();
}

/// A buffer on pages that are all present.
fn buffer(bytes: usize) -> Vec<u64> {
    // An ordinary number in every type.
    vec![0x3f80_3f80_3f80_3f80; bytes / 8]
}

fn table(bytes: usize, label: &str) {
    let sources: Vec<_> = (0..16).map(|_| buffer(bytes)).collect();
    let mut target = buffer(bytes);
    let inputs: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
    let into = target.as_mut_ptr().cast::<u8>();
    let repeats = ((32 << 20) / bytes).max(1);

    let mut copies = Vec::new();
    let mut folds = vec![Vec::new(); TYPES.len() * INPUTS.len()];
    for _ in 0..ROUNDS {
        // SAFETY: distinct buffers of `bytes` bytes.
        copies.push(seconds(repeats, || unsafe { copy(inputs[0], into, bytes) }));
        let mut times = folds.iter_mut();
        for dtype in TYPES {
            for n in INPUTS {
                let (tree, count) = (Tree::canonical(n), bytes / dtype.size());
                // SAFETY: distinct buffers of `bytes` bytes.
                let time = seconds(repeats, || unsafe {
                    fold(dtype, Reduction::Sum, &tree, &inputs[..n], into, None, count, None);
                });
                times.next().expect("one list for every row").push(time);
            }
        }
    }
    let copied = 2.0 * bytes as f64 / median(copies) / 1e9;
    println!("{label} buffers: copy {copied:.1} GB/s");
    let mut times = folds.into_iter();
    for dtype in TYPES {
        print!("  {:<5}", dtype.name());
        for n in INPUTS {
            let time = median(times.next().expect("one list for every row"));
            let rate = (n + 1) as f64 * bytes as f64 / time / 1e9;
            print!("  {n:>2} inputs {rate:>6.1} GB/s ({:.2}x copy)", rate / copied);
        }
        println!();
    }
}

/// One step of a window reduction: a segment of a large private buffer and a segment of hot
/// staging memory are added, and the sum goes back to both.
fn pipeline() {
    const LARGE: usize = 64 << 20;
    const SEGMENT: usize = 256 << 10;
    let mut private = buffer(LARGE);
    let mut staging = buffer(SEGMENT);
    let (private, staging) = (private.as_mut_ptr().cast::<u8>(), staging.as_mut_ptr().cast());
    let tree = Tree::pair();
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let segments = || (0..LARGE).step_by(SEGMENT);
    for _ in 0..ROUNDS {
        // SAFETY: both buffers hold every segment, and outputs are exactly inputs.
        unsafe {
            times[0].push(seconds(1, || {
                segments().for_each(|at| copy(private.add(at), staging, SEGMENT));
            }));
            times[1].push(seconds(1, || {
                segments().for_each(|at| copy(staging, private.add(at), SEGMENT));
            }));
            times[2].push(seconds(1, || {
                for at in segments() {
                    let own = private.add(at);
                    let inputs = [own.cast_const(), staging.cast_const()];
                    let (dtype, sum) = (Dtype::F32, Reduction::Sum);
                    fold(dtype, sum, &tree, &inputs, own, Some(staging), SEGMENT / 4, None);
                }
            }));
        }
    }
    println!("64 MiB private memory by 256 KiB segments of hot staging, private GB/s:");
    let names = ["stage", "collect", "reduce into both"];
    for (name, times) in names.into_iter().zip(times) {
        println!("  {name:<17} {:>6.1}", LARGE as f64 / median(times) / 1e9);
    }
}

fn seconds(repeats: usize, mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        work();
    }
    start.elapsed().as_secs_f64() / repeats as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
