//! Ranks at the command of a test: threads of the test, or processes that can be killed.
//!
//! A test starts a [`World`], tells its ranks what to do with [`Command`]s and compares what they
//! answer. A rank that is a process is the test binary itself, started again with only its test
//! `as_rank`, which every binary that uses this module has and which otherwise does nothing.

// Every test binary uses its part.
#![allow(dead_code)]

mod churn;
pub mod machine;
pub mod protocol;
pub mod random;
mod rank;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use unisono::collective::fabric::{Address, HostId, LocalHub};
use unisono::net::Token;
use unisono_netlab::{Host, Lab};

use protocol::{Command, Failed, Formation, Reply, Residue, Settings};
use rank::{Meeting, REPLY};

/// How long anything may take before it counts as hung.
pub const LONG: Duration = Duration::from_secs(30);

/// Tells the processes of one world from all others.
const MARKER: &str = "UNISONO_TEST_WORLD";

/// Serves as a rank, if this process was started as one.
pub fn serve_if_rank() {
    if std::env::var_os(MARKER).is_some() {
        rank::serve_stdin();
    }
}

/// The ranks of a job.
pub struct World {
    pub ranks: Vec<RankHandle>,
    /// The host each rank shall believe to be on, if that is not the true one.
    pub hosts: Option<Vec<u32>>,
    pub token: Token,
    epoch: u64,
    marker: String,
    /// The Unix sockets that its ranks have opened.
    sockets: Vec<String>,
}

/// One rank, as the test sees it.
pub struct RankHandle {
    commands: Box<dyn FnMut(&Command)>,
    replies: Receiver<Reply>,
    ip: IpAddr,
    process: Option<Child>,
    log: Arc<Mutex<String>>,
}

impl World {
    /// Ranks that are processes of this machine.
    pub fn processes(ranks: usize) -> World {
        World::started(ranks, |_| {
            (this_program(std::process::Command::new), Ipv4Addr::LOCALHOST.into())
        })
    }

    /// Ranks that are processes; `start` gives, for each, its program, made by [`this_program`],
    /// and an address of the host it runs on.
    pub fn started(
        ranks: usize,
        mut start: impl FnMut(usize) -> (std::process::Command, IpAddr),
    ) -> World {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let marker = format!("{}-{number}", std::process::id());
        let ranks = (0..ranks).map(|rank| {
            let (program, ip) = start(rank);
            RankHandle::process(program, ip, &marker)
        });
        World::new(ranks.collect(), marker)
    }

    /// `per_host` ranks on every host of a lab, neighbours together.
    pub fn in_lab(lab: &Lab, per_host: usize, address: fn(&Host) -> IpAddr) -> World {
        World::started(lab.hosts().len() * per_host, |rank| {
            let host = lab.host(rank / per_host);
            (this_program(|path| host.command(path)), address(host))
        })
    }

    /// Ranks that are threads, as if ranks with different numbers were on different hosts.
    pub fn threads(hosts: &[u32]) -> World {
        let hub = LocalHub::on_hosts(hosts);
        let ranks = hosts.iter().map(|_| RankHandle::thread(hub.clone()));
        World::new(ranks.collect(), String::new())
    }

    fn new(ranks: Vec<RankHandle>, marker: String) -> World {
        let token = Token::random().expect("the system has random numbers");
        World { ranks, hosts: None, token, epoch: 0, marker, sockets: Vec::new() }
    }

    /// Forms a group of all ranks, of a new epoch.
    pub fn form(&mut self, settings: &Settings) {
        let every = |_| settings.clone();
        for (rank, reply) in self.try_form(every).into_iter().enumerate() {
            assert_eq!(reply, Reply::Done, "rank {rank} could not join");
        }
    }

    /// Tries to form a group of all ranks, each with its own settings.
    pub fn try_form(&mut self, settings: impl Fn(usize) -> Settings) -> Vec<Reply> {
        let roster = self.bind();
        self.join(&roster, settings)
    }

    /// Tries to form a group of ranks that listen at the addresses of `roster`.
    pub fn join(&mut self, roster: &[Address], settings: impl Fn(usize) -> Settings) -> Vec<Reply> {
        self.epoch += 1;
        let (world, epoch, token) = (self.ranks.len(), self.epoch, self.token.to_hex());
        for (rank, handle) in self.ranks.iter_mut().enumerate() {
            let (roster, token, settings) = (roster.to_vec(), token.clone(), settings(rank));
            let formation = Formation { rank, world, epoch, token, roster, settings };
            handle.tell(&Command::Form(formation));
        }
        self.ranks.iter().map(RankHandle::reply).collect()
    }

    /// Lets all ranks that are processes listen.
    pub fn bind(&mut self) -> Vec<Address> {
        if self.ranks.iter().any(|rank| rank.process.is_none()) {
            return Vec::new();
        }
        for rank in &mut self.ranks {
            let ip = rank.ip;
            rank.tell(&Command::Bind { ip });
        }
        let bound = |rank: &RankHandle| match rank.reply() {
            Reply::Bound(address) => address,
            other => panic!("{other:?} instead of an address"),
        };
        let mut roster: Vec<Address> = self.ranks.iter().map(bound).collect();
        self.sockets.extend(roster.iter().map(|address| address.unix.clone()));
        for (address, host) in roster.iter_mut().zip(self.hosts.iter().flatten()) {
            address.host = pretended(*host);
        }
        roster
    }

    /// Tells all ranks the same and hears their replies.
    pub fn all(&mut self, command: &Command) -> Vec<Reply> {
        self.tell_all(command);
        self.ranks.iter().map(RankHandle::reply).collect()
    }

    pub fn tell_all(&mut self, command: &Command) {
        for rank in &mut self.ranks {
            rank.tell(command);
        }
    }

    /// The test is over: all processes end when told to, and leave nothing behind.
    pub fn end(mut self) {
        for mut rank in self.ranks.drain(..) {
            rank.close();
            if let Some(mut process) = rank.process.take() {
                let status = wait(&mut process);
                assert!(status.success(), "a rank ended with {status}: {}", rank.log());
            }
        }
        self.assert_nothing_left();
    }

    /// No process can connect to a rank of the latest group any more.
    pub fn assert_unreachable(&self, rank: usize) {
        let latest = &self.sockets[self.sockets.len() - self.ranks.len()..];
        wait_until("its socket is gone", || !machine::abstract_sockets().contains(&latest[rank]));
    }

    /// Nothing is left of any process that belonged to this world.
    pub fn assert_nothing_left(&self) {
        if self.marker.is_empty() {
            return;
        }
        assert_eq!(machine::processes(MARKER, &self.marker), [0; 0], "processes are left");
        assert_eq!(machine::shared_memory_files(), [""; 0], "shared memory is left");
        let sockets = machine::abstract_sockets();
        let left: Vec<&String> = self.sockets.iter().filter(|s| sockets.contains(s)).collect();
        assert!(left.is_empty(), "Unix sockets are left: {left:?}");
    }
}

impl RankHandle {
    fn process(mut program: std::process::Command, ip: IpAddr, marker: &str) -> RankHandle {
        let program = program.env(MARKER, marker).stdin(Stdio::piped());
        let program = program.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = program.spawn().expect("the test binary can be started");
        let mut stdin = process.stdin.take().expect("piped above");
        let stdout = process.stdout.take().expect("piped above");
        let stderr = process.stderr.take().expect("piped above");
        let (send, replies) = channel();
        thread::spawn(move || forward_replies(stdout, &send));
        let log: Arc<Mutex<String>> = Arc::default();
        let sink = log.clone();
        thread::spawn(move || collect(stderr, &sink));
        let commands = Box::new(move |command: &Command| {
            let mut line = serde_json::to_string(command).expect("commands are plain data");
            line.push('\n');
            // A rank that has died does not read; its replies tell.
            let _ = stdin.write_all(line.as_bytes());
        });
        RankHandle { commands, replies, ip, process: Some(process), log }
    }

    fn thread(hub: Arc<LocalHub>) -> RankHandle {
        let (send, commands) = channel::<Command>();
        let (replier, replies) = channel();
        thread::spawn(move || {
            let mut rank = rank::Rank::new(Meeting::Thread(hub));
            for command in commands {
                // A test that has seen enough no longer listens.
                rank.obey(command, &mut |reply| drop(replier.send(reply)));
            }
        });
        let commands = Box::new(move |command: &Command| {
            // A rank that has panicked does not listen; its replies tell.
            let _ = send.send(command.clone());
        });
        let ip = Ipv4Addr::LOCALHOST.into();
        RankHandle { commands, replies, ip, process: None, log: Arc::default() }
    }

    pub fn tell(&mut self, command: &Command) {
        (self.commands)(command);
    }

    /// The next reply, which must come before anything counts as hung.
    pub fn reply(&self) -> Reply {
        match self.replies.recv_timeout(LONG) {
            Ok(reply) => reply,
            Err(RecvTimeoutError::Timeout) => panic!("a rank hangs; its log: {}", self.log()),
            Err(RecvTimeoutError::Disconnected) => panic!("a rank ended; its log: {}", self.log()),
        }
    }

    /// The next reply if it comes within `patience`.
    pub fn reply_within(&self, patience: Duration) -> Option<Reply> {
        self.replies.recv_timeout(patience).ok()
    }

    /// The failure that the next reply tells of.
    pub fn failed(&self) -> Failed {
        match self.reply() {
            Reply::Failed(failed) => failed,
            other => panic!("{other:?} instead of a failure; the log: {}", self.log()),
        }
    }

    pub fn residue(&mut self, command: &Command) -> Residue {
        self.tell(command);
        match self.reply() {
            Reply::Residue(residue) => residue,
            other => panic!("{other:?} instead of a residue"),
        }
    }

    /// Lets the process fork a child, which lives until the answer is dropped.
    pub fn fork(&mut self) -> Orphan {
        self.tell(&Command::Fork);
        match self.reply() {
            Reply::Forked(child) => Orphan(child),
            other => panic!("{other:?} instead of a child"),
        }
    }

    /// What the rank has written to stderr so far.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic while locked").clone()
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the rank is a process").id()
    }

    pub fn is_running(&mut self) -> bool {
        let process = self.process.as_mut().expect("the rank is a process");
        matches!(process.try_wait(), Ok(None))
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a process number is positive");
        kill_process(pid, signal).expect("the process has not been waited for");
    }

    /// Stops the process; returns when all its threads stand still.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        wait_until("the process stands still", || machine::stands_still(self.pid()));
    }

    /// Waits for the process to end.
    pub fn wait(&mut self) -> ExitStatus {
        wait(self.process.as_mut().expect("the rank is a process"))
    }

    /// Ends the commands, and with them a rank that obeys.
    fn close(&mut self) {
        self.commands = Box::new(|_| {});
    }
}

impl Drop for RankHandle {
    /// A test that fails leaves no process behind either.
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A process that a rank forked, and that outlives it.
pub struct Orphan(u32);

impl Orphan {
    pub fn is_running(&self) -> bool {
        std::fs::read(format!("/proc/{}/environ", self.0)).is_ok_and(|vars| !vars.is_empty())
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.0 as i32).expect("a process number is positive");
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A command that runs this test binary as a rank; `make` makes it for the host it is to run on.
pub fn this_program(
    make: impl FnOnce(std::path::PathBuf) -> std::process::Command,
) -> std::process::Command {
    let mut program = make(std::env::current_exe().expect("a test has a path"));
    program.args(["--exact", "as_rank", "--nocapture", "-q"]);
    program
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn wait(process: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("a process has ended", || {
        status = process.try_wait().expect("it is this process's child");
        status.is_some()
    });
    status.expect("waited for above")
}

fn forward_replies(stdout: impl Read, into: &Sender<Reply>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        if let Some(reply) = line.strip_prefix(REPLY) {
            let reply = serde_json::from_str(reply).expect("ranks write replies");
            if into.send(reply).is_err() {
                return;
            }
        }
    }
}

fn collect(stderr: impl Read, into: &Mutex<String>) {
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        let mut log = into.lock().expect("no panic while locked");
        log.push_str(&line);
        log.push('\n');
    }
}

/// A host that does not exist, different from all others.
fn pretended(host: u32) -> HostId {
    let mut id = [0xee; 16];
    id[0] = host as u8;
    serde_json::from_value(serde_json::json!(id)).expect("a host is sixteen bytes")
}
