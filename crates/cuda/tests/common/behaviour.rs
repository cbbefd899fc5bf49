//! What every engine of a device does when ranks call differently, wait for each other or give up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono_collective::engine::Memory;
use unisono_collective::{Dtype, Error, InvalidCall, Op, Rank, Reduction, Request};
use unisono_cuda::{DeviceGroup, DevicePtr};

use crate::fake::on_all;

pub fn all_reduce(group: &DeviceGroup, buffer: &mut [f32]) -> Result<(), Error> {
    let at = DevicePtr(buffer.as_mut_ptr() as u64);
    // SAFETY: the host's memory is the device's.
    unsafe { group.all_reduce(at, at, buffer.len(), Dtype::F32, Reduction::Sum, None) }
}

/// Two ranks that call differently are told.
pub fn tells_of_different_calls(groups: &[DeviceGroup]) {
    let errors = on_all(groups, |group| {
        all_reduce(group, &mut [1.0; 50]).unwrap();
        all_reduce(group, &mut vec![1.0; 100 + group.group().rank()]).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }), "{text}");
        assert!(text.contains("of 100 f32") && text.contains("of 101 f32"), "{text}");
    }
}

/// Two ranks of which one calls on the host are told.
pub fn tells_of_a_call_on_the_host(groups: &[DeviceGroup]) {
    let errors = on_all(groups, |group| match group.group().rank() {
        0 => all_reduce(group, &mut [1.0; 50]).unwrap_err(),
        _ => group.group().barrier().unwrap_err(),
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }), "{text}");
        assert!(text.contains("all_reduce #1") && text.contains("barrier #1"), "{text}");
    }
}

/// Two ranks wait in a call that a third one ends.
pub fn ends_a_call_with_its_group(groups: &[DeviceGroup]) {
    on_all(groups, |group| match group.group().rank() {
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

/// Ranks 0 and 2 wait for rank 1, and say so.
pub fn says_for_whom_it_waits(groups: &[DeviceGroup]) {
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
    on_all(groups, |group| match group.group().rank() {
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

/// A stream that records for a graph is refused, and the group is as before.
pub fn refuses_a_stream_that_records(groups: &[DeviceGroup]) {
    on_all(groups, |group| {
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
        assert_eq!(buffer, [groups.len() as f32; 10]);
    });
}

/// Groups of two that are made of a group of four, and the group after them.
pub fn makes_groups_of_a_group(groups: &[DeviceGroup]) {
    on_all(groups, |group| {
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
