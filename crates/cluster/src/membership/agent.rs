//! The workers of one machine: their connections, what they have said, and where they stand.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use socket2::Socket;
use unisono_net::{Acceptor, Admission, Connection, Receiver, Sender, Token, frame};

use super::coordinator::Report;
use super::core::WorkerId;
use super::{MAX_ADDRESS, MEMBERSHIP, ToCoordinator, ToWorker, introduced};
use crate::rendezvous::listen;

/// The largest message of a worker: its result.
const MAX_MESSAGE: usize = 16 << 20;

/// How long a worker may take to accept a message before it is given up. Longer: a worker that is stopped, and
/// has a full buffer, keeps the others waiting. Shorter: a slow one is cut off.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the connection of a worker brings.
pub(super) struct FromWorker {
    worker: WorkerId,
    what: What,
}

enum What {
    Connected(Sender, u64),
    Said(ToCoordinator),
    Closed(u64),
}

/// The workers of this machine.
pub(super) struct Agent {
    /// Until they are closed: a worker's last words may be read after its end was seen.
    links: HashMap<WorkerId, Link>,
    /// What a worker has handed in last, and in which epoch. The worker may have ended since.
    result: Option<(u64, Vec<u8>)>,
    address: SocketAddr,
    /// Keeps the port open.
    _acceptor: Acceptor,
}

struct Link {
    sender: Sender,
    /// Which of the connections that have introduced themselves as this worker it is.
    connection: u64,
}

impl Agent {
    /// Listens at `ip`, on any free port, for workers that hold the token. What they bring goes to `hear`, on
    /// other threads.
    pub fn open(
        ip: IpAddr,
        token: &Token,
        hear: impl Fn(FromWorker) + Send + Sync + 'static,
    ) -> io::Result<Agent> {
        let (listeners, port) = listen(&ip.to_string(), 0)?;
        let admission = Admission::new(token.clone(), &[MEMBERSHIP]);
        let hear = Arc::new(hear);
        let acceptor = Acceptor::start(listeners, admission, move |connection, introduction| {
            let Some(worker) = introduced(introduction) else { return };
            if let Err(error) = attend(connection, worker, hear.clone()) {
                log::warn!("cannot hear worker {}: {error}", worker.number);
            }
        })?;
        let address = SocketAddr::new(ip, port);
        Ok(Agent { links: HashMap::new(), result: None, address, _acceptor: acceptor })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What there is to report of what a connection brought.
    pub fn heard(&mut self, from: FromWorker) -> Option<(WorkerId, Report)> {
        let FromWorker { worker, what } = from;
        let report = match what {
            What::Connected(sender, connection) => {
                if self.links.contains_key(&worker) {
                    // A second connection of one process: not one of ours.
                    let _ = sender.socket().shutdown(std::net::Shutdown::Both);
                    return None;
                }
                self.links.insert(worker, Link { sender, connection });
                Report::Connected
            }
            What::Closed(connection) => {
                // A second connection that was turned away is no news of the first.
                if self.links.get(&worker).is_some_and(|link| link.connection != connection) {
                    return None;
                }
                self.links.remove(&worker);
                Report::Closed
            }
            What::Said(message) => self.said(worker, message)?,
        };
        Some((worker, report))
    }

    fn said(&mut self, worker: WorkerId, message: ToCoordinator) -> Option<Report> {
        self.links.get(&worker)?;
        Some(match message {
            ToCoordinator::Ready { about, .. } if about.address.len() > MAX_ADDRESS => {
                Report::Closed
            }
            ToCoordinator::Ready { after, silent, about } => {
                let silent = silent.into_iter().map(|rank| rank as usize).collect();
                Report::Ready { after, silent, about }
            }
            ToCoordinator::Alive => Report::Alive,
            ToCoordinator::Stepped(first) => Report::Stepped(first),
            ToCoordinator::Computing(shard) => Report::Computing(shard.map(|shard| shard as usize)),
            ToCoordinator::Look => Report::Look,
            ToCoordinator::Finished { epoch, result } => {
                self.result = Some((epoch, result));
                Report::Finished { epoch }
            }
        })
    }

    /// What a worker has handed in last.
    pub fn handed_in(&self) -> Option<&[u8]> {
        self.result.as_ref().map(|(_, result)| &**result)
    }

    /// The same, which is not needed here any more.
    pub fn take_result(&mut self) -> Option<Vec<u8>> {
        self.result.take().map(|(_, result)| result)
    }

    /// The result that a worker has handed in as rank 0 of this epoch.
    pub fn result(&mut self, epoch: u64) -> Option<Vec<u8>> {
        self.result.take_if(|(of, _)| *of == epoch).map(|(_, result)| result)
    }

    /// Says something to a worker. One that cannot be reached will be noticed by its closed connection.
    pub fn tell(&mut self, worker: WorkerId, message: &ToWorker) {
        let Some(link) = self.links.get_mut(&worker) else { return };
        if let Err(error) = frame::send(&mut link.sender, message) {
            log::debug!("cannot reach worker {}: {error}", worker.number);
            let _ = link.sender.socket().shutdown(std::net::Shutdown::Both);
        }
    }

    /// Says something to all workers.
    pub fn tell_all(&mut self, message: &ToWorker) {
        let all: Vec<WorkerId> = self.links.keys().copied().collect();
        all.into_iter().for_each(|worker| self.tell(worker, message));
    }
}

impl Drop for Agent {
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
    hear: Arc<impl Fn(FromWorker) + Send + Sync + 'static>,
) -> io::Result<()> {
    let Connection { sender, receiver } = connection;
    let socket: &Arc<Socket> = sender.socket();
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
    let number = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
    hear(FromWorker { worker, what: What::Connected(sender, number) });
    std::thread::Builder::new()
        .name("unisono-worker".into())
        .spawn(move || listen_to(receiver, worker, number, &*hear))
        .map(drop)
}

fn listen_to(mut receiver: Receiver, worker: WorkerId, number: u64, hear: &impl Fn(FromWorker)) {
    while let Ok(message) = frame::receive(&mut receiver, MAX_MESSAGE) {
        hear(FromWorker { worker, what: What::Said(message) });
    }
    hear(FromWorker { worker, what: What::Closed(number) });
}
