//! The description of a strategy, as on the command line.

use std::fmt;
use std::str::FromStr;

use super::local::Schedule;
use unisono_optimizer::{LearningRate, OptimizerSpec};

/// When the workers of a run agree, and on what.
///
/// Its text ([`fmt::Display`]) contains every setting exactly, so two runs use the same strategy if
/// and only if the texts are equal; and it parses to the same strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum StrategySpec {
    /// `all-reduce`: on the gradient of every step.
    #[default]
    AllReduce,
    /// `local:H`, `local:H..MAX`: on the mean of their weights, every so many steps.
    Local(Local),
    /// `diloco:H[,streams=P][,delay=T][,rate=R][,momentum=M]`: on what an outer optimizer makes of
    /// the mean, every so many steps.
    Diloco(Diloco),
}

/// Periodic averaging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    period: u32,
    longest: u32,
}

/// Periodic averaging with an outer optimizer: gradient descent with Nesterov momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Diloco {
    period: u32,
    streams: u32,
    delay: u32,
    rate: f64,
    momentum: f64,
}

/// What local steps are made of, whatever their name: when the workers synchronize, and what becomes
/// of the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalStepsSpec {
    pub(super) schedule: Schedule,
    pub(super) outer: OptimizerSpec,
}

impl StrategySpec {
    /// The local steps of a strategy that has them; `None` if every step is synchronized.
    pub fn local_steps(&self) -> Option<LocalStepsSpec> {
        match self {
            StrategySpec::AllReduce => None,
            StrategySpec::Local(local) => Some(local.local_steps()),
            StrategySpec::Diloco(diloco) => Some(diloco.local_steps()),
        }
    }
}

impl Local {
    /// The outer optimizer takes the mean as it is.
    pub fn local_steps(&self) -> LocalStepsSpec {
        let schedule = Schedule::new(self.period, self.longest, 1, 0);
        let learning_rate = LearningRate::Constant(1.0);
        LocalStepsSpec { schedule, outer: OptimizerSpec::Sgd { learning_rate, weight_decay: 0.0 } }
    }

    /// Steps of the first period.
    pub fn period(&self) -> u32 {
        self.period
    }

    /// Steps of the longest period. Every synchronization makes it longer by one until then.
    pub fn longest(&self) -> u32 {
        self.longest
    }

    fn parse(text: &str) -> Result<Local, &'static str> {
        let (period, longest) = text.split_once("..").unwrap_or((text, text));
        let (period, longest) = (steps(period)?, steps(longest)?);
        if longest < period {
            return Err("MAX must not be below H");
        }
        Ok(Local { period, longest })
    }
}

impl Diloco {
    /// The outer rate, if not given.
    pub const RATE: f64 = 0.7;
    /// The outer momentum, if not given.
    pub const MOMENTUM: f64 = 0.9;

    /// The outer optimizer is gradient descent with Nesterov momentum.
    pub fn local_steps(&self) -> LocalStepsSpec {
        let outer = OptimizerSpec::Momentum {
            learning_rate: LearningRate::Constant(self.rate),
            momentum: self.momentum,
            nesterov: true,
            weight_decay: 0.0,
        };
        LocalStepsSpec {
            schedule: Schedule::new(self.period, self.period, self.streams, self.delay),
            outer,
        }
    }

    /// Steps from one synchronization of a parameter to its next.
    pub fn period(&self) -> u32 {
        self.period
    }

    /// Groups of parameters that synchronize at different steps.
    pub fn streams(&self) -> u32 {
        self.streams
    }

    /// Steps that a synchronization has time for, while the workers go on.
    pub fn delay(&self) -> u32 {
        self.delay
    }

    /// The outer learning rate.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// The outer momentum.
    pub fn momentum(&self) -> f64 {
        self.momentum
    }

    fn parse(text: &str) -> Result<Diloco, &'static str> {
        let mut parts = text.split(',');
        let period = steps(parts.next().unwrap_or_default())?;
        let (mut streams, mut delay, mut rate, mut momentum) = (None, None, None, None);
        for part in parts {
            let (name, value) = part.split_once('=').ok_or("a setting is written NAME=VALUE")?;
            match name {
                "streams" => set(&mut streams, whole(value))?,
                "delay" => set(&mut delay, whole(value))?,
                "rate" => set(&mut rate, value.parse().ok())?,
                "momentum" => set(&mut momentum, value.parse().ok())?,
                _ => return Err("its settings are streams, delay, rate and momentum"),
            }
        }
        let streams = streams.unwrap_or(1);
        let delay = delay.unwrap_or(u32::from(streams > 1));
        let (rate, momentum) = (rate.unwrap_or(Self::RATE), momentum.unwrap_or(Self::MOMENTUM));
        if !(1..=period).contains(&streams) {
            return Err("streams must be from 1 to H, for each has a step of its own");
        }
        if delay >= period {
            return Err("delay must be below H, to be over before the next synchronization");
        }
        if !(rate > 0.0 && (rate as f32).is_finite()) {
            return Err("rate must be a number above 0");
        }
        if !(0.0..1.0).contains(&momentum) {
            return Err("momentum must be at least 0 and below 1");
        }
        Ok(Diloco { period, streams, delay, rate, momentum })
    }
}

impl FromStr for StrategySpec {
    type Err = BadStrategy;

    fn from_str(text: &str) -> Result<StrategySpec, BadStrategy> {
        let parsed = match text.split_once(':') {
            None if text == ALL_REDUCE => Ok(StrategySpec::AllReduce),
            Some((LOCAL, rest)) => Local::parse(rest).map(StrategySpec::Local),
            Some((DILOCO, rest)) => Diloco::parse(rest).map(StrategySpec::Diloco),
            None if text == LOCAL || text == DILOCO => Err("the period H is missing"),
            _ => Err("there is none of that name"),
        };
        parsed.map_err(|flaw| BadStrategy { text: text.to_owned(), flaw })
    }
}

impl fmt::Display for StrategySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StrategySpec::AllReduce => f.write_str(ALL_REDUCE),
            StrategySpec::Local(Local { period, longest }) if period == longest => {
                write!(f, "{LOCAL}:{period}")
            }
            StrategySpec::Local(Local { period, longest }) => {
                write!(f, "{LOCAL}:{period}..{longest}")
            }
            StrategySpec::Diloco(Diloco { period, streams, delay, rate, momentum }) => {
                write!(f, "{DILOCO}:{period},streams={streams},delay={delay}")?;
                write!(f, ",rate={rate},momentum={momentum}")
            }
        }
    }
}

/// A text that describes no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no strategy: {flaw}; write all-reduce, local:H, local:H..MAX or \
     diloco:H[,streams=P][,delay=T][,rate=R][,momentum=M], with H in steps, such as \
     diloco:20,streams=4"
)]
pub struct BadStrategy {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub flaw: &'static str,
}

const ALL_REDUCE: &str = "all-reduce";
const LOCAL: &str = "local";
const DILOCO: &str = "diloco";

/// A length of a period.
fn steps(text: &str) -> Result<u32, &'static str> {
    whole(text).filter(|steps| *steps > 0).ok_or("a period is a whole number of steps, from 1")
}

fn whole(text: &str) -> Option<u32> {
    text.parse().ok()
}

/// Takes a setting's value over, once.
fn set<T>(setting: &mut Option<T>, value: Option<T>) -> Result<(), &'static str> {
    let value = value.ok_or("the value of a setting is not a number of its kind")?;
    match setting.replace(value) {
        None => Ok(()),
        Some(_) => Err("a setting is given twice"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> StrategySpec {
        text.parse().unwrap()
    }

    #[test]
    fn texts_contain_every_setting() {
        for (text, whole) in [
            ("all-reduce", "all-reduce"),
            ("local:1", "local:1"),
            ("local:8..8", "local:8"),
            ("local:8..32", "local:8..32"),
            ("diloco:20", "diloco:20,streams=1,delay=0,rate=0.7,momentum=0.9"),
            ("diloco:20,streams=4", "diloco:20,streams=4,delay=1,rate=0.7,momentum=0.9"),
            (
                "diloco:30,momentum=0,rate=1e-3,delay=29",
                "diloco:30,streams=1,delay=29,rate=0.001,momentum=0",
            ),
        ] {
            let spec = parse(text);
            assert_eq!(spec.to_string(), whole);
            assert_eq!(parse(whole), spec);
        }
        assert_eq!(StrategySpec::default(), parse("all-reduce"));
    }

    #[test]
    fn settings_reach_the_plan() {
        assert_eq!(parse("all-reduce").local_steps(), None);
        let plan = parse("local:3..5").local_steps().unwrap();
        assert_eq!(plan.schedule, Schedule::new(3, 5, 1, 0));
        let plan =
            parse("diloco:9,streams=3,delay=2,rate=0.5,momentum=0.25").local_steps().unwrap();
        assert_eq!(plan.schedule, Schedule::new(9, 9, 3, 2));
        assert_eq!(
            plan.outer.to_string(),
            "momentum, learning rate 0.5, momentum 0.25 (Nesterov), weight decay 0"
        );
    }

    #[test]
    fn what_is_no_strategy_is_refused_with_what_to_write() {
        for (text, about) in [
            ("", "none of that name"),
            ("ring", "none of that name"),
            ("ring:3", "none of that name"),
            ("all-reduce:3", "none of that name"),
            ("local", "H is missing"),
            ("diloco", "H is missing"),
            ("local:", "a period"),
            ("local:0", "a period"),
            ("local:-1", "a period"),
            ("local:9999999999", "a period"),
            ("local:4,rate=1", "a period"),
            ("local:4..", "a period"),
            ("local:4..3", "MAX"),
            ("diloco:0", "a period"),
            ("diloco:20,", "NAME=VALUE"),
            ("diloco:20,4", "NAME=VALUE"),
            ("diloco:20,speed=4", "its settings"),
            ("diloco:20,streams=x", "of its kind"),
            ("diloco:20,streams=2,streams=2", "twice"),
            ("diloco:20,streams=0", "streams must"),
            ("diloco:20,streams=21", "streams must"),
            ("diloco:20,delay=20", "delay must"),
            ("diloco:20,rate=0", "rate must"),
            ("diloco:20,rate=nan", "rate must"),
            ("diloco:20,rate=inf", "rate must"),
            ("diloco:20,momentum=1", "momentum must"),
            ("diloco:20,momentum=nan", "momentum must"),
        ] {
            let error = text.parse::<StrategySpec>().unwrap_err();
            assert!(error.flaw.contains(about), "{error}");
            assert!(error.to_string().contains("write all-reduce, local:H"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_text_parses_to_what_it_came_from(
            period in 1u32..,
            more in 0u32..,
            streams in 0.0..1.0,
            delay in 0.0..1.0,
            rate in 1e-30..1e30,
            momentum in 0.0..1.0,
        ) {
            let within = |share: f64| (share * f64::from(period)) as u32;
            let local = Local { period, longest: period.saturating_add(more) };
            let (streams, delay) = (within(streams).max(1), within(delay));
            let diloco = Diloco { period, streams, delay, rate, momentum };
            for spec in [StrategySpec::Local(local), StrategySpec::Diloco(diloco)] {
                prop_assert_eq!(spec.to_string().parse(), Ok(spec));
                prop_assert!(spec.local_steps().is_some());
            }
        }

        #[test]
        fn any_text_parses_or_is_refused(text in "(local|diloco):[0-9.,=a-z-]{0,20}") {
            if let Ok(spec) = text.parse::<StrategySpec>() {
                prop_assert_eq!(spec.to_string().parse(), Ok(spec));
                prop_assert!(spec.local_steps().is_some());
            }
        }
    }
}
