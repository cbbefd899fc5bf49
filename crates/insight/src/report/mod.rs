//! The report of a run, for people: in the terminal and as a page.

mod bins;
mod html;
mod terminal;

use crate::breakdown::RunBreakdown;
use crate::record::{RunInfo, StepRecord, Summary};
use crate::verdict::Verdict;
use bins::{Curves, HeatMap};

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
    curves: Curves,
    heat_map: HeatMap,
}

impl Report {
    /// Reports on a run; without a summary, on one that did not finish.
    pub fn new(info: &RunInfo, steps: &[StepRecord], summary: Option<&Summary>) -> Report {
        let run = RunBreakdown::of(info, steps);
        let scaling = summary.and_then(Summary::scaling);
        Report {
            info: info.clone(),
            verdict: Verdict::of(&run, info, scaling.as_ref()),
            run,
            summary: summary.cloned(),
            curves: Curves::of(steps),
            heat_map: HeatMap::of(steps),
        }
    }

    /// As text for a terminal of `width` columns.
    pub fn terminal(&self, width: usize) -> String {
        terminal::render(self, width)
    }

    /// As one page that needs nothing else.
    pub fn html(&self) -> String {
        html::render(self)
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
