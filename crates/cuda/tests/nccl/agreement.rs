//! Calls that are cut in other ways, ranks of several hosts, and ranks that do not agree on a call.

use unisono_collective::engine::Memory;
use unisono_collective::{Algorithm, Dtype, Error, InvalidCall, Op, Options, Reduction, Request};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{DeviceCosts, DeviceGroup};

use crate::behaviour::{
    all_reduce, ends_a_call_with_its_group, makes_groups_of_a_group, refuses_a_stream_that_records,
    says_for_whom_it_waits, tells_of_a_call_on_the_host, tells_of_different_calls,
};
use crate::common::{element, same};
use crate::fake::{fake_engine, form, on_all, world};

/// Costs by which bytes count, so that calls are pairwise exchanges.
const BYTES_COUNT: NcclCosts = NcclCosts { group: 1e-12, byte: 1.0, gathered: 1.0, folded: 1.0 };

fn groups(hosts: &[u32]) -> Vec<DeviceGroup> {
    let engine = fake_engine(1024, Some(BYTES_COUNT));
    let formed = form(hosts, &Options::default(), |_| engine.clone());
    formed.into_iter().map(|group| DeviceGroup::new(group.unwrap(), 0)).collect()
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
                Request::raw_all_to_all_unequal(from, &sent, into, &received, None)
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
fn other_memory_and_other_algorithms_are_refused() {
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
        // The group is as before.
        group.group().run(request(Memory::Device(0))).unwrap();
        assert_eq!(buffer, [2; 10]);
    });
}

#[test]
fn ranks_that_call_differently_are_told() {
    for hosts in [[0, 0], [0, 1]] {
        tells_of_different_calls(&groups(&hosts));
        tells_of_a_call_on_the_host(&groups(&hosts));
    }
}

#[test]
fn a_call_ends_with_its_group() {
    ends_a_call_with_its_group(&groups(&[0; 3]));
}

#[test]
fn a_wait_says_for_whom() {
    says_for_whom_it_waits(&groups(&[0; 3]));
}

#[test]
fn a_stream_that_records_is_refused() {
    refuses_a_stream_that_records(&groups(&[0; 2]));
}

#[test]
fn groups_made_of_a_group_have_communicators_of_their_own() {
    makes_groups_of_a_group(&groups(&[0; 4]));
}
