//! The core of the parameter server, one rule at a time. `simulator` has all of them at once.

use std::time::Duration;

use unisono_relaxed::server::core::{
    Age, Broken, Core, Entry, Joined, Ledger, PushId, Pushed, Refusal, Rules, Saved,
};
use unisono_relaxed::staleness::StalenessPolicy;
use unisono_relaxed::{Clock, Life};

const NOW: Duration = Duration::ZERO;

#[test]
fn a_reader_waits_for_the_slowest() {
    let mut core = with_members(false, 2);
    for clock in 0..3 {
        assert_eq!(core.read(0, Life(1), Clock(clock), Some(2)), Ok(true));
        settled(&mut core, push(0, 1, clock + 1, clock));
    }
    assert_eq!(core.read(0, Life(1), Clock(3), Some(2)), Ok(false));
    assert_eq!(core.read(0, Life(1), Clock(3), Some(3)), Ok(true), "the bound is that of the read");
    assert_eq!(core.read(0, Life(1), Clock(3), None), Ok(true));
    settled(&mut core, push(1, 1, 1, 0));
    assert_eq!(core.slowest(), Some(Clock(1)));
    assert_eq!(core.read(0, Life(1), Clock(3), Some(2)), Ok(true));
}

#[test]
fn a_worker_that_is_gone_holds_no_other_back() {
    let mut core = with_members(false, 3);
    settled(&mut core, push(0, 1, 1, 0));
    assert_eq!(core.read(0, Life(1), Clock(1), Some(0)), Ok(false));
    core.leave(1, Life(1));
    core.hear(0, Life(1), Duration::from_secs(10));
    assert!(core.expire(Duration::from_secs(10)).is_empty());
    assert_eq!(core.expire(Duration::from_secs(11)), [2], "the one of the three who is silent");
    assert_eq!(core.read(0, Life(1), Clock(1), Some(0)), Ok(true));
    for gone in [1, 2] {
        assert_eq!(core.read(gone, Life(1), Clock(0), None), Err(Refusal::NotPresent));
        assert_eq!(core.push(push(gone, 1, 1, 0)), Err(Refusal::NotPresent));
        assert_eq!(core.enter(gone, Life(1), Clock(0)), Err(Refusal::NotPresent));
    }
    core.leave(0, Life(0));
    assert!(core.is_present(0, Life(1)), "an earlier life that leaves is not this one");
}

#[test]
fn a_later_life_takes_the_place_of_an_earlier() {
    let mut core = with_members(false, 2);
    settled(&mut core, push(0, 1, 1, 0));
    assert_eq!(
        core.join(0, Life(2), NOW),
        Ok(Joined { clock: Clock(0), pushes: 0 }),
        "enters at the slowest"
    );
    assert!(!core.is_settled(0, Life(2), 1) && !core.is_present(0, Life(1)));
    assert_eq!(core.join(0, Life(1), NOW), Err(Refusal::Superseded));
    assert_eq!(core.enter(0, Life(1), Clock(0)), Err(Refusal::Superseded));
    assert_eq!(core.read(0, Life(1), Clock(1), None), Err(Refusal::Superseded));
    assert_eq!(core.push(push(0, 1, 1, 0)), Err(Refusal::Superseded), "even a duplicate");
    core.enter(0, Life(2), Clock(0)).unwrap();
    settled(&mut core, push(0, 2, 1, 0));
}

#[test]
fn numbers_have_no_gaps_and_count_once() {
    let mut core = with_members(false, 1);
    assert_eq!(core.push(push(0, 1, 2, 0)), Err(Refusal::Gap { expected: 1 }));
    assert_eq!(core.push(push(0, 1, 1, 1)), Err(Refusal::OtherClock { clock: Clock(0) }));
    settled(&mut core, push(0, 1, 1, 0));
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Duplicate));
    core.leave(0, Life(1));
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Duplicate), "settled is settled");
    assert_eq!(core.ledger(), Ledger { applied: 1, dropped: 0, duplicates: 2 });
    assert_eq!(core.join(0, Life(1), NOW), Ok(Joined { clock: Clock(1), pushes: 1 }));
}

#[test]
fn a_read_is_at_the_clock_of_the_reader() {
    let mut core = with_members(false, 1);
    assert_eq!(core.read(0, Life(1), Clock(1), None), Err(Refusal::OtherClock { clock: Clock(0) }));
    core.join(0, Life(1), NOW).unwrap();
    assert_eq!(
        core.read(0, Life(1), Clock(0), None),
        Err(Refusal::NotPresent),
        "told its clock, not entered"
    );
    core.enter(0, Life(1), Clock(7)).unwrap();
    core.enter(0, Life(1), Clock(5)).unwrap();
    assert_eq!(
        core.read(0, Life(1), Clock(5), None),
        Err(Refusal::OtherClock { clock: Clock(7) }),
        "no way back"
    );
    assert_eq!(core.read(0, Life(1), Clock(7), Some(0)), Ok(true));
}

#[test]
fn ages_are_counted_from_the_read() {
    let mut core = Core::new(Rules { stale: StalenessPolicy::Drop(1), ..rules(false) });
    enter_all(&mut core, 2);
    core.read(0, Life(1), Clock(0), None).unwrap();
    for clock in 0..3 {
        core.read(1, Life(1), Clock(clock), None).unwrap();
        let entry = settled(&mut core, push(1, 1, clock + 1, clock));
        assert_eq!(entry.pushes[0].1, Age { lead: clock, delay: 0, present: 2 });
        assert_eq!((entry.update, entry.factor), (clock + 1, 1.0));
    }
    let entry = settled(&mut core, push(0, 1, 1, 0));
    assert_eq!(entry.pushes[0].1, Age { lead: 0, delay: 3, present: 2 });
    assert_eq!((entry.update, core.updates()), (0, 3), "1.5 clocks are more than 1");
    assert_eq!(core.ledger(), Ledger { applied: 3, dropped: 1, duplicates: 0 });
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Duplicate), "what is dropped is settled");
    core.read(0, Life(1), Clock(1), None).unwrap();
    assert_eq!(settled(&mut core, push(0, 1, 2, 1)).update, 4);
}

#[test]
fn who_comes_late_enters_at_the_slowest_and_the_first_one_back_at_the_furthest() {
    let mut core = with_members(false, 2);
    for clock in 0..4 {
        settled(&mut core, push(0, 1, clock + 1, clock));
    }
    settled(&mut core, push(1, 1, 1, 0));
    assert_eq!(core.join(2, Life(1), NOW).unwrap().clock, Clock(1));
    core.leave(0, Life(1));
    core.leave(1, Life(1));
    assert_eq!((core.present_members(), core.slowest()), (0, None));
    assert_eq!(core.join(2, Life(1), NOW).unwrap().clock, Clock(4));
    core.enter(2, Life(1), Clock(4)).unwrap();
    assert_eq!(core.join(1, Life(2), NOW).unwrap(), Joined { clock: Clock(4), pushes: 0 });
    assert_eq!(core.read(2, Life(1), Clock(4), Some(0)), Ok(true));
}

#[test]
fn what_is_written_survives() {
    let mut core = with_members(false, 2);
    let first = settled(&mut core, push(0, 1, 1, 0));
    let saved = core.save();
    let second = settled(&mut core, push(1, 1, 1, 0));
    core.push(push(1, 1, 1, 0)).unwrap();
    for (saved, entries) in [(saved, vec![&second]), (Saved::default(), vec![&first, &second])] {
        let mut restored = Core::restore(rules(false), &saved);
        entries.into_iter().for_each(|entry| restored.repeat(entry).unwrap());
        assert_eq!(restored.save(), core.save());
        assert_eq!(restored.ledger(), Ledger { applied: 2, dropped: 0, duplicates: 0 });
        assert_eq!(restored.present_members(), 0);
        assert_eq!(restored.push(push(0, 1, 1, 0)), Ok(Pushed::Duplicate));
        assert_eq!(restored.push(push(0, 1, 2, 1)), Err(Refusal::NotPresent));
        assert_eq!(restored.join(0, Life(1), NOW), Ok(Joined { clock: Clock(1), pushes: 1 }));
    }
}

/// Else what comes after would meet weights that it was not made for.
#[test]
fn nothing_that_is_written_is_passed_over() {
    let mut core = with_members(false, 2);
    let saved = core.save();
    let entries: Vec<Entry> = (1..=3)
        .flat_map(|number| [(0, number), (1, number)])
        .map(|(worker, number)| settled(&mut core, push(worker, 1, number, number - 1)))
        .collect();
    for left_out in 0..entries.len() - 1 {
        let mut restored = Core::restore(rules(false), &saved);
        entries[..left_out].iter().for_each(|entry| restored.repeat(entry).unwrap());
        let before = left_out as u64;
        let broken = restored.repeat(&entries[left_out + 1]);
        assert_eq!(broken, Err(Broken::Update { before, found: before + 2 }));
        if left_out > 0 {
            let again = restored.repeat(&entries[left_out - 1]);
            assert_eq!(again, Err(Broken::Update { before, found: before }), "it is there");
        }
    }
    // A push that was dropped is no update, but it has a number.
    let mut restored = Core::restore(rules(false), &saved);
    let dropped = |entry: &Entry| Entry { update: 0, ..entry.clone() };
    restored.repeat(&dropped(&entries[0])).unwrap();
    let broken = restored.repeat(&dropped(&entries[4]));
    assert_eq!(broken, Err(Broken::Push { worker: 0, life: Life(1), before: 1, found: 3 }));
}

#[test]
fn a_round_is_one_push_of_every_worker() {
    let mut core = with_members(true, 2);
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Collected));
    assert_eq!(core.commit(), None);
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Collected), "sent again");
    assert_eq!(core.push(push(1, 1, 1, 0)), Ok(Pushed::Collected));
    let entry = core.commit().unwrap();
    assert_eq!(pushers(&entry), [(0, 1), (1, 1)]);
    assert_eq!((core.round(), core.updates(), core.ledger().applied), (Clock(1), 1, 2));
    assert_eq!(core.push(push(0, 1, 1, 0)), Ok(Pushed::Duplicate));
    assert_eq!(core.commit(), None);
}

#[test]
fn a_round_goes_on_without_who_has_left() {
    let mut core = with_members(true, 3);
    core.push(push(0, 1, 1, 0)).unwrap();
    core.push(push(1, 1, 1, 0)).unwrap();
    core.leave(1, Life(1));
    core.leave(2, Life(1));
    assert_eq!(pushers(&core.commit().unwrap()), [(0, 1), (1, 1)], "what had come counts");
    core.join(2, Life(1), NOW).unwrap();
    core.enter(2, Life(1), Clock(0)).unwrap();
    let late = push(2, 1, 1, 0);
    assert_eq!(core.push(late), Ok(Pushed::Late { clock: Clock(1) }));
    assert_eq!(core.push(push(2, 1, 2, 1)), Err(Refusal::Gap { expected: 1 }));
    let entry = core.drop_late(late);
    assert_eq!((entry.update, pushers(&entry)), (0, vec![(2, 1)]));
    assert_eq!(core.push(late), Ok(Pushed::Duplicate));
    assert_eq!(core.push(push(2, 1, 2, 1)), Ok(Pushed::Collected));
    assert_eq!(core.ledger(), Ledger { applied: 2, dropped: 1, duplicates: 1 });
}

#[test]
fn a_round_that_no_worker_is_left_for_waits() {
    let mut core = with_members(true, 1);
    core.push(push(0, 1, 1, 0)).unwrap();
    core.leave(0, Life(1));
    assert_eq!(core.commit(), None);
    assert_eq!(core.join(0, Life(2), NOW), Ok(Joined { clock: Clock(0), pushes: 0 }));
    core.enter(0, Life(2), Clock(0)).unwrap();
    assert_eq!(pushers(&core.commit().unwrap()), [(0, 1)], "pushed by its earlier life");
    assert_eq!(core.push(push(0, 2, 1, 0)), Ok(Pushed::Late { clock: Clock(1) }));
    assert_eq!(core.read(0, Life(2), Clock(1), Some(0)), Ok(true));
}

/// Its numbers would otherwise make those of the later life duplicates.
#[test]
fn a_push_of_an_earlier_life_settles_nothing_of_the_later() {
    let mut core = with_members(true, 1);
    for number in 1..=3 {
        core.push(push(0, 1, number, number - 1)).unwrap();
        if number < 3 {
            core.commit().unwrap();
        }
    }
    core.join(0, Life(2), NOW).unwrap();
    let saved = core.save();
    core.enter(0, Life(2), Clock(0)).unwrap();
    let entry = core.commit().unwrap();
    let mut restored = Core::restore(rules(true), &saved);
    restored.repeat(&entry).unwrap();
    for core in [&mut core, &mut restored] {
        assert_eq!(core.join(0, Life(2), NOW), Ok(Joined { clock: Clock(3), pushes: 0 }));
        core.enter(0, Life(2), Clock(3)).unwrap();
        assert_eq!(core.push(push(0, 2, 1, 3)), Ok(Pushed::Collected));
    }
}

/// Servers can be a round apart. Who joins meanwhile begins with the later one, everywhere.
#[test]
fn a_server_that_is_behind_does_not_wait_for_who_joined_at_a_later_round() {
    let mut core = with_members(true, 1);
    core.join(1, Life(1), NOW).unwrap();
    core.enter(1, Life(1), Clock(1)).unwrap();
    assert_eq!(core.read(1, Life(1), Clock(1), Some(0)), Ok(false), "round 0 is not over");
    core.push(push(0, 1, 1, 0)).unwrap();
    assert_eq!(pushers(&core.commit().unwrap()), [(0, 1)]);
    assert_eq!(core.read(1, Life(1), Clock(1), Some(0)), Ok(true));
    core.join(2, Life(1), NOW).unwrap();
    core.enter(2, Life(1), Clock(3)).unwrap();
    core.leave(0, Life(1));
    core.leave(1, Life(1));
    assert_eq!((core.commit(), core.round().0), (None, 3), "rounds of no worker are left out");
    assert_eq!(core.push(push(2, 1, 1, 3)), Ok(Pushed::Collected));
    assert_eq!(core.commit().unwrap().update, 2);
}

#[test]
fn a_run_is_over_after_its_pushes_or_rounds() {
    let mut core = Core::new(Rules { total: 2, ..rules(false) });
    enter_all(&mut core, 2);
    settled(&mut core, push(0, 1, 1, 0));
    assert!(!core.is_finished());
    settled(&mut core, push(1, 1, 1, 0));
    assert!(core.is_finished());
    let mut core = Core::new(Rules { total: 1, ..rules(true) });
    enter_all(&mut core, 2);
    core.push(push(0, 1, 1, 0)).unwrap();
    core.push(push(1, 1, 1, 0)).unwrap();
    assert!(!core.is_finished());
    core.commit().unwrap();
    assert!(core.is_finished());
}

fn rules(lockstep: bool) -> Rules {
    Rules {
        lockstep,
        stale: StalenessPolicy::Keep,
        timeout: Duration::from_secs(10),
        total: u64::MAX,
    }
}

fn with_members(lockstep: bool, members: u32) -> Core {
    let mut core = Core::new(rules(lockstep));
    enter_all(&mut core, members);
    core
}

fn enter_all(core: &mut Core, members: u32) {
    for worker in 0..members {
        assert_eq!(core.join(worker, Life(1), NOW), Ok(Joined { clock: Clock(0), pushes: 0 }));
        core.enter(worker, Life(1), Clock(0)).unwrap();
    }
}

fn push(worker: u32, life: u64, number: u64, clock: u64) -> PushId {
    PushId { worker, life: Life(life), number, clock: Clock(clock) }
}

fn settled(core: &mut Core, push: PushId) -> Entry {
    match core.push(push) {
        Ok(Pushed::Settled(entry)) => entry,
        other => panic!("{push:?} became {other:?}"),
    }
}

fn pushers(entry: &Entry) -> Vec<(u32, u64)> {
    entry.pushes.iter().map(|(push, _)| (push.worker, push.life.0)).collect()
}
