//! Calls on memory that ranks read of each other in place: the same bits as on any other memory, and the same
//! errors, and no rank takes for a result what it has read of a buffer that was used again.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Kind, Sample, on_all, outcome, worlds};
use half::bf16;
use unisono_collective::{
    Algorithm, Error, Group, InvalidCall, Options, Reduction, Registered, Request,
};

/// Counts below a cache line, around a segment, and of several segments that end unevenly.
const COUNTS: [usize; 6] = [0, 1, 17, 4_096, 300_001, 1 << 20];

fn registered<T: Sample>(group: &Group, values: &[T]) -> Registered<T> {
    let mut buffer = group.allocate(values.len()).expect("there is memory");
    buffer.copy_from_slice(values);
    buffer
}

/// Every operation that can be in place, on memory of both kinds.
fn compare<T: Sample>(group: &Group, count: usize, reduction: Reduction) {
    let (rank, world) = (group.rank(), group.size());
    let what = format!("{count} {} on rank {rank} of {world}", T::DTYPE);
    let values = T::samples(count * world, rank as u64);
    let whole = || values.clone();

    let (mut plain, mut lent) = (whole(), registered(group, &values));
    group.all_reduce(&mut plain, reduction).unwrap();
    group.all_reduce(&mut lent, reduction).unwrap();
    T::assert_same(&lent, &plain, &format!("all-reduce of {what}"));
    // Forced, so that small ones are in place as well.
    lent.copy_from_slice(&values);
    let request = Request::all_reduce(&mut lent, reduction);
    group.run(request.with_algorithm(Algorithm::Window)).or_else(unsupported).unwrap();
    if group.topology().is_one_host() {
        T::assert_same(&lent, &plain, &format!("all-reduce in place of {what}"));
    }

    let (mut plain, lent) = (values[..count].to_vec(), registered(group, &values));
    let mut scattered = plain.clone();
    group.reduce_scatter(&values, &mut plain, reduction).unwrap();
    group.reduce_scatter(&lent, &mut scattered, reduction).unwrap();
    T::assert_same(&scattered, &plain, &format!("reduce-scatter of {what}"));
    T::assert_same(&lent, &values, &format!("the input of a reduce-scatter of {what}"));
    let mut lent = lent;
    group.reduce_scatter_in_place(&mut lent, reduction).unwrap();
    let own = rank * count..(rank + 1) * count;
    T::assert_same(&lent[own.clone()], &plain, &format!("reduce-scatter in place of {what}"));

    let (mut plain, mut lent) = (whole(), registered(group, &values));
    group.all_gather_in_place(&mut plain).unwrap();
    group.all_gather_in_place(&mut lent).unwrap();
    T::assert_same(&lent, &plain, &format!("all-gather of {what}"));

    for root in [0, world - 1] {
        let (mut plain, mut lent) = (whole(), registered(group, &values));
        group.broadcast(&mut plain, root).unwrap();
        group.broadcast(&mut lent, root).unwrap();
        T::assert_same(&lent, &plain, &format!("broadcast of {what}"));
    }
}

fn unsupported(error: Error) -> Result<u32, Error> {
    match error {
        Error::InvalidCall(InvalidCall::UnsupportedAlgorithm { .. }) => Ok(0),
        error => Err(error),
    }
}

#[test]
fn the_bits_are_those_of_other_memory() {
    for kind in Kind::ALL {
        for world in [1, 2, 3, 4, 5] {
            on_all(&kind.start(world, &Options::default()), |group| {
                for count in COUNTS {
                    compare::<f32>(group, count / group.size(), Reduction::Mean);
                }
                compare::<bf16>(group, 5_003, Reduction::Sum);
                compare::<i64>(group, 70_001, Reduction::Max);
            });
        }
    }
}

#[test]
fn short_segments_change_nothing() {
    for segment in [1, 3_000] {
        let mut options = Options::default();
        options.segment = Some(segment);
        on_all(&Kind::Shm.start(3, &options), |group| {
            compare::<f32>(group, 1_001, Reduction::Sum);
        });
    }
}

/// Calls in place, others, and on parts of a buffer, one after the other and waiting in line.
#[test]
fn calls_may_be_mixed() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            let rank = group.rank() as f32;
            let mut buffer = group.allocate::<f32>(200_000).unwrap();
            for round in 0..50 {
                let from = round * 1_000;
                buffer.fill(rank);
                group.all_reduce(&mut buffer[from..], Reduction::Sum).unwrap();
                assert!(buffer[..from].iter().all(|value| *value == rank));
                assert!(buffer[from..].iter().all(|value| *value == 3.0));
                let mut small = [rank; 5];
                group.all_reduce(&mut small, Reduction::Sum).unwrap();
                assert_eq!(small, [3.0; 5]);
            }
            let pending: Vec<_> = (0..4)
                .map(|_| {
                    // Allocated while others wait in line.
                    let mut buffer = group.allocate::<f32>(100_000).unwrap();
                    buffer.fill(rank);
                    group.submit_owned(buffer, |all| Request::all_reduce(all, Reduction::Sum))
                })
                .collect();
            for pending in pending {
                let sums = pending.unwrap().wait().unwrap();
                assert!(sums.iter().all(|value| *value == 3.0));
            }
        });
    }
}

/// Its addresses may be those of other memory afterwards.
#[test]
fn memory_that_is_dropped_is_forgotten() {
    on_all(&Kind::Shm.start(2, &Options::default()), |group| {
        for round in 0..200 {
            let mut lent = group.allocate::<f32>(50_000).unwrap();
            lent.fill(round as f32);
            group.all_reduce(&mut lent, Reduction::Sum).unwrap();
            assert_eq!(lent[49_999], 2.0 * round as f32);
            drop(lent);
            let mut plain = vec![1f32; 50_000];
            group.all_reduce(&mut plain, Reduction::Sum).unwrap();
            assert_eq!(plain[0], 2.0);
        }
    });
}

#[test]
fn ranks_that_pass_other_memory_are_told() {
    type Case = fn(&Group, &mut [f32], &mut [f32]) -> Result<(), Error>;
    let cases: [Case; 2] = [
        |group, lent, plain| {
            let buffer = if group.rank() == 0 { lent } else { plain };
            group.all_reduce(buffer, Reduction::Sum)
        },
        |group, lent, _| {
            let from = 64 * group.rank();
            group.all_reduce(&mut lent[from..from + 550_000], Reduction::Sum)
        },
    ];
    for (case, other) in cases.iter().zip(["in other memory", "at another place of registered"]) {
        let errors = on_all(&Kind::Shm.start(2, &Options::default()), |group| {
            let mut lent = group.allocate::<f32>(600_000).unwrap();
            let mut plain = vec![0f32; 600_000];
            case(group, &mut lent, &mut plain).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("registered memory") && error.contains(other), "{error}");
        }
    }
}

#[test]
fn too_much_memory_and_unequal_amounts_are_refused_on_all_ranks_and_the_group_goes_on() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            // Only one of them asks for more than there is.
            let count = if group.rank() == 0 { 1 << 44 } else { 1 << 10 };
            assert!(matches!(group.allocate::<u8>(count), Err(Error::InvalidCall(_))));
            let all = group.allocate::<u8>(1 << 44).unwrap_err();
            assert!(matches!(all, Error::System { .. }), "{all}");
            assert!(matches!(group.allocate::<f64>(usize::MAX), Err(Error::InvalidCall(_))));
            let mut buffer = group.allocate::<f32>(1_000).unwrap();
            buffer.fill(1.0);
            group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            assert_eq!(buffer[999], 2.0);
        });
    }
}

/// The group ends in the middle of calls, again and again. Whoever is told fills its buffer with what is no sum.
#[test]
fn a_rank_that_leaves_a_call_spoils_no_result() {
    const ENDED: f32 = 1e30;
    for round in 0..30 {
        let groups = Kind::Shm.start(3, &Options::default());
        let buffers = on_all(&groups, |group| group.allocate::<f32>(1 << 18).unwrap());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let abort = groups[round % 3].abort_handle();
            let stop = &stop;
            scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(3_000 + 137 * round as u64));
                abort.abort("the test wants it");
                stop.store(true, Ordering::SeqCst);
            });
            for (group, mut buffer) in groups.iter().zip(buffers) {
                scope.spawn(move || {
                    loop {
                        buffer.fill(1.0);
                        if group.all_reduce(&mut buffer, Reduction::Sum).is_err() {
                            buffer.fill(ENDED);
                            break;
                        }
                        assert!(buffer.iter().all(|sum| *sum == 3.0), "a torn result");
                    }
                });
            }
        });
        assert!(stop.load(Ordering::SeqCst));
    }
}

/// Bytes that others read of a rank count as if it had copied them.
#[test]
fn what_is_read_in_place_is_counted() {
    for world in [2, 3, 4] {
        on_all(&Kind::Shm.start(world, &Options::default()), |group| {
            let mut lent = group.allocate::<f32>(240_000).unwrap();
            let mut plain = vec![0f32; 240_000];
            let sent = |buffer: &mut [f32]| {
                let before = group.traffic().shared;
                let request = Request::all_reduce(buffer, Reduction::Sum);
                group.run(request.with_algorithm(Algorithm::Window)).unwrap();
                group.traffic().shared - before
            };
            assert_eq!(sent(&mut lent), sent(&mut plain));
            assert_eq!(sent(&mut lent), 4 * 240_000);
        });
    }
}

#[test]
fn a_buffer_outlives_its_group() {
    let buffers = on_all(&Kind::Shm.start(2, &Options::default()), |group| {
        let mut buffer = group.allocate::<f32>(100_000).unwrap();
        buffer.fill(1.0);
        // SAFETY: the buffer lives until the wait below is over.
        let work = unsafe { group.submit(Request::all_reduce(&mut buffer, Reduction::Sum)) };
        outcome(&work.unwrap()).unwrap();
        buffer
    });
    assert!(buffers.iter().all(|buffer| buffer[99_999] == 2.0));
}
