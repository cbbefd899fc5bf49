//! The report of a run, for people: in the terminal and as a page.

mod bins;
mod html;
mod relaxed;
mod terminal;
mod text;
mod workers;

use serde::Serialize;

use crate::advice::{Advice, Measured, Prediction};
use crate::breakdown::{ByCodec, RunBreakdown, Traffic};
use crate::membership::Timeline;
use crate::record::{RunInfo, StepRecord, Summary};
use crate::units::{bytes, count, duration, percent, times_less};
use crate::verdict::Verdict;
use bins::{Curves, HeatMap};
pub use relaxed::RelaxedReport;

/// Everything a report shows. Its size is bounded, whatever the length of the run and the number of
/// ranks.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was run.
    pub info: RunInfo,
    /// Its typical step.
    pub run: RunBreakdown,
    /// What that means.
    pub verdict: Verdict,
    summary: Option<Summary>,
    choice: Option<Choice>,
    curves: Curves,
    heat_map: HeatMap,
    timeline: Option<Timeline>,
}

impl Report {
    /// Reports on a run; without a summary, on one that did not finish; with advice, on one that
    /// chose its codec.
    pub fn new(
        info: &RunInfo,
        steps: &[StepRecord],
        summary: Option<&Summary>,
        advice: Option<&Advice>,
    ) -> Report {
        let run = RunBreakdown::of(info, steps);
        let scaling = summary.and_then(Summary::scaling);
        Report {
            info: info.clone(),
            verdict: Verdict::of(&run, info, scaling.as_ref()),
            run,
            summary: summary.cloned(),
            choice: advice.map(|advice| Choice::of(advice, steps)),
            curves: Curves::of(steps),
            heat_map: HeatMap::of(steps),
            timeline: None,
        }
    }

    /// Also says what happened to the workers of a run in which they could come and go.
    pub fn with_timeline(mut self, timeline: Option<&Timeline>) -> Report {
        self.timeline = timeline.cloned();
        self.verdict.findings.extend(timeline.map(Timeline::sentence));
        self
    }

    /// As text for a terminal of `width` columns.
    pub fn terminal(&self, width: usize) -> String {
        terminal::render(self, width)
    }

    /// As one page that needs nothing else.
    pub fn html(&self) -> String {
        html::render(self)
    }

    /// The loss of the last step; none where the program did not tell it.
    fn final_loss(&self) -> Option<String> {
        match (self.run.final_loss?, self.run.diverged) {
            (_, Some(step)) => Some(format!("no number since step {step}")),
            (loss, None) => loss.is_finite().then(|| format!("{loss:.4}")),
        }
    }

    /// What a step sends, in comparison with one without codec and local steps: "1.2 MB a step, 30×
    /// less than without a codec".
    fn sent(&self) -> Option<String> {
        let sent = self.run.sent.per_step().filter(|sent| *sent > 0.0)?;
        Some(match self.saving() {
            Some(saving) => format!("{} a step, {saving}", bytes(sent)),
            None => format!("{} a step", bytes(sent)),
        })
    }

    fn saving(&self) -> Option<String> {
        let ratio = self.less(&self.run.sent)?;
        match (self.run.has_local_steps(), self.info.codec()) {
            (true, _) => Some(format!("{ratio} than a full exchange in every step")),
            (false, Some(_)) => Some(format!("{ratio} than without a codec")),
            (false, None) => None,
        }
    }

    /// What was sent while the codec was in force, and before, where there were such steps: "90 kB a
    /// step, 40× less, in 700 steps", and "3.60 MB a step, no less, in 300 steps".
    fn sent_by_codec(&self) -> Option<(String, String)> {
        let ByCodec { plain, encoded } =
            self.run.by_codec.filter(|by| by.plain.steps > 0 && self.run.sent.bytes > 0)?;
        let phase = |sent: &Traffic| {
            let amount = bytes(sent.per_step().unwrap_or(0.0));
            let less = self.less(sent).map_or(String::new(), |less| format!(", {less}"));
            let plural = if sent.steps == 1 { "" } else { "s" };
            format!("{amount} a step{less}, in {} step{plural}", count(sent.steps as f64))
        };
        let with = match encoded.steps {
            0 => "no step was encoded".to_owned(),
            _ => phase(&encoded),
        };
        Some((with, phase(&plain)))
    }

    /// "30× less" than without codec and local steps.
    fn less(&self, sent: &Traffic) -> Option<String> {
        Some(match self.info.wire_ratio(sent)? {
            // The counts and numbers of a step come on top of its gradients.
            ratio if (0.98..1.02).contains(&ratio) => "no less".to_owned(),
            ratio => times_less(ratio),
        })
    }

    /// The ranks worth showing one by one, in order: all of them, or the `at_most` latest ones.
    fn notable_ranks(&self, at_most: usize) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..self.run.ranks.len()).collect();
        ranks.sort_by(|a, b| self.run.ranks[*b].lateness.total_cmp(&self.run.ranks[*a].lateness));
        ranks.truncate(at_most);
        ranks.sort_unstable();
        ranks
    }
}

/// Candidates shown of a choice. No run considers more, but a file might hold any number.
const CANDIDATES: usize = 32;

/// The choice of a codec, in words.
#[derive(Clone, Debug, Serialize)]
struct Choice {
    /// When it was made, and from what.
    basis: String,
    rows: Vec<Candidate>,
    /// What came of it.
    result: String,
    reason: String,
}

/// One codec that was considered.
#[derive(Clone, Debug, Serialize)]
struct Candidate {
    codec: String,
    step: String,
    coding: String,
    bytes: String,
    /// What a step took, for the chosen one, and how far off the prediction was; else empty.
    measured: String,
    error: String,
    chosen: bool,
}

impl Choice {
    fn of(advice: &Advice, steps: &[StepRecord]) -> Choice {
        let measured = advice.measured(steps);
        let candidate = |row: &Prediction| {
            let chosen = row.codec == advice.chosen;
            let measured = measured.filter(|_| chosen);
            Candidate {
                codec: row.codec.clone(),
                step: duration(row.seconds),
                coding: duration(row.coding_seconds),
                bytes: bytes(row.wire_bytes as f64),
                measured: measured.map(|m| duration(m.seconds)).unwrap_or_default(),
                error: measured.and_then(|m| m.error).map(off).unwrap_or_default(),
                chosen,
            }
        };
        Choice {
            basis: format!(
                "decided at step {}, where a step without a codec took {}{}",
                advice.step,
                duration(advice.measured_dense_seconds),
                cost(advice),
            ),
            rows: advice.rows.iter().take(CANDIDATES).map(candidate).collect(),
            result: result(advice, measured),
            reason: advice.reason.clone(),
        }
    }
}

/// What deciding took, if that is known.
fn cost(advice: &Advice) -> String {
    if advice.observed_steps == 0 {
        return String::new();
    }
    format!(
        "; {} sent to decide, in {}, after {} steps without a codec",
        bytes(advice.deciding_bytes as f64),
        duration(advice.deciding_seconds),
        advice.observed_steps,
    )
}

fn result(advice: &Advice, measured: Option<Measured>) -> String {
    let chosen = match advice.chosen.as_str() {
        "none" => "No codec was chosen",
        codec => &format!("{codec} was chosen"),
    };
    match measured {
        None => format!("{chosen}; there are too few steps since then to judge the prediction."),
        Some(Measured { steps, seconds, error }) => {
            let error = error.map(|error| format!(": the prediction was {}", off(error)));
            let seconds = duration(seconds);
            let error = error.unwrap_or_default();
            format!("{chosen}; since then a step takes {seconds} (median of {steps}){error}.")
        }
    }
}

/// "4.8 % too short": a prediction that is off by this part of what was measured.
fn off(error: f64) -> String {
    let direction = if error < 0.0 { "too short" } else { "too long" };
    format!("{} {direction}", percent(error.abs()))
}

#[cfg(test)]
mod tests;
