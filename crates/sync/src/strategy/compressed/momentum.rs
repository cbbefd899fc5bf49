//! The momentum of what is not encoded.
//!
//! A codec with momentum takes the place of the optimizer's. What it does not encode, which is the
//! small parameters always and all of them during the warm-up, gets the same momentum here, applied
//! to the mean, which is equal on all workers. When a parameter is encoded for the first time, the
//! velocity of every shard begins with what the mean's was.

use unisono_codec::{CodecSpec, Rules};

use super::Compressed;
use crate::strategy::Gradients;

/// A codec's momentum.
#[derive(Clone, Copy, Debug)]
pub struct Momentum {
    factor: f32,
    nesterov: bool,
}

impl Momentum {
    /// That of the codec of these rules, if it has one.
    pub fn of(rules: &Rules) -> Option<Momentum> {
        match &rules.codec {
            Some(CodecSpec::Dgc(settings, _)) if settings.momentum > 0.0 => {
                let factor = settings.momentum as f32;
                Some(Momentum { factor, nesterov: settings.nesterov })
            }
            _ => None,
        }
    }

    /// Replaces a gradient by what the velocity makes of it, as the codec does.
    fn apply(self, velocity: &mut Vec<f32>, gradient: &mut [f32]) {
        velocity.resize(gradient.len(), 0.0);
        for (velocity, gradient) in velocity.iter_mut().zip(gradient) {
            if self.nesterov {
                *velocity = self.factor * (*velocity + *gradient);
                *gradient += *velocity;
            } else {
                *velocity = self.factor * *velocity + *gradient;
                *gradient = *velocity;
            }
        }
    }
}

impl Compressed {
    /// Gives the velocity that a parameter had before it was encoded to all of its shards.
    pub(super) fn hand_over_velocity(&mut self, parameters: &[usize]) {
        for &parameter in parameters {
            let state = &mut self.states[parameter];
            let velocity = std::mem::take(&mut state.velocity);
            if velocity.is_empty() {
                continue;
            }
            for memory in state.shards.iter_mut().filter(|memory| !memory.velocity.is_empty()) {
                memory.velocity.copy_from_slice(&velocity);
                if let Some(scale) = &state.scale {
                    scale.divide(&mut memory.velocity);
                }
            }
        }
    }

    /// Applies the momentum to the means of parameters that were not encoded.
    pub(super) fn apply_momentum(&mut self, gradients: &mut Gradients, encoded: bool) {
        let Some(momentum) = Momentum::of(&self.compression.rules) else { return };
        let layout = gradients.layout.clone();
        for &parameter in &layout.buckets()[gradients.bucket].parameters {
            let is_plain = !encoded || self.chosen[parameter].is_none();
            if is_plain && gradients.slots[0][layout.count(parameter)] > 0.0 {
                let mean = &mut gradients.slots[0][layout.span(parameter)];
                momentum.apply(&mut self.states[parameter].velocity, mean);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_that_of_the_codec() {
        for (text, expected) in [
            ("dgc:1%,momentum=0.5", [1.0, 1.5, 1.75]),
            ("dgc:1%,momentum=0.5,nesterov", [1.5, 1.75, 1.875]),
        ] {
            let momentum = Momentum::of(&Rules::all(text.parse().unwrap())).unwrap();
            let mut velocity = Vec::new();
            for expected in expected {
                let mut gradient = [1.0];
                momentum.apply(&mut velocity, &mut gradient);
                assert_eq!(gradient, [expected], "{text}");
            }
        }
        assert!(Momentum::of(&Rules::all("dgc:1%".parse().unwrap())).is_none());
        assert!(Momentum::of(&Rules::default()).is_none());
    }
}
