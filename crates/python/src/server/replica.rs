//! Downpour: a replica that steps by itself. After every so many steps it pushes the mean of the
//! gradients since, and after every so many it fetches the weights of the servers.
//!
//! Replica and servers have the same optimizer, and each counts its own updates: the replica its
//! steps, the servers the pushes of everybody. So a learning rate that changes over the run is
//! given to the replica as the caller wrote it, in steps, and to the servers in pushes.

use unisono_optimizer::{Optimizer, OptimizerSpec};
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{Gradient, Run};
use unisono_relaxed::spec::Level;

/// What a worker keeps between pushes.
pub struct Replica {
    optimizer: Box<dyn Optimizer>,
    push: u64,
    fetch: u64,
    /// Steps of this worker, also those before it came in.
    steps: u64,
    /// The gradients since the last push, each divided by the steps between pushes.
    gathered: Vec<Vec<f32>>,
    /// Which parameters had a gradient since.
    touched: Vec<bool>,
    measured: Measured,
}

impl Replica {
    /// The replica of a worker that comes in at this clock, if the run has replicas.
    pub fn new(
        run: &Run,
        optimizer: &OptimizerSpec,
        clock: u64,
    ) -> Result<Option<Replica>, String> {
        let Level::Downpour { push, fetch } = run.level else { return Ok(None) };
        let lengths: Vec<usize> = run.shapes.iter().map(|shape| shape.iter().product()).collect();
        Ok(Some(Replica {
            optimizer: optimizer.build(&lengths).map_err(|error| error.to_string())?,
            push: push.into(),
            fetch: fetch.into(),
            steps: clock.saturating_mul(push.into()),
            gathered: lengths.iter().map(|length| vec![0.0; *length]).collect(),
            touched: vec![false; lengths.len()],
            measured: Measured::default(),
        }))
    }

    /// Steps by itself. A parameter without a gradient stays as it is.
    pub fn step(
        &mut self,
        weights: &mut [&mut [f32]],
        gradients: &[Option<&[f32]>],
        measured: Measured,
    ) {
        self.steps += 1;
        let share = self.push as f32;
        for (parameter, gradient) in gradients.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            let gathered = self.gathered[parameter].iter_mut().zip(*gradient);
            gathered.for_each(|(sum, gradient)| *sum += gradient / share);
            self.touched[parameter] = true;
            self.optimizer.update(parameter, self.steps, weights[parameter], gradient);
        }
        self.measured.loss += measured.loss / share;
        self.measured.samples += measured.samples;
        self.measured.compute += measured.compute;
    }

    /// Whether to push now.
    pub fn is_full(&self) -> bool {
        self.steps.is_multiple_of(self.push)
    }

    /// Whether to fetch now.
    pub fn is_thirsty(&self) -> bool {
        self.steps.is_multiple_of(self.fetch)
    }

    /// What there is to push.
    pub fn gathered(&self) -> (Vec<Gradient<'_>>, Measured) {
        let all =
            self.gathered.iter().enumerate().filter(|(parameter, _)| self.touched[*parameter]);
        (all.map(|(parameter, sum)| (parameter, vec![sum.as_slice()])).collect(), self.measured)
    }

    /// Begins anew after a push.
    pub fn empty(&mut self) {
        self.gathered.iter_mut().for_each(|gathered| gathered.fill(0.0));
        self.touched.fill(false);
        self.measured = Measured::default();
    }
}
