//! The state of a worker that agrees, on its way to a worker that joins beside the training.

use std::sync::Arc;

use unisono_sync::strategy::Weights;

use super::agreeing::Agreeing;
use crate::elastic::{Donor, Follower, Unfit};

/// What a worker needs to hand over its state.
pub(super) struct Handing {
    pub donor: Arc<Donor>,
    /// The parameters that are not trained.
    pub frozen: Box<dyn Weights + Send>,
    pub number: usize,
}

/// A worker that joins, with so many parameters that are not trained.
pub(crate) struct Joining<'a> {
    pub agreeing: &'a mut Agreeing,
    pub weights: &'a mut dyn Weights,
    pub frozen: (&'a mut dyn Weights, usize),
}

impl Agreeing {
    /// From now on the donor gets the state for workers that join, and the means of the steps that follow.
    pub(crate) fn hand_over_to(
        &mut self,
        donor: Arc<Donor>,
        frozen: Box<dyn Weights + Send>,
        number: usize,
    ) {
        let elements = self.parameters().iter().map(|parameter| parameter.elements()).sum();
        donor.offer(self.fingerprint((&*frozen, number)), elements);
        self.handing = Some(Handing { donor, frozen, number });
    }

    /// Copies the state for a joiner, if one has asked for it; whether the means of the step must be copied.
    pub(super) fn offer_state(&self, weights: &dyn Weights) -> bool {
        let Some(Handing { donor, frozen, number }) = &self.handing else { return false };
        if donor.is_asked() && self.has_state() {
            let count = self.parameters().len();
            let mut vectors = weights.to_vecs(count);
            vectors.extend(frozen.to_vecs(*number));
            for parameter in 0..count {
                vectors.extend(self.optimizer.state(parameter).into_iter().map(<[f32]>::to_vec));
            }
            donor.give(self.steps(), vectors);
        }
        donor.is_followed()
    }

    /// What two workers must have in common so that one can follow the other.
    fn fingerprint(&self, (frozen, number): (&dyn Weights, usize)) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for parameter in self.parameters() {
            hasher.update(format!("{} {:?}\n", parameter.name, parameter.shape).as_bytes());
        }
        for parameter in 0..number {
            frozen.read(parameter, &mut |values| {
                hasher.update(format!("frozen {}\n", values.len()).as_bytes());
            });
        }
        hasher.update(self.spec.to_string().as_bytes());
        *hasher.finalize().as_bytes()
    }
}

impl Follower for Joining<'_> {
    fn fingerprint(&self) -> [u8; 32] {
        self.agreeing.fingerprint((&*self.frozen.0, self.frozen.1))
    }

    fn lengths(&self) -> Option<Vec<usize>> {
        let parameters = self.agreeing.parameters();
        let mut lengths: Vec<usize> = parameters.iter().map(|it| it.elements()).collect();
        for parameter in 0..self.frozen.1 {
            self.frozen.0.read(parameter, &mut |values| lengths.push(values.len()));
        }
        for parameter in 0..parameters.len() {
            lengths.extend(self.agreeing.optimizer.state(parameter).iter().map(|it| it.len()));
        }
        Some(lengths)
    }

    fn trained(&self) -> usize {
        self.agreeing.parameters().len()
    }

    fn begin(&mut self) {
        self.agreeing.lose_state();
    }

    fn set(&mut self, vector: usize, values: &[f32]) {
        let (trained, frozen) = (self.trained(), self.frozen.1);
        if vector < trained {
            self.weights.set(vector, values);
        } else if vector < trained + frozen {
            self.frozen.0.set(vector - trained, values);
        } else {
            let states = self.agreeing.optimizer.state_names().len();
            let number = vector - trained - frozen;
            let mut of_parameter = self.agreeing.optimizer.state_mut(number / states);
            of_parameter[number % states].copy_from_slice(values);
        }
    }

    fn complete(&mut self, steps: u64) -> Result<(), Unfit> {
        self.agreeing.has_made(steps);
        Ok(())
    }

    fn update(&mut self, step: u64, parameter: usize, mean: &[f32]) {
        let optimizer = &mut self.agreeing.optimizer;
        self.weights.change(parameter, &mut |weights| {
            optimizer.update(parameter, step, weights, mean);
        });
    }

    fn stepped(&mut self, steps: u64) -> Result<(), Unfit> {
        self.agreeing.has_made(steps);
        Ok(())
    }
}
