//! Calls that are cut in other ways, ranks of several hosts, and ranks that do not agree on a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono_collective::engine::Memory;
use unisono_collective::{
    Algorithm, Dtype, Error, InvalidCall, Op, Options, Rank, Reduction, Request,
};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{DeviceCosts, DeviceGroup, DevicePtr};

use crate::common::{element, same};
use crate::fake::{fake_engine, form, on_all, world};

/// Costs by which bytes count, so that calls are pairwise exchanges.
const BYTES_COUNT: NcclCosts = NcclCosts { group: 1e-12, byte: 1.0, folded: 1.0 };

fn groups(hosts: &[u32]) -> Vec<DeviceGroup> {
    let engine = fake_engine(1024, Some(BYTES_COUNT));
    let formed = form(hosts, &Options::default(), |_| engine.clone());
    formed.into_iter().map(|group| DeviceGroup::new(group.unwrap(), 0)).collect()
}

fn all_reduce(group: &DeviceGroup, buffer: &mut [f32]) -> Result<(), Error> {
    let at = DevicePtr(buffer.as_mut_ptr() as u64);
    // SAFETY: the host's memory is the device's.
    unsafe { group.all_reduce(at, at, buffer.len(), Dtype::F32, Reduction::Sum, None) }
}

fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| f32::from_bits(element(Dtype::F32, rank, i) as u32)).collect()
}

fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (found, expected) = (found.to_bits().into(), expected.to_bits().into());
        assert!(same(Dtype::F32, found, expected), "element {i} of {what}");
    }
}

#[test]
fn ranks_of_several_hosts_have_the_same_bits() {
    for hosts in [&[0, 1][..], &[0, 0, 1], &[0, 1, 0, 2, 1]] {
        on_all(&groups(hosts), |group| {
            for count in [0, 1, 4, 3001] {
                let mut expected = numbers(group.group().rank(), count);
                let mut found = expected.clone();
                group.group().all_reduce(&mut expected, Reduction::Sum).unwrap();
                all_reduce(group, &mut found).unwrap();
                assert_same(&found, &expected, &format!("{count} on {hosts:?}"));
            }
        });
    }
}

#[test]
fn every_canonical_algorithm_can_be_forced() {
    const COUNT: usize = 1500;
    for ranks in 2..=5 {
        on_all(&groups(&vec![0; ranks]), |group| {
            let own = numbers(group.group().rank(), COUNT);
            let mut expected = own.clone();
            group.group().all_reduce(&mut expected, Reduction::Mean).unwrap();
            let able = [
                Algorithm::Pairwise,
                Algorithm::Direct,
                Algorithm::Tree,
                Algorithm::HalvingDoubling,
            ];
            for algorithm in able {
                let mut found = vec![0.0; COUNT];
                // SAFETY: the host's memory is the device's.
                let request = unsafe {
                    Request::raw(Op::AllReduce, Dtype::F32, COUNT, own.as_ptr(), found.as_mut_ptr())
                        .unwrap()
                        .in_memory(Memory::Device(0))
                };
                let request = request.with_reduction(Reduction::Mean).with_algorithm(algorithm);
                group.group().run(request).unwrap();
                assert_same(&found, &expected, &format!("{algorithm} of {ranks} ranks"));
            }
        });
    }
}

#[test]
fn blocks_may_differ_in_length_and_lie_apart() {
    on_all(&groups(&[0; 4]), |group| {
        let rank = group.group().rank();
        let counts = [300, 0, 7, 1001];
        let own = numbers(rank, counts[rank]);
        let total = counts.iter().sum();
        let (mut expected, mut found) = (vec![0f32; total], vec![0f32; total]);
        group.group().run(Request::all_gather_unequal(&own, &mut expected, &counts)).unwrap();
        // SAFETY: the host's memory is the device's.
        let request = unsafe {
            Request::all_gather_unequal(&own, &mut found, &counts).in_memory(Memory::Device(0))
        };
        group.group().run(request).unwrap();
        assert_same(&found, &expected, "the gathered blocks");

        // Rank r sends r + 2s bytes to rank s.
        let bytes = |from: usize, to: usize| 300 * (from + 2 * to);
        let (sent, received): (Vec<usize>, Vec<usize>) =
            ((0..4).map(|s| bytes(rank, s)).collect(), (0..4).map(|s| bytes(s, rank)).collect());
        let input: Vec<u8> = (0..sent.iter().sum()).map(|i| (i * 7 + rank) as u8).collect();
        let results = [Memory::Host, Memory::Device(0)].map(|memory| {
            let mut output = vec![0u8; received.iter().sum()];
            // SAFETY: the host's memory is the device's, and as long as the counts say.
            let request = unsafe {
                let (from, into) = (input.as_ptr(), output.as_mut_ptr());
                Request::raw_all_to_all_unequal(from, &sent, into, &received)
                    .unwrap()
                    .in_memory(memory)
            };
            group.group().run(request).unwrap();
            output
        });
        assert_eq!(results[0], results[1]);

        // Blocks of one rank lie apart, those of the others do not.
        let mut blocks = vec![vec![0f32; 500]; 4];
        let mut whole = vec![0f32; 2000];
        let own = numbers(rank, 500);
        let output = match rank {
            2 => unisono_collective::Address::Apart(
                blocks.iter_mut().map(|block| block.as_mut_ptr().cast()).collect(),
            ),
            _ => whole.as_mut_ptr().into(),
        };
        // SAFETY: the host's memory is the device's.
        let request = unsafe {
            Request::raw(Op::AllGather, Dtype::F32, 500, own.as_ptr(), output)
                .unwrap()
                .in_memory(Memory::Device(0))
        };
        group.group().run(request).unwrap();
        let found = if rank == 2 { blocks.concat() } else { whole };
        let expected: Vec<f32> = (0..4).flat_map(|rank| numbers(rank, 500)).collect();
        assert_same(&found, &expected, "blocks that lie apart");
    });
}

#[test]
fn ranks_that_call_differently_are_told() {
    for hosts in [[0, 0], [0, 1]] {
        let errors = on_all(&groups(&hosts), |group| {
            all_reduce(group, &mut [1.0; 50]).unwrap();
            all_reduce(group, &mut vec![1.0; 100 + group.group().rank()]).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("of 100 f32") && text.contains("of 101 f32"), "{text}");
        }
    }
}

#[test]
fn ranks_of_which_one_calls_on_the_host_are_told() {
    for hosts in [[0, 0], [0, 1]] {
        let errors = on_all(&groups(&hosts), |group| match group.group().rank() {
            0 => all_reduce(group, &mut [1.0; 50]).unwrap_err(),
            _ => group.group().barrier().unwrap_err(),
        });
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("all_reduce #1") && text.contains("barrier #1"), "{text}");
        }
    }
}

#[test]
fn a_call_ends_with_its_group() {
    on_all(&groups(&[0; 3]), |group| match group.group().rank() {
        2 => {
            std::thread::sleep(Duration::from_millis(50));
            group.group().abort("it was enough");
        }
        _ => {
            let error = all_reduce(group, &mut [1.0; 1000]).unwrap_err();
            assert!(matches!(error, Error::Aborted { peer: Rank(2), .. }), "{error}");
        }
    });
}

#[test]
fn a_wait_says_for_whom() {
    let groups = groups(&[0; 3]);
    let asked = [0, 2].map(|rank| {
        // Asked when a call waits, and has noted for whom.
        let asked = Arc::new(AtomicBool::new(false));
        let ask = asked.clone();
        groups[rank].group().stop_waiting_if(move || {
            ask.store(true, Ordering::SeqCst);
            false
        });
        asked
    });
    on_all(&groups, |group| match group.group().rank() {
        1 => {
            let deadline = Instant::now() + Duration::from_secs(20);
            while !asked.iter().all(|asked| asked.load(Ordering::SeqCst)) {
                assert!(Instant::now() < deadline, "no rank waits");
                std::thread::sleep(Duration::from_millis(5));
            }
            groups[0].group().abort_handle().expire(Duration::from_millis(1));
        }
        rank => match all_reduce(group, &mut [1.0; 1000]).unwrap_err() {
            Error::TimedOut { missing, .. } if rank == 0 => assert_eq!(missing, [Rank(1)]),
            Error::Aborted { peer: Rank(0), .. } if rank == 2 => {}
            error => panic!("rank {rank}: {error}"),
        },
    });
}

#[test]
fn other_memory_other_algorithms_and_recording_streams_are_refused() {
    on_all(&world(2, 1024, DeviceCosts::default()), |group| {
        let mut buffer = [1i32; 10];
        let at = buffer.as_mut_ptr();
        let request = |memory| {
            // SAFETY: the host's memory is the device's.
            unsafe {
                Request::raw(Op::AllReduce, Dtype::I32, 10, at, at).unwrap().in_memory(memory)
            }
        };
        let memory = Memory::Device(1);
        let refused = group.group().run(request(memory)).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Memory { memory }));
        for algorithm in [Algorithm::Window, Algorithm::Ring, Algorithm::DoubleTree] {
            let forced = request(Memory::Device(0)).with_algorithm(algorithm);
            let refused = group.group().run(forced).unwrap_err();
            let expected = InvalidCall::UnsupportedAlgorithm { algorithm, op: "all-reduce" };
            assert_eq!(refused, Error::InvalidCall(expected));
        }
        // SAFETY: the driver knows this stream.
        let recording =
            unsafe { request(Memory::Device(0)).on_stream(std::ptr::without_provenance_mut(2)) };
        let refused = group.group().run(recording).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Recording));
        // The group is as before.
        group.group().run(request(Memory::Device(0))).unwrap();
        assert_eq!(buffer, [2; 10]);
    });
}

#[test]
fn groups_made_of_a_group_have_communicators_of_their_own() {
    on_all(&groups(&[0; 4]), |group| {
        let half = group.group().split(Some(group.group().rank() as u32 % 2), 0).unwrap().unwrap();
        let half = DeviceGroup::new(half, 0);
        let mut ranks = vec![group.group().rank() as f32; 1000];
        all_reduce(&half, &mut ranks).unwrap();
        let expected = if group.group().rank() % 2 == 0 { 2.0 } else { 4.0 };
        assert!(ranks.iter().all(|sum| *sum == expected));
        drop(half);
        all_reduce(group, &mut ranks).unwrap();
        assert!(ranks.iter().all(|sum| *sum == 12.0));
    });
}
