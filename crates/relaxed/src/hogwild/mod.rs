//! Lock-free updates of shared weights: hogwild.
//!
//! The threads of one process train one copy of the weights. Each reads them, computes a gradient, and
//! subtracts it where the others do the same at the same time, without a lock and without a turn.
//! No thread waits: a slow thread holds up no other, and a gradient that touches few elements costs no
//! more than these.
//!
//! What keeps this correct is small. A weight is one word of memory, and [`SharedWeights`] changes it
//! by a loop of compare-exchange: subtract from the value that was seen, and store the result only if
//! it is still there. So no update of any thread is lost, whatever the interleaving.
//!
//! What is given up is everything beyond the single word. A thread that reads a parameter may see one
//! element before and its neighbour after the update of another thread. Sums of floats depend on
//! their order, and no thread chooses the order: two runs differ in their last bits, and then in all.
//!
//! What a gradient missed while it was computed is measured. [`Clocks`] counts the updates of every
//! thread, and a [`Thread`] notes them when a step begins and when it ends: the difference is the delay
//! in its record.

mod atomic;
mod clocks;
#[cfg(test)]
mod interleavings;
mod run;
mod weights;

pub use clocks::Clocks;
pub use run::{Step, Thread, run};
pub use weights::SharedWeights;
