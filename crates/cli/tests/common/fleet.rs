//! Machines that share one elastic job, and the etcd that they share it by.
//!
//! ```text
//!   m0  m1  m2    machines with a launcher each, and its workers
//!    │   │   │
//!   ─┴───┴───┴──┬───┬───┬─
//!               │   │   │
//!              e0  e1  e2    one node of etcd each
//! ```
//!
//! Each is a host of a network lab, so that a machine can lose etcd, or the other machines, or both. Files are
//! those of one machine: every worker appends the number of each step that it has applied to the file of its
//! machine, so that it is seen what a machine does that can be reached by no other.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use unisono_netlab::{
    EtcdCluster, EtcdOptions, Host, Lab, Link, Rate, etcd_on_or_skip, lab_or_skip,
};

use super::common::{Desk, Ended, Running, wait_until};

/// Machines with workers: the first hosts of the lab. Those of etcd come after them.
pub const MACHINES: usize = 3;

/// Nodes of etcd.
const NODES: usize = 3;

/// Workers of each machine.
pub const WORKERS: usize = 2;

/// The steps of a run.
pub const STEPS: u64 = 1000;

/// How long a worker waits in the first step while the test wants time for its faults.
const PACE: Duration = Duration::from_millis(25);

/// For how long it is looked that something does not happen.
pub const WHILE: Duration = Duration::from_secs(4);

/// What a worker does, in words.
pub const PROGRAM: &str = "UNISONO_TEST_PROGRAM";

/// The seconds after which a silent process is lost.
const TIMEOUT: &str = "2";

/// The name of the job.
const JOB: &str = "fleet";

/// The hosts of a fleet, if there can be some here.
pub fn hosts_or_skip() -> Option<Lab> {
    lab_or_skip(MACHINES + NODES, Link::new(Rate::gbit(10)))
}

/// What the machines do, and what can be done to them.
pub struct Fleet<'a> {
    lab: &'a Lab,
    pub etcd: EtcdCluster<'a>,
    desk: Desk,
    /// Of each machine the launcher that runs.
    running: BTreeMap<usize, Running>,
    /// For how many seconds launchers wait for workers.
    pub patience: u32,
    /// What each worker does, in a word.
    program: &'static str,
    /// The hash of the undisturbed run.
    whole: String,
}

impl<'a> Fleet<'a> {
    /// Starts etcd, and makes the undisturbed run with one worker that needs none of it.
    pub fn new(lab: &'a Lab) -> Option<Fleet<'a>> {
        Fleet::of(lab, "train")
    }

    /// The same, of workers that do this.
    pub fn of(lab: &'a Lab, program: &'static str) -> Option<Fleet<'a>> {
        let nodes: Vec<&Host> = lab.hosts()[MACHINES..].iter().collect();
        let etcd = etcd_on_or_skip(&nodes, EtcdOptions::default())?;
        let desk = Desk::new();
        let (running, whole) = (BTreeMap::new(), String::new());
        let mut fleet = Fleet { lab, etcd, desk, running, patience: 60, program, whole };
        fs::write(fleet.hurry_file(), "").expect("the desk can be written to");
        let mut alone = fleet.desk.command("run -n 1 --");
        fleet.add_worker(&mut alone, &fleet.desk.path("alone"));
        let ended = fleet.desk.start(&mut alone).wait();
        fleet.whole = the_hash([&ended]);
        fs::remove_file(fleet.hurry_file()).expect("it was made above");
        Some(fleet)
    }

    /// Starts a launcher on a machine: `unisono run --elastic RANGE …`.
    pub fn start(&mut self, machine: usize, range: &str) {
        self.start_with(machine, range, WORKERS);
    }

    /// The same, with so many workers.
    pub fn start_with(&mut self, machine: usize, range: &str, workers: usize) {
        assert!(!self.running.contains_key(&machine), "m{machine} has a launcher");
        let (urls, patience) = (self.urls(), self.patience);
        let arguments = format!(
            "run --elastic {range} --etcd {urls} --job {JOB} --timeout {patience} -n {workers} --"
        );
        let mut command = self.command(machine, &arguments);
        self.add_worker(&mut command, &self.progress_file(machine));
        command.env("UNISONO_TIMEOUT", TIMEOUT);
        self.running.insert(machine, self.desk.start(&mut command));
    }

    /// Starts a launcher on each of some machines, and waits until all of them train together.
    pub fn start_all(&mut self, machines: Range<usize>, range: &str) {
        machines.clone().for_each(|machine| self.start(machine, range));
        self.wait_until_all_train(machines.clone());
        // On a busy machine a worker may come late, and be let in only then.
        let (asked, count) = (machines.start, machines.len() * WORKERS);
        wait_until(&format!("{count} workers train"), || self.members(asked) == count);
        self.wait_until_all_train(machines);
    }

    /// How many members the epoch has, asked on a machine that reaches etcd.
    pub fn members(&self, machine: usize) -> usize {
        self.status(machine)["members"].as_array().map_or(0, Vec::len)
    }

    /// Waits until each of these machines has made a few more steps.
    pub fn wait_until_all_train(&mut self, machines: Range<usize>) {
        for machine in machines {
            self.wait_for_steps(machine, 5);
        }
    }

    /// Waits until a machine has made this many more steps.
    pub fn wait_for_steps(&mut self, machine: usize, steps: u64) {
        let goal = self.progress(machine) + steps;
        assert!(goal < STEPS, "the run is over before the test is");
        let file = self.progress_file(machine);
        let job = self.running.get_mut(&machine).expect("the machine has a launcher");
        job.wait_until(&format!("m{machine} makes step {goal}"), || last_step(&file) >= goal);
    }

    /// The last step that a worker of this machine has applied.
    pub fn progress(&self, machine: usize) -> u64 {
        last_step(&self.progress_file(machine))
    }

    /// How often workers of a machine have applied a step that they had applied before.
    pub fn repeated(&self, machine: usize) -> usize {
        let text = fs::read_to_string(self.progress_file(machine)).unwrap_or_default();
        let mut times = BTreeMap::<&str, usize>::new();
        text.lines().for_each(|step| *times.entry(step).or_default() += 1);
        times.into_values().map(|times| times.saturating_sub(WORKERS)).sum()
    }

    /// The last step that a worker of any machine has applied.
    pub fn most_progress(&self) -> u64 {
        (0..MACHINES).map(|machine| self.progress(machine)).max().unwrap_or(0)
    }

    /// Looks for a while, in which none of these machines may apply a step that was not under way.
    pub fn assert_no_progress(&self, machines: &[usize]) {
        // A worker that has all means of a step applies it, and no other step can begin.
        let limit = self.most_progress() + 1;
        thread::sleep(WHILE);
        for machine in machines {
            let step = self.progress(*machine);
            assert!(step <= limit, "m{machine} applied step {step}, and {limit} was the last");
        }
    }

    /// The workers of a machine.
    pub fn workers(&self, machine: usize) -> Vec<Pid> {
        let members = self.running[&machine].members().into_iter();
        members.map(|(pid, _)| pid).filter(|pid| has_rank(*pid)).collect()
    }

    /// Kills one worker of a machine with SIGKILL.
    pub fn kill_worker(&self, machine: usize) {
        let mut victim = None;
        wait_until(&format!("m{machine} has a worker"), || {
            victim = self.workers(machine).first().copied();
            victim.is_some()
        });
        let victim = victim.expect("it was waited for");
        kill_process(victim, Signal::KILL).expect("the worker runs");
        wait_until("the worker is gone", || !has_rank(victim));
    }

    /// Kills the launcher of a machine with SIGKILL, and waits until its workers have ended with it.
    pub fn kill_launcher(&mut self, machine: usize) {
        let job = self.running.remove(&machine).expect("the machine has a launcher");
        job.signal(Signal::KILL);
        let ended = job.wait();
        assert!(ended.was_killed_by(Signal::KILL), "it ended before: {}", ended.stderr);
        assert_eq!(self.lab.host(machine).processes().unwrap(), 0, "m{machine} has processes");
    }

    /// Takes the power of a machine: the others are not told, and its launcher and workers are gone.
    pub fn power_off(&mut self, machine: usize) {
        self.cut(machine);
        let killed = self.lab.host(machine).kill().expect("the machine has processes");
        assert!(killed > WORKERS, "not the launcher and all workers, but {killed}");
        let job = self.running.remove(&machine).expect("the machine has a launcher");
        assert!(job.wait().was_killed_by(Signal::KILL));
    }

    /// Sends a signal to the launcher of a machine.
    pub fn signal(&self, machine: usize, signal: Signal) {
        self.running[&machine].signal(signal);
    }

    /// Kills the leader of etcd, and waits until another node leads. Returns the one that was killed.
    pub fn kill_etcd_leader(&mut self) -> usize {
        let leader = self.etcd.leader().expect("etcd has a leader");
        self.etcd.kill(leader);
        assert_ne!(self.etcd.leader().expect("the others elect a leader"), leader);
        leader
    }

    /// Stops all nodes of etcd.
    pub fn stop_etcd(&self) {
        (0..NODES).for_each(|node| self.etcd.stop(node));
    }

    /// Lets them go on.
    pub fn cont_etcd(&self) {
        (0..NODES).for_each(|node| self.etcd.cont(node));
    }

    /// Cuts a machine off from the others and from etcd.
    pub fn cut(&self, machine: usize) {
        self.lab.host(machine).cut().expect("the link was up");
    }

    /// Puts it back.
    pub fn heal(&self, machine: usize) {
        self.lab.host(machine).heal().expect("the link was down");
    }

    /// Splits the network: these machines and nodes of etcd on one side, all others on the other.
    pub fn separate(&self, machines: &[usize], nodes: &[usize]) {
        let nodes = nodes.iter().map(|node| MACHINES + node);
        let hosts: Vec<usize> = machines.iter().copied().chain(nodes).collect();
        self.lab.separate(&hosts).expect("they were connected");
    }

    /// Makes one network of it again.
    pub fn reunite(&self) {
        self.lab.reunite().expect("they were separated");
    }

    /// What `unisono status` says, asked on a machine that reaches etcd.
    pub fn status(&self, machine: usize) -> Value {
        let arguments = format!("status --etcd {} --job {JOB} --json", self.urls());
        let ended = self.desk.start(&mut self.command(machine, &arguments)).wait();
        ended.summary().object
    }

    /// The present epoch, asked on a machine that reaches etcd.
    pub fn epoch(&self, machine: usize) -> u64 {
        let status = self.status(machine);
        status["epoch"].as_u64().unwrap_or_else(|| panic!("no epoch: {status}"))
    }

    /// Waits until the epoch is beyond this one.
    pub fn wait_for_epoch_after(&self, machine: usize, epoch: u64) {
        wait_until(&format!("there is an epoch after {epoch}"), || self.epoch(machine) > epoch);
    }

    /// The machine whose launcher coordinates, asked on a machine that reaches etcd. It is known by the address
    /// at which its launcher listens.
    pub fn leader(&self, asked: usize) -> usize {
        let status = self.status(asked);
        let leader = status["leader"].to_string();
        let is_at =
            |machine: &usize| leader.contains(&format!("{}:", self.lab.host(*machine).address()));
        let found: Vec<usize> = (0..MACHINES).filter(is_at).collect();
        assert_eq!(found.len(), 1, "no address of a machine: {status}");
        found[0]
    }

    /// Waits until a launcher has ended, however.
    pub fn expect_some_end(&mut self, machine: usize) -> Ended {
        self.running.remove(&machine).expect("the machine has a launcher").wait()
    }

    /// Waits until a launcher has ended well.
    pub fn expect_success(&mut self, machine: usize) -> Ended {
        let ended = self.running.remove(&machine).expect("the machine has a launcher").wait();
        ended.expect_success();
        ended
    }

    /// Lets the run go on as fast as it can.
    pub fn hurry(&self) {
        assert!(self.most_progress() < STEPS, "the run was over before the test was");
        fs::write(self.hurry_file(), "").expect("the desk can be written to");
    }

    /// Hurries to the end, where no launcher has ended before.
    pub fn finish(self) {
        self.hurry();
        self.expect_end(Vec::new());
    }

    /// Waits for the end: every launcher ends well, one of those and of `before` has printed the weights, they
    /// are those of the undisturbed run, and nothing is left behind.
    pub fn expect_end(mut self, before: Vec<Ended>) {
        let machines: Vec<usize> = self.running.keys().copied().collect();
        let mut ended = before;
        ended.extend(machines.into_iter().map(|machine| self.expect_success(machine)));
        let hash = the_hash(&ended);
        assert_eq!(hash, self.whole, "{}", all_stderr(&ended));
        for machine in 0..MACHINES {
            let left = self.lab.host(machine).processes().unwrap();
            assert_eq!(left, 0, "{left} processes are left on m{machine}");
        }
        assert_eq!(shared_memory_files(), [""; 0], "shared memory is left");
    }

    fn command(&self, machine: usize, arguments: &str) -> Command {
        self.desk.command_by(|program| self.lab.host(machine).command(program), arguments)
    }

    fn add_worker(&self, command: &mut Command, progress: &Path) {
        let this = std::env::current_exe().expect("a test has a path");
        command.arg(this).args(["as_worker", "--exact", "--nocapture", "-q", "--", "--as-worker"]);
        let (progress, hurry) = (progress.display(), self.hurry_file());
        let program = format!("{} {STEPS} {progress} {}", self.program, hurry.display());
        command.env(PROGRAM, program);
    }

    fn urls(&self) -> String {
        self.etcd.endpoints()
    }

    fn progress_file(&self, machine: usize) -> PathBuf {
        self.desk.path(&format!("progress-{machine}"))
    }

    /// While it does not exist, workers take their time.
    fn hurry_file(&self) -> PathBuf {
        self.desk.path("hurry")
    }
}

/// What a worker tells the test, and how fast it goes.
pub struct Pacer {
    progress: PathBuf,
    hurry: PathBuf,
}

impl Pacer {
    /// With the files that the words of its program name.
    pub fn new(progress: &str, hurry: &str) -> Pacer {
        Pacer { progress: progress.into(), hurry: hurry.into() }
    }

    /// Waits a little in a step, if the test wants time: the longer the fewer steps are left, so that a run does
    /// not end before its test on a machine where faults take long to have their effect. Half of the steps take
    /// 17 s, and nine tenths of them a minute.
    pub fn pace(&self, step: u64) {
        let left = STEPS.saturating_sub(step).max(1);
        let until = Instant::now() + PACE.mul_f64(STEPS as f64 / left as f64);
        while !self.hurry.exists() {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            thread::sleep(rest.min(PACE));
        }
    }

    /// Says that a step is applied.
    pub fn applied(&self, step: u64) -> std::io::Result<()> {
        // One short write at the end of a file is not torn by those of other processes.
        let mut file = OpenOptions::new().create(true).append(true).open(&self.progress)?;
        file.write_all(format!("{step}\n").as_bytes())
    }
}

/// The last step in a file of progress, or 0.
fn last_step(file: &Path) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    // The last line may be under way.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0)
}

/// The hash of the weights, which was printed once in all.
fn the_hash<'a>(ended: impl IntoIterator<Item = &'a Ended> + Clone) -> String {
    let lines = ended.clone().into_iter().flat_map(|ended| ended.stdout.lines());
    let hashes: Vec<&str> = lines.filter_map(|line| Some(line.split_once("weights ")?.1)).collect();
    let is_one = hashes.len() == 1 && hashes[0].len() == 64;
    assert!(is_one, "printed {} times: {}", hashes.len(), all_stderr(ended));
    hashes[0].to_owned()
}

/// What all launchers have said.
fn all_stderr<'a>(ended: impl IntoIterator<Item = &'a Ended>) -> String {
    let texts: Vec<&str> = ended.into_iter().map(|ended| &*ended.stderr).collect();
    texts.join("\n")
}

/// Whether a process runs and was told by a launcher which rank it has.
fn has_rank(pid: Pid) -> bool {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()));
    environment
        .unwrap_or_default()
        .split(|byte| *byte == 0)
        .any(|entry| entry.starts_with(b"RANK="))
}

/// Files of POSIX shared memory that look like Unisono's.
fn shared_memory_files() -> Vec<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains("unisono")).collect()
}
