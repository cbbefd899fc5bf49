//! What holds for every command: exit codes, pipes, variables, files of flags, words.

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Desk, checkpoints, lines, wait_until};
use rustix::process::Signal;

/// Runs a command whose reader goes away after so many lines; its exit code and stderr.
fn read_only(desk: &Desk, arguments: &str, wanted: usize) -> (Option<i32>, String) {
    let errors = desk.path(".errors");
    let mut command = desk.command(arguments);
    let (output, input) = std::io::pipe().unwrap();
    command.stdin(Stdio::null()).stdout(input).stderr(File::create(&errors).unwrap());
    // A reader that wants nothing is gone before the command can have written it all.
    let mut output = (wanted > 0).then(|| BufReader::new(output));
    let mut child = command.spawn().unwrap();
    drop(command);
    for _ in 0..wanted {
        let (output, mut line) = (output.as_mut().expect("kept above"), Vec::new());
        assert!(output.read_until(b'\n', &mut line).unwrap() > 0, "{arguments}: no line");
    }
    drop(output);
    let mut status = None;
    wait_until(&format!("the end of {arguments}"), || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    (status.unwrap().code(), fs::read_to_string(errors).unwrap())
}

#[test]
fn a_reader_that_goes_away_ends_every_command_quietly() {
    let desk = Desk::new();
    desk.train("--steps 3 --run-dir run");
    desk.write("talk", "trap 'exit 0' TERM\nwhile true; do echo $RANK; sleep 0.01; done\n");
    for (arguments, wanted) in [
        ("bench collective --ranks 2 --sizes 1KiB..1MiB", 0),
        ("bench codec --size 1MiB --codecs int8,sign --seconds 0.01", 0),
        ("bench codec --size 1MiB --codecs int8,sign --seconds 0.01 --json", 0),
        ("bench hogwild --size 64KiB --seconds 0.01 --threads 1,2", 0),
        ("bench server --size 64KiB --seconds 0.01 --workers 1", 0),
        ("report run", 0),
        ("completions zsh", 0),
        ("run -n 2 -- yes", 3),
        // A rank that is not killed, but told to end.
        ("run -n 2 -- sh talk", 3),
        ("train --steps 3 --run-dir all-reduce", 0),
        ("train --steps 3 --run-dir ssp --strategy ssp:1", 0),
        ("train --steps 3 --run-dir hogwild --strategy hogwild --json", 0),
    ] {
        let (code, said) = read_only(&desk, arguments, wanted);
        assert_eq!(code, Some(141), "{arguments}: {said}");
        let told = said.lines().filter(|line| !line.starts_with("step ") && !line.is_empty());
        let told: Vec<&str> = told.filter(|line| !line.contains("Terminated")).collect();
        assert_eq!(told, Vec::<&str>::new(), "{arguments}");
    }
    // The runs themselves were done.
    for run in ["all-reduce", "ssp", "hogwild"] {
        assert!(desk.path(run).join("report.html").exists(), "{run}");
    }
    assert!(!desk.path("ssp/journal").exists(), "a journal that is not needed any more was kept");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let desk = Desk::new();
    let mut command = desk.command("train --steps 3");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = command.stdout(full).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("unisono: the output could not be written: No space left"), "{said}");
    assert!(!said.contains("left the group"), "{said}");
}

#[test]
fn a_second_run_in_a_folder_of_checkpoints_is_told_of_the_first() {
    let desk = Desk::new();
    let mut first = desk.start(&mut desk.command(
        "train --steps 100000000 --checkpoint-dir saved --checkpoint-every 50 --run-dir first",
    ));
    first.wait_until("there are checkpoints", || !checkpoints(&desk.path("saved")).is_empty());
    let holder = first.worker(0).as_raw_nonzero();
    let ended = desk.run("train --steps 5 --checkpoint-dir saved --resume --run-dir second");
    assert_eq!(ended.status.code(), Some(1), "a matter of circumstances: {}", ended.stderr);
    let complaint = ended.complaint();
    for word in ["--checkpoint-dir", "saved", &format!("process {holder} on "), "another folder"] {
        assert!(complaint.contains(word), "no {word} in {complaint}");
    }
    assert!(!desk.path("second").exists());
    first.signal(Signal::KILL);
    assert!(first.wait().was_killed_by(Signal::KILL));
    // What it left behind does not stop the next run.
    let again = "train --steps 100000000 --checkpoint-dir saved --resume --dry-run";
    desk.run(again).expect_success();
}

#[test]
fn a_wrong_call_exits_with_2_and_a_run_that_fails_with_1() {
    let desk = Desk::new();
    desk.write("file", "mine");
    for arguments in [
        "",
        "swim",
        "train --steps many",
        "train --workers 0",
        "train --batch 7",
        "train --data text:missing --model transformer",
        "train --checkpoint-dir file",
        "train --run-dir file",
        "train --strategy ssp:1 --model replay:gpt2",
        "train --strategy hogwild --optimizer adamw",
        "train --strategy async --run-dir file",
        "train --config missing",
        "run -n 0 -- true",
        "run --nnodes 2 --node-rank 5 --rendezvous here:1 -- true",
        "run --rendezvous nonsense -- true",
        "serve",
        "report missing",
        "bench collective --sizes many",
        "bench collective --sizes 3",
        "bench codec --size 3",
        "bench codec --codecs zip",
        "bench hogwild --touched 0",
        "bench server --workers 0",
        "bench step --steps 0",
    ] {
        let ended = desk.run(arguments);
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
    }
    for (variable, value) in [("UNISONO_TIMEOUT", "soon"), ("UNISONO_CANONICAL", "false")] {
        let ended = desk.start(desk.command("train --steps 1").env(variable, value)).wait();
        assert_eq!(ended.status.code(), Some(2), "{variable}: {}", ended.stderr);
    }
    let diverges = desk.run("train --steps 50 --learning-rate 1e30 --optimizer sgd");
    assert_eq!(diverges.status.code(), Some(1), "{}", diverges.stderr);
    assert_eq!(desk.run("run -- sh -c false").status.code(), Some(1));
    assert_eq!(desk.run("run -- missing-program").status.code(), Some(127));
}

#[test]
fn numbers_below_zero_are_values() {
    let desk = Desk::new();
    for (arguments, words) in [
        ("train --learning-rate -1", "learning rate"),
        ("train --weight-decay -0.5", "weight decay"),
        ("train --seed -1", "'-1' for '--seed <SEED>'"),
        ("train --steps -5", "'-5' for '--steps <STEPS>'"),
        ("run --restarts -1 -- true", "'-1' for '--restarts <R>'"),
        ("bench codec --seconds -1", "--seconds -1"),
    ] {
        let ended = desk.run(arguments);
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
        assert!(ended.stderr.contains(words), "{arguments}: {}", ended.stderr);
    }
}

#[test]
fn misspelt_variables_are_noticed() {
    let desk = Desk::new();
    // A level that is misspelt as well silences nothing.
    for level in ["warn", "inof"] {
        let mut command = desk.command("run -n 2 -- true");
        let command = command.env("UNISONO_TRANSPRT", "tcp").env("UNISONO_LOG", level);
        let ended = desk.start(command).wait();
        ended.expect_success();
        let named = |name: &str| {
            let said: Vec<_> = ended.stderr.lines().filter(|line| line.contains(name)).collect();
            said.join("\n")
        };
        let said = named("TRANSPRT");
        assert_eq!(said.lines().count(), 1, "{}", ended.stderr);
        assert!(said.contains("UNISONO_TRANSPRT means nothing; did you mean UNISONO_TRANSPORT?"));
        let complaint = named("UNISONO_LOG=inof: \"inof\" is no level");
        assert_eq!(complaint.is_empty(), level == "warn", "{}", ended.stderr);
    }
}

/// The list that misspelt ones are compared with has all that the code knows.
#[test]
fn every_variable_is_in_the_list() {
    let mut found = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders = vec![crates.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && !["tests", "target", "examples", ".venv"].contains(&name.as_str()) {
                folders.push(path);
            } else if [".rs", ".py"].iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(&path).unwrap_or_default();
                for (at, _) in text.match_indices("\"UNISONO_") {
                    let word = text[at + 1..].split('"').next().unwrap();
                    if word.bytes().all(|b| b.is_ascii_uppercase() || b == b'_') {
                        found.push(word.to_owned());
                    }
                }
            }
        }
    }
    let known = unisono::cluster::variables::KNOWN;
    let unlisted: Vec<_> = found
        .iter()
        .filter(|name| !known.contains(&name.as_str()) && !name.ends_with('_'))
        // Examples of mistakes, and what tests make up.
        .filter(|name| !name.starts_with("UNISONO_TEST_") && !name.starts_with("UNISONO_NETLAB_"))
        .filter(|name| !["UNISONO_TRANSPRT", "UNISONO_TIME_OUT"].contains(&name.as_str()))
        .filter(|name| *name != "UNISONO_COLOR_OF_THE_SKY")
        .collect();
    assert!(found.len() > 10, "not looked where they are");
    assert_eq!(unlisted, Vec::<&String>::new(), "add them to cluster/src/variables.rs");
}

#[test]
fn a_full_disk_under_the_report_does_not_end_the_run() {
    let desk = Desk::new();
    fs::create_dir(desk.path("small")).unwrap();
    let script = r#"
        mount -t tmpfs -o size=64k none small
        exec "$1" train --json --steps 400 --checkpoint-dir saved --run-dir small/run"#;
    let Some(mut command) = desk.with_own_mounts(script) else { return };
    let ended = desk.start(&mut command).wait();
    let summary = ended.summary();
    assert_eq!((summary.count("step"), summary.count("steps")), (400, 400));
    assert!(summary.object["report"].is_null(), "{}", summary.object);
    let warnings: Vec<&str> =
        ended.stderr.lines().filter(|line| line.contains("unisono: warning: ")).collect();
    assert!(warnings.len() == 2 && warnings[0].contains("the run goes on"), "{}", ended.stderr);
    assert!(warnings.iter().all(|line| line.contains("No space left")), "{warnings:?}");
    assert_eq!(checkpoints(&desk.path("saved")).last(), Some(&400));
    let other = Desk::new();
    summary.assert_same_weights(&other.train("--steps 400"));
}

#[test]
fn a_quiet_run_says_what_it_came_to() {
    let desk = Desk::new();
    let ended = desk.run("train --quiet --steps 30 --run-dir run --codec auto");
    let lines: Vec<&str> = ended.expect_success().lines().collect();
    assert_eq!(ended.stderr, "");
    assert!(lines.len() == 2 && lines[0].starts_with("loss "), "{lines:?}");
    assert!(lines[1].starts_with("report: "), "{lines:?}");
    let ended = desk.run("train -q --steps 5 --strategy ssp:1 --run-dir relaxed");
    assert_eq!((ended.expect_success().lines().count(), ended.stderr.as_str()), (2, ""));
    assert_eq!(desk.run("train --quiet --batch 7").complaint().matches("--batch 7").count(), 1);

    desk.write("fails", "[ $UNISONO_LIFE = 1 ] || kill -9 $$; echo fine");
    let ended = desk.run("run --quiet --restarts 1 -- sh fails");
    assert_eq!((ended.expect_success(), ended.stderr.as_str()), ("fine\n", ""));
}

#[test]
fn a_dry_run_checks_and_tells_and_does_nothing() {
    let desk = Desk::new();
    let ended = desk.run("train --dry-run --workers 4 --hidden 32 --checkpoint-dir saved");
    let told = ended.expect_success();
    for words in [
        "model         mlp",
        "parameters    2410, ",
        "workers       4, this machine, with 1 thread each",
        "batch         64 samples in 8 shards",
        "strategy      all-reduce",
        "codec         none",
        "checkpoints   saved, every 100 steps",
        "report        a new folder in runs",
    ] {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    assert!(!desk.path("runs").exists() && checkpoints(&desk.path("saved")).is_empty());
    let ended = desk.run("train --dry-run --strategy ssp:3 --servers 2 --journal journal");
    let told = ended.expect_success();
    assert!(told.contains("servers       2, started") && told.contains("journal       journal"));
    assert!(!desk.path("runs").exists() && !desk.path("journal").exists());
    for arguments in [
        "train --dry-run --batch 7",
        "train --dry-run --data fashion-mnist:missing",
        "run --dry-run -n 0 x",
    ] {
        let ended = desk.run(arguments);
        assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(2), ""), "{arguments}");
    }

    desk.write("program", "#!/bin/sh\ntouch started\n");
    fs::set_permissions(desk.path("program"), fs::Permissions::from_mode(0o755)).unwrap();
    let ended = desk.run("run --dry-run -n 3 --servers 2 --restarts 5 -- ./program a $b");
    let told = ended.expect_success();
    for words in
        ["ranks         3, on this machine", "./program a '$b'", "servers       2, ", "5 in all"]
    {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    assert!(!desk.path("started").exists());
    let missing = desk.run("run --dry-run -- ./missing");
    assert_eq!(missing.status.code(), Some(2));
    assert!(missing.complaint().contains("no such program"));
}

#[test]
fn flags_can_come_from_a_file() {
    let desk = Desk::new();
    desk.write(
        "run.toml",
        "steps = 7\nseed = 3\nhidden = [16, 8]\njson = true\nlearning-rate = 1e-3\n",
    );
    let of_file = desk.run("train --config run.toml").summary();
    let typed = desk.train("--steps 7 --seed 3 --hidden 16,8 --learning-rate 1e-3");
    of_file.assert_same_weights(&typed);
    // What is typed wins; workers are told what their leader was.
    let both = desk.run("train --steps 5 --config run.toml --strategy bsp").summary();
    assert_eq!(both.count("updates"), 5);
    for (file, words) in [
        ("stepps = 5", "there is no flag --stepps; did you mean steps?"),
        ("steps = [1", "line 1"),
        ("as-worker = true", "there is no flag --as-worker"),
    ] {
        desk.write("wrong.toml", file);
        let ended = desk.run("train --config wrong.toml");
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        let complaint = ended.complaint();
        assert!(
            complaint.contains("--config wrong.toml") && complaint.contains(words),
            "{complaint}"
        );
    }
    desk.write("wrong.toml", "steps = 'many'");
    let ended = desk.run("train --config wrong.toml");
    assert!(ended.stderr.contains("'many' for '--steps <STEPS>'"), "{}", ended.stderr);
    assert!(ended.stderr.contains("What wrong.toml sets counts as if"), "{}", ended.stderr);
}

#[test]
fn shells_can_complete_commands() {
    let desk = Desk::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = desk.run(&format!("completions {shell}"));
        let script = script.expect_success();
        assert!(script.contains("learning-rate") && script.contains("collective"), "{shell}");
    }
    desk.write("check", desk.run("completions bash").expect_success());
    let status = Command::new("bash").arg("-n").arg(desk.path("check")).status().unwrap();
    assert!(status.success(), "bash does not understand its script");
}

#[test]
fn help_says_what_the_program_is_for_and_is_not_wrapped_for_a_pipe() {
    let desk = Desk::new();
    let help = desk.run("--help");
    let help = help.expect_success();
    assert!(help.starts_with("Trains models on many workers"), "{help}");
    assert!(help.contains("unisono train ") && help.contains("Exit codes: 0, "), "{help}");
    let help = desk.run("train --help");
    let long = "The weights depend on the model, the data, --seed, --batch, --shards, --steps, --threads, \
                the optimizer, the strategy and the codec, and on nothing else";
    assert!(help.expect_success().contains(long), "{}", help.stdout);
}

#[test]
fn what_is_wrong_with_the_folder_of_a_run_is_said() {
    let desk = Desk::new();
    desk.train("--steps 20 --run-dir run");
    let bytes = [0x80u8, 0, 0xff, 0x0a, 0xfe];
    let records = desk.path("run/steps.jsonl");
    let whole = fs::read(&records).unwrap();
    let refused = |words: &[&str]| {
        let ended = desk.run("report run");
        let complaint = ended.complaint();
        assert!(words.iter().all(|word| complaint.contains(word)), "{words:?}: {complaint}");
        ended.status.code()
    };
    fs::write(&records, bytes).unwrap();
    assert_eq!(refused(&["run/steps.jsonl:1", "not text", "restore the file"]), Some(1));
    fs::remove_file(&records).unwrap();
    assert_eq!(refused(&["run/steps.jsonl is missing", "records of its steps"]), Some(1));

    let half = whole.iter().take(whole.len() / 2).copied().collect::<Vec<u8>>();
    fs::write(&records, half).unwrap();
    let ended = desk.run("report run");
    ended.expect_success();
    let left = lines(&records);
    let warning = format!("run has records of {left} of the 20 steps");
    assert!(ended.stderr.contains(&warning), "{}", ended.stderr);

    fs::write(&records, whole).unwrap();
    fs::write(desk.path("run/run.toml"), bytes).unwrap();
    assert_eq!(refused(&["run/run.toml:1", "not text"]), Some(1));
    fs::remove_file(desk.path("run/run.toml")).unwrap();
    assert_eq!(refused(&["run is not the folder of a run", "has no run.toml"]), Some(2));
    let ended = desk.run("report nowhere");
    assert!(ended.complaint().contains("nowhere is not the folder of a run: it does not exist"));
}

/// A worker that still waits for the others has nothing to finish.
#[test]
fn a_worker_that_waits_for_the_others_ends_when_told_to() {
    let desk = Desk::new();
    let mut command = desk.command("train --steps 5");
    // As of `torchrun`. The other never comes, and is waited for longer than for anything here.
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("LOCAL_RANK", "0");
    command.env("LOCAL_WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", (20_000 + std::process::id() % 10_000).to_string());
    command.env("UNISONO_TIMEOUT", "3600");
    let mut job = desk.start(&mut command);
    let worker = job.worker(0);
    job.wait_until("it listens", || listens(worker.as_raw_nonzero().get()));
    job.signal(Signal::TERM);
    assert!(job.wait().was_killed_by(Signal::TERM));
}

/// Whether a process has a socket that listens.
fn listens(pid: i32) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let sockets: Vec<String> = files
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok()?.into_os_string().into_string().ok())
        .filter_map(|name| Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    ["tcp", "tcp6"].iter().any(|table| {
        let table = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        table.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State and inode.
            fields.get(3) == Some(&"0A")
                && fields.get(9).is_some_and(|inode| sockets.iter().any(|own| own == inode))
        })
    })
}

/// Whatever starts the ranks encrypts as they do.
#[test]
fn every_command_that_starts_ranks_can_encrypt() {
    let desk = Desk::new();
    for arguments in [
        "bench collective --ranks 2 --sizes 1KiB --seconds 0.01 --transport tcp",
        "train --steps 3 --transport tcp",
        "train --steps 3 --transport tcp --strategy ssp:1 --servers 1",
        "train --steps 3 --strategy gossip",
        "run -n 2 -- true",
    ] {
        let mut command = desk.command(arguments);
        desk.start(command.env("UNISONO_ENCRYPT", "true")).wait().expect_success();
    }
}
