//! What a group takes from the process, counted: heap allocations, bytes, threads, descriptors.
//!
//! One test, because whatever else the process does would be counted too.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::{Kind, on_all};
use unisono_collective::{Algorithm, Group, Op, Options, Reduction, Request};

/// The system's allocator, watched.
struct Counting;

/// Whether allocations are counted now, and how many were.
static WATCHED: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Bytes in use.
static LIVE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, SeqCst);
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: passed on from the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size as isize - layout.size() as isize);
        // SAFETY: passed on from the caller.
        unsafe { System.realloc(address, layout, size) }
    }
}

fn note(bytes: isize) {
    LIVE.fetch_add(bytes, SeqCst);
    if WATCHED.load(SeqCst) {
        ALLOCATIONS.fetch_add(1, SeqCst);
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn what_a_group_takes() {
    // The first of everything (thread-local storage, lazily read settings) is not the group's.
    drop(Kind::Tcp.start(2, &Options::default()));
    let baseline = Resources::now();

    the_count_counts();
    blocking_calls_on_an_idle_group_need_no_thread();
    for (kind, world) in [(Kind::Local, 3), (Kind::Shm, 3), (Kind::Tcp, 3), (Kind::LocalHosts, 3)] {
        steady_state_allocates_nothing(kind, world);
        memory_does_not_grow_with_the_tensor(kind);
        baseline.are_back(&format!("{kind:?}"));
    }
    for kind in [Kind::Shm, Kind::Tcp] {
        shared_calls_allocate_nothing(kind);
        baseline.are_back("helpers");
    }
    many_streams_allocate_nothing();
    baseline.are_back("many streams");
    hosts_of_one_rank_allocate_nothing();
    baseline.are_back("uneven hosts");
    groups_that_fail_give_everything_back();
    baseline.are_back("failed groups");
}

/// The fewest allocations of a few measurements. What an operation allocates, it allocates in all
/// of them; but on a busy machine a rank may wait so long that it asks the others what they do,
/// and asking allocates.
fn allocations(groups: &[Group], operation: impl Fn(&Group, &mut Buffers) + Sync) -> usize {
    let mut fewest = usize::MAX;
    for _ in 0..10 {
        fewest = fewest.min(allocations_once(groups, &operation));
        if fewest == 0 {
            break;
        }
    }
    fewest
}

/// Calls `operation` on every rank and returns how many allocations the whole process makes while
/// it is repeated. The ranks meet before and after outside the group, in ways that do not
/// allocate.
fn allocations_once(groups: &[Group], operation: impl Fn(&Group, &mut Buffers) + Sync) -> usize {
    /// More than it takes until every queue and list has the room it needs.
    const WARM_UP: usize = 40;
    const REPETITIONS: usize = 60;
    let meeting = Barrier::new(groups.len());
    on_all(groups, |group| {
        let mut buffers = Buffers::new(group.size());
        (0..WARM_UP).for_each(|_| operation(group, &mut buffers));
        if meeting.wait().is_leader() {
            ALLOCATIONS.store(0, SeqCst);
            WATCHED.store(true, SeqCst);
        }
        meeting.wait();
        (0..REPETITIONS).for_each(|_| operation(group, &mut buffers));
        if meeting.wait().is_leader() {
            WATCHED.store(false, SeqCst);
        }
        meeting.wait();
    });
    ALLOCATIONS.load(SeqCst)
}

/// Buffers of one rank, large enough for several segments.
struct Buffers {
    short: Vec<f32>,
    long: Vec<f32>,
    other: Vec<f32>,
}

impl Buffers {
    const COUNT: usize = 6000;

    fn new(world: usize) -> Buffers {
        let long = || vec![0.5; Self::COUNT * world];
        Buffers { short: vec![1.0; Self::COUNT], long: long(), other: long() }
    }
}

/// The measurement itself can fail.
fn the_count_counts() {
    let groups = Kind::Local.start(2, &Options::default());
    let count = allocations(&groups, |group, _| {
        drop(std::hint::black_box(vec![0u8; 10]));
        group.barrier().unwrap();
    });
    assert!(count >= 2 * 60, "{count}");
}

type Operation = (&'static str, fn(&Group, &mut Buffers));

const OPERATIONS: [Operation; 13] = [
    ("all-reduce", |g, b| g.all_reduce(&mut b.short, Reduction::Max).unwrap()),
    ("small all-reduce", |g, b| g.all_reduce(&mut b.short[..10], Reduction::Mean).unwrap()),
    ("reduce-scatter", |g, b| {
        g.reduce_scatter(&b.long, &mut b.short, Reduction::Mean).unwrap();
    }),
    ("all-gather", |g, b| g.all_gather(&b.short, &mut b.long).unwrap()),
    ("broadcast", |g, b| g.broadcast(&mut b.short, 1).unwrap()),
    ("reduce", |g, b| {
        let output = (g.rank() == 1).then_some(&mut b.long[..Buffers::COUNT]);
        g.reduce(&b.short, output, Reduction::Mean, 1).unwrap();
    }),
    ("gather", |g, b| {
        let output = (g.rank() == 0).then_some(&mut b.long[..]);
        g.gather(&b.short, output, 0).unwrap();
    }),
    ("scatter", |g, b| {
        let input = (g.rank() == 0).then_some(&b.long[..]);
        g.scatter(input, &mut b.short, 0).unwrap();
    }),
    ("all-to-all", |g, b| g.all_to_all(&b.long, &mut b.other).unwrap()),
    ("all-to-all in place", |g, b| g.all_to_all_in_place(&mut b.long).unwrap()),
    ("barrier", |g, _| g.barrier().unwrap()),
    ("submit and wait", |g, b| {
        let submit = |buffer: &mut [f32]| {
            // SAFETY: the buffers are borrowed until after the waits.
            unsafe { g.submit(Request::all_reduce(buffer, Reduction::Max)) }.unwrap()
        };
        let works = [submit(&mut b.short), submit(&mut b.long), submit(&mut b.other)];
        works.iter().for_each(|work| work.wait().unwrap());
    }),
    ("send and receive", |g, b| {
        let (next, previous) = ((g.rank() + 1) % g.size(), (g.rank() + g.size() - 1) % g.size());
        let bytes = size_of_val(&b.short[..]);
        // SAFETY: the buffers are borrowed until after the waits.
        let works = unsafe {
            [
                g.submit_send(b.short.as_mut_ptr().cast(), bytes, next, 0),
                g.submit_receive(b.long.as_mut_ptr().cast(), bytes, previous, 0),
            ]
        };
        works.into_iter().for_each(|work| work.unwrap().wait().unwrap());
    }),
];

fn steady_state_allocates_nothing(kind: Kind, world: usize) {
    let mut options = Options::default();
    // Small segments, so that a call has many; frequent heartbeats, so that some are counted.
    options.segment = Some(4096);
    options.timeout = Duration::from_secs(4);
    let groups = kind.start(world, &options);
    for (name, operation) in OPERATIONS {
        let count = allocations(&groups, operation);
        assert_eq!(count, 0, "{name} over {kind:?} allocates");
    }
    for algorithm in Algorithm::ALL {
        if !algorithm.supports(Op::AllReduce, groups[0].topology()) {
            continue;
        }
        let count = allocations(&groups, |group, buffers| {
            let request = Request::all_reduce(&mut buffers.long, Reduction::Mean);
            group.run(request.with_algorithm(algorithm)).unwrap();
        });
        assert_eq!(count, 0, "{algorithm} over {kind:?} allocates");
    }
}

/// Calls that are large enough for helpers.
fn shared_calls_allocate_nothing(kind: Kind) {
    let mut options = Options::default();
    options.threads = Some(3);
    let groups = kind.start(3, &options);
    let tensors: Vec<_> = (0..3).map(|_| std::sync::Mutex::new(vec![1f32; 300_000])).collect();
    let count = allocations(&groups, |group, _| {
        let mut tensor = tensors[group.rank()].lock().unwrap();
        group.all_reduce(&mut tensor, Reduction::Mean).unwrap();
    });
    assert_eq!(count, 0, "a call with helpers over {kind:?} allocates");
}

/// More than a hundred sockets of a rank, for all of which it waits at once.
fn many_streams_allocate_nothing() {
    let mut options = Options::default();
    options.streams = Some(32);
    let groups = Kind::Tcp.start(5, &options);
    let tensors: Vec<_> = (0..5).map(|_| std::sync::Mutex::new(vec![1f32; 300_000])).collect();
    let count = allocations(&groups, |group, _| {
        let mut tensor = tensors[group.rank()].lock().unwrap();
        let request = Request::all_reduce(&mut tensor, Reduction::Mean);
        group.run(request.with_algorithm(Algorithm::Pairwise)).unwrap();
    });
    assert_eq!(count, 0, "a call over many streams allocates");
}

fn hosts_of_one_rank_allocate_nothing() {
    let groups = Group::local_on_hosts(&[0, 0, 1], &Options::default()).unwrap();
    let count = allocations(&groups, |group, buffers| {
        let request = Request::all_reduce(&mut buffers.long, Reduction::Mean);
        group.run(request.with_algorithm(Algorithm::Hierarchical)).unwrap();
    });
    assert_eq!(count, 0, "a hierarchy with a rank alone on its host allocates");
}

/// The bound on what one rank may stage, whatever the tensor.
const STAGING: usize = 16 << 20;

fn memory_does_not_grow_with_the_tensor(kind: Kind) {
    const SMALL: usize = 1 << 20;
    const LARGE: usize = 256 << 20;
    let world = 2;
    let before = LIVE.load(SeqCst);
    let groups = kind.start(world, &Options::default());
    let tensors: Vec<_> = (0..world).map(|_| std::sync::Mutex::new(vec![1u8; LARGE])).collect();
    let tensors_bytes = (LARGE * world) as isize;
    let bytes_after = |bytes: usize| {
        on_all(&groups, |group| {
            let mut tensor = tensors[group.rank()].lock().unwrap();
            group.all_reduce(&mut tensor[..bytes], Reduction::Max).unwrap();
            group.broadcast(&mut tensor[..bytes], 0).unwrap();
            group.all_gather_in_place(&mut tensor[..bytes]).unwrap();
            group.reduce_scatter_in_place(&mut tensor[..bytes], Reduction::Max).unwrap();
        });
        LIVE.load(SeqCst) - before - tensors_bytes
    };
    let (small, large) = (bytes_after(SMALL), bytes_after(LARGE));
    let shared = shared_memory();
    assert!(shared.values().all(|&bytes| bytes <= STAGING), "{kind:?}: {shared:?}");
    assert!(shared.len() <= world, "{kind:?}: {shared:?}");
    let staged: usize = shared.values().sum();
    let owned = large.max(small) as usize / world + staged / world;
    assert!(owned <= STAGING, "{kind:?}: a rank owns {owned} bytes");
    // Decisions about two more sizes, and scratch for full segments instead of a part of one.
    assert!(large - small <= (4 << 20) * world as isize, "{kind:?}: {small} grew to {large}");
    println!("{kind:?}: heap {small} then {large} bytes of {world} ranks, shared {staged}");
}

/// The staging memory of all groups of this process: bytes by file.
fn shared_memory() -> BTreeMap<String, usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = BTreeMap::new();
    for line in maps.lines().filter(|line| line.contains("memfd:unisono")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = fields[0].split_once('-').unwrap();
        let address = |text| usize::from_str_radix(text, 16).unwrap();
        let inode = fields[4].to_owned();
        files.insert(inode, address(end) - address(start));
    }
    files
}

/// A progress thread starts with the first submission, and no earlier.
fn blocking_calls_on_an_idle_group_need_no_thread() {
    let progress_threads = || {
        let names = std::fs::read_dir("/proc/self/task").unwrap().map(|task| {
            let path = task.unwrap().path().join("comm");
            std::fs::read_to_string(path).unwrap_or_default()
        });
        // The kernel keeps fifteen characters of a name.
        names.filter(|name| name.starts_with("unisono-progres")).count()
    };
    for kind in [Kind::Local, Kind::Shm, Kind::Tcp] {
        let groups = kind.start(2, &Options::default());
        on_all(&groups, |group| {
            for _ in 0..10 {
                group.all_reduce(&mut [1f32; 100], Reduction::Sum).unwrap();
                group.barrier().unwrap();
            }
        });
        assert_eq!(progress_threads(), 0, "{kind:?}");
        on_all(&groups, |group| {
            group.submit_all_reduce(vec![1f32; 100], Reduction::Sum).unwrap().wait().unwrap();
        });
        // A thread that starts gives itself its name.
        let deadline = Instant::now() + Duration::from_secs(20);
        while progress_threads() < 2 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(progress_threads(), 2, "{kind:?}");
    }
}

fn groups_that_fail_give_everything_back() {
    for kind in [Kind::Local, Kind::Shm, Kind::Tcp] {
        for _ in 0..5 {
            let groups = kind.start(3, &Options::default());
            let children = on_all(&groups, |group| group.split(Some(0), 0).unwrap());
            on_all(&groups, |group| {
                if group.rank() == 1 {
                    group.epoch().end();
                }
                assert!(group.all_reduce(&mut [1f32; 1000], Reduction::Sum).is_err());
            });
            drop((groups, children));
        }
    }
}

/// What the process holds of the system.
#[derive(Debug, PartialEq, Eq)]
struct Resources {
    threads: usize,
    descriptors: usize,
    shared: usize,
}

impl Resources {
    fn now() -> Resources {
        let entries = |path| std::fs::read_dir(path).unwrap().count();
        Resources {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            shared: shared_memory().len(),
        }
    }

    /// Everything that was taken since has been given back. The kernel may count a thread for a
    /// moment after it was joined.
    fn are_back(&self, after: &str) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Resources::now() != *self {
            assert!(Instant::now() < deadline, "after {after}: {:?} of {self:?}", Resources::now());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
