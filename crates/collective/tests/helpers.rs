//! Calls that several threads of a rank share: the same bits, the same bytes handed over, the same ends.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use common::{Kind, PATIENCE, Sample, meet, on_all, outcome, reference};
use unisono_collective::{Algorithm, Group, Op, Options, Reduction, Request};

/// Elements of a call that helpers take part in, no multiple of anything.
const COUNT: usize = 400_009;

fn with_threads(threads: usize) -> Options {
    let mut options = Options::default();
    options.threads = Some(threads);
    options
}

/// Threads of this process that are helpers. The kernel keeps fifteen characters of a name.
fn helpers() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().map(|task| {
        let path = task.unwrap().path().join("comm");
        std::fs::read_to_string(path).unwrap_or_default()
    });
    names.filter(|name| name.starts_with("unisono-helper-")).count()
}

/// Every operation on many elements of this type, compared with what it must give.
fn operations<T: Sample>(group: &Group) {
    let (rank, world) = (group.rank(), group.size());
    let all: Vec<Vec<T>> = (0..world).map(|rank| T::samples(COUNT, rank as u64)).collect();
    for reduction in [Reduction::Sum, Reduction::Mean, Reduction::Max] {
        let expected = reference(&all, reduction);
        let what = format!("{} {reduction} of {world}", T::DTYPE);
        for algorithm in Algorithm::ALL {
            if !algorithm.is_canonical() || !algorithm.supports(Op::AllReduce, group.topology()) {
                continue;
            }
            let mut buffer = all[rank].clone();
            let request = Request::all_reduce(&mut buffer, reduction);
            group.run(request.with_algorithm(algorithm)).unwrap();
            T::assert_same(&buffer, &expected, &format!("{what} by {algorithm}"));
        }
        let mut root = all[rank].clone();
        group.reduce_in_place(&mut root, reduction, 1).unwrap();
        T::assert_same(&root, if rank == 1 { &expected } else { &all[rank] }, &what);
    }
    let sum = reference(&all, Reduction::Sum);
    let block = COUNT / world;
    let mut part = T::samples(block, 9);
    group.reduce_scatter(&all[rank][..block * world], &mut part, Reduction::Sum).unwrap();
    T::assert_same(&part, &sum[rank * block..(rank + 1) * block], "reduce-scatter");

    let mut gathered = T::samples(COUNT * world, 9);
    group.all_gather(&all[rank], &mut gathered).unwrap();
    T::assert_same(&gathered, &all.concat(), "all-gather");
    let mut buffer = all[rank].clone();
    group.broadcast(&mut buffer, 1).unwrap();
    T::assert_same(&buffer, &all[1], "broadcast");
    let mut exchanged = T::samples(COUNT * world, 9);
    let sent: Vec<T> = (0..world).flat_map(|_| all[rank].iter().copied()).collect();
    group.all_to_all(&sent, &mut exchanged).unwrap();
    T::assert_same(&exchanged, &all.concat(), "all-to-all");
}

#[test]
fn every_transport_gives_the_bits_of_one_thread() {
    for (kind, world) in [(Kind::Local, 2), (Kind::Shm, 3), (Kind::Tcp, 3), (Kind::LocalHosts, 5)] {
        let groups = kind.start(world, &with_threads(3));
        on_all(&groups, |group| {
            operations::<f32>(group);
            operations::<half::bf16>(group);
        });
        assert!(helpers() >= 2 * world, "{kind:?}: nobody has helped");
    }
}

#[test]
fn several_streams_give_them_too() {
    let mut options = with_threads(4);
    (options.streams, options.segment) = (Some(3), Some(1_000_003));
    let groups = Kind::Tcp.start(2, &options);
    on_all(&groups, operations::<f32>);
}

#[test]
fn memory_that_is_read_in_place_gives_them_too() {
    let groups = Kind::Shm.start(3, &with_threads(3));
    let all: Vec<Vec<f32>> = (0..3).map(|rank| f32::samples(COUNT, rank)).collect();
    let expected = reference(&all, Reduction::Mean);
    on_all(&groups, |group| {
        let mut buffer = group.allocate::<f32>(COUNT).unwrap();
        for _ in 0..5 {
            buffer.copy_from_slice(&all[group.rank()]);
            group.all_reduce(&mut buffer, Reduction::Mean).unwrap();
            f32::assert_same(&buffer, &expected, "in place");
        }
    });
}

/// Each rank may have as many threads as it likes, and hands over the same bytes.
#[test]
fn ranks_need_not_have_as_many_threads() {
    for transport in ["shm", "tcp"] {
        let world = |threads: [usize; 3]| -> Vec<Group> {
            let options = threads.map(|threads| {
                let mut options = with_threads(threads);
                options.transport = transport.parse().unwrap();
                // How many streams there are, ranks would choose by how many threads they have.
                options.streams = Some(2);
                options
            });
            let groups = meet(IpAddr::V4(Ipv4Addr::LOCALHOST), &options);
            groups.into_iter().map(Result::unwrap).collect()
        };
        let handed_over = |groups: &[Group]| {
            on_all(groups, |group| {
                let before = group.traffic().total();
                let mut buffer = vec![1f32; COUNT];
                let request = Request::all_reduce(&mut buffer, Reduction::Sum);
                let algorithm = match transport {
                    "shm" => Algorithm::Window,
                    _ => Algorithm::Pairwise,
                };
                group.run(request.with_algorithm(algorithm)).unwrap();
                group.traffic().total() - before
            })
        };
        let uneven = world([1, 4, 2]);
        assert_eq!(handed_over(&uneven), handed_over(&world([1, 1, 1])), "{transport}");
        on_all(&uneven, operations::<f32>);
    }
}

/// Aborted at any moment of a call, all ranks come out of it, and no helper is left behind.
#[test]
fn a_group_ends_in_the_middle_of_a_shared_call() {
    for kind in [Kind::Local, Kind::Shm, Kind::Tcp] {
        let mut broken = 0;
        for attempt in 0..12 {
            let groups = kind.start(3, &with_threads(3));
            let works: Vec<_> = groups
                .iter()
                .map(|group| {
                    let buffer = vec![1f32; 8 * COUNT];
                    group.submit_all_reduce(buffer, Reduction::Sum).unwrap()
                })
                .collect();
            std::thread::sleep(Duration::from_micros(200 * attempt));
            groups[attempt as usize % 3].abort("on purpose");
            for work in works {
                match work.wait() {
                    Ok(sum) => assert!(sum.iter().all(|x| *x == 3.0)),
                    Err(_) => broken += 1,
                }
            }
        }
        assert!(broken > 0, "{kind:?}: no call was broken off");
    }
}

#[test]
fn a_rank_that_goes_away_ends_the_calls_of_the_others() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let mut groups = kind.start(3, &with_threads(3));
        on_all(&groups, |group| {
            group.all_reduce(&mut vec![1f32; COUNT], Reduction::Sum).unwrap();
        });
        drop(groups.remove(1));
        on_all(&groups, |group| {
            // SAFETY: the buffer outlives the wait.
            let mut buffer = vec![1f32; COUNT];
            // SAFETY: the buffer outlives the work, which is waited for.
            let work = unsafe { group.submit(Request::all_reduce(&mut buffer, Reduction::Sum)) };
            assert!(outcome(&work.unwrap()).is_err());
        });
    }
}

/// One test sees all helpers of the process, so it waits until those of the others have gone.
#[test]
fn helpers_start_with_a_large_call_and_end_with_the_group() {
    let groups = Kind::Local.start(2, &with_threads(2));
    let name = |group: &Group| format!("unisono-helper-{}-0", group.rank());
    on_all(&groups, |group| {
        group.all_reduce(&mut vec![1f32; COUNT], Reduction::Sum).unwrap();
    });
    assert!(groups.iter().all(|group| name(group).len() > 15) && helpers() >= 2);
    let parts = on_all(&groups, |group| group.split(Some(0), 0).unwrap().unwrap());
    assert!(parts.iter().all(|part| part.options().threads == Some(2)));
    drop((groups, parts));
    let deadline = Instant::now() + PATIENCE * 3;
    while helpers() > 0 {
        assert!(Instant::now() < deadline, "{} helpers are left", helpers());
        std::thread::sleep(Duration::from_millis(5));
    }
}
