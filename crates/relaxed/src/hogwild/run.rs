//! Threads that train together.
//!
//! Every thread repeats: claim one of the updates that remain, take a step, count it, and hand a
//! record of it to the caller's thread. The claim is a counter that all threads share; it is touched
//! once per step, before a forward and a backward pass, and makes the number of updates exact. Before
//! it claims, a thread checks whether the run was stopped or another thread has ended, for whatever
//! reason; so a run ends with the steps that are under way.

use std::panic::resume_unwind;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use super::Clocks;
use crate::events::Update;
use crate::server::core::{Age, PushId};
use crate::server::wire::Measured;
use crate::{Clock, Life};

/// Records that wait for the caller's thread. With room for fewer, threads wait for a caller who
/// writes to a slow disk; more is only memory.
const WAITING: usize = 1024;

/// What a thread says about a step it has taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The loss the gradient was computed at.
    pub loss: f32,
    /// Samples the gradient was computed from.
    pub samples: u64,
    /// Seconds of computing it.
    pub compute: f64,
}

/// Runs `body` on so many threads, which together make so many updates, and gives `record` what they
/// report, on the caller's thread. Returns what the bodies did, and the number of updates that were made.
///
/// Updates are numbered in the order in which the reports arrive.
///
/// # Errors
/// The first error of a thread, by number. The others have finished their steps by then, so that the
/// weights hold whole updates, but for what the failed step had made of its own.
///
/// # Panics
/// If a thread panics, or `record` does, with the same panic, once all threads have ended; whatever
/// errors others returned. Without any threads.
pub fn run<T: Send, E: Send>(
    threads: usize,
    updates: u64,
    stop: &AtomicBool,
    began: Instant,
    body: impl Fn(Thread<'_>) -> Result<T, E> + Sync,
    mut record: impl FnMut(Update),
) -> Result<(Vec<T>, u64), E> {
    assert!(threads > 0, "training takes at least one thread");
    let shared = Shared {
        updates,
        stop,
        began,
        claimed: AtomicU64::new(0),
        ended: AtomicBool::new(false),
        clocks: Clocks::new(threads),
        threads,
    };
    let (shared, body) = (&shared, &body);
    let mut made = 0;
    let outcomes: Vec<Result<T, E>> = thread::scope(|scope| {
        let (reports, received) = sync_channel(WAITING);
        let spawn = |number: usize| {
            let thread = Thread { shared, number, reports: reports.clone(), begun: None };
            scope.spawn(move || body(thread))
        };
        let threads: Vec<_> = (0..threads).map(spawn).collect();
        drop(reports);
        // Ends when the last thread does. If `record` panics, `received` is dropped, and the threads
        // find that their reports are not received any more.
        for mut report in received {
            made += 1;
            report.update = made;
            record(report);
        }
        let join = |thread: ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    Ok((outcomes.into_iter().collect::<Result<_, E>>()?, made))
}

/// What the threads of a run share beside the weights.
struct Shared<'a> {
    updates: u64,
    stop: &'a AtomicBool,
    began: Instant,
    threads: usize,
    /// Updates that were claimed, and perhaps made: more than there are to make, in the end.
    claimed: AtomicU64,
    /// Whether a thread has ended.
    ended: AtomicBool,
    clocks: Clocks,
}

/// One thread's part of a run. When it is dropped, be it by a panic, the other threads end after the
/// step they are in.
pub struct Thread<'a> {
    shared: &'a Shared<'a>,
    number: usize,
    reports: SyncSender<Update>,
    begun: Option<Begun>,
}

/// What was known when an update was claimed.
struct Begun {
    clock: Clock,
    lead: u64,
    version: u64,
}

impl Thread<'_> {
    /// Which thread this is, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Claims an update, before the weights are read: this thread's clock. `None` if the run is over.
    ///
    /// The flags come first: who claims an update makes it. They and the counter say nothing about other
    /// memory, and are relaxed.
    pub fn begin(&mut self) -> Option<Clock> {
        let Shared { updates, claimed, clocks, .. } = self.shared;
        if self.is_over() || claimed.fetch_add(1, Relaxed) >= *updates {
            return None;
        }
        let clock = clocks.of(self.number);
        let lead = clock.lead_over(clocks.slowest());
        self.begun = Some(Begun { clock, lead, version: clocks.of_others(self.number) });
        Some(clock)
    }

    /// The update that was claimed is made. `false` if the caller of the run takes no more reports.
    ///
    /// # Panics
    /// If none was claimed.
    pub fn end(&mut self, step: Step) -> bool {
        let Begun { clock, lead, version } = self.begun.take().expect("an update was claimed");
        let Step { loss, samples, compute } = step;
        let delay = self.shared.clocks.of_others(self.number) - version;
        self.shared.clocks.tick(self.number);
        let report = Update {
            time: self.shared.began.elapsed().as_secs_f64(),
            // The caller's thread numbers updates.
            update: 0,
            push: PushId {
                worker: self.number as u32,
                life: Life(1),
                number: clock.next().0,
                clock,
            },
            age: Age { lead, delay, present: self.shared.threads as u32 },
            // No thread waits for another, and nothing leaves the process.
            measured: Measured { loss, samples, compute, ..Measured::default() },
        };
        self.reports.send(report).is_ok()
    }

    /// Whether the run was stopped, or another thread has ended.
    pub fn is_over(&self) -> bool {
        self.shared.stop.load(Relaxed) || self.shared.ended.load(Relaxed)
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        self.shared.ended.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use super::super::SharedWeights;
    use super::*;

    const STEP: Step = Step { loss: 0.5, samples: 3, compute: 0.25 };

    /// A run of threads on shared weights, each of which calls a closure for every step.
    #[derive(Clone, Copy)]
    struct Hogwild<'a> {
        weights: &'a SharedWeights,
        threads: usize,
        updates: u64,
        stop: &'a AtomicBool,
        began: Instant,
    }

    impl Hogwild<'_> {
        /// Every thread calls `start` with its number, and then what that returned for every step.
        fn train<S, E>(
            &self,
            start: impl Fn(usize) -> Result<S, E> + Sync,
            record: impl FnMut(Update),
        ) -> Result<u64, E>
        where
            S: FnMut(Clock, &SharedWeights) -> Result<Step, E>,
            E: Send,
        {
            let Hogwild { weights, threads, updates, stop, began } = *self;
            let body = |mut thread: Thread<'_>| {
                let mut step = start(thread.number())?;
                while let Some(clock) = thread.begin() {
                    let step = step(clock, weights)?;
                    if !thread.end(step) {
                        break;
                    }
                }
                Ok(())
            };
            super::run(threads, updates, stop, began, body, record).map(|(_, made)| made)
        }
    }

    fn run<'a>(weights: &'a SharedWeights, updates: u64, stop: &'a AtomicBool) -> Hogwild<'a> {
        Hogwild { weights, threads: 3, updates, stop, began: Instant::now() }
    }

    fn subtract_one(weights: &SharedWeights) -> Result<Step, String> {
        weights.update(0, &[1.0], 1.0);
        Ok(STEP)
    }

    #[test]
    fn exactly_as_many_updates_are_made_and_recorded() {
        let (weights, stop) = (SharedWeights::new([[0.0]]), AtomicBool::new(false));
        let mut records: Vec<Update> = Vec::new();
        let made = run(&weights, 5000, &stop)
            .train(|_| Ok(|_, weights: &_| subtract_one(weights)), |record| records.push(record));
        assert_eq!(made, Ok(5000));
        assert_eq!(weights.into_parameters(), [[-5000.0]]);

        assert!(records.iter().map(|record| record.update).eq(1..=5000));
        for thread in 0..3 {
            let own: Vec<_> =
                records.iter().filter(|record| record.push.worker == thread).collect();
            assert!(own.iter().map(|record| record.push.number).eq(1..=own.len() as u64));
            assert!(own.iter().all(|record| record.push.clock.next().0 == record.push.number));
            assert!(own.is_sorted_by_key(|record| record.time));
            // What others did during one's steps is part of what they did.
            let delays: u64 = own.iter().map(|record| record.age.delay).sum();
            assert!(delays <= 5000 - own.len() as u64, "{delays}");
            assert!(own.iter().all(|record| record.age.lead <= record.push.clock.0));
        }
        let Update { push, age, measured, .. } = records.last().unwrap();
        assert_eq!((measured.loss, measured.samples, measured.compute), (0.5, 3, 0.25));
        assert_eq!(
            (push.life, age.present, measured.bytes, measured.blocked),
            (Life(1), 3, 0, 0.0)
        );
    }

    /// The first thread reads, then the second takes four steps, then the first one updates.
    #[test]
    fn delay_and_lead_are_counted() {
        let (weights, stop) = (SharedWeights::new([[0.0]]), AtomicBool::new(false));
        let (has_read, have_updated) = (Barrier::new(2), Barrier::new(2));
        let mut records = Vec::new();
        let started = |thread| {
            let (has_read, have_updated) = (&has_read, &have_updated);
            Ok(move |clock: Clock, weights: &SharedWeights| {
                match (thread, clock.0) {
                    (0, 0) => {
                        has_read.wait();
                        have_updated.wait();
                    }
                    (1, 0) => _ = has_read.wait(),
                    // Its fourth step was counted before this one began.
                    (1, 4) => _ = have_updated.wait(),
                    _ => {}
                }
                subtract_one(weights)
            })
        };
        let run = Hogwild { threads: 2, ..run(&weights, 6, &stop) };
        assert_eq!(run.train(started, |record| records.push(record)), Ok(6));
        let find = |worker: u32, clock: u64| {
            let found = records
                .iter()
                .find(|record| (record.push.worker, record.push.clock) == (worker, Clock(clock)));
            found.unwrap_or_else(|| panic!("step {clock} of {worker} is none of {records:?}"))
        };
        assert!((4..=5).contains(&find(0, 0).age.delay), "{records:?}");
        assert_eq!([0, 1, 2, 3].map(|clock| find(1, clock).age.delay), [0; 4]);
        assert_eq!([0, 1, 2, 3].map(|clock| find(1, clock).age.lead), [0, 1, 2, 3]);
    }

    #[test]
    fn stop_is_honoured() {
        let (weights, stop) = (SharedWeights::new([[0.0]]), AtomicBool::new(false));
        let started = |_| Ok(|_, weights: &_| subtract_one(weights));
        let made = run(&weights, u64::MAX, &stop).train(started, |record| {
            if record.update == 10 {
                stop.store(true, Relaxed);
            }
        });
        let made = made.unwrap();
        assert!(made >= 10);
        assert_eq!(weights.into_parameters(), [[-(made as f32)]]);

        let weights = SharedWeights::new([[0.0]]);
        let made =
            run(&weights, 10, &stop).train(started, |_| panic!("it had been stopped before"));
        assert_eq!(made, Ok(0));
    }

    #[test]
    fn an_error_ends_all_threads() {
        let (weights, stop) = (SharedWeights::new([[0.0]]), AtomicBool::new(false));
        let run = run(&weights, u64::MAX, &stop);
        let started = |thread| {
            Ok(move |clock: Clock, weights: &_| match (thread, clock.0) {
                (1, 7) => Err("out of data".to_owned()),
                _ => subtract_one(weights),
            })
        };
        assert_eq!(run.train(started, |_| ()), Err("out of data".to_owned()));

        let fails = |thread| match thread {
            2 => Err("no data".to_owned()),
            _ => Ok(|_, weights: &_| subtract_one(weights)),
        };
        assert_eq!(run.train(fails, |_| ()), Err("no data".to_owned()));
        assert!(!stop.load(Relaxed), "the caller's flag is the caller's");
    }

    #[test]
    fn panics_end_all_threads_and_reach_the_caller() {
        let (weights, stop) = (SharedWeights::new([[0.0]]), AtomicBool::new(false));
        let run = run(&weights, u64::MAX, &stop);
        let message = |train: &dyn Fn() -> Result<u64, String>| -> String {
            let panic = catch_unwind(AssertUnwindSafe(train)).unwrap_err();
            (*panic.downcast::<&str>().expect("a text")).to_owned()
        };
        // Two threads fail at once, and an error does not hide a panic.
        let both = Barrier::new(2);
        let panics = |thread| {
            let both = &both;
            Ok(move |_, weights: &_| {
                if thread == 1 {
                    return subtract_one(weights);
                }
                both.wait();
                if thread == 0 { Err("an error".to_owned()) } else { panic!("in a step") }
            })
        };
        assert_eq!(message(&|| run.train(panics, |_| ())), "in a step");
        let works = |_| Ok(|_, weights: &_| subtract_one(weights));
        assert_eq!(message(&|| run.train(works, |_| panic!("in record"))), "in record");
    }
}
