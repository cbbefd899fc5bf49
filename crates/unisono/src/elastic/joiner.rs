//! A joiner's side of a handover: takes the state of a member, and follows its steps.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use unisono_net::frame::{self, FrameError};
use unisono_net::{Receiver, crash, timespec};
use zerocopy::IntoBytes;

use super::wire::{
    Chunk, MAX_LENGTHS, MAX_MESSAGE, MAX_VECTORS, Message, Refused, chunks, expect_parameters,
};

/// A model that can take the state of another worker, and follow its steps.
pub trait Follower {
    /// What it must have in common with the donor: parameters and optimizer.
    fn fingerprint(&self) -> [u8; 32];

    /// The lengths of all vectors of the state; those of the parameters that are trained come first. `None` if the
    /// donor tells them: then no means are given by parameter, and all that a step needs is among the vectors that are
    /// set before it is [made](Follower::stepped).
    fn lengths(&self) -> Option<Vec<usize>>;

    /// How many parameters are trained.
    fn trained(&self) -> usize;

    /// From now on the state is that of no step.
    fn begin(&mut self);

    /// One of the vectors is this. They come in order; a vector of no elements does not come.
    fn set(&mut self, vector: usize, values: &[f32]);

    /// All vectors are those after so many steps.
    fn complete(&mut self, steps: u64) -> Result<(), Unfit>;

    /// Updates a parameter by its mean in a step, the first of which is 1.
    fn update(&mut self, step: u64, parameter: usize, mean: &[f32]);

    /// All that changes in a step was given: so many steps are made.
    fn stepped(&mut self, steps: u64) -> Result<(), Unfit>;

    /// Whether the program that has it has given up, so that it joins nothing any more.
    fn is_gone(&self) -> bool {
        false
    }
}

/// Why a model does not follow, whatever donor it has: its state is handed over inside of the group.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub String);

/// What a donor has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The follower has made so many steps, and the donor so many.
    At { steps: u64, newest: u64 },
    /// The follower has all that there is.
    Ended,
    /// Another donor may be free, or this one later.
    NotNow,
    /// No donor can help.
    Never,
}

/// Why a donor is given up.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// The connection.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What came over it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The model cannot take it.
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

/// Where a follower is.
#[derive(Default)]
pub struct Following {
    /// The steps after which its state is complete.
    steps: Option<u64>,
    scratch: Vec<f32>,
}

impl Following {
    /// Hears the donor once, and takes over what it sends.
    pub fn hear(&mut self, from: &mut impl Read, model: &mut dyn Follower) -> Result<Heard, Lost> {
        let limit = MAX_MESSAGE + 5 * model.trained();
        match (frame::receive(from, limit)?, self.steps) {
            (Message::Busy | Message::NotNow, None) => Ok(Heard::NotNow),
            (Message::Differs, None) | (Message::TooSlow, _) => Ok(Heard::Never),
            (Message::State { version }, None) => {
                model.begin();
                let lengths = match model.lengths() {
                    Some(known) => {
                        self.scratch.resize(known.iter().copied().max().unwrap_or(0), 0.0);
                        known
                    }
                    None => told(from)?,
                };
                self.take(from, version, &lengths, &mut |vector, values| {
                    model.set(vector, values)
                })?;
                model.complete(version)?;
                self.steps = Some(version);
                self.hear_newest(from, version)
            }
            (Message::Means { version, parameters }, Some(steps)) => {
                if version != steps + 1 {
                    return Err(Refused::WrongStep.into());
                }
                let parameters = expect_parameters(&parameters, model.trained())?;
                let Some(all) = model.lengths() else {
                    let lengths = told(from)?;
                    let mut set = |vector: usize, values: &[f32]| model.set(vector, values);
                    self.take(from, version, &lengths, &mut set)?;
                    crash::point("catching-up");
                    model.stepped(version)?;
                    self.steps = Some(version);
                    return self.hear_newest(from, version);
                };
                let lengths: Vec<usize> = parameters.iter().map(|number| all[*number]).collect();
                self.scratch.resize(lengths.iter().sum(), 0.0);
                let (mut start, mut vector) = (0, 0);
                for chunk in chunks(version, &lengths) {
                    let number = chunk.vector as usize;
                    start += lengths[vector..number].iter().sum::<usize>();
                    vector = number;
                    receive(from, chunk, &mut self.scratch[start..][chunk.range()])?;
                }
                crash::point("catching-up");
                let mut rest = &self.scratch[..];
                for (parameter, length) in parameters.iter().zip(&lengths) {
                    let (mean, behind) = rest.split_at(*length);
                    model.update(version, *parameter, mean);
                    rest = behind;
                }
                model.stepped(version)?;
                self.steps = Some(version);
                self.hear_newest(from, version)
            }
            (Message::UpTo { newest }, Some(steps)) => {
                Ok(Heard::At { steps, newest: newest.max(steps) })
            }
            (Message::End { steps }, Some(own)) if steps == own => Ok(Heard::Ended),
            _ => Err(Refused::OutOfTurn.into()),
        }
    }

    /// Receives vectors of these lengths, and gives each to `set`.
    fn take(
        &mut self,
        from: &mut impl Read,
        version: u64,
        lengths: &[usize],
        set: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Lost> {
        for chunk in chunks(version, lengths) {
            let range = chunk.range();
            // Chunk by chunk: a length that is wrong costs no more memory than what arrives.
            if self.scratch.len() < range.end {
                self.scratch.resize(range.end, 0.0);
            }
            receive(from, chunk, &mut self.scratch[range])?;
            if chunk.index + 1 == chunk.of {
                let vector = chunk.vector as usize;
                set(vector, &self.scratch[..lengths[vector]]);
            }
        }
        Ok(())
    }

    fn hear_newest(&self, from: &mut impl Read, steps: u64) -> Result<Heard, Lost> {
        match frame::receive(from, MAX_MESSAGE)? {
            Message::UpTo { newest } => Ok(Heard::At { steps, newest: newest.max(steps) }),
            _ => Err(Refused::OutOfTurn.into()),
        }
    }
}

/// The lengths that the donor announces.
fn told(from: &mut impl Read) -> Result<Vec<usize>, Lost> {
    let Message::Lengths(lengths) = frame::receive(from, MAX_LENGTHS)? else {
        return Err(Refused::OutOfTurn.into());
    };
    let lengths = lengths.into_iter().map(|length| usize::try_from(length).ok());
    let lengths: Option<Vec<usize>> = lengths.collect();
    Ok(lengths.filter(|lengths| lengths.len() <= MAX_VECTORS).ok_or(Refused::OutOfTurn)?)
}

/// Receives the chunk that must come next.
fn receive(from: &mut impl Read, expected: Chunk, into: &mut [f32]) -> Result<(), Lost> {
    let Message::Chunk(chunk) = frame::receive(from, MAX_MESSAGE)? else {
        return Err(Refused::OutOfOrder.into());
    };
    expected.expect(&chunk)?;
    from.read_exact(into.as_mut_bytes()).map_err(FrameError::from)?;
    crash::point("receiving");
    Ok(chunk.check(into.as_bytes())?)
}

/// How often a wait looks whether it is over. Longer: the end of a wait is noticed later. Shorter: more wakeups.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Receives until nothing comes for `silence`, or `is_enough`.
pub struct Patient<'a> {
    pub receiver: &'a mut Receiver,
    pub silence: Duration,
    pub is_enough: &'a dyn Fn() -> bool,
}

impl Read for Patient<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            match self.receiver.receive(into, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                received => return Ok(received?),
            }
            if since.elapsed() >= self.silence || (self.is_enough)() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut fds = [PollFd::new(self.receiver.socket(), PollFlags::IN)];
            match poll(&mut fds, Some(&timespec(LOOK_EVERY))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
