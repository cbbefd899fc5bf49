//! Communication hides behind the backward pass. In a test binary of its own, so that no other test
//! competes with it for the processor.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use unisono_netlab::{Lab, Link, Rate, lab_or_skip};

const RATE: Rate = Rate::gbit(1);

/// A model of equal layers.
const LAYERS: usize = 32;
const LAYER_BYTES: usize = 512 << 10;

const STEPS: usize = 30;

/// Runs with and without overlap, in turns, of the benchmark.
const RUNS: usize = 3;

/// What must hide of what can, by the measurements of one and the same run. The first bucket is ready
/// when a sixteenth of the backward pass is over, the last when all of it is, and every thread that is
/// not given a processor in time costs a little more.
const HIDDEN: f64 = 0.65;

/// Without overlap, nothing does.
const HIDDEN_WITHOUT: f64 = 0.05;

/// What the documentation promises of a machine that does nothing else: how much shorter steps are than
/// without overlap, of how much shorter they could be.
const PROMISED: f64 = 0.80;

/// Communication and backward pass are measured in the same steps, so whatever else the machine does
/// makes both longer. Steps of different runs are only compared by `bench/links`, which sets
/// `BENCH_LINKS`.
#[test]
fn communication_hides_behind_backward() {
    let is_bench = std::env::var_os("BENCH_LINKS").is_some();
    let mut savings = Vec::new();
    for hosts in [2, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(RATE)) else { return };
        let folder = tempfile::tempdir().unwrap();
        // Backward takes about as long as communication does at best, forward half of that.
        let bytes = (LAYERS * LAYER_BYTES) as f64 * 2.0 * (hosts as f64 - 1.0) / hosts as f64;
        let backward = bytes * 8.0 / RATE.as_bits_per_second() as f64 * 1e3;
        let model = folder.path().join("model");
        std::fs::write(&model, layers(backward / LAYERS as f64)).unwrap();

        let (mut without, mut with) = (Vec::new(), Vec::new());
        for run in 0..if is_bench { RUNS } else { 1 } {
            let into = |name: &str| folder.path().join(format!("{name}-{run}"));
            without.push(train(&lab, &model, &into("off"), &["--no-overlap"]));
            with.push(train(&lab, &model, &into("on"), &[]));
        }
        let median = |runs: &[Summary], of: fn(&Summary) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let hidden = median(&with, |run| run.hidden_of_hideable);
        let hidden_without = median(&without, |run| run.hidden_of_hideable);
        let hideable = median(&without, |run| run.comm_ms.min(run.backward_ms));
        let step = |runs: &[Summary]| median(runs, |run| run.step_ms);
        let saved = (step(&without) - step(&with)) / hideable;
        println!(
            "{hosts} hosts: a step takes {:.0} ms without overlap ({:.0} backward, {:.0} \
             communication), {:.0} ms with: {:.0} % of what can be hidden is, by its own measurements \
             {:.0} %",
            step(&without),
            median(&without, |run| run.backward_ms),
            median(&without, |run| run.comm_ms),
            step(&with),
            saved * 100.0,
            hidden * 100.0
        );
        assert!(hidden >= HIDDEN, "{hosts} hosts: {hidden} is hidden");
        assert!(hidden_without <= HIDDEN_WITHOUT, "{hosts} hosts: {hidden_without} is hidden");
        savings.push(saved);
    }
    let kept = !is_bench || savings.iter().all(|saved| *saved >= PROMISED);
    assert!(kept, "{savings:?} with 2 and 4 hosts, where {PROMISED} are promised");
}

/// A file for `--model replay:`.
fn layers(backward_ms: f64) -> String {
    let layer = |i: usize| {
        let forward_ms = backward_ms / 2.0;
        format!("layer l{i} {forward_ms} {backward_ms}\nl{i}.weight {}\n", LAYER_BYTES / 4)
    };
    (0..LAYERS).map(layer).collect()
}

/// What `--json` says of a run.
#[derive(serde::Deserialize)]
struct Summary {
    step_ms: f64,
    backward_ms: f64,
    comm_ms: f64,
    hidden_of_hideable: f64,
}

/// Trains with one worker on each host.
fn train(lab: &Lab, model: &Path, run_dir: &Path, flags: &[&str]) -> Summary {
    let program = env!("CARGO_BIN_EXE_unisono");
    let rendezvous = format!("{}:29400", lab.host(0).address());
    let start = |node: usize| -> Child {
        let mut command: Command = lab.host(node).command(program);
        command.args(["run", "-n", "1", "--rendezvous", &rendezvous]);
        command.args(["--nnodes", &lab.hosts().len().to_string()]);
        command.args(["--node-rank", &node.to_string(), "--", program, "train", "--json"]);
        command.args(["--model", &format!("replay:{}", model.display())]);
        command.args(["--steps", &STEPS.to_string(), "--run-dir"]).arg(run_dir).args(flags);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let nodes: Vec<Child> = (0..lab.hosts().len()).map(start).collect();
    let mut summary = None;
    for node in nodes {
        let output = node.wait_with_output().unwrap();
        assert!(output.status.success());
        summary = summary.or_else(|| serde_json::from_slice(&output.stdout).ok());
    }
    summary.expect("rank 0 prints a summary")
}
