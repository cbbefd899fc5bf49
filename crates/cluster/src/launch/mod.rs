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
//! - the output cannot be written any more, most often because its reader has gone, as in
//!   `unisono run … | head`: the launcher ends the ranks, as the system ends a program by SIGPIPE;
//! - another node reports one of the above, or falls silent.
//!
//! Ending a rank means a signal to its whole group, some grace, then SIGKILL. What its processes
//! started outside the group is found by a mark in its environment (`strays.rs`). Should the launcher
//! itself be killed, the kernel kills the ranks (parent-death signal), and a guard process the
//! rest. A guard that is itself killed is replaced.
//!
//! Jobs whose ranks do without each other can have more. *Servers* are processes beside the ranks:
//! started before them, each with a socket that the launcher keeps open for it (`listeners.rs`), and
//! ended after them. Ranks and servers are the *members* of the job; those that fail can be started
//! again (`restarts.rs`), which is then no failure. What a member finds in its environment:
//!
//! | variable | whose | content |
//! |---|---|---|
//! | `UNISONO_SERVERS` | all | where the servers listen: `host:port,host:port`, in their order |
//! | `UNISONO_SERVER` | servers | the number of this one, from 0 |
//! | `UNISONO_PEERS` | ranks with sockets | where the ranks listen, in their order |
//! | `UNISONO_LISTEN_FD` | who has a socket | the number of the open file that listens |
//! | `UNISONO_LIFE` | all | how often this member was started before |
//! | `UNISONO_TOKEN` | all | the token of the job |
//!
//! With several nodes, every node runs a launcher. That of node 0 assembles the others
//! (`nodes.rs`), stays connected to them, and decides how the job ends.

mod binding;
mod driver;
mod guard;
mod listeners;
mod members;
mod nodes;
mod outcome;
mod output;
mod process;
mod restarts;
mod shared;
mod stopped;
mod strays;
mod supervisor;

pub use listeners::Servers;
pub use outcome::{Ending, Failure, Outcome, ServerFailure};
pub use output::Sink;
pub use restarts::Restarts;
pub use shared::{ShareError, SharedJob, record_in_etcd};

use std::ffi::OsString;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use unisono_net::{HandshakeError, Token, descriptors};

use crate::membership::machines::{JoinError, Joining, Machines};
use crate::membership::{self, Embedded, Heard, History, Home, Observer};
use crate::place::{self, MAX_WORLD};

/// Descriptors of a launcher beside those for its ranks.
const DESCRIPTORS: u64 = 128;

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
    /// Whether everything that travels over TCP is encrypted. The same on all nodes; members find it in
    /// `UNISONO_ENCRYPT`.
    pub encrypt: bool,
    /// Processes beside the ranks, for jobs of one node: started before them, told to end when all
    /// ranks have ended well. One that exits with code 0 before is done.
    pub servers: Option<Servers>,
    /// Whether every rank gets a socket to listen at, as servers do; for jobs of one node.
    pub listeners_for_ranks: bool,
    /// Whether ranks may come and go while the others train on; for jobs of one node, or of machines that
    /// come and go as well.
    pub elastic: Option<Elastic>,
    /// The elastic job that this launcher shares with those of other machines.
    pub shared: Option<SharedJob>,
    /// Is told what happens to the ranks of an elastic job.
    pub observer: Option<Observer>,
    /// Whether ranks and servers that fail are started again.
    pub restarts: Restarts,
    /// Counts how often one was.
    pub restarted: Arc<AtomicU32>,
    /// Variables for the ranks and servers, beside the launcher's own.
    pub vars: Vec<(OsString, OsString)>,
    /// How long members may take to end when told to. Longer lets them save more; shorter ends a
    /// failed job sooner.
    pub grace: Duration,
    /// How long to wait for the other nodes.
    pub timeout: Duration,
    /// Whether lines of stdout begin with their rank, or server. Lines of stderr do whenever there
    /// are several.
    pub label_stdout: bool,
    /// Whether every rank is bound to its share of the cores, if there are enough. A rank then
    /// keeps its caches, and waits by spinning; but two jobs on one machine would get the same
    /// cores.
    pub bind: bool,
    /// Whether it goes without saying that a member is started again.
    pub quiet: bool,
    /// Where the members' stdout goes.
    pub stdout: Sink,
    /// Where the members' stderr, and what the launcher has to say, goes.
    pub stderr: Sink,
}

/// A job whose ranks may come and go while the others train on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elastic {
    /// With fewer workers the job waits.
    pub least: u32,
    /// More workers wait as spares.
    pub most: u32,
    /// After how long a worker that does not answer counts as lost.
    pub timeout: Duration,
    /// How long the job waits for workers before it ends.
    pub patience: Duration,
}

/// What came of a job whose ranks may come and go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// The result that the workers handed in, if they came to one.
    pub result: Option<Vec<u8>>,
    /// What happened to them.
    pub history: History,
}

impl Elastic {
    /// Of a job whose first epoch waits for so many workers.
    fn settings(&self, workers: u32) -> membership::Settings {
        membership::Settings {
            workers: workers as usize,
            least: self.least as usize,
            most: self.most as usize,
            timeout: self.timeout,
            patience: self.patience,
        }
    }
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
        #[source]
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
        #[source]
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
    /// The process that listens there is not node 0 of this job, or does not believe that this node
    /// belongs to it: is `UNISONO_TOKEN` the same, or unset, on all nodes?
    #[error(
        "refused at {address}: {cause}; set UNISONO_TOKEN to the same on all nodes, or on none"
    )]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        #[source]
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
    /// The job of several machines could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
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
            encrypt: false,
            servers: None,
            listeners_for_ranks: false,
            elastic: None,
            shared: None,
            observer: None,
            restarts: Restarts::default(),
            restarted: Arc::default(),
            vars: Vec::new(),
            grace: Duration::from_secs(5),
            timeout: Duration::from_secs(300),
            label_stdout: false,
            bind: false,
            quiet: false,
            stdout: Arc::new(Mutex::new(io::stdout())),
            stderr: Arc::new(Mutex::new(io::stderr())),
        }
    }

    /// Starts the job and stays with it until it ends.
    ///
    /// Must be called on a thread that outlives the job, for the kernel ends the ranks together
    /// with the thread that started them. SIGINT and SIGTERM belong to the launcher meanwhile.
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        let (events, inbox) = channel();
        self.supervise(events, inbox, None).map(|(outcome, _)| outcome)
    }

    /// As [`Launch::run`], of an [elastic](Launch::elastic) job; with what came of it.
    pub fn run_elastic(&self) -> Result<(Outcome, Completion), LaunchError> {
        let (events, inbox) = channel();
        self.supervise(events, inbox, None)
    }

    /// As [`Launch::run`], with something to do when all ranks have ended well (those of other
    /// nodes, too: only node 0 calls it), while the servers still run, and are still started again:
    /// to fetch what they hold. Returns what it returned, or `None` if it was not called or not
    /// waited for: when the job fails or is interrupted meanwhile, its thread is left alone.
    pub fn run_with<T: Send + 'static>(
        &self,
        at_end: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(Outcome, Option<T>), LaunchError> {
        let (events, inbox) = channel();
        let (begin, beginning) = channel();
        let (result, results) = channel();
        let done = events.clone();
        // Started now, because later there would be no way to report that it cannot be.
        std::thread::Builder::new().name("unisono-at-end".into()).spawn(move || {
            if beginning.recv().is_ok() {
                let _ = result.send(catch_unwind(AssertUnwindSafe(at_end)));
                let _ = done.send(Event::AtEndDone);
            }
        })?;
        let (outcome, _) = self.supervise(events, inbox, Some(begin))?;
        match results.try_recv() {
            Ok(Err(panic)) => resume_unwind(panic),
            result => Ok((outcome, result.ok().and_then(Result::ok))),
        }
    }

    /// Runs the job; sends something to `at_end`, and waits for its event, before servers end.
    fn supervise(
        &self,
        events: Sender<Event>,
        inbox: Receiver<Event>,
        at_end: Option<Sender<()>>,
    ) -> Result<(Outcome, Completion), LaunchError> {
        self.check()?;
        // Two pipes and a connection to the rendezvous each, and both ends of a pipe while it is made.
        descriptors::ensure(DESCRIPTORS + 6 * u64::from(self.ranks))?;
        let (mut job, home) = match (&self.elastic, &self.shared) {
            (None, _) => (nodes::assemble(self, &events)?, None),
            (Some(elastic), None) => {
                let job = nodes::assemble(self, &events)?;
                let home = self.open_home(elastic, &job.place, events.clone())?;
                (job, Some(home))
            }
            (Some(elastic), Some(shared)) => {
                let home = self.join(elastic, shared, events.clone())?;
                let (me, token) = (home.me(), home.token().clone());
                let job = nodes::shared(self, shared.ip, me.first, token)?;
                (job, Some(Box::new(home) as Box<dyn Home>))
            }
        };
        job.place.membership = home.as_ref().map(|home| home.address());
        let _signals = SignalForwarder::start(events.clone())?;
        let members = members::Members::start(self, job.place.clone(), events)?;
        Ok(driver::Driver::new(self, job, home, members, inbox, at_end).run())
    }

    fn open_home(
        &self,
        elastic: &Elastic,
        place: &nodes::NodePlace,
        events: Sender<Event>,
    ) -> io::Result<Box<dyn Home>> {
        let settings = elastic.settings(self.ranks.min(elastic.most));
        let ip = place.rendezvous.ip();
        let hear = move |heard| {
            // A launcher that has ended hears nothing.
            let _ = events.send(Event::Membership(heard));
        };
        let mut home = Embedded::open(ip, &place.token, settings, Duration::ZERO, hear)?;
        if let Some(observer) = &self.observer {
            home.observe(observer.clone());
        }
        Ok(Box::new(home))
    }

    fn join(
        &self,
        elastic: &Elastic,
        shared: &SharedJob,
        events: Sender<Event>,
    ) -> Result<Machines, JoinError> {
        let joining = Joining {
            workers: self.ranks,
            ip: shared.ip,
            host: shared.host.clone(),
            token: self.token.clone(),
            encrypt: self.encrypt,
            equal: shared.equal.clone(),
            // How many machines will come is not known.
            settings: elastic.settings(elastic.least),
            deadline: self.deadline(),
        };
        let hear = move |heard| {
            // A launcher that has ended hears nothing.
            let _ = events.send(Event::Membership(heard));
        };
        Machines::join(shared.store.clone(), joining, Duration::ZERO, hear)
    }

    /// Whether the request makes sense.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Usage`] if not, as [`Launch::run`] would say.
    pub fn check(&self) -> Result<(), LaunchError> {
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
        let several = self.nodes.as_ref().is_some_and(|nodes| nodes.count > 1);
        if several && (self.servers.is_some() || self.listeners_for_ranks) {
            return Err(LaunchError::Usage(
                "the launcher opens sockets for jobs of one node only; start servers by hand",
            ));
        }
        if several && self.elastic.is_some() {
            return Err(LaunchError::Usage(
                "ranks may come and go in jobs of one node, or of machines that meet by etcd",
            ));
        }
        if self.shared.is_some() && self.elastic.is_none() {
            return Err(LaunchError::Usage("machines that meet by etcd run elastic jobs only"));
        }
        Ok(())
    }

    fn server_count(&self) -> u32 {
        self.servers.as_ref().map_or(0, |servers| servers.commands().len() as u32)
    }

    /// Whether members may come and go.
    fn is_relaxed(&self) -> bool {
        self.servers.is_some()
            || self.listeners_for_ranks
            || self.restarts.limit > 0
            || self.elastic.is_some()
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

/// One of the processes that make up a job on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    /// By its number on this node.
    Rank(u32),
    Server(u32),
}

impl Member {
    /// Its place among all members of a node with so many servers.
    fn index(self, servers: u32) -> usize {
        match self {
            Member::Server(server) => server as usize,
            Member::Rank(local) => (servers + local) as usize,
        }
    }
}

/// What the launcher reacts to.
enum Event {
    /// The process of a member ended; it is not reaped yet.
    Ended { member: Member, ending: Ending },
    /// What a member that failed for good wrote to stderr last.
    LastWords { member: Member, ending: Ending, stderr: Vec<String> },
    /// What the caller wanted done at the end is done.
    AtEndDone,
    /// The launcher was told to stop.
    Signal(i32),
    /// Another launcher said something.
    Heard { node: u32, message: nodes::Message },
    /// Another launcher's connection closed.
    Closed { node: u32 },
    /// A worker of an elastic job said something.
    Membership(Heard),
    /// The workers of an elastic job have handed in their result: none is needed any more.
    Complete,
    /// An elastic job had too few workers for too long.
    TooFewWorkers { ready: usize, least: u32 },
    /// An elastic job loses workers before it completes a step, again and again.
    NoProgress { epochs: u32 },
    /// Another job has begun under the name of this one.
    Superseded,
    /// What the members write cannot be passed on.
    OutputLost(io::Error),
    /// The guard with this number ended.
    GuardEnded(u32),
}

/// The outcome of a job whose output met this error.
fn output_lost(error: &io::Error) -> Outcome {
    let closed = error.kind() == io::ErrorKind::BrokenPipe;
    Outcome::OutputLost { closed, reason: error.to_string() }
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
