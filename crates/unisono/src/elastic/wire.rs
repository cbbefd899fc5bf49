//! What a member that hands over its state and a worker that joins say to each other.
//!
//! ```text
//! joiner ──► donor   Ask
//! donor ──► joiner   Busy | NotNow | Differs | TooSlow          and the connection ends
//!                    State(version)  chunk…  UpTo(newest)       the weights and the optimizer's state
//!                    Means(version)  chunk…  UpTo(newest)       once for every step after that
//!                    UpTo(newest)                               now and then while there is nothing to send
//!                    End(steps)                                 the joiner is in the donor's next epoch
//! ```
//!
//! A version is a number of steps. What is sent is a list of vectors, and both sides know their lengths: the
//! joiner takes no length from the donor. A vector travels in chunks of [`CHUNK`] elements. Each is a message
//! that says what it is a part of, with the hash of its bytes, which follow.
//!
//! The state of some models has another shape in every run, as that of a PyTorch program: its optimizer, its scheduler
//! and its own objects decide what they remember. The donor of such a model says `Lengths` before the chunks, of a state
//! and of a step, and the means of a step are among those vectors. The joiner reserves memory for what has arrived, not
//! for what was announced.

use serde::{Deserialize, Serialize};
use unisono_net::Purpose;

/// Connections of joiners to the members whose state they ask for.
pub const HANDOVER: Purpose = Purpose::new(*b"hand");

/// Elements of a chunk. More: more is sent again in vain if a chunk is damaged, and a deadline covers more. Fewer:
/// more headers, and more calls of the system.
pub const CHUNK: usize = 1 << 20;

/// The largest message, besides a number for every parameter.
pub const MAX_MESSAGE: usize = 256;

/// The most vectors whose lengths a donor may announce. More: a message may be larger, which is believed before it is
/// read. Fewer: a model of more tensors than that is handed over inside of the group.
pub const MAX_VECTORS: usize = 1 << 20;

/// The largest message that announces lengths.
pub const MAX_LENGTHS: usize = MAX_MESSAGE + 10 * MAX_VECTORS;

/// What a joiner says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// What both must have in common: parameters and optimizer.
    pub model: [u8; 32],
}

/// What a donor says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// It serves another joiner.
    Busy,
    /// It is between two epochs.
    NotNow,
    /// It has another model or optimizer.
    Differs,
    /// The joiner does not keep up with the steps of the members.
    TooSlow,
    /// All vectors of the state after so many steps follow.
    State { version: u64 },
    /// The means by which that step updates these parameters follow.
    Means { version: u64, parameters: Vec<u32> },
    /// So many bytes of a vector follow.
    Chunk(Chunk),
    /// What was announced is complete, and the donor has made so many steps meanwhile. Also said now and then while
    /// there is nothing to send.
    UpTo { newest: u64 },
    /// That was all: the donor has made so many steps in the epochs before the one with the joiner.
    End { steps: u64 },
    /// So many elements each of the vectors have that follow.
    Lengths(Vec<u64>),
}

/// Which part of what a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The steps after which the state is this, or the step whose means these are.
    pub version: u64,
    /// Of which vector.
    pub vector: u32,
    /// Which of its chunks.
    pub index: u32,
    /// Of how many.
    pub of: u32,
    /// Its elements.
    pub length: u32,
    /// The hash of its bytes.
    pub hash: [u8; 32],
}

/// Why what a donor sent is not believed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    /// A chunk of something else than what comes next.
    #[error("a chunk of something else than what comes next")]
    OutOfOrder,
    /// Its bytes have another hash.
    #[error("a chunk whose bytes have another hash")]
    Damaged,
    /// Means of another step than the next.
    #[error("the means of another step than the next")]
    WrongStep,
    /// Means of parameters that the model does not have, or of one of them twice.
    #[error("the means of parameters that the model does not have")]
    WrongParameters,
    /// A message at a time at which it makes no sense.
    #[error("a message that makes no sense there")]
    OutOfTurn,
}

/// The chunks of vectors of these lengths, in the order in which they travel, without their hashes.
pub fn chunks(version: u64, lengths: &[usize]) -> impl Iterator<Item = Chunk> + '_ {
    lengths.iter().enumerate().flat_map(move |(vector, length)| {
        let of = length.div_ceil(CHUNK);
        (0..of).map(move |index| Chunk {
            version,
            vector: vector as u32,
            index: index as u32,
            of: of as u32,
            length: (length - index * CHUNK).min(CHUNK) as u32,
            hash: [0; 32],
        })
    })
}

impl Chunk {
    /// The elements of the vector that it is.
    pub fn range(&self) -> std::ops::Range<usize> {
        let start = self.index as usize * CHUNK;
        start..start + self.length as usize
    }

    /// The same, with the hash of these bytes.
    pub fn of(self, bytes: &[u8]) -> Chunk {
        Chunk { hash: *blake3::hash(bytes).as_bytes(), ..self }
    }

    /// Refuses a chunk that is not this one, of which the hash is not known.
    pub fn expect(&self, received: &Chunk) -> Result<(), Refused> {
        let is_this = Chunk { hash: self.hash, ..*received } == *self;
        is_this.then_some(()).ok_or(Refused::OutOfOrder)
    }

    /// Refuses other bytes than those whose hash it has.
    pub fn check(&self, bytes: &[u8]) -> Result<(), Refused> {
        // In constant time, which costs nothing.
        let is_right = blake3::hash(bytes) == self.hash;
        is_right.then_some(()).ok_or(Refused::Damaged)
    }
}

/// The numbers of the parameters whose means follow, each of which the model has, once.
pub fn expect_parameters(parameters: &[u32], count: usize) -> Result<Vec<usize>, Refused> {
    let mut seen = vec![false; count];
    let mut numbers = Vec::with_capacity(parameters.len().min(count));
    for number in parameters.iter().map(|number| *number as usize) {
        let is_new = seen.get_mut(number).is_some_and(|seen| !std::mem::replace(seen, true));
        if !is_new {
            return Err(Refused::WrongParameters);
        }
        numbers.push(number);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_vector_once_in_order() {
        for lengths in [vec![], vec![0], vec![1, 0, CHUNK, CHUNK + 1, 3 * CHUNK - 1]] {
            let mut covered: Vec<usize> = lengths.iter().map(|_| 0).collect();
            for chunk in chunks(7, &lengths) {
                let vector = chunk.vector as usize;
                assert_eq!(chunk.range().start, covered[vector]);
                assert!(chunk.version == 7 && chunk.index < chunk.of && chunk.length > 0);
                covered[vector] = chunk.range().end;
            }
            assert_eq!(covered, lengths);
        }
    }

    #[test]
    fn a_chunk_is_believed_only_if_every_field_and_every_byte_is_right() {
        let expected = chunks(5, &[CHUNK + 3]).nth(1).unwrap();
        let bytes = [1u8; 12];
        let right = expected.of(&bytes);
        assert_eq!(expected.expect(&right), Ok(()));
        assert_eq!(right.check(&bytes), Ok(()));
        for wrong in [
            Chunk { version: 4, ..right },
            Chunk { vector: 1, ..right },
            Chunk { index: 0, ..right },
            Chunk { of: 3, ..right },
            Chunk { length: u32::MAX, ..right },
        ] {
            assert_eq!(expected.expect(&wrong), Err(Refused::OutOfOrder), "{wrong:?}");
        }
        for flipped in 0..bytes.len() {
            let mut bytes = bytes;
            bytes[flipped] ^= 0x10;
            assert_eq!(right.check(&bytes), Err(Refused::Damaged));
        }
    }

    #[test]
    fn means_are_of_parameters_that_exist_and_of_each_once() {
        assert_eq!(expect_parameters(&[], 3), Ok(vec![]));
        assert_eq!(expect_parameters(&[2, 0], 3), Ok(vec![2, 0]));
        for wrong in [&[3][..], &[1, 1], &[0, u32::MAX]] {
            assert_eq!(expect_parameters(wrong, 3), Err(Refused::WrongParameters));
        }
    }
}
