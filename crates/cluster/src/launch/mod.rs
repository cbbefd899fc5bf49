//! Starts the ranks of a job on this machine, watches over them, and leaves nothing behind.
//!
//! Each rank is the leader of a process group of its own and has its place in its environment
//! (torchrun's variables, plus the address of the rendezvous, which the launcher hosts, and the
//! job's token). The launcher then waits for the first of these to happen:
//!
//! - all ranks end well: so does the launcher;
//! - a rank fails: the launcher says which, how, and with what last words, ends the others, and
//!   ends with that rank's exit code;
//! - the launcher is told to stop (Ctrl-C, SIGTERM): it passes the signal on;
//! - another node reports one of the above, or falls silent.
//!
//! Ending a rank means a signal to its whole group, some grace, then SIGKILL. What its processes
//! started outside the group is found by a mark in its environment (`strays.rs`). Should the launcher
//! itself be killed, the kernel kills the ranks (parent-death signal), and a guard process the
//! rest.
//!
//! With several nodes, every node runs a launcher. That of node 0 assembles the others
//! (`nodes.rs`), stays connected to them, and decides how the job ends.

mod binding;
mod guard;
mod nodes;
mod output;
mod ranks;
mod strays;
mod supervisor;

pub use output::Sink;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use unisono_collective::handshake::{HandshakeError, Token};

use crate::place::{self, MAX_WORLD};

/// What to start on this node, and how.
#[derive(Clone)]
pub struct Launch {
    /// The program and its arguments; the same for every rank.
    pub command: Vec<OsString>,
    /// How many ranks this node runs.
    pub ranks: u32,
    /// The other nodes, if there are any.
    pub nodes: Option<Nodes>,
    /// The job's token; must be given to all nodes or to none. Without one, node 0 makes one.
    pub token: Option<Token>,
    /// Variables for the ranks, beside the launcher's own.
    pub vars: Vec<(OsString, OsString)>,
    /// How long ranks may take to end when told to. Longer lets them save more; shorter ends a
    /// failed job sooner.
    pub grace: Duration,
    /// How long to wait for the other nodes.
    pub timeout: Duration,
    /// Whether lines of stdout begin with their rank. Lines of stderr do whenever there are
    /// several ranks.
    pub label_stdout: bool,
    /// Whether every rank is bound to its share of the cores, if there are enough. A rank then
    /// keeps its caches, and waits by spinning; but two jobs on one machine would get the same
    /// cores.
    pub bind: bool,
    /// Where the ranks' stdout goes.
    pub stdout: Sink,
    /// Where the ranks' stderr, and what the launcher has to say, goes.
    pub stderr: Sink,
}

/// This node among several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// How many there are.
    pub count: u32,
    /// Which one this is; ranks are numbered in the order of nodes.
    pub node: u32,
    /// Where node 0 listens: a host of its own that the others can reach, and a port.
    pub rendezvous: (String, u16),
}

impl Nodes {
    /// Reads `HOST:PORT`.
    pub fn parse_rendezvous(text: &str) -> Option<(String, u16)> {
        place::split_host_port(text).map(|(host, port)| (host.to_owned(), port))
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// Every rank exited with code 0.
    Success,
    /// A rank failed, and the others were ended.
    Failed(Failure),
    /// A launcher was told to stop by a signal.
    Interrupted {
        /// The signal.
        signal: i32,
    },
    /// The launcher of a node disappeared.
    NodeLost {
        /// Its number.
        node: u32,
    },
}

/// The rank that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Which.
    pub rank: u32,
    /// The node it ran on.
    pub node: u32,
    /// How it ended.
    pub ending: Ending,
    /// The last lines it wrote to stderr.
    pub stderr: Vec<String>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// Why a job could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The request itself makes no sense.
    #[error("{0}")]
    Usage(&'static str),
    /// The program could not be started.
    #[error("cannot start {command}: {cause}")]
    Spawn {
        /// The program.
        command: String,
        /// Why.
        cause: io::Error,
    },
    /// Node 0 cannot listen where it should.
    #[error(
        "cannot listen at {address}: {cause}; give node 0 a free port of an address that is its own (behind address translation: its local one), or of 0.0.0.0 for all its addresses"
    )]
    Listen {
        /// Where.
        address: String,
        /// Why.
        cause: io::Error,
    },
    /// Some nodes did not come in time.
    #[error("these nodes did not come in time: {missing:?}")]
    NodesMissing {
        /// Their numbers.
        missing: Vec<u32>,
    },
    /// Node 0 was not found in time.
    #[error("node 0 was not found at {address}: {last}")]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// What the last attempt ran into.
        last: String,
    },
    /// Whoever listens there is not node 0 of this job, or does not believe that this node
    /// belongs to it: is `UNISONO_TOKEN` the same, or unset, on all nodes?
    #[error(
        "refused at {address}: {cause}; set UNISONO_TOKEN to the same on all nodes, or on none"
    )]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        cause: HandshakeError,
    },
    /// Node 0 has no place for this node.
    #[error("node 0 refused this node: {reason}")]
    Rejected {
        /// In its words.
        reason: String,
    },
    /// The connection between the launchers broke before the job began.
    #[error("lost the connection to node {node} before the job began: {reason}")]
    Lost {
        /// The other node.
        node: u32,
        /// How.
        reason: String,
    },
    /// The system lacks something.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Launch {
    /// `ranks` ranks of `command` on this machine alone, with output to the launcher's own.
    pub fn new(command: Vec<OsString>, ranks: u32) -> Launch {
        Launch {
            command,
            ranks,
            nodes: None,
            token: None,
            vars: Vec::new(),
            grace: Duration::from_secs(5),
            timeout: Duration::from_secs(300),
            label_stdout: false,
            bind: false,
            stdout: Arc::new(Mutex::new(io::stdout())),
            stderr: Arc::new(Mutex::new(io::stderr())),
        }
    }

    /// Starts the job and stays with it until it ends.
    ///
    /// Must be called on a thread that outlives the job, for the kernel ends the ranks together
    /// with the thread that started them. SIGINT and SIGTERM belong to the launcher meanwhile.
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        if self.command.is_empty() {
            return Err(LaunchError::Usage("no command to run"));
        }
        if self.ranks == 0 {
            return Err(LaunchError::Usage("a node runs at least one rank"));
        }
        if self.nodes.as_ref().is_some_and(|nodes| nodes.node >= nodes.count) {
            return Err(LaunchError::Usage("the node's number must be below the number of nodes"));
        }
        if self.ranks > MAX_WORLD {
            return Err(TOO_MANY);
        }
        let (events, inbox) = channel();
        let job = nodes::assemble(self, &events)?;
        let _signals = SignalForwarder::start(events.clone())?;
        let ranks = ranks::Ranks::start(self, &job.place, &events)?;
        Ok(supervisor::Supervisor::new(self, job, ranks, inbox).run())
    }
}

/// A world beyond [`MAX_WORLD`].
const TOO_MANY: LaunchError = LaunchError::Usage("a job has at most 65536 ranks");

impl Launch {
    /// When not to wait for other nodes any longer; far away if no clock can tell.
    fn deadline(&self) -> Instant {
        const YEAR: Duration = Duration::from_secs(31_536_000);
        let now = Instant::now();
        now + self.timeout.min(YEAR)
    }
}

impl Outcome {
    /// What the launcher exits with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Outcome::Success => 0,
            Outcome::Failed(failure) => failure.ending.exit_code(),
            Outcome::Interrupted { signal } => Ending::Signal(*signal).exit_code(),
            Outcome::NodeLost { .. } => 1,
        }
    }
}

impl Ending {
    /// The exit code a shell would give: 128 + n for signal n.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Ending::Code(code) => code,
            Ending::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }

    fn is_success(self) -> bool {
        self == Ending::Code(0)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Code(code) => write!(f, "exited with code {code}"),
            Ending::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("unnamed");
                write!(f, "was killed by signal {signal} ({name})")
            }
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Success => f.write_str("all ranks ended well"),
            Outcome::Failed(Failure { rank, ending, .. }) => write!(f, "rank {rank} {ending}"),
            Outcome::Interrupted { signal } => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("a signal");
                write!(f, "stopped by {name}")
            }
            Outcome::NodeLost { node } => write!(f, "lost the launcher of node {node}"),
        }
    }
}

/// What the launcher reacts to.
enum Event {
    /// The process of a local rank ended; it is not reaped yet.
    Ended { local: u32, ending: Ending },
    /// The launcher was told to stop.
    Signal(i32),
    /// Another launcher said something.
    Heard { node: u32, message: nodes::Message },
    /// Another launcher's connection closed.
    Closed { node: u32 },
}

/// Turns SIGINT and SIGTERM into events while it lives.
struct SignalForwarder {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalForwarder {
    fn start(events: Sender<Event>) -> io::Result<SignalForwarder> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let handle = signals.handle();
        let forward = move || {
            for signal in signals.forever() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("unisono-signals".into()).spawn(forward)?;
        Ok(SignalForwarder { handle, thread: Some(thread) })
    }
}

impl Drop for SignalForwarder {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
