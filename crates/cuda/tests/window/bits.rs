//! Every operation, type and reduction, against the host's engine, bit by bit.

use unisono_collective::{Dtype, Reduction};
use unisono_cuda::DevicePtr;

use crate::calls::{BUFFER, COUNTS, WORLDS, check, check_long, exchange_unequal, follow_streams};
use crate::fake::{ONE_ROUND, TWO_ROUNDS, on_all, world};

#[test]
fn one_rank_alone() {
    check(&world(1, BUFFER, ONE_ROUND), &[0, 1, 1000]);
}

#[test]
fn every_operation_has_the_bits_of_the_host_in_one_round() {
    for ranks in WORLDS {
        check(&world(ranks, BUFFER, ONE_ROUND), &COUNTS);
    }
}

#[test]
fn every_operation_has_the_bits_of_the_host_in_two_rounds() {
    for ranks in WORLDS {
        check(&world(ranks, BUFFER, TWO_ROUNDS), &COUNTS);
    }
}

#[test]
fn many_segments_follow_each_other() {
    check_long(&world(3, BUFFER, TWO_ROUNDS));
}

#[test]
fn calls_are_in_the_order_of_the_callers_stream() {
    follow_streams(&world(2, BUFFER, TWO_ROUNDS));
}

#[test]
fn blocks_of_different_lengths_arrive() {
    exchange_unequal(&world(3, BUFFER, TWO_ROUNDS));
}

#[test]
fn the_caller_may_name_the_parts_of_its_memory() {
    let groups = world(3, BUFFER, TWO_ROUNDS);
    on_all(&groups, |group| {
        let rank = group.group().rank();
        let mut own = [rank as i32 + 1; 100];
        let mut all = [0i32; 300];
        let (from, into) = (DevicePtr(own.as_mut_ptr() as u64), DevicePtr(all.as_mut_ptr() as u64));
        // SAFETY: the host's memory is the device's, and as long as the calls need.
        unsafe {
            group.all_gather(from, into, 100, Dtype::I32, None).unwrap();
            assert_eq!((all[0], all[100], all[299]), (1, 2, 3));
            group.reduce_scatter(into, from, 100, Dtype::I32, Reduction::Max, None).unwrap();
            assert_eq!(own, [rank as i32 + 1; 100]);
            group.broadcast(from, 100, Dtype::I32, 2, None).unwrap();
        }
        assert_eq!(own, [3; 100]);
    });
}
