//! `unisono bench hogwild`: how many sparse updates threads make on shared weights.
//!
//! Every thread repeats one update: it draws some elements, reads them, and changes them. The rounds of
//! the thread counts take turns, so that whatever disturbs the machine disturbs all alike, and after
//! each round the weights are added up: every update adds small integers, whose sums f32 holds exactly,
//! so that one lost addition is noticed.
//!
//! The weights are much larger than a core's caches, as those with sparse gradients are: tables of
//! words, of users, of products. Threads then rarely meet at an element, and what they share is the
//! memory. Nothing else is shared while the clock runs: elements are drawn by hashing a thread's own
//! count, and updates are counted by each thread for itself.

use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use serde::Serialize;

use unisono_codec::Key;
use unisono_relaxed::hogwild::{Clocks, SharedWeights};

use super::{FEWEST, expect_memory, expect_seconds, median, print, sizes};
use crate::exit::Wrong;
use unisono::insight::units::counted;

/// One round. In a shorter one, starting the threads shows; longer ones leave fewer for the median.
const ROUND: Duration = Duration::from_millis(200);

/// One update of so many is asked for its delay. To ask is to fetch the clocks of all threads: more
/// often, and it slows down what is measured; less often, and a short round has no answer.
const ASKED: u64 = 64;

/// The changes of the elements of an update take turns from 1 up to here.
const LARGEST_CHANGE: usize = 4;

/// Options of `unisono bench hogwild`.
#[derive(Args, Clone)]
pub struct HogwildArgs {
    /// Numbers of threads, separated by commas. Speedups are relative to the first.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16")]
    threads: Vec<usize>,
    /// The size of the weights, in f32.
    #[arg(long, default_value = "64MiB")]
    size: String,
    /// Elements that an update reads and changes.
    #[arg(long, default_value_t = 64)]
    touched: usize,
    /// Seconds to spend on each number of threads.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Print one JSON object per number of threads instead of a table.
    #[arg(long)]
    json: bool,
}

/// One line of the report.
#[derive(Serialize)]
struct Row {
    threads: usize,
    /// Threads that this machine can run at once.
    cores: usize,
    bytes: usize,
    touched: usize,
    rounds: usize,
    updates_per_second: f64,
    elements_per_second: f64,
    /// Updates per second, relative to the first number of threads.
    speedup: f64,
    /// The speedup, as a part of what as many times more threads would make if nothing were shared.
    of_linear: f64,
    /// Updates of other threads between the reading and the change of one.
    delay: f64,
}

/// Measures all numbers of threads.
pub fn run(args: HogwildArgs) -> anyhow::Result<ExitCode> {
    let bytes = sizes::parse(&args.size).context("--size").wrong_call()?;
    demand!(
        bytes > 0 && bytes.is_multiple_of(4) && u32::try_from(bytes / 4).is_ok(),
        "--size {}: the weights are f32, and counted in 32 bits; use a multiple of 4 below 16GiB",
        args.size
    );
    demand!((1..=1 << 20).contains(&args.touched), "--touched {}: use 1 to 2^20", args.touched);
    expect_seconds(args.seconds)?;
    for threads in &args.threads {
        demand!((1..=1024).contains(threads), "--threads {threads}: use 1 to 1024");
    }
    // The weights, and the copy that is added up.
    expect_memory("--size: this needs", 2 * bytes, "a smaller size")?;

    let mut bench = Bench::new(bytes / 4, args.touched);
    let rates = measure(&mut bench, &args.threads, args.seconds)?;
    report(&args, bytes, &rates)
}

/// Lets the numbers of threads take turns.
fn measure(bench: &mut Bench, threads: &[usize], seconds: f64) -> anyhow::Result<Vec<Rates>> {
    let mut rates = vec![Rates::default(); threads.len()];
    let deadline = Duration::try_from_secs_f64(seconds * threads.len() as f64)?;
    let start = Instant::now();
    while rates[0].updates_per_second.len() < FEWEST || start.elapsed() < deadline {
        for (threads, rates) in threads.iter().zip(&mut rates) {
            let round = bench.round(*threads, ROUND)?;
            rates.updates_per_second.push(round.updates as f64 / round.seconds);
            rates.delays.push(round.delay);
        }
    }
    Ok(rates)
}

fn report(args: &HogwildArgs, bytes: usize, rates: &[Rates]) -> anyhow::Result<ExitCode> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if !args.json {
        result_line!(
            "updates of {} in {} of f32, {}; no addition was lost",
            counted(args.touched, "element"),
            sizes::format(bytes),
            counted(cores, "core")
        )?;
        result_line!(
            "{:>8} {:>14} {:>14} {:>9} {:>10} {:>8}",
            "threads",
            "updates/s",
            "elements/s",
            "speedup",
            "of linear",
            "delay"
        )?;
    }
    let first = median(rates[0].updates_per_second.iter().copied());
    for (threads, rates) in args.threads.iter().copied().zip(rates) {
        let updates_per_second = median(rates.updates_per_second.iter().copied());
        let speedup = updates_per_second / first;
        let row = Row {
            threads,
            cores,
            bytes,
            touched: args.touched,
            rounds: rates.updates_per_second.len(),
            updates_per_second,
            elements_per_second: updates_per_second * args.touched as f64,
            speedup,
            of_linear: speedup * args.threads[0] as f64 / threads as f64,
            delay: median(rates.delays.iter().copied()),
        };
        print(&row, args.json, || {
            let Row { updates_per_second, elements_per_second, of_linear, delay, .. } = row;
            format!(
                "{threads:>8} {updates_per_second:>14.0} {elements_per_second:>14.0} {speedup:>9.2} \
                 {of_linear:>10.3} {delay:>8.1}"
            )
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What was measured of one number of threads, in every round.
#[derive(Clone, Default)]
struct Rates {
    updates_per_second: Vec<f64>,
    delays: Vec<f64>,
}

/// The weights, and what must have become of them.
struct Bench {
    weights: SharedWeights,
    /// What every update adds to the elements it draws, negated, as gradients are.
    gradient: Vec<f32>,
    /// Room to add up the weights.
    values: Vec<f32>,
    /// What all updates so far have added.
    added: u64,
    rounds: u64,
}

/// What came of a round.
struct Round {
    updates: u64,
    seconds: f64,
    /// The mean, of those updates that were asked.
    delay: f64,
}

/// What one thread did in a round.
struct Part {
    updates: u64,
    began: Instant,
    ended: Instant,
    delays: u64,
    asked: u64,
}

impl Bench {
    fn new(elements: usize, touched: usize) -> Bench {
        let values = vec![0.0; elements];
        Bench {
            weights: SharedWeights::new([&values]),
            gradient: (0..touched).map(|place| -((place % LARGEST_CHANGE + 1) as f32)).collect(),
            values,
            added: 0,
            rounds: 0,
        }
    }

    /// Has threads update for so long, and verifies the weights.
    fn round(&mut self, threads: usize, length: Duration) -> anyhow::Result<Round> {
        let key = Key::new(self.rounds);
        let (clocks, ready) = (Clocks::new(threads), Barrier::new(threads + 1));
        let stop = AtomicBool::new(false);
        let parts: Vec<Part> = thread::scope(|scope| {
            let (bench, clocks, ready, stop) = (&*self, &clocks, &ready, &stop);
            let spawn = |thread: usize| {
                scope.spawn(move || {
                    let draw = Draw { key: key.with(thread as u64), drawn: 0 };
                    ready.wait();
                    bench.work(thread, draw, clocks, stop)
                })
            };
            let handles: Vec<_> = (0..threads).map(spawn).collect();
            ready.wait();
            thread::sleep(length);
            stop.store(true, Relaxed);
            // The threads only compute; should one panic nevertheless, so does this one.
            handles.into_iter().map(|handle| handle.join().expect("a thread panicked")).collect()
        });

        let updates: u64 = parts.iter().map(|part| part.updates).sum();
        ensure!(updates == clocks.total(), "the clocks do not show what the threads did");
        self.rounds += 1;
        self.added += updates * -self.gradient.iter().sum::<f32>() as u64;
        self.weights.read(0, &mut self.values);
        verify(&self.values, self.added)?;

        // From the first that began to the last that ended: a thread that had to wait for a core is
        // not forgiven.
        let began = parts.iter().map(|part| part.began).min().expect("there is a thread");
        let ended = parts.iter().map(|part| part.ended).max().expect("there is a thread");
        let delays: u64 = parts.iter().map(|part| part.delays).sum();
        let asked: u64 = parts.iter().map(|part| part.asked).sum();
        let delay = delays as f64 / asked.max(1) as f64;
        Ok(Round { updates, seconds: (ended - began).as_secs_f64(), delay })
    }

    /// What one thread does until it is stopped: at least one update.
    fn work(&self, thread: usize, mut draw: Draw, clocks: &Clocks, stop: &AtomicBool) -> Part {
        let began = Instant::now();
        let elements = self.values.len();
        let mut indices = vec![0; self.gradient.len()];
        let mut values = vec![0.0; self.gradient.len()];
        let mut part = Part { updates: 0, began, ended: began, delays: 0, asked: 0 };
        loop {
            let asks = part.updates.is_multiple_of(ASKED);
            draw.indices(elements, &mut indices);
            let version = if asks { clocks.of_others(thread) } else { 0 };
            self.weights.read_sparse(0, &indices, &mut values);
            // A model would compute its gradient from these.
            std::hint::black_box(&mut values);
            self.weights.update_sparse(0, &indices, &self.gradient, 1.0);
            if asks {
                part.delays += clocks.of_others(thread) - version;
                part.asked += 1;
            }
            clocks.tick(thread);
            part.updates += 1;
            if stop.load(Relaxed) {
                part.ended = Instant::now();
                return part;
            }
        }
    }
}

/// Draws elements, without a state that threads share.
struct Draw {
    key: Key,
    drawn: u64,
}

impl Draw {
    /// Draws as many of `elements` as there is room for. One hash makes two.
    fn indices(&mut self, elements: usize, into: &mut [u32]) {
        let scale = |bits: u32| ((u64::from(bits) * elements as u64) >> 32) as u32;
        for pair in into.chunks_mut(2) {
            let bits = self.key.at(self.drawn);
            self.drawn += 1;
            pair[0] = scale(bits as u32);
            if let Some(second) = pair.get_mut(1) {
                *second = scale((bits >> 32) as u32);
            }
        }
    }
}

/// Refuses weights that are not the sum of what was added to them. All additions are positive
/// integers, so that a weight below the limit was exact all the time.
fn verify(weights: &[f32], added: u64) -> anyhow::Result<()> {
    const LIMIT: f32 = (1 << f32::MANTISSA_DIGITS) as f32;
    let mut sum = 0;
    for weight in weights {
        ensure!(
            *weight < LIMIT,
            "a weight became {weight}, where f32 is no longer exact; use a larger --size, a smaller \
             --touched or fewer --seconds"
        );
        ensure!(*weight >= 0.0 && weight.fract() == 0.0, "a weight became {weight}");
        sum += *weight as u64;
    }
    ensure!(sum == added, "the weights sum to {sum}, but {added} was added: updates were lost");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_measured_and_verified() {
        // Few elements, at which threads meet all the time.
        let mut bench = Bench::new(7, 5);
        for threads in [1, 3, 2] {
            let before = bench.added;
            let round = bench.round(threads, Duration::from_millis(1)).unwrap();
            assert!(round.updates >= threads as u64);
            assert_eq!(bench.added - before, round.updates * (1 + 2 + 3 + 4 + 1));
            assert!(round.seconds > 0.0 && round.delay >= 0.0);
            assert!(threads > 1 || round.delay == 0.0, "one thread has no others");
        }
        assert_eq!(bench.rounds, 3);
        // An addition that the bench did not make is as bad as one that was lost.
        bench.weights.update(0, &[0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0], 1.0);
        assert!(bench.round(1, Duration::ZERO).is_err());
    }

    #[test]
    fn wrong_weights_are_noticed() {
        assert!(verify(&[3.0, 0.0, 4.0], 7).is_ok());
        assert!(verify(&[3.0, 0.0, 4.0], 8).is_err());
        assert!(verify(&[3.5, 0.0, 3.5], 7).is_err());
        assert!(verify(&[-1.0, 8.0], 7).is_err());
        assert!(verify(&[f32::NAN, 7.0], 7).is_err());
        let limit = 1u64 << 24;
        assert!(verify(&[(limit - 1) as f32], limit - 1).is_ok());
        assert!(verify(&[limit as f32], limit).is_err());
    }

    #[test]
    fn all_elements_are_drawn_and_no_others() {
        let mut counts = [0; 7];
        let mut draw = Draw { key: Key::new(1), drawn: 0 };
        let mut indices = [0; 5];
        for _ in 0..1400 {
            draw.indices(counts.len(), &mut indices);
            indices.iter().for_each(|index| counts[*index as usize] += 1);
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
