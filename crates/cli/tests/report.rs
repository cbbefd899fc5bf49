//! The report of a run tells the truth about its time.

mod common;

use std::time::Instant;

use common::{Desk, lines};
use serde_json::Value;

/// The parts of a step, and their sum.
fn assert_adds_up(summary: &Value) {
    let ms = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("no {key}: {summary}"));
    let parts = ["compute_ms", "exposed_ms", "straggler_ms", "rest_ms"].map(ms);
    assert!(parts.iter().all(|part| *part >= 0.0), "{summary}");
    let (sum, step) = (parts.iter().sum::<f64>(), ms("step_ms"));
    assert!((sum - step).abs() <= 0.03 * step, "{sum} of {step} ms: {summary}");
}

fn steps(desk: &Desk, run: &str) -> Vec<Value> {
    let text = desk.read(&format!("{run}/steps.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).expect("a step is a line")).collect()
}

fn seconds(rank: &Value, key: &str) -> f64 {
    rank[key].as_f64().unwrap_or_else(|| panic!("no {key}: {rank}"))
}

/// Recomputes from the records what the summary says, and that they leave no time out.
#[test]
fn the_breakdown_adds_up() {
    for (workers, model) in [
        (1, "--model mlp --hidden 256"),
        (3, "--model mlp --hidden 256"),
        (2, "--model mlp --hidden 256 --no-overlap --bucket 16KiB"),
        (2, "--model replay:layers --shards 4 --batch 4"),
    ] {
        let desk = Desk::new();
        let layer = |i: usize| format!("layer l{i} 1 2\nl{i}.weight 100000\n");
        desk.write("layers", (0..4).map(layer).collect::<String>());
        // So few steps that nothing else happens between two of them.
        let flags = format!("{model} --steps 40 --check-every 0 --run-dir run --workers {workers}");
        let start = Instant::now();
        let summary = desk.train(&flags);
        let wall = start.elapsed().as_secs_f64();

        assert_adds_up(&summary.object);
        let written: Value = serde_json::from_str(&desk.read("run/summary.json")).unwrap();
        assert_adds_up(&written);
        assert_eq!(written["step_ms"], summary.object["step_ms"]);

        let records = steps(&desk, "run");
        assert_eq!(records.len(), 40);
        let mut durations = Vec::new();
        for rank in 0..workers {
            let of = |step: usize| &records[step]["ranks"][rank];
            let mut sum = 0.0;
            for step in 0..records.len() {
                let at = ["begin", "computed", "reduced", "end"].map(|key| seconds(of(step), key));
                assert!(at.is_sorted(), "an order of events that cannot be: {}", of(step));
                assert!(seconds(of(step), "compute") <= (at[1] - at[0]) * 1.001, "{}", of(step));
                sum += at[3] - at[0];
                durations.push(at[3] - at[0]);
            }
            let whole = seconds(of(39), "end") - seconds(of(0), "begin");
            assert!((sum - whole).abs() <= 0.03 * whole, "steps of {sum} s in {whole} s");
            assert!(whole < wall, "{whole} s of steps in a run of {wall} s");
        }
        // A typical step is one of them, roughly.
        let typical = summary.number("step_ms") / 1e3;
        let longest = durations.iter().copied().fold(0.0, f64::max);
        let shortest = durations.iter().copied().fold(f64::INFINITY, f64::min);
        assert!((shortest..=longest).contains(&typical), "{shortest} {typical} {longest}");
        let samples = summary.number("samples_per_s") * typical;
        let batch = records[0]["samples"].as_f64().unwrap();
        assert!((samples - batch).abs() <= 0.03 * batch, "{samples} samples instead of {batch}");
    }
}

/// One rank computes twice as long as the others, and is named.
fn assert_straggler_is_named(flags: &str, workers: usize, slow: usize) {
    let desk = Desk::new();
    let arguments = format!("{flags} --workers {workers} --slow {slow}:2 --run-dir run");
    let summary = desk.train(&arguments);
    assert_eq!(summary.count("straggler_rank"), slow as u64, "{}", summary.object);
    assert!(summary.number("straggler_ms") > 0.0);
    assert_adds_up(&summary.object);
    let report = desk.run("report run");
    let report = report.expect_success();
    let (_, verdict) = report.rsplit_once("\nVerdict: ").expect("a report ends in a verdict");
    let verdict = verdict.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(verdict.contains(&format!("Rank {slow} on ")), "{verdict}");
    for other in (0..workers).filter(|rank| *rank != slow) {
        assert!(!verdict.contains(&format!("Rank {other} ")), "{verdict}");
    }
    assert!(desk.read("run/report.html").contains(&format!("Rank {slow} on ")));
}

#[test]
fn a_slow_learner_is_named() {
    // A shard takes milliseconds, far longer than a worker waits for its turn on a core.
    assert_straggler_is_named("--hidden 1024,512 --batch 256 --steps 40", 2, 1);
}

#[test]
fn a_slow_replay_is_named() {
    let flags = "--model replay:resnet50 --compute-ms 100 --steps 12";
    assert_straggler_is_named(flags, 2, 1);
    assert_straggler_is_named(flags, 3, 0);
}

#[test]
fn a_real_model_is_replayed() {
    let desk = Desk::new();
    let flags = "--model replay:resnet50 --compute-ms 20 --steps 12 --run-dir run";
    let summary = desk.train(flags);
    assert_eq!((summary.count("steps"), summary.count("workers")), (12, 2));
    assert!(summary.object["accuracy"].is_null());
    // 25.6 million parameters, and each of two ranks sends at least half of them twice.
    assert!(summary.number("wire_bytes_per_step") >= 2.0 * 25.5e6 * 4.0, "{}", summary.object);
    assert!(summary.number("compute_ms") >= 20.0);
    assert_adds_up(&summary.object);
}

#[test]
fn a_run_leaves_all_that_was_promised() {
    let desk = Desk::new();
    let summary = desk.train("--workers 3 --steps 120 --bucket 64KiB --measure-scaling");
    let run = "runs/mlp-1";
    assert_eq!(summary.object["report"], format!("{run}/report.html"));
    assert!(summary.number("scaling_efficiency") > 0.0);

    let settings = desk.read(&format!("{run}/run.toml"));
    for setting in ["workers = 3", "shards = 8", "steps = 120", "seed", "optimizer", "bucket"] {
        assert!(settings.contains(setting), "no {setting}: {settings}");
    }
    assert_eq!(lines(&desk.path(&format!("{run}/steps.jsonl"))), 120);
    let losses: Vec<f64> =
        steps(&desk, run).iter().map(|step| step["loss"].as_f64().unwrap()).collect();
    assert!(losses[119] < losses[0] / 2.0, "it did not learn: {losses:?}");

    assert_valid_trace(&desk.read(&format!("{run}/trace.json")), 3);
    let page = desk.read(&format!("{run}/report.html"));
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for loading in ["src=\"", "<link", "@import", "url(\"", "url(h"] {
        assert!(!page.contains(loading), "the page needs more than itself: {loading}");
    }

    // The next run gets a folder of its own.
    let next = desk.train("--steps 3");
    assert_eq!(next.object["report"], "runs/mlp-2/report.html");
    // And the report can be made again.
    std::fs::remove_file(desk.path(&format!("{run}/report.html"))).unwrap();
    let report = desk.run(&format!("report {run} --rewrite --width 80"));
    assert!(report.expect_success().lines().all(|line| line.chars().count() <= 80));
    assert_eq!(desk.read(&format!("{run}/report.html")), page);
}

/// A timeline that a viewer for Chrome's format takes: all ranks on one clock, computing, waiting, and
/// with their buckets.
fn assert_valid_trace(text: &str, workers: u64) {
    let trace: Value = serde_json::from_str(text).expect("a trace is JSON");
    let events = trace["traceEvents"].as_array().expect("a trace is a list of events");
    for rank in 0..workers {
        let of_rank = || events.iter().filter(|event| event["pid"] == rank);
        let has = |phase: &str, name: &str| {
            let is = |e: &Value| e["ph"] == phase && e["name"].as_str().unwrap().starts_with(name);
            assert!(of_rank().any(is), "no {name} of rank {rank}");
        };
        has("M", "process_name");
        for name in ["forward", "backward", "optimizer", "bucket 0", "bucket 1"] {
            has("X", name);
        }
        for event in of_rank().filter(|event| event["ph"] == "X") {
            let at = |key: &str| event[key].as_f64().unwrap_or(f64::NAN);
            assert!(at("ts") >= 0.0 && at("dur") >= 0.0, "{event}");
            assert!(event["tid"].is_u64(), "{event}");
        }
    }
    assert!(events.iter().all(|event| event["pid"].as_u64().is_some_and(|pid| pid < workers)));
}

/// What a user sees who asks for nothing.
#[test]
fn without_json_the_report_is_printed() {
    let desk = Desk::new();
    let ended = desk.run("train");
    let stdout = ended.expect_success();
    for words in ["held-out accuracy 9", "weights ", "A typical step", "Verdict: ", "report: runs/"]
    {
        assert!(stdout.contains(words), "no {words:?}: {stdout}");
    }
    assert!(!stdout.contains('\u{1e}'), "messages to the launcher got out");
    let summary: Value = serde_json::from_str(&desk.read("runs/mlp-1/summary.json")).unwrap();
    assert!(summary["accuracy"].as_f64().unwrap() >= 0.97, "{summary}");
}

/// More shards than the usual batch can be cut into make it larger, and that is said.
#[test]
fn a_batch_that_is_not_the_usual_one_is_said() {
    let desk = Desk::new();
    let ended = desk.run("train --json --workers 9 --steps 2 --run-dir run");
    assert_eq!(ended.summary().count("batch"), 72);
    let words = "72 samples instead of the usual 64, which 9 shards cannot share evenly";
    assert_eq!(ended.stderr.matches(words).count(), 1, "{}", ended.stderr);
    assert!(desk.read("run/run.toml").contains("batch_instead_of = 64"));
    for flags in ["--workers 2", "--workers 1 --accumulate 9 --batch 72"] {
        let ended = desk.run(&format!("train --json --steps 2 {flags}"));
        ended.summary();
        assert!(!ended.stderr.contains("instead of"), "{}", ended.stderr);
    }
}
