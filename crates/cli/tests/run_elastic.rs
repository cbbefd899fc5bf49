//! Programs of a user's own whose ranks are killed, stopped and let in again. Every fault is counted and must
//! have had its effect, and the weights are those of the undisturbed run.

mod common;
#[path = "../../unisono/examples/train_candle.rs"]
#[allow(dead_code)]
mod example;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, exit};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarMap};
use common::{Desk, Ended, Running, numbers};
use rustix::process::{Pid, Signal, kill_process};
use unisono::candle::{Checkpoint, ElasticReplica, Parameters};
use unisono::cluster::worker::Worker;
use unisono::prelude::*;
use unisono::sync::strategy::Compression;

/// What a rank does, in words.
const PROGRAM: &str = "UNISONO_TEST_PROGRAM";

/// Steps of a run that is over soon.
const STEPS: u64 = 12;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A rank in a process of its own.
#[test]
fn as_worker() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    if let Err(error) = run(&program) {
        eprintln!("{error}");
        exit(example::exit_code(&*error).into());
    }
}

fn run(program: &str) -> Result<()> {
    let rank = std::env::var("RANK")?;
    match program.split_whitespace().collect::<Vec<_>>()[..] {
        ["train", steps] => example::train(steps.parse()?),
        ["compressed", steps] => compressed(steps.parse()?, None),
        ["compressed", steps, file] => compressed(steps.parse()?, Some(file.into())),
        ["differs"] => differs(),
        ["joins"] => Ok(Job::join().map(drop)?),
        ["fails"] if rank == "1" => {
            // Longer than a call that never worked.
            std::thread::sleep(Duration::from_millis(1100));
            eprintln!("the data of rank 1 is damaged");
            exit(3)
        }
        ["sleeps"] if rank == "1" => {
            std::thread::sleep(common::LONG);
            Ok(())
        }
        ["stops"] if rank == "1" && Worker::from_env()?.starts == 1 => {
            // Before it has connected to anything.
            Ok(kill_process(rustix::process::getpid(), Signal::STOP)?)
        }
        ["fails" | "sleeps" | "stops"] => example::train(STEPS),
        _ => Err(format!("no such program: {program}").into()),
    }
}

/// Trains with a codec, which remembers something from step to step: when a rank is lost, all others lose the
/// state of the run. After every fourth step rank 0 saves to the file, if there is one. Says when the number of workers
/// changes, and when the run goes back.
fn compressed(steps: u64, file: Option<PathBuf>) -> Result<()> {
    let variables = VarMap::new();
    let parameters = Parameters::with_initializer(&variables, |_, shape, _| {
        (0..shape.elem_count()).map(|i| i as f32 * 0.001).collect()
    });
    let model = candle_nn::linear(40, 40, parameters.builder(DType::F32, &Device::Cpu))?;
    let compression = Some(Compression::new("int8".parse()?));
    let settings = Settings { compression, ..Settings::new(6) };
    let mut replica = ElasticReplica::join(&parameters, settings, "adamw".parse()?)?;
    if let Some(file) = file.clone() {
        replica.find_checkpoints_by(move || {
            let text = std::fs::read(&file).ok()?;
            let (steps, values): (u64, HashMap<String, Vec<f32>>) =
                serde_json::from_slice(&text).expect("it was written in one piece");
            eprintln!("going on after {steps} steps");
            Some(Checkpoint { steps, values })
        });
    }
    let mut before = (0, 0);
    while let Some(step) = replica.next_step(steps)? {
        let now = (step, replica.workers());
        if now.0 < before.0 {
            eprintln!("back to step {step}");
        }
        if now.1 != before.1 {
            eprintln!("step {step} with {} workers", now.1);
        }
        before = now;
        while let Some(shard) = replica.next_shard() {
            replica.backward(&loss(&model, step, shard)?)?;
        }
        let Some(stepped) = replica.step()? else { continue };
        if let Some(file) = file.as_ref().filter(|_| stepped.step.is_multiple_of(4)) {
            let mut values = HashMap::new();
            let is_whole = replica.save(|name, _, of_name| {
                values.insert(name, of_name.to_vec());
            })?;
            if is_whole && replica.rank() == 0 {
                let new = file.with_extension("new");
                std::fs::write(&new, serde_json::to_vec(&(stepped.step, values))?)?;
                std::fs::rename(new, file)?;
            }
        }
    }
    replica.finish(|replica| format!("weights {}\n", replica.weights_hash().to_hex()))?;
    Ok(())
}

fn loss(model: &impl Module, step: u64, shard: usize) -> Result<Tensor> {
    let inputs: Vec<f32> = (0..40).map(|i| ((i * shard as u64 + step) % 7) as f32).collect();
    let inputs = Tensor::from_vec(inputs, (1, 40), &Device::Cpu)?;
    Ok(model.forward(&inputs)?.sqr()?.mean_all()?)
}

/// Trains a model whose weights one rank changes by itself.
fn differs() -> Result<()> {
    let variables = VarMap::new();
    let parameters = Parameters::of(&variables);
    let model = candle_nn::linear(40, 40, parameters.builder(DType::F32, &Device::Cpu))?;
    let mut replica = ElasticReplica::join(&parameters, Settings::new(6), "sgd".parse()?)?;
    while let Some(step) = replica.next_step(STEPS)? {
        while let Some(shard) = replica.next_shard() {
            replica.backward(&loss(&model, step, shard)?)?;
        }
        if replica.rank() == 1 {
            let mut weights = replica.weights().clone();
            weights.change(0, &mut |weights| weights[0] += 1.0);
        }
        replica.step()?;
    }
    replica.finish(|replica| format!("weights {}\n", replica.weights_hash().to_hex()))?;
    Ok(())
}

/// `unisono run` with these arguments, of ranks that do this.
fn command(desk: &Desk, arguments: &str, program: &str) -> Command {
    let mut command = desk.command(&format!("run {arguments} --"));
    let this = std::env::current_exe().expect("a test has a path");
    command.arg(this).args(["as_worker", "--exact", "--nocapture", "-q", "--", "--as-worker"]);
    command.env(PROGRAM, program).env("UNISONO_TIMEOUT", "2");
    command
}

fn launch(desk: &Desk, arguments: &str, program: &str) -> Ended {
    desk.start(&mut command(desk, arguments, program)).wait()
}

fn with_crashes(desk: &Desk, arguments: &str, program: &str, plan: &str) -> Ended {
    let mut command = command(desk, arguments, program);
    desk.start(command.env("UNISONO_TEST_CRASH", plan)).wait()
}

/// The hash of the weights, which was printed once.
fn hash(ended: &Ended) -> &str {
    let hashes: Vec<&str> = ended
        .expect_success()
        .lines()
        .filter_map(|line| Some(line.split_once("weights ")?.1))
        .collect();
    assert!(hashes.len() == 1 && hashes[0].len() == 64, "{}\n{}", ended.stdout, ended.stderr);
    hashes[0]
}

/// How many ranks were lost and joined, as the launcher says.
fn lost_and_joined(ended: &Ended) -> (u64, u64) {
    let line = ended.stderr.lines().find(|line| line.contains("ranks lost"));
    let line = line.unwrap_or_else(|| panic!("no rank was lost: {}", ended.stderr));
    let numbers: Vec<u64> = line.split([' ', ':']).filter_map(|word| word.parse().ok()).collect();
    (numbers[0], numbers[1])
}

/// Every crash of a plan has happened.
fn assert_crashed(ended: &Ended, plan: &str) {
    for crash in plan.split(';') {
        let name = crash.split(',').next().expect("a plan has a name");
        let told = ended.stderr.matches(&format!("crash point {name} reached")).count();
        assert!(told > 0, "{plan}: it did not happen: {}", ended.stderr);
    }
}

#[test]
fn the_number_of_ranks_and_the_launcher_change_no_bit() {
    let desk = Desk::new();
    let alone = launch(&desk, "", &format!("train {STEPS}"));
    for arguments in
        ["-n 2", "-n 3", "--elastic 1 -n 1", "--elastic 2:2 -n 2", "--elastic 1:4 -n 3"]
    {
        let ended = launch(&desk, arguments, &format!("train {STEPS}"));
        assert_eq!(hash(&ended), hash(&alone), "{arguments}");
        assert_eq!(ended.stderr, "", "{arguments}");
        let workers = arguments.rsplit(' ').next().expect("a number");
        assert!(ended.stdout.contains(&format!("{workers} workers: ")), "{}", ended.stdout);
    }
}

#[test]
fn every_crash_point_is_survived() {
    let desk = Desk::new();
    let program = format!("train {STEPS}");
    let whole = launch(&desk, "", &program);
    let of_all = [
        ("ready", 1),
        ("begun", 1),
        ("forming", 1),
        ("formed", 1),
        ("regrouped", 1),
        ("step", 1),
        ("shard", 3),
        ("computed", 4),
        ("applied", 5),
        ("applied", STEPS),
        ("trained", 1),
        ("finished", 1),
    ];
    let of_rank_0 = [("summed-up", 1), ("handed-in", 1)];
    let mut crashes = 0;
    for rank in [0, 2] {
        let more = if rank == 0 { &of_rank_0[..] } else { &[] };
        for (name, number) in of_all.iter().chain(more) {
            let plan = format!("{name},{rank},{number},kill");
            let ended = with_crashes(&desk, "--elastic 1:4 -n 3", &program, &plan);
            assert_crashed(&ended, &plan);
            assert_eq!(hash(&ended), hash(&whole), "{plan}: {}", ended.stderr);
            crashes += 1;
        }
    }
    assert_eq!(crashes, 26);
}

#[test]
fn stopped_ranks_and_several_crashes_are_survived() {
    let desk = Desk::new();
    let program = format!("train {STEPS}");
    let whole = launch(&desk, "", &program);
    for plan in [
        "computed,1,4,stop",
        "trained,0,1,stop",
        "computed,1,3,kill;begun,2,2,kill",
        "computed,0,3,kill;formed,1,2,kill",
        "applied,1,3,kill;regrouped,0,2,kill",
        // None has any state any more.
        "applied,0,5,kill;applied,1,5,kill;applied,2,5,kill",
    ] {
        let ended = with_crashes(&desk, "--elastic 1:4 -n 3", &program, plan);
        let first = plan.split(';').next().expect("a plan has a crash");
        assert_crashed(&ended, first);
        assert_eq!(hash(&ended), hash(&whole), "{plan}: {}", ended.stderr);
        let crashes = plan.matches(',').count() as u64 / 3;
        assert!(lost_and_joined(&ended).0 >= crashes, "{plan}: {}", ended.stderr);
    }
}

/// The processes of the ranks, which their launcher has told that they are.
fn ranks(job: &Running) -> Vec<Pid> {
    let is_rank = |pid: &Pid| {
        let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
        let environment = std::fs::read(path).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry.starts_with(b"RANK="))
    };
    job.members().into_iter().map(|(pid, _)| pid).filter(is_rank).collect()
}

#[test]
fn random_kills_change_no_bit() {
    let desk = Desk::new();
    let program = "train 1000";
    let whole = launch(&desk, "", program);
    let mut dice = numbers();
    let mut roll = |sides: u32| dice.next().expect("they never end") % sides;
    let (mut kills, mut lost, mut joined) = (0, 0, 0);
    while kills < 24 {
        let job = desk.start(&mut command(&desk, "--elastic 1:4 -n 3", program));
        // Not for ever: ranks that end soon after their start are started again ever later, until all are lost.
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(50 + u64::from(roll(450))));
            let ranks = ranks(&job);
            if !ranks.is_empty() {
                let victim = ranks[roll(ranks.len() as u32) as usize];
                kills += u64::from(kill_process(victim, Signal::KILL).is_ok());
            }
        }
        let ended = job.wait();
        assert_eq!(hash(&ended), hash(&whole), "{}", ended.stderr);
        // A run may be over before the first of them.
        let is_disturbed = ended.stderr.contains("ranks lost");
        let (of_run, also) = if is_disturbed { lost_and_joined(&ended) } else { (0, 0) };
        (lost, joined) = (lost + of_run, joined + also);
    }
    println!("{kills} kills: {lost} members lost, {joined} joined");
    assert!(lost >= 8 && joined >= 8, "{kills} kills: {lost} members lost, {joined} joined");
}

/// Survivors have weights of some step, and yet the run begins with those of its beginning.
#[test]
fn without_state_the_run_begins_anew_or_goes_on_from_its_checkpoint() {
    let desk = Desk::new();
    let program = format!("compressed {STEPS}");
    let whole = launch(&desk, "-n 2", &program);
    let plan = "computed,1,7,kill";
    for file in ["", "kept"] {
        let ended = with_crashes(&desk, "--elastic 1 -n 3", &format!("{program} {file}"), plan);
        assert_crashed(&ended, plan);
        assert_eq!(hash(&ended), hash(&whole), "{}", ended.stderr);
        assert_eq!(lost_and_joined(&ended).0, 1, "{}", ended.stderr);
        let has_gone_on = ended.stderr.contains("going on after 4 steps");
        assert_eq!(has_gone_on, !file.is_empty(), "{}", ended.stderr);
    }
}

/// The loss takes the run back to its beginning, for what a codec remembers was lost with the rank. Letting it in does
/// not.
#[test]
fn a_rank_that_is_let_in_takes_no_compressed_run_back() {
    let desk = Desk::new();
    let program = "compressed 3000";
    let whole = launch(&desk, "-n 2", program);
    let plan = "computed,1,3,kill";
    // On a busy machine the rank may be back before the others have recovered: then it is not let in.
    let is_let_in = (0..5).any(|_| {
        let ended = with_crashes(&desk, "--elastic 1 -n 3", program, plan);
        assert_crashed(&ended, plan);
        assert_eq!(hash(&ended), hash(&whole), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches("back to step").count(), 2, "{}", ended.stderr);
        let entered = ended.stderr.lines().filter(|line| line.ends_with("with 3 workers"));
        let steps = entered.filter_map(|line| line.split("step ").nth(1)?.split(' ').next());
        steps.filter(|step| step.parse::<u64>().is_ok_and(|step| step > 0)).count() == 3
    });
    assert!(is_let_in, "the rank was never let in");
}

/// Another attempt would end like this one.
/// Two ranks would be too few, so that the job has to do something about the third.
#[test]
fn a_rank_that_is_stopped_before_it_has_connected_is_ended_and_started_again() {
    let desk = Desk::new();
    let whole = launch(&desk, "", &format!("train {STEPS}"));
    let ended = launch(&desk, "--elastic 3 -n 3", "stops");
    assert_eq!(hash(&ended), hash(&whole));
    assert!(ended.stderr.contains("rank 1 is stopped; ending it"), "{}", ended.stderr);
    assert!(ended.stderr.contains("restart 1 of"), "{}", ended.stderr);
}

#[test]
fn ranks_whose_weights_differ_are_not_started_again() {
    let desk = Desk::new();
    let ended = launch(&desk, "--elastic 1 -n 3", "differs");
    assert_eq!(ended.status.code(), Some(64), "{}", ended.stderr);
    assert!(ended.stderr.contains("the weights of rank 1 differ"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("starting it again"), "{}", ended.stderr);
}

#[test]
fn more_ranks_than_the_most_wait_and_take_over() {
    let desk = Desk::new();
    let program = format!("train {STEPS}");
    let whole = launch(&desk, "", &program);
    let ended = launch(&desk, "--elastic 1:2 -n 3", &program);
    assert_eq!(hash(&ended), hash(&whole));
    assert!(ended.stdout.contains("2 workers: "), "{}", ended.stdout);
    // Whichever two begin, one of these is among them, and both will have been.
    let plan = "computed,0,5,kill;computed,1,5,kill";
    let ended = with_crashes(&desk, "--elastic 1:2 -n 3 --restarts 0", &program, plan);
    assert_eq!(ended.stderr.matches("crash point computed reached").count(), 2);
    assert_eq!(hash(&ended), hash(&whole));
    assert_eq!(lost_and_joined(&ended), (2, 1), "{}", ended.stderr);
}

#[test]
fn with_too_few_ranks_the_job_ends_and_says_why() {
    let desk = Desk::new();
    let program = format!("train {STEPS}");
    let arguments = "--elastic 2 -n 2 --restarts 0";
    let ended = with_crashes(&desk, arguments, &program, "computed,1,4,kill");
    assert_eq!(ended.status.code(), Some(128 + 9), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 1 was killed by signal 9"), "{}", ended.stderr);
    assert!(!ended.stdout.contains("weights"), "{}", ended.stdout);

    let ended = launch(&desk, "--elastic 2 -n 2 --timeout 1 --grace 1", "sleeps");
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let words = "waited too long for workers: 1 ready, at least 2 needed";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
}

#[test]
fn a_rank_that_fails_every_time_is_given_up_with_its_last_words() {
    let desk = Desk::new();
    let ended = launch(&desk, "--elastic 2 -n 2 --restarts 3", "fails");
    assert_eq!(ended.status.code(), Some(3), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("starting it again").count(), 3, "{}", ended.stderr);
    assert!(ended.stderr.contains("| the data of rank 1 is damaged"), "{}", ended.stderr);
    // The other can do without it, and waits for so long before it begins.
    let ended = launch(&desk, "--elastic 1 -n 2 --restarts 3 --timeout 2", "fails");
    let whole = launch(&desk, "", &format!("train {STEPS}"));
    assert_eq!(hash(&ended), hash(&whole));
}

#[test]
fn a_program_that_does_not_know_elastic_jobs_is_told_what_to_do() {
    let desk = Desk::new();
    let ended = launch(&desk, "--elastic 1 -n 2", "joins");
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    for words in ["start it without --elastic", "ElasticReplica", "Job::join"] {
        assert!(ended.stderr.contains(words), "no {words}: {}", ended.stderr);
    }
    launch(&desk, "-n 2", "joins").expect_success();
}

/// A job of a run that would take long, which has made some steps.
fn long_job(desk: &Desk) -> Running {
    let mut job = desk.start(&mut command(desk, "--elastic 1:4 -n 3", "train 1000000"));
    let stdout = desk.path(".0-stdout");
    job.wait_until("some steps", || {
        std::fs::read_to_string(&stdout).is_ok_and(|text| text.contains("step 100: "))
    });
    job
}

#[test]
fn a_launcher_that_is_told_to_stop_leaves_nothing_behind() {
    let desk = Desk::new();
    let job = long_job(&desk);
    job.signal(Signal::TERM);
    // Waits until nothing is left.
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(128 + 15), "{}", ended.stderr);
    assert!(!ended.stdout.contains("weights"), "{}", ended.stdout);
    assert!(!ended.stderr.contains("starting it again"), "{}", ended.stderr);
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing_behind() {
    let desk = Desk::new();
    let job = long_job(&desk);
    job.signal(Signal::KILL);
    assert!(job.wait().was_killed_by(Signal::KILL));
}

#[test]
fn what_makes_no_sense_with_it_is_refused() {
    let desk = Desk::new();
    for (arguments, words) in [
        ("--elastic 0 -n 2", "MIN or MIN:MAX"),
        ("--elastic x -n 2", "MIN or MIN:MAX"),
        ("--elastic 1:2:3 -n 2", "MIN or MIN:MAX"),
        ("--elastic : -n 2", "MIN or MIN:MAX"),
        ("--elastic 3 -n 2", "use a MIN of 1 to 2"),
        ("--elastic 2:1 -n 2", "use a MAX of at least 2"),
        ("--elastic 1 --nnodes 2 --rendezvous localhost:29400", "use --etcd and --job"),
        ("--elastic 1 --etcd ftp://localhost --job a", "unknown scheme"),
        ("--elastic 1 --etcd localhost:1 --job a/b", "use a name of letters"),
        ("--elastic 1 --servers 1", "--servers"),
    ] {
        let ended = desk.run(&format!("run {arguments} -- true"));
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
        assert!(ended.complaint().contains(words), "{arguments}: {}", ended.stderr);
    }
    let ended = desk.run("run --dry-run --elastic 1:2 -n 3 -- true");
    let told = ended.expect_success();
    assert!(told.contains("elastic       1 to 2 ranks train") && told.contains("100 in all"));
}
