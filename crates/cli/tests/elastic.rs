//! Runs whose workers are killed, stopped and let in again. Every fault is counted and must have had its
//! effect, and the weights are those of the undisturbed run.

mod common;

use std::time::Duration;

use common::{Desk, Ended, Running, Summary, checkpoints, numbers};
use rustix::process::{Pid, Signal, kill_process};

/// A model that is trained quickly.
const SMALL: &str = "--hidden 16 --batch 16 --check-every 10";

/// Points that every member of the first epoch gets to, in a run of [`STEPS`] steps with checkpoints.
const POINTS: [(&str, u32); 14] = [
    ("ready", 1),
    ("begun", 1),
    ("forming", 1),
    ("formed", 1),
    ("regrouped", 1),
    ("recording", 1),
    ("step", 1),
    ("shard", 3),
    ("computed", 4),
    ("applied", 5),
    ("applied", STEPS),
    ("saved", 1),
    ("trained", 1),
    ("finished", 1),
];

/// Points that only rank 0 gets to.
const POINTS_OF_RANK_0: [&str; 2] = ["summed-up", "handed-in"];

const STEPS: u32 = 12;

/// The undisturbed run.
fn undisturbed(desk: &Desk, arguments: &str) -> Summary {
    desk.train(&format!("--workers 2 {arguments}"))
}

/// An elastic run in which processes crash as planned.
fn with_crashes(desk: &Desk, arguments: &str, plan: &str) -> Ended {
    let number = desk.count();
    let arguments = format!("train --json --elastic --run-dir run-{number} {arguments}");
    let mut command = desk.command(&arguments);
    command.env("UNISONO_TEST_CRASH", plan).env("UNISONO_TIMEOUT", "2");
    desk.start(&mut command).wait()
}

/// Every crash of a plan has happened, and the weights are those of the undisturbed run.
fn assert_survived(ended: &Ended, plan: &str, whole: &Summary) -> Summary {
    let summary = ended.summary();
    for crash in plan.split(';') {
        let name = crash.split(',').next().unwrap();
        let line = format!("crash point {name} reached");
        assert!(ended.stderr.contains(&line), "{plan}: it did not happen: {}", ended.stderr);
    }
    summary.assert_same_weights(whole);
    assert_eq!(summary.count("step"), u64::from(STEPS), "{plan}");
    summary
}

/// Every crash point that a rank gets to, in runs of so many workers.
fn survives_crashes(workers: usize, ranks: &[usize], ways: &[&str], points: &[(&str, u32)]) {
    let desk = Desk::new();
    let sizes = format!("{SMALL} --steps {STEPS}");
    let whole = undisturbed(&desk, &sizes);
    let mut crashes = 0;
    for (rank, way) in ranks.iter().flat_map(|rank| ways.iter().map(move |way| (rank, way))) {
        let of_rank_0 = POINTS_OF_RANK_0.map(|name| (name, 1));
        let more: &[(&str, u32)] = if *rank == 0 { &of_rank_0 } else { &[] };
        for (name, number) in points.iter().chain(more) {
            let plan = format!("{name},{rank},{number},{way}");
            let kept = format!("--checkpoint-dir kept-{} --checkpoint-every 5", desk.count());
            let ended = with_crashes(&desk, &format!("{sizes} --workers {workers} {kept}"), &plan);
            assert_survived(&ended, &plan, &whole);
            crashes += 1;
        }
    }
    println!("{crashes} crashes survived");
}

#[test]
fn one_worker_survives_every_crash_point() {
    survives_crashes(1, &[0], &["kill"], &POINTS);
}

#[test]
fn two_workers_survive_every_crash_point() {
    survives_crashes(2, &[0, 1], &["kill"], &POINTS);
}

#[test]
fn three_workers_survive_every_crash_point_of_the_last() {
    survives_crashes(3, &[2], &["kill"], &POINTS);
}

#[test]
fn stopped_workers_are_lost_and_come_back() {
    let some = [("forming", 1), ("computed", 4), ("applied", 5), ("trained", 1)];
    survives_crashes(3, &[0, 1], &["stop"], &some);
}

#[test]
#[ignore = "soak of ten minutes; its last result is in docs/measurements/elastic.md"]
fn every_crash_point_of_every_rank() {
    for workers in 1..=4 {
        let ranks: Vec<usize> = (0..workers).collect();
        survives_crashes(workers, &ranks, &["kill", "stop"], &POINTS);
    }
}

#[test]
#[ignore = "soak: some minutes; its last result is in docs/measurements/elastic.md"]
fn every_crash_point_of_a_worker_that_joins() {
    let crashes = survives_crashes_of_joins(&["kill", "stop"], &JOINS);
    println!("{crashes} crashes survived while workers joined");
}

#[test]
fn a_second_crash_in_the_middle_of_a_recovery_is_survived() {
    let desk = Desk::new();
    let sizes = format!("{SMALL} --steps {STEPS}");
    let whole = undisturbed(&desk, &sizes);
    for (first, second) in [
        ("computed,1,3,kill", "ready,0,2,kill"),
        ("computed,1,3,kill", "begun,2,2,kill"),
        ("computed,0,3,kill", "formed,1,2,kill"),
        ("applied,1,3,kill", "regrouped,0,2,kill"),
        // The one that comes back is let in, and another is lost at that moment.
        ("computed,0,1,kill", "leaving,1,1,kill"),
        ("computed,2,1,kill", "leaving,0,1,kill"),
    ] {
        let plan = format!("{first};{second}");
        // Long enough for a worker to come back.
        let steps = if plan.contains("leaving") { 1500 } else { STEPS };
        let whole = match steps {
            STEPS => &whole,
            _ => &undisturbed(&desk, &format!("{SMALL} --steps {steps}")),
        };
        let arguments = format!("{SMALL} --steps {steps} --workers 3");
        // On a busy machine the first may be back before the others have recovered: then it is not let in.
        let is_reached = (0..5).any(|_| {
            let ended = with_crashes(&desk, &arguments, &plan);
            let summary = ended.summary();
            summary.assert_same_weights(whole);
            let has_crashed = |name: &str| ended.stderr.contains(&format!("point {name} "));
            let first = first.split(',').next().expect("a plan has a name");
            assert!(has_crashed(first), "{plan}: {}", ended.stderr);
            if plan.contains("leaving") && !has_crashed("leaving") {
                return false;
            }
            assert!(summary.count("workers_lost") >= 2, "{plan}: {}", summary.object);
            true
        });
        assert!(is_reached, "{plan}: it did not happen");
    }
}

/// Crashes of a worker that joins beside the training, and of the members that serve it. Worker 1 is killed first,
/// so that it is the one that joins; the members then are the workers 0 and 2, and it asks one of them.
const JOINS: [&[&str]; 7] = [
    &["handing,0,1", "handing,2,1"],
    &["handing,0,3", "handing,2,3"],
    &["handing,0,9", "handing,2,9"],
    &["receiving,1/1,1"],
    &["receiving,1/1,2"],
    &["catching-up,1/1,1"],
    // The joiner and whichever member serves its next life.
    &["receiving,1/1,2", "handing,0,20", "handing,2,20"],
];

/// Workers crash in the middle of joining, and the members that hand over their state; how often they did.
fn survives_crashes_of_joins(ways: &[&str], joins: &[&[&str]]) -> usize {
    let desk = Desk::new();
    let arguments = format!("{SMALL} --steps 1500");
    let whole = undisturbed(&desk, &arguments);
    let mut crashes = 0;
    for (way, points) in ways.iter().flat_map(|way| joins.iter().map(move |join| (way, join))) {
        let plan: String = points.iter().map(|point| format!(";{point},{way}")).collect();
        let plan = format!("computed,1,3,kill{plan}");
        let name = points[0].split(',').next().unwrap();
        // On a busy machine the worker may be back before the others have recovered: then it is in the next
        // epoch without joining one.
        let is_reached = (0..5).any(|_| {
            let ended = with_crashes(&desk, &format!("{arguments} --workers 3"), &plan);
            ended.summary().assert_same_weights(&whole);
            crashes += ended.stderr.matches("crash point ").count();
            ended.stderr.contains(&format!("point {name} "))
        });
        assert!(is_reached, "{plan}: it did not happen");
    }
    crashes
}

#[test]
fn crashes_in_the_middle_of_joining_are_survived() {
    let crashes = survives_crashes_of_joins(&["kill"], &JOINS);
    println!("{crashes} crashes survived");
}

#[test]
fn a_donor_or_a_joiner_that_is_stopped_is_replaced() {
    let crashes = survives_crashes_of_joins(&["stop"], &[JOINS[1], JOINS[5]]);
    println!("{crashes} crashes survived");
}

/// A worker that joins is behind none of the others when it is let in, so nothing is handed over while they wait.
#[test]
fn a_worker_that_joins_gets_the_state_beside_the_training() {
    for more in ["--optimizer sgd", "--optimizer adamw --transport tcp", "--codec fp16 --shards 4"]
    {
        let desk = Desk::new();
        let arguments = format!("{SMALL} --steps 1500 {more}");
        let whole = undisturbed(&desk, &arguments);
        let number = desk.count();
        let plan = "computed,1,3,kill";
        let ended = with_crashes(&desk, &format!("{arguments} --workers 3"), plan);
        let summary = ended.summary();
        summary.assert_same_weights(&whole);
        assert_eq!(summary.count("workers_joined"), 1, "{more}: {}", summary.object);
        let first_steps = first_steps(&desk, number);
        assert_eq!(first_steps.len(), 3, "{first_steps:?}");
        assert_eq!(first_steps[2]["behind"], 0, "{more}: {first_steps:?}");
    }
}

/// What was recorded of the first step of each epoch of a run.
fn first_steps(desk: &Desk, number: u32) -> Vec<serde_json::Value> {
    let events = desk.read(&format!("run-{number}/membership.jsonl"));
    let events = events.lines().map(|event| serde_json::from_str(event).expect("it is JSON"));
    events.filter(|event: &serde_json::Value| event["event"] == "stepped").collect()
}

/// A loss takes the run back, for what a codec remembers is lost. A worker that is let in does not.
#[test]
fn a_worker_that_is_let_in_takes_no_compressed_run_back() {
    let desk = Desk::new();
    let arguments = format!("{SMALL} --steps 1500 --shards 4 --codec int8");
    let whole = undisturbed(&desk, &arguments);
    // On a busy machine the worker may be back before the others have recovered: then it is not let in.
    let is_let_in = (0..5).any(|_| {
        let number = desk.count();
        let ended = with_crashes(&desk, &format!("{arguments} --workers 3"), "computed,1,3,kill");
        ended.summary().assert_same_weights(&whole);
        let first_steps = first_steps(&desk, number);
        if first_steps.len() < 3 {
            return false;
        }
        let of = |key: &str| first_steps.iter().map(|first| first[key] == true).collect::<Vec<_>>();
        assert_eq!(of("from_checkpoint"), [true, true, false], "{first_steps:?}");
        assert_eq!(of("redone"), [false, true, false], "{first_steps:?}");
        assert!(first_steps[2]["step"].as_u64() > first_steps[1]["step"].as_u64());
        true
    });
    assert!(is_let_in, "the worker was never let in");
}

/// A run that is disturbed at random moments.
struct Victim {
    job: Running,
    dice: Box<dyn Iterator<Item = u32>>,
    kills: u64,
}

impl Victim {
    fn start(desk: &Desk, arguments: &str, seed: usize) -> Victim {
        let number = desk.count();
        let run = format!("train --json --elastic --restarts 10000 --run-dir run-{number}");
        let job = desk.start(&mut desk.command(&format!("{run} {arguments}")));
        Victim { job, dice: Box::new(numbers().skip(seed)), kills: 0 }
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.dice.next().expect("they never end") as usize % sides
    }

    /// Kills a worker, and sometimes two, after a pause of 50 to 500 ms.
    fn kill(&mut self) {
        let pause = 50 + self.roll(450) as u64;
        std::thread::sleep(Duration::from_millis(pause));
        let mut workers = self.workers();
        if workers.is_empty() {
            return;
        }
        let first = self.roll(workers.len());
        workers.swap(0, first);
        let several = self.roll(6) == 0;
        for worker in workers.into_iter().take(if several { 2 } else { 1 }) {
            if kill_process(worker, Signal::KILL).is_ok() {
                self.kills += 1;
            }
        }
    }

    fn workers(&self) -> Vec<Pid> {
        self.job.members().into_iter().map(|(worker, _)| worker).collect()
    }
}

/// A worker dies, and the launcher is told to stop before the others have gone on without it: they have the state, and
/// save it.
#[test]
fn a_run_that_is_told_to_stop_while_a_worker_dies_saves() {
    for pause in [0, 1, 2, 4, 7, 10, 20] {
        let desk = Desk::new();
        let kept = "--checkpoint-dir kept --checkpoint-every 100000";
        let mut victim =
            Victim::start(&desk, &format!("{SMALL} --workers 3 --steps 100000 {kept}"), 1);
        let steps = desk.path("run-0/steps.jsonl");
        let is_under_way = || std::fs::metadata(&steps).is_ok_and(|file| file.len() > 1000);
        victim.job.wait_until("some steps", is_under_way);
        let worker = victim.workers()[pause as usize % 3];
        kill_process(worker, Signal::KILL).unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        victim.job.signal(Signal::TERM);
        let ended = victim.job.wait();
        let saved = checkpoints(&desk.path("kept"));
        assert_eq!(saved.len(), 1, "after {pause} ms: {}", ended.stderr);
        assert_eq!(ended.summary().object["interrupted"], true, "after {pause} ms");
    }
}

/// It ends as if it had been killed; only the launcher can tell the run to stop.
#[test]
fn a_worker_that_is_told_to_end_takes_no_run_with_it() {
    let desk = Desk::new();
    let arguments = format!("{SMALL} --steps 20000");
    let whole = undisturbed(&desk, &arguments);
    let number = desk.count();
    let mut victim = Victim::start(&desk, &format!("{arguments} --workers 3"), 1);
    let steps = desk.path(&format!("run-{number}/steps.jsonl"));
    let is_under_way = || std::fs::metadata(&steps).is_ok_and(|file| file.len() > 1000);
    victim.job.wait_until("some steps", is_under_way);
    kill_process(victim.workers()[1], Signal::TERM).unwrap();
    let ended = victim.job.wait();
    ended.summary().assert_same_weights(&whole);
    assert_eq!(ended.summary().count("workers_lost"), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("SIGTERM"), "{}", ended.stderr);
}

/// They are started at once, so that both find no run in the folder.
#[test]
fn of_two_runs_with_one_folder_one_is_refused() {
    let desk = Desk::new();
    let call = format!("train --elastic {SMALL} --workers 1 --steps 50 --run-dir one");
    let runs: Vec<Running> = (0..4).map(|_| desk.start(&mut desk.command(&call))).collect();
    let codes: Vec<_> = runs.into_iter().map(|run| run.wait().status.code()).collect();
    assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 1, "{codes:?}");
    assert_eq!(codes.iter().filter(|code| **code == Some(2)).count(), 3, "{codes:?}");
    // Each without a name for it has a folder of its own.
    let call = format!("train --elastic {SMALL} --workers 1 --steps 50");
    let runs: Vec<Running> = (0..3).map(|_| desk.start(&mut desk.command(&call))).collect();
    runs.into_iter().for_each(|run| drop(run.wait().expect_success().to_owned()));
    assert_eq!(std::fs::read_dir(desk.path("runs")).unwrap().count(), 3);
}

/// Kills workers until so many have died, about `in_one` of them in each run. `arguments` describe the run,
/// `kept` what only the disturbed one needs. `UNISONO_TEST_SEED` kills at other moments.
fn survives_kills(kills: u64, in_one: u64, arguments: &str, kept: &str) {
    let seed = std::env::var("UNISONO_TEST_SEED").map_or(0, |seed| seed.parse().unwrap());
    survives_kills_of(1_000_000 * seed, kills, in_one, arguments, kept);
}

/// The same, with kills at moments that depend on the seed. Returns how many there were.
fn survives_kills_of(mut seed: usize, kills: u64, in_one: u64, arguments: &str, kept: &str) -> u64 {
    let desk = Desk::new();
    desk.write_text("text", 4000);
    let whole = undisturbed(&desk, arguments);
    let (mut killed, mut lost, mut joined) = (0, 0, 0);
    while killed < kills {
        seed += 1000;
        let kept = kept.replace("RUN", &seed.to_string());
        let mut victim = Victim::start(&desk, &format!("--workers 4 {arguments} {kept}"), seed);
        while victim.kills < in_one && victim.job.is_running() {
            victim.kill();
        }
        killed += victim.kills;
        let summary = victim.job.wait().summary();
        summary.assert_same_weights(&whole);
        lost += summary.count("workers_lost");
        joined += summary.count("workers_joined");
    }
    println!("{killed} kills: {lost} members lost, {joined} joined");
    assert!(lost > 0 && joined > 0, "{lost} members lost, {joined} joined");
    killed
}

#[test]
fn a_hundred_random_kills_change_no_bit() {
    survives_kills(100, 12, "--steps 1500", "");
}

/// What a codec carries from step to step is gone with a worker: the run goes back to its last checkpoint, again
/// and again.
#[test]
fn random_kills_change_no_bit_of_compressed_runs() {
    for codec in ["int8", "topk:1% --codec-warmup 20"] {
        let arguments = format!("{SMALL} --steps 900 --shards 4 --codec {codec}");
        survives_kills(10, 5, &arguments, "--checkpoint-dir kept-RUN --checkpoint-every 20");
    }
}

/// A soak of other runs: 250 kills of each, unless `UNISONO_TEST_KILLS` says otherwise. With a codec, the number of
/// shards must be said: by default it is that of the workers.
fn survives_many_kills(arguments: &str, kept: &str) {
    let kills = std::env::var("UNISONO_TEST_KILLS").map_or(250, |kills| kills.parse().unwrap());
    survives_kills(kills, 25, arguments, kept);
}

const OFTEN_KEPT: &str = "--checkpoint-dir kept-RUN --checkpoint-every 20";

#[test]
#[ignore = "soak: some minutes; its last result is in docs/measurements/elastic.md"]
fn many_random_kills_change_no_bit_of_int8() {
    survives_many_kills("--steps 3000 --shards 4 --codec int8", OFTEN_KEPT);
}

#[test]
#[ignore = "soak: some minutes; its last result is in docs/measurements/elastic.md"]
fn many_random_kills_change_no_bit_of_topk() {
    survives_many_kills("--steps 3000 --shards 4 --codec topk:1% --codec-warmup 20", OFTEN_KEPT);
}

#[test]
#[ignore = "soak: some minutes; its last result is in docs/measurements/elastic.md"]
fn many_random_kills_change_no_bit_of_a_transformer() {
    survives_many_kills("--model transformer --data text:text --steps 200", "");
}

#[test]
#[ignore = "soak: some minutes; its last result is in docs/measurements/elastic.md"]
fn many_random_kills_change_no_bit_of_conv() {
    survives_many_kills("--model conv --steps 400", "");
}

#[test]
#[ignore = "soak: most of an hour; its last result is in docs/measurements/elastic.md"]
fn ten_thousand_random_kills_change_no_bit() {
    let kills: u64 =
        std::env::var("UNISONO_TEST_KILLS").map_or(10_000, |kills| kills.parse().unwrap());
    let seed = std::env::var("UNISONO_TEST_SEED").map_or(0, |seed| seed.parse().unwrap());
    // Checkpoints, should all workers be lost at once: else the run would begin anew.
    let kept = "--checkpoint-dir kept-RUN --checkpoint-every 200";
    // One run for each core at a time.
    let lanes = std::thread::available_parallelism().map_or(1, usize::from);
    let of_one = kills.div_ceil(lanes as u64);
    let run = |lane| {
        let seed = 1_000_000 * (seed * lanes + lane);
        move || survives_kills_of(seed, of_one, of_one.min(1000), "--steps 20000", kept)
    };
    let killed: u64 = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|lane| scope.spawn(run(lane))).collect();
        lanes.into_iter().map(|lane| lane.join().expect("its run survives")).sum()
    });
    println!("{killed} kills in all");
}

#[test]
fn codecs_go_back_to_the_last_checkpoint_by_themselves() {
    for codec in ["int8", "topk:1% --codec-warmup 20"] {
        let desk = Desk::new();
        let arguments = format!("{SMALL} --steps 400 --shards 4 --codec {codec}");
        let whole = undisturbed(&desk, &arguments);
        let kept = "--checkpoint-dir kept --checkpoint-every 50";
        let mut victim = Victim::start(&desk, &format!("--workers 3 {arguments} {kept}"), 5);
        let folder = desk.path("kept");
        victim.job.wait_until("a checkpoint", || !checkpoints(&folder).is_empty());
        kill_process(victim.workers()[1], Signal::KILL).unwrap();
        let ended = victim.job.wait();
        let summary = ended.summary();
        summary.assert_same_weights(&whole);
        assert_eq!(summary.count("workers_lost"), 1);
        assert!(ended.stderr.contains("going on from "), "{}", ended.stderr);
    }
}

/// With an optimizer that remembers nothing, and as many workers in every round, the round that is computed again
/// gives what the one that was lost would have given.
#[test]
fn workers_with_local_steps_compute_the_round_again() {
    for strategy in ["local:5", "diloco:5"] {
        let desk = Desk::new();
        let arguments =
            format!("{SMALL} --steps {STEPS} --strategy {strategy} --optimizer sgd --workers 2");
        let whole = desk.train(&arguments);
        let mut lost = 0;
        for plan in [
            "shard,1,3,kill",
            "computed,0,8,kill",
            "computed,1,10,kill",
            "applied,0,10,kill",
            "applied,1,7,kill",
            "trained,1,1,kill",
            "computed,0,3,stop",
        ] {
            let ended = with_crashes(&desk, &format!("{arguments} --min-workers 2"), plan);
            lost += assert_survived(&ended, plan, &whole).count("workers_lost");
        }
        assert_eq!(lost, 7, "{strategy}");
    }
}

/// Replicas that differ would end the run: they are compared all the time.
#[test]
fn workers_with_local_steps_survive_random_kills() {
    for strategy in ["local:4", "diloco:6"] {
        let desk = Desk::new();
        let arguments = format!("{SMALL} --steps 1500 --strategy {strategy} --workers 3");
        let mut victim = Victim::start(&desk, &arguments, 17);
        (0..6).for_each(|_| victim.kill());
        let kills = victim.kills;
        let summary = victim.job.wait().summary();
        assert_eq!(summary.count("step"), 1500);
        assert!(kills > 0 && summary.count("workers_lost") > 0, "{}", summary.object);
        assert!(summary.object["final_loss"].as_f64().unwrap() < 1.0, "{}", summary.object);
    }
}

#[test]
fn when_all_are_lost_at_once_the_run_goes_on_from_its_checkpoint_or_its_beginning() {
    for kept in ["--checkpoint-dir kept --checkpoint-every 50", ""] {
        let desk = Desk::new();
        let arguments = "--steps 600";
        let whole = undisturbed(&desk, arguments);
        let victim = Victim::start(&desk, &format!("--workers 2 {arguments} {kept}"), 0);
        let mut job = victim.job;
        let steps = desk.path("run-1/steps.jsonl");
        job.wait_until("some steps", || common::lines(&steps) > 50);
        job.members().iter().for_each(|(worker, _)| kill_process(*worker, Signal::KILL).unwrap());
        let ended = job.wait();
        ended.summary().assert_same_weights(&whole);
        let expected = if kept.is_empty() { "beginning anew" } else { "going on from " };
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
        // The records of steps that were made twice are those of the second time.
        assert_eq!(common::lines(&steps), 600);
    }
}

#[test]
fn more_workers_than_shards_wait_and_take_over() {
    let desk = Desk::new();
    let arguments = "--steps 1500 --shards 2";
    let whole = undisturbed(&desk, arguments);
    let mut victim = Victim::start(&desk, &format!("--workers 3 --restarts 0 {arguments}"), 3);
    let steps = desk.path("run-1/steps.jsonl");
    victim.job.wait_until("some steps", || common::lines(&steps) > 50);
    // The spare does nothing.
    let busiest = victim.workers().into_iter().max_by_key(|worker| processor_time(*worker));
    kill_process(busiest.expect("there are workers"), Signal::KILL).unwrap();
    let summary = victim.job.wait().summary();
    summary.assert_same_weights(&whole);
    let counts = ["epochs", "workers_lost", "workers_joined"].map(|key| summary.count(key));
    assert_eq!(counts, [2, 1, 1], "{}", summary.object);
}

/// The time for which a process has computed, in ticks.
fn processor_time(process: Pid) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    let stat = stat.unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().nth(11).and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

#[test]
fn with_fewer_than_the_least_it_ends_and_says_so() {
    let desk = Desk::new();
    let arguments = "train --elastic --workers 2 --min-workers 2 --restarts 0 --steps 100000 -q \
                     --run-dir run --checkpoint-dir kept";
    let mut job = desk.start(&mut desk.command(arguments));
    let steps = desk.path("run/steps.jsonl");
    job.wait_until("some steps", || common::lines(&steps) > 50);
    kill_process(job.worker(1), Signal::KILL).unwrap();
    let ended = job.wait();
    let complaint = ended.complaint();
    assert!(complaint.contains("rank 1 was killed by signal 9"), "{complaint}");
    assert!(ended.stderr.contains("--resume"), "{}", ended.stderr);
}

#[test]
fn a_shard_that_kills_every_worker_is_named() {
    let desk = Desk::new();
    let arguments = format!("{SMALL} --steps {STEPS} --workers 3 -q");
    let ended = with_crashes(&desk, &arguments, "shard-5,*,1,kill");
    let complaint = ended.stderr.lines().last().unwrap_or_default();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let named = "each of them was computing shard 5: look at its data";
    assert!(complaint.contains(named), "{}", ended.stderr);
    assert!(ended.stderr.matches("point shard-5 reached").count() >= 10, "{}", ended.stderr);
}

#[test]
fn a_run_that_is_told_to_stop_saves_and_can_be_resumed() {
    let desk = Desk::new();
    let whole = undisturbed(&desk, "--steps 3000");
    let run = "--elastic --workers 3 --steps 3000 --checkpoint-dir kept --run-dir";
    let mut job = desk.start(&mut desk.command(&format!("train --json {run} first")));
    let steps = desk.path("first/steps.jsonl");
    job.wait_until("some steps", || common::lines(&steps) > 50);
    job.signal(Signal::TERM);
    let first = job.wait().summary();
    assert_eq!(first.object["interrupted"], true);
    let rest = desk.train(&format!("{run} second --resume"));
    rest.assert_same_weights(&whole);
    assert!(rest.count("steps") < 3000, "{}", rest.object);
}

#[test]
fn what_makes_no_sense_with_it_is_refused() {
    let desk = Desk::new();
    for (arguments, about) in [
        ("--elastic --strategy diloco:4,delay=1", "without streams and delay"),
        ("--elastic --strategy local:4 --codec int8", "--codec: leave it out"),
        ("--elastic --strategy ssp:3", "--elastic"),
        ("--elastic --model replay:resnet50", "replayed"),
        ("--elastic --min-workers 3 --workers 2", "--min-workers 3: use 1 to 2"),
        ("--elastic --measure-scaling", "--measure-scaling"),
        ("--restarts 3", "--elastic"),
    ] {
        let ended = desk.run(&format!("train {arguments}"));
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
        assert!(ended.stderr.contains(about), "{arguments}: {}", ended.stderr);
    }
}

#[test]
fn a_launcher_that_is_killed_leaves_no_process_behind() {
    let desk = Desk::new();
    let arguments = "train --elastic --workers 3 --steps 100000 --run-dir run";
    let mut job = desk.start(&mut desk.command(arguments));
    let steps = desk.path("run/steps.jsonl");
    job.wait_until("some steps", || common::lines(&steps) > 50);
    job.signal(Signal::KILL);
    // Waits until nothing is left.
    assert!(job.wait().was_killed_by(Signal::KILL));
}
