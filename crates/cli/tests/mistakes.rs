//! Whatever a user gets wrong costs one line, which says what to change.

mod common;

use std::fs;
use std::net::TcpListener;

use common::{Desk, PROGRAM, checkpoints, contents};

/// Runs the program with each of some arguments; requires of each complaint certain words.
fn each(desk: &Desk, mistakes: &[(&str, &[&str])]) {
    for (arguments, words) in mistakes {
        let ended = desk.run(arguments);
        let complaint = ended.complaint();
        for word in *words {
            assert!(
                complaint.contains(word),
                "no {word:?} in the answer to {arguments}: {complaint}"
            );
        }
    }
    assert!(!desk.path("runs").exists(), "a run that was refused left a folder");
}

#[test]
fn data_that_does_not_exist() {
    let desk = Desk::new();
    fs::create_dir(desk.path("empty")).unwrap();
    each(
        &desk,
        &[
            ("train --model transformer --data text:missing", &["--data", "missing"]),
            ("train --model transformer --data text:empty", &["--data", "empty"]),
            ("train --data fashion-mnist:missing", &["--data", "missing", "name a folder"]),
            ("train --data fashion-mnist:empty", &["--data", "empty", "name a folder"]),
            ("train --data cifar", &["--data", "cifar", "digits, fashion-mnist:DIR or text:FILE"]),
        ],
    );
}

#[test]
fn data_that_is_damaged() {
    let desk = Desk::new();
    fs::create_dir(desk.path("images")).unwrap();
    desk.write("images/train-images-idx3-ubyte", "no images");
    each(
        &desk,
        &[("train --data fashion-mnist:images", &["--data", "train-images", "download it again"])],
    );
}

#[test]
fn models_that_do_not_exist_or_do_not_fit() {
    let desk = Desk::new();
    desk.write_text("words", 1000);
    desk.write("short", "not long enough");
    each(
        &desk,
        &[
            ("train --model perceptron", &["--model perceptron", "mlp, conv, transformer"]),
            ("train --model transformer", &["needs a text", "--data text:FILE"]),
            ("train --model transformer --data digits", &["--model", "transformer", "mlp or conv"]),
            ("train --model mlp --data text:words", &["--model", "mlp", "use a transformer"]),
            (
                "train --model transformer --data text:short --context 32",
                &["--data", "short has 15 bytes", "context of 32", "longer file"],
            ),
            ("train --model transformer --data text:words --context 0", &["context"]),
            ("train --model transformer --data text:words --heads 3", &["--model", "heads"]),
            ("train --hidden 0", &["--model", "hidden"]),
            ("train --model conv --hidden 3,4", &["--hidden", "one"]),
        ],
    );
}

#[test]
fn flags_that_mean_nothing() {
    let desk = Desk::new();
    each(
        &desk,
        &[
            ("train --channels 3", &["--channels", "leave it out"]),
            ("train --context 3", &["--context", "leave it out"]),
            ("train --model conv --heads 3", &["--heads", "leave it out"]),
            ("train --compute-ms 3", &["--compute-ms", "leave it out"]),
            ("train --model replay:gpt2 --hidden 3", &["--hidden", "leave it out"]),
            ("bench collective --registered --op barrier", &["--op barrier", "--registered out"]),
            ("bench collective --registered --device cuda", &["--registered", "--device out"]),
            ("train --model replay:gpt2 --data digits", &["--data", "leave it out"]),
            (
                "train --model replay:gpt2 --checkpoint-dir here",
                &["--checkpoint-dir", "leave it out"],
            ),
        ],
    );
    assert!(!desk.path("here").exists());
}

#[test]
fn numbers_that_do_not_fit_together() {
    let desk = Desk::new();
    each(
        &desk,
        &[
            ("train --workers 0", &["--workers", "at least 1"]),
            ("train --workers 3 --shards 2", &["--shards", "2 shards", "at least 3 shards"]),
            ("train --shards 0", &["--shards"]),
            ("train --batch 60", &["--batch 60", "8 shards", "a multiple of 8"]),
            ("train --batch 0", &["--batch 0", "a multiple of 8"]),
            ("train --accumulate 0", &["--accumulate 0", "use 1 to"]),
            (
                "train --shards 8 --accumulate 5",
                &["--accumulate 5", "10 shards", "raise --shards or lower --accumulate"],
            ),
            ("train --shards 8 --accumulate 9999999", &["--accumulate", "lower"]),
            ("train --accumulate 18446744073709551615", &["--accumulate", "use 1 to"]),
            ("train --batch 8000000000000", &["--batch", "at most"]),
            ("train --hidden 99999999,99999999", &["99999999", "at most"]),
            ("train --threads 100000", &["--threads", "1 to 256"]),
            ("train --threads 0", &["--threads", "1 to 256"]),
            ("train --bucket 0", &["--bucket", "4MiB"]),
            ("train --bucket many", &["--bucket", "many"]),
            ("train --slow 2:2", &["--slow 2:2", "below 2"]),
            (
                "train --codec int8 --codec-rule embd*=none",
                &["embd*=none", "fits no parameter", "linear0.weight, linear0.bias"],
            ),
            (
                "train --codec int8 --codec-rule embd*=none --strategy async",
                &["embd*=none", "fits no parameter", "linear0.weight, linear0.bias"],
            ),
            ("train --slow 1:0.5", &["--slow", "a factor of 1 to 1000"]),
            ("train --slow 1:1e30", &["--slow", "a factor of 1 to 1000"]),
            ("train --slow fast", &["--slow", "such as 1:2"]),
            ("train --learning-rate NaN", &["learning rate"]),
            ("train --model replay:gpt2 --compute-ms NaN", &["--compute-ms", "0 to 3600000"]),
            ("train --model replay:gpt2 --compute-ms 1e30", &["--compute-ms", "0 to 3600000"]),
        ],
    );
}

#[test]
fn settings_that_contradict_each_other() {
    let desk = Desk::new();
    each(
        &desk,
        &[
            (
                "train --strategy local:8 --codec auto",
                &["--codec auto", "--strategy local:8", "name a codec", "leave it out"],
            ),
            (
                "train --optimizer momentum --codec dgc:1%,momentum=0.9",
                &["--codec dgc", "--optimizer momentum", "use --optimizer sgd"],
            ),
        ],
    );
}

#[test]
fn settings_of_other_strategies() {
    let desk = Desk::new();
    let of_servers = ["leave it out", "a strategy with servers, such as ssp:3"];
    for (flag, value, strategies) in [
        ("--servers", "2", &["all-reduce", "local:4", "hogwild", "gossip"][..]),
        ("--stale", "drop:3", &["all-reduce", "hogwild", "gossip"]),
        ("--journal", "here", &["all-reduce", "hogwild", "gossip"]),
        ("--codec", "int8", &["hogwild", "gossip"]),
        ("--restarts", "5", &["all-reduce", "hogwild"]),
    ] {
        for strategy in strategies {
            let train = format!("train --strategy {strategy} {flag} {value}");
            let words = [flag, strategy, of_servers[0], of_servers[1]];
            each(&desk, &[(&train, &words)]);
        }
    }
    each(
        &desk,
        &[
            (
                "train --strategy bsp --stale scale",
                &["--stale scale", "no gradient is stale", "leave it out"],
            ),
            (
                "train --strategy hogwild --optimizer adamw",
                &["hogwild", "use --optimizer sgd without weight decay", "adamw"],
            ),
            (
                "train --strategy hogwild --optimizer sgd --weight-decay 0.1",
                &["use --optimizer sgd without weight decay"],
            ),
            (
                "train --strategy ssp:3 --model replay:gpt2",
                &["--strategy ssp:3", "a replayed model", "use --strategy all-reduce"],
            ),
            (
                "train --strategy async --checkpoint-dir here",
                &["--checkpoint-dir", "--strategy async", "give --journal DIR"],
            ),
            ("train --strategy async --measure-scaling", &["--measure-scaling", "leave it out"]),
            ("train --strategy async --codec auto", &["--codec auto", "name a codec"]),
            (
                "train --strategy async --servers 127.0.0.1:9 --journal here",
                &["--journal", "give it to `unisono serve`"],
            ),
            ("train --strategy async --servers 127.0.0.1:9", &["UNISONO_TOKEN", "64 hexadecimal"]),
            ("train --strategy async --workers 9 --shards 8", &["--shards", "at least 9 shards"]),
        ],
    );
    assert!(!desk.path("here").exists());
}

#[test]
fn servers_that_cannot_start() {
    let desk = Desk::new();
    desk.write("file", "mine");
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("serve --listen {}", busy.local_addr().unwrap());
    each(
        &desk,
        &[
            ("serve", &["--listen HOST:PORT", "unisono run"]),
            ("serve --listen 127.0.0.1:0", &["UNISONO_TOKEN is not set", "64 hexadecimal digits"]),
            ("serve --listen 127.0.0.1", &["--listen 127.0.0.1", "give HOST:PORT"]),
            (
                "serve --listen nowhere.invalid:1",
                &["--listen nowhere.invalid:1", "of this machine"],
            ),
            (&taken, &["--listen", "a free port", "in use"]),
        ],
    );
    for (flags, words) in [
        ("--journal file", ["journal", "file"]),
        ("--run-dir file", ["--run-dir file", "another folder"]),
    ] {
        let mut command = desk.command(&format!("serve --listen 127.0.0.1:0 {flags}"));
        let ended = desk.start(command.env("UNISONO_TOKEN", "5a".repeat(32))).wait();
        let complaint = ended.complaint();
        assert!(words.iter().all(|word| complaint.contains(word)), "{flags}: {complaint}");
    }
    assert_eq!(desk.read("file"), "mine");
}

/// What is no value at all, the parser of the command line says in its own words, before anything
/// else is looked at.
#[test]
fn values_that_are_not_understood() {
    let desk = Desk::new();
    let mistakes: &[(&str, &[&str])] = &[
        ("--codec zip", &["'--codec <CODEC>'", "no codec zip", "choose fp16"]),
        ("--codec topk:0%", &["'--codec <CODEC>'", "0%", "such as 1%"]),
        ("--codec int8:5", &["'--codec <CODEC>'", "nearest or stochastic"]),
        ("--codec topk+zip", &["'--codec <CODEC>'", "zip", "after + come fp16"]),
        ("--codec powersgd:0", &["'--codec <CODEC>'", "powersgd"]),
        ("--codec-rule int8", &["'--codec-rule <PATTERN=CODEC>'", "write PATTERN=CODEC"]),
        ("--codec-rule *=zip", &["'--codec-rule <PATTERN=CODEC>'", "no codec zip"]),
        ("--codec-relative maybe", &["'--codec-relative <BOOL>'"]),
        ("--codec-warmup -1", &["-1"]),
        ("--strategy often", &["'--strategy <STRATEGY>'", "often", "write all-reduce"]),
        ("--strategy diloco:0", &["'--strategy <STRATEGY>'", "diloco:0", "from 1"]),
        ("--strategy local:5..2", &["'--strategy <STRATEGY>'", "MAX must not be below H"]),
        ("--strategy diloco:4,streams=9", &["'--strategy <STRATEGY>'", "streams"]),
        ("--strategy eventual", &["'--strategy <STRATEGY>'", "eventual", "ssp:S", "gossip"]),
        ("--strategy ssp", &["'--strategy <STRATEGY>'", "S is missing", "such as ssp:3"]),
        ("--strategy ssp:x", &["'--strategy <STRATEGY>'", "ssp:x", "from 0 to 1000000, or auto"]),
        ("--strategy bsp:2", &["'--strategy <STRATEGY>'", "bsp:2", "no settings"]),
        ("--strategy downpour:2", &["'--strategy <STRATEGY>'", "two numbers", "PUSH,FETCH"]),
        ("--servers 0", &["'--servers <SERVERS>'", "use 1 to 256"]),
        ("--servers nonsense", &["'--servers <SERVERS>'", "a number, inside, or HOST:PORT"]),
        ("--stale drop", &["'--stale <STALE>'", "T is missing", "such as drop:8"]),
        ("--stale forget", &["'--stale <STALE>'", "forget", "keep, scale, drop:T"]),
    ];
    for (arguments, words) in mistakes {
        let ended = desk.run(&format!("train {arguments}"));
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
        assert_eq!(ended.stdout, "", "{arguments}");
        let line = ended.stderr.lines().next().unwrap_or_default();
        assert!(line.starts_with("error: "), "{arguments}: {line}");
        for word in *words {
            assert!(line.contains(word), "no {word:?} in the answer to {arguments}: {line}");
        }
    }
    assert!(!desk.path("runs").exists(), "a run that was refused left a folder");
}

#[test]
fn models_to_replay_that_are_not_understood() {
    let desk = Desk::new();
    desk.write("model", "layer first 1 2\nfirst.weight 10x64\nlayer second 1\n");
    desk.write("nothing", "# only words\n");
    each(
        &desk,
        &[
            ("train --model replay:model", &["model:3", "layer NAME FORWARD_MS BACKWARD_MS"]),
            ("train --model replay:nothing", &["nothing"]),
            ("train --model replay:missing", &["missing", "resnet50, bert-large, gpt2"]),
        ],
    );
}

#[test]
fn folders_that_cannot_be_used() {
    let desk = Desk::new();
    desk.write("file", "mine");
    each(
        &desk,
        &[
            ("train --checkpoint-dir file", &["--checkpoint-dir", "file", "name another"]),
            ("train --checkpoint-dir file/below", &["--checkpoint-dir", "name another"]),
            ("train --run-dir file", &["--run-dir", "file", "choose another folder"]),
            ("train --run-dir file/below", &["--run-dir", "choose another folder"]),
            ("train --run-dir file/below --workers 1", &["--run-dir", "choose another folder"]),
            ("train --run-dir file/below --workers 8", &["--run-dir", "choose another folder"]),
            ("train --strategy async --run-dir file", &["--run-dir", "choose another folder"]),
            ("train --strategy hogwild --run-dir file", &["--run-dir", "choose another folder"]),
            ("train --strategy async --journal file", &["--journal file", "another folder"]),
            ("train --strategy async --journal file/below", &["--journal", "another folder"]),
        ],
    );
    assert_eq!(desk.read("file"), "mine");
    let bench = "bench server --workers 1 --size 4KiB --seconds 0 --journal used";
    assert!(desk.run(bench).status.success());
    each(&desk, &[(bench, &["--journal used", "not empty", "name a new one"])]);
}

#[test]
fn a_folder_that_holds_a_run() {
    let desk = Desk::new();
    desk.train("--steps 3 --run-dir run");
    let before = contents(&desk.path("run"));
    each(&desk, &[("train --steps 5 --run-dir run", &["--run-dir", "run", "another folder"])]);
    assert_eq!(contents(&desk.path("run")), before, "the earlier run was harmed");
}

#[test]
fn a_folder_that_holds_checkpoints_of_another_run() {
    let desk = Desk::new();
    desk.train("--steps 3 --run-dir first --checkpoint-dir saved");
    let before = contents(&desk.path("saved"));
    let again = "train --steps 5 --seed 2 --checkpoint-dir saved";
    each(&desk, &[(again, &["--checkpoint-dir", "saved", "--resume", "another folder"])]);
    assert_eq!(contents(&desk.path("saved")), before, "the earlier checkpoints were harmed");
}

#[test]
fn a_learning_rate_that_is_too_high() {
    let desk = Desk::new();
    let ended = desk.run(
        "train --optimizer sgd --learning-rate 1e6 --steps 200 --run-dir run --checkpoint-dir saved \
         --checkpoint-every 1000",
    );
    assert!(!ended.status.success());
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("no longer a number") && last.contains("--learning-rate"), "{last}");
    assert!(desk.path("run/report.html").exists(), "there is something to look at");
    assert_eq!(checkpoints(&desk.path("saved")), [] as [u64; 0], "nothing to go on from");
    assert_verdict_is_lost(&desk, last);
}

/// The report says the same as the complaint: since when, and what to change.
fn assert_verdict_is_lost(desk: &Desk, complaint: &str) {
    let (_, since) = complaint.split_once("no longer a number since step ").expect("since when");
    let step: u64 = since.split([';', ' ']).next().unwrap().parse().unwrap();
    let report = desk.run("report run --width 110");
    let report = report.expect_success();
    let (_, verdict) = report.rsplit_once("\nVerdict: ").expect("a report ends in a verdict");
    let words = format!("The run is lost: its loss is no longer a number since step {step}.");
    assert!(verdict.contains(&words), "{verdict}");
    assert!(report.contains("lower learning rate"), "{report}");
    assert!(desk.read("run/report.html").contains(&words));
}

/// Between two agreements a worker knows its own loss only, and the others do not wait for it.
#[test]
fn a_learning_rate_that_is_too_high_for_local_steps() {
    for period in [5, 120] {
        let desk = Desk::new();
        let settings = "--optimizer sgd --learning-rate 1e9 --steps 200 --run-dir run \
                        --checkpoint-dir saved --checkpoint-every 10";
        let ended = desk.run(&format!("train --strategy local:{period} {settings}"));
        assert!(!ended.status.success());
        assert_verdict_is_lost(&desk, ended.stderr.lines().last().unwrap_or_default());
        assert_eq!(checkpoints(&desk.path("saved")), [] as [u64; 0], "they would be lost, too");
    }
}

#[test]
fn a_learning_rate_that_is_too_high_for_workers_that_do_not_wait() {
    for strategy in ["bsp", "async", "async --servers inside", "downpour:2,2", "hogwild", "gossip"]
    {
        let desk = Desk::new();
        let settings = "--optimizer sgd --learning-rate 1e9 --steps 200 --run-dir run";
        let ended = desk.run(&format!("train --strategy {strategy} {settings}"));
        let complaint = ended.complaint();
        assert!(complaint.contains("no longer a number"), "{strategy}: {complaint}");
        assert!(complaint.contains("lower --learning-rate"), "{strategy}: {complaint}");
    }
}

#[test]
fn workers_that_were_told_different_things() {
    let desk = Desk::new();
    for (key, rank_0, others) in [
        ("seed", "--seed 1", "--seed 2"),
        ("checkpoint-dir", "--checkpoint-dir saved", ""),
        ("checkpoint-every", "--checkpoint-dir s --checkpoint-every 7", "--checkpoint-dir s"),
    ] {
        let script = format!(
            "[ $RANK = 0 ] && exec {PROGRAM} train --steps 20 {rank_0}; exec {PROGRAM} train --steps \
             20 {others}"
        );
        let mut command = desk.command("run -n 2 -- sh -c");
        let ended = desk.start(command.arg(script)).wait();
        assert!(!ended.status.success());
        let named = ended.stderr.contains("different settings") && ended.stderr.contains(key);
        assert!(named, "{key}: {}", ended.stderr);
    }
}

#[test]
fn a_place_where_no_folder_can_be_made_for_the_report() {
    let desk = Desk::new();
    desk.write("runs", "a file");
    let ended = desk.run("train --steps 3");
    assert!(ended.complaint().contains("--run-dir"), "{}", ended.stderr);
}

#[test]
fn reports_of_what_is_no_run() {
    let desk = Desk::new();
    desk.write("file", "");
    fs::create_dir(desk.path("empty")).unwrap();
    each(
        &desk,
        &[
            ("report missing", &["missing", "name a folder that a run wrote"]),
            ("report file", &["file", "name a folder that a run wrote"]),
            ("report empty", &["empty", "name a folder that a run wrote"]),
        ],
    );
}

#[test]
fn reports_of_runs_that_were_tampered_with() {
    let desk = Desk::new();
    desk.train("--steps 3 --run-dir run");
    let (steps, info) = (desk.read("run/steps.jsonl"), desk.read("run/run.toml"));
    desk.write("run/steps.jsonl", steps.replacen("\"loss\"", "\"gain\"", 1));
    each(&desk, &[("report run", &["steps.jsonl:1", "run again"])]);
    desk.write("run/steps.jsonl", steps);
    desk.write("run/run.toml", format!("what?\n{info}"));
    each(&desk, &[("report run", &["run.toml:1", "run again"])]);
}

#[test]
fn a_disk_that_is_full_costs_no_earlier_checkpoint() {
    let desk = Desk::new();
    fs::create_dir(desk.path("small")).unwrap();
    fs::create_dir(desk.path("saved")).unwrap();
    // Room for one checkpoint and a half. What is left is copied to where the test can see it.
    let script = r#"
        mount -t tmpfs -o size=1m none small
        code=0
        "$1" train --workers 3 --steps 50 --checkpoint-dir small --checkpoint-every 10 || code=$?
        cp -a small/. saved
        exit $code"#;
    let Some(mut command) = desk.with_own_mounts(script) else { return };
    let ended = desk.start(&mut command).wait();
    let complaint = ended.complaint();
    assert!(complaint.contains("step-000000020") && complaint.contains("free some space"));
    assert_eq!(checkpoints(&desk.path("saved")), [10], "the earlier one, and no piece of another");
    assert_eq!(contents(&desk.path("saved")).len(), 1, "no piece of another");
    let resumed = desk.train("--steps 50 --checkpoint-dir saved --resume");
    assert_eq!(resumed.count("steps"), 40);
    resumed.assert_same_weights(&desk.train("--steps 50"));
}

#[test]
fn folders_that_are_read_only() {
    let desk = Desk::new();
    fs::create_dir(desk.path("sealed")).unwrap();
    for flag in ["--checkpoint-dir", "--run-dir"] {
        let script = format!(
            r#"mount -t tmpfs -o ro none sealed; exec "$1" train --steps 3 {flag} sealed/x"#
        );
        let Some(mut command) = desk.with_own_mounts(&script) else { return };
        let ended = desk.start(&mut command).wait();
        let complaint = ended.complaint();
        assert!(complaint.contains(flag) && complaint.contains("folder"), "{complaint}");
    }
}
