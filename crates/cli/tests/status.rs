//! What `unisono status` and `unisono report` say of a run whose workers come and go.

mod common;

use std::path::Path;

use common::{Desk, Ended, lines};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

/// What `--json` prints.
fn status(desk: &Desk) -> Value {
    let ended = desk.run("status run --json");
    serde_json::from_str(ended.expect_success()).expect("one object")
}

fn numbers(workers: &Value, key: &str) -> Vec<u64> {
    let workers = workers.as_array().expect("a list of workers");
    workers.iter().map(|worker| worker[key].as_u64().expect("a number")).collect()
}

/// The data that the page of a report draws.
fn page(path: &Path) -> Value {
    let page = std::fs::read_to_string(path).expect("the page is there");
    let (_, after) = page.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
    serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_run_is_described_while_it_goes_on_and_after_its_end() {
    let desk = Desk::new();
    let arguments = "train --json --elastic --workers 3 --shards 6 --steps 3000 --run-dir run";
    let mut job = desk.start(&mut desk.command(arguments));
    let steps = desk.path("run/steps.jsonl");
    job.wait_until("some steps", || lines(&steps) > 50);
    job.wait_until("a record of its workers", || lines(&desk.path("run/membership.jsonl")) > 9);

    let before = status(&desk);
    assert_eq!((&before["state"], &before["epoch"]), (&"running".into(), &1.into()), "{before}");
    assert_eq!(before["launcher"]["pid"], job.id());
    assert!(before["step"].as_u64() > Some(40) && before["steps"] == 3000, "{before}");
    assert_eq!(numbers(&before["members"], "worker").len(), 3);
    assert_eq!(numbers(&before["members"], "rank"), [0, 1, 2]);
    let shards: Vec<&Value> =
        before["members"].as_array().unwrap().iter().map(|member| &member["shards"]).collect();
    assert_eq!(shards, [&Value::from([0, 2]), &[2, 4].into(), &[4, 6].into()]);
    let victim = job.worker(1);
    let pid = u64::from(victim.as_raw_nonzero().get().unsigned_abs());
    assert!(numbers(&before["members"], "pid").contains(&pid), "{before}");

    kill_process(victim, Signal::KILL).unwrap();
    let mut after = Value::Null;
    job.wait_until("the worker is back", || {
        after = status(&desk);
        after["workers_joined"] == 1
    });
    assert_eq!((&after["state"], &after["workers_lost"]), (&"running".into(), &1.into()));
    assert!(after["epoch"].as_u64() > Some(1), "{after}");
    let back = after["members"].as_array().unwrap().iter().find(|worker| worker["worker"] == 1);
    let back = back.unwrap_or_else(|| panic!("worker 1 is a member again: {after}"));
    assert_eq!((&back["life"], &back["state"]), (&1.into(), &"member".into()));
    assert_ne!(back["pid"], pid);

    let summary = job.wait().summary();
    let end = status(&desk);
    assert_eq!((&end["state"], &end["step"]), (&"finished".into(), &3000.into()), "{end}");
    for key in ["epochs", "workers_lost", "workers_joined", "recoveries", "steps_redone"] {
        assert_eq!(end[key], summary.object[key], "{key}: {end}");
    }
    for key in ["recovery_ms_p50", "recovery_ms_max"] {
        let (said, expected) = (end[key].as_f64().unwrap(), summary.number(key));
        assert!((said - expected).abs() <= 1e-6 * expected, "{key}: {end}");
    }
    assert!(end["advice"].as_str().unwrap().contains("unisono report"), "{end}");

    let text = desk.run("report run --width 100");
    let text = text.expect_success();
    assert!(text.contains("1 worker lost, 1 joined; 1 recovery in "), "{text}");
    assert!(text.contains("  worker 1      ") && text.contains('│'), "{text}");
    let page = page(&desk.path("run/report.html"));
    let workers = &page["workers"];
    assert_eq!(workers["rows"].as_array().unwrap().len(), 3);
    assert_eq!(workers["recoveries_in_all"], summary.object["recoveries"]);
    assert_eq!(workers["rows"][1]["begins"].as_array().unwrap().len(), 1);
    let text = desk.run("status run");
    let text = text.expect_success();
    assert!(text.contains(": finished\n") && text.contains("1 worker lost, 1 joined"), "{text}");
}

#[test]
fn a_run_whose_launcher_is_gone_says_how_to_go_on() {
    for (kept, remedy) in [
        ("--checkpoint-dir kept --checkpoint-every 20", "--resume to go on after step "),
        ("", "with --checkpoint-dir, less would be lost"),
    ] {
        let desk = Desk::new();
        let arguments = format!("train --elastic --workers 2 --steps 100000 --run-dir run {kept}");
        let mut job = desk.start(&mut desk.command(&arguments));
        let steps = desk.path("run/steps.jsonl");
        job.wait_until("some steps", || lines(&steps) > 200);
        job.wait_until("a record of its workers", || lines(&desk.path("run/membership.jsonl")) > 6);
        job.signal(Signal::KILL);
        job.wait();
        let status = status(&desk);
        assert_eq!(status["state"], "killed", "{status}");
        assert!(status["advice"].as_str().unwrap().contains(remedy), "{status}");
        let text = desk.run("status run");
        assert!(text.expect_success().contains("is gone"), "{}", text.stdout);
    }
}

#[test]
fn a_folder_without_such_a_run_is_refused_in_a_line() {
    let desk = Desk::new();
    desk.train("--steps 3 --run-dir run");
    let refused = |ended: Ended| {
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        ended.complaint().to_owned()
    };
    assert!(refused(desk.run("status run")).contains("not started with --elastic"));
    assert!(refused(desk.run("status nowhere")).contains("does not exist"));
    // An elastic run neither.
    let ended = desk.run("train --elastic --steps 3 --run-dir run");
    assert!(refused(ended).contains("already holds a run"));
    let page = page(&desk.path("run/report.html"));
    assert!(page["workers"].is_null());
}

#[test]
fn a_folder_that_cannot_be_written_costs_the_record_and_not_the_run() {
    let desk = Desk::new();
    std::fs::create_dir_all(desk.path("run/membership.jsonl")).unwrap();
    let ended = desk.run("train --json --elastic --workers 2 --steps 20 --run-dir run");
    assert_eq!(ended.summary().count("step"), 20);
    assert!(ended.stderr.contains("without a record of its workers"), "{}", ended.stderr);
}
