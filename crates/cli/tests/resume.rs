//! A run that stops, is stopped, or is killed goes on as if nothing had happened.

mod common;

use std::fs;
use std::path::Path;

use common::{Desk, Running, Summary, checkpoints, contents, lines};
use rustix::process::{Signal, kill_process};

const MODEL: &str = "--model mlp --hidden 48,24 --batch 16 --seed 3";

/// More than any of these runs gets to.
const ENDLESS: &str = "--steps 1000000000";

const FOLDER: &str = "checkpoints";

/// Steps that a run which was cut short goes on for. Short of the next checkpoint that is due.
const MORE: u64 = 37;

/// Starts a run that has to be ended, with a report in the folder `run`.
fn start(desk: &Desk, flags: &str) -> Running {
    let arguments =
        format!("train --json {MODEL} {ENDLESS} --run-dir run --checkpoint-dir {FOLDER}");
    desk.start(&mut desk.command(&format!("{arguments} {flags}")))
}

/// Goes on from the newest checkpoint, with other workers, and compares with a run that was never cut
/// short.
fn assert_goes_on(desk: &Desk, from: u64) {
    let to = from + MORE;
    let resumed = resume(desk, to, "--workers 3");
    assert_eq!(resumed.count("steps"), MORE, "it went on from somewhere else");
    resumed.assert_same_weights(&desk.train(&format!("{MODEL} --steps {to} --workers 1")));
    assert_eq!(checkpoints(&desk.path(FOLDER)).last(), Some(&to));
}

fn resume(desk: &Desk, steps: u64, flags: &str) -> Summary {
    desk.train(&format!("{MODEL} --steps {steps} --checkpoint-dir {FOLDER} --resume {flags}"))
}

#[test]
fn a_run_that_is_told_to_stop_saves_and_goes_on() {
    for signal in [Signal::INT, Signal::TERM] {
        for workers in [1, 4] {
            let desk = Desk::new();
            let mut job = start(&desk, &format!("--workers {workers}"));
            // Some hundred steps: records are written every now and then.
            job.wait_until("steps are taken", || lines(&desk.path("run/steps.jsonl")) >= 100);
            job.signal(signal);
            let summary = job.wait().summary();
            assert_eq!(summary.object["interrupted"], true);
            let step = summary.count("step");
            assert!(step >= 100 && summary.count("steps") == step, "{}", summary.object);
            assert_eq!(lines(&desk.path("run/steps.jsonl")) as u64, step, "a step got lost");
            assert!(desk.path("run/report.html").exists());
            // The step is finished: the weights are those of a run that was to end there.
            assert_eq!(checkpoints(&desk.path(FOLDER)).last(), Some(&step));
            summary.assert_same_weights(&desk.train(&format!("{MODEL} --steps {step}")));
            assert_goes_on(&desk, step);
        }
    }
}

/// Before there was any progress to tell of.
#[test]
fn a_run_that_is_told_to_stop_at_once_ends_well() {
    let desk = Desk::new();
    // Steps of a second or so.
    let slow = "--hidden 1024,1024 --batch 4096 --workers 2";
    let arguments =
        format!("train --json {ENDLESS} --run-dir run --checkpoint-dir {FOLDER} {slow}");
    let mut job = desk.start(&mut desk.command(&arguments));
    job.wait_until("the run begins", || desk.path("run/run.toml").exists());
    job.signal(Signal::INT);
    let summary = job.wait().summary();
    assert_eq!(summary.object["interrupted"], true);
    assert_eq!(checkpoints(&desk.path(FOLDER)), [summary.count("step")]);
}

#[test]
fn a_run_without_checkpoints_can_be_stopped_too() {
    let desk = Desk::new();
    let arguments = format!("train --json {MODEL} {ENDLESS} --run-dir run");
    let mut job = desk.start(&mut desk.command(&arguments));
    job.wait_until("steps are taken", || lines(&desk.path("run/steps.jsonl")) > 0);
    job.signal(Signal::INT);
    let summary = job.wait().summary();
    summary.assert_same_weights(&desk.train(&format!("{MODEL} --steps {}", summary.count("step"))));
}

/// Waits until the third checkpoint is written.
fn wait_for_checkpoints(desk: &Desk, job: &mut Running) {
    let written = || checkpoints(&desk.path(FOLDER)).last().is_some_and(|step| *step >= 60);
    job.wait_until("three checkpoints are written", written);
}

#[test]
fn a_job_that_is_killed_leaves_nothing_behind_and_goes_on() {
    let desk = Desk::new();
    let mut job = start(&desk, "--workers 4 --checkpoint-every 20");
    wait_for_checkpoints(&desk, &mut job);
    job.signal(Signal::KILL);
    // Which also requires that the workers are gone.
    assert!(job.wait().was_killed_by(Signal::KILL));
    let newest = *checkpoints(&desk.path(FOLDER)).last().unwrap();
    assert_goes_on(&desk, newest);
    // The steps that were recorded can be looked at.
    let report = desk.run("report run");
    assert!(report.expect_success().contains("not finished"), "{}", report.stdout);
    desk.run("report run --rewrite").expect_success();
    assert!(desk.path("run/report.html").exists());
}

#[test]
fn a_worker_that_is_killed_is_named_and_the_run_goes_on() {
    let desk = Desk::new();
    let mut job = start(&desk, "--workers 3 --checkpoint-every 20");
    wait_for_checkpoints(&desk, &mut job);
    kill_process(job.worker(2), Signal::KILL).unwrap();
    let ended = job.wait();
    let complaint = ended.complaint();
    assert!(complaint.contains("rank 2 was killed by signal 9"), "{complaint}");
    assert!(complaint.contains("--resume"), "{complaint}");
    let newest = *checkpoints(&desk.path(FOLDER)).last().unwrap();
    assert_goes_on(&desk, newest);
}

/// Leaves checkpoints of steps 30, 60 and 90.
fn with_checkpoints() -> Desk {
    let desk = Desk::new();
    let arguments = format!("--steps 90 --checkpoint-dir {FOLDER} --checkpoint-every 30");
    desk.train(&format!("{MODEL} {arguments}"));
    assert_eq!(checkpoints(&desk.path(FOLDER)), [30, 60, 90]);
    desk
}

const NEWEST: &str = "step-000000090.safetensors";

fn damage(how: impl Fn(&Path)) {
    let desk = with_checkpoints();
    how(&desk.path(FOLDER).join(NEWEST));
    let arguments = format!("{MODEL} --steps 127 --checkpoint-dir {FOLDER} --resume");
    let ended = desk.run(&format!("train --json {arguments} --workers 3"));
    let resumed = ended.summary();
    assert_eq!(resumed.count("steps"), 67, "it did not go on from step 60");
    assert!(ended.stderr.contains(NEWEST), "not a word about it: {}", ended.stderr);
    resumed.assert_same_weights(&desk.train(&format!("{MODEL} --steps 127 --workers 1")));
}

#[test]
fn a_truncated_checkpoint_is_passed_over() {
    damage(|path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    });
    damage(|path| fs::write(path, "").unwrap());
}

#[test]
fn a_corrupted_checkpoint_is_passed_over() {
    damage(|path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    });
    damage(|path| fs::write(path, "something else").unwrap());
}

#[test]
fn checkpoints_of_which_none_is_good_are_not_trusted() {
    let desk = with_checkpoints();
    for (name, _) in contents(&desk.path(FOLDER)) {
        fs::write(desk.path(FOLDER).join(name), "garbage").unwrap();
    }
    let before = contents(&desk.path(FOLDER));
    let ended = desk.run(&format!("train {MODEL} --checkpoint-dir {FOLDER} --resume"));
    assert!(ended.complaint().contains("start anew in another folder"), "{}", ended.stderr);
    assert_eq!(contents(&desk.path(FOLDER)), before);
}

#[test]
fn checkpoints_of_another_run_are_refused_and_not_harmed() {
    let desk = with_checkpoints();
    let before = contents(&desk.path(FOLDER));
    let others = [
        ("model", "--model mlp --hidden 48,25 --batch 16 --seed 3"),
        ("model", "--model conv --batch 16 --seed 3"),
        ("seed", "--model mlp --hidden 48,24 --batch 16 --seed 4"),
        ("batch", "--model mlp --hidden 48,24 --batch 32 --seed 3"),
        ("shards", "--model mlp --hidden 48,24 --batch 16 --seed 3 --shards 4"),
        ("optimizer", "--model mlp --hidden 48,24 --batch 16 --seed 3 --optimizer sgd"),
        ("--steps", "--model mlp --hidden 48,24 --batch 16 --seed 3 --steps 80"),
    ];
    for (reason, other) in others {
        let ended = desk.run(&format!("train {other} --checkpoint-dir {FOLDER} --resume"));
        let complaint = ended.complaint();
        assert!(complaint.contains(NEWEST) && complaint.contains(reason), "{complaint}");
        assert_eq!(contents(&desk.path(FOLDER)), before);
    }
    assert!(resume(&desk, 100, "").count("step") == 100);
}

#[test]
fn a_run_that_is_complete_stays_as_it_is() {
    let desk = with_checkpoints();
    let before = contents(&desk.path(FOLDER));
    let again = resume(&desk, 90, "--workers 3");
    assert_eq!((again.count("step"), again.count("steps")), (90, 0));
    again.assert_same_weights(&desk.train(&format!("{MODEL} --steps 90")));
    assert_eq!(contents(&desk.path(FOLDER)), before);
}

#[test]
fn a_folder_without_checkpoints_is_begun() {
    let desk = Desk::new();
    let begun = resume(&desk, 20, "");
    assert_eq!(begun.count("steps"), 20);
    begun.assert_same_weights(&desk.train(&format!("{MODEL} --steps 20")));
}

/// Nothing but the learning rate may change, and only on purpose; the run says so ever after.
#[test]
fn another_learning_rate_is_used_from_there_on() {
    let desk = with_checkpoints();
    let copy = |name: &str| {
        fs::create_dir(desk.path(name)).unwrap();
        for (file, content) in contents(&desk.path(FOLDER)) {
            fs::write(desk.path(name).join(file), content).unwrap();
        }
    };
    copy("other");
    let resume = |folder: &str, steps: u64, flags: &str| {
        desk.run(&format!(
            "train --json {MODEL} --steps {steps} --checkpoint-dir {folder} --resume {flags}"
        ))
    };
    let changed = resume(FOLDER, 100, "--learning-rate 0.0005 --workers 3 --run-dir changed");
    let words = "learning rate 0.0005 instead of 0.001 from step 91 on";
    assert!(changed.stderr.contains(words), "{}", changed.stderr);
    let summary = changed.summary();
    assert_eq!(summary.object["earlier_learning_rates"], "0.001 until step 90");
    summary.assert_same_weights(&resume("other", 100, "--learning-rate 0.0005").summary());
    assert_ne!(summary.hash(), desk.train(&format!("{MODEL} --steps 100")).hash());
    let report = desk.run("report changed");
    assert!(report.expect_success().contains("learning rate: 0.001 until step 90"));

    // It is what the run has now.
    let complaint = resume(FOLDER, 110, "");
    assert!(complaint.complaint().contains("add --learning-rate 0.0005"), "{}", complaint.stderr);
    let again = resume(FOLDER, 110, "--learning-rate 0.0005").summary();
    assert_eq!(again.object["earlier_learning_rates"], "0.001 until step 90");
    for flags in ["--learning-rate 0.0001 --weight-decay 0.1", "--learning-rate 1 --optimizer sgd"]
    {
        let ended = resume(FOLDER, 120, flags);
        assert!(ended.complaint().contains("of a run with optimizer"), "{}", ended.stderr);
    }
}

/// What the program advises when the loss is no longer a number is possible.
#[test]
fn a_run_that_was_lost_goes_on_with_a_lower_rate() {
    let desk = with_checkpoints();
    let flags = format!("{MODEL} --steps 200 --checkpoint-dir {FOLDER} --resume");
    let ended = desk.run(&format!("train {flags} --learning-rate 1e30"));
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("by --resume with a lower --learning-rate"), "{last}");
    assert_eq!(checkpoints(&desk.path(FOLDER)), [30, 60, 90], "weights that are lost");
    let summary = desk.train(&format!("{flags} --learning-rate 0.0005"));
    assert_eq!((summary.count("steps"), summary.count("step")), (110, 200));
    assert!(summary.number("final_loss").is_finite() && summary.object["diverged_at"].is_null());
}
