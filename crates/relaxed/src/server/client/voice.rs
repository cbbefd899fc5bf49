//! What the threads of a client share: the sockets, on which one thread works and waits, another says
//! now and then that the worker lives, and any may ask for the end.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use unisono_net::{Signal, frame};

use super::options::ServerError;
use crate::server::link::Pulse;
use crate::server::wire::Request;

/// No shorter than this, whatever the timeout: else beating takes a core.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// The sockets of a client, one for every session.
pub struct Voices {
    voices: Vec<Voice>,
    stopped: AtomicBool,
    abort: Signal,
    /// Whether the client is gone.
    over: Mutex<bool>,
    changed: Condvar,
}

#[derive(Default)]
struct Voice {
    /// Never locked for long, so that it can be shut down at once whatever happens on it.
    pulse: Mutex<Option<Arc<Pulse>>>,
    /// Locked while something is sent, so that nothing gets in between.
    speaking: Mutex<()>,
}

impl Voices {
    pub fn new(sessions: usize) -> std::io::Result<Voices> {
        Ok(Voices {
            voices: (0..sessions).map(|_| Voice::default()).collect(),
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
    pub fn open(&self, session: usize, pulse: Pulse) -> Result<(), ServerError> {
        let mut voice = self.pulse(session);
        // Under the lock, so that whoever asks for the end meanwhile finds the connection.
        if self.is_stopped() {
            return Err(ServerError::Stopped);
        }
        *voice = Some(Arc::new(pulse));
        Ok(())
    }

    /// Ends the connection, and says so to the other side.
    pub fn close(&self, session: usize) {
        if let Some(pulse) = self.pulse(session).take() {
            let _ = pulse.socket().shutdown(Shutdown::Both);
        }
    }

    /// To be held while something is sent.
    pub fn speak(&self, session: usize) -> MutexGuard<'_, ()> {
        self.voices[session].speaking.lock().expect("no panic while locked")
    }

    /// Ends all connections, and every attempt to open one.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.abort.raise();
        for session in 0..self.voices.len() {
            self.close(session);
        }
        // Whoever is about to wait has seen the stop, or is woken.
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

    /// Ends the beating, and all connections.
    pub fn finish(&self) {
        *self.over.lock().expect("no panic while locked") = true;
        self.changed.notify_all();
        for session in 0..self.voices.len() {
            self.close(session);
        }
    }

    /// Says to all shards that this worker lives, from a thread of its own, until the client is gone.
    pub fn beat(voices: &Arc<Voices>, pause: Duration) -> std::io::Result<JoinHandle<()>> {
        let (voices, pause) = (voices.clone(), pause.max(SHORTEST_PAUSE));
        // Nothing is locked while something is said, which may take long.
        let message = frame::encode(&Request::Beat).map_err(std::io::Error::from)?;
        let beat = move || {
            while !voices.is_over_after(pause) {
                voices.voices.iter().for_each(|voice| voice.beat(&message));
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

    fn pulse(&self, session: usize) -> MutexGuard<'_, Option<Arc<Pulse>>> {
        self.voices[session].pulse.lock().expect("no panic while locked")
    }
}

impl Voice {
    /// Says that the worker lives, unless something else is just being said.
    fn beat(&self, message: &[u8]) {
        let Ok(_speaking) = self.speaking.try_lock() else { return };
        let pulse = self.pulse.lock().expect("no panic while locked").clone();
        pulse.iter().for_each(|pulse| pulse.beat(message));
    }
}

/// Ends every wait of a client, from any thread.
#[derive(Clone)]
pub struct Stopper(pub(super) Arc<Voices>);

impl Stopper {
    /// Whatever the client waits for, now and later, fails with [`ServerError::Stopped`].
    pub fn stop(&self) {
        self.0.stop();
    }
}
