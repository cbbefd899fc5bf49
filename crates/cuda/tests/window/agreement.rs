//! Ranks that cannot share memory, or do not agree on a call.

use unisono_collective::engine::Memory;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{
    Algorithm, Dtype, Epoch, Error, FormError, Group, InvalidCall, Op, Options, Rank, Request,
};
use unisono_cuda::{
    CudaError, DeviceCosts, DeviceEngine, DeviceGroup, DeviceOptions, Driver, engine as engine_of,
};

use crate::behaviour::{
    all_reduce, ends_a_call_with_its_group, makes_groups_of_a_group, refuses_a_stream_that_records,
    says_for_whom_it_waits, tells_of_a_call_on_the_host, tells_of_different_calls,
};
use crate::fake::{ONE_ROUND, fake_engine, library, on_all, window, world, world_with};

fn start(
    hosts: &[u32],
    asked: &[Option<DeviceEngine>],
    bad: Option<usize>,
) -> Vec<Result<Group, FormError>> {
    let (hub, epoch) = (LocalHub::on_hosts(hosts), Epoch::new(0));
    std::thread::scope(|scope| {
        let form = |rank: usize| {
            let (hub, epoch, library) = (hub.clone(), epoch.clone(), library());
            let device = move || {
                let number = if bad == Some(rank) { 7 } else { 0 };
                Driver::load_from(library.as_os_str())?.device(number)
            };
            let window = window(1024, DeviceCosts::default());
            let engine = asked[rank % asked.len()];
            let make = engine_of(device, DeviceOptions { engine, window, ..Default::default() });
            let options = Options::default();
            scope.spawn(move || Group::with_engine(hub, epoch, rank, hosts.len(), options, make))
        };
        let ranks: Vec<_> = (0..hosts.len()).map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_without_its_device_is_named_by_all() {
    for formed in start(&[0; 3], &[None], Some(1)) {
        let error = formed.err().expect("no group forms");
        let FormError::Device { rank: Rank(1), reason } = &error else { panic!("{error}") };
        let cause = CudaError::NoSuchDevice { device: 7, devices: 1 }.to_string();
        assert_eq!(reason, &cause);
    }
}

#[test]
fn windows_of_different_hosts_are_refused() {
    for engine in [DeviceEngine::Window, DeviceEngine::HostWindow] {
        for formed in start(&[0, 0, 1], &[Some(engine)], None) {
            let error = formed.err().expect("no group forms");
            assert!(matches!(error, FormError::Device { rank: Rank(2), .. }), "{error}");
        }
    }
}

#[test]
fn ranks_of_different_hosts_go_through_their_hosts() {
    // Those of one host share its GPU in the first placement; in the others there is nothing that they could fold there.
    for (hosts, engine) in
        [([0, 0, 1], "hierarchical"), ([0, 1, 2], "bounce"), ([0, 1, 0], "bounce")]
    {
        let groups = start(&hosts, &[None], None).into_iter();
        let groups: Vec<DeviceGroup> =
            groups.map(|group| DeviceGroup::new(group.unwrap(), 0)).collect();
        on_all(&groups, |group| {
            assert_eq!(group.engine().unwrap(), engine);
            let mut buffer = [1.5; 1000];
            all_reduce(group, &mut buffer).unwrap();
            assert_eq!(buffer, [4.5; 1000]);
        });
    }
}

#[test]
fn ranks_that_want_different_engines_are_told() {
    let asked = [Some(DeviceEngine::Window), Some(DeviceEngine::Window), None];
    for formed in start(&[0; 3], &asked, None) {
        let error = formed.err().expect("no group forms");
        let FormError::Device { rank: Rank(2), reason } = &error else { panic!("{error}") };
        assert!(reason.contains("and rank 0 window"), "{reason}");
    }
}

#[test]
fn groups_tell_their_engine() {
    for engine in [DeviceEngine::Window, DeviceEngine::HostWindow, DeviceEngine::Bounce] {
        let groups =
            world_with(2, DeviceOptions { window: window(1024, ONE_ROUND), ..engine.into() });
        on_all(&groups, |group| assert_eq!(group.engine().unwrap(), engine.name()));
    }
}

#[test]
fn other_memory_and_other_algorithms_are_refused() {
    let groups = world(2, 1024, DeviceCosts::default());
    on_all(&groups, |group| {
        let mut buffer = [1f32; 10];
        let at = buffer.as_mut_ptr();
        let request = |memory| {
            // SAFETY: the host's memory is the device's.
            unsafe {
                Request::raw(Op::AllReduce, Dtype::F32, 10, at, at).unwrap().in_memory(memory)
            }
        };
        let memory = Memory::Device(1);
        let refused = group.group().run(request(memory)).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Memory { memory }));
        let ring = request(Memory::Device(0)).with_algorithm(Algorithm::Ring);
        let refused = group.group().run(ring).unwrap_err();
        let expected =
            InvalidCall::UnsupportedAlgorithm { algorithm: Algorithm::Ring, op: "all-reduce" };
        assert_eq!(refused, Error::InvalidCall(expected));
        // The group is as before.
        for algorithm in [Algorithm::Window, Algorithm::WindowDirect] {
            group.group().run(request(Memory::Device(0)).with_algorithm(algorithm)).unwrap();
        }
        assert_eq!(buffer, [4.0; 10]);
    });
}

#[test]
fn a_world_with_devices_forms_twice_at_once() {
    let make = fake_engine(window(2048, DeviceCosts::default()));
    let groups: Vec<Vec<DeviceGroup>> =
        (0..2).map(|_| world(2, 1024, DeviceCosts::default())).collect();
    drop(make);
    for groups in &groups {
        on_all(groups, |group| all_reduce(group, &mut [1.0; 500]).unwrap());
    }
}

/// A world over each of the engines that need no NCCL.
fn every_world(ranks: usize) -> impl Iterator<Item = Vec<DeviceGroup>> {
    let engines = [DeviceEngine::Window, DeviceEngine::HostWindow, DeviceEngine::Bounce];
    let window = window(1024, DeviceCosts::default());
    engines
        .into_iter()
        .map(move |engine| world_with(ranks, DeviceOptions { window, ..engine.into() }))
}

#[test]
fn ranks_that_call_differently_are_told() {
    every_world(2).for_each(|groups| tells_of_different_calls(&groups));
    every_world(2).for_each(|groups| tells_of_a_call_on_the_host(&groups));
}

#[test]
fn a_call_ends_with_its_group() {
    every_world(3).for_each(|groups| ends_a_call_with_its_group(&groups));
}

#[test]
fn a_wait_says_for_whom() {
    every_world(3).for_each(|groups| says_for_whom_it_waits(&groups));
}

#[test]
fn a_stream_that_records_is_refused() {
    every_world(2).for_each(|groups| refuses_a_stream_that_records(&groups));
}

#[test]
fn groups_made_of_a_group_have_staging_of_their_own() {
    every_world(4).for_each(|groups| makes_groups_of_a_group(&groups));
}
