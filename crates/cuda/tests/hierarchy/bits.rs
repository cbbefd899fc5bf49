//! Every operation, type and reduction, against the host's engine, bit by bit.

use unisono_collective::engine::Memory;
use unisono_collective::{Algorithm, Dtype, Op, Request};
use unisono_cuda::DeviceGroup;

use crate::calls::{check, check_long, follow_streams};
use crate::fake::on_all;
use crate::worlds::{ALL, Between, world_on};

const TWO_BY_TWO: &[u32] = &[0, 0, 1, 1];
const TWO_BY_FOUR: &[u32] = &[0, 0, 0, 0, 1, 1, 1, 1];
const FOUR_BY_TWO: &[u32] = &[0, 0, 1, 1, 2, 2, 3, 3];

/// Elements of a call: none, fewer than there are ranks, and several segments.
const COUNTS: [usize; 3] = [0, 3, 700];

/// That calls of a kind go through the levels, and how.
fn explained(group: &DeviceGroup, op: Op) -> (&'static str, Algorithm) {
    let request = Request::sized(op, Dtype::F32, 1000);
    // SAFETY: a call that is only explained has no memory.
    let request = unsafe { request.in_memory(Memory::Device(0)) };
    let explanation = group.group().explain(request).unwrap();
    (explanation.engine, explanation.chosen)
}

#[test]
fn two_hosts_of_two_through_nccl() {
    check(&world_on(TWO_BY_TWO, Between::Nccl), &COUNTS);
}

#[test]
fn two_hosts_of_two_through_nccl_of_counterparts() {
    check(&world_on(TWO_BY_TWO, Between::Counterparts), &COUNTS);
}

#[test]
fn two_hosts_of_two_through_the_hosts() {
    check(&world_on(TWO_BY_TWO, Between::Hosts), &COUNTS);
}

#[test]
fn two_hosts_of_four() {
    for between in ALL {
        check(&world_on(TWO_BY_FOUR, between), &[300]);
    }
}

#[test]
fn four_hosts_of_two() {
    for between in ALL {
        check(&world_on(FOUR_BY_TWO, between), &[300]);
    }
}

#[test]
fn hosts_with_fewer_ranks_have_fewer_leaders() {
    for between in ALL {
        check(&world_on(&[0, 0, 1], between), &[700]);
    }
}

#[test]
fn many_segments_follow_each_other() {
    for between in ALL {
        check_long(&world_on(TWO_BY_TWO, between));
    }
}

#[test]
fn calls_are_in_the_order_of_the_callers_stream() {
    for between in ALL {
        follow_streams(&world_on(TWO_BY_TWO, between));
    }
}

#[test]
fn operations_with_a_schedule_go_through_the_levels() {
    for between in ALL {
        let root = 2;
        let (nccl, flat) = match between {
            Between::Nccl => ("hierarchical, nccl between hosts", "hierarchical, flat by nccl"),
            Between::Counterparts => {
                ("hierarchical, nccl between hosts", "hierarchical, flat by bounce")
            }
            Between::Hosts => {
                ("hierarchical, through the hosts between them", "hierarchical, flat by bounce")
            }
        };
        on_all(&world_on(TWO_BY_TWO, between), |group| {
            for op in [
                Op::AllReduce,
                Op::ReduceScatter,
                Op::AllGather,
                Op::Broadcast { root },
                Op::Reduce { root },
            ] {
                assert_eq!(explained(group, op), (nccl, Algorithm::Hierarchical), "{op:?}");
            }
            for op in [Op::AllToAll, Op::Gather { root }, Op::Scatter { root }] {
                assert_eq!(explained(group, op).0, flat, "{op:?}");
            }
            assert_eq!(group.engine().unwrap(), "hierarchical");
        });
    }
}

#[test]
fn gathered_blocks_may_differ_in_length() {
    let counts = [300, 0, 7, 1001];
    for between in ALL {
        on_all(&world_on(TWO_BY_TWO, between), |group| {
            let rank = group.group().rank();
            let own: Vec<i32> = (0..counts[rank]).map(|i| (i * 7 + rank) as i32).collect();
            let [expected, found] = [Memory::Host, Memory::Device(0)].map(|memory| {
                let mut all = vec![0; counts.iter().sum()];
                // SAFETY: the host's memory is the device's.
                let request = unsafe {
                    Request::all_gather_unequal(&own, &mut all, &counts).in_memory(memory)
                };
                group.group().run(request).unwrap();
                all
            });
            assert_eq!(found, expected, "rank {rank}");
        });
    }
}
