//! A job on several machines: the present epoch, and which launcher coordinates it, are kept in etcd.
//!
//! Every machine has a launcher, with an agent for the workers of that machine. One launcher leads. What each of
//! them does is decided by a pure core, `launcher::Launcher`; here are the threads and sockets.
//!
//! ```text
//!  worker ⇄ agent ─┐                              ┌─ agent ⇄ worker
//!  worker ⇄ agent ─┴ launcher ⇄ leading launcher ─┴─ agent ⇄ worker
//!                                    ⇅
//!                          etcd: one record per job
//! ```

mod clerk;
mod etcd;
mod launcher;
mod links;
mod record;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use unisono_net::{Token, TokenError};

pub use clerk::{Replaced, Store, StoreError};
pub use etcd::{EtcdRecord, Kept};
pub use launcher::Status;
pub use record::{JoinRefused, Machine, Record};

pub(super) use self::clerk::Answer;
use self::clerk::Clerk;
use self::launcher::{Command, Input, Launcher};
pub(super) use self::links::FromLink;
use self::links::{Links, Listener};
use self::record::Applicant;
use super::ToWorker;
use super::agent::Agent;
use super::coordinator::{History, Report};
use super::core::{Settings, WorkerId};
use super::{Brought, Heard, Home, Order};

/// What a launcher has to say for itself when it joins a job.
#[derive(Clone, Debug)]
pub struct Joining {
    /// How many workers it starts.
    pub workers: u32,
    /// The address at which other machines can reach this one.
    pub ip: IpAddr,
    /// The name of this machine, for people.
    pub host: String,
    /// The job's token, if this launcher was given one.
    pub token: Option<Token>,
    /// Whether connections are encrypted.
    pub encrypt: bool,
    /// Other settings that must be equal on all machines, as text: `timeout 10 s, streams 1`.
    pub equal: String,
    /// With fewer workers the job waits, more wait as spares, and so on.
    pub settings: Settings,
    /// When to give up joining.
    pub deadline: Instant,
}

/// Why a launcher could not join a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The job does not take it.
    #[error(transparent)]
    Refused(#[from] JoinRefused),
    /// Where the record is kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What is kept is no record of this version.
    #[error(
        "what is kept under the name of this job was not written by this version of Unisono; choose another \
         --job name"
    )]
    Unreadable,
    /// The token that is kept cannot be one.
    #[error("the token that is kept for this job cannot be read: {0}")]
    Token(#[from] TokenError),
    /// The system lacks something.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A job on several machines, as the launcher of one of them takes part in it.
pub struct Machines {
    launcher: Launcher,
    me: Machine,
    token: Token,
    agent: Agent,
    links: Links,
    clerk: Clerk,
    is_leaving: bool,
    /// What was published last, and when.
    published: Option<(Status, Instant)>,
    /// What a worker said when it handed in the result, until that is kept.
    finished: Option<(WorkerId, Report)>,
}

/// How often the leader publishes that nothing has changed. More often: more requests to etcd. Less often: it shows
/// later that no launcher is left.
const REFRESH: Duration = Duration::from_secs(10);

/// How long to wait before the record is tried again while joining.
const PAUSE: Duration = Duration::from_millis(100);

impl Machines {
    /// Joins a job, or begins one, by the record that is kept in `store`. What connections bring goes to `hear`,
    /// on other threads; the owner hands it [on](Home::heard).
    pub fn join(
        store: Arc<dyn Store>,
        joining: Joining,
        now: Duration,
        hear: impl Fn(Heard) + Send + Sync + 'static,
    ) -> Result<Machines, JoinError> {
        let hear = Arc::new(hear);
        let listener = Listener::bind(joining.ip)?;
        let (me, record, revision) = enroll(&*store, &joining, listener.address())?;
        let token = match (&joining.token, &record.token) {
            (Some(token), _) => token.clone(),
            (None, Some(kept)) => kept.parse()?,
            (None, None) => return Err(JoinRefused::Token.into()),
        };
        let token = token.with_encryption(joining.encrypt);
        let of_workers = hear.clone();
        let agent = Agent::open(joining.ip, &token, move |from| {
            of_workers(Heard(Brought::Worker(from)));
        })?;
        let of_links = hear.clone();
        let from_link = Arc::new(move |from| of_links(Heard(Brought::Link(from))));
        let links = listener.start(me.number, &token, from_link)?;
        let clerk = Clerk::start(store, record.clone(), me.clone(), move |answer| {
            hear(Heard(Brought::Store(answer)));
        })?;
        let (launcher, commands) =
            Launcher::new(joining.settings, me.clone(), record, revision, now);
        let mut machines = Machines {
            launcher,
            me,
            token,
            agent,
            links,
            clerk,
            is_leaving: false,
            published: None,
            finished: None,
        };
        machines.carry_out(commands);
        Ok(machines)
    }

    /// This machine's place in the job.
    pub fn me(&self) -> &Machine {
        &self.me
    }

    /// The job's token.
    pub fn token(&self) -> &Token {
        &self.token
    }

    fn handle(&mut self, now: Duration, input: Input) -> Vec<Order> {
        let commands = self.launcher.handle(now, input);
        self.carry_out(commands)
    }

    fn carry_out(&mut self, commands: Vec<Command>) -> Vec<Order> {
        let mut orders = Vec::new();
        for command in commands {
            match command {
                Command::Read => self.clerk.read(),
                Command::Write(record, revision) => self.clerk.write(record, revision),
                Command::Link(leader) => self.links.open(&leader),
                Command::Unlink => self.links.unlink(),
                Command::ToLeader(message) => self.links.tell_leader(&message),
                Command::ToMachine(machine, message) => self.links.tell_machine(machine, &message),
                Command::Close(machine) => self.links.close(machine),
                Command::ToWorker(worker, message) => self.agent.tell(worker, &message),
                Command::Kill(worker, sign) => orders.push(Order::Kill(worker, sign)),
                Command::Complete { epoch } => {
                    self.agent.tell_all(&ToWorker::Finish);
                    let result = self.agent.result(epoch);
                    // What was handed in in another epoch is not what the run came to.
                    self.agent.take_result();
                    orders.push(Order::Finished(result));
                }
                Command::Disband => orders.push(Order::Disband),
                Command::Superseded => orders.push(Order::Superseded),
                Command::GiveUp { ready } => orders.push(Order::GiveUp { ready }),
                Command::NoProgress { epochs } => orders.push(Order::NoProgress { epochs }),
            }
        }
        self.publish();
        orders
    }

    /// Publishes what has changed of the job, for people, and now and then that nothing has.
    fn publish(&mut self) {
        let Some(status) = self.launcher.status() else { return };
        let is_old = |(published, when): &(Status, Instant)| {
            *published != status || when.elapsed() >= REFRESH
        };
        if self.published.as_ref().is_none_or(is_old) {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            let at = since.map_or(0, |since| since.as_secs());
            self.clerk.publish(Status { at, ..status.clone() });
            self.published = Some((status, Instant::now()));
        }
    }

    /// Has the result kept before the leader hears of it: the launcher that prints it may be lost.
    fn on_worker(&mut self, now: Duration, worker: WorkerId, report: Report) -> Vec<Order> {
        if let (Report::Finished { .. }, Some(result)) = (&report, self.agent.handed_in()) {
            self.clerk.keep_result(result.to_vec());
            self.finished = Some((worker, report));
            return Vec::new();
        }
        self.handle(now, Input::Worker(worker, report))
    }

    fn on_link(&mut self, now: Duration, from: FromLink) -> Vec<Order> {
        let input = match from {
            FromLink::Arrived(machine, link) => {
                let mut orders = Vec::new();
                if self.links.has(machine) {
                    // Its earlier connection is over, whether that has shown or not.
                    orders = self.handle(now, Input::MachineClosed(machine));
                }
                self.links.arrived(machine, link);
                return orders;
            }
            FromLink::Said(machine, number, message) if self.links.is_of(machine, number) => {
                Input::FromMachine(machine, message)
            }
            FromLink::Closed(machine, number) if self.links.is_of(machine, number) => {
                Input::MachineClosed(machine)
            }
            FromLink::Linked(link) => {
                if !self.links.linked(link) {
                    return Vec::new();
                }
                Input::Linked
            }
            FromLink::Unreachable(number, is_gone) if self.links.is_leader(number) => {
                Input::Unreachable { is_gone }
            }
            FromLink::LeaderSaid(number, message) if self.links.is_leader(number) => {
                Input::FromLeader(message)
            }
            FromLink::LeaderClosed(number) if self.links.is_leader(number) => Input::LeaderClosed,
            // Of a connection that was given up.
            _ => return Vec::new(),
        };
        self.handle(now, input)
    }
}

impl Home for Machines {
    fn address(&self) -> SocketAddr {
        self.agent.address()
    }

    fn history(&self) -> History {
        self.launcher.history().clone()
    }

    fn deadline(&self) -> Option<Duration> {
        self.launcher.deadline()
    }

    fn heard(&mut self, now: Duration, heard: Heard) -> Vec<Order> {
        match heard.0 {
            Brought::Worker(from) => match self.agent.heard(from) {
                Some((worker, report)) => self.on_worker(now, worker, report),
                None => Vec::new(),
            },
            Brought::Link(from) => self.on_link(now, from),
            Brought::Store(Answer::Read(record, revision)) => {
                self.handle(now, Input::Read(*record, revision))
            }
            Brought::Store(Answer::Written(revision)) => self.handle(now, Input::Written(revision)),
            Brought::Store(Answer::Kept) => match self.finished.take() {
                Some((worker, report)) => self.handle(now, Input::Worker(worker, report)),
                None => Vec::new(),
            },
        }
    }

    fn ended(&mut self, now: Duration, worker: WorkerId) -> Vec<Order> {
        self.handle(now, Input::Worker(worker, Report::Ended))
    }

    fn tick(&mut self, now: Duration) -> Vec<Order> {
        let commands = self.launcher.tick(now);
        self.carry_out(commands)
    }

    fn pending_result(&mut self) -> Option<Vec<u8>> {
        self.agent.take_result()
    }

    fn release(&mut self, now: Duration) {
        self.agent.tell_all(&ToWorker::Stop);
        let commands = self.launcher.release(now);
        self.carry_out(commands);
    }

    fn leave(&mut self, now: Duration) -> Option<Vec<Order>> {
        // With the result at hand there is nothing to leave to others.
        let is_done = self.agent.handed_in().is_some();
        if std::mem::replace(&mut self.is_leaving, true) || !self.launcher.has_others() || is_done {
            return None;
        }
        Some(self.handle(now, Input::Leave))
    }
}

/// Writes this launcher into the record of the job.
fn enroll(
    store: &dyn Store,
    joining: &Joining,
    address: SocketAddr,
) -> Result<(Machine, Record, u64), JoinError> {
    let token = match joining.token {
        Some(_) => None,
        None => Some(Token::random()?.to_hex()),
    };
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(io::Error::from)?;
    let applicant = Applicant {
        id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
        workers: joining.workers,
        address,
        host: joining.host.clone(),
        least: joining.settings.least as u32,
        most: joining.settings.most as u32,
        token,
        proof: joining.token.as_ref().map(|token| record::proof_of(&token.to_hex())),
        settings: joining.equal.clone(),
    };
    loop {
        match apply(store, &applicant) {
            Ok(Some(joined)) => return Ok(joined),
            // Another launcher was faster.
            Ok(None) => {}
            Err(JoinError::Store(StoreError::Unavailable(_)))
                if Instant::now() < joining.deadline =>
            {
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Tries once; `None` if the record changes meanwhile.
fn apply(
    store: &dyn Store,
    applicant: &Applicant,
) -> Result<Option<(Machine, Record, u64)>, JoinError> {
    let found = store.read()?;
    let revision = found.as_ref().map_or(0, |(_, revision)| *revision);
    let record = match found {
        Some((bytes, _)) => Some(Record::parse(&bytes).ok_or(JoinError::Unreadable)?),
        None => None,
    };
    let (me, record) = Record::join(record, applicant.clone())?;
    Ok(match store.replace(revision, &record.to_bytes())? {
        Replaced::Done(revision) => Some((me, record, revision)),
        Replaced::Other(_) => None,
    })
}
