//! Ranks that are processes on several hosts: what they compute, and what the others see when one fails or is killed.

use std::error::Error as AnyError;
use std::ffi::OsString;
use std::time::Duration;

use unisono_collective::engine::Memory;
use unisono_collective::{Algorithm, Dtype, Epoch, Group, Op, Options, Request};
use unisono_cuda::{
    BounceOptions, DRIVER_VARIABLE, DeviceGroup, DeviceOptions, Driver, ENGINE_VARIABLE,
    NCCL_VARIABLE, NcclOptions, WindowOptions, engine,
};

use crate::fake::{Kind, NCCL, library, nccl};
use crate::member::{SCENARIO, counted, take_part};
use crate::processes::{HOSTS, Ranks, place, say};
use crate::worlds::{ALL, Between};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts two hosts of two ranks. Counterparts have a host of their own for NCCL, which refuses others on one device.
fn start(
    scenario: &str,
    between: Between,
    adapt: impl Fn(usize) -> Vec<(&'static str, OsString)>,
) -> Ranks {
    let (driver, refusing) = (library(), nccl(Kind { refuses: true, ..NCCL }));
    let ranks = Ranks::start(4, |rank, command| {
        command.args(["--exact", "faults::as_rank", "--ignored", "--nocapture"]);
        command.env(DRIVER_VARIABLE, driver).env(SCENARIO, scenario).env(HOSTS, "0,0,1,1");
        let (library, host) = match between {
            Between::Nccl => (refusing.clone(), rank),
            Between::Counterparts => (refusing.clone(), rank / 2),
            Between::Hosts => (between.library(2), rank / 2),
        };
        command.env(NCCL_VARIABLE, library).env("NCCL_HOSTID", host.to_string());
        command.env(ENGINE_VARIABLE, "hierarchical").envs(adapt(rank));
    });
    ranks.unwrap()
}

#[test]
#[ignore = "a rank of the other tests"]
fn as_rank() -> Result<(), Box<dyn AnyError>> {
    let Some(place) = place()? else { return Ok(()) };
    let (rank, world) = (place.rank, place.world);
    let device_options = DeviceOptions {
        window: WindowOptions { buffer: Some(4096), ..Default::default() },
        nccl: NcclOptions { scratch: 16 << 10, ..Default::default() },
        bounce: BounceOptions { chunk: 4096 },
        ..DeviceOptions::from_env()?
    };
    let engine = engine(|| Driver::load()?.device(0), device_options);
    let mut options = Options::default();
    options.algorithm = Some(Algorithm::Hierarchical);
    let formed = Group::with_engine(place.connector, Epoch::new(0), rank, world, options, engine);
    let group = match formed {
        Ok(group) => DeviceGroup::new(group, 0),
        Err(error) => return say(&format!("{error:?}")),
    };
    take_part(
        group,
        |group| {
            let request = Request::sized(Op::AllReduce, Dtype::F32, 1000);
            // SAFETY: a call that is only explained has no memory.
            let request = unsafe { request.in_memory(Memory::Device(0)) };
            Ok(format!("right by {}", group.group().explain(request)?.engine))
        },
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
    let ways = ["nccl between hosts", "nccl between hosts", "through the hosts between them"];
    for (between, way) in ALL.into_iter().zip(ways) {
        let mut ranks = start("sums", between, |_| Vec::new());
        for (rank, said) in ranks.hear(4, PATIENCE).unwrap() {
            assert_eq!(said, format!("right by hierarchical, {way}"), "{rank}, {between:?}");
        }
        assert_eq!(ranks.finish().unwrap(), [0; 0]);
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for (round, between) in ALL.into_iter().chain(ALL).enumerate() {
        let victim = 1 + round % 3;
        let mut ranks = start("until the end", between, |_| Vec::new());
        assert!(ranks.hear(4, PATIENCE).unwrap().iter().all(|(_, said)| said == "under way"));
        ranks.kill(victim).unwrap();
        for (rank, said) in ranks.hear(3, PATIENCE).unwrap() {
            assert_eq!(said, format!("lost {victim}"), "rank {rank}, {between:?}");
        }
        // The killed one as well, of course.
        assert_eq!(ranks.finish().unwrap(), [victim]);
    }
}

/// What the ranks say at their ends.
fn ends(ranks: &Ranks) -> Vec<(usize, String)> {
    let mut ends = Vec::new();
    while ends.len() < 4 {
        let (rank, said) = ranks.next(PATIENCE).unwrap();
        if said != "under way" {
            ends.push((rank, said));
        }
    }
    ends
}

#[test]
fn a_network_that_fails_ends_the_group_everywhere() {
    for between in [Between::Nccl, Between::Counterparts] {
        // The rank is the one of the communicator: of counterparts, both ranks of the second host have it.
        let breaking = |rank: usize| match rank {
            3 => vec![("FAKE_NCCL_GROUPS", "60".into()), ("FAKE_NCCL_RANK", number(between))],
            _ => Vec::new(),
        };
        for (rank, said) in ends(&start("until the end", between, breaking)) {
            assert!(said.contains("Connection closed by remote peer"), "rank {rank}: {said}");
            assert!(rank == 3 || said.contains("aborted by 3"), "rank {rank}: {said}");
        }
    }
}

/// The number of rank 3 in its communicator.
fn number(between: Between) -> OsString {
    if between == Between::Nccl { "3".into() } else { "1".into() }
}

#[test]
fn a_device_that_fails_ends_the_group_everywhere() {
    for between in ALL {
        let failing =
            |rank| if rank == 1 { vec![("FAKE_LAUNCHES", "40".into())] } else { Vec::new() };
        for (rank, said) in ends(&start("until the end", between, failing)) {
            assert!(said.contains("CUDA_ERROR_LAUNCH_FAILED"), "rank {rank}: {said}");
            assert!(rank == 1 || said.contains("aborted by 1"), "rank {rank}: {said}");
        }
    }
}

#[test]
fn where_one_rank_cannot_open_memory_there_is_no_hierarchy() {
    let without = |rank: usize| match rank {
        2 => vec![("FAKE_NO_IPC", "1".into())],
        _ => Vec::new(),
    };
    for (rank, said) in start("sums", Between::Nccl, without).hear(4, PATIENCE).unwrap() {
        let opening = "opening the memory of rank 3";
        assert!(said.contains("Rank(2)") && said.contains(opening), "rank {rank}: {said}");
    }
    let automatic =
        |rank| without(rank).into_iter().chain([(ENGINE_VARIABLE, "auto".into())]).collect();
    for (rank, said) in start("sums", Between::Nccl, automatic).hear(4, PATIENCE).unwrap() {
        assert_eq!(said, "right by nccl", "rank {rank}");
    }
}
