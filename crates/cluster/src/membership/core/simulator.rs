//! Jobs of one to six workers under seeded histories of kills, stops, joins, leaves, slow workers, late messages
//! and pauses of the coordinator. While the faults last, nothing may happen that [the witness](super::world)
//! forbids; when they are over, every run must come to its end. `UNISONO_TEST_SEED` repeats one history.

mod history;

use super::world::{Sabotage, Tally};
use history::History;

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
#[ignore = "soak: a million histories and more, some minutes; its last result is in docs/measurements/elastic.md"]
fn a_million_histories_end_with_the_weights_of_an_undisturbed_run() {
    println!("{:?}", survive(SEEDS..1_200_000));
}

/// A coordinator that is paused before the first worker comes; the only member of a job for one leaves.
#[test]
fn histories_that_once_went_wrong_end_well() {
    survive([613_539, 1_099_040].into_iter());
}

#[test]
fn equal_seeds_have_equal_histories() {
    for seed in seeds(200) {
        let fingerprint = || {
            let mut history = History::new(seed, None);
            history.run().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            history.fingerprint()
        };
        assert_eq!(fingerprint(), fingerprint(), "seed {seed}");
    }
}

/// What must have happened in the histories of one run of the tests.
const REQUIRED: [&str; 39] = [
    "answers in a pause",
    "asked to regroup",
    "checkpoints loaded",
    "coordinator pauses",
    "departures",
    "end after the end",
    "end in a bucket",
    "end in the barrier",
    "end while building",
    "end while forming",
    "end while giving",
    "end while handing in",
    "end while loading",
    "end while receiving",
    "end while saving",
    "end while sharing",
    "end while waiting",
    "epochs",
    "failures",
    "failures by silence",
    "jobs disbanded",
    "joins",
    "kills of the silent",
    "leaves to regroup",
    "leaving workers",
    "messages after the end",
    "orderly ends taken for losses",
    "probes",
    "restarts",
    "several at once",
    "slow steps",
    "spares",
    "states given",
    "stops",
    "stops that end before the timeout",
    "stops that end after the timeout",
    "undisturbed",
    "workers released",
    "wrong suspicions",
];

#[test]
fn not_waiting_for_members_of_the_old_epoch_is_found() {
    is_found(Sabotage::WaitForNone, &["begins while"]);
}

#[test]
fn a_stopped_member_that_is_not_killed_is_found() {
    is_found(Sabotage::SpareTheSilent, &["begins while"]);
}

#[test]
fn a_killed_member_whose_end_is_not_awaited_is_found() {
    is_found(Sabotage::KillWithoutWaiting, &["begins while"]);
}

#[test]
fn a_late_ready_of_an_old_life_that_counts_is_found() {
    is_found(Sabotage::MixLives, &["which is not ready", "though it answers"]);
}

#[test]
fn a_dead_worker_that_joins_is_found() {
    is_found(Sabotage::ForgetEnds, &["no end after the faults"]);
}

#[test]
fn a_commit_before_all_parts_are_in_is_found() {
    is_found(Sabotage::CommitEarly, &["wrong weights"]);
}

#[test]
fn a_donor_with_fewer_steps_is_found() {
    is_found(Sabotage::OldDonor, &["is handed an older state"]);
}

#[test]
fn a_receiver_that_claims_half_a_state_is_found() {
    is_found(Sabotage::HalfReceived, &["wrong weights"]);
}

#[test]
fn the_result_of_an_old_epoch_is_found() {
    is_found(Sabotage::OldFinish, &["the result of an old epoch counts"]);
}

#[test]
fn leaving_without_a_vote_is_found() {
    is_found(Sabotage::NoVote, &["fails without a fault"]);
}

#[test]
fn killing_workers_that_answer_is_found() {
    is_found(Sabotage::OverlookAnswers, &["though it answers"]);
}

#[test]
fn a_pause_that_counts_as_silence_is_found() {
    is_found(Sabotage::CountPauses, &["though it answers"]);
}

#[test]
fn a_pause_that_counts_as_patience_is_found() {
    is_found(Sabotage::GiveUpAfterPauses, &["gives up"]);
}

/// Runs so many histories and adds up what happened.
fn survive(seeds: impl Iterator<Item = u64>) -> Tally {
    let mut total = Tally::default();
    for seed in seeds {
        let mut history = History::new(seed, None);
        if let Err(wrong) = history.run() {
            panic!("seed {seed}, at {:?}: {wrong}", history.world().now);
        }
        total.add(&history.world().tally);
        if seed % 10_000 == 9_999 {
            println!("histories up to {seed} ended well");
        }
    }
    total
}

/// Requires that what is done wrong shows, as what it is, in one of the histories.
fn is_found(sabotage: Sabotage, expected: &[&str]) {
    let mut failures = (0..SEEDS).filter_map(|seed| {
        let wrong = History::new(seed, Some(sabotage)).run().err()?;
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
