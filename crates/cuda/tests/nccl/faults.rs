//! Ranks that are processes: what they compute, and what the others see when one fails or is killed.

use std::error::Error as AnyError;
use std::ffi::OsString;
use std::time::Duration;

use unisono_collective::{Epoch, Group, Options};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{DRIVER_VARIABLE, DeviceGroup, Driver, NCCL_VARIABLE, NcclOptions, nccl_engine};

use crate::fake::{Kind, NCCL, library, nccl};
use crate::member::{SCENARIO, counted, take_part};
use crate::processes::{Ranks, place, say};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

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
    take_part(
        group,
        |_| Ok("right".to_owned()),
        || {
            let memory = counted(DRIVER_VARIABLE, "host_device_allocations");
            let communicators = counted(NCCL_VARIABLE, "host_nccl_living");
            assert_eq!(
                [memory, communicators],
                [0, 0],
                "device memory, or a communicator, is left over"
            );
        },
    )
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
