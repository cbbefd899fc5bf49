//! When there is a hierarchy, and which calls go through it.

use unisono_collective::engine::Memory;
use unisono_collective::{Algorithm, Dtype, Explanation, FormError, Op, Options, Request};
use unisono_cuda::{DeviceEngine, DeviceGroup, DeviceOptions};

use crate::behaviour::all_reduce;
use crate::fake::on_all;
use crate::worlds::{ALL, Between, options, try_world, world_of_any_engine, world_on};

fn explain(group: &DeviceGroup, count: usize) -> Explanation {
    let request = Request::sized(Op::AllReduce, Dtype::F32, count);
    // SAFETY: a call that is only explained has no memory.
    group.group().explain(unsafe { request.in_memory(Memory::Device(0)) }).unwrap()
}

#[test]
fn placements_that_cut_subtrees_have_a_flat_engine() {
    for (between, flat) in ALL.into_iter().zip(["nccl", "bounce", "bounce"]) {
        let hosts = [0, 0, 0, 1];
        on_all(&world_of_any_engine(&hosts, between), |group| {
            assert_eq!(group.engine().unwrap(), flat);
            let mut buffer = [1.5; 1000];
            all_reduce(group, &mut buffer).unwrap();
            assert_eq!(buffer, [6.0; 1000]);
        });
        let engine = Some(DeviceEngine::Hierarchical);
        let options = DeviceOptions { engine, ..options(between, &hosts) };
        for formed in try_world(&hosts, &Options::default(), &options) {
            let error = formed.err().expect("no group forms");
            let FormError::Device { reason, .. } = &error else { panic!("{error}") };
            assert!(reason.contains("canonical tree"), "{reason}");
        }
    }
}

#[test]
fn a_flat_engine_that_is_asked_for_is_flat() {
    for engine in [DeviceEngine::Nccl, DeviceEngine::Bounce] {
        let hosts = [0, 0, 1, 1];
        let options = DeviceOptions { engine: Some(engine), ..options(Between::Nccl, &hosts) };
        let groups = try_world(&hosts, &Options::default(), &options).into_iter();
        let groups: Vec<DeviceGroup> = groups.map(Result::unwrap).collect();
        on_all(&groups, |group| assert_eq!(group.engine().unwrap(), engine.name()));
    }
}

#[test]
fn what_costs_less_is_chosen() {
    let hosts = [0, 0, 1, 1];
    // Where bytes between hosts are what counts, the hierarchy has fewer of them.
    on_all(&world_of_any_engine(&hosts, Between::Nccl), |group| {
        let explained = explain(group, 10_000);
        assert_eq!(explained.chosen, Algorithm::Hierarchical);
        let [first, second, ..] = explained.candidates[..] else { panic!("{explained:?}") };
        assert_eq!(first.algorithm, Algorithm::Hierarchical);
        assert!(first.seconds < second.seconds);
        assert_eq!(second.algorithm, Algorithm::Pairwise);
    });
    // Where a window takes its time, a small call is flat.
    let mut options = options(Between::Nccl, &hosts);
    let costs = options.window.costs.as_mut().unwrap();
    costs.device.first = 200.0;
    let groups = try_world(&hosts, &Options::default(), &options).into_iter();
    let groups: Vec<DeviceGroup> = groups.map(Result::unwrap).collect();
    on_all(&groups, |group| {
        let [small, large] = [10, 100_000].map(|count| explain(group, count));
        assert_ne!(small.chosen, Algorithm::Hierarchical);
        assert_eq!(small.engine, "hierarchical, flat by nccl");
        assert_eq!(large.chosen, Algorithm::Hierarchical, "{large:?}");
        assert_eq!(large.engine, "hierarchical, nccl between hosts");
    });
}

#[test]
fn only_folded_parts_leave_a_host() {
    const COUNT: usize = 8000;
    let hosts = [0, 0, 1, 1];
    for between in ALL {
        let groups = world_on(&hosts, between);
        let sent = on_all(&groups, |group| {
            let before = group.group().traffic().sockets;
            all_reduce(group, &mut [1.0; COUNT]).unwrap();
            group.group().traffic().sockets - before
        });
        // Each rank exchanges a quarter of the sums, twice; headers and the meeting come to that.
        let least = groups.len() as u64 * (4 * COUNT as u64 / 2);
        let sent: u64 = sent.iter().sum();
        assert!((least..least + least / 4).contains(&sent), "{sent} of {least}, {between:?}");
    }
}

#[test]
fn costs_are_measured_alike_on_all_ranks() {
    for between in ALL {
        let hosts = [0, 0, 1];
        let mut options = options(between, &hosts);
        (options.nccl.costs, options.window.costs) = (None, None);
        let groups = try_world(&hosts, &Options::default(), &options).into_iter();
        let groups: Vec<DeviceGroup> = groups.map(Result::unwrap).collect();
        let prices = on_all(&groups, |group| {
            let explained = explain(group, 1 << 20);
            let mut candidates = explained.candidates.iter();
            candidates.find(|it| it.algorithm == Algorithm::Hierarchical).unwrap().seconds
        });
        assert!(prices[0] > 0.0 && prices.iter().all(|price| *price == prices[0]), "{prices:?}");
    }
}
