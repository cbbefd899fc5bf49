//! Encodings that are only of use as a whole: all ranks get all of them, and add them up in the order of the ranks.
//!
//! How long an encoding is, only the device knows: the ranks tell each other on their hosts.

use unisono_codec::BadEncoding;

use super::scratch::Use;
use super::{DeviceGradient, Exchange, ExchangeError};
use crate::codec::{CodecError, Placement};
use crate::memory::DeviceMemory;
use crate::stream::Stream;

impl Exchange {
    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn exchange_gathered(
        &mut self,
        codec: usize,
        step: u64,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let (me, world, seed) = (self.rank(), self.world(), self.seed);
        let room = gradients.iter().map(|of| self.own(of).most_bytes()).sum();
        let mine = self.scratch.of(Use::Outgoing, room)?;
        let feeds_back = self.passages[codec].encoded.feeds_back;
        let mut lengths = Vec::with_capacity(gradients.len());
        let mut own = 0;
        // SAFETY: the caller's promise; an encoding has room where the longest would be, for all before it are no
        // longer than theirs could be.
        unsafe {
            for of in gradients {
                let held = &mut self.held[of.parameter];
                let residual = held.residual.as_ref().map(DeviceMemory::pointer);
                if let (Some(residual), false) = (residual, feeds_back) {
                    stream.fill_words(residual, 0, held.elements)?;
                }
                let task =
                    unisono_codec::Task { shape: &held.shape, parameter: of.parameter, step, seed };
                let coder = held.own.as_mut().expect("a sparse codec is a parameter's own");
                coder.encode(stream, &task, me, of.pointer, residual, mine.offset(own))?;
                let length = coder.length(stream)?;
                lengths.push(length as i64);
                own += length;
            }
        }
        let mut all_lengths = vec![0i64; lengths.len() * world];
        self.group().group().all_gather(&lengths, &mut all_lengths)?;
        let all_lengths = self.checked_lengths(gradients, &all_lengths)?;
        let counts: Vec<usize> =
            all_lengths.chunks_exact(gradients.len()).map(|of| of.iter().sum()).collect();
        let all = self.scratch.of(Use::Incoming, counts.iter().sum())?;
        // SAFETY: the caller's promise; the scratch memory has room for all encodings.
        unsafe {
            self.calls.all_gather_unequal(mine, all, &counts, stream)?;
            for (number, of) in gradients.iter().enumerate() {
                let elements = self.held[of.parameter].elements;
                if elements > 0 {
                    stream.fill_words(of.pointer, 0, elements)?;
                }
                let place = |shard: usize| {
                    let before = shard * gradients.len() + number;
                    let at = all_lengths[..before].iter().sum();
                    (all.offset(at), all_lengths[before])
                };
                let held = &mut self.held[of.parameter];
                let task =
                    unisono_codec::Task { shape: &held.shape, parameter: of.parameter, step, seed };
                let coder = held.own.as_mut().expect("a sparse codec is a parameter's own");
                for shard in 0..world {
                    let (from, length) = place(shard);
                    coder.decode(stream, &task, from, length, of.pointer, Placement::Add)?;
                }
                match coder.check(stream) {
                    Ok(()) => {}
                    Err(CodecError::Encoding(found)) => {
                        // Whose it was, tells each by itself.
                        for shard in 0..world {
                            let (from, length) = place(shard);
                            coder.decode(
                                stream,
                                &task,
                                from,
                                length,
                                of.pointer,
                                Placement::Add,
                            )?;
                            if let Err(CodecError::Encoding(source)) = coder.check(stream) {
                                return Err(ExchangeError::Encoding { shard, source });
                            }
                        }
                        return Err(CodecError::Encoding(found).into());
                    }
                    Err(other) => return Err(other.into()),
                }
                self.divide(of.pointer, of.pointer, elements, stream)?;
            }
        }
        Ok(())
    }

    /// Lengths of encodings, each of which one could have.
    fn checked_lengths(
        &self,
        gradients: &[DeviceGradient],
        lengths: &[i64],
    ) -> Result<Vec<usize>, ExchangeError> {
        let most = gradients.iter().map(|of| self.own(of).most_bytes()).cycle();
        let checked = lengths.iter().zip(most).enumerate().map(|(place, (length, most))| {
            let found = usize::try_from(*length).ok().filter(|length| *length <= most);
            found.ok_or_else(|| {
                let (shard, found) = (place / gradients.len(), usize::MAX);
                let codec = "a sparse codec";
                let source = BadEncoding::Length { codec, expected: most, found };
                ExchangeError::Encoding { shard, source }
            })
        });
        checked.collect()
    }
}
