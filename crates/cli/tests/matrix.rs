//! The weights after 200 steps are the same bits, whichever workers computed them, wherever, and however they
//! were summed.
//!
//! The models are small: 200 steps take a second or two, and most of that is starting processes. So a
//! hundred runs fit into two minutes on two busy cores. Bits do not depend on sizes, but on the order
//! of sums, and that is what differs from run to run: several buckets and uneven shares occur at
//! these sizes as well.

mod common;

use std::process::Command;

use common::{Desk, PROGRAM, Running, Summary};
use unisono::sync::{Parameter, Settings, Synchronizer};
use unisono::{Algorithm, Group, Options, Transport};
use unisono_netlab::{Lab, Link, Rate, lab_or_skip};

const STEPS: u64 = 200;

/// The step at which a run that is resumed was ended: no multiple of anything.
const MIDDLE: u64 = 90;

/// All that promise canonical bits, and whichever is the cheapest.
const ALGORITHMS: [&str; 10] = [
    "",
    "--algorithm tree",
    "--algorithm halving-doubling",
    "--algorithm recursive-doubling",
    "--algorithm pairwise",
    "--algorithm direct",
    "--algorithm window",
    "--algorithm window-direct",
    "--algorithm hierarchical",
    "--algorithm regional",
];

/// Less than most parameters; some of them; more than the models have. And tuned.
const BUCKETS: [&str; 4] = ["--bucket 1KiB", "--bucket 8KiB", "--bucket 1MiB", ""];

const OVERLAP: [&str; 3] = ["", "--no-overlap", ""];

/// Five workers and three share eight shards unevenly.
const WORKERS: [usize; 6] = [1, 2, 3, 4, 5, 8];

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

/// A model, its data, and what else decides about its weights.
#[derive(Clone, Copy)]
struct Case(&'static str);

const MLP: Case = Case("--model mlp --hidden 48,24 --batch 16 --shards 8 --seed 5");

const CONV: Case = Case(
    "--model conv --channels 4,8 --hidden 16 --batch 16 --shards 8 --seed 5 --optimizer momentum",
);

const TRANSFORMER: Case = Case(
    "--model transformer --data text:words --layers 1 --width 16 --heads 2 --context 8 --batch 8 \
     --shards 8 --seed 5",
);

impl Case {
    fn desk(self) -> Desk {
        let desk = Desk::new();
        desk.write_text("words", 1000);
        desk
    }

    /// One worker.
    fn alone(self, desk: &Desk) -> Summary {
        self.run(desk, 1, "")
    }

    fn run(self, desk: &Desk, workers: usize, flags: &str) -> Summary {
        let Case(model) = self;
        let summary = desk.train(&format!("{model} --steps {STEPS} --workers {workers} {flags}"));
        check(&summary, workers);
        summary
    }
}

/// The run was the one that was asked for.
fn check(summary: &Summary, workers: usize) {
    assert_eq!(summary.count("workers"), workers as u64);
    assert_eq!((summary.count("step"), summary.count("shards")), (STEPS, 8));
    assert_eq!(summary.number("wire_bytes_per_step") > 0.0, workers > 1);
    for key in ["final_loss", "accuracy", "samples_per_s", "step_ms", "compute_ms", "comm_ms"] {
        assert!(summary.number(key).is_finite(), "{key}");
    }
    assert!(summary.number("exposed_ms").is_finite());
    assert_eq!(summary.object["interrupted"], false);
}

/// The `i`-th of some settings, in turn.
fn turn<'a>(settings: &[&'a str], i: usize) -> &'a str {
    settings[i % settings.len()]
}

/// Every algorithm with every number of workers. Those that do not fit the transport leave the
/// choice to the program. Bucket sizes and overlap change from run to run, out of step with the
/// algorithms, so that each of them meets each.
fn every_algorithm(transport: &str) {
    let desk = MLP.desk();
    let expected = MLP.alone(&desk);
    let mut i = 0;
    for workers in [2, 3, 4, 5, 8] {
        for algorithm in ALGORITHMS {
            let (bucket, overlap) = (turn(&BUCKETS, i / 8 + i), turn(&OVERLAP, i));
            let flags = format!("--transport {transport} {algorithm} {bucket} {overlap}");
            MLP.run(&desk, workers, &flags).assert_same_weights(&expected);
            i += 1;
        }
    }
}

#[test]
fn every_algorithm_over_shm() {
    every_algorithm("shm");
}

#[test]
fn every_algorithm_over_tcp() {
    every_algorithm("tcp");
}

/// Every number of workers over every transport, and every other setting at least once.
fn every_setting_once(case: Case) {
    let desk = case.desk();
    let expected = case.alone(&desk);
    let mut i = 0;
    for workers in WORKERS {
        for transport in TRANSPORTS {
            let (algorithm, bucket) = (turn(&ALGORITHMS, i), turn(&BUCKETS, i));
            let overlap = turn(&OVERLAP, i);
            let flags = format!("--transport {transport} {algorithm} {bucket} {overlap}");
            case.run(&desk, workers, &flags).assert_same_weights(&expected);
            i += 1;
        }
    }
}

#[test]
fn the_conv_net() {
    every_setting_once(CONV);
}

#[test]
fn the_transformer() {
    every_setting_once(TRANSFORMER);
}

#[test]
fn accumulation() {
    for case in [MLP, TRANSFORMER] {
        let desk = case.desk();
        let expected = case.alone(&desk);
        for (workers, factor) in [(1, 8), (1, 3), (2, 4), (2, 1), (3, 2), (4, 2)] {
            let flags = format!("--accumulate {factor} --bucket 4KiB");
            case.run(&desk, workers, &flags).assert_same_weights(&expected);
        }
    }
}

#[test]
fn a_pause_in_the_middle() {
    for case in [MLP, CONV, TRANSFORMER] {
        let desk = case.desk();
        let expected = case.alone(&desk);
        for (i, (before, after)) in [(2, 2), (1, 3), (4, 1), (3, 8)].into_iter().enumerate() {
            let Case(model) = case;
            let folder = format!("--checkpoint-dir checkpoints-{i} --checkpoint-every 40");
            let first =
                desk.train(&format!("{model} --workers {before} --steps {MIDDLE} {folder}"));
            assert_ne!(first.hash(), expected.hash());
            let second = case.run(&desk, after, &format!("--resume {folder} --bucket 2KiB"));
            assert_eq!(second.count("steps"), STEPS - MIDDLE, "it began anew");
            second.assert_same_weights(&expected);
        }
    }
}

#[test]
fn another_number_of_shards_that_no_number_of_workers_divides() {
    let desk = Desk::new();
    let run = |workers: usize, flags: &str| {
        let model = "--model mlp --hidden 48,24 --batch 21 --shards 7 --steps 60";
        desk.train(&format!("{model} --workers {workers} {flags}"))
    };
    let expected = run(1, "");
    for workers in 2..=7 {
        run(workers, turn(&BUCKETS, workers)).assert_same_weights(&expected);
    }
}

#[test]
fn images_from_files() {
    let desk = Desk::new();
    std::fs::create_dir(desk.path("images")).unwrap();
    for (part, samples) in [("train", 100), ("t10k", 20)] {
        let image = |n: usize| common::numbers().take(n).map(|number| number as u8).collect();
        let labels = (0..samples as u8).map(|label| label % 10).collect();
        let images: Vec<u8> = image(samples * 28 * 28);
        desk.write(
            &format!("images/{part}-images-idx3-ubyte"),
            idx(&[samples as u32, 28, 28], images),
        );
        desk.write(&format!("images/{part}-labels-idx1-ubyte"), idx(&[samples as u32], labels));
    }
    let run = |workers: usize| {
        let model = "--model conv --data fashion-mnist:images --channels 2,4 --hidden 8 --batch 8";
        desk.train(&format!("{model} --steps 20 --workers {workers} --bucket 512"))
    };
    let expected = run(1);
    for workers in [2, 3, 8] {
        run(workers).assert_same_weights(&expected);
    }
}

/// A file of bytes as Fashion-MNIST comes in.
fn idx(lengths: &[u32], content: Vec<u8>) -> Vec<u8> {
    let mut file = (0x0800 + lengths.len() as u32).to_be_bytes().to_vec();
    lengths.iter().for_each(|length| file.extend(length.to_be_bytes()));
    file.extend(content);
    file
}

/// Trains on the hosts of a lab, with so many workers on each.
fn across(lab: &Lab, desk: &Desk, workers: &[usize], arguments: &str) -> Summary {
    let rendezvous = format!("{}:29400", lab.host(0).address());
    let start = |(node, workers): (usize, &usize)| -> Running {
        let launcher = format!(
            "run -n {workers} --nnodes {} --node-rank {node} --rendezvous {rendezvous} -- {PROGRAM}",
            lab.hosts().len()
        );
        let host = |program: &str| -> Command { lab.host(node).command(program) };
        desk.start(&mut desk.command_by(host, &format!("{launcher} train --json {arguments}")))
    };
    let nodes: Vec<Running> = workers.iter().enumerate().map(start).collect();
    let mut ended: Vec<_> = nodes.into_iter().map(Running::wait).collect();
    for node in &ended[1..] {
        assert_eq!(node.expect_success(), "", "only rank 0 sums up");
    }
    let summary = ended.remove(0).summary();
    check(&summary, workers.iter().sum());
    summary
}

#[test]
fn several_hosts() {
    let shapes: [&[usize]; 4] = [&[2, 2], &[1, 1, 1], &[3, 1], &[1, 2, 2]];
    for (i, workers) in shapes.into_iter().enumerate() {
        let Some(lab) = lab_or_skip(workers.len(), Link::new(Rate::gbit(1))) else { return };
        for case in [MLP, CONV, TRANSFORMER] {
            let desk = case.desk();
            let Case(model) = case;
            let arguments = format!("{model} --steps {STEPS} {}", turn(&BUCKETS, i));
            let summary = across(&lab, &desk, workers, &arguments);
            summary.assert_same_weights(&case.alone(&desk));
        }
    }
}

#[test]
fn every_algorithm_across_hosts() {
    let Some(lab) = lab_or_skip(2, Link::new(Rate::gbit(1))) else { return };
    let Case(model) = MLP;
    let desk = MLP.desk();
    let expected = MLP.alone(&desk);
    for (i, algorithm) in ALGORITHMS.into_iter().enumerate() {
        let arguments = format!("{model} --steps {STEPS} {algorithm} {}", turn(&BUCKETS, i));
        across(&lab, &desk, &[2, 2], &arguments).assert_same_weights(&expected);
    }
}

/// Were the hash deaf, all of the above would prove nothing.
#[test]
fn what_decides_about_the_weights_changes_the_hash() {
    let desk = Desk::new();
    let run = |flags: &str| desk.train(&format!("--model mlp --hidden 48,24 --steps 20 {flags}"));
    let same = run("--seed 5 --shards 8 --batch 16");
    let others = [
        "--seed 6 --shards 8 --batch 16",
        "--seed 5 --shards 4 --batch 16",
        "--seed 5 --shards 8 --batch 32",
        "--seed 5 --shards 8 --batch 16 --optimizer sgd",
        "--seed 5 --shards 8 --batch 16 --learning-rate 0.0011",
    ];
    let mut hashes = vec![same.hash().to_owned()];
    hashes.extend(others.iter().map(|flags| run(flags).hash().to_owned()));
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), others.len() + 1);
}

/// The mean of what eight shards have, by one algorithm; the bits at rank 0.
fn mean_by(algorithm: Algorithm, workers: usize) -> Vec<u32> {
    const SHARDS: usize = 8;
    const LEN: usize = 1000;
    let mut options = Options::default();
    (options.transport, options.algorithm) = (Transport::Tcp, Some(algorithm));
    let groups = Group::local(workers, &options).unwrap();
    let mean = |group: &Group| {
        let parameters = vec![Parameter::flat("weights", LEN)];
        let synchronizer =
            Synchronizer::new(Some(group), parameters, Settings::new(SHARDS)).unwrap();
        for _ in synchronizer.shards() {
            let shard = synchronizer.begin_shard();
            synchronizer.begin_backward(0.0);
            let values = common::numbers().skip(shard * LEN).take(LEN);
            let gradient: Vec<f32> = values.map(|value| value as f32 / 1e9).collect();
            synchronizer.gradient(0, &gradient);
            synchronizer.end_shard();
        }
        let mut bits = Vec::new();
        let keep = |_, mean: &[f32]| bits = mean.iter().map(|value| value.to_bits()).collect();
        synchronizer.finish(keep).unwrap();
        bits
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || mean(group))).collect();
        let mut means = ranks.into_iter().map(|rank| rank.join().expect("no rank panics"));
        let first = means.next().expect("there is a rank 0");
        means.for_each(|other| assert_eq!(other, first));
        first
    })
}

/// What the refusal is for, and what the tests above would notice: one step is enough.
#[test]
fn a_ring_has_other_bits() {
    for workers in [1, 2, 4, 8] {
        assert_eq!(mean_by(Algorithm::Tree, workers), mean_by(Algorithm::Pairwise, 1));
    }
    assert_ne!(mean_by(Algorithm::Ring, 4), mean_by(Algorithm::Tree, 4));
    assert_ne!(mean_by(Algorithm::Ring, 8), mean_by(Algorithm::Ring, 4));
}

/// A ring sums in an order that depends on the number of workers.
#[test]
fn algorithms_with_other_bits_are_refused() {
    let desk = Desk::new();
    for algorithm in ["ring", "double-tree"] {
        let ended = desk.run(&format!("train --algorithm {algorithm}"));
        let complaint = ended.complaint();
        assert!(complaint.contains(&format!("--algorithm {algorithm}")), "{complaint}");
        for (variable, value) in [("UNISONO_ALGORITHM", algorithm), ("UNISONO_CANONICAL", "false")]
        {
            let ended = desk.start(desk.command("train").env(variable, value)).wait();
            let complaint = ended.complaint();
            assert!(complaint.contains(&format!("{variable}={value}")), "{complaint}");
        }
    }
    assert!(!desk.path("runs").exists(), "it left traces");
}
