//! Connects the [core](super::core) with the workers: hears them, and tells them what it decides.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use socket2::Socket;
use unisono_net::{Acceptor, Admission, Connection, Receiver, Sender, Token, frame};

use super::core::{Decision, Input, Membership, Settings, WorkerId};
use super::events::{Happened, Observer, Occurrence, Sign};
use super::{MAX_ADDRESS, MEMBERSHIP, ToCoordinator, ToWorker, introduced};
use crate::rendezvous::listen;

/// The largest message of a worker: its result.
const MAX_MESSAGE: usize = 16 << 20;

/// How long a worker may take to accept a message before the coordinator gives up on it. Longer: a worker that
/// is stopped, and has a full buffer, keeps the others waiting. Shorter: a slow one is cut off.
const PATIENCE: Duration = Duration::from_secs(1);

/// Epochs in a row that may end before a step is complete. More: a run that kills each of its workers, as one
/// with a shard that none of them can compute, ends later. Fewer: workers that are killed one after the other by
/// accident end the run.
const FRUITLESS: u32 = 30;

/// What the connections of workers bring. The owner of the coordinator hands it [on](Coordinator::heard).
pub struct Heard {
    worker: WorkerId,
    what: What,
}

enum What {
    Connected(Sender, u64),
    Said(ToCoordinator),
    Closed(u64),
}

/// What the owner of the coordinator has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Kill the process of a worker.
    Kill(WorkerId),
    /// The run is complete, with this result: no worker is needed any more.
    Finished(Vec<u8>),
    /// There were too few workers for too long.
    GiveUp {
        /// How many there are.
        ready: usize,
    },
    /// So many epochs in a row have ended before a step was complete: another would as well.
    NoProgress {
        /// How many.
        epochs: u32,
    },
}

/// The first step of an epoch, as its rank 0 saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstStep {
    /// The epoch.
    pub epoch: u64,
    /// The step.
    pub step: u64,
    /// Seconds that it took to compute.
    pub compute: f64,
    /// Whether it had been begun in the epoch before.
    pub redone: bool,
    /// Workers that were given the state of another.
    pub behind: u64,
    /// Whether no worker had any state, so that the run went back to its last checkpoint, or its beginning.
    pub from_checkpoint: bool,
}

/// How a run went on after a loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// Seconds from the loss, as the coordinator saw it, until the first step was complete, without the
    /// computation of that step.
    pub seconds: f64,
    /// What was complete then.
    pub first: FirstStep,
}

/// What has happened to a job's membership.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Epochs that have begun.
    pub epochs: u64,
    /// Members that were lost.
    pub workers_lost: u64,
    /// Workers that became members of a later epoch than the first.
    pub workers_joined: u64,
    /// How the run went on each time.
    pub recoveries: Vec<Recovery>,
    /// The members that were lost since a step was last complete: their ranks, and of how many.
    pub lost_since: Vec<(usize, usize)>,
}

/// The coordinator of a job.
pub struct Coordinator {
    membership: Membership,
    links: HashMap<WorkerId, Link>,
    history: History,
    /// Is told what happens.
    observer: Option<Observer>,
    /// The most members of an epoch.
    most: usize,
    /// Of the newest epoch.
    members: Vec<WorkerId>,
    /// Those of them of whose loss the observer was told.
    lost: Vec<WorkerId>,
    /// Whether one of them is lost, and whether the others have been told so.
    is_broken: bool,
    told_over: bool,
    /// Whether a step is complete in this epoch, and how many before it have ended without.
    has_stepped: bool,
    fruitless: u32,
    /// Whether the job is to end.
    is_ending: bool,
    /// When the first of them was lost since a step was last complete.
    lost_at: Option<Duration>,
    /// The result, once it was handed in.
    result: Option<Vec<u8>>,
    address: SocketAddr,
    /// Keeps the port open.
    _acceptor: Acceptor,
}

struct Link {
    sender: Sender,
    /// Where the members of the next epoch can reach this worker.
    address: Vec<u8>,
    /// What it has handed in.
    result: Vec<u8>,
    /// Which of the connections that have introduced themselves as this worker it is.
    connection: u64,
}

impl Coordinator {
    /// Listens at `ip`, on any free port, for workers that hold the token. What they bring goes to `hear`, on
    /// other threads.
    pub fn open(
        ip: IpAddr,
        token: &Token,
        settings: Settings,
        now: Duration,
        hear: impl Fn(Heard) + Send + Sync + 'static,
    ) -> io::Result<Coordinator> {
        let (listeners, port) = listen(&ip.to_string(), 0)?;
        let admission = Admission::new(token.clone(), &[MEMBERSHIP]);
        let hear = Arc::new(hear);
        let acceptor = Acceptor::start(listeners, admission, move |connection, introduction| {
            let Some(worker) = introduced(introduction) else { return };
            if let Err(error) = attend(connection, worker, hear.clone()) {
                log::warn!("cannot hear worker {}: {error}", worker.number);
            }
        })?;
        Ok(Coordinator {
            most: settings.most,
            membership: Membership::new(settings, now),
            links: HashMap::new(),
            history: History::default(),
            observer: None,
            members: Vec::new(),
            lost: Vec::new(),
            is_broken: false,
            told_over: false,
            has_stepped: false,
            fruitless: 0,
            is_ending: false,
            lost_at: None,
            result: None,
            address: SocketAddr::new(ip, port),
            _acceptor: acceptor,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on tells `observer` what happens.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// What has happened so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// When time alone changes something: see [`Coordinator::tick`].
    pub fn deadline(&self) -> Option<Duration> {
        self.membership.deadline()
    }

    /// A connection brought something.
    pub fn heard(&mut self, now: Duration, heard: Heard) -> Vec<Order> {
        let Heard { worker, what } = heard;
        let input = match what {
            What::Connected(sender, connection) => {
                if self.links.contains_key(&worker) {
                    // A second connection of one process: not one of ours.
                    let _ = sender.socket().shutdown(std::net::Shutdown::Both);
                    return Vec::new();
                }
                let (address, result) = Default::default();
                self.links.insert(worker, Link { sender, address, result, connection });
                self.note(now, Occurrence::Connected(worker));
                Input::Connected(worker)
            }
            What::Closed(connection) => {
                // A second connection that was turned away is no news of the first.
                if self.links.get(&worker).is_some_and(|link| link.connection != connection) {
                    return Vec::new();
                }
                self.links.remove(&worker);
                self.note_lost(now, worker, Sign::CutOff);
                Input::Closed(worker)
            }
            What::Said(message) => match self.said(now, worker, message) {
                Some(input) => input,
                None => return Vec::new(),
            },
        };
        let decisions = self.membership.handle(now, input);
        let orders = self.carry_out(now, decisions, Sign::CutOff);
        self.release_spares();
        orders
    }

    /// The process of a worker has ended.
    pub fn ended(&mut self, now: Duration, worker: WorkerId) -> Vec<Order> {
        if self.members.contains(&worker) && self.result.is_none() {
            self.history.workers_lost += 1;
        }
        self.note_lost(now, worker, Sign::Ended);
        let decisions = self.membership.handle(now, Input::Ended(worker));
        self.carry_out(now, decisions, Sign::CutOff)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Order> {
        let decisions = self.membership.tick(now);
        self.carry_out(now, decisions, Sign::Silent)
    }

    /// The job is to end: lets workers go that wait for an epoch, now and from now on.
    pub fn release(&mut self) {
        self.is_ending = true;
        self.release_spares();
    }

    fn release_spares(&mut self) {
        if self.is_ending {
            let spares: Vec<WorkerId> = self.membership.spares().collect();
            spares.into_iter().for_each(|worker| self.tell(worker, &ToWorker::Finish));
        }
    }

    fn said(&mut self, now: Duration, worker: WorkerId, message: ToCoordinator) -> Option<Input> {
        match message {
            ToCoordinator::Ready { after, silent, address } => {
                if address.len() > MAX_ADDRESS {
                    return Some(Input::Closed(worker));
                }
                if self.result.is_some() {
                    // It has come too late to hear that it is not needed any more.
                    self.tell(worker, &ToWorker::Finish);
                    return None;
                }
                self.links.get_mut(&worker)?.address = address;
                if !silent.is_empty() {
                    self.lost_at.get_or_insert(now);
                }
                self.note(now, Occurrence::Ready(worker));
                let silent = silent.into_iter().map(|rank| rank as usize).collect();
                Some(Input::Ready { worker, after, silent })
            }
            ToCoordinator::Alive => Some(Input::Answered(worker)),
            ToCoordinator::Stepped(first) => {
                if first.epoch != self.history.epochs {
                    return None;
                }
                (self.has_stepped, self.fruitless) = (true, 0);
                self.history.lost_since.clear();
                let seconds_since = |lost| now.saturating_sub(lost).as_secs_f64();
                let recovery = self.lost_at.take();
                let recovery = recovery.map(|lost| (seconds_since(lost) - first.compute).max(0.0));
                self.note(now, Occurrence::Stepped { first: first.clone(), recovery });
                let recovery = recovery.map(|seconds| Recovery { seconds, first });
                self.history.recoveries.extend(recovery);
                None
            }
            ToCoordinator::Finished { epoch, result } => {
                self.links.get_mut(&worker)?.result = result;
                Some(Input::Finished { worker, epoch })
            }
            ToCoordinator::Look => {
                let seen = self.seen();
                self.tell(worker, &seen);
                None
            }
        }
    }

    /// The present epoch, as a worker sees it that is not in it.
    fn seen(&self) -> ToWorker {
        let is_open = self.membership.is_whole() && self.result.is_none() && !self.is_ending;
        let (mut epoch, mut addresses) = (0, Vec::new());
        if is_open && self.members.len() < self.most {
            epoch = self.membership.epoch();
            let links = self.members.iter().filter_map(|member| self.links.get(member));
            addresses = links.map(|link| link.address.clone()).collect();
        }
        ToWorker::Seen { epoch, addresses }
    }

    /// Does what was decided; `sign` says why workers are to be killed, if any are.
    fn carry_out(&mut self, now: Duration, decisions: Vec<Decision>, sign: Sign) -> Vec<Order> {
        let mut orders = Vec::new();
        for decision in decisions {
            match decision {
                Decision::Begin { epoch, members } => {
                    if epoch > 1 && !self.has_stepped {
                        self.fruitless += 1;
                    }
                    if self.fruitless == FRUITLESS {
                        orders.push(Order::NoProgress { epochs: FRUITLESS });
                    }
                    self.begin(now, epoch, &members);
                }
                Decision::AskToRegroup => {
                    let epoch = self.membership.epoch();
                    for worker in self.membership.members().to_vec() {
                        self.tell(worker, &ToWorker::AskToRegroup { epoch });
                    }
                }
                Decision::Probe(worker) => self.tell(worker, &ToWorker::Probe),
                Decision::Kill(worker) => {
                    self.tell_lost(now, worker, sign);
                    self.note(now, Occurrence::Killed { worker, sign });
                    orders.push(Order::Kill(worker));
                }
                Decision::Finish => {
                    let first = self.members.first().and_then(|first| self.links.get_mut(first));
                    let result = first.map(|link| std::mem::take(&mut link.result));
                    self.result = Some(result.unwrap_or_default());
                    self.note(now, Occurrence::Finished);
                    let all: Vec<WorkerId> = self.links.keys().copied().collect();
                    all.into_iter().for_each(|worker| self.tell(worker, &ToWorker::Finish));
                    orders.push(Order::Finished(self.result.clone().unwrap_or_default()));
                }
                Decision::GiveUp { ready } => {
                    self.note(now, Occurrence::GaveUp { ready });
                    orders.push(Order::GiveUp { ready });
                }
            }
        }
        if self.is_broken && !self.told_over && self.result.is_none() {
            self.told_over = true;
            let over = ToWorker::Over { epoch: self.membership.epoch() };
            self.members.clone().into_iter().for_each(|worker| self.tell(worker, &over));
        }
        orders
    }

    fn begin(&mut self, now: Duration, epoch: u64, members: &[WorkerId]) {
        log::debug!("epoch {epoch} begins with {members:?}");
        let is_new = |worker: &&WorkerId| !self.members.contains(worker);
        self.history.workers_joined += members.iter().filter(is_new).count() as u64;
        if self.history.epochs == 0 {
            self.history.workers_joined = 0;
        }
        self.history.epochs = epoch;
        self.members = members.to_vec();
        self.lost.clear();
        (self.is_broken, self.told_over, self.has_stepped) = (false, false, false);
        self.note(now, Occurrence::Epoch { epoch, members: members.to_vec() });
        let addresses = members.iter().map(|worker| {
            let link = self.links.get(worker).expect("who is ready is connected");
            link.address.clone()
        });
        let addresses = addresses.collect();
        let message = ToWorker::Begin { epoch, members: members.to_vec(), addresses };
        members.iter().for_each(|worker| self.tell(*worker, &message));
    }

    fn note_lost(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        let rank = self.members.iter().position(|member| *member == worker);
        if let Some(rank) = rank {
            let lost = (rank, self.members.len());
            // Its connection closes, and its process ends.
            if !self.has_stepped && self.history.lost_since.last() != Some(&lost) {
                self.history.lost_since.push(lost);
            }
            self.is_broken = true;
            self.lost_at.get_or_insert(now);
            self.tell_lost(now, worker, sign);
        }
    }

    /// Tells the observer of the loss of a member, once.
    fn tell_lost(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        let is_new = self.members.contains(&worker) && !self.lost.contains(&worker);
        if is_new && self.result.is_none() {
            self.lost.push(worker);
            self.note(now, Occurrence::Lost { worker, sign });
        }
    }

    /// Tells the observer, if there is one.
    fn note(&self, at: Duration, what: Occurrence) {
        if let Some(observer) = &self.observer {
            observer(Happened { at, what });
        }
    }

    /// Says something to a worker. One that cannot be reached will be noticed by its closed connection.
    fn tell(&mut self, worker: WorkerId, message: &ToWorker) {
        let Some(link) = self.links.get_mut(&worker) else { return };
        if let Err(error) = frame::send(&mut link.sender, message) {
            log::debug!("cannot reach worker {}: {error}", worker.number);
            let _ = link.sender.socket().shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        for link in self.links.values() {
            // The reading threads end with their connections.
            let _ = link.sender.socket().shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Hears a worker on a thread of its own.
fn attend(
    connection: Connection,
    worker: WorkerId,
    hear: Arc<impl Fn(Heard) + Send + Sync + 'static>,
) -> io::Result<()> {
    let Connection { sender, receiver } = connection;
    let socket: &Arc<Socket> = sender.socket();
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
    let number = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
    hear(Heard { worker, what: What::Connected(sender, number) });
    std::thread::Builder::new()
        .name("unisono-worker".into())
        .spawn(move || listen_to(receiver, worker, number, &*hear))
        .map(drop)
}

fn listen_to(mut receiver: Receiver, worker: WorkerId, number: u64, hear: &impl Fn(Heard)) {
    while let Ok(message) = frame::receive(&mut receiver, MAX_MESSAGE) {
        hear(Heard { worker, what: What::Said(message) });
    }
    hear(Heard { worker, what: What::Closed(number) });
}
