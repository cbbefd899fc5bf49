//! Jobs of one to four machines under seeded histories: launchers and whole machines that are killed, stopped and
//! cut off, machines that join and leave, a store that is away or loses answers, and all that can happen to
//! workers. The launchers are the real ones. While the faults last, nothing may happen that
//! [the witness](witness) forbids; when they are over, every run must come to its end, and all launchers must
//! learn of it. `UNISONO_TEST_SEED` repeats one history.

mod faults;
mod hosts;
mod links;
mod store;
mod witness;
mod workers;
mod world;

use crate::membership::model::Tally;
use world::{Sabotage, World};

const SEEDS: u64 = 20_000;

#[test]
fn every_history_ends_with_the_weights_of_an_undisturbed_run() {
    let tally = survive(seeds(SEEDS));
    if std::env::var_os("UNISONO_TEST_SEED").is_none() {
        // What never happened was not tried.
        for what in REQUIRED {
            let count = tally.counts.get(what).copied().unwrap_or(0);
            assert!(count >= 20, "{what}: {count} in {tally:?}");
        }
    }
}

#[test]
#[ignore = "soak: a million histories, some minutes; its last result is in docs/measurements/elastic.md"]
fn a_million_histories_of_machines_end_with_the_weights_of_an_undisturbed_run() {
    println!("{:?}", survive(SEEDS..1_000_000 + SEEDS));
}

/// A leader that is late now and then and never asks its followers whether they live, or never finds that one of
/// them is silent; a launcher that has joined twice; workers that leave with the state though those that stay were
/// not handed it; a machine that is lost twice; a worker that is heard after its end, before there is a leader;
/// one that is let go by a leader whose place another has taken; a leader that leaves with the state before it has
/// heard of its successors.
#[test]
fn histories_that_once_went_wrong_end_well() {
    survive(
        [10, 1_059, 3_314, 10_217, 14_144, 23_643, 133_304, 554_382, 58_316, 363_510, 454_216]
            .into_iter(),
    );
}

#[test]
fn equal_seeds_have_equal_histories() {
    for seed in seeds(200) {
        let fingerprint = || {
            let mut world = World::new(seed, None);
            world.run().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            world.fingerprint()
        };
        assert_eq!(fingerprint(), fingerprint(), "seed {seed}");
    }
}

/// What must have happened in the histories of one run of the tests.
const REQUIRED: [&str; 29] = [
    "all machines lost",
    "all machines told to leave",
    "all members leave",
    "asymmetric partitions",
    "begun again after the patience",
    "blips",
    "changes while the store is away",
    "checkpoints loaded",
    "deposed leaders",
    "epochs",
    "followers killed",
    "followers stopped",
    "followers that leave",
    "leaders killed",
    "leaders stopped",
    "leaders that leave",
    "leaders that wake up deposed",
    "leaves to regroup",
    "lost answers of the store",
    "machines disbanded",
    "machines that join later",
    "machines without the store",
    "members released",
    "minorities cut off",
    "states given",
    "takeovers",
    "takeovers by two",
    "workers killed by order",
    "writes of a deposed leader",
];

#[test]
fn an_epoch_that_is_told_before_it_is_in_the_record_is_found() {
    is_found(Sabotage::BeginEarly, &["before the record says so"]);
}

#[test]
fn a_result_that_is_accepted_before_it_is_in_the_record_is_found() {
    is_found(Sabotage::CompleteEarly, &["complete before the record says so"]);
}

#[test]
fn a_takeover_without_a_comparison_is_found() {
    is_found(Sabotage::TakeOverBlindly, &["two lists", "begins after", "changes after the end"]);
}

#[test]
fn a_deposed_leader_that_goes_on_is_found() {
    is_found(Sabotage::IgnoreConflicts, &["before the record says so", "two launchers begin"]);
}

#[test]
fn workers_that_return_and_are_believed_to_be_ready_are_found() {
    is_found(Sabotage::BelieveReturned, &["which is not ready"]);
}

#[test]
fn an_epoch_that_begins_while_all_members_may_be_in_the_last_one_is_found() {
    is_found(Sabotage::ForgetUnseen, &["though all members may be in"]);
}

#[test]
fn releasing_the_only_workers_with_state_is_found() {
    is_found(Sabotage::ReleaseAtOnce, &["is lost"]);
}

#[test]
fn an_old_leader_that_is_heard_is_found() {
    is_found(Sabotage::HearOldLinks, &["comes back", "which is not ready"]);
}

/// Runs so many histories and adds up what happened.
fn survive(seeds: impl Iterator<Item = u64>) -> Tally {
    let (mut total, mut failures) = (Tally::default(), 0);
    for seed in seeds {
        let mut world = World::new(seed, None);
        if let Err(wrong) = world.run() {
            failures += 1;
            println!("seed {seed}, at {} µs: {wrong}", world.now);
        }
        total.add(&world.tally);
        if seed % 10_000 == 9_999 {
            println!("histories up to {seed}: {failures} went wrong");
        }
    }
    assert_eq!(failures, 0, "histories that went wrong");
    total
}

/// Requires that what is done wrong shows, as what it is, in one of the histories.
fn is_found(sabotage: Sabotage, expected: &[&str]) {
    let mut failures = (0..SEEDS).filter_map(|seed| {
        let wrong = World::new(seed, Some(sabotage)).run().err()?;
        Some((seed, wrong))
    });
    let found =
        failures.find(|(_, wrong)| expected.iter().any(|expected| wrong.contains(expected)));
    let (seed, wrong) = found.unwrap_or_else(|| panic!("no history noticed {sabotage:?}"));
    println!("{sabotage:?}: seed {seed}: {wrong}");
}

/// The seeds from 0, or the one that is to be repeated.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let one = std::env::var("UNISONO_TEST_SEED").ok();
    let one = one.map(|text| text.parse::<u64>().expect("UNISONO_TEST_SEED is a number"));
    one.map_or(0..count, |seed| seed..seed + 1)
}
