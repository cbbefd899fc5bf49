//! Ranks that cannot share memory, or do not agree on a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono_collective::engine::Memory;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{
    Algorithm, Dtype, Epoch, Error, FormError, Group, InvalidCall, Op, Options, Rank, Reduction,
    Request,
};
use unisono_cuda::{
    CudaError, DeviceCosts, DeviceEngine, DeviceGroup, DeviceOptions, DevicePtr, Driver,
    engine as engine_of,
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

fn all_reduce(group: &DeviceGroup, buffer: &mut [f32]) -> Result<(), Error> {
    let at = DevicePtr(buffer.as_mut_ptr() as u64);
    // SAFETY: the host's memory is the device's.
    unsafe { group.all_reduce(at, at, buffer.len(), Dtype::F32, Reduction::Sum, None) }
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
    let groups = start(&[0, 0, 1], &[None], None).into_iter();
    let groups: Vec<DeviceGroup> =
        groups.map(|group| DeviceGroup::new(group.unwrap(), 0)).collect();
    on_all(&groups, |group| {
        assert_eq!(group.engine().unwrap(), "bounce");
        let mut buffer = [1.5; 1000];
        all_reduce(group, &mut buffer).unwrap();
        assert_eq!(buffer, [4.5; 1000]);
    });
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
fn ranks_that_call_differently_are_told() {
    let groups = world(2, 1024, DeviceCosts::default());
    let errors = on_all(&groups, |group| {
        all_reduce(group, &mut [1.0; 50]).unwrap();
        all_reduce(group, &mut vec![1.0; 100 + group.group().rank()]).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }), "{text}");
        assert!(text.contains("of 100 f32") && text.contains("of 101 f32"), "{text}");
    }
}

#[test]
fn ranks_of_which_one_calls_on_the_host_are_told() {
    let groups = world(2, 1024, DeviceCosts::default());
    let errors = on_all(&groups, |group| match group.group().rank() {
        0 => all_reduce(group, &mut [1.0; 50]).unwrap_err(),
        _ => group.group().barrier().unwrap_err(),
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_call_ends_with_its_group() {
    let groups = world(3, 1024, DeviceCosts::default());
    on_all(&groups, |group| match group.group().rank() {
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
    let groups = world(3, 1024, DeviceCosts::default());
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
                assert!(Instant::now() < deadline, "nobody waits");
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
fn a_stream_that_records_is_refused() {
    let groups = world(2, 1024, DeviceCosts::default());
    on_all(&groups, |group| {
        let mut buffer = [1f32; 10];
        let at = buffer.as_mut_ptr();
        // SAFETY: the host's memory is the device's, and the driver knows this stream.
        let request = unsafe {
            let request = Request::raw(Op::AllReduce, Dtype::F32, 10, at, at).unwrap();
            request.in_memory(Memory::Device(0)).on_stream(std::ptr::without_provenance_mut(2))
        };
        let refused = group.group().run(request).unwrap_err();
        assert_eq!(refused, Error::InvalidCall(InvalidCall::Recording));
        all_reduce(group, &mut buffer).unwrap();
        assert_eq!(buffer, [2.0; 10]);
    });
}

#[test]
fn groups_made_of_a_group_have_staging_of_their_own() {
    let groups = world(4, 1024, DeviceCosts::default());
    on_all(&groups, |group| {
        let half = group.group().split(Some(group.group().rank() as u32 % 2), 0).unwrap().unwrap();
        let half = DeviceGroup::new(half, 0);
        let mut ranks = vec![group.group().rank() as f32; 1000];
        all_reduce(&half, &mut ranks).unwrap();
        let expected = if group.group().rank() % 2 == 0 { 2.0 } else { 4.0 };
        assert!(ranks.iter().all(|sum| *sum == expected));
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
