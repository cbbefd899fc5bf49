//! The bound on staleness that adapts, for `ssp:auto`. A larger *bound* lets fast workers wait less;
//! a smaller one lets them compute on fresher weights. Which of the two is worth more depends on the
//! job and changes while it runs, but both can be seen: the one as the *share* of their time in which
//! workers are blocked, the other, if at all, in the loss.
//!
//! Pushes are collected in *windows* of so many per worker, and every window is judged once:
//!
//! 1. **The loss got worse**: twice in a row its mean is above that of the best recent window since
//!    the last move, by more than the noise of both, or it is no number any more. Then the last raise
//!    is undone, and a *rest* follows in which there is none. If the loss gets worse still, the bound
//!    is halved.
//! 2. **Workers are blocked** for more than 10 % of the time, and the loss is not worse. Then the bound
//!    is raised: doubled at first, by one after it had to be lowered once. Each raise is on *trial* for
//!    two windows, in which rule 1 may undo it, before the next one.
//! 3. **No worker is blocked** for more than 2 % of the time, for several windows in a row (the *patience*).
//!    Then the bound is lowered by one: it costs nothing.
//!
//! Between 2 % and 10 % nothing happens. That alone would not keep the bound from going to and fro
//! between two values of which one is always too small and one too large. So the bound moves
//! ever more seldom after mistakes: a raise that had to be undone doubles the rest, and a lowering that had to be
//! undone doubles the patience. In a job that does not change, the number of moves grows with the
//! logarithm of time only. In one that does, a bound that was *too large* or *too small* once may be
//! right later; when it has proved so, rest or patience is short again.
//!
//! Against a worker that is always slower than the others, no bound helps for long: once the fast
//! ones have used up their lead they go at its pace. The bound then rises to its limit, where the
//! job was given all that bounded staleness can give.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::mem;

/// Pushes of each worker in a window. More make means that are less noisy, and a bound that follows
/// later.
const PUSHES: usize = 8;
/// Pushes of a window at most, for jobs of very many workers: enough for a mean without much noise.
const MOST_PUSHES: usize = 8192;
/// The share of blocked time that is worth a raise. Smaller, and the bound grows for nothing; larger,
/// and that much of the workers' time is lost without an attempt to get it back.
const BLOCKED: f64 = 0.10;
/// The share of blocked time that counts as none. It must stay well below [`BLOCKED`].
const IDLE: f64 = 0.02;
/// By how many standard errors of their difference two means must differ to be different. Smaller,
/// and the bound is lowered by chance; larger, and a run that diverges is noticed later.
const NOISE: f64 = 4.0;
/// Windows that a new one is compared with. The best of more is the best by luck, and the next seems
/// worse by chance; with fewer, a loss that rises slowly is not noticed.
const RECENT: usize = 16;
/// Windows in a row that must be worse before the bound is lowered; and for which a raise is on trial,
/// so that it has been judged before the next.
const TRIAL: u64 = 2;
/// The rest after the loss got worse, in windows, at first. Longer, and workers stay blocked for
/// longer if it was by chance; shorter, and a bound that harms is tried again before the harm is mended.
const REST: u64 = 4;
/// Windows without blocked time before the bound is lowered, at first. Longer, and weights stay older
/// than they need be; shorter, and workers that stumble seldom lose the room for it in between.
const PATIENCE: u64 = 4;

/// Where a bound that adapts must stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The least bound, with which it begins.
    pub least: u64,
    /// The largest.
    pub most: u64,
}

impl Default for Limits {
    /// From 1 to 16. At 0 the workers are in lock-step, for which there is a level of its own.
    fn default() -> Limits {
        Limits { least: 1, most: 16 }
    }
}

/// What one push says about the bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Seconds since the run began.
    pub time: f64,
    /// Who pushed.
    pub worker: u32,
    /// Seconds since its last push in which the bound held it back.
    pub blocked: f64,
    /// Seconds since its last push. If this or `blocked` is no time, both are ignored.
    pub wall: f64,
    /// The loss of what it pushed.
    pub loss: f32,
}

/// A change of the bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// Seconds since the run began.
    pub time: f64,
    /// The bound before.
    pub from: u64,
    /// The bound from now on.
    pub to: u64,
    /// Why.
    pub reason: String,
}

/// A bound on staleness that follows what it observes.
///
/// It has no clock and no randomness: equal observations make equal moves.
#[derive(Clone, Debug)]
pub struct AdaptiveBound {
    limits: Limits,
    bound: u64,
    window: Window,
    /// Workers that were seen in the window before, or 0.
    workers: usize,
    /// The last windows, from that which led to the last move.
    recent: VecDeque<Loss>,
    /// Windows in a row, until now, whose loss is worse than the best.
    worse: u64,
    /// Windows in a row, until now, in which no worker was blocked.
    idle: u64,
    /// Windows after the last move in which the bound is not raised.
    hold: u64,
    /// Whether raises double the bound: until it is lowered.
    doubling: bool,
    last: Option<Step>,
    /// Windows since the last move.
    since: u64,
    /// The rest after the next raise that fails, and the bound that was the last to.
    rest: u64,
    too_large: u64,
    /// The patience until the next lowering, and the bound that was the last to be regretted.
    patience: u64,
    too_small: u64,
}

/// What the last move was.
#[derive(Clone, Copy, Debug)]
enum Step {
    Raised { from: u64 },
    LoweredForLoss,
    LoweredWhenIdle,
}

impl AdaptiveBound {
    /// Begins at the least bound. A largest that is less than the least counts as equal to it.
    pub fn new(limits: Limits) -> AdaptiveBound {
        AdaptiveBound {
            limits: Limits { most: limits.most.max(limits.least), ..limits },
            bound: limits.least,
            window: Window::default(),
            workers: 0,
            recent: VecDeque::with_capacity(RECENT),
            worse: 0,
            idle: 0,
            hold: 0,
            doubling: true,
            last: None,
            since: 0,
            rest: REST,
            too_large: u64::MAX,
            patience: PATIENCE,
            too_small: 0,
        }
    }

    /// The bound as of now.
    pub fn bound(&self) -> u64 {
        self.bound
    }

    /// Takes one push into account. Returns the move, if it makes one.
    pub fn observe(&mut self, observation: Observation) -> Option<Move> {
        self.window.add(&observation);
        let workers = self.workers.max(self.window.workers.len());
        if self.window.pushes < (PUSHES * workers).min(MOST_PUSHES) {
            return None;
        }
        let window = mem::take(&mut self.window);
        self.workers = window.workers.len();
        let from = self.bound;
        let reason = self.judge(&window)?;
        let to = self.bound;
        let reason = format!("{reason}: {from} → {to}");
        Some(Move { time: observation.time, from, to, reason })
    }

    /// Applies the rules to a complete window. Returns why it moved the bound, if it did.
    fn judge(&mut self, window: &Window) -> Option<String> {
        let share = window.share();
        let loss = window.loss();
        let best = self.recent.iter().copied().min_by(|a, b| a.mean.total_cmp(&b.mean));
        let change = best.zip(loss).map(|(from, to)| Change { from, to });

        let broken = window.broken > 0 && best.is_some();
        let worse = broken || change.is_some_and(Change::is_rise);
        self.worse = if worse { self.worse + 1 } else { 0 };
        self.idle = if share < IDLE { self.idle + 1 } else { 0 };
        self.since += 1;
        let held = self.hold >= self.since;

        let Limits { least, most } = self.limits;
        let reason = if self.bound > least && (broken || self.worse >= TRIAL) {
            self.lower_for_loss();
            match change.filter(|_| !broken) {
                Some(change) => format!("the loss rose {change}"),
                None => format!("{} of {} losses are no numbers", window.broken, window.pushes),
            }
        } else if self.bound < most && share > BLOCKED && !worse && !held {
            self.raise();
            let blocked = format!("blocked {:.0} % of the time", 100.0 * share);
            match change {
                Some(change) if change.is_fall() => {
                    format!("{blocked} while the loss fell {change}")
                }
                Some(change) => format!("{blocked} while the loss went {change}"),
                None => blocked,
            }
        } else if self.bound > least && self.idle >= self.patience {
            let (limit, windows, pushes) = (100.0 * IDLE, self.idle, window.pushes);
            self.lower_when_idle();
            format!(
                "blocked less than {limit:.0} % of the time in {windows} windows of {pushes} pushes"
            )
        } else {
            self.remember(loss);
            return None;
        };
        // From now on windows are compared with this one; if it has no loss, still with those before.
        if loss.is_some() {
            self.recent.clear();
        }
        self.remember(loss);
        (self.worse, self.idle, self.since) = (0, 0, 0);
        Some(reason)
    }

    fn raise(&mut self) {
        if self.bound >= self.too_large {
            (self.rest, self.too_large) = (REST, u64::MAX);
        }
        if let Some(Step::LoweredWhenIdle) = self.last {
            self.patience = self.patience.saturating_mul(2);
            self.too_small = self.bound;
        }
        self.last = Some(Step::Raised { from: self.bound });
        let twice = if self.doubling { self.bound.saturating_mul(2) } else { 0 };
        self.bound = twice.max(self.bound + 1).min(self.limits.most);
        self.hold = TRIAL;
    }

    fn lower_for_loss(&mut self) {
        let at_once = self.since <= 2 * TRIAL;
        self.hold = self.rest;
        self.bound = match self.last {
            Some(Step::Raised { from }) => {
                self.rest = self.rest.saturating_mul(2);
                self.too_large = self.bound;
                from
            }
            Some(Step::LoweredForLoss) if at_once => (self.bound / 2).max(self.limits.least),
            _ => self.bound - 1,
        };
        self.last = Some(Step::LoweredForLoss);
        self.doubling = false;
    }

    fn lower_when_idle(&mut self) {
        if self.bound <= self.too_small {
            (self.patience, self.too_small) = (PATIENCE, 0);
        }
        self.bound -= 1;
        // What is left of a rest.
        self.hold = self.hold.saturating_sub(self.since);
        self.last = Some(Step::LoweredWhenIdle);
        self.doubling = false;
    }

    fn remember(&mut self, loss: Option<Loss>) {
        let Some(loss) = loss else { return };
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(loss);
    }
}

/// The pushes since the last judgement.
#[derive(Clone, Debug, Default)]
struct Window {
    pushes: usize,
    workers: BTreeSet<u32>,
    blocked: f64,
    wall: f64,
    /// Losses that are numbers: how many, their mean, and the sum of squared distances from it.
    losses: usize,
    mean: f64,
    spread: f64,
    /// Losses that are not.
    broken: usize,
}

impl Window {
    fn add(&mut self, observation: &Observation) {
        self.pushes += 1;
        self.workers.insert(observation.worker);
        let Observation { blocked, wall, loss, .. } = *observation;
        if wall.is_finite() && wall > 0.0 && blocked >= 0.0 {
            self.wall += wall;
            self.blocked += blocked.min(wall);
        }
        let loss = f64::from(loss);
        if loss.is_finite() {
            // Welford's way: sums of squares would cancel where the loss varies little.
            self.losses += 1;
            let distance = loss - self.mean;
            self.mean += distance / self.losses as f64;
            self.spread += distance * (loss - self.mean);
        } else {
            self.broken += 1;
        }
    }

    /// The share of the workers' time in which the bound held them back.
    fn share(&self) -> f64 {
        if self.wall > 0.0 { self.blocked / self.wall } else { 0.0 }
    }

    /// The loss, if there are enough numbers to know its noise.
    fn loss(&self) -> Option<Loss> {
        let count = self.losses as f64;
        let variance = self.spread / (count - 1.0) / count;
        (self.losses >= 2).then_some(Loss { mean: self.mean, variance })
    }
}

/// The mean loss of a window and the variance of that mean.
#[derive(Clone, Copy, Debug)]
struct Loss {
    mean: f64,
    variance: f64,
}

/// The loss of one window against that of another.
#[derive(Clone, Copy, Debug)]
struct Change {
    from: Loss,
    to: Loss,
}

impl Change {
    /// By how much the means may differ without meaning anything.
    fn noise(self) -> f64 {
        NOISE * (self.from.variance + self.to.variance).sqrt()
    }

    fn is_rise(self) -> bool {
        self.to.mean - self.from.mean > self.noise()
    }

    fn is_fall(self) -> bool {
        self.to.mean < self.from.mean
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [from, to, noise] = [self.from.mean, self.to.mean, self.noise()].map(number);
        write!(f, "from {from} to {to}")?;
        match (self.is_rise(), self.is_fall()) {
            (true, _) => write!(f, ", more than its noise of {noise}"),
            (_, true) => Ok(()),
            _ => write!(f, ", within its noise of {noise}"),
        }
    }
}

/// With three significant digits, for people.
fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e5 || (size > 0.0 && size < 1e-3) {
        return format!("{value:.2e}");
    }
    let decimals = match size {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.1.. => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests;
