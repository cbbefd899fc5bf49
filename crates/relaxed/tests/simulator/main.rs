//! The core of the parameter server under thousands of seeded histories.
//!
//! Workers ([`process`]) and servers ([`server`]) talk over a network that delays, doubles, reorders and
//! loses messages and breaks connections, while workers and servers crash, pause and come back
//! ([`world`]). A [`witness`] beside every server checks every event. `UNISONO_TEST_SEED` repeats one
//! history.

mod message;
mod process;
mod random;
mod scenario;
mod server;
mod tally;
mod witness;
mod world;

use scenario::{Level, Sabotage, Scenario};
use tally::Tally;
use unisono_relaxed::staleness::StalenessPolicy;

#[test]
fn lockstep_survives_faults() {
    let tally = survive(5000, |_| Level::Lockstep);
    require_all(&tally, &[]);
}

#[test]
fn even_bounds_survive_faults() {
    let tally = survive(5000, |seed| Level::Ssp(seed % 3 * 2));
    require_all(&tally, &[]);
}

#[test]
fn odd_bounds_survive_faults() {
    let tally = survive(5000, |seed| Level::Ssp(seed % 3 * 2 + 1));
    require_all(&tally, &[]);
}

#[test]
fn async_survives_faults() {
    let tally = survive(5000, |_| Level::Async);
    require_all(&tally, &["held"]);
}

/// Without faults, all servers see the same rounds, each of all workers.
#[test]
fn undisturbed_lockstep_commits_everything_everywhere() {
    for seed in seeds(500) {
        let scenario = Scenario::undisturbed(Level::Lockstep, seed);
        let outcome = world::run(scenario).unwrap_or_else(|failure| panic!("{failure}"));
        let all: Vec<u32> = (0..scenario.workers as u32).collect();
        for commits in &outcome.commits {
            let rounds: Vec<u64> = commits.iter().map(|(round, _)| round.0).collect();
            assert_eq!(rounds, (0..rounds.len() as u64).collect::<Vec<_>>(), "{scenario:?}");
            assert!(rounds.len() >= 4, "{scenario:?}");
            assert!(commits.iter().all(|(_, workers)| *workers == all), "{scenario:?}");
            assert_eq!(commits, &outcome.commits[0], "{scenario:?}");
        }
    }
}

/// Without faults nothing is late, lost or done twice.
#[test]
fn undisturbed_runs_need_no_second_attempt() {
    for seed in seeds(500) {
        for level in [Level::Ssp(seed % 6), Level::Async] {
            let scenario =
                Scenario { stale: StalenessPolicy::Keep, ..Scenario::undisturbed(level, seed) };
            let Tally { settled, dropped, known_by_joining, expired, superseded, .. } =
                world::run(scenario).unwrap_or_else(|failure| panic!("{failure}")).tally;
            assert_eq!(settled, 4 * scenario.workers * scenario.servers as u64, "{scenario:?}");
            assert_eq!([dropped, known_by_joining, expired, superseded], [0; 4]);
        }
    }
}

#[test]
fn equal_seeds_have_equal_histories() {
    let mut fingerprints = std::collections::BTreeSet::new();
    for seed in seeds(200) {
        for level in [Level::Lockstep, Level::Ssp(seed % 6), Level::Async] {
            let scenario = Scenario::new(level, seed);
            let fingerprint = || match world::run_recorded(scenario) {
                Ok(outcome) => outcome.fingerprint,
                Err(failure) => panic!("{failure}"),
            };
            assert_eq!(fingerprint(), fingerprint(), "{scenario:?}");
            fingerprints.insert((format!("{level:?}"), fingerprint()));
        }
    }
    assert_eq!(
        fingerprints.len() as u64,
        3 * seeds(200).count() as u64,
        "seeds make no difference"
    );
}

#[test]
fn reads_without_a_bound_are_found() {
    is_found(Sabotage::NoBound, Level::Ssp(1), "more than 1 behind");
    is_found(Sabotage::NoBound, Level::Ssp(3), "more than 3 behind");
    is_found(Sabotage::NoBound, Level::Lockstep, "more than 0 behind");
}

#[test]
fn a_forgotten_disk_is_found() {
    is_found(Sabotage::ForgetDisk, Level::Async, "is missing, and was acknowledged");
    is_found(Sabotage::ForgetDisk, Level::Lockstep, "is missing, and was acknowledged");
}

#[test]
fn acknowledging_before_writing_is_found() {
    is_found(Sabotage::AcknowledgeFirst, Level::Ssp(2), "is missing, and was acknowledged");
    is_found(Sabotage::AcknowledgeFirst, Level::Lockstep, "is missing, and was acknowledged");
}

#[test]
fn a_push_that_is_applied_twice_is_found() {
    is_found(Sabotage::ForgetNumbers, Level::Ssp(2), "is settled twice");
    is_found(Sabotage::ForgetNumbers, Level::Async, "is settled twice");
}

#[test]
fn a_leaving_that_the_server_overlooks_is_found() {
    is_found(Sabotage::OverlookLeaving, Level::Ssp(0), "no end");
    is_found(Sabotage::OverlookLeaving, Level::Lockstep, "no end");
}

#[test]
fn clocks_that_differ_between_servers_are_found() {
    is_found(Sabotage::ClocksApart, Level::Ssp(0), "no end");
    is_found(Sabotage::ClocksApart, Level::Lockstep, "no end");
}

#[test]
fn entering_ahead_of_a_push_under_way_is_found() {
    is_found(Sabotage::EnterAhead, Level::Ssp(1), "without Some(PushId");
}

/// Runs so many seeds and adds up what happened.
fn survive(count: u64, level: impl Fn(u64) -> Level) -> Tally {
    let mut total = Tally::default();
    for seed in seeds(count) {
        match world::run(Scenario::new(level(seed), seed)) {
            Ok(outcome) => total.add(&outcome.tally),
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("{total:?}");
    total
}

/// Requires that everything has happened at least once, but for the exceptions.
fn require_all(tally: &Tally, except: &[&str]) {
    if std::env::var_os("UNISONO_TEST_SEED").is_none() {
        assert_eq!(tally.missing(), except, "{tally:?}");
    }
}

/// Requires that what is done wrong shows, as what it is, in one of many histories.
fn is_found(sabotage: Sabotage, level: Level, expected: &str) {
    let scenario = |seed| Scenario { sabotage, ..Scenario::new(level, seed) };
    let mut failures = (0..2000).filter_map(|seed| world::run(scenario(seed)).err());
    let found = failures.find(|failure| failure.violation.contains(expected));
    assert!(found.is_some(), "no run noticed {sabotage:?}");
}

/// The seeds from 0, or the one that is to be repeated.
fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let one = std::env::var("UNISONO_TEST_SEED").ok();
    let one = one.map(|text| text.parse::<u64>().expect("UNISONO_TEST_SEED is a number"));
    one.map_or(0..count, |seed| seed..seed + 1)
}
