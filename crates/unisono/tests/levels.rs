//! A program of a user's own at every consistency level: the same lines, and a report that is right.

#[path = "../examples/levels.rs"]
#[allow(dead_code)]
mod example;

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex};

use unisono::cluster::launch::{Launch, Outcome};
use unisono::insight::folder::RunFolder;
use unisono::insight::relaxed::RelaxedFolder;
use unisono::worker::Consistency;

const LEVEL: &str = "UNISONO_TEST_LEVEL";
const FOLDER: &str = "UNISONO_TEST_FOLDER";
const WORKERS: u64 = 2;

/// A worker in a process of its own.
#[test]
fn as_worker() {
    if let (Ok(level), Some(folder)) = (std::env::var(LEVEL), std::env::var_os(FOLDER)) {
        example::run(&level, Some(folder.into())).expect("the worker trains");
    }
}

/// Trains with two workers; what each said of itself: its steps, its loss and the hash of its weights.
fn train(level: &str, folder: &Path) -> Vec<(u64, f32, String)> {
    let hogwild = level == "hogwild";
    let program = std::env::current_exe().unwrap().into_os_string();
    let mut command = vec![program];
    command.extend(["as_worker", "--exact", "--nocapture"].map(OsString::from));
    let mut launch = Launch::new(command, if hogwild { 1 } else { WORKERS as u32 });
    let stdout: Arc<Mutex<Vec<u8>>> = Arc::default();
    launch.stdout = Arc::clone(&stdout) as _;
    launch.vars.push((LEVEL.into(), level.into()));
    launch.vars.push((FOLDER.into(), folder.into()));
    assert_eq!(launch.run().expect("the job starts"), Outcome::Success, "{level}");
    let stdout = String::from_utf8(stdout.lock().unwrap().clone()).unwrap();
    let said = |line: &str| {
        // worker 0 of 2: 150 steps, loss 0.000001, HASH
        let (_, rest) = line.split_once("of 2: ")?;
        let words: Vec<&str> = rest.split([' ', ',']).collect();
        let hash = words.last()?.to_string();
        Some((words[0].parse().ok()?, words[4].parse().ok()?, hash))
    };
    let mut workers: Vec<_> = stdout.lines().filter_map(said).collect();
    workers.sort_by_key(|(steps, ..)| *steps);
    assert_eq!(workers.len() as u64, WORKERS, "{level}: {stdout}");
    workers
}

/// Trains at a level, and checks what all levels have in common.
fn check(level: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("run");
    let workers = train(level, &folder);
    let (_, _, hash) = &workers[0];
    assert!(workers.iter().all(|(.., theirs)| theirs == hash), "{level}: {workers:?}");
    assert!(folder.join("report.html").exists(), "{level}");
    let consistency: Consistency = level.parse().unwrap();
    let (name, loss, saved) = match consistency.level() {
        None => {
            let run = RunFolder::open(&folder).unwrap();
            let summary = run.summary.expect("it has finished");
            assert_eq!((summary.steps, run.steps.len() as u64), (example::STEPS, example::STEPS));
            assert_eq!(run.info.workers as u64, WORKERS);
            assert_eq!(run.steps[0].samples, 32);
            (run.info.model, summary.final_loss, summary.weights_hash)
        }
        Some(level) => {
            let saved = RelaxedFolder::open(&folder).unwrap();
            let summary = saved.summary.expect("it has finished");
            assert!(summary.is_balanced(), "{level}: {}", summary.ledger);
            assert_eq!(summary.strategy, level.to_string());
            // Gradients under way when the last one comes still count.
            let all = match level.is_lockstep() {
                true => WORKERS * example::STEPS,
                false => match level.to_string().as_str() {
                    "gossip" => WORKERS * example::STEPS,
                    _ => level.updates(example::STEPS, WORKERS as u32),
                },
            };
            assert!((all..=all + WORKERS).contains(&summary.pushes), "{level}: {}", summary.pushes);
            assert_eq!(summary.exchanges.is_some(), level.to_string() == "gossip");
            (saved.run.info.model, summary.final_loss, summary.weights_hash)
        }
    };
    assert_eq!(name, "linear regression");
    assert_eq!(&saved, hash, "{level}: the report has the final weights");
    // Of weights of zero it is 4.4. A report's final loss is the mean over the last 32 pushes: half a
    // run of downpour, more of its beginning the later a worker has a core.
    assert!(loss < 0.44, "{level}: it learns: {loss}");
}

macro_rules! levels {
    ($($name:ident: $level:literal,)*) => {
        $(#[test] fn $name() { check($level); })*
    };
}

levels! {
    all_reduce: "all-reduce",
    local_steps: "local:4",
    diloco: "diloco:8",
    bsp: "bsp",
    ssp: "ssp:3",
    ssp_auto: "ssp:auto",
    async_: "async",
    downpour: "downpour",
    hogwild: "hogwild",
    gossip: "gossip",
}

#[test]
fn lock_step_has_the_bits_of_all_reduce() {
    let scratch = tempfile::tempdir().unwrap();
    let hash = |level: &str| train(level, &scratch.path().join(level)).remove(0).2;
    assert_eq!(hash("bsp"), hash("all-reduce"));
}
