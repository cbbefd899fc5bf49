//! The protocol of the window: which rank may touch which staging buffer when.
//!
//! Every rank has one *clock* in shared memory, a counter that it alone advances and all others
//! read. The ranks of a window follow the same program, so a clock value says exactly how far
//! its rank has come: one number per rank orders everything. For every segment a rank *stages*
//! its data and ticks; folds what the others staged and, if the fold is published, ticks again;
//! and collects what the others published. These three overlap: while segment `i` is staged,
//! segment `i−1` is folded and segment `i−2` collected.
//!
//! A rank's staging area holds [`Pipeline::buffers`] segments. A buffer is free again when every
//! peer has moved past its last read of it, which is the peer's next tick after that read; that
//! tick may belong to the next call, so clocks, and the buffers' obligations, run on from call to
//! call.
//!
//! A call on [registered](crate::Registered) memory stages nothing: the ranks read each other's buffers in
//! place. A rank ticks when its buffer holds its input, folds when all have, and comes out of the call when
//! all have ticked once more, after their last read. One that leaves earlier, because the group has ended,
//! says so before it goes: its caller may use the buffer again, and whoever has read it since must not take
//! what it read for the result.
//!
//! Waiting is spinning for a while and then sleeping on a futex of the clock; a clock's owner
//! makes the wake-up call only if a rank sleeps.

/// The shared words behind a window, as one rank sees them. Implemented on real shared memory,
/// and on a model checker's memory in the tests.
pub trait Words {
    /// Number of ranks.
    fn ranks(&self) -> usize;
    /// This rank.
    fn me(&self) -> usize;
    /// Reads a clock; what its owner wrote before that value is visible afterwards.
    fn clock(&self, rank: usize) -> u32;
    /// Sets this rank's clock; sequentially consistent with [`Words::sleepers`].
    fn set_clock(&self, value: u32);
    /// How many ranks sleep on this rank's clock.
    fn sleepers(&self) -> u32;
    /// Announces (or withdraws) that this rank sleeps on a clock.
    fn announce_sleep(&self, rank: usize, sleeping: bool);
    /// Sleeps until the clock differs from `seen`; may return early. `Err` ends the wait.
    fn sleep(&self, rank: usize, seen: u32, target: u32) -> Result<(), Interrupted>;
    /// Wakes all that sleep on this rank's clock.
    fn wake(&self);
    /// One turn of a busy wait; `false` when it is time to sleep.
    fn spin(&self, turn: u32) -> bool;
}

/// The wait ended because the group did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

/// `clock` has reached `target`; both wrap.
pub fn reached(clock: u32, target: u32) -> bool {
    clock.wrapping_sub(target) as i32 >= 0
}

/// Where a rank stands in the endless sequence of segments of its window.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// This rank's clock.
    clock: u32,
    /// Segments staged so far; the next one uses buffer `staged % buffers`.
    staged: usize,
    /// For each buffer, the clock every peer must show before it may be written again.
    free_at: Vec<u32>,
    /// The last clock seen of each rank.
    seen: Vec<u32>,
}

/// The work of a call on one segment.
pub trait Steps {
    /// Copy this rank's data of `segment` into staging buffer `buffer`.
    fn stage(&mut self, segment: usize, buffer: usize);
    /// Combine what others have staged in their buffer `buffer`.
    fn fold(&mut self, segment: usize, buffer: usize);
    /// Copy what others have published in their buffer `buffer`.
    fn collect(&mut self, segment: usize, buffer: usize);
    /// All ranks have entered this call; `Err` if they disagree about it.
    fn entered(&mut self) -> Result<(), Interrupted> {
        Ok(())
    }
    /// This rank has read for the last time in a call [in place](Pipeline::run_in_place); `Err` if a rank has
    /// left the call before.
    fn read(&mut self) -> Result<(), Interrupted> {
        Ok(())
    }
}

impl Pipeline {
    /// The start, before any segment.
    pub fn new(ranks: usize, buffers: usize) -> Pipeline {
        Pipeline::starting_at(0, ranks, buffers)
    }

    /// The start, with all clocks at `clock`.
    pub fn starting_at(clock: u32, ranks: usize, buffers: usize) -> Pipeline {
        // A rank shows that it no longer reads a segment when it stages the third one after it:
        // with three buffers, all ranks would wait for each other to do so.
        assert!(buffers >= 4, "too few buffers for the segments in flight");
        Pipeline { clock, staged: 0, free_at: vec![clock; buffers], seen: vec![clock; ranks] }
    }

    /// The number of staging buffers.
    pub fn buffers(&self) -> usize {
        self.free_at.len()
    }

    /// Runs `segments` segments through the window.
    ///
    /// With `publishes`, collecting a segment waits until all ranks have folded it; without,
    /// folding and collecting both follow staging. Both must be equal on all ranks.
    pub fn run(
        &mut self,
        words: &impl Words,
        segments: usize,
        publishes: bool,
        steps: &mut impl Steps,
    ) -> Result<(), Interrupted> {
        let ticks = Ticks { base: self.clock, segments: segments as u32, publishes };
        let first = self.staged;
        let buffers = self.buffers();
        let buffer = |segment: usize| (first + segment) % buffers;
        let lag = if publishes { 2 } else { 1 };
        for i in 0..segments + lag {
            if i < segments {
                self.wait_for_all(words, self.free_at[buffer(i)])?;
                steps.stage(i, buffer(i));
                self.free_at[buffer(i)] = ticks.released(i as u32);
                self.tick(words);
                self.staged += 1;
            }
            if i >= 1 && i - 1 < segments {
                self.wait_for_all(words, ticks.staged(i as u32 - 1))?;
                if i == 1 {
                    steps.entered()?;
                }
                steps.fold(i - 1, buffer(i - 1));
                if publishes {
                    self.tick(words);
                } else {
                    steps.collect(i - 1, buffer(i - 1));
                }
            }
            if publishes && i >= 2 {
                self.wait_for_all(words, ticks.folded(i as u32 - 2))?;
                steps.collect(i - 2, buffer(i - 2));
            }
        }
        debug_assert_eq!(self.clock, ticks.end());
        Ok(())
    }

    /// Runs `segments` segments of buffers that all ranks can read where they are: nothing is staged.
    ///
    /// With `publishes`, collecting a segment waits until all ranks have folded it. After an error, others may
    /// still read this rank's buffer: it has to tell them, in a way that [`Steps::read`] sees, before its caller
    /// uses the buffer again.
    pub fn run_in_place(
        &mut self,
        words: &impl Words,
        segments: usize,
        publishes: bool,
        steps: &mut impl Steps,
    ) -> Result<(), Interrupted> {
        self.tick(words);
        let entered = self.clock;
        self.wait_for_all(words, entered)?;
        steps.entered()?;
        for i in 0..segments + usize::from(publishes) {
            if i < segments {
                steps.fold(i, 0);
                if publishes {
                    self.tick(words);
                } else {
                    steps.collect(i, 0);
                }
            }
            if publishes && i >= 1 {
                // Each segment that is folded is a tick.
                self.wait_for_all(words, entered.wrapping_add(i as u32))?;
                steps.collect(i - 1, 0);
            }
        }
        steps.read()?;
        self.tick(words);
        self.wait_for_all(words, self.clock)
    }

    fn tick(&mut self, words: &impl Words) {
        self.clock = self.clock.wrapping_add(1);
        words.set_clock(self.clock);
        if words.sleepers() > 0 {
            words.wake();
        }
    }

    fn wait_for_all(&mut self, words: &impl Words, target: u32) -> Result<(), Interrupted> {
        let (me, ranks) = (words.me(), words.ranks());
        // Starting after ourselves spreads the readers over the clocks.
        for rank in (me + 1..ranks).chain(0..me) {
            if !reached(self.seen[rank], target) {
                self.seen[rank] = wait_for(words, rank, target)?;
            }
        }
        Ok(())
    }
}

/// Waits until a rank's clock has reached `target`; returns what it shows then.
fn wait_for(words: &impl Words, rank: usize, target: u32) -> Result<u32, Interrupted> {
    let mut turn = 0;
    loop {
        let clock = words.clock(rank);
        if reached(clock, target) {
            return Ok(clock);
        }
        if words.spin(turn) {
            turn += 1;
            continue;
        }
        words.announce_sleep(rank, true);
        // The owner sets its clock and then looks for sleepers; we announce ourselves and then
        // look at the clock. One of the two sees the other.
        let clock = words.clock(rank);
        let slept = if reached(clock, target) { Ok(()) } else { words.sleep(rank, clock, target) };
        words.announce_sleep(rank, false);
        slept?;
    }
}

/// The clock values of one call, the same for every rank.
#[derive(Clone, Copy)]
struct Ticks {
    /// The clock before the call.
    base: u32,
    segments: u32,
    publishes: bool,
}

impl Ticks {
    /// The clock of a rank that has staged segment `i`.
    fn staged(&self, i: u32) -> u32 {
        // Ticks alternate: stage 0, stage 1, fold 0, stage 2, fold 1, …
        let ticks = if self.publishes && i > 0 { 2 * i } else { i + 1 };
        self.base.wrapping_add(ticks)
    }

    /// The clock of a rank that has folded segment `i`.
    fn folded(&self, i: u32) -> u32 {
        let ticks = if i + 1 == self.segments { 2 * self.segments } else { 2 * i + 3 };
        self.base.wrapping_add(ticks)
    }

    /// The clock of a rank that no longer reads segment `i`: its first tick after the last read.
    fn released(&self, i: u32) -> u32 {
        match self.publishes {
            true if i + 3 < self.segments => self.staged(i + 3),
            true if i + 2 < self.segments => self.folded(i + 2),
            false if i + 2 < self.segments => self.staged(i + 2),
            _ => self.end().wrapping_add(1),
        }
    }

    /// The clock after the call.
    fn end(&self) -> u32 {
        self.base.wrapping_add(if self.publishes { 2 * self.segments } else { self.segments })
    }
}
