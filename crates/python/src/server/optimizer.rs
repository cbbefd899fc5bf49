//! The optimizer of the servers, as a text: `NAME[:KEY=VALUE,…]`, such as `momentum:lr=0.1`.

use unisono_optimizer::{LearningRate, OptimizerSpec};

/// Adam without weight decay is AdamW without.
const ADAM: &str = "adam";

/// Reads an optimizer, or says what is wrong with it.
pub fn parse(text: &str) -> Result<OptimizerSpec, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let mut spec: OptimizerSpec = match name {
        ADAM => OptimizerSpec::with_weight_decay(parse("adamw")?, 0.0),
        name => name.parse().map_err(|error| format!("{error}"))?,
    };
    let mut keys = OptimizerKeys::read(text, rest)?;
    if name != ADAM
        && let Some(decay) = keys.number("weight_decay")?
    {
        spec = spec.with_weight_decay(decay);
    }
    spec = spec.with_learning_rate(keys.learning_rate(spec.learning_rate().peak())?);
    match &mut spec {
        OptimizerSpec::Momentum { momentum, nesterov, .. } => {
            keys.set("momentum", momentum)?;
            *nesterov = keys.flag("nesterov")?;
        }
        OptimizerSpec::Adagrad { epsilon, .. } => keys.set("eps", epsilon)?,
        OptimizerSpec::AdamW { betas, epsilon, .. } => {
            keys.set("beta1", &mut betas.0)?;
            keys.set("beta2", &mut betas.1)?;
            keys.set("eps", epsilon)?;
        }
        _ => {}
    }
    keys.expect_none_left(name)?;
    spec.build(&[]).map_err(|error| error.to_string())?;
    Ok(spec)
}

/// The settings that were not taken yet.
struct OptimizerKeys<'a> {
    text: &'a str,
    left: Vec<(&'a str, &'a str)>,
    /// The keys that were asked for.
    known: Vec<&'static str>,
}

impl<'a> OptimizerKeys<'a> {
    fn read(text: &'a str, rest: &'a str) -> Result<OptimizerKeys<'a>, String> {
        let mut left: Vec<(&str, &str)> = Vec::new();
        for pair in rest.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if left.iter().any(|(before, _)| *before == key) {
                return Err(format!("{text:?} says {key:?} twice"));
            }
            left.push((key, value));
        }
        Ok(OptimizerKeys { text, left, known: Vec::new() })
    }

    fn take(&mut self, key: &'static str) -> Option<&'a str> {
        self.known.push(key);
        let found = self.left.iter().position(|(left, _)| *left == key)?;
        Some(self.left.remove(found).1)
    }

    fn number<T: std::str::FromStr>(&mut self, key: &'static str) -> Result<Option<T>, String> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let bad = |_| format!("{:?}: write {key}= and a number", self.text);
        value.parse().map(Some).map_err(bad)
    }

    fn set(&mut self, key: &'static str, setting: &mut f64) -> Result<(), String> {
        if let Some(value) = self.number(key)? {
            *setting = value;
        }
        Ok(())
    }

    fn flag(&mut self, key: &'static str) -> Result<bool, String> {
        match self.take(key) {
            None => Ok(false),
            Some("") => Ok(true),
            Some(_) => {
                Err(format!("{:?}: write {key} without a value, or leave it out", self.text))
            }
        }
    }

    /// `lr=RATE`, or `lr=RATE,cosine=STEPS[,floor=RATE][,warmup=STEPS]`.
    fn learning_rate(&mut self, usual: f64) -> Result<LearningRate, String> {
        let peak = self.number("lr")?.unwrap_or(usual);
        let steps = self.number("cosine")?;
        let (floor, warm_up) = (self.number("floor")?, self.number("warmup")?);
        match steps {
            Some(steps) => Ok(LearningRate::Cosine {
                peak,
                floor: floor.unwrap_or(0.0),
                warm_up: warm_up.unwrap_or(0),
                steps,
            }),
            None if floor.is_none() && warm_up.is_none() => Ok(LearningRate::Constant(peak)),
            None => Err(format!("{:?}: floor and warmup belong to cosine=STEPS", self.text)),
        }
    }

    fn expect_none_left(&self, name: &str) -> Result<(), String> {
        match self.left.first() {
            None => Ok(()),
            Some((key, _)) => {
                let known = self.known.join(", ");
                Err(format!("{:?}: {name} takes no {key:?}; it takes {known}", self.text))
            }
        }
    }
}
