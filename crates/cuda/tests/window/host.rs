//! Through the host: the same bits on every way.

use unisono_cuda::{
    BounceOptions, DeviceCosts, DeviceEngine, DeviceGroup, DeviceOptions, Way, WindowOptions,
};

use crate::calls::{BUFFER, COUNTS, WORLDS, check, check_long, exchange_unequal, follow_streams};
use crate::fake::{ONE_ROUND, TWO_ROUNDS, window, world_on, world_with};

/// Staging on the host, and nothing on the device.
fn through_host(ranks: usize, way: Way, costs: DeviceCosts) -> Vec<DeviceGroup> {
    let window = WindowOptions { way: Some(way), ..window(BUFFER, costs) };
    let engine = Some(DeviceEngine::HostWindow);
    world_with(ranks, DeviceOptions { engine, window, ..Default::default() })
}

/// Through the host's collectives, in chunks of so many bytes.
fn bouncing(hosts: &[u32], chunk: usize) -> Vec<DeviceGroup> {
    let (engine, bounce) = (Some(DeviceEngine::Bounce), BounceOptions { chunk });
    world_on(hosts, DeviceOptions { engine, bounce, ..Default::default() })
}

#[test]
fn one_rank_alone() {
    check(&world_with(1, DeviceEngine::HostWindow), &[0, 1, 1000]);
    check(&world_with(1, DeviceEngine::Bounce), &[0, 1, 1000]);
}

#[test]
fn every_operation_has_the_bits_of_the_host_copied() {
    for ranks in WORLDS {
        let costs = if ranks % 2 == 0 { TWO_ROUNDS } else { ONE_ROUND };
        check(&through_host(ranks, Way::Copied, costs), &COUNTS);
    }
}

#[test]
fn every_operation_has_the_bits_of_the_host_mapped() {
    for ranks in WORLDS {
        let costs = if ranks % 2 == 0 { ONE_ROUND } else { TWO_ROUNDS };
        check(&through_host(ranks, Way::Mapped, costs), &COUNTS);
    }
}

#[test]
fn every_operation_has_the_bits_of_the_host_folded_there() {
    for (ranks, costs) in [(2, ONE_ROUND), (3, TWO_ROUNDS), (4, ONE_ROUND)] {
        check(&through_host(ranks, Way::Folded, costs), &COUNTS);
    }
}

#[test]
fn every_operation_has_the_bits_of_the_host_through_its_collectives() {
    for hosts in [&[0, 0][..], &[0, 1], &[0, 0, 1], &[0, 1, 2, 0, 1]] {
        check(&bouncing(hosts, 1024), &COUNTS);
    }
}

#[test]
fn many_segments_follow_each_other() {
    for way in [Way::Copied, Way::Mapped, Way::Folded] {
        for costs in [ONE_ROUND, TWO_ROUNDS] {
            check_long(&through_host(3, way, costs));
        }
    }
}

#[test]
fn many_chunks_follow_each_other() {
    for hosts in [[0, 0, 0], [0, 1, 1]] {
        check_long(&bouncing(&hosts, 4096));
    }
}

#[test]
fn blocks_of_different_lengths_arrive() {
    exchange_unequal(&through_host(3, Way::Copied, TWO_ROUNDS));
    exchange_unequal(&bouncing(&[0, 0, 0], 1024));
    exchange_unequal(&bouncing(&[0, 1, 1], 1024));
}

#[test]
fn calls_are_in_the_order_of_the_callers_stream() {
    for way in [Way::Copied, Way::Mapped, Way::Folded] {
        let window = WindowOptions { way: Some(way), ..window(BUFFER, TWO_ROUNDS) };
        follow_streams(&world_with(2, window));
    }
    follow_streams(&bouncing(&[0, 1], 4096));
}
