//! How a worker enters: it looks for others that are under way, and takes over from the one that is
//! furthest.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use super::connect::{Connection, DialError};
use super::error::GossipError;
use super::merge;
use super::node::{Joined, Shared};
use super::wire::{Kind, Message};
use crate::Clock;

/// The part of the timeout a worker waits at its start for others to greet it. Longer finds others
/// that are slow to answer; shorter begins sooner where some host swallows packets.
const PATIENCE: u32 = 4;

/// Connects to all others that are there, and takes over the weights of one that is under way.
///
/// Workers that start at the same time all find no other under way and start from what they have.
pub fn join(node: &Shared) -> Result<Option<Joined>, GossipError> {
    let mut there = greet_all(node)?;
    // The furthest; among equals the lowest rank, for there is no better reason.
    there.sort_by_key(|peer| (std::cmp::Reverse(peer.greeting.clock), peer.partner));
    let mut joined = None;
    let mut buffer = Vec::new();
    let mut connected = Vec::new();
    for mut peer in there {
        if joined.is_none() && peer.greeting.clock > Clock::START {
            buffer.resize(node.weights.elements(), 0.0);
            match fetch(node, &mut peer, &mut buffer) {
                Ok(clock) => {
                    node.weights.replace(&mut buffer);
                    joined = Some(Joined { from: peer.partner, clock });
                }
                Err(error) => {
                    // One that ends at this moment is told of elsewhere.
                    let has_ended = matches!(
                        error.kind(),
                        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
                    );
                    let level = if has_ended { log::Level::Info } else { log::Level::Warn };
                    let (rank, from) = (node.rank, peer.partner);
                    log::log!(level, "worker {rank}: no weights from worker {from}: {error}");
                    continue;
                }
            }
        }
        connected.push(peer);
    }
    if !buffer.is_empty() {
        node.give_buffer(buffer);
    }
    for peer in connected {
        node.connected(peer);
    }
    Ok(joined)
}

/// Dials all others at once, so that those who do not answer cost the time of one.
fn greet_all(node: &Shared) -> Result<Vec<Connection>, GossipError> {
    let deadline = Instant::now() + (node.timeout / PATIENCE).max(Duration::from_millis(1));
    let others = node.knock_at();
    let answers: Vec<(u32, Result<Connection, DialError>)> = std::thread::scope(|scope| {
        let dials: Vec<_> = others
            .into_iter()
            .map(|peer| (peer, scope.spawn(move || Connection::dial(node, peer, deadline))))
            .collect();
        dials
            .into_iter()
            .map(|(peer, dial)| {
                let panicked = |_| Err(io::Error::from(io::ErrorKind::Other).into());
                (peer, dial.join().unwrap_or_else(panicked))
            })
            .collect()
    });
    let mut there = Vec::new();
    for (peer, answer) in answers {
        match answer {
            Ok(connection) => there.push(connection),
            Err(DialError::OtherModel { theirs, .. }) => {
                return Err(node.wrong_model(peer, theirs));
            }
            Err(error) => {
                log::debug!("worker {}: worker {peer} is not there yet: {error}", node.rank);
                node.unanswered(peer);
            }
        }
    }
    Ok(there)
}

/// Receives the weights of a worker under way; returns their clock.
fn fetch(node: &Shared, peer: &mut Connection, into: &mut [f32]) -> io::Result<Clock> {
    let mut stream = peer.until(Instant::now() + node.timeout);
    node.message(Kind::Fetch, 0).send(&mut stream, &[])?;
    let reply = Message::receive(&mut stream)?;
    match reply.kind {
        Kind::Weights if reply.shape == node.shape => {
            node.receive_payload(&mut stream, into)?;
            node.moved(peer.partner, into.len());
            if !merge::are_finite(into) {
                return Err(io::Error::other("they are not finite"));
            }
            Ok(reply.clock)
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
