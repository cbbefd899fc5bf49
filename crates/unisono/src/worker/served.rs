//! A worker whose weights live on servers.

use std::ops::Range;
use std::time::Instant;

use unisono_optimizer::OptimizerSpec;
use unisono_relaxed::downpour::Downpour;
use unisono_relaxed::server::{Client, Run, ServerError, Take};
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
    /// For the numbers of one parameter that have arrived, the largest if need be.
    room: Vec<f32>,
}

impl Served {
    /// A worker that has joined a run. The optimizer is as the caller wrote it, for a step of all
    /// workers.
    pub fn new(
        client: Client,
        run: &Run,
        optimizer: &OptimizerSpec,
    ) -> Result<Served, WorkerError> {
        let length = |shape: &Vec<usize>| shape.iter().product();
        let lengths: Vec<usize> = run.shapes.iter().map(length).collect();
        let room = vec![0.0; lengths.iter().copied().max().unwrap_or(0)];
        let replica = match run.level {
            Level::Downpour(periods) => {
                Some(Downpour::new(periods, optimizer, &lengths, client.clock())?)
            }
            _ => None,
        };
        Ok(Served { client, replica, is_fresh: false, room })
    }
}

impl Relaxed for Served {
    fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError> {
        if self.client.is_finished() {
            return Ok(None);
        }
        if !self.is_fresh {
            Arriving::all(weights, &mut self.room, |take| self.client.pull(None, take))?;
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
                pushed = Some(Arriving::all(weights, &mut self.room, |take| {
                    self.client.push_pull(&gradients, measured, take)
                })?);
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
                    Arriving::all(weights, &mut self.room, |take| self.client.pull(None, take))?;
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

/// Weights that arrive, on their way to where they belong.
///
/// Whoever changes some numbers of a parameter may have to copy all of it, and nobody can read it meanwhile. So what
/// arrives is kept until all of its neighbours are there, and while the network is waited for the weights are free. Only
/// what has arrived gets into them: those of a pull that fails are partly new, and partly what they were.
struct Arriving<'a> {
    weights: &'a mut dyn Weights,
    room: &'a mut [f32],
    /// Whose numbers are in the room, and which: each where it is in its parameter.
    parameter: usize,
    span: Range<usize>,
}

impl<'a> Arriving<'a> {
    /// Puts all weights where they belong that a `pull` takes.
    fn all<T>(
        weights: &'a mut dyn Weights,
        room: &'a mut [f32],
        pull: impl FnOnce(&mut Take<'_>) -> Result<T, ServerError>,
    ) -> Result<T, ServerError> {
        let mut arriving = Arriving { weights, room, parameter: 0, span: 0..0 };
        let pulled =
            pull(&mut |parameter, first, numbers| arriving.take(parameter, first, numbers))?;
        arriving.settle();
        Ok(pulled)
    }

    fn take(&mut self, parameter: usize, first: usize, numbers: &[f32]) {
        if (parameter, first) != (self.parameter, self.span.end) {
            self.settle();
            (self.parameter, self.span) = (parameter, first..first);
        }
        let end = first + numbers.len();
        self.room[first..end].copy_from_slice(numbers);
        self.span.end = end;
    }

    /// Puts what has arrived where it belongs.
    fn settle(&mut self) {
        let span = std::mem::take(&mut self.span);
        if !span.is_empty() {
            let arrived = &self.room[span.clone()];
            let put = &mut |own: &mut [f32]| own[span.clone()].copy_from_slice(arrived);
            self.weights.change(self.parameter, put);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights that count how often they are changed.
    struct Counted(Vec<Vec<f32>>, usize);

    impl Weights for Counted {
        fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
            self.0.read(parameter, with);
        }

        fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
            self.1 += 1;
            self.0.change(parameter, with);
        }
    }

    /// Two servers, of which the second has some rows of the last parameter, and is taken from first.
    #[test]
    fn neighbours_take_their_place_together() {
        let mut weights = Counted(vec![vec![0.0; 4], vec![0.0; 3], vec![0.0; 6]], 0);
        let mut room = vec![9.0; 6];
        let parts: [(usize, usize, &[f32]); 7] = [
            (2, 3, &[4.0, 5.0]),
            (2, 5, &[6.0]),
            (0, 0, &[1.0, 2.0]),
            (0, 2, &[3.0, 4.0]),
            (1, 0, &[5.0, 6.0, 7.0]),
            (2, 0, &[1.0, 2.0]),
            (2, 2, &[3.0]),
        ];
        let pull = |take: &mut Take<'_>| {
            for (parameter, first, numbers) in parts {
                take(parameter, first, numbers);
            }
            Ok(())
        };
        Arriving::all(&mut weights, &mut room, pull).unwrap();
        let expected =
            [vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0, 7.0], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]];
        assert_eq!((&weights.0[..], weights.1), (&expected[..], 4));
    }

    /// A connection is lost, and all comes once more; then it is lost for good.
    #[test]
    fn only_what_has_arrived_gets_into_the_weights() {
        let mut weights = Counted(vec![vec![0.0; 4], vec![0.0; 4]], 0);
        let mut room = vec![9.0; 4];
        let pull = |take: &mut Take<'_>| -> Result<(), ServerError> {
            take(0, 0, &[1.0; 4]);
            take(1, 0, &[1.0; 2]);
            take(0, 0, &[2.0; 4]);
            take(1, 0, &[2.0; 3]);
            Err(ServerError::Stopped)
        };
        Arriving::all(&mut weights, &mut room, pull).unwrap_err();
        assert_eq!(weights.0, [vec![2.0; 4], vec![1.0, 1.0, 0.0, 0.0]]);
    }
}
