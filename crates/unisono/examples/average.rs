//! Workers average their gradients: first one buffer, then the layers of a model while the rest
//! of it is still being computed.
//!
//! ```text
//! cargo build --release --workspace --bins --examples
//! target/release/unisono run -n 4 -- target/release/examples/average
//! ```

use unisono::prelude::*;

const LAYERS: usize = 3;
const PARAMETERS: usize = 100_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let job = Job::join()?;
    let world = job.world();

    let mut gradient = compute_gradient(world.rank(), 0);
    world.all_reduce(&mut gradient, Reduction::Mean)?;
    assert_eq!(gradient, expected_mean(world.size(), 0));

    // The last layer's gradient is ready first. Its all-reduce runs while the next is computed.
    let mut pending = Vec::with_capacity(LAYERS);
    for layer in (0..LAYERS).rev() {
        let gradient = compute_gradient(world.rank(), layer);
        pending.push((layer, world.submit_all_reduce(gradient, Reduction::Mean)?));
    }
    for (layer, submitted) in pending {
        assert_eq!(submitted.wait()?, expected_mean(world.size(), layer));
    }

    if world.rank() == 0 {
        println!("{LAYERS} layers of {PARAMETERS} parameters, averaged over {}", world.size());
    }
    Ok(())
}

/// Stands for a backward pass: whole numbers, so that the mean of any world is easy to check.
fn compute_gradient(rank: usize, layer: usize) -> Vec<f32> {
    vec![(rank + 10 * layer) as f32; PARAMETERS]
}

fn expected_mean(world: usize, layer: usize) -> Vec<f32> {
    let sum: usize = (0..world).map(|rank| rank + 10 * layer).sum();
    vec![sum as f32 / world as f32; PARAMETERS]
}
