//! The passive side: a thread for each worker that dialed this one answers what it asks.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use unisono_net::keepalive::keep_alive;
use unisono_net::{Connection, Introduction, TimedStream};

use super::connect::End;
use super::core::Meeting;
use super::merge;
use super::node::Shared;
use super::wire::{Kind, Message, Reason};
use crate::Clock;

/// Takes a connection from the acceptor, if it is meant for this worker.
pub fn admit(node: &Arc<Shared>, mut connection: Connection, who: Introduction) {
    let known = (who.from as usize) < node.addresses.len() && who.from != node.rank;
    if !known || who.to != node.rank || node.is_cut(who.from) {
        log::warn!("worker {} refused a connection that is not for it: {who:?}", node.rank);
        return;
    }
    let Ok(entry) = node.sockets.keep(End::From(who.from), connection.socket()) else { return };
    let host = Arc::clone(node);
    let spawned = node.spawn("unisono-gossip", move || {
        if let Err(error) = serve(&host, &mut connection, who.from) {
            log::debug!("worker {}: worker {} hung up: {error}", host.rank, who.from);
        }
        let _ = connection.socket().shutdown(std::net::Shutdown::Both);
        host.sockets.forget(End::From(who.from), entry);
    });
    if spawned.is_err() {
        node.sockets.forget(End::From(who.from), entry);
    }
}

/// Greets, then answers until the connection ends. Returns with the reason why it did.
fn serve(node: &Shared, connection: &mut Connection, from: u32) -> io::Result<()> {
    // A host that lost its power says no goodbye: without this, its thread would wait for ever.
    keep_alive(connection.socket(), node.timeout)?;
    let mut stream = connection.until(Instant::now() + node.timeout);
    let greeting = Message::receive(&mut stream)?;
    node.greeting().send(&mut stream, &[])?;
    if greeting.shape != node.shape || !matches!(greeting.kind, Kind::Greeting { .. }) {
        log::warn!("{}", node.wrong_model(from, greeting.shape));
        return Err(io::ErrorKind::InvalidData.into());
    }
    loop {
        // Between exchanges there is no hurry; a socket that is shut down ends the wait.
        let request = Message::receive(&mut connection.receiver)?;
        if node.is_cut(from) || request.shape != node.shape {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut stream = connection.until(Instant::now() + node.timeout);
        let mut buffer = node.take_buffer();
        let served = match request.kind {
            Kind::Offer => answer_offer(node, &mut stream, from, request, &mut buffer),
            Kind::Fetch => answer_fetch(node, &mut stream, from, &mut buffer),
            _ => Err(io::ErrorKind::InvalidData.into()),
        };
        node.give_buffer(buffer);
        served?;
    }
}

fn answer_offer(
    node: &Shared,
    stream: &mut TimedStream<'_>,
    from: u32,
    offer: Message,
    buffer: &mut [f32],
) -> io::Result<()> {
    node.receive_payload(stream, buffer)?;
    node.moved(from, buffer.len());
    let decline = if node.is_joining() {
        Some(Reason::NotUnderWay)
    } else if !merge::are_finite(buffer) {
        node.core().declined(from);
        Some(Reason::NotFinite)
    } else {
        node.core().offered(from, offer.life, offer.number).err()
    };
    if let Some(reason) = decline {
        node.moved(from, 0);
        return node.message(Kind::Declined(reason), offer.number).send(stream, &[]);
    }
    let squares = node.weights.meet(buffer);
    let distance = merge::root_mean_square(squares, buffer.len());
    let lead = node.clock().distance(offer.clock);
    node.core().answered(from, Meeting { lead, distance });
    node.message(Kind::Moved, offer.number).send(stream, buffer)?;
    node.moved(from, buffer.len());
    Ok(())
}

fn answer_fetch(
    node: &Shared,
    stream: &mut TimedStream<'_>,
    from: u32,
    buffer: &mut [f32],
) -> io::Result<()> {
    // Before the weights: they contain at least the steps of this clock.
    let message = node.message(Kind::Weights, 0);
    if message.clock == Clock::START || node.is_joining() {
        return node.message(Kind::Declined(Reason::NotUnderWay), 0).send(stream, &[]);
    }
    node.weights.snapshot(buffer);
    message.send(stream, buffer)?;
    node.moved(from, buffer.len());
    Ok(())
}
