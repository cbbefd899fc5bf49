//! A worker whose weights live on servers.

use std::time::Instant;

use unisono_optimizer::OptimizerSpec;
use unisono_relaxed::downpour::Downpour;
use unisono_relaxed::server::{Client, Fill, Run};
use unisono_relaxed::spec::Level;
use unisono_sync::strategy::Weights;

use super::collector::Collected;
use super::{Relaxed, Stepped, WorkerError};

/// Pushes gradients and pulls weights.
pub struct Served {
    client: Client,
    /// At downpour, where a worker steps by itself in between.
    replica: Option<Downpour>,
    /// Whether the weights were pulled for the next step.
    is_fresh: bool,
}

impl Served {
    /// A worker that has joined a run. The optimizer is as the caller wrote it, for a step of all
    /// workers.
    pub fn new(
        client: Client,
        run: &Run,
        optimizer: &OptimizerSpec,
    ) -> Result<Served, WorkerError> {
        let replica = match run.level {
            Level::Downpour(periods) => {
                let length = |shape: &Vec<usize>| shape.iter().product();
                let lengths: Vec<usize> = run.shapes.iter().map(length).collect();
                Some(Downpour::new(periods, optimizer, &lengths, client.clock())?)
            }
            _ => None,
        };
        Ok(Served { client, replica, is_fresh: false })
    }
}

impl Relaxed for Served {
    fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError> {
        if self.client.is_finished() {
            return Ok(None);
        }
        if !self.is_fresh {
            self.client.pull_into(None, &mut into(weights))?;
            self.is_fresh = true;
        }
        Ok(Some(self.replica.as_ref().map_or(self.client.clock().0, Downpour::steps)))
    }

    /// Pushes every gradient, and pulls the weights for the next step. At downpour, steps by itself, and
    /// now and then pushes what it has gathered, and fetches.
    fn end_step(
        &mut self,
        collected: &Collected,
        weights: &mut dyn Weights,
    ) -> Result<Stepped, WorkerError> {
        let measured = collected.measured();
        let (start, step, pushed);
        match &mut self.replica {
            None => {
                let gradients = collected.gradients();
                (start, step) = (Instant::now(), self.client.clock().next().0);
                pushed =
                    Some(self.client.push_pull_into(&gradients, measured, &mut into(weights))?);
            }
            Some(replica) => {
                for (parameter, gradients) in collected.gradients() {
                    weights.change(parameter, &mut |own| {
                        replica.update(parameter, own, gradients[0]);
                    });
                }
                replica.end_step(measured);
                (start, step) = (Instant::now(), replica.steps());
                pushed = if replica.push_is_due() {
                    let (gathered, measured) = replica.gathered();
                    let pushed = self.client.push(&gathered, measured)?;
                    replica.clear();
                    Some(pushed)
                } else {
                    None
                };
                if replica.fetch_is_due() {
                    self.client.pull_into(None, &mut into(weights))?;
                }
            }
        }
        let blocked = start.elapsed();
        Ok(Stepped { pushed, ..Stepped::by_itself(step, measured, blocked) })
    }

    fn sent(&self) -> u64 {
        self.client.traffic()
    }

    fn is_finished(&self) -> bool {
        self.client.is_finished()
    }

    fn leave(self: Box<Self>, _: &mut dyn Weights) -> Result<(), WorkerError> {
        self.client.leave();
        Ok(())
    }
}

/// Puts weights where they belong.
fn into(weights: &mut dyn Weights) -> impl FnMut(usize, usize, usize, &mut Fill<'_>) {
    |parameter, first, count, fill| {
        weights.change(parameter, &mut |own| fill(&mut own[first..first + count]));
    }
}
