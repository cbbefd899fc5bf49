//! Ranks that are processes: what they compute, and what the others see when one fails or is killed.

use std::error::Error as AnyError;
use std::time::Duration;

use unisono_collective::{Epoch, Group, Options};
use unisono_cuda::{
    BounceOptions, DRIVER_VARIABLE, DeviceGroup, DeviceOptions, Driver, ENGINE_VARIABLE,
    WindowOptions, engine,
};

use crate::fake::library;
use crate::member::{SCENARIO, counted, take_part};
use crate::processes::{Ranks, place, say};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The way that all calls go.
const WAY: &str = "DEVICE_TEST_WAY";

/// Every engine, and every way of the windows.
const KINDS: [[(&str, &str); 2]; 5] = [
    [(ENGINE_VARIABLE, "window"), (WAY, "device")],
    [(ENGINE_VARIABLE, "host"), (WAY, "copied")],
    [(ENGINE_VARIABLE, "host"), (WAY, "mapped")],
    [(ENGINE_VARIABLE, "host"), (WAY, "folded")],
    [(ENGINE_VARIABLE, "bounce"), (WAY, "device")],
];

fn start(
    world: usize,
    scenario: &str,
    adapt: impl Fn(usize) -> Vec<(&'static str, &'static str)>,
) -> Ranks {
    let library = library();
    let ranks = Ranks::start(world, |rank, command| {
        command.args(["--exact", "faults::as_rank", "--ignored", "--nocapture"]);
        command.env(DRIVER_VARIABLE, library).env(SCENARIO, scenario);
        command.envs(adapt(rank));
    });
    ranks.unwrap()
}

#[test]
#[ignore = "a rank of the other tests"]
fn as_rank() -> Result<(), Box<dyn AnyError>> {
    let Some(place) = place()? else { return Ok(()) };
    let (rank, world) = (place.rank, place.world);
    let way = std::env::var(WAY).ok().map(|way| way.parse()).transpose()?;
    let window = WindowOptions { buffer: Some(4096), host_buffer: 8192, way, ..Default::default() };
    let bounce = BounceOptions { chunk: 4096 };
    let device_options = DeviceOptions { window, bounce, ..DeviceOptions::from_env()? };
    let engine = engine(|| Driver::load()?.device(0), device_options);
    let options = Options::default();
    let formed = Group::with_engine(place.connector, Epoch::new(0), rank, world, options, engine);
    let group = match formed {
        Ok(group) => DeviceGroup::new(group, 0),
        Err(error) => return say(&format!("{error:?}")),
    };
    take_part(
        group,
        |group| Ok(format!("right by {}", group.engine()?)),
        || {
            let memory = counted(DRIVER_VARIABLE, "host_device_allocations");
            assert_eq!(memory, 0, "device memory is left over");
        },
    )
}

/// What all ranks say of their sums, of which one is adapted.
fn sums(world: usize, adapt: impl Fn(usize) -> Vec<(&'static str, &'static str)>) -> Vec<String> {
    let mut ranks = start(world, "sums", adapt);
    let heard = ranks.hear(world, PATIENCE).unwrap();
    ranks.finish().unwrap();
    heard.into_iter().map(|(_, said)| said).collect()
}

#[test]
fn processes_share_memory() {
    for (world, kind) in [2, 3, 4, 2, 3].into_iter().zip(KINDS) {
        let expected = format!("right by {}", kind[0].1);
        assert_eq!(sums(world, |_| kind.to_vec()), vec![expected; world]);
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for kind in KINDS {
        let mut ranks = start(4, "until the end", |_| kind.to_vec());
        assert!(ranks.hear(4, PATIENCE).unwrap().iter().all(|(_, said)| said == "under way"));
        ranks.kill(2).unwrap();
        for (rank, said) in ranks.hear(3, PATIENCE).unwrap() {
            assert_eq!(said, "lost 2", "rank {rank}, {kind:?}");
        }
        // The killed one as well, of course.
        assert_eq!(ranks.finish().unwrap(), [2]);
    }
}

#[test]
fn a_device_that_fails_ends_the_group_everywhere() {
    for kind in &KINDS[..3] {
        let failing = |rank| {
            let failing = (rank == 1).then_some(("FAKE_LAUNCHES", "40"));
            kind.iter().copied().chain(failing).collect()
        };
        let ranks = start(3, "until the end", failing);
        let mut ends: Vec<(usize, String)> = ranks.hear(6, PATIENCE).unwrap();
        ends.retain(|(_, said)| said != "under way");
        assert_eq!(ends.len(), 3);
        for (rank, said) in ends {
            assert!(said.contains("CUDA_ERROR_LAUNCH_FAILED"), "rank {rank}: {said}");
            assert!(rank == 1 || said.contains("aborted by 1"), "rank {rank}: {said}");
        }
    }
}

/// Adds a fault to rank 1.
fn with(
    fault: &'static str,
    all: &[(&'static str, &'static str)],
) -> impl Fn(usize) -> Vec<(&'static str, &'static str)> {
    let all = all.to_vec();
    move |rank| all.iter().copied().chain((rank == 1).then_some((fault, "9"))).collect()
}

#[test]
fn a_device_that_the_others_do_not_see_is_reached_through_the_host() {
    assert_eq!(sums(3, with("FAKE_DEVICE", &[])), ["right by host"; 3]);
    for said in sums(3, with("FAKE_DEVICE", &[(ENGINE_VARIABLE, "window")])) {
        assert!(said.starts_with("Device {") && said.contains("does not see its device"), "{said}");
    }
}

#[test]
fn where_one_rank_cannot_open_memory_all_go_through_the_host() {
    assert_eq!(sums(3, with("FAKE_NO_IPC", &[])), ["right by host"; 3]);
    for said in sums(3, with("FAKE_NO_IPC", &[(ENGINE_VARIABLE, "window")])) {
        let opening = "opening the memory of rank 0";
        assert!(said.starts_with("Device { rank: Rank(1)") && said.contains(opening), "{said}");
    }
}

#[test]
fn where_one_rank_cannot_register_memory_there_are_other_ways() {
    // The window needs none, and what bounces is allocated by the driver.
    assert_eq!(sums(3, with("FAKE_NO_REGISTER", &[])), ["right by window"; 3]);
    let all = [("FAKE_NO_IPC", "1")];
    assert_eq!(sums(3, with("FAKE_NO_REGISTER", &all)), ["right by bounce"; 3]);
}
