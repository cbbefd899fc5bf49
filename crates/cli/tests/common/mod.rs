//! The program `unisono`, started as its users start it.
//!
//! A [`Desk`] is a folder in which a user types commands. What was started there is a [`Running`] until
//! it has [ended](Ended): all processes of its session, however they were started, so that none can
//! be overlooked.

// Every test binary uses its part.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, setsid};
use serde_json::Value;
use tempfile::TempDir;

/// How long anything may take before it counts as hung. The longest run of these tests takes a few
/// seconds, and ten times that on a machine with much else to do.
pub const LONG: Duration = Duration::from_secs(180);

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_unisono");

/// A folder of its own to work in.
pub struct Desk {
    folder: TempDir,
    jobs: AtomicU32,
}

impl Desk {
    pub fn new() -> Desk {
        let folder = tempfile::tempdir().expect("there is room for temporary files");
        Desk { folder, jobs: AtomicU32::new(0) }
    }

    /// A file or folder on the desk.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("the desk can be written to");
    }

    pub fn read(&self, name: &str) -> String {
        let path = self.path(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Some words of text, the same every time.
    pub fn write_text(&self, name: &str, words: usize) {
        const WORDS: [&str; 8] =
            ["every ", "rank ", "sums ", "its ", "shards ", "in ", "one ", "order. "];
        let mut numbers = numbers();
        let word = |_| WORDS[numbers.next().expect("they never end") as usize % WORDS.len()];
        self.write(name, (0..words).map(word).collect::<String>());
    }

    /// How many commands were started here so far.
    pub fn count(&self) -> u32 {
        self.jobs.load(Ordering::Relaxed)
    }

    /// `unisono` with these arguments, separated by spaces.
    pub fn command(&self, arguments: &str) -> Command {
        self.command_by(|program| Command::new(program), arguments)
    }

    /// The same, where `new` makes the command, perhaps on another host.
    pub fn command_by(&self, new: impl FnOnce(&str) -> Command, arguments: &str) -> Command {
        let mut command = new(PROGRAM);
        command.args(arguments.split_whitespace()).current_dir(self.folder.path());
        // Whatever launched the tests did not mean the program under test.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("UNISONO_") || ["RANK", "WORLD_SIZE"].contains(&&*text) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// A shell script in a mount namespace of its own, with the program as `$1`; `None` where this
    /// user may not.
    pub fn with_own_mounts(&self, script: &str) -> Option<Command> {
        for namespaces in ["-m", "-rm"] {
            let mut probe = Command::new("unshare");
            probe.args([namespaces, "mount", "-t", "tmpfs", "none", "/mnt"]);
            if probe.output().is_ok_and(|output| output.status.success()) {
                let mut command = self.command_by(|_| Command::new("unshare"), namespaces);
                command.args(["sh", "-ec", script, "sh", PROGRAM]);
                return Some(command);
            }
        }
        println!("SKIPPED: no mount namespaces here");
        None
    }

    /// Starts a command made for this desk.
    pub fn start(&self, command: &mut Command) -> Running {
        let number = self.jobs.fetch_add(1, Ordering::Relaxed);
        let output = |name: &str| {
            let path = self.path(&format!(".{number}-{name}"));
            (File::create(&path).expect("the desk can be written to"), path)
        };
        let ((stdout, stdout_path), (stderr, stderr_path)) = (output("stdout"), output("stderr"));
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        // SAFETY: between fork and exec, the child may only do what a signal handler may. This makes
        // one system call.
        unsafe { command.pre_exec(|| setsid().map(drop).map_err(Into::into)) };
        let text = format!("{command:?}");
        let child = command.spawn().expect("the program can be started");
        Running { child, text, stdout: stdout_path, stderr: stderr_path }
    }

    /// Starts `unisono` and waits for its end.
    pub fn run(&self, arguments: &str) -> Ended {
        self.start(&mut self.command(arguments)).wait()
    }

    /// Trains; what `--json` prints of a run that must end well.
    pub fn train(&self, arguments: &str) -> Summary {
        self.run(&format!("train --json {arguments}")).summary()
    }
}

/// A command under way, and all processes that it started.
pub struct Running {
    child: Child,
    text: String,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running {
    /// The number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the process has not been waited for");
    }

    /// Whether its process has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is a child").is_none()
    }

    /// Waits until something is the case, while the job still runs.
    pub fn wait_until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        wait_until(&format!("{what}: {}", self.text), || {
            if let Some(status) = self.child.try_wait().expect("it is a child of this process") {
                panic!("{} ended ({status}) before {what}: {}", self.text, read(&self.stderr));
            }
            done()
        });
    }

    /// The worker with that rank.
    pub fn worker(&self, rank: usize) -> Pid {
        let variable = format!("RANK={rank}");
        let is_it = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
        };
        let pid = self.processes().into_iter().find(is_it).expect("every rank has a process");
        Pid::from_raw(pid).expect("a process number is positive")
    }

    /// The workers and servers that `unisono train` has started and that still run, and whether each is
    /// a server.
    pub fn members(&self) -> Vec<(Pid, bool)> {
        let role = |pid: i32| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let has = |word: &str| command.split(|byte| *byte == 0).any(|w| w == word.as_bytes());
            let is_server = has("serve");
            (is_server || has("--as-worker")).then_some((Pid::from_raw(pid)?, is_server))
        };
        self.processes().into_iter().filter_map(role).collect()
    }

    /// Waits for the end. Afterwards no process of the job may be left.
    pub fn wait(mut self) -> Ended {
        let mut status = None;
        wait_until(&format!("the end of {}", self.text), || {
            status = self.child.try_wait().expect("it is a child of this process");
            status.is_some()
        });
        // The last ones of a launcher that was killed end when the kernel gets round to it.
        wait_until(&format!("nothing is left of {}", self.text), || self.processes().is_empty());
        Ended {
            text: self.text.clone(),
            status: status.expect("waited for above"),
            stdout: read(&self.stdout),
            stderr: read(&self.stderr),
        }
    }

    /// Those that run in the session of the job; its leader gave it its number.
    fn processes(&self) -> Vec<i32> {
        let session = self.child.id().to_string();
        let belongs = |pid: &i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // After the name, which may hold anything: state, parent, process group, session.
            let fields: Vec<&str> =
                stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            matches!(fields[..], [state, _, _, s, ..] if s == session && state != "Z")
        };
        let all = fs::read_dir("/proc").expect("/proc is there").flatten();
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(belongs).collect()
    }
}

impl Drop for Running {
    /// A test that fails leaves no process behind either.
    fn drop(&mut self) {
        for pid in self.processes().into_iter().filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// How a command ended.
pub struct Ended {
    text: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// What it printed, if it ended well.
    pub fn expect_success(&self) -> &str {
        assert!(self.status.success(), "{}: {}: {}", self.text, self.status, self.stderr);
        &self.stdout
    }

    /// What `--json` printed, if it ended well.
    pub fn summary(&self) -> Summary {
        let stdout = self.expect_success();
        let object = serde_json::from_str(stdout);
        let object = object.unwrap_or_else(|error| panic!("{}: {error}: {stdout}", self.text));
        Summary { object, text: self.text.clone() }
    }

    /// The one line that tells the user what to change, if that is all it said.
    pub fn complaint(&self) -> &str {
        let said = format!("{}: {}: {}", self.text, self.status, self.stderr);
        assert!(matches!(self.status.code(), Some(1..)), "no exit code of a failure: {said}");
        assert_eq!(self.stdout, "", "no result of a failure: {said}");
        // A run that had begun may have told of its progress.
        let mut lines = self.stderr.lines().filter(|line| !line.starts_with("step "));
        let line = lines.next().unwrap_or_else(|| panic!("not a word: {said}"));
        assert_eq!(lines.next(), None, "more than one line: {said}");
        assert!(line.starts_with("unisono: "), "not the program's own words: {said}");
        line
    }

    /// Whether the process that was started died of this signal.
    pub fn was_killed_by(&self, signal: Signal) -> bool {
        self.status.signal() == Some(signal.as_raw())
    }
}

/// What `--json` prints.
pub struct Summary {
    pub object: Value,
    text: String,
}

impl Summary {
    pub fn number(&self, key: &str) -> f64 {
        let number = self.object[key].as_f64();
        number.unwrap_or_else(|| panic!("no number {key}: {}", self.object))
    }

    pub fn count(&self, key: &str) -> u64 {
        let count = self.object[key].as_u64();
        count.unwrap_or_else(|| panic!("no count {key}: {}", self.object))
    }

    pub fn hash(&self) -> &str {
        let hash = self.object["weights_hash"].as_str().unwrap_or_default();
        assert!(hash.len() == 64 && hash.bytes().all(|c| c.is_ascii_hexdigit()), "{hash}");
        hash
    }

    /// The weights of both runs are the same, bit by bit.
    pub fn assert_same_weights(&self, other: &Summary) {
        assert_eq!(self.hash(), other.hash(), "\n{}\n{}", self.text, other.text);
        assert_eq!(self.object["accuracy"], other.object["accuracy"], "\n{}", self.text);
    }
}

/// The bytes of every file in a folder, by name.
pub fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(folder)
        .expect("the folder exists")
        .map(|entry| {
            let path = entry.expect("the folder can be read").path();
            let name = path.file_name().expect("it is in a folder").to_string_lossy().into_owned();
            (name, fs::read(path).expect("it is a file"))
        })
        .collect();
    files.sort();
    files
}

/// The steps of which there are checkpoints, in ascending order.
pub fn checkpoints(folder: &Path) -> Vec<u64> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
        entries => entries.expect("the folder can be read").flatten(),
    };
    let step =
        |name: String| name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok();
    let mut steps: Vec<u64> =
        entries.filter_map(|entry| step(entry.file_name().into_string().ok()?)).collect();
    steps.sort_unstable();
    steps
}

/// How many lines a file has, which may not exist yet.
pub fn lines(path: &Path) -> usize {
    fs::read(path).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count())
}

/// Numbers without a pattern, the same every time.
pub fn numbers() -> impl Iterator<Item = u32> {
    let next = |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    std::iter::successors(Some(0x0005_eed5), next).map(|state| (state >> 33) as u32)
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
