//! Ranks that are processes: what they compute, and what the others see when one fails or is killed.

use std::error::Error as AnyError;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use unisono_collective::{Dtype, Epoch, Error, Group, Options, Reduction};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{
    DRIVER_VARIABLE, DeviceGroup, DevicePtr, Driver, NCCL_VARIABLE, NcclOptions, nccl_engine,
};

use crate::common::{element, same};
use crate::fake::{Kind, NCCL, library, nccl};
use crate::processes::{Ranks, place, say};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Names what the ranks do.
const SCENARIO: &str = "DEVICE_TEST_SCENARIO";

fn start(
    world: usize,
    scenario: &str,
    kind: Kind,
    adapt: impl Fn(usize) -> Vec<(&'static str, OsString)>,
) -> Ranks {
    let (driver, nccl) = (library(), nccl(kind));
    let ranks = Ranks::start(world, |rank, command| {
        command.args(["--exact", "faults::as_rank", "--ignored", "--nocapture"]);
        command.env(DRIVER_VARIABLE, driver).env(NCCL_VARIABLE, &nccl).env(SCENARIO, scenario);
        command.envs(adapt(rank));
    });
    ranks.unwrap()
}

#[test]
#[ignore = "a rank of the other tests"]
fn as_rank() -> Result<(), Box<dyn AnyError>> {
    let Some(place) = place()? else { return Ok(()) };
    let (rank, world) = (place.rank, place.world);
    let costs = Some(NcclCosts::default());
    let nccl = NcclOptions { scratch: 16 << 10, costs, ..NcclOptions::default() };
    let engine = nccl_engine(|| Driver::load()?.device(0), nccl);
    let options = Options::default();
    let formed = Group::with_engine(place.connector, Epoch::new(0), rank, world, options, engine);
    let group = match formed {
        Ok(group) => DeviceGroup::new(group, 0),
        Err(error) => return say(&format!("{error:?}")),
    };
    let numbers = |count: usize, round: usize| -> Vec<f32> {
        (0..count).map(|i| f32::from_bits(element(Dtype::F32, rank + round, i) as u32)).collect()
    };
    let all_reduce = |count: usize, round: usize| {
        let mut buffer = numbers(count, round);
        let at = DevicePtr(buffer.as_mut_ptr() as u64);
        // SAFETY: the host's memory is the device's.
        let reduced = unsafe { group.all_reduce(at, at, count, Dtype::F32, Reduction::Sum, None) };
        reduced.map(|()| buffer)
    };
    if std::env::var(SCENARIO)? == "sums" {
        for (round, count) in [1, 3, 1000, 5001, 30_000, 7].into_iter().enumerate() {
            let found = all_reduce(count, round)?;
            let mut expected = numbers(count, round);
            group.group().all_reduce(&mut expected, Reduction::Sum)?;
            let equal = found.iter().zip(&expected).all(|(found, expected)| {
                same(Dtype::F32, found.to_bits().into(), expected.to_bits().into())
            });
            assert!(equal, "{count} elements");
        }
        drop(group);
        assert_eq!(left_over(), [0, 0], "device memory, or a communicator, is left over");
        return say("right");
    }
    for round in 0.. {
        if round == 5 {
            say("under way")?;
        }
        if let Err(error) = all_reduce(3000, round) {
            let after = all_reduce(10, 0).expect_err("the group has ended");
            assert_eq!(std::mem::discriminant(&after), std::mem::discriminant(&error));
            let dropped = Instant::now();
            drop(group);
            assert!(dropped.elapsed() < Duration::from_secs(5), "leaving takes too long");
            assert_eq!(left_over(), [0, 0], "device memory, or a communicator, is left over");
            let kind = match error {
                Error::PeerLost { peer, .. } => format!("lost {peer}"),
                Error::Aborted { peer, reason } => format!("aborted by {peer}: {reason}"),
                error => format!("{error:?}"),
            };
            return say(&kind);
        }
    }
    Ok(())
}

/// Pieces of device memory, and communicators, that this process has.
fn left_over() -> [i32; 2] {
    let counters =
        [(DRIVER_VARIABLE, "host_device_allocations"), (NCCL_VARIABLE, "host_nccl_living")];
    counters.map(|(variable, function)| {
        let library = std::env::var_os(variable).expect("set for every rank");
        // SAFETY: it is loaded already, and has this function.
        unsafe {
            let library = libloading::Library::new(library).unwrap();
            library.get::<unsafe extern "C" fn() -> i32>(function).unwrap()()
        }
    })
}

#[test]
fn processes_have_the_bits_of_the_host() {
    // On one device, which NCCL allows where each has a host of its own.
    let apart = |rank: usize| vec![("NCCL_HOSTID", OsString::from(rank.to_string()))];
    for world in [2, 3, 4] {
        let mut ranks = start(world, "sums", Kind { refuses: true, ..NCCL }, apart);
        for (rank, said) in ranks.hear(world, PATIENCE).unwrap() {
            assert_eq!(said, "right", "rank {rank}");
        }
        assert_eq!(ranks.finish().unwrap(), [0; 0]);
    }
}

#[test]
fn processes_on_one_device_are_told_what_to_do() {
    let ranks = start(2, "sums", Kind { refuses: true, ..NCCL }, |_| Vec::new());
    for (rank, said) in ranks.hear(2, PATIENCE).unwrap() {
        assert!(said.starts_with("Device {") && said.contains("NCCL_HOSTID"), "{rank}: {said}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for _ in 0..3 {
        let mut ranks = start(4, "until the end", NCCL, |_| Vec::new());
        assert!(ranks.hear(4, PATIENCE).unwrap().iter().all(|(_, said)| said == "under way"));
        ranks.kill(2).unwrap();
        for (rank, said) in ranks.hear(3, PATIENCE).unwrap() {
            assert_eq!(said, "lost 2", "rank {rank}");
        }
        // The killed one as well, of course.
        assert_eq!(ranks.finish().unwrap(), [2]);
    }
}

#[test]
fn a_network_that_fails_ends_the_group_everywhere() {
    let breaking = |_| vec![("FAKE_NCCL_GROUPS", "40".into()), ("FAKE_NCCL_RANK", "1".into())];
    let ranks = start(3, "until the end", NCCL, breaking);
    let mut ends: Vec<(usize, String)> = ranks.hear(6, PATIENCE).unwrap();
    ends.retain(|(_, said)| said != "under way");
    assert_eq!(ends.len(), 3);
    for (rank, said) in ends {
        assert!(said.contains("Connection closed by remote peer"), "rank {rank}: {said}");
        assert!(rank == 1 || said.contains("aborted by 1"), "rank {rank}: {said}");
    }
}

#[test]
fn a_device_that_fails_ends_the_group_everywhere() {
    let failing = |rank| if rank == 1 { vec![("FAKE_LAUNCHES", "20".into())] } else { Vec::new() };
    let ranks = start(3, "until the end", NCCL, failing);
    let mut ends: Vec<(usize, String)> = ranks.hear(6, PATIENCE).unwrap();
    ends.retain(|(_, said)| said != "under way");
    assert_eq!(ends.len(), 3);
    for (rank, said) in ends {
        assert!(said.contains("CUDA_ERROR_LAUNCH_FAILED"), "rank {rank}: {said}");
        assert!(rank == 1 || said.contains("aborted by 1"), "rank {rank}: {said}");
    }
}
