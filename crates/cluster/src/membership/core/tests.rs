//! Histories that were once handled wrongly, or that would be easily.

use std::time::Duration;

use super::{Decision, Input, Membership, Settings, Stands, WorkerId};

#[test]
fn the_next_epoch_waits_for_the_end_of_a_member_that_is_killed() {
    let mut job = Job::of(2, 1);
    job.begin();
    assert_eq!(job.hear(1, Input::Closed(worker(1))), [Decision::Kill(worker(1))]);
    assert_eq!(job.hear(2, job.ready(0, 1, &[])), []);
    // It may act until its end is seen.
    assert_eq!(job.hear(40, Input::Ended(worker(1))), [begin(2, &[worker(0)])]);
}

#[test]
fn the_next_epoch_waits_for_the_end_of_an_old_life_whose_next_is_here() {
    let mut job = Job::of(2, 1);
    job.begin();
    let next = WorkerId { number: 1, life: 1 };
    assert_eq!(job.hear(1, Input::Connected(next)), [Decision::Kill(worker(1))]);
    assert_eq!(job.hear(2, Input::Ready { worker: next, after: 0, silent: vec![] }), []);
    assert_eq!(job.hear(3, job.ready(0, 1, &[])), []);
    assert_eq!(job.hear(4, Input::Ended(worker(1))), [begin(2, &[worker(0), next])]);
}

#[test]
fn what_a_worker_sent_before_its_end_is_too_late_after_it() {
    let mut job = Job::of(2, 1);
    job.begin();
    let next = WorkerId { number: 2, life: 0 };
    assert_eq!(job.hear(1, Input::Ended(next)), []);
    assert_eq!(job.hear(2, Input::Connected(next)), [Decision::Kill(next)]);
    assert_eq!(job.hear(3, Input::Ready { worker: next, after: 0, silent: vec![] }), []);
    assert_eq!(job.core.spares().count(), 0);
}

#[test]
fn an_answer_behind_other_inputs_counts() {
    let mut job = Job::of(3, 1);
    job.begin();
    let probes = job.hear(100, job.ready(0, 1, &[1]));
    assert_eq!(probes, [Decision::Probe(worker(1))]);
    assert_eq!(job.wait(249), []);
    // Its chance is over, and its answer waits behind what another worker says.
    assert_eq!(job.hear(251, job.ready(2, 1, &[1])), []);
    assert_eq!(job.hear(251, Input::Answered(worker(1))), []);
    assert_eq!(job.tick(251), []);
}

#[test]
fn a_short_pause_of_the_coordinator_is_not_the_silence_of_a_worker() {
    let mut job = Job::of(3, 1);
    job.begin();
    assert_eq!(job.hear(100, job.ready(0, 1, &[1])), [Decision::Probe(worker(1))]);
    // It was paused for most of the time that the worker had; the answer waits in a socket.
    assert_eq!(job.tick(255), [Decision::Probe(worker(1))]);
    assert_eq!(job.hear(256, Input::Answered(worker(1))), []);
    assert_eq!(job.tick(500), []);
}

#[test]
fn a_silent_worker_is_killed_in_time() {
    let mut job = Job::of(3, 1);
    job.begin();
    assert_eq!(job.hear(100, job.ready(0, 1, &[1])), [Decision::Probe(worker(1))]);
    assert_eq!(job.hear(100, job.ready(2, 1, &[1])), []);
    assert_eq!(job.wait(249), []);
    assert_eq!(job.wait(250), [Decision::Kill(worker(1))]);
    let members = [worker(0), worker(2)];
    assert_eq!(job.hear(251, Input::Ended(worker(1))), [begin(2, &members)]);
}

#[test]
fn a_member_that_computes_for_minutes_is_waited_for() {
    let mut job = Job::of(2, 1);
    job.begin();
    assert_eq!(job.hear(100, job.ready(0, 1, &[1])), [Decision::Probe(worker(1))]);
    assert_eq!(job.hear(110, Input::Answered(worker(1))), []);
    while job.now < 600_000 {
        let at = job.core.deadline().expect("it is watched").as_millis() as u64;
        let mut decisions = job.tick(at);
        while let Some(decision) = decisions.pop() {
            let Decision::Probe(id) = decision else { panic!("{decision:?}") };
            decisions.extend(job.hear(at, Input::Answered(id)));
        }
    }
    let decisions = job.hear(job.now, job.ready(1, 1, &[]));
    assert_eq!(decisions, [begin(2, &[worker(0), worker(1)])]);
}

#[test]
fn a_spare_that_is_stopped_is_found_before_it_is_needed() {
    let mut job = Job::of(2, 1);
    job.core.settings.most = 2;
    job.begin();
    job.hear(1, Input::Connected(worker(2)));
    assert_eq!(job.hear(1, Input::Ready { worker: worker(2), after: 0, silent: vec![] }), []);
    let mut decisions = Vec::new();
    while job.now < 5_000 {
        let at = job.core.deadline().expect("all are watched").as_millis() as u64;
        for decision in job.tick(at) {
            match decision {
                Decision::Probe(id) if id.number < 2 => {
                    job.hear(at, Input::Answered(id));
                }
                other => decisions.push(other),
            }
        }
    }
    assert_eq!(decisions, [Decision::Probe(worker(2)), Decision::Kill(worker(2))]);
}

#[test]
fn a_paused_coordinator_does_not_give_up() {
    let mut job = Job::of(2, 2);
    job.begin();
    job.hear(1, Input::Closed(worker(1)));
    job.hear(2, Input::Ended(worker(1)));
    assert_eq!(job.hear(3, job.ready(0, 1, &[])), []);
    let next = WorkerId { number: 1, life: 1 };
    // The next life has connected and waits to be heard.
    assert!(!job.tick(300_000).iter().any(|decision| matches!(decision, Decision::GiveUp { .. })));
    job.hear(300_001, Input::Connected(next));
    let decisions = job.hear(300_001, Input::Ready { worker: next, after: 0, silent: vec![] });
    assert_eq!(decisions, [begin(2, &[worker(0), next])]);
}

#[test]
fn too_few_workers_for_too_long_are_the_end() {
    let mut job = Job::of(2, 2);
    job.begin();
    job.hear(1, Input::Ended(worker(1)));
    assert_eq!(job.hear(3, job.ready(0, 1, &[])), []);
    let mut last = Vec::new();
    while let Some(at) = job.core.deadline() {
        last = job.tick(at.as_millis() as u64);
        if last == [Decision::Probe(worker(0))] {
            assert_eq!(job.hear(job.now, Input::Answered(worker(0))), []);
        }
    }
    assert_eq!((job.now, last), (60_003, vec![Decision::GiveUp { ready: 1 }]));
}

#[test]
fn a_result_counts_though_its_worker_has_ended_until_the_next_epoch_begins() {
    let finished = Input::Finished { worker: worker(0), epoch: 1 };
    let mut job = Job::of(2, 1);
    job.begin();
    assert_eq!(job.hear(1, Input::Ended(worker(0))), []);
    let mut other = Job { core: job.core.clone(), now: 1 };
    assert_eq!(job.hear(2, finished.clone()), [Decision::Finish]);
    assert_eq!(job.hear(3, finished.clone()), []);
    assert_eq!(other.hear(2, other.ready(1, 1, &[])), [begin(2, &[worker(1)])]);
    assert_eq!(other.hear(3, finished), []);
}

#[test]
fn workers_that_never_come_are_the_end() {
    let mut job = Job::of(2, 1);
    assert_eq!(job.wait(120_000), [Decision::GiveUp { ready: 0 }]);
    assert_eq!(job.now, 60_000);
}

#[test]
fn patience_may_be_without_end() {
    let settings = Settings { patience: Duration::MAX, ..Job::of(2, 1).core.settings };
    let mut core = Membership::new(settings, Duration::from_secs(1));
    assert_eq!(core.handle(Duration::from_secs(2), Input::Connected(worker(0))), []);
    assert_eq!(core.tick(Duration::from_secs(3)), []);
}

#[test]
fn a_member_that_vanishes_twice_may_still_be_in_its_epoch() {
    let mut job = Job::of(1, 1);
    job.begin();
    job.hear(1, Input::Connected(worker(1)));
    job.hear(1, Input::Ready { worker: worker(1), after: 0, silent: vec![] });
    for now in [2, 3] {
        assert_eq!(job.hear(now, Input::Vanished(vec![worker(0)])), []);
    }
    // No member of the last epoch has been seen to leave it.
    assert_eq!(job.core.epoch(), 1);
}

#[test]
fn a_member_that_returns_before_the_next_epoch_is_where_it_was() {
    let mut job = Job::of(2, 1);
    job.begin();
    job.hear(1, Input::Connected(worker(2)));
    job.hear(1, Input::Ready { worker: worker(2), after: 0, silent: vec![] });
    assert_eq!(job.hear(2, Input::Vanished(vec![worker(0), worker(1), worker(2)])), []);
    let stands = Stands::Ready { after: 0, silent: vec![] };
    assert_eq!(job.hear(3, Input::Returned { worker: worker(2), stands }), []);
    let returned = |number, stands| Input::Returned { worker: worker(number), stands };
    assert_eq!(job.hear(4, returned(0, Stands::In(1))), []);
    let stands = Stands::Ready { after: 1, silent: vec![] };
    assert_eq!(job.hear(5, returned(1, stands)), []);
    let members = [worker(0), worker(1), worker(2)];
    assert_eq!(job.hear(6, job.ready(0, 1, &[])), [begin(2, &members)]);
    // That one has begun without it.
    job.hear(7, Input::Vanished(vec![worker(2)]));
    job.hear(8, job.ready(0, 2, &[]));
    let members = [worker(0), worker(1)];
    assert_eq!(job.hear(9, job.ready(1, 2, &[])), [begin(3, &members)]);
    let killed = job.hear(10, returned(2, Stands::In(2)));
    assert_eq!(killed, [Decision::Kill(worker(2))]);
}

#[test]
fn no_epoch_begins_with_a_worker_that_vanishes_with_others() {
    let mut job = Job::of(3, 1);
    job.begin();
    job.hear(1, job.ready(0, 1, &[]));
    job.hear(1, job.ready(2, 1, &[]));
    let vanished = Input::Vanished(vec![worker(1), worker(2)]);
    assert_eq!(job.hear(2, vanished), [begin(2, &[worker(0)])]);
}

#[test]
fn workers_that_leave_stay_for_one_more_epoch_if_the_others_may_lack_the_state() {
    let mut job = Job::of(1, 1);
    job.begin();
    job.hear(1, Input::Connected(worker(1)));
    let asked = job.hear(1, Input::Ready { worker: worker(1), after: 0, silent: vec![] });
    assert_eq!(asked, [Decision::AskToRegroup]);
    let both = [worker(0), worker(1)];
    assert_eq!(job.hear(2, job.ready(0, 1, &[])), [begin(2, &both)]);
    // That epoch ends before anything is handed over.
    assert_eq!(job.hear(3, Input::Leaving(worker(0))), [Decision::AskToRegroup]);
    job.hear(4, job.ready(1, 2, &[]));
    assert_eq!(job.hear(4, job.ready(0, 2, &[])), [begin(3, &both)]);
    assert_eq!(job.hear(5, Input::Stepped { epoch: 3 }), [Decision::AskToRegroup]);
    job.hear(6, job.ready(1, 3, &[]));
    let decisions = job.hear(6, job.ready(0, 3, &[]));
    assert_eq!(decisions, [Decision::Release(worker(0)), begin(4, &[worker(1)])]);
}

#[test]
fn a_coordinator_that_is_late_again_and_again_finds_a_silent_worker() {
    let mut job = Job::of(3, 1);
    job.begin();
    job.hear(1, job.ready(0, 1, &[]));
    job.hear(1, job.ready(2, 1, &[]));
    let mut killed = Vec::new();
    for late in [0, 60].into_iter().cycle().take(100) {
        let at = job.core.deadline().expect("all are watched").as_millis() as u64;
        for decision in job.tick(at + late) {
            match decision {
                Decision::Probe(id) if id != worker(1) => {
                    job.hear(job.now, Input::Answered(id));
                }
                Decision::Kill(id) => killed.push((id, job.now < 5_000)),
                _ => {}
            }
        }
    }
    assert_eq!(killed, [(worker(1), true)]);
}

#[test]
fn members_regroup_while_they_are_enough_without_a_worker_that_is_not_ready() {
    let mut job = Job::of(3, 2);
    assert!(!job.core.is_regrouping(), "before the first epoch");
    job.begin();
    assert!(!job.core.is_regrouping(), "all are in the epoch");
    job.hear(1, Input::Ended(worker(2)));
    assert!(job.core.is_regrouping());
    job.hear(2, job.ready(0, 1, &[]));
    assert!(job.core.is_regrouping(), "one is not ready yet");
    // Its place is needed: whoever waited for the others now would wait for itself.
    job.hear(3, Input::Closed(worker(1)));
    assert!(!job.core.is_regrouping(), "one alone is too few");
    let spare = WorkerId { number: 2, life: 1 };
    job.hear(4, Input::Connected(spare));
    job.hear(5, Input::Ready { worker: spare, after: 0, silent: vec![] });
    assert!(job.core.is_regrouping(), "with the spare they are two");
    assert_eq!(job.hear(6, Input::Ended(worker(1))), [begin(2, &[worker(0), spare])]);
    assert!(!job.core.is_regrouping());
    for worker in [worker(0), spare] {
        job.hear(7, Input::Ended(worker));
    }
    assert!(!job.core.is_regrouping(), "no member lives");
}

struct Job {
    core: Membership,
    now: u64,
}

impl Job {
    fn of(workers: usize, least: usize) -> Job {
        let settings = Settings {
            workers,
            least,
            most: 8,
            timeout: Duration::from_secs(2),
            patience: Duration::from_secs(60),
        };
        Job { core: Membership::new(settings, Duration::ZERO), now: 0 }
    }

    /// Begins the first epoch.
    fn begin(&mut self) {
        let members: Vec<WorkerId> = (0..self.core.settings.workers as u32).map(worker).collect();
        let mut last = Vec::new();
        for id in &members {
            assert_eq!(self.hear(0, Input::Connected(*id)), []);
            last = self.hear(0, Input::Ready { worker: *id, after: 0, silent: vec![] });
        }
        assert_eq!(last, [begin(1, &members)]);
    }

    fn ready(&self, number: u32, after: u64, silent: &[usize]) -> Input {
        Input::Ready { worker: worker(number), after, silent: silent.to_vec() }
    }

    fn hear(&mut self, now: u64, input: Input) -> Vec<Decision> {
        self.now = now;
        self.core.handle(Duration::from_millis(now), input)
    }

    fn tick(&mut self, now: u64) -> Vec<Decision> {
        self.now = now;
        self.core.tick(Duration::from_millis(now))
    }

    /// Until then, with a tick at every deadline.
    fn wait(&mut self, until: u64) -> Vec<Decision> {
        let mut decisions = Vec::new();
        while let Some(at) = self.core.deadline().filter(|at| at.as_millis() as u64 <= until) {
            self.now = at.as_millis() as u64;
            decisions.extend(self.core.tick(at));
        }
        decisions
    }
}

fn worker(number: u32) -> WorkerId {
    WorkerId { number, life: 0 }
}

fn begin(epoch: u64, members: &[WorkerId]) -> Decision {
    Decision::Begin { epoch, members: members.to_vec() }
}
