//! The description of an optimizer: its name and settings.

use std::fmt;
use std::str::FromStr;

use crate::{Adagrad, AdamW, LearningRate, Momentum, Optimizer, Sgd};

/// Which optimizer, with which settings.
///
/// Its text ([`fmt::Display`]) contains every setting exactly, so two runs use the same optimizer
/// if and only if the texts are equal.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum OptimizerSpec {
    /// Stochastic gradient descent.
    Sgd {
        /// The learning rate.
        learning_rate: LearningRate,
        /// The share of the weights that is added to the gradient.
        weight_decay: f64,
    },
    /// Gradient descent with momentum.
    Momentum {
        /// The learning rate.
        learning_rate: LearningRate,
        /// The factor by which the past fades per step.
        momentum: f64,
        /// Whether to look one step ahead.
        nesterov: bool,
        /// The share of the weights that is added to the gradient.
        weight_decay: f64,
    },
    /// Gradient descent in units of the root of the summed squares.
    Adagrad {
        /// The learning rate.
        learning_rate: LearningRate,
        /// Keeps the division by a vanishing sum finite.
        epsilon: f64,
        /// The share of the weights that is added to the gradient.
        weight_decay: f64,
    },
    /// Adam with decoupled weight decay.
    AdamW {
        /// The learning rate.
        learning_rate: LearningRate,
        /// The factors by which the moments of gradient and squared gradient fade per step.
        betas: (f64, f64),
        /// Keeps the division by a vanishing second moment finite.
        epsilon: f64,
        /// The share of the weights, times the learning rate, that every step takes away.
        weight_decay: f64,
    },
}

impl OptimizerSpec {
    /// The names of all optimizers.
    pub const NAMES: [&str; 4] = [Sgd::NAME, Momentum::NAME, Adagrad::NAME, AdamW::NAME];

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            OptimizerSpec::Sgd { .. } => Sgd::NAME,
            OptimizerSpec::Momentum { .. } => Momentum::NAME,
            OptimizerSpec::Adagrad { .. } => Adagrad::NAME,
            OptimizerSpec::AdamW { .. } => AdamW::NAME,
        }
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> LearningRate {
        match self {
            OptimizerSpec::Sgd { learning_rate, .. }
            | OptimizerSpec::Momentum { learning_rate, .. }
            | OptimizerSpec::Adagrad { learning_rate, .. }
            | OptimizerSpec::AdamW { learning_rate, .. } => *learning_rate,
        }
    }

    /// The same with another learning rate.
    #[must_use]
    pub fn with_learning_rate(mut self, rate: LearningRate) -> OptimizerSpec {
        match &mut self {
            OptimizerSpec::Sgd { learning_rate, .. }
            | OptimizerSpec::Momentum { learning_rate, .. }
            | OptimizerSpec::Adagrad { learning_rate, .. }
            | OptimizerSpec::AdamW { learning_rate, .. } => *learning_rate = rate,
        }
        self
    }

    /// The learning rate in the text of another optimizer, if that differs from this one in nothing
    /// but how high it is: the same schedule, and all other settings equal.
    pub fn rate_in<'a>(&self, text: &'a str) -> Option<&'a str> {
        let (own, rate) = (self.to_string(), self.learning_rate().to_string());
        let before = format!("{}, learning rate ", self.name());
        let after = &own[before.len() + rate.len()..];
        let theirs = text.strip_prefix(&before)?.strip_suffix(after)?;
        // What follows the height of a schedule; nothing if there is none.
        let schedule = |rate: &str| rate.find(", warm-up").map(|at| rate[at..].to_owned());
        (schedule(theirs) == schedule(&rate)).then_some(theirs)
    }

    /// The same with another weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, decay: f64) -> OptimizerSpec {
        match &mut self {
            OptimizerSpec::Sgd { weight_decay, .. }
            | OptimizerSpec::Momentum { weight_decay, .. }
            | OptimizerSpec::Adagrad { weight_decay, .. }
            | OptimizerSpec::AdamW { weight_decay, .. } => *weight_decay = decay,
        }
        self
    }

    /// The optimizer, for parameters of these lengths.
    ///
    /// # Errors
    ///
    /// If a setting makes no sense.
    pub fn build(&self, lengths: &[usize]) -> Result<Box<dyn Optimizer>, BadOptimizer> {
        if let Some(flaw) = self.flaw() {
            return Err(BadOptimizer { spec: *self, flaw });
        }
        Ok(match *self {
            OptimizerSpec::Sgd { learning_rate, weight_decay } => {
                Box::new(Sgd::new(learning_rate, weight_decay, lengths))
            }
            OptimizerSpec::Momentum { learning_rate, momentum, nesterov, weight_decay } => {
                Box::new(Momentum::new(learning_rate, momentum, nesterov, weight_decay, lengths))
            }
            OptimizerSpec::Adagrad { learning_rate, epsilon, weight_decay } => {
                Box::new(Adagrad::new(learning_rate, epsilon, weight_decay, lengths))
            }
            OptimizerSpec::AdamW { learning_rate, betas, epsilon, weight_decay } => {
                Box::new(AdamW::new(learning_rate, betas, epsilon, weight_decay, lengths))
            }
        })
    }

    fn flaw(&self) -> Option<&'static str> {
        let fades = |factor: f64| (0.0..1.0).contains(&factor);
        let epsilon_flaw = |epsilon: f64| {
            let works = (epsilon as f32).is_normal() && epsilon > 0.0;
            (!works).then_some("epsilon must be a number above 1e-37")
        };
        let (own, weight_decay) = match *self {
            OptimizerSpec::Sgd { weight_decay, .. } => (None, weight_decay),
            OptimizerSpec::Momentum { momentum, weight_decay, .. } => {
                let flaw = "the momentum must be at least 0 and below 1";
                ((!fades(momentum)).then_some(flaw), weight_decay)
            }
            OptimizerSpec::Adagrad { epsilon, weight_decay, .. } => {
                (epsilon_flaw(epsilon), weight_decay)
            }
            OptimizerSpec::AdamW { betas, epsilon, weight_decay, .. } => {
                let flaw = "both betas must be at least 0 and below 1";
                let flaw = (!fades(betas.0) || !fades(betas.1)).then_some(flaw);
                (flaw.or(epsilon_flaw(epsilon)), weight_decay)
            }
        };
        let decay = (!weight_decay.is_finite() || weight_decay < 0.0)
            .then_some("the weight decay must be a number of at least 0");
        self.learning_rate().flaw().or(own).or(decay)
    }
}

/// The optimizer of that name with the settings that most people start from.
impl FromStr for OptimizerSpec {
    type Err = UnknownOptimizer;

    fn from_str(name: &str) -> Result<OptimizerSpec, UnknownOptimizer> {
        match name {
            Sgd::NAME => Ok(OptimizerSpec::Sgd {
                learning_rate: LearningRate::Constant(0.1),
                weight_decay: 0.0,
            }),
            Momentum::NAME => Ok(OptimizerSpec::Momentum {
                learning_rate: LearningRate::Constant(0.05),
                momentum: 0.9,
                nesterov: false,
                weight_decay: 0.0,
            }),
            Adagrad::NAME => Ok(OptimizerSpec::Adagrad {
                learning_rate: LearningRate::Constant(0.01),
                epsilon: 1e-10,
                weight_decay: 0.0,
            }),
            AdamW::NAME => Ok(OptimizerSpec::AdamW {
                learning_rate: LearningRate::Constant(0.001),
                betas: (0.9, 0.999),
                epsilon: 1e-8,
                weight_decay: 0.01,
            }),
            _ => Err(UnknownOptimizer { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for OptimizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, learning rate {}", self.name(), self.learning_rate())?;
        let decay = match self {
            OptimizerSpec::Sgd { weight_decay, .. } => weight_decay,
            OptimizerSpec::Momentum { momentum, nesterov, weight_decay, .. } => {
                let nesterov = if *nesterov { " (Nesterov)" } else { "" };
                write!(f, ", momentum {momentum}{nesterov}")?;
                weight_decay
            }
            OptimizerSpec::Adagrad { epsilon, weight_decay, .. } => {
                write!(f, ", epsilon {epsilon:e}")?;
                weight_decay
            }
            OptimizerSpec::AdamW { betas: (beta1, beta2), epsilon, weight_decay, .. } => {
                write!(f, ", betas {beta1} and {beta2}, epsilon {epsilon:e}")?;
                weight_decay
            }
        };
        write!(f, ", weight decay {decay}")
    }
}

/// There is no optimizer of that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown optimizer {name:?}; use one of {}", OptimizerSpec::NAMES.join(", "))]
pub struct UnknownOptimizer {
    /// The name.
    pub name: String,
}

/// An optimizer's settings make no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{flaw} ({spec})")]
pub struct BadOptimizer {
    /// The settings.
    pub spec: OptimizerSpec,
    /// What is wrong with them.
    pub flaw: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_themselves() {
        for name in OptimizerSpec::NAMES {
            let spec: OptimizerSpec = name.parse().unwrap();
            assert_eq!(spec.name(), name);
            let optimizer = spec.build(&[3]).unwrap();
            assert_eq!(optimizer.name(), name);
            assert_eq!(optimizer.state(0).len(), optimizer.state_names().len());
        }
        let error = "adam".parse::<OptimizerSpec>().unwrap_err().to_string();
        assert_eq!(error, "unknown optimizer \"adam\"; use one of sgd, momentum, adagrad, adamw");
    }

    #[test]
    fn texts_contain_every_setting() {
        let spec: OptimizerSpec = "sgd".parse().unwrap();
        assert_eq!(spec.to_string(), "sgd, learning rate 0.1, weight decay 0");
        let spec = OptimizerSpec::Momentum {
            learning_rate: LearningRate::Constant(0.5),
            momentum: 0.75,
            nesterov: true,
            weight_decay: 0.25,
        };
        let text = "momentum, learning rate 0.5, momentum 0.75 (Nesterov), weight decay 0.25";
        assert_eq!(spec.to_string(), text);
        let spec: OptimizerSpec = "adagrad".parse().unwrap();
        let text = "adagrad, learning rate 0.01, epsilon 1e-10, weight decay 0";
        assert_eq!(spec.to_string(), text);
        let rate = LearningRate::Cosine { peak: 0.5, floor: 0.125, warm_up: 3, steps: 20 };
        let spec = "adamw".parse::<OptimizerSpec>().unwrap().with_learning_rate(rate);
        assert_eq!(
            spec.with_weight_decay(0.5).to_string(),
            "adamw, learning rate cosine(0.5 to 0.125, warm-up 3 of 20 steps), \
             betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.5"
        );
    }

    #[test]
    fn the_rate_of_another_is_known_if_nothing_else_differs() {
        let sgd: OptimizerSpec = "sgd".parse().unwrap();
        let adamw: OptimizerSpec = "adamw".parse().unwrap();
        let rate = LearningRate::Constant;
        let cosine =
            |peak, steps| LearningRate::Cosine { peak, floor: peak / 10.0, warm_up: 1, steps };
        let other = |of: OptimizerSpec, rate| of.with_learning_rate(rate).to_string();
        assert_eq!(sgd.rate_in(&other(sgd, rate(0.5))), Some("0.5"));
        assert_eq!(adamw.rate_in(&other(adamw, rate(0.5))), Some("0.5"));
        assert_eq!(sgd.rate_in(&other(adamw, rate(0.1))), None);
        assert_eq!(sgd.rate_in(&sgd.with_weight_decay(0.5).to_string()), None);
        assert_eq!(sgd.rate_in(&other(sgd, cosine(0.5, 9))), None);
        let planned = adamw.with_learning_rate(cosine(1.0, 9));
        assert_eq!(planned.rate_in(&other(adamw, rate(0.5))), None);
        assert_eq!(planned.rate_in(&other(adamw, cosine(0.5, 8))), None);
        let theirs = other(adamw, cosine(0.5, 9));
        assert_eq!(planned.rate_in(&theirs), Some("cosine(0.5 to 0.05, warm-up 1 of 9 steps)"));
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        let sgd: OptimizerSpec = "sgd".parse().unwrap();
        let rate = LearningRate::Constant;
        let cosine = |peak, floor, warm_up, steps| {
            sgd.with_learning_rate(LearningRate::Cosine { peak, floor, warm_up, steps })
        };
        let momentum = |momentum| OptimizerSpec::Momentum {
            learning_rate: rate(0.1),
            momentum,
            nesterov: false,
            weight_decay: 0.0,
        };
        let adagrad = |epsilon| OptimizerSpec::Adagrad {
            learning_rate: rate(0.1),
            epsilon,
            weight_decay: 0.0,
        };
        let adamw = |betas, epsilon| OptimizerSpec::AdamW {
            learning_rate: rate(0.1),
            betas,
            epsilon,
            weight_decay: 0.0,
        };
        let bad = [
            (sgd.with_learning_rate(rate(-0.1)), "learning rate"),
            (sgd.with_learning_rate(rate(f64::NAN)), "learning rate"),
            (cosine(0.1, 0.2, 0, 10), "floor"),
            (cosine(f64::INFINITY, 0.2, 0, 10), "floor"),
            (cosine(0.1, f64::NAN, 0, 10), "floor"),
            (cosine(0.1, 0.0, 11, 10), "warm-up"),
            (sgd.with_weight_decay(-1.0), "weight decay"),
            (sgd.with_weight_decay(f64::NAN), "weight decay"),
            (momentum(1.0), "momentum must"),
            (momentum(f64::NAN), "momentum must"),
            (adagrad(0.0), "epsilon"),
            (adagrad(f64::NAN), "epsilon"),
            (adagrad(1e-10).with_weight_decay(-1.0), "weight decay"),
            (adamw((0.9, 1.0), 1e-8), "betas"),
            (adamw((-0.1, 0.9), 1e-8), "betas"),
            (adamw((0.9, 0.99), 0.0), "epsilon"),
            (adamw((0.9, 0.99), 1e-60), "epsilon"),
            (adamw((0.9, 0.99), -1e-8), "epsilon"),
        ];
        for (spec, about) in bad {
            let error = spec.build(&[1]).err().expect("refused").to_string();
            assert!(error.contains(about), "{error}");
        }
        let adamw = adamw((0.0, 0.0), 1e-8);
        for good in [cosine(0.1, 0.1, 10, 10), momentum(0.0), adagrad(1e-10), adamw] {
            assert!(good.build(&[1]).is_ok(), "{good}");
        }
    }
}
