//! What is remembered from step to step, and how it is saved.
//!
//! Residuals belong to a shard, and those of a mean to its elements, whichever worker has them. So they
//! are saved under names that do not know the workers, and a run goes on with any number of them.

use std::borrow::Cow;
use std::sync::Arc;

use unisono_codec::scale::Scale;
use unisono_codec::{Codec, Memory, Passage, is_encoded_twice};
use unisono_collective::{Group, Reduction};

use super::momentum::Momentum;

use super::spans::share;
use super::{Compressed, Find, Save};
use crate::error::SyncError;

/// What this worker remembers of one parameter.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// By shard, of those of this worker.
    pub shards: Vec<Memory>,
    /// What the encodings of the mean have left out, of this worker's share of the elements.
    pub mean: Vec<f32>,
    /// What all workers remember alike.
    pub common: Vec<f32>,
    /// The momentum of its mean while it is not encoded, if the codec has one; empty if it is zero.
    pub velocity: Vec<f32>,
    /// How large its gradient usually is, if that matters.
    pub scale: Option<Scale>,
}

/// What a worker with one shard remembers of a parameter, for someone else to encode; empty where there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Remembered {
    /// What the encodings of its shard have left out.
    pub residual: Vec<f32>,
    /// What the encodings of the mean have left out, of this worker's share of the elements.
    pub mean: Vec<f32>,
    /// What all workers remember alike.
    pub common: Vec<f32>,
    /// What is known of the usual size.
    pub scale: Vec<f32>,
}

/// Something that is saved.
#[derive(Clone, Copy)]
enum Part {
    Residual { shard: usize },
    Velocity { shard: usize },
    Mean,
    Common,
    Scale,
    Momentum,
}

impl Compressed {
    /// What is remembered of a parameter before the first step.
    pub(super) fn state(&self, parameter: usize) -> State {
        let mut state = State::default();
        let Some(codec) = self.chosen[parameter] else { return state };
        let codec = &*self.codecs[codec];
        let (task, feeds_back) = (self.task(parameter, 0), self.feeds_back(codec));
        let zeros = |wanted: bool| vec![0.0; if wanted { task.elements() } else { 0 }];
        let (mut has_residual, mut has_velocity) = (feeds_back, false);
        match codec.passage() {
            Passage::Summed(summed) => state.common = summed.start(&task),
            Passage::Spans(spans) => {
                if feeds_back && is_encoded_twice(self.shards.count()) {
                    let (rank, workers) = (self.combiner.group().rank(), self.workers());
                    let own = share(spans, parameter, task.elements(), rank, workers);
                    state.mean = vec![0.0; own.len()];
                }
            }
            Passage::Gathered(gathered) => {
                // It encodes from its residual, even if that is forgotten before every step.
                has_residual = true;
                has_velocity = gathered.has_velocity();
            }
        }
        if self.compression.is_relative(codec) {
            state.scale = Some(Scale::new(task.shape));
        }
        let memory = Memory { residual: zeros(has_residual), velocity: zeros(has_velocity) };
        state.shards = vec![memory; self.own.len()];
        state
    }

    /// What is remembered of a parameter, of a worker with one shard.
    pub fn remembered(&self, parameter: usize) -> Remembered {
        let state = &self.states[parameter];
        Remembered {
            residual: state.shards.first().map_or_else(Vec::new, |own| own.residual.clone()),
            mean: state.mean.clone(),
            common: state.common.clone(),
            scale: state.scale.as_ref().map_or_else(Vec::new, Scale::known),
        }
    }

    /// Remembers this of a parameter, as if it had been encoded here. What is of another length is of another
    /// parameter, or another codec.
    ///
    /// # Panics
    /// If it has another length.
    pub fn remember(&mut self, parameter: usize, remembered: Remembered) {
        let Remembered { residual, mean, common, scale } = remembered;
        let state = &mut self.states[parameter];
        if let Some(own) = state.shards.first_mut() {
            assert_eq!(own.residual.len(), residual.len(), "as much as is owed");
            own.residual = residual;
        }
        assert_eq!(state.mean.len(), mean.len(), "as much as is owed of means");
        state.mean = mean;
        assert_eq!(state.common.len(), common.len(), "as much as is common");
        state.common = common;
        if let Some(known) = &mut state.scale {
            known.restore(&scale);
        }
    }

    /// Whether no codec carries anything from one step to the next.
    pub(super) fn remembers_nothing(&self) -> bool {
        let forgets = |codec: &Arc<dyn Codec>| {
            !self.feeds_back(&**codec) && !self.compression.is_relative(&**codec)
        };
        let is_empty = |state: &State| {
            let has_velocity = state.shards.iter().any(|memory| !memory.velocity.is_empty());
            state.common.is_empty() && !has_velocity
        };
        self.codecs.iter().all(forgets) && self.states.iter().all(is_empty)
    }

    pub(super) fn workers(&self) -> usize {
        self.combiner.group().size()
    }

    pub(super) fn save_memory(&self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        for (parameter, part) in self.parts() {
            // Every rank adds what it has to zeros: bits, so that nothing is rounded.
            let mut bits = vec![0i32; self.length(parameter, part)];
            let (start, values) = self.held(parameter, part);
            let held = &mut bits[start..start + values.len()];
            held.iter_mut().zip(&*values).for_each(|(bits, value)| *bits = value.to_bits() as i32);
            match part {
                Part::Common | Part::Scale | Part::Momentum => {}
                _ => group.reduce_in_place(&mut bits, Reduction::Sum, 0)?,
            }
            if group.rank() == 0 {
                let values: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b as u32)).collect();
                each(self.part_name(parameter, part), parameter, &values);
            }
        }
        Ok(())
    }

    pub(super) fn restore_memory(
        &mut self,
        group: &Group,
        find: &Find<'_>,
    ) -> Result<(), SyncError> {
        for (parameter, part) in self.parts() {
            let name = self.part_name(parameter, part);
            let length = self.length(parameter, part);
            let values = spread(group, &name, length, &|name| match part {
                _ if !self.shards_change => find(name),
                Part::Residual { shard } | Part::Velocity { shard } => {
                    self.inherit(parameter, part, shard, length, find)
                }
                // There is none where so few shards were left that the mean was not encoded.
                Part::Mean => find(name).or_else(|| Some(vec![0.0; length])),
                _ => find(name),
            })?;
            let (start, held) = self.held(parameter, part);
            let own = values[start..start + held.len()].to_vec();
            let state = &mut self.states[parameter];
            match part {
                Part::Residual { shard } if self.own.contains(&shard) => {
                    state.shards[shard - self.own.start].residual = own;
                }
                Part::Velocity { shard } if self.own.contains(&shard) => {
                    state.shards[shard - self.own.start].velocity = own;
                }
                Part::Residual { .. } | Part::Velocity { .. } => {}
                Part::Mean => state.mean = own,
                Part::Common => state.common = own,
                // Zeros are as good as nothing.
                Part::Momentum if values.iter().all(|x| *x == 0.0) => state.velocity.clear(),
                Part::Momentum => state.velocity = values,
                Part::Scale => {
                    if let Some(scale) = &mut state.scale {
                        scale.restore(&values);
                    }
                }
            }
        }
        Ok(())
    }

    /// What a shard takes over where there were as many shards as there were workers: its own, and
    /// that of those who are gone. New ones begin with nothing.
    fn inherit(
        &self,
        parameter: usize,
        part: Part,
        shard: usize,
        length: usize,
        find: &Find<'_>,
    ) -> Option<Vec<f32>> {
        let of = |shard: usize| match part {
            Part::Residual { .. } => Part::Residual { shard },
            _ => Part::Velocity { shard },
        };
        let saved = |shard: usize| find(&self.part_name(parameter, of(shard)));
        // With nothing at all, it is the state of something else.
        saved(0)?;
        // Of a mean over fewer, each is a larger part.
        let before = (0..).take_while(|shard| saved(*shard).is_some()).count();
        let share = self.shards.count() as f32 / before as f32;
        let mut sum = vec![0.0; length];
        for shard in (shard..).step_by(self.shards.count()) {
            let Some(values) = saved(shard) else { break };
            if values.len() != length {
                return None;
            }
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * share);
        }
        Some(sum)
    }

    /// All that any rank remembers, in an order that all ranks know.
    fn parts(&self) -> Vec<(usize, Part)> {
        let mut parts = Vec::new();
        let has_momentum = Momentum::of(&self.compression.rules).is_some();
        for (parameter, codec) in self.chosen.iter().enumerate() {
            if has_momentum {
                parts.push((parameter, Part::Momentum));
            }
            let Some(codec) = codec.map(|codec| &*self.codecs[codec]) else { continue };
            let feeds_back = self.feeds_back(codec);
            for shard in 0..self.shards.count() {
                if feeds_back {
                    parts.push((parameter, Part::Residual { shard }));
                }
                if matches!(codec.passage(), Passage::Gathered(g) if g.has_velocity()) {
                    parts.push((parameter, Part::Velocity { shard }));
                }
            }
            if self.states[parameter].scale.is_some() {
                parts.push((parameter, Part::Scale));
            }
            match codec.passage() {
                Passage::Spans(_) if feeds_back && is_encoded_twice(self.shards.count()) => {
                    parts.push((parameter, Part::Mean))
                }
                Passage::Summed(_) if !self.states[parameter].common.is_empty() => {
                    parts.push((parameter, Part::Common));
                }
                _ => {}
            }
        }
        parts
    }

    /// The length of a part, of which every rank may hold a piece.
    fn length(&self, parameter: usize, part: Part) -> usize {
        match part {
            Part::Common => self.states[parameter].common.len(),
            Part::Scale => self.states[parameter].scale.as_ref().map_or(0, Scale::known_len),
            _ => self.parameters[parameter].elements(),
        }
    }

    /// What this rank holds of a part, and where in it.
    fn held(&self, parameter: usize, part: Part) -> (usize, Cow<'_, [f32]>) {
        let state = &self.states[parameter];
        let of = |shard: usize| {
            let own = self.own.contains(&shard);
            own.then(|| &state.shards[shard - self.own.start])
        };
        match part {
            Part::Residual { shard } => {
                (0, of(shard).map_or(&[][..], |memory| &memory.residual).into())
            }
            Part::Velocity { shard } => {
                (0, of(shard).map_or(&[][..], |memory| &memory.velocity).into())
            }
            Part::Common => (0, (&state.common).into()),
            Part::Momentum => (0, (&state.velocity).into()),
            Part::Scale => (0, state.scale.as_ref().map_or(Vec::new(), Scale::known).into()),
            Part::Mean => {
                let (first, mean) = self.mean_span(parameter);
                (first, mean.into())
            }
        }
    }

    /// The residual of the mean that this rank holds of a parameter, and where it begins.
    pub(super) fn mean_span(&self, parameter: usize) -> (usize, &[f32]) {
        let codec = self.chosen[parameter].map(|codec| self.codecs[codec].passage());
        let Some(Passage::Spans(spans)) = codec else { return (0, &[]) };
        let elements = self.parameters[parameter].elements();
        let rank = self.combiner.group().rank();
        let own = share(spans, parameter, elements, rank, self.workers());
        (own.start, &self.states[parameter].mean)
    }

    fn part_name(&self, parameter: usize, part: Part) -> String {
        let name = &self.parameters[parameter].name;
        match part {
            Part::Residual { shard } => format!("codec.residual.{shard}.{name}"),
            Part::Velocity { shard } => format!("codec.velocity.{shard}.{name}"),
            Part::Mean => format!("codec.mean.{name}"),
            Part::Common => format!("codec.common.{name}"),
            Part::Scale => format!("codec.scale.{name}"),
            Part::Momentum => format!("codec.momentum.{name}"),
        }
    }
}

/// Gives all ranks what rank 0 finds by a name. All ranks must call it.
pub fn spread(
    group: &Group,
    name: &str,
    length: usize,
    find: &Find<'_>,
) -> Result<Vec<f32>, SyncError> {
    let found = match group.rank() {
        0 => find(name).filter(|values| values.len() == length),
        _ => None,
    };
    let mut is_found = [u8::from(found.is_some())];
    group.broadcast(&mut is_found, 0)?;
    if is_found[0] == 0 {
        return Err(SyncError::MissingState { name: name.to_owned() });
    }
    let mut values = found.unwrap_or_else(|| vec![0.0; length]);
    group.broadcast(&mut values, 0)?;
    Ok(values)
}
