//! Downpour: a replica that steps by itself. After every so many steps it pushes the mean of the
//! gradients since, and after every so many it fetches the weights of the servers.
//!
//! Replica and servers have the same optimizer, and each counts its own updates: the replica its
//! steps, the servers the pushes of all workers. So a learning rate that changes over the run is
//! given to the replica as the caller wrote it, in steps, and to the servers in pushes
//! ([`Level::optimizer`](crate::spec::Level::optimizer)).

use serde::{Deserialize, Serialize};
use unisono_optimizer::{BadOptimizer, Optimizer, OptimizerSpec};

use crate::Clock;
use crate::server::Gradient;
use crate::server::wire::Measured;

/// Steps from one push to the next, and from one fetch to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Periods {
    /// Steps from one push to the next.
    pub push: u32,
    /// Steps from one fetch to the next.
    pub fetch: u32,
}

impl Default for Periods {
    /// A fifth of the messages of `async`, which is what downpour is for where the way to the servers is
    /// slow. With longer periods replicas drift further apart; with 1 and 1, as in the experiments of its
    /// authors, nothing is saved.
    fn default() -> Periods {
        Periods { push: 5, fetch: 5 }
    }
}

/// What a worker keeps between pushes.
pub struct Downpour {
    optimizer: Box<dyn Optimizer>,
    periods: Periods,
    /// Steps of this worker, also those before it came in.
    steps: u64,
    /// The gradients since the last push, each divided by the steps between pushes.
    gathered: Vec<Vec<f32>>,
    /// Which parameters had a gradient since.
    touched: Vec<bool>,
    measured: Measured,
}

impl Downpour {
    /// The replica of a worker that comes in at this clock, with parameters of these lengths and the
    /// optimizer as the caller wrote it.
    pub fn new(
        periods: Periods,
        optimizer: &OptimizerSpec,
        lengths: &[usize],
        clock: Clock,
    ) -> Result<Downpour, BadOptimizer> {
        Ok(Downpour {
            optimizer: optimizer.build(lengths)?,
            periods,
            steps: clock.0.saturating_mul(periods.push.into()),
            gathered: lengths.iter().map(|length| vec![0.0; *length]).collect(),
            touched: vec![false; lengths.len()],
            measured: Measured::default(),
        })
    }

    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Updates the weights of a parameter by its gradient in the step under way, and keeps the gradient
    /// for the next push. A parameter without a gradient stays as it is.
    pub fn update(&mut self, parameter: usize, weights: &mut [f32], gradient: &[f32]) {
        let share = self.periods.push as f32;
        let gathered = self.gathered[parameter].iter_mut().zip(gradient);
        gathered.for_each(|(sum, gradient)| *sum += gradient / share);
        self.touched[parameter] = true;
        self.optimizer.update(parameter, self.steps + 1, weights, gradient);
    }

    /// Ends the step.
    pub fn end_step(&mut self, measured: Measured) {
        self.steps += 1;
        self.measured.loss += measured.loss / self.periods.push as f32;
        self.measured.samples += measured.samples;
        self.measured.compute += measured.compute;
    }

    /// Whether to push now.
    pub fn push_is_due(&self) -> bool {
        self.steps.is_multiple_of(self.periods.push.into())
    }

    /// Whether to fetch now.
    pub fn fetch_is_due(&self) -> bool {
        self.steps.is_multiple_of(self.periods.fetch.into())
    }

    /// What there is to push.
    pub fn gathered(&self) -> (Vec<Gradient<'_>>, Measured) {
        let all =
            self.gathered.iter().enumerate().filter(|(parameter, _)| self.touched[*parameter]);
        (all.map(|(parameter, sum)| (parameter, vec![sum.as_slice()])).collect(), self.measured)
    }

    /// Begins anew after a push.
    pub fn clear(&mut self) {
        self.gathered.iter_mut().for_each(|gathered| gathered.fill(0.0));
        self.touched.fill(false);
        self.measured = Measured::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_is_the_mean_of_the_steps_since_the_last() {
        let sgd: OptimizerSpec = "sgd".parse().unwrap();
        let rate = sgd.learning_rate().at(1) as f32;
        let periods = Periods { push: 2, fetch: 3 };
        let mut replica = Downpour::new(periods, &sgd, &[1, 1], Clock(5)).unwrap();
        assert_eq!(replica.steps(), 10, "five pushes of two steps");
        let mut weights = [0.0];
        let mut due = Vec::new();
        for (step, gradient) in [1.0, 3.0, 5.0].into_iter().enumerate() {
            replica.update(0, &mut weights, &[gradient]);
            let measured = Measured { loss: gradient, samples: 4, ..Measured::default() };
            replica.end_step(measured);
            if step == 1 {
                let (gradients, measured) = replica.gathered();
                assert_eq!(gradients, [(0, vec![&[2.0][..]])], "the other parameter had none");
                assert_eq!((measured.loss, measured.samples), (2.0, 8));
                replica.clear();
            }
            due.push((replica.push_is_due(), replica.fetch_is_due()));
        }
        assert_eq!(due, [(false, false), (true, true), (false, false)]);
        assert_eq!(weights, [-(1.0f32 * rate) - 3.0 * rate - 5.0 * rate]);
        assert_eq!(replica.gathered().0, [(0, vec![&[2.5][..]])]);
    }
}
