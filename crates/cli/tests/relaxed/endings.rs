//! Runs that do not end well, and say so; and servers that stop for a while.

use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::common::{Desk, wait_until};
use crate::records::{assert_adds_up, furthest, records, updates};

#[test]
fn a_loss_that_is_no_number_is_in_the_report() {
    for level in ["bsp", "ssp:2", "async", "downpour:2,2", "hogwild", "gossip"] {
        let desk = Desk::new();
        let servers = if ["hogwild", "gossip"].contains(&level) { "" } else { "--servers 2" };
        let settings = "--workers 2 --steps 50 --optimizer sgd --learning-rate 1e30 --run-dir run";
        let ended = desk.run(&format!("train --strategy {level} {servers} {settings}"));
        assert_eq!(ended.status.code(), Some(1), "{level}: {}", ended.stderr);
        assert!(ended.stderr.contains("no longer a number"), "{level}: {}", ended.stderr);
        assert!(desk.path("run/report.html").exists(), "{level}: {}", ended.stderr);
        let report = desk.run("report run");
        let report = report.expect_success();
        assert!(report.contains("became NaN at step"), "{level}: {report}");
        assert!(report.contains("lower --learning-rate"), "{level}: {report}");
    }
}

#[test]
fn a_ledger_that_does_not_add_up_ends_in_an_error() {
    let desk = Desk::new();
    let train = "train --strategy async --workers 2 --servers 1 --steps 400 --run-dir run";
    let mut job = desk.start(&mut desk.command(train));
    let run_dir = desk.path("run");
    job.wait_until("update 20", || updates(&run_dir) >= 20);
    let path = run_dir.join("updates-0.jsonl");
    let first = desk.read("run/updates-0.jsonl").lines().next().unwrap().to_owned() + "\n";
    let mut file = OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(first.as_bytes()).unwrap();
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("ledger") && last.contains("does not add up"), "{last}");
    assert!(desk.path("run/report.html").exists());
    let report = desk.run("report run");
    assert_eq!(report.status.code(), Some(1), "{}", report.stderr);
    assert!(report.stdout.contains("does not add up") && report.stderr.contains("the ledger of"));
}

/// The limit on the size of files stands for a full disk.
#[test]
fn a_server_inside_that_cannot_write_ends_the_run() {
    let desk = Desk::new();
    let train = "train --strategy ssp:2 --servers inside --workers 2 --steps 100000 --run-dir run";
    let limited = |program: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; ulimit -f 400; exec \"$0\" \"$@\"", program]);
        command
    };
    let ended = desk.start(&mut desk.command_by(limited, train)).wait();
    assert!(!ended.status.success(), "{}", ended.stderr);
    let last = ended.stderr.lines().last().unwrap_or_default();
    let names = last.contains("server 0") || last.contains("server 1");
    assert!(names && last.contains("File too large"), "{}", ended.stderr);
}

#[test]
fn a_server_that_is_stopped_for_a_while_is_waited_for_with_a_word() {
    let desk = Desk::new();
    let train = "train --json --strategy ssp:2 --workers 2 --servers 2 --steps 400 --run-dir run";
    let mut command = desk.command(train);
    command.env("UNISONO_TIMEOUT", "2");
    let mut job = desk.start(&mut command);
    let (run_dir, number) = (desk.path("run"), desk.count() - 1);
    job.wait_until("update 50", || updates(&run_dir) >= 50);
    let server = job.members().into_iter().find(|(_, is_server)| *is_server).unwrap().0;
    kill_process(server, Signal::STOP).unwrap();
    let stderr = format!(".{number}-stderr");
    job.wait_until("both say whom they wait for", || {
        desk.read(&stderr).matches("waits for server").count() == 2
    });
    kill_process(server, Signal::CONT).unwrap();
    let summary = job.wait().summary();
    assert_eq!(summary.object["ledger"], "balanced");
    assert_eq!(summary.count("processes_restarted"), 0);
    assert_adds_up(&run_dir, 2);
}

#[test]
fn a_worker_of_gossip_that_starts_late_makes_all_its_steps() {
    const STEPS: u64 = 150;
    let desk = Desk::new();
    let train = format!("train --json --strategy gossip --workers 3 --steps {STEPS} --run-dir run");
    let mut command = desk.command(&train);
    command.env("UNISONO_TIMEOUT", "2");
    let mut job = desk.start(&mut command);
    wait_until("all are there", || job.members().len() == 3);
    let late = job.worker(2);
    kill_process(late, Signal::STOP).unwrap();
    let run_dir = desk.path("run");
    job.wait_until("the others are under way", || furthest(&run_dir, 2) >= 20);
    kill_process(late, Signal::CONT).unwrap();
    let summary = job.wait().summary();
    assert_eq!(summary.count("pushes"), 3 * STEPS, "{}", summary.object);
    for worker in 0..3 {
        assert_eq!(records(&run_dir, worker).len() as u64, STEPS, "worker {worker}");
    }
}
