//! Model parallelism beside data parallelism: the ranks form a grid. The ranks of a row hold the
//! stages of one replica and hand activations from stage to stage; the ranks of a column hold the
//! same stage of all replicas and average its gradient.
//!
//! ```text
//! cargo build --release --workspace --bins --examples
//! target/release/unisono run -n 4 -- target/release/examples/grid
//! ```

use unisono::prelude::*;

/// Stages of a replica; a world that is no multiple of it is cut into single ranks.
const STAGES: usize = 2;

/// Marks the messages that carry activations.
const ACTIVATIONS: u32 = 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let job = Job::join()?;
    let world = job.world();
    let stages = if world.size().is_multiple_of(STAGES) { STAGES } else { 1 };
    let (replica, stage) = (world.rank() / stages, world.rank() % stages);

    let row = world.split(Some(replica as u32), stage as i64)?.expect("every rank has a color");
    let column = world.split(Some(stage as u32), replica as i64)?.expect("every rank has a color");
    assert_eq!((row.rank(), column.rank()), (stage, replica));

    // Forward: every stage adds its number and passes the activations on.
    let mut activations = [replica as f32; 16];
    if stage > 0 {
        row.receive(&mut activations, stage - 1, ACTIVATIONS)?;
    }
    activations.iter_mut().for_each(|value| *value += stage as f32);
    if stage + 1 < stages {
        row.send(&activations, stage + 1, ACTIVATIONS)?;
    }

    // The last stage knows the loss; the whole replica learns it.
    let mut loss = [activations[0]];
    row.broadcast(&mut loss, stages - 1)?;
    assert_eq!(loss[0], (replica + stages * (stages - 1) / 2) as f32);

    // Backward: replicas average the gradient of the stage they share.
    let replicas = column.size();
    let mut gradient = vec![replica as f32; 1000];
    column.all_reduce(&mut gradient, Reduction::Mean)?;
    assert_eq!(gradient[0], (0..replicas).sum::<usize>() as f32 / replicas as f32);

    if world.rank() == 0 {
        println!("{replicas} replicas of {stages} stages");
    }
    Ok(())
}
