//! A straight answer: is synchronization the bottleneck, and what would help?
//!
//! A step can lose time to three things besides computing: exposed communication, waiting for a
//! straggler, and the rest. The one that takes the largest share of a typical step is the bottleneck
//! if that share is worth acting on; if none is, computing itself is. The verdict says so in words,
//! always with the figures it rests on, and gives advice only where following it could matter. Of a run
//! whose loss is no longer a number it says [that](diverged) instead.

pub mod diverged;

use serde::Serialize;

use crate::breakdown::{RunBreakdown, Straggler};
use crate::record::{RunInfo, Scaling};
use crate::units::{count, duration, percent};

/// Something other than computing is the bottleneck if it takes at least this share of a step.
/// Removing it speeds the run up by a quarter; for less, people would change their setup on the word
/// of a noisy machine. A larger share would call a fifth of the hardware's time unimportant.
pub const BOTTLENECK_SHARE: f64 = 0.20;

/// Below this share a loss is not worth a word of advice: the run would be 5 % faster at best.
pub const NOTABLE_SHARE: f64 = 0.05;

/// Overlap is doing its job when it hides this share of what can hide. The first bucket is only ready
/// some way into the backward pass, so all of it never is.
pub const GOOD_OVERLAP: f64 = 0.80;

/// Coding that takes this share of the communication is worth a word: a codec is there to save time.
/// With less, another codec would gain little; with more, one that loses would go unnoticed.
pub const MUCH_CODING: f64 = 0.50;

/// With fewer measured steps, one hiccup decides the figures.
pub const ENOUGH_STEPS: usize = 5;

/// A straggler computes slower than the others if it takes this many times as long. Nearer to 1, its
/// lateness has another cause.
pub const SLOWER: f64 = 1.10;

/// Scaling that falls short of what waiting explains by more than this has another cause: workers
/// that share cores, caches or memory.
pub const UNEXPLAINED_SHARE: f64 = 0.10;

/// What holds the run up most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Bottleneck {
    /// There are too few steps to tell; or the run is lost, and it does not matter.
    Unknown,
    /// Nothing but the computation.
    Compute,
    /// Exposed communication.
    Synchronization,
    /// Ranks wait for the last to finish computing. [`RunBreakdown::straggler`] says if it is always
    /// the same.
    Straggler,
    /// Data, bookkeeping or optimizer.
    Rest,
}

/// The answer, in sentences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// What holds the run up most.
    pub bottleneck: Bottleneck,
    /// The answer in one sentence.
    pub headline: String,
    /// The figures it rests on.
    pub findings: Vec<String>,
    /// What would help; empty if nothing is worth doing.
    pub advice: Vec<String>,
}

impl Verdict {
    /// Judges a run.
    pub fn of(run: &RunBreakdown, info: &RunInfo, scaling: Option<&Scaling>) -> Verdict {
        let case = Case { run, info, scaling };
        if let Some(step) = run.diverged {
            return Verdict {
                bottleneck: Bottleneck::Unknown,
                headline: diverged::headline(step),
                findings: case.findings(),
                advice: diverged::advice(info),
            };
        }
        let bottleneck = case.bottleneck();
        Verdict {
            bottleneck,
            headline: case.headline(bottleneck),
            findings: case.findings(),
            advice: if bottleneck == Bottleneck::Unknown { Vec::new() } else { case.advice() },
        }
    }
}

/// What is judged.
struct Case<'a> {
    run: &'a RunBreakdown,
    info: &'a RunInfo,
    scaling: Option<&'a Scaling>,
}

impl Case<'_> {
    fn bottleneck(&self) -> Bottleneck {
        if self.run.measured() < ENOUGH_STEPS || self.run.parts.total() <= 0.0 {
            return Bottleneck::Unknown;
        }
        [
            (Bottleneck::Synchronization, self.exposed()),
            (Bottleneck::Straggler, self.waiting()),
            (Bottleneck::Rest, self.rest()),
        ]
        .into_iter()
        .filter(|(_, share)| *share >= BOTTLENECK_SHARE)
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map_or(Bottleneck::Compute, |(bottleneck, _)| bottleneck)
    }

    fn headline(&self, bottleneck: Bottleneck) -> String {
        let exposed = percent(self.exposed());
        let straggler = self.run.straggler.as_ref();
        let answer = match bottleneck {
            Bottleneck::Unknown => {
                return format!(
                    "Too few steps to judge: {} after warm-up, at least {ENOUGH_STEPS} are needed.",
                    self.run.measured()
                );
            }
            Bottleneck::Straggler => match straggler {
                Some(straggler) => {
                    return format!(
                        "{} is the bottleneck, not synchronization: the others spend {} of each \
                         step waiting for it to finish computing.",
                        capitalized(&self.name(straggler.rank)),
                        percent(self.run.parts.share(straggler.cost)),
                    );
                }
                None => format!(
                    "Uneven ranks are the bottleneck, not synchronization: {} of a step is spent \
                     waiting for whichever rank is last.",
                    percent(self.waiting())
                ),
            },
            Bottleneck::Compute if self.info.workers <= 1 => {
                "Synchronization is not the bottleneck: there is one worker and no other to \
                 synchronize with."
                    .into()
            }
            Bottleneck::Compute => format!(
                "Synchronization is not the bottleneck: steps spend {exposed} of their time \
                 waiting for it."
            ),
            Bottleneck::Synchronization => format!(
                "Synchronization is the bottleneck: steps spend {exposed} of their time waiting \
                 for it."
            ),
            Bottleneck::Rest => format!(
                "Synchronization is not the bottleneck ({exposed}): {} of a step goes to data, \
                 bookkeeping and the optimizer.",
                percent(self.rest())
            ),
        };
        // A straggler is worth naming even where it is not the largest loss.
        match straggler {
            Some(straggler) => format!(
                "{answer} {} holds up the others: they wait {} of each step for it.",
                capitalized(&self.name(straggler.rank)),
                percent(self.run.parts.share(straggler.cost)),
            ),
            None => answer,
        }
    }

    fn findings(&self) -> Vec<String> {
        if self.run.measured() == 0 {
            return Vec::new();
        }
        let mut findings = vec![self.where_time_goes()];
        findings.extend(self.run.straggler.as_ref().map(|straggler| self.describe(straggler)));
        findings.extend(self.communication());
        findings.extend(self.coding());
        findings.extend(self.agreements());
        findings.extend(self.scaling());
        findings
    }

    fn where_time_goes(&self) -> String {
        let parts = &self.run.parts;
        let part = |seconds| format!("{} ({})", duration(seconds), percent(parts.share(seconds)));
        format!(
            "A typical step takes {} ({} measured): compute {}, exposed communication {}, waiting for \
             a straggler {}, rest {}.",
            duration(parts.total()),
            count(self.run.measured() as f64),
            part(parts.compute),
            part(parts.exposed),
            part(parts.straggler),
            part(parts.rest),
        )
    }

    fn describe(&self, straggler: &Straggler) -> String {
        let cause = if straggler.slowdown >= SLOWER {
            format!("it computes {:.1} times as long as the others", straggler.slowdown)
        } else {
            "it computes no slower than the others, so it starts late or waits for its data".into()
        };
        format!(
            "{} was the last to finish computing in {} of the {}; each of the others waits {} a step \
             for it; {cause}.",
            capitalized(&self.name(straggler.rank)),
            percent(straggler.last_share),
            if self.run.has_local_steps() { "steps in which they agreed" } else { "steps" },
            duration(straggler.cost),
        )
    }

    fn communication(&self) -> Option<String> {
        let run = self.run;
        let hidden = run.hidden_of_hideable()?;
        Some(format!(
            "Communication takes {} a step, the backward pass {}; {} of the {} that could hide \
             behind it did ({}).",
            duration(run.comm),
            duration(run.backward),
            duration(run.hidden.min(run.hideable)),
            duration(run.hideable),
            percent(hidden),
        ))
    }

    fn coding(&self) -> Option<String> {
        let share = self.run.coding_share()?;
        Some(format!(
            "Encoding and decoding take {} a step, {} of the communication.",
            duration(self.run.coding),
            percent(share),
        ))
    }

    fn agreements(&self) -> Option<String> {
        let RunBreakdown { agreed, recorded, .. } = self.run;
        self.run.has_local_steps().then(|| {
            format!(
                "Workers agreed in {agreed} of {recorded} steps; what that takes is spread over all \
                 of them here."
            )
        })
    }

    fn scaling(&self) -> Option<String> {
        let efficiency = self.efficiency()?;
        let workers = self.info.workers;
        let mut text = format!(
            "{workers} workers do {:.2} times the work of one ({} against {} samples/s): {} of ideal \
             scaling.",
            efficiency * workers as f64,
            count(self.run.samples_per_s),
            count(self.scaling?.one_worker_samples_per_s),
            percent(efficiency),
        );
        if self.slowed_by_each_other() {
            text += &format!(
                " Waiting explains {} of the loss; the rest is workers computing slower beside each \
                 other than alone.",
                percent((self.exposed() + self.waiting()) / (1.0 - efficiency)),
            );
        }
        Some(text)
    }

    /// The larger loss first.
    fn advice(&self) -> Vec<String> {
        let mut advice = self.advice_on_communication();
        let first = if self.waiting() > self.exposed() { 0 } else { advice.len() };
        advice.splice(first..first, self.advice_on_waiting());
        if self.rest() >= BOTTLENECK_SHARE {
            advice.push("Look at loading data, the optimizer and checkpoints.".into());
        }
        if self.slowed_by_each_other() {
            advice.push(
                "Give every worker its own cores: fewer workers per host may do as much.".into(),
            );
        }
        advice
    }

    fn advice_on_waiting(&self) -> Option<String> {
        match &self.run.straggler {
            Some(straggler) if straggler.slowdown >= SLOWER => Some(format!(
                "Look at {}: a slower or throttled device, or other work on its host.",
                self.name(straggler.rank)
            )),
            Some(straggler) => Some(format!(
                "Look at what {} does before it computes: its data, its disk, other work on its host.",
                self.name(straggler.rank)
            )),
            None if self.waiting() >= BOTTLENECK_SHARE => Some(
                "No single rank is to blame: look for other work on the hosts, more ranks than \
                 cores, or shards that take unequally long."
                    .into(),
            ),
            None => None,
        }
    }

    fn advice_on_communication(&self) -> Vec<String> {
        if self.exposed() < NOTABLE_SHARE || self.info.workers <= 1 {
            return Vec::new();
        }
        let mut advice = Vec::new();
        let run = self.run;
        let step = run.parts.total();
        let without = step - run.parts.exposed;
        if self.info.transport == "tcp" && !self.info.spans_hosts() {
            advice.push(
                "All ranks are on one host: let them use shared memory instead of tcp \
                 (--transport shm)."
                    .into(),
            );
        }
        if run.coding_share().is_some_and(|share| share >= MUCH_CODING) {
            advice.push(format!(
                "Encoding and decoding are {} of the communication: try a faster codec, or none.",
                percent(run.coding_share().unwrap_or(0.0))
            ));
        }
        let missed = run.hideable - run.hidden;
        if run.has_local_steps() {
            // What is exchanged now and then has little to hide behind, whatever the buckets.
            advice.push("Agree less often: more local steps in between.".into());
        } else if self.overlap_is_off() {
            advice.push(format!(
                "Switch overlap on: up to {} a step can hide behind the backward pass.",
                duration(missed.max(0.0))
            ));
        } else if run.buckets == 1 {
            // The only bucket is ready when backward ends. Nothing can hide, whatever its size.
        } else if run.hidden_of_hideable().is_some_and(|hidden| hidden < GOOD_OVERLAP) {
            advice.push(format!(
                "Overlap leaves {} a step exposed that could hide: try another bucket size.",
                duration(missed)
            ));
        }
        if run.comm > run.backward && !run.has_local_steps() {
            let less = match (self.info.codec(), self.info.framework()) {
                (None, None) => "send less (--codec auto), ",
                (None, Some(_)) => "send less (unisono.torch.compress), ",
                (Some(_), _) => "",
            };
            advice.push(format!(
                "Communication takes longer than the backward pass, so {} stay exposed at best: \
                 compute more per step (larger batch, more micro-batches, larger model), {less}or \
                 use a faster network.",
                duration(run.comm - run.backward)
            ));
        }
        if without > 0.0 {
            advice.push(format!(
                "An infinitely fast network would make this run {:.2} times as fast.",
                step / without
            ));
        }
        advice
    }

    fn overlap_is_off(&self) -> bool {
        self.info.settings.get("overlap").and_then(toml::Value::as_bool) == Some(false)
    }

    fn efficiency(&self) -> Option<f64> {
        self.scaling?.efficiency(self.run.samples_per_s, self.info.workers)
    }

    fn slowed_by_each_other(&self) -> bool {
        self.efficiency().is_some_and(|efficiency| {
            1.0 - efficiency - self.exposed() - self.waiting() > UNEXPLAINED_SHARE
        })
    }

    fn exposed(&self) -> f64 {
        self.run.parts.share(self.run.parts.exposed)
    }

    /// The share of a step that a rank waits for the last. Where that is always the same one, its own
    /// steps have no such wait and do not count.
    fn waiting(&self) -> f64 {
        let seconds = self.run.straggler.as_ref().map_or(0.0, |straggler| straggler.cost);
        self.run.parts.share(seconds.max(self.run.parts.straggler))
    }

    fn rest(&self) -> f64 {
        self.run.parts.share(self.run.parts.rest)
    }

    fn name(&self, rank: usize) -> String {
        match self.info.host(rank) {
            Some(host) => format!("rank {rank} on {host}"),
            None => format!("rank {rank}"),
        }
    }
}

/// For the start of a sentence.
fn capitalized(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

#[cfg(test)]
mod tests;
