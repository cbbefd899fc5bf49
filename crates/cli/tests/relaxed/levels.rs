//! Every consistency level trains, keeps what it promises, and accounts for every push.

use crate::common::{Desk, Summary};
use crate::records::{assert_adds_up, count, lines, records};

/// One worker of three takes four times as long as the others.
const SLOW: &str = "--workers 3 --slow 1:4";

/// A run in the folder `run`.
fn train(desk: &Desk, arguments: &str) -> Summary {
    let summary = desk.train(&format!("{arguments} --run-dir run"));
    assert_eq!(summary.object["ledger"], "balanced", "{arguments}: {}", summary.object);
    assert!(desk.path("run/report.html").exists(), "{arguments}");
    summary
}

#[test]
fn each_level_learns_and_counts_every_push() {
    const STEPS: u64 = 250;
    const WORKERS: u64 = 3;
    for level in ["bsp", "ssp:0", "ssp:3", "ssp:auto", "async", "downpour:2,4", "hogwild", "gossip"]
    {
        let desk = Desk::new();
        let servers = if ["hogwild", "gossip"].contains(&level) { "" } else { "--servers 2" };
        let settings = format!("--steps {STEPS} --workers {WORKERS} {servers}");
        let summary = train(&desk, &format!("--strategy {level} {settings}"));
        let accuracy = summary.number("accuracy");
        assert!(accuracy > 0.9, "{level}: {accuracy}");
        assert_eq!(summary.object["strategy"], level);
        assert_eq!(summary.count("workers"), WORKERS);
        assert_eq!(summary.count("processes_restarted"), 0);
        assert_eq!(summary.count("dropped"), 0, "{level}");
        let pushes = summary.count("pushes");
        let asked =
            if level.starts_with("downpour") { STEPS * WORKERS / 2 } else { STEPS * WORKERS };
        // A worker that was computing when the run was over may have pushed once more.
        let extra = if ["bsp", "hogwild", "gossip"].contains(&level) { 0 } else { WORKERS - 1 };
        assert!((asked..=asked + extra).contains(&pushes), "{level}: {pushes} of {asked} pushes");
        match level {
            "hogwild" => assert_eq!(assert_adds_up(&desk.path("run"), 1), 3),
            "gossip" => assert!(summary.count("exchanges") > 0),
            _ => {
                assert_eq!(summary.count("servers"), 2);
                assert_eq!(assert_adds_up(&desk.path("run"), 2), 3, "{level}");
            }
        }
        assert!(!desk.path("run/journal").exists(), "{level}: it has done its duty");
        let report = desk.run("report run");
        assert!(report.expect_success().contains(level), "{level}: {}", report.stdout);
    }
}

#[test]
fn steps_are_counted_as_they_were_asked_for() {
    for level in ["hogwild", "gossip", "ssp:1"] {
        let desk = Desk::new();
        let ended = desk.run(&format!("train --strategy {level} --workers 2 --steps 60"));
        ended.expect_success();
        assert!(ended.stderr.contains("step 60/60"), "{level}: {}", ended.stderr);
    }
}

#[test]
fn no_worker_gets_further_ahead_than_the_bound() {
    for bound in [0, 1, 3] {
        let desk = Desk::new();
        let summary =
            train(&desk, &format!("--strategy ssp:{bound} --steps 60 --servers 2 {SLOW}"));
        // Fast workers get as far as they may; that none gets further is the point.
        assert_eq!(summary.count("max_lead"), bound);
        assert_eq!(summary.count("bound"), bound);
        for server in 0..2 {
            let leads = records(&desk.path("run"), server);
            let furthest = leads.iter().map(|record| count(record, "lead")).max();
            assert_eq!(furthest, Some(bound), "server {server}");
        }
    }
}

#[test]
fn without_a_bound_fast_workers_get_far_ahead() {
    let desk = Desk::new();
    // So slow that no busy machine can make the others look slower.
    let summary = train(&desk, "--strategy async --steps 100 --workers 3 --slow 1:40");
    assert!(summary.count("max_lead") > 20, "{}", summary.object);
    assert!(summary.object["bound"].is_null());
    let by_worker = &summary.object["by_worker"];
    let pushes = |worker: usize| count(&by_worker[worker], "pushes");
    assert!(pushes(0) > 2 * pushes(1) && pushes(2) > 2 * pushes(1), "{by_worker}");
}

#[test]
fn a_bound_that_adapts_says_why() {
    let desk = Desk::new();
    let summary = train(&desk, &format!("--strategy ssp:auto --steps 200 --servers 2 {SLOW}"));
    let moves = lines(&desk.path("run/moves.jsonl"));
    assert!(!moves.is_empty(), "fast workers are blocked most of the time");
    let mut bound = 1;
    for change in &moves {
        assert_eq!(count(change, "from"), bound, "{change}");
        bound = count(change, "to");
        assert!((1..=16).contains(&bound), "{change}");
        assert!(
            change["reason"].as_str().is_some_and(|reason| reason.contains("blocked")),
            "{change}"
        );
    }
    let largest = moves.iter().map(|change| count(change, "to")).max().unwrap_or(1);
    assert!(summary.count("max_lead") <= largest, "{}", summary.object);
    assert!(desk.read("run/report.html").contains("blocked"));
}

#[test]
fn stale_gradients_are_treated_as_was_asked() {
    for stale in ["keep", "scale", "drop:1", "compensate", "compensate:0.5"] {
        let desk = Desk::new();
        let settings = format!("--steps 120 --servers 2 --stale {stale} {SLOW}");
        let summary = train(&desk, &format!("--strategy async {settings}"));
        let treated = summary.object["stale"].as_str().unwrap_or_default();
        assert!(treated.starts_with(stale), "{stale}: {treated}");
        assert!(summary.number("accuracy") > 0.85, "{stale}: {}", summary.object);
        let dropped = summary.count("dropped");
        assert_eq!(dropped > 0, stale == "drop:1", "{stale}: {dropped}");
        assert_eq!(summary.count("updates") + dropped, summary.count("pushes"));
        for record in records(&desk.path("run"), 0) {
            // Staleness is counted in clocks: updates for every worker that is there.
            let is_old = count(&record, "delay") > count(&record, "present");
            let is_dropped = count(&record, "update") == 0;
            assert_eq!(is_dropped, is_old && stale == "drop:1", "{stale}: {record}");
        }
        assert_adds_up(&desk.path("run"), 2);
    }
}

#[test]
fn codecs_save_bytes_on_the_way_to_servers() {
    let bytes = |codec: &str| {
        let desk = Desk::new();
        let settings = "--steps 250 --workers 2 --servers 2 --codec-warmup 0";
        let summary = train(&desk, &format!("--strategy ssp:2 --codec {codec} {settings}"));
        let accuracy = summary.number("accuracy");
        assert!(accuracy > 0.85, "{codec}: {accuracy}");
        let records = records(&desk.path("run"), 0);
        let sum: u64 = records.iter().map(|record| count(record, "bytes")).sum();
        sum as f64 / records.len() as f64
    };
    let dense = bytes("none");
    // What is pulled, half of it, is never encoded.
    for (codec, share) in [("int8", 0.65), ("topk:5%", 0.65), ("powersgd:4", 0.65)] {
        let encoded = bytes(codec);
        assert!(encoded < share * dense, "{codec}: {encoded} of {dense} bytes");
        assert!(encoded > 0.5 * dense, "{codec}: weights are pulled as they are");
    }
}

#[test]
fn servers_inside_and_tcp_serve_every_level() {
    for level in ["ssp:2", "async", "downpour:2,2"] {
        for how in ["--servers inside", "--servers 2 --transport tcp"] {
            let desk = Desk::new();
            let summary =
                train(&desk, &format!("--strategy {level} --steps 150 --workers 2 {how}"));
            assert!(summary.number("accuracy") > 0.88, "{level} {how}: {}", summary.object);
            assert_eq!(assert_adds_up(&desk.path("run"), 2), 2);
        }
    }
}
