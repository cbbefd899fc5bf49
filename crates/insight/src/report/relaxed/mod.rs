//! The report of a relaxed run, for people: in the terminal and as a page.

mod html;
mod terminal;

use serde::Serialize;

use crate::relaxed::{LevelAdvice, RelaxedRun, RelaxedSummary, WorkerStats};
use crate::units::{count, duration, percent};
use crate::verdict::NOTABLE_SHARE;

/// The share of pushes that may be far out in a histogram before all of it is drawn in the width that
/// they need. A larger one would hide much of it, a smaller one let a hiccup flatten the rest.
const FAR_OUT: f64 = 0.02;

/// What to do about a loss that is no number any more.
const DIVERGED: &str = "Start again with a lower --learning-rate. A journal of this run would go on with \
                        its weights: name another, or none.";

/// Everything a report shows. Its size is bounded, whatever the length of the run and the number of
/// workers.
#[derive(Clone, Debug)]
pub struct RelaxedReport<'a> {
    run: &'a RelaxedRun,
    summary: Option<&'a RelaxedSummary>,
    advice: Option<LevelAdvice>,
    answer: Answer,
}

impl<'a> RelaxedReport<'a> {
    /// Reports on a run; without a summary, on one that did not finish.
    pub fn new(run: &'a RelaxedRun, summary: Option<&'a RelaxedSummary>) -> RelaxedReport<'a> {
        let advice = run.advice();
        let answer = Answer::of(run, advice.as_ref());
        RelaxedReport { run, summary, advice, answer }
    }

    /// As text for a terminal of `width` columns.
    pub fn terminal(&self, width: usize) -> String {
        terminal::render(self, width)
    }

    /// As one page that needs nothing else.
    pub fn html(&self) -> String {
        html::render(self)
    }

    /// One line for a headline: "mlp on digits, ssp:3 over tcp, 4 workers, 1 server, stale gradients:
    /// keep".
    fn subtitle(&self) -> String {
        let info = &self.run.info;
        let servers = match self.run.servers() {
            0 => "no server".to_owned(),
            servers => plural(servers as u64, "server"),
        };
        let codec = info.codec().map(|codec| format!(" with codec {codec}")).unwrap_or_default();
        format!(
            "{} on {}, {}{codec} over {}, {}, {servers}, stale gradients: {}",
            info.model,
            info.data,
            info.strategy,
            info.transport,
            plural(info.workers as u64, "worker"),
            self.run.stale(),
        )
    }

    /// The workers worth showing one by one, in order: all of them, or the `at_most` slowest ones.
    fn notable_workers(&self, at_most: usize) -> Vec<&WorkerStats> {
        let mut workers: Vec<&WorkerStats> = self.run.workers.iter().collect();
        workers.sort_by(|a, b| b.median_compute.total_cmp(&a.median_compute));
        workers.truncate(at_most);
        workers.sort_by_key(|worker| worker.worker);
        workers
    }
}

/// The answer, in sentences.
#[derive(Clone, Debug, Serialize)]
struct Answer {
    tone: Tone,
    headline: String,
    /// The figures it rests on.
    findings: Vec<String>,
    advice: Vec<String>,
}

/// How good the news is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Tone {
    /// Another level would not suit better.
    Good,
    /// Another level would suit better.
    Notable,
    /// A promise was broken.
    Bad,
    /// There is too little to tell.
    Unknown,
}

impl Answer {
    fn of(run: &RelaxedRun, advice: Option<&LevelAdvice>) -> Answer {
        if let Some(diverged) = run.diverged {
            return Answer {
                tone: Tone::Bad,
                headline: format!(
                    "The loss of worker {} became NaN at step {}, which ended the run.",
                    diverged.worker, diverged.step
                ),
                findings: findings(run),
                advice: vec![DIVERGED.to_owned()],
            };
        }
        if run.pushes == 0 {
            return Answer {
                tone: Tone::Unknown,
                headline: "No gradient was recorded in this folder, so there is nothing to judge."
                    .into(),
                findings: Vec::new(),
                advice: Vec::new(),
            };
        }
        let broken = broken_promise(run);
        let tone = match (&broken, advice) {
            (Some(_), _) => Tone::Bad,
            (None, None) => Tone::Unknown,
            (None, Some(advice)) if is_at(&run.info.strategy, &advice.level) => Tone::Good,
            (None, Some(_)) => Tone::Notable,
        };
        Answer {
            tone,
            headline: broken.unwrap_or_else(|| headline(run)),
            findings: findings(run),
            advice: advice.map(|advice| advice.text.clone()).into_iter().collect(),
        }
    }
}

/// What was promised and does not hold, if anything.
fn broken_promise(run: &RelaxedRun) -> Option<String> {
    if let Err(error) = run.ledger() {
        return Some(format!("The ledger of pushes does not add up: {error}."));
    }
    let bound = run.bound().filter(|bound| run.max_lead > *bound)?;
    Some(format!(
        "The bound did not hold: a worker was {} ahead of the slowest, and {} allows {bound}.",
        plural(run.max_lead, "clock"),
        run.info.strategy
    ))
}

fn headline(run: &RelaxedRun) -> String {
    let age = run.mean_staleness.map_or_else(String::new, |mean| {
        format!(", computed on weights that were {} clocks old on average", clocks(mean))
    });
    format!(
        "{} gave {} gradients per second{age}; workers waited for {} of their time.",
        run.info.strategy,
        count(run.gradients_per_s()),
        percent(run.blocked_share)
    )
}

fn findings(run: &RelaxedRun) -> Vec<String> {
    let mut findings = Vec::new();
    if let Ok(ledger) = run.ledger() {
        let dropped = match ledger.dropped {
            0 => String::new(),
            dropped => format!(", {} of them dropped as too stale", count(dropped as f64)),
        };
        let partial = match ledger.partial {
            0 => String::new(),
            partial => format!(", {} on some servers only", count(partial as f64)),
        };
        findings.push(format!(
            "The ledger adds up: {} in {}, each accounted for once{dropped}{partial}.",
            plural(ledger.pushes, "push"),
            plural(run.updates, "update"),
        ));
    }
    if let Some(bound) = run.bound().filter(|bound| run.max_lead <= *bound) {
        findings.push(format!(
            "The bound held: no worker read weights while more than {} ahead of the slowest, and {} \
             {} allowed.",
            plural(run.max_lead, "clock"),
            bound,
            if bound == 1 { "is" } else { "are" },
        ));
    }
    // Of workers that waited equally long, the first.
    let by_blocked =
        |a: &&WorkerStats, b: &&WorkerStats| a.blocked_share.total_cmp(&b.blocked_share);
    let most = run.workers.iter().rev().max_by(by_blocked);
    let least = run.workers.iter().min_by(by_blocked);
    if let (Some(most), Some(least)) = (most, least)
        && most.blocked_share - least.blocked_share >= NOTABLE_SHARE
    {
        findings.push(format!(
            "Worker {} waited most, for {} of its time; worker {} least, for {}.",
            most.worker,
            percent(most.blocked_share),
            least.worker,
            percent(least.blocked_share)
        ));
    }
    if let (Some(first), Some(last)) = (run.moves.first(), run.moves.last()) {
        findings.push(format!(
            "The bound moved {}, from {} to {}.",
            how_often(run.moves.len() as u64),
            first.from,
            last.to
        ));
    }
    if run.restarts() > 0 {
        findings.push(format!("Workers were started again {}.", how_often(run.restarts())));
    }
    findings
}

/// Whether a run of this strategy is at the level that is advised. A bound is as good as another.
fn is_at(strategy: &str, advised: &str) -> bool {
    let family = |level: &str| level.split([':', ',']).next().unwrap_or("").to_owned();
    family(strategy) == family(advised)
}

/// A histogram in at most so many columns, `(label, pushes)`. Where a few pushes are far out, they share
/// the last one; where many are, every column is as wide.
fn columns(histogram: &[(u64, u64)], at_most: u64) -> Vec<(String, u64)> {
    let Some(&(largest, _)) = histogram.last() else { return Vec::new() };
    let pushes = |from: u64, to: u64| -> u64 {
        let within = histogram.iter().filter(|(value, _)| (from..=to).contains(value));
        within.map(|(_, count)| count).sum()
    };
    let tail = at_most - 1;
    if largest <= tail {
        return (0..=largest).map(|value| (value.to_string(), pushes(value, value))).collect();
    }
    if pushes(tail, largest) as f64 <= FAR_OUT * pushes(0, largest) as f64 {
        let near = (0..tail).map(|value| (value.to_string(), pushes(value, value)));
        return near.chain([(format!("{tail}+"), pushes(tail, largest))]).collect();
    }
    let width = largest / at_most + 1;
    let column = |from: u64| {
        let to = from + (width - 1);
        (format!("{from}–{to}"), pushes(from, to))
    };
    (0..=largest / width).map(|column| column * width).map(column).collect()
}

/// A number of clocks that is not a whole one: "1.3".
fn clocks(value: f64) -> String {
    format!("{value:.1}")
}

/// "once", "2,000 times".
fn how_often(n: u64) -> String {
    if n == 1 { "once".into() } else { plural(n, "time") }
}

/// "1 clock", "2,000 clocks", "3 pushes".
fn plural(n: u64, what: &str) -> String {
    let ending = match n {
        1 => "",
        _ if what.ends_with("sh") => "es",
        _ => "s",
    };
    format!("{} {what}{ending}", count(n as f64))
}

/// A loss as people read it.
fn loss(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "diverged".into() }
}

/// A rate of one worker: "12.3 /s", or the time of one where it takes long.
fn rate(per_s: f64) -> String {
    if per_s >= 1.0 || per_s <= 0.0 {
        format!("{}/s", count(per_s))
    } else {
        format!("1 in {}", duration(1.0 / per_s))
    }
}

#[cfg(test)]
mod tests;
