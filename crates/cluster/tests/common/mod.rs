//! Jobs under test: their output, and what is left of them.

// Every test binary uses its part.
#![allow(dead_code)]

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
pub struct TestJob {
    pub launch: Launch,
    stdout: Arc<Mutex<Vec<u8>>>,
    stderr: Arc<Mutex<Vec<u8>>>,
    pub marker: String,
}

impl TestJob {
    pub fn new(ranks: u32, command: &[&str]) -> TestJob {
        let (stdout, stderr) = (Arc::default(), Arc::default());
        let mut launch = Launch::new(command.iter().map(OsString::from).collect(), ranks);
        launch.stdout = Arc::clone(&stdout) as _;
        launch.stderr = Arc::clone(&stderr) as _;
        launch.timeout = LONG;
        let marker = marker();
        launch.vars.push((MARKER.into(), marker.clone().into()));
        TestJob { launch, stdout, stderr, marker }
    }

    pub fn shell(ranks: u32, script: &str) -> TestJob {
        TestJob::new(ranks, &["sh", "-c", script])
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

/// Waits for the guard of the launcher whose ranks carry this marker: one that is not `other`.
pub fn wait_for_guard(marker: &str, other: Option<Pid>) -> Pid {
    let mut found = None;
    wait_until("there is a guard", || {
        let marks = processes(marker).into_iter().find_map(|pid| variable(pid, "UNISONO_LAUNCH"));
        let Some(marks) = marks else { return false };
        let mark = marks.rsplit(':').next().unwrap_or_default().to_owned();
        found = guards(&mark).into_iter().find(|pid| Some(*pid) != other);
        found.is_some()
    });
    found.expect("it was waited for")
}

/// The guards of the launcher with this mark.
fn guards(mark: &str) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
        if arguments.contains(&&b"unisono-guard"[..]) && arguments.contains(&mark.as_bytes()) {
            let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
            found.extend(pid.and_then(Pid::from_raw));
        }
    }
    found
}

/// A variable in the environment of a process.
fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environment.split(|byte| *byte == 0).find_map(|entry| {
        entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec)
    })?;
    String::from_utf8(value).ok()
}

pub fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
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
