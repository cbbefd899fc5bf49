//! Jobs under test: their output, and what is left of them.

use std::ffi::OsString;
use std::process::Child;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use unisono_cluster::launch::{Failure, Launch, Outcome};

/// How long anything here may take before it counts as hung.
pub const LONG: Duration = Duration::from_secs(60);

/// A variable whose value tells the processes of one test from all others.
pub const MARKER: &str = "UNISONO_TEST_MARKER";

pub fn marker() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A job with its captured output.
pub struct Job {
    pub launch: Launch,
    stdout: Arc<Mutex<Vec<u8>>>,
    stderr: Arc<Mutex<Vec<u8>>>,
    pub marker: String,
}

impl Job {
    pub fn new(ranks: u32, command: &[&str]) -> Job {
        let (stdout, stderr) = (Arc::default(), Arc::default());
        let mut launch = Launch::new(command.iter().map(OsString::from).collect(), ranks);
        launch.stdout = Arc::clone(&stdout) as _;
        launch.stderr = Arc::clone(&stderr) as _;
        launch.timeout = LONG;
        let marker = marker();
        launch.vars.push((MARKER.into(), marker.clone().into()));
        Job { launch, stdout, stderr, marker }
    }

    pub fn shell(ranks: u32, script: &str) -> Job {
        Job::new(ranks, &["sh", "-c", script])
    }

    /// Runs it; afterwards none of its processes may be left.
    pub fn run(&self) -> Outcome {
        let outcome = self.launch.run().expect("the job starts");
        assert_eq!(processes(&self.marker), Vec::<i32>::new(), "left behind");
        outcome
    }

    pub fn stdout(&self) -> String {
        String::from_utf8(self.stdout.lock().unwrap().clone()).unwrap()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8(self.stderr.lock().unwrap().clone()).unwrap()
    }
}

/// All running processes that carry this marker.
pub fn processes(marker: &str) -> Vec<i32> {
    let needle = format!("{MARKER}={marker}");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|var| var == needle.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn failure(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

pub fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}
