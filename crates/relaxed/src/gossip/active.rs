//! The active side: one thread that carries out, one after the other, the exchanges this worker asks
//! for, and knocks at those who are out of reach.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::connect::{Connection, DialError};
use super::core::{Exchange, Meeting, Outcome};
use super::merge;
use super::node::Shared;
use super::wire::{Kind, Message, Reason};

/// Serves requests until the node is closed.
pub fn run(node: &Arc<Shared>) {
    // The weights that were sent and the reply share this memory: the former are not needed once
    // the latter is here.
    let mut buffer = vec![0.0; node.weights.elements()];
    while node.await_request() {
        for peer in node.knock_at() {
            knock(node, peer);
        }
        loop {
            let begun = node.core().begin();
            match begun.map(|exchange| carry_out(node, exchange, &mut buffer)) {
                Some(Carried::Not) => continue,
                Some(Carried::Out) | None => break,
            }
        }
        node.request_served();
    }
}

enum Carried {
    /// The exchange took place, or may have.
    Out,
    /// The partner was never reached: another one may be.
    Not,
}

fn carry_out(node: &Shared, exchange: Exchange, buffer: &mut [f32]) -> Carried {
    let partner = exchange.partner;
    let usable = |connection: &mut Connection| connection.is_quiet() && !node.is_cut(partner);
    let Some(mut connection) = node.take_connection(partner).take_if(usable) else {
        let _ = node.core().finish(exchange, Outcome::Lost, node.now());
        return Carried::Not;
    };
    let outcome = match converse(node, &mut connection, exchange, buffer) {
        Ok(reply) => {
            node.return_connection(connection);
            judge(node, partner, reply, buffer)
        }
        Err(error) => {
            log::debug!("worker {}: exchange with worker {partner} failed: {error}", node.rank);
            Outcome::Lost
        }
    };
    let counts = node.core().finish(exchange, outcome, node.now());
    if counts && matches!(outcome, Outcome::Met(_)) {
        node.weights.follow(buffer);
    }
    Carried::Out
}

/// Sends the weights and waits for the reply, whose payload is in `buffer` then.
fn converse(
    node: &Shared,
    connection: &mut Connection,
    exchange: Exchange,
    buffer: &mut [f32],
) -> io::Result<Message> {
    let mut stream = connection.until(Instant::now() + node.timeout);
    node.weights.snapshot(buffer);
    node.message(Kind::Offer, exchange.number).send(&mut stream, buffer)?;
    node.moved(exchange.partner, buffer.len());
    let reply = Message::receive(&mut stream)?;
    if reply.number != exchange.number || reply.shape != node.shape {
        return Err(io::ErrorKind::InvalidData.into());
    }
    match reply.kind {
        Kind::Moved => {
            node.receive_payload(&mut stream, buffer)?;
            node.moved(exchange.partner, buffer.len());
        }
        Kind::Declined(_) => node.moved(exchange.partner, 0),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    Ok(reply)
}

fn judge(node: &Shared, partner: u32, reply: Message, half: &[f32]) -> Outcome {
    match reply.kind {
        Kind::Moved => {
            let squares = 4.0 * merge::squares(half);
            if !squares.is_finite() {
                log::warn!("worker {}: the weights of worker {partner} are not finite", node.rank);
                return Outcome::Declined;
            }
            let distance = merge::root_mean_square(squares, half.len());
            Outcome::Met(Meeting { lead: node.clock().distance(reply.clock), distance })
        }
        Kind::Declined(Reason::NotFinite) => {
            log::warn!("worker {}: its weights are not finite: no partner takes them", node.rank);
            Outcome::Declined
        }
        _ => Outcome::Declined,
    }
}

/// Dials a worker on a thread of its own: one that does not answer holds up no exchange.
fn knock(node: &Arc<Shared>, peer: u32) {
    let visitor = Arc::clone(node);
    let spawned = node.spawn("unisono-knock", move || {
        match Connection::dial(&visitor, peer, Instant::now() + visitor.timeout) {
            Ok(connection) => visitor.connected(connection),
            Err(error) => {
                // Of a worker that is joining nothing counts yet; it finds out by itself.
                if let DialError::OtherModel { theirs, joining: false } = error {
                    visitor.fail(peer, theirs);
                }
                let level = if error.is_lasting() { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "worker {}: worker {peer} is out of reach: {error}", visitor.rank);
                visitor.unanswered(peer);
            }
        }
    });
    if spawned.is_err() {
        node.unanswered(peer);
    }
}
