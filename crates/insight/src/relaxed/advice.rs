//! Which consistency level suits the workers of a run.
//!
//! What counts is how many gradients per second a level would let these workers compute. Each worker
//! has a pace: how long its gradients took, one after the other, in blocks of which the lower quartile
//! counts. A worker that is slow takes long every time; one that shares a busy machine now and then, and
//! no level would give it more of that machine. The paces are replayed at every level: a worker
//! begins a clock when its last one is done and, at a bound of S, when every other worker has finished
//! the one S + 1 clocks before. `bsp` is a bound of 0, `async` none at all. To every gradient comes the
//! exchange with the server: what the worker that waited least waited, for that one did not wait for
//! others.
//!
//! `bsp` gives the weights of the synchronous run, so it is the advice unless a relaxed level is worth
//! giving that up. Among those, a bounded one is better than none if it gets most of the gain. It does
//! where slowness comes and goes; behind a worker that is always slow it gains nothing for long, since
//! all others soon wait for it at the distance of the bound.

use serde::{Deserialize, Serialize};

use super::{known, median};
use crate::units::times;
use crate::updates::UpdateRecord;

/// A relaxed level must give this many times the gradients of `bsp`. Nearer to 1, people would give up
/// equal weights for what a busy machine may take back; further, for a fifth of their hardware.
pub const WORTH_IT: f64 = 1.2;

/// The same if no worker is slower than others throughout. More, because slowness that comes and goes is
/// often another program's, and gone the next time.
const WORTH_IT_IN_TURNS: f64 = 1.4;

/// A bound is advised if it gets this share of what no bound at all would gain.
const MOST_OF_IT: f64 = 2.0 / 3.0;

/// Bounds that are considered. Larger ones are hardly told from none; between them lies little.
const BOUNDS: [usize; 2] = [3, 10];

/// Gradients that have one pace. Fewer would take noise for slowness; with more, a worker that is slow
/// for a while would not be seen to be.
const BLOCK: usize = 16;

/// Clocks of `bsp` that are replayed. With fewer, the head start of a bound would count as a gain; more
/// only take time.
const HORIZON: usize = 512;

/// With fewer gradients of a worker, one hiccup is its pace.
const ENOUGH: usize = 5;

/// A worker is slow throughout if its pace is this many times the median of all. Nearer to 1, it is one
/// of them.
const SLOWER: f64 = 1.15;

/// How fast one worker computes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pace {
    worker: u32,
    /// Seconds of its gradients, in order, block by block.
    computes: Vec<f64>,
    /// The pace of them all.
    typical: f64,
    /// The median of what it waited for a gradient.
    blocked: f64,
}

/// What a level would give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelPrediction {
    /// The level, as it is given to `--strategy`.
    pub level: String,
    /// Gradients per second of all workers together.
    pub pushes_per_s: f64,
    /// How many times those of `bsp` that is.
    pub ratio: f64,
}

/// The level that suits, and what that rests on.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelAdvice {
    /// As it is given to `--strategy`.
    pub level: String,
    /// What each level would give, from strict to loose.
    pub predictions: Vec<LevelPrediction>,
    /// The advice in words.
    pub text: String,
}

impl Pace {
    /// From the records of one worker, in order, each of so many gradients.
    pub(super) fn of(worker: u32, records: &[&UpdateRecord], gradients: u64) -> Pace {
        // The first gradient of a life pays for warming up.
        let warm: Vec<&&UpdateRecord> = records.iter().filter(|record| record.push > 1).collect();
        let of = |part: fn(&UpdateRecord) -> f64| -> Vec<f64> {
            warm.iter().map(|record| known(part(record))).collect()
        };
        let pushes = of(|record| record.compute);
        let all: Vec<f64> =
            pushes.iter().map(|seconds| seconds / gradients.max(1) as f64).collect();
        let block = |block: &[f64]| std::iter::repeat_n(pace(block), block.len());
        Pace {
            worker,
            computes: all.chunks(BLOCK).flat_map(block).collect(),
            typical: pace(&all),
            blocked: median(of(|record| record.blocked)).unwrap_or(0.0),
        }
    }
}

impl LevelAdvice {
    /// Advises workers of these paces; none for one worker alone, or with too little to tell.
    pub(super) fn of(paces: &[Pace]) -> Option<LevelAdvice> {
        let usable = |pace: &Pace| pace.computes.len() >= ENOUGH && pace.typical > 0.0;
        if paces.len() < 2 || !paces.iter().all(usable) {
            return None;
        }
        let exchange = paces.iter().map(|pace| pace.blocked).fold(f64::INFINITY, f64::min);
        let replay = Replay::of(paces, exchange);
        let bsp = replay.bounded(0);
        let prediction = |level: String, pushes_per_s: f64| LevelPrediction {
            level,
            pushes_per_s,
            ratio: pushes_per_s / bsp,
        };
        let mut predictions = vec![prediction("bsp".into(), bsp)];
        for bound in BOUNDS {
            predictions.push(prediction(format!("ssp:{bound}"), replay.bounded(bound)));
        }
        predictions.push(prediction("async".into(), replay.unbounded()));
        let most = predictions.last().map_or(1.0, |unbounded| unbounded.ratio);
        let worth_it = match slow_throughout(paces) {
            Some(_) => WORTH_IT,
            None => WORTH_IT_IN_TURNS,
        };
        let chosen = if most < worth_it {
            predictions.first()
        } else {
            let enough = |prediction: &&LevelPrediction| {
                prediction.ratio >= WORTH_IT && prediction.ratio - 1.0 >= MOST_OF_IT * (most - 1.0)
            };
            predictions.iter().find(enough)
        };
        let level = chosen?.level.clone();
        let text = sentences(&level, &predictions, paces);
        Some(LevelAdvice { level, predictions, text })
    }
}

/// How long a gradient takes of which some were disturbed: the lower quartile.
fn pace(seconds: &[f64]) -> f64 {
    let mut seconds = seconds.to_vec();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 4).copied().unwrap_or(0.0)
}

/// The paces, to be run through at any level.
struct Replay<'a> {
    paces: &'a [Pace],
    exchange: f64,
    /// How long [`HORIZON`] clocks of `bsp` take. All levels get this time.
    seconds: f64,
}

impl Replay<'_> {
    fn of(paces: &[Pace], exchange: f64) -> Replay<'_> {
        let mut replay = Replay { paces, exchange, seconds: 0.0 };
        let slowest = |clock| paces.iter().map(|pace| replay.cost(pace, clock)).fold(0.0, f64::max);
        replay.seconds = (0..HORIZON).map(slowest).sum();
        replay
    }

    /// Seconds of one clock of one worker. What was recorded is repeated.
    fn cost(&self, pace: &Pace, clock: usize) -> f64 {
        pace.computes[clock % pace.computes.len()] + self.exchange
    }

    /// Gradients per second with at most `bound` clocks between the first and the last worker.
    fn bounded(&self, bound: usize) -> f64 {
        // A clock that ends with the time is within it, whatever the rounding.
        let end = self.seconds * (1.0 + 1e-9);
        let mut done = 0u64;
        let mut now = vec![0.0; self.paces.len()];
        // When all workers had finished each clock. No worker gets further than the bound ahead of the
        // slowest, which at best does as well as in `bsp`.
        let mut finished: Vec<f64> = Vec::with_capacity(HORIZON + bound);
        for clock in 0..HORIZON + bound {
            let admitted = clock.checked_sub(bound + 1).map_or(0.0, |before| finished[before]);
            for (pace, now) in self.paces.iter().zip(&mut now) {
                *now = admitted.max(*now) + self.cost(pace, clock);
                done += u64::from(*now <= end);
            }
            finished.push(now.iter().copied().fold(0.0, f64::max));
        }
        done as f64 / self.seconds
    }

    /// Gradients per second if no worker waits for another.
    fn unbounded(&self) -> f64 {
        let pace = |pace: &Pace| {
            let clocks = pace.computes.len();
            clocks as f64 / (0..clocks).map(|clock| self.cost(pace, clock)).sum::<f64>()
        };
        self.paces.iter().map(pace).sum()
    }
}

/// The worker that is slower than the others throughout, if one is, and how many times.
fn slow_throughout(paces: &[Pace]) -> Option<(u32, f64)> {
    let typical = median(paces.iter().map(|pace| pace.typical).collect())?;
    let slowest = paces.iter().max_by(|a, b| a.typical.total_cmp(&b.typical))?;
    let factor = slowest.typical / typical;
    (factor >= SLOWER).then_some((slowest.worker, factor))
}

fn sentences(level: &str, predictions: &[LevelPrediction], paces: &[Pace]) -> String {
    let ratio = |level: &str| {
        let found = predictions.iter().find(|prediction| prediction.level == level);
        found.map_or(1.0, |prediction| prediction.ratio)
    };
    let who = slow_throughout(paces).map(|(worker, factor)| {
        format!("worker {worker} takes {} as long as the median worker", times(factor))
    });
    let unbounded = times(ratio("async"));
    match (level, who) {
        ("bsp", None) if ratio("async") >= WORTH_IT => format!(
            "bsp suits: no worker is slower than the others throughout, and whatever slowed them down \
             in turns may be gone the next time (async would have given {unbounded} the gradients per \
             second); it gives the weights of the synchronous run."
        ),
        ("bsp", None) => format!(
            "bsp suits: the workers are about equally fast, so that waiting for each other costs \
             little (async would give {unbounded} the gradients per second), and it gives the weights \
             of the synchronous run."
        ),
        ("bsp", Some(who)) => format!(
            "bsp suits: {who}, but async would give only {unbounded} the gradients per second, and \
             bsp gives the weights of the synchronous run."
        ),
        ("async", Some(who)) => format!(
            "async suits: {who}, and at bsp all wait for it; async would give {unbounded} the \
             gradients per second of bsp. A bound would not help for long: with one worker always \
             slower, all others soon wait for it at the distance of the bound, and ssp:S gives in the \
             long run no more gradients per second than bsp, only a head start of S clocks and more, \
             smaller updates."
        ),
        ("async", None) => format!(
            "async suits: workers are slow in turns, for longer than a bound could bridge (ssp:{} \
             would give {} the gradients per second of bsp); async would give {unbounded}.",
            BOUNDS[BOUNDS.len() - 1],
            times(ratio(&format!("ssp:{}", BOUNDS[BOUNDS.len() - 1]))),
        ),
        (bounded, _) => format!(
            "{bounded} suits: workers are slow in turns, and at bsp every clock takes as long as its \
             slowest; {bounded} would give {} the gradients per second of bsp, async {unbounded} but \
             without a bound on staleness.",
            times(ratio(bounded)),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relaxed::tests::record;

    /// Workers that compute for as long as `compute` says of worker and push, and then exchange.
    fn advise(
        workers: u32,
        pushes: u64,
        exchange: f64,
        compute: impl Fn(u32, u64) -> f64,
    ) -> Option<LevelAdvice> {
        let pace = |worker: u32| {
            let records: Vec<UpdateRecord> = (1..=pushes)
                .map(|push| UpdateRecord {
                    push,
                    compute: compute(worker, push),
                    blocked: exchange,
                    ..record(worker, 1.0)
                })
                .collect();
            Pace::of(worker, &records.iter().collect::<Vec<_>>(), 1)
        };
        LevelAdvice::of(&(0..workers).map(pace).collect::<Vec<_>>())
    }

    /// Worker 2 takes four times as long as all others.
    fn one_slow(worker: u32, _push: u64) -> f64 {
        if worker == 2 { 4.0 } else { 1.0 }
    }

    fn ratio(advice: &LevelAdvice, level: &str) -> f64 {
        advice.predictions.iter().find(|prediction| prediction.level == level).unwrap().ratio
    }

    #[test]
    fn equal_workers_are_advised_bsp() {
        let advice = advise(4, 100, 0.1, |_, _| 1.0).unwrap();
        assert_eq!(advice.level, "bsp");
        assert!((ratio(&advice, "async") - 1.0).abs() < 0.01);
        assert!(
            advice.text.starts_with("bsp suits: the workers are about equally fast"),
            "{advice:?}"
        );
        let bsp = &advice.predictions[0];
        assert!((bsp.pushes_per_s - 4.0 / 1.1).abs() < 0.01, "{bsp:?}");
    }

    #[test]
    fn noise_of_single_gradients_is_not_slowness() {
        // Every third gradient takes twice as long, of each worker another one.
        let noisy = |worker: u32, push: u64| {
            if (push + u64::from(worker)).is_multiple_of(3) { 2.0 } else { 1.0 }
        };
        let advice = advise(3, 100, 0.0, noisy).unwrap();
        assert_eq!(advice.level, "bsp", "{advice:?}");
    }

    #[test]
    fn a_busy_machine_is_not_a_slow_worker() {
        // Worker 1 shares its core: of three gradients one is undisturbed. Worker 0 has luck.
        let busy = |worker: u32, push: u64| {
            if worker == 0 || push.is_multiple_of(3) { 1.0 } else { 1.0 + (push % 5) as f64 / 2.0 }
        };
        let advice = advise(2, 200, 0.0, busy).unwrap();
        assert_eq!(advice.level, "bsp", "{advice:?}");
        assert!(advice.text.contains("about equally fast"), "{}", advice.text);
    }

    #[test]
    fn one_of_four_slowed_four_times_is_advised_async() {
        let advice = advise(4, 100, 0.0, one_slow).unwrap();
        assert_eq!(advice.level, "async");
        assert!((ratio(&advice, "async") - 3.25).abs() < 0.01, "{advice:?}");
        // A bound only gives a head start.
        assert!(ratio(&advice, "ssp:3") < 1.02, "{advice:?}");
        for part in ["worker 2 takes 4.00× as long", "3.25× the gradients", "no more gradients per"]
        {
            assert!(advice.text.contains(part), "{part}: {}", advice.text);
        }
    }

    #[test]
    fn what_is_exchanged_counts_at_every_level() {
        // Clocks of 5 and 8 seconds: 3/5 + 1/8 against 4/8.
        let advice = advise(4, 100, 4.0, one_slow).unwrap();
        assert!((ratio(&advice, "async") - 1.45).abs() < 0.01, "{advice:?}");
    }

    #[test]
    fn a_slightly_slower_worker_is_not_worth_other_weights() {
        let advice = advise(4, 100, 0.0, |worker, _| if worker == 3 { 1.2 } else { 1.0 }).unwrap();
        assert_eq!(advice.level, "bsp");
        assert!(advice.text.contains("worker 3 takes 1.20×"), "{}", advice.text);
        assert!(advice.text.contains("only 1.15×"), "{}", advice.text);
    }

    #[test]
    fn slowness_in_turns_is_bridged_by_a_bound() {
        // Each is three times as slow in one block of four, in turns. The first push is not counted.
        let block = |push: u64| push.saturating_sub(2) / BLOCK as u64 % 4;
        let in_turn = |worker, push| if block(push) == u64::from(worker) { 3.0 } else { 1.0 };
        let advice = advise(4, 4 * BLOCK as u64 + 1, 0.0, in_turn).unwrap();
        assert!((ratio(&advice, "async") - 2.0).abs() < 0.02, "{advice:?}");
        assert!(ratio(&advice, "ssp:10") > ratio(&advice, "ssp:3"), "{advice:?}");
        assert_ne!(advice.level, "bsp");
        assert!(advice.text.contains("slow in turns"), "{}", advice.text);
    }

    #[test]
    fn a_little_slowness_in_turns_may_be_another_programs() {
        let block = |push: u64| push.saturating_sub(2) / BLOCK as u64 % 2;
        let in_turn = |worker, push| if block(push) == u64::from(worker) { 1.6 } else { 1.0 };
        let advice = advise(2, 8 * BLOCK as u64 + 1, 0.0, in_turn).unwrap();
        assert!((WORTH_IT..WORTH_IT_IN_TURNS).contains(&ratio(&advice, "async")), "{advice:?}");
        assert_eq!(advice.level, "bsp");
        assert!(advice.text.contains("may be gone the next time"), "{}", advice.text);
    }

    #[test]
    fn too_little_is_no_base_for_advice() {
        assert_eq!(advise(1, 100, 0.0, |_, _| 1.0), None);
        assert_eq!(advise(2, ENOUGH as u64, 0.0, |_, _| 1.0), None);
        assert_eq!(advise(2, 100, 0.0, |_, _| 0.0), None);
        assert_eq!(advise(2, 100, 0.0, |_, _| f64::NAN), None);
        assert_eq!(advise(0, 100, 0.0, |_, _| 1.0), None);
    }
}
