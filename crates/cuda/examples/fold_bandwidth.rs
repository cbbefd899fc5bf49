//! How near folds come to the bandwidth of device memory.
//!
//!     cargo run --release -p unisono-cuda --example fold_bandwidth [-- sweep]
//!
//! For sums of 2, 4 and 8 inputs of 256 MiB: bytes read and written per second, the median of 20, beside
//! those of the driver's copy and of a fold of one input, which is a copy as well, in the same run. With
//! `sweep`, for other numbers of blocks.

use std::error::Error;

use unisono_collective::{Dtype, Reduction};
use unisono_cuda::fold::{Alignment, FoldPlan, FoldShape};
use unisono_cuda::{Context, DeviceMemory, DevicePtr, Driver, Folds, Stream};

#[path = "shared/timing.rs"]
mod timing;
use timing::median_seconds;

const BYTES: usize = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let sweep = std::env::args().any(|argument| argument == "sweep");
    let driver = Driver::load()?;
    let context = Context::new(&driver.device(0)?)?;
    let device = context.device();
    let multiprocessors = device.multiprocessors()?;
    println!(
        "{}, compute capability {}, {multiprocessors} multiprocessors, CUDA {}",
        device.name()?,
        device.capability()?,
        driver.version()?
    );

    let folds = Folds::load(&context)?;
    let stream = Stream::new(&context, 0)?;
    let buffers =
        (0..9).map(|_| DeviceMemory::new(&context, BYTES)).collect::<Result<Vec<_>, _>>()?;
    for buffer in &buffers {
        // Numbers around one, of either type.
        // SAFETY: the buffer has as many words.
        unsafe { stream.fill_words(buffer.pointer(), 0x3f9c_3f81, BYTES / 4)? };
    }
    let inputs: Vec<DevicePtr> = buffers[..8].iter().map(DeviceMemory::pointer).collect();
    let output = buffers[8].pointer();

    let seconds = median_seconds(&stream, || {
        // SAFETY: both have as many bytes, and nothing else touches them.
        unsafe { stream.copy_on_device(output, inputs[0], BYTES) }.map_err(Into::into)
    })?;
    let copy = (2 * BYTES) as f64 / seconds;
    println!("{:>28} {:8.1} GB/s", "copy of the driver", copy / 1e9);

    for dtype in [Dtype::F32, Dtype::Bf16] {
        let prepared = std::time::Instant::now();
        folds.prepare(dtype)?;
        println!("{dtype}: kernels loaded in {:.0} ms", prepared.elapsed().as_secs_f64() * 1e3);
        for n in [1, 2, 4, 8] {
            let count = BYTES / dtype.size();
            let alignment = Alignment::Alike { bytes: 0 };
            let shape = FoldShape::new(dtype, Reduction::Sum, None, n, alignment, count)?;
            let mut plans = vec![FoldPlan::of(&shape)];
            if sweep {
                let blocks = [1, 2, 4, 6, 8, 12, 16, 32, 64, 128];
                plans.extend(
                    blocks.map(|blocks| FoldPlan::with_blocks(&shape, blocks * multiprocessors)),
                );
            }
            for plan in plans {
                let seconds = median_seconds(&stream, || {
                    // SAFETY: all buffers have as many elements, and nothing else touches them.
                    unsafe {
                        folds.launch(&stream, &plan, &shape, &inputs[..n], (output, None), count)
                    }
                    .map_err(Into::into)
                })?;
                let rate = ((n + 1) * BYTES) as f64 / seconds;
                println!(
                    "{:>20}, {:6} blocks {:8.1} GB/s, {:5.1} % of the copy",
                    plan.kernel.to_string(),
                    plan.grid,
                    rate / 1e9,
                    100.0 * rate / copy
                );
            }
            check(&stream, dtype, n, output)?;
        }
    }
    Ok(())
}

/// What was timed must be right: all inputs are the same, and their number is a power of two, so that every sum is
/// the input with a larger exponent.
fn check(stream: &Stream, dtype: Dtype, n: usize, output: DevicePtr) -> Result<(), Box<dyn Error>> {
    let mut words = vec![0_u32; BYTES / 4];
    // SAFETY: both have as many bytes, and the copy is waited for.
    unsafe { stream.copy_to_host(words.as_mut_ptr().cast(), output, BYTES)? };
    stream.synchronize()?;
    let exponents = n.ilog2() << 23 | if dtype == Dtype::Bf16 { n.ilog2() << 7 } else { 0 };
    match words.iter().position(|&word| word != 0x3f9c_3f81 + exponents) {
        Some(at) => Err(format!("{n} inputs of {dtype}: word {at} is {:#x}", words[at]).into()),
        None => Ok(()),
    }
}
