//! The parameter server over loopback: servers and workers as threads of one process, and where it
//! matters servers as processes that are killed.
//!
//! Most tests count: the optimizer is plain descent with a rate of 1, a push of worker `w` is one where
//! the weights have its number and zero elsewhere, so that the weights say how often each worker's
//! pushes were applied.

mod bounds;
mod codecs;
mod departures;
mod failures;
#[path = "../common/forked.rs"]
mod forked;
mod fused;
mod hostile;
mod lab;
mod lockstep;
mod pieces;
mod restarts;
mod staleness;
mod stopped;
