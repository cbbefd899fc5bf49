//! Runs that are stopped, and go on from their journal.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::common::{Desk, Ended, PROGRAM};
use crate::records::{assert_adds_up, records, updates};

/// Starts a run, and interrupts it after so many updates.
fn interrupt(desk: &Desk, arguments: &str, run_dir: &str, after: u64) -> Ended {
    let mut job = desk.start(&mut desk.command(&format!("train --json {arguments}")));
    let run_dir = desk.path(run_dir);
    job.wait_until(&format!("update {after}"), || updates(&run_dir) >= after);
    job.signal(Signal::INT);
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
    assert_eq!(ended.stdout, "", "no result");
    assert!(run_dir.join("report.html").exists(), "there is something to look at");
    ended
}

#[test]
fn an_interrupted_run_goes_on_and_finishes() {
    for (level, servers) in
        [("ssp:3", "2"), ("bsp", "2"), ("async", "inside"), ("downpour:2,2", "1")]
    {
        let desk = Desk::new();
        let settings = format!("--strategy {level} --servers {servers} --workers 2 --steps 400");
        let arguments = format!("{settings} --journal journal");
        let ended = interrupt(&desk, &arguments, "runs/mlp-1", 100);
        assert!(ended.stderr.contains("the same command goes on"), "{}", ended.stderr);
        let before = records(&desk.path("runs/mlp-1"), 0);

        // The same command, and where it names no folder, the same folder.
        let resumed = desk.train(&arguments);
        let count = if servers == "1" { 1 } else { 2 };
        assert!(!desk.path("runs/mlp-2").exists());
        let lives = assert_adds_up(&desk.path("runs/mlp-1"), count);
        assert_eq!(lives, 4, "{level}: both workers had two lives");
        let after = records(&desk.path("runs/mlp-1"), 0);
        assert_eq!(after[..before.len()], before, "{level}: what was done is not done again");
        assert_eq!(resumed.object["ledger"], "balanced");
        let asked = if level.starts_with("downpour") { 400 } else { 800 };
        let pushes = resumed.count("pushes");
        // The push that a worker was interrupted in may have reached the other server only; the worker
        // goes on after it.
        let fewest = if count == 2 { asked - 2 } else { asked };
        assert!((fewest..=asked + 1).contains(&pushes) || level == "bsp", "{level}: {pushes}");
        if level == "bsp" {
            // A round that was interrupted may have been settled by some and not by others. If one
            // server had committed it, the other one goes on without.
            assert!((399..=400).contains(&resumed.count("updates")), "{}", resumed.object);
        }

        // Once more: there is nothing left to do.
        let again = desk.run(&format!("train --json {arguments}"));
        assert!(again.stderr.contains("nothing left to do"), "{level}: {}", again.stderr);
        let again = again.summary();
        again.assert_same_weights(&resumed);
        assert_eq!(again.count("pushes"), pushes);
        assert_eq!(records(&desk.path("runs/mlp-1"), 0), after);
    }
}

#[test]
fn without_a_journal_of_its_own_a_run_can_go_on_from_that_in_its_folder() {
    let desk = Desk::new();
    let settings = "--strategy ssp:1 --servers 1 --workers 2 --steps 300 --run-dir run";
    let ended = interrupt(&desk, settings, "run", 50);
    let hint = "the same command with --journal run/journal goes on";
    assert!(ended.stderr.contains(hint), "{}", ended.stderr);
    let resumed = desk.train(&format!("{settings} --journal run/journal"));
    assert_eq!(resumed.object["ledger"], "balanced");
    assert_eq!(assert_adds_up(&desk.path("run"), 1), 4);
}

#[test]
fn an_interrupted_run_with_a_killed_launcher_goes_on() {
    let desk = Desk::new();
    let arguments = "--strategy ssp:1 --servers 2 --workers 2 --steps 400 --journal journal";
    let mut job = desk.start(&mut desk.command(&format!("train --json {arguments}")));
    let run_dir = desk.path("runs/mlp-1");
    job.wait_until("update 100", || updates(&run_dir) >= 100);
    job.signal(Signal::KILL);
    assert!(job.wait().was_killed_by(Signal::KILL));
    let resumed = desk.train(arguments);
    assert_eq!(resumed.object["ledger"], "balanced");
    assert_adds_up(&run_dir, 2);
}

/// The documented way: a worker is killed, all is stopped, and the same command goes on. Also if the
/// clock was set back meanwhile, and the new launcher counts starts from 1 again.
#[test]
fn workers_of_another_launcher_go_on_whatever_the_clock_says() {
    let desk = Desk::new();
    let launcher = "run --servers 2 --run-dir run --journal journal --restarts 10 -n 2";
    let train = "train --json --strategy ssp:3 --steps 400 --run-dir run";
    let arguments = format!("{launcher} -- {PROGRAM} {train}");
    let mut job = desk.start(&mut desk.command(&arguments));
    let run_dir = desk.path("run");
    job.wait_until("update 50", || updates(&run_dir) >= 50);
    kill_process(job.worker(1), Signal::KILL).unwrap();
    job.wait_until("the next life of worker 1", || lives(&run_dir, 1) > 1);
    job.signal(Signal::INT);
    assert_eq!(job.wait().status.code(), Some(130));
    let before = records(&run_dir, 0);
    assert!(before.len() < 800, "it was stopped before its end");

    let mut command = desk.command(&arguments);
    let ended = desk.start(command.env("LD_PRELOAD", clock_of_yesterday(&desk))).wait();
    let summary = ended.summary();
    assert_eq!(summary.object["ledger"], "balanced");
    assert_eq!(assert_adds_up(&run_dir, 2), 5, "three lives before, and two after");
    let after = records(&run_dir, 0);
    assert_eq!(after[..before.len()], before, "what was done is not done again");
    let times: Vec<f64> = after.iter().map(|record| record["time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted(), "time goes on");
}

/// How many lives of a worker have pushed so far, while lines are still written.
fn lives(run_dir: &Path, worker: u64) -> usize {
    let text = fs::read_to_string(run_dir.join("updates-0.jsonl")).unwrap();
    let (complete, _) = text.rsplit_once('\n').unwrap_or_default();
    let records = complete.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let own = records.filter(|record| record["worker"] == worker);
    own.map(|record| record["life"].as_u64()).collect::<BTreeSet<_>>().len()
}

/// A library for programs that are to believe that it is yesterday.
fn clock_of_yesterday(desk: &Desk) -> PathBuf {
    desk.write(
        "clock.c",
        r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <time.h>
        int clock_gettime(clockid_t clock, struct timespec *now) {
            static int (*system)(clockid_t, struct timespec *);
            if (!system) *(void **)&system = dlsym(RTLD_NEXT, "clock_gettime");
            int result = system(clock, now);
            if (clock == CLOCK_REALTIME) now->tv_sec -= 24 * 60 * 60;
            return result;
        }
        "#,
    );
    let (source, library) = (desk.path("clock.c"), desk.path("clock.so"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
    assert!(compiler.status().expect("there is a compiler").success());
    library
}

/// One leads. Another one is told at once who it is, and disturbs nothing.
#[test]
fn a_journal_has_one_leader() {
    let desk = Desk::new();
    let leads = [
        "train --json --strategy async --servers 1 --workers 1 --steps 100000 --run-dir {}"
            .to_owned(),
        format!(
            "run --servers 1 --run-dir {{}} -n 1 -- {PROGRAM} train --strategy async --steps 100000 \
             --run-dir {{}}"
        ),
    ];
    for (number, lead) in leads.iter().enumerate() {
        let journal = format!("journal-{number}");
        let with_journal = |lead: &str, run_dir: &str| {
            let (verb, rest) = lead.split_once(' ').unwrap();
            format!("{verb} --journal {journal} {}", rest.replace("{}", run_dir))
        };
        let run_dir = format!("run-{number}");
        let mut first = desk.start(&mut desk.command(&with_journal(lead, &run_dir)));
        let path = desk.path(&run_dir);
        first.wait_until("update 20", || updates(&path) >= 20);
        for other in &leads {
            let ended = desk.run(&with_journal(other, &run_dir));
            let complaint = ended.complaint();
            let holder = format!("process {} uses", first.id());
            assert!(complaint.contains(&holder), "no {holder:?}: {complaint}");
            assert!(complaint.contains(&journal), "{complaint}");
        }
        first.signal(Signal::INT);
        assert_eq!(first.wait().status.code(), Some(130));
    }
}

#[test]
fn a_server_without_its_journal_cannot_go_on_with_its_run() {
    let desk = Desk::new();
    let arguments = "--strategy async --servers 2 --workers 2 --steps 200 --journal journal";
    interrupt(&desk, arguments, "runs/mlp-1", 20);
    let before = records(&desk.path("runs/mlp-1"), 1);
    fs::remove_dir_all(desk.path("journal/1")).unwrap();
    for _ in 0..2 {
        let ended = desk.run(&format!("train {arguments}"));
        let complaint = ended.complaint();
        for word in
            ["--journal journal", "server 1 has lost its weights", "remove the whole journal"]
        {
            assert!(complaint.contains(word), "no {word:?}: {complaint}");
        }
        assert_eq!(records(&desk.path("runs/mlp-1"), 1), before);
    }
    fs::remove_dir_all(desk.path("journal")).unwrap();
    assert_eq!(desk.train(arguments).object["ledger"], "balanced");
    assert!(desk.path("runs/mlp-2").exists());
}

#[test]
fn a_journal_goes_on_with_nothing_but_its_run() {
    let desk = Desk::new();
    let settings = "--strategy async --servers 1 --workers 2 --journal journal";
    interrupt(&desk, &format!("{settings} --steps 300 --run-dir run"), "run", 20);
    let refused = |arguments: &str, words: &[&str]| {
        let ended = desk.run(&format!("train {arguments}"));
        let complaint = ended.complaint();
        for word in words {
            assert!(complaint.contains(word), "no {word:?}: {complaint}");
        }
    };
    refused(&format!("{settings} --steps 400"), &["--journal journal", "steps 300", "has 400"]);
    refused(
        &format!("{settings} --steps 300 --seed 2"),
        &["--journal", "seed 1", "another journal"],
    );
    refused(&format!("{settings} --steps 300 --batch 32"), &["--journal", "batch 64"]);
    let other_folder = format!("{settings} --steps 300 --run-dir other");
    refused(&other_folder, &["--run-dir other", "--journal journal", "another journal"]);
    let more = "--strategy async --servers 1 --workers 3 --journal journal --steps 300";
    refused(more, &["workers 2", "has 3"]);
    fs::rename(desk.path("run"), desk.path("moved")).unwrap();
    refused(&format!("{settings} --steps 300"), &["--journal journal", "another journal"]);
    assert!(!desk.path("runs").exists() && !desk.path("other").exists());
}

#[test]
fn runs_without_servers_stop_as_well() {
    let desk = Desk::new();
    let ended = interrupt(&desk, "--strategy gossip --steps 100000 --run-dir run", "run", 20);
    assert!(ended.stderr.contains("start again"), "{}", ended.stderr);

    let settings = "train --json --strategy hogwild --steps 100000 --run-dir hogwild";
    let mut job = desk.start(&mut desk.command(settings));
    let run_dir = desk.path("hogwild");
    job.wait_until("update 20", || updates(&run_dir) >= 20);
    job.signal(Signal::INT);
    let ended = job.wait();
    assert!(ended.stderr.contains("stopped after"), "{}", ended.stderr);
    let summary = ended.summary();
    assert_eq!(summary.object["ledger"], "balanced");
    assert!(summary.count("pushes") >= 20);
}
