//! A small client of etcd: reads one key, writes it if it has not changed, and waits until it changes.
//!
//! It talks to the JSON gateway that every etcd since 3.4 serves beside gRPC, over HTTP/1.1 and
//! blocking sockets. There are no locks and leases here, on purpose: neither is safe as a lock once a
//! process can be stopped. What holds is the comparison inside of one write.
//!
//! # Nodes that fail
//!
//! A call tries the endpoints in turn, the one that answered last first, and gives each a short time.
//! It goes on, round after round, until one answers or the call's own time is over. A node that
//! refuses, or that does not answer as etcd does, is passed over as well; when all of them do, the call
//! fails at once, for waiting would not help.
//!
//! # Writes whose answer is lost
//!
//! When a connection breaks after a request has left, the write may have been done. The client then
//! sends the same transaction again. If the first was not done, the second is; and the first, should it
//! still be on its way, then fails its comparison. If the first was done, the second fails its comparison and
//! etcd answers with what the key holds: exactly our value, so the write is done. This is why a
//! value that is written with [`Etcd::write_if`] should hold something that no other writer writes.

mod client;
mod endpoints;
mod error;
mod settings;
mod until;
mod wire;

use std::fmt;
use std::time::Duration;

use self::client::{Client, Heard, Reply};
use self::until::Ended;
pub use self::{
    endpoints::{BadEndpoints, Endpoints},
    error::{Attempted, EtcdError},
    settings::{Password, Settings},
    until::Until,
};

/// How long to listen for a change before the key is read again.
///
/// Larger, and a change is noticed later if the node that we listen to has lost touch with the others,
/// and an abort is noticed later; smaller, and a wait costs etcd more reads and connections.
const LISTEN: Duration = Duration::from_millis(500);

/// How long to wait before the key is read again if listening does not work.
const POLL: Duration = Duration::from_millis(200);

/// A client of one etcd cluster. It may be used by several threads at a time.
pub struct Etcd {
    client: Client,
}

/// What a key holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versioned {
    /// The bytes.
    pub value: Vec<u8>,
    /// The revision at which they were written. It grows with every write.
    pub revision: u64,
}

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// It was done.
    Done {
        /// The revision of the key now.
        revision: u64,
    },
    /// The key had changed. It now holds this, or does not exist.
    ///
    /// If an answer was lost on the way, our value may have been there in between: written by us, and then
    /// replaced by another writer that had seen it.
    Conflict(Option<Versioned>),
}

impl Etcd {
    /// Connects to the first node that answers, and checks its version. The others are checked before
    /// their first use.
    ///
    /// # Errors
    ///
    /// [`EtcdError::BadSetting`] at once, the others when no node answers as it should.
    pub fn connect(
        endpoints: &Endpoints,
        settings: &Settings,
        until: Until<'_>,
    ) -> Result<Etcd, EtcdError> {
        let client = Client::new(endpoints, settings)?;
        client.greet(until)?;
        Ok(Etcd { client })
    }

    /// What the key holds, if it exists: never older than what any earlier write left there.
    pub fn read(&self, key: &str, until: Until<'_>) -> Result<Option<Versioned>, EtcdError> {
        let Reply { answer: (_, current), .. } = self.range(key, until)?;
        Ok(current)
    }

    /// Writes `value` if the key was last written at revision `expected`, or, for 0, if it does not exist.
    ///
    /// An answer that is lost does not make a failure of a write that was done; see the module.
    pub fn write_if(
        &self,
        key: &str,
        expected: u64,
        value: &[u8],
        until: Until<'_>,
    ) -> Result<Written, EtcdError> {
        let body = wire::write_if(key, expected, value);
        let Reply { answer, repeated, .. } =
            self.client.call("/v3/kv/txn", &body, until, |txn: wire::Txn| {
                match txn.of(key)? {
                    wire::Compared::Equal(revision) if revision <= expected => {
                        Err("the revision of a write is not beyond that of the last".to_owned())
                    }
                    compared => Ok(compared),
                }
            })?;
        Ok(match answer {
            wire::Compared::Equal(revision) => Written::Done { revision },
            wire::Compared::Different(Some(current))
                if repeated && current.revision > expected && current.value == value =>
            {
                Written::Done { revision: current.revision }
            }
            wire::Compared::Different(current) => Written::Conflict(current),
        })
    }

    /// Waits until the key holds something that was written after revision `after`, and returns it, or
    /// `None` when `until` has come. Several changes may pass as one, of which the last is returned.
    ///
    /// # Errors
    ///
    /// [`EtcdError::Unreachable`] if at the end the key could not be read, and [`EtcdError::Aborted`].
    pub fn changed(
        &self,
        key: &str,
        after: u64,
        until: Until<'_>,
    ) -> Result<Option<Versioned>, EtcdError> {
        loop {
            let Reply { answer: (store, current), node, .. } = self.range(key, until)?;
            if let Some(current) = current.filter(|current| current.revision > after) {
                return Ok(Some(current));
            }
            // The last time to listen lasts to the end: no read begins that has no time for an answer.
            let time = match until.left() {
                Ok(left) if left < LISTEN + client::ATTEMPT => left,
                Ok(_) => LISTEN,
                Err(ended) => return none_or_aborted(ended),
            };
            let heard = match self.client.listen(node, key, store + 1, time) {
                Heard::Change(change) if change.revision > after => return Ok(Some(change)),
                Heard::Change(_) | Heard::Nothing => until.left().map(|_| ()),
                Heard::Failure => until.pause(POLL),
            };
            if let Err(ended) = heard {
                return none_or_aborted(ended);
            }
        }
    }

    /// The revision of the store, and what the key holds.
    fn range(
        &self,
        key: &str,
        until: Until<'_>,
    ) -> Result<Reply<(u64, Option<Versioned>)>, EtcdError> {
        let body = wire::range(key);
        self.client
            .call("/v3/kv/range", &body, until, |range: wire::Range| range.of(key))
            .map_err(|error| error.of_a_read())
    }
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Etcd").field(&self.client.endpoints()).finish()
    }
}

fn none_or_aborted(ended: Ended) -> Result<Option<Versioned>, EtcdError> {
    match ended {
        Ended::Late => Ok(None),
        Ended::Aborted => Err(EtcdError::Aborted { maybe_written: false }),
    }
}
