//! A worker's connection to its coordinator.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unisono_net::frame::{self, FrameError};
use unisono_net::{Connection, Receiver, Sender, Token};

use super::{
    About, FirstStep, MAX_ADDRESS, Seen, ToCoordinator, ToWorker, VARIABLE, WorkerId, epoch_token,
    introduction,
};
use crate::place::{MAX_WORLD, Place, split_host_port};
use crate::rendezvous::{RendezvousError, Sought};
use crate::worker::Worker;

/// The largest message of a coordinator: an epoch of as many workers as a job can have.
const MAX_MESSAGE: usize = MAX_WORLD as usize * 256 + MAX_ADDRESS;

/// How long a worker waits to hear where the members are: while one launcher takes over from another, none may
/// say so. Longer: it joins later then. Shorter: it joins without having asked a member for the state.
const LOOKING: Duration = Duration::from_secs(2);

/// A worker's connection to its coordinator.
pub struct Client {
    id: WorkerId,
    ip: IpAddr,
    token: Token,
    /// Into how many shards this worker cuts a batch, if it does.
    shards: Option<u32>,
    sender: Arc<Mutex<Sender>>,
    shared: Arc<Shared>,
}

/// What the coordinator has said.
#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    bell: Condvar,
    /// The newest epoch whose members were asked to leave it.
    asked: AtomicU64,
    /// What to do when an epoch is over.
    on_over: Mutex<Option<OnOver>>,
    /// Whether the job is to stop.
    stopping: Arc<AtomicBool>,
}

type OnOver = (u64, Box<dyn FnOnce() + Send>);

#[derive(Default)]
struct Inbox {
    /// The newest epoch that is over.
    over: u64,
    next: Option<Next>,
    /// The answer to the last look.
    seen: Option<Seen>,
    /// How the connection was lost.
    lost: Option<Arc<FrameError>>,
}

/// What a worker that is ready is told.
#[derive(Clone, Debug)]
pub enum Next {
    /// An epoch begins with it.
    Epoch(View),
    /// The run is complete.
    Over,
}

/// An epoch, as one of its members sees it.
#[derive(Clone, Debug)]
pub struct View {
    /// Its number, from 1.
    pub epoch: u64,
    /// This worker's rank in it.
    pub rank: usize,
    /// Its members, by rank.
    pub members: Vec<WorkerId>,
    /// Where they can be reached, by rank.
    pub addresses: Vec<Vec<u8>>,
    /// Whether this worker is to say which shard it [computes](Client::computing).
    pub is_careful: bool,
    /// What its connections prove.
    pub token: Token,
}

/// Why a worker is not in an epoch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The coordinator could not be reached.
    #[error(transparent)]
    Unreachable(#[from] RendezvousError),
    /// The variable does not say where it is.
    #[error(
        "{VARIABLE}={value} is not HOST:PORT; start workers by `unisono run` or `unisono train`"
    )]
    Variable {
        /// What it says.
        value: String,
    },
    /// The launcher has ended, or has cut this worker off.
    #[error("the launcher, which coordinates the workers, is gone ({0}); see what it printed")]
    Lost(#[source] Arc<FrameError>),
    /// The system lacks something.
    #[error("connecting to the launcher: {0}")]
    Io(#[from] std::io::Error),
}

impl Client {
    /// Connects to the coordinator that the launcher has named; `None` if it has named none.
    pub fn connect(
        place: &Place,
        encrypt: bool,
        deadline: Instant,
    ) -> Result<Option<Client>, MembershipError> {
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let value = value.to_string_lossy().into_owned();
        let wrong = || MembershipError::Variable { value: value.clone() };
        let (host, port) = split_host_port(&value).ok_or_else(wrong)?;
        (host, port).to_socket_addrs().map_err(|_| wrong())?;
        let token = place.token.clone().ok_or_else(wrong)?.with_encryption(encrypt);
        let life = Worker::from_env().map_or(0, |worker| worker.starts.saturating_sub(1));
        let id = WorkerId { number: place.rank, life: life as u32 };
        Client::connect_to((host, port), id, token, deadline).map(Some)
    }

    /// The address of this machine at which its launcher listens: others can reach it there.
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// Connects a worker to the coordinator that listens there.
    pub fn connect_to(
        (host, port): (&str, u16),
        id: WorkerId,
        token: Token,
        deadline: Instant,
    ) -> Result<Client, MembershipError> {
        let (hosts, ports) = ([host], [port]);
        let introduction = introduction(id);
        let sought = Sought { hosts: &hosts, ports: &ports, key: &token, introduction };
        let connection = sought.find(deadline)?;
        Client::over(connection, id, token)
    }

    fn over(connection: Connection, id: WorkerId, token: Token) -> Result<Client, MembershipError> {
        let Connection { sender, receiver } = connection;
        let address = receiver.socket().peer_addr()?.as_socket();
        let ip = address.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip());
        // The coordinator speaks when it has something to say.
        receiver.socket().set_read_timeout(None)?;
        let (sender, shared) = (Arc::new(Mutex::new(sender)), Arc::new(Shared::default()));
        let listener =
            Listener { id, token: token.clone(), sender: sender.clone(), shared: shared.clone() };
        std::thread::Builder::new()
            .name("unisono-member".into())
            .spawn(move || listener.listen(receiver))?;
        Ok(Client { id, ip, token, shards: None, sender, shared })
    }

    /// This worker.
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// The job's token.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// From now on says that a batch is cut into so many shards: no epoch gets more members.
    pub fn set_shards(&mut self, shards: usize) {
        self.shards = u32::try_from(shards).ok();
    }

    /// Waits for the next epoch with this worker in it. It has left epoch `after`, which is 0 if it was in
    /// none; `silent` are the ranks that it lost there because they were silent, and `address` is where the
    /// other members of the next epoch can reach it.
    pub fn enter(
        &self,
        after: u64,
        silent: &[usize],
        address: Vec<u8>,
    ) -> Result<Next, MembershipError> {
        let silent = silent.iter().map(|rank| *rank as u32).collect();
        let about = About { address, pid: std::process::id(), shards: self.shards };
        self.say(&ToCoordinator::Ready { after, silent, about })?;
        self.wait()
    }

    /// Where the members of the present epoch are, for a worker that is in none and not ready yet. A coordinator that
    /// does not answer soon knows of none.
    pub fn look(&self) -> Result<Seen, MembershipError> {
        self.shared.lock().seen = None;
        self.say(&ToCoordinator::Look)?;
        let deadline = Instant::now() + LOOKING;
        let mut inbox = self.shared.lock();
        loop {
            if let Some(seen) = inbox.seen.take() {
                return Ok(seen);
            }
            if let Some(error) = &inbox.lost {
                return Err(MembershipError::Lost(error.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Seen::Nothing);
            }
            let waited = self.shared.bell.wait_timeout(inbox, left);
            inbox = waited.expect("no panic while locked").0;
        }
    }

    /// Whether this worker was told that it is not needed any more.
    pub fn is_let_go(&self) -> bool {
        matches!(self.shared.lock().next, Some(Next::Over))
    }

    /// Becomes true when the launcher of this machine says that the job is to stop.
    pub fn stopping(&self) -> Arc<AtomicBool> {
        self.shared.stopping.clone()
    }

    /// Whether the members of an epoch should agree to leave it.
    pub fn is_asked_to_regroup(&self, epoch: u64) -> bool {
        self.shared.asked.load(Ordering::Relaxed) >= epoch
    }

    /// Calls `end`, on another thread or this one, when the coordinator says that an epoch is over.
    pub fn when_over(&self, epoch: u64, end: impl FnOnce() + Send + 'static) {
        let is_over = {
            let inbox = self.shared.lock();
            *self.shared.on_over() = Some((epoch, Box::new(end)));
            inbox.over >= epoch
        };
        if is_over {
            self.shared.end(epoch);
        }
    }

    /// Tells which shard this worker begins to compute, or that it has computed all of a step.
    pub fn computing(&self, shard: Option<usize>) -> Result<(), MembershipError> {
        self.say(&ToCoordinator::Computing(shard.map(|shard| shard as u64)))
    }

    /// Tells that the first step of an epoch is complete.
    pub fn stepped(&self, first: FirstStep) -> Result<(), MembershipError> {
        self.say(&ToCoordinator::Stepped(first))
    }

    /// Hands in the result of the run, as rank 0 of an epoch, and waits until it is there.
    pub fn finish(&self, epoch: u64, result: Vec<u8>) -> Result<(), MembershipError> {
        self.say(&ToCoordinator::Finished { epoch, result })?;
        loop {
            if let Next::Over = self.wait()? {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> Result<Next, MembershipError> {
        let mut inbox = self.shared.lock();
        loop {
            if let Some(next) = inbox.next.take() {
                return Ok(next);
            }
            if let Some(error) = &inbox.lost {
                return Err(MembershipError::Lost(error.clone()));
            }
            inbox = self.shared.bell.wait(inbox).expect("no panic while locked");
        }
    }

    fn say(&self, message: &ToCoordinator) -> Result<(), MembershipError> {
        say(&self.sender, message).map_err(|error| MembershipError::Lost(Arc::new(error)))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let sender = self.sender.lock().expect("no panic while locked");
        let _ = sender.socket().shutdown(std::net::Shutdown::Both);
    }
}

/// The thread that hears what the coordinator says, so that it is answered while the worker computes.
struct Listener {
    id: WorkerId,
    token: Token,
    sender: Arc<Mutex<Sender>>,
    shared: Arc<Shared>,
}

impl Listener {
    fn listen(self, mut receiver: Receiver) {
        let error = loop {
            match frame::receive(&mut receiver, MAX_MESSAGE) {
                Ok(message) => {
                    if let Err(error) = self.hear(message) {
                        break error;
                    }
                }
                Err(error) => break error,
            }
        };
        self.shared.lock().lost = Some(Arc::new(error));
        self.shared.bell.notify_all();
    }

    fn hear(&self, message: ToWorker) -> Result<(), FrameError> {
        let next = match message {
            ToWorker::Probe => return say(&self.sender, &ToCoordinator::Alive),
            ToWorker::AskToRegroup { epoch } => {
                self.shared.asked.fetch_max(epoch, Ordering::Relaxed);
                return Ok(());
            }
            ToWorker::Over { epoch } => {
                self.shared.lock().over = epoch;
                self.shared.end(epoch);
                return Ok(());
            }
            ToWorker::Stop => {
                self.shared.stopping.store(true, Ordering::Relaxed);
                return Ok(());
            }
            ToWorker::Seen(seen) => {
                self.shared.lock().seen = Some(seen);
                self.shared.bell.notify_all();
                return Ok(());
            }
            ToWorker::Finish => Next::Over,
            ToWorker::Begin { epoch, members, addresses, is_careful } => {
                let rank = members.iter().position(|id| *id == self.id);
                let rank = rank.filter(|_| members.len() == addresses.len());
                let rank = rank.ok_or(FrameError::Malformed)?;
                let token = epoch_token(&self.token, epoch);
                Next::Epoch(View { epoch, rank, members, addresses, is_careful, token })
            }
        };
        self.shared.lock().next = Some(next);
        self.shared.bell.notify_all();
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().expect("no panic while locked")
    }

    fn on_over(&self) -> MutexGuard<'_, Option<OnOver>> {
        self.on_over.lock().expect("no panic while locked")
    }

    /// Does what is to be done when an epoch is over, once.
    fn end(&self, epoch: u64) {
        let end = self.on_over().take_if(|(watched, _)| *watched <= epoch);
        if let Some((_, end)) = end {
            end();
        }
    }
}

fn say(sender: &Mutex<Sender>, message: &ToCoordinator) -> Result<(), FrameError> {
    frame::send(&mut *sender.lock().expect("no panic while locked"), message)
}
