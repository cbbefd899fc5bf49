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

        let off = train(&lab, &model, &folder.path().join("off"), &["--no-overlap"]);
        let on = train(&lab, &model, &folder.path().join("on"), &[]);
        let hideable = off.comm_ms.min(off.backward_ms);
        let hidden = (off.step_ms - on.step_ms) / hideable;
        println!(
            "{hosts} hosts: a step takes {:.0} ms without overlap ({:.0} backward, {:.0} \
             communication), {:.0} ms with: {:.0} % of what can be hidden is",
            off.step_ms,
            off.backward_ms,
            off.comm_ms,
            on.step_ms,
            hidden * 100.0
        );
        // A quiet machine hides 80 % and more. Less than half would be a mistake in the order of
        // things, whatever else the machine has to do.
        assert!(hidden > 0.5, "{hidden}");
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
