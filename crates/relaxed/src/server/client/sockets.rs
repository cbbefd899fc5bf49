//! What the threads of a client share: the sockets, on which one thread works and waits, another says
//! now and then that the worker lives, and any may ask for the end.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use unisono_net::{Signal, frame};

use super::options::ServerError;
use crate::server::link::Heartbeat;
use crate::server::wire::Request;

/// No shorter than this, whatever the timeout: else heartbeats take a core.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// The sockets of a client, one for every session.
pub struct ClientSockets {
    /// Never locked for long, so that a socket can be shut down at once whatever happens on it.
    heartbeats: Vec<Mutex<Option<Arc<Heartbeat>>>>,
    stopped: AtomicBool,
    abort: Signal,
    /// Whether the client is gone.
    over: Mutex<bool>,
    changed: Condvar,
}

impl ClientSockets {
    pub fn new(sessions: usize) -> std::io::Result<ClientSockets> {
        Ok(ClientSockets {
            heartbeats: (0..sessions).map(|_| Mutex::default()).collect(),
            stopped: AtomicBool::new(false),
            abort: Signal::new()?,
            over: Mutex::new(false),
            changed: Condvar::new(),
        })
    }

    /// Ends every attempt to open a connection, once stopped.
    pub fn abort(&self) -> &Signal {
        &self.abort
    }

    /// A connection is open. From now on it ends with the client.
    pub fn open(&self, session: usize, heartbeat: Heartbeat) -> Result<(), ServerError> {
        let mut kept = self.heartbeat(session);
        // Under the lock, so that a thread that stops the client meanwhile finds the connection.
        if self.is_stopped() {
            return Err(ServerError::Stopped);
        }
        *kept = Some(Arc::new(heartbeat));
        Ok(())
    }

    /// Ends the connection, and says so to the other side.
    pub fn close(&self, session: usize) {
        if let Some(heartbeat) = self.heartbeat(session).take() {
            let _ = heartbeat.socket().shutdown(Shutdown::Both);
        }
    }

    /// Ends all connections, and every attempt to open one.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.abort.raise();
        for session in 0..self.heartbeats.len() {
            self.close(session);
        }
        // A thread that is about to wait has seen the stop, or is woken.
        drop(self.over.lock());
        self.changed.notify_all();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Waits, unless stopped.
    pub fn pause(&self, pause: Duration) {
        let over = self.over.lock().expect("no panic while locked");
        let waits = |_: &mut bool| !self.is_stopped();
        drop(self.changed.wait_timeout_while(over, pause, waits).expect("no panic while locked"));
    }

    /// Ends the heartbeats, and all connections.
    pub fn finish(&self) {
        *self.over.lock().expect("no panic while locked") = true;
        self.changed.notify_all();
        for session in 0..self.heartbeats.len() {
            self.close(session);
        }
    }

    /// Says to all servers that this worker lives, from a thread of its own, until the client is gone.
    pub fn beat(sockets: &Arc<ClientSockets>, pause: Duration) -> std::io::Result<JoinHandle<()>> {
        let (sockets, pause) = (sockets.clone(), pause.max(SHORTEST_PAUSE));
        // Nothing is locked while something is said, which may take long.
        let message = frame::encode(&Request::Beat).map_err(std::io::Error::from)?;
        let beat = move || {
            while !sockets.is_over_after(pause) {
                for session in 0..sockets.heartbeats.len() {
                    let heartbeat = sockets.heartbeat(session).clone();
                    heartbeat.iter().for_each(|heartbeat| heartbeat.beat(&message));
                }
            }
        };
        std::thread::Builder::new().name("unisono-beat".into()).spawn(beat)
    }

    /// Waits; whether the client is gone.
    fn is_over_after(&self, pause: Duration) -> bool {
        let over = self.over.lock().expect("no panic while locked");
        let waited = self.changed.wait_timeout_while(over, pause, |over| !*over);
        *waited.expect("no panic while locked").0
    }

    fn heartbeat(&self, session: usize) -> MutexGuard<'_, Option<Arc<Heartbeat>>> {
        self.heartbeats[session].lock().expect("no panic while locked")
    }
}

/// Ends every wait of a client, from any thread.
#[derive(Clone)]
pub struct Stopper(pub(super) Arc<ClientSockets>);

impl Stopper {
    /// Whatever the client waits for, now and later, fails with [`ServerError::Stopped`].
    pub fn stop(&self) {
        self.0.stop();
    }
}
