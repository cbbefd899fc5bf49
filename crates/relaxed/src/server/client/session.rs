//! A worker and one server: what is said, and what has to be said again.
//!
//! A session is *open* if its connection is, and the worker has joined by it. It is then *at* a clock
//! if it has entered. Whatever goes wrong, the connection is given up: on a new one nothing is under
//! way, and the server says what it knows.

use std::io;
use std::time::{Duration, Instant};

use socket2::Socket;
use unisono_codec::CodecSpec;
use unisono_codec::sender::{Origin, Scratch, Sender};
use unisono_collective::shards::Shards;
use unisono_net::Signal;

use super::dial::Call;
use super::options::{ClientOptions, ServerError};
use super::{FIRST_PAUSE, Gradient, Lend, Pushed, Weights};
use crate::Clock;
use crate::server::core::Refusal;
use crate::server::layout::Piece;
use crate::server::link::{Heartbeat, Link, bytes, numbers};
use crate::server::outbox::Outbox;
use crate::server::run::SLACK;
use crate::server::wire::{Measured, Part, Reply, Request, Setup};

/// What went wrong with a request.
pub enum Fault {
    /// The connection; it can be opened again.
    Lost(io::Error),
    /// The server wants the worker to join again, for this reason.
    Rejoin(Refusal),
    /// There is nothing to be done.
    Fatal(ServerError),
}

impl Fault {
    /// The other side has ended the connection.
    pub fn ended() -> Fault {
        Fault::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended the connection"))
    }
}

/// Nothing has come of what was tried.
pub struct Trouble {
    /// Since when.
    pub since: Instant,
    /// How long to wait before the next attempt.
    pub pause: Duration,
    /// Whether people were told.
    pub is_told: bool,
}

impl Trouble {
    /// Now.
    pub fn begin() -> Trouble {
        Trouble { since: Instant::now(), pause: FIRST_PAUSE, is_told: false }
    }
}

/// A worker and one server.
pub struct Session {
    pub number: usize,
    address: String,
    setup: Setup,
    fingerprint: [u8; 32],
    link: Option<Link>,
    /// The clock at which the server has the worker.
    pub at: Option<Clock>,
    /// The clock for which weights were asked that have not come yet.
    pub asked: Option<Clock>,
    pub outbox: Outbox,
    pub trouble: Option<Trouble>,
    /// Encodes each piece, where it is encoded, from a clock on.
    senders: Vec<Option<Sender>>,
    warm_up: u64,
    /// What is under way: the parts, and the encodings among them.
    parts: Vec<Part>,
    encoded: Vec<Vec<u8>>,
    /// Bytes moved over connections that are closed.
    moved: u64,
    /// Bytes moved until the last push, and between that and the one before.
    counted: u64,
    bytes_since: u64,
}

/// What a server says to a worker that joins.
pub struct Welcome {
    /// The clock of the run.
    pub clock: Clock,
    /// By how much the worker may be ahead.
    pub bound: Option<u64>,
    /// Whether the run is over.
    pub finished: bool,
}

/// What a server says about a push.
pub struct Settled {
    pub pushed: Pushed,
    /// The worker's clock now.
    pub clock: Clock,
    /// By how much the worker may be ahead.
    pub bound: Option<u64>,
}

impl Session {
    pub fn new(number: usize, setup: Setup, options: &ClientOptions) -> Session {
        let sender = |(piece, codec): (usize, &Option<CodecSpec>)| {
            let origin = Origin {
                shape: setup.pieces[piece].shape.clone(),
                parameter: piece,
                seed: setup.seed,
                worker: options.worker as usize,
                mean_of: 1,
            };
            Some(Sender::new(codec.as_ref()?.build(), origin, options.error_feedback))
        };
        Session {
            number,
            address: options.servers.get(number).cloned().unwrap_or_default(),
            fingerprint: setup.fingerprint(),
            senders: setup.codecs.iter().enumerate().map(sender).collect(),
            warm_up: options.warm_up,
            link: None,
            at: None,
            asked: None,
            outbox: Outbox::new(options.worker, options.life.unwrap_or_default()),
            trouble: None,
            parts: Vec::new(),
            encoded: Vec::new(),
            moved: 0,
            counted: 0,
            bytes_since: 0,
            setup,
        }
    }

    pub fn is_open(&self) -> bool {
        self.link.is_some()
    }

    /// The socket, to watch it.
    pub fn socket(&self) -> Option<&Socket> {
        self.link.as_ref().map(|link| &**link.socket())
    }

    /// How long to wait for the server at a time.
    pub fn slice(&mut self) -> Option<Duration> {
        Some(self.link.as_mut()?.silence()?.slice())
    }

    /// Whether something is here that a poll of the socket does not see.
    pub fn has_unread(&self) -> bool {
        self.link.as_ref().is_some_and(Link::has_unread)
    }

    /// Whether the server has said more than that it lives, or never will.
    pub fn has_message(&mut self) -> bool {
        self.link.as_mut().is_none_or(Link::has_message)
    }

    /// Nothing has come from the server for so long.
    pub fn waited(&mut self, time: Duration) -> Result<(), Fault> {
        let silence = self.link.as_mut().and_then(Link::silence);
        silence.map_or(Ok(()), |silence| silence.waited(time)).map_err(Fault::Lost)
    }

    /// Whether bulk data lies in common memory.
    pub fn is_shared(&self) -> bool {
        self.link.as_ref().is_some_and(Link::is_shared)
    }

    /// Opens a connection, by which the worker has not joined yet.
    pub fn connect(
        &mut self,
        options: &ClientOptions,
        worker: u32,
        abort: &Signal,
    ) -> Result<Heartbeat, Fault> {
        let call = Call {
            options,
            server: self.number,
            worker,
            most_bulk: self.most_bulk(),
            timeout: Duration::from_millis(self.setup.timeout_ms),
        };
        self.close();
        let mut link = call.dial(abort)?;
        link.limit_silence(call.timeout).map_err(Fault::Lost)?;
        let heartbeat = link.heartbeat();
        self.link = Some(link);
        Ok(heartbeat)
    }

    /// Gives the connection up.
    pub fn close(&mut self) {
        self.moved = self.traffic();
        self.link = None;
        self.at = None;
        self.asked = None;
    }

    /// Bytes sent and received so far.
    pub fn traffic(&self) -> u64 {
        self.moved + self.link.as_ref().map_or(0, Link::traffic)
    }

    /// Joins, and sets the server up if it knows of no run and the weights are there.
    pub fn join(&mut self, initial: Option<&dyn Fn(usize) -> Vec<f32>>) -> Result<Welcome, Fault> {
        loop {
            match self.call(&Request::Join { run: self.fingerprint }, &[])? {
                Reply::Joined { joined, bound, finished } => {
                    self.outbox.rejoin(joined);
                    return Ok(Welcome { clock: joined.clock, bound, finished });
                }
                Reply::Unknown => match initial {
                    Some(initial) => self.set_up(initial)?,
                    None => return Err(self.unexpected(Reply::Unknown)),
                },
                other => return Err(self.unexpected(other)),
            }
        }
    }

    fn set_up(&mut self, initial: &dyn Fn(usize) -> Vec<f32>) -> Result<(), Fault> {
        let mut weights: Vec<(usize, Vec<f32>)> = Vec::new();
        // Pieces of one parameter are neighbours.
        for piece in &self.setup.pieces {
            if weights.last().is_none_or(|(parameter, _)| *parameter != piece.parameter) {
                weights.push((piece.parameter, initial(piece.parameter)));
            }
        }
        let of = |parameter: usize| {
            let found = weights.binary_search_by_key(&parameter, |(parameter, _)| *parameter);
            &weights[found.expect("fetched above, in order")].1
        };
        let parts = self.setup.pieces.iter();
        let parts: Vec<&[u8]> =
            parts.map(|piece| bytes(&of(piece.parameter)[piece.span()])).collect();
        let request = Request::SetUp(Box::new(self.setup.clone()));
        match self.call(&request, &parts)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Begins at a clock.
    pub fn enter(&mut self, clock: Clock) -> Result<(), Fault> {
        match self.call(&Request::Enter { clock }, &[])? {
            Reply::Done => {
                self.at = Some(clock);
                Ok(())
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Prepares a push for a clock, and encodes what is encoded. What is sent again later is the same.
    pub fn begin(&mut self, clock: Clock, gradients: &[Gradient<'_>], scratch: &mut Scratch) {
        self.outbox.begin(clock);
        let traffic = self.traffic();
        self.bytes_since = traffic - self.counted;
        self.counted = traffic;
        self.parts.clear();
        self.encoded.clear();
        for (number, piece) in self.setup.pieces.iter().enumerate() {
            let Some(vectors) = of(gradients, piece) else { continue };
            let mut encoded = Vec::new();
            let mut part = Part {
                piece: number as u32,
                vectors: vectors.len() as u32,
                bytes: (4 * piece.len() * vectors.len()) as u64,
                encoded: false,
            };
            if clock.0 >= self.warm_up
                && let (Some(sender), [gradient]) = (&mut self.senders[number], vectors)
            {
                sender.encode(clock.0, &gradient[piece.span()], scratch, &mut encoded);
                part.bytes = encoded.len() as u64;
                part.encoded = true;
            }
            self.parts.push(part);
            self.encoded.push(encoded);
        }
    }

    /// Sends the push that is under way.
    pub fn send_push(&mut self, gradients: &[Gradient<'_>], measured: Measured) -> io::Result<()> {
        let Session { setup, parts, encoded, link, outbox, bytes_since, .. } = self;
        let push = outbox.pending().expect("a push is under way");
        let vectors = |part: &Part| {
            let piece = &setup.pieces[part.piece as usize];
            let vectors = of(gradients, piece).expect("a part of a gradient");
            vectors.iter().map(|vector| &vector[piece.span()])
        };
        // Several vectors of a piece travel as one part.
        let joined: Vec<Vec<f32>> = parts
            .iter()
            .map(|part| match part.vectors {
                1 => Vec::new(),
                _ => vectors(part).flatten().copied().collect(),
            })
            .collect();
        let mut slices: Vec<&[u8]> = Vec::with_capacity(parts.len());
        for ((part, encoded), joined) in parts.iter().zip(&*encoded).zip(&joined) {
            slices.push(match (part.encoded, part.vectors) {
                (true, _) => encoded,
                (false, 1) => bytes(vectors(part).next().expect("there is one")),
                (false, _) => bytes(joined),
            });
        }
        let measured = Measured { bytes: *bytes_since, ..measured };
        let request = Request::Push { push, measured, parts: parts.clone() };
        link.as_mut().ok_or_else(not_connected)?.send(&request, &slices)
    }

    /// What became of the push that is under way.
    pub fn receive_pushed(&mut self) -> Result<Settled, Fault> {
        match self.receive()? {
            Reply::Pushed { applied, age, clock, bound, finished } => {
                self.outbox.settle();
                self.at = Some(clock);
                self.trouble = None;
                Ok(Settled { pushed: Pushed { applied, age, finished }, clock, bound })
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Asks for weights.
    pub fn ask(
        &mut self,
        clock: Clock,
        bound: Option<u64>,
        only: Option<&[usize]>,
    ) -> io::Result<()> {
        let pieces = only.map(|only| {
            let wanted = self.setup.pieces.iter().enumerate();
            let wanted = wanted.filter(|(_, piece)| only.contains(&piece.parameter));
            wanted.map(|(number, _)| number as u32).collect()
        });
        self.link()?.send(&Request::Pull { clock, bound, pieces }, &[])?;
        self.asked = Some(clock);
        Ok(())
    }

    /// Takes the weights that were asked for.
    pub fn receive_weights(&mut self, weights: &mut Weights<'_, '_>) -> Result<(), Fault> {
        let reply = self.receive()?;
        self.asked = None;
        let Reply::Weights { versions } = reply else { return Err(self.unexpected(reply)) };
        let pieces = &self.setup.pieces;
        let known = |(number, _): &(u32, u64)| pieces.get(*number as usize).ok_or(*number);
        let read: Result<Vec<&Piece>, u32> = versions.iter().map(known).collect();
        let server = self.number;
        let read = read.map_err(|number| {
            let what = format!("there is no piece {number}").into();
            Fault::Fatal(ServerError::Protocol { server, what })
        })?;
        let link = self.link.as_mut().ok_or_else(|| Fault::Lost(not_connected()))?;
        let lengths: Vec<usize> = read.iter().map(|piece| 4 * piece.len()).collect();
        let taken = match weights {
            Weights::Take(take) => link.bulk_as_it_comes(&lengths, |part, start, bytes| {
                take(read[part].parameter, read[part].start + start / 4, numbers(bytes)?);
                Ok(())
            }),
            Weights::Lend(lend) => link.bulk_to_place(&lengths, |part, first, count, fill| {
                lend(read[part].parameter, read[part].start + first, count, fill);
            }),
        };
        taken.map_err(Fault::Lost)?;
        self.trouble = None;
        Ok(())
    }

    /// Fetches the weights as they are, without taking part.
    pub fn fetch_weights(&mut self, lend: &mut Lend<'_>) -> Result<(), Fault> {
        let request = Request::Weights { run: self.fingerprint };
        self.link().and_then(|link| link.send(&request, &[])).map_err(Fault::Lost)?;
        self.receive_weights(&mut Weights::Lend(lend))
    }

    pub fn call(&mut self, request: &Request, parts: &[&[u8]]) -> Result<Reply, Fault> {
        self.link().and_then(|link| link.send(request, parts)).map_err(Fault::Lost)?;
        self.receive()
    }

    fn receive(&mut self) -> Result<Reply, Fault> {
        let reply = self.link().and_then(Link::receive).map_err(Fault::Lost)?;
        reply.ok_or_else(Fault::ended)
    }

    /// Says that the worker is done, and waits until the server knows, though not for long.
    pub fn leave(&mut self, patience: Duration) {
        if let Some(link) = &mut self.link
            && link.limit_silence(patience).is_ok()
            && link.send(&Request::Leave, &[]).is_ok()
            && link.await_message(patience)
        {
            // A server that cannot be told sees the connection end.
            let _ = link.receive::<Reply>();
        }
    }

    /// What a reply means that was not hoped for.
    pub fn unexpected(&self, reply: Reply) -> Fault {
        let server = self.number;
        Fault::Fatal(match reply {
            Reply::Refused(Refusal::Superseded) => {
                ServerError::Superseded { worker: self.outbox.worker() }
            }
            Reply::Refused(refusal @ (Refusal::NotPresent | Refusal::OtherClock { .. })) => {
                return Fault::Rejoin(refusal);
            }
            Reply::Refused(refusal) => ServerError::Protocol { server, what: refusal.into() },
            Reply::OtherRun => ServerError::OtherRun { server },
            Reply::OtherServer { number } => {
                ServerError::OtherServer { server, address: self.address.clone(), number }
            }
            Reply::Unknown => ServerError::Forgotten { server },
            Reply::Invalid(what) => ServerError::Protocol { server, what: what.into() },
            _ => ServerError::Protocol { server, what: "a reply to another question".into() },
        })
    }

    fn link(&mut self) -> io::Result<&mut Link> {
        self.link.as_mut().ok_or_else(not_connected)
    }

    /// The most bulk data that travels at once: a push, or all weights.
    fn most_bulk(&self) -> usize {
        let Setup { level, pieces, codecs, shards, workers, .. } = &self.setup;
        let (shards, workers) = (*shards as usize, *workers as usize);
        let shards = Shards::new(shards, workers).ok().filter(|_| level.is_lockstep());
        let subtrees = shards.map(|shards| shards.subtrees(workers));
        let vectors = subtrees.and_then(|all| all.iter().map(Vec::len).max()).unwrap_or(1);
        let most = |(piece, codec): (&Piece, &Option<CodecSpec>)| {
            let encoded = if codec.is_some() { 8 * piece.len() + SLACK as usize } else { 0 };
            (4 * piece.len() * vectors).max(encoded).next_multiple_of(8)
        };
        pieces.iter().zip(codecs).map(most).sum()
    }
}

/// The vectors of a piece's parameter, if it has a gradient.
fn of<'a, 'b>(gradients: &'b [Gradient<'a>], piece: &Piece) -> Option<&'b [&'a [f32]]> {
    let is_its = |(parameter, _): &&Gradient<'_>| *parameter == piece.parameter;
    // Mostly all parameters have one, in order.
    let at_once = gradients.get(piece.parameter).filter(is_its);
    let of = at_once.or_else(|| gradients.iter().find(is_its));
    of.map(|(_, vectors)| vectors.as_slice())
}

fn not_connected() -> io::Error {
    io::ErrorKind::NotConnected.into()
}
