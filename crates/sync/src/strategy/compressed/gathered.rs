//! Encodings that are only of use as a whole: all workers get all of them.
//!
//! A worker sends, for each of its shards and each parameter, the length of the encoding (4 bytes)
//! and the encoding. Every worker then decodes those of all shards and adds them up in the order of the
//! shards: they are sparse, and a tree would add mostly zeros.

use unisono_codec::{BadEncoding, Gathered};

use super::{Compressed, task, timed};
use crate::error::SyncError;
use crate::strategy::Gradients;

/// What errors call the sender.
const CODEC: &str = "a sparse codec";

impl Compressed {
    pub(super) fn exchange_gathered(
        &mut self,
        gathered: &dyn Gathered,
        feeds_back: bool,
        parameters: &[usize],
        gradients: &mut Gradients,
    ) -> Result<(), SyncError> {
        let (layout, step, shards) = (gradients.layout.clone(), gradients.step, gradients.shards);
        let mut coding = self.coding;
        let mut mine = std::mem::take(&mut self.buffers.mine);
        mine.clear();
        timed(&mut coding, || {
            for (i, shard) in self.own.clone().enumerate() {
                for &parameter in parameters {
                    let task = task(&self.parameters, &self.compression, parameter, step);
                    let memory = &mut self.states[parameter].shards[i];
                    if !feeds_back {
                        memory.residual.fill(0.0);
                    }
                    let gradient = &gradients.slots[i][layout.span(parameter)];
                    gathered.absorb(&task, shards, gradient, memory);
                    let prefix = mine.len();
                    mine.extend_from_slice(&[0; 4]);
                    gathered.encode(&task, shard, memory, &mut mine);
                    let length = mine.len() - prefix - 4;
                    let length = u32::try_from(length).expect("a gradient has less than 4 GiB");
                    mine[prefix..prefix + 4].copy_from_slice(&length.to_le_bytes());
                }
            }
        });
        let group = self.combiner.group();
        let mut lengths = vec![0i64; group.size()];
        group.all_gather(&[mine.len() as i64], &mut lengths)?;
        let lengths = lengths.iter().enumerate().map(|(rank, length)| {
            let shards = self.shards.of(rank, group.size());
            let elements = parameters.iter().map(|p| self.parameters[*p].elements());
            // An index and a value each, at the most, and a few numbers.
            let most = elements.map(|elements| elements * 8 + 64).sum::<usize>() * shards.len();
            let length = usize::try_from(*length).ok().filter(|length| *length <= most);
            length.ok_or_else(|| {
                let source =
                    BadEncoding::Length { codec: CODEC, expected: most, found: usize::MAX };
                SyncError::Encoding { shard: shards.start, source }
            })
        });
        let lengths = lengths.collect::<Result<Vec<usize>, SyncError>>()?;
        let mut all = std::mem::take(&mut self.buffers.all);
        all.resize(lengths.iter().sum(), 0);
        group.all_gather_unequal(&mine, &mut all, &lengths)?;
        timed(&mut coding, || -> Result<(), SyncError> {
            for &parameter in parameters {
                gradients.slots[0][layout.span(parameter)].fill(0.0);
            }
            let (mut unread, workers) = (&all[..], lengths.len());
            for (rank, length) in lengths.iter().enumerate() {
                let (mut rest, after) = unread.split_at(*length);
                unread = after;
                for shard in self.shards.of(rank, workers) {
                    let damaged = |source| SyncError::Encoding { shard, source };
                    for &parameter in parameters {
                        let into = &mut gradients.slots[0][layout.span(parameter)];
                        let taken = take(&mut rest).and_then(|bytes| gathered.decode(bytes, into));
                        taken.map_err(damaged)?;
                    }
                    if shard + 1 == self.shards.of(rank, workers).end && !rest.is_empty() {
                        let (expected, found) = (length - rest.len(), *length);
                        return Err(damaged(BadEncoding::Length { codec: CODEC, expected, found }));
                    }
                }
            }
            for &parameter in parameters {
                let mean = &mut gradients.slots[0][layout.span(parameter)];
                mean.iter_mut().for_each(|x| *x /= shards as f32);
            }
            Ok(())
        })?;
        self.buffers.mine = mine;
        self.buffers.all = all;
        self.coding = coding;
        Ok(())
    }
}

/// Takes the next encoding, with its length before it.
fn take<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], BadEncoding> {
    let cut = |expected: usize, found: usize| BadEncoding::Length { codec: CODEC, expected, found };
    let (length, after) = rest.split_first_chunk().ok_or(cut(4, rest.len()))?;
    let length = u32::from_le_bytes(*length) as usize;
    let (bytes, after) = after.split_at_checked(length).ok_or(cut(length, after.len()))?;
    *rest = after;
    Ok(bytes)
}
