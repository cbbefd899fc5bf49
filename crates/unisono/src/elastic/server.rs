//! The state server of a member: hands its state to workers that join, beside the training.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::Domain;
use unisono_cluster::membership::WorkerId;
use unisono_net::frame::{self, FrameError, SIGN_OF_LIFE};
use unisono_net::{Acceptor, Admission, Connection, Introduction, Token, crash, new_socket};
use zerocopy::IntoBytes;

use super::donor::{Changes, Donor, Item, Next};
use super::wire::{Ask, HANDOVER, MAX_MESSAGE, Message, chunks};

/// How often a joiner that waits for the end of a step is shown that the donor lives. Longer: must stay below the
/// shortest timeout. Shorter: more packets.
const SIGN_EVERY: Duration = Duration::from_millis(250);

/// Serves until dropped.
pub struct StateServer {
    donor: Arc<Donor>,
    address: SocketAddr,
    _acceptor: Acceptor,
}

impl StateServer {
    /// Listens at a free port of `ip`, for workers that hold the token. A joiner that takes nothing for `timeout` is
    /// lost.
    pub fn start(ip: IpAddr, token: Token, timeout: Duration) -> io::Result<StateServer> {
        let address = SocketAddr::new(ip, 0);
        let listener = new_socket(Domain::for_address(address))?;
        listener.bind(&address.into())?;
        listener.listen(64)?;
        let address = listener.local_addr()?.as_socket();
        let address = address.ok_or(io::ErrorKind::AddrNotAvailable)?;
        let donor = Donor::new();
        let served = donor.clone();
        let admission = Admission::new(token, &[HANDOVER]);
        let acceptor =
            Acceptor::start(vec![listener], admission, move |connection, introduction| {
                let donor = served.clone();
                let serving = std::thread::Builder::new().name("unisono-hand".into());
                let serving =
                    serving.spawn(move || attend(connection, introduction, &donor, timeout));
                if let Err(error) = serving {
                    log::warn!("cannot serve a worker that joins: {error}");
                }
            })?;
        Ok(StateServer { donor, address, _acceptor: acceptor })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the training thread gives to joiners.
    pub fn donor(&self) -> &Arc<Donor> {
        &self.donor
    }
}

impl Drop for StateServer {
    fn drop(&mut self) {
        self.donor.close();
    }
}

/// How a worker introduces itself to a donor.
pub fn introduction(joiner: WorkerId) -> Introduction {
    Introduction { group: u64::from(joiner.life), ..Introduction::new(HANDOVER, joiner.number, 0) }
}

fn attend(
    mut connection: Connection,
    introduction: Introduction,
    donor: &Donor,
    timeout: Duration,
) {
    let Ok(life) = u32::try_from(introduction.group) else { return };
    let joiner = WorkerId { number: introduction.from, life };
    if let Err(error) = serve(&mut connection, joiner, donor, timeout) {
        log::debug!("handing the state to worker {}: {error}", joiner.number);
    }
}

/// Serves a joiner to its end.
fn serve(
    connection: &mut Connection,
    joiner: WorkerId,
    donor: &Donor,
    timeout: Duration,
) -> Result<(), FrameError> {
    let ask: Ask = frame::receive(&mut connection.until(Instant::now() + timeout), MAX_MESSAGE)?;
    let mut to = Outlet { connection, timeout };
    if let Err(answer) = donor.ask(joiner, ask.model, to.connection.socket()) {
        return to.say(&answer);
    }
    let _release = Release(donor);
    let mut has_state = false;
    loop {
        match donor.next(SIGN_EVERY) {
            Next::Close => return Ok(()),
            Next::Nothing if has_state => to.say(&Message::UpTo { newest: donor.newest() })?,
            Next::Nothing => to.write(&SIGN_OF_LIFE)?,
            Next::Item(Item::Last(word)) => return to.say(&word),
            Next::Item(Item::State { version, vectors, are_told }) => {
                to.say(&Message::State { version })?;
                if are_told {
                    to.tell_lengths(&vectors)?;
                }
                to.send(version, vectors)?;
                to.say(&Message::UpTo { newest: donor.newest() })?;
                has_state = true;
            }
            Next::Item(Item::Step { version, changes: Changes::Means(means) }) => {
                let (parameters, vectors): (Vec<usize>, Vec<Vec<f32>>) = means.into_iter().unzip();
                let parameters = parameters.into_iter().map(|number| number as u32).collect();
                to.say(&Message::Means { version, parameters })?;
                to.send(version, vectors)?;
                to.say(&Message::UpTo { newest: donor.newest() })?;
            }
            Next::Item(Item::Step { version, changes: Changes::Vectors(vectors) }) => {
                to.say(&Message::Means { version, parameters: Vec::new() })?;
                to.tell_lengths(&vectors)?;
                to.send(version, vectors)?;
                to.say(&Message::UpTo { newest: donor.newest() })?;
            }
        }
    }
}

/// Lets the next joiner ask.
struct Release<'a>(&'a Donor);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Sends to a joiner, each time until a deadline.
struct Outlet<'a> {
    connection: &'a mut Connection,
    timeout: Duration,
}

impl Outlet<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
        let deadline = Instant::now() + self.timeout;
        Ok(self.connection.until(deadline).write_all(bytes)?)
    }

    fn say(&mut self, message: &Message) -> Result<(), FrameError> {
        crash::point("handing");
        self.write(&frame::encode(message)?)
    }

    fn tell_lengths(&mut self, vectors: &[Vec<f32>]) -> Result<(), FrameError> {
        self.say(&Message::Lengths(vectors.iter().map(|values| values.len() as u64).collect()))
    }

    /// Sends vectors, and frees each when it is sent.
    fn send(&mut self, version: u64, vectors: Vec<Vec<f32>>) -> Result<(), FrameError> {
        let lengths: Vec<usize> = vectors.iter().map(Vec::len).collect();
        let mut vectors = vectors.into_iter().enumerate();
        let mut present = vectors.next();
        for chunk in chunks(version, &lengths) {
            while present.as_ref().is_some_and(|(number, _)| *number < chunk.vector as usize) {
                present = vectors.next();
            }
            let (_, values) = present.as_ref().expect("a chunk is of one of the vectors");
            let bytes = values[chunk.range()].as_bytes();
            self.say(&Message::Chunk(chunk.of(bytes)))?;
            self.write(bytes)?;
        }
        Ok(())
    }
}
