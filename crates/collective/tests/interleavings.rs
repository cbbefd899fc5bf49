//! The window's protocol under thousands of thread schedules.
//!
//! The product's [`Pipeline`] runs on a model of shared memory whose every access is a point at
//! which `shuttle` may switch ranks. A staging cell holds the name of what was written to it, and
//! while it is being written, that it is torn; readers know what they must see, before and after
//! they have read. Sleeping is a futex without a time limit, so that a lost wake-up is a deadlock,
//! which shuttle reports.
//!
//! The second half breaks one promise at a time and requires that the exploration notices.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, thread};
use unisono_collective::internals::clock::{Interrupted, Pipeline, Steps, Words};

/// The promise that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// A sleeper announces itself only after its last look at the clock.
    AnnouncesLate,
    /// A sleeper does not look whether the clock has moved on meanwhile.
    SleepsBlindly,
    /// A rank looks for sleepers before it sets its clock.
    LooksBeforeTicking,
    /// A rank sets its clock and wakes no other.
    WakesNobody,
    /// Clocks read one too high: waits end one tick too early.
    ReadsAhead,
    /// Two staging buffers are the same memory.
    SharesBuffers,
    /// There is one slot for the record of calls.
    SharesSlots,
    /// A rank that leaves a call in place does not say so.
    LeavesSilently,
}

/// What the ranks do.
#[derive(Clone, Debug)]
struct Program {
    ranks: usize,
    buffers: usize,
    /// Segments of each call, and whether it publishes.
    calls: Vec<(usize, bool)>,
    /// Whether the second, fourth, … call is in place.
    in_place: bool,
    /// The rank and wait that the end of the group interrupts in the last call, after which the rank uses its
    /// buffer again.
    leaves: Option<(usize, u32)>,
    /// Busy turns before sleeping.
    spins: u32,
    /// Where the clocks start.
    start: u32,
    fault: Fault,
}

/// One rank's part of the shared memory.
struct Region {
    clock: AtomicU32,
    sleepers: AtomicU32,
    futex: (Mutex<()>, Condvar),
    /// What each buffer holds for others to fold.
    staged: Vec<AtomicU64>,
    /// What each buffer holds for others to collect.
    published: Vec<AtomicU64>,
    /// The buffer of a call in place: of each segment what others fold, and what they collect.
    lent: Vec<[AtomicU64; 2]>,
    /// Whether its owner has left a call in place.
    left: AtomicU32,
    /// The last calls of this rank.
    record: Vec<AtomicU64>,
}

/// A cell that is being written.
const TORN: u64 = u64::MAX;

/// Slots for calls; the product has more.
const SLOTS: usize = 2;

fn cells(n: usize) -> Vec<AtomicU64> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

/// The name of a segment of a call as staged or published.
fn name(call: usize, segment: usize, published: bool) -> u64 {
    (call as u64 + 1) << 32 | (segment as u64) << 1 | u64::from(published)
}

fn write(cell: &AtomicU64, value: u64) {
    cell.store(TORN, SeqCst);
    cell.store(value, SeqCst);
}

/// Reading takes a while: what is read must stay what it is.
fn expect(cell: &AtomicU64, value: u64, what: &str) {
    for _ in 0..2 {
        let found = cell.load(SeqCst);
        assert_eq!(found, value, "{what}: found {found:#x}, expected {value:#x}");
    }
}

struct View<'a> {
    regions: &'a [Region],
    me: usize,
    program: &'a Program,
    /// A clock value to be set late.
    pending: Cell<Option<u32>>,
    /// Looks at clocks until this rank is interrupted.
    patience: Cell<Option<u32>>,
}

impl Words for View<'_> {
    fn ranks(&self) -> usize {
        self.regions.len()
    }

    fn me(&self) -> usize {
        self.me
    }

    fn clock(&self, rank: usize) -> u32 {
        let ahead = u32::from(self.program.fault == Fault::ReadsAhead);
        self.regions[rank].clock.load(SeqCst).wrapping_add(ahead)
    }

    fn set_clock(&self, value: u32) {
        if self.program.fault == Fault::LooksBeforeTicking {
            self.pending.set(Some(value));
        } else {
            self.regions[self.me].clock.store(value, SeqCst);
        }
    }

    fn sleepers(&self) -> u32 {
        let sleepers = self.regions[self.me].sleepers.load(SeqCst);
        if let Some(value) = self.pending.take() {
            self.regions[self.me].clock.store(value, SeqCst);
        }
        sleepers
    }

    fn announce_sleep(&self, rank: usize, sleeping: bool) {
        let sleepers = &self.regions[rank].sleepers;
        match (sleeping, self.program.fault) {
            (true, Fault::AnnouncesLate) => {}
            (true, _) => _ = sleepers.fetch_add(1, SeqCst),
            (false, Fault::AnnouncesLate) => {}
            (false, _) => _ = sleepers.fetch_sub(1, SeqCst),
        }
    }

    fn sleep(&self, rank: usize, seen: u32, _target: u32) -> Result<(), Interrupted> {
        if let Some(patience) = self.patience.get() {
            // The group has ended: this rank hears of it by itself.
            self.patience.set(Some(patience.saturating_sub(1)));
            if patience == 0 {
                return Err(Interrupted);
            }
            thread::yield_now();
            return Ok(());
        }
        let (lock, woken) = &self.regions[rank].futex;
        let guard = lock.lock().unwrap();
        if self.program.fault != Fault::SleepsBlindly && self.clock(rank) != seen {
            return Ok(());
        }
        let late = self.program.fault == Fault::AnnouncesLate;
        if late {
            self.regions[rank].sleepers.fetch_add(1, SeqCst);
        }
        drop(woken.wait(guard).unwrap());
        if late {
            self.regions[rank].sleepers.fetch_sub(1, SeqCst);
        }
        Ok(())
    }

    fn wake(&self) {
        if self.program.fault == Fault::WakesNobody {
            return;
        }
        let (lock, woken) = &self.regions[self.me].futex;
        // Like the kernel, which looks at the word and lines up the sleeper in one step.
        let _guard = lock.lock().unwrap();
        woken.notify_all();
    }

    fn spin(&self, turn: u32) -> bool {
        if turn < self.program.spins {
            thread::yield_now();
            return true;
        }
        false
    }
}

/// One call of one rank.
struct Run<'a> {
    regions: &'a [Region],
    me: usize,
    call: usize,
    publishes: bool,
    in_place: bool,
    fault: Fault,
    /// Whether all that was read was right, in a call that a rank has left.
    was_right: Option<bool>,
}

impl Run<'_> {
    /// Reads what a peer has at a place. In a call that a rank has left it may be anything.
    fn read(&mut self, cell: impl Fn(&Region) -> &AtomicU64, value: u64, what: &str) {
        for rank in (0..self.regions.len()).filter(|rank| *rank != self.me) {
            let cell = cell(&self.regions[rank]);
            match &mut self.was_right {
                Some(was_right) => *was_right &= (0..2).all(|_| cell.load(SeqCst) == value),
                None => expect(cell, value, what),
            }
        }
    }

    fn peers(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().enumerate().filter(|(rank, _)| *rank != self.me).map(|(_, r)| r)
    }

    fn buffer(&self, buffer: usize) -> usize {
        if self.fault == Fault::SharesBuffers { buffer.saturating_sub(1) } else { buffer }
    }

    fn slot(&self) -> usize {
        if self.fault == Fault::SharesSlots { 0 } else { self.call % SLOTS }
    }
}

impl Steps for Run<'_> {
    fn stage(&mut self, segment: usize, buffer: usize) {
        let (own, buffer) = (&self.regions[self.me], self.buffer(buffer));
        write(&own.staged[buffer], name(self.call, segment, false));
        // Staging takes the whole buffer, also the hole in which results were published.
        own.published[buffer].store(TORN, SeqCst);
    }

    fn fold(&mut self, segment: usize, buffer: usize) {
        if self.in_place {
            self.read(|peer| &peer.lent[segment][0], name(self.call, segment, false), "a fold");
            let own = &self.regions[self.me].lent[segment];
            if self.publishes {
                write(&own[1], name(self.call, segment, true));
            }
            return;
        }
        let buffer = self.buffer(buffer);
        for peer in self.peers() {
            expect(&peer.staged[buffer], name(self.call, segment, false), "a fold");
        }
        if self.publishes {
            let own = &self.regions[self.me];
            write(&own.published[buffer], name(self.call, segment, true));
        }
    }

    fn collect(&mut self, segment: usize, buffer: usize) {
        if self.in_place {
            let (part, published) = (usize::from(self.publishes), self.publishes);
            let name = name(self.call, segment, published);
            self.read(|peer| &peer.lent[segment][part], name, "a collect");
            if published {
                // What is collected replaces what others have folded.
                write(&self.regions[self.me].lent[segment][0], TORN);
            }
            return;
        }
        let buffer = self.buffer(buffer);
        for peer in self.peers() {
            let cells = if self.publishes { &peer.published } else { &peer.staged };
            expect(&cells[buffer], name(self.call, segment, self.publishes), "a collect");
        }
    }

    fn entered(&mut self) -> Result<(), Interrupted> {
        for peer in self.peers() {
            expect(&peer.record[self.slot()], self.call as u64 + 1, "the record of a call");
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Interrupted> {
        let any_left = self.regions.iter().any(|region| region.left.load(SeqCst) != 0);
        if any_left { Err(Interrupted) } else { Ok(()) }
    }
}

/// The most segments of a call in place.
const LENT: usize = 8;

/// Runs the program once, under shuttle's control.
fn execute(program: &Program) {
    let region = |_| Region {
        clock: AtomicU32::new(program.start),
        sleepers: AtomicU32::new(0),
        futex: (Mutex::new(()), Condvar::new()),
        staged: cells(program.buffers),
        published: cells(program.buffers),
        lent: (0..LENT).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
        left: AtomicU32::new(0),
        record: cells(SLOTS),
    };
    let regions: Arc<Vec<Region>> = Arc::new((0..program.ranks).map(region).collect());
    let ranks: Vec<_> = (0..program.ranks)
        .map(|me| {
            let (regions, program) = (regions.clone(), program.clone());
            thread::spawn(move || {
                let mut pipeline =
                    Pipeline::starting_at(program.start, program.ranks, program.buffers);
                let (pending, patience) = (Cell::new(None), Cell::new(None));
                let view = View { regions: &regions, me, program: &program, pending, patience };
                for (call, &(segments, publishes)) in program.calls.iter().enumerate() {
                    let in_place = program.in_place && call % 2 == 1;
                    let (regions, fault, is_last) =
                        (&*regions, program.fault, call + 1 == program.calls.len());
                    let was_right = program.leaves.filter(|_| is_last).map(|_| true);
                    let mut run = Run { regions, me, call, publishes, in_place, fault, was_right };
                    regions[me].record[run.slot()].store(call as u64 + 1, SeqCst);
                    if !in_place {
                        let ran = pipeline.run(&view, segments, publishes, &mut run);
                        ran.expect("nothing interrupts");
                        continue;
                    }
                    for (segment, lent) in regions[me].lent.iter().take(segments).enumerate() {
                        write(&lent[0], name(call, segment, false));
                    }
                    if let Some((who, wait)) = program.leaves.filter(|_| is_last) {
                        // The others hear of the end of the group some time later.
                        view.patience.set(Some(if who == me { wait } else { 200 }));
                    }
                    let ran = pipeline.run_in_place(&view, segments, publishes, &mut run);
                    if ran.is_err() && program.fault != Fault::LeavesSilently {
                        regions[me].left.store(1, SeqCst);
                    }
                    assert!(ran.is_err() || run.was_right != Some(false), "a torn result");
                    assert!(ran.is_ok() || run.was_right.is_some(), "nothing interrupts");
                    // The caller has its buffer back.
                    for lent in regions[me].lent.iter().flatten() {
                        lent.store(TORN, SeqCst);
                    }
                }
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
    if program.leaves.is_some() {
        return;
    }
    let ticks = |(call, &(segments, publishes)): (usize, &(usize, bool))| match publishes {
        _ if program.in_place && call % 2 == 1 => 2 + if publishes { segments } else { 0 },
        true => 2 * segments,
        false => segments,
    };
    let ticks: usize = program.calls.iter().enumerate().map(ticks).sum();
    for region in regions.iter() {
        assert_eq!(region.clock.load(SeqCst), program.start.wrapping_add(ticks as u32));
        assert_eq!(region.sleepers.load(SeqCst), 0);
    }
}

fn explore(scheduler: impl Scheduler + 'static, program: &Program) {
    let mut config = Config::new();
    config.stack_size = 1 << 17;
    config.max_steps = MaxSteps::FailAfter(1_000_000);
    config.failure_persistence = FailurePersistence::Print;
    let program = program.clone();
    Runner::new(scheduler, config).run(move || execute(&program));
}

fn program(ranks: usize, buffers: usize, calls: &[(usize, bool)]) -> Program {
    let (calls, in_place, leaves) = (calls.to_vec(), false, None);
    Program { ranks, buffers, calls, in_place, leaves, spins: 0, start: 0, fault: Fault::None }
}

/// Calls that publish and calls that do not, shorter and longer than the pipeline, in an order in
/// which each kind follows each.
const MIXED: [(usize, bool); 8] =
    [(1, true), (3, true), (1, false), (2, false), (5, true), (4, false), (2, true), (1, true)];

/// Seeds are fixed, so that a failure is found again.
fn holds(program: &Program, iterations: usize) {
    explore(RandomScheduler::new_from_seed(7, iterations), program);
    for depth in [2, 4] {
        explore(PctScheduler::new_from_seed(11, depth, iterations / 2), program);
    }
}

#[test]
fn two_ranks_never_read_too_early_nor_write_too_early() {
    for buffers in [4, 5] {
        holds(&program(2, buffers, &MIXED), 4_000);
    }
}

#[test]
fn three_ranks_never_read_too_early_nor_write_too_early() {
    for buffers in [4, 5] {
        holds(&program(3, buffers, &MIXED), 1_500);
    }
}

/// Calls in place between others, each before and after each kind.
#[test]
fn buffers_that_are_read_in_place_are_whole_and_come_back_when_nobody_reads_them() {
    for (ranks, iterations) in [(2, 2_000), (3, 700)] {
        holds(&Program { in_place: true, ..program(ranks, 4, &MIXED) }, iterations);
        let more = [(1, false), (4, true), (2, true), (3, false), (0, true), (0, true)];
        holds(&Program { in_place: true, ..program(ranks, 4, &more) }, iterations);
    }
}

/// The group ends while ranks read each other's buffers. One of them is told sooner, and uses its buffer again.
const LEFT: [(usize, bool); 2] = [(1, true), (3, true)];

#[test]
fn what_was_read_of_a_rank_that_has_left_is_not_taken_for_a_result() {
    for wait in 0..6 {
        let leaves = Some((1, wait));
        holds(&Program { in_place: true, leaves, ..program(3, 4, &LEFT) }, 400);
    }
}

#[test]
fn leaving_silently_is_noticed() {
    let leaves_after = |wait| {
        let (leaves, fault) = (Some((1, wait)), Fault::LeavesSilently);
        Program { in_place: true, leaves, fault, ..program(3, 4, &LEFT) }
    };
    assert!((0..6).any(|wait| notices(&leaves_after(wait)).is_some()));
}

#[test]
fn busy_waiting_changes_nothing() {
    holds(&Program { spins: 2, ..program(2, 4, &MIXED) }, 300);
    holds(&Program { spins: 1, ..program(3, 4, &[(2, true), (1, false), (1, true)]) }, 300);
}

#[test]
fn clocks_wrap() {
    for before in [1, 6, 20] {
        holds(&Program { start: 0u32.wrapping_sub(before), ..program(2, 4, &MIXED) }, 200);
    }
    // The sign of a difference of clocks changes here.
    holds(&Program { start: i32::MAX as u32 - 5, ..program(2, 4, &MIXED) }, 200);
}

#[test]
fn many_small_calls_keep_their_order() {
    holds(&program(3, 4, &[(1, false); 12]), 200);
    holds(&program(2, 4, &[(1, true); 12]), 200);
    holds(&program(2, 4, &[(0, true), (1, true), (0, false), (1, false)]), 200);
}

/// As far as the bound goes, this leaves out no schedule that differs in its last decisions.
#[test]
fn the_first_schedules_in_depth_first_order_hold() {
    let scheduler = shuttle::scheduler::DfsScheduler::new(Some(5_000), false);
    explore(scheduler, &program(2, 4, &[(1, true), (1, false)]));
}

/// Whether the exploration notices what is broken; the message of its panic.
fn notices(program: &Program) -> Option<String> {
    let attempt = catch_unwind(AssertUnwindSafe(|| holds(program, 2_000)));
    attempt.err().map(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
    })
}

#[test]
fn lost_wake_ups_are_noticed() {
    for fault in
        [Fault::AnnouncesLate, Fault::SleepsBlindly, Fault::LooksBeforeTicking, Fault::WakesNobody]
    {
        let message = notices(&Program { fault, ..program(2, 4, &MIXED) });
        let message = message.unwrap_or_else(|| panic!("{fault:?} went unnoticed"));
        assert!(message.contains("deadlock"), "{fault:?}: {message}");
    }
}

#[test]
fn premature_reads_are_noticed() {
    for calls in [&[(3, true)][..], &[(3, false)][..]] {
        let program = Program { fault: Fault::ReadsAhead, ..program(2, 4, calls) };
        assert!(notices(&program).is_some(), "{calls:?}");
    }
    let calls = [(0, false), (1, true)];
    let ahead = Program { fault: Fault::ReadsAhead, in_place: true, ..program(2, 4, &calls) };
    assert!(notices(&ahead).is_some());
}

#[test]
fn premature_writes_are_noticed() {
    for calls in [&[(6, true)][..], &[(6, false)][..], &[(1, false); 8][..]] {
        let program = Program { fault: Fault::SharesBuffers, ..program(2, 4, calls) };
        let message = notices(&program).unwrap_or_else(|| panic!("{calls:?} went unnoticed"));
        assert!(!message.contains("deadlock"), "{message}");
    }
}

#[test]
fn a_record_that_is_overwritten_is_noticed() {
    let program = Program { fault: Fault::SharesSlots, ..program(2, 4, &[(1, false); 6]) };
    assert!(notices(&program).is_some());
}
