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

/// What must hide of what can, by the measurements of one and the same run. The first bucket is ready
/// when a thirty-second of the backward pass is over, the last when all of it is, and every thread that is
/// not given a processor in time costs a little more.
const HIDDEN: f64 = 0.65;

/// Without overlap, nothing does.
const HIDDEN_WITHOUT: f64 = 0.05;

/// Communication and backward pass are measured in the same steps, so whatever else the machine does
/// makes both longer. Steps of different runs are only compared by `bench/links`.
#[test]
fn communication_hides_behind_backward() {
    for hosts in [2, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(RATE)) else { return };
        let folder = tempfile::tempdir().unwrap();
        // Backward takes about as long as communication does at best, forward half of that.
        let bytes = (LAYERS * LAYER_BYTES) as f64 * 2.0 * (hosts as f64 - 1.0) / hosts as f64;
        let backward = bytes * 8.0 / RATE.as_bits_per_second() as f64 * 1e3;
        let model = folder.path().join("model");
        std::fs::write(&model, layers(backward / LAYERS as f64)).unwrap();

        let into = |name: &str| folder.path().join(name);
        let without = train(&lab, &model, &into("off"), &["--no-overlap"]);
        let with = train(&lab, &model, &into("on"), &[]);
        let (hidden, hidden_without) = (with.hidden_of_hideable, without.hidden_of_hideable);
        println!(
            "{hosts} hosts: a step takes {:.0} ms without overlap ({:.0} backward, {:.0} \
             communication), {:.0} ms with, which hides {:.0} % of what can be hidden",
            without.step_ms,
            without.backward_ms,
            without.comm_ms,
            with.step_ms,
            hidden * 100.0
        );
        assert!(hidden >= HIDDEN, "{hosts} hosts: {hidden} is hidden");
        assert!(hidden_without <= HIDDEN_WITHOUT, "{hosts} hosts: {hidden_without} is hidden");
    }
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
