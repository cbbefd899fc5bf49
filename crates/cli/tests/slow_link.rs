//! What codecs are worth over slow links, and whether that is known beforehand. Minutes each, and only
//! of use on a quiet machine, so they are not run every day:
//!
//! ```text
//! cargo test --release -p unisono-cli --all-features --test slow_link -- --ignored --nocapture
//! ```

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use unisono_netlab::{Lab, Link, Rate, lab_or_skip};

/// What `auto` chooses from.
const CODECS: [&str; 7] = ["none", "fp16", "int8", "int4", "sign", "topk:4%", "powersgd:4"];

/// A model that learns, with 1.2 million parameters.
const LEARNER: [&str; 4] = ["--model", "mlp", "--hidden", "1024,1024"];

#[test]
#[ignore = "a soak of minutes for a quiet machine; its last result is in docs/measurements/compression.md"]
fn the_best_codec_reaches_the_loss_eight_times_sooner() {
    const LOSS: f64 = 0.5;
    for hosts in [2, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(Rate::mbit(100))) else { return };
        let folder = tempfile::tempdir().unwrap();
        let shards = hosts.to_string();
        let time = |codec: &str, steps: &str| {
            let run_dir = folder.path().join(codec);
            let common = ["--steps", steps, "--shards", &shards, "--codec", codec];
            let rest = ["--codec-warmup", "0", "--check-every", "0"];
            train(&lab, &run_dir, &[&LEARNER[..], &common, &rest].concat());
            let seconds = seconds_until(&run_dir, LOSS);
            println!("{hosts} hosts, {codec}: a loss of {LOSS} after {seconds:.2} s");
            seconds
        };
        let dense = time("none", "60");
        let best = ["sign", "topk:4%", "powersgd:4"].map(|codec| time(codec, "150"));
        let best = best.into_iter().fold(f64::INFINITY, f64::min);
        println!("{hosts} hosts: {:.1} times sooner", dense / best);
        assert!(dense / best >= 8.0);
    }
}

#[test]
#[ignore = "a soak of minutes for a quiet machine; its last result is in docs/measurements/compression.md"]
fn what_auto_predicts_comes_true() {
    let folder = tempfile::tempdir().unwrap();
    let replay = folder.path().join("replay");
    std::fs::write(&replay, layers()).unwrap();
    let replay = format!("replay:{}", replay.display());
    let models: [(&str, Vec<&str>); 2] =
        [("mlp", LEARNER.to_vec()), ("replay", vec!["--model", &replay])];
    let rates = [Some(Rate::mbit(100)), Some(Rate::gbit(1)), None];
    let (mut close, mut right, mut settings) = (0, 0, 0);
    println!("| link | model | workers | chosen | predicted | measured | error | best | off by |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (rate, workers) in rates.iter().flat_map(|rate| [2, 4].map(|workers| (rate, workers))) {
        let lab = match rate {
            Some(rate) => match lab_or_skip(workers, Link::new(*rate)) {
                Some(lab) => Some(lab),
                None => return,
            },
            None => None,
        };
        for (name, model) in &models {
            let run = |codec: &str, steps: &str| {
                let tag = format!("{name}-{rate:?}-{workers}-{codec}");
                let run_dir = folder.path().join(tag.replace(['/', ' '], "-"));
                let shards = workers.to_string();
                let common = ["--steps", steps, "--shards", &shards, "--codec", codec];
                let rest = ["--codec-warmup", "0", "--check-every", "0", "--bucket", "4MiB"];
                let arguments = [&model[..], &common, &rest].concat();
                match &lab {
                    Some(lab) => train(lab, &run_dir, &arguments),
                    None => train_here(workers, &run_dir, &arguments),
                }
                run_dir
            };
            let fixed: Vec<f64> =
                CODECS.iter().map(|codec| median_step(&run(codec, "24"), 8)).collect();
            let run_dir = run("auto", "40");
            let advice: Value =
                serde_json::from_slice(&std::fs::read(run_dir.join("advice.json")).unwrap())
                    .unwrap();
            let chosen = advice["chosen"].as_str().unwrap();
            let rows = advice["rows"].as_array().unwrap();
            let row = rows.iter().find(|row| row["codec"] == chosen).unwrap();
            let predicted = row["seconds"].as_f64().unwrap();
            let measured = median_step(&run_dir, 10);
            let of = |codec: &str| fixed[CODECS.iter().position(|c| *c == codec).unwrap()];
            let (best, fastest) = (0..CODECS.len())
                .map(|i| (CODECS[i], fixed[i]))
                .min_by(|a, b| a.1.total_cmp(&b.1))
                .unwrap();
            let (error, off) = (predicted / measured - 1.0, of(chosen) / fastest - 1.0);
            let link = rate.map_or("shm".to_owned(), |rate| {
                format!("{} Mbit/s", rate.as_bits_per_second() / 1_000_000)
            });
            println!(
                "| {link} | {name} | {workers} | {chosen} | {:.1} ms | {:.1} ms | {:+.0} % | {best} \
                 {:.1} ms | {:.0} % |",
                predicted * 1e3,
                measured * 1e3,
                error * 100.0,
                fastest * 1e3,
                off * 100.0,
            );
            settings += 1;
            close += usize::from(off <= 0.10);
            right += usize::from(off <= 0.10 && error.abs() <= 0.20);
        }
    }
    println!(
        "{close} of {settings} within 10 % of the best, {right} of them predicted within 20 %"
    );
    assert!(close * 12 >= settings * 9);
}

/// A model for `--model replay:`: 2 million parameters in matrices, and 20 ms of computing.
fn layers() -> String {
    let layer = |i: usize| format!("layer l{i} 0.8 1.7\nl{i}.weight 512x512\nl{i}.bias 512\n");
    (0..8).map(layer).collect()
}

/// Trains with one worker on each host.
fn train(lab: &Lab, run_dir: &Path, arguments: &[&str]) {
    let program = env!("CARGO_BIN_EXE_unisono");
    let rendezvous = format!("{}:29400", lab.host(0).address());
    let start = |node: usize| -> Child {
        let mut command: Command = lab.host(node).command(program);
        command.args(["run", "-n", "1", "--rendezvous", &rendezvous]);
        command.args(["--nnodes", &lab.hosts().len().to_string()]);
        command.args(["--node-rank", &node.to_string(), "--", program, "train", "--json"]);
        command.args(arguments).arg("--run-dir").arg(run_dir);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let nodes: Vec<Child> = (0..lab.hosts().len()).map(start).collect();
    for mut node in nodes {
        assert!(node.wait().unwrap().success(), "{arguments:?}");
    }
}

/// Trains with as many workers on this machine.
fn train_here(workers: usize, run_dir: &Path, arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unisono"));
    command.args(["train", "--json", "--workers", &workers.to_string()]).args(arguments);
    let output = command.arg("--run-dir").arg(run_dir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What was recorded of the steps of a run.
fn steps(run_dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run_dir.join("steps.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The duration of the middle one of the steps after the first few.
fn median_step(run_dir: &Path, skipped: usize) -> f64 {
    let duration = |step: &Value| {
        let of = |key: &str| step["ranks"][0][key].as_f64().unwrap();
        of("end") - of("begin")
    };
    let mut durations: Vec<f64> = steps(run_dir)[skipped..].iter().map(duration).collect();
    durations.sort_by(f64::total_cmp);
    durations[durations.len() / 2]
}

/// How long it took until the mean loss of five steps was as small.
fn seconds_until(run_dir: &Path, loss: f64) -> f64 {
    let steps = steps(run_dir);
    let losses: Vec<f64> = steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect();
    let reached = losses.windows(5).position(|five| five.iter().sum::<f64>() / 5.0 <= loss);
    let reached = reached.expect("the loss is reached") + 4;
    let at = |step: usize, key: &str| steps[step]["ranks"][0][key].as_f64().unwrap();
    at(reached, "end") - at(0, "begin")
}
